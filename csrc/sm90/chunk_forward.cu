// Host side of the chunked forward on Hopper; params.h says what is asked of it.
#include <algorithm>
#include <array>
#include <iterator>

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

// Microseconds, fitted to the times of 363 plans of 31 calls on an H200.
struct Costs {
  double both, half, map;  // a chunk with 128 channels of V in a block, with 64, and of a map
  double tile;             // the start and end of a tile
  double fold, launches;   // a segment of the fold; three more launches
};
template <class Heads>
constexpr Costs costs() {
  return Heads::kKeys == 64    ? Costs{1.74, 1.28, 1.4, 3.5, 1.7, 12.5}
         : Heads::kKeys == 128 ? Costs{2.25, 1.6, 1.87, 10, 0.6, 10}
                               : Costs{0, 2.55, 2.05, 9, 15.7, 13};
}

// When the last of some tiles is done, each of which goes to the multiprocessor that is free first: those
// of one kind, then those of another.
struct Tiles {
  int64_t count;
  double time;
};
double makespan(int multiprocessors, Tiles one, Tiles other) {
  const int64_t late = one.count % multiprocessors, early = multiprocessors - late;
  double early_free = double(one.count / multiprocessors) * one.time;
  double late_free = early_free + one.time, end = late > 0 ? late_free : early_free;
  const int64_t rounds = std::max<int64_t>(other.count / multiprocessors - 1, 0);  // one each
  other.count -= rounds * multiprocessors;
  early_free += double(rounds) * other.time;
  late_free += double(rounds) * other.time;
  while (other.count > 0) {
    double& free = late == 0 || early_free <= late_free ? early_free : late_free;
    other.count -= &free == &early_free ? early : late;
    free += other.time;
    end = std::max(end, free);
  }
  return end;
}

// Chunks of the longest sequence, which the others wait for, and of each other one.
struct Lengths {
  int64_t longest, other;
};

// What plans take, for lengths that are known or guessed.
template <class Heads>
struct Estimate {
  static constexpr Costs kCosts = costs<Heads>();
  static constexpr int kMapChannels = Heads::kKeys == 256 ? 64 : 128;  // of a block
  const ChunkForward& p;

  double tile(int64_t chunks, bool halves) const {
    return double(chunks) * (halves ? kCosts.half : kCosts.both) + kCosts.tile;
  }
  int64_t parts(bool halves) const { return ceil_div(p.V, halves ? 64 : 128); }

  double whole(Lengths lengths, bool halves) const {
    const int64_t turns = ceil_div(p.N * p.HV * parts(halves), p.multiprocessors);
    return double(turns) * tile(lengths.longest, halves);
  }
  double segments(Lengths lengths, int64_t segment) const {
    const auto later = [&](int64_t length) {
      return length > segment ? ceil_div(length, segment) - 1 : 0;
    };
    const int64_t most = later(lengths.longest), rest = later(lengths.other), others = p.N - 1;
    const int64_t all = most + others * rest;
    const int64_t inner = std::max<int64_t>(most - 1, 0) + others * std::max<int64_t>(rest - 1, 0);
    const int64_t map_parts = ceil_div(p.V, kMapChannels) + ceil_div(Heads::kKeys, kMapChannels);
    const double time = tile(segment, true);
    const Tiles maps = {p.HV * inner * map_parts, double(segment) * kCosts.map + kCosts.tile};
    const Tiles first = {p.N * p.HV * parts(true), time}, last = {p.HV * all * parts(true), time};
    return makespan(p.multiprocessors, maps, first) + double(std::max<int64_t>(most - 1, 0)) * kCosts.fold +
           makespan(p.multiprocessors, {}, last) + kCosts.launches;
  }
  // No segments take less: every chunk of o is made once, by a block with half of V.
  double least_in_segments(Lengths lengths) const {
    const int64_t chunks = p.HV * parts(true) * (lengths.longest + (p.N - 1) * lengths.other);
    return double(chunks) * kCosts.half / p.multiprocessors;
  }
};

template <class Heads>
Plan make_plan(const ChunkForward& p) {
  constexpr double kWorthIt = 0.95;  // segments must promise so much
  constexpr int kMostSegments = 32, kLeastChunks = 4;
  // The host does not know the lengths of packed sequences: one may be so much longer than the average.
  constexpr double kLonger[] = {0, 0.25, 0.5, 0.75};
  const Estimate<Heads> estimate = {p};
  const int64_t chunks = ceil_div(p.T, sm90::kChunk);  // of a batch entry
  const bool guess = p.cu_seqlens && p.N > 1;
  const int guesses = guess ? int(std::size(kLonger)) : 1;
  const int64_t each = p.cu_seqlens ? ceil_div(chunks, std::max(p.N, 1)) : chunks;
  Lengths lengths[std::size(kLonger)];
  for (int i = 0; i < guesses; ++i) {
    const int64_t longest = each + int64_t(double(each) * kLonger[i]);
    lengths[i] = {longest, guess ? (chunks - longest) / (p.N - 1) : each};
  }
  const auto total = [&](const auto& time_of) {
    double sum = 0;
    for (int i = 0; i < guesses; ++i) sum += time_of(lengths[i]);
    return sum;
  };

  Plan best = {};
  double least = 0;
  for (const bool halves : {true, false}) {
    if (!halves && sm90::only_halves<Heads>()) break;
    const double time = total([&](Lengths some) { return estimate.whole(some, halves); });
    if (halves || time <= least) best.halves = halves, least = time;
  }
  const int forced = GDN_SEGMENT_CHUNKS;
  if (p.batch_invariant || forced == 0) return best;

  const auto slots = [&](int64_t segment) {
    return p.cu_seqlens ? p.T / (segment * sm90::kChunk) : p.N * (ceil_div(chunks, segment) - 1);
  };
  if (forced > 0) return chunks > forced ? Plan{true, forced, int(slots(forced))} : best;
  least *= kWorthIt;
  if (least <= total([&](Lengths some) { return estimate.least_in_segments(some); })) return best;
  for (int i = 0; i < guesses; ++i) {
    for (int count = 3; count <= kMostSegments; ++count) {
      const int64_t segment = ceil_div(lengths[i].longest, count);
      if (segment < kLeastChunks) break;
      const double time = total([&](Lengths some) { return estimate.segments(some, segment); });
      if (time < least) {
        least = time;
        best = {true, int(segment), int(slots(segment))};
      }
    }
  }
  return best;
}

// The same, kept for the next call of these sizes: for packed sequences the search takes about 10 us.
template <class Heads>
Plan plan_of(const ChunkForward& p) {
  using Sizes = std::array<int64_t, 7>;
  const Sizes sizes = {p.N, p.T, p.HV, p.V, p.multiprocessors, p.cu_seqlens != nullptr, p.batch_invariant};
  thread_local Sizes known = {};
  thread_local Plan plan = {};
  if (sizes != known) {
    plan = make_plan<Heads>(p);
    known = sizes;
  }
  return plan;
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
  const Plan plan = plan_of<Heads>(p);
  float* const maps = reinterpret_cast<float*>(workspace);
  params.heads = sm90::Divisor::of(p.HV);
  params.group = sm90::Divisor::of(p.HV / p.H);
  params.segments = {plan.segment, plan.slots, false, maps, maps + map_floats<Heads>(p, plan)};
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
    const Plan plan = plan_of<Heads>(p);
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
