// From a sequence's last chunk to its first: the gradient of the state, 64 channels of V a warpgroup, in registers.
//
// Transposed as in state.cuh. With do' = scale 2^e do, and P and T_s decayed where the chunk is steep,
//     du = P^T do' + k dS    dx = du + T_s^T du    dS <- 2^D dS + q^T 2^d do' - k^T beta 2^d dx
//     dv = beta 2^-e dx
// dS behind the chunk and dx go to scratch memory, dv out. Of whole sequences a warpgroup of a block with all of V makes
// q k^T, k k^T and T_s, which go to scratch memory as well.
#include <type_traits>

#include "sm90/backward/chunk_triangles.cuh"
#include "sm90/backward/products.cuh"
#include "sm90/launch_blocks.h"

namespace gdn::sm90::backward {
namespace {
template <class Type, int kStates_>
struct Back {
  using T = Type;
  static constexpr int kStates = kStates_;
  static constexpr bool kMaker = kStates == 2;
  static constexpr int kThreads = 128 * (1 + kStates + kMaker);
  static constexpr int kStages = kStates == 2 ? 2 : 3;
  static constexpr int kTileParts = 2 / kStates;
  // A chunk begins while the one behind it ends: where few blocks wait for their own chain of products. Elsewhere
  // memory is waited for, and a stage is given back first.
  static constexpr bool kBeginsAhead = kStates == 1;
  static constexpr int kSinglesRegisters = kMaker ? 32 : 40, kStateRegisters = kMaker ? 176 : 232;
};

constexpr int kMakerRegisters = 128;
template <class C>
struct MakerMemory {
  SharedMemory<Alone<typename C::T>> scratch;
  uint8_t kk[kTileBytes];
  GateVectors vectors;
  uint64_t made[C::kStages];  // T and P
};
struct NoMaker {};

template <class C>
struct Memory {
  struct alignas(1024) Stage {
    uint8_t k[2][kTileBytes], q[2][kTileBytes], dO[C::kStates][kTileBytes], t[kTileBytes], p[kTileBytes];
  } stages[C::kStages];
  uint8_t dx[C::kStates][kTileBytes], dv[C::kStates][kTileBytes], ds[C::kStates][2][kTileBytes];
  std::conditional_t<C::kMaker, MakerMemory<C>, NoMaker> maker;
  Gates gates[C::kStages];
  uint64_t full[C::kStages], empty[C::kStages], aside;
  uint64_t ds_full[C::kStates], ds_empty[C::kStates], dx_full[C::kStates], dx_empty[C::kStates];
};

template <class C>
GDN_DEVICE void loader(Memory<C>& sm, const Params& params) {
  const ChunkForward& p = params.problem.forward;
  const bool makes = C::kMaker && makes_triangles_walking(params);
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
        if (makes) return;
        tma_load(shared_address(stage.t), &params.t, bar, 0, 0, 0, block);
        if (steep) {
          tma_load(shared_address(stage.p), &params.ds, bar, 0, 64 * tile.part, 0, block);
        } else {
          tma_load(shared_address(stage.p), &params.qk, bar, 0, 0, 0, slot * p.H + tile.h);
        }
      };
      const int rest_bytes = sizeof(Gates) + (makes ? 0 : 2 * kTileBytes);
      load_rows<2>(params.k, stage.k, sm.full[s], sm.aside, aside_phase, 0, row, tile.h, tile.batch, rows, rest_bytes,
                   rest);
      load_rows<2>(params.q, stage.q, sm.full[s], sm.aside, aside_phase, 0, row, tile.h, tile.batch, rows, 0,
                   Nothing{});
      load_rows<C::kStates>(params.dO, stage.dO, sm.full[s], sm.aside, aside_phase, 64 * tile.part, row, tile.hv,
                            tile.batch, rows, 0, Nothing{});
    }
  }
}

