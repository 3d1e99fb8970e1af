// The kernel of the chunked forward: single warps that load, store and make gates, and the roles of
// the warpgroups.
#pragma once
#include <type_traits>

#include "sm90/forward/gates.cuh"
#include "sm90/forward/segments/forgetting.cuh"
#include "sm90/forward/state.cuh"
#include "sm90/plan/tile_order.cuh"
#include "sm90/tile/triangles.cuh"

namespace gdn::sm90 {

// k and q, v, or all of a chunk, by one thread. v has fewer stages: a thread that waits for one of
// them cannot fetch what the makers need next.
template <class C, bool kKeysQueries, bool kValues>
GDN_DEVICE void loader_role(SharedMemory<C>& sm, const KernelParams& params) {
  Walk<C, kKeysQueries ? Reader::kLoader : Reader::kLane> walk(sm, params);
  Ring<C::kKStages> k;
  Ring<C::kQStages> q;
  Ring<C::kVStages> v;
  const auto load_rows = [&](const CUtensorMap& map, auto& to, uint64_t& full, int column,
                             int head) {
    const uint32_t bar = shared_address(&full);
    mbarrier_expect(bar, sizeof(to));
    for (uint32_t i = 0; i < sizeof(to) / kTileBytes; ++i)
      tma_load(shared_address(to[i]), &map, bar, column + 64 * i, walk.tile().first + walk.row, head,
               walk.tile().batch);
  };
  for (bool more = walk.begin(); more; more = walk.next()) {
    const int hv = walk.tile().hv, h = params.group.divide(hv);
    if constexpr (kKeysQueries) {
      wait(sm, sm.k_empty[k.stage], k.phase ^ 1, kLoadK);
      load_rows(params.k, sm.k[k.stage], sm.k_full[k.stage], 0, h);
      k.advance();
    }
    if constexpr (kValues) {
      wait(sm, sm.v_empty[v.stage], v.phase ^ 1, kLoadV);
      load_rows(params.v, sm.v[v.stage], sm.v_full[v.stage],
                64 * C::kStates * walk.tile().part, hv);
      v.advance();
    }
    if constexpr (kKeysQueries && C::kOutput) {
      wait(sm, sm.q_empty[q.stage], q.phase ^ 1, kLoadQ);
      load_rows(params.q, sm.q[q.stage], sm.q_full[q.stage], 0, h);
      q.advance();
    }
  }
}

// Rows of a sequence's last chunk, from a tile: a TMA store would write into the next sequence.
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
      to = o_line(params.pool, walk.tile().batch, walk.tile().first + walk.row + row, walk.tile().hv,
                  first_column + column * 8);
    *to = *reinterpret_cast<const uint4*>(tile + row * 128 + ((column ^ (row % 8)) * 16));
  }
}

template <class C>
GDN_DEVICE void store_role(SharedMemory<C>& sm, const KernelParams& params, int slot) {
  Walk<C> walk(sm, params);
  const bool lead = thread_of<C>() % 32 == 0;
  uint32_t phase = 0;
  for (bool more = walk.begin(); more; more = walk.next()) {
    const int first_column = first_value_channel<C>(walk.tile(), slot);
    mbarrier_wait(shared_address(&sm.o_full[slot]), phase);
    if (walk.rows() == kChunk) {
      if (lead) {
        tma_store(&params.o, shared_address(sm.o[slot]), first_column,
                  walk.tile().first + walk.row, walk.tile().hv, walk.tile().batch);
        tma_store_commit();
        tma_store_wait_read();
      }
    } else {
      store_tail(params, walk, sm.o[slot], first_column);
    }
    __syncwarp();
    arrive(sm.o_empty[slot], lead);
    phase ^= 1;
  }
  if (lead) tma_store_wait();
}

