// What the segments of both walks start from, out of their maps (segment_maps.cu), in fp32: E_(j-1) = E_j M_j + b_j
// from the last segment to the second, and S_(j+1) = S_j M_j^T + b_j from the first one to the last but one. The result
// replaces b.
#include "sm90/backward/windows.cuh"
#include "sm90/launch_blocks.h"

namespace gdn::sm90::backward {
namespace {
// As fold.cuh: a block has kRows rows of V, and a matrix comes in lines of its rows, several in flight. With 16 rows a
// block's products take as long as its matrices. With fewer the steps are shorter, but all blocks together load more.
constexpr int kThreads = 256;
constexpr int kLine = 32, kLines = kChannels / kLine, kLineBytes = kLine * kChannels * 4, kStages = 4;
// A thread multiplies a share of a line with two columns of all rows, and adds up the shares of kRows / kShares rows.
constexpr int kPairs = kChannels / 2, kShares = kThreads / kPairs, kShare = kLine / kShares;
constexpr int kAloneBytes = 116 * 1024;  // of a block that is to have a multiprocessor for itself

template <int kRows>
struct Memory {
  uint8_t lines[kStages][kLineBytes];
  float4 state[kRows][kChannels / 4];
  float2 sums[kShares][kRows][kPairs];
  uint32_t has_map[kMostFolds / 32];  // a bit for each step: behind a segment that forgets, the state is b
};

template <class Kind, int kRows>
__global__ void __launch_bounds__(kThreads, 2) segment_folds_kernel(const __grid_constant__ Params params) {
  static_assert(sizeof(Memory<kRows>) <= kAloneBytes, "shared memory of a block");
  constexpr int kBlocks = kChannels / kRows, kOwn = kRows / kShares;
  extern __shared__ __align__(16) uint8_t raw[];
  Memory<kRows>& sm = *reinterpret_cast<Memory<kRows>*>(raw);
  launch_dependents();
  // By blocks without a step too: else this launch could end, and the next one begin, before the maps' has ended.
  wait_for_prerequisites();
  const bool back = blockIdx.x & 1;
  const int index = blockIdx.x / 2 / kBlocks, part = blockIdx.x / 2 % kBlocks;
  const int n = divide_by_slices<Kind>(params, index), slice = index - n * slices_of<Kind>(params);
  const int last = segment_tile<Kind>(params, n, 0, slice).last, steps = last - 1;
  if (steps < 1) return;
  const int first = back ? last - 1 : 1;
  for (int i = threadIdx.x; i / 32 * 32 < steps; i += kThreads) {
    const int segment = back ? first - i : first + i;
    const bool has = i < steps && params.cut.forgotten[segment_index<Kind>(params, n, segment, slice)] == 0;
    const uint32_t all = __ballot_sync(~0u, has);
    if (threadIdx.x % 32 == 0) sm.has_map[i / 32] = all;
  }
  __syncthreads();
  const auto step_from = [&](int i) {  // the first one with a matrix, or `steps`
    for (; i < steps; i = (i / 32 + 1) * 32) {
      const uint32_t left = sm.has_map[i / 32] >> (i % 32);
      if (left != 0) return i + __ffs(left) - 1;
    }
    return steps;
  };
  const int share = threadIdx.x / kPairs, column = threadIdx.x % kPairs, row = share * kOwn;
  const int64_t matrix = segment_matrix<Kind>(params, n, first, slice);
  const int64_t each = int64_t{slices_of<Kind>(params)} * (kChannels * kChannels), next = back ? -each : each;
  const float* const maps = params.cut.maps + (back ? 0 : params.segments * each) + matrix;
  float* const state = (back ? params.cut.ends : starts_of<Kind>(params, n)) + matrix +
                       (part * kRows + row) * kChannels + column * 2;

  int fetched = step_from(0);  // the step of the next line that is fetched
  const auto fetch = [&](int line) {
    if (fetched < steps) {
      const float* const from = maps + fetched * next + line % kLines * (kLineBytes / 4);
      const uint32_t to = shared_address(sm.lines[line % kStages]);
#pragma unroll
      for (int at = threadIdx.x * 16; at < kLineBytes; at += kThreads * 16) copy_async_16(to + at, from + at / 4);
      if (line % kLines == kLines - 1) fetched = step_from(fetched + 1);
    }
    copy_async_commit();  // also of none, as groups are counted
  };
#pragma unroll
  for (int line = 0; line + 1 < kStages; ++line) fetch(line);

  int line = 0, behind = -1;  // behind: the step whose state is in sm.state
#pragma unroll 1
  for (int i = step_from(0); i < steps; i = step_from(i + 1)) {
    float* const before = state + i * next;
    float2 b[kOwn];
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
      if (i != behind)
        reinterpret_cast<float2*>(sm.state[row + r])[column] = *reinterpret_cast<const float2*>(before + r * kChannels);
      b[r] = *reinterpret_cast<const float2*>(before + next + r * kChannels);
    }
    float2 sum[kRows] = {};
#pragma unroll 1
    for (int above = share * kShare; above < kChannels; above += kLine, ++line) {
      copy_async_wait<kStages - 2>();
      __syncthreads();  // the line and the state are there; the line before has been read
      fetch(line + kStages - 1);
      const float2* const m =
          reinterpret_cast<const float2*>(sm.lines[line % kStages]) + share * kShare * kPairs + column;
#pragma unroll
      for (int j = 0; j < kShare; j += 4) {
        const float2 m0 = m[j * kPairs], m1 = m[(j + 1) * kPairs], m2 = m[(j + 2) * kPairs], m3 = m[(j + 3) * kPairs];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float4 x = sm.state[r][(above + j) / 4];
          sum[r].x += x.x * m0.x + x.y * m1.x + x.z * m2.x + x.w * m3.x;
          sum[r].y += x.x * m0.y + x.y * m1.y + x.z * m2.y + x.w * m3.y;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) sm.sums[share][r][column] = sum[r];
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
      float2 s = b[r];
#pragma unroll
      for (int other = 0; other < kShares; ++other) {
        const float2 x = sm.sums[other][row + r][column];
        s.x += x.x;
        s.y += x.y;
      }
      *reinterpret_cast<float2*>(before + next + r * kChannels) = s;
      reinterpret_cast<float2*>(sm.state[row + r])[column] = s;
    }
    behind = i + 1;
  }
}

template <class Kind, int kRows>
const char* launch(const Params& params, cudaStream_t stream) {
  const ChunkForward& p = params.problem.forward;
  const int64_t blocks = int64_t{p.N} * params.slices * 2 * (kChannels / kRows);
  // The first multiprocessors that the maps leave would get two blocks each, and others none.
  const int bytes = blocks <= p.multiprocessors ? kAloneBytes : int(sizeof(Memory<kRows>));
  return launch_blocks(&segment_folds_kernel<Kind, kRows>, params, blocks, kThreads, bytes, 1, true, stream);
}
}  // namespace

template <class Kind>
const char* run_segment_folds(const Params& params, cudaStream_t stream) {
  const ChunkForward& p = params.problem.forward;
  const int rows = fold_rows(int64_t{p.N} * params.slices, p.multiprocessors);
  if (rows == 4) return launch<Kind, 4>(params, stream);
  if (rows == 8) return launch<Kind, 8>(params, stream);
  return launch<Kind, 16>(params, stream);
}

template const char* run_segment_folds<Kind<__nv_bfloat16, true>>(const Params&, cudaStream_t);

}  // namespace gdn::sm90::backward
