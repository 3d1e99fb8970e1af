// Host side of the chunked forward on Hopper; params.h says what is asked of it.
#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "../common/tensor_map.h"
#include "config.cuh"
#include "l2norm.cuh"

namespace gdn {
namespace {
using sm90::Cut;
using sm90::Cuts;
using sm90::Plan;
using sm90::Shape;
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
  return sm90::check(cudaGetLastError());
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
constexpr double kSecondLaunch = 2;  // so much later begin the maps, unless they are launched first
constexpr double kNoSegments = 2;    // the launches, of nothing
template <class Heads>
constexpr Costs costs() {
  return Heads::kKeys == 64    ? Costs{1.74, 1.28, 1.4, 3.5, 1.7, 12.5}
         : Heads::kKeys == 128 ? Costs{2.25, 1.6, 1.87, 10, 0.6, 10}
                               : Costs{0, 2.55, 2.05, 9, 15.7, 13};
}

// When tiles are done of which each goes to the multiprocessor that is free first, in their order.
class Schedule {
 public:
  explicit Schedule(int multiprocessors) : multiprocessors_(multiprocessors) {
    groups_[0] = {0, multiprocessors};
  }
  // Tiles of one kind. At most kMostKinds may have some.
  void add(int64_t count, double time) {
    const int64_t rounds = std::max<int64_t>(count / multiprocessors_ - 1, 0);  // one each
    for (int i = 0; i < size_; ++i) groups_[i].free += double(rounds) * time;
    count -= rounds * multiprocessors_;
    while (count > 0) {
      Group& first = *std::min_element(
          groups_, groups_ + size_, [](const Group& a, const Group& b) { return a.free < b.free; });
      const int64_t taken = std::min(count, first.count);
      if (taken < first.count) groups_[size_++] = {first.free, first.count - taken};
      first = {first.free + time, taken};
      count -= taken;
    }
  }
  double end() const {
    double last = 0;
    for (int i = 0; i < size_; ++i) last = std::max(last, groups_[i].free);
    return last;
  }
  static constexpr int kMostKinds = 4;

 private:
  struct Group {  // of multiprocessors
    double free;
    int64_t count;
  };
  int multiprocessors_, size_ = 1;
  Group groups_[kMostKinds + 1] = {};
};

// Chunks of the longest sequence and of each other one.
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
  double map(int64_t chunks) const { return double(chunks) * kCosts.map + kCosts.tile; }
  int64_t parts(bool halves) const { return ceil_div(p.V, halves ? 64 : 128); }
  int64_t map_parts() const {
    return ceil_div(p.V, kMapChannels) + ceil_div(Heads::kKeys, kMapChannels);
  }

  double whole(Lengths lengths, bool halves) const {
    Schedule schedule(p.multiprocessors);
    schedule.add(p.HV * parts(halves), tile(lengths.longest, halves));
    schedule.add((p.N - 1) * p.HV * parts(halves), tile(lengths.other, halves));
    return schedule.end();
  }
  Cut cut(Lengths lengths, int64_t first, int64_t rest) const {
    Cut cut = {int(first), int(rest), int(lengths.longest), 0, 0};
    const int64_t most = later(lengths.longest, cut), others = later(lengths.other, cut);
    const auto inner = [](int64_t some) { return std::max<int64_t>(some - 1, 0); };
    cut.later = int(most + (p.N - 1) * others);
    cut.inner = int(inner(most) + (p.N - 1) * inner(others));
    return cut;
  }
  // Estimated time of this cut; returns `enough` early if even its lower bound is not below `enough`.
  double segments(Lengths lengths, const Cut& cut, double enough) const {
    const int64_t heads = p.HV * parts(true), maps = p.HV * map_parts() * cut.inner;
    const int64_t inner = heads * cut.inner, others = (p.N - 1) * heads;
    const double first = tile(std::min<int64_t>(lengths.longest, cut.first), true);
    const double other_first = tile(std::min<int64_t>(lengths.other, cut.first), true);
    const double rest = tile(cut.rest, true), a_map = map(cut.rest);
    const int64_t most = later(lengths.longest, cut), other_most = later(lengths.other, cut);
    const double last = most > 0 ? tile(left(lengths.longest, cut, most), true) : 0;
    const double other_last = other_most > 0 ? tile(left(lengths.other, cut, other_most), true) : 0;
    const double apart = double(std::max<int64_t>(most - 1, 0)) * kCosts.fold +
                         (cut.later > 0 ? kCosts.launches : kNoSegments) +
                         (maps > 0 && first > a_map ? kSecondLaunch : 0);

    const double early_work = double(heads) * first + double(others) * other_first + double(maps) * a_map;
    const double late_work =
        double(inner) * rest + double(heads) * last + double(others) * other_last;
    const double all = p.multiprocessors;
    const double early_least = std::max({first, maps > 0 ? a_map : 0, early_work / all});
    const double late_least = std::max({inner > 0 ? rest : 0, last, late_work / all});
    if (early_least + late_least + apart >= enough) return enough;

    Schedule early(p.multiprocessors), late(p.multiprocessors);
    early.add(heads, first);
    early.add(others, other_first);
    early.add(maps, a_map);
    late.add(inner, rest);
    if (most > 0) late.add(heads, last);
    if (other_most > 0) late.add(others, other_last);
    return early.end() + late.end() + apart;
  }
  double least_in_segments(Lengths lengths) const {
    const int64_t chunks = p.HV * parts(true) * (lengths.longest + (p.N - 1) * lengths.other);
    return double(chunks) * kCosts.half / p.multiprocessors;
  }

