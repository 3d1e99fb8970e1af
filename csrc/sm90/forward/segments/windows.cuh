// The window of a map, plan/forgetting.cuh.
#pragma once
#include "sm90/forward/tiles.cuh"
#include "sm90/plan/forgetting.cuh"

namespace gdn::sm90 {

// Chunks; a head with a longer window counts as one that never forgets.
constexpr int kMostWindow = 32;

// Shortens the tile of a map to its window, or removes it. All threads of the block call it, before
// the memory of its roles is in use.
template <class C>
GDN_DEVICE void shorten_to_window(SharedMemory<C>& sm, const KernelParams& params) {
  static_assert(sizeof(sm.gates) >= kMostWindow * sizeof(float));
  const ChunkForward& p = params.problem;
  const uint32_t sums = shared_address(sm.gates);
  const Tile& tile = sm.tiles[0];
  const int lane = threadIdx.x % 32, chunks = tile.length / kChunk;
  // The last segment of a part may end within a chunk. It then has no window, whose chunks are
  // whole.
  const int most = C::kPart && tile.length % kChunk ? 0 : min(chunks, kMostWindow);
  for (int back = threadIdx.x / 32; back < most; back += C::kThreads / 32) {
    const int row = tile.first + (chunks - 1 - back) * kChunk + 2 * lane;
    int64_t at = tile.batch * p.g.batch + tile.hv * p.g.head + int64_t{row} * p.g.row;
    float sum = log2_decay(p, to_float(load_bits(p.g.data, at, p.g_dtype), p.g_dtype), tile.hv);
    at += p.g.row;
    sum += log2_decay(p, to_float(load_bits(p.g.data, at, p.g_dtype), p.g_dtype), tile.hv);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    if constexpr (C::kPart) sum += params.part.growth[int64_t{row / kChunk} * p.HV + tile.hv];
    if (lane == 0) store_shared_4(sums + 4 * back, __float_as_int(sum));
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    float sum = 0.f;
    int window = 0;
    for (int back = 0; back < most && window == 0; ++back) {
      sum += __uint_as_float(load_shared_4(sums + 4 * back));
      if (sum <= -kForgotten) window = back + 1;  // never past a NaN
    }
    Tile& shortened = sm.tiles[0];
    if (tile.map == 0 && tile.part == 0)
      params.segments.windows[int64_t{tile.segment} * p.HV + tile.hv] = window;
    if (window > 0) {
      if (tile.map == 1) shortened.exists = false;
      shortened.first += (chunks - window) * kChunk;
      shortened.length = window * kChunk;
    }
  }
  __syncthreads();
}

}  // namespace gdn::sm90
