// Both walks of few long sequences in segments that run concurrently.
//
// A segment transforms the transposed gradient of the state [128 of V, 128 of K] by an affine map,
// dS <- dS M + b: b is the walk back through the segment from zeros, M the walk from the identity
// with do = 0. It transforms the state by an affine map too, with the transpose of M. This kernel
// walks, for every slice,
//     kBack      segments but the first: b, from dht in the last one
//     kMap       segments but the first and the last: M
//     kForward   segments but the last: b of the state, from h0 in the first one; not where the
//     forward has left the states
// segments/folds.cu folds them into the states and gradients that segments start from. All of them
// are in the frame of the sequence's chunks. A block has a tile, and each of its two warpgroups 64
// rows. kPart: of a part of a sequence (PartMaps), all segments have kBack, from zeros, and kMap;
// the forward has left the states.
#include "sm90/backward/copies.cuh"
#include "sm90/backward/segments/map_halves.cuh"
#include "sm90/backward/segments/windows.cuh"
#include "sm90/backward/state_step.cuh"
#include "sm90/launch_blocks.h"

namespace gdn::sm90::backward {
namespace {
constexpr int kThreads = 384, kStages = 3, kStates = 2;
constexpr int kSinglesRegisters = 40, kStateRegisters = 232;
constexpr int kLaunchRegisters = launch_registers(kThreads, kStateRegisters);
static_assert(kSinglesRegisters + kStates * kStateRegisters <= (1 + kStates) * kLaunchRegisters);

struct Memory {
  struct alignas(1024) Stage {
    uint8_t k[2][kTileBytes], q[2][kTileBytes], values[2][kTileBytes], t[kTileBytes],
        p[kTileBytes];  // values: of do or v
  } stages[kStages];
  ChunkFactors factors[kStages];
  uint64_t full[kStages], empty[kStages], aside;
};
constexpr int kArrivals = 3;  // arrivals of the loader at `full`: for k, q and do

enum class Job { kBack, kMap, kForward };
template <class Kind>
struct MapTile : SegmentTile<Kind> {
  Job job;
  bool forgets;  // the walk begins from zeros, windows.cuh
  int what;      // the value of SegmentMaps::forgotten if the segment forgets
  // Whether this tile writes SegmentMaps::forgotten of its segment.
  GDN_DEVICE bool says() const {
    return this->length > 0 && job != Job::kMap &&
           (job == Job::kBack) == (what == kForgetsGradient);
  }
};
template <bool kPart>
int tiles_of(const Params& params) {  // at most
  if (kPart) return params.segments * params.slices * 2;
  return (params.segments - params.problem.forward.N) * params.slices *
         (has_states(params) ? 2 : 3);
}

// Counts of jobs by kind: lane n has the number of a kind in sequences up to n. A whole warp calls
// it.
template <bool kPart>
struct Jobs {
  int later, maps;  // kBack, and as many kForward; kMap
  GDN_DEVICE explicit Jobs(const Params& params) {
    const ChunkForward& p = params.problem.forward;
    const int lane = threadIdx.x % 32;
    later = lane < p.N ? last_segment(chunks_of_sequence(p, lane), params.segment) : 0;
    if (kPart && lane < p.N) ++later;
    maps = kPart ? later : max(later - 1, 0);
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int x = __shfl_up_sync(~0u, later, d), y = __shfl_up_sync(~0u, maps, d);
      if (lane >= d) later += x, maps += y;
    }
  }
};
template <class Kind, bool kPart>
GDN_DEVICE MapTile<Kind> map_tile(const Params& params, const Jobs<kPart>& jobs, int index) {
  const int slices = slices_of<Kind>(params), all_later = __shfl_sync(~0u, jobs.later, 31);
  int number = divide_by_slices<Kind>(params, index);  // the tile's number without its slice
  const int slice = index - number * slices;
  // The longest jobs come first.
  Job job = Job::kBack;
  int up_to = jobs.later;
  if (number >= all_later) {
    number -= all_later;
    job = Job::kMap;
    up_to = jobs.maps;
    const int all_maps = __shfl_sync(~0u, jobs.maps, 31);
    if (number >= all_maps) {
      number -= all_maps;
      job = Job::kForward;
      up_to = has_states(params) ? 0 : jobs.later;
    }
  }
  const int n = __popc(__ballot_sync(~0u, up_to <= number)),
            before = __shfl_sync(~0u, up_to, max(n - 1, 0));
  MapTile<Kind> x = {};
  if (n == 32) return x;
  const int segment = number - (n > 0 ? before : 0) + (kPart || job == Job::kForward ? 0 : 1);
  static_cast<SegmentTile<Kind>&>(x) = segment_tile<Kind>(params, n, segment, slice);
  x.job = job;
  x.what = segment == x.last || has_states(params) ? kForgetsGradient : kForgetsState;
  // All jobs of a segment add its decays in the same order. Sums in two orders could differ by
  // their rounding about the limit, and a fold would then read a map that no job has made.
  const int window = window_of<Kind, kPart>(params, x, true);
  if (window == 0) return x;
  x.forgets = true;
  if (job == Job::kForward) {
    const int own = window_of<Kind>(params, x, false), left_out = own == 0 ? 0 : x.chunks() - own;
    x.first += left_out * kChunk;
    x.chunk_index += left_out;
    x.length -= left_out * kChunk;
  } else {
    x.length = job == Job::kBack ? min(x.length, window * kChunk) : 0;
  }
  return x;
}

template <class Kind, bool kPart>
GDN_DEVICE void loader(Memory& sm, const Params& params) {
  using T = typename Kind::T;
  const ChunkForward& p = params.problem.forward;
  const bool lead = threadIdx.x % 32 == 0;
  const Jobs<kPart> jobs(params);
  uint32_t it = 0, aside_phase = 0;
#pragma unroll 1
  for (int index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const MapTile<Kind> tile = map_tile<Kind, kPart>(params, jobs, index);
    const int count = tile.chunks();
#pragma unroll 1
    for (int i = 0; i < count; ++i, ++it) {
      const int c = tile.job == Job::kForward ? i : count - 1 - i;
      const uint32_t s = it % kStages;
      auto& stage = sm.stages[s];
      const int chunk_index = tile.chunk_index + c, row = tile.first + c * kChunk,
                rows = tile.length - c * kChunk;
      const int of_head = chunk_index * p.HV + tile.hv(params);
      wait_for(sm.empty[s], it / kStages + 1);
      const auto load_factors = [&](uint32_t bar) {
        bulk_load(shared_address(&sm.factors[s]), params.scratch.factors + of_head,
                  sizeof(ChunkFactors), bar);
        bulk_load(shared_address(stage.t), t_at(params, of_head), kTileBytes, bar);
      };
      const auto load = [&](const CUtensorMap& map, uint8_t (*to)[kTileBytes], int head, int bytes,
                            const auto& also) {
        load_rows<2>(map, to, sm.full[s], sm.aside, aside_phase, 0, row, head, tile.batch, rows,
                     bytes, also);
      };
      constexpr int kBytes = sizeof(ChunkFactors) + kTileBytes;
      if (tile.job == Job::kBack) {
        const bool steep = params.scratch.last[of_head] < -Frame<T>::kRange;
        load(params.k, stage.k, tile.h(params), kBytes + kTileBytes, [&](uint32_t bar) {
          load_factors(bar);
          if (steep) {
            bulk_load(shared_address(stage.p),
                      ds_at(params, chunk_index * slices_of<Kind>(params) + tile.slice, 0),
                      kTileBytes, bar);
          } else {
            tma_load(
                shared_address(stage.p),
                pairs_at<Kind>(params, chunk_index, tile.h(params), tile.n, tile.batch, row, rows),
                bar);
          }
        });
        load(params.q, stage.q, tile.h(params), 0, Nothing{});
        load(params.dO, stage.values, tile.hv(params), 0, Nothing{});
      } else {  // all chunks are whole, since a segment follows
        load(params.k, stage.k, tile.h(params), kBytes, load_factors);
        if (tile.job == Job::kForward) {
          load(params.v, stage.values, tile.hv(params), 0, Nothing{});
        } else {
          arrive(sm.full[s], lead);
        }
        arrive(sm.full[s], lead);
      }
    }
  }
}

// A step of dS through a chunk, walk_back.cu; kReads: with do.
template <bool kReads, class T>
GDN_DEVICE void step_back(float (&S)[64], const Memory::Stage& stage, const ChunkFactors& factors,
                          int warpgroup, int warp) {
  const int lane = fresh_lane();
  float x[32];
  uint32_t y[16], u[16];
  if constexpr (kReads)
    read_do<T>(y, shared_address(stage.values[warpgroup]), transposed_line(warp, lane), factors,
               lane);
  {
    uint32_t rounded[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) rounded[i] = pack(T{}, S[2 * i], S[2 * i + 1]);
    pin(rounded);
    const Descriptor k_rows = k_major(shared_address(stage.k)),
                     p_columns = mn_major(shared_address(stage.p));
    wgmma_fence();
    if constexpr (kReads) {
      set_rs_n64_mn(T{}, x, y, p_columns.at(0));
#pragma unroll
      for (int i = 1; i < 4; ++i) wgmma_rs_n64_mn(T{}, x, y + 4 * i, p_columns.at(i * 2048), 1);
      wgmma_rs_n64(T{}, x, rounded, k_rows.at(0), 1);
    } else {
      set_rs_n64(T{}, x, rounded, k_rows.at(0));
    }
#pragma unroll
    for (int i = 1; i < 8; ++i)
      wgmma_rs_n64(T{}, x, rounded + 4 * i, k_rows.at(i / 4 * kTileBytes + i % 4 * 32), 1);
    wgmma_commit();
    wgmma_wait<0>();
  }
  pin(x);
#pragma unroll
  for (int i = 0; i < 16; ++i) u[i] = pack(T{}, x[2 * i], x[2 * i + 1]);
  const Descriptor t_columns = mn_major(shared_address(stage.t));
  pin(x);
  pin(u);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i) wgmma_rs_n64_mn(T{}, x, u + 4 * i, t_columns.at(i * 2048), 1);
  wgmma_commit();
  // The product with T_s runs meanwhile, and hides the time of this.
  if (factors.post != 1.f) scale_state(S, factors.post);
  if constexpr (kReads) {
    if (factors.steep) decay_do<T>(y, factors, lane);
    pin(y);
    pin(S);
    wgmma_fence();
    const Descriptor q_columns = mn_major(shared_address(stage.q));
#pragma unroll
    for (int i = 0; i < 4; ++i) wgmma_rs_n128_mn(T{}, S, y + 4 * i, q_columns.at(i * 2048), 1);
    wgmma_commit();
  }
  float f[16];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 pair = *reinterpret_cast<const float2*>(&factors.x[j * 4 + lane % 4].z);
    f[2 * j] = pair.x, f[2 * j + 1] = pair.y;
  }
  pin(f);
  wgmma_wait<kReads ? 1 : 0>();
  pin(x);
