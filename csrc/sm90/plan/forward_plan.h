// How the host plans a forward: whole sequences or segments, the shape of the blocks, and how these
// come to their tiles. A plan follows from the sizes of a call and from the constants in costs.h.
// No CUDA is called.
#pragma once
#include <algorithm>
#include <array>
#include <iterator>
#include <numeric>
#include <utility>
#include <vector>

#include "params.h"
#include "sm90/heads.h"
#include "sm90/plan/cut.h"
#include "sm90/plan/device_cut.h"
#include "sm90/plan/estimate.h"
#include "sm90/plan/lengths.h"
#include "sm90/plan/memo.h"
#include "sm90/plan/search.h"

namespace gdn::sm90 {

// Makes the plan of a call. plan() takes one of three cases, each a function: whole sequences,
// known lengths, and assumed lengths. Sequences of padded calls, and a single packed sequence, have
// one assumption, which is true.
template <class Heads>
class ForwardPlanner {
 public:
  explicit ForwardPlanner(const ChunkForward& p)
      : p_(p), estimate_{p}, chunks_(ceil_div(p.T, kChunk)), is_uneven_(p.cu_seqlens && p.N > 1) {
    assume_lengths();
    time_whole_sequences();
  }

  ForwardPlan plan() const {
    if (p_.batch_invariant || p_.N == 0) return whole_sequences();
    return knows_longest() ? known_lengths_plan() : assumed_lengths_plan();
  }

 private:
  // A cut may take at most this share of the time of whole sequences.
  static constexpr double kWorthIt = 0.95;

  // The host knows the lengths of uneven sequences only where the caller names the longest ones.
  bool knows_longest() const { return is_uneven_ && p_.longest[0] > 0; }

  void assume_lengths() {
    // The longest of several packed sequences has an equal share of all chunks, and this part of
    // the others.
    constexpr double kLonger[] = {0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75};
    static_assert(std::size(kLonger) < Cuts::kMost);
    const int64_t each = p_.cu_seqlens ? ceil_div(chunks_, std::max(p_.N, 1)) : chunks_;
    const size_t assumptions = is_uneven_ && !knows_longest() ? std::size(kLonger) : 1;
    for (size_t i = 0; i < assumptions; ++i) {
      const int64_t longest =
          each + int64_t(double(chunks_ - each) * (is_uneven_ ? kLonger[i] : 0));
      counts_.push_back({longest, is_uneven_ ? ceil_div(chunks_ - longest, p_.N - 1) : each});
      lengths_.push_back(knows_longest() ? known_lengths(p_) : lengths_of(counts_[i], p_.N));
    }
  }

  // With half of V a block is done sooner with a long sequence, but four equal sequences of 32
  // heads would take two turns. Calls that do not fill a turn have blocks with half of V, whatever
  // their lengths.
  void time_whole_sequences() {
    const bool by_lengths = is_uneven_ && !only_halves<Heads>() &&
                            p_.N * p_.HV * estimate_.parts(true) > p_.multiprocessors;
    bool halves = true;
    for (size_t i = 0; i < lengths_.size(); ++i) {
      const double of_halves = estimate_.whole(lengths_[i], true);
      const double of_both = only_halves<Heads>() ? of_halves : estimate_.whole(lengths_[i], false);
      if (i == 0) halves = of_halves <= of_both;
      whole_times_.push_back(by_lengths ? std::min(of_halves, of_both)
                             : halves   ? of_halves
                                        : of_both);
    }
    shape_ = by_lengths ? BlockShape::kByLengths : halves ? BlockShape::kHalves : BlockShape::kBoth;
  }

  ForwardPlan whole_sequences() const {
    ForwardPlan plan = {};
    plan.shape = shape_;
    return plan;
  }
  ForwardPlan whole_or_cut_by_device() const {
    return or_cut_by_device<Heads>(p_, whole_sequences(), lengths_, whole_times_);
  }