// T and P of every chunk to its stage; T, and of a key head's first value head q k^T and k k^T, to scratch memory.
template <class C>
GDN_DEVICE void make_triangles(Memory<C>& sm, const Params& params, int warp) {
  using T = typename C::T;
  constexpr int kBarrier = 1;
  const ChunkForward& p = params.problem.forward;
  const int group = p.HV / p.H, thread = threadIdx.x % 128;
  // What is above a diagonal is read and never written.
  for (auto& stage : sm.stages) clear_tiles(stage.t, 2, thread);
  clear_tiles(sm.maker.scratch.inverse[0], 2, thread);
  uint32_t it = 0;
#pragma unroll 1
  for (int index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const BackTile tile = back_tile<C::kTileParts>(params, index);
    const bool first = tile.hv == tile.h * group;
#pragma unroll 1
    for (int c = tile.chunks() - 1; c >= 0; --c, ++it) {
      const uint32_t s = it % C::kStages;
      auto& stage = sm.stages[s];
      const int lane = fresh_lane(), slot = tile.slot + c;
      const Triangles<Alone<T>> own(sm.maker.scratch, kBarrier, lane, warp);
      float kk[32] = {};
      wait_for(sm.full[s], it / C::kStages);
      const bool steep = sm.gates[s].steep;
      {
        float qk[32] = {};
        const uint32_t k = shared_address(stage.k);
        own.issue_product(qk, shared_address(stage.q), k);
        own.issue_product(kk, k, k);
        copy_factors(sm.maker.vectors, sm.gates[s], thread);
        if (thread == 0) {
          sm.maker.vectors.steep = steep;
          tma_store_wait_read();  // of the chunk before; this stage's own are further back
        }
        wgmma_wait<0>();
        pin(qk);
        pin(kk);
        named_barrier(kBarrier, 128);
        own.store_a(kk, sm.maker.vectors);
        store_lower(own, qk, stage.p);
      }
      if (first) store_lower(own, kk, sm.maker.kk);
      if (steep) {
        if (first) {  // before it is decayed in its place
          fence_async_proxy();
          named_barrier(kBarrier, 128);
          if (thread == 0) {
            tma_store(&params.qk, shared_address(stage.p), 0, 0, 0, slot * p.H + tile.h);
            tma_store_commit();
            tma_store_wait_read();
          }
          named_barrier(kBarrier, 128);
        }
        decay_pairs(own, sm.maker.vectors, stage.p, stage.p);
      }
      own.invert(shared_address(stage.t));
      fence_async_proxy();
      __syncwarp();
      mbarrier_arrive_if(shared_address(&sm.maker.made[s]), lane == 0);
      named_barrier(kBarrier, 128);
      if (thread == 0) {
        tma_store(&params.t, shared_address(stage.t), 0, 0, 0, slot * p.HV + tile.hv);
        if (first) {
          tma_store(&params.kk, shared_address(sm.maker.kk), 0, 0, 0, slot * p.H + tile.h);
          if (!steep) tma_store(&params.qk, shared_address(stage.p), 0, 0, 0, slot * p.H + tile.h);
        }
        tma_store_commit();
      }
    }
  }
  if (thread == 0) tma_store_wait();
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

// y = do' of a chunk, and x = P^T do': they need no state.
template <class C>
GDN_DEVICE void read_chunk(Memory<C>& sm, uint32_t (&y)[16], uint32_t it, int slot, int warp) {
  using T = typename C::T;
  const uint32_t s = it % C::kStages;
  const int lane = fresh_lane();
  const uint32_t tline = transposed_line(warp, lane);
  const Gates& gates = sm.gates[s];
  const auto& stage = sm.stages[s];
  wait_for(sm.full[s], it / C::kStages);
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
  pin(y);
}
template <class C>
GDN_DEVICE void issue_pairs(Memory<C>& sm, float (&x)[32], uint32_t (&y)[16], uint32_t it) {
  const Descriptor columns = mn_major(shared_address(sm.stages[it % C::kStages].p));
  set_rs_n64_mn(x, y, columns.at(0));
#pragma unroll
  for (int i = 1; i < 4; ++i) wgmma_rs_n64_mn(typename C::T{}, x, y + 4 * i, columns.at(i * 2048), 1);
}

template <class C>
GDN_DEVICE void state(Memory<C>& sm, const Params& params, int slot, int warp) {
  using T = typename C::T;
  const ChunkBackward& problem = params.problem;
  const bool makes = C::kMaker && makes_triangles_walking(params);
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
    float x[32];
    uint32_t y[16];
    float pre = 1, post = 1;
    int steep = 0;
    // du of a chunk, of which P^T do' may be on its way, and dS behind that chunk to memory.
    const auto make_du = [&](uint32_t at, bool begun) {
      const int lane = fresh_lane();
      uint32_t Sb[32];
#pragma unroll
      for (int i = 0; i < 32; ++i) Sb[i] = pack(T{}, S[2 * i], S[2 * i + 1]);
      pin(Sb);
      if constexpr (C::kMaker)
        if (makes) wait_for(sm.maker.made[at % C::kStages], at / C::kStages);
      wgmma_fence();
      if (!begun) issue_pairs(sm, x, y, at);
      const Descriptor k_rows = k_major(shared_address(sm.stages[at % C::kStages].k));
#pragma unroll
      for (int i = 0; i < 8; ++i)
        wgmma_rs_n64(T{}, x, Sb + 4 * i, k_rows.at(i / 4 * kTileBytes + i % 4 * 32), 1);
      wgmma_commit();
      wait_for(sm.ds_empty[slot], at + 1);
      const Lines lines(lane);
#pragma unroll
      for (int b = 0; b < 8; ++b) {
        const uint32_t r[4] = {Sb[4 * b], Sb[4 * b + 1], Sb[4 * b + 2], Sb[4 * b + 3]};
        stmatrix_x4(lines.block_at(shared_address(sm.ds[slot][b / 4]), warp, b % 4), r);
      }
      fence_async_proxy();
      __syncwarp();
      mbarrier_arrive_if(shared_address(&sm.ds_full[slot]), lane == 0);
      const Gates& gates = sm.gates[at % C::kStages];
      pre = gates.pre, post = gates.post, steep = gates.steep;
      wgmma_wait<0>();
      pin(x);
    };
    if (any) {
      read_chunk(sm, y, it, slot, warp);
      make_du(it, false);
    }
    // Where it turns, no product is on its way: the compiler would wait for it there.
#pragma unroll 1
    while (left > 0) {
      const uint32_t s = it % C::kStages;
      const int lane = fresh_lane();
      const bool lead = lane == 0;
      const uint32_t tline = transposed_line(warp, lane);
      const Gates& gates = sm.gates[s];
      const auto& stage = sm.stages[s];
      uint32_t u[16], next[16];
      if (post != 1.f) scale_state(S, post);
      if (steep) {  // 2^d do'
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
      if (C::kBeginsAhead && left > 1) read_chunk(sm, next, it + 1, slot, warp);
      float f[16];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float4 cf = gates.x[j * 4 + lane % 4];
        f[2 * j] = cf.z, f[2 * j + 1] = cf.w;
      }
      pin(f);
      wgmma_wait<1>();
      pin(x);
#pragma unroll
      for (int at = 0; at < 32; at += 2) u[at / 2] = pack(T{}, -f[at / 4 * 2] * x[at], -f[at / 4 * 2 + 1] * x[at + 1]);
      const Descriptor k_columns = mn_major(shared_address(stage.k));
      pin(u);
      pin(S);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) wgmma_rs_n128_mn(T{}, S, u + 4 * i, k_columns.at(i * 2048), 1);
      wgmma_commit();
      // dx and dv, under the products of the state.
      wait_for(sm.dx_empty[slot], it + 1);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t d4[4], v4[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = 8 * j + 2 * i;
          const float4 cf = gates.x[at / 4 * 4 + lane % 4];
          d4[i] = pack(T{}, x[at], x[at + 1]);
          v4[i] = pack(T{}, cf.x * x[at], cf.y * x[at + 1]);
        }
        stmatrix_x4_trans(shared_address(sm.dx[slot]) + j * 2048 + tline, d4);
        stmatrix_x4_trans(shared_address(sm.dv[slot]) + j * 2048 + tline, v4);
      }
      fence_async_proxy();
      __syncwarp();
      mbarrier_arrive_if(shared_address(&sm.dx_full[slot]), lead);
      if (C::kBeginsAhead && left > 1) {
        wgmma_fence();
        issue_pairs(sm, x, next, it + 1);
        wgmma_commit();
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      pin(S);
      if (pre != 1.f) scale_state(S, pre);
      __syncwarp();
      mbarrier_arrive_if(shared_address(&sm.empty[s]), lead);
      ++it;
      if (--left == 0) break;
      if constexpr (C::kBeginsAhead) {
#pragma unroll
        for (int i = 0; i < 16; ++i) y[i] = next[i];
      } else {
        read_chunk(sm, y, it, slot, warp);
      }
      make_du(it, C::kBeginsAhead);
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
      if constexpr (C::kMaker) mbarrier_init(&sm.maker.made[i], 4);
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
  } else if (warpgroup <= C::kStates) {
    raise_registers<C::kStateRegisters>();
    state(sm, params, warpgroup - 1, warp % 4);
  } else if constexpr (C::kMaker) {
    raise_registers<kMakerRegisters>();
    if (makes_triangles_walking(params)) make_triangles(sm, params, warp % 4);
  }
}

template <class C>
const char* launch(Params& params, cudaStream_t stream) {
  const ChunkForward& p = params.problem.forward;
  params.tiles = p.N * p.HV * C::kTileParts;
  const unsigned blocks = unsigned(params.tiles < p.multiprocessors ? params.tiles : p.multiprocessors);
  return launch_blocks(&walk_back_kernel<C>, params, blocks, C::kThreads, sizeof(Memory<C>), 1, false, stream);
}
}  // namespace

bool walks_back_over_halves(const ChunkForward& p) { return 2 * p.N * p.HV <= p.multiprocessors; }

const char* run_walk_back(Params& params, cudaStream_t stream) {
  using T = __nv_bfloat16;
  if (walks_back_over_halves(params.problem.forward)) return launch<Back<T, 1>>(params, stream);
  return launch<Back<T, 2>>(params, stream);
}

}  // namespace gdn::sm90::backward
