// What the kernels of the backward share: where chunks lie, what they leave for each other, and the
// factors of a chunk's tokens (frame.cuh has the symbols).
//
// A chunk has a *slot*, a number that follows from its sequence and place alone. A *slice* is 128 channels of V of a
// value head; its number is hv parts + part. A chunk of a slice has a block of scratch memory, at slot slices + slice.
// Tiles in scratch memory are whole: their rows past a sequence's end are zero, and so are channels past K and V.
#pragma once
#include "params.h"
#include "sm90/plan/backward/sizes.h"
#include "sm90/tile/block.cuh"
#include "sm90/tile/chunk.h"
#include "sm90/tile/frame.cuh"
#include "sm90/tile/gates.cuh"
#include "sm90/tile/sequences.cuh"

namespace gdn::sm90::backward {

// What a kernel is compiled for. kExact: K = V = 128, so that a slice is a value head. Else K is any multiple of 8 up
// to 128, and V any multiple of 8.
template <class Type, bool kExact_>
struct Kind {
  using T = Type;
  static constexpr bool kExact = kExact_;
};
// Which kinds have the kernels that cut both walks.
template <class Kind>
constexpr bool kCuts = Kind::kExact;
constexpr int kParts = 8;       // rows of Scratch::parts

// The walk forward needs dx. A row of dv is a row of dx times beta 2^-e, so that it may take dv, and divide what it makes
// of each row. In fp16 a row of dv may lie below the normal numbers where one of dx does not: there dx is stored as well.
template <class T>
constexpr bool kReadsDv = Frame<T>::kSteepUnits > 0;
// Where |beta| is below kLeastBeta, a row of dv would be 0, or lose digits that the row of dx has. The walk back stores the
// row of dx in the memory of dv there, and sums.cu replaces that row by the one of dv.
constexpr float kLeastBeta = 0x1p-60f;
GDN_DEVICE bool is_beta_small(float beta) { return fabsf(beta) < kLeastBeta; }

// Of a chunk and value head, made once for all kernels.
struct Gates {
  float4 x[kChunk / 2];  // of tokens 2 i, 2 i + 1: (c0, c1, f0, f1) in x = c v - f (k S): beta 2^-e, beta 2^d
  float read[kChunk];    // scale 2^e: do in the frame
  float start[kChunk];   // scale 2^(d + e): what q S has in o
  float beta[kChunk];
  float c[kChunk];         // 2^-e
  float dv[kChunk];        // rows of dx times this go to dv: beta 2^-e; with kReadsDv 1 where beta is small
  int16_t power[kChunk];   // d
  float pre, post, end;    // as in GateVectors
  int steep;               // D, frame.cuh, which is below 0 there; 0: the chunk is mild
};
static_assert(sizeof(Gates) % 16 == 0, "copied in lines of 16 bytes");

// A part of a token's gradients of its gate and beta, by chunk and slice.
enum Part {
  kPairsPart,   // row sums less column sums of M
  kQueryPart,   // q (do S)
  kReadPart,    // k (dx S), by halves of K
  kBehindPart = kReadPart + 2,  // k (u dS), by halves of K
  kBetaPart = kBehindPart + 2,  // row sums of the decayed k k^T o dx u^T
  kValuePart,                   // dx v
};
static_assert(kValuePart + 1 == kParts);

struct Scratch {
  void* q;          // [B, T, H, K], with the norm in the kernel: q and k over their norms
  void* k;
  Gates* gates;     // [slots, HV]
  float* last;      // [slots, HV]: the chunk's log2 decay
  float* G;         // [slots, HV]: of the state behind the chunk before, frame.cuh
  uint16_t* t;      // [slots, HV, 64, 64]: strict-lower (I + A)^-1, as it lies in shared memory
  uint16_t* qk;     // [slots, H, 64, 64]: lower q k^T; with Params::pairs_with_dq [N, H, 64, 64], pairs_at
  int* made;        // [slots, H]: 0 until what triangles.cu makes is there, if it is made beside the walk back; else null
  uint16_t* dx;     // [slots, slices, 64, 128]; null with kReadsDv
  // [slots, slices, 2 halves of V, 2 of K, 64, 64]: the gradient of the state behind the chunk, in tiles as they lie in shared
  // memory; with Sums::kLater dk of the slice replaces the first half of V, and dq the other one. Before, where a chunk is
  // steep, its lower q k^T, decayed, in the first tile of each half of V: who walks back over a half reads it there.
  uint16_t* ds;
  float* parts;     // [slots, slices, kParts, 64]
  float* across;    // [slots, slices, 2]: <S, dS> by halves of V
  float* gate_sums; // [slots, 2, HV]
  float* starts;    // [-, slices, 128 of V, 128 of K]: the state that each segment but a first starts from, starts_of
  int* segment;     // chunks of a segment, or kWholeSequences: what the device chose
  // Lists of the tiles of the walks' blocks, deal.cuh; null: not dealt.
  int* back_links;     // [blocks + tiles]
  int* forward_links;  // [blocks + tiles]
  int* order;          // [N]: sequences, the longest first, where segments of dealt walks start from walk_states.cu
};

// What Cut::forgotten has where it is not 0: a segment but the last forgets the state and the gradient of the state. The last
// one, and each whose state the forward has left, forgets the gradient alone.
constexpr int kForgetsState = 1, kForgetsGradient = 2;
// Both walks of few long sequences in segments of Params::segment chunks, segments/maps.cu.
struct Cut {
  bool cuts;
  // [segments, slices, 128 of V, 128 of K]: the gradient of the state behind each segment but the last
  float* ends;
  // [segments, slices, kMapValues]: what a segment does to the gradient of the state, M, [128 of K, 128 of K],
  // map_halves.cuh; the transpose of M is what it does to the state.
  uint16_t* maps;
  int* forgotten;  // [segments, slices]: not 0 where what a segment starts from is forgotten at its end, windows.cuh
  int* wrong;      // not 0 where a segment has started from something else: all is walked again, whole
};

struct BackBlocks {
  BackShape shape;
  int* over_halves;   // where the device chooses by the lengths, deal.cuh: not 0: halves
  Divisor by_halves;  // twice the slices
};

// How dq and dk of a key head follow from those of its slices. kLater: the walk forward stores them in the memory of the
// chunk's dS, and sums.cu adds them. kCluster: two value heads, whose blocks add them in global memory, walk_forward_memory.cuh. kNone:
// there is one slice, and nothing is added.
enum class Sums { kLater, kCluster, kNone };

struct Params {
  CUtensorMap q, k, v, dO, dv, qk, dx;
  CUtensorMap dq, dk;  // where the walk forward stores them; dq: pairs_at
  ChunkBackward problem;
  Scratch scratch;
  int slots, slots_of_batch;  // of all; of a batch entry, if padded
  // The walk forward goes in segments of so many chunks where whole sequences would leave multiprocessors idle. What they
  // start from the forward has left, ChunkBackward::states, or a walk of the state alone finds it, which changes no bit.
  int segment;                      // chunks; 0: whole sequences
  bool may_be_whole;                // the device takes whole sequences all the same where they take less
  int segments, segments_of_batch;  // of all; of a batch entry, if padded
  int tiles;                  // of the grid: (sequence or segment, slice), or halves of slices
  const int* links;           // of the grid: one of those of Scratch, or null
  bool makes;                 // over slices the walk back makes T of whole sequences and q k^T
  bool pairs_with_dq;         // of exact kinds, pairs_at
  int triangle_blocks;        // that make triangles beside the walk back; 0: they are made before
  Sums sums;
  int parts, slices;          // of V, and HV times those
  Divisor heads, group;       // HV, and value heads of a key head
  Divisor by_slices, by_parts;
  Cut cut;
  const int* again;  // Cut::wrong, of a walk over whole sequences that is made only if that is not 0; else null
  BackBlocks back;
};

// Whether tokens of a steep chunk may matter at its end and have d > D. Where not, what such a token gives to the state
// is at most 2^-kSteepUnits of its u, and is added as it is.
template <class T>
constexpr bool kDecaysToEnd = Frame<T>::kSteepUnits == 0;

// 2^e for a whole number e <= 127; 0 below the normal numbers.
GDN_DEVICE float power_of_two_float(int e) { return __int_as_float(max(e + 127, 0) << 23); }
// 2^(D - d) of tokens 2 i and 2 i + 1 of a steep chunk.
GDN_DEVICE float2 end_factors(const Gates& gates, int i) {
  const short2 d = reinterpret_cast<const short2*>(gates.power)[i];
  return make_float2(power_of_two_float(gates.steep - d.x), power_of_two_float(gates.steep - d.y));
}

// The factor from a row that the walk forward reads, of dv or of dx, to the row of dx.
template <class T>
GDN_DEVICE float of_dx(const Gates& gates, int row) {
  return kReadsDv<T> ? __fdividef(1.f, gates.dv[row]) : 1.f;
}

GDN_DEVICE bool walks_back_over_halves(const Params& params) {
  return params.back.shape == BackShape::kHalves ||
         (params.back.shape == BackShape::kByLengths && *params.back.over_halves != 0);
}
// Whether the forward has left the states that segments of the walk forward start from.
GDN_HOST_DEVICE bool has_states(const Params& params) { return params.problem.states != nullptr; }
// Whether the walk back over slices makes the triangles, as no kernel needs them before, or a kernel of their own.
GDN_DEVICE bool makes_triangles_walking(const Params& params) {
  return params.makes && (params.segment == 0 || has_states(params) || *params.scratch.segment == kWholeSequences);
}

// Whether a kernel deals the tiles of a walk.
GDN_HOST_DEVICE bool are_dealt(const Params& params) {
  return params.scratch.back_links != nullptr || params.scratch.forward_links != nullptr;
}

GDN_DEVICE int first_slot(const Params& params, int n) {
  const ChunkForward& p = params.problem.forward;
  return p.cu_seqlens ? int(sequence_bound(p, n) / kChunk) + n : n * params.slots_of_batch;
}

// Where q k^T of a chunk and key head lies, as tensor maps have it. With Params::pairs_with_dq it lies in the first 64
// channels of the chunk's dq, which is written when no one reads q k^T of the chunk any more. There TMA would write the next
// sequence's rows behind a packed sequence's last ones: such a chunk has a tile in scratch memory.
struct MapPlace {
  const CUtensorMap* map;
  int column, row, head, batch;
};
template <class Kind>
GDN_DEVICE MapPlace pairs_at(const Params& params, int slot, int h, int n, int batch, int row, int rows) {
  const ChunkForward& p = params.problem.forward;
  if constexpr (!Kind::kExact) return {&params.qk, 0, 0, 0, slot * p.H + h};
  if (!params.pairs_with_dq) return {&params.qk, 0, 0, 0, slot * p.H + h};
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

// Where a chunk lies.
struct Place {
  int n, batch;
  int first;  // row of the chunk in the batch entry
  int rows;   // of the sequence, from there on; 0 or less: no chunk
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

GDN_DEVICE Place place_of(const Params& params, int slot) {
  const ChunkForward& p = params.problem.forward;
  Place x;
  if (p.cu_seqlens == nullptr) {
    x.n = x.batch = slot / params.slots_of_batch;
    x.first = (slot - x.n * params.slots_of_batch) * kChunk;
    x.rows = int(p.T) - x.first;
  } else {
    x.n = last_not_above(p.N, slot, [&](int n) { return int64_t{first_slot(params, n)}; });
    x.batch = 0;
    const int before = (slot - first_slot(params, x.n)) * kChunk;
    x.first = int(sequence_bound(p, x.n)) + before;
    x.rows = sequence_length(p, x.n) - before;
  }
  return x;
}

// One sequence and slice, or half of a slice.
template <class Kind>
struct BackTile {
  int n, batch, part, first, length, slot;  // part: half of the slice, or part of the sequence
  int slice, exact_h;                       // exact_h: h, which only exact kinds keep
  GDN_DEVICE int chunks() const { return length > 0 ? (length + kChunk - 1) / kChunk : 0; }
  // The slice's heads and its first channel of V. Not kept, as single warps have no registers for them.
  GDN_DEVICE int hv(const Params& params) const { return Kind::kExact ? slice : params.by_parts.divide(slice); }
  GDN_DEVICE int h(const Params& params) const { return Kind::kExact ? exact_h : params.group.divide(hv(params)); }
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
// The sequence, or segment, of what is numbered by it and its slice.
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
  x.slot = first_slot(params, x.n);
  return x;
}

// Of a segment's tile, in the order of first_segment; one that does not exist has no length.
GDN_DEVICE int first_segment(const Params& params, int n) {
  if (!params.problem.forward.cu_seqlens) return n * params.segments_of_batch;
  return first_slot(params, n) / *params.scratch.segment + n;
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
  x.slot += x.part * chunks;
  x.length = min(x.length - x.part * rows, rows);
  return x;
}

GDN_DEVICE int chunks_of_sequence(const ChunkForward& p, int n) {
  return (max(sequence_length(p, n), 0) + kChunk - 1) / kChunk;
}
// Of a sequence in segments of `segment` chunks, of which one without chunks has the first.
GDN_DEVICE int last_segment(int chunks, int segment) { return max(chunks - 1, 0) / segment; }

// A segment of a sequence where both walks are cut, and a slice.
template <class Kind>
struct SegmentTile : BackTile<Kind> {
  int segment, last;  // of the sequence's segments: this one, and the last; without chunks the sequence has the first
};
template <class Kind>
GDN_DEVICE SegmentTile<Kind> segment_tile(const Params& params, int n, int segment, int slice) {
  SegmentTile<Kind> x;
  static_cast<BackTile<Kind>&>(x) = back_tile<Kind, 1>(params, n * slices_of<Kind>(params) + slice);
  const int rows = params.segment * kChunk;
  x.segment = segment;
  x.last = last_segment(x.chunks(), params.segment);
  x.first += segment * rows;
  x.slot += segment * params.segment;
  x.length = min(x.length - segment * rows, rows);
  return x;
}
// The tile of a grid that has all segments of every sequence, where both walks are cut. One that does not exist lies behind
// the last of its sequence.
template <class Kind>
GDN_DEVICE SegmentTile<Kind> cut_tile(const Params& params, int index) {
  const int segment = divide_by_slices<Kind>(params, index), n = sequence_of_segment(params, segment);
  return segment_tile<Kind>(params, n, segment - first_segment(params, n), index - segment * slices_of<Kind>(params));
}
// The number of a segment and slice in the arrays of Scratch and Cut that have an entry or a matrix [128, 128] for each.
template <class Kind>
GDN_DEVICE int64_t segment_index(const Params& params, int n, int segment, int slice) {
  return int64_t{first_segment(params, n) + segment} * slices_of<Kind>(params) + slice;
}

// Scratch::starts, less the matrices of the first segments up to that of sequence n, which it has not: to be taken with
// segment_index of a later segment.
template <class Kind>
GDN_DEVICE float* starts_of(const Params& params, int n) {
  return params.scratch.starts - (n + 1) * int64_t{slices_of<Kind>(params)} * (kChannels * kChannels);
}

// Of the `count` chunks of a key head that begin at `slot` and lie `step` slots apart, returns how many have their
// triangles without a gap from the first one on; the first one is waited for. All lanes of a warp call it: the loads of 32
// words take as long as the load of one word, which with the fence takes as long as a chunk of the walk.
GDN_DEVICE int wait_until_made(const Params& params, int slot, int step, int count, int h) {
  const int* const made = params.scratch.made;
  if (made == nullptr) return count;
  const int lane = threadIdx.x % 32;
  uint32_t there;
  do {
    const int* const of_chunk = made + (slot + lane * step) * params.problem.forward.H + h;
    there = __ballot_sync(~0u, lane >= count || load_published(of_chunk) != 0);
  } while ((there & 1) == 0);
  fence_async_proxy_of_all();
  return there == ~0u ? 32 : __ffs(int(~there)) - 1;
}

GDN_DEVICE void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(bar)
      : "memory");
}

// Copies bytes out of shared memory, as they lie there.
GDN_DEVICE void bulk_store(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}

// Where T of a chunk and value head lies, and half of V of a slice's block of dS, Scratch.
GDN_DEVICE uint16_t* t_at(const Params& params, int of_head) {
  return params.scratch.t + int64_t{of_head} * (kChunk * kChunk);
}
GDN_DEVICE uint16_t* ds_at(const Params& params, int block, int half) {
  return params.scratch.ds + (int64_t{block} * 2 + half) * (kChannels / 2 * kChannels);
}

// bulk_load to the same place of every block of the cluster whose bit is set in `blocks`, and to the same barrier there.
GDN_DEVICE void bulk_load_to(uint32_t blocks, uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(bar), "h"(uint16_t(blocks))
      : "memory");
}

