// Maps that are walked only as far back as their gates remember.
//
// A segment's map is S_out = M S_in + b, and |M| is at most the product of its decays where no key
// is longer than its beta allows. So where the last w chunks of a segment decay by more than
// 2^kForgotten, the walk of b begins w chunks before the segment's end, from zeros, and M is left
// out: the fold takes S_out = b.
//
// That is a guess. It is wrong where keys are long, where a window adds next to nothing to the
// state (what came before is then all of it, however small), and where a NaN or an infinity lies
// before the window. So a segment that ends where the next one started from such a b compares the
// two. Where they differ, the rest of the sequence is walked again from the state that the segment
// ended with (SegmentGroup::kAgain); a launch finds nothing to do otherwise. The verdict on a
// window and on a start are functions of the call's contents, summed in a fixed order: the bits are
// the same on every run.
//
// Two walks of the same tokens round differently where their frames differ by a power of two that
// is not whole, and then end 2^-8 apart in bf16, however much is forgotten. So the walk of the
// segment begins its frame anew where the window begins (Tile::frame_begins), as the walk of b
// does. Where a chunk decays by more than 2^4.5 the two then end with the same bits; where it
// decays by less, what one rounding makes of the other's rest is as large as a rounding, and they
// stay 2^-8 apart (fp16: 2^-11), or 2^-6 (2^-8.5) where all keys are alike. The comparison allows
// more than that.
#pragma once
#include "common/ptx.cuh"

namespace gdn::sm90 {

constexpr float kForgotten = 64.f;  // log2 units
// How far apart two starts may be, over the largest entry of the 16 channels of V that a warp has.
// Not of each channel: one whose state is next to nothing when it ends, by chance or for want of
// values, would have the rest walked again.
template <class T>
constexpr float kSameStart = 0x1p-4f;
template <>
inline constexpr float kSameStart<__half> = 0x1p-6f;

}  // namespace gdn::sm90
