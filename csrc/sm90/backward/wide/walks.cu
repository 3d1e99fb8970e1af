// Both walks over the states of heads with 129 to 256 channels of K: the walk forward makes h, the
// state before each chunk, and v_new; the walk back makes dh, the gradient of the state after each
// chunk, and dx. Triton's kernels do the other steps of such a backward, in the same tensors
// (docs/backward.md).
//
// Transposed as in state.cuh. The states are in no frame: with A_inv and A_qk strictly lower,
//     x = beta (v - 2^g k h)    v_new = x + A_inv x    h <- 2^g_last h + k^T 2^(g_last - g) v_new
//     du = A_qk^T do + own do + 2^(g_last - g) k dh    dx = du + A_inv^T du
//     dh <- 2^g_last dh + q^T scale 2^g do - k^T beta 2^g dx
// A block has a sequence, a value head, 64 or 128 channels of V, and one direction.
#include <cmath>

#include "common/tensor_map.h"
#include "sm90/backward/matrices.cuh"
#include "sm90/backward/wide/memory.cuh"
#include "sm90/entry.h"
#include "sm90/launch_blocks.h"
#include "sm90/tile/products.cuh"
#include "sm90/tile/triangles.cuh"

namespace gdn::sm90::backward {
namespace {
// Reads a lane's part of transposed values [64 of V, 64 tokens] in 16 bits.
GDN_DEVICE void read_values(uint32_t (&y)[16], uint32_t tile, uint32_t line) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t r[4];
    ldmatrix_x4_trans(tile + j * 2048 + line, r);
#pragma unroll
    for (int i = 0; i < 4; ++i) y[4 * j + i] = r[i];
  }
}
template <class T>
GDN_DEVICE void round_values(uint32_t (&y)[16], const float (&x)[32]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) y[i] = pack(T{}, x[2 * i], x[2 * i + 1]);
}

// Issues x = S k^T. The state is rounded 32 channels of K at a time, and each piece is written to
// the state's tile too.
template <class T>
GDN_DEVICE void read_state(float (&x)[32], const float (&S)[kHalves][64], uint32_t k_tile,
                           uint32_t state_tile, uint32_t line) {
  const Descriptor rows = k_major(k_tile);
  uint32_t rounded[2][8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    uint32_t (&piece)[8] = rounded[j % 2];
    if (j >= 2) wgmma_wait<1>();
#pragma unroll
    for (int i = 0; i < 8; ++i)
      piece[i] = pack(T{}, S[j / 4][j % 4 * 16 + 2 * i], S[j / 4][j % 4 * 16 + 2 * i + 1]);
    pin(piece);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t r[4] = {piece[4 * i], piece[4 * i + 1], piece[4 * i + 2], piece[4 * i + 3]};
      stmatrix_x4_trans(state_tile + j / 2 * kTileBytes + (j % 2 * 2 + i) * 2048 + line, r);
    }
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint64_t at = rows.at(j / 2 * kTileBytes + (j % 2 * 2 + i) * 32);
      if (j + i == 0)
        set_rs_n64(T{}, x, piece, at);
      else
        wgmma_rs_n64(T{}, x, piece + 4 * i, at, 1);
    }
    wgmma_commit();
  }
}
// S += y^T x for a tile x of 64 tokens and 256 channels.
template <class T>
GDN_DEVICE void add_outer(float (&S)[kHalves][64], uint32_t (&y)[16], uint32_t tiles) {
  const Descriptor columns = mn_major(tiles);
#pragma unroll
  for (int half = 0; half < kHalves; ++half)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      wgmma_rs_n128_mn(T{}, S[half], y + 4 * i, columns.at(half * 2 * kTileBytes + i * 2048), 1);
}

template <class C, bool kBack>
struct WideState {
  using T = typename C::T;
  WideMemory<C>& sm;
  const WideParams& params;
  const int warpgroup, warp;

