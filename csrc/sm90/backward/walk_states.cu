// The state alone, from a sequence's first chunk to the begin of its last segment: the states that
// the segments of the walk forward start from. A block has 64 channels of V.
#include <algorithm>

#include "sm90/backward/copies.cuh"
#include "sm90/backward/state_step.cuh"
#include "sm90/launch_blocks.h"

namespace gdn::sm90::backward {
namespace {
constexpr int kThreads = 256, kStages = 4, kTileParts = 2;  // halves of a slice
constexpr int kSinglesRegisters = 40, kStateRegisters = 232;
constexpr int kLaunchRegisters = launch_registers(kThreads, kStateRegisters);
static_assert(kSinglesRegisters + kStateRegisters <= 2 * kLaunchRegisters);

struct Memory {
  struct alignas(1024) Stage {
    uint8_t k[2][kTileBytes], v[1][kTileBytes], t[kTileBytes];
  } stages[kStages];
  ChunkFactors factors[kStages];
  uint64_t full[kStages], empty[kStages], aside;
};

// Sequences are in the order of the deal, if there is one: the longest first.
template <class Kind>
GDN_DEVICE BackTile<Kind> state_tile(const Params& params, int index) {
  if (const int* const order = params.scratch.order) {
    const int each = slices_of<Kind>(params) * kTileParts,
              i = divide_by_slices<Kind>(params, index / kTileParts);
    index += (order[i] - i) * each;
  }
  return back_tile<Kind, kTileParts>(params, index);
}

// The number of chunks before the last segment.
template <class Kind>
GDN_DEVICE int chunks_before(const Params& params, const BackTile<Kind>& tile) {
  const int segment = *params.scratch.segment;
  return last_segment(tile.chunks(), segment) * segment;
}

template <class Kind>
GDN_DEVICE void loader(Memory& sm, const Params& params) {
  const ChunkForward& p = params.problem.forward;
  uint32_t it = 0, aside_phase = 0;
#pragma unroll 1
  for (int index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const BackTile<Kind> tile = state_tile<Kind>(params, index);
    const int count = chunks_before(params, tile);  // of whole chunks
    int ready = 0;                                  // chunks from here on whose triangles are there
#pragma unroll 1
    for (int c = 0; c < count; ++c, ++it) {
      const uint32_t s = it % kStages;
      auto& stage = sm.stages[s];
      const int block = (tile.chunk_index + c) * p.HV + tile.hv(params),
                row = tile.first + c * kChunk;
      if (ready == 0)
        ready = wait_for_triangles(params, tile.chunk_index + c, 1, count - c, tile.h(params));
      --ready;
      wait_for(sm.empty[s], it / kStages + 1);
      load_rows<2>(params.k, stage.k, sm.full[s], sm.aside, aside_phase, 0, row, tile.h(params),
                   tile.batch, kChunk, sizeof(ChunkFactors) + 2 * kTileBytes, [&](uint32_t bar) {
                     bulk_load(shared_address(&sm.factors[s]), params.scratch.factors + block,
                               sizeof(ChunkFactors), bar);
                     bulk_load(shared_address(stage.t), t_at(params, block), kTileBytes, bar);
                     tma_load(shared_address(stage.v[0]), &params.v, bar,
                              tile.v(params) + 64 * tile.part, row, tile.hv(params), tile.batch);
                   });
    }
  }
}

template <class Kind>
GDN_DEVICE void state(Memory& sm, const Params& params, int warp) {
  using T = typename Kind::T;
  float S[64];
  uint32_t it = 0;
#pragma unroll 1
  for (int index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const BackTile<Kind> tile = state_tile<Kind>(params, index);
    const int count = chunks_before(params, tile);
    if (count == 0) continue;
    load_initial<Kind>(S, params, tile, tile.part, warp);
    int left = *params.scratch.segment;  // chunks, to where a segment begins
    float* to = state_of(starts_of<Kind>(params, tile.n),
                         segment_index<Kind>(params, tile.n, 0, tile.slice), tile.part, warp);
#pragma unroll 1
    for (int c = 0; c < count; ++c, ++it) {
      const uint32_t s = it % kStages;
      const int lane = fresh_lane();
      const auto& stage = sm.stages[s];
      const uint32_t k_tile = shared_address(stage.k);
      uint32_t u[16];
      const auto there = [&] { wait_for(sm.full[s], it / kStages); };
      there();
      make_u<T, 4>(
          S, u, sm.factors[s], k_tile, shared_address(stage.v[0]), shared_address(stage.t), warp,
          lane,
          // All data has arrived. The waits keep c v in its place: the compiler would otherwise
          // move it between or after the products.
          there, [](bool) {}, there, [] {}, [] {});
      update_state<T>(S, u, sm.factors[s], k_tile);
      wgmma_wait<0>();
      pin(S);
      __syncwarp();
      arrive(sm.empty[s], lane == 0);
      if (--left == 0) {
        left = *params.scratch.segment;
        to += int64_t{slices_of<Kind>(params)} * (kChannels * kChannels);
        store_matrix(S, to);
      }
    }
  }
}

template <class Kind>
__global__ void __launch_bounds__(kThreads, 1)
    walk_states_kernel(const __grid_constant__ Params params) {
  static_assert(sizeof(Memory) <= 232448, "shared memory of a block");
  extern __shared__ __align__(1024) uint8_t raw[];
  Memory& sm = *reinterpret_cast<Memory*>(raw);
  // This kernel overlaps with the walk back, and the next kernel waits for this one only: its last
  // block waits for both.
  const bool waits = blockIdx.x + 1 == gridDim.x;
  if (!waits && *params.scratch.segment == kWholeSequences) return;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&sm.full[i], kWarpArrivals);
      mbarrier_init(&sm.empty[i], 4 * kWarpArrivals);
    }
    mbarrier_init(&sm.aside, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  if (warp < 4) {
    set_registers<kSinglesRegisters, kLaunchRegisters>();
    if (warp == 0) loader<Kind>(sm, params);
    if (waits) wait_for_prerequisites();
  } else {
    set_registers<kStateRegisters, kLaunchRegisters>();
    state<Kind>(sm, params, warp % 4);
  }
}
}  // namespace

template <class Kind>
const char* run_walk_states(Params& params, cudaStream_t stream) {
  const ChunkForward& p = params.problem.forward;
  const int each = params.slices * kTileParts;
  params.tiles = p.N * each;
  int blocks = std::min(params.tiles, p.multiprocessors);
  if (params.scratch.order != nullptr) {
    // Each tile has a block: the first tiles begin first, as soon as the walk back frees a
    // multiprocessor. longer: an upper bound on sequences of more than one segment.
    const int64_t longer = p.T / (int64_t{params.segment} * kChunk + 1);
    params.tiles = blocks = int(std::min<int64_t>(p.N, std::max<int64_t>(longer, 1))) * each;
  }
  return launch_blocks(&walk_states_kernel<Kind>, params, blocks, kThreads, sizeof(Memory), 1, true,
                       stream);
}

template const char* run_walk_states<Kind<__nv_bfloat16, true>>(Params&, cudaStream_t);
template const char* run_walk_states<Kind<__nv_bfloat16, false>>(Params&, cudaStream_t);
template const char* run_walk_states<Kind<__half, false>>(Params&, cudaStream_t);

}  // namespace gdn::sm90::backward
