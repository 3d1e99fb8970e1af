// Definitions that the kernels of the backward share: the places of chunks, and scratch memory.
//
// The *chunk index* of a chunk depends on its sequence and place alone. A *slice* is 128 channels
// of V of a value head; its number is hv parts + part. A chunk of a slice has a block of scratch
// memory, number chunk_index slices + slice. Tiles in scratch memory are whole: rows past a
// sequence's end are zero, and so are channels past K and V.
#pragma once
#include "params.h"
#include "sm90/backward/factors.cuh"
#include "sm90/plan/backward/sizes.h"
#include "sm90/tile/block.cuh"
#include "sm90/tile/chunk.h"
#include "sm90/tile/frame.cuh"
#include "sm90/tile/gates.cuh"
#include "sm90/tile/sequences.cuh"

namespace gdn::sm90::backward {

// The heads that a kernel is compiled for. kExact: K = V = 128, and a slice is a value head.
// Otherwise K is any multiple of 8 up to 128, and V any multiple of 8.
template <class Type, bool kExact_>
struct Kind {
  using T = Type;
  static constexpr bool kExact = kExact_;
};
// Whether a kind has the kernels that cut both walks.
template <class Kind>
constexpr bool kCuts = Kind::kExact;
constexpr int kParts = 8;  // rows of Scratch::parts

// Parts of the gradients of a token's gate and beta, by chunk and slice.
enum GradientPart {
  kPairsPart,                   // row sums minus column sums of M
  kQueryPart,                   // q (do S)
  kReadPart,                    // k (dx S), by halves of K
  kBehindPart = kReadPart + 2,  // k (u dS), by halves of K
  kBetaPart = kBehindPart + 2,  // row sums of the decayed k k^T o dx u^T
  kValuePart,                   // dx v
};
static_assert(kValuePart + 1 == kParts);

struct Scratch {
  void* q;  // [B, T, H, K], with use_qk_l2norm: q and k over their norms
  void* k;
  ChunkFactors* factors;  // [chunks, HV]
  float* last;            // [chunks, HV]: the chunk's log2 decay
  float* G;               // [chunks, HV]: after the previous chunk, frame.cuh
  uint16_t* t;  // [chunks, HV, 64, 64]: strict-lower (I + A)^-1, in the layout of shared memory
  uint16_t*
      qk;  // [chunks, H, 64, 64]: lower q k^T; with Params::pairs_with_dq [N, H, 64, 64], pairs_at
  int* triangles_ready;  // [chunks, H]: 0 until the triangles are stored, where triangles.cu runs
                         // while the walk back does; else null
  uint16_t* dx;          // [chunks, slices, 64, 128]; null with kReadsDv
  // [chunks, slices, 2 halves of V, 2 of K, 64, 64]: the gradient of the state after the chunk, in
  // tiles with the layout of shared memory; with Sums::kLater dk of the slice replaces the first
  // half of V, and dq the other half. Before that, the first tile of each half of V has the decayed
  // lower q k^T of a steep chunk, for the walk back over that half.
  uint16_t* ds;
  float* parts;      // [chunks, slices, kParts, 64]
  float* across;     // [chunks, slices, 2]: <S, dS> by halves of V
  float* gate_sums;  // [chunks, 2, HV]
  float* starts;  // [-, slices, 128 of V, 128 of K]: the states that segments start from, but those
                  // of first segments, starts_of
  int* segment;   // the choice of the device: chunks of a segment, or kWholeSequences
  // Lists of the tiles of the walks' blocks, deal.cuh; null: tiles are not dealt out.
  int* back_links;     // [blocks + tiles]
  int* forward_links;  // [blocks + tiles]
  int* order;  // [N]: sequences, the longest first, where dealt segments start from states of
               // walk_states.cu
};

// Values of SegmentMaps::forgotten other than 0. A segment forgets the state and the gradient of
// the state. The last segment of a sequence, and a segment whose state the forward has left,
// forgets the gradient alone.
constexpr int kForgetsState = 1, kForgetsGradient = 2;
// Scratch memory of both walks of few long sequences in segments of Params::segment chunks,
// segments/maps.cu.
struct SegmentMaps {
  bool exist;  // both walks are cut
  // [segments, slices, 128 of V, 128 of K]: the gradient of the state after each segment but the
  // last
  float* ends;
  // [segments, slices, kMapValues]: the map M [128 of K, 128 of K] of the gradient of the state,
  // map_halves.cuh; its transpose is the map of the state.
  uint16_t* values;
  int* forgotten;  // [segments, slices]: not 0 where a segment forgets its start at its end,
                   // windows.cuh
  int* wrong;  // not 0 where a segment has started from another state: whole sequences are walked
               // again
};

// The maps and folds of a part of a sequence (Part) have this and SegmentMaps. Every segment has
// a map of the gradient, and SegmentMaps::ends has two matrices more: before the first segment, and
// after the last one.
struct PartMaps {
  const float* growth;  // [chunks, HV], tile/growth.cuh; null: no segment forgets
  float* carry;         // Part::carry
};

struct BackBlocks {
  BackShape shape;
  int* over_halves;   // the choice of the device by the lengths, deal.cuh; not 0: halves
  Divisor by_halves;  // twice the slices
};

// How dq and dk of a key head are summed over its slices. kLater: the walk forward stores them in
// the memory of the chunk's dS, and sums.cu adds them. kCluster: the blocks of two value heads add
// them in global memory, walk_forward_memory.cuh. kNone: there is one slice, and no sum.
enum class Sums { kLater, kCluster, kNone };

struct Params {
  CUtensorMap q, k, v, dO, dv, qk, dx;
  CUtensorMap dq, dk;  // for the stores of the walk forward; dq: also pairs_at
  ChunkBackward problem;
  Scratch scratch;
  int chunks, chunks_of_batch;  // of all; of a batch entry, if padded
  // The walk forward has segments where whole sequences would leave multiprocessors idle. The
  // forward has left the states that they start from, ChunkBackward::states, or a walk of the state
  // alone finds these states, which changes no bit.
  int segment;        // chunks; 0: whole sequences
  bool may_be_whole;  // the device may use whole sequences instead, where they take less time
  int segments, segments_of_batch;  // of all; of a batch entry, if padded
  int tiles;             // of the grid: (sequence or segment, slice), or halves of slices
  const int* links;      // of the grid: one of the lists of Scratch, or null
  bool makes_triangles;  // a walk back over slices makes T and q k^T of whole sequences
  bool pairs_with_dq;    // of exact kinds, pairs_at
  int triangle_blocks;   // blocks that make triangles while the walk back runs; 0: triangles are
                         // made before
  Sums sums;
  int parts, slices;     // of V, and HV times those
  Divisor heads, group;  // HV, and value heads of a key head
  Divisor by_slices, by_parts;
  SegmentMaps maps;
  const int* again;  // SegmentMaps::wrong, for walks over whole sequences that run only if it is
                     // not 0; else null
  BackBlocks back;
  PartMaps part;
};

GDN_DEVICE bool walks_back_over_halves(const Params& params) {
  return params.back.shape == BackShape::kHalves ||
         (params.back.shape == BackShape::kByLengths && *params.back.over_halves != 0);
}
// Whether the forward has left the states that segments of the walk forward start from.
GDN_HOST_DEVICE bool has_states(const Params& params) { return params.problem.states != nullptr; }
// Whether a walk back over slices makes the triangles; otherwise a separate kernel makes them,
// because another kernel needs them earlier.
GDN_DEVICE bool makes_triangles_walking(const Params& params) {
  return params.makes_triangles &&
         (params.segment == 0 || has_states(params) || *params.scratch.segment == kWholeSequences);
}

// Whether a kernel deals out the tiles of a walk.
GDN_HOST_DEVICE bool are_dealt(const Params& params) {
  return params.scratch.back_links != nullptr || params.scratch.forward_links != nullptr;
}

GDN_DEVICE int first_chunk(const Params& params, int n) {
  const ChunkForward& p = params.problem.forward;
  return p.cu_seqlens ? int(sequence_bound(p, n) / kChunk) + n : n * params.chunks_of_batch;
}

// The place of q k^T of a chunk and key head in a tensor map. With Params::pairs_with_dq it is in
// the first 64 channels of the chunk's dq, which is written after the last read of the chunk's q
// k^T. The last chunk of a packed sequence has a tile in scratch memory instead: TMA would write
// into the rows of the next sequence.
struct MapPlace {
  const CUtensorMap* map;
  int column, row, head, batch;
};
template <class Kind>
GDN_DEVICE MapPlace pairs_at(const Params& params, int chunk_index, int h, int n, int batch,
                             int row, int rows) {
  const ChunkForward& p = params.problem.forward;
  if constexpr (!Kind::kExact) return {&params.qk, 0, 0, 0, chunk_index * p.H + h};
  if (!params.pairs_with_dq) return {&params.qk, 0, 0, 0, chunk_index * p.H + h};
  if (p.cu_seqlens != nullptr && rows < kChunk) return {&params.qk, 0, 0, 0, n * p.H + h};
  return {&params.dq, 0, row, h, batch};
}
GDN_DEVICE void tma_load(uint32_t to, const MapPlace& from, uint32_t bar) {
  gdn::tma_load(to, from.map, bar, from.column, from.row, from.head, from.batch);
}
GDN_DEVICE void tma_store(const MapPlace& to, uint32_t from) {
  gdn::tma_store(to.map, from, to.column, to.row, to.head, to.batch);
}
using gdn::tma_load;
using gdn::tma_store;

// The place of a chunk.
struct Place {
  int n, batch;
  int first;  // row of the chunk in the batch entry
  int rows;   // of the sequence from there on; 0 or less: there is no chunk
};

// The last n for which key(n) <= x; key(0) <= x and key ascends.
template <class Key>
GDN_DEVICE int last_not_above(int count, int64_t x, const Key& key) {
  int low = 0, high = count;  // key(low) <= x < key(high)
#pragma unroll 1
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (key(middle) <= x ? low : high) = middle;
  }
  return low;
}

