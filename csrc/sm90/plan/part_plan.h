// How a part of a sequence is cut (Part): into segments of equal length, all of which have a map.
// The other parts are not known. No CUDA.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>

#include "sm90/plan/estimate.h"
#include "sm90/plan/memo.h"

namespace gdn::sm90 {

// The time of a cut is that of the maps, two folds (of the part's own map, and of the states that
// segments start from), and the walk with o in blocks of either shape. Where segments may forget,
// it is the mean of the times where no head forgets and where most do.
template <class Heads>
class PartPlanner {
 public:
  explicit PartPlanner(const ChunkForward& p) : p_(p), estimate_{p} {}

  ForwardPlan plan() const {
    constexpr int kMostSegments = 256;
    const int64_t all = ceil_div(p_.T, kChunk);
    int64_t length = all;
    if (!p_.batch_invariant) {
      double least = time(all);
      for (int number = 2; number <= kMostSegments; ++number) {
        const int64_t next = ceil_div(all, number);
        if (next < kLeastChunks) break;
        if (const double x = time(next); x < least) length = next, least = x;
      }
    }
    const int segments = int(ceil_div(all, length));
    ForwardPlan plan = {};
    plan.cuts.choices[0] = {0, int(length), int(all), segments, segments};
    plan.cuts.count = 1;
    plan.shape =
        walk(length, true) <= walk(length, false) ? BlockShape::kHalves : BlockShape::kBoth;
    plan.first = BlockShape::kHalves;
    plan.later_segments = segments;
    plan.forgets = may_forget() && segments <= kMostForgetting;
    return plan;
  }

 private:
  static constexpr int64_t kLeastChunks = 4;

  double rounds(int64_t tiles, double time) const {
    return double(ceil_div(tiles, p_.multiprocessors)) * time;
  }
  double walk(int64_t length, bool halves) const {
    if (!halves && only_halves<Heads>()) return kNever;
    const int64_t segments = ceil_div(ceil_div(p_.T, kChunk), length);
    return rounds(segments * p_.HV * estimate_.parts(halves), estimate_.tile(length, halves));
  }
  // Without the norm in the kernel the length of keys is not known, growth.cuh.
  bool may_forget() const { return p_.use_qk_l2norm && !p_.batch_invariant; }

  double time(int64_t length) const {
    constexpr double kLikely = 0.75;  // the share of heads that are assumed to forget
    return may_forget() ? (time(length, 0) + time(length, kLikely)) / 2 : time(length, 0);
  }
  double time(int64_t length, double share) const {
    constexpr Costs kCosts = costs<Heads>();
    const int64_t segments = ceil_div(ceil_div(p_.T, kChunk), length);
    const int64_t in_windows = int64_t(share * p_.HV), others = p_.HV - in_windows;
    const double fold =
        std::max(double(kCosts.fold_least),
                 p_.HV * double(kCosts.fold_head) + double(others) * double(kCosts.fold_map));
    // The longest tiles come first, and those of heads that forget fill the last round.
    const double full = estimate_.map(length),
                 window = estimate_.map(std::min<int64_t>(length, kWindow)) + kVerdict;
    Schedule maps(p_.multiprocessors);
    maps.add(segments * others * estimate_.map_parts(), full);
    maps.add(segments * in_windows * ceil_div(p_.V, Estimate<Heads>::kMapChannels), window);
    return maps.end() + 2 * double(segments) * fold +
           std::min(walk(length, true), walk(length, false));
  }

  const ChunkForward& p_;
  const Estimate<Heads> estimate_;
};

// The plan of a part, remembered.
template <class Heads>
ForwardPlan part_plan_of(const ChunkForward& p) {
  thread_local Memo<std::array<int64_t, 6>, ForwardPlan, 64> memo;
  return memo.find({p.T, p.HV, p.V, p.multiprocessors, p.use_qk_l2norm, p.batch_invariant},
                   [&] { return PartPlanner<Heads>(p).plan(); });
}

}  // namespace gdn::sm90
