// Shared memory and barriers of the walk back; the warps that load and store; and the warpgroup
// that makes triangles.
#pragma once
#include <type_traits>

#include "sm90/backward/chunk_triangles.cuh"
#include "sm90/backward/copies.cuh"
#include "sm90/backward/deal.cuh"

namespace gdn::sm90::backward {

// kCut: the walk back over segments, each from a result of segments/folds.cu, with triangles that
// were made before segments/maps.cu.
template <class Kind_, int kStates_, bool kCut_ = false>
struct Back {
  using Kind = Kind_;
  using T = typename Kind::T;
  static constexpr int kStates = kStates_;
  static constexpr bool kCut = kCut_;
  static constexpr bool kInverses = kStates == 2 && !kCut;
  static constexpr int kThreads = 128 * (1 + kStates + kInverses);
  static constexpr int kStages = kStates == 2 ? 2 : 3;
  static constexpr int kTileParts = 2 / kStates;
  // Whether a chunk begins while the previous one ends: it pays where few blocks wait for their own
  // chain of products. Elsewhere memory is the bound, and a stage is released first.
  static constexpr bool kBeginsAhead = kStates == 1 && !kDecaysToEnd<T>;
  static constexpr int kSinglesRegisters = kInverses ? 32 : 40,
                       kStateRegisters = kInverses ? 176 : 232;
  static constexpr int kInverseRegisters = 128,
                       kLaunchRegisters = launch_registers(kThreads, kStateRegisters);
  static_assert(kSinglesRegisters + kStates * kStateRegisters + kInverses * kInverseRegisters <=
                kThreads / 128 * kLaunchRegisters);
};

template <class C>
GDN_DEVICE auto walk_back_tile(const Params& params, int index) {
  using Kind = typename C::Kind;
  if constexpr (C::kCut) {
    static_assert(C::kTileParts == 1, "whole slices");
    return cut_tile<Kind>(params, index);
  } else {
    return back_tile<Kind, C::kTileParts>(params, index);
  }
}

template <class C>
struct InverseMemory {
  InverseScratch scratch;
  uint8_t qk[kTileBytes];  // q k^T of a steep chunk for the store; the stage has the decayed one
  GateVectors vectors;
  uint64_t full[C::kStages];  // T and P
};
struct NoInverses {};
// The number of tiles of a chunk that are stored together: dv, and without kReadsDv dx.
template <class T>
constexpr int kOuts = kReadsDv<T> ? 1 : 2;

template <class C>
struct BackMemory {
  struct alignas(1024) Stage {
    uint8_t k[2][kTileBytes], q[2][kTileBytes], dO[C::kStates][kTileBytes], t[kTileBytes],
        p[kTileBytes];
  } stages[C::kStages];
  uint8_t dv[C::kStates][kOuts<typename C::T>][kTileBytes], ds[C::kStates][2][kTileBytes];
  std::conditional_t<C::kInverses, InverseMemory<C>, NoInverses> inverses;
  ChunkFactors factors[C::kStages];
  uint64_t full[C::kStages], empty[C::kStages], aside;
  uint64_t ds_full[C::kStates], ds_empty[C::kStates];
  uint64_t dv_full[C::kStates], dv_empty[C::kStates];
};

template <class C>
GDN_DEVICE void load_behind(BackMemory<C>& sm, const Params& params) {
  const ChunkForward& p = params.problem.forward;
  using Kind = typename C::Kind;
  const bool makes_triangles = C::kInverses && makes_triangles_walking(params);
  // Only a walk of few blocks prefetches: with a block on each multiprocessor prefetches make the
  // walk 5 percent slower.
  const bool prefetches = C::kStates == 1 && 2 * params.tiles <= p.multiprocessors;
  constexpr int kAhead = 2;  // chunks
  uint32_t it = 0, aside_phase = 0;
#pragma unroll 1
  for (int index = first_tile(params); index >= 0; index = next_tile(params, index)) {
    const auto tile = walk_back_tile<C>(params, index);
    int ready = 0;  // chunks from here on whose triangles are there
#pragma unroll 1
    for (int c = tile.chunks() - 1; c >= 0; --c, ++it) {
      const uint32_t s = it % C::kStages;
      auto& stage = sm.stages[s];
      const int chunk_index = tile.chunk_index + c, row = tile.first + c * kChunk,
                rows = tile.length - c * kChunk;
      const int of_head = chunk_index * p.HV + tile.hv(params),
                block = chunk_index * slices_of<Kind>(params) + tile.slice;
      const bool steep = params.scratch.last[of_head] < -Frame<typename C::T>::kRange;
      if constexpr (C::kStates == 1) {
        if (ready == 0) ready = wait_for_triangles(params, chunk_index, -1, c + 1, tile.h(params));
        --ready;
      }
      if (prefetches && c >= kAhead && threadIdx.x % 32 == 0) {
        const int before = row - kAhead * kChunk;
        for (int i = 0; i < 2; ++i) {
          tma_prefetch(&params.k, 64 * i, before, tile.h(params), tile.batch);
          tma_prefetch(&params.q, 64 * i, before, tile.h(params), tile.batch);
        }
        tma_prefetch(&params.dO, tile.v(params) + 64 * tile.part, before, tile.hv(params),
                     tile.batch);
      }
      wait_for(sm.empty[s], it / C::kStages + 1);
      // The other copies of the stage are issued together with those of k. The copies of q and do
      // follow, since each of the three may have rows to set to zero.
      const auto rest = [&](uint32_t bar) {
        bulk_load(shared_address(&sm.factors[s]), params.scratch.factors + of_head,
                  sizeof(ChunkFactors), bar);
        if (makes_triangles) return;
        bulk_load(shared_address(stage.t), t_at(params, of_head), kTileBytes, bar);
        if (steep) {
          bulk_load(shared_address(stage.p), ds_at(params, block, tile.part), kTileBytes, bar);
        } else {
          tma_load(
              shared_address(stage.p),
              pairs_at<Kind>(params, chunk_index, tile.h(params), tile.n, tile.batch, row, rows),
              bar);
        }
      };
      const int rest_bytes = sizeof(ChunkFactors) + (makes_triangles ? 0 : 2 * kTileBytes);
      load_rows<2>(params.k, stage.k, sm.full[s], sm.aside, aside_phase, 0, row, tile.h(params),
                   tile.batch, rows, rest_bytes, rest);
      load_rows<2>(params.q, stage.q, sm.full[s], sm.aside, aside_phase, 0, row, tile.h(params),
                   tile.batch, rows, 0, Nothing{});
      load_rows<C::kStates>(params.dO, stage.dO, sm.full[s], sm.aside, aside_phase,
                            tile.v(params) + 64 * tile.part, row, tile.hv(params), tile.batch, rows,
                            0, Nothing{});
    }
  }
}

// Makes T and P of every chunk in its stage. The first slice of a value head stores T, and the
// first slice of a key head q k^T, to scratch memory.
template <class C>
GDN_DEVICE void make_triangles(BackMemory<C>& sm, const Params& params, int warp) {
  using T = typename C::T;
  using Kind = typename C::Kind;
  constexpr int kBarrier = 1;
  const ChunkForward& p = params.problem.forward;
  const int group = p.HV / p.H, thread = threadIdx.x % 128;
  // Blocks above a diagonal are read, and never written.
  for (auto& stage : sm.stages) clear_tiles(stage.t, 2, thread);
  clear_tiles(sm.inverses.scratch.inverse, 2, thread);
  uint32_t it = 0;
#pragma unroll 1
  for (int index = first_tile(params); index >= 0; index = next_tile(params, index)) {
    const auto tile = walk_back_tile<C>(params, index);
    const bool first_of_head = tile.v(params) == 0,
               first = tile.hv(params) == tile.h(params) * group && first_of_head;
#pragma unroll 1
    for (int c = tile.chunks() - 1; c >= 0; --c, ++it) {
      const uint32_t s = it % C::kStages;
      auto& stage = sm.stages[s];
      const int lane = fresh_lane(), chunk_index = tile.chunk_index + c;
      const Triangles<Alone<T>> own(kBarrier, lane, warp, sm.inverses.scratch.a,
                                    sm.inverses.scratch.inverse);
      wait_for(sm.full[s], it / C::kStages);
      const bool steep = sm.factors[s].steep;
      const uint8_t* const pairs = steep && first ? sm.inverses.qk : stage.p;
      {
        float qk[32] = {}, kk[32] = {};
        const uint32_t k = shared_address(stage.k);
        own.issue_product(qk, shared_address(stage.q), k);
        own.issue_product(kk, k, k);
        copy_factors(sm.inverses.vectors, sm.factors[s], thread);
        if (thread == 0) {
          sm.inverses.vectors.steep = steep;
          tma_store_wait_read();  // of the previous chunk; the stores from this stage were issued
                                  // earlier
        }
        wgmma_wait<0>();
        pin(qk);
        pin(kk);
        named_barrier(kBarrier, 128);
        own.store_a(kk, sm.inverses.vectors);
        store_lower(own, qk, pairs);
      }
      if (steep) decay_pairs(own, sm.inverses.vectors, pairs, stage.p);
      own.invert(shared_address(stage.t));
      fence_async_proxy();
      __syncwarp();
      arrive(sm.inverses.full[s], lane == 0);
      named_barrier(kBarrier, 128);
      if (thread == 0) {
        if (first_of_head)
          bulk_store(t_at(params, chunk_index * p.HV + tile.hv(params)), shared_address(stage.t),
                     kTileBytes);
        if (first)
          tma_store(pairs_at<Kind>(params, chunk_index, tile.h(params), tile.n, tile.batch,
                                   tile.first + c * kChunk, tile.length - c * kChunk),
                    shared_address(pairs));
        tma_store_commit();
      }
    }
  }
  if (thread == 0) tma_store_wait();
}

template <class C>
GDN_DEVICE void store_behind(BackMemory<C>& sm, const Params& params, int warpgroup) {
  using Kind = typename C::Kind;
  const ChunkForward& p = params.problem.forward;
  const bool lead = threadIdx.x % 32 == 0;
  uint32_t it = 0;
#pragma unroll 1
  for (int index = first_tile(params); index >= 0; index = next_tile(params, index)) {
    const auto tile = walk_back_tile<C>(params, index);
    const int part = (C::kStates == 2 ? warpgroup : tile.part) * 64;
    const int v = tile.v(params) + part, V = Kind::kExact ? kChannels : p.V;
#pragma unroll 1
    for (int c = tile.chunks() - 1; c >= 0; --c, ++it) {
      const int block = (tile.chunk_index + c) * slices_of<Kind>(params) + tile.slice;
      wait_for(sm.ds_full[warpgroup], it);
      if (lead) {
        bulk_store(ds_at(params, block, part / 64), shared_address(sm.ds[warpgroup]),
                   sizeof(sm.ds[warpgroup]));
        tma_store_commit();
        tma_store_wait_read();
      }
      arrive(sm.ds_empty[warpgroup], lead);
      wait_for(sm.dv_full[warpgroup], it);
      const int row = tile.first + c * kChunk, rows = tile.length - c * kChunk;
      if (lead) {
        if constexpr (!kReadsDv<typename C::T>)
          tma_store(&params.dx, shared_address(sm.dv[warpgroup][1]), part, 0, 0, block);
        if (rows >= kChunk && v < V)
          tma_store(&params.dv, shared_address(sm.dv[warpgroup][0]), v, row, tile.hv(params),
                    tile.batch);
        tma_store_commit();
        tma_store_wait_read();
      }
      if (rows < kChunk) {  // TMA would write into the next sequence
#pragma unroll 1
        for (int i = threadIdx.x % 32; i < rows * 8; i += 32) {
          if (v + i % 8 * 8 >= V) continue;
          const int64_t at =
              ((tile.batch * p.T + row + i / 8) * p.HV + tile.hv(params)) * V + v + i % 8 * 8;
          *reinterpret_cast<uint4*>(static_cast<uint16_t*>(params.problem.dv) + at) =
              *reinterpret_cast<const uint4*>(sm.dv[warpgroup][0] + i / 8 * 128 +
                                              ((i % 8 ^ i / 8 % 8) * 16));
        }
      }
      __syncwarp();
      arrive(sm.dv_empty[warpgroup], lead);
    }
  }
  if (lead) tma_store_wait();
}

}  // namespace gdn::sm90::backward
