// Sizes that the plan of a backward and its kernels agree on.
#pragma once
#include <cstdint>

#include "params.h"
#include "sm90/tile/chunk.h"

namespace gdn::sm90::backward {

// The channels that tiles have room for: all of K, and those of V in a slice.
constexpr int kChannels = 128;

inline int64_t slices_of(const ChunkForward& p) { return p.HV * ceil_div(p.V, kChannels); }

// An upper bound on the chunk indices of a call. In a packed call the index of a sequence's first
// chunk is its first row / 64 + its number.
inline int64_t most_chunks_of(const ChunkForward& p) {
  return p.cu_seqlens ? p.T / kChunk + p.N : int64_t{p.B} * (ceil_div(p.T, kChunk));
}

// The channels of V of a block of the walk back: a slice, half of one, or as the device chooses.
enum class BackShape { kSlices, kHalves, kByLengths };
constexpr int kWholeSequences = 1 << 30;
constexpr int kMostFolds = 4096;  // segments of a sequence where both walks are cut
// Sequences of a call whose walks are both cut: a lane of a warp has one.
constexpr int kMostCut = 32;

constexpr int kFoldRows = 16;  // rows of V in a block of segments/folds.cu

constexpr int kUnitBits = 10, kMostUnits = 1 << kUnitBits;
// A unit has fewer chunks: chunks and number share 32 bits.
constexpr int kMostUnitChunks = 1 << (32 - kUnitBits);
// Bins are blocks or clusters, of which a lane of the dealing warp has kBinRows.
constexpr int kBinRows = 5, kMostBins = 32 * kBinRows;

}  // namespace gdn::sm90::backward
