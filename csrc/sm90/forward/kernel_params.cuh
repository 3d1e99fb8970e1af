// The parameters of the chunked forward's kernels.
#pragma once
#include "common/ptx.cuh"
#include "params.h"
#include "sm90/plan/cut.h"
#include "sm90/tile/block.cuh"

namespace gdn::sm90 {

// Which segments the tiles of a launch are: the first of each sequence, the others, or those that
// are walked again.
enum class SegmentGroup { kFirst, kLater, kAgain };

// Scratch memory of sequences in segments. The segments but the first of each sequence are
// numbered, those of sequence 0 first. States and maps are transposed, in rows of kKeys; R =
// state_rows().
struct SegmentBuffers {
  Cuts cuts;
  const DeviceCut* device_cut;  // ForwardPlan::cut_by_device; else null
  const int* order;    // with device_cut: the value heads, in the order of their maps' tiles
  bool leads;          // this launch is the first that reads device_cut, and waits for it
  SegmentGroup group;  // Pass::kSegments
  // [later segments, HV, R + kMapRows, kKeys]: b, then M, whose rows are channels of the start's K.
  float* maps;
  float* starts;  // [later segments, HV, R, kKeys]: the state that a segment starts from
  // Null unless ForwardPlan::forgets, forgetting.cuh.
  int* windows;  // [later segments, HV]
  int* marks;    // [N, HV, R / 64]
};
constexpr int kUnmarked = INT32_MAX;

// The maps and folds of a part of a sequence (Part) have this and SegmentBuffers. All of its
// segments are later ones: a first segment has no chunk.
struct PartSegments {
  bool maps_last;       // the last segment has a map too, since another part follows
  const float* growth;  // [chunks, HV], growth.cuh; null: no segment forgets
  float* carry;         // Part::carry
  bool comes;           // Part::comes
};

struct KernelParams {
  CUtensorMap q, k, v, o;
  ChunkForward problem;
  SegmentBuffers segments;
  BlockShape shape;      // Pass::kWhole
  Dealing dealing;       // Pass::kWhole
  int tiles;             // of the grid: (sequence or segment, value head, map, part of V); not with
                         // Pass::kWhole
  Divisor heads, group;  // HV, and value heads of a key head
  Pool pool;             // of C::kPool
  PartSegments part;     // of C::kPart
};

}  // namespace gdn::sm90
