// States in the registers of a warpgroup, and the place of a thread's part in memory.
#pragma once
#include "sm90/backward/layout.cuh"

namespace gdn::sm90::backward {

// The channels that a state in memory has. A warp has 16 channels of V and 128 of K: rows(i) tells
// of the i-th eight channels of V, columns(j) of the j-th eight of K.
struct AllChannels {
  GDN_DEVICE bool rows(int) const { return true; }
  GDN_DEVICE bool columns(int) const { return true; }
};
struct SomeChannels {
  int V, K;  // channels from the warp's first one on; multiples of 8
  GDN_DEVICE bool rows(int i) const { return 8 * i < V; }
  GDN_DEVICE bool columns(int j) const { return 8 * j < K; }
};
// v: the warpgroup's first channel of V.
template <class Kind>
GDN_DEVICE auto channels_of(const Params& params, int v, int warp) {
  if constexpr (Kind::kExact) {
    return AllChannels{};
  } else {
    return SomeChannels{params.problem.forward.V - v - 16 * warp, params.problem.forward.K};
  }
}

// Load and store a warpgroup's state [64 of V, 128 of K], at any strides.
template <class From, class Channels>
GDN_DEVICE void load_state(float (&S)[64], const From* at, int64_t stride_k, int64_t stride_v,
                           float factor, const Channels& channels) {
#pragma unroll
  for (int j = 0; j < 16; ++j, at += 8 * stride_k) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool inside = channels.columns(j) && channels.rows(i);
      S[4 * j + 2 * i] = inside ? float(at[8 * i * stride_v]) * factor : 0.f;
      S[4 * j + 2 * i + 1] = inside ? float(at[8 * i * stride_v + stride_k]) * factor : 0.f;
    }
  }
}
template <class Channels>
GDN_DEVICE void store_state(const float (&S)[64], float* at, int64_t stride_k, int64_t stride_v,
                            float factor, const Channels& channels) {
#pragma unroll
  for (int j = 0; j < 16; ++j, at += 8 * stride_k) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!channels.columns(j) || !channels.rows(i)) continue;
      at[8 * i * stride_v] = S[4 * j + 2 * i] * factor;
      at[8 * i * stride_v + stride_k] = S[4 * j + 2 * i + 1] * factor;
    }
  }
}
// Load and store a part of a dense matrix [128 of V, 128 of K].
GDN_DEVICE void load_matrix(float (&S)[64], const float* at) {
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    const float2 x = *reinterpret_cast<const float2*>(at + j / 2 * 8 + j % 2 * 8 * kChannels);
    S[2 * j] = x.x, S[2 * j + 1] = x.y;
  }
}
GDN_DEVICE void store_matrix(const float (&S)[64], float* at) {
#pragma unroll
  for (int j = 0; j < 32; ++j)
    *reinterpret_cast<float2*>(at + j / 2 * 8 + j % 2 * 8 * kChannels) =
        make_float2(S[2 * j], S[2 * j + 1]);
}
GDN_DEVICE void clear_state(float (&S)[64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) S[i] = 0;
}
GDN_DEVICE void scale_state(float (&S)[64], float factor) {
#pragma unroll
  for (int i = 0; i < 64; ++i) S[i] *= factor;
}

// The thread's first channels of V and K in a state warpgroup's part.
GDN_DEVICE int state_row(int warp, int lane) { return warp * 16 + lane / 4; }
GDN_DEVICE int state_column(int lane) { return lane % 4 * 2; }

// A lane's line in a [64 tokens][64 channels of V] tile whose transpose it holds.
GDN_DEVICE uint32_t transposed_line(int warp, int lane) {
  const int token = lane / 16 * 8 + lane % 8, column = 2 * warp + lane / 8 % 2;
  return token * 128 + ((column ^ (token % 8)) * 16);
}

}  // namespace gdn::sm90::backward
