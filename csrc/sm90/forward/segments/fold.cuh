// Sequences in segments that run concurrently, for calls with too few states to fill a GPU.
//
// Pass::kSegments of the kernel walks the first segments of all sequences, which start from known
// states, and stores the states that the second segments start from. A segment transforms the state
// by an affine map, S_out = M S_in + b. At the same time Pass::kMaps finds the maps of all inner
// segments: b is the walk from a state of zeros, M the walk from the identity with values of zero.
// The kernel here folds the maps of each sequence, in order, into the states that the other
// segments start from, and Pass::kSegments then walks these. A last segment needs no map.
#pragma once
#include "sm90/forward/tiles.cuh"

namespace gdn::sm90 {

constexpr int kFoldRows = 8, kFoldThreads = 256;

// M is loaded in lines of kLine rows, several at a time: a step would otherwise be bound by their
// latency.
template <class C>
struct Fold {
  static constexpr int kKeys = C::kKeys, kLine = 4096 / kKeys, kLines = kKeys / kLine;
  static constexpr int kLineBytes = kLine * kKeys * 4, kStages = 5;  // two blocks a multiprocessor
  static constexpr int kBytes = kStages * kLineBytes;
  // A thread multiplies a share of a line with two columns of all rows, and adds up the shares of
  // kRows rows. A block therefore reads M once.
  static constexpr int kPairs = kKeys / 2, kShares = kFoldThreads / kPairs;
  static constexpr int kShare = kLine / kShares, kRows = kFoldRows / kShares;
  // The next kernel starts this many steps before the end, since its start takes that long. An
  // earlier start would compete with the steps.
  static constexpr int kStepsBeforeEnd = 3;
};

// All matrices are transposed: a block has kFoldRows rows (channels of V) of one sequence and value
// head, and computes s <- s M + b in fp32. kCarry: the map of a part of a sequence, from the maps
// of all its segments. The rows after those of V are those of the part's M, which begin as the
// identity and get no b; the result of the last step is written to PartSegments::carry, and no
// other.
template <class C, bool kCarry = false>
__global__ void __launch_bounds__(kFoldThreads, 1)
    fold_kernel(const __grid_constant__ KernelParams params) {
  using F = Fold<C>;
  constexpr int kKeys = F::kKeys, kRows = F::kRows;
  extern __shared__ __align__(16) uint8_t lines[];
  __shared__ float4 state[kFoldRows][kKeys / 4];
  __shared__ float2 sums[F::kShares][kFoldRows][F::kPairs];
  const ChunkForward& p = params.problem;
  const int state_size = state_rows(values<C>(p)) * kKeys;
  const int parts = (values<C>(p) + (kCarry && params.part.comes ? p.K : 0)) / kFoldRows;
  const int part = blockIdx.x % parts, pair = blockIdx.x / parts;
  const bool of_map = kCarry && part * kFoldRows >= values<C>(p);
  const int hv = pair % p.HV, share = threadIdx.x / F::kPairs;
  const int column = threadIdx.x % F::kPairs;  // the first of two, in units of two
  const int row = share * kRows;               // of the block's rows

  constexpr int kUnit = 64;  // channels of V that have a mark
  if (!kCarry && params.segments.marks != nullptr && part == 0 &&
      threadIdx.x < state_rows(values<C>(p)) / kUnit)
    params.segments.marks[int64_t{pair} * (state_rows(values<C>(p)) / kUnit) + threadIdx.x] =
        kUnmarked;
  Tile tile;
  tile.n = pair / p.HV;
  locate_sequence<C>(params, tile);
  const SegmentLengths lengths = lengths_of_segments(params);
  const int steps = lengths.later(tile.length) - (kCarry ? 0 : 1);
  if (steps < 1) return;
  const int map_size = state_size + C::kMapRows * kKeys;
  const int64_t first = int64_t{second_segment<C>(params, tile.n, lengths)} * p.HV + hv;
  // Steps whose map is b alone (forgetting.cuh).
  __shared__ bool forgotten[kMostForgetting];
  const bool forgets = params.segments.windows != nullptr;
  if (forgets) {
    for (int i = threadIdx.x; i < steps; i += kFoldThreads)
      forgotten[i] = params.segments.windows[first + int64_t{i} * p.HV] > 0;
    __syncthreads();
  }
  const auto next_with_map = [&](int step) {
    while (forgets && step < steps && forgotten[step]) ++step;
    return step;
  };
  const int64_t next_map = int64_t{p.HV} * map_size;
  const int own = (part * kFoldRows + row) * kKeys + column * 2;
  const float* const maps = params.segments.maps + first * map_size;
  float* start = params.segments.starts + first * state_size + own;

  int fetched = next_with_map(0),
      fetched_line = 0;               // the step and the line that are fetched next
  const auto fetch = [&](int line) {  // line: over all steps that have an M
    if (fetched < steps) {
      const float* const from =
          maps + fetched * next_map + state_size + fetched_line * (F::kLineBytes / 4);
      const uint32_t to = shared_address(lines + line % F::kStages * F::kLineBytes);
#pragma unroll
      for (int at = threadIdx.x * 16; at < F::kLineBytes; at += kFoldThreads * 16)
        copy_async_16(to + at, from + at / 4);
      if (++fetched_line == F::kLines) {
        fetched_line = 0;
        fetched = next_with_map(fetched + 1);
      }
    }
    copy_async_commit();  // also where nothing is fetched, since groups are counted
  };
#pragma unroll
  for (int line = 0; line + 1 < F::kStages; ++line) fetch(line);

  float2 b[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    // With a pool, columns past the call's own have not been written.
    const bool known = column * 2 < p.K;
    if (of_map) {
      const int at = part * kFoldRows + row + r - values<C>(p);  // the row of M
      reinterpret_cast<float2*>(state[row + r])[column] =
          make_float2(at == column * 2 ? 1.f : 0.f, at == column * 2 + 1 ? 1.f : 0.f);
      b[r] = {};
      continue;
    }
    reinterpret_cast<float2*>(state[row + r])[column] =
        known ? *reinterpret_cast<const float2*>(start + r * kKeys) : float2{};
    b[r] = *reinterpret_cast<const float2*>(maps + own + r * kKeys);
  }
  int line = 0;
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    if (i + F::kStepsBeforeEnd >= steps) launch_dependents();
    const bool has_map = !forgets || !forgotten[i];
    float2 sum[kFoldRows] = {};
#pragma unroll 1
    for (int above = share * F::kShare; has_map && above < kKeys; above += F::kLine, ++line) {
      copy_async_wait<F::kStages - 2>();
      __syncthreads();  // the line and the state are ready; the previous line has been read
      fetch(line + F::kStages - 1);
      const float2* const m =
          reinterpret_cast<const float2*>(lines + line % F::kStages * F::kLineBytes) +
          share * F::kShare * F::kPairs + column;
#pragma unroll
      for (int j = 0; j < F::kShare; j += 4) {
        const float2 m0 = m[j * F::kPairs], m1 = m[(j + 1) * F::kPairs];
        const float2 m2 = m[(j + 2) * F::kPairs], m3 = m[(j + 3) * F::kPairs];
#pragma unroll
        for (int r = 0; r < kFoldRows; ++r) {
          const float4 x = state[r][(above + j) / 4];
          sum[r].x += x.x * m0.x + x.y * m1.x + x.z * m2.x + x.w * m3.x;
          sum[r].y += x.x * m0.y + x.y * m1.y + x.z * m2.y + x.w * m3.y;
        }
      }
    }
    if (has_map) {
#pragma unroll
      for (int r = 0; r < kFoldRows; ++r) sums[share][r][column] = sum[r];
      __syncthreads();
    }
    start += int64_t{p.HV} * state_size;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float2 s = b[r];
#pragma unroll
      for (int other = 0; other < F::kShares; ++other) {
        if (!has_map) break;
        const float2 x = sums[other][row + r][column];
        s.x += x.x;
        s.y += x.y;
      }
      if constexpr (!kCarry) {
        *reinterpret_cast<float2*>(start + r * kKeys) = s;
      } else if (i + 1 == steps && column * 2 < p.K) {
        const int64_t to = int64_t{hv} * (values<C>(p) + p.K) + part * kFoldRows + row + r;
        *reinterpret_cast<float2*>(params.part.carry + to * p.K + column * 2) = s;
      }
      reinterpret_cast<float2*>(state[row + r])[column] = s;
      if (i + 1 < steps && !of_map)
        b[r] = *reinterpret_cast<const float2*>(maps + (i + 1) * next_map + own + r * kKeys);
    }
  }
}

}  // namespace gdn::sm90
