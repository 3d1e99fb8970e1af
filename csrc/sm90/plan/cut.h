// How a call is cut up into tiles: what the host chooses (forward_plan.h) and the device reads. No CUDA.
#pragma once
#include "sm90/tile/chunk.h"

namespace gdn::sm90 {

// Where every sequence is cut into segments, in chunks: the length of its first one, which is the longer,
// and of each other one but the last.
struct Cut {
  int first, rest;
  // What it was chosen for, at most: the longest sequence; segments, without the first of each sequence;
  // and without the last of each, too.
  int longest, later, inner;
};

// In ascending order of `longest`, for the device to choose from by the contents of cu_seqlens; the last
// one serves any. None: whole sequences.
struct Cuts {
  static constexpr int kMost = 8;
  Cut choices[kMost];
  int count;
  bool maps_first;  // maps take longer than the first segments, beside which they are walked
};

// How many channels of V a block owns in a call of whole sequences: 128, 64, or what the device chooses
// by the contents of cu_seqlens.
enum class Shape { kBoth, kHalves, kByLengths };

// How blocks come to their tiles in a call of whole sequences.
struct Dealing {
  bool ordered;    // those of the longest sequences first; else in the order of the sequences
  // Tiles that blocks have taken, beside the first of each: a block takes its next when it is free. Null: every
  // block has its own, in steps of the grid, there and back.
  int* taken;
  float chunk[2];  // ordered: microseconds of a chunk in a block of either shape,
  float tile;      // and of the start and end of a tile
};
constexpr int kMostOrdered = 1024;  // sequences; more of them are taken in their own order

// How a call is cut up; by what the host knows alone, so that a CUDA graph stays valid when the contents of
// cu_seqlens and of the gates change.
struct Plan {
  Shape shape;   // of whole sequences, or of later segments
  Shape first;   // of first segments
  Cuts cuts;
  int slots;     // segments at most, without the first of each sequence
  bool chosen;   // there are no cuts to choose from: the device makes one, by lengths and gates (choose_cut.cuh)
  bool forgets;  // maps are walked as far back as gates remember (forgetting.cuh)
  bool in_segments() const { return cuts.count > 0 || chosen; }
};
constexpr int kMostForgetting = 1024;  // segments of Plan::forgets
constexpr int kMostChosenHeads = 512;  // value heads of Plan::chosen

// What choose_cut chose: a cut's lengths in chunks, and the shape of blocks of later segments.
struct alignas(16) Choice {
  int first, rest, late_halves;
};

}  // namespace gdn::sm90
