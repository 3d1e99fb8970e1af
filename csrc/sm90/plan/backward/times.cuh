// Models of the times of the backward's steps, in microseconds on an H200, for the plan of the host
// and for the choices of the device.
#pragma once
#include "common/ptx.cuh"
#include "params.h"
#include "sm90/plan/backward/sizes.h"

namespace gdn::sm90::backward {

// What the device chooses of the walk back, BackShape::kByLengths: 1: halves of slices; 0: slices;
// -1: by the lengths.
#ifndef GDN_BACKWARD_HALVES
#define GDN_BACKWARD_HALVES -1
#endif
constexpr int kForcedHalves = GDN_BACKWARD_HALVES;

// Microseconds of a chunk walked back, of half a slice and of a whole one whose triangles are
// there.
constexpr double kBack = 1.2, kBackWhole = 2.6;

// Microseconds of the walk forward: of a chunk with its gradients, and of the start and end of its
// tile.
constexpr float kGradients = 6.5f, kTile = 5;
// What it takes in segments of `length` chunks, which are dealt, where every multiprocessor's share
// of all chunks is `share`. The block that has most has about a sixth of a segment more.
GDN_HOST_DEVICE float time_of_segments(float share, float length, float chunk = kGradients,
                                       float tile = kTile) {
  return fmaxf(share / length, 1.f) * (length * chunk + tile) + length * (chunk / 6);
}
// What it takes to walk to where the last segments begin, where that is `walked` chunks of the
// longest sequence and `share` of all that a multiprocessor has.
GDN_HOST_DEVICE float time_of_states(float share, float walked, bool beside) {
  // Of a chunk: what the walk back takes longer with this walk beside it, and the walk of the state
  // behind the walk back, by its chain and by memory; and of its launch.
  constexpr float kBeside = 0.2f, kChain = 1.2f, kFull = 1.8f, kLaunch = 8, kBehind = 15;
  return kLaunch + (beside ? kBeside * walked : kBehind + fmaxf(kChain * walked, kFull * share));
}

// Whether the walk of the state finds a free multiprocessor for each of its tiles, halves of
// slices, beside the walk back.
GDN_HOST_DEVICE bool states_go_beside(const ChunkForward& p, int64_t slices) {
  const int64_t halves = 2 * int64_t{p.N} * slices,
                blocks = halves <= p.multiprocessors ? halves : halves / 2;
  return blocks + halves <= p.multiprocessors;
}

// Microseconds of step 2, of a chunk that a multiprocessor has.
constexpr float kTriangles = 1.35f;
// Whether the walk back takes clearly less over halves of slices: their chain of products is
// shorter, and the longest sequence bounds the walk where lengths are uneven. `share`: of all
// chunks a multiprocessor's; makes: over slices the walk makes the triangles, for which halves need
// a kernel of their own.
GDN_HOST_DEVICE bool halves_pay(float longest, float share, bool makes) {
  if (kForcedHalves >= 0) return kForcedHalves != 0;
  // Microseconds of a chunk, by a block's chain, and with a block on every multiprocessor, by
  // memory.
  constexpr float kSlice = 2.5f, kSliceFull = 5, kHalf = 1.55f, kHalfFull = 2.3f, kMargin = 0.95f;
  return fmaxf(longest * kHalf, share * 2 * kHalfFull) + (makes ? share * kTriangles : 0) <
         kMargin * fmaxf(longest * kSlice, share * kSliceFull);
}

}  // namespace gdn::sm90::backward
