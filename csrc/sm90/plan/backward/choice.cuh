// How the walks of a call go: whole or in segments, both or the walk forward alone, over slices or halves of them, and which
// states the forward leaves. By models of the times, and of packed sequences by what the host knows of their lengths. All of
// it is asked by chunk_backward.cu, on the host.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>

#include "sm90/backward/deal.cuh"
#include "sm90/plan/memo.h"

namespace gdn::sm90::backward {

// Of both walks in segments, segment_maps.cu: chunks of a segment in every call that may be cut so; 0: none is cut; -1:
// as the host chooses.
#ifndef GDN_BACKWARD_CUT
#define GDN_BACKWARD_CUT -1
#endif
constexpr int kForcedCut = GDN_BACKWARD_CUT;

// Kind::kExact.
inline bool is_exact(const ChunkForward& p) { return p.dtype == Dtype::kBFloat16 && p.K == kChannels && p.V == kChannels; }

inline int64_t slices_of(const ChunkForward& p) { return p.HV * ceil_div(p.V, kChannels); }

// The walk forward in segments of `length` chunks; 0: whole sequences.
struct Segments {
  int length;
  int64_t count, of_batch;  // at most; of a batch entry, if padded
  bool may_be_whole;        // the device takes whole sequences all the same where they take less
  bool cuts;                // the walk back goes in the same segments, segment_maps.cu
};
// What was chosen, and microseconds of both walks, less what all choices for the same sizes have in common.
struct Choice {
  Segments segments;
  double time;
};
// Microseconds of a chunk walked back, of half a slice and of a whole one whose triangles are there.
constexpr double kBack = 1.2, kBackWhole = 2.6;

// Whether the lengths of the sequences, of which there are several, are known on the device alone.
inline bool is_uneven(const ChunkForward& p) { return p.cu_seqlens != nullptr && p.N > 1; }

// Whether the host knows no more of several lengths than the longest, or nothing. Else all are equally long.
inline bool knows_no_lengths(const ChunkForward& p) { return is_uneven(p) && p.longest[0] * p.N != p.T; }

inline Segments in_segments(const ChunkForward& p, int length, bool cuts) {
  const int64_t of_batch = ceil_div(ceil_div(p.T, kChunk), length);
  return {length, p.cu_seqlens ? slots_of(p) / length + p.N : p.B * of_batch, of_batch, is_uneven(p) && !cuts, cuts};
}

// Whether there is a multiprocessor for each half of a slice, so that the walk back goes over halves.
inline bool has_room_for_halves(const ChunkForward& p) { return 2 * int64_t{p.N} * slices_of(p) <= p.multiprocessors; }

// Blocks that make the triangles beside the walk back over halves, on the multiprocessors that this walk and that of the
// state leave; 0: the triangles are made before. A walk back that has half of the multiprocessors to its end gains
// nothing: it reads as much from L2 as all can, and takes longer with others beside it. Of uneven sequences the longest
// alone has blocks to the end.
inline int triangle_blocks_of(const ChunkForward& p, const Segments& segments, bool keeps) {
  const int64_t halves = 2 * int64_t{p.N} * slices_of(p);
  const int64_t left = p.multiprocessors - (segments.length > 0 && !keeps ? 2 : 1) * halves;
  const bool pays = 3 * left >= p.multiprocessors && (knows_no_lengths(p) || 4 * halves <= p.multiprocessors);
  return pays && !segments.cuts && has_room_for_halves(p) ? int(left) : 0;
}

// Of several packed sequences the host has to be told the longest.
inline bool may_be_cut(const ChunkForward& p) {
  const bool is_known = !is_uneven(p) || p.longest[0] > 0 || kForcedCut > 0;
  return kForcedCut != 0 && is_exact(p) && !p.batch_invariant && p.N <= kMostCut && is_known;
}
// Microseconds of a walk back that is not cut; 0 where no choice has a walk back that is.
inline double time_of_back(const ChunkForward& p) {
  const int64_t longest = is_uneven(p) && p.longest[0] > 0 ? std::min(p.longest[0], p.T) : p.T;
  return has_room_for_halves(p) ? kBack * double(ceil_div(longest, kChunk)) : 0;
}

// Segments of `length` chunks of all sequences, of a slice. Of several packed sequences the host may be told the three
// longest, and takes the others to be equally long.
struct SegmentCounts {
  double all = 0, later = 0, inner = 0;  // later: but the first of each sequence; inner: but the first and the last
  double steps = 0;                      // of the folds of the longest sequence
  SegmentCounts(const ChunkForward& p, int length) {
    const auto add = [&](double sequences, double tokens) {
      const double own = std::max(std::ceil(std::ceil(tokens / kChunk) / length), 1.);
      all += sequences * own;
      later += sequences * (own - 1);
      inner += sequences * std::max(own - 2, 0.);
      steps = std::max(steps, own - 2);
    };
    int others = p.N;
    double left = double(p.B) * double(p.T);
    if (is_uneven(p)) {
      for (const int64_t tokens : p.longest) {
        if (tokens == 0 || others == 0) break;
        add(1, double(tokens));
        left -= double(tokens);
        --others;
      }
    }
    if (others > 0) add(others, std::max(left, 0.) / others);
  }
};

// Microseconds of both walks in `segments` of `length` chunks. keeps: the forward has left the states, and their maps and
// folds are left out. others: the choice that is not cut.
inline double time_of_cut(const ChunkForward& p, int length, const SegmentCounts& segments, bool keeps,
                          const Segments& others) {
  // Of a chunk of the maps, of the start and end of a tile of theirs or of the walk back; of a step of the folds, of
  // which a multiprocessor has two blocks at a time; of the launches that are a cut's alone.
  constexpr double kMaps = 1.25, kShort = 3, kFold = 1.4, kLaunches = 12;
  constexpr double kMapBytes = 0.026, kBackBytes = 0.027;  // of a chunk and slice, by the bandwidth of memory
  const double slices = double(slices_of(p)), each = p.multiprocessors;
  const double fold_blocks = p.N * slices * (kChannels / kFoldRows) * (keeps ? 1 : 2);
  const auto walk = [&](double tiles, double chunk, double tile) {
    return std::ceil(tiles / each) * (length * chunk + tile);
  };
  // The tiles of uneven sequences are dealt: many of their last segments are short.
  const double chunks = is_uneven(p) ? double(ceil_div(p.T, kChunk)) : segments.all * length;
  const auto walk_all = [&](double chunk, double tile) {
    return is_uneven(p) ? time_of_segments(chunks * slices / each, length, chunk, tile)
                        : walk(slices * segments.all, chunk, tile);
  };
  const double jobs = segments.later * (keeps ? 1 : 2) + segments.inner;
  const double bytes = slices * chunks * kMapBytes * (keeps ? 2. / 3 : 1);
  const double maps = std::max(walk(slices * jobs, kMaps, kShort), bytes);
  const double folds = std::ceil(fold_blocks / (2 * each)) * segments.steps * kFold;
  const double back = std::max(walk_all(kBackWhole, kShort), slices * chunks * kBackBytes);
  // A walk back that is not cut may have the triangles made beside it. For single sequences the times above allow for that:
  // they were fitted to the fastest choices.
  const bool hides = is_uneven(p) && triangle_blocks_of(p, others, keeps) > 0;
  const double triangles = hides ? chunks * slices / each * kTriangles : 0;
  return kLaunches + triangles + maps + folds + back + walk_all(kGradients, kTile);
}

// The cut of both walks where it takes clearly less than `others`, microseconds of the walk forward alone in segments:
// it changes bits, and so is none of a call that may not be cut, or of whose lengths the host knows no more than a sum.
inline Choice cut_of(const ChunkForward& p, const Choice& others, double others_time) {
  constexpr int kLengths[] = {64, 48, 32, 24, 16, 8};
  constexpr double kMargin = 0.92, kLeast = 10;  // of all, and microseconds: what has to be won
  const int64_t chunks = ceil_div(p.T, kChunk);
  if (!may_be_cut(p)) return others;
  if (kForcedCut > 0) return chunks > kForcedCut ? Choice{in_segments(p, kForcedCut, true), 0} : others;
  if (!has_room_for_halves(p)) return others;  // whole slices are walked back
  double least = kMargin * (others_time + time_of_back(p)) - kLeast;
  Choice best = others;
  for (const int length : kLengths) {
    const Segments cut = in_segments(p, length, true);
    const SegmentCounts counts(p, length);
    if (counts.steps < 1 || cut.of_batch > kMostFolds) continue;
    const double time = time_of_cut(p, length, counts, false, others.segments);
    if (time >= least) continue;
    least = time;
    best = {cut, time};
  }
  return best;
}

// Whether tiles of so many sequences or segments are dealt to the blocks of a walk, of which there are as many as
// multiprocessors. Sequences of padded calls are equally long.
inline bool is_dealt(const ChunkForward& p, int64_t units, int64_t tiles_of_unit) {
  return is_uneven(p) && units <= kMostUnits && slots_of(p) < kMostUnitChunks &&
         p.multiprocessors <= kMostBins && units * tiles_of_unit > p.multiprocessors;
}
inline int64_t links_of(const ChunkForward& p, int64_t units, int64_t tiles_of_unit) {
  return p.multiprocessors + units * tiles_of_unit;
}
// Halves of slices, where multiprocessors would be idle else. Of many uneven sequences they may be idle too, when all
// but the longest one's tiles have been walked: there the device chooses, unless the longest that there can be is too
// short. `makes`: over slices the walk makes the triangles.
inline BackShape back_shape_of(const ChunkForward& p, bool makes) {
  if (has_room_for_halves(p)) return BackShape::kHalves;
  const double chunks = double(ceil_div(p.T, kChunk)), told = double(ceil_div(p.longest[0], kChunk));
  const double share = chunks * double(slices_of(p)) / p.multiprocessors;
  const bool may_pay = halves_pay(float(told > 0 ? told : chunks), float(share), makes);
  return may_pay && is_dealt(p, p.N, 2 * slices_of(p)) ? BackShape::kByLengths : BackShape::kSlices;
}

// Microseconds of the walk forward, whole and in segments, and of what may come with segments.
class Walks {
 public:
  explicit Walks(const ChunkForward& p) : p_(p), slices_(double(slices_of(p))), each_(p.multiprocessors) {
    const double chunks = double(ceil_div(p.T, kChunk)), told = std::min(double(ceil_div(p.longest[0], kChunk)), chunks);
    guess_ = knows_no_lengths(p);
    share_ = double(p.B) * chunks * slices_ / each_;
    longest_ = told > 0 ? told : guess_ ? chunks / 2 : chunks;
  }
  double longest() const { return longest_; }
  double whole() const {
    return guess_ ? std::max(share_, longest_) * kGradients + kTile : walk(double(p_.N) * slices_, longest_);
  }
  // In segments of `length` chunks, without what finds the states that they start from.
  double in(int length) const {
    return guess_ ? time_of_segments(float(share_), float(length))
                  : walk(double(p_.N) * std::ceil(longest_ / length) * slices_, length);
  }
  // What step 4 takes then.
  double states(int length) const {
    const double walked = guess_ ? std::max(longest_ - length, 0.) : (std::ceil(longest_ / length) - 1) * length;
    const auto time = [&](bool beside) {
      return double(time_of_states(float(share_ * walked / longest_), float(walked), beside));
    };
    const bool beside = states_go_beside(p_, slices_of(p_));
    // Of lengths that the host does not know, short sequences may leave multiprocessors free, and may not.
    return guess_ ? (time(true) + time(beside)) / 2 : time(beside);
  }
  // What step 2 takes, if without it the walk back would make the triangles; else 0.
  double triangles() const { return back_shape_of(p_, true) == BackShape::kSlices ? share_ * kTriangles : 0; }
  // Calls consider() with each length that segments may have.
  template <class Consider>
  void lengths(const Consider& consider) const {
    constexpr int kLengths[] = {256, 192, 128, 96, 64, 32, 16, 8, 4}, kMostSegments = 128, kLeastChunks = 4;
    if (guess_) {
      for (const int length : kLengths) consider(length);
    } else {  // equally long ones
      const int64_t chunks = int64_t(longest_);
      for (int number = 2; number <= kMostSegments && ceil_div(chunks, number) >= kLeastChunks; ++number)
        consider(int(ceil_div(chunks, number)));
    }
  }

