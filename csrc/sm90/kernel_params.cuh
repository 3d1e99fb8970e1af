// What the host hands to the kernels of the chunked forward.
#pragma once
#include "common/ptx.cuh"
#include "params.h"
#include "sm90/cut.h"

namespace gdn::sm90 {

// Segments of sequences. A slot is a segment that is not the first of its sequence; those of sequence
// 0 come first. States and maps are transposed, in rows of kKeys; R = state_rows().
struct Segments {
  Cuts cuts;
  bool first;    // Pass::kSegments: the tiles are first segments, else the later ones
  float* maps;   // [slots, HV, R + kMapRows, kKeys]: b, then M (its rows: K of what comes in)
  float* starts; // [slots, HV, R, kKeys]: what a segment starts from
};

// Division by a number that the host knows, in a few instructions.
struct Divisor {
  uint64_t inverse;  // 2^64 / number, rounded up; 0 for 1
  static Divisor of(int number) { return {number > 1 ? UINT64_MAX / number + 1 : 0}; }
  GDN_DEVICE int divide(int x) const {
    return inverse == 0 ? x : int(__umul64hi(uint64_t(x), inverse));
  }
};

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
