// A model of the time of a call whose sequences are cut into segments, for the plans of the host
// and for the kernel that chooses a cut; and the candidates for a cut.
#pragma once
#include "common/ptx.cuh"
#include "sm90/plan/costs.h"
#include "sm90/plan/cut.h"
#include "sm90/plan/lengths.h"

namespace gdn::sm90 {

// All that the time of a cut depends on, apart from the lengths and the cut.
struct CutCall {
  Costs costs;
  int heads, blocks;               // value heads; blocks that run at once
  int first_parts;                 // blocks of a first segment and head
  int both_parts, half_parts;      // of a later segment, in blocks of either shape; both_parts is 0
                                   // where there are no such blocks
  int value_map_parts, map_parts;  // of b; of b and M
  int later_segments;              // ForwardPlan::later_segments
  bool first_halves, forgets;
};

// A cut, and the shape of blocks of later segments. The grid of candidates has numbers of segments,
// ratios of the first segment's length to the others', and no cut at all. A second round has the
// neighbours of the best candidate. A thread of choose_cut has one candidate.
struct Candidate {
  static constexpr int kNumbers = 32, kRatios = 8, kGrid = kNumbers * kRatios, kAll = 2 * kGrid + 1,
                       kNear = 9 * 9;
  static constexpr int kLeastChunks = 4;
  int first, rest;
  bool late_halves;
  GDN_HOST_DEVICE bool is_one(int longest) const {
    return first >= longest || (rest >= kLeastChunks && first >= rest);
  }
  GDN_HOST_DEVICE static Candidate of_grid(int index, int longest, const CutCall& call) {
    if (index == 0) return {longest, longest, true};
    const int cut = (index - 1) / 2, number = 2 + cut / kRatios, step = cut % kRatios;
    // 1, 1.25, 1.5, 2, 2.5, 3, 4, 6
    const float ratio = step < 3   ? 1 + 0.25f * float(step)
                        : step < 6 ? 0.5f * float(step + 1)
                                   : float(2 * step - 8);
    const float rest = ceilf(float(longest) / (float(number - 1) + ratio));
    return {int(ceilf(rest * ratio)), int(rest), index % 2 == 1 || call.both_parts == 0};
  }
  GDN_HOST_DEVICE static Candidate near(int index, Candidate best) {
    return {best.first + 2 * (index / 9 - 4), best.rest + index % 9 - 4, best.late_halves};
  }
};

// The lengths of sequences, by the number of a kind or of a sequence.
struct InKinds {
  const EqualSequences* kinds;
  GDN_HOST_DEVICE EqualSequences operator()(int i) const { return kinds[i]; }
};
struct OneByOne {
  const int* chunks;
  GDN_HOST_DEVICE EqualSequences operator()(int n) const { return {chunks[n], 1}; }
};

// Tiles that the blocks take, the longest first, whenever they are free. The time is estimated by
// its lower bounds, and by half of the shortest tile where there are more tiles than blocks.
struct Round {
  static constexpr int kKinds = 4;
  float time[kKinds], count[kKinds];
  GDN_HOST_DEVICE float most_likely(int blocks) const {
    float work = 0, bound = 0, tiles = 0, shortest = kNever;
    for (int i = 0; i < kKinds; ++i) {
      float longer = 0;
      for (int j = 0; j < kKinds; ++j)
        if (time[j] >= time[i]) longer += count[j];
      if (count[i] > 0) {
        bound = fmaxf(bound, ceilf(longer / float(blocks)) * time[i]);
        shortest = fminf(shortest, time[i]);
      }
      tiles += count[i];
      work += count[i] * time[i];
    }
    return fmaxf(bound, work / float(blocks) + (tiles > float(blocks) ? shortest / 2 : 0));
  }
};

// Microseconds of a call with this cut where `share` of the heads forget; kNever where the cut has
// too many segments. lengths: of n kinds of sequences.
template <class Lengths>
GDN_HOST_DEVICE float cut_time(const CutCall& call, const Lengths& lengths, int n,
                               const Candidate& cut, float share) {
  const Costs& costs = call.costs;
  const int first = cut.first, rest = cut.rest;
  const float late_chunk = cut.late_halves ? costs.half : costs.both;
  const float first_chunk = call.first_halves ? costs.half : costs.both;
  int long_ones = 0, short_ones = 0, inner = 0, most_later = 0, most_short = 0, most_last = 0;
  float short_chunks = 0, last_chunks = 0;
  for (int i = 0; i < n; ++i) {
    const EqualSequences x = lengths(i);
    if (x.chunks <= first) {
      short_ones += x.count;
      short_chunks += float(x.count) * float(x.chunks);
      most_short = max(most_short, x.chunks);
      continue;
    }
    const int later = (x.chunks - first - 1) / rest + 1,
              last = x.chunks - first - (later - 1) * rest;
    long_ones += x.count;
    inner += x.count * (later - 1);
    last_chunks += float(x.count) * float(last);
    most_later = max(most_later, later);
    most_last = max(most_last, last);
  }
  if (inner + long_ones > call.later_segments) return kNever;
  const float heads = float(call.heads), verdict = call.forgets ? kVerdict : 0;
  const float in_windows = call.forgets ? floorf(share * heads) * float(inner) : 0;
  const float first_tiles = heads * float(call.first_parts);
  const float late_tiles = heads * float(cut.late_halves ? call.half_parts : call.both_parts);
  const float a_first = float(first) * first_chunk + costs.tile;
  const float a_map = float(rest) * costs.map + costs.tile + verdict;
  const Round early = {
      {a_first, short_ones > 0 ? short_chunks / float(short_ones) * first_chunk + costs.tile : 0,
       a_map, float(min(rest, kWindow)) * costs.map + costs.tile + verdict},
      {first_tiles * float(long_ones), first_tiles * float(short_ones),
       (heads * float(inner) - in_windows) * float(call.map_parts),
       in_windows * float(call.value_map_parts)}};
  const Round late = {
      {float(rest) * late_chunk + costs.tile,
       long_ones > 0 ? last_chunks / float(long_ones) * late_chunk + costs.tile : 0, 0, 0},
      {late_tiles * float(inner), late_tiles * float(long_ones), 0, 0}};
  const float with_map = heads - (call.forgets ? floorf(share * heads) : 0);
  const float fold = fmaxf(
      costs.fold_least, float(long_ones) * (heads * costs.fold_head + with_map * costs.fold_map));
  const float longest_short = short_ones > 0 ? float(most_short) * first_chunk + costs.tile : 0;
  const float longest_last = long_ones > 0 ? float(most_last) * late_chunk + costs.tile : 0;
  return fmaxf(early.most_likely(call.blocks), longest_short) +
         fmaxf(late.most_likely(call.blocks), longest_last) + float(max(most_later - 1, 0)) * fold +
         (long_ones > 0 ? costs.launches : kNoSegments) + (call.forgets ? kAgain : 0) + kChoice +
         kOtherShape;
}

}  // namespace gdn::sm90
