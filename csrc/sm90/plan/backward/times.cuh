// Models of the times of the backward's steps, in microseconds on an H200, for plans of the host
// and choices of the device.
#pragma once
#include "common/ptx.cuh"
#include "params.h"
#include "sm90/plan/backward/sizes.h"

namespace gdn::sm90::backward {

// A chunk of the walk back: kBack of half a slice, kBackWhole of a slice whose triangles are ready.
constexpr double kBack = 1.2, kBackWhole = 2.6;

// A chunk of the walk forward with its gradients, and the start and end of a tile.
constexpr float kGradients = 6.5f, kTile = 5;
// A walk in segments of `length` chunks that are dealt out. share: chunks of a multiprocessor,
// where all have equally many. The block with the most chunks has about a sixth of a segment more.
GDN_HOST_DEVICE float time_of_segments(float share, float length, float chunk = kGradients,
                                       float tile = kTile) {
  return fmaxf(share / length, 1.f) * (length * chunk + tile) + length * (chunk / 6);
}
// The walk of the state to where the last segments begin. walked: chunks of the longest sequence;
// share: chunks of a multiprocessor, where all have equally many.
GDN_HOST_DEVICE float time_of_states(float share, float walked, bool overlaps) {
  // kOverlap: the time that this walk adds to a chunk of the walk back while both run. A chunk of
  // this walk after the walk back takes kChain, the chain of its products, or kFull, where memory
  // is the bound.
  constexpr float kOverlap = 0.2f, kChain = 1.2f, kFull = 1.8f, kLaunch = 8, kBehind = 15;
  return kLaunch + (overlaps ? kOverlap * walked : kBehind + fmaxf(kChain * walked, kFull * share));
}

// Whether the walk of the state has a free multiprocessor for each of its tiles (halves of slices)
// while the walk back runs.
GDN_HOST_DEVICE bool states_overlap(const ChunkForward& p, int64_t slices) {
  const int64_t halves = 2 * int64_t{p.N} * slices,
                blocks = halves <= p.multiprocessors ? halves : halves / 2;
  return blocks + halves <= p.multiprocessors;
}

// Step 2, for each chunk of a multiprocessor.
constexpr float kTriangles = 1.35f;
// Whether the walk back takes clearly less time over halves of slices: their chain of products is
// shorter, and the longest sequence bounds the walk where lengths are uneven. share: chunks of a
// multiprocessor; makes: a walk over slices makes the triangles, for which halves need a kernel of
// their own.
GDN_HOST_DEVICE bool halves_pay(float longest, float share, bool makes) {
  // Microseconds of a chunk: by the chain of a block's products, and (Full) by memory, with a block
  // on every multiprocessor.
  constexpr float kSlice = 2.5f, kSliceFull = 5, kHalf = 1.55f, kHalfFull = 2.3f, kMargin = 0.95f;
  return fmaxf(longest * kHalf, share * 2 * kHalfFull) + (makes ? share * kTriangles : 0) <
         kMargin * fmaxf(longest * kSlice, share * kSliceFull);
}

}  // namespace gdn::sm90::backward