  // Several packed sequences of which the host knows the longest.
  ForwardPlan known_lengths_plan() const {
    // Cuts of uneven lengths take a little longer than the model says.
    constexpr double kUnevenWorthIt = 0.9;
    const SequenceLengths& lengths = lengths_[0];
    auto [best, time] = best_known_cut<Heads>(p_, lengths);
    double worth_it = kUnevenWorthIt, most = kUnbounded;
    if (p_.N == 2) {  // all lengths are known: cuts are compared by the schedule of their tiles
      const ChunkCounts both = {lengths.longest(), chunks_ - lengths.longest()};
      const auto [cut, time_of_cut] = cut_for(both, true);
      time = kUnbounded;
      if (best.first > 0)
        time = estimate_.segments(both, estimate_.cut(both, best.first, best.rest),
                                  best.late_halves, kUnbounded);
      if (time_of_cut < time) best = {cut.first, cut.rest, true}, time = time_of_cut;
      worth_it = kWorthIt, most = time;
    }
    if (best.first >= lengths.longest() || time >= worth_it * whole_times_[0])
      return whole_or_cut_by_device();
    Cut cut = {best.first, best.rest, lengths.longest(), 0, 0};
    cut.later = lengths.most_later(cut), cut.inner = lengths.most_later(cut, true);
    Cuts cuts = {};
    add(cuts, cut);
    add(cuts, cut_for_any_lengths());
    return or_cut_by_device<Heads>(p_, in_segments(cuts, best.late_halves), lengths_, {time}, most);
  }

  // Lengths that the host assumes. It cuts only where that pays on average, and loses little for
  // any of them.
  ForwardPlan assumed_lengths_plan() const {
    constexpr double kMostLoss = 1.03;
    // Blocks of later segments have both halves where that takes at most this share.
    constexpr double kLateBoth = 0.97;
    const double enough = kWorthIt * std::accumulate(whole_times_.begin(), whole_times_.end(), 0.);
    double bound = 0;
    for (const ChunkCounts& counts : counts_) bound += estimate_.least_in_segments(counts);
    if (enough <= bound) return whole_or_cut_by_device();
    Cuts cuts = {};
    std::vector<double> times;
    bool late_halves = true;
    for (size_t i = 0; i < counts_.size(); ++i) {
      auto [cut, time] = cut_for(counts_[i], true);
      if (!is_uneven_ && !only_halves<Heads>()) {
        const auto [other, time_of_other] = cut_for(counts_[i], false);
        late_halves = time_of_other >= kLateBoth * time;
        if (!late_halves) cut = other, time = time_of_other;
      }
      if (time > kMostLoss * whole_times_[i]) return whole_or_cut_by_device();
      add(cuts, cut);
      times.push_back(time);
    }
    if (std::accumulate(times.begin(), times.end(), 0.) >= enough) return whole_or_cut_by_device();
    if (is_uneven_) add(cuts, cut_for_any_lengths());
    return or_cut_by_device<Heads>(p_, in_segments(cuts, late_halves), lengths_, times);
  }

  std::pair<Cut, double> cut_for(ChunkCounts counts, bool late_halves) const {
    return best_cut(estimate_, counts.longest, late_halves, [&](int64_t first, int64_t rest) {
      return std::pair(estimate_.cut(counts, first, rest), counts);
    });
  }
  // The cut of sequences of any other lengths: they never have more segments than it was planned
  // for.
  Cut cut_for_any_lengths() const {
    const auto candidate = [&](int64_t first, int64_t rest) {
      const ChunkCounts most = {chunks_ + (first < chunks_ ? rest : 0), 1};
      return std::pair(estimate_.cut(most, first, rest), most);
    };
    return best_cut(estimate_, chunks_, true, candidate).first;
  }
  static void add(Cuts& cuts, const Cut& cut) { cuts.choices[cuts.count++] = cut; }

  ForwardPlan in_segments(const Cuts& cuts, bool late_halves) const {
    const Cut& last = cuts.choices[cuts.count - 1];
    int64_t later = p_.cu_seqlens ? chunks_ / last.rest : last.later;
    ForwardPlan plan = {};
    plan.cuts = cuts;
    plan.cuts.maps_first = true;
    for (int i = 0; i < cuts.count; ++i) {
      const Cut& cut = cuts.choices[i];
      if (i + 1 < cuts.count) later = std::max<int64_t>(later, cut.later);
      plan.cuts.maps_first &= estimate_.map(cut.rest) >= estimate_.tile(cut.first, true);
    }
    plan.shape = late_halves ? BlockShape::kHalves : BlockShape::kBoth;
    plan.first = BlockShape::kHalves;
    plan.later_segments = int(later);
    return plan;
  }

