// q and k over their norms, into contiguous copies: x rsqrt(sum x^2 + 1e-6), rounded to the dtype.
#pragma once
#include "config.cuh"

namespace gdn::sm90 {

constexpr float kNormEps = 1e-6f;
constexpr int kNormThreads = 256;

// 16 threads a row of 128; blockIdx.y: q or k.
template <class T>
__global__ void __launch_bounds__(kNormThreads)
    l2norm_kernel(const __grid_constant__ Rows q, const __grid_constant__ Rows k, uint4* q_out,
                  uint4* k_out, int64_t rows, int64_t T_, int H) {
  const Rows& x = blockIdx.y == 0 ? q : k;
  uint4* const out = blockIdx.y == 0 ? q_out : k_out;
  const int64_t row = (int64_t{blockIdx.x} * kNormThreads + threadIdx.x) / 16;
  const int part = threadIdx.x % 16;
  if (row >= rows) return;  // whole groups of 16 leave; the shuffles below stay within a group
  const int64_t token = row / H;
  const int64_t at = token / T_ * x.batch + token % T_ * x.row + row % H * x.head + part * 8;
  const uint4 line = *reinterpret_cast<const uint4*>(static_cast<const T*>(x.data) + at);
  uint32_t pairs[4] = {line.x, line.y, line.z, line.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack(T{}, pairs[i]);
    sum += pair.x * pair.x + pair.y * pair.y;
  }
  const uint32_t group = 0xffffu << (threadIdx.x % 32 / 16 * 16);
#pragma unroll
  for (int d = 8; d > 0; d /= 2) sum += __shfl_xor_sync(group, sum, d);
  const float factor = rsqrtf(sum + kNormEps);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack(T{}, pairs[i]);
    pairs[i] = pack(T{}, pair.x * factor, pair.y * factor);
  }
  out[row * 16 + part] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

}  // namespace gdn::sm90