#pragma unroll
  for (int at = 0; at < 32; at += 2)
    u[at / 2] = pack(T{}, -f[at / 4 * 2] * x[at], -f[at / 4 * 2 + 1] * x[at + 1]);
  const Descriptor k_columns = mn_major(shared_address(stage.k));
  pin(u);
  pin(S);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i) wgmma_rs_n128_mn(T{}, S, u + 4 * i, k_columns.at(i * 2048), 1);
  wgmma_commit();
  wgmma_wait<0>();
  pin(S);
  if (factors.pre != 1.f) scale_state(S, factors.pre);
}

template <class Kind, bool kPart>
GDN_DEVICE void walk(Memory& sm, const Params& params, int warpgroup, int warp) {
  using T = typename Kind::T;
  static_assert(!kDecaysToEnd<T>, "w = 1, walk_back.cu");
  const ChunkBackward& problem = params.problem;
  const Jobs<kPart> jobs(params);
  float S[64];
  uint32_t it = 0;
#pragma unroll 1
  for (int index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const MapTile<Kind> tile = map_tile<Kind, kPart>(params, jobs, index);
    const int count = tile.chunks();
    if (warpgroup == 0 && warp == 0 && fresh_lane() == 0 && tile.says())
      params.maps.forgotten[segment_index<Kind>(params, tile.n, tile.segment, tile.slice)] =
          tile.forgets ? tile.what : 0;
    if (count == 0) continue;
    const int row = warpgroup * 64 + state_row(warp, fresh_lane()),
              column = state_column(fresh_lane());
    const auto chunks = [&](const auto& step) {
#pragma unroll 1
      for (int c = 0; c < count; ++c, ++it) {
        const uint32_t s = it % kStages;
        wait_for(sm.full[s], it / kStages);
        step(s);
        __syncwarp();
        arrive(sm.empty[s], fresh_lane() == 0);
      }
    };
    const int64_t number = segment_index<Kind>(params, tile.n, tile.segment, tile.slice);
    const int64_t matrix = number * (kChannels * kChannels);
    const int64_t next = int64_t{slices_of<Kind>(params)} *
                         (kChannels * kChannels);  // elements from a segment to the next one
    float* to;
    if (tile.job == Job::kForward) {
      if (tile.segment == 0 && !tile.forgets) {
        load_initial<Kind>(S, params, tile, warpgroup, warp);
      } else {
        clear_state(S);
      }
      chunks([&](uint32_t s) {
        const auto& stage = sm.stages[s];
        const uint32_t k_tile = shared_address(stage.k);
        const auto there = [&] {
          wait_for(sm.full[s], it / kStages);
        };  // again, as in walk_states.cu
        uint32_t u[16];
        make_u<T, 4>(
            S, u, sm.factors[s], k_tile, shared_address(stage.values[warpgroup]),
            shared_address(stage.t), warp, fresh_lane(), there, [](bool) {}, there, [] {}, [] {});
        update_state<T>(S, u, sm.factors[s], k_tile);
        wgmma_wait<0>();
        pin(S);
      });
      to = starts_of<Kind>(params, tile.n) + matrix + next;
    } else if (tile.job == Job::kMap) {
#pragma unroll
      for (int j = 0; j < 16; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          S[4 * j + i] = row + i / 2 * 8 == column + j * 8 + i % 2 ? 1.f : 0.f;
      chunks([&](uint32_t s) {
        step_back<false, T>(S, sm.stages[s], sm.factors[s], warpgroup, warp);
      });
      store_map(S, params.maps.values + number * kMapValues, warpgroup * 64 + warp * 16,
                fresh_lane());
      continue;
    } else {
      if (kPart || tile.segment < tile.last || tile.forgets || problem.dht == nullptr) {
        clear_state(S);
      } else {
        wait_for(sm.full[it % kStages], it / kStages);
        load_state(S,
                   problem.dht + tile.n * problem.dht_n + tile.hv(params) * problem.dht_h +
                       row * problem.dht_v + column * problem.dht_k,
                   problem.dht_k, problem.dht_v, sm.factors[it % kStages].end, AllChannels{});
      }
      chunks(
          [&](uint32_t s) { step_back<true, T>(S, sm.stages[s], sm.factors[s], warpgroup, warp); });
      to = params.maps.ends + matrix - next;
    }
    store_matrix(S, to + row * kChannels + column);
  }
}

// Writes SegmentMaps::forgotten of sequences of one segment, which have no job. A warp calls it.
template <class Kind>
GDN_DEVICE void say_of_short_ones(const Params& params) {
  const ChunkForward& p = params.problem.forward;
  const int slices = slices_of<Kind>(params);
#pragma unroll 1
  for (int n = 0; n < p.N; ++n) {
    if (last_segment(chunks_of_sequence(p, n), params.segment) > 0) continue;
    for (int slice = threadIdx.x % 32; slice < slices; slice += 32)
      params.maps.forgotten[segment_index<Kind>(params, n, 0, slice)] = 0;
  }
}

template <class Kind, bool kPart>
__global__ void __launch_bounds__(kThreads, 1)
    segment_maps_kernel(const __grid_constant__ Params params) {
  static_assert(sizeof(Memory) <= 232448, "shared memory of a block");
  extern __shared__ __align__(1024) uint8_t raw[];
  Memory& sm = *reinterpret_cast<Memory*>(raw);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  launch_dependents();  // the folds, which wait for the end of this kernel
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&sm.full[i], kArrivals * kWarpArrivals);
      mbarrier_init(&sm.empty[i], 4 * kStates * kWarpArrivals);
    }
    mbarrier_init(&sm.aside, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  wait_for_prerequisites();
  if (warp < 4) {
    set_registers<kSinglesRegisters, kLaunchRegisters>();
    if (warp == 0) loader<Kind, kPart>(sm, params);
    if (!kPart && warp == 1 && blockIdx.x == 0) say_of_short_ones<Kind>(params);
  } else {
    set_registers<kStateRegisters, kLaunchRegisters>();
    walk<Kind, kPart>(sm, params, warp / 4 - 1, warp % 4);
  }
}
}  // namespace

template <class Kind, bool kPart>
const char* run_segment_maps(Params& params, cudaStream_t stream) {
  const ChunkForward& p = params.problem.forward;
  params.tiles = tiles_of<kPart>(params);
  const unsigned blocks =
      unsigned(params.tiles < p.multiprocessors ? params.tiles : p.multiprocessors);
  return launch_blocks(&segment_maps_kernel<Kind, kPart>, params, blocks, kThreads, sizeof(Memory),
                       1, true, stream);
}

template const char* run_segment_maps<Kind<__nv_bfloat16, true>, false>(Params&, cudaStream_t);
template const char* run_segment_maps<Kind<__nv_bfloat16, true>, true>(Params&, cudaStream_t);

}  // namespace gdn::sm90::backward
