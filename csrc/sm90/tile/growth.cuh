// How much the keys of a part of a sequence may enlarge its state.
//
// A token multiplies the state by 2^g (I - beta k^T k). With |k| <= 1, as the norm in the kernel
// makes it, that is at most 2^g max(1, |1 - beta|). A part whose state goes to another device may
// therefore leave out its M where the sum of both logarithms is below -kForgotten
// (plan/forgetting.cuh): the state from before the window then adds at most 2^-kForgotten of
// itself, and no comparison of states is needed, which the other device could not repeat.
#pragma once
#include "params.h"
#include "sm90/tile/gates.cuh"

namespace gdn::sm90 {

// |k|^2 of a key whose channels are rounded to 16 bits after the norm is less.
constexpr float kLongestKey = 1.01f;

constexpr int kGrowthWarps = 8;
struct GrowthParams {
  ChunkForward problem;
  float* growth;  // [chunks, HV]: the sum of log2(max(1, |1 - beta|)) over a chunk
};

// A warp has a chunk and value head. NaN in a beta makes the sum NaN, and nothing is left out.
static __global__ void __launch_bounds__(kGrowthWarps * 32)
    growth_kernel(const __grid_constant__ GrowthParams params) {
  const ChunkForward& p = params.problem;
  const int lane = threadIdx.x % 32, hv = blockIdx.y * kGrowthWarps + threadIdx.x / 32;
  if (hv >= p.HV) return;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t row = int64_t{blockIdx.x} * kChunk + 2 * lane + i;
    if (row >= p.T) continue;
    const int64_t at = hv * p.beta.head + row * p.beta.row;
    const float beta =
        activate_beta(p, to_float(load_bits(p.beta.data, at, p.beta_dtype), p.beta_dtype));
    const float factor = fabsf(1.f - kLongestKey * beta);
    sum += factor <= 1.f ? 0.f : __log2f(factor);
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if (lane == 0) params.growth[int64_t{blockIdx.x} * p.HV + hv] = sum;
}

inline int64_t growth_floats(const ChunkForward& p) {
  return p.use_qk_l2norm ? (p.T + kChunk - 1) / kChunk * p.HV : 0;
}

// Fills `growth`, growth_floats elements.
inline cudaError_t make_growth(const ChunkForward& p, float* growth, cudaStream_t stream) {
  const dim3 grid(unsigned((p.T + kChunk - 1) / kChunk),
                  unsigned((p.HV + kGrowthWarps - 1) / kGrowthWarps));
  growth_kernel<<<grid, kGrowthWarps * 32, 0, stream>>>({p, growth});
  return cudaGetLastError();
}

}  // namespace gdn::sm90
