// What the host hands to the kernels of the chunked forward.
#pragma once
#include "params.h"
#include "common/ptx.cuh"
#include "sm90/plan/cut.h"

namespace gdn::sm90 {

// Segments of sequences. A slot is a segment that is not the first of its sequence; those of sequence
// 0 come first. States and maps are transposed, in rows of kKeys; R = state_rows().
enum class Part { kFirst, kLater, kAgain };  // which segments the tiles of a launch are
struct Segments {
  Cuts cuts;
  const Choice* choice;  // Plan::chosen; else null
  const int* order;    // with a choice: the value heads, in the order of their maps' tiles
  bool leads;    // the launch that reads the choice first: its blocks wait for it
  Part part;     // Pass::kSegments
  float* maps;   // [slots, HV, R + kMapRows, kKeys]: b, then M (its rows: K of what comes in)
  float* starts; // [slots, HV, R, kKeys]: what a segment starts from
  // Null unless Plan::forgets; forgetting.cuh has what they are for.
  int* windows;  // [slots, HV]
  int* marks;    // [N, HV, R / 64]
};
constexpr int kUnmarked = INT32_MAX;

struct KernelParams {
  CUtensorMap q, k, v, o;
  ChunkForward problem;
  Segments segments;
  Shape shape;     // Pass::kWhole
  Dealing dealing; // Pass::kWhole
  int tiles;  // of the grid: (sequence or segment, value head, map, part of V); unless Pass::kWhole
  Divisor heads, group;  // HV, and value heads of a key head
  Pool pool;  // of C::kPool
};

}  // namespace gdn::sm90
