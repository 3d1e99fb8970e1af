// Whether both walks of few long sequences go in segments: where that takes clearly less time than
// other plans.
#pragma once
#include <algorithm>
#include <cmath>

#include "sm90/plan/backward/times.cuh"

namespace gdn::sm90::backward {

// Whether a call has the kernels of Kind::kExact in bf16.
inline bool is_exact(const ChunkForward& p) {
  return p.dtype == Dtype::kBFloat16 && p.K == kChannels && p.V == kChannels;
}

// How the walk forward is cut: segments of `length` chunks, or whole sequences where that is 0.
struct SegmentPlan {
  int length;
  int64_t count, of_batch;  // upper bound for the call; number in a batch entry of a padded call
  bool may_be_whole;        // the device may use whole sequences instead, where they take less time
  bool both_walks;          // the walk back has the same segments, segments/maps.cu
};
// A plan, and the microseconds of both walks, without the part that all plans of the same sizes
// share.
struct TimedPlan {
  SegmentPlan segments;
  double time;
};
// Whether there are several packed sequences, whose lengths only the device knows exactly.
inline bool is_uneven(const ChunkForward& p) { return p.cu_seqlens != nullptr && p.N > 1; }

// Whether the host does not know all lengths. Otherwise all sequences are equally long.
inline bool knows_no_lengths(const ChunkForward& p) {
  return is_uneven(p) && p.longest[0] * p.N != p.T;
}

inline SegmentPlan in_segments(const ChunkForward& p, int length, bool both_walks) {
  const int64_t of_batch = ceil_div(ceil_div(p.T, kChunk), length);
  return {length, p.cu_seqlens ? most_chunks_of(p) / length + p.N : p.B * of_batch, of_batch,
          is_uneven(p) && !both_walks, both_walks};
}

// Whether there is a multiprocessor for each half of a slice. The walk back then goes over halves.
inline bool has_room_for_halves(const ChunkForward& p) {
  return 2 * int64_t{p.N} * slices_of(p) <= p.multiprocessors;
}

// The number of blocks that make the triangles while the walk back over halves runs, on the
// multiprocessors that this walk and the walk of the state leave idle; 0: the triangles are made
// before. A walk back that keeps half of the multiprocessors busy to its end gains nothing: it is
// bound by the bandwidth of L2, and takes longer while other blocks run. Among uneven sequences
// only the longest keeps its blocks busy to the end.
inline int triangle_blocks_of(const ChunkForward& p, const SegmentPlan& segments, bool has_states) {
  const int64_t halves = 2 * int64_t{p.N} * slices_of(p);
  const int64_t left = p.multiprocessors - (segments.length > 0 && !has_states ? 2 : 1) * halves;
  const bool pays =
      3 * left >= p.multiprocessors && (knows_no_lengths(p) || 4 * halves <= p.multiprocessors);
  return pays && !segments.both_walks && has_room_for_halves(p) ? int(left) : 0;
}

// Both walks of several packed sequences are cut only where the host knows the longest.
inline bool may_be_cut(const ChunkForward& p) {
  const bool is_known = !is_uneven(p) || p.longest[0] > 0;
  return is_exact(p) && !p.batch_invariant && p.N <= kMostCut && is_known;
}
// Microseconds of a walk back that is not cut; 0 where no plan cuts the walk back.
inline double time_of_back(const ChunkForward& p) {
  const int64_t longest = is_uneven(p) && p.longest[0] > 0 ? std::min(p.longest[0], p.T) : p.T;
  return has_room_for_halves(p) ? kBack * double(ceil_div(longest, kChunk)) : 0;
}

// Counts of the segments of `length` chunks of all sequences, for one slice. Where the host knows
// the three longest packed sequences, it assumes that the others are equally long.
struct SegmentCounts {
  // later: not the first of their sequence; inner: neither the first nor the last.
  double all = 0, later = 0, inner = 0;
  double steps = 0;  // of the fold of the longest sequence
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

// Microseconds of both walks in `segments` of `length` chunks. has_states: the forward has left the
// states, and their maps and folds are not needed. others: the plan that does not cut both walks.
inline double time_of_cut(const ChunkForward& p, int length, const SegmentCounts& segments,
                          bool has_states, const SegmentPlan& others) {
  // kMaps: a chunk of the maps; kShort: the start and end of a tile of the maps or of the walk
  // back; kFold: a step of the folds, of which a multiprocessor runs two blocks at once; kLaunches:
  // the launches that only a cut has.
  constexpr double kMaps = 1.25, kShort = 3, kFold = 1.4, kLaunches = 12;
  constexpr double kMapBytes = 0.026,
                   kBackBytes = 0.027;  // of a chunk and slice, where memory is the bound
  const double slices = double(slices_of(p)), each = p.multiprocessors;
  const double fold_blocks = p.N * slices * (kChannels / kFoldRows) * (has_states ? 1 : 2);
  const auto walk = [&](double tiles, double chunk, double tile) {
    return std::ceil(tiles / each) * (length * chunk + tile);
  };
  // The tiles of uneven sequences are dealt out: many of their last segments are short.
  const double chunks = is_uneven(p) ? double(ceil_div(p.T, kChunk)) : segments.all * length;
  const auto walk_all = [&](double chunk, double tile) {
    return is_uneven(p) ? time_of_segments(chunks * slices / each, length, chunk, tile)
                        : walk(slices * segments.all, chunk, tile);
  };
  const double jobs = segments.later * (has_states ? 1 : 2) + segments.inner;
  const double bytes = slices * chunks * kMapBytes * (has_states ? 2. / 3 : 1);
  const double maps = std::max(walk(slices * jobs, kMaps, kShort), bytes);
  const double folds = std::ceil(fold_blocks / (2 * each)) * segments.steps * kFold;
  const double back = std::max(walk_all(kBackWhole, kShort), slices * chunks * kBackBytes);
  // While a walk back that is not cut runs, other blocks may make the triangles. The times above
  // allow for that in single sequences: they were fitted to the fastest plans.
  const bool hides = is_uneven(p) && triangle_blocks_of(p, others, has_states) > 0;
  const double triangles = hides ? chunks * slices / each * kTriangles : 0;
  return kLaunches + triangles + maps + folds + back + walk_all(kGradients, kTile);
}

// The plan that cuts both walks, where it takes clearly less time than `others`, whose walk forward
// takes others_time. A cut of both walks changes bits: calls that may not be cut, and calls whose
// lengths the host does not know, have none.
inline TimedPlan cut_of(const ChunkForward& p, const TimedPlan& others, double others_time) {
  constexpr int kLengths[] = {64, 48, 32, 24, 16, 8};
  constexpr double kMargin = 0.92,
                   kLeast = 10;  // the least gain: as a share of the time, and in microseconds
  const int64_t chunks = ceil_div(p.T, kChunk);
  if (!may_be_cut(p)) return others;
  if (!has_room_for_halves(p)) return others;  // whole slices are walked back
  double least = kMargin * (others_time + time_of_back(p)) - kLeast;
  TimedPlan best = others;
  for (const int length : kLengths) {
    const SegmentPlan cut = in_segments(p, length, true);
    const SegmentCounts counts(p, length);
    if (counts.steps < 1 || cut.of_batch > kMostFolds) continue;
    const double time = time_of_cut(p, length, counts, false, others.segments);
    if (time >= least) continue;
    least = time;
    best = {cut, time};
  }
  return best;
}

}  // namespace gdn::sm90::backward
