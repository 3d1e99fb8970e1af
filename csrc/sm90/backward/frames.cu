// The frame of every chunk, made once for all kernels of the backward: sums of the decays, the
// frame from chunk to chunk, then the factors of the tokens. The second step also chooses the
// walks; after the third, tiles are dealt out.
#include <algorithm>

#include "sm90/backward/deal.cuh"
#include "sm90/backward/head_rows.cuh"
#include "sm90/launch_blocks.h"

namespace gdn::sm90::backward {
namespace {
// Writes beta, and inclusive sums of the log2 decays, which `start` will replace. A warp has a
// chunk and value head.
__global__ void __launch_bounds__(kMostHeads * 32)
    sum_kernel(const __grid_constant__ Params params) {
  __shared__ HeadRows g_rows, beta_rows;
  const ChunkForward& p = params.problem.forward;
  const int chunk_index = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int hv = blockIdx.y * (blockDim.x / 32) + warp;
  if (params.scratch.triangles_ready != nullptr && blockIdx.y == 0)
    for (int h = threadIdx.x; h < p.H; h += blockDim.x)
      params.scratch.triangles_ready[chunk_index * p.H + h] = 0;
  const Place place = place_of(params, chunk_index);
  if (place.rows <= 0) return;
  {
    const HeadThread own(params);
    uint32_t g[2], beta[2];
    own.load(g, p.g, p.g_dtype, place);
    own.load(beta, p.beta, p.beta_dtype, place);
    own.give(g_rows, g, p.g_dtype);
    own.give(beta_rows, beta, p.beta_dtype);
  }
  __syncthreads();
  if (hv >= p.HV) return;
  float g[2], beta[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * lane + i;
    g[i] = beta[i] = 0;
    if (row < place.rows) {
      g[i] = log2_decay(p, g_rows.x[warp][row], hv);
      if (!(g[i] < kGrowthLimit)) g[i] = NAN;
      beta[i] = activate_beta(p, beta_rows.x[warp][row]);
    }
  }
  // Summed in the order of the forward's write_gates.
  float sum = g[0] + g[1];
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const float below = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += below;
  }
  float before = __shfl_up_sync(~0u, sum, 1);
  if (lane == 0) before = 0.f;
  const int index = chunk_index * p.HV + hv;
  ChunkFactors& out = params.scratch.factors[index];
  reinterpret_cast<float2*>(out.start)[lane] = make_float2(g[0] + before, sum);
  reinterpret_cast<float2*>(out.beta)[lane] = make_float2(beta[0], beta[1]);
  if (lane == 31) params.scratch.last[index] = sum;
}

// chunk_frame(G, last).next, without a branch: the time of walk_kernel is a chain of these steps.
template <class T>
GDN_DEVICE float next_frame(float G, float last) {
  using F = Frame<T>;
  const bool steep = last < -F::kRange;
  const float x = G + last, anew = F::kTop + last;
  const bool outside = steep ? G < 0 || G > F::kTop : x < F::kTop - F::kRange || x > F::kTop + 16.f;
  const float y = outside ? anew : x;
  return steep ? y - floorf(y) : y;
}

// Whether the first block of walk_kernel chooses the walks.
GDN_HOST_DEVICE bool has_choice(const Params& params) {
  return params.segment > 0 || params.back.shape == BackShape::kByLengths;
}

// A block, one warp, walks over every gridDim.y-th group of 32 chunks of a sequence and value head.
// A group begins at the top of the range, and therefore does not wait for the previous group. All
// lanes walk, and each lane loads and stores for one chunk: a single thread would issue 32 loads
// and stores.
constexpr int kWalkThreads = 32, kGroup = 32;
template <class T>
__global__ void __launch_bounds__(kWalkThreads) walk_kernel(const __grid_constant__ Params params) {
  wait_for_prerequisites();
  const ChunkForward& p = params.problem.forward;
  const int block = int(blockIdx.x) - has_choice(params);
  if (block < 0) {
    __shared__ uint32_t keys[kMostUnits];
    if (blockIdx.y == 0) choose_walks(params, keys);
    return;
  }
  const auto tile = back_tile<Kind<T, true>, 1>(params, block);  // its slices are not used
  const int count = tile.chunks(), lane = threadIdx.x, each = kGroup * gridDim.y;
  const int64_t first = int64_t{tile.chunk_index} * p.HV + tile.hv(params);
  const auto load = [&](int c) {
    return c + lane < count ? params.scratch.last[first + int64_t{c + lane} * p.HV] : 0.f;
  };
  const auto store = [&](int c, float G) { params.scratch.G[first + int64_t{c} * p.HV] = G; };
  if (params.maps.exist && block == 0 && blockIdx.y == 0 && lane == 0) *params.maps.wrong = 0;
  int c = kGroup * blockIdx.y;
  float last = load(c);
#pragma unroll 1
  for (; c < count; c += each) {
    const float next = load(c + each);
    float G = Frame<T>::kTop, own = G;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (lane == i) own = G;
      G = next_frame<T>(G, __shfl_sync(~0u, last, i));
    }
    // The first chunk of a group has the G after the previous group: chunk_frame brings the state
    // to the top of the range from there.
    if (c + lane < count && (lane > 0 || c == 0)) store(c + lane, own);
    if (lane == 0 && c + kGroup < count) store(c + kGroup, G);
    last = next;
  }
}

