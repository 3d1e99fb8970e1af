// How the walks of a call go: whole or in segments, both or the walk forward alone, over slices or
// halves of them, and which states the forward leaves. By models of the times, and of packed
// sequences by what the host knows of their lengths. All of it is asked by chunk_backward.cu, on
// the host.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>

#include "sm90/plan/backward/cut.h"
#include "sm90/plan/memo.h"

namespace gdn::sm90::backward {

// Whether tiles of so many sequences or segments are dealt to the blocks of a walk, of which there
// are as many as multiprocessors. Sequences of padded calls are equally long.
inline bool is_dealt(const ChunkForward& p, int64_t units, int64_t tiles_of_unit) {
  return is_uneven(p) && units <= kMostUnits && most_chunks_of(p) < kMostUnitChunks &&
         p.multiprocessors <= kMostBins && units * tiles_of_unit > p.multiprocessors;
}
inline int64_t links_of(const ChunkForward& p, int64_t units, int64_t tiles_of_unit) {
  return p.multiprocessors + units * tiles_of_unit;
}
// Halves of slices, where multiprocessors would be idle else. Of many uneven sequences they may be
// idle too, when all but the longest one's tiles have been walked: there the device chooses, unless
// the longest that there can be is too short. `makes`: over slices the walk makes the triangles.
inline BackShape back_shape_of(const ChunkForward& p, bool makes) {
  if (has_room_for_halves(p)) return BackShape::kHalves;
  const double chunks = double(ceil_div(p.T, kChunk)),
               longest = double(ceil_div(p.longest[0], kChunk));
  const double share = chunks * double(slices_of(p)) / p.multiprocessors;
  const bool may_pay = halves_pay(float(longest > 0 ? longest : chunks), float(share), makes);
  return may_pay && is_dealt(p, p.N, 2 * slices_of(p)) ? BackShape::kByLengths : BackShape::kSlices;
}

// Microseconds of the walk forward, whole and in segments, and of what may come with segments.
class WalkTimes {
 public:
  explicit WalkTimes(const ChunkForward& p)
      : p_(p), slices_(double(slices_of(p))), each_(p.multiprocessors) {
    const double chunks = double(ceil_div(p.T, kChunk)),
                 longest = std::min(double(ceil_div(p.longest[0], kChunk)), chunks);
    guess_ = knows_no_lengths(p);
    share_ = double(p.B) * chunks * slices_ / each_;
    longest_ = longest > 0 ? longest : guess_ ? chunks / 2 : chunks;
  }
  double longest() const { return longest_; }
  double whole() const {
    return guess_ ? std::max(share_, longest_) * kGradients + kTile
                  : walk(double(p_.N) * slices_, longest_);
  }
  // In segments of `length` chunks, without what finds the states that they start from.
  double in(int length) const {
    return guess_ ? time_of_segments(float(share_), float(length))
                  : walk(double(p_.N) * std::ceil(longest_ / length) * slices_, length);
  }
  // What step 4 takes then.
  double states(int length) const {
    const double walked =
        guess_ ? std::max(longest_ - length, 0.) : (std::ceil(longest_ / length) - 1) * length;
    const auto time = [&](bool beside) {
      return double(time_of_states(float(share_ * walked / longest_), float(walked), beside));
    };
    const bool beside = states_go_beside(p_, slices_of(p_));
    // Of lengths that the host does not know, short sequences may leave multiprocessors free, and
    // may not.
    return guess_ ? (time(true) + time(beside)) / 2 : time(beside);
  }
  // What step 2 takes, if without it the walk back would make the triangles; else 0.
  double triangles() const {
    return back_shape_of(p_, true) == BackShape::kSlices ? share_ * kTriangles : 0;
  }
  // Calls consider() with each length that segments may have.
  template <class Consider>
  void lengths(const Consider& consider) const {
    constexpr int kLengths[] = {256, 192, 128, 96, 64, 32, 16, 8, 4}, kMostSegments = 128,
                  kLeastChunks = 4;
    if (guess_) {
      for (const int length : kLengths) consider(length);
    } else {  // equally long ones
      const int64_t chunks = int64_t(longest_);
      for (int number = 2; number <= kMostSegments && ceil_div(chunks, number) >= kLeastChunks;
           ++number)
        consider(int(ceil_div(chunks, number)));
    }
  }

