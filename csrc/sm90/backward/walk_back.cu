// From a sequence's last chunk to its first: the gradient of the state, 64 channels of V a
// warpgroup, in registers. A block has a slice, or half of one.
//
// Transposed as in state.cuh. With do' = scale 2^e do, and P and T_s decayed where the chunk is
// steep,
//     du = P^T do' + w k dS    dx = du + T_s^T du    dS <- 2^D dS + q^T 2^d do' - k^T beta 2^d dx
//     dv = beta 2^-e dx
// where w = 2^(D - d), or 1 where that does not matter: kDecaysToEnd. dS after the chunk is stored
// to scratch memory, and so is dx without kReadsDv; dv is an output. Over whole sequences and whole
// slices a warpgroup of the block also makes q k^T and T_s, and stores them to scratch memory.
#include "sm90/backward/segments/windows.cuh"
#include "sm90/backward/state_step.cuh"
#include "sm90/backward/walk_back_memory.cuh"
#include "sm90/launch_blocks.h"

namespace gdn::sm90::backward {
namespace {
// y = do' of a chunk, and x = P^T do', which need no state.
template <class C>
GDN_DEVICE void read_chunk(BackMemory<C>& sm, uint32_t (&y)[16], uint32_t it, int warpgroup,
                           int warp) {
  using T = typename C::T;
  const uint32_t s = it % C::kStages;
  const int lane = fresh_lane();
  const uint32_t tline = transposed_line(warp, lane);
  wait_for(sm.full[s], it / C::kStages);
  read_do<T>(y, shared_address(sm.stages[s].dO[warpgroup]), tline, sm.factors[s], lane);
}
template <bool kAdds, class C>
GDN_DEVICE void issue_pairs(BackMemory<C>& sm, float (&x)[32], uint32_t (&y)[16], uint32_t it) {
  using T = typename C::T;
  const Descriptor columns = mn_major(shared_address(sm.stages[it % C::kStages].p));
  if constexpr (kAdds)
    wgmma_rs_n64_mn(T{}, x, y, columns.at(0), 1);
  else
    set_rs_n64_mn(T{}, x, y, columns.at(0));
#pragma unroll
  for (int i = 1; i < 4; ++i) wgmma_rs_n64_mn(T{}, x, y + 4 * i, columns.at(i * 2048), 1);
}

template <class C>
GDN_DEVICE void state(BackMemory<C>& sm, const Params& params, int warpgroup, int warp) {
  using T = typename C::T;
  using Kind = typename C::Kind;
  const ChunkBackward& problem = params.problem;
  const bool makes_triangles = C::kInverses && makes_triangles_walking(params);
  float S[64];
  uint32_t it = 0;
#pragma unroll 1
  for (int index = first_tile(params); index >= 0; index = next_tile(params, index)) {
    int left;  // chunks
    {
      const auto tile = walk_back_tile<C>(params, index);
      left = tile.chunks();
      bool ends = true;
      if constexpr (C::kCut) ends = tile.segment >= tile.last;
      if (!ends) {
        if constexpr (C::kCut) {
          const int64_t index = segment_index<Kind>(params, tile.n, tile.segment, tile.slice);
          load_matrix(S, state_of(params.maps.ends, index, warpgroup, warp));
        }
      } else if (problem.dht == nullptr) {
        clear_state(S);
      } else {
        float factor = 1;
        if (left > 0) {
          wait_for(sm.full[it % C::kStages], it / C::kStages);
          factor = sm.factors[it % C::kStages].end;
        }
        const int lane = threadIdx.x % 32;
        const int v = tile.v(params) + (C::kStates == 2 ? warpgroup : tile.part) * 64;
        load_state(S,
                   problem.dht + tile.n * problem.dht_n + tile.hv(params) * problem.dht_h +
                       (v + state_row(warp, lane)) * problem.dht_v +
                       state_column(lane) * problem.dht_k,
                   problem.dht_k, problem.dht_v, factor, channels_of<Kind>(params, v, warp));
      }
    }
    const bool any = left > 0;
    float x[32];
    uint32_t y[16];
    float pre = 1, post = 1;
    int steep = 0;
    // Makes du of a chunk, and stores dS after that chunk. begun: P^T do' has been issued.
    const auto make_du = [&](uint32_t at, bool begun) {
      const int lane = fresh_lane();
      uint32_t Sb[32];
#pragma unroll
      for (int i = 0; i < 32; ++i) Sb[i] = pack(T{}, S[2 * i], S[2 * i + 1]);
      pin(Sb);
      if constexpr (C::kInverses)
        if (makes_triangles) wait_for(sm.inverses.full[at % C::kStages], at / C::kStages);
      wgmma_fence();
      if (!kDecaysToEnd<T> && !begun) issue_pairs<false>(sm, x, y, at);
      const Descriptor k_rows = k_major(shared_address(sm.stages[at % C::kStages].k));
      if constexpr (kDecaysToEnd<T>)
        set_rs_n64(T{}, x, Sb, k_rows.at(0));
      else
        wgmma_rs_n64(T{}, x, Sb, k_rows.at(0), 1);
#pragma unroll
      for (int i = 1; i < 8; ++i)
        wgmma_rs_n64(T{}, x, Sb + 4 * i, k_rows.at(i / 4 * kTileBytes + i % 4 * 32), 1);
      wgmma_commit();
      wait_for(sm.ds_empty[warpgroup], at + 1);
      const Lines lines(lane);
#pragma unroll
      for (int b = 0; b < 8; ++b) {
        const uint32_t r[4] = {Sb[4 * b], Sb[4 * b + 1], Sb[4 * b + 2], Sb[4 * b + 3]};
        stmatrix_x4(lines.block_at(shared_address(sm.ds[warpgroup][b / 4]), warp, b % 4), r);
      }
      fence_async_proxy();
      __syncwarp();
      arrive(sm.ds_full[warpgroup], lane == 0);
      const ChunkFactors& factors = sm.factors[at % C::kStages];
      pre = factors.pre, post = factors.post, steep = factors.steep;
      wgmma_wait<0>();
      pin(x);
      if constexpr (kDecaysToEnd<T>) {  // 2^(D - d) k dS
        if (steep) {
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            const float2 factor = end_factors(factors, j * 4 + lane % 4);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              x[4 * j + 2 * h] *= factor.x;
              x[4 * j + 2 * h + 1] *= factor.y;
            }
          }
        }
        pin(x);
        pin(y);
        wgmma_fence();
        issue_pairs<true>(sm, x, y, at);
        wgmma_commit();
        wgmma_wait<0>();
        pin(x);
      }
    };
    if (any) {
      read_chunk(sm, y, it, warpgroup, warp);
      make_du(it, false);
    }
    // No product is in flight at the end of an iteration: the compiler would wait for it there.
#pragma unroll 1
    while (left > 0) {
      const uint32_t s = it % C::kStages;
      const int lane = fresh_lane();
      const bool lead = lane == 0;
      const uint32_t tline = transposed_line(warp, lane);
      const ChunkFactors& factors = sm.factors[s];
      const auto& stage = sm.stages[s];
      uint32_t u[16], next[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) u[i] = pack(T{}, x[2 * i], x[2 * i + 1]);
      const Descriptor t_columns = mn_major(shared_address(stage.t)),
                       q_columns = mn_major(shared_address(stage.q));
      pin(x);
      pin(u);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) wgmma_rs_n64_mn(T{}, x, u + 4 * i, t_columns.at(i * 2048), 1);
      wgmma_commit();
      // The product with T_s runs meanwhile, and hides the time of this.
      if (post != 1.f) scale_state(S, post);
      if (steep) decay_do<T>(y, factors, lane);
      pin(y);
      pin(S);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) wgmma_rs_n128_mn(T{}, S, y + 4 * i, q_columns.at(i * 2048), 1);
      wgmma_commit();
      if (C::kBeginsAhead && left > 1) read_chunk(sm, next, it + 1, warpgroup, warp);
      float f[16];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float4 cf = factors.x[j * 4 + lane % 4];
        f[2 * j] = cf.z, f[2 * j + 1] = cf.w;
      }
      pin(f);
      wgmma_wait<1>();
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
      // dv and dx are stored while the products of the state run.
      wait_for(sm.dv_empty[warpgroup], it + 1);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t d4[4], v4[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = 8 * j + 2 * i;
          const float2 of_dv = reinterpret_cast<const float2*>(factors.dv)[at / 4 * 4 + lane % 4];
          d4[i] = pack(T{}, x[at], x[at + 1]);
          v4[i] = pack(T{}, of_dv.x * x[at], of_dv.y * x[at + 1]);
        }
        if constexpr (!kReadsDv<T>)
          stmatrix_x4_trans(shared_address(sm.dv[warpgroup][1]) + j * 2048 + tline, d4);
        stmatrix_x4_trans(shared_address(sm.dv[warpgroup][0]) + j * 2048 + tline, v4);
      }
      fence_async_proxy();
      __syncwarp();
      arrive(sm.dv_full[warpgroup], lead);
      if (C::kBeginsAhead && left > 1) {
        wgmma_fence();
        issue_pairs<false>(sm, x, next, it + 1);
        wgmma_commit();
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      pin(S);
      if (pre != 1.f) scale_state(S, pre);
      __syncwarp();
      arrive(sm.empty[s], lead);
      ++it;
      if (--left == 0) break;
      if constexpr (C::kBeginsAhead) {
#pragma unroll
        for (int i = 0; i < 16; ++i) y[i] = next[i];
      } else {
        read_chunk(sm, y, it, warpgroup, warp);
      }
      make_du(it, C::kBeginsAhead);
    }
    if constexpr (C::kCut) {
      const auto tile = walk_back_tile<C>(params, index);
      if (tile.segment > 0) {
        const int64_t index = segment_index<Kind>(params, tile.n, tile.segment, tile.slice);
        if (any && params.maps.forgotten[index] != 0) {
          const float* const given =
              state_of(params.maps.ends, index - slices_of<Kind>(params), warpgroup, warp);
          StateDifference difference;
          difference.add(S, given);
          difference.judge(params.maps.wrong);
        }
        continue;
      }
    }
    if (problem.dh0 != nullptr) {
      const auto tile = walk_back_tile<C>(params, index);
      const int lane = threadIdx.x % 32;
      const int v = tile.v(params) + (C::kStates == 2 ? warpgroup : tile.part) * 64;
      store_state(S,
                  problem.dh0 + tile.n * problem.dh0_n + tile.hv(params) * problem.dh0_h +
                      (v + state_row(warp, lane)) * problem.dh0_v +
                      state_column(lane) * problem.dh0_k,
                  problem.dh0_k, problem.dh0_v, any ? exp2_approx(-Frame<T>::kTop) : 1.f,
                  channels_of<Kind>(params, v, warp));
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    walk_back_kernel(const __grid_constant__ Params params) {
  static_assert(sizeof(BackMemory<C>) <= 232448, "shared memory of a block");
  extern __shared__ __align__(1024) uint8_t raw[];
  BackMemory<C>& sm = *reinterpret_cast<BackMemory<C>*>(raw);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), warpgroup = warp / 4;
  if (params.again != nullptr) {
    wait_for_prerequisites();
    if (*params.again == 0) return;
  }
  if constexpr (!C::kCut) {
    launch_dependents();  // the walk of the state, which reads no result of this walk
    if (params.back.shape == BackShape::kByLengths) {
      // The kernel over slices overlaps with the kernel over halves, and only one of the two walks.
      // The next kernel waits for the kernel over slices alone, which therefore waits for the other
      // one.
      const bool walks = walks_back_over_halves(params) == (C::kStates == 1);
      if (C::kStates == 2 && (walks || blockIdx.x + 1 == gridDim.x)) wait_for_prerequisites();
      if (!walks) return;
    }
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      mbarrier_init(&sm.full[i], 3 * kWarpArrivals);  // k and the rest, q, do
      mbarrier_init(&sm.empty[i], 4 * C::kStates * kWarpArrivals);
      if constexpr (C::kInverses) mbarrier_init(&sm.inverses.full[i], 4 * kWarpArrivals);
    }
    for (int i = 0; i < C::kStates; ++i) {
      mbarrier_init(&sm.ds_full[i], 4 * kWarpArrivals);
      mbarrier_init(&sm.ds_empty[i], kWarpArrivals);
      mbarrier_init(&sm.dv_full[i], 4 * kWarpArrivals);
      mbarrier_init(&sm.dv_empty[i], kWarpArrivals);
    }
    mbarrier_init(&sm.aside, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  if constexpr (C::kCut) {
    wait_for_prerequisites();
    // The walk forward may begin now: it reads results of the folds, and then waits for this walk.
    // Clusters that begin while this walk ends are placed on distant multiprocessors, which costs
    // long segments more than the overlap gains.
    constexpr int kShortSegment = 16;  // chunks
    if (params.segment <= kShortSegment) launch_dependents();
  }
  if (warpgroup == 0) {
    set_registers<C::kSinglesRegisters, C::kLaunchRegisters>();
    if (warp == 0) {
      load_behind(sm, params);
    } else if (warp <= C::kStates) {
      store_behind(sm, params, warp - 1);
    } else if (blockIdx.x + 1 == gridDim.x) {
      // The next kernel waits for this one alone: this kernel therefore ends after the kernel of
      // the triangles that overlaps with it.
      wait_for_prerequisites();
    }
  } else if (warpgroup <= C::kStates) {
    set_registers<C::kStateRegisters, C::kLaunchRegisters>();
    state(sm, params, warpgroup - 1, warp % 4);
  } else if constexpr (C::kInverses) {
    set_registers<C::kInverseRegisters, C::kLaunchRegisters>();
    if (makes_triangles_walking(params)) make_triangles(sm, params, warp % 4);
  }
}

template <class C>
const char* launch(Params& params, cudaStream_t stream) {
  const ChunkForward& p = params.problem.forward;
  params.tiles = (C::kCut ? params.segments : p.N) * params.slices * C::kTileParts;
  params.links = params.scratch.back_links;
  const unsigned blocks =
      unsigned(params.links || params.tiles > p.multiprocessors ? p.multiprocessors : params.tiles);
  const bool second = params.back.shape == BackShape::kByLengths && C::kStates == 2;
  return launch_blocks(
      &walk_back_kernel<C>, params, blocks, C::kThreads, sizeof(BackMemory<C>), 1,
      C::kCut || params.again != nullptr || second || params.scratch.triangles_ready != nullptr,
      stream);
}
}  // namespace

template <class Kind>
const char* run_walk_back(Params& params, cudaStream_t stream) {
  if constexpr (kCuts<Kind>)
    if (params.maps.exist) return launch<Back<Kind, 2, true>>(params, stream);
  if (params.back.shape != BackShape::kSlices)
    if (const char* error = launch<Back<Kind, 1>>(params, stream)) return error;
  return params.back.shape != BackShape::kHalves ? launch<Back<Kind, 2>>(params, stream) : nullptr;
}

template const char* run_walk_back<Kind<__nv_bfloat16, true>>(Params&, cudaStream_t);
template const char* run_walk_back<Kind<__nv_bfloat16, false>>(Params&, cudaStream_t);
template const char* run_walk_back<Kind<__half, false>>(Params&, cudaStream_t);

}  // namespace gdn::sm90::backward
