// Sequences in segments that run side by side, for calls with too few states to fill a GPU.
//
// What a segment does to the state is an affine map, S_out = M S_in + b. Pass::kMaps of the kernel
// finds the maps of all segments at once: b is the walk from a state of zeros, M the walk from the
// identity with values of zero. At the same time Pass::kSegments walks the first segments of all
// sequences, which start from known states, and leaves the states that the second ones start from.
// The kernel here folds the maps of each sequence, in order, into the states that the others start
// from; Pass::kSegments then walks these. A last segment needs no map.
#pragma once
#include "config.cuh"

namespace gdn::sm90 {

constexpr int kFoldRows = 8, kFoldThreads = 256;

// All is transposed: a block owns kFoldRows rows (channels of V) of one sequence and value head,
// and computes s <- s M + b in fp32. A thread owns a column and some of the rows.
template <class C>
__global__ void __launch_bounds__(kFoldThreads, 1)
    fold_kernel(const __grid_constant__ KernelParams params) {
  constexpr int kKeys = C::kKeys, kRows = kFoldRows * kKeys / kFoldThreads;
  constexpr int kLine = kKeys < 128 ? kKeys : 128;  // loads in flight
  __shared__ float4 state[2][kFoldRows][kKeys / 4];
  const ChunkForward& p = params.problem;
  const int state_size = state_rows(values<C>(p)) * kKeys;
  const int parts = values<C>(p) / kFoldRows;
  const int part = blockIdx.x % parts, pair = blockIdx.x / parts;
  const int hv = pair % p.HV, column = threadIdx.x % kKeys;
  const int row = threadIdx.x / kKeys * kRows;  // of the block's

  Tile tile;
  tile.n = pair / p.HV;
  locate_sequence<C>(params, tile);
  const int count = later_segments(tile.length, params.segments.chunks * kChunk);
  if (count < 2) return;
  const int map_size = state_size + C::kMapRows * kKeys;
  const int64_t first = int64_t{second_slot<C>(params, tile.n)} * p.HV + hv;
  const int own = (part * kFoldRows + row) * kKeys + column;  // of the first of this thread's rows
  const float* b = params.segments.maps + first * map_size;
  float* start = params.segments.starts + first * state_size + own;

  float s[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r)  // of a pool, columns that are not the call's have not been written
    s[r] = column < p.K ? start[r * kKeys] : 0.f;
  for (int i = 0; i + 1 < count; ++i, b += int64_t{p.HV} * map_size) {
    const float* const m = b + state_size + column;
    float next[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) next[r] = b[own + r * kKeys];
    auto& now = state[i % 2];
#pragma unroll
    for (int r = 0; r < kRows; ++r) reinterpret_cast<float*>(now[row + r])[column] = s[r];
    for (int above = 0; above < kKeys; above += kLine) {
      float line[kLine];  // all in flight before the barrier: a step is bound by their latency
#pragma unroll
      for (int j = 0; j < kLine; ++j) line[j] = m[(above + j) * kKeys];
      if (above == 0) __syncthreads();
#pragma unroll
      for (int j = 0; j < kLine; j += 4)
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float4 x = now[row + r][(above + j) / 4];
          next[r] += x.x * line[j] + x.y * line[j + 1] + x.z * line[j + 2] + x.w * line[j + 3];
        }
    }
    start += int64_t{p.HV} * state_size;
#pragma unroll
    for (int r = 0; r < kRows; ++r) start[r * kKeys] = s[r] = next[r];
  }
}

}  // namespace gdn::sm90