 private:
  double walk(double tiles, double length) const {
    return std::ceil(tiles / each_) * (length * kGradients + kTile);
  }

  const ChunkForward& p_;
  // knows_no_lengths: segments are chosen for the longest sequence, or for one that has half of
  // all, and the device, which knows all, may take whole sequences all the same.
  bool guess_;
  double slices_, each_;
  double share_;    // what checkpoint_interval multiprocessor has of all chunks
  double longest_;  // chunks
};

// The choice where the forward has left no states.
inline TimedPlan find_segments(const ChunkForward& p) {
  constexpr int kMemory =
      3;  // a start is twice as large as a chunk's dS: of many short sequences there are no more
  const WalkTimes walks(p);
  SegmentPlan best = {0, 0, 0, false, false};
  double least = walks.whole(), least_states = 0;
  walks.lengths([&](int length) {
    const SegmentPlan segments = in_segments(p, length, false);
    if (segments.count * kMemory > most_chunks_of(p)) return;
    const double states = walks.states(length), time = states + walks.in(length);
    if (time >= least) return;
    least = time;
    least_states = states;
    best = segments;
  });
  const double triangles = best.length > 0 ? walks.triangles() : 0;
  return cut_of(p, {best, least + time_of_back(p) + triangles}, least - least_states);
}

// The choice where the forward has left states, `length` chunks apart.
inline TimedPlan segments_from_states(const ChunkForward& p, int length) {
  const TimedPlan others = {in_segments(p, length, false),
                            WalkTimes(p).in(length) + time_of_back(p)};
  const SegmentPlan segments = in_segments(p, length, true);
  if (!may_be_cut(p) || segments.of_batch > kMostFolds) return others;
  const SegmentCounts counts(p, length);
  const TimedPlan cut = {segments, time_of_cut(p, length, counts, true, others.segments)};
  if (kForcedCut > 0) return segments.of_batch > 1 ? cut : others;
  return has_room_for_halves(p) && counts.steps >= 1 && cut.time < others.time ? cut : others;
}

// How many chunks apart the forward is to leave states; 0: it leaves none.
inline int find_checkpoint_interval(const ChunkForward& p) {
  constexpr int kLeastChunks = 32;  // 32 bytes a token and value head
  // Microseconds that a forward takes longer: for each state of a value head that it leaves, and at
  // all.
  constexpr double kState = 0.044, kCall = 10;
  // Of a batch-invariant call the bits of a sequence may not depend on what its batch makes the
  // forward leave.
  if (!is_exact(p) || p.batch_invariant) return 0;
  const WalkTimes walks(p);
  double least = find_segments(p).time - kCall;
  int best = 0;
  const auto consider = [&](int length) {
    if (length < kLeastChunks || length >= walks.longest()) return;
    const double states = double(p.B) * double(p.T) / (kChunk * length) * p.HV;
    const double time = segments_from_states(p, length).time + kState * states;
    if (time >= least) return;
    least = time;
    best = length;
  };
  walks.lengths(consider);
  for (const int length : {64, 48, 32}) consider(length);  // where both walks are cut
  return best;
}

// What a call depends on when it is planned, and how many tokens apart the forward has left states,
// or 0.
using BackwardSizes = std::array<int64_t, 15>;
inline BackwardSizes sizes_of(const ChunkForward& p, int checkpoint_interval) {
  return {p.B,
          p.T,
          p.H,
          p.HV,
          p.K,
          p.V,
          p.N,
          int64_t(p.dtype),
          p.cu_seqlens != nullptr,
          p.batch_invariant,
          p.multiprocessors,
          p.longest[0],
          p.longest[1],
          p.longest[2],
          checkpoint_interval};
}
// What was found is kept: a search takes up to 20 us, and a call asks twice.
inline SegmentPlan segments_of(const ChunkForward& p, int checkpoint_interval) {
  thread_local Memo<BackwardSizes, SegmentPlan, 64> memo;
  return memo.find(sizes_of(p, checkpoint_interval), [&] {
    return (checkpoint_interval > 0 ? segments_from_states(p, checkpoint_interval / kChunk)
                                    : find_segments(p))
        .segments;
  });
}
inline int checkpoint_interval_of(const ChunkForward& p) {
  thread_local Memo<BackwardSizes, int, 64> memo;
  return memo.find(sizes_of(p, 0), [&] { return find_checkpoint_interval(p); });
}

}  // namespace gdn::sm90::backward