// o of packed tokens that no sequence has, by the threads of the single warps.
template <class C>
GDN_DEVICE void zero_orphans(const KernelParams& params) {
  const ChunkForward& p = params.problem;
  if (p.cu_seqlens == nullptr) return;
  // Of C::kOneTile not gridDim.x: launch() rounds the grid up to pairs, and the last block, which has no
  // tile, takes no share.
  const int blocks = C::kOneTile ? params.tiles : gridDim.x;
  if constexpr (C::kPool) {  // rows may lie apart: one a warp
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

template <class C>
GDN_DEVICE void init_barriers(SharedMemory<C>& sm) {
  // Arrivals; a chunk has one maker.
  constexpr int kStateWarps = 4 * C::kStates * kWarpArrivals, kMakerWarps = 4 * kWarpArrivals;
  const auto init = [](auto& full, int writers, auto& empty, int readers) {
    for (auto& bar : full) mbarrier_init(&bar, writers);
    for (auto& bar : empty) mbarrier_init(&bar, readers);
  };
  init(sm.k_full, 1, sm.k_empty, kStateWarps + kMakerWarps);
  init(sm.q_full, 1, sm.q_empty, kStateWarps + (C::kMakersMakeP ? kMakerWarps : 0));
  init(sm.v_full, 1, sm.v_empty, kStateWarps);
  init(sm.t_full, kMakerWarps, sm.t_empty, kStateWarps);
  init(sm.p_full, kMakerWarps, sm.p_empty, kStateWarps);
  init(sm.gates_full, 32, sm.gates_empty, kStateWarps + kMakerWarps);
  init(sm.o_full, 4 * kWarpArrivals, sm.o_empty, kWarpArrivals);
  // The gates' warp and those that store o; a single thread that loads v.
  constexpr int kOtherReaders = (1 + C::kStates) * kWarpArrivals + C::kValuesApart;
  init(sm.tile_full, 1, sm.tile_empty, kStateWarps + C::kMakers * kMakerWarps + kOtherReaders);
  mbarrier_init_fence();
}

#ifdef GDN_PROFILE
__device__ uint32_t profile_out[132][40];
#endif

template <class C>
GDN_DEVICE void run_block(const KernelParams& params) {
  static_assert(sizeof(SharedMemory<C>) <= (C::kPass == Pass::kWhole ? kLengthsAt : kSharedBytes));
  SharedMemory<C>& sm = *reinterpret_cast<SharedMemory<C>*>(raw_shared_memory);
  const int warp = __shfl_sync(~0u, thread_of<C>() / 32, 0), warpgroup = warp / 4;

  if (thread_of<C>() == 0) init_barriers(sm);
  // Blocks above the diagonal are read and never written.
  const auto clear = [](auto& tiles) {
    for (uint32_t i = thread_of<C>(); i < sizeof(tiles) / 16; i += C::kThreads)
      reinterpret_cast<uint4*>(tiles)[i] = make_uint4(0, 0, 0, 0);
  };
  clear(sm.inverse);
  clear(sm.t);
  clear(sm.p);
#ifdef GDN_PROFILE
  if (thread_of<C>() < 40) sm.profile[thread_of<C>()] = 0;
#endif
  if constexpr (C::kOneTile) {
    if (thread_of<C>() == 0) {
      if (params.segments.leads) wait_for_prerequisites();  // for the choice of a cut
      // Of the maps and the walk of the first segments, what is launched second may begin when all of the other
      // has, and with the choice made; and what walks again beside the last of the later segments.
      const Segments& segments = params.segments;
      if (segments.part == Part::kFirst || (segments.part == Part::kLater && segments.windows != nullptr))
        launch_dependents();
      sm.tiles[0].exists = false;
      if (int(blockIdx.x) < params.tiles) sm.tiles[0] = tile_at<C>(params, blockIdx.x);
    }
  }
  fence_async_proxy();
  __syncthreads();
  if constexpr (C::kOneTile) {
    // No kernel may end before the kernel that it runs beside, even when none of its tiles exists: what comes
    // next waits for this kernel only. Loaders of segments wait when they are done. Of maps, and where there is
    // no tile, the last block alone waits: a waiting block occupies a multiprocessor, and no later block needs
    // this one.
    if ((C::kPass == Pass::kMaps || !sm.tiles[0].exists) && blockIdx.x == gridDim.x - 1 && thread_of<C>() == 0)
      wait_for_prerequisites();
    if (!sm.tiles[0].exists) return;
    if constexpr (C::kPass == Pass::kMaps) {
      if (params.segments.windows != nullptr) {
        shorten_to_window(sm, params);
        if (!sm.tiles[0].exists) return;
      }
    }
  }

  if (warpgroup == 0) {
    set_registers<C::kSinglesRegisters, C::kLaunchRegisters>();
    if (warp == kLoader) {
      if (thread_of<C>() == 0) {
        loader_role<C, true, !C::kValuesApart>(sm, params);
        // It may not end before what it was launched beside: what comes next waits for this kernel only.
        if (C::kPass == Pass::kSegments || (C::kPass == Pass::kWhole && params.dealing.taken))
          wait_for_prerequisites();
      }
    } else if (C::kValuesApart && warp == kStore1) {
      if (thread_of<C>() % 32 == 0) loader_role<C, false, true>(sm, params);
    } else if (warp == kGates) {
      gates_role(sm, params);
    } else if (C::kOutput && warp - kStore0 < C::kStates) {
      store_role(sm, params, warp - kStore0);
    }
    if (C::kPass == Pass::kWhole || (C::kOutput && params.segments.part == Part::kFirst))
      zero_orphans<C>(params);
  } else if (warpgroup <= C::kStates) {
    set_registers<C::kStateRegisters, C::kLaunchRegisters>();
    state_role(sm, params, warpgroup - 1, warp % 4);
  } else {
    if constexpr (C::kLowersMakers) set_registers<C::kMakerRegisters, C::kLaunchRegisters>();
    triangles_role(sm, params, warpgroup - 1 - C::kStates, warp % 4);
  }
#ifdef GDN_PROFILE
  __syncthreads();
  if (thread_of<C>() < 40 && blockIdx.x < 132)
    profile_out[blockIdx.x][thread_of<C>()] = sm.profile[thread_of<C>()];
#endif
}

// A tile a block.
template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    chunk_forward_kernel(const __grid_constant__ KernelParams params) {
  run_block<C>(params);
}

// Whole sequences, in blocks of either shape: a call has one of them.
template <class Both, class Halves>
__global__ void __launch_bounds__(Halves::kThreads, 1)
    whole_sequences_kernel(const __grid_constant__ KernelParams params) {
  static_assert(Both::kThreads == Halves::kThreads);
  bool halves = params.shape == Shape::kHalves;
  if (params.dealing.ordered) {
    find_order(params, Halves::kThreads);
    // A load whose address is the same in all threads: behind a branch that the compiler thinks threads may
    // take apart it has no uniform registers, and the state's registers spill.
    if (params.shape == Shape::kByLengths) halves = lengths_of_call().halves != 0;
  }
  if constexpr (!std::is_same_v<Both, Halves>) {
    if (!halves) return run_block<Both>(params);
  }
  run_block<Halves>(params);
}

}  // namespace gdn::sm90
