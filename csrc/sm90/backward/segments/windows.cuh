// Segments of both walks (segments/maps.cu) that forget the state that they start from.
//
// A segment maps the state, and its gradient, to M x + b, and |M| is at most the product of the
// decays where no key is longer than its beta allows. Where a segment decays by more than
// 2^kForgotten, M is therefore left out: the walk that finds b begins, from zeros, where the rest
// of the segment decays by as much, and the next segment starts from b. This assumption is wrong
// where keys are long, where a window adds almost nothing to the state, and where a NaN or an
// infinity lies before the window, as in sm90/plan/forgetting.cuh. Each segment therefore compares
// its final state with the start of the next one. Where any differ, all sequences are walked again,
// whole, in both directions. All walks of a sequence have the same frames, and differ only by the
// rounding of what is forgotten.
#pragma once
#include "sm90/backward/layout.cuh"
#include "sm90/plan/forgetting.cuh"

namespace gdn::sm90::backward {

// The number of chunks before its end at which a walk through a segment, forward or back, may begin
// because all before is forgotten; 0: not all is forgotten. The two directions add decays in
// opposite orders. A whole warp calls it. kPart: of a part of a sequence, whose windows have to be
// certain (tile/growth.cuh).
template <class Kind, bool kPart = false>
GDN_DEVICE int window_of(const Params& params, const SegmentTile<Kind>& tile, bool back) {
  const int lane = threadIdx.x % 32, count = tile.chunks(), HV = params.problem.forward.HV;
  const float* const last = params.scratch.last + int64_t{tile.chunk_index} * HV + tile.hv(params);
  if (kPart && params.part.growth == nullptr) return 0;
  float before = 0;
#pragma unroll 1
  for (int first = 0; first < count; first += 32) {
    const int i = first + lane;
    float sum = i < count ? last[int64_t{back ? i : count - 1 - i} * HV] : 0.f;
    if constexpr (kPart) {
      const int64_t at = int64_t{tile.chunk_index + i} * HV + tile.hv(params);
      if (i < count) sum += params.part.growth[at];
    }
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const float below = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += below;
    }
    // Never past a NaN.
    const uint32_t enough = __ballot_sync(~0u, i < count && before + sum <= -kForgotten);
    if (enough != 0) return first + __ffs(enough);
    before += __shfl_sync(~0u, sum, 31);
  }
  return 0;
}

// The difference between a warp's part of a state, 16 channels of V, and the start of the next
// segment.
class StateDifference {
 public:
  // given: the thread's first element of the start, state_of.
  GDN_DEVICE void add(const float (&S)[64], const float* given) {
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const float2 x = *reinterpret_cast<const float2*>(given + j / 2 * 8 + j % 2 * 8 * kChannels);
      add(S[2 * j], x.x);
      add(S[2 * j + 1], x.y);
    }
  }
  // Counts a difference in `wrong`. A whole warp calls it.
  GDN_DEVICE void judge(int* wrong) const {
    // Non-negative floats order like their bits.
    const float most = __int_as_float(__reduce_max_sync(~0u, __float_as_int(most_)));
    const float apart = __int_as_float(__reduce_max_sync(~0u, __float_as_int(apart_)));
    const bool same = __all_sync(~0u, finite_) && apart <= kSameStart<__nv_bfloat16> * most;
    if (!same)
      atomicAdd(wrong,
                1);  // by all lanes: with a choice of one lane the walk forward spills a register
  }

 private:
  GDN_DEVICE void add(float x, float given) {
    const float difference = fabsf(x - given);
    finite_ = finite_ && difference < INFINITY;
    most_ = fmaxf(most_, fabsf(x));
    apart_ = fmaxf(apart_, difference);
  }

  float most_ = 0, apart_ = 0;
  bool finite_ = true;
};

}  // namespace gdn::sm90::backward
