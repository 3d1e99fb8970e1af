// From a sequence's last chunk to its first: the gradient of the state, 64 channels of V a warpgroup, in registers.
//
// Transposed as in state.cuh. With do' = scale 2^e do, and P and T_s decayed where the chunk is steep,
//     du = P^T do' + k dS    dx = du + T_s^T du    dS <- 2^D dS + q^T 2^d do' - k^T beta 2^d dx
//     dv = beta 2^-e dx
// dS behind the chunk and dx go to scratch memory, dv out.
#include "sm90/backward/common.cuh"
#include "sm90/triangles.cuh"

namespace gdn::sm90::backward {
namespace {
template <class Type, int kStates_>
struct Back {
  using T = Type;
  static constexpr int kStates = kStates_;
  static constexpr int kThreads = 128 * (1 + kStates);
  static constexpr int kStages = kStates == 2 ? 2 : 3;
  static constexpr int kTileParts = 2 / kStates;
  static constexpr int kSinglesRegisters = 40, kStateRegisters = kStates == 2 ? 216 : 232;
};

template <class C>
struct Memory {
  struct alignas(1024) Stage {
    uint8_t k[2][kTileBytes], q[2][kTileBytes], dO[C::kStates][kTileBytes], t[kTileBytes], p[kTileBytes];
  } stages[C::kStages];
  uint8_t dx[C::kStates][kTileBytes], dv[C::kStates][kTileBytes], ds[C::kStates][2][kTileBytes];
  Gates gates[C::kStages];
  uint64_t full[C::kStages], empty[C::kStages], aside;
  uint64_t ds_full[C::kStates], ds_empty[C::kStates], dx_full[C::kStates], dx_empty[C::kStates];
};

template <class C>
GDN_DEVICE void loader(Memory<C>& sm, const Params& params) {
  const ChunkForward& p = params.problem.forward;
  uint32_t it = 0, aside_phase = 0;
#pragma unroll 1
  for (int index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const BackTile tile = back_tile<C::kTileParts>(params, index);
#pragma unroll 1
    for (int c = tile.chunks() - 1; c >= 0; --c, ++it) {
      const uint32_t s = it % C::kStages;
      auto& stage = sm.stages[s];
      const int slot = tile.slot + c, block = slot * p.HV + tile.hv, row = tile.first + c * kChunk;
      const int rows = tile.length - c * kChunk;
      const bool steep = params.scratch.last[block] < -Frame<typename C::T>::kRange;
      wait_for(sm.empty[s], it / C::kStages + 1);
      // k, with it all of the stage but q and do, which may have rows to clear as well.
      const auto rest = [&](uint32_t bar) {
        bulk_load(shared_address(&sm.gates[s]), params.scratch.gates + block, sizeof(Gates), bar);
        tma_load(shared_address(stage.t), &params.t, bar, 0, 0, 0, block);
        if (steep) {
          tma_load(shared_address(stage.p), &params.p, bar, 0, 0, 0, block);
        } else {
          tma_load(shared_address(stage.p), &params.qk, bar, 0, 0, 0, slot * p.H + tile.h);
        }
      };
      constexpr int kRest = sizeof(Gates) + 2 * kTileBytes;
      load_rows<2>(params.k, stage.k, sm.full[s], sm.aside, aside_phase, 0, row, tile.h, tile.batch, rows, kRest,
                   rest);
      load_rows<2>(params.q, stage.q, sm.full[s], sm.aside, aside_phase, 0, row, tile.h, tile.batch, rows, 0,
                   Nothing{});
      load_rows<C::kStates>(params.dO, stage.dO, sm.full[s], sm.aside, aside_phase, 64 * tile.part, row, tile.hv,
                            tile.batch, rows, 0, Nothing{});
    }
  }
}

template <class C>
GDN_DEVICE void store(Memory<C>& sm, const Params& params, int slot) {
  const ChunkForward& p = params.problem.forward;
  const bool lead = threadIdx.x % 32 == 0;
  uint32_t it = 0;
#pragma unroll 1
  for (int index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const BackTile tile = back_tile<C::kTileParts>(params, index);
    const int part = (C::kStates == 2 ? slot : tile.part) * 64;
#pragma unroll 1
    for (int c = tile.chunks() - 1; c >= 0; --c, ++it) {
      const int block = (tile.slot + c) * p.HV + tile.hv;
      wait_for(sm.ds_full[slot], it);
      if (lead) {
        for (int i = 0; i < 2; ++i) tma_store(&params.ds, shared_address(sm.ds[slot][i]), 64 * i, part, 0, block);
        tma_store_commit();
        tma_store_wait_read();
      }
      mbarrier_arrive_if(shared_address(&sm.ds_empty[slot]), lead);
      wait_for(sm.dx_full[slot], it);
      const int row = tile.first + c * kChunk, rows = tile.length - c * kChunk;
      if (lead) {
        tma_store(&params.dx, shared_address(sm.dx[slot]), part, 0, 0, block);
        if (rows >= kChunk) tma_store(&params.dv, shared_address(sm.dv[slot]), part, row, tile.hv, tile.batch);
        tma_store_commit();
        tma_store_wait_read();
      }
      if (rows < kChunk) {  // TMA would write into the next sequence
#pragma unroll 1
        for (int i = threadIdx.x % 32; i < rows * 8; i += 32) {
          const int64_t at = ((tile.batch * p.T + row + i / 8) * p.HV + tile.hv) * kChannels + part + i % 8 * 8;
          *reinterpret_cast<uint4*>(static_cast<uint16_t*>(params.problem.dv) + at) =
              *reinterpret_cast<const uint4*>(sm.dv[slot] + i / 8 * 128 + ((i % 8 ^ i / 8 % 8) * 16));
        }
      }
      __syncwarp();
      mbarrier_arrive_if(shared_address(&sm.dx_empty[slot]), lead);
    }
  }
  if (lead) tma_store_wait();
}

template <class C>
GDN_DEVICE void state(Memory<C>& sm, const Params& params, int slot, int warp) {
  using T = typename C::T;
  const ChunkBackward& problem = params.problem;
  float S[64];
  uint32_t it = 0;
#pragma unroll 1
  for (int index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    int left;  // chunks
    {
      const BackTile tile = back_tile<C::kTileParts>(params, index);
      left = tile.chunks();
      if (problem.dht == nullptr) {
        clear_state(S);
      } else {
        float factor = 1;
        if (left > 0) {
          wait_for(sm.full[it % C::kStages], it / C::kStages);
          factor = sm.gates[it % C::kStages].end;
        }
        const int lane = threadIdx.x % 32;
        const int v = (C::kStates == 2 ? slot : tile.part) * 64 + state_row(warp, lane);
        load_state(S, problem.dht + tile.n * problem.dht_n + tile.hv * problem.dht_h + v * problem.dht_v +
                          state_column(lane) * problem.dht_k,
                   problem.dht_k, problem.dht_v, factor);
      }
    }
    const bool any = left > 0;
#pragma unroll 1
    for (; left > 0; --left, ++it) {
      const uint32_t s = it % C::kStages;
      const int lane = fresh_lane();
      const bool lead = lane == 0;
      const uint32_t tline = transposed_line(warp, lane);
      const Gates& gates = sm.gates[s];
      const auto& stage = sm.stages[s];
      float x[32] = {};
      uint32_t y[16], u[16], Sb[32];
      wait_for(sm.full[s], it / C::kStages);
      const float pre = gates.pre, post = gates.post;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t d4[4];
        ldmatrix_x4_trans(shared_address(stage.dO[slot]) + j * 2048 + tline, d4);
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          const float2 f = reinterpret_cast<const float2*>(gates.read)[(2 * j + b) * 4 + lane % 4];
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float2 pair = unpack(T{}, d4[2 * b + h]);
            y[4 * j + 2 * b + h] = pack(T{}, f.x * pair.x, f.y * pair.y);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 32; ++i) Sb[i] = pack(T{}, S[2 * i], S[2 * i + 1]);
      pin(y);
      pin(Sb);
      pin(x);
      wgmma_fence();
      const Descriptor p_columns = mn_major(shared_address(stage.p)), k_rows = k_major(shared_address(stage.k));
#pragma unroll
      for (int i = 0; i < 4; ++i) wgmma_rs_n64_mn(T{}, x, y + 4 * i, p_columns.at(i * 2048), i > 0);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        wgmma_rs_n64(T{}, x, Sb + 4 * i, k_rows.at(i / 4 * kTileBytes + i % 4 * 32), 1);
      wgmma_commit();

      // dS behind the chunk, to memory.
      wait_for(sm.ds_empty[slot], it + 1);
      const Lines lines(lane);
#pragma unroll
      for (int b = 0; b < 8; ++b) {
        const uint32_t r[4] = {Sb[4 * b], Sb[4 * b + 1], Sb[4 * b + 2], Sb[4 * b + 3]};
        stmatrix_x4(lines.block_at(shared_address(sm.ds[slot][b / 4]), warp, b % 4), r);
      }
      fence_async_proxy();
      __syncwarp();
      mbarrier_arrive_if(shared_address(&sm.ds_full[slot]), lead);

      wgmma_wait<0>();
      pin(x);
      if (post != 1.f) scale_state(S, post);
      if (gates.steep) {  // 2^d do'
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const uint32_t factor =
              power_of_two<T>(biased_power<T>(0), reinterpret_cast<const uint32_t*>(gates.power)[j * 4 + lane % 4]);
#pragma unroll
          for (int h = 0; h < 2; ++h) y[2 * j + h] = multiply(T{}, y[2 * j + h], factor);
        }
      }
#pragma unroll
      for (int i = 0; i < 16; ++i) u[i] = pack(T{}, x[2 * i], x[2 * i + 1]);
      const Descriptor t_columns = mn_major(shared_address(stage.t)), q_columns = mn_major(shared_address(stage.q));
      pin(x);
      pin(u);
      pin(y);
      pin(S);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) wgmma_rs_n64_mn(T{}, x, u + 4 * i, t_columns.at(i * 2048), 1);
      wgmma_commit();
#pragma unroll
      for (int i = 0; i < 4; ++i) wgmma_rs_n128_mn(T{}, S, y + 4 * i, q_columns.at(i * 2048), 1);
      wgmma_commit();
      wait_for(sm.dx_empty[slot], it + 1);
      wgmma_wait<1>();
      pin(x);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t d4[4], v4[4];
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          const float4 cf = gates.x[(2 * j + b) * 4 + lane % 4];
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int at = 4 * (2 * j + b) + 2 * h;
            d4[2 * b + h] = pack(T{}, x[at], x[at + 1]);
            v4[2 * b + h] = pack(T{}, cf.x * x[at], cf.y * x[at + 1]);
            u[at / 2] = pack(T{}, -cf.z * x[at], -cf.w * x[at + 1]);
          }
        }
        stmatrix_x4_trans(shared_address(sm.dx[slot]) + j * 2048 + tline, d4);
        stmatrix_x4_trans(shared_address(sm.dv[slot]) + j * 2048 + tline, v4);
      }
      fence_async_proxy();
      __syncwarp();
      mbarrier_arrive_if(shared_address(&sm.dx_full[slot]), lead);
      const Descriptor k_columns = mn_major(shared_address(stage.k));
      pin(u);
      pin(S);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) wgmma_rs_n128_mn(T{}, S, u + 4 * i, k_columns.at(i * 2048), 1);
      wgmma_commit();
      wgmma_wait<0>();
      pin(S);
      if (pre != 1.f) scale_state(S, pre);
      __syncwarp();
      mbarrier_arrive_if(shared_address(&sm.empty[s]), lead);
    }
    if (problem.dh0 != nullptr) {
      const BackTile tile = back_tile<C::kTileParts>(params, index);
      const int lane = threadIdx.x % 32;
      const int v = (C::kStates == 2 ? slot : tile.part) * 64 + state_row(warp, lane);
      store_state(S, problem.dh0 + tile.n * problem.dh0_n + tile.hv * problem.dh0_h + v * problem.dh0_v +
                         state_column(lane) * problem.dh0_k,
                  problem.dh0_k, problem.dh0_v, any ? exp2_approx(-Frame<T>::kTop) : 1.f);
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) walk_back_kernel(const __grid_constant__ Params params) {
  static_assert(sizeof(Memory<C>) <= 232448, "shared memory of a block");
  extern __shared__ __align__(1024) uint8_t raw[];
  Memory<C>& sm = *reinterpret_cast<Memory<C>*>(raw);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), warpgroup = warp / 4;
  launch_dependents();  // the walk of the state, which needs nothing of this one
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      mbarrier_init(&sm.full[i], 3);  // k and the rest, q, do
      mbarrier_init(&sm.empty[i], 4 * C::kStates);
    }
    for (int i = 0; i < C::kStates; ++i) {
      mbarrier_init(&sm.ds_full[i], 4);
      mbarrier_init(&sm.ds_empty[i], 1);
      mbarrier_init(&sm.dx_full[i], 4);
      mbarrier_init(&sm.dx_empty[i], 1);
    }
    mbarrier_init(&sm.aside, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  if (warpgroup == 0) {
    lower_registers<C::kSinglesRegisters>();
    if (warp == 0) {
      loader(sm, params);
    } else if (warp <= C::kStates) {
      store(sm, params, warp - 1);
    }
  } else {
    raise_registers<C::kStateRegisters>();
    state(sm, params, warpgroup - 1, warp % 4);
  }
}

template <class C>
const char* launch(Params& params, cudaStream_t stream) {
  const ChunkForward& p = params.problem.forward;
  constexpr int kBytes = sizeof(Memory<C>);
  if (const char* error = check(cudaFuncSetAttribute(
          walk_back_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes)))
    return error;
  params.tiles = p.N * p.HV * C::kTileParts;
  const unsigned blocks = unsigned(params.tiles < p.multiprocessors ? params.tiles : p.multiprocessors);
  walk_back_kernel<C><<<blocks, C::kThreads, kBytes, stream>>>(params);
  return check(cudaGetLastError());
}
}  // namespace

const char* run_walk_back(Params& params, cudaStream_t stream) {
  const ChunkForward& p = params.problem.forward;
  using T = __nv_bfloat16;
  // Half of V a block where multiprocessors would be idle else.
  if (2 * p.N * p.HV <= p.multiprocessors) return launch<Back<T, 1>>(params, stream);
  return launch<Back<T, 2>>(params, stream);
}

}  // namespace gdn::sm90::backward
