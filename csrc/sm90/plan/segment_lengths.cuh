// The lengths of a call's segments, by the cut that was planned for lengths like those of the call.
#pragma once
#include "sm90/plan/cut.h"
#include "sm90/tile/sequences.cuh"

namespace gdn::sm90 {

// The lengths of segments, in tokens.
struct SegmentLengths {
  int first, rest;
  GDN_HOST_DEVICE SegmentLengths(int first_chunks, int rest_chunks)
      : first(first_chunks * kChunk), rest(rest_chunks * kChunk) {}
  GDN_HOST_DEVICE explicit SegmentLengths(const Cut& cut) : SegmentLengths(cut.first, cut.rest) {}
  // The segments of a sequence after its first one.
  GDN_HOST_DEVICE int later(int length) const {
    return length > first ? (length - first - 1) / rest + 1 : 0;
  }
};

// The segments of the first planned cut whose bounds hold for the call's lengths. Skipped sequences
// count: which sequences are skipped changes no bits of the others.
GDN_HOST_DEVICE SegmentLengths planned_lengths(const ChunkForward& p, const Cuts& cuts) {
  int longest = 0, choice = 0;
  const int N = cuts.count > 1 ? p.N : 0;
  GDN_ROLLED
  for (int n = 0; n < N; ++n) longest = max(longest, sequence_length(p, n));
  GDN_ROLLED
  for (; choice + 1 < cuts.count; ++choice) {
    const Cut& cut = cuts.choices[choice];
    if (longest > cut.longest * kChunk) continue;
    const SegmentLengths segment(cut);
    int later = 0, inner = 0;
    GDN_ROLLED
    for (int n = 0; n < N; ++n) {
      const int count = segment.later(sequence_length(p, n));
      later += count;
      inner += max(count - 1, 0);
    }
    if (later <= cut.later && inner <= cut.inner) break;
  }
  return SegmentLengths(cuts.choices[choice]);
}

}  // namespace gdn::sm90
