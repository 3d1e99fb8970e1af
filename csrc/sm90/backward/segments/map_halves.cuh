// The layout of a map in SegmentMaps::values: each fp32 value is the sum of a high and a low bf16
// value, for tensor cores.
#pragma once
#include "sm90/backward/layout.cuh"

namespace gdn::sm90::backward {

// Two fp32 values, each the sum of a high and a low bf16 value to a relative error of 2^-17.
struct Split {
  uint32_t high, low;
};
GDN_DEVICE Split split(float x, float y) {
  const uint32_t high = pack(__nv_bfloat16{}, x, y);
  const float2 rounded = unpack(__nv_bfloat16{}, high);
  return {high, pack(__nv_bfloat16{}, x - rounded.x, y - rounded.y)};
}

// The begin of a map's row of high values. The row of low values is kMapLine rows further on.
GDN_DEVICE int map_row(int row) {
  return (row / kMapLine * (2 * kMapLine) + row % kMapLine) * kMapPitch;
}

// A transpose between four lanes whose numbers differ in the lowest two bits: lane i of the four
// gets word i of each.
GDN_DEVICE uint4 gather_words(uint32_t (&x)[4], int lane) {
#pragma unroll
  for (int d = 1; d < 4; d *= 2) {
    const bool high = lane & d;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & d) continue;
      const uint32_t other = __shfl_xor_sync(~0u, high ? x[i] : x[i + d], d);
      (high ? x[i] : x[i + d]) = other;
    }
  }
  return make_uint4(x[0], x[1], x[2], x[3]);
}

// Stores a warp's 16 rows of a map from `row` on, 16 bytes at a time. A lane has two rows, and two
// of every eight columns, the layout of WGMMA's accumulators.
GDN_DEVICE void store_map(const float (&S)[64], uint16_t* map, int row, int lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint16_t* const to = map + map_row(row + 8 * i + lane / 4) + lane % 4 * 8;
#pragma unroll
    for (int first = 0; first < 16; first += 4) {
      uint32_t own[2][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const Split halves = split(S[4 * (first + j) + 2 * i], S[4 * (first + j) + 2 * i + 1]);
        own[0][j] = halves.high, own[1][j] = halves.low;
      }
#pragma unroll
      for (int part = 0; part < 2; ++part)
        *reinterpret_cast<uint4*>(to + part * kMapLine * kMapPitch + first * 8) =
            gather_words(own[part], lane);
    }
  }
}

}  // namespace gdn::sm90::backward
