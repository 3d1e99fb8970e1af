// The state warpgroups of the walk forward: u and the state for 64 channels of V, as in state.cuh;
// then dk for 64 channels of K:
//     dk = w u dS^T - beta 2^d (dx S^T) + N k + N^T k + dP^T q + own q
// w is that of walk_back.cu, S the state before the chunk, and dS the gradient after it, both
// rounded in their tiles.
#pragma once
#include "sm90/backward/segments/windows.cuh"
#include "sm90/backward/state_step.cuh"
#include "sm90/backward/walk_forward_memory.cuh"

namespace gdn::sm90::backward {

// Row sums of x * tile for this thread's two rows, over its four lanes.
template <class T, int kBlocks>
GDN_DEVICE float2 row_sums(const float (&x)[8 * kBlocks], uint32_t tile, const Lines& lines,
                           int warp) {
  float s0 = 0, s1 = 0;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    uint32_t r[4];
    ldmatrix_x4(lines.block_at(tile + b / 4 * kTileBytes, warp, b % 4), r);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 t = unpack(T{}, r[i]);
      float& s = i % 2 ? s1 : s0;
      s += t.x * x[8 * b + 2 * i] + t.y * x[8 * b + 2 * i + 1];
    }
  }
#pragma unroll
  for (int d = 1; d < 4; d *= 2) {
    s0 += __shfl_xor_sync(~0u, s0, d);
    s1 += __shfl_xor_sync(~0u, s1, d);
  }
  return make_float2(s0, s1);
}

// Stores x + own * other, rounded, to the tiles `to`; `other`: tiles of the same rows.
template <class T, int kBlocks>
GDN_DEVICE void store_gradient(const float (&x)[8 * kBlocks], float own0, float own1,
                               uint32_t other, uint32_t to, const Lines& lines, int warp) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    uint32_t r[4];
    ldmatrix_x4(lines.block_at(other + b / 4 * kTileBytes, warp, b % 4), r);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 t = unpack(T{}, r[i]);
      const float own = i % 2 ? own1 : own0;
      r[i] = pack(T{}, x[8 * b + 2 * i] + own * t.x, x[8 * b + 2 * i + 1] + own * t.y);
    }
    stmatrix_x4(lines.block_at(to + b / 4 * kTileBytes, warp, b % 4), r);
  }
  fence_async_proxy();
  __syncwarp();
}

// Writes the rounded state before a chunk to its tile.
template <class T>
GDN_DEVICE void give_state(const float (&S)[64], WalkMemory& sm, uint32_t it, int half, int warp) {
  wait_for(sm.S_empty, it + 1);
  const int lane = fresh_lane();
  const Lines lines(lane);
#pragma unroll
  for (int b = 0; b < 8; ++b) {
    uint32_t r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i] = pack_again(T{}, S[8 * b + 2 * i], S[8 * b + 2 * i + 1]);
    stmatrix_x4(lines.block_at(shared_address(sm.S[half][b / 4]), warp, b % 4), r);
  }
  fence_async_proxy();
  __syncwarp();
  arrive(sm.S_full, lane == 0);
}

// Advances S by a chunk; the chunk's u and the S before it are written to their tiles.
template <class Kind>
GDN_DEVICE void advance_state(float (&S)[64], WalkMemory& sm, uint32_t it, int half, int warp) {
  using T = typename Kind::T;
  constexpr bool kGivesEarly = Kind::kExact;  // other kinds would spill
  const uint32_t stage = it % 2;
  const int lane = fresh_lane();
  const bool lead = lane == 0;
  const ChunkFactors& factors = sm.factors[stage];
  const uint32_t k_tile = shared_address(sm.k[stage]);
  const auto give = [&] { give_state<T>(S, sm, it, half, warp); };
  uint32_t u[16];
  make_u<T, 2>(
      S, u, factors, k_tile, shared_address(sm.v[half]), shared_address(sm.t), warp, lane,
      [&] { wait_for(sm.v_full, it); }, [&](bool one) { arrive(sm.v_empty, one); },
      [&] { wait_for(sm.t_full, it); },
      [&] {
        if constexpr (kGivesEarly) give();
      },
      [&] { arrive(sm.t_empty, lead); });
  wait_for(sm.u_empty, it + 1);
  const uint32_t u_tile = shared_address(sm.u[half]) + transposed_line(warp, lane);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t r[4] = {u[4 * j], u[4 * j + 1], u[4 * j + 2], u[4 * j + 3]};
    stmatrix_x4_trans(u_tile + j * 2048, r);
  }
  fence_async_proxy();
  __syncwarp();
  arrive(sm.u_full, lead);
  if constexpr (!kGivesEarly) {
    pin(S);
    give();
  }
  update_state<T>(S, u, factors, k_tile);
}

