// What the segments of both walks start from, out of their maps (segment_maps.cu): E_(j-1) = E_j M_j + b_j
// from the last segment to the second, and S_(j+1) = S_j M_j^T + b_j from the first one to the last but one. The result
// replaces b.
#include "sm90/backward/windows.cuh"
#include "sm90/launch_blocks.h"

namespace gdn::sm90::backward {
namespace {
// A block has kFoldRows rows of V, and a matrix comes in lines of its rows, several in flight. A warp makes 16 columns
// of the product by tensor cores. Each fp32 factor is split into two bf16 values, and the product of both low ones is
// left out; all sums are in fp32.
constexpr int kThreads = 256, kBlocks = kChannels / kFoldRows;
constexpr int kLine = 32, kLines = kChannels / kLine, kStages = 5;
// Floats from row to row in shared memory, of a matrix and of the state: a load of half a warp falls into all banks.
constexpr int kMapPitch = kChannels + 4, kStatePitch = kChannels + 8;
constexpr int kAloneBytes = 116 * 1024;  // of a block that is to have a multiprocessor for itself

struct Memory {
  float lines[kStages][kLine][kMapPitch];
  float state[2][kFoldRows][kStatePitch];  // before a step, and behind it
  uint32_t has_map[kMostFolds / 32];       // a bit for each step: behind a segment that forgets, the state is b
};
static_assert(sizeof(Memory) <= kAloneBytes && 2 * sizeof(Memory) <= kSharedBytes, "shared memory of a block");

// Two fp32 values, each the sum of a high and a low bf16 value but for 2^-17 of it.
struct Split {
  uint32_t high, low;
};
GDN_DEVICE Split split(float x, float y) {
  const uint32_t high = pack(__nv_bfloat16{}, x, y);
  const float2 rounded = unpack(__nv_bfloat16{}, high);
  return {high, pack(__nv_bfloat16{}, x - rounded.x, y - rounded.y)};
}

template <class Kind>
__global__ void __launch_bounds__(kThreads, 2) segment_folds_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(16) uint8_t raw[];
  Memory& sm = *reinterpret_cast<Memory*>(raw);
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
  const int64_t matrix = segment_matrix<Kind>(params, n, first, slice);
  const int64_t each = int64_t{slices_of<Kind>(params)} * (kChannels * kChannels), next = back ? -each : each;
  const float* const maps = params.cut.maps + (back ? 0 : params.segments * each) + matrix;

  int fetched = step_from(0);  // the step of the next line that is fetched
  const auto fetch = [&](int line) {
    if (fetched < steps) {
      constexpr int kLoads = kLine * kChannels / (kThreads * 4);  // of 16 bytes, a thread
      const int at = int(threadIdx.x) * 4, row = at / kChannels, column = at % kChannels;
      const float* const from = maps + fetched * next + line % kLines * (kLine * kChannels) + at;
      const uint32_t to = shared_address(&sm.lines[line % kStages][row][column]);
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
        copy_async_16(to + i * (kLine / kLoads * kMapPitch * 4), from + i * (kThreads * 4));
      if (line % kLines == kLines - 1) fetched = step_from(fetched + 1);
    }
    copy_async_commit();  // also of none, as groups are counted
  };
#pragma unroll
  for (int line = 0; line + 1 < kStages; ++line) fetch(line);

