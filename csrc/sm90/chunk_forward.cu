// Host side of the chunked forward on Hopper; params.h says what is asked of it.
#include "../common/tensor_map.h"
#include "kernel.cuh"
#include "l2norm.cuh"
#include "segments.cuh"

namespace gdn {
namespace {

size_t normalized_bytes(const ChunkForward& p) { return size_t(p.B) * p.T * p.H * p.K * 2; }

const char* check(cudaError_t error) {
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

const char* unsupported(const ChunkForward& p) {
  if (p.K != sm90::kDim || p.V != sm90::kDim) return "the Hopper kernel needs K = V = 128";
  if (p.dtype != Dtype::kBFloat16 && p.dtype != Dtype::kFloat16)
    return "the Hopper kernel needs q, k, v in bfloat16 or float16";
  if (p.T >= int64_t{1} << 31) return "the Hopper kernel needs T below 2^31";
  return nullptr;
}

// q and k over their norms, in the workspace.
template <class T>
const char* normalize(const ChunkForward& p, Rows& q, Rows& k, cudaStream_t stream) {
  const int64_t rows = p.B * p.T * p.H;
  uint4* const q_out = static_cast<uint4*>(p.workspace);
  uint4* const k_out = q_out + normalized_bytes(p) / sizeof(uint4);
  const dim3 grid(unsigned((rows * 16 + sm90::kNormThreads - 1) / sm90::kNormThreads), 2);
  sm90::l2norm_kernel<T>
      <<<grid, sm90::kNormThreads, 0, stream>>>(q, k, q_out, k_out, rows, p.T, p.H);
  q = {q_out, p.T * p.H * p.K, int64_t{p.H} * p.K, p.K};
  k = {k_out, p.T * p.H * p.K, int64_t{p.H} * p.K, p.K};
  return check(cudaGetLastError());
}

// How a call is cut up; by what the host knows alone, so that a CUDA graph stays valid when the
// contents of cu_seqlens change.
struct Plan {
  bool halves;   // a block owns half of V
  int segment;   // chunks of a segment; 0: whole sequences
  int slots;     // segments at most
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// For tests and measurements: sequences longer than this always go in segments of so many chunks; 0
// never.
#ifndef GDN_SEGMENT_CHUNKS
#define GDN_SEGMENT_CHUNKS -1
#endif

Plan make_plan(const ChunkForward& p) {
  // Microseconds, fitted to an H200: a chunk with both halves of V in a block, with one, and of a
  // map; the start and end of a tile; a segment of the fold; the two more launches.
  constexpr double kBoth = 2.6, kHalf = 1.85, kMap = 1.6, kTile = 6, kFold = 2.5, kLaunches = 10;
  constexpr double kWorthIt = 0.9;  // segments must promise so much
  const int64_t pairs = int64_t{p.N} * p.HV;
  const auto turns = [&](int64_t tiles, double time) {
    return double(ceil_div(tiles, p.multiprocessors)) * time;
  };
  const auto walk = [&](int64_t tiles, int64_t chunks, bool& halves) {
    const double both = turns(tiles, chunks * kBoth + kTile);
    const double half = turns(2 * tiles, chunks * kHalf + kTile);
    halves = half < both;
    return halves ? half : both;
  };
  const int64_t chunks = ceil_div(p.T, sm90::kChunk);  // of a batch entry
  const int64_t each = p.cu_seqlens ? ceil_div(chunks, p.N > 0 ? p.N : 1) : chunks;
  const int forced = GDN_SEGMENT_CHUNKS;
  Plan best = {};
  double least = kWorthIt * walk(pairs, each, best.halves);
  if (p.batch_invariant || forced == 0) return best;
  for (int segment = forced > 0 ? forced : 8; segment < each; segment *= 2) {
    const int64_t slots =
        p.cu_seqlens ? p.N + p.T / (segment * sm90::kChunk) : p.N * ceil_div(chunks, segment);
    const int64_t count = ceil_div(each, segment);
    Plan plan = {false, segment, int(slots)};
    const double time = turns(pairs * (2 * count - 3), segment * kMap + kTile) +
                        walk(pairs * count, segment, plan.halves) + count * kFold + kLaunches;
    if (time < least || forced > 0) {
      least = time;
      best = plan;
    }
    if (forced > 0) break;
  }
  return best;
}

size_t map_bytes(const ChunkForward& p, const Plan& plan) {
  return size_t(plan.slots) * p.HV * sm90::kDim * sm90::kDim * sizeof(float);
}

template <class C>
const char* launch(const ChunkForward& p, sm90::KernelParams& params, int64_t tiles,
                   cudaStream_t stream) {
  params.tiles = int(tiles);
  auto* const kernel = &sm90::chunk_forward_kernel<C>;
  constexpr int kBytes = sizeof(sm90::SharedMemory<C>);
  if (const char* error = check(cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes)))
    return error;
  const int blocks = params.tiles < p.multiprocessors ? params.tiles : p.multiprocessors;
  kernel<<<blocks > 0 ? blocks : 1, sm90::kThreads, kBytes, stream>>>(params);
  return check(cudaGetLastError());
}

template <class T>
const char* run(const ChunkForward& p, cudaStream_t stream) {
  using sm90::Config;
  using sm90::Pass;
  sm90::KernelParams params;
  params.problem = p;
  Rows q = p.q, k = p.k;
  char* workspace = static_cast<char*>(p.workspace);
  if (p.use_qk_l2norm && p.B * p.T > 0) {
    if (const char* error = normalize<T>(p, q, k, stream)) return error;
    workspace += 2 * normalized_bytes(p);
  }
  const Rows o = {p.o, p.T * p.HV * p.V, int64_t{p.HV} * p.V, p.V};
  if (p.B * p.T > 0) {  // a map of nothing is refused, and is not needed
    if (const char* error = make_map(&params.q, p.dtype, q, p.B, p.T, p.H)) return error;
    if (const char* error = make_map(&params.k, p.dtype, k, p.B, p.T, p.H)) return error;
    if (const char* error = make_map(&params.v, p.dtype, p.v, p.B, p.T, p.HV)) return error;
    if (const char* error = make_map(&params.o, p.dtype, o, p.B, p.T, p.HV)) return error;
  }
  const Plan plan = make_plan(p);
  const int64_t pairs = int64_t{p.N} * p.HV;
  if (plan.segment == 0)
    return plan.halves ? launch<Config<T, 1>>(p, params, 2 * pairs, stream)
                       : launch<Config<T, 2>>(p, params, pairs, stream);

  params.segments = {plan.segment, plan.slots, reinterpret_cast<float*>(workspace),
                     reinterpret_cast<float*>(workspace + 2 * map_bytes(p, plan))};
  const int64_t tiles = int64_t{plan.slots} * p.HV;
  if (const char* error = launch<Config<T, 2, Pass::kMaps>>(p, params, 2 * tiles, stream))
    return error;
  const unsigned blocks = unsigned(pairs * (sm90::kDim / sm90::kFoldRows));
  sm90::fold_kernel<<<blocks, sm90::kFoldThreads, 0, stream>>>(params);
  if (const char* error = check(cudaGetLastError())) return error;
  return plan.halves ? launch<Config<T, 1, Pass::kSegments>>(p, params, 2 * tiles, stream)
                     : launch<Config<T, 2, Pass::kSegments>>(p, params, tiles, stream);
}

}  // namespace

size_t chunk_forward_workspace(const ChunkForward& p) {
  return (p.use_qk_l2norm ? 2 * normalized_bytes(p) : 0) + 3 * map_bytes(p, make_plan(p));
}

const char* chunk_forward(const ChunkForward& p, cudaStream_t stream) {
  if (const char* reason = unsupported(p)) return reason;
  if (p.HV == 0 || (p.N == 0 && p.T == 0)) return nullptr;
  return p.dtype == Dtype::kBFloat16 ? run<__nv_bfloat16>(p, stream)
                                     : run<__half>(p, stream);
}

}  // namespace gdn
