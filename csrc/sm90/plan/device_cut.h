// Whether the device makes the cut of a call, choose_cut.cuh, and walks maps in windows. The host
// decides.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "sm90/plan/search.h"

namespace gdn::sm90 {

// The plan so far, or one whose cut the device makes and whose maps are walked in windows: where
// that promises much for all lengths together, and loses next to nothing for any of them. times: of
// the plan so far, for each of the lengths; most: microseconds that the other plan may take for all
// lengths together.
template <class Heads>
ForwardPlan or_cut_by_device(const ChunkForward& p, const ForwardPlan& so_far,
                             const std::vector<SequenceLengths>& lengths,
                             const std::vector<double>& times, double most = kUnbounded) {
  constexpr double kWorthIt = 0.95, kMostLoss = 1.01;
  constexpr double kMostLossUnforgotten = 1.05;  // where no head forgets
  constexpr float kLikely = 0.75f;               // the share of heads that are assumed to forget
  const Estimate<Heads> estimate = {p};
  constexpr Costs kCosts = costs<Heads>();
  // Calls that fill the GPU more than twice take longer than their longest sequence alone.
  // choose_cut has memory for kMostOrdered sequences and kMostDeviceCutHeads heads.
  if (p.N * p.HV * estimate.parts(false) > 2 * p.multiprocessors || p.N > kMostOrdered ||
      p.HV > kMostDeviceCutHeads)
    return so_far;
  struct Assumed {
    SequenceLengths lengths;
    double time;
    Candidate as_planned;
  };
  std::vector<Assumed> assumed;
  double enough = 0, bound = 0;  // no cut takes less than `bound`: every chunk of o is made once
  for (size_t i = 0; i < lengths.size(); i += 2) {
    const int longest = lengths[i].longest();
    Assumed x = {lengths[i], times[i], {longest, longest, true}};
    if (so_far.cuts.count > 0) {  // by the same model as the cut of the device
      const Cut& cut = so_far.cuts.choices[i];
      x.as_planned = {cut.first, cut.rest, so_far.shape == BlockShape::kHalves};
      x.time = time_of_host_cut(unbounded_cut_call<Heads>(p, so_far), x.lengths, x.as_planned);
    }
    double chunks = 0;
    for (const EqualSequences& kind : x.lengths.kinds)
      chunks += double(p.HV) * double(kind.chunks) * kind.count;
    const double each = only_halves<Heads>()
                            ? kCosts.half * double(estimate.parts(true))
                            : std::min(kCosts.half * double(estimate.parts(true)),
                                       kCosts.both * double(estimate.parts(false)));
    enough += kWorthIt * x.time;
    bound += chunks * each / p.multiprocessors + kChoice + kAgain;
    assumed.push_back(x);
  }
  if (enough <= bound) return so_far;
  ForwardPlan plan = {};
  plan.shape = BlockShape::kHalves;
  // Blocks with half of V that outnumber the multiprocessors end later than blocks with both
  // halves.
  const bool many = p.N * p.HV * estimate.parts(true) > p.multiprocessors;
  plan.first = many && !only_halves<Heads>() ? BlockShape::kBoth : BlockShape::kHalves;
  plan.cut_by_device = plan.forgets = true;
  plan.later_segments = kMostForgetting;
  const CutCall call = cut_call<Heads>(p, plan);
  int later = 0;
  double time = 0;
  for (const Assumed& x : assumed) {
    for (const auto& [share, most_loss] :
         {std::pair(0.f, kMostLossUnforgotten), std::pair(kLikely, kMostLoss)}) {
      const auto [cut, time_of_cut] = likely_device_cut(call, x.lengths, x.as_planned, share);
      if (time_of_cut > most_loss * x.time) return so_far;
      later = std::max(later, x.lengths.most_later(cut));
      if (share > 0) time += time_of_cut;
    }
  }
  if (later == 0 || time >= enough || time >= most) return so_far;
  // The best cut may have more of them.
  plan.later_segments = std::min(later + later / 2, kMostForgetting);
  return plan;
}

}  // namespace gdn::sm90
