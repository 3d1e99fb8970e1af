// A step of the state, for all walks forward, and the products with do of the walks back.
#pragma once
#include "sm90/backward/matrices.cuh"
#include "sm90/tile/products.cuh"
#include "sm90/tile/triangles.cuh"

namespace gdn::sm90::backward {

// Loads 64 channels of V of the state that a sequence starts from, in the frame.
template <class Kind>
GDN_DEVICE void load_initial(float (&S)[64], const Params& params, const BackTile<Kind>& tile,
                             int half, int warp) {
  const ChunkForward& p = params.problem.forward;
  if (p.h0 == nullptr) return clear_state(S);
  const int lane = fresh_lane(), v = tile.v(params) + half * 64;
  const int64_t at = tile.n * p.h0_n + tile.hv(params) * p.h0_h +
                     (v + state_row(warp, lane)) * p.h0_v + state_column(lane) * p.h0_k;
  const float factor = exp2_approx(-Frame<typename Kind::T>::kTop);
  const auto load = [&](auto* from) {
    load_state(S, from + at, p.h0_k, p.h0_v, factor, channels_of<Kind>(params, v, warp));
  };
  if (p.h0_dtype == Dtype::kFloat32) {
    load(static_cast<const float*>(p.h0));
  } else if (p.h0_dtype == Dtype::kFloat16) {
    load(static_cast<const __half*>(p.h0));
  } else {
    load(static_cast<const __nv_bfloat16*>(p.h0));
  }
}

// The thread's first element of a state in an array with a state for each segment and slice.
template <class Float>
GDN_DEVICE Float* state_of(Float* states, int64_t index, int half, int warp) {
  const int lane = fresh_lane();
  return states + (index * kChannels + half * 64 + state_row(warp, lane)) * kChannels +
         state_column(lane);
}

// u of a steep chunk times 2^(D - d), as it is added to the state.
template <class T>
GDN_DEVICE void decay_to_end(uint32_t (&u)[16], const ChunkFactors& factors) {
  const int lane = fresh_lane();
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 factor = end_factors(factors, j * 4 + lane % 4);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 pair = unpack(T{}, u[2 * j + h]);
      u[2 * j + h] = pack(T{}, factor.x * pair.x, factor.y * pair.y);
    }
  }
}

// Reads do' = scale 2^e do of a chunk, transposed and rounded, from the tile of do. tline:
// transposed_line.
template <class T>
GDN_DEVICE void read_do(uint32_t (&y)[16], uint32_t tile, uint32_t tline,
                        const ChunkFactors& factors, int lane) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t d4[4];
    ldmatrix_x4_trans(tile + j * 2048 + tline, d4);
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const float2 f = reinterpret_cast<const float2*>(factors.read)[(2 * j + b) * 4 + lane % 4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 pair = unpack(T{}, d4[2 * b + h]);
        y[4 * j + 2 * b + h] = pack(T{}, f.x * pair.x, f.y * pair.y);
      }
    }
  }
  pin(y);
}

// Multiplies do' of a steep chunk by 2^d.
template <class T>
GDN_DEVICE void decay_do(uint32_t (&y)[16], const ChunkFactors& factors, int lane) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const uint32_t powers = reinterpret_cast<const uint32_t*>(factors.power)[j * 4 + lane % 4];
    if constexpr (kDecaysToEnd<T>) {  // the power may underflow in this dtype where the product
                                      // does not
      const short2 d = reinterpret_cast<const short2&>(powers);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 pair = unpack(T{}, y[2 * j + h]);
        y[2 * j + h] =
            pack(T{}, power_of_two_float(d.x) * pair.x, power_of_two_float(d.y) * pair.y);
      }
    } else {
      const uint32_t factor = power_of_two<T>(biased_power<T>(0), powers);
#pragma unroll
      for (int h = 0; h < 2; ++h) y[2 * j + h] = multiply(T{}, y[2 * j + h], factor);
    }
  }
}

// Makes the rounded u of a chunk from the state before it: x = c v - f (k S), u = x + T_s x.
// v_there() and t_there() wait for v and T, v_read(lane) and t_read() release them, and meanwhile()
// runs during the product T_s x. The state is rounded in four pieces, of which kPieces have
// registers at a time.
template <class T, int kPieces, class VThere, class VRead, class TThere, class Meanwhile,
          class TRead>
