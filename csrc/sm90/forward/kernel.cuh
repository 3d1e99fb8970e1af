// The kernels of the chunked forward: barriers, and which warps have which roles.
#pragma once
#include <type_traits>

#include "sm90/forward/gates.cuh"
#include "sm90/forward/inverses.cuh"
#include "sm90/forward/loader.cuh"
#include "sm90/forward/segments/windows.cuh"
#include "sm90/forward/state.cuh"
#include "sm90/forward/store.cuh"

namespace gdn::sm90 {

template <class C>
GDN_DEVICE void init_barriers(SharedMemory<C>& sm) {
  // Arrivals. One inverse warpgroup makes T of a chunk.
  constexpr int kStateWarps = 4 * C::kStates * kWarpArrivals, kInverseWarps = 4 * kWarpArrivals;
  const auto init = [](auto& full, int writers, auto& empty, int readers) {
    for (auto& bar : full) mbarrier_init(&bar, writers);
    for (auto& bar : empty) mbarrier_init(&bar, readers);
  };
  init(sm.k_full, 1, sm.k_empty, kStateWarps + kInverseWarps);
  init(sm.q_full, 1, sm.q_empty, kStateWarps + (C::kInversesMakeP ? kInverseWarps : 0));
  init(sm.v_full, 1, sm.v_empty, kStateWarps);
  init(sm.t_full, kInverseWarps, sm.t_empty, kStateWarps);
  init(sm.p_full, kInverseWarps, sm.p_empty, kStateWarps);
  init(sm.gates_full, 32, sm.gates_empty, kStateWarps + kInverseWarps);
  init(sm.o_full, 4 * kWarpArrivals, sm.o_empty, kWarpArrivals);
  // The gates warp, the warps that store o, and a single thread that loads v.
  constexpr int kOtherReaders = (1 + C::kStates) * kWarpArrivals + C::kValuesApart;
  init(sm.tile_full, 1, sm.tile_empty, kStateWarps + C::kInverses * kInverseWarps + kOtherReaders);
  mbarrier_init_fence();
}

template <class C>
GDN_DEVICE void run_block(const KernelParams& params) {
  static_assert(sizeof(SharedMemory<C>) <= (C::kPass == Pass::kWhole ? kLengthsAt : kSharedBytes));
  SharedMemory<C>& sm = *reinterpret_cast<SharedMemory<C>*>(raw_shared_memory);
  const int warp = __shfl_sync(~0u, thread_of<C>() / 32, 0), warpgroup = warp / 4;

  if (thread_of<C>() == 0) init_barriers(sm);
  // The blocks above the diagonal are read, and never written.
  const auto clear = [](auto& tiles) {
    for (uint32_t i = thread_of<C>(); i < sizeof(tiles) / 16; i += C::kThreads)
      reinterpret_cast<uint4*>(tiles)[i] = make_uint4(0, 0, 0, 0);
  };
  clear(sm.inverse);
  clear(sm.t);
  clear(sm.p);
  if constexpr (C::kOneTile) {
    if (thread_of<C>() == 0) {
      if (params.segments.leads) wait_for_prerequisites();  // for choose_cut
      // The maps and the walk of the first segments overlap: the kernel that is launched second may
      // begin once all blocks of the other have begun, with the cut chosen. The walk that repeats
      // sequences overlaps with the last of the later segments.
      const SegmentBuffers& segments = params.segments;
      if (segments.group == SegmentGroup::kFirst ||
          (segments.group == SegmentGroup::kLater && segments.windows != nullptr))
        launch_dependents();
      sm.tiles[0].exists = false;
      if (int(blockIdx.x) < params.tiles) sm.tiles[0] = tile_at<C>(params, blockIdx.x);
    }
  }
  fence_async_proxy();
  __syncthreads();
  if constexpr (C::kOneTile) {
    // No kernel may end before the kernel that it overlaps with, even where none of its tiles
    // exists: the next kernel waits for this kernel only. Loaders of segments wait at their end. In
    // the pass of the maps, and where there is no tile, only the last block waits: a waiting block
    // occupies a multiprocessor, and no later block needs that one.
    if ((C::kPass == Pass::kMaps || !sm.tiles[0].exists) && blockIdx.x == gridDim.x - 1 &&
        thread_of<C>() == 0)
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
        // This kernel may not end before the one that it overlaps with: the next kernel waits for
        // this one only.
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
    if (C::kPass == Pass::kWhole || (C::kOutput && params.segments.group == SegmentGroup::kFirst))
      zero_orphans<C>(params);
  } else if (warpgroup <= C::kStates) {
    set_registers<C::kStateRegisters, C::kLaunchRegisters>();
    state_role(sm, params, warpgroup - 1, warp % 4);
  } else {
    if constexpr (C::kLowersInverses) set_registers<C::kInverseRegisters, C::kLaunchRegisters>();
    inverse_role(sm, params, warpgroup - 1 - C::kStates, warp % 4);
  }
}

// A tile a block.
template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    chunk_forward_kernel(const __grid_constant__ KernelParams params) {
  run_block<C>(params);
}

// Whole sequences, in blocks of either shape: all blocks of a call have one shape.
template <class Both, class Halves>
__global__ void __launch_bounds__(Halves::kThreads, 1)
    whole_sequences_kernel(const __grid_constant__ KernelParams params) {
  static_assert(Both::kThreads == Halves::kThreads);
  bool halves = params.shape == BlockShape::kHalves;
  if (params.dealing.ordered) {
    find_order(params.problem, params.dealing, Halves::kThreads);
    // The address of this load is the same in all threads. After a branch that the compiler takes
    // for divergent there are no uniform registers, and the state's registers would spill.
    if (params.shape == BlockShape::kByLengths) halves = lengths_of_call().halves != 0;
  }
  if constexpr (!std::is_same_v<Both, Halves>) {
    if (!halves) return run_block<Both>(params);
  }
  run_block<Halves>(params);
}

}  // namespace gdn::sm90