  // Runs a load or store of the state at an end of a sequence, 128 channels of K at a time.
  template <class Do>
  GDN_DEVICE void in_halves(float (&S)[kHalves][64], const WideTile<kBack>& tile,
                            const Do& run) const {
    const ChunkForward& p = params.problem.forward;
    const int lane = fresh_lane(), v = tile.v + 64 * warpgroup;
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
      run(S[half], tile.n, tile.hv, v + state_row(warp, lane), half * 128 + state_column(lane),
          SomeChannels{p.V - v - 16 * warp, p.K - 128 * half});
  }
  GDN_DEVICE void begin(float (&S)[kHalves][64], const WideTile<kBack>& tile) const {
    const BackwardWalks& w = params.problem;
    const ChunkForward& p = w.forward;
    const void* const from = kBack ? static_cast<const void*>(w.dht) : p.h0;
    if (from == nullptr) {
      for (auto& half : S) clear_state(half);
      return;
    }
    const auto load = [&](auto* states, int64_t n, int64_t h, int64_t k, int64_t v) {
      in_halves(S, tile, [&](auto& part, int i_n, int hv, int i_v, int i_k, const auto& channels) {
        load_state(part, states + i_n * n + hv * h + i_v * v + i_k * k, k, v, 1.f, channels);
      });
    };
    if constexpr (kBack) {
      load(w.dht, w.dht_n, w.dht_h, w.dht_k, w.dht_v);
    } else if (p.h0_dtype == Dtype::kFloat32) {
      load(static_cast<const float*>(p.h0), p.h0_n, p.h0_h, p.h0_k, p.h0_v);
    } else if (p.h0_dtype == Dtype::kFloat16) {
      load(static_cast<const __half*>(p.h0), p.h0_n, p.h0_h, p.h0_k, p.h0_v);
    } else {
      load(static_cast<const __nv_bfloat16*>(p.h0), p.h0_n, p.h0_h, p.h0_k, p.h0_v);
    }
  }
  GDN_DEVICE void end(float (&S)[kHalves][64], const WideTile<kBack>& tile) const {
    const BackwardWalks& w = params.problem;
    if (!kBack || w.dh0 == nullptr) return;
    in_halves(S, tile, [&](auto& part, int n, int hv, int v, int k, const auto& channels) {
      store_state(part, w.dh0 + n * w.dh0_n + hv * w.dh0_h + v * w.dh0_v + k * w.dh0_k, w.dh0_k,
                  w.dh0_v, 1.f, channels);
    });
  }

  // Writes the state to its tile, and issues x = S k^T.
  GDN_DEVICE void read(float (&x)[32], float (&S)[kHalves][64], uint32_t it, uint32_t line) const {
    wait_for(sm.of_state[warpgroup].empty, it + 1);
    read_state<T>(x, S, shared_address(sm.k[it % 2]), shared_address(sm.state[warpgroup]), line);
    fence_async_proxy();
    __syncwarp();
    arrive(sm.of_state[warpgroup].full, fresh_lane() == 0);
  }
  GDN_DEVICE void give(const uint32_t (&y)[16], uint32_t it, uint32_t line) const {
    wait_for(sm.of_result[warpgroup].empty, it + 1);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t r[4] = {y[4 * j], y[4 * j + 1], y[4 * j + 2], y[4 * j + 3]};
      stmatrix_x4_trans(shared_address(sm.result[warpgroup]) + j * 2048 + line, r);
    }
    fence_async_proxy();
    __syncwarp();
    arrive(sm.of_result[warpgroup].full, fresh_lane() == 0);
  }

  GDN_DEVICE void forward(float (&S)[kHalves][64], uint32_t it) const {
    const uint32_t s = it % 2;
    const int lane = fresh_lane();
    const bool lead = lane == 0;
    const uint32_t line = transposed_line(warp, lane);
    const WideFactors& factors = sm.factors[s];
    float x[32];
    uint32_t v[16], u[16];
    wait_for(sm.of_k[s].full, it / 2);
    read(x, S, it, line);
    wait_for(sm.of_values.full, it);
    read_values(v, shared_address(sm.values[warpgroup]), line);
    arrive(sm.of_values.empty, fresh_lane() == lane_after(v[3] ^ v[7] ^ v[11] ^ v[15]));
    wait_for(sm.of_factors[s].full, it / 2);
    wgmma_wait<0>();
    pin(x);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float4 f = factors.x[j * 4 + lane % 4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 pair = unpack(T{}, v[2 * j + h]);
        const int at = 4 * j + 2 * h;
        x[at] = f.x * pair.x - f.z * x[at];
        x[at + 1] = f.y * pair.y - f.w * x[at + 1];
      }
    }
    round_values<T>(u, x);
    wait_for(sm.of_A_inv.full, it);
    {
      const Descriptor rows = k_major(shared_address(sm.A_inv));
      pin(x);
      pin(u);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) wgmma_rs_n64(T{}, x, u + 4 * i, rows.at(i * 32), 1);
      wgmma_commit();
    }
    for (auto& half : S) scale_state(half, factors.last);
    wgmma_wait<0>();
    pin(x);
    arrive(sm.of_A_inv.empty, lead);
    round_values<T>(v, x);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 f = reinterpret_cast<const float2*>(factors.end)[j * 4 + lane % 4];