  // A thread has rows `row` and `row` + 8 of four columns. The warp multiplies its columns of even number apart from
  // those of odd number, and so two of the four are of either product.
  const int lane = threadIdx.x % 32, row = lane / 4, columns = threadIdx.x / 32 * 16;
  const int own = row * kChannels + columns + lane % 4 * 4;
  float* const state =
      (back ? params.cut.ends : starts_of<Kind>(params, n)) + matrix + part * (kFoldRows * kChannels) + own;
  const auto keep = [&](int at, int r, float4 x) {
    *reinterpret_cast<float4*>(&sm.state[at][row + 8 * r][columns + lane % 4 * 4]) = x;
  };
  int line = 0, behind = -1, now = 0;  // behind: the step whose state is in sm.state[now]
  float4 b[2];                          // of the next step with a matrix
  const auto load_b = [&](int i) {
    if (i >= steps) return;
#pragma unroll
    for (int r = 0; r < 2; ++r)
      b[r] = *reinterpret_cast<const float4*>(state + (i + 1) * next + r * (8 * kChannels));
  };
  load_b(step_from(0));
#pragma unroll 1
  for (int i = step_from(0); i < steps;) {
    float* const before = state + i * next;
    const int following = step_from(i + 1);
    float sum[2][4], low[2][4] = {};  // low: the products with a low value
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (i != behind) keep(now, r, *reinterpret_cast<const float4*>(before + r * (8 * kChannels)));
      sum[0][2 * r] = b[r].x, sum[1][2 * r] = b[r].y, sum[0][2 * r + 1] = b[r].z, sum[1][2 * r + 1] = b[r].w;
    }
    load_b(following);
#pragma unroll 1
    for (int above = 0; above < kChannels; above += kLine, ++line) {
      copy_async_wait<kStages - 2>();
      __syncthreads();  // the line and the state are there; the line before has been read
      fetch(line + kStages - 1);
      const auto& map = sm.lines[line % kStages];
#pragma unroll
      for (int k = 0; k < kLine; k += 16) {
        const int channel = k + lane % 4 * 2;
        // x[i]: the state in row `row` + i % 2 * 8, m[j][i]: the matrix in column j of two; of two channels of K, those
        // of m[j][1], x[2] and x[3] eight further on.
        Split x[4], m[2][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 pair =
              *reinterpret_cast<const float2*>(&sm.state[now][row + i % 2 * 8][above + channel + i / 2 * 8]);
          x[i] = split(pair.x, pair.y);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float2 first = *reinterpret_cast<const float2*>(&map[channel + 8 * i][columns + row * 2]);
          const float2 second = *reinterpret_cast<const float2*>(&map[channel + 8 * i + 1][columns + row * 2]);
          m[0][i] = split(first.x, second.x);
          m[1][i] = split(first.y, second.y);
        }
        const uint32_t x_high[4] = {x[0].high, x[1].high, x[2].high, x[3].high};
        const uint32_t x_low[4] = {x[0].low, x[1].low, x[2].low, x[3].low};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          mma_16816(__nv_bfloat16{}, low[j], x_low, m[j][0].high, m[j][1].high);
          mma_16816(__nv_bfloat16{}, low[j], x_high, m[j][0].low, m[j][1].low);
          mma_16816(__nv_bfloat16{}, sum[j], x_high, m[j][0].high, m[j][1].high);
        }
      }
    }
    now ^= 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto all = [&](int j, int i) { return sum[j][2 * r + i] + low[j][2 * r + i]; };
      const float4 s = {all(0, 0), all(1, 0), all(0, 1), all(1, 1)};
      *reinterpret_cast<float4*>(before + next + r * (8 * kChannels)) = s;
      keep(now, r, s);
    }
    behind = i + 1;
    i = following;
  }
}
}  // namespace

template <class Kind>
const char* run_segment_folds(const Params& params, cudaStream_t stream) {
  const ChunkForward& p = params.problem.forward;
  const int64_t blocks = int64_t{p.N} * params.slices * 2 * kBlocks;
  // The first multiprocessors that the maps leave would get two blocks each, and others none.
  const int bytes = blocks <= p.multiprocessors ? kAloneBytes : int(sizeof(Memory));
  return launch_blocks(&segment_folds_kernel<Kind>, params, blocks, kThreads, bytes, 1, true, stream);
}

template const char* run_segment_folds<Kind<__nv_bfloat16, true>>(const Params&, cudaStream_t);

}  // namespace gdn::sm90::backward
