// Shared memory and barriers of the walk forward, and its single warps, which load and store, and
// make <S, dS> and dx . v.
#pragma once
#include "sm90/backward/copies.cuh"
#include "sm90/backward/deal.cuh"
#include "sm90/tile/cluster.cuh"

namespace gdn::sm90::backward {

// A chunk as the loader announces it to the roles that wait for its k.
struct Announced {
  int block;   // the chunk's block of scratch memory; -1: there are no more chunks
  int begins;  // the number of the tile that begins with this chunk; -1: none does
  // Where both walks are cut and the previous tile forgets its start: the matrix of Scratch::starts
  // that its final state has to equal; else -1.
  int ended;
};

// The number of a 16 x 16 block of a lower triangle of four row strips. In a block the four
// matrices of stmatrix are consecutive.
GDN_DEVICE int key_block(int strip, int column) { return strip * (strip + 1) / 2 + column; }

// Each buffer has a full and an empty barrier; csrc/sm90/backward/README.md lists the roles that
// fill and empty it.
struct WalkMemory {
  alignas(1024) uint8_t k[2][2][kTileBytes];
  uint8_t q[2][kTileBytes];  // then dk
  uint8_t v[2][kTileBytes];
  uint8_t dO[2][2][kTileBytes];  // then dq
  uint8_t dx[2][kTileBytes];     // with kReadsDv dv
  uint8_t ds[2][2][kTileBytes];  // halves of V, halves of K
  uint8_t t[kTileBytes];
  uint8_t qk[kTileBytes];  // then dP
  uint8_t n[kTileBytes];
  uint8_t S[2][2][kTileBytes];
  uint8_t u[2][kTileBytes];
  uint8_t kk[10][512];      // lower k k^T, key_block
  ChunkFactors factors[2];  // loaded and released with k
  Announced chunk[2];       // the same
  float column[4][kChunk], row[kChunk], own[kChunk];
  uint64_t k_full[2], k_empty[2], q_full, q_read, v_full, v_empty, do_full[2], dx_full, dx_empty,
      ds_full, ds_empty;
  uint64_t t_full, t_empty, pairs_full, pairs_empty, S_full, S_empty, u_full, u_empty, n_full,
      dk_full;
  uint64_t
      dq_full[2];     // two: with one barrier two phases could end before the store sees the first
  uint64_t aside[3];  // of the loaders
  uint64_t dq_there, dq_taken, dk_there, dk_taken, pairs_read[2];  // load_and_store
};

template <class T>
GDN_DEVICE void init_barriers(WalkMemory& sm) {
  // Arrivals. For tiles without rows to zero the loader's first lane alone arrives.
  constexpr int kWarp = kWarpArrivals, kStates = 8 * kWarp, kPairs = 4 * kWarp;
  constexpr int kProducts = 2 * kWarp;  // <S, dS>: the warps that load q and do
  for (int i = 0; i < 2; ++i) {
    mbarrier_init(&sm.k_full[i], kWarp);
    mbarrier_init(&sm.k_empty[i], kStates + kPairs);
    mbarrier_init(&sm.do_full[i], kWarp);
    mbarrier_init(&sm.dq_full[i], kPairs);
  }
  const auto init = [](uint64_t& full, uint64_t& empty, int writers, int readers) {
    mbarrier_init(&full, writers);
    mbarrier_init(&empty, readers);
  };
  init(sm.v_full, sm.v_empty, kWarp, kStates + kWarp);
  init(sm.dx_full, sm.dx_empty, kReadsDv<T> ? kWarp : 1, kStates + kPairs + kWarp);
  init(sm.ds_full, sm.ds_empty, 1, kStates + kProducts);
  init(sm.t_full, sm.t_empty, 1, kStates);
  init(sm.pairs_full, sm.pairs_empty, 1, kStates + kPairs);
  init(sm.S_full, sm.S_empty, kStates, kStates + kPairs + kProducts);
  init(sm.u_full, sm.u_empty, kStates, kStates + kPairs);
  mbarrier_init(&sm.q_full, kWarp);
  mbarrier_init(&sm.q_read, kPairs);
  mbarrier_init(&sm.n_full, kPairs);
  mbarrier_init(&sm.dk_full, kStates);
  for (uint64_t* bar : {&sm.dq_there, &sm.dq_taken, &sm.dk_there, &sm.dk_taken, &sm.pairs_read[0],
                        &sm.pairs_read[1]})
    mbarrier_init(bar, 1);
  for (uint64_t& bar : sm.aside) mbarrier_init(&bar, 1);
  mbarrier_init_fence();
}

// All chunks of all tiles of this block, in forward order.
template <class Kind>
struct ForwardWalk {
  const Params& params;
  int index, c = 0;
  BackTile<Kind> tile;
  GDN_DEVICE explicit ForwardWalk(const Params& p) : params(p), index(first_tile(p)) {}
  GDN_DEVICE bool begin() {
    for (; index >= 0; index = next_tile(params, index)) {
      tile = forward_tile<Kind>(params, index);
      c = 0;
      if (tile.length > 0) return true;
    }
    return false;
  }
  GDN_DEVICE bool next() {
    if (++c < tile.chunks()) return true;
    index = next_tile(params, index);
    return begin();
  }
  GDN_DEVICE int block() const {
    return (tile.chunk_index + c) * slices_of<Kind>(params) + tile.slice;
  }
  GDN_DEVICE int head_block() const {
    return (tile.chunk_index + c) * params.problem.forward.HV + tile.hv(params);
  }
  GDN_DEVICE int row() const { return tile.first + c * kChunk; }
  GDN_DEVICE int rows() const { return tile.length - c * kChunk; }
};

// kCut: this kernel may begin while the walk back runs, and waits before it reads results of the
// walk back.
template <class Kind, bool kCut>
GDN_DEVICE void load_most(WalkMemory& sm, const Params& params) {
  const bool lead = threadIdx.x % 32 == 0;
  uint32_t aside_phase = 0;
  ForwardWalk<Kind> walk(params);
  uint32_t it = 0;
  int ended = -1;  // of the tile that is walked
#pragma unroll 1
  for (bool more = walk.begin(); more; more = walk.next(), ++it) {
    const uint32_t stage = it % 2, block = walk.block(), of_head = walk.head_block();
    wait_for(sm.k_empty[stage], it / 2 + 1);
    if (lead)
      sm.chunk[stage] = {int(block), walk.c == 0 ? walk.index : -1, walk.c == 0 ? ended : -1};
    // A state that the forward has left is not assumed, and then no job writes
    // SegmentMaps::forgotten of a first segment.
    if (walk.c == 0 && params.maps.exist && !has_states(params)) {
      const bool forgets = params.maps.forgotten[walk.index] == kForgetsState;
      ended = forgets ? walk.index - walk.tile.n * slices_of<Kind>(params) : -1;
    }
    load_rows<2>(params.k, sm.k[stage], sm.k_full[stage], sm.aside[0], aside_phase, 0, walk.row(),
                 walk.tile.h(params), walk.tile.batch, walk.rows(), sizeof(ChunkFactors),
                 [&](uint32_t bar) {
                   bulk_load(shared_address(&sm.factors[stage]), params.scratch.factors + of_head,
                             sizeof(ChunkFactors), bar);
                 });
    wait_for(sm.v_empty, it + 1);
    load_rows<2>(params.v, sm.v, sm.v_full, sm.aside[0], aside_phase, walk.tile.v(params),
                 walk.row(), walk.tile.hv(params), walk.tile.batch, walk.rows(), 0, Nothing{});
    if (lead) {
      wait_for(sm.t_empty, it + 1);
      mbarrier_expect(shared_address(&sm.t_full), kTileBytes);
      bulk_load(shared_address(sm.t), t_at(params, of_head), kTileBytes,
                shared_address(&sm.t_full));
    }
    if (kCut && it == 0) wait_for_prerequisites();
    if constexpr (kReadsDv<typename Kind::T>) {
      wait_for(sm.dx_empty, it + 1);
      load_rows<2>(params.dv, sm.dx, sm.dx_full, sm.aside[0], aside_phase, walk.tile.v(params),
                   walk.row(), walk.tile.hv(params), walk.tile.batch, walk.rows(), 0, Nothing{});
    }
    if (lead) {
      if constexpr (!kReadsDv<typename Kind::T>) {
        wait_for(sm.dx_empty, it + 1);
        mbarrier_expect(shared_address(&sm.dx_full), 2 * kTileBytes);
        for (int i = 0; i < 2; ++i)
          tma_load(shared_address(sm.dx[i]), &params.dx, shared_address(&sm.dx_full), 64 * i, 0, 0,
                   block);
      }
      wait_for(sm.ds_empty, it + 1);
      mbarrier_expect(shared_address(&sm.ds_full), sizeof sm.ds);
      bulk_load(shared_address(sm.ds), ds_at(params, block, 0), sizeof sm.ds,
                shared_address(&sm.ds_full));
      wait_for(sm.pairs_empty, it + 1);
      mbarrier_expect(shared_address(&sm.pairs_full), kTileBytes);
      tma_load(shared_address(sm.qk),
               pairs_at<Kind>(params, walk.tile.chunk_index + walk.c, walk.tile.h(params),
                              walk.tile.n, walk.tile.batch, walk.row(), walk.rows()),
               shared_address(&sm.pairs_full));
    }
    __syncwarp();
  }
  // Otherwise a launch without a chunk would end before the walk back, and the next kernel would
  // begin.
  if (kCut && it == 0) wait_for_prerequisites();
  wait_for(sm.k_empty[it % 2], it / 2 + 1);
  if (lead) sm.chunk[it % 2] = {-1, -1, ended};
  arrive(sm.k_full[it % 2], lead);
}

// <S, dS> of a chunk over half of V, from their tiles, by a warp that would wait otherwise. Both
// tiles have the same layout. Returns the chunk's block of scratch memory.
template <class T>
GDN_DEVICE int states_product(WalkMemory& sm, const Params& params, uint32_t it, int half) {
  const int lane = threadIdx.x % 32;
  wait_for(sm.k_full[it % 2], it / 2);  // for the announced chunk
  const int block = sm.chunk[it % 2].block;
  wait_for(sm.ds_full, it);
  wait_for(sm.S_full, it);
  uint32_t ds = shared_address(sm.ds[half]) + lane * 16;
  constexpr uint32_t kApart = offsetof(WalkMemory, S) - offsetof(WalkMemory, ds);
  float sum[2] = {};
#pragma unroll 1
  for (int i = 0; i < 2 * kTileBytes / 1024; ++i, ds += 1024) {
    uint32_t x[2][4], y[2][4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      load_shared_16(ds + j * 512, x[j]);
      load_shared_16(ds + kApart + j * 512, y[j]);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 a = unpack(T{}, x[j][w]), b = unpack(T{}, y[j][w]);
        sum[j] += a.x * b.x;
        sum[j] += a.y * b.y;
      }
  }
  float all = sum[0] + sum[1];
#pragma unroll
  for (int d = 1; d < 32; d *= 2) all += __shfl_xor_sync(~0u, all, d);
  if (lane == 0) params.scratch.across[int64_t{block} * 2 + half] = all;
  const bool one = lane == lane_after(__float_as_uint(all));
  arrive(sm.S_empty, one);
  arrive(sm.ds_empty, one);
  return block;
}

// Stores the first `rows` rows of a tile of two halves, or adds them to memory. All 64 rows would
// reach into the next sequence. A warp calls it. to: the first row, of `lines` lines of 16 bytes;
// stride: from row to row, in rows.
template <bool kAdds>
GDN_DEVICE void store_some_rows(const uint8_t (*tiles)[kTileBytes], uint4* to, int lines,
                                int stride, int rows, int lane) {
  using T = __nv_bfloat16;
  constexpr int kLines = kChannels / 8;  // of a row of the tile
#pragma unroll 1
  for (int i = lane; i < rows * kLines; i += 32) {
    const int row = i / kLines, half = i / 8 % 2, line = i % 8;
    if (i % kLines >= lines) continue;
    uint32_t x[4];
    load_shared_16(shared_address(tiles[half]) + row * 128 + (line ^ row % 8) * 16, x);
    uint4* const at = to + int64_t{row} * stride * lines + i % kLines;
    if constexpr (kAdds) {
      const uint4 before = *at;
      const uint32_t y[4] = {before.x, before.y, before.z, before.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 a = unpack(T{}, x[j]), b = unpack(T{}, y[j]);
        x[j] = pack(T{}, a.x + b.x, a.y + b.y);
      }
    }
    *at = make_uint4(x[0], x[1], x[2], x[3]);
  }
  __syncwarp();
}

// Loads do or q, in kStages stages, and stores dq or dk from the same tile: with Sums::kLater to
// the memory of the chunk's dS, which has been read, else to `to`, where the second block of a
// cluster adds.
//
// With Sums::kCluster dq and dk of two value heads of a key head are added in global memory by the
// two blocks that make them, a cluster: the first block stores its own, and the second one adds its
// own to it. Both terms are rounded, and so is the sum: the sums have the bits of head_sum_kernel.
// No warpgroup waits for the other block. The second block adds once the first block has signalled
// that its store is complete (`there`), and is therefore later by the time of a store. The first
// block loads its next chunk before it waits for the second block's signal (`taken`), and is at
// most one chunk ahead.
template <class Kind, int kStages, Sums kSums>
GDN_DEVICE void load_and_store(WalkMemory& sm, const Params& params, const CUtensorMap& map,
                               uint8_t (*tiles)[2][kTileBytes], uint64_t* full,
                               uint64_t* result_full, uint64_t& aside, bool of_keys,
                               const CUtensorMap& to, uint64_t& there, uint64_t& taken) {
  const ChunkForward& p = params.problem.forward;
  constexpr bool kCluster = kSums == Sums::kCluster;
  const bool lead = threadIdx.x % 32 == 0, adds = kCluster && cluster_rank() == 1;
  uint4* const sums = static_cast<uint4*>(of_keys ? params.problem.dk : params.problem.dq);
  uint32_t aside_phase = 0, loaded = 0, it = 0;
  // A loaded chunk: its place in `to`, and the rows of the sequence from there on.
  struct Chunk {
    int row, rows, h, batch;
  } oldest = {}, newest = {};
  ForwardWalk<Kind> walk(params);
  bool more = walk.begin();
  const auto fetch = [&] {
    oldest = newest;
    if (!more) return;
    const uint32_t stage = loaded++ % kStages;
    load_rows<2>(map, tiles[stage], full[stage], aside, aside_phase,
                 of_keys ? 0 : walk.tile.v(params), walk.row(),
                 of_keys ? walk.tile.h(params) : walk.tile.hv(params), walk.tile.batch, walk.rows(),
                 0, Nothing{});
    newest = {walk.row(), walk.rows(), walk.tile.h(params), walk.tile.batch};
    more = walk.next();
  };
#pragma unroll 1
  for (int i = 0; i < kStages; ++i) fetch();
#pragma unroll 1
  for (; it < loaded; ++it) {
    const int block = states_product<typename Kind::T>(sm, params, it, of_keys);
    // Unused with Sums::kLater.
    const Chunk chunk = kStages == 1 || it + 1 == loaded ? newest : oldest;
    uint8_t (&tile)[2][kTileBytes] = tiles[it % kStages];
    wait_for(result_full[it % kStages], it / kStages);
    if constexpr (kCluster) {
      if (adds) {
        wait_for_there(there, it);
      } else if (!of_keys) {  // Params::pairs_with_dq
        wait_for(sm.pairs_read[it % 2], it / 2);
      }
    }
    if (kSums == Sums::kLater || chunk.rows >= kChunk) {
      if (lead) {
        if (adds) fence_async_proxy_of_all();
        if constexpr (kSums == Sums::kLater) {
          bulk_store(ds_at(params, block, of_keys ? 0 : 1), shared_address(tile), sizeof tile);
        } else {
          for (int i = 0; i < 2; ++i) {
            const uint32_t from = shared_address(tile[i]);
            if (adds)
              tma_add(&to, from, 64 * i, chunk.row, chunk.h, chunk.batch);
            else
              tma_store(&to, from, 64 * i, chunk.row, chunk.h, chunk.batch);
          }
        }
        tma_store_commit();
        tma_store_wait_read();
      }
      __syncwarp();
    } else {  // TMA would write into the next sequence
      const int lines = lines_of<Kind>(p.K);
      uint4* const rows =
          sums + (int64_t{chunk.batch * int(p.T) + chunk.row} * p.H + chunk.h) * lines;
      if (adds)
        store_some_rows<true>(tile, rows, lines, p.H, chunk.rows, threadIdx.x % 32);
      else
        store_some_rows<false>(tile, rows, lines, p.H, chunk.rows, threadIdx.x % 32);
    }
    fetch();
    if constexpr (kCluster) {
      if (adds) {
        arrive_there_if(address_in(shared_address(&taken), 0), lead);
      } else {
        if (lead) tma_store_wait();
        wait_for(taken, it + 1);
        __syncwarp();
        publish_there_if(address_in(shared_address(&there), 1), lead);
      }
    }
  }
  if (lead) tma_store_wait();
}

// dx v of every token, or dv v. A lane has two rows: a column of lines in eight rows covers all
// banks.
template <class Kind>
GDN_DEVICE void values(WalkMemory& sm, const Params& params) {
  using T = typename Kind::T;
  const int lane = threadIdx.x % 32;
  ForwardWalk<Kind> walk(params);
  uint32_t it = 0;
#pragma unroll 1
  for (bool more = walk.begin(); more; more = walk.next(), ++it) {
    float* const sums =
        params.scratch.parts + (int64_t{walk.block()} * kParts + kValuePart) * kChunk;
    wait_for(sm.v_full, it);
    wait_for(sm.dx_full, it);
    float sum[2] = {};
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const uint32_t dx = shared_address(sm.dx[half]) + lane * 128,
                     v = shared_address(sm.v[half]) + lane * 128;
#pragma unroll 1
      for (int column = 0; column < 8; ++column) {
        const uint32_t at = (column ^ lane % 8) * 16;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t x[4], y[4];
          load_shared_16(dx + at + i * 4096, x);
          load_shared_16(v + at + i * 4096, y);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float2 a = unpack(T{}, x[j]), b = unpack(T{}, y[j]);
            sum[i] += a.x * b.x;
            sum[i] += a.y * b.y;
          }
        }
      }
    }
    sums[lane] = sum[0];
    sums[lane + 32] = sum[1];
    const bool one = lane == lane_after(__float_as_uint(sum[0] + sum[1]));
    arrive(sm.v_empty, one);
    arrive(sm.dx_empty, one);
  }
}

}  // namespace gdn::sm90::backward
