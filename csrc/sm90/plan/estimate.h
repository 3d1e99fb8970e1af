// A model of the time of a call on the host, for lengths that are known or assumed. No CUDA.
#pragma once
#include <algorithm>
#include <cstdint>

#include "params.h"
#include "sm90/heads.h"
#include "sm90/plan/costs.h"
#include "sm90/plan/cut.h"
#include "sm90/plan/lengths.h"
#include "sm90/plan/schedule.h"

namespace gdn::sm90 {

// Times in microseconds.
template <class Heads>
struct Estimate {
  static constexpr Costs kCosts = costs<Heads>();
  static constexpr int kMapChannels = Heads::kKeys == 256 ? 64 : 128;  // of a block
  const ChunkForward& p;

  double tile(int64_t chunks, bool halves) const {
    return double(chunks) * (halves ? kCosts.half : kCosts.both) + kCosts.tile;
  }
  double map(int64_t chunks) const { return double(chunks) * kCosts.map + kCosts.tile; }
  int64_t parts(bool halves) const { return ceil_div(p.V, halves ? 64 : 128); }
  int64_t map_parts() const {
    return ceil_div(p.V, kMapChannels) + ceil_div(Heads::kKeys, kMapChannels);
  }

  // Whole sequences, in blocks of one shape.
  double whole(const SequenceLengths& lengths, bool halves) const {
    Schedule schedule(p.multiprocessors);
    for (int i = 0; i < lengths.count; ++i)
      schedule.add(int64_t{lengths.kinds[i].count} * p.HV * parts(halves),
                   tile(lengths.kinds[i].chunks, halves));
    return schedule.end();
  }
  // The cut with these lengths of segments, planned for these lengths of sequences.
  Cut cut(ChunkCounts lengths, int64_t first, int64_t rest) const {
    Cut cut = {int(first), int(rest), int(lengths.longest), 0, 0};
    const int64_t most = later(lengths.longest, cut), others = later(lengths.other, cut);
    const auto inner = [](int64_t some) { return std::max<int64_t>(some - 1, 0); };
    cut.later = int(most + (p.N - 1) * others);
    cut.inner = int(inner(most) + (p.N - 1) * inner(others));
    return cut;
  }
  // Sequences in the segments of a cut, with later segments in blocks of one shape. Returns
  // `enough` early where even a lower bound of the time is not below `enough`.
  double segments(ChunkCounts lengths, const Cut& cut, bool late_halves, double enough) const {
    const int64_t heads = p.HV * parts(true), maps = p.HV * map_parts() * cut.inner;
    const int64_t late_heads = p.HV * parts(late_halves), inner = late_heads * cut.inner;
    const int64_t others = (p.N - 1) * heads, late_others = (p.N - 1) * late_heads;
    const double first = tile(std::min<int64_t>(lengths.longest, cut.first), true);
    const double other_first = tile(std::min<int64_t>(lengths.other, cut.first), true);
    const double rest = tile(cut.rest, late_halves), a_map = map(cut.rest);
    const int64_t most = later(lengths.longest, cut), other_most = later(lengths.other, cut);
    const double last =
        most > 0 ? tile(chunks_of_last(lengths.longest, cut, most), late_halves) : 0;
    const double other_last =
        other_most > 0 ? tile(chunks_of_last(lengths.other, cut, other_most), late_halves) : 0;
    const double apart = double(std::max<int64_t>(most - 1, 0)) * kCosts.fold +
                         (cut.later > 0 ? kCosts.launches : kNoSegments) +
                         (maps > 0 && first > a_map ? kSecondLaunch : 0);

    const double early_work =
        double(heads) * first + double(others) * other_first + double(maps) * a_map;
    const double late_work =
        double(inner) * rest + double(late_heads) * last + double(late_others) * other_last;
    const double all = p.multiprocessors;
    const double early_least = std::max({first, maps > 0 ? a_map : 0, early_work / all});
    const double late_least = std::max({inner > 0 ? rest : 0, last, late_work / all});
    if (early_least + late_least + apart >= enough) return enough;

    Schedule early(p.multiprocessors), late(p.multiprocessors);
    early.add(heads, first);
    early.add(others, other_first);
    early.add(maps, a_map);
    late.add(inner, rest);
    if (most > 0) late.add(late_heads, last);
    if (other_most > 0) late.add(late_others, other_last);
    return early.end() + late.end() + apart;
  }
  // A lower bound for any cut: every chunk of o is made once, by a block with half of V.
  double least_in_segments(ChunkCounts lengths) const {
    const int64_t chunks = p.HV * parts(true) * (lengths.longest + (p.N - 1) * lengths.other);
    return double(chunks) * kCosts.half / p.multiprocessors;
  }

  // Segments after the first one of a sequence.
  static int64_t later(int64_t length, const Cut& cut) {
    return length > cut.first ? ceil_div(length - cut.first, cut.rest) : 0;
  }

 private:
  // Chunks of the last segment of a sequence that has `later` after its first.
  static int64_t chunks_of_last(int64_t length, const Cut& cut, int64_t later) {
    return length - cut.first - (later - 1) * cut.rest;
  }
};

}  // namespace gdn::sm90
