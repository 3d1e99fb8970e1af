// Tensor maps for TMA, built without linking libcuda.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "params.h"

namespace gdn {

// Map of x [B, T, heads, channels] of 16-bit values with boxes of 64 rows x 64 columns, 128-byte
// swizzle; elements past T or the channels read as 0 and are not written. Returns null or a
// sentence.
inline const char* make_map(CUtensorMap* map, Dtype dtype, const Rows& x, int64_t B, int64_t T,
                            int heads, int channels) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const auto error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000,
                                                        cudaEnableDefault, &found);
    const bool ok = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
    return ok ? reinterpret_cast<Encode>(f) : nullptr;
  }();
  if (!encode) return "no CUDA driver, or one older than 12.0 (cuTensorMapEncodeTiled not found)";
  // The driver's function needs a current context, which a thread has only after a call of the
  // runtime that makes one. Memory from a cache needs no such call, and autograd's threads have
  // made none.
  thread_local const bool has_context = [] {
    int device = 0;
    return cudaGetDevice(&device) == cudaSuccess && cudaSetDevice(device) == cudaSuccess;
  }();
  if (!has_context) return "the thread has no CUDA context, and cudaSetDevice made none";
  // The stride of a dimension of size 1 has no meaning, and is replaced by a legal one.
  const int64_t row = T > 1 ? x.row : 128;
  const int64_t head = heads > 1 ? x.head : 128;
  const int64_t batch = B > 1 ? x.batch : 128;
  const cuuint64_t dims[4] = {cuuint64_t(channels), cuuint64_t(T), cuuint64_t(heads),
                              cuuint64_t(B)};
  const cuuint64_t strides[3] = {cuuint64_t(row) * 2, cuuint64_t(head) * 2, cuuint64_t(batch) * 2};
  const cuuint32_t box[4] = {64, 64, 1, 1}, ones[4] = {1, 1, 1, 1};
  const auto type = dtype == Dtype::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                              : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const auto rc = encode(map, type, 4, const_cast<void*>(x.data), dims, strides, box, ones,
                         CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                         CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (rc == CUDA_SUCCESS) return nullptr;
  if (rc == CUDA_ERROR_INVALID_CONTEXT)
    return "the thread has no CUDA context (cuTensorMapEncodeTiled)";
  return "a tensor's address or strides are not multiples of 16 bytes, as TMA needs";
}

}  // namespace gdn
