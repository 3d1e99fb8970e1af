// The launch of the backward on Hopper: its scratch memory, and its kernels in their order.
// dispatch.h has the contracts of these functions.
#include <algorithm>

#include "common/tensor_map.h"
#include "sm90/backward/layout.cuh"
#include "sm90/entry.h"
#include "sm90/launch_blocks.h"
#include "sm90/plan/backward/plan.h"
#include "sm90/tile/growth.cuh"
#include "sm90/tile/l2norm.cuh"

namespace gdn::sm90::backward {
namespace {
// The mean sequence length, in tokens, from which q k^T is stored in the memory of dq.
constexpr int64_t kPairsTokens = 4096;

// Allocates the parts of the workspace, one after the other; a null `base` only counts bytes.
class Parts {
 public:
  explicit Parts(void* base) : base_(static_cast<char*>(base)) {}
  template <class X>
  void take(X*& to, int64_t count) {
    to = reinterpret_cast<X*>(base_ + used_);
    used_ += ceil_div(count * int64_t{sizeof(X)}, 256) * 256;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

// Whether q k^T is stored in the memory of dq, Params::pairs_with_dq. It saves 128 bytes for each
// token and value head. With many short sequences step 5 would take 1 to 4 percent longer: blocks
// at different chunks would read rows that are far apart.
bool keeps_pairs_with_dq(const ChunkForward& p) {
  return is_exact(p) && p.B * p.T >= p.N * kPairsTokens;
}
// The number of tiles of q k^T in scratch memory, pairs_at.
int64_t pairs_of(const ChunkForward& p) {
  if (!keeps_pairs_with_dq(p)) return most_chunks_of(p) * p.H;
  return p.cu_seqlens ? int64_t{p.N} * p.H : 0;
}

// Which kernels a call launches: all, or those of one of the two calls of a part of a sequence.
enum class Stage { kAll, kPartMaps, kPartWalks };

// Lays out the scratch memory of `params`, and returns its bytes. has_states: the forward has left
// the states that segments start from. is_part: of a part of a sequence, PartMaps.
int64_t lay_out(const ChunkForward& p, const SegmentPlan& segments, bool has_states, bool is_part,
                void* base, Params& params) {
  Scratch& x = params.scratch;
  SegmentMaps& maps = params.maps;
  BackBlocks& back = params.back;
  const int64_t matrix = slices_of(p) * kChannels * kChannels,
                matrices = segments.count * matrix;  // of all slices
  // Segments that start from a state of step 4 or of a fold.
  const int64_t later = segments.length == 0 || has_states ? 0
                        : p.cu_seqlens                     ? most_chunks_of(p) / segments.length
                                                           : p.B * (segments.of_batch - 1);
  const int64_t chunks = most_chunks_of(p), blocks = chunks * p.HV,
                slice_blocks = chunks * slices_of(p), pair = kChunk * kChunk;
  Parts parts(base);
  if (p.use_qk_l2norm) {
    uint16_t *q, *k;
    parts.take(q, p.B * p.T * p.H * p.K);
    parts.take(k, p.B * p.T * p.H * p.K);
    x.q = q, x.k = k;
  }
  parts.take(x.factors, blocks);
  parts.take(x.last, blocks);
  parts.take(x.G, blocks);
  parts.take(x.t, blocks * pair);
  parts.take(x.qk, pairs_of(p) * pair);
  params.triangle_blocks = triangle_blocks_of(p, segments, has_states);
  x.triangles_ready = nullptr;
  if (params.triangle_blocks > 0) parts.take(x.triangles_ready, chunks * p.H);
  x.dx = nullptr;
  if (p.dtype == Dtype::kFloat16) parts.take(x.dx, slice_blocks * kChunk * kChannels);
  parts.take(x.ds, slice_blocks * kChannels * kChannels);
  parts.take(x.parts, slice_blocks * kParts * kChunk);
  parts.take(x.across, slice_blocks * 2);
  parts.take(x.gate_sums, chunks * 2 * p.HV);
  parts.take(x.starts, later * matrix);
  parts.take(x.segment, 1);
  x.back_links = x.forward_links = x.order = nullptr;
  back.shape = segments.both_walks ? BackShape::kSlices
                                   : back_shape_of(p, segments.length == 0 || has_states);
  const int64_t back_tiles = back.shape == BackShape::kByLengths ? 2 * slices_of(p) : slices_of(p);
  const int64_t back_units = segments.both_walks ? segments.count : p.N;
  if (is_dealt(p, back_units, back_tiles))
    parts.take(x.back_links, links_of(p, back_units, back_tiles));
  parts.take(back.over_halves, 1);
  const int64_t units = segments.length > 0 ? segments.count : p.N;
  if (is_dealt(p, units, slices_of(p))) {
    parts.take(x.forward_links, links_of(p, units, slices_of(p)));
    if (segments.length > 0 && !has_states && !segments.both_walks) parts.take(x.order, p.N);
  }
  maps = {};
  if (segments.both_walks) {
    maps.exist = true;
    parts.take(maps.ends, matrices + (is_part ? matrix : 0));
    if (is_part) maps.ends += matrix;
    parts.take(maps.values, segments.count * slices_of(p) * kMapValues);
    parts.take(maps.forgotten, segments.count * slices_of(p));
    parts.take(maps.wrong, 1);
  }
  params.part = {};
  if (is_part && p.use_qk_l2norm && !p.batch_invariant) {
    float* growth;
    parts.take(growth, growth_floats(p));
    params.part.growth = growth;
  }
  return parts.used();
}

const char* unsupported(const ChunkForward& p) {
  if (p.K % 8 || p.V % 8 || p.K > kChannels)
    return "the Hopper backward needs K and V in multiples of 8, K up to 128";
  if (p.dtype != Dtype::kBFloat16 && p.dtype != Dtype::kFloat16)
    return "the Hopper backward needs q, k, v in bfloat16 or float16";
  if (p.T >= kTokenLimit) return "the Hopper kernel needs T below 2^30";
  if (p.B * p.T >= int64_t{1} << 31) return "the Hopper backward needs B * T below 2^31";
  if (most_chunks_of(p) * slices_of(p) >= int64_t{1} << 28)
    return "the Hopper backward needs fewer chunks and value heads";
  return nullptr;
}

// The tensor map of consecutive tiles of `rows` x `channels` 16-bit values.
const char* tiles_map(CUtensorMap* map, Dtype dtype, const void* data, int64_t count, int64_t rows,
                      int channels) {
  return make_map(map, dtype, {data, rows * channels, channels, channels}, count, rows, 1,
                  channels);
}

// The strides of a contiguous [B, T, heads, channels].
Rows whole(const ChunkForward& p, void* data, int heads, int channels) {
  const int64_t row = int64_t{heads} * channels;
  return {data, p.T * row, row, channels};
}

// A cluster adds two slices. With more slices a second sum would follow, and both sums together
// take longer. Kinds that are not exact have too few registers for the warps that add.
Sums sums_of(const ChunkForward& p) {
  const int64_t slices = slices_of(p) / p.H;
  if (slices == 1) return Sums::kNone;
  return is_exact(p) && slices == 2 && p.multiprocessors > 1 ? Sums::kCluster : Sums::kLater;
}

template <class Kind>
const char* normalize(const ChunkForward& p, const Scratch& scratch, const Rows& q, const Rows& k,
                      cudaStream_t stream) {
  constexpr int kLanes = kChannels / 8;
  const int64_t rows = p.B * p.T * p.H;
  const dim3 grid(unsigned(ceil_div(rows * kLanes, kNormThreads)), 2);
  l2norm_kernel<typename Kind::T, kLanes, Kind::kExact><<<grid, kNormThreads, 0, stream>>>(
      q, k, static_cast<uint4*>(scratch.q), static_cast<uint4*>(scratch.k), rows, p.T, p.H, p.K);
  return check(cudaGetLastError());
}

// The kernels of the first call of a part, after those that all calls begin with.
template <class Kind>
const char* run_part_maps(Params& params, cudaStream_t stream) {
  if (params.part.growth != nullptr) {
    float* const growth = const_cast<float*>(params.part.growth);
    if (const char* error = check(make_growth(params.problem.forward, growth, stream)))
      return error;
  }
  if (const char* error = run_segment_maps<Kind, true>(params, stream)) return error;
  return params.part.carry == nullptr ? nullptr : run_part_fold<Kind>(params, stream);
}

// part: of a part of a sequence; else null.
template <class Kind>
const char* run(const ChunkBackward& problem, const Part* part, Stage stage, cudaStream_t stream) {
  const ChunkForward& p = problem.forward;
  Params params = {};
  params.problem = problem;
  const bool has_states = problem.states != nullptr;
  const SegmentPlan segments = part ? in_segments(p, part->chunks, true)
                                    : segments_of(p, has_states ? problem.checkpoint_interval : 0);
  lay_out(p, segments, has_states, part != nullptr, p.workspace, params);
  if (stage == Stage::kPartMaps) params.part.carry = part->carry;
  params.chunks = int(most_chunks_of(p));
  params.chunks_of_batch = int(ceil_div(p.T, kChunk));
  params.segment = segments.length;
  params.segments = int(segments.count);
  params.may_be_whole = segments.may_be_whole;
  params.segments_of_batch = int(segments.of_batch);
  params.parts = int(ceil_div(p.V, kChannels));
  params.slices = int(slices_of(p));
  params.makes_triangles = !params.maps.exist && params.back.shape != BackShape::kHalves;
  params.pairs_with_dq = keeps_pairs_with_dq(p);
  params.sums = sums_of(p);
  params.heads = Divisor::of(p.HV);
  params.group = Divisor::of(p.HV / p.H);
  params.by_slices = Divisor::of(params.slices);
  params.back.by_halves = Divisor::of(2 * params.slices);
  params.by_parts = Divisor::of(params.parts);
  const Scratch& x = params.scratch;
  Rows q = p.q, k = p.k;
  if (p.use_qk_l2norm) {
    if (stage != Stage::kPartWalks)
      if (const char* error = normalize<Kind>(p, x, q, k, stream)) return error;
    q = whole(p, x.q, p.H, p.K);
    k = whole(p, x.k, p.H, p.K);
  }
  const int64_t pairs = std::max<int64_t>(pairs_of(p), 1);  // a tensor map needs a tile
  const int64_t slice_blocks = int64_t{params.chunks} * params.slices;
  const char* errors[] = {
      make_map(&params.q, p.dtype, q, p.B, p.T, p.H, p.K),
      make_map(&params.k, p.dtype, k, p.B, p.T, p.H, p.K),
      make_map(&params.v, p.dtype, p.v, p.B, p.T, p.HV, p.V),
      make_map(&params.dO, p.dtype, problem.dO, p.B, p.T, p.HV, p.V),
      make_map(&params.dq, p.dtype, whole(p, problem.dq, p.H, p.K), p.B, p.T, p.H, p.K),
      make_map(&params.dk, p.dtype, whole(p, problem.dk, p.H, p.K), p.B, p.T, p.H, p.K),
      make_map(&params.dv, p.dtype, whole(p, problem.dv, p.HV, p.V), p.B, p.T, p.HV, p.V),
      tiles_map(&params.qk, p.dtype, x.qk, pairs, kChunk, kChunk),
      kReadsDv<typename Kind::T>
          ? nullptr
          : tiles_map(&params.dx, p.dtype, x.dx, slice_blocks, kChunk, kChannels),
  };
  for (const char* error : errors)
    if (error) return error;
  if (stage != Stage::kPartWalks) {
    if (const char* error = run_frames<Kind>(params, stream)) return error;
    if (const char* error = run_deals(params, stream)) return error;
    if (!params.makes_triangles || (params.segment > 0 && !has_states) ||
        params.back.shape == BackShape::kByLengths)
      if (const char* error = run_triangles<Kind>(params, stream)) return error;
  }
  if constexpr (kCuts<Kind>) {
    if (stage == Stage::kPartMaps) return run_part_maps<Kind>(params, stream);
    if (stage == Stage::kPartWalks) {
      if (const char* error = run_part_fold<Kind>(params, stream)) return error;
    } else if (params.maps.exist) {
      if (const char* error = run_segment_maps<Kind, false>(params, stream)) return error;
      if (const char* error = run_segment_folds<Kind>(params, stream)) return error;
    }
  }
  if (const char* error = run_walk_back<Kind>(params, stream)) return error;
  if (params.segment > 0 && !params.maps.exist && !has_states)
    if (const char* error = run_walk_states<Kind>(params, stream)) return error;
  if (const char* error = run_walk_forward<Kind>(params, stream)) return error;
  if constexpr (kCuts<Kind>) {
    if (params.maps.exist) {  // the start of a segment that forgets may be wrong, windows.cuh
      Params again = params;
      again.again = params.maps.wrong;
      again.maps.exist = false;
      again.segment = 0;
      again.makes_triangles = true;  // dS has replaced the P of steep chunks
      // The lists of the first walks are of segments.
      again.scratch.back_links = again.scratch.forward_links = nullptr;
      if (const char* error = run_walk_back<Kind>(again, stream)) return error;
      if (const char* error = run_walk_forward<Kind>(again, stream)) return error;
    }
  }
  return run_sums<Kind>(params, stream);
}
}  // namespace

int chunk_backward_checkpoint_interval(const ChunkForward& p) {
  return unsupported(p) ? 0 : checkpoint_interval_of(p) * kChunk;
}

size_t chunk_backward_workspace(const ChunkForward& p, int checkpoint_interval) {
  Params params = {};
  return unsupported(p) ? 0
                        : size_t(lay_out(p, segments_of(p, checkpoint_interval),
                                         checkpoint_interval > 0, false, nullptr, params));
}

const char* chunk_backward(const ChunkBackward& problem, cudaStream_t stream) {
  const ChunkForward& p = problem.forward;
  if (const char* reason = unsupported(p)) return reason;
  if (problem.states != nullptr && !is_exact(p))
    return "the Hopper backward takes states that the forward has left only with K = V = 128 in "
           "bfloat16";
  constexpr Stage kAll = Stage::kAll;
  if (p.dtype == Dtype::kFloat16) return run<Kind<__half, false>>(problem, nullptr, kAll, stream);
  if (is_exact(p)) return run<Kind<__nv_bfloat16, true>>(problem, nullptr, kAll, stream);
  return run<Kind<__nv_bfloat16, false>>(problem, nullptr, kAll, stream);
}

size_t part_backward_workspace(const ChunkForward& p) {
  if (unsupported(p) || !is_exact(p)) return 0;
  Params params = {};
  return size_t(lay_out(p, in_segments(p, part_segment(p), true), true, true, nullptr, params));
}

namespace {
// Runs one call of a part. Its segments start from the states of the forward, Part::starts.
const char* run_part(ChunkBackward problem, const Part& part, Stage stage, cudaStream_t stream) {
  const ChunkForward& p = problem.forward;
  if (const char* reason = unsupported(p)) return reason;
  if (!is_exact(p)) return "the Hopper backward of a part needs K = V = 128 in bfloat16";
  problem.states = part.starts + int64_t{p.HV} * kChannels * kChannels;
  problem.checkpoint_interval = part.chunks * kChunk;
  return run<Kind<__nv_bfloat16, true>>(problem, &part, stage, stream);
}
}  // namespace

const char* part_backward_maps(const ChunkBackward& problem, const Part& part,
                               cudaStream_t stream) {
  return run_part(problem, part, Stage::kPartMaps, stream);
}

const char* part_backward_walks(const ChunkBackward& problem, const Part& part,
                                cudaStream_t stream) {
  return run_part(problem, part, Stage::kPartWalks, stream);
}

}  // namespace gdn::sm90::backward
