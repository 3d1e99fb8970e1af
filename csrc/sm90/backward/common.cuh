// What the kernels of the backward share: where chunks lie, what they leave for each other, and the
// factors of a chunk's tokens (frame.cuh has the symbols).
//
// A chunk has a *slot*, a number that follows from its sequence and place alone, and a chunk of a value
// head a block of scratch memory at slot HV + hv. Tiles in scratch memory are whole: their rows past a
// sequence's end are zero.
#pragma once
#include "sm90/gates.cuh"

namespace gdn::sm90::backward {

constexpr int kChannels = 128;  // of K and of V
constexpr int kParts = 8;       // rows of Scratch::parts

// Of a chunk and value head, made once for all kernels.
struct Gates {
  float4 x[kChunk / 2];  // of tokens 2 i, 2 i + 1: (c0, c1, f0, f1) in x = c v - f (k S): beta 2^-e, beta 2^d
  float read[kChunk];    // scale 2^e: do in the frame
  float start[kChunk];   // scale 2^(d + e): what q S has in o
  float beta[kChunk];
  float c[kChunk];         // 2^-e
  int16_t power[kChunk];   // d
  float pre, post, end;    // as in GateVectors
  int steep;
};
static_assert(sizeof(Gates) % 16 == 0, "copied in lines of 16 bytes");

// A part of a token's gradients of its gate and beta, by chunk and value head.
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
  void* q;          // [B, T, H, 128], with the norm in the kernel: q and k over their norms
  void* k;
  Gates* gates;     // [slots, HV]
  float* last;      // [slots, HV]: the chunk's log2 decay
  float* G;         // [slots, HV]: of the state behind the chunk before, frame.cuh
  uint16_t* t;      // [slots, HV, 64, 64]: strict-lower (I + A)^-1
  uint16_t* qk;     // [slots, H, 64, 64]: lower q k^T
  uint16_t* kk;     // [slots, H, 64, 64]: lower k k^T
  uint16_t* dx;     // [slots, HV, 64, 128], where dq of the value head replaces it
  // [slots, HV, 128 of V, 128 of K]: the gradient of the state behind the chunk; dk replaces it. Before, where a chunk is
  // steep, its lower q k^T, decayed, [64, 64] in a corner of each half of V: who walks back over a half reads it there.
  uint16_t* ds;
  float* parts;     // [slots, HV, kParts, 64]
  float* across;    // [slots, HV, 8]: <S, dS> by warps
  float* gate_sums; // [slots, 2, HV]
  float* starts;    // [segments, HV, 128 of V, 128 of K]: the state that each segment but the first starts from
  int* segment;     // chunks of a segment, or kWholeSequences: what the device chose
};

struct Params {
  CUtensorMap q, k, v, dO, dv, t, qk, kk, dx, ds;
  ChunkBackward problem;
  Scratch scratch;
  int slots, slots_of_batch;  // of all; of a batch entry, if padded
  // The walk forward goes in segments of so many chunks where whole sequences would leave multiprocessors idle: a walk
  // of the state alone finds what they start from. That changes no bit.
  int segment;                      // chunks; 0: whole sequences
  int whole_up_to;                  // whole sequences all the same where none has more chunks
  int segments, segments_of_batch;  // of all; of a batch entry, if padded
  int tiles;                  // of the grid: (sequence or segment, value head, part of V)
  bool makes;                 // the walk back makes T of whole sequences, q k^T and k k^T: makes_triangles_walking
  bool exchange;              // the walk forward adds dq and dk of a key head's two value heads, exchange.cuh
  Divisor heads, group;       // HV, and value heads of a key head
};

constexpr int kWholeSequences = 1 << 30;

// Whether the walk back makes the triangles, as no kernel needs them before, or a kernel of their own.
GDN_DEVICE bool makes_triangles_walking(const Params& params) {
  return params.makes && (params.segment == 0 || *params.scratch.segment == kWholeSequences);
}

// Slots of a call at most. Packed, that of a sequence's first chunk is its first row / 64 + its number.
inline int64_t slots_of(const ChunkForward& p) {
  return p.cu_seqlens ? p.T / kChunk + p.N : int64_t{p.B} * ((p.T + kChunk - 1) / kChunk);
}

GDN_DEVICE int first_slot(const Params& params, int n) {
  const ChunkForward& p = params.problem.forward;
  return p.cu_seqlens ? int(sequence_bound(p, n) / kChunk) + n : n * params.slots_of_batch;
}

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