  const ChunkForward& p_;
  const Estimate<Heads> estimate_;
  const int64_t chunks_;  // of a batch entry
  const bool is_uneven_;  // several packed sequences
  std::vector<ChunkCounts> counts_;
  std::vector<SequenceLengths> lengths_;  // the same, or the known lengths
  std::vector<double> whole_times_;       // of whole sequences, for each of the lengths
  BlockShape shape_;
};

template <class Heads>
ForwardPlan make_plan(const ChunkForward& p) {
  return ForwardPlanner<Heads>(p).plan();
}

// The tokens that a call is planned for. A plan for sequences whose lengths the host does not know
// rests on assumptions, and serves fewer tokens as well: such calls are planned for one of at most
// 16 numbers of chunks between two powers of two.
inline int64_t planned_tokens(int64_t tokens) {
  const int64_t chunks = ceil_div(tokens, kChunk);
  int64_t step = 1;
  while (step * 32 <= chunks) step *= 2;
  return ceil_div(chunks, step) * step * kChunk;
}
inline ChunkForward planned(const ChunkForward& p) {
  ChunkForward x = p;
  const bool is_uneven = p.cu_seqlens && p.N > 1;
  if (is_uneven) x.T = planned_tokens(p.T);
  for (int64_t& tokens : x.longest) tokens = is_uneven ? planned_tokens(tokens) : 0;
  return x;
}

// All that a plan depends on, apart from the kind of heads. Lengths are those that the call is
// planned for: calls whose lengths never repeat have few plans.
using PlanSizes = std::array<int64_t, 10>;
inline PlanSizes plan_sizes(const ChunkForward& p) {
  const ChunkForward x = planned(p);
  const auto& longest = x.longest;
  return {p.N,
          ceil_div(x.T, kChunk),
          longest[0],
          longest[1],
          longest[2],
          p.HV,
          p.V,
          p.multiprocessors,
          p.cu_seqlens != nullptr,
          p.batch_invariant};
}
constexpr size_t kMostPlans = 64;

// The plan of a call, remembered for later calls of these sizes: for packed sequences the search
// takes up to 100 us.
template <class Heads>
ForwardPlan plan_of(const ChunkForward& p) {
  thread_local Memo<PlanSizes, ForwardPlan, kMostPlans> memo;
  return memo.find(plan_sizes(p), [&] { return make_plan<Heads>(planned(p)); });
}

// The number of tiles of whole sequences whose lengths the host does not know; 0 for other calls.
template <class Heads>
int64_t tiles_of_unknown_length(const ChunkForward& p, const ForwardPlan& plan, bool halves) {
  if (!p.cu_seqlens || p.N < 2 || plan.in_segments()) return 0;
  return int64_t{p.N} * p.HV * Estimate<Heads>{p}.parts(halves);
}
// Whether a block takes its next tile by the counter Dealing::taken. A kernel launched before sets
// the counter to 0, which is worth its time where even tiles with the most channels of V outnumber
// the multiprocessors.
template <class Heads>
bool are_taken(const ChunkForward& p, const ForwardPlan& plan) {
  return tiles_of_unknown_length<Heads>(p, plan, only_halves<Heads>()) > p.multiprocessors;
}

template <class Heads>
Dealing deal(const ChunkForward& p, const ForwardPlan& plan, void* memory) {
  constexpr Costs kCosts = costs<Heads>();
  const bool ordered =
      p.N <= kMostOrdered && tiles_of_unknown_length<Heads>(p, plan, true) > p.multiprocessors;
  int* const taken = are_taken<Heads>(p, plan) ? static_cast<int*>(memory) : nullptr;
  return {ordered, taken, {float(kCosts.both), float(kCosts.half)}, float(kCosts.tile)};
}

}  // namespace gdn::sm90
