// The frame of the state: the power of two in which the state is held, and the factors of tokens
// that follow from it.
//
// With g_i the chunk-local inclusive sum of log2 decays and a state S = 2^G S' before the chunk,
// the chunk's equations
//     u = (I + A)^-1 beta (v - 2^g k S),  A_ij = beta_i (k_i . k_j) 2^(g_i - g_j),  i > j
//     o = scale (2^g q S + P u),          P_ij = (q_i . k_j) 2^(g_i - g_j),         i >= j
//     S <- 2^g_last S + k^T 2^(g_last - g) u
// become, for u'_i = 2^-e_i u_i with any e_i, d_i = G + g_i - e_i and S_next = 2^G1 S'_next,
//     u' = (I + A')^-1 beta (2^-e v - 2^d k S'),  A'_ij = beta_i (k_i . k_j) 2^(d_i - d_j)
//     o  = scale 2^(e - y) (2^(d + y) q S' + P' u'),  P'_ij = (q_i . k_j) 2^(y_i + d_i - d_j)
//     S'_next = 2^D S' + sum_j 2^(D - d_j) k_j^T u'_j,    D = G + g_last - G1
// with any y. In most chunks e = G + g, d = y = D = 0 and G1 = G + g_last: no matrix has a decay.
// This is exact as long as G stays in a range that the dtype's exponent covers; S' is brought back
// to the top of the range where a chunk would leave it.
//
// A chunk whose own decay is wider than the range is *steep*. Its e_i stay below kSteepUnits + 1,
// and the rest of the decay, d_i, is a whole number. Every factor on a 16-bit operand is therefore
// an exact power of two. From one token to a later one e grows by at most 1: an entry of A' or P'
// that is flushed to 0 is then small compared with u_j.
#pragma once
#include <cmath>

#include "common/ptx.cuh"

namespace gdn::sm90 {

// G stays in [kTop - kRange, kTop] from chunk to chunk. A steep chunk reads a state with G in [0,
// kTop] and leaves one with G in [0, 1). In a steep chunk, tokens whose decay to the chunk's end is
// less than kSteepUnits have d = D; the others have e in [kSteepUnits, kSteepUnits + 1).
template <class T>
struct Frame;
template <>
struct Frame<__nv_bfloat16> {
  static constexpr float kTop = 24, kRange = 96, kSteepUnits = 49;
  // y = -d: then q S' has no factor. P' u' is at most 2^kMostLift times P u, as the u' of mild
  // chunks are, and r is a normal number.
  static constexpr bool kLiftsOutput = false;
  static constexpr float kMostLift = 72, kMostPower = 100;
};
template <>
struct Frame<__half> {
  static constexpr float kTop = 4, kRange = 8, kSteepUnits = 0;
  // Neither P' nor u' has room for 2^y: P' u' is multiplied by it in fp32.
  static constexpr bool kLiftsOutput = true;
  static constexpr float kMostLift = 96, kMostPower = 96;
};

// The frame of one chunk.
struct ChunkFrame {
  float G;      // of the state that the chunk reads
  float enter;  // log2 of the factor that brings S' into that frame
  float D;      // log2 of the factor of S' before the chunk's tokens are added; whole
  float next;   // G after the chunk
  bool steep;
};

// G: after the previous chunk, or kTop; last: the log2 decay of the whole chunk; anew: the chunk
// reads a state at the top of the range, whatever G is.
template <class T>
GDN_HOST_DEVICE ChunkFrame chunk_frame(float G, float last, bool anew = false) {
  using F = Frame<T>;
  ChunkFrame x = {G, 0, 0, 0, last < -F::kRange};
  const bool outside =
      x.steep ? G < 0 || G > F::kTop : G + last < F::kTop - F::kRange || G + last > F::kTop + 16.f;
  if (outside || anew) {
    x.enter = G - F::kTop;
    x.G = F::kTop;
  }
  if (x.steep) x.D = floorf(x.G + last);
  x.next = x.G + last - x.D;
  return x;
}

// The exponents of one token, as above.
struct TokenFrame {
  float e, d, y;  // d and y are whole numbers
};

// g: the log2 decay from the chunk's start to the token, inclusive.
template <class T>
GDN_HOST_DEVICE TokenFrame token_frame(const ChunkFrame& chunk, float g) {
  using F = Frame<T>;
  const float in_frame = chunk.G + g;
  if (!chunk.steep) return {in_frame, 0, 0};  // also where g dips below the range
  const float d = fmaxf(chunk.D, floorf(in_frame - F::kSteepUnits)), e = in_frame - d;
  const float most =
      F::kLiftsOutput ? F::kMostPower : fminf(F::kMostLift + floorf(e), F::kMostPower);
  return {e, d, fminf(-d, most)};
}

}  // namespace gdn::sm90
