// q and k over their norms, into contiguous copies: x rsqrt(sum x^2 + 1e-6), rounded to the dtype.
#pragma once
#include "common/ptx.cuh"
#include "params.h"

namespace gdn::sm90 {

constexpr float kNormEps = 1e-6f;
constexpr int kNormThreads = 256;

// A row has kLanes threads of 8 channels each; blockIdx.y selects q or k. K is 8 kLanes, or a
// smaller multiple of 8.
template <class T, int kLanes, bool kExact>
__global__ void __launch_bounds__(kNormThreads)
    l2norm_kernel(const __grid_constant__ Rows q, const __grid_constant__ Rows k, uint4* q_out,
                  uint4* k_out, int64_t rows, int64_t T_, int H, int K) {
  const Rows& x = blockIdx.y == 0 ? q : k;
  uint4* const out = blockIdx.y == 0 ? q_out : k_out;
  const int64_t row = (int64_t{blockIdx.x} * kNormThreads + threadIdx.x) / kLanes;
  const int part = threadIdx.x % kLanes;
  if (row >= rows) return;  // whole groups of kLanes return: the shuffles below stay within a group
  const bool inside = kExact || part * 8 < K;
  const int64_t token = row / H;
  const int64_t at = token / T_ * x.batch + token % T_ * x.row + row % H * x.head + part * 8;
  uint4 line = {};
  if (inside) line = *reinterpret_cast<const uint4*>(static_cast<const T*>(x.data) + at);
  uint32_t pairs[4] = {line.x, line.y, line.z, line.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack(T{}, pairs[i]);
    sum += pair.x * pair.x + pair.y * pair.y;
  }
  const uint32_t group = ~0u >> (32 - kLanes) << (threadIdx.x % 32 / kLanes * kLanes);
#pragma unroll
  for (int d = kLanes / 2; d > 0; d /= 2) sum += __shfl_xor_sync(group, sum, d);
  const float factor = rsqrtf(sum + kNormEps);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack(T{}, pairs[i]);
    pairs[i] = pack(T{}, pair.x * factor, pair.y * factor);
  }
  if (!inside) return;
  out[row * (kExact ? kLanes : K / 8) + part] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

}  // namespace gdn::sm90
