// The warps that store o, and zeros for o of tokens that no sequence has.
#pragma once
#include "sm90/forward/walk.cuh"

namespace gdn::sm90 {

// Stores the rows of a sequence's last chunk from a tile: TMA would write into the next sequence.
template <class C>
GDN_DEVICE void store_tail(const KernelParams& params, const Walk<C>& walk, const uint8_t* tile,
                           int first_column) {
  const ChunkForward& p = params.problem;
  const int64_t first = walk.tile().batch * p.T + walk.tile().first + walk.row;
  uint8_t* const o = static_cast<uint8_t*>(p.o);
#pragma unroll 1
  for (int i = thread_of<C>() % 32; i < walk.rows() * 8; i += 32) {
    const int row = i / 8, column = i % 8;
    const int64_t at =
        ((first + row) * p.HV + walk.tile().hv) * values<C>(p) + first_column + column * 8;
    if (!C::kExact && first_column + column * 8 >= p.V) continue;
    uint4* to = reinterpret_cast<uint4*>(o + at * 2);
    if constexpr (C::kPool)
      to = o_line(params.pool, walk.tile().batch, walk.tile().first + walk.row + row,
                  walk.tile().hv, first_column + column * 8);
    *to = *reinterpret_cast<const uint4*>(tile + row * 128 + ((column ^ (row % 8)) * 16));
  }
}

template <class C>
GDN_DEVICE void store_role(SharedMemory<C>& sm, const KernelParams& params, int warpgroup) {
  Walk<C> walk(sm, params);
  const bool lead = thread_of<C>() % 32 == 0;
  uint32_t phase = 0;
  for (bool more = walk.begin(); more; more = walk.next()) {
    const int first_column = first_value_channel<C>(walk.tile(), warpgroup);
    mbarrier_wait(shared_address(&sm.o_full[warpgroup]), phase);
    if (walk.rows() == kChunk) {
      if (lead) {
        tma_store(&params.o, shared_address(sm.o[warpgroup]), first_column,
                  walk.tile().first + walk.row, walk.tile().hv, walk.tile().batch);
        tma_store_commit();
        tma_store_wait_read();
      }
    } else {
      store_tail(params, walk, sm.o[warpgroup], first_column);
    }
    __syncwarp();
    arrive(sm.o_empty[warpgroup], lead);
    phase ^= 1;
  }
  if (lead) tma_store_wait();
}

// Zeroes o of packed tokens that no sequence has, by the threads of the single warps.
template <class C>
GDN_DEVICE void zero_orphans(const KernelParams& params) {
  const ChunkForward& p = params.problem;
  if (p.cu_seqlens == nullptr) return;
  // With C::kOneTile not gridDim.x: launch() rounds the grid up to pairs, and the last block, which
  // has no tile, takes no share.
  const int blocks = C::kOneTile ? params.tiles : gridDim.x;
  if constexpr (C::kPool) {              // rows may not be contiguous: a warp has a row
    const int lines = values<C>(p) / 8;  // of a row of a head
    int64_t row = sequence_bound(p, p.N) + blockIdx.x * 4 + thread_of<C>() / 32;
#pragma unroll 1
    for (; row < p.T; row += blocks * 4)
#pragma unroll 1
      for (int i = thread_of<C>() % 32; i < p.HV * lines; i += 32)
        *o_line(params.pool, 0, row, i / lines, i % lines * 8) = make_uint4(0, 0, 0, 0);
  } else {
    const int64_t row_bytes = int64_t{p.HV} * values<C>(p) * 2;
    const int64_t end = p.T * row_bytes;
    constexpr int kSharing = 128;  // threads of a block
    const int64_t step = int64_t{blocks} * kSharing * 16;
    int64_t at = sequence_bound(p, p.N) * row_bytes;
    at += (int64_t{blockIdx.x} * kSharing + thread_of<C>()) * 16;
    for (; at < end; at += step)
      *reinterpret_cast<uint4*>(static_cast<uint8_t*>(p.o) + at) = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace gdn::sm90
