// How a map lies in Cut::maps: each fp32 value as the sum of a high and a low bf16 value, which tensor cores take.
#pragma once
#include "sm90/backward/common.cuh"

namespace gdn::sm90::backward {

// Two fp32 values, each the sum of a high and a low bf16 value but for 2^-17 of it.
struct Split {
  uint32_t high, low;
};
GDN_DEVICE Split split(float x, float y) {
  const uint32_t high = pack(__nv_bfloat16{}, x, y);
  const float2 rounded = unpack(__nv_bfloat16{}, high);
  return {high, pack(__nv_bfloat16{}, x - rounded.x, y - rounded.y)};
}

// A row of a map begins here with its high values. Its low ones are kMapLine rows further on.
GDN_DEVICE int map_row(int row) { return (row / kMapLine * (2 * kMapLine) + row % kMapLine) * kMapPitch; }

// Of four lanes whose numbers differ in two bits, from `bit` on, the lane with number i there gets word i of each.
GDN_DEVICE uint4 gather_words(uint32_t (&x)[4], int lane, int bit) {
#pragma unroll
  for (int d = 1; d < 4; d *= 2) {
    const bool high = lane & (bit * d);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & d) continue;
      const uint32_t other = __shfl_xor_sync(~0u, high ? x[i] : x[i + d], bit * d);
      (high ? x[i] : x[i + d]) = other;
    }
  }
  return make_uint4(x[0], x[1], x[2], x[3]);
}

// A warp's 16 rows of a map from `row` on, and its 16 columns of the transpose, in stores of 16 bytes. A lane has two
// rows, and of each eight columns two, as the accumulators of WGMMA lie.
GDN_DEVICE void store_map(const float (&S)[64], uint16_t* map, uint16_t* transposed, int row, int lane) {
  const int odd = lane / 4 % 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int first = 0; first < 16; first += 4) {
      const int at = map_row(row + 8 * i + lane / 4) + (first + lane % 4) * 8;
      const int there = map_row((first + lane / 8) * 8 + lane % 4 * 2 + odd) + row + 8 * i;
      uint32_t own[2][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const Split halves = split(S[4 * (first + j) + 2 * i], S[4 * (first + j) + 2 * i + 1]);
        own[0][j] = halves.high, own[1][j] = halves.low;
      }
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        uint32_t pairs[4];  // of one of two columns, this lane's row and its neighbour's
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t other = __shfl_xor_sync(~0u, own[part][j], 4);
          pairs[j] = odd ? __byte_perm(other, own[part][j], 0x7632) : __byte_perm(own[part][j], other, 0x5410);
        }
        const int behind = part * kMapLine * kMapPitch;
        *reinterpret_cast<uint4*>(map + behind + at) = gather_words(own[part], lane, 1);
        *reinterpret_cast<uint4*>(transposed + behind + there) = gather_words(pairs, lane, 8);
      }
    }
  }
}

}  // namespace gdn::sm90::backward
