// The plan of a backward: whole sequences or segments, for both walks or the walk forward alone;
// slices or halves of slices; and which states the forward leaves. Plans rest on models of the
// times, and on the lengths that the host knows. chunk_backward.cu asks for them, on the host.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>

#include "sm90/plan/backward/cut.h"
#include "sm90/plan/memo.h"

namespace gdn::sm90::backward {

// Whether the tiles of `units` sequences or segments are dealt out to the blocks of a walk, one
// block a multiprocessor. Padded calls need no deal: their sequences are equally long.
inline bool is_dealt(const ChunkForward& p, int64_t units, int64_t tiles_of_unit) {
  return is_uneven(p) && units <= kMostUnits && most_chunks_of(p) < kMostUnitChunks &&
         p.multiprocessors <= kMostBins && units * tiles_of_unit > p.multiprocessors;
}
inline int64_t links_of(const ChunkForward& p, int64_t units, int64_t tiles_of_unit) {
  return p.multiprocessors + units * tiles_of_unit;
}
// Halves of slices where slices would leave multiprocessors idle. With many uneven sequences
// multiprocessors may become idle once only the tiles of the longest sequence are left: there the
// device chooses, unless even the longest possible sequence is too short. makes: a walk over slices
// makes the triangles.
inline BackShape back_shape_of(const ChunkForward& p, bool makes) {
  if (has_room_for_halves(p)) return BackShape::kHalves;
  const double chunks = double(ceil_div(p.T, kChunk)),
               longest = double(ceil_div(p.longest[0], kChunk));
  const double share = chunks * double(slices_of(p)) / p.multiprocessors;
  const bool may_pay = halves_pay(float(longest > 0 ? longest : chunks), float(share), makes);
  return may_pay && is_dealt(p, p.N, 2 * slices_of(p)) ? BackShape::kByLengths : BackShape::kSlices;
}

// Microseconds of the walk forward, over whole sequences and in segments, and of the other steps
// that depend on this choice.
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
  // In segments of `length` chunks, without the step that finds the states that they start from.
  double in(int length) const {
    return guess_ ? time_of_segments(float(share_), float(length))
                  : walk(double(p_.N) * std::ceil(longest_ / length) * slices_, length);
  }
  // Step 4, which finds these states.
  double states(int length) const {
    const double walked =
        guess_ ? std::max(longest_ - length, 0.) : (std::ceil(longest_ / length) - 1) * length;
    const auto time = [&](bool overlaps) {
      return double(time_of_states(float(share_ * walked / longest_), float(walked), overlaps));
    };
    const bool overlaps = states_overlap(p_, slices_of(p_));
    // With unknown lengths short sequences may or may not leave multiprocessors idle: the mean of
    // both times.
    return guess_ ? (time(true) + time(overlaps)) / 2 : time(overlaps);
  }
  // Step 2, where the walk back would make the triangles otherwise; else 0.
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
  // knows_no_lengths: segments are planned for the longest sequence, or for one that has half of
  // all chunks, and the device, which knows the lengths, may use whole sequences instead.
  bool guess_;
  double slices_, each_;
  double share_;    // chunks of a multiprocessor, where all have equally many
  double longest_;  // chunks
};

// The plan where the forward has left no states.
inline TimedPlan find_segments(const ChunkForward& p) {
  constexpr int kMemory = 3;  // a start takes twice the memory of a chunk's dS: this bounds the
                              // starts of many short sequences
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

// The plan where the forward has left states, `length` chunks apart.
inline TimedPlan segments_from_states(const ChunkForward& p, int length) {
  const TimedPlan others = {in_segments(p, length, false),
                            WalkTimes(p).in(length) + time_of_back(p)};
  const SegmentPlan segments = in_segments(p, length, true);
  if (!may_be_cut(p) || segments.of_batch > kMostFolds) return others;
  const SegmentCounts counts(p, length);
  const TimedPlan cut = {segments, time_of_cut(p, length, counts, true, others.segments)};
  return has_room_for_halves(p) && counts.steps >= 1 && cut.time < others.time ? cut : others;
}

// How many chunks apart the forward is to leave states; 0: it leaves none.
inline int find_checkpoint_interval(const ChunkForward& p) {
  constexpr int kLeastChunks = 32;  // at most 32 bytes for a token and value head
  // Microseconds by which a forward takes longer: kState for each state of a value head that it
  // leaves, and kCall for leaving any.
  constexpr double kState = 0.044, kCall = 10;
  // In a batch-invariant call the bits of a sequence may not depend on which states its batch makes
  // the forward leave.
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

// All that a plan depends on; checkpoint_interval: tokens from one state that the forward has left
// to the next, or 0.
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
// Plans are remembered: a search takes up to 20 us, and a call asks twice.
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
