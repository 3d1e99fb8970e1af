// Shared memory and barriers of the walks of wide keys, and their single warps, which load, make
// the factors of tokens, and store.
#pragma once
#include "sm90/backward/copies.cuh"
#include "sm90/backward/layout.cuh"

namespace gdn::sm90::backward {

constexpr int kHalves = 2, kKeyTiles = 4;  // of K: halves of 128 channels, tiles of 64 channels

template <class Type, int kStates_>
struct Wide {
  using T = Type;
  static constexpr int kStates = kStates_;  // state warpgroups, of 64 channels of V each
  static constexpr int kThreads = 128 * (1 + kStates);
  static constexpr int kSinglesRegisters = kStates == 1 ? 64 : 40, kStateRegisters = 232;
  static constexpr int kLaunchRegisters = launch_registers(kThreads, kStateRegisters);
  static_assert(kSinglesRegisters + kStates * kStateRegisters <= (1 + kStates) * kLaunchRegisters);
};

struct WideParams {
  CUtensorMap q, k, v, dO, A_inv, A_qk, h, dh, v_new, dx;
  BackwardWalks problem;
  int tiles, parts,
      chunks_of_batch;  // tiles of one direction; parts of V; chunks of a padded batch entry
  Divisor heads, group, by_parts;  // HV, value heads of a key head, parts
};

// The factors of a chunk's tokens; zeros past the sequence's end.
struct WideFactors {
  float4 x[kChunk / 2];  // of tokens 2 i, 2 i + 1: beta, beta, beta 2^g, beta 2^g
  float end[kChunk];     // 2^(g_last - g)
  float read[kChunk];    // scale 2^g
  float own[kChunk];     // A_qk's diagonal
  float last;            // 2^g_last
};

struct Buffer {
  uint64_t full, empty;
};
template <class C>
struct WideMemory {
  alignas(1024) uint8_t k[2][kKeyTiles][kTileBytes];
  uint8_t q[kKeyTiles][kTileBytes];                   // back
  uint8_t values[C::kStates][kTileBytes];             // v, or do
  uint8_t A_inv[1][kTileBytes], A_qk[1][kTileBytes];  // A_qk: back
  uint8_t state[C::kStates][kKeyTiles][kTileBytes];   // h or dh: rows are channels of K
  uint8_t result[C::kStates][kTileBytes];             // v_new or dx
  WideFactors factors[2];
  Buffer of_k[2], of_factors[2], of_q, of_values, of_A_inv, of_A_qk, of_state[C::kStates],
      of_result[C::kStates];
  uint64_t aside;  // of the loader
};

// The tile of a block: the chunks of a sequence, in the order of the walk.
template <bool kBack>
struct WideTile {
  int n, hv, h, batch, first, length, v;  // v: the first channel of V
  int64_t chunk_index;                    // of the first chunk
  GDN_DEVICE int chunks() const { return length > 0 ? (length + kChunk - 1) / kChunk : 0; }
  GDN_DEVICE int chunk(int i) const { return kBack ? chunks() - 1 - i : i; }
};
template <class C, bool kBack>
GDN_DEVICE WideTile<kBack> wide_tile(const WideParams& params) {
  const ChunkForward& p = params.problem.forward;
  int index = int(blockIdx.x) % params.tiles;
  WideTile<kBack> x;
  const int pair = params.by_parts.divide(index);
  x.v = (index - pair * params.parts) * 64 * C::kStates;
  x.n = params.heads.divide(pair);
  x.hv = pair - x.n * p.HV;
  x.h = params.group.divide(x.hv);
  x.batch = p.cu_seqlens ? 0 : x.n;
  x.first = p.cu_seqlens ? int(sequence_bound(p, x.n)) : 0;
  x.length = sequence_length(p, x.n);
  x.chunk_index = p.cu_seqlens ? int64_t{params.problem.chunk_offsets[x.n]}
                               : int64_t{x.n} * params.chunks_of_batch;
  return x;
}

template <class C, bool kBack>
GDN_DEVICE void load(WideMemory<C>& sm, const WideParams& params) {
  const auto tile = wide_tile<C, kBack>(params);
  uint32_t aside_phase = 0;
#pragma unroll 1
  for (int it = 0; it < tile.chunks(); ++it) {
    const int c = tile.chunk(it), row = tile.first + c * kChunk, rows = tile.length - c * kChunk;
    const auto fill = [&](auto& to, const CUtensorMap& map, Buffer& buffer, uint32_t use,
                          int column, int head) {
      constexpr int kTiles = sizeof(to) / kTileBytes;
      wait_for(buffer.empty, use + 1);
      load_rows<kTiles>(map, to, buffer.full, sm.aside, aside_phase, column, row, head, tile.batch,
                        rows, 0, Nothing{});
    };
    fill(sm.k[it % 2], params.k, sm.of_k[it % 2], it / 2, 0, tile.h);
    fill(sm.values, kBack ? params.dO : params.v, sm.of_values, it, tile.v, tile.hv);
    if constexpr (kBack) fill(sm.A_qk, params.A_qk, sm.of_A_qk, it, 0, tile.hv);
    fill(sm.A_inv, params.A_inv, sm.of_A_inv, it, 0, tile.hv);
    if constexpr (kBack) fill(sm.q, params.q, sm.of_q, it, 0, tile.h);
  }
}

// A lane has tokens 2 lane and 2 lane + 1.
template <class C, bool kBack>
GDN_DEVICE void make_factors(WideMemory<C>& sm, const WideParams& params) {
  const ChunkForward& p = params.problem.forward;
  const auto tile = wide_tile<C, kBack>(params);
  const int lane = threadIdx.x % 32;
  struct Given {
    float g[2], beta[2], own[2], last;
  } next = {};
  const auto read = [&](int it) {
    const int c = tile.chunk(it), rows = min(tile.length - c * kChunk, kChunk),
              row = tile.first + c * kChunk;
    const auto at = [&](const Rows& x, int token) {
      const int64_t offset = tile.batch * x.batch + tile.hv * x.head + int64_t{row + token} * x.row;
      return static_cast<const float*>(x.data)[offset];
    };
    next.last = at(p.g, rows - 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool inside = 2 * lane + i < rows;
      next.g[i] = inside ? at(p.g, 2 * lane + i) : INFINITY;  // 2^(last - g) is 0
      next.beta[i] = inside ? at(p.beta, 2 * lane + i) : 0.f;
      next.own[i] = kBack && inside ? at(params.problem.own, 2 * lane + i) : 0.f;
    }
  };
  if (tile.chunks() > 0) read(0);
#pragma unroll 1
  for (int it = 0; it < tile.chunks(); ++it) {
    const Given given = next;
    if (it + 1 < tile.chunks()) read(it + 1);
    wait_for(sm.of_factors[it % 2].empty, it / 2 + 1);
    WideFactors& factors = sm.factors[it % 2];
    float decay[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool inside = given.g[i] != INFINITY;
      decay[i] = inside ? exp2_approx(given.g[i]) : 0.f;
      factors.end[2 * lane + i] = inside ? exp2_approx(given.last - given.g[i]) : 0.f;
      factors.read[2 * lane + i] = p.scale * decay[i];
      factors.own[2 * lane + i] = given.own[i];
    }
    factors.x[lane] = make_float4(given.beta[0], given.beta[1], given.beta[0] * decay[0],
                                  given.beta[1] * decay[1]);
    if (lane == 0) factors.last = exp2_approx(given.last);
    __syncwarp();
    arrive(sm.of_factors[it % 2].full, lane == 0);
  }
}

template <class C, bool kBack>
GDN_DEVICE void store(WideMemory<C>& sm, const WideParams& params, int warpgroup) {
  const ChunkForward& p = params.problem.forward;
  const auto tile = wide_tile<C, kBack>(params);
  const int v = tile.v + 64 * warpgroup, lane = threadIdx.x % 32;
  const CUtensorMap &states = kBack ? params.dh : params.h,
                    &values = kBack ? params.dx : params.v_new;
  uint16_t* const rows_to =
      static_cast<uint16_t*>(kBack ? params.problem.dx : params.problem.v_new);
#pragma unroll 1
  for (int it = 0; it < tile.chunks(); ++it) {
    const int c = tile.chunk(it), row = tile.first + c * kChunk, rows = tile.length - c * kChunk;
    wait_for(sm.of_state[warpgroup].full, it);
    if (lane == 0 && v < p.V) {
      for (int i = 0; 64 * i < p.K; ++i)
        tma_store(&states, shared_address(sm.state[warpgroup][i]), v, 64 * i, 0,
                  int((tile.chunk_index + c) * p.HV + tile.hv));
      tma_store_commit();
      tma_store_wait_read();
    }
    __syncwarp();
    arrive(sm.of_state[warpgroup].empty, lane == 0);
    wait_for(sm.of_result[warpgroup].full, it);
    if (rows >= kChunk) {
      if (lane == 0 && v < p.V) {
        tma_store(&values, shared_address(sm.result[warpgroup]), v, row, tile.hv, tile.batch);
        tma_store_commit();
        tma_store_wait_read();
      }
    } else {  // TMA would write into the next sequence
#pragma unroll 1
      for (int i = lane; i < rows * 8; i += 32) {
        if (v + i % 8 * 8 >= p.V) continue;
        uint32_t line[4];
        load_shared_16(
            shared_address(sm.result[warpgroup]) + i / 8 * 128 + (i % 8 ^ i / 8 % 8) * 16, line);
        const int64_t at =
            ((tile.batch * p.T + row + i / 8) * p.HV + tile.hv) * p.V + v + i % 8 * 8;
        *reinterpret_cast<uint4*>(rows_to + at) = make_uint4(line[0], line[1], line[2], line[3]);
      }
    }
    __syncwarp();
    arrive(sm.of_result[warpgroup].empty, lane == 0);
  }
  if (lane == 0) tma_store_wait();
}

}  // namespace gdn::sm90::backward
