// Segments of both walks (segments/maps.cu) that forget what they start from.
//
// What a segment does to the state and to its gradient is M x + b, and |M| is at most the product
// of its decays where no key is longer than its beta allows. So where a segment decays by more than
// 2^kForgotten, M is left out: the walk that finds b begins where what is left of the segment
// decays by as much, from zeros, and b is what the next segment starts from. That is a guess, wrong
// where keys are long, where a window adds next to nothing to the state, and where a NaN or an
// infinity lies before the window, as in sm90/plan/forgetting.cuh. So each segment compares what it
// ends with and what the next one has started from, and where they differ anywhere all sequences
// are walked again, whole, both ways. All walks of a sequence have the same frames, so that they
// differ by no more than the rounding of what is forgotten.
#pragma once
#include "sm90/backward/layout.cuh"
#include "sm90/plan/forgetting.cuh"

namespace gdn::sm90::backward {

// How many chunks of a segment a walk forward or back has to begin before its end, for all before
// to be forgotten; 0: not all is. Forward and back the decays are added in opposite orders. By a
// whole warp.
template <class Kind>
GDN_DEVICE int window_of(const Params& params, const SegmentTile<Kind>& tile, bool back) {
  const int lane = threadIdx.x % 32, count = tile.chunks(), HV = params.problem.forward.HV;
  const float* const last = params.scratch.last + int64_t{tile.chunk_index} * HV + tile.hv(params);
  float before = 0;
#pragma unroll 1
  for (int first = 0; first < count; first += 32) {
    const int i = first + lane;
    float sum = i < count ? last[int64_t{back ? i : count - 1 - i} * HV] : 0.f;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const float below = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += below;
    }
    const uint32_t enough =
        __ballot_sync(~0u, i < count && before + sum <= -kForgotten);  // never behind a NaN
    if (enough != 0) return first + __ffs(enough);
    before += __shfl_sync(~0u, sum, 31);
  }
  return 0;
}

// How far a warp's share of a state, 16 channels of V, is from what the next segment was given.
class StateDifference {
 public:
  // given: this thread's first element, state_of.
  GDN_DEVICE void add(const float (&S)[64], const float* given) {
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const float2 x = *reinterpret_cast<const float2*>(given + j / 2 * 8 + j % 2 * 8 * kChannels);
      add(S[2 * j], x.x);
      add(S[2 * j + 1], x.y);
    }
  }
  // Puts down that they differ, by a whole warp.
  GDN_DEVICE void judge(int* wrong) const {
    // Numbers that are not negative are in the order of their bits.
    const float most = __int_as_float(__reduce_max_sync(~0u, __float_as_int(most_)));
    const float apart = __int_as_float(__reduce_max_sync(~0u, __float_as_int(apart_)));
    const bool same = __all_sync(~0u, finite_) && apart <= kSameStart<__nv_bfloat16> * most;
    if (!same)
      atomicAdd(wrong,
                1);  // by all lanes: with one lane chosen, the walk forward spills a register
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
