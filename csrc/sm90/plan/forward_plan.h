// How the host plans a call: into which segments sequences are cut, if any, the shape of the blocks, and how these come
// to their tiles. A plan follows from the sizes of a call and the costs below. Host code alone: no GPU and no kernel.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "params.h"
#include "sm90/heads.h"
#include "sm90/plan/cut.h"
#include "sm90/plan/cut_time.cuh"
#include "sm90/plan/estimate.h"
#include "sm90/plan/memo.h"

namespace gdn::sm90 {

// For tests and measurements: sequences longer than this always go in segments of so many chunks; 0
// never.
#ifndef GDN_SEGMENT_CHUNKS
#define GDN_SEGMENT_CHUNKS -1
#endif

// With it: whether blocks of later segments own 64 channels of V, not 128.
#ifndef GDN_LATER_HALVES
#define GDN_LATER_HALVES 0
#endif

constexpr double kUnbounded = std::numeric_limits<double>::infinity();

// The best of cuts, each with lengths that it serves: of a coarse grid, then of what is near the best.
template <class Heads, class Served>
std::pair<Cut, double> best_cut(const Estimate<Heads>& estimate, int64_t longest, bool late_halves,
                                const Served& candidate) {
  constexpr int kMostSegments = 32, kMore = 5;
  constexpr double kRatios[] = {1, 1.25, 1.5, 2, 3, 4};  // of the first segment's length to the others'
  constexpr int kSteps[] = {3, 1};                       // chunks
  const auto [uncut, lengths] = candidate(longest, longest);  // in segments all the same
  Cut best = uncut;
  double least = estimate.segments(lengths, best, late_halves, kUnbounded);
  const auto better = [&](int64_t first, int64_t rest) {
    if (rest < Candidate::kLeastChunks || first < rest) return false;
    const auto [cut, served] = candidate(first, rest);
    const double time = estimate.segments(served, cut, late_halves, least);
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
CutCall cut_call(const ChunkForward& p, const Plan& plan) {
  const Estimate<Heads> estimate = {p};
  const bool first_halves = plan.first == Shape::kHalves;
  return {estimate.kCosts,
          p.HV,
          p.multiprocessors,
          int(estimate.parts(first_halves)),
          only_halves<Heads>() ? 0 : int(estimate.parts(false)),
          int(estimate.parts(true)),
          int(ceil_div(p.V, estimate.kMapChannels)),
          int(estimate.map_parts()),
          plan.slots,
          first_halves,
          plan.forgets};
}

// A cut nearly as good as the one that choose_cut would take for these lengths, of fewer candidates: this runs on the
// host, for each number of chunks that a call may have.
inline std::pair<Cut, float> chosen_cut(const CutCall& call, const KnownLengths& lengths, const Candidate& as_planned,
                                        float share) {
  constexpr int kMostSegments = 12, kStep = 5;
  const InKinds length = {lengths.of};
  const int longest = lengths.longest();
  std::pair<Cut, float> best = {{as_planned.first, as_planned.rest},
                                cut_time(call, length, lengths.kinds, as_planned, share)};
  const int most = share > 0 ? 2 * Candidate::kRatios * (kMostSegments - 1) : 0;  // else planned as well as can be
  for (int i = 0; i <= most; i += kStep) {
    const Candidate x = Candidate::of_grid(i, longest, call);
    if (!x.is_one(longest)) continue;
    const float time = cut_time(call, length, lengths.kinds, x, share);
    if (time < best.second) best = {{x.first, x.rest}, time};
  }
  return best;
}

// The plan so far, or one whose cut the device chooses and whose maps are walked in windows: where that promises much
// for all lengths together, and loses next to nothing for any. times: what the plan so far takes for each of the
// lengths; most: what the plan with the device's cut may take.
template <class Heads>
Plan best_chosen(const ChunkForward& p, const Plan& so_far, const std::vector<KnownLengths>& lengths, const double* times,
                 double most) {
  constexpr double kWorthIt = 0.95, kMostLoss = 1.01, kMostUnforgotten = 1.05;
  constexpr float kLikely = 0.75f;  // so many heads forget; kMostUnforgotten is for none
  const Estimate<Heads> estimate = {p};
  constexpr Costs kCosts = costs<Heads>();
  // What fills the GPU more than twice takes longer than its longest sequence alone. choose_cut has memory for
  // kMostOrdered sequences and kMostChosenHeads heads.
  if (p.N * p.HV * estimate.parts(false) > 2 * p.multiprocessors || p.N > kMostOrdered || p.HV > kMostChosenHeads)
    return so_far;
  struct Guess {
    KnownLengths of;
    double time;
    Candidate as_planned;
  };
  std::vector<Guess> guesses;
  double least = 0, bound = 0;  // no choice takes less: every chunk of o is made once
  for (size_t i = 0; i < lengths.size(); i += 2) {
    const int longest = lengths[i].longest();
    Guess x = {lengths[i], times[i], {longest, longest, true}};
    if (so_far.cuts.count > 0) {  // by the measure of what it is compared with
      Plan plan = so_far;
      plan.slots = std::numeric_limits<int>::max();
      const Cut& cut = so_far.cuts.choices[i];
      x.as_planned = {cut.first, cut.rest, so_far.shape == Shape::kHalves};
      const float time = cut_time(cut_call<Heads>(p, plan), InKinds{x.of.of}, x.of.kinds, x.as_planned, 0);
      x.time = double(time - kChoice - kOtherShape);
    }
    double chunks = 0;
    for (const Alike& kind : x.of.of) chunks += double(p.HV) * double(kind.chunks) * kind.count;
    const double each = only_halves<Heads>() ? kCosts.half * double(estimate.parts(true))
                                             : std::min(kCosts.half * double(estimate.parts(true)),
                                                        kCosts.both * double(estimate.parts(false)));
    least += kWorthIt * x.time;
    bound += chunks * each / p.multiprocessors + kChoice + kAgain;
    guesses.push_back(x);
  }
  if (least <= bound) return so_far;
  Plan plan = {};
  plan.shape = Shape::kHalves;
  // Halves of first segments that outnumber the blocks are done later than blocks of both.
  const bool many = p.N * p.HV * estimate.parts(true) > p.multiprocessors;
  plan.first = many && !only_halves<Heads>() ? Shape::kBoth : Shape::kHalves;
  plan.chosen = plan.forgets = true;
  plan.slots = kMostForgetting;
  const CutCall call = cut_call<Heads>(p, plan);
  int slots = 0;
  double time = 0;
  for (const Guess& guess : guesses) {
    for (const auto& [share, most_loss] : {std::pair(0.f, kMostUnforgotten), std::pair(kLikely, kMostLoss)}) {
      const auto [cut, taken] = chosen_cut(call, guess.of, guess.as_planned, share);
      if (taken > most_loss * guess.time) return so_far;
      slots = std::max(slots, guess.of.most_later(cut));
      if (share > 0) time += taken;
    }
  }
  if (slots == 0 || time >= least || time >= most) return so_far;
  plan.slots = std::min(slots + slots / 2, kMostForgetting);  // the best cut may have more of them
  return plan;
}

// The cut of a packed call whose longest sequences the host was told, and its time.
template <class Heads>
std::pair<Candidate, double> told_cut(const ChunkForward& p, const KnownLengths& lengths) {
  constexpr int kMostSegments = 16;
  Plan plan = {};
  plan.first = Shape::kHalves;
  plan.slots = std::numeric_limits<int>::max();
  const CutCall call = cut_call<Heads>(p, plan);
  std::pair<Candidate, double> best = {{}, kUnbounded};
  const auto offer = [&](const Candidate& x) {
    if (x.first >= lengths.longest() || !x.is_one(lengths.longest())) return;
    const double time = cut_time(call, InKinds{lengths.of}, lengths.kinds, x, 0) - kChoice - kOtherShape;
    if (time < best.second) best = {x, time};
  };
  for (int i = 1; i <= 2 * Candidate::kRatios * (kMostSegments - 1); ++i)
    offer(Candidate::of_grid(i, lengths.longest(), call));
  const Candidate coarse = best.first;
  if (coarse.first > 0)
    for (int i = 0; i < Candidate::kNear; ++i) offer(Candidate::near(i, coarse));
  return best;
}

template <class Heads>
Plan make_plan(const ChunkForward& p) {
  // What segments must promise for all lengths together, and may lose for one.
  constexpr double kWorthIt = 0.95, kMostLoss = 1.03;
  constexpr double kToldWorthIt = 0.9;  // cuts of uneven lengths take a little longer than is reckoned
  constexpr double kLateBoth = 0.97;  // later segments in blocks of both halves take at most so much of the other's
  // The host does not know the lengths of packed sequences, unless it was told the longest: the longest has so much of
  // what is between an equal share and all.
  constexpr double kLonger[] = {0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75};
  constexpr int kGuesses = int(std::size(kLonger));
  static_assert(kGuesses < Cuts::kMost);
  const Estimate<Heads> estimate = {p};
  const int64_t chunks = ceil_div(p.T, kChunk);  // of a batch entry
  const bool guess = p.cu_seqlens && p.N > 1, told = guess && p.longest[0] > 0;
  const int guesses = guess && !told ? kGuesses : 1;
  const int64_t each = p.cu_seqlens ? ceil_div(chunks, std::max(p.N, 1)) : chunks;
  ChunkCounts lengths[kGuesses];
  std::vector<KnownLengths> served;
  double whole[2][kGuesses];
  for (int i = 0; i < guesses; ++i) {
    const int64_t longest = each + int64_t(double(chunks - each) * (guess ? kLonger[i] : 0));
    lengths[i] = {longest, guess ? ceil_div(chunks - longest, p.N - 1) : each};
    served.push_back(told ? told_lengths(p) : two_lengths(lengths[i], p.N));
    whole[true][i] = estimate.whole(served[i], true);
    whole[false][i] = only_halves<Heads>() ? whole[true][i] : estimate.whole(served[i], false);
  }
  // With half of V a block is done sooner with a long sequence, but four equal ones of 32 heads would take
  // two turns. What fills no turn goes in halves, whatever its lengths.
  const bool halves = whole[true][0] <= whole[false][0];
  const bool by_lengths = guess && !only_halves<Heads>() &&
                          p.N * p.HV * estimate.parts(true) > p.multiprocessors;
  Plan in_whole = {};
  in_whole.shape = by_lengths ? Shape::kByLengths : halves ? Shape::kHalves : Shape::kBoth;
  double least_whole[kGuesses];
  for (int i = 0; i < guesses; ++i)
    least_whole[i] = by_lengths ? std::min(whole[true][i], whole[false][i]) : whole[halves][i];
  const double enough = kWorthIt * std::accumulate(least_whole, least_whole + guesses, 0.);
  const int forced = GDN_SEGMENT_CHUNKS;
  if (p.batch_invariant || forced == 0 || p.N == 0) return in_whole;

  Cuts cuts = {};
  const auto in_segments = [&](bool late_halves) {
    const Cut& last = cuts.choices[cuts.count - 1];
    int64_t slots = p.cu_seqlens ? chunks / last.rest : last.later;
    cuts.maps_first = true;
    for (int i = 0; i < cuts.count; ++i) {
      const Cut& cut = cuts.choices[i];
      if (i + 1 < cuts.count) slots = std::max<int64_t>(slots, cut.later);
      cuts.maps_first &= estimate.map(cut.rest) >= estimate.tile(cut.first, true);
    }
    Plan plan = {};
    plan.shape = late_halves ? Shape::kHalves : Shape::kBoth;
    plan.first = Shape::kHalves;
    plan.cuts = cuts;
    plan.slots = int(slots);
    return plan;
  };
  if (forced > 0) {
    cuts = {{estimate.cut(lengths[0], forced, forced)}, 1};
    Plan plan = in_segments(GDN_LATER_HALVES || only_halves<Heads>());
    plan.forgets = plan.slots <= kMostForgetting;
    return chunks > forced ? plan : in_whole;
  }
  const auto or_chosen = [&](const Plan& plan, const double* times, double most = kUnbounded) {
    return best_chosen<Heads>(p, plan, served, times, most);
  };
  const auto cut_for = [&](ChunkCounts of, bool late_halves) {
    return best_cut(estimate, of.longest, late_halves, [&](int64_t first, int64_t rest) {
      return std::pair(estimate.cut(of, first, rest), of);
    });
  };
  // For all other lengths one whose number of segments is never more than was reckoned with.
  const auto add_any = [&] {
    cuts.choices[cuts.count++] = best_cut(estimate, chunks, true, [&](int64_t first, int64_t rest) {
      const ChunkCounts most = {chunks + (first < chunks ? rest : 0), 1};
      return std::pair(estimate.cut(most, first, rest), most);
    }).first;
  };
  if (told) {
    auto [best, taken] = told_cut<Heads>(p, served[0]);
    double worth_it = kToldWorthIt, most = kUnbounded;
    if (p.N == 2) {  // all lengths are known: cuts are compared by the schedule of their tiles
      const ChunkCounts both = {served[0].of[0].chunks, chunks - served[0].of[0].chunks};
      const auto [cut, time] = cut_for(both, true);
      taken = kUnbounded;
      if (best.first > 0)
        taken = estimate.segments(both, estimate.cut(both, best.first, best.rest), best.late_halves, kUnbounded);
      if (time < taken) best = {cut.first, cut.rest, true}, taken = time;
      worth_it = kWorthIt, most = taken;
    }
    if (best.first >= served[0].longest() || taken >= worth_it * least_whole[0]) return or_chosen(in_whole, least_whole);
    Cut cut = {best.first, best.rest, served[0].longest(), 0, 0};
    cut.later = served[0].most_later(cut), cut.inner = served[0].most_later(cut, true);
    cuts.choices[cuts.count++] = cut;
    add_any();
    return or_chosen(in_segments(best.late_halves), &taken, most);
  }
  double least = 0;  // no segments take less: every chunk of o is made once, by a block with half of V
  for (int i = 0; i < guesses; ++i) least += estimate.least_in_segments(lengths[i]);
  if (enough <= least) return or_chosen(in_whole, least_whole);
  double times[kGuesses], time = 0;
  bool late_halves = true;
  for (int i = 0; i < guesses; ++i) {
    auto [cut, of_cut] = cut_for(lengths[i], true);
    if (!guess && !only_halves<Heads>()) {
      const auto [other, of_other] = cut_for(lengths[i], false);
      late_halves = of_other >= kLateBoth * of_cut;
      if (!late_halves) cut = other, of_cut = of_other;
    }
    if (of_cut > kMostLoss * least_whole[i]) return or_chosen(in_whole, least_whole);
    cuts.choices[cuts.count++] = cut;
    times[i] = of_cut;
    time += of_cut;
  }
  if (time >= enough) return or_chosen(in_whole, least_whole);
  if (guess) add_any();
  return or_chosen(in_segments(late_halves), times);
}

// The tokens that a call is planned for. A plan for sequences whose lengths the host does not know rests on guesses,
// and serves fewer tokens as well: those calls are planned for one of at most 16 numbers of chunks between two
// powers of two.
inline int64_t planned_tokens(int64_t tokens) {
  const int64_t chunks = ceil_div(tokens, kChunk);
  int64_t step = 1;
  while (step * 32 <= chunks) step *= 2;
  return ceil_div(chunks, step) * step * kChunk;
}
inline ChunkForward planned(const ChunkForward& p) {
  ChunkForward x = p;
  const bool guess = p.cu_seqlens && p.N > 1;
  if (guess) x.T = planned_tokens(p.T);
  for (int64_t& tokens : x.longest) tokens = guess ? planned_tokens(tokens) : 0;
  return x;
}

// All that a plan depends on, beside the kind of heads. Of lengths it is the numbers of chunks that the call is planned
// for, so that lengths that never repeat have few plans. Of the device it is the number of multiprocessors.
using PlanSizes = std::array<int64_t, 10>;
inline PlanSizes plan_sizes(const ChunkForward& p) {
  const ChunkForward x = planned(p);
  const auto& most = x.longest;
  return {p.N, ceil_div(x.T, kChunk), most[0], most[1], most[2], p.HV, p.V, p.multiprocessors, p.cu_seqlens != nullptr,
          p.batch_invariant};
}
constexpr size_t kMostPlans = 64;

// The same, kept for the next calls of these sizes: for packed sequences the search takes up to 100 us.
template <class Heads>
Plan plan_of(const ChunkForward& p) {
  thread_local Kept<PlanSizes, Plan, kMostPlans> known;
  return known.find(plan_sizes(p), [&] { return make_plan<Heads>(planned(p)); });
}

// Tiles of whole sequences whose lengths the host does not know; 0 for other calls.
template <class Heads>
int64_t tiles_of_unknown_length(const ChunkForward& p, const Plan& plan, bool halves) {
  if (!p.cu_seqlens || p.N < 2 || plan.in_segments()) return 0;
  return int64_t{p.N} * p.HV * Estimate<Heads>{p}.parts(halves);
}
// Whether a block takes its next tile by the counter Dealing::taken. A kernel before sets the counter to 0;
// that kernel is worth its time where even tiles with the most channels of V outnumber the multiprocessors.
template <class Heads>
bool are_taken(const ChunkForward& p, const Plan& plan) {
  return tiles_of_unknown_length<Heads>(p, plan, only_halves<Heads>()) > p.multiprocessors;
}

template <class Heads>
Dealing deal(const ChunkForward& p, const Plan& plan, void* memory) {
  constexpr Costs kCosts = costs<Heads>();
  const bool ordered = p.N <= kMostOrdered &&
                       tiles_of_unknown_length<Heads>(p, plan, true) > p.multiprocessors;
  int* const taken = are_taken<Heads>(p, plan) ? static_cast<int*>(memory) : nullptr;
  return {ordered, taken, {float(kCosts.both), float(kCosts.half)}, float(kCosts.tile)};
}

}  // namespace gdn::sm90