// Tiles of kTiles * 64 columns of a chunk's rows, by a whole warp; `bytes` more come by what `also` issues. What lies
// past the sequence's end belongs to others, and may be NaN: it is zeroed before the tiles are given out. The first
// lane alone knows when: `aside` is a barrier of this warp.
template <int kTiles, class Also>
GDN_DEVICE void load_rows(const CUtensorMap& map, uint8_t (*to)[kTileBytes], uint64_t& full, uint64_t& aside,
                          uint32_t& aside_phase, int column, int row, int head, int batch, int rows, int bytes,
                          const Also& also) {
  const bool lead = threadIdx.x % 32 == 0, whole = rows >= kChunk;
  const uint32_t bar = shared_address(whole ? &full : &aside);
  if (lead) {
    mbarrier_expect(bar, kTiles * kTileBytes + bytes);
    for (int i = 0; i < kTiles; ++i) tma_load(shared_address(to[i]), &map, bar, column + 64 * i, row, head, batch);
    also(bar);
  }
  __syncwarp();
  if (whole) {
    if constexpr (kWarpArrivals == 32) mbarrier_arrive_if(bar, !lead);  // the first lane arrived by mbarrier_expect
    return;
  }
  mbarrier_wait(bar, aside_phase);
  aside_phase ^= 1;
#pragma unroll 1
  for (int i = 0; i < kTiles; ++i)
#pragma unroll 1
    for (int line = rows * 8 + threadIdx.x % 32; line < kChunk * 8; line += 32)
      reinterpret_cast<uint4*>(to[i])[line] = make_uint4(0, 0, 0, 0);
  fence_async_proxy();
  __syncwarp();
  arrive(full, lead);
}
struct Nothing {
  GDN_DEVICE void operator()(uint32_t) const {}
};

// A map in scratch memory has lines of so many rows, and rows of so many values, with which ldmatrix falls into all banks
// where a line has been copied to shared memory as it is.
constexpr int kMapLine = 32, kMapPitch = kChannels + 8, kMapValues = 2 * kChannels * kMapPitch;

// The launchers, each in a file of its own.
template <class Kind>
const char* run_frames(const Params&, cudaStream_t);
const char* run_deals(const Params&, cudaStream_t);
template <class Kind>
const char* run_triangles(const Params&, cudaStream_t);
template <class Kind>
const char* run_segment_maps(Params&, cudaStream_t);
template <class Kind>
const char* run_segment_folds(const Params&, cudaStream_t);
template <class Kind>
const char* run_walk_back(Params&, cudaStream_t);
template <class Kind>
const char* run_walk_states(Params&, cudaStream_t);
template <class Kind>
const char* run_walk_forward(Params&, cudaStream_t);
template <class Kind>
const char* run_sums(const Params&, cudaStream_t);

}  // namespace gdn::sm90::backward
