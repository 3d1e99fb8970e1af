// How a call is cut up into tiles. The host chooses the cut (forward_plan.h), and the device reads
// it. No CUDA.
#pragma once
#include "sm90/tile/chunk.h"

namespace gdn::sm90 {

// Where every sequence is cut into segments, in chunks: the length of its first segment, which is
// the longest, and of each other one but the last.
struct Cut {
  int first, rest;
  // Upper bounds that this cut was planned for: chunks of the longest sequence; segments that are
  // not the first of their sequence; segments that are neither the first nor the last.
  int longest, later, inner;
};

// Cuts in ascending order of `longest`. The device takes the first that was planned for lengths
// like those in cu_seqlens; the last one serves all lengths. Without any, sequences are whole.
struct Cuts {
  static constexpr int kMost = 8;
  Cut choices[kMost];
  int count;
  bool maps_first;  // maps are launched before first segments, since they take longer
};

// How many channels of V a block has in a call of whole sequences: 128, 64, or as the device
// chooses by the contents of cu_seqlens.
enum class BlockShape { kBoth, kHalves, kByLengths };

// How blocks come to their tiles in a call of whole sequences.
struct Dealing {
  bool ordered;  // tiles of the longest sequences come first; else tiles are in the order of the
                 // sequences
  // The number of tiles that blocks have taken after their first one: a block takes the next tile
  // when it is free. Null: every block has its own tiles, in steps of the grid, forward and
  // backward in turn.
  int* taken;
  float chunk[2];  // with `ordered`, microseconds: a chunk in a block of either shape,
  float tile;      // and the start and end of a tile
};
constexpr int kMostOrdered = 1024;  // sequences; more of them are taken in their own order

// How a call is cut up. A plan depends only on values that the host knows, and a CUDA graph
// therefore stays valid when the contents of cu_seqlens and of the gates change.
struct ForwardPlan {
  BlockShape shape;  // of whole sequences, or of later segments
  BlockShape first;  // of first segments
  Cuts cuts;
  int later_segments;  // an upper bound on segments that are not the first of their sequence
  bool cut_by_device;  // there are no cuts to choose from: choose_cut.cuh makes one, by lengths and
                       // gates
  bool forgets;        // maps are walked only as far back as gates remember, forgetting.cuh
  bool in_segments() const { return cuts.count > 0 || cut_by_device; }
};
constexpr int kMostForgetting = 1024;     // segments of ForwardPlan::forgets
constexpr int kMostDeviceCutHeads = 512;  // value heads of ForwardPlan::cut_by_device

// The choice of choose_cut: a cut's lengths in chunks, and the shape of blocks of later segments.
struct alignas(16) DeviceCut {
  int first, rest, late_halves;
};

}  // namespace gdn::sm90
