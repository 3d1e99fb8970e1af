// The frame of every chunk, made once for all kernels of the backward: sums of the decays, the frame from chunk to
// chunk, then the factors of the tokens.
#include "sm90/backward/common.cuh"

namespace gdn::sm90::backward {
namespace {
constexpr int kThreads = 256;  // a warp a chunk and value head

// Inclusive sums of the log2 decays, to where `start` will be, and beta.
__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ Params params) {
  const ChunkForward& p = params.problem.forward;
  const int index = blockIdx.x * (kThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (index >= params.slots * p.HV) return;
  const int slot = params.heads.divide(index), hv = index - slot * p.HV;
  const Place place = place_of(params, slot);
  if (place.rows <= 0) return;
  float g[2], beta[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * lane + i;
    const int64_t at = place.first + row;
    g[i] = beta[i] = 0;
    if (row < place.rows) {
      const auto load = [&](const Rows& x, Dtype dtype) {
        return to_float(load_bits(x.data, place.batch * x.batch + hv * x.head + at * x.row, dtype), dtype);
      };
      g[i] = log2_decay(p, load(p.g, p.g_dtype), hv);
      if (!(g[i] < kGrowthLimit)) g[i] = NAN;
      beta[i] = activate_beta(p, load(p.beta, p.beta_dtype));
    }
  }
  // In the order of write_gates.
  float sum = g[0] + g[1];
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const float below = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += below;
  }
  float before = __shfl_up_sync(~0u, sum, 1);
  if (lane == 0) before = 0.f;
  Gates& out = params.scratch.gates[index];
  reinterpret_cast<float2*>(out.start)[lane] = make_float2(g[0] + before, sum);
  reinterpret_cast<float2*>(out.beta)[lane] = make_float2(beta[0], beta[1]);
  if (lane == 31) params.scratch.last[index] = sum;
}

// A thread walks a sequence and value head.
template <class T>
__global__ void __launch_bounds__(kThreads) walk_kernel(const __grid_constant__ Params params) {
  constexpr int kAhead = 8;
  const ChunkForward& p = params.problem.forward;
  const int index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= p.N * p.HV) return;
  const auto tile = back_tile<Kind<T, true>, 1>(params, index);  // slices are not asked for
  const int count = tile.chunks();
  const int64_t first = int64_t{tile.slot} * p.HV + tile.hv(params);
  // The next kAhead are loaded while these are walked.
  float last[kAhead];
  const auto load = [&](float (&to)[kAhead], int c) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      to[i] = c + i < count ? params.scratch.last[first + int64_t{c + i} * p.HV] : 0.f;
  };
  float G = Frame<T>::kTop;
  load(last, 0);
#pragma unroll 1
  for (int c = 0; c < count; c += kAhead) {
    float next[kAhead];
    load(next, c + kAhead);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (c + i >= count) break;
      params.scratch.G[first + int64_t{c + i} * p.HV] = G;
      G = chunk_frame<T>(G, last[i]).next;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) last[i] = next[i];
  }
}

// By a warp: whether the walk forward goes in segments.
GDN_DEVICE void choose_segment(const Params& params) {
  const ChunkForward& p = params.problem.forward;
  int longest = 0;
#pragma unroll 4
  for (int n = threadIdx.x % 32; n < p.N; n += 32) longest = max(longest, sequence_length(p, n));
  longest = __reduce_max_sync(~0u, longest);
  if (threadIdx.x % 32 == 0)
    *params.scratch.segment = longest > params.whole_up_to * kChunk ? params.segment : kWholeSequences;
}

template <class T>
__global__ void __launch_bounds__(kThreads) factor_kernel(const __grid_constant__ Params params) {
  const ChunkForward& p = params.problem.forward;
  const int index = blockIdx.x * (kThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (index == 0 && params.segment > 0) choose_segment(params);
  if (index >= params.slots * p.HV) return;
  if (place_of(params, params.heads.divide(index)).rows <= 0) return;
  Gates& out = params.scratch.gates[index];
  const float2 sums = reinterpret_cast<const float2*>(out.start)[lane];
  const float2 beta = reinterpret_cast<const float2*>(out.beta)[lane];
  const ChunkFrame chunk = chunk_frame<T>(params.scratch.G[index], params.scratch.last[index]);
  const TokenFrame x0 = token_frame<T>(chunk, sums.x), x1 = token_frame<T>(chunk, sums.y);
  const float c0 = exp2_approx(-x0.e), c1 = exp2_approx(-x1.e);
  out.x[lane] = make_float4(beta.x * c0, beta.y * c1, beta.x * exp2_approx(x0.d), beta.y * exp2_approx(x1.d));
  reinterpret_cast<float2*>(out.read)[lane] = make_float2(p.scale * exp2_approx(x0.e), p.scale * exp2_approx(x1.e));
  reinterpret_cast<float2*>(out.start)[lane] =
      make_float2(p.scale * exp2_approx(chunk.G + sums.x), p.scale * exp2_approx(chunk.G + sums.y));
  reinterpret_cast<float2*>(out.c)[lane] = make_float2(c0, c1);
  reinterpret_cast<short2*>(out.power)[lane] = make_short2(short(x0.d), short(x1.d));
  if (lane == 0) {
    out.pre = exp2_approx(chunk.enter);
    out.post = exp2_approx(chunk.D);
    out.end = exp2_approx(chunk.next);
    out.steep = chunk.steep ? int(chunk.D) : 0;
  }
}
}  // namespace

template <class Kind>
const char* run_frames(const Params& params, cudaStream_t stream) {
  using T = typename Kind::T;
  const ChunkForward& p = params.problem.forward;
  const unsigned warps = unsigned(ceil_div(int64_t{params.slots} * p.HV, kThreads / 32));
  const unsigned walks = unsigned(ceil_div(int64_t{p.N} * p.HV, kThreads));
  sum_kernel<<<warps, kThreads, 0, stream>>>(params);
  walk_kernel<T><<<walks, kThreads, 0, stream>>>(params);
  factor_kernel<T><<<warps, kThreads, 0, stream>>>(params);
  return check(cudaGetLastError());
}

template const char* run_frames<Kind<__nv_bfloat16, true>>(const Params&, cudaStream_t);
template const char* run_frames<Kind<__nv_bfloat16, false>>(const Params&, cudaStream_t);
template const char* run_frames<Kind<__half, false>>(const Params&, cudaStream_t);

}  // namespace gdn::sm90::backward