 private:
  // Segments behind a sequence's first, and the chunks of the last of these.
  static int64_t later(int64_t length, const Cut& cut) {
    return length > cut.first ? ceil_div(length - cut.first, cut.rest) : 0;
  }
  static int64_t left(int64_t length, const Cut& cut, int64_t later) {
    return length - cut.first - (later - 1) * cut.rest;
  }
};

// The best of cuts, each with lengths that it serves: of a coarse grid, then of what is near the best.
template <class Heads, class Candidate>
std::pair<Cut, double> best_cut(const Estimate<Heads>& estimate, int64_t longest, const Candidate& candidate) {
  constexpr int kMostSegments = 32, kMore = 5, kLeastChunks = 4;
  constexpr double kRatios[] = {1, 1.25, 1.5, 2, 3, 4};  // of the first segment's length to the others'
  constexpr int kSteps[] = {3, 1};                       // chunks
  const auto [uncut, lengths] = candidate(longest, longest);  // in segments all the same
  Cut best = uncut;
  double least = estimate.segments(lengths, best, std::numeric_limits<double>::infinity());
  const auto better = [&](int64_t first, int64_t rest) {
    if (rest < kLeastChunks || first < rest) return false;
    const auto [cut, served] = candidate(first, rest);
    const double time = estimate.segments(served, cut, least);
    if (time >= least) return false;
    best = cut, least = time;
    return true;
  };
  int last = 3;  // number of segments that was better than fewer
  for (int number = 3; number <= std::min(last + kMore, kMostSegments); ++number) {
    for (const double ratio : kRatios) {
      const int64_t rest = int64_t(std::ceil(double(longest) / (number - 1 + ratio)));
      if (better(int64_t(std::ceil(double(rest) * ratio)), rest)) last = number;
    }
  }
  const auto better_near = [&](int step) {
    const int64_t first = best.first, rest = best.rest;
    bool any = false;
    for (int i = -1; i <= 1; ++i)
      for (int j = -1; j <= 1; ++j) any |= better(first + i * step, rest + j * step);
    return any;
  };
  for (const int step : kSteps)
    while (best.later > 0 && better_near(step)) continue;
  return {best, least};
}

template <class Heads>
Plan make_plan(const ChunkForward& p) {
  // What segments must promise for all lengths together, and may lose for one.
  constexpr double kWorthIt = 0.95, kMostLoss = 1.03;
  // The host does not know the lengths of packed sequences. The longest has so much of what is between an
  // equal share and all.
  constexpr double kLonger[] = {0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75};
  constexpr int kGuesses = int(std::size(kLonger));
  static_assert(kGuesses < Cuts::kMost);
  const Estimate<Heads> estimate = {p};
  const int64_t chunks = ceil_div(p.T, sm90::kChunk);  // of a batch entry
  const bool guess = p.cu_seqlens && p.N > 1;
  const int guesses = guess ? kGuesses : 1;
  const int64_t each = p.cu_seqlens ? ceil_div(chunks, std::max(p.N, 1)) : chunks;
  Lengths lengths[kGuesses];
  double whole[2][kGuesses];
  for (int i = 0; i < guesses; ++i) {
    const int64_t longest = each + int64_t(double(chunks - each) * (guess ? kLonger[i] : 0));
    lengths[i] = {longest, guess ? ceil_div(chunks - longest, p.N - 1) : each};
    whole[true][i] = estimate.whole(lengths[i], true);
    whole[false][i] = sm90::only_halves<Heads>() ? whole[true][i] : estimate.whole(lengths[i], false);
  }
  // With half of V a block is done sooner with a long sequence, but four equal ones of 32 heads would take
  // two turns. What fills no turn goes in halves, whatever its lengths.
  const bool halves = whole[true][0] <= whole[false][0];
  const bool by_lengths = guess && !sm90::only_halves<Heads>() &&
                          p.N * p.HV * estimate.parts(true) > p.multiprocessors;
  const Plan in_whole = {by_lengths ? Shape::kByLengths : halves ? Shape::kHalves : Shape::kBoth, {}, 0};
  double least_whole[kGuesses];
  for (int i = 0; i < guesses; ++i)
    least_whole[i] = by_lengths ? std::min(whole[true][i], whole[false][i]) : whole[halves][i];
  const double enough = kWorthIt * std::accumulate(least_whole, least_whole + guesses, 0.);
  const int forced = GDN_SEGMENT_CHUNKS;
  if (p.batch_invariant || forced == 0 || p.N == 0) return in_whole;

  Cuts cuts = {};
  const auto in_segments = [&] {
    const Cut& last = cuts.choices[cuts.count - 1];
    int64_t slots = p.cu_seqlens ? chunks / last.rest : last.later;
    cuts.maps_first = true;
    for (int i = 0; i < cuts.count; ++i) {
      const Cut& cut = cuts.choices[i];
      if (i + 1 < cuts.count) slots = std::max<int64_t>(slots, cut.later);
      cuts.maps_first &= estimate.map(cut.rest) >= estimate.tile(cut.first, true);
    }
    return Plan{Shape::kHalves, cuts, int(slots)};
  };
  if (forced > 0) {
    cuts = {{estimate.cut(lengths[0], forced, forced)}, 1};
    return chunks > forced ? in_segments() : in_whole;
  }
  double least = 0;  // no segments take less: every chunk of o is made once, by a block with half of V
  for (int i = 0; i < guesses; ++i) least += estimate.least_in_segments(lengths[i]);
  if (enough <= least) return in_whole;
  double time = 0;
  for (int i = 0; i < guesses; ++i) {
    const auto [cut, of_cut] = best_cut(estimate, lengths[i].longest, [&](int64_t first, int64_t rest) {
      return std::pair(estimate.cut(lengths[i], first, rest), lengths[i]);
    });
    if (of_cut > kMostLoss * least_whole[i]) return in_whole;
    cuts.choices[cuts.count++] = cut;
    time += of_cut;
  }
  if (time >= enough) return in_whole;
  if (guess) {
    // For all other lengths one whose number of segments is never more than was reckoned with.
    cuts.choices[cuts.count++] = best_cut(estimate, chunks, [&](int64_t first, int64_t rest) {
      const Lengths most = {chunks + (first < chunks ? rest : 0), 1};
      return std::pair(estimate.cut(most, first, rest), most);
    }).first;
  }
  return in_segments();
}

// What was made for the last kMost keys.
template <class Key, class Value, size_t kMost>
class Kept {
 public:
  template <class Make>
  Value find(const Key& key, const Make& make) {
    if (last_ < entries_.size() && entries_[last_].key == key) return entries_[last_].value;
    for (last_ = 0; last_ < entries_.size(); ++last_)
      if (entries_[last_].key == key) return entries_[last_].value;
    const Entry entry = {key, make()};
    if (entries_.size() < kMost) {
      entries_.push_back(entry);
    } else {
      entries_[last_ = oldest_] = entry;
      oldest_ = (oldest_ + 1) % kMost;
    }
    return entry.value;
  }
  size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    Key key;
    Value value;
  };
  std::vector<Entry> entries_;
  size_t last_ = 0, oldest_ = 0;  // found or made; to be replaced
};

