// Launches a kernel of one argument.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace gdn::sm90 {

// Returns null, or CUDA's message. CUDA also keeps the error for the next cudaGetLastError, where a
// later launch would find it. Therefore cudaGetLastError is called here, which clears the error.
inline const char* check(cudaError_t error) {
  if (error == cudaSuccess) return nullptr;
  static_cast<void>(cudaGetLastError());
  return cudaGetErrorString(error);
}

// overlaps: the kernel may start once all blocks of the previous kernel have called
// launch_dependents, or ended.
template <class Params>
const char* launch_grid(void (*kernel)(Params), const Params& params, dim3 grid, int threads,
                        int bytes, int cluster, bool overlaps, cudaStream_t stream) {
  // Bytes of shared memory that a block may have without asking.
  constexpr int kWithoutAsking = 48 * 1024;
  if (bytes > kWithoutAsking)
    if (const char* error =
            check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)))
      return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = unsigned(threads);
  config.dynamicSmemBytes = size_t(bytes);
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  const auto add = [&](cudaLaunchAttributeID id) -> cudaLaunchAttributeValue& {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = id;
    return attribute.val;
  };
  if (cluster > 1) add(cudaLaunchAttributeClusterDimension).clusterDim = {unsigned(cluster), 1, 1};
  if (overlaps)
    add(cudaLaunchAttributeProgrammaticStreamSerialization).programmaticStreamSerializationAllowed =
        1;
  return check(cudaLaunchKernelEx(&config, kernel, params));
}
template <class Params>
const char* launch_blocks(void (*kernel)(Params), const Params& params, int64_t blocks, int threads,
                          int bytes, int cluster, bool overlaps, cudaStream_t stream) {
  return launch_grid(kernel, params, dim3(unsigned(blocks)), threads, bytes, cluster, overlaps,
                     stream);
}
// Launches a small kernel whose blocks all begin with wait_for_prerequisites.
template <class Params>
const char* launch_small(void (*kernel)(Params), const Params& params, dim3 grid, unsigned threads,
                         cudaStream_t stream) {
  return launch_grid(kernel, params, grid, int(threads), 0, 1, true, stream);
}

}  // namespace gdn::sm90