GDN_DEVICE Place place_of(const Params& params, int chunk_index) {
  const ChunkForward& p = params.problem.forward;
  Place x;
  if (p.cu_seqlens == nullptr) {
    x.n = x.batch = chunk_index / params.chunks_of_batch;
    x.first = (chunk_index - x.n * params.chunks_of_batch) * kChunk;
    x.rows = int(p.T) - x.first;
  } else {
    x.n = last_not_above(p.N, chunk_index, [&](int n) { return int64_t{first_chunk(params, n)}; });
    x.batch = 0;
    const int before = (chunk_index - first_chunk(params, x.n)) * kChunk;
    x.first = int(sequence_bound(p, x.n)) + before;
    x.rows = sequence_length(p, x.n) - before;
  }
  return x;
}

// One sequence and slice, or half of a slice.
template <class Kind>
struct BackTile {
  int n, batch, part, first, length,
      chunk_index;     // part: the half of the slice, or the segment of the sequence
  int slice, exact_h;  // exact_h: h, which only exact kinds store
  GDN_DEVICE int chunks() const { return length > 0 ? (length + kChunk - 1) / kChunk : 0; }
  // The heads of the slice and its first channel of V. They are not stored: single warps have no
  // registers for them.
  GDN_DEVICE int hv(const Params& params) const {
    return Kind::kExact ? slice : params.by_parts.divide(slice);
  }
  GDN_DEVICE int h(const Params& params) const {
    return Kind::kExact ? exact_h : params.group.divide(hv(params));
  }
  GDN_DEVICE int v(const Params& params) const {
    return Kind::kExact ? 0 : (slice - hv(params) * params.parts) * kChannels;
  }
};

