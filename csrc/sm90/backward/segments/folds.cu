// The folds of the maps of segments/maps.cu into the states and gradients that segments start from:
// E_(j-1) = E_j M_j + b_j from the last segment to the second, and S_(j+1) = S_j M_j^T + b_j from
// the first segment to the last but one. The result replaces b. Through a part of a sequence
// (PartMaps) the gradient is folded twice: first from the part's own dht to the gradient before the
// part alone, which other parts need; then from the dht that includes what comes from other parts,
// where each result replaces b as above.
#include "sm90/backward/copies.cuh"
#include "sm90/backward/segments/map_halves.cuh"
#include "sm90/backward/segments/windows.cuh"
#include "sm90/launch_blocks.h"
#include "sm90/tile/cluster.cuh"

namespace gdn::sm90::backward {
namespace {
// A block has kFoldRows rows of V, and kCluster blocks of a slice are a cluster. A line is some
// rows of a matrix; each block copies its share of every line to all blocks of the cluster. A warp
// makes 16 columns of the product by tensor cores, and one more warp copies. Values are pairs of
// bf16 halves, and the product of both low halves is left out; all sums are in fp32. Larger
// clusters would not all fit at once where a block has a multiprocessor for itself: a cluster has
// to lie in one group of multiprocessors.
constexpr int kCluster = 2, kBlocks = kChannels / kFoldRows, kWarps = 8,
              kThreads = (kWarps + 1) * 32;
constexpr int kLineValues = 2 * kMapLine * kMapPitch, kShare = kLineValues / kCluster;
static_assert(kFoldRows == 16, "the rows of a product by tensor cores");
constexpr int kColumns = 16;  // columns of a product that a warp makes
// The number of warps that read a line. In the fold back a line has rows of the right factor M, and
// all warps read it. In the fold forward that factor is M^T, and the line has columns of it.
GDN_DEVICE constexpr int readers(bool back) { return back ? kWarps : kMapLine / kColumns; }
constexpr int kBarrier = 1;  // for the warps that make products
// Buffers of lines: of a block that has a multiprocessor for itself, and of two blocks that share
// one.
constexpr int kStagesAlone = 11, kStagesOfTwo = 4;

template <int kStages>
struct Memory {
  uint16_t lines[kStages][2][kMapLine][kMapPitch];  // high and low values
  uint16_t state[2][2][kFoldRows][kMapPitch];       // before a step, and after it
  // A bit for each step: after a segment that forgets, the state is b alone.
  uint32_t has_map[kMostFolds / 32];
  uint64_t full[kStages], empty[kStages];  // empty: counts all blocks
};
constexpr int kMultiprocessorBytes = 228 * 1024,
              kReservedBytes = 1024;  // reserved for each block
static_assert(sizeof(Memory<kStagesAlone>) <= kSharedBytes, "shared memory of a block");
static_assert(2 * (sizeof(Memory<kStagesOfTwo>) + kReservedBytes) <= kMultiprocessorBytes,
              "of two blocks");

// The first step with a matrix from i on, or `steps`.
template <int kStages>
GDN_DEVICE int step_from(const Memory<kStages>& sm, int steps, int i) {
  for (; i < steps; i = (i / 32 + 1) * 32) {
    const uint32_t left = sm.has_map[i / 32] >> (i % 32);
    if (left != 0) return i + __ffs(left) - 1;
  }
  return steps;
}

// Copies this block's share of all lines to all blocks of the cluster. One thread calls it.
template <int kStages>
GDN_DEVICE void copy_lines(Memory<kStages>& sm, const uint16_t* maps, int64_t next, int steps,
                           uint32_t rank) {
  int line = 0;
#pragma unroll 1
  for (int i = step_from(sm, steps, 0); i < steps; i = step_from(sm, steps, i + 1)) {
#pragma unroll 1
    for (int first = 0; first < kMapValues; first += kLineValues, ++line) {
      const int stage = line % kStages, share = int(rank) * kShare;
      const uint32_t bar = shared_address(&sm.full[stage]);
      if (line >= kStages) wait_for(sm.empty[stage], line / kStages - 1);
      mbarrier_expect(bar, sizeof(sm.lines[0]));
      bulk_load_to((1 << kCluster) - 1, shared_address(sm.lines[stage]) + share * 2,
                   maps + i * next + first + share, kShare * 2, bar);
    }
  }
}

// state: this thread's part of the state before the first step. A thread has rows `row` and `row` +
// 8, and columns `column`, `column` + 1, `column` + 8 and `column` + 9. carry: where the thread's
// part of the last result goes, times `factor`, in place of all results; null: nowhere.
template <bool kBack, bool kPart, int kStages>
GDN_DEVICE void fold(Memory<kStages>& sm, float* state, int64_t next, int steps, int row,
                     int column, int warp, int lane, float* carry, float factor) {
  constexpr int kDepth =
      kBack ? kMapLine : kChannels;  // rows of the right factor in the products with a line
  const auto place = [](int r, int j) { return r * (8 * kChannels) + 8 * j; };
  const auto keep = [&](int at, int r, int j, float2 x) {
    const Split halves = split(x.x, x.y);
    *reinterpret_cast<uint32_t*>(&sm.state[at][0][row + 8 * r][column + 8 * j]) = halves.high;
    *reinterpret_cast<uint32_t*>(&sm.state[at][1][row + 8 * r][column + 8 * j]) = halves.low;
  };
  // Offsets of this lane's 16-byte rows for ldmatrix, in the state and in a line.
  const uint32_t own_state = (lane % 16 * kMapPitch + lane / 16 * 8) * 2;
  const int map_row = kBack ? lane % 16 : warp * kColumns % kMapLine + lane / 16 * 8 + lane % 8;
  const int map_column = kBack ? warp * kColumns + lane / 16 * 8 : lane / 8 % 2 * 8;
  const uint32_t own_map = (map_row * kMapPitch + map_column) * 2;
  int line = kBack ? 0 : warp * kColumns / kMapLine;
  int behind = -1, now = 0;  // behind: the step after which the state is that in sm.state[now]
  float2 b[2][2];            // b of the next step with a matrix
  const auto load_b = [&](int i) {
    if (i >= steps) return;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        b[r][j] = *reinterpret_cast<const float2*>(state + (i + 1) * next + place(r, j));
  };
  load_b(step_from(sm, steps, 0));
#pragma unroll 1
  for (int i = step_from(sm, steps, 0); i < steps;) {
    float* const before = state + i * next;
    const int following = step_from(sm, steps, i + 1);
    float sum[2][4], low[2][4] = {};  // low: products with a low half
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (i != behind) keep(now, r, j, *reinterpret_cast<const float2*>(before + place(r, j)));
        sum[j][2 * r] = b[r][j].x, sum[j][2 * r + 1] = b[r][j].y;
      }
    }
    load_b(following);
    named_barrier(kBarrier, kWarps * 32);  // the state is in shared memory
#pragma unroll 1
    for (int above = 0; above < kChannels; above += kDepth) {
      const int stage = line % kStages;
      wait_for(sm.full[stage], line / kStages);
#pragma unroll
      for (int k = 0; k < kDepth; k += 16) {
        uint32_t x[2][4], m[2][4];
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          if constexpr (kBack) {
            ldmatrix_x4_trans(shared_address(sm.lines[stage][part][k]) + own_map, m[part]);
          } else {
            ldmatrix_x4(shared_address(sm.lines[stage][part]) + own_map + k * 2, m[part]);
          }
        }
#pragma unroll
        for (int part = 0; part < 2; ++part)
          ldmatrix_x4(shared_address(sm.state[now][part]) + own_state + (above + k) * 2, x[part]);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          mma_16816(__nv_bfloat16{}, low[j], x[1], m[0][2 * j], m[0][2 * j + 1]);
          mma_16816(__nv_bfloat16{}, low[j], x[0], m[1][2 * j], m[1][2 * j + 1]);
          mma_16816(__nv_bfloat16{}, sum[j], x[0], m[0][2 * j], m[0][2 * j + 1]);
        }
      }
      __syncwarp();
      // Depends on all that was read of the line.
      const uint32_t vote = vote_on(__float_as_uint(low[0][0]));
      const uint32_t bar = shared_address(&sm.empty[stage]);
      if constexpr (kWarpArrivals == 1) {
        // The first of the lanes that arrive, one for each block.
        const int first = lane_of_vote(vote) == 1 ? kCluster : 0;
        arrive_there_if(address_in(bar, lane % kCluster), lane / kCluster * kCluster == first);
      } else {
        for (int rank = 0; rank < kCluster; ++rank) arrive_there_if(address_in(bar, rank), true);
      }
      line += kBack ? 1 : kChannels / kMapLine;
    }
    now ^= 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const auto all = [&](int i) { return sum[j][2 * r + i] + low[j][2 * r + i]; };
        const float2 s = {all(0), all(1)};
        if (!kPart || carry == nullptr) {
          *reinterpret_cast<float2*>(before + next + place(r, j)) = s;
        } else if (i + 1 == steps) {
          *reinterpret_cast<float2*>(carry + place(r, j)) = {s.x * factor, s.y * factor};
        }
        keep(now, r, j, s);
      }
    }
    behind = i + 1;
    i = following;
  }
  if constexpr (kPart) {
    if (carry == nullptr || behind == steps) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float2 s = *reinterpret_cast<const float2*>(state + steps * next + place(r, j));
        *reinterpret_cast<float2*>(carry + place(r, j)) = {s.x * factor, s.y * factor};
      }
    }
  }
}