#pragma unroll
      for (int h = 0; h < 2; ++h)
        u[2 * j + h] = pack(T{}, f.x * x[4 * j + 2 * h], f.y * x[4 * j + 2 * h + 1]);
    }
    for (auto& half : S) pin(half);
    pin(u);
    wgmma_fence();
    add_outer<T>(S, u, shared_address(sm.k[s]));
    wgmma_commit();
    give(v, it, line);
    wgmma_wait<0>();
    for (auto& half : S) pin(half);
    __syncwarp();
    arrive(sm.of_k[s].empty, lead);
    arrive(sm.of_factors[s].empty, lead);
  }

  GDN_DEVICE void back(float (&S)[kHalves][64], uint32_t it) const {
    const uint32_t s = it % 2;
    const int lane = fresh_lane();
    const bool lead = lane == 0;
    const uint32_t line = transposed_line(warp, lane);
    const WideFactors& factors = sm.factors[s];
    float x[32];
    uint32_t y[16], u[16];
    wait_for(sm.of_k[s].full, it / 2);
    read(x, S, it, line);
    wait_for(sm.of_values.full, it);
    read_values(y, shared_address(sm.values[warpgroup]), line);
    arrive(sm.of_values.empty, fresh_lane() == lane_after(y[3] ^ y[7] ^ y[11] ^ y[15]));
    wait_for(sm.of_factors[s].full, it / 2);
    wgmma_wait<0>();
    pin(x);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 end = reinterpret_cast<const float2*>(factors.end)[j * 4 + lane % 4];
      const float2 own = reinterpret_cast<const float2*>(factors.own)[j * 4 + lane % 4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 pair = unpack(T{}, y[2 * j + h]);
        const int at = 4 * j + 2 * h;
        x[at] = end.x * x[at] + own.x * pair.x;
        x[at + 1] = end.y * x[at + 1] + own.y * pair.y;
      }
    }
    wait_for(sm.of_A_qk.full, it);
    {
      const Descriptor columns = mn_major(shared_address(sm.A_qk));
      pin(x);
      pin(y);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) wgmma_rs_n64_mn(T{}, x, y + 4 * i, columns.at(i * 2048), 1);
      wgmma_commit();
    }
    for (auto& half : S) scale_state(half, factors.last);
    wgmma_wait<0>();
    pin(x);
    pin(y);
    arrive(sm.of_A_qk.empty, lead);
    round_values<T>(u, x);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 f = reinterpret_cast<const float2*>(factors.read)[j * 4 + lane % 4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 pair = unpack(T{}, y[2 * j + h]);
        y[2 * j + h] = pack(T{}, f.x * pair.x, f.y * pair.y);
      }
    }
    wait_for(sm.of_A_inv.full, it);
    wait_for(sm.of_q.full, it);
    {
      const Descriptor columns = mn_major(shared_address(sm.A_inv));
      pin(x);
      pin(u);
      pin(y);
      for (auto& half : S) pin(half);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) wgmma_rs_n64_mn(T{}, x, u + 4 * i, columns.at(i * 2048), 1);
      wgmma_commit();
    }
    add_outer<T>(S, y, shared_address(sm.q));
    wgmma_commit();
    wgmma_wait<1>();
    pin(x);
    arrive(sm.of_A_inv.empty, lead);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float4 f = factors.x[j * 4 + lane % 4];
#pragma unroll
      for (int h = 0; h < 2; ++h)
        u[2 * j + h] = pack(T{}, -f.z * x[4 * j + 2 * h], -f.w * x[4 * j + 2 * h + 1]);
    }
    pin(u);
    wgmma_fence();
    add_outer<T>(S, u, shared_address(sm.k[s]));
    wgmma_commit();
    wgmma_wait<1>();
    arrive(sm.of_q.empty, lead);
    round_values<T>(y, x);
    give(y, it, line);
    wgmma_wait<0>();
    for (auto& half : S) pin(half);
    __syncwarp();
    arrive(sm.of_k[s].empty, lead);
    arrive(sm.of_factors[s].empty, lead);
  }

  GDN_DEVICE void walk() const {
    float S[kHalves][64];
    const auto tile = wide_tile<C, kBack>(params);
    const int count = tile.chunks();
    begin(S, tile);
#pragma unroll 1
    for (int it = 0; it < count; ++it) {
      if constexpr (kBack)
        back(S, it);
      else
        forward(S, it);
    }
    end(S, wide_tile<C, kBack>(params));
  }
};

