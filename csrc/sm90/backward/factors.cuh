// The factors of a chunk's tokens, made once for all kernels (frame.cuh defines the symbols), and
// values derived from them.
#pragma once
#include "common/ptx.cuh"
#include "sm90/tile/chunk.h"
#include "sm90/tile/frame.cuh"

namespace gdn::sm90::backward {

// Whether the walk forward reads dv in place of dx. A row of dv is a row of dx times beta 2^-e, by
// which the walk divides its results. In fp16 a row of dv may be below the normal numbers where the
// row of dx is not: there dx is stored as well.
template <class T>
constexpr bool kReadsDv = Frame<T>::kSteepUnits > 0;
// Where |beta| is below kLeastBeta, a row of dv would be 0, or have fewer digits than the row of
// dx. There the walk back stores the row of dx in the memory of dv, and sums.cu replaces it by the
// row of dv.
constexpr float kLeastBeta = 0x1p-60f;
GDN_DEVICE bool is_beta_small(float beta) { return fabsf(beta) < kLeastBeta; }

// The factors of a chunk and value head.
struct ChunkFactors {
  float4 x[kChunk / 2];  // of tokens 2 i, 2 i + 1: (c0, c1, f0, f1) in x = c v - f (k S): beta
                         // 2^-e, beta 2^d
  float read[kChunk];    // scale 2^e: do in the frame
  float start[kChunk];   // scale 2^(d + e): the factor of q S in o
  float beta[kChunk];
  float c[kChunk];  // 2^-e
  // Rows of dx times this are rows of dv: beta 2^-e, or with kReadsDv 1 where beta is small.
  float dv[kChunk];
  int16_t power[kChunk];  // d
  float pre, post, end;   // as in GateVectors
  int steep;              // D, frame.cuh, which is below 0 there; 0: the chunk is mild
};
static_assert(sizeof(ChunkFactors) % 16 == 0, "copied in lines of 16 bytes");

// Whether a token of a steep chunk with d > D may matter at the chunk's end. Otherwise such a token
// adds at most 2^-kSteepUnits of its u to the state, and is added without the factor.
template <class T>
constexpr bool kDecaysToEnd = Frame<T>::kSteepUnits == 0;

// The largest exponent of fp32.
constexpr int kMostExponent = 127;
// 2^e for a whole number e of at most kMostExponent; 0 below the normal numbers.
GDN_DEVICE float power_of_two_float(int e) { return __int_as_float(max(e + 127, 0) << 23); }
// 2^(D - d) of tokens 2 i and 2 i + 1 of a steep chunk.
GDN_DEVICE float2 end_factors(const ChunkFactors& factors, int i) {
  const short2 d = reinterpret_cast<const short2*>(factors.power)[i];
  return make_float2(power_of_two_float(factors.steep - d.x),
                     power_of_two_float(factors.steep - d.y));
}

// The factor from the row that the walk forward reads, of dv or dx, to the row of dx.
template <class T>
GDN_DEVICE float of_dx(const ChunkFactors& factors, int row) {
  return kReadsDv<T> ? __fdividef(1.f, factors.dv[row]) : 1.f;
}

}  // namespace gdn::sm90::backward
