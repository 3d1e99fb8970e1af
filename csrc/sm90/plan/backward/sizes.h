// Sizes that the plan of a backward and its kernels agree on.
#pragma once
#include <cstdint>

#include "params.h"
#include "sm90/tile/chunk.h"

namespace gdn::sm90::backward {

constexpr int kChannels = 128;  // that there is room for: all of K, and of V those of a slice

inline int64_t slices_of(const ChunkForward& p) { return p.HV * ceil_div(p.V, kChannels); }

// Slots of a call at most. Packed, that of a sequence's first chunk is its first row / 64 + its
// number.
inline int64_t most_chunks_of(const ChunkForward& p) {
  return p.cu_seqlens ? p.T / kChunk + p.N : int64_t{p.B} * (ceil_div(p.T, kChunk));
}

// What a block of the walk back has: a slice, or half of one.
enum class BackShape { kSlices, kHalves, kByLengths };
constexpr int kWholeSequences = 1 << 30;
constexpr int kMostFolds = 4096;  // segments of a sequence where both walks are cut
constexpr int kMostCut = 32;      // sequences there: a lane of a warp has one

constexpr int kFoldRows = 16;  // of V, of a block of segments/folds.cu

constexpr int kUnitBits = 10, kMostUnits = 1 << kUnitBits;
constexpr int kMostUnitChunks =
    1 << (32 - kUnitBits);  // a unit has fewer: its chunks and number lie in 32 bits
constexpr int kBinRows = 5,
              kMostBins =
                  32 * kBinRows;  // blocks, or clusters: a lane of the warp that deals has kBinRows

}  // namespace gdn::sm90::backward
