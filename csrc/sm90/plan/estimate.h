// What plans of the host reckon with: lengths that are known or guessed, and a model of the time for them. Host code alone.
#pragma once
#include <algorithm>
#include <cstdint>

#include "params.h"
#include "sm90/heads.h"
#include "sm90/plan/cut.h"
#include "sm90/plan/cut_time.cuh"

namespace gdn::sm90 {

template <class Heads>
constexpr Costs costs() {
  return Heads::kKeys == 64    ? Costs{1.74f, 1.28f, 1.4f, 3.5f, 1.7f, 12.5f, 1.7f, 0.03f, 0.03f}
         : Heads::kKeys == 128 ? Costs{2.25f, 1.6f, 1.87f, 10, 0.6f, 10, 2.3f, 0.1f, 0.12f}
                               : Costs{0, 2.55f, 2.05f, 9, 15.7f, 13, 15.7f, 0.4f, 0.5f};
}

// When tiles are done of which each goes to the multiprocessor that is free first, in their order.
class Schedule {
 public:
  explicit Schedule(int multiprocessors) : multiprocessors_(multiprocessors) {
    groups_[0] = {0, multiprocessors};
  }
  // Tiles of one kind. At most kMostKinds may have some.
  void add(int64_t count, double time) {
    const int64_t rounds = std::max<int64_t>(count / multiprocessors_ - 1, 0);  // one each
    for (int i = 0; i < size_; ++i) groups_[i].free += double(rounds) * time;
    count -= rounds * multiprocessors_;
    while (count > 0) {
      Group& first = *std::min_element(
          groups_, groups_ + size_, [](const Group& a, const Group& b) { return a.free < b.free; });
      const int64_t taken = std::min(count, first.count);
      if (taken < first.count) groups_[size_++] = {first.free, first.count - taken};
      first = {first.free + time, taken};
      count -= taken;
    }
  }
  double end() const {
    double last = 0;
    for (int i = 0; i < size_; ++i) last = std::max(last, groups_[i].free);
    return last;
  }
  static constexpr int kMostKinds = 4;

 private:
  struct Group {  // of multiprocessors
    double free;
    int64_t count;
  };
  int multiprocessors_, size_ = 1;
  Group groups_[kMostKinds + 1] = {};
};

// Chunks of the longest sequence and of each other one.
struct ChunkCounts {
  int64_t longest, other;
};

// What the host knows of the lengths of a packed call, or guesses: kinds of sequences, the longest first.
struct KnownLengths {
  static constexpr int kMost = Schedule::kMostKinds;
  Alike of[kMost] = {};
  int kinds = 0;
  int others = kMost;  // the number of a kind whose sequences have any lengths, up to that of the kind before
  int64_t chunks = 0;  // of the call
  void add(int64_t chunks_of_one, int64_t count) {
    if (count > 0) of[kinds++] = {int(chunks_of_one), int(count)};
  }
  int longest() const { return of[0].chunks; }
  // Segments behind the first ones of their sequences, at most; inner: without the last of each sequence.
  int most_later(const Cut& cut, bool inner = false) const {
    if (others < kinds && of[others - 1].chunks > cut.first) return int(chunks / cut.rest);  // no lengths have more
    int64_t later = 0;
    for (int i = 0; i < kinds; ++i)
      if (of[i].chunks > cut.first && i != others)
        later += of[i].count * (ceil_div(of[i].chunks - cut.first, cut.rest) - inner);
    return int(later);
  }
};
inline KnownLengths two_lengths(ChunkCounts x, int N) {
  KnownLengths found;
  found.add(x.longest, 1);
  found.add(x.other, N - 1);
  return found;
}
// Of a packed call whose longest sequences the host was told.
inline KnownLengths told_lengths(const ChunkForward& p) {
  KnownLengths x;
  x.chunks = p.T / kChunk + p.N;
  int64_t left = ceil_div(p.T, kChunk), sequences = p.N;
  for (const int64_t tokens : p.longest) {
    if (tokens <= 0 || sequences == 0) break;
    x.add(std::min(ceil_div(tokens, kChunk), ceil_div(p.T, kChunk)), 1);
    left -= x.of[x.kinds - 1].chunks;
    --sequences;
  }
  if (sequences > 0) x.others = x.kinds;
  x.add(ceil_div(std::max<int64_t>(left, 0), std::max<int64_t>(sequences, 1)), sequences);
  return x;
}

// What plans take, for lengths that are known or guessed.
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

  double whole(const KnownLengths& lengths, bool halves) const {
    Schedule schedule(p.multiprocessors);
    for (int i = 0; i < lengths.kinds; ++i)
      schedule.add(int64_t{lengths.of[i].count} * p.HV * parts(halves), tile(lengths.of[i].chunks, halves));
    return schedule.end();
  }
  Cut cut(ChunkCounts lengths, int64_t first, int64_t rest) const {
    Cut cut = {int(first), int(rest), int(lengths.longest), 0, 0};
    const int64_t most = later(lengths.longest, cut), others = later(lengths.other, cut);
    const auto inner = [](int64_t some) { return std::max<int64_t>(some - 1, 0); };
    cut.later = int(most + (p.N - 1) * others);
    cut.inner = int(inner(most) + (p.N - 1) * inner(others));
    return cut;
  }
  // Estimated time of this cut, with later segments in blocks of that shape; returns `enough` early if even its
  // lower bound is not below `enough`.
  double segments(ChunkCounts lengths, const Cut& cut, bool late_halves, double enough) const {
    const int64_t heads = p.HV * parts(true), maps = p.HV * map_parts() * cut.inner;
    const int64_t late_heads = p.HV * parts(late_halves), inner = late_heads * cut.inner;
    const int64_t others = (p.N - 1) * heads, late_others = (p.N - 1) * late_heads;
    const double first = tile(std::min<int64_t>(lengths.longest, cut.first), true);
    const double other_first = tile(std::min<int64_t>(lengths.other, cut.first), true);
    const double rest = tile(cut.rest, late_halves), a_map = map(cut.rest);
    const int64_t most = later(lengths.longest, cut), other_most = later(lengths.other, cut);
    const double last = most > 0 ? tile(left(lengths.longest, cut, most), late_halves) : 0;
    const double other_last = other_most > 0 ? tile(left(lengths.other, cut, other_most), late_halves) : 0;
    const double apart = double(std::max<int64_t>(most - 1, 0)) * kCosts.fold +
                         (cut.later > 0 ? kCosts.launches : kNoSegments) +
                         (maps > 0 && first > a_map ? kSecondLaunch : 0);

    const double early_work = double(heads) * first + double(others) * other_first + double(maps) * a_map;
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
  double least_in_segments(ChunkCounts lengths) const {
    const int64_t chunks = p.HV * parts(true) * (lengths.longest + (p.N - 1) * lengths.other);
    return double(chunks) * kCosts.half / p.multiprocessors;
  }

  // Segments behind a sequence's first, and the chunks of the last of these.
  static int64_t later(int64_t length, const Cut& cut) {
    return length > cut.first ? ceil_div(length - cut.first, cut.rest) : 0;
  }

 private:
  static int64_t left(int64_t length, const Cut& cut, int64_t later) {
    return length - cut.first - (later - 1) * cut.rest;
  }
};

}  // namespace gdn::sm90
