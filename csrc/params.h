// The parameters that operators pass to an architecture: no torch, no tensor-map type. dispatch.h
// declares the functions that take them.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace gdn {

enum class Dtype : int { kBFloat16, kFloat16, kFloat32, kFloat64 };

// T is less than this: tokens have 32-bit numbers, with room for a chunk or a segment that the last
// token does not fill.
constexpr int64_t kTokenLimit = int64_t{1} << 30;

// A [B, T, heads, D] or [B, T, heads] tensor. Strides in elements, >= 0 (0: expanded); that of D is
// 1. A tensor with a D begins at a multiple of 16 bytes, and so do its rows and heads, as TMA
// requires.
struct Rows {
  const void* data;
  int64_t batch, row, head;
};

// Packed sequences: B = 1 and `cu_seqlens` holds N + 1 offsets into T. Padded: N = B.
struct ChunkForward {
  Rows q;     // [B, T, H, K], of `dtype`
  Rows k;     // [B, T, H, K], of `dtype`
  Rows v;     // [B, T, HV, V], of `dtype`
  Rows g;     // [B, T, HV], of `g_dtype`
  Rows beta;  // [B, T, HV], of `beta_dtype`

  const float* A_log;    // [HV] contiguous, null unless `use_gate`
  const float* dt_bias;  // [HV] contiguous, or null, also with `use_gate`

  const void* h0;  // [N, HV, K, V] at the strides below, in elements; null: zeros
  int64_t h0_n, h0_h, h0_k, h0_v;
  Dtype h0_dtype;

  void* o;    // [B, T, HV, V] contiguous, of `dtype`
  float* ht;  // [N, HV, K, V] at the strides below, in elements; null: not wanted
  int64_t ht_n, ht_h, ht_k, ht_v;

  const void* cu_seqlens;  // [N + 1] contiguous, on the device; null: padded
  bool cu_seqlens_64;      // its entries are int64, not int32

  void* workspace;  // chunk_forward_workspace() bytes, 256-byte aligned, contents undefined

  int64_t B, T;
  int H, HV, K, V, N;
  float scale;
  Dtype dtype, g_dtype, beta_dtype;
  bool use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval, use_gate;
  int64_t
      longest[3];  // tokens of the longest packed sequences, in descending order: a hint for the
                   // plan, which is correct for any lengths. 0: not known, or no such sequence
  bool batch_invariant;  // a sequence's bits may not depend on the rest of the batch: no sequence
                         // is cut into segments
  int multiprocessors;   // of the device
};

// States [rows, HV, K, V]. Strides in elements. States that are read are not float64.
struct States {
  void* data;
  int64_t row, head, k, v;
  Dtype dtype;
};

// Row numbers of States, int32 or int64, contiguous.
struct Slots {
  const void* data;
  bool is_64;
};

// The states and o of a call on a pool of states, or with checkpoints, in place of h0, ht and o.
// Sequence n starts from row read_slots[n] of `from`, and its final state is written to row
// write_slots[n] of `to`. Row numbers up to `last_skipped` are padding: a read slot that is padding
// skips the sequence, with o = 0 and nothing else written; a write slot that is padding is not
// written.
struct Pool {
  Rows o;           // [B, T, HV, V], of `dtype`: written
  States from, to;  // null data: all sequences start from zeros; no final state is written
  Slots read_slots, write_slots;  // [N]; null data: n itself
  // [N]: whether sequence n starts from its row, not from zeros; null: all do.
  const bool* has_state;
  int last_skipped;  // -1 or 0

  // The state after tokens n, 2 n, ... of a sequence, n = checkpoint_interval. Without slots the
  // first one has row s / n, where s is the sequence's first token of all B T; else checkpoint j of
  // sequence m has row checkpoint_slots[m, j], and is not stored where that is padding or does not
  // exist.
  int checkpoint_interval;  // tokens, a multiple of 64; 0: no checkpoints
  States checkpoints;
  Slots checkpoint_slots;  // [N, checkpoint_columns]; null data: there are none
  int64_t checkpoint_columns;
};

