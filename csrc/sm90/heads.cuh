// The kernels of one kind of heads, and how a call launches them.
#pragma once
#include "heads.h"
#include "kernel.cuh"
#include "segments.cuh"

namespace gdn::sm90 {

inline const char* check(cudaError_t error) {
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// beside: with the kernel launched before it, as soon as all blocks of that one run.
template <class C>
const char* launch(KernelParams& params, int64_t tiles, cudaStream_t stream, bool beside = false) {
  if (tiles == 0) return nullptr;
  params.tiles = int(tiles);
  auto* const kernel = &chunk_forward_kernel<C>;
  constexpr int kBytes = sizeof(SharedMemory<C>);
  if (const char* error = check(cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes)))
    return error;
  cudaLaunchConfig_t config = {};
  config.blockDim = C::kThreads;
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  const auto add = [&](cudaLaunchAttributeID id) -> cudaLaunchAttributeValue& {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = id;
    return attribute.val;
  };
  if constexpr (C::kOneTile) {
    // Neighbours share an instruction cache, which does not hold two kernels: in pairs they run one.
    config.gridDim = unsigned(ceil_div(tiles, 2) * 2);
    add(cudaLaunchAttributeClusterDimension).clusterDim = {2, 1, 1};
  } else {
    const int most = params.problem.multiprocessors;
    config.gridDim = unsigned(params.tiles < most ? params.tiles : most);
  }
  if (beside)
    add(cudaLaunchAttributeProgrammaticStreamSerialization).programmaticStreamSerializationAllowed = 1;
  return check(cudaLaunchKernelEx(&config, kernel, params));
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
  if (plan.segment == 0) {
    if constexpr (!only_halves<Heads>())
      if (!plan.halves)
        return launch_output<Config<T, Heads, 2, Pass::kWhole, kPool>>(params, pairs, stream);
    return launch_output<Config<T, Heads, 1, Pass::kWhole, kPool>>(params, pairs, stream);
  }
  const int64_t tiles = int64_t{plan.slots} * p.HV;
  using Maps = Config<T, Heads, Heads::kKeys == 256 ? 1 : 2, Pass::kMaps, kPool>;
  params.parts = ceil_div(p.V, 64 * Maps::kStates);
  const int64_t maps = tiles * (params.parts + Maps::kMapRows / 64 / Maps::kStates);
  if (const char* error = launch<Maps>(params, maps, stream)) return error;
  const auto walk = [&](bool first) {
    params.segments.first = first;
    return launch_output<Config<T, Heads, 1, Pass::kSegments, kPool>>(
        params, first ? pairs : tiles, stream, first && maps > 0);
  };
  if (const char* error = walk(true)) return error;
  const unsigned blocks = unsigned(pairs * (p.V / kFoldRows));
  fold_kernel<Maps><<<blocks, kFoldThreads, 0, stream>>>(params);
  if (const char* error = check(cudaGetLastError())) return error;
  return walk(false);
}

}  // namespace gdn::sm90
