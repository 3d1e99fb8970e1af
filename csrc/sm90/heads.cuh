// The kernels of one kind of heads, and how a call launches them.
#pragma once
#include "heads.h"
#include "kernel.cuh"
#include "segments.cuh"

namespace gdn::sm90 {

inline const char* check(cudaError_t error) {
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <class C>
const char* launch(KernelParams& params, int64_t tiles, cudaStream_t stream) {
  const int most = params.problem.multiprocessors;
  params.tiles = int(tiles);
  auto* const kernel = &chunk_forward_kernel<C>;
  constexpr int kBytes = sizeof(SharedMemory<C>);
  if (const char* error = check(cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes)))
    return error;
  const int blocks = params.tiles < most ? params.tiles : most;
  kernel<<<blocks > 0 ? blocks : 1, C::kThreads, kBytes, stream>>>(params);
  return check(cudaGetLastError());
}

// `tiles` are pairs of a sequence (or segment) and a value head; each is as many as it has parts.
template <class T, class Heads, Pass kPass, bool kPool>
const char* launch_output(KernelParams& params, bool halves, int64_t tiles, cudaStream_t stream) {
  using One = Config<T, Heads, 1, kPass, kPool>;
  if constexpr (only_halves<Heads>(kPass == Pass::kSegments)) {
    params.parts = ceil_div(params.problem.V, 64);
    return launch<One>(params, tiles * params.parts, stream);
  } else {
    using Two = Config<T, Heads, 2, kPass, kPool>;
    params.parts = ceil_div(params.problem.V, halves ? 64 : 128);
    return halves ? launch<One>(params, tiles * params.parts, stream)
                  : launch<Two>(params, tiles * params.parts, stream);
  }
}

template <class T, class Heads, bool kPool>
const char* run_heads(KernelParams& params, const Plan& plan, cudaStream_t stream) {
  const ChunkForward& p = params.problem;
  const int64_t pairs = int64_t{p.N} * p.HV;
  if (plan.segment == 0)
    return launch_output<T, Heads, Pass::kWhole, kPool>(params, plan.halves, pairs, stream);

  const int64_t tiles = int64_t{plan.slots} * p.HV;
  using Maps = Config<T, Heads, Heads::kKeys == 256 ? 1 : 2, Pass::kMaps, kPool>;
  params.parts = ceil_div(p.V, 64 * Maps::kStates);
  const int64_t maps = tiles * (params.parts + Maps::kMapRows / 64 / Maps::kStates);
  if (const char* error = launch<Maps>(params, maps, stream)) return error;
  const unsigned blocks = unsigned(pairs * (p.V / kFoldRows));
  fold_kernel<Maps><<<blocks, kFoldThreads, 0, stream>>>(params);
  if (const char* error = check(cudaGetLastError())) return error;
  return launch_output<T, Heads, Pass::kSegments, kPool>(params, plan.halves, tiles, stream);
}

}  // namespace gdn::sm90