// 16-byte lines of a row of K or V.
template <class Kind>
GDN_DEVICE int lines_of(int channels) {
  return Kind::kExact ? kChannels / 8 : channels / 8;
}

template <class Kind>
GDN_DEVICE int slices_of(const Params& params) {
  return Kind::kExact ? params.problem.forward.HV : params.slices;
}
// The sequence or segment of a tile that is numbered by it and its slice.
template <class Kind>
GDN_DEVICE int divide_by_slices(const Params& params, int index) {
  return Kind::kExact ? params.heads.divide(index) : params.by_slices.divide(index);
}

template <class Kind, int kTileParts>
GDN_DEVICE BackTile<Kind> back_tile(const Params& params, int index) {
  const ChunkForward& p = params.problem.forward;
  BackTile<Kind> x;
  x.part = index % kTileParts;
  index /= kTileParts;
  x.n = divide_by_slices<Kind>(params, index);
  x.slice = index - x.n * slices_of<Kind>(params);
  if constexpr (Kind::kExact) x.exact_h = params.group.divide(x.slice);
  x.batch = p.cu_seqlens ? 0 : x.n;
  x.first = p.cu_seqlens ? int(sequence_bound(p, x.n)) : 0;
  x.length = sequence_length(p, x.n);
  x.chunk_index = first_chunk(params, x.n);
  return x;
}

// The number of a sequence's first segment. A segment that does not exist has a number too, and no
// length.
GDN_DEVICE int first_segment(const Params& params, int n) {
  if (!params.problem.forward.cu_seqlens) return n * params.segments_of_batch;
  return first_chunk(params, n) / *params.scratch.segment + n;
}
// The sequence of a segment with that number.
GDN_DEVICE int sequence_of_segment(const Params& params, int segment) {
  const ChunkForward& p = params.problem.forward;
  if (!p.cu_seqlens) return segment / params.segments_of_batch;
  return last_not_above(p.N, segment, [&](int n) { return int64_t{first_segment(params, n)}; });
}
template <class Kind>
GDN_DEVICE BackTile<Kind> forward_tile(const Params& params, int index) {
  if (params.segment == 0) return back_tile<Kind, 1>(params, index);
  const int segment = divide_by_slices<Kind>(params, index), slices = slices_of<Kind>(params);
  const int n = sequence_of_segment(params, segment);
  BackTile<Kind> x = back_tile<Kind, 1>(params, n * slices + index - segment * slices);
  x.part = segment - first_segment(params, n);
  const int chunks = *params.scratch.segment;
  if (chunks == kWholeSequences) {
    if (x.part > 0) x.length = 0;
    return x;
  }
  const int rows = chunks * kChunk;
  x.first += x.part * rows;
  x.chunk_index += x.part * chunks;
  x.length = min(x.length - x.part * rows, rows);
  return x;
}

