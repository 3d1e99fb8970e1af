// Where the sequences of a call begin, and how long they are, in tokens.
#pragma once
#include "common/ptx.cuh"
#include "params.h"

namespace gdn::sm90 {

GDN_HOST_DEVICE int64_t sequence_bound(const ChunkForward& p, int n) {
  return p.cu_seqlens_64 ? static_cast<const int64_t*>(p.cu_seqlens)[n]
                         : static_cast<const int32_t*>(p.cu_seqlens)[n];
}
GDN_HOST_DEVICE int sequence_length(const ChunkForward& p, int n) {
  return static_cast<int>(p.cu_seqlens ? sequence_bound(p, n + 1) - sequence_bound(p, n) : p.T);
}

}  // namespace gdn::sm90