// One sequence, value head and part of V.
struct BackTile {
  int n, hv, h, batch, part, first, length, slot;  // part: of V, or of the sequence
  GDN_DEVICE int chunks() const { return length > 0 ? (length + kChunk - 1) / kChunk : 0; }
};
template <int kTileParts>
GDN_DEVICE BackTile back_tile(const Params& params, int index) {
  const ChunkForward& p = params.problem.forward;
  BackTile x;
  x.part = index % kTileParts;
  index /= kTileParts;
  x.n = params.heads.divide(index);
  x.hv = index - x.n * p.HV;
  x.h = params.group.divide(x.hv);
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
GDN_DEVICE BackTile forward_tile(const Params& params, int index) {
  if (params.segment == 0) return back_tile<1>(params, index);
  const ChunkForward& p = params.problem.forward;
  const int segment = params.heads.divide(index);
  int n;
  if (p.cu_seqlens) {
    n = last_not_above(p.N, segment, [&](int n) { return int64_t{first_segment(params, n)}; });
  } else {
    n = segment / params.segments_of_batch;
  }
  BackTile x = back_tile<1>(params, n * p.HV + index - segment * p.HV);
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

GDN_DEVICE void wait_for(const uint64_t& bar, uint32_t parity) { mbarrier_wait(shared_address(&bar), parity & 1); }

GDN_DEVICE void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(bar)
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
  if (whole) return;
  mbarrier_wait(bar, aside_phase);
  aside_phase ^= 1;
#pragma unroll 1
  for (int i = 0; i < kTiles; ++i)
#pragma unroll 1
    for (int line = rows * 8 + threadIdx.x % 32; line < kChunk * 8; line += 32)
      reinterpret_cast<uint4*>(to[i])[line] = make_uint4(0, 0, 0, 0);
  fence_async_proxy();
  __syncwarp();
  mbarrier_arrive_if(shared_address(&full), lead);
}
struct Nothing {
  GDN_DEVICE void operator()(uint32_t) const {}
};

// A state [64 of V, 128 of K] of a warpgroup's registers, from and to strided memory.
template <class From>
GDN_DEVICE void load_state(float (&S)[64], const From* at, int64_t stride_k, int64_t stride_v, float factor) {
#pragma unroll
  for (int j = 0; j < 16; ++j, at += 8 * stride_k) {
    S[4 * j] = float(at[0]) * factor;
    S[4 * j + 1] = float(at[stride_k]) * factor;
    S[4 * j + 2] = float(at[8 * stride_v]) * factor;
    S[4 * j + 3] = float(at[8 * stride_v + stride_k]) * factor;
  }
}
GDN_DEVICE void store_state(const float (&S)[64], float* at, int64_t stride_k, int64_t stride_v, float factor) {
#pragma unroll
  for (int j = 0; j < 16; ++j, at += 8 * stride_k) {
    at[0] = S[4 * j] * factor;
    at[stride_k] = S[4 * j + 1] * factor;
    at[8 * stride_v] = S[4 * j + 2] * factor;
    at[8 * stride_v + stride_k] = S[4 * j + 3] * factor;
  }
}
GDN_DEVICE void clear_state(float (&S)[64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) S[i] = 0;
}
GDN_DEVICE void scale_state(float (&S)[64], float factor) {
#pragma unroll
  for (int i = 0; i < 64; ++i) S[i] *= factor;
}

// This thread's first channels of V and K in a state warpgroup's part.
GDN_DEVICE int state_row(int warp, int lane) { return warp * 16 + lane / 4; }
GDN_DEVICE int state_column(int lane) { return lane % 4 * 2; }

// A lane's line in a [64 tokens][64 channels of V] tile whose transpose it holds.
GDN_DEVICE uint32_t transposed_line(int warp, int lane) {
  const int token = lane / 16 * 8 + lane % 8, column = 2 * warp + lane / 8 % 2;
  return token * 128 + ((column ^ (token % 8)) * 16);
}

// The launchers, each in a file of its own.
const char* run_frames(const Params&, cudaStream_t);
const char* run_triangles(const Params&, cudaStream_t);
bool walks_back_over_halves(const ChunkForward&);  // of V, where multiprocessors would be idle else
const char* run_walk_back(Params&, cudaStream_t);
const char* run_walk_states(Params&, cudaStream_t);
const char* run_walk_forward(Params&, cudaStream_t);
const char* run_sums(const Params&, cudaStream_t);

}  // namespace gdn::sm90::backward
