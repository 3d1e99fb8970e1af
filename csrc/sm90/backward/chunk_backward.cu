// The launch of the backward on Hopper: its scratch memory, its segments, and its kernels in their order. dispatch.h has
// what is asked of these functions.
#include <algorithm>
#include <array>
#include <cmath>

#include "common/tensor_map.h"
#include "sm90/backward/deal.cuh"
#include "sm90/entry.h"
#include "sm90/kept.h"
#include "sm90/l2norm.cuh"

namespace gdn::sm90::backward {
namespace {
#ifndef GDN_BACKWARD_EXCHANGE
#define GDN_BACKWARD_EXCHANGE 1
#endif
#ifndef GDN_BACKWARD_MAKES
#define GDN_BACKWARD_MAKES 1
#endif
// Of both walks in segments, segment_maps.cu: chunks of a segment in every call that may be cut so; 0: none is cut; -1:
// as the host chooses.
#ifndef GDN_BACKWARD_CUT
#define GDN_BACKWARD_CUT -1
#endif
// Of a sequence, in the mean: with so many tokens q k^T lies with dq.
#ifndef GDN_BACKWARD_PAIRS_TOKENS
#define GDN_BACKWARD_PAIRS_TOKENS 4096
#endif
constexpr bool kExchanges = GDN_BACKWARD_EXCHANGE, kMakes = GDN_BACKWARD_MAKES;
constexpr int kForcedCut = GDN_BACKWARD_CUT;

// The parts of the workspace, one after the other; with a null `base` only their size.
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

// Kind::kExact.
bool is_exact(const ChunkForward& p) { return p.dtype == Dtype::kBFloat16 && p.K == kChannels && p.V == kChannels; }

int64_t slices_of(const ChunkForward& p) { return p.HV * ceil_div(p.V, kChannels); }

// The walk forward in segments of `length` chunks; 0: whole sequences.
struct Segments {
  int length;
  int64_t count, of_batch;  // at most; of a batch entry, if padded
  bool may_be_whole;        // the device takes whole sequences all the same where they take less
  bool cuts;                // the walk back goes in the same segments, segment_maps.cu
};
// What was chosen, and microseconds of both walks, less what all choices for the same sizes have in common.
struct Choice {
  Segments segments;
  double time;
};
// Microseconds of a chunk walked back, of half a slice and of a whole one whose triangles are there.
constexpr double kBack = 1.2, kBackWhole = 2.6;

// Whether the lengths of the sequences, of which there are several, are known on the device alone.
bool is_uneven(const ChunkForward& p) { return p.cu_seqlens != nullptr && p.N > 1; }

// Whether the host knows no more of several lengths than the longest, or nothing. Else all are equally long.
bool knows_no_lengths(const ChunkForward& p) { return is_uneven(p) && p.longest[0] * p.N != p.T; }

Segments in_segments(const ChunkForward& p, int length, bool cuts) {
  const int64_t of_batch = ceil_div(ceil_div(p.T, kChunk), length);
  return {length, p.cu_seqlens ? slots_of(p) / length + p.N : p.B * of_batch, of_batch, is_uneven(p), cuts};
}

// Whether there is a multiprocessor for each half of a slice, so that the walk back goes over halves.
bool has_room_for_halves(const ChunkForward& p) { return 2 * int64_t{p.N} * slices_of(p) <= p.multiprocessors; }
bool may_be_cut(const ChunkForward& p) {
  return kForcedCut != 0 && is_exact(p) && !p.batch_invariant && !is_uneven(p);
}
// Microseconds of a walk back that is not cut; 0 where no choice has a walk back that is.
double time_of_back(const ChunkForward& p) {
  return has_room_for_halves(p) ? kBack * double(ceil_div(p.T, kChunk)) : 0;
}

// Microseconds of both walks in segments of `length` chunks, of which a sequence has `of_batch`. keeps: the forward has left
// the states, and their maps and folds are left out.
double time_of_cut(const ChunkForward& p, int length, double of_batch, bool keeps) {
  // Of a chunk of the maps, of the start and end of a tile of theirs or of the walk back; of a step of the folds, of
  // which a multiprocessor has two blocks at a time; of the launches that are a cut's alone.
  constexpr double kMaps = 1.25, kShort = 3, kFold = 1.4, kLaunches = 12;
  constexpr double kMapBytes = 0.026, kBackBytes = 0.027;  // of a chunk and slice, by the bandwidth of memory
  const double slices = double(p.N) * double(slices_of(p)), each = p.multiprocessors, chunks = of_batch * length;
  const double fold_blocks = slices * (kChannels / kFoldRows) * (keeps ? 1 : 2);
  const auto walk = [&](double tiles, double chunk, double tile) {
    return std::ceil(tiles / each) * (length * chunk + tile);
  };
  const double jobs = (of_batch - 1) * (keeps ? 1 : 2) + of_batch - 2;  // of a slice
  const double bytes = slices * chunks * kMapBytes * (keeps ? 2. / 3 : 1);
  const double maps = std::max(walk(slices * jobs, kMaps, kShort), bytes);
  const double folds = std::ceil(fold_blocks / (2 * each)) * (of_batch - 2) * kFold;
  const double back = std::max(walk(slices * of_batch, kBackWhole, kShort), slices * chunks * kBackBytes);
  return kLaunches + maps + folds + back + walk(slices * of_batch, kGradients, kTile);
}

// The cut of both walks where it takes clearly less than `others`, microseconds of the walk forward alone in segments:
// it changes bits, and so is none of a call that may not be cut, or of whose lengths the host knows no more than a sum.
Choice cut_of(const ChunkForward& p, const Choice& others, double others_time) {
  constexpr int kLengths[] = {64, 48, 32, 24, 16, 8};
  constexpr double kMargin = 0.92, kLeast = 10;  // of all, and microseconds: what has to be won
  const int64_t chunks = ceil_div(p.T, kChunk);
  if (!may_be_cut(p)) return others;
  if (kForcedCut > 0) return chunks > kForcedCut ? Choice{in_segments(p, kForcedCut, true), 0} : others;
  if (!has_room_for_halves(p)) return others;  // whole slices are walked back
  double least = kMargin * (others_time + time_of_back(p)) - kLeast;
  Choice best = others;
  for (const int length : kLengths) {
    const Segments cut = in_segments(p, length, true);
    if (cut.of_batch < 3 || cut.of_batch > kMostFolds) continue;
    const double time = time_of_cut(p, length, double(cut.of_batch), false);
    if (time >= least) continue;
    least = time;
    best = {cut, time};
  }
  return best;
}

// Whether tiles of so many sequences or segments are dealt to the blocks of a walk, of which there are as many as
// multiprocessors. Sequences of padded calls are equally long.
bool is_dealt(const ChunkForward& p, int64_t units, int64_t tiles_of_unit) {
  return is_uneven(p) && units <= kMostUnits && slots_of(p) < kMostUnitChunks &&
         p.multiprocessors <= kMostBins && units * tiles_of_unit > p.multiprocessors;
}
int64_t links_of(const ChunkForward& p, int64_t units, int64_t tiles_of_unit) {
  return p.multiprocessors + units * tiles_of_unit;
}
// Halves of slices, where multiprocessors would be idle else. Of many uneven sequences they may be idle too, when all
// but the longest one's tiles have been walked: there the device chooses, unless the longest that there can be is too
// short. `makes`: over slices the walk makes the triangles.
BackShape back_shape_of(const ChunkForward& p, bool makes) {
  if (has_room_for_halves(p)) return BackShape::kHalves;
  const double chunks = double(ceil_div(p.T, kChunk)), told = double(ceil_div(p.longest[0], kChunk));
  const double share = chunks * double(slices_of(p)) / p.multiprocessors;
  const bool may_pay = halves_pay(float(told > 0 ? told : chunks), float(share), makes);
  return may_pay && is_dealt(p, p.N, 2 * slices_of(p)) ? BackShape::kByLengths : BackShape::kSlices;
}

// Microseconds of the walk forward, whole and in segments, and of what may come with segments.
class Walks {
 public:
  explicit Walks(const ChunkForward& p) : p_(p), slices_(double(slices_of(p))), each_(p.multiprocessors) {
    const double chunks = double(ceil_div(p.T, kChunk)), told = std::min(double(ceil_div(p.longest[0], kChunk)), chunks);
    guess_ = knows_no_lengths(p);
    share_ = double(p.B) * chunks * slices_ / each_;
    longest_ = told > 0 ? told : guess_ ? chunks / 2 : chunks;
  }
  double longest() const { return longest_; }
  double whole() const {
    return guess_ ? std::max(share_, longest_) * kGradients + kTile : walk(double(p_.N) * slices_, longest_);
  }
  // In segments of `length` chunks, without what finds the states that they start from.
  double in(int length) const {
    return guess_ ? time_of_segments(float(share_), float(length))
                  : walk(double(p_.N) * std::ceil(longest_ / length) * slices_, length);
  }
  // What step 4 takes then.
  double states(int length) const {
    const double walked = guess_ ? std::max(longest_ - length, 0.) : (std::ceil(longest_ / length) - 1) * length;
    const auto time = [&](bool beside) {
      return double(time_of_states(float(share_ * walked / longest_), float(walked), beside));
    };
    const bool beside = states_go_beside(p_, slices_of(p_));
    // Of lengths that the host does not know, short sequences may leave multiprocessors free, and may not.
    return guess_ ? (time(true) + time(beside)) / 2 : time(beside);
  }
  // What step 2 takes, if without it the walk back would make the triangles; else 0.
  double triangles() const { return back_shape_of(p_, true) == BackShape::kSlices ? share_ * kTriangles : 0; }
  // Calls consider() with each length that segments may have.
  template <class Consider>
  void lengths(const Consider& consider) const {
    constexpr int kLengths[] = {256, 192, 128, 96, 64, 32, 16, 8, 4}, kMostSegments = 128, kLeastChunks = 4;
    if (guess_) {
      for (const int length : kLengths) consider(length);
    } else {  // equally long ones
      const int64_t chunks = int64_t(longest_);
      for (int number = 2; number <= kMostSegments && ceil_div(chunks, number) >= kLeastChunks; ++number)
        consider(int(ceil_div(chunks, number)));
    }
  }