GDN_DEVICE void make_u(float (&S)[64], uint32_t (&u)[16], const ChunkFactors& factors,
                       uint32_t k_tile, uint32_t v_tile, uint32_t t_tile, int warp, int lane,
                       const VThere& v_there, const VRead& v_read, const TThere& t_there,
                       const Meanwhile& meanwhile, const TRead& t_read) {
  const uint32_t tline = transposed_line(warp, lane);
  float x[32];
  if (factors.pre != 1.f) scale_state(S, factors.pre);
  {
    const Descriptor rows = k_major(k_tile);
    uint32_t rounded[kPieces][8];
    const auto round = [&](int j) {
      uint32_t (&piece)[8] = rounded[j % kPieces];
#pragma unroll
      for (int i = 0; i < 8; ++i)
        piece[i] = pack_again(T{}, S[16 * j + 2 * i], S[16 * j + 2 * i + 1]);
      pin(piece);
    };
    const auto multiply_by = [&](int j) {
      uint32_t (&piece)[8] = rounded[j % kPieces];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint64_t at = rows.at(j / 2 * kTileBytes + (j % 2 * 2 + i) * 32);
        if (j + i == 0)
          set_rs_n64(T{}, x, piece, at);
        else
          wgmma_rs_n64(T{}, x, piece + 4 * i, at, 1);
      }
    };
    if constexpr (kPieces == 4) {
#pragma unroll
      for (int j = 0; j < 4; ++j) round(j);
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < 4; ++j) multiply_by(j);
      wgmma_commit();
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j >= kPieces) wgmma_wait<kPieces - 1>();
        round(j);
        wgmma_fence();
        multiply_by(j);
        wgmma_commit();
      }
    }
  }
  // c v is made while the product runs.
  v_there();
  // Factors f that are loaded ahead: in the walk forward more would spill.
  constexpr int kFactors = kPieces == 4 ? 8 : 1;
  float cv[32];
  float2 f[8];
  const auto load_factors = [&](int j) {
    f[j] = *reinterpret_cast<const float2*>(&factors.x[j * 4 + lane % 4].z);
  };
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t v4[4];
    ldmatrix_x4_trans(v_tile + j * 2048 + tline, v4);
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const float2 c = *reinterpret_cast<const float2*>(&factors.x[(2 * j + b) * 4 + lane % 4]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 pair = unpack(T{}, v4[2 * b + h]);
        const int at = 4 * (2 * j + b) + 2 * h;
        cv[at] = c.x * pair.x;
        cv[at + 1] = c.y * pair.y;
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kFactors; ++j) {
    load_factors(j);
    asm volatile("" : "+f"(f[j].x), "+f"(f[j].y)::"memory");
  }
  pin(cv);
  t_there();  // here: the compiler does not move arithmetic across the wait at a barrier
  wgmma_wait<0>();
  pin(x);
#pragma unroll
  for (int j = kFactors; j < 8; ++j) load_factors(j);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = 4 * j + 2 * h;
      x[at] = cv[at] - f[j].x * x[at];
      x[at + 1] = cv[at + 1] - f[j].y * x[at + 1];
      u[at / 2] = pack(T{}, x[at], x[at + 1]);
    }
  }
  v_read(lane == lane_after(u[3] ^ u[7] ^ u[11] ^ u[15]));
  const Descriptor rows = k_major(t_tile);
  pin(x);
  pin(u);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i) wgmma_rs_n64(T{}, x, u + 4 * i, rows.at(i * 32), 1);
  wgmma_commit();
  meanwhile();
  wgmma_wait<0>();
  pin(x);
  t_read();
#pragma unroll
  for (int i = 0; i < 16; ++i) u[i] = pack(T{}, x[2 * i], x[2 * i + 1]);
}

// Issues S <- 2^D S + k^T u. u is decayed to the chunk's end in place.
template <class T>
GDN_DEVICE void update_state(float (&S)[64], uint32_t (&u)[16], const ChunkFactors& factors,
                             uint32_t k_tile) {
  if (factors.post != 1.f) scale_state(S, factors.post);
  if constexpr (kDecaysToEnd<T>)
    if (factors.steep) decay_to_end<T>(u, factors);
  const Descriptor columns = mn_major(k_tile);
  pin(S);
  pin(u);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i) wgmma_rs_n128_mn(T{}, S, u + 4 * i, columns.at(i * 2048), 1);
  wgmma_commit();
}

}  // namespace gdn::sm90::backward
