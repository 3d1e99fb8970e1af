// A state warpgroup: 64 channels of V and all chunks of a sequence, with its part of the state in
// registers.
//
// All matrices are transposed: rows are channels of V; columns are channels of K in the state, and
// tokens elsewhere. The fp32 state [64 x kKeys] is the accumulator of its update and, rounded, the
// register operand of its reads. A thread has rows 16 warp + lane/4 (+8), and columns 2 (lane % 4)
// (+1) of every 8.
#pragma once
#include "sm90/forward/state_memory.cuh"
#include "sm90/forward/walk.cuh"
#include "sm90/tile/triangles.cuh"

namespace gdn::sm90 {

template <class C>
struct State : StateMemory<C> {
  using T = typename C::T;
  using Memory = StateMemory<C>;
  using Memory::Memory, Memory::sm, Memory::lane, Memory::warpgroup, Memory::tile_line,
      Memory::kSize, Memory::S;
  using Rounded = uint32_t[C::kKeepsRounded ? kSize / 2 : 1];  // S in 16 bits

  // Brings the state into the chunk's frame, and rounds it for its reads.
  GDN_DEVICE void enter(Rounded& Sb, const GateVectors& gates) {
    if (gates.pre != 1.f) scale(gates.pre);
    if constexpr (C::kKeepsRounded) {
#pragma unroll
      for (int i = 0; i < kSize / 2; ++i) Sb[i] = pack(T{}, S[2 * i], S[2 * i + 1]);
    }
  }
  GDN_DEVICE void scale(float factor) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) S[i] *= factor;
  }

  // d [+]= S x^T for tiles x of 64 tokens x kKeys channels. Callers of these four functions pin all
  // operands in registers and call wgmma_fence() before.
  GDN_DEVICE void issue_read(float (&d)[32], const Rounded& Sb, uint32_t x, bool onto) {
    const Descriptor rows = k_major(x);
#pragma unroll
    for (int i = 0; i < C::kKeys / 16; ++i)
      wgmma_rs_n64(T{}, d, Sb + 4 * i, rows.at(i / 4 * kTileBytes + i % 4 * 32), onto || i > 0);
  }

  // x = S k^T and, for the output, o = S q^T. The state is rounded 32 columns at a time, into the
  // registers of the last piece but one. Both products are made together: with two separate reads
  // the compiler would keep the whole rounded state of the first one.
  GDN_DEVICE void issue_reads(float (&x)[32], float (&o)[32], uint32_t k, uint32_t q) {
    const Descriptor k_rows = k_major(k), q_rows = k_major(q);
    uint32_t Sb[2][8];
#pragma unroll
    for (int j = 0; j < C::kKeys / 32; ++j) {
      uint32_t (&piece)[8] = Sb[j % 2];
      if (j >= 2) wgmma_wait<1>();
#pragma unroll
      for (int i = 0; i < 8; ++i) piece[i] = pack(T{}, S[16 * j + 2 * i], S[16 * j + 2 * i + 1]);
      pin(piece);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t bytes = j / 2 * kTileBytes + (j % 2 * 2 + i) * 32;
        wgmma_rs_n64(T{}, x, piece + 4 * i, k_rows.at(bytes), j + i > 0);
        if constexpr (C::kOutput) wgmma_rs_n64(T{}, o, piece + 4 * i, q_rows.at(bytes), j + i > 0);
      }
      wgmma_commit();
    }
  }

  // d [+]= y m^T for a triangle m. Blocks above the diagonal are 0, and are multiplied too: with N
  // = 48, 32, 16 in the later steps ptxas would serialise all WGMMA (operands that overlap).
  GDN_DEVICE void issue_triangle(float (&d)[32], uint32_t (&y)[16], uint32_t m, bool onto) {
    const Descriptor rows = k_major(m);
#pragma unroll
    for (int i = 0; i < 4; ++i) wgmma_rs_n64(T{}, d, y + 4 * i, rows.at(i * 32), onto || i > 0);
  }

  // S += u k for the chunk's keys.
  GDN_DEVICE void issue_update(uint32_t (&u)[16], uint32_t k) {
    const Descriptor columns = mn_major(k);
    if constexpr (C::kKeys == 64) {
#pragma unroll
      for (int i = 0; i < 4; ++i) wgmma_rs_n64_mn(T{}, S, u + 4 * i, columns.at(i * 2048), 1);
    } else {
#pragma unroll
      for (int j = 0; j < C::kKeys / 128; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          wgmma_rs_n128_mn(T{}, S + 64 * j, u + 4 * i, columns.at(j * 2 * kTileBytes + i * 2048),
                           1);
    }
  }

  // x = c v - f (S k), in fp32 in the registers of S k, and rounded for the product with T.
  GDN_DEVICE void make_x(float (&x)[32], uint32_t (&rounded)[16], uint32_t v,
                         const GateVectors& gates, bool without_v) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t v4[4];
      ldmatrix_x4_trans(v + j * 2048 + tile_line, v4);
      if (C::kPass == Pass::kMaps && without_v) v4[0] = v4[1] = v4[2] = v4[3] = 0;
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const float4 cf = gates.x[(2 * j + b) * 4 + lane % 4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 pair = unpack(T{}, v4[2 * b + h]);
          const int at = 4 * (2 * j + b) + 2 * h;
          x[at] = cf.x * pair.x - cf.z * x[at];
          x[at + 1] = cf.y * pair.y - cf.w * x[at + 1];
          rounded[at / 2] = pack(T{}, x[at], x[at + 1]);
        }
      }
    }
  }

  // u' of a steep chunk times 2^(D - d), as it is added to the state.
  GDN_DEVICE void decay_to_end(uint32_t (&u)[16], const GateVectors& gates) {
    const uint32_t decay = biased_power<T>(gates.decay);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint32_t left = reinterpret_cast<const uint32_t*>(gates.left)[j * 4 + lane % 4];
      const uint32_t factor = power_of_two<T>(decay, left);
#pragma unroll
      for (int h = 0; h < 2; ++h) u[2 * j + h] = multiply(T{}, u[2 * j + h], factor);
    }
  }
  // Brings the part of o that is computed first into the units of the other part.
  GDN_DEVICE void lift(float (&o)[32], const GateVectors& gates) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 factor = reinterpret_cast<const float2*>(gates.lift)[j * 4 + lane % 4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        o[4 * j + 2 * h] *= factor.x;
        o[4 * j + 2 * h + 1] *= factor.y;
      }
    }
  }

  // Writes o = r O to its tile, for the store warp.
  GDN_DEVICE void emit(const float (&O)[32], const GateVectors& gates) {
    const uint32_t tile = shared_address(sm.o[warpgroup]) + tile_line;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t o4[4];
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const float2 r = reinterpret_cast<const float2*>(gates.r)[(2 * j + b) * 4 + lane % 4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int at = 4 * (2 * j + b) + 2 * h;
          o4[2 * b + h] = pack(T{}, O[at] * r.x, O[at + 1] * r.y);
        }
      }
      stmatrix_x4_trans(tile + j * 2048, o4);
    }
    fence_async_proxy();
    __syncwarp();
  }
};