// A call for the gradients of chunk_forward's inputs. `forward` has the inputs, the options and the
// workspace; its o and ht are unset.
struct ChunkBackward {
  ChunkForward forward;
  Rows dO;           // [B, T, HV, V], of `dtype`: the gradient of o
  const float* dht;  // [N, HV, K, V] at the strides below, in elements; null: zeros
  int64_t dht_n, dht_h, dht_k, dht_v;

  // States that the forward has left: [B T / n, HV, V, K] contiguous, the states after tokens n, 2
  // n, ... of a sequence, n = checkpoint_interval. The first is in row s / n, where s is the
  // sequence's first token of all B T. Null: the forward left none.
  const float* states;
  int checkpoint_interval;  // tokens, a multiple of 64; 0 without states

  // Outputs, contiguous but dh0. They are 0 for tokens of no sequence.
  void* dq;  // [B, T, H, K], of `dtype`
  void* dk;
  void* dv;     // [B, T, HV, V], of `dtype`
  void* dg;     // [B, T, HV], of `dg_dtype`
  void* dbeta;  // [B, T, HV], of `dbeta_dtype`
  Dtype dg_dtype, dbeta_dtype;
  float* dh0;  // [N, HV, K, V] at the strides below, in elements; null: not wanted
  int64_t dh0_n, dh0_h, dh0_k, dh0_v;
  float* gate_sums;  // [2, HV]: of A_log, then of dt_bias; null unless `use_gate`
};

// A part of a sequence whose other parts are on other devices: a call of one sequence, without
// cu_seqlens. The part is cut into segments of equal length, of which the last may be shorter, and
// its own map S_out = M S_in + b is folded from theirs. Matrices are transposed: rows are channels
// of V, or of the incoming state's K, and columns are channels of K.
struct Part {
  int chunks;     // of a segment: part_segment()
  float* starts;  // part_starts() bytes: the states that the segments start from
  // [HV, V + K, K] contiguous, the part's map: b, then M; null: nothing leaves the part. The
  // backward writes only the first V rows: the gradient of the state before the part, for the given
  // gradient of the state after it.
  float* carry;
  bool comes;  // a state comes from another part; else M is not needed, and not written
};

// Both walks over the states of a backward whose other steps run elsewhere, in chunks of 64 tokens.
// `forward` has q, k, v, h0, cu_seqlens, the sizes, `dtype`, `scale` and `multiprocessors`; and in
// fp32 g, the sum of log2 decays from the chunk's first token on, and the activated beta.
struct BackwardWalks {
  ChunkForward forward;
  Rows dO;                   // [B, T, HV, V], of `dtype`: the gradient of o
  Rows own;                  // [B, T, HV], fp32: the diagonal of A_qk
  const void* A_inv;         // [B, T, HV, 64] contiguous, of `dtype`, strictly lower
  const void* A_qk;          // the same
  const int* chunk_offsets;  // [N]: the index of each packed sequence's first chunk; null: padded
  int64_t chunks;            // the number of chunk indices, those without tokens included
  const float* dht;          // [N, HV, K, V] at the strides below, in elements; null: zeros
  int64_t dht_n, dht_h, dht_k, dht_v;

  // Outputs; of `dtype` and contiguous but dh0.
  void* h;      // [chunks, HV, K, V]: the state before each chunk
  void* dh;     // the same: the gradient of the state after each chunk
  void* v_new;  // [B, T, HV, V]
  void* dx;     // the same: the gradient of x, (I + A)^-1 x = v_new
  float* dh0;   // [N, HV, K, V] at the strides below, in elements; null: not wanted
  int64_t dh0_n, dh0_h, dh0_k, dh0_v;
};

}  // namespace gdn
