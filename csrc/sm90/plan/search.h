// Searches for a cut on the host. No CUDA is called.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "params.h"
#include "sm90/heads.h"
#include "sm90/plan/costs.h"
#include "sm90/plan/cut.h"
#include "sm90/plan/cut_time.cuh"
#include "sm90/plan/estimate.h"
#include "sm90/plan/lengths.h"

namespace gdn::sm90 {

constexpr double kUnbounded = std::numeric_limits<double>::infinity();

// The best cut by Estimate::segments, and its time: first of a coarse grid, then of the cuts near
// the best one. candidate(first, rest): a cut, and the lengths of sequences that its time is for.
template <class Heads, class MakeCandidate>
std::pair<Cut, double> best_cut(const Estimate<Heads>& estimate, int64_t longest, bool late_halves,
                                const MakeCandidate& candidate) {
  constexpr int kMostSegments = 32, kMore = 5;
  constexpr double kRatios[] = {1, 1.25, 1.5,
                                2, 3,    4};  // of the first segment's length to the others'
  constexpr int kSteps[] = {3, 1};            // chunks
  // No cut still has the launches for segments.
  const auto [uncut, lengths] = candidate(longest, longest);
  Cut best = uncut;
  double least = estimate.segments(lengths, best, late_halves, kUnbounded);
  const auto is_better = [&](int64_t first, int64_t rest) {
    if (rest < Candidate::kLeastChunks || first < rest) return false;
    const auto [cut, served] = candidate(first, rest);
    const double time = estimate.segments(served, cut, late_halves, least);
    if (time >= least) return false;
    best = cut, least = time;
    return true;
  };
  int last = 3;  // the number of segments that was better than fewer
  for (int number = 3; number <= std::min(last + kMore, kMostSegments); ++number) {
    for (const double ratio : kRatios) {
      const int64_t rest = int64_t(std::ceil(double(longest) / (number - 1 + ratio)));
      if (is_better(int64_t(std::ceil(double(rest) * ratio)), rest)) last = number;
    }
  }
  const auto is_better_near = [&](int step) {
    const int64_t first = best.first, rest = best.rest;
    bool any = false;
    for (int i = -1; i <= 1; ++i)
      for (int j = -1; j <= 1; ++j) any |= is_better(first + i * step, rest + j * step);
    return any;
  };
  for (const int step : kSteps)
    while (best.later > 0 && is_better_near(step)) continue;
  return {best, least};
}

// The sizes that cut_time reads.
template <class Heads>
CutCall cut_call(const ChunkForward& p, const ForwardPlan& plan) {
  const Estimate<Heads> estimate = {p};
  const bool first_halves = plan.first == BlockShape::kHalves;
  return {estimate.kCosts,
          p.HV,
          p.multiprocessors,
          int(estimate.parts(first_halves)),
          only_halves<Heads>() ? 0 : int(estimate.parts(false)),
          int(estimate.parts(true)),
          int(ceil_div(p.V, estimate.kMapChannels)),
          int(estimate.map_parts()),
          plan.later_segments,
          first_halves,
          plan.forgets};
}

// The same for a plan whose cut the host makes, without a bound on segments.
template <class Heads>
CutCall unbounded_cut_call(const ChunkForward& p, ForwardPlan plan) {
  plan.later_segments = std::numeric_limits<int>::max();
  return cut_call<Heads>(p, plan);
}

// Microseconds of a cut that the host makes, where no head forgets: cut_time without the kernels of
// a cut by the device.
inline double time_of_host_cut(const CutCall& call, const SequenceLengths& lengths,
                               const Candidate& cut) {
  return cut_time(call, InKinds{lengths.kinds}, lengths.count, cut, 0) - kChoice - kOtherShape;
}

// A cut nearly as good as the one that choose_cut would make for these lengths, from fewer
// candidates, and its time: the host searches for each number of chunks that a call may have.
// share: of the heads that forget.
inline std::pair<Cut, float> likely_device_cut(const CutCall& call, const SequenceLengths& lengths,
                                               const Candidate& as_planned, float share) {
  constexpr int kMostSegments = 12, kStep = 5;
  const InKinds length = {lengths.kinds};
  const int longest = lengths.longest();
  std::pair<Cut, float> best = {{as_planned.first, as_planned.rest},
                                cut_time(call, length, lengths.count, as_planned, share)};
  // Where no head forgets, the plan of the host is as good as it can be.
  const int most = share > 0 ? 2 * Candidate::kRatios * (kMostSegments - 1) : 0;
  for (int i = 0; i <= most; i += kStep) {
    const Candidate x = Candidate::of_grid(i, longest, call);
    if (!x.is_one(longest)) continue;
    const float time = cut_time(call, length, lengths.count, x, share);
    if (time < best.second) best = {{x.first, x.rest}, time};
  }
  return best;
}

// The best cut by cut_time for known lengths, and its time; a candidate without a length where no
// cut is possible.
template <class Heads>
std::pair<Candidate, double> best_known_cut(const ChunkForward& p, const SequenceLengths& lengths) {
  constexpr int kMostSegments = 16;
  ForwardPlan plan = {};
  plan.first = BlockShape::kHalves;
  const CutCall call = unbounded_cut_call<Heads>(p, plan);
  std::pair<Candidate, double> best = {{}, kUnbounded};
  const auto offer = [&](const Candidate& x) {
    if (x.first >= lengths.longest() || !x.is_one(lengths.longest())) return;
    const double time = time_of_host_cut(call, lengths, x);
    if (time < best.second) best = {x, time};
  };
  for (int i = 1; i <= 2 * Candidate::kRatios * (kMostSegments - 1); ++i)
    offer(Candidate::of_grid(i, lengths.longest(), call));
  const Candidate coarse = best.first;
  if (coarse.first > 0)
    for (int i = 0; i < Candidate::kNear; ++i) offer(Candidate::near(i, coarse));
  return best;
}

}  // namespace gdn::sm90
