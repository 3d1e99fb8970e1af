// Maps that are walked only as far back as their gates remember.
//
// A segment's map is S_out = M S_in + b, and |M| is at most the product of its decays where no key
// is longer than its beta allows. Where the last w chunks of a segment decay by more than
// 2^kForgotten, the walk of b therefore begins w chunks before the segment's end, from zeros, and M
// is left out: the fold sets S_out = b.
//
// This is an assumption. It is wrong where keys are long, where a window adds almost nothing to the
// state (the state from before the window is then all of it, however small), and where a NaN or an
// infinity lies before the window. A segment whose successor started from such a b therefore
// compares its final state with b. Where they differ, the rest of the sequence is walked again from
// the segment's final state (SegmentGroup::kAgain); otherwise that launch does nothing. Windows and
// comparisons depend on the call's contents alone, and sums have a fixed order: the bits are the
// same on every run.
//
// Two walks of the same tokens round differently where their frames differ by a power of two whose
// exponent is not whole, and then end 2^-8 apart in bf16, however much is forgotten. The walk of
// the segment therefore begins its frame anew where the window begins (Tile::frame_begins), as the
// walk of b does. Where a chunk decays by more than 2^4.5, both walks then end with the same bits.
// Where it decays by less, a difference of one rounding persists, and the walks stay 2^-8 apart
// (fp16: 2^-11), or 2^-6 (2^-8.5) where all keys are equal. The comparison allows more than that.
#pragma once
#include "common/ptx.cuh"

namespace gdn::sm90 {

constexpr float kForgotten = 64.f;  // log2 units
// The largest difference between two starts that count as equal, relative to the largest entry in
// the 16 channels of V of a warp. A limit for each channel would have sequences walked again
// because of a channel whose final state is almost zero.
template <class T>
constexpr float kSameStart = 0x1p-4f;
template <>
inline constexpr float kSameStart<__half> = 0x1p-6f;

}  // namespace gdn::sm90