// A warp has a chunk and value head.
constexpr int kThreads = 256;
template <class T>
__global__ void __launch_bounds__(kThreads) factor_kernel(const __grid_constant__ Params params) {
  wait_for_prerequisites();
  const ChunkForward& p = params.problem.forward;
  const int index = blockIdx.x * (kThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (index >= params.chunks * p.HV) return;
  ChunkFactors& out = params.scratch.factors[index];
  const float2 sums = reinterpret_cast<const float2*>(out.start)[lane];
  const float2 beta = reinterpret_cast<const float2*>(out.beta)[lane];
  const float G = params.scratch.G[index], last = params.scratch.last[index];
  // The loads above do not wait for the search for the chunk; their values are not used where there
  // is no chunk.
  const int chunk_index = params.heads.divide(index);
  const Place place = place_of(params, chunk_index);
  if (place.rows <= 0) return;
  const int c = chunk_index - first_chunk(params, place.n);
  const ChunkFrame chunk = chunk_frame<T>(G, last, c > 0 && c % kGroup == 0);
  const TokenFrame x0 = token_frame<T>(chunk, sums.x), x1 = token_frame<T>(chunk, sums.y);
  const float c0 = exp2_approx(-x0.e), c1 = exp2_approx(-x1.e);
  out.x[lane] =
      make_float4(beta.x * c0, beta.y * c1, beta.x * exp2_approx(x0.d), beta.y * exp2_approx(x1.d));
  reinterpret_cast<float2*>(out.read)[lane] =
      make_float2(p.scale * exp2_approx(x0.e), p.scale * exp2_approx(x1.e));
  reinterpret_cast<float2*>(out.start)[lane] =
      make_float2(p.scale * exp2_approx(chunk.G + sums.x), p.scale * exp2_approx(chunk.G + sums.y));
  reinterpret_cast<float2*>(out.c)[lane] = make_float2(c0, c1);
  const auto of_dv = [](float beta, float c) {
    return kReadsDv<T> && is_beta_small(beta) ? 1.f : beta * c;
  };
  reinterpret_cast<float2*>(out.dv)[lane] = make_float2(of_dv(beta.x, c0), of_dv(beta.y, c1));
  reinterpret_cast<short2*>(out.power)[lane] = make_short2(short(x0.d), short(x1.d));
  if (lane == 0) {
    out.pre = exp2_approx(chunk.enter);
    out.post = exp2_approx(chunk.D);
    out.end = exp2_approx(chunk.next);
    out.steep = chunk.steep ? int(chunk.D) : 0;
  }
}

// One block deals for the walk forward, the other one for the walk back. The kernel of the
// triangles overlaps with this one, and begins once this one has waited for the factors, which it
// reads.
__global__ void __launch_bounds__(32) deal_kernel(const __grid_constant__ Params params) {
  __shared__ uint32_t keys[kMostUnits];
  wait_for_prerequisites();
  launch_dependents();
  deal_walk(params, blockIdx.x == 1, keys);
}
}  // namespace

template <class Kind>
const char* run_frames(const Params& params, cudaStream_t stream) {
  using T = typename Kind::T;
  const ChunkForward& p = params.problem.forward;
  const HeadBlocks heads(params);
  sum_kernel<<<heads.grid, heads.threads, 0, stream>>>(params);
  if (const char* error = check(cudaGetLastError())) return error;
  const unsigned walks = unsigned(int64_t{p.N} * p.HV + has_choice(params));
  // A packed sequence has as many blocks as a sequence of mean length has groups. In a longer
  // sequence a block walks several groups.
  const int64_t of_sequence =
      ceil_div(ceil_div(p.T, kChunk), p.cu_seqlens ? int64_t{p.N} * kGroup : kGroup);
  const unsigned groups = unsigned(std::clamp<int64_t>(of_sequence, 1, 64));
  if (const char* error =
          launch_small(&walk_kernel<T>, params, dim3(walks, groups), kWalkThreads, stream))
    return error;
  const unsigned blocks = unsigned(ceil_div(int64_t{params.chunks} * p.HV, kThreads / 32));
  return launch_small(&factor_kernel<T>, params, blocks, kThreads, stream);
}

const char* run_deals(const Params& params, cudaStream_t stream) {
  return are_dealt(params) ? launch_small(&deal_kernel, params, 2, 32, stream) : nullptr;
}

template const char* run_frames<Kind<__nv_bfloat16, true>>(const Params&, cudaStream_t);
template const char* run_frames<Kind<__nv_bfloat16, false>>(const Params&, cudaStream_t);
template const char* run_frames<Kind<__half, false>>(const Params&, cudaStream_t);

}  // namespace gdn::sm90::backward
