// Gates and betas: their dtypes, their activations, and the factors of a chunk's tokens.
#pragma once
#include "common/ptx.cuh"
#include "params.h"
#include "sm90/tile/chunk.h"

namespace gdn::sm90 {

constexpr float kGrowthLimit = 256.f;  // log2 units
constexpr float kLog2Floor = -160.f;   // LOG2_DECAY_FLOOR of gdn_triton/constants.py
constexpr float kRcpLn2 = 1.4426950408889634f;
constexpr float kSoftplusThreshold = 20.f;

// The bits of a number in memory: 32, or 16.
GDN_DEVICE uint32_t load_bits(const void* base, int64_t offset, Dtype dtype) {
  if (dtype == Dtype::kFloat32) return static_cast<const uint32_t*>(base)[offset];
  return static_cast<const uint16_t*>(base)[offset];
}
GDN_DEVICE float to_float(uint32_t bits, Dtype dtype) {
  if (dtype == Dtype::kFloat16) return __half2float(__ushort_as_half(uint16_t(bits)));
  return __uint_as_float(dtype == Dtype::kBFloat16 ? bits << 16 : bits);
}

// log(1 + e^x); x itself above the threshold, as in the formula of the models. Below e^x = 1/16 the
// series is used, and above it the rounding error of 1 + e^x is added back.
GDN_DEVICE float softplus(float x) {
  if (x > kSoftplusThreshold) return x;
  const float e = __expf(x);
  if (e < 0.0625f)
    return e * (1 - e * (1 / 2.f - e * (1 / 3.f - e * (1 / 4.f - e * (1 / 5.f - e / 6)))));
  const float u = 1 + e;
  return __logf(u) + __fdividef(e - (u - 1), u);
}

// Below this softplus(x) is e^x to the last bit.
constexpr float kSoftplusIsExp = -2 * kSoftplusThreshold;

// -exp(A_log) softplus(x). Where softplus(x) is e^x, one exponential of the sum replaces the
// product of two: exp(A_log) may overflow where e^x underflows, and inf * 0 is NaN.
GDN_DEVICE float log_decay(float x, float A_log) {
  const bool is_exp = x < kSoftplusIsExp;
  const float g = -__expf(is_exp ? A_log + x : A_log);
  return is_exp ? g : g * softplus(x);
}

// The derivative of log_decay by x. Where softplus is an exponential the decay g is its own
// derivative.
GDN_DEVICE float log_decay_slope(float x, float A_log, float g) {
  if (x < kSoftplusIsExp) return g;
  return -__expf(A_log) * (x > kSoftplusThreshold ? 1.f : 1.f / (1.f + __expf(-x)));
}

// The log2 decay of one token, not below the floor; a NaN stays a NaN.
GDN_DEVICE float log2_decay(const ChunkForward& p, float g, int hv) {
  if (p.use_gate) {
    if (p.dt_bias) g += p.dt_bias[hv];
    g = log_decay(g, p.A_log[hv]);
  }
  g *= kRcpLn2;
  return g < kLog2Floor ? kLog2Floor : g;
}

GDN_DEVICE float activate_beta(const ChunkForward& p, float beta) {
  if (!p.use_beta_sigmoid) return beta;
  return (p.allow_neg_eigval ? 2.f : 1.f) / (1.f + __expf(-beta));
}

// Factors of a chunk's tokens, made by the gates warp; frame.cuh defines the symbols e, d, y, D and
// G.
struct GateVectors {
  float4 x[kChunk / 2];  // of tokens 2 i, 2 i + 1: (c0, c1, f0, f1) in x' = c v - f (k S')
  float r[kChunk];       // o = r (q S' + P' u')
  float beta[kChunk];
  // In a steep chunk, exponents of the powers of two that stay in the triangles: A'_ij has -left_i
  // + left_j, P'_ij has score_i + left_j.
  int16_t left[kChunk];   // -d
  int16_t score[kChunk];  // y + d, or d where P' u' is lifted
  // Steep, fp16: 2^y, which multiplies P' u'; 2^d of q S' where that comes first.
  float lift[kChunk];
  float pre;   // S' is multiplied by this before the chunk reads it,
  float post;  // by this, 2^D, before it adds the chunk's u',
  float end;   // and by this, 2^G, to be the state after the chunk.
  int decay;   // D
  int steep;   // the chunk's decay does not fit the frame
};

}  // namespace gdn::sm90