template <class C, bool kBack>
GDN_DEVICE void run_roles(WideMemory<C>& sm, const WideParams& params, int warp) {
  if (warp < 4) {
    set_registers<C::kSinglesRegisters, C::kLaunchRegisters>();
    if (warp == 0) {
      load<C, kBack>(sm, params);
    } else if (warp == 1) {
      make_factors<C, kBack>(sm, params);
    } else if (warp - 2 < C::kStates) {
      store<C, kBack>(sm, params, warp - 2);
    }
  } else {
    set_registers<C::kStateRegisters, C::kLaunchRegisters>();
    WideState<C, kBack>{sm, params, warp / 4 - 1, warp % 4}.walk();
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    wide_walks_kernel(const __grid_constant__ WideParams params) {
  static_assert(sizeof(WideMemory<C>) <= kSharedBytes, "shared memory of a block");
  extern __shared__ __align__(1024) uint8_t raw[];
  WideMemory<C>& sm = *reinterpret_cast<WideMemory<C>*>(raw);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    const auto init = [](Buffer& buffer, int writers, int readers) {
      mbarrier_init(&buffer.full, writers * kWarpArrivals);
      mbarrier_init(&buffer.empty, readers * kWarpArrivals);
    };
    for (int i = 0; i < 2; ++i) {
      init(sm.of_k[i], 1, 4 * C::kStates);
      init(sm.of_factors[i], 1, 4 * C::kStates);
    }
    for (Buffer* buffer : {&sm.of_q, &sm.of_values, &sm.of_A_inv, &sm.of_A_qk})
      init(*buffer, 1, 4 * C::kStates);
    for (int i = 0; i < C::kStates; ++i) {
      init(sm.of_state[i], 4, 1);
      init(sm.of_result[i], 4, 1);
    }
    mbarrier_init(&sm.aside, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  if (int(blockIdx.x) < params.tiles)
    run_roles<C, true>(sm, params, warp);
  else
    run_roles<C, false>(sm, params, warp);
}

template <class C>
const char* launch(WideParams& params, cudaStream_t stream) {
  const ChunkForward& p = params.problem.forward;
  params.parts = int(ceil_div(p.V, 64 * C::kStates));
  params.tiles = p.N * p.HV * params.parts;
  params.by_parts = Divisor::of(params.parts);
  return launch_blocks(&wide_walks_kernel<C>, params, 2 * int64_t{params.tiles}, C::kThreads,
                       sizeof(WideMemory<C>), 1, false, stream);
}

template <class T>
const char* run(WideParams& params, cudaStream_t stream) {
  // Microseconds of a chunk in either direction: two states in a block wait for each other's
  // products.
  constexpr double kOne = 2.6, kTwo = 3.7;
  const ChunkForward& p = params.problem.forward;
  const auto time = [&](int channels, double chunk) {
    return std::ceil(2. * p.N * p.HV * double(ceil_div(p.V, channels)) / p.multiprocessors) * chunk;
  };
  return time(64, kOne) < time(128, kTwo) ? launch<Wide<T, 1>>(params, stream)
                                          : launch<Wide<T, 2>>(params, stream);
}
}  // namespace

const char* backward_walks(const BackwardWalks& problem, cudaStream_t stream) {
  const ChunkForward& p = problem.forward;
  if (p.K % 8 || p.V % 8 || p.K > 256)
    return "the Hopper walks need K and V in multiples of 8, K up to 256";
  if (p.T >= kTokenLimit) return "the Hopper kernel needs T below 2^30";
  const int64_t chunks = problem.chunks, blocks = chunks * p.HV;
  if (blocks >= int64_t{1} << 31) return "the Hopper walks need fewer chunks and value heads";
  WideParams params = {};
  params.problem = problem;
  params.chunks_of_batch = int(ceil_div(p.T, kChunk));
  params.heads = Divisor::of(p.HV);
  params.group = Divisor::of(p.HV / p.H);
  const auto values = [&](const void* x) {
    return Rows{x, p.T * p.HV * p.V, int64_t{p.HV} * p.V, p.V};
  };
  const auto pairs = [&](const void* x) {
    return Rows{x, p.T * p.HV * kChunk, int64_t{p.HV} * kChunk, kChunk};
  };
  const auto states = [&](CUtensorMap* map, const void* x) {
    return make_map(map, p.dtype, {x, int64_t{p.K} * p.V, p.V, p.V}, blocks, p.K, 1, p.V);
  };
  const char* errors[] = {
      make_map(&params.q, p.dtype, p.q, p.B, p.T, p.H, p.K),
      make_map(&params.k, p.dtype, p.k, p.B, p.T, p.H, p.K),
      make_map(&params.v, p.dtype, p.v, p.B, p.T, p.HV, p.V),
      make_map(&params.dO, p.dtype, problem.dO, p.B, p.T, p.HV, p.V),
      make_map(&params.A_inv, p.dtype, pairs(problem.A_inv), p.B, p.T, p.HV, kChunk),
      make_map(&params.A_qk, p.dtype, pairs(problem.A_qk), p.B, p.T, p.HV, kChunk),
      make_map(&params.v_new, p.dtype, values(problem.v_new), p.B, p.T, p.HV, p.V),
      make_map(&params.dx, p.dtype, values(problem.dx), p.B, p.T, p.HV, p.V),
      states(&params.h, problem.h),
      states(&params.dh, problem.dh),
  };
  for (const char* error : errors)
    if (error) return error;
  return p.dtype == Dtype::kBFloat16 ? run<__nv_bfloat16>(params, stream)
                                     : run<__half>(params, stream);
}

}  // namespace gdn::sm90::backward
