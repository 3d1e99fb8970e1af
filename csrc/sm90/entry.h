// The functions of this architecture that csrc/dispatch.cpp enters in its row; dispatch.h has their
// contracts.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>

#include "params.h"

namespace gdn::sm90 {

size_t chunk_forward_workspace(const ChunkForward&);
const char* chunk_forward(const ChunkForward&, cudaStream_t);
const char* chunk_prefill(const ChunkForward&, const Pool&, cudaStream_t);

int part_segment(const ChunkForward&);
size_t part_starts(const ChunkForward&);
size_t part_forward_workspace(const ChunkForward&);
const char* part_forward_maps(const ChunkForward&, const Part&, cudaStream_t);
const char* part_forward_walk(const ChunkForward&, const Part&, cudaStream_t);

namespace backward {
int chunk_backward_checkpoint_interval(const ChunkForward&);
size_t chunk_backward_workspace(const ChunkForward&, int checkpoint_interval);
const char* chunk_backward(const ChunkBackward&, cudaStream_t);
size_t part_backward_workspace(const ChunkForward&);
const char* part_backward_maps(const ChunkBackward&, const Part&, cudaStream_t);
const char* part_backward_walks(const ChunkBackward&, const Part&, cudaStream_t);
const char* backward_walks(const BackwardWalks&, cudaStream_t);
}  // namespace backward

}  // namespace gdn::sm90
