// Segments of both walks (segment_maps.cu) that forget what they start from.
//
// What a segment does to the state and to its gradient is M x + b, and |M| is at most the product of its decays where no
// key is longer than its beta allows. So where a segment decays by more than 2^kForgotten, M is left out: the walk that
// finds b begins where what is left of the segment decays by as much, from zeros, and b is what the next segment starts
// from. That is a guess, wrong where keys are long, where a window adds next to nothing to the state, and where a NaN or
// an infinity lies before the window, as in sm90/forgetting.cuh. So each segment compares what it ends with and what
// the next one has started from, and where they differ anywhere all sequences are walked again, whole, both ways. All
// walks of a sequence have the same frames, so that they differ by no more than the rounding of what is forgotten.
#pragma once
#include "sm90/backward/common.cuh"
#include "sm90/forgetting.cuh"

namespace gdn::sm90::backward {

// The number of a segment and slice in Cut::forgotten.
template <class Kind>
GDN_DEVICE int64_t segment_index(const Params& params, int n, int segment, int slice) {
  return segment_matrix<Kind>(params, n, segment, slice) / (kChannels * kChannels);
}

// How many chunks of a segment a walk forward or back has to begin before its end, for all before to be forgotten; 0: not
// all is. By a whole warp.
template <class Kind>
GDN_DEVICE int window_of(const Params& params, const SegmentTile<Kind>& tile, bool back) {
  const int lane = threadIdx.x % 32, count = tile.chunks(), HV = params.problem.forward.HV;
  const float* const last = params.scratch.last + int64_t{tile.slot} * HV + tile.hv(params);
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
    const uint32_t enough = __ballot_sync(~0u, i < count && before + sum <= -kForgotten);  // never behind a NaN
    if (enough != 0) return first + __ffs(enough);
    before += __shfl_sync(~0u, sum, 31);
  }
  return 0;
}

// Puts down where the state that a segment ends with, or its gradient, is not what the next segment was given. at: this
// thread's part of that.
GDN_DEVICE void compare_states(const float (&S)[64], const float* at, int* wrong) {
  float most = 0, apart = 0;
  bool finite = true;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = S[4 * j + i], difference = fabsf(x - at[8 * j + i / 2 * 8 * kChannels + i % 2]);
      finite = finite && difference < INFINITY;
      most = fmaxf(most, fabsf(x));
      apart = fmaxf(apart, difference);
    }
    asm volatile("" : "+f"(most), "+f"(apart)::"memory");  // or more is loaded ahead than there are registers for
  }
  // Numbers that are not negative are in the order of their bits.
  most = __int_as_float(__reduce_max_sync(~0u, __float_as_int(most)));
  apart = __int_as_float(__reduce_max_sync(~0u, __float_as_int(apart)));
  const bool same = __all_sync(~0u, finite) && apart <= kSameStart<__nv_bfloat16> * most;
  if (!same && threadIdx.x % 32 == 0) atomicAdd(wrong, 1);
}

}  // namespace gdn::sm90::backward
