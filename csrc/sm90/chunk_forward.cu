// Host side of the chunked forward on Hopper; params.h says what is asked of it.
#include "../common/tensor_map.h"
#include "config.cuh"
#include "l2norm.cuh"

namespace gdn {
namespace {
using sm90::Plan;
using sm90::ceil_div;

size_t normalized_bytes(const ChunkForward& p) { return size_t(p.B) * p.T * p.H * p.K * 2; }

const char* unsupported(const ChunkForward& p) {
  if (p.K < 8 || p.K > 256 || p.K % 8 != 0)
    return "the Hopper kernel needs K to be a multiple of 8, up to 256";
  if (p.V < 8 || p.V % 8 != 0) return "the Hopper kernel needs V to be a multiple of 8";
  if (p.dtype != Dtype::kBFloat16 && p.dtype != Dtype::kFloat16)
    return "the Hopper kernel needs q, k, v in bfloat16 or float16";
  if (p.T >= int64_t{1} << 31) return "the Hopper kernel needs T below 2^31";
  return nullptr;
}

// Which kernels: exactly 128 channels, or the least of 64, 128 and 256 that K fits in.
template <class Kernels>
auto with_heads(const ChunkForward& p, const Kernels& run) {
  if (p.K == 128 && p.V == 128) return run(sm90::Heads<128, true>{});
  if (p.K <= 64) return run(sm90::Heads<64>{});
  if (p.K <= 128) return run(sm90::Heads<128>{});
  return run(sm90::Heads<256>{});
}

// q and k over their norms, in the workspace.
template <class T, class Heads>
const char* normalize(const ChunkForward& p, Rows& q, Rows& k, cudaStream_t stream) {
  constexpr int kLanes = Heads::kKeys / 8;
  const int64_t rows = p.B * p.T * p.H;
  uint4* const q_out = static_cast<uint4*>(p.workspace);
  uint4* const k_out = q_out + normalized_bytes(p) / sizeof(uint4);
  const dim3 grid(unsigned(ceil_div(rows * kLanes, sm90::kNormThreads)), 2);
  sm90::l2norm_kernel<T, kLanes, Heads::kExact>
      <<<grid, sm90::kNormThreads, 0, stream>>>(q, k, q_out, k_out, rows, p.T, p.H, p.K);
  q = {q_out, p.T * p.H * p.K, int64_t{p.H} * p.K, p.K};
  k = {k_out, p.T * p.H * p.K, int64_t{p.H} * p.K, p.K};
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// For tests and measurements: sequences longer than this always go in segments of so many chunks; 0
// never.
#ifndef GDN_SEGMENT_CHUNKS
#define GDN_SEGMENT_CHUNKS -1
#endif

// Microseconds, fitted to the times of all plans of 32 calls on an H200: a chunk with 128 channels of
// V in a block, with 64, and of a map; a segment of the fold.
struct Costs {
  double both, half, map, fold;
};
template <class Heads>
constexpr Costs costs() {
  return Heads::kKeys == 64    ? Costs{1.7, 1.25, 1.2, 1.5}
         : Heads::kKeys == 128 ? Costs{2.4, 1.55, 1.7, 1.6}
                               : Costs{0, 2.6, 2.2, 4};
}

template <class Heads>
Plan make_plan(const ChunkForward& p) {
  constexpr Costs kCosts = costs<Heads>();
  constexpr double kTile = 9, kLaunches = 30;  // the start and end of a tile; the two more launches
  constexpr double kWorthIt = 0.87;  // segments must promise so much
  const int64_t pairs = int64_t{p.N} * p.HV;
  const auto turns = [&](int64_t tiles, double time) {
    return double(ceil_div(tiles, p.multiprocessors)) * time;
  };
  const auto walk = [&](int64_t tiles, int64_t chunks, bool in_segments, bool& halves) {
    const double both = turns(ceil_div(p.V, 128) * tiles, chunks * kCosts.both + kTile);
    const double half = turns(ceil_div(p.V, 64) * tiles, chunks * kCosts.half + kTile);
    halves = half < both || sm90::only_halves<Heads>(in_segments);
    return halves ? half : both;
  };
  constexpr int kMapChannels = Heads::kKeys == 256 ? 64 : 128;  // of a block
  const int64_t b_parts = ceil_div(p.V, kMapChannels), m_parts = ceil_div(Heads::kKeys, kMapChannels);
  const int64_t chunks = ceil_div(p.T, sm90::kChunk);  // of a batch entry
  const int64_t each = p.cu_seqlens ? ceil_div(chunks, p.N > 0 ? p.N : 1) : chunks;
  // The host does not know the lengths of packed sequences. The longest, which the others wait for, is
  // taken to be a quarter longer than the average.
  const int64_t longest = p.cu_seqlens && p.N > 1 ? each + each / 4 : each;
  const int forced = GDN_SEGMENT_CHUNKS;
  Plan best = {};
  double least = kWorthIt * walk(pairs, longest, false, best.halves);
  if (p.batch_invariant || forced == 0) return best;
  for (int segment = forced > 0 ? forced : 8; segment < each; segment *= 2) {
    const int64_t slots =
        p.cu_seqlens ? p.N + p.T / (segment * sm90::kChunk) : p.N * ceil_div(chunks, segment);
    const int64_t count = ceil_div(each, segment);
    Plan plan = {false, segment, int(slots)};
    const int64_t maps = (count - 1) * b_parts + (count - 2) * m_parts;
    const double time = turns(pairs * maps, segment * kCosts.map + kTile) +
                        ceil_div(longest, segment) * kCosts.fold +
                        walk(pairs * count, segment, true, plan.halves) + kLaunches;
    if (time < least || forced > 0) {
      least = time;
      best = plan;
    }
    if (forced > 0) break;
  }
  return best;
}

// Of the maps, and of the states that segments start from.
template <class Heads>
size_t segment_floats(const ChunkForward& p, const Plan& plan, size_t rows) {
  return size_t(plan.slots) * p.HV * rows * Heads::kKeys;
}
template <class Heads>
size_t map_floats(const ChunkForward& p, const Plan& plan) {
  return segment_floats<Heads>(p, plan, sm90::state_rows(p.V) + sm90::map_rows(Heads::kKeys));
}
template <class Heads>
size_t start_floats(const ChunkForward& p, const Plan& plan) {
  return segment_floats<Heads>(p, plan, sm90::state_rows(p.V));
}

// pool: null without one.
template <class T, class Heads>
const char* run(const ChunkForward& p, const Pool* pool, cudaStream_t stream) {
  sm90::KernelParams params = {};
  params.problem = p;
  if (pool) params.pool = *pool;
  Rows q = p.q, k = p.k;
  char* workspace = static_cast<char*>(p.workspace);
  if (p.use_qk_l2norm && p.B * p.T > 0) {
    if (const char* error = normalize<T, Heads>(p, q, k, stream)) return error;
    workspace += 2 * normalized_bytes(p);
  }
  const Rows o = pool ? pool->o : Rows{p.o, p.T * p.HV * p.V, int64_t{p.HV} * p.V, p.V};
  if (p.B * p.T > 0) {  // a map of nothing is refused, and is not needed
    if (const char* error = make_map(&params.q, p.dtype, q, p.B, p.T, p.H, p.K)) return error;
    if (const char* error = make_map(&params.k, p.dtype, k, p.B, p.T, p.H, p.K)) return error;
    if (const char* error = make_map(&params.v, p.dtype, p.v, p.B, p.T, p.HV, p.V)) return error;
    if (const char* error = make_map(&params.o, p.dtype, o, p.B, p.T, p.HV, p.V)) return error;
  }
  const Plan plan = make_plan<Heads>(p);
  float* const maps = reinterpret_cast<float*>(workspace);
  params.heads = sm90::Divisor::of(p.HV);
  params.group = sm90::Divisor::of(p.HV / p.H);
  params.segments = {plan.segment, plan.slots, maps, maps + map_floats<Heads>(p, plan)};
  return pool ? sm90::run_heads<T, Heads, true>(params, plan, stream)
              : sm90::run_heads<T, Heads, false>(params, plan, stream);
}

const char* run_supported(const ChunkForward& p, const Pool* pool, cudaStream_t stream) {
  if (const char* reason = unsupported(p)) return reason;
  if (p.HV == 0 || (p.N == 0 && p.T == 0)) return nullptr;
  return with_heads(p, [&](auto heads) {
    return p.dtype == Dtype::kBFloat16 ? run<__nv_bfloat16, decltype(heads)>(p, pool, stream)
                                       : run<__half, decltype(heads)>(p, pool, stream);
  });
}

}  // namespace

size_t chunk_forward_workspace(const ChunkForward& p) {
  if (unsupported(p)) return 0;
  const size_t floats = with_heads(p, [&](auto heads) {
    using Heads = decltype(heads);
    const Plan plan = make_plan<Heads>(p);
    return map_floats<Heads>(p, plan) + start_floats<Heads>(p, plan);
  });
  return (p.use_qk_l2norm ? 2 * normalized_bytes(p) : 0) + floats * sizeof(float);
}

const char* chunk_forward(const ChunkForward& p, cudaStream_t stream) {
  return run_supported(p, nullptr, stream);
}

const char* chunk_prefill(const ChunkForward& p, const Pool& pool, cudaStream_t stream) {
  return run_supported(p, &pool, stream);
}

}  // namespace gdn
