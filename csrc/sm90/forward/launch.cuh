// The kernels of one kind of heads, and their launches.
#pragma once
#include <algorithm>

#include "sm90/forward/kernel.cuh"
#include "sm90/forward/run_heads.h"
#include "sm90/forward/segments/fold.cuh"
#include "sm90/launch_blocks.h"

namespace gdn::sm90 {

// A tile a block.
template <class C>
const char* launch(KernelParams& params, int64_t tiles, cudaStream_t stream, bool overlaps) {
  if (tiles == 0) return nullptr;
  params.tiles = int(tiles);
  // Two neighbouring multiprocessors share an instruction cache, which does not hold two kernels:
  // as a cluster of two blocks they run one.
  return launch_blocks(&chunk_forward_kernel<C>, params, ceil_div(tiles, 2) * 2, C::kThreads,
                       sizeof(SharedMemory<C>), 2, overlaps, stream);
}

// Overlaps with the kernel that sets Dealing::taken, if there is one.
template <class T, class Heads, bool kPool>
const char* launch_whole(KernelParams& params, cudaStream_t stream) {
  using Halves = Config<T, Heads, 1, Pass::kWhole, kPool>;
  using Both = Config<T, Heads, only_halves<Heads>() ? 1 : 2, Pass::kWhole, kPool>;
  const ChunkForward& p = params.problem;
  const bool both = params.shape == BlockShape::kBoth;
  const int64_t parts = both ? value_parts<Both>(p) : value_parts<Halves>(p);
  const int64_t blocks = std::min<int64_t>(int64_t{p.N} * p.HV * parts, p.multiprocessors);
  if (blocks == 0) return nullptr;
  return launch_blocks(&whole_sequences_kernel<Both, Halves>, params, blocks, Halves::kThreads,
                       kSharedBytes, 1, params.dealing.taken != nullptr, stream);
}

template <class T, class Heads, bool kPool>
const char* run_heads(KernelParams& params, const ForwardPlan& plan, cudaStream_t stream) {
  if (!plan.in_segments()) return launch_whole<T, Heads, kPool>(params, stream);
  // Pairs of a sequence or later segment and a value head.
  const ChunkForward& p = params.problem;
  const int64_t pairs = int64_t{p.N} * p.HV, tiles = int64_t{plan.later_segments} * p.HV;
  using Maps = Config<T, Heads, Heads::kKeys == 256 ? 1 : 2, Pass::kMaps, kPool>;
  using Halves = Config<T, Heads, 1, Pass::kSegments, kPool>;
  using Both = Config<T, Heads, only_halves<Heads>() ? 1 : 2, Pass::kSegments, kPool>;
  const auto walk = [&](SegmentGroup group, BlockShape shape, bool overlaps) {
    params.segments.group = group;
    const int64_t some = group == SegmentGroup::kLater ? tiles : pairs;
    if (shape == BlockShape::kBoth)
      return launch<Both>(params, some * value_parts<Both>(p), stream, overlaps);
    return launch<Halves>(params, some * value_parts<Halves>(p), stream, overlaps);
  };
  const auto map = [&](bool overlaps) {
    const int64_t parts = value_parts<Maps>(p) + Maps::kMapRows / 64 / Maps::kStates;
    return launch<Maps>(params, tiles * parts, stream, overlaps);
  };
  const bool maps_first = plan.cuts.maps_first && tiles > 0;
  params.segments.leads = plan.cut_by_device;
  if (const char* error = maps_first ? map(plan.cut_by_device)
                                     : walk(SegmentGroup::kFirst, plan.first, plan.cut_by_device))
    return error;
  params.segments.leads = false;
  if (const char* error = maps_first ? walk(SegmentGroup::kFirst, plan.first, true) : map(true))
    return error;
  if (const char* error = launch_blocks(&fold_kernel<Maps>, params, pairs * (p.V / kFoldRows),
                                        kFoldThreads, Fold<Maps>::kBytes, 1, false, stream))
    return error;
  // Where the device chooses the shape, blocks of the other shape have no tile.
  if (plan.cut_by_device && !only_halves<Heads>())
    if (const char* error = walk(SegmentGroup::kLater, BlockShape::kBoth, true)) return error;
  if (const char* error = walk(SegmentGroup::kLater, plan.shape, true)) return error;
  return plan.forgets ? walk(SegmentGroup::kAgain, BlockShape::kHalves, true) : nullptr;
}

// Writes the state that a part starts from, h0 or zeros, to its place before the first segment.
// gridDim: value heads, rows.
template <class C>
__global__ void __launch_bounds__(C::kKeys)
    part_start_kernel(const __grid_constant__ KernelParams params) {
  const ChunkForward& p = params.problem;
  const int hv = blockIdx.x, v = blockIdx.y, k = threadIdx.x, rows = gridDim.y;
  float x = 0.f;
  if (p.h0 != nullptr && v < p.V && k < p.K) {
    const int64_t at = hv * p.h0_h + v * p.h0_v + k * p.h0_k;
    x = to_float(load_bits(p.h0, at, p.h0_dtype), p.h0_dtype);
  }
  params.segments.starts[(int64_t{hv} * rows + v) * C::kKeys + k] = x;
}

// The two calls of a part of a sequence (Part). The maps are those of all segments, or without a
// carry of all but the last.
template <class T, class Heads>
const char* run_part(KernelParams& params, const ForwardPlan& plan, PartStage stage,
                     cudaStream_t stream) {
  using Maps = Config<T, Heads, Heads::kKeys == 256 ? 1 : 2, Pass::kMaps, false, true>;
  using WholeMaps = Config<T, Heads, Heads::kKeys == 256 ? 1 : 2, Pass::kMaps, false>;
  using Halves = Config<T, Heads, 1, Pass::kSegments, false>;
  using Both = Config<T, Heads, only_halves<Heads>() ? 1 : 2, Pass::kSegments, false>;
  const ChunkForward& p = params.problem;
  const int64_t tiles = int64_t{plan.later_segments} * p.HV;
  if (stage == PartStage::kMaps || p.h0 != nullptr) {
    part_start_kernel<Maps>
        <<<dim3(unsigned(p.HV), unsigned(state_rows(p.V))), Maps::kKeys, 0, stream>>>(params);
    if (const char* error = check(cudaGetLastError())) return error;
  }
  if (stage == PartStage::kMaps) {
    const int64_t parts = value_parts<Maps>(p) + Maps::kMapRows / 64 / Maps::kStates;
    if (const char* error = launch<Maps>(params, tiles * parts, stream, false)) return error;
    if (params.part.carry == nullptr) return nullptr;
    const int64_t rows = p.V + (params.part.comes ? p.K : 0);
    return launch_blocks(&fold_kernel<WholeMaps, true>, params, p.HV * (rows / kFoldRows),
                         kFoldThreads, Fold<WholeMaps>::kBytes, 1, false, stream);
  }
  if (const char* error = launch_blocks(&fold_kernel<WholeMaps>, params, p.HV * (p.V / kFoldRows),
                                        kFoldThreads, Fold<WholeMaps>::kBytes, 1, false, stream))
    return error;
  params.segments.group = SegmentGroup::kLater;
  const bool both = plan.shape == BlockShape::kBoth;
  if (const char* error =
          both ? launch<Both>(params, tiles * value_parts<Both>(p), stream, true)
               : launch<Halves>(params, tiles * value_parts<Halves>(p), stream, true))
    return error;
  if (!plan.forgets) return nullptr;
  params.segments.group = SegmentGroup::kAgain;
  return launch<Halves>(params, p.HV * value_parts<Halves>(p), stream, true);
}

}  // namespace gdn::sm90