// The number of folds of a slice: only that of the gradient where the forward has left the states.
GDN_HOST_DEVICE int folds_of(const Params& params) { return has_states(params) ? 1 : 2; }

template <class Kind, bool kPart, int kStages>
__global__ void __launch_bounds__(kThreads, 2)
    segment_folds_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) uint8_t raw[];
  auto& sm = *reinterpret_cast<Memory<kStages>*>(raw);
  launch_dependents();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int ways = kPart ? 1 : folds_of(params);
  const bool back = ways == 1 || blockIdx.x / kBlocks % 2 != 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&sm.full[i], 1);
      mbarrier_init(&sm.empty[i], kCluster * readers(back) * kWarpArrivals);
    }
    mbarrier_init_fence();
  }
  cluster_sync();
  // Blocks without a step wait too: otherwise this launch could end, and the next one begin, before
  // the launch of the maps has ended.
  wait_for_prerequisites();
  const int part = blockIdx.x % kBlocks;
  const int index = blockIdx.x / (ways * kBlocks);
  const int n = divide_by_slices<Kind>(params, index), slice = index - n * slices_of<Kind>(params);
  const int last = segment_tile<Kind>(params, n, 0, slice).last;
  const int steps = kPart ? last + 1 : last - 1;
  if (steps < 1) return;
  const int first = kPart ? last : back ? last - 1 : 1;
  for (int i = threadIdx.x; i / 32 * 32 < steps; i += kThreads) {
    const int segment = back ? first - i : first + i;
    const bool has =
        i < steps && params.maps.forgotten[segment_index<Kind>(params, n, segment, slice)] == 0;
    const uint32_t all = __ballot_sync(~0u, has);
    if (lane == 0) sm.has_map[i / 32] = all;
  }
  __syncthreads();
  const int64_t slices = slices_of<Kind>(params),
                from = segment_index<Kind>(params, n, first, slice);
  const int64_t each = back ? -slices : slices;
  if (warp == kWarps) {
    if (lane == 0)
      copy_lines(sm, params.maps.values + from * kMapValues, each * kMapValues, steps,
                 cluster_rank());
    __syncwarp();
  } else {
    const int row = lane / 4, column = warp * 16 + lane % 4 * 2;
    float* const states =
        (back ? params.maps.ends : starts_of<Kind>(params, n)) + from * (kChannels * kChannels);
    float* const state = states + (part * kFoldRows + row) * kChannels + column;
    if (kPart) {
      float* const carry = params.part.carry;
      const int64_t own = int64_t{slice} * (2 * kChannels * kChannels) +
                          (part * kFoldRows + row) * kChannels + column;
      fold<true, true>(sm, state, each * (kChannels * kChannels), steps, row, column, warp, lane,
                       carry ? carry + own : nullptr, exp2_approx(-Frame<typename Kind::T>::kTop));
    } else if (back) {
      fold<true, false>(sm, state, each * (kChannels * kChannels), steps, row, column, warp, lane,
                        nullptr, 1.f);
    } else {
      fold<false, false>(sm, state, each * (kChannels * kChannels), steps, row, column, warp, lane,
                         nullptr, 1.f);
    }
  }
  cluster_sync();  // no block ends while another block copies to it or arrives at its barriers
}