 private:
  double walk(double tiles, double length) const { return std::ceil(tiles / each_) * (length * kGradients + kTile); }

  const ChunkForward& p_;
  // knows_no_lengths: segments are chosen for the longest sequence, or for one that has half of all, and the device, which
  // knows all, may take whole sequences all the same.
  bool guess_;
  double slices_, each_;
  double share_;    // what every multiprocessor has of all chunks
  double longest_;  // chunks
};

// The choice where the forward has left no states.
Choice find_segments(const ChunkForward& p) {
  constexpr int kMemory = 3;  // a start is twice as large as a chunk's dS: of many short sequences there are no more
  const Walks walks(p);
  Segments best = {0, 0, 0, false, false};
  double least = walks.whole(), least_states = 0;
  walks.lengths([&](int length) {
    const Segments segments = in_segments(p, length, false);
    if (segments.count * kMemory > slots_of(p)) return;
    const double states = walks.states(length), time = states + walks.in(length);
    if (time >= least) return;
    least = time;
    least_states = states;
    best = segments;
  });
  const double triangles = best.length > 0 ? walks.triangles() : 0;
  return cut_of(p, {best, least + time_of_back(p) + triangles}, least - least_states);
}

// The choice where the forward has left states, `length` chunks apart.
Choice segments_from_states(const ChunkForward& p, int length) {
  const Choice others = {in_segments(p, length, false), Walks(p).in(length) + time_of_back(p)};
  const Segments segments = in_segments(p, length, true);
  if (!may_be_cut(p) || segments.of_batch > kMostFolds) return others;
  const Choice cut = {segments, time_of_cut(p, length, double(segments.of_batch), true)};
  if (kForcedCut > 0) return segments.of_batch > 1 ? cut : others;
  return has_room_for_halves(p) && segments.of_batch >= 3 && cut.time < others.time ? cut : others;
}

// How many chunks apart the forward is to leave states; 0: it leaves none.
int find_kept(const ChunkForward& p) {
  constexpr int kLeastChunks = 32;  // 32 bytes a token and value head
  // Microseconds that a forward takes longer: for each state of a value head that it leaves, and at all.
  constexpr double kState = 0.044, kCall = 10;
  // Of a batch-invariant call the bits of a sequence may not depend on what its batch makes the forward leave.
  if (!is_exact(p) || p.batch_invariant) return 0;
  const Walks walks(p);
  double least = find_segments(p).time - kCall;
  int best = 0;
  const auto consider = [&](int length) {
    if (length < kLeastChunks || length >= walks.longest()) return;
    const double states = double(p.B) * double(p.T) / (kChunk * length) * p.HV;
    const double time = segments_from_states(p, length).time + kState * states;
    if (time >= least) return;
    least = time;
    best = length;
  };
  walks.lengths(consider);
  for (const int length : {64, 48, 32}) consider(length);  // where both walks are cut
  return best;
}

// What a call depends on when it is planned, and how many tokens apart the forward has left states, or 0.
using Sizes = std::array<int64_t, 13>;
Sizes sizes_of(const ChunkForward& p, int every) {
  return {p.B, p.T, p.H, p.HV, p.K, p.V, p.N, int64_t(p.dtype), p.cu_seqlens != nullptr, p.batch_invariant,
          p.multiprocessors, p.longest[0], every};
}
// What was found is kept: a search takes up to 20 us, and a call asks twice.
Segments segments_of(const ChunkForward& p, int every) {
  thread_local Kept<Sizes, Segments, 64> known;
  return known.find(sizes_of(p, every), [&] {
    return (every > 0 ? segments_from_states(p, every / kChunk) : find_segments(p)).segments;
  });
}
int kept_of(const ChunkForward& p) {
  thread_local Kept<Sizes, int, 64> known;
  return known.find(sizes_of(p, 0), [&] { return find_kept(p); });
}

// Params::pairs_with_dq: 128 bytes a token and value head less, but of many short sequences step 5 takes 1 to 4 percent
// longer, as blocks that are at different chunks read rows that lie far apart.
bool keeps_pairs_with_dq(const ChunkForward& p) {
  return is_exact(p) && p.B * p.T >= int64_t{p.N} * GDN_BACKWARD_PAIRS_TOKENS;
}
// Tiles of q k^T in scratch memory: pairs_at.
int64_t pairs_of(const ChunkForward& p) {
  if (!keeps_pairs_with_dq(p)) return slots_of(p) * p.H;
  return p.cu_seqlens ? int64_t{p.N} * p.H : 0;
}

// Blocks that make the triangles beside the walk back over halves, on the multiprocessors that this walk and that of the
// state leave; 0: the triangles are made before. A walk back that has half of the multiprocessors to its end gains
// nothing: it reads as much from L2 as all can, and takes longer with others beside it. Of uneven sequences the longest
// alone has blocks to the end.
int triangle_blocks_of(const ChunkForward& p, const Segments& segments, bool keeps) {
  const int64_t halves = 2 * int64_t{p.N} * slices_of(p);
  const int64_t left = p.multiprocessors - (segments.length > 0 && !keeps ? 2 : 1) * halves;
  const bool pays = 3 * left >= p.multiprocessors && (knows_no_lengths(p) || 4 * halves <= p.multiprocessors);
  return pays && !segments.cuts && has_room_for_halves(p) ? int(left) : 0;
}

// The scratch memory of `params`; returns its bytes. keeps: the forward has left the states that segments start from.
int64_t lay_out(const ChunkForward& p, const Segments& segments, bool keeps, void* base, Params& params) {
  Scratch& x = params.scratch;
  Cut& cut = params.cut;
  BackBlocks& back = params.back;
  const int64_t matrix = slices_of(p) * kChannels * kChannels, matrices = segments.count * matrix;  // of all slices
  const int64_t later = segments.length == 0 || keeps ? 0  // segments that start from what step 4 or a fold has found
                        : p.cu_seqlens                ? slots_of(p) / segments.length
                                                      : p.B * (segments.of_batch - 1);
  const int64_t slots = slots_of(p), blocks = slots * p.HV, slice_blocks = slots * slices_of(p), pair = kChunk * kChunk;
  Parts parts(base);
  if (p.use_qk_l2norm) {
    uint16_t *q, *k;
    parts.take(q, p.B * p.T * p.H * p.K);
    parts.take(k, p.B * p.T * p.H * p.K);
    x.q = q, x.k = k;
  }
  parts.take(x.gates, blocks);
  parts.take(x.last, blocks);
  parts.take(x.G, blocks);
  parts.take(x.t, blocks * pair);
  parts.take(x.qk, pairs_of(p) * pair);
  params.triangle_blocks = triangle_blocks_of(p, segments, keeps);
  x.made = nullptr;
  if (params.triangle_blocks > 0) parts.take(x.made, slots * p.H);
  x.dx = nullptr;
  if (p.dtype == Dtype::kFloat16) parts.take(x.dx, slice_blocks * kChunk * kChannels);
  parts.take(x.ds, slice_blocks * kChannels * kChannels);
  parts.take(x.parts, slice_blocks * kParts * kChunk);
  parts.take(x.across, slice_blocks * 2);
  parts.take(x.gate_sums, slots * 2 * p.HV);
  parts.take(x.starts, later * matrix);
  parts.take(x.segment, 1);
  x.back_links = x.forward_links = x.order = nullptr;
  back.shape = segments.cuts ? BackShape::kSlices : back_shape_of(p, segments.length == 0 || keeps);
  const int64_t back_tiles = back.shape == BackShape::kByLengths ? 2 * slices_of(p) : slices_of(p);
  if (is_dealt(p, p.N, back_tiles)) parts.take(x.back_links, links_of(p, p.N, back_tiles));
  parts.take(back.over_halves, 1);
  const int64_t units = segments.length > 0 ? segments.count : p.N;
  if (is_dealt(p, units, slices_of(p))) {
    parts.take(x.forward_links, links_of(p, units, slices_of(p)));
    if (segments.length > 0 && !keeps) parts.take(x.order, p.N);
  }
  cut = {};
  if (segments.cuts) {
    cut.cuts = true;
    parts.take(cut.ends, matrices);
    parts.take(cut.maps, segments.count * slices_of(p) * kMapValues);
    parts.take(cut.forgotten, segments.count * slices_of(p));
    parts.take(cut.wrong, 1);
  }
  return parts.used();
}

const char* unsupported(const ChunkForward& p) {
  if (p.K % 8 || p.V % 8 || p.K > kChannels) return "the Hopper backward needs K and V in multiples of 8, K up to 128";
  if (p.dtype != Dtype::kBFloat16 && p.dtype != Dtype::kFloat16)
    return "the Hopper backward needs q, k, v in bfloat16 or float16";
  if (p.T >= int64_t{1} << 31) return "the Hopper kernel needs T below 2^31";
  if (slots_of(p) * slices_of(p) >= int64_t{1} << 28) return "the Hopper backward needs fewer chunks and value heads";
  return nullptr;
}

// Tiles of `rows` x `channels` of 16-bit values, one behind the other.
const char* tiles_map(CUtensorMap* map, Dtype dtype, const void* data, int64_t count, int64_t rows, int channels) {
  return make_map(map, dtype, {data, rows * channels, channels, channels}, count, rows, 1, channels);
}

// [B, T, heads, channels] as an output has it.
Rows whole(const ChunkForward& p, void* data, int heads, int channels) {
  const int64_t row = int64_t{heads} * channels;
  return {data, p.T * row, row, channels};
}

// With more than two value heads a sum over what is left would follow, and both together take longer. Of kinds that are not
// exact the warps that add would need more registers than there are.
Sums sums_of(const ChunkForward& p) {
  const int64_t slices = slices_of(p) / p.H;
  if (slices == 1) return Sums::kNone;
  return kExchanges && is_exact(p) && slices == 2 && p.multiprocessors > 1 ? Sums::kCluster : Sums::kLater;
}

template <class Kind>
const char* normalize(const ChunkForward& p, const Scratch& scratch, Rows& q, Rows& k, cudaStream_t stream) {
  constexpr int kLanes = kChannels / 8;
  const int64_t rows = p.B * p.T * p.H;
  const dim3 grid(unsigned(ceil_div(rows * kLanes, kNormThreads)), 2);
  l2norm_kernel<typename Kind::T, kLanes, Kind::kExact><<<grid, kNormThreads, 0, stream>>>(
      q, k, static_cast<uint4*>(scratch.q), static_cast<uint4*>(scratch.k), rows, p.T, p.H, p.K);
  q = whole(p, scratch.q, p.H, p.K);
  k = whole(p, scratch.k, p.H, p.K);
  return check(cudaGetLastError());
}

template <class Kind>
const char* run(const ChunkBackward& problem, cudaStream_t stream) {
  const ChunkForward& p = problem.forward;
  Params params = {};
  params.problem = problem;
  const bool keeps = problem.states != nullptr;
  const Segments segments = segments_of(p, keeps ? problem.every : 0);
  lay_out(p, segments, keeps, p.workspace, params);
  params.slots = int(slots_of(p));
  params.slots_of_batch = int(ceil_div(p.T, kChunk));
  params.segment = segments.length;
  params.segments = int(segments.count);
  params.may_be_whole = segments.may_be_whole;
  params.segments_of_batch = int(segments.of_batch);
  params.parts = int(ceil_div(p.V, kChannels));
  params.slices = int(slices_of(p));
  params.makes = kMakes && !params.cut.cuts && params.back.shape != BackShape::kHalves;
  params.pairs_with_dq = keeps_pairs_with_dq(p);
  params.sums = sums_of(p);
  params.heads = Divisor::of(p.HV);
  params.group = Divisor::of(p.HV / p.H);
  params.by_slices = Divisor::of(params.slices);
  params.back.by_halves = Divisor::of(2 * params.slices);
  params.by_parts = Divisor::of(params.parts);
  const Scratch& x = params.scratch;
  Rows q = p.q, k = p.k;
  if (p.use_qk_l2norm)
    if (const char* error = normalize<Kind>(p, x, q, k, stream)) return error;
  const int64_t pairs = std::max<int64_t>(pairs_of(p), 1);  // a map has a tile
  const int64_t slice_blocks = int64_t{params.slots} * params.slices;
  const char* errors[] = {
      make_map(&params.q, p.dtype, q, p.B, p.T, p.H, p.K),
      make_map(&params.k, p.dtype, k, p.B, p.T, p.H, p.K),
      make_map(&params.v, p.dtype, p.v, p.B, p.T, p.HV, p.V),
      make_map(&params.dO, p.dtype, problem.dO, p.B, p.T, p.HV, p.V),
      make_map(&params.dq, p.dtype, whole(p, problem.dq, p.H, p.K), p.B, p.T, p.H, p.K),
      make_map(&params.dk, p.dtype, whole(p, problem.dk, p.H, p.K), p.B, p.T, p.H, p.K),
      make_map(&params.dv, p.dtype, whole(p, problem.dv, p.HV, p.V), p.B, p.T, p.HV, p.V),
      tiles_map(&params.qk, p.dtype, x.qk, pairs, kChunk, kChunk),
      kReadsDv<typename Kind::T> ? nullptr : tiles_map(&params.dx, p.dtype, x.dx, slice_blocks, kChunk, kChannels),
  };
  for (const char* error : errors)
    if (error) return error;
  if (const char* error = run_frames<Kind>(params, stream)) return error;
  if (const char* error = run_deals(params, stream)) return error;
  if (!params.makes || (params.segment > 0 && !keeps) || params.back.shape == BackShape::kByLengths)
    if (const char* error = run_triangles<Kind>(params, stream)) return error;
  if constexpr (kCuts<Kind>) {
    if (params.cut.cuts) {
      if (const char* error = run_segment_maps<Kind>(params, stream)) return error;
      if (const char* error = run_segment_folds<Kind>(params, stream)) return error;
    }
  }
  if (const char* error = run_walk_back<Kind>(params, stream)) return error;
  if (params.segment > 0 && !params.cut.cuts && !keeps)
    if (const char* error = run_walk_states<Kind>(params, stream)) return error;
  if (const char* error = run_walk_forward<Kind>(params, stream)) return error;
  if constexpr (kCuts<Kind>) {
    if (params.cut.cuts) {  // what a segment that forgets has started from may be wrong, windows.cuh
      Params again = params;
      again.again = params.cut.wrong;
      again.cut.cuts = false;
      again.segment = 0;
      again.makes = true;  // P of a steep chunk lay where dS is now
      if (const char* error = run_walk_back<Kind>(again, stream)) return error;
      if (const char* error = run_walk_forward<Kind>(again, stream)) return error;
    }
  }
  return run_sums<Kind>(params, stream);
}
}  // namespace

int chunk_backward_every(const ChunkForward& p) { return unsupported(p) ? 0 : kept_of(p) * kChunk; }

size_t chunk_backward_workspace(const ChunkForward& p, int every) {
  Params params = {};
  return unsupported(p) ? 0 : size_t(lay_out(p, segments_of(p, every), every > 0, nullptr, params));
}

const char* chunk_backward(const ChunkBackward& problem, cudaStream_t stream) {
  const ChunkForward& p = problem.forward;
  if (const char* reason = unsupported(p)) return reason;
  if (problem.states != nullptr && !is_exact(p))
    return "the Hopper backward takes states that the forward has left only with K = V = 128 in bfloat16";
  if (p.dtype == Dtype::kFloat16) return run<Kind<__half, false>>(problem, stream);
  if (is_exact(p)) return run<Kind<__nv_bfloat16, true>>(problem, stream);
  return run<Kind<__nv_bfloat16, false>>(problem, stream);
}

}  // namespace gdn::sm90::backward
