// The kernels of one kind of heads, and how a call launches them.
#pragma once
#include <algorithm>

#include "heads.h"
#include "kernel.cuh"
#include "segments.cuh"

namespace gdn::sm90 {

inline const char* check(cudaError_t error) {
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// beside: with the kernel launched before it, once all blocks of that one have let it, or ended.
template <class Kernel>
const char* launch_blocks(Kernel* kernel, const KernelParams& params, int64_t blocks, int threads, int bytes,
                          int cluster, bool beside, cudaStream_t stream) {
  if (const char* error = check(
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)))
    return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = unsigned(blocks);
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
  if (beside)
    add(cudaLaunchAttributeProgrammaticStreamSerialization).programmaticStreamSerializationAllowed = 1;
  return check(cudaLaunchKernelEx(&config, kernel, params));
}

template <class C>
const char* launch(KernelParams& params, int64_t tiles, cudaStream_t stream, bool beside = false) {
  if (tiles == 0) return nullptr;
  params.tiles = int(tiles);
  // Neighbours share an instruction cache, which does not hold two kernels: in pairs they run one.
  const int64_t blocks =
      C::kOneTile ? ceil_div(tiles, 2) * 2 : std::min<int64_t>(tiles, params.problem.multiprocessors);
  return launch_blocks(&chunk_forward_kernel<C>, params, blocks, C::kThreads, sizeof(SharedMemory<C>),
                       C::kOneTile ? 2 : 1, beside, stream);
}

// In the following, `tiles` are pairs of a sequence (or segment) and a value head; each is as many as it
// has parts.
template <class C>
const char* launch_output(KernelParams& params, int64_t tiles, cudaStream_t stream,
                          bool beside = false) {
  params.parts = ceil_div(params.problem.V, 64 * C::kStates);
  return launch<C>(params, tiles * params.parts, stream, beside);
}

template <class T, class Heads, bool kPool>
const char* run_heads(KernelParams& params, const Plan& plan, cudaStream_t stream) {
  const ChunkForward& p = params.problem;
  const int64_t pairs = int64_t{p.N} * p.HV;
  if (plan.cuts.count == 0) {
    if constexpr (!only_halves<Heads>())
      if (!plan.halves)
        return launch_output<Config<T, Heads, 2, Pass::kWhole, kPool>>(params, pairs, stream);
    return launch_output<Config<T, Heads, 1, Pass::kWhole, kPool>>(params, pairs, stream);
  }
  const int64_t tiles = int64_t{plan.slots} * p.HV;
  using Maps = Config<T, Heads, Heads::kKeys == 256 ? 1 : 2, Pass::kMaps, kPool>;
  const auto walk = [&](bool first, bool beside) {
    params.segments.first = first;
    return launch_output<Config<T, Heads, 1, Pass::kSegments, kPool>>(
        params, first ? pairs : tiles, stream, beside);
  };
  const auto map = [&](bool beside) {
    params.parts = ceil_div(p.V, 64 * Maps::kStates);
    const int64_t parts = params.parts + Maps::kMapRows / 64 / Maps::kStates;
    return launch<Maps>(params, tiles * parts, stream, beside);
  };
  const bool maps_first = plan.cuts.maps_first && tiles > 0;
  if (const char* error = maps_first ? map(false) : walk(true, false)) return error;
  if (const char* error = maps_first ? walk(true, true) : map(true)) return error;
  if (const char* error = launch_blocks(&fold_kernel<Maps>, params, pairs * (p.V / kFoldRows),
                                        kFoldThreads, Fold<Maps>::kBytes, 1, false, stream))
    return error;
  return walk(false, true);
}

}  // namespace gdn::sm90