// The gradient of the state after a part of a sequence, in the frame of its last chunk, at the
// place after its last segment. A block has a slice and a channel of V, a thread a channel of K.
__global__ void __launch_bounds__(kChannels)
    part_end_kernel(const __grid_constant__ Params params) {
  const ChunkBackward& problem = params.problem;
  const int slice = blockIdx.x, v = blockIdx.y, k = threadIdx.x;
  float x = 0.f;
  if (problem.dht != nullptr) {
    const float end = params.scratch.factors[(params.chunks - 1) * problem.forward.HV + slice].end;
    x = problem.dht[slice * problem.dht_h + v * problem.dht_v + k * problem.dht_k] * end;
  }
  const int64_t matrix = int64_t{params.segments - 1} * params.slices + slice;
  params.maps.ends[(matrix * kChannels + v) * kChannels + k] = x;
}

template <class Kind, bool kPart>
const char* launch_folds(const Params& params, int ways, cudaStream_t stream) {
  const ChunkForward& p = params.problem.forward;
  const int64_t blocks = int64_t{p.N} * params.slices * ways * kBlocks;
  const auto launch = [&](auto* kernel, size_t bytes) {
    return launch_blocks(kernel, params, blocks, kThreads, int(bytes), kCluster, true, stream);
  };
  // With the smaller buffers the first multiprocessors that the maps free would get two blocks
  // each, and others none.
  if (blocks <= p.multiprocessors)
    return launch(&segment_folds_kernel<Kind, kPart, kStagesAlone>, sizeof(Memory<kStagesAlone>));
  return launch(&segment_folds_kernel<Kind, kPart, kStagesOfTwo>, sizeof(Memory<kStagesOfTwo>));
}
}  // namespace

template <class Kind>
const char* run_segment_folds(const Params& params, cudaStream_t stream) {
  return launch_folds<Kind, false>(params, folds_of(params), stream);
}

template <class Kind>
const char* run_part_fold(const Params& params, cudaStream_t stream) {
  static_assert(Kind::kExact, "a slice is a value head");
  part_end_kernel<<<dim3(unsigned(params.slices), kChannels), kChannels, 0, stream>>>(params);
  if (const char* error = check(cudaGetLastError())) return error;
  return launch_folds<Kind, true>(params, 1, stream);
}

template const char* run_segment_folds<Kind<__nv_bfloat16, true>>(const Params&, cudaStream_t);
template const char* run_part_fold<Kind<__nv_bfloat16, true>>(const Params&, cudaStream_t);

}  // namespace gdn::sm90::backward