GDN_DEVICE int chunks_of_sequence(const ChunkForward& p, int n) {
  return (max(sequence_length(p, n), 0) + kChunk - 1) / kChunk;
}
// The last segment of a sequence in segments of `segment` chunks; 0 for a sequence without chunks.
GDN_DEVICE int last_segment(int chunks, int segment) { return max(chunks - 1, 0) / segment; }

// A segment of a sequence where both walks are cut, and a slice.
template <class Kind>
struct SegmentTile : BackTile<Kind> {
  int segment,
      last;  // this segment and the last one of the sequence; 0 for a sequence without chunks
};
template <class Kind>
GDN_DEVICE SegmentTile<Kind> segment_tile(const Params& params, int n, int segment, int slice) {
  SegmentTile<Kind> x;
  static_cast<BackTile<Kind>&>(x) = back_tile<Kind, 1>(params, n * slices_of<Kind>(params) + slice);
  const int rows = params.segment * kChunk;
  x.segment = segment;
  x.last = last_segment(x.chunks(), params.segment);
  x.first += segment * rows;
  x.chunk_index += segment * params.segment;
  x.length = min(x.length - segment * rows, rows);
  return x;
}
// A tile of a grid of all segments of every sequence, where both walks are cut. A segment that does
// not exist comes after the last one of its sequence.
template <class Kind>
GDN_DEVICE SegmentTile<Kind> cut_tile(const Params& params, int index) {
  const int segment = divide_by_slices<Kind>(params, index),
            n = sequence_of_segment(params, segment);
  return segment_tile<Kind>(params, n, segment - first_segment(params, n),
                            index - segment * slices_of<Kind>(params));
}
// The number of a segment and slice in arrays of Scratch and SegmentMaps with an entry or a matrix
// [128, 128] for each.
template <class Kind>
GDN_DEVICE int64_t segment_index(const Params& params, int n, int segment, int slice) {
  return int64_t{first_segment(params, n) + segment} * slices_of<Kind>(params) + slice;
}

// The base of Scratch::starts for segment_index of a later segment of sequence n: the array has no
// matrices of first segments.
template <class Kind>
GDN_DEVICE float* starts_of(const Params& params, int n) {
  return params.scratch.starts -
         (n + 1) * int64_t{slices_of<Kind>(params)} * (kChannels * kChannels);
}

// The place of T of a chunk and value head, and of one half of V in a slice's block of dS, Scratch.
GDN_DEVICE uint16_t* t_at(const Params& params, int of_head) {
  return params.scratch.t + int64_t{of_head} * (kChunk * kChunk);
}
GDN_DEVICE uint16_t* ds_at(const Params& params, int block, int half) {
  return params.scratch.ds + (int64_t{block} * 2 + half) * (kChannels / 2 * kChannels);
}

// A map in scratch memory has lines of kMapLine rows, and rows of kMapPitch values: after an
// unchanged copy to shared memory ldmatrix reads a line without bank conflicts.
constexpr int kMapLine = 32, kMapPitch = kChannels + 8, kMapValues = 2 * kChannels * kMapPitch;

// The launches of the steps, one file for each step.
template <class Kind>
const char* run_frames(const Params&, cudaStream_t);
const char* run_deals(const Params&, cudaStream_t);
template <class Kind>
const char* run_triangles(const Params&, cudaStream_t);
template <class Kind, bool kPart>
const char* run_segment_maps(Params&, cudaStream_t);
template <class Kind>
const char* run_segment_folds(const Params&, cudaStream_t);
// The fold of the gradient through a part of a sequence: from problem.dht to PartMaps::carry if
// that is not null, else into SegmentMaps::ends.
template <class Kind>
const char* run_part_fold(const Params&, cudaStream_t);
template <class Kind>
const char* run_walk_back(Params&, cudaStream_t);
template <class Kind>
const char* run_walk_states(Params&, cudaStream_t);
template <class Kind>
const char* run_walk_forward(Params&, cudaStream_t);
template <class Kind>
const char* run_sums(const Params&, cudaStream_t);

}  // namespace gdn::sm90::backward
