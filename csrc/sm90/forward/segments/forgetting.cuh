// Maps that are walked only as far back as their gates remember.
//
// A segment's map is S_out = M S_in + b, and |M| is at most the product of its decays where no key is longer
// than its beta allows. So where the last w chunks of a segment decay by more than 2^kForgotten, the walk of
// b begins w chunks before the segment's end, from zeros, and M is left out: the fold takes S_out = b.
//
// That is a guess. It is wrong where keys are long, where a window adds next to nothing to the state (what
// came before is then all of it, however small), and where a NaN or an infinity lies before the window. So a
// segment that ends where the next one started from such a b compares the two. Where they differ, the rest of
// the sequence is walked again from the state that the segment ended with (Part::kAgain); a launch finds
// nothing to do otherwise. The verdict on a window and on a start are functions of the call's contents,
// summed in a fixed order: the bits are the same on every run.
//
// Two walks of the same tokens round differently where their frames differ by a power of two that is not whole,
// and then end 2^-8 apart in bf16, however much is forgotten. So the walk of the segment begins its frame anew
// where the window begins (Tile::frame_begins), as the walk of b does. Where a chunk decays by more than 2^4.5
// the two then end with the same bits; where it decays by less, what one rounding makes of the other's rest is
// as large as a rounding, and they stay 2^-8 apart (fp16: 2^-11), or 2^-6 (2^-8.5) where all keys are alike. The
// comparison allows more than that.
#pragma once
#include "sm90/forward/gates.cuh"

namespace gdn::sm90 {

constexpr float kForgotten = 64.f;  // log2 units
constexpr int kMostWindow = 32;     // chunks; beyond them a head counts as one that never forgets
// How far apart two starts may be, over the largest entry of the 16 channels of V that a warp has. Not of each channel:
// one whose state is next to nothing when it ends, by chance or for want of values, would have the rest walked again.
template <class T>
constexpr float kSameStart = 0x1p-4f;
template <>
inline constexpr float kSameStart<__half> = 0x1p-6f;

// Shortens a map's tile to its window, or takes it away. By all threads of the block; the memory of its roles
// is not in use yet.
template <class C>
GDN_DEVICE void shorten_to_window(SharedMemory<C>& sm, const KernelParams& params) {
  static_assert(sizeof(sm.gates) >= kMostWindow * sizeof(float));
  const ChunkForward& p = params.problem;
  const uint32_t sums = shared_address(sm.gates);
  const Tile& tile = sm.tiles[0];
  const int lane = threadIdx.x % 32, chunks = tile.length / kChunk;
  const int most = min(chunks, kMostWindow);
  for (int back = threadIdx.x / 32; back < most; back += C::kThreads / 32) {
    const int row = tile.first + (chunks - 1 - back) * kChunk + 2 * lane;
    int64_t at = tile.batch * p.g.batch + tile.hv * p.g.head + int64_t{row} * p.g.row;
    float sum = log2_decay(p, to_float(load_bits(p.g.data, at, p.g_dtype), p.g_dtype), tile.hv);
    at += p.g.row;
    sum += log2_decay(p, to_float(load_bits(p.g.data, at, p.g_dtype), p.g_dtype), tile.hv);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    if (lane == 0) store_shared_4(sums + 4 * back, __float_as_int(sum));
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    float sum = 0.f;
    int window = 0;
    for (int back = 0; back < most && window == 0; ++back) {
      sum += __uint_as_float(load_shared_4(sums + 4 * back));
      if (sum <= -kForgotten) window = back + 1;  // never behind a NaN
    }
    Tile& shortened = sm.tiles[0];
    if (tile.map == 0 && tile.part == 0)
      params.segments.windows[int64_t{tile.slot} * p.HV + tile.hv] = window;
    if (window > 0) {
      if (tile.map == 1) shortened.exists = false;
      shortened.first += (chunks - window) * kChunk;
      shortened.length = window * kChunk;
    }
  }
  __syncthreads();
}

}  // namespace gdn::sm90
