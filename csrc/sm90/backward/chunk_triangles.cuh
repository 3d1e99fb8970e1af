// T of a chunk and value head, and the decayed q k^T of a steep chunk, from k k^T and q k^T: made
// by a separate kernel (triangles.cu), or by a warpgroup of the walk back.
#pragma once
#include "sm90/backward/layout.cuh"
#include "sm90/tile/triangles.cuh"

namespace gdn::sm90::backward {

// The configuration of Triangles: one path for steep and mild chunks.
template <class Type>
struct Alone {
  using T = Type;
  static constexpr int kKeys = kChannels, kStates = 1;
  static constexpr bool kTwoShapes = false;
};
// Tiles in which T is made, as in the forward's inverse warpgroups.
struct InverseScratch {
  uint8_t a[kTileBytes], inverse[kTileBytes];
};

// Zeroes whole tiles, by 128 threads. Blocks above the diagonal of a triangle are read, and never
// written.
GDN_DEVICE void clear_tiles(uint8_t* from, uint32_t tiles, uint32_t thread) {
#pragma unroll 1
  for (uint32_t i = thread; i < tiles * kTileBytes / 16; i += 128)
    reinterpret_cast<uint4*>(from)[i] = make_uint4(0, 0, 0, 0);
}

// Copies the factors that Triangles reads, by 128 threads.
GDN_DEVICE void copy_factors(GateVectors& to, const ChunkFactors& from, uint32_t thread) {
  if (thread < kChunk) {
    to.beta[thread] = from.beta[thread];
    to.left[thread] = int16_t(-from.power[thread]);
    to.score[thread] = from.power[thread];
  }
}

// Stores row strip `own.w` of a lower triangle, rounded.
template <class T>
GDN_DEVICE void store_lower(const Triangles<Alone<T>>& own, const float (&x)[32],
                            const uint8_t* tile) {
  own.store_strip(shared_address(tile), own.lower(0),
                  [&](int b, int i) { return pack(T{}, x[8 * b + 2 * i], x[8 * b + 2 * i + 1]); });
}

// Stores row strip `own.w` of a steep chunk's decayed q k^T, made from the rounded q k^T: the
// factors are powers of two.
template <class T>
GDN_DEVICE void decay_pairs(const Triangles<Alone<T>>& own, const GateVectors& factors,
                            const uint8_t* from, uint8_t* to) {
  const uint32_t rows[2] = {biased_power<T>(factors.score[own.w * 16 + own.lane / 4]),
                            biased_power<T>(factors.score[own.w * 16 + own.lane / 4 + 8])};
  const auto* left = reinterpret_cast<const uint32_t*>(factors.left);
#pragma unroll 1
  for (int b = 0; b <= own.w; ++b) {
    uint32_t r[4];
    ldmatrix_x4(own.lines.block_at(shared_address(from), own.w, b), r);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      r[j] = multiply(T{}, r[j],
                      power_of_two<T>(rows[j % 2], left[8 * b + 4 * (j / 2) + own.lane % 4]));
    own.keep_lower(r, own.lower(0), b == own.w);
    stmatrix_x4(own.lines.block_at(shared_address(to), own.w, b), r);
  }
}

}  // namespace gdn::sm90::backward