// dk of 64 channels of K. The update of the state may still run.
template <class T>
GDN_DEVICE void key_gradient(float (&S)[64], WalkMemory& sm, const Params& params, uint32_t it,
                             int half, int warp) {
  const uint32_t stage = it % 2;
  const int lane = fresh_lane();
  const bool lead = lane == 0;
  const Lines lines(lane);
  const int row = 16 * warp + lane / 4;
  const uint32_t k_half = shared_address(sm.k[stage][half]);
  float acc[32];
  wait_for(sm.dx_full, it);
  wait_for(sm.S_full, it);
  {
    const Descriptor dx = k_major(shared_address(sm.dx)),
                     columns = mn_major(shared_address(sm.S[0][half]));
    wgmma_fence();
    set_ss_n64_mn(T{}, acc, dx.at(0), columns.at(0));
#pragma unroll
    for (int i = 1; i < 8; ++i)
      add_ss_n64_mn(T{}, acc, dx.at(i / 4 * kTileBytes + i % 4 * 32),
                    columns.at(i / 4 * 2 * kTileBytes + i % 4 * 2048));
    wgmma_commit();
  }
  wait_for(sm.ds_full, it);
  wgmma_wait<1>();  // for the update of the state, whose operands have registers that `given` needs
  pin(S);
  wait_for(sm.u_full, it);
  float given[32];
  {
    const Descriptor u = k_major(shared_address(sm.u)),
                     columns = mn_major(shared_address(sm.ds[0][half]));
    wgmma_fence();
    set_ss_n64_mn(T{}, given, u.at(0), columns.at(0));
#pragma unroll
    for (int i = 1; i < 8; ++i)
      add_ss_n64_mn(T{}, given, u.at(i / 4 * kTileBytes + i % 4 * 32),
                    columns.at(i / 4 * 2 * kTileBytes + i % 4 * 2048));
    wgmma_commit();
  }
  wgmma_wait<1>();
  pin(acc);
  arrive(sm.S_empty, lead);
  arrive(sm.dx_empty, lead);
  const float2 read = row_sums<T, 4>(acc, k_half, lines, warp);
  float2 factor;
  {
    const float* const x = reinterpret_cast<const float*>(sm.factors[stage].x);
    factor.x = x[row / 2 * 4 + 2 + row % 2] * of_dx<T>(sm.factors[stage], row);
    factor.y = x[row / 2 * 4 + 16 + 2 + row % 2] * of_dx<T>(sm.factors[stage], row + 8);
  }
  wgmma_wait<0>();
  pin(given);
  arrive(sm.u_empty, lead);
  arrive(sm.ds_empty, lead);
  if constexpr (kDecaysToEnd<T>) {  // each row of u dS^T has a separate factor
    if (const int D = sm.factors[stage].steep) {
      const float w0 = power_of_two_float(D - sm.factors[stage].power[row]);
      const float w1 = power_of_two_float(D - sm.factors[stage].power[row + 8]);
#pragma unroll
      for (int i = 0; i < 32; ++i) given[i] *= i % 4 < 2 ? w0 : w1;
    }
  }
  const float2 behind = row_sums<T, 4>(given, k_half, lines, warp);
#pragma unroll
  for (int i = 0; i < 32; ++i) acc[i] = given[i] - (i % 4 < 2 ? factor.x : factor.y) * acc[i];
  if (lane % 4 == 0) {
    const int64_t at = int64_t{sm.chunk[stage].block} * (kParts * kChunk) + half * kChunk + row;
    float* const parts = params.scratch.parts + at;
    parts[kReadPart * kChunk] = read.x;
    parts[kReadPart * kChunk + 8] = read.y;
    parts[kBehindPart * kChunk] = behind.x;
    parts[kBehindPart * kChunk + 8] = behind.y;
  }
  wait_for(sm.n_full, it);
  {
    const Descriptor n = k_major(shared_address(sm.n)), transposed = mn_major(shared_address(sm.n));
    const Descriptor columns = mn_major(k_half);
    pin(acc);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) add_ss_n64_mn(T{}, acc, n.at(i * 32), columns.at(i * 2048));
#pragma unroll
    for (int i = 0; i < 4; ++i)
      add_ss_n64_transposed_mn(T{}, acc, transposed.at(i * 2048), columns.at(i * 2048));
    wgmma_commit();
  }
  wait_for(sm.q_full, it);
  {
    const Descriptor dp = mn_major(shared_address(sm.qk)),
                     columns = mn_major(shared_address(sm.q[half]));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i)
      add_ss_n64_transposed_mn(T{}, acc, dp.at(i * 2048), columns.at(i * 2048));
    wgmma_commit();
  }
  const float own0 = sm.own[row], own1 = sm.own[row + 8];
  wgmma_wait<0>();
  pin(acc);
  __syncwarp();
  arrive(sm.k_empty[stage], lead);
  arrive(sm.pairs_empty, lead);
  const uint32_t q = shared_address(sm.q[half]);
  wait_for(sm.q_read, it);
  named_barrier(2 + half, 128);  // this half of q has been read by all
  store_gradient<T, 4>(acc, own0, own1, q, q, lines, warp);
  arrive(sm.dk_full, lead);
}

