// The lengths of sequences that a plan of the host knows or assumes: numbers of sequences with
// equally many chunks. No CUDA.
#pragma once
#include <algorithm>
#include <cstdint>

#include "params.h"
#include "sm90/plan/cut.h"

namespace gdn::sm90 {

// `count` sequences of `chunks` chunks each.
struct EqualSequences {
  int chunks, count;
};

// Chunks of the longest sequence and of each other one.
struct ChunkCounts {
  int64_t longest, other;
};

// Kinds of sequences of equal length, the longest first.
struct SequenceLengths {
  static constexpr int kMost = 4;
  EqualSequences kinds[kMost] = {};
  int count = 0;       // of kinds
  int others = kMost;  // the number of a kind whose sequences have any lengths, up to that of the
                       // kind before
  int64_t chunks = 0;  // of the call; set where `others` is
  void add(int64_t chunks_of_one, int64_t sequences) {
    if (sequences > 0) kinds[count++] = {int(chunks_of_one), int(sequences)};
  }
  int longest() const { return kinds[0].chunks; }
  // An upper bound on the segments that are not the first of their sequence; inner: nor the last of
  // it.
  int most_later(const Cut& cut, bool inner = false) const {
    if (others < count && kinds[others - 1].chunks > cut.first)
      return int(chunks / cut.rest);  // no lengths have more
    int64_t later = 0;
    for (int i = 0; i < count; ++i)
      if (kinds[i].chunks > cut.first && i != others)
        later += kinds[i].count * (ceil_div(kinds[i].chunks - cut.first, cut.rest) - inner);
    return int(later);
  }
};

inline SequenceLengths lengths_of(ChunkCounts x, int N) {
  SequenceLengths lengths;
  lengths.add(x.longest, 1);
  lengths.add(x.other, N - 1);
  return lengths;
}

// The lengths of a packed call whose longest sequences the host knows, ChunkForward::longest. The
// others share the remaining tokens.
inline SequenceLengths known_lengths(const ChunkForward& p) {
  SequenceLengths lengths;
  lengths.chunks = p.T / kChunk + p.N;
  int64_t chunks = ceil_div(p.T, kChunk), sequences = p.N;  // of the others
  for (const int64_t tokens : p.longest) {
    if (tokens <= 0 || sequences == 0) break;
    lengths.add(std::min(ceil_div(tokens, kChunk), ceil_div(p.T, kChunk)), 1);
    chunks -= lengths.kinds[lengths.count - 1].chunks;
    --sequences;
  }
  if (sequences > 0) lengths.others = lengths.count;
  lengths.add(ceil_div(std::max<int64_t>(chunks, 0), std::max<int64_t>(sequences, 1)), sequences);
  return lengths;
}

}  // namespace gdn::sm90