// All that a plan depends on, beside the kind of heads. Of T it is the number of chunks: lengths that never
// repeat are few numbers of chunks. Of the device it is the number of multiprocessors.
using PlanSizes = std::array<int64_t, 7>;
PlanSizes plan_sizes(const ChunkForward& p) {
  return {p.N, ceil_div(p.T, sm90::kChunk), p.HV, p.V, p.multiprocessors, p.cu_seqlens != nullptr,
          p.batch_invariant};
}
constexpr size_t kMostPlans = 64;

// The same, kept for the next calls of these sizes: for packed sequences the search takes up to 100 us.
template <class Heads>
Plan plan_of(const ChunkForward& p) {
  thread_local Kept<PlanSizes, Plan, kMostPlans> known;
  return known.find(plan_sizes(p), [&] { return make_plan<Heads>(p); });
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

// Tiles of whole sequences whose lengths the host does not know; 0 for other calls.
template <class Heads>
int64_t tiles_of_unknown_length(const ChunkForward& p, const Plan& plan, bool halves) {
  if (!p.cu_seqlens || p.N < 2 || plan.cuts.count > 0) return 0;
  return int64_t{p.N} * p.HV * Estimate<Heads>{p}.parts(halves);
}
// Whether a block takes its next tile by the counter Dealing::taken. A kernel before sets the counter to 0;
// that kernel is worth its time where even tiles with the most channels of V outnumber the multiprocessors.
template <class Heads>
bool are_taken(const ChunkForward& p, const Plan& plan) {
  return tiles_of_unknown_length<Heads>(p, plan, sm90::only_halves<Heads>()) > p.multiprocessors;
}
constexpr size_t kDealBytes = 256;  // Dealing::taken, and what keeps the next array aligned

__global__ void __launch_bounds__(32, 1) set_to_zero(int* taken) {
  launch_dependents();
  if (threadIdx.x == 0) *taken = 0;
}
template <class Heads>
sm90::Dealing deal(const ChunkForward& p, const Plan& plan, void* memory) {
  constexpr Costs kCosts = costs<Heads>();
  const bool ordered = p.N <= sm90::kMostOrdered &&
                       tiles_of_unknown_length<Heads>(p, plan, true) > p.multiprocessors;
  int* const taken = are_taken<Heads>(p, plan) ? static_cast<int*>(memory) : nullptr;
  return {ordered, taken, {float(kCosts.both), float(kCosts.half)}, float(kCosts.tile)};
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
  params.shape = plan.shape;
  params.dealing = deal<Heads>(p, plan, workspace);
  if (params.dealing.taken) {
    set_to_zero<<<1, 32, 0, stream>>>(params.dealing.taken);
    if (const char* error = sm90::check(cudaGetLastError())) return error;
    workspace += kDealBytes;
  }
  float* const maps = reinterpret_cast<float*>(workspace);
  params.heads = sm90::Divisor::of(p.HV);
  params.group = sm90::Divisor::of(p.HV / p.H);
  params.segments = {plan.cuts, false, maps, maps + map_floats<Heads>(p, plan)};
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
  const size_t of_plan = with_heads(p, [&](auto heads) {
    using Heads = decltype(heads);
    const Plan plan = plan_of<Heads>(p);
    const size_t floats = map_floats<Heads>(p, plan) + start_floats<Heads>(p, plan);
    return (are_taken<Heads>(p, plan) ? kDealBytes : 0) + floats * sizeof(float);
  });
  return (p.use_qk_l2norm ? 2 * normalized_bytes(p) : 0) + of_plan;
}

const char* chunk_forward(const ChunkForward& p, cudaStream_t stream) {
  return run_supported(p, nullptr, stream);
}

const char* chunk_prefill(const ChunkForward& p, const Pool& pool, cudaStream_t stream) {
  return run_supported(p, &pool, stream);
}

}  // namespace gdn