// Loads the state that a later segment starts from, which the forward has left, in the frame.
template <class Kind>
GDN_DEVICE void load_checkpoint(float (&S)[64], const Params& params, const BackTile<Kind>& tile,
                                int half, int warp) {
  const ChunkForward& p = params.problem.forward;
  const int64_t first = p.cu_seqlens ? sequence_bound(p, tile.n)
                                     : tile.n * p.T;  // the sequence's first token in the call
  const int64_t row = first / params.problem.checkpoint_interval + tile.part - 1;
  load_matrix(S, state_of(params.problem.states, row * p.HV + tile.slice, half, warp));
  scale_state(S, exp2_approx(-params.scratch.G[int64_t{tile.chunk_index} * p.HV + tile.slice]));
}

// Loads the state that a tile starts from, in the frame.
template <class Kind>
GDN_DEVICE void begin_state(float (&S)[64], const Params& params, int index, int half, int warp) {
  // Opaque to the compiler, which would otherwise keep values that depend on them across tiles, and
  // spill.
  if constexpr (!Kind::kExact) asm volatile("" : "+r"(half), "+r"(warp));
  const BackTile<Kind> tile = forward_tile<Kind>(params, index);
  if (params.segment == 0 || tile.part == 0) {
    load_initial<Kind>(S, params, tile, half, warp);
  } else if (Kind::kExact && has_states(params)) {
    load_checkpoint<Kind>(S, params, tile, half, warp);
  } else {
    load_matrix(S, state_of(starts_of<Kind>(params, tile.n), index, half, warp));
  }
}

// Compares the final state of a segment that forgets with the state that the next one started from.
GDN_DEVICE void check_end(const float (&S)[64], const Params& params, int ended, int half,
                          int warp) {
  StateDifference difference;
  difference.add(S, state_of(params.scratch.starts, ended, half, warp));
  difference.judge(params.maps.wrong);
}

template <class Kind, bool kCut>
GDN_DEVICE void states(WalkMemory& sm, const Params& params, int half, int warp) {
  using T = typename Kind::T;
  float S[64];
#pragma unroll 1
  for (uint32_t it = 0;; ++it) {
    wait_for(sm.k_full[it % 2], it / 2);
    const Announced chunk = sm.chunk[it % 2];
    if constexpr (kCut)
      if (chunk.ended >= 0) check_end(S, params, chunk.ended, half, warp);
    if (chunk.block < 0) return;
    if (chunk.begins >= 0) begin_state<Kind>(S, params, chunk.begins, half, warp);
    advance_state<Kind>(S, sm, it, half, warp);
    key_gradient<T>(S, sm, params, it, half, warp);
  }
}

}  // namespace gdn::sm90::backward