template <class C>
GDN_DEVICE void state_role(SharedMemory<C>& sm, const KernelParams& params, int warpgroup,
                           int warp) {
  using T = typename C::T;
  using F = Frame<T>;
  State<C> state(sm, params, warpgroup);
  const bool lead = state.lane == 0;
  // A block of one tile has the loop over tiles too: ptxas allocates registers differently for a
  // body that is known to run once, and at K = 256 some spill.
  const uint32_t first = C::kOneTile ? blockIdx.x : 0, step = C::kOneTile ? gridDim.x : 1;
  uint32_t it = 0;  // chunks so far
  uint32_t q = 0;   // stage of the chunk's q
  static_assert(kTStages == 2 && kPStages == 2);
  constexpr bool kStops = C::kPool && C::kOutput;
  // Where P u' cannot have the units of q S', the one that is computed first is multiplied before
  // the other is added.
  constexpr bool kLiftsFirst = F::kLiftsOutput && C::kOutput && C::kKeepsRounded;
  constexpr bool kLiftsStatesPart = F::kLiftsOutput && C::kOutput && !C::kKeepsRounded;
  const auto more = [&](uint32_t turn) {
    if constexpr (C::kOneTile) {
      return int(turn) < params.tiles;
    } else {
      return enter_tile(sm, turn);
    }
  };

#pragma unroll 1
  for (uint32_t turn = first; more(turn); leave_tile(sm, turn), turn += step) {
    int left;
    bool without_v;
    {
      const Tile tile = tile_now(sm, turn);
      state.load(tile);
      left = tile.length;
      without_v = C::kPass == Pass::kMaps && tile.map == 1;
    }
    float end = exp2_approx(Frame<T>::kTop);
    do {
      int stop = 0;  // rows left where the state is stored next
      if constexpr (kStops) {
        stop = state.next_stop(tile_now(sm, turn), left);
        store_shared_4(shared_address(&sm.stop[warpgroup][warp]), stop);
      }
#pragma unroll 1
      for (; left > stop; left -= kChunk, ++it) {
        const uint32_t pair = it % 2, pair_phase = it / 2 & 1;
        const uint32_t k = it % C::kKStages, v = it % C::kVStages;
        const GateVectors& gates = sm.gates[it % C::kGateStages];
        const uint32_t k_tile = shared_address(sm.k[k]);
        float x[32] = {},
              o[32] = {};  // defined in each iteration, or they would be live across iterations
        typename State<C>::Rounded Sb;
        uint32_t u[16];

        wait(sm.gates_full[it % C::kGateStages], it / C::kGateStages & 1);
        if (left < kChunk)
          wait(sm.t_full[pair], pair_phase);  // the rows past the sequence's end are zeroed
        wait(sm.k_full[k], it / C::kKStages & 1);
        if constexpr (C::kStatesMakeP) {
          if (int(it % C::kStates) == warpgroup) {
            const Triangles<C> own(kStateBarrier + warpgroup, fresh_lane(), warp);
            wait(sm.q_full[q], it / C::kQStages & 1);
            own.issue_product(x, shared_address(sm.q[q]), k_tile);
            wgmma_wait<0>();
            pin(x);
            wait(sm.p_empty[pair], pair_phase ^ 1);
            own.finish_p(x, sm.p[pair], gates);
            arrive(sm.p_full[pair], lead);
          }
        }
        end = gates.end;
        state.enter(Sb, gates);
        if constexpr (C::kKeepsRounded) {
          pin(Sb);
          pin(x);
          wgmma_fence();
          state.issue_read(x, Sb, k_tile, false);
          wgmma_commit();
          if (gates.post != 1.f) state.scale(gates.post);  // while the product runs
        } else {
          if constexpr (C::kOutput) {
            wait(sm.q_full[q], it / C::kQStages & 1);
            pin(o);
          }
          pin(x);
          state.issue_reads(x, o, k_tile, shared_address(sm.q[q]));
        }

        wait(sm.v_full[v], it / C::kVStages & 1);
        wgmma_wait<0>();
        pin(x);
        if constexpr (!C::kKeepsRounded) {
          if constexpr (C::kOutput) pin(o);
          if (gates.post != 1.f) state.scale(gates.post);
        }
        if (left < kChunk) {  // the other rows of v belong to the next sequence, and may be NaN
          clear_rows<C>(sm.v[v][warpgroup], left);
          fence_async_proxy();
          named_barrier(kStateBarrier + warpgroup, 128);
        }
        state.make_x(x, u, shared_address(sm.v[v][warpgroup]), gates, without_v);
        arrive(sm.v_empty[v], state.lane == lane_after(u[3] ^ u[7] ^ u[11] ^ u[15]));
        wait(sm.t_full[pair], pair_phase);
        pin(x);
        pin(u);
        wgmma_fence();
        state.issue_triangle(x, u, shared_address(sm.t[pair]), true);
        wgmma_commit();
        wgmma_wait<0>();
        pin(x);
        arrive(sm.t_empty[pair], lead);

#pragma unroll
        for (int i = 0; i < 16; ++i) u[i] = pack(T{}, x[2 * i], x[2 * i + 1]);
        if constexpr (C::kOutput) {
          wait(sm.p_full[pair], pair_phase);
          if constexpr (C::kKeepsRounded) pin(Sb);
          if (kLiftsStatesPart && gates.steep) state.lift(o, gates);
          pin(o);
          pin(u);
          wgmma_fence();
          if constexpr (C::kKeepsRounded && !F::kLiftsOutput)
            state.issue_read(o, Sb, shared_address(sm.q[q]), false);
          state.issue_triangle(o, u, shared_address(sm.p[pair]), !kLiftsFirst);
          wgmma_commit();
        }
        if constexpr (F::kLiftsOutput) {
          if constexpr (C::kOutput) {
            wgmma_wait<0>();
            pin(o);
          }
          if (gates.steep) {
            if constexpr (kLiftsFirst) state.lift(o, gates);
            state.decay_to_end(u, gates);
          }
          if constexpr (kLiftsFirst) {
            pin(Sb);
            pin(o);
            wgmma_fence();
            state.issue_read(o, Sb, shared_address(sm.q[q]), true);
            wgmma_commit();
          }
        }
        pin(state.S);
        pin(u);
        wgmma_fence();
        state.issue_update(u, k_tile);
        wgmma_commit();

        if constexpr (C::kOutput) {
          wait(sm.o_empty[warpgroup], (it & 1) ^ 1);
          wgmma_wait<1>();
          pin(o);
          arrive(sm.p_empty[pair], lead);
          arrive(sm.q_empty[q], lead);
          if (++q == C::kQStages) q = 0;
          state.emit(o, gates);
          arrive(sm.o_full[warpgroup], lead);
        }
        __syncwarp();
        arrive(sm.gates_empty[it % C::kGateStages], lead);
        if constexpr (kStops)  // it had no register until here
          stop = load_shared_4(shared_address(&sm.stop[warpgroup][warp]));
        wgmma_wait<0>();
        pin(state.S);
        arrive(sm.k_empty[k], lead);
      }
      const Tile tile = tile_now(sm, turn);
      if constexpr (kStops) {
        state.zero_skipped(tile);
        state.store_at_stop(tile, left, end);
      } else {
        state.store(tile, end);
      }
      if constexpr (C::kPass == Pass::kSegments) {
        if (left <= 0 && state.has_guessed(tile)) state.compare_with_next(tile, end);
      }
    } while (kStops && left > 0);
  }
}

}  // namespace gdn::sm90