 private:
  double walk(double tiles, double length) const { return std::ceil(tiles / each_) * (length * kGradients + kTile); }

  const ChunkForward& p_;
  // knows_no_lengths: segments are chosen for the longest sequence, or for one that has half of all, and the device, which
  // knows all, may take whole sequences all the same.
  bool guess_;
  double slices_, each_;
  double share_;    // what every multiprocessor has of all chunks
  double longest_;  // chunks
};

// The choice where the forward has left no states.
inline Choice find_segments(const ChunkForward& p) {
  constexpr int kMemory = 3;  // a start is twice as large as a chunk's dS: of many short sequences there are no more
  const Walks walks(p);
  Segments best = {0, 0, 0, false, false};
  double least = walks.whole(), least_states = 0;
  walks.lengths([&](int length) {
    const Segments segments = in_segments(p, length, false);
    if (segments.count * kMemory > slots_of(p)) return;
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
inline Choice segments_from_states(const ChunkForward& p, int length) {
  const Choice others = {in_segments(p, length, false), Walks(p).in(length) + time_of_back(p)};
  const Segments segments = in_segments(p, length, true);
  if (!may_be_cut(p) || segments.of_batch > kMostFolds) return others;
  const SegmentCounts counts(p, length);
  const Choice cut = {segments, time_of_cut(p, length, counts, true, others.segments)};
  if (kForcedCut > 0) return segments.of_batch > 1 ? cut : others;
  return has_room_for_halves(p) && counts.steps >= 1 && cut.time < others.time ? cut : others;
}

// How many chunks apart the forward is to leave states; 0: it leaves none.
inline int find_kept(const ChunkForward& p) {
  constexpr int kLeastChunks = 32;  // 32 bytes a token and value head
  // Microseconds that a forward takes longer: for each state of a value head that it leaves, and at all.
  constexpr double kState = 0.044, kCall = 10;
  // Of a batch-invariant call the bits of a sequence may not depend on what its batch makes the forward leave.
  if (!is_exact(p) || p.batch_invariant) return 0;
  const Walks walks(p);
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

// What a call depends on when it is planned, and how many tokens apart the forward has left states, or 0.
using Sizes = std::array<int64_t, 15>;
inline Sizes sizes_of(const ChunkForward& p, int every) {
  return {p.B, p.T, p.H, p.HV, p.K, p.V, p.N, int64_t(p.dtype), p.cu_seqlens != nullptr, p.batch_invariant,
          p.multiprocessors, p.longest[0], p.longest[1], p.longest[2], every};
}
// What was found is kept: a search takes up to 20 us, and a call asks twice.
inline Segments segments_of(const ChunkForward& p, int every) {
  thread_local Kept<Sizes, Segments, 64> known;
  return known.find(sizes_of(p, every), [&] {
    return (every > 0 ? segments_from_states(p, every / kChunk) : find_segments(p)).segments;
  });
}
inline int kept_of(const ChunkForward& p) {
  thread_local Kept<Sizes, int, 64> known;
  return known.find(sizes_of(p, 0), [&] { return find_kept(p); });
}

}  // namespace gdn::sm90::backward
