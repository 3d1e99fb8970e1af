// The kernels of one kind of heads, and how a call launches them.
#pragma once
#include <algorithm>

#include "sm90/fold.cuh"
#include "sm90/heads.h"
#include "sm90/kernel.cuh"

namespace gdn::sm90 {

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

// A tile a block.
template <class C>
const char* launch(KernelParams& params, int64_t tiles, cudaStream_t stream, bool beside) {
  if (tiles == 0) return nullptr;
  params.tiles = int(tiles);
  // Neighbours share an instruction cache, which does not hold two kernels: in pairs they run one.
  return launch_blocks(&chunk_forward_kernel<C>, params, ceil_div(tiles, 2) * 2, C::kThreads,
                       sizeof(SharedMemory<C>), 2, beside, stream);
}

// Beside the kernel that sets Dealing::taken, if there is one.
template <class T, class Heads, bool kPool>
const char* launch_whole(KernelParams& params, cudaStream_t stream) {
  using Halves = Config<T, Heads, 1, Pass::kWhole, kPool>;
  using Both = Config<T, Heads, only_halves<Heads>() ? 1 : 2, Pass::kWhole, kPool>;
  const ChunkForward& p = params.problem;
  const bool both = params.shape == Shape::kBoth;
  const int64_t parts = both ? value_parts<Both>(p) : value_parts<Halves>(p);
  const int64_t blocks = std::min<int64_t>(int64_t{p.N} * p.HV * parts, p.multiprocessors);
  if (blocks == 0) return nullptr;
  return launch_blocks(&whole_sequences_kernel<Both, Halves>, params, blocks, Halves::kThreads, kSharedBytes, 1,
                       params.dealing.taken != nullptr, stream);
}

template <class T, class Heads, bool kPool>
const char* run_heads(KernelParams& params, const Plan& plan, cudaStream_t stream) {
  if (plan.cuts.count == 0) return launch_whole<T, Heads, kPool>(params, stream);
  // Pairs of a sequence, or of a later segment, and a value head.
  const ChunkForward& p = params.problem;
  const int64_t pairs = int64_t{p.N} * p.HV, tiles = int64_t{plan.slots} * p.HV;
  using Maps = Config<T, Heads, Heads::kKeys == 256 ? 1 : 2, Pass::kMaps, kPool>;
  using Output = Config<T, Heads, 1, Pass::kSegments, kPool>;
  const auto walk = [&](bool first, bool beside) {
    params.segments.first = first;
    return launch<Output>(params, (first ? pairs : tiles) * value_parts<Output>(p), stream, beside);
  };
  const auto map = [&](bool beside) {
    const int64_t parts = value_parts<Maps>(p) + Maps::kMapRows / 64 / Maps::kStates;
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
