// Sequences in segments that run side by side, for calls with too few states to fill a GPU.
//
// What a segment does to the state is an affine map, S_out = M S_in + b. Pass::kMaps of the kernel
// finds the maps of all segments at once: b is the walk from a state of zeros, M the walk from the
// identity with values of zero. The kernel here folds the maps of each sequence, in order, into the
// state that each segment starts from; Pass::kSegments then walks the segments. A sequence's first
// segment starts from its initial state already when the maps are made, so its b is a state and it
// needs no M; its last segment needs no map at all.
#pragma once
#include "config.cuh"

namespace gdn::sm90 {

constexpr int kFoldRows = 8, kFoldThreads = 256;

// All is transposed: a block owns kFoldRows rows (channels of V) of one sequence and value head,
// and computes s <- s M + b in fp32. A thread owns a column and half of the rows.
__global__ void __launch_bounds__(kFoldThreads, 1)
    fold_kernel(const __grid_constant__ KernelParams params) {
  constexpr int kRows = kFoldRows / 2;
  __shared__ float4 state[2][kFoldRows][kDim / 4];
  const ChunkForward& p = params.problem;
  constexpr int kParts = kDim / kFoldRows;
  const int part = blockIdx.x % kParts, pair = blockIdx.x / kParts;
  const int hv = pair % p.HV, column = threadIdx.x % kDim;
  const int row = threadIdx.x / kDim * kRows;  // of the block's

  Tile tile;
  int slot = 0;  // of the sequence's first segment
  for (tile.n = 0; tile.n < pair / p.HV; ++tile.n) {
    locate_sequence(p, tile);
    slot += segment_count(tile.length, params.segments.chunks * kChunk);
  }
  locate_sequence(p, tile);
  const int count = segment_count(tile.length, params.segments.chunks * kChunk);
  const int64_t step = int64_t{p.HV} * (kDim * kDim);
  int64_t at = (int64_t{slot} * p.HV + hv) * (kDim * kDim);
  const int own = (part * kFoldRows + row) * kDim + column;  // of the first of this thread's rows

  float s[kRows] = {};
  for (int i = 0; i + 1 < count; ++i, at += step) {
    const float* const b = params.segments.maps + 2 * at;
    const float* const m = b + kDim * kDim + column;
    float next[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) next[r] = b[own + r * kDim];
    if (i > 0) {
      auto& now = state[i % 2];
#pragma unroll
      for (int r = 0; r < kRows; ++r) reinterpret_cast<float*>(now[row + r])[column] = s[r];
      float line[kDim];  // all in flight before the barrier: a step is bound by their latency
#pragma unroll
      for (int j = 0; j < kDim; ++j) line[j] = m[j * kDim];
      __syncthreads();
#pragma unroll
      for (int j = 0; j < kDim; j += 4)
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float4 x = now[row + r][j / 4];
          next[r] += x.x * line[j] + x.y * line[j + 1] + x.z * line[j + 2] + x.w * line[j + 3];
        }
    }
    float* const start = params.segments.starts + at + step + own;
#pragma unroll
    for (int r = 0; r < kRows; ++r) start[r * kDim] = s[r] = next[r];
  }
}

}  // namespace gdn::sm90
