// The state of a state warpgroup in registers, and its loads and stores: the call's own states, the
// slots of a pool, and the states and maps of segments in scratch memory.
//
// The state is transposed: rows are channels of V, columns are channels of K. A thread has rows 16
// warp + lane/4 (+8), and columns 2 (lane % 4) (+1) of every 8.
#pragma once
#include <cfloat>

#include "sm90/forward/tiles.cuh"
#include "sm90/plan/forgetting.cuh"
#include "sm90/tile/frame.cuh"

namespace gdn::sm90 {

template <class C>
struct StateMemory {
  using T = typename C::T;
  SharedMemory<C>& sm;
  const KernelParams& params;
  const int lane, warpgroup;  // warpgroup: which state warpgroup of the block
  const uint32_t tile_line;   // this lane's line in a [64 tokens][64 channels] tile, for ldmatrix

  static constexpr int kSize = C::kKeys / 2;
  float S[kSize];

  GDN_DEVICE StateMemory(SharedMemory<C>& s, const KernelParams& p, int warpgroup)
      : sm(s),
        params(p),
        lane(thread_of<C>() % 32),
        warpgroup(warpgroup),
        tile_line(line(thread_of<C>())) {}

  GDN_DEVICE static uint32_t line(int thread) {
    const int lane = thread % 32, w = thread / 32 % 4;
    const int token = lane / 16 * 8 + lane % 8, column = 2 * w + lane / 8 % 2;
    return token * 128 + ((column ^ (token % 8)) * 16);
  }

  // The row and the column of S[0] in the whole transposed state.
  GDN_DEVICE int value_channel(const Tile& tile) const {
    return first_value_channel<C>(tile, warpgroup) + thread_of<C>() / 32 % 4 * 16 + lane / 4;
  }
  GDN_DEVICE int key_channel() const { return lane % 4 * 2; }

  // The map of a segment in the workspace, and the state that the segment starts from.
  GDN_DEVICE int rows() const { return state_rows(values<C>(params.problem)); }
  GDN_DEVICE float* map_of(int segment, int hv, int map) const {
    return params.segments.maps +
           ((int64_t{segment} * params.problem.HV + hv) * (rows() + C::kMapRows) + map * rows()) *
               C::kKeys;
  }
  GDN_DEVICE float* start_of(int segment, int hv) const {
    return params.segments.starts +
           (int64_t{segment} * params.problem.HV + hv) * (rows() * C::kKeys);
  }

  GDN_DEVICE void load(const Tile& tile) {
    const ChunkForward& p = params.problem;
    const int64_t base = tile.n * p.h0_n + tile.hv * p.h0_h;
    if constexpr (C::kPass == Pass::kMaps) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const int row = value_channel(tile) + i % 4 / 2 * 8;
        const int column = key_channel() + i / 4 * 8 + i % 2;
        S[i] = tile.map == 1 && row == column ? exp2_approx(-Frame<T>::kTop) : 0.f;
      }
    } else if (C::kPass == Pass::kSegments && !tile.begins) {
      wait_for_prerequisites();  // for the fold, or for the later segments
      const bool again = params.segments.group == SegmentGroup::kAgain;
      load_from(again ? map_of(tile.segment - 1, tile.hv, 0) : start_of(tile.segment, tile.hv), 1,
                C::kKeys, tile);
    } else if constexpr (C::kPool) {
      const int64_t row = first_row(tile);
      if (row < 0) {
        clear();
      } else {
        const States& from = params.pool.from;
        load_row(from, row * from.row + tile.hv * from.head, tile);
      }
    } else if (p.h0 == nullptr) {
      clear();
    } else {
      load_row({const_cast<void*>(p.h0), 0, 0, p.h0_k, p.h0_v, p.h0_dtype}, base, tile);
    }
  }
  GDN_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < kSize; ++i) S[i] = 0.f;
  }
  GDN_DEVICE void load_row(const States& from, int64_t base, const Tile& tile) {
    if (from.dtype == Dtype::kFloat32) {
      load_from(static_cast<const float*>(from.data) + base, from.k, from.v, tile);
    } else if (from.dtype == Dtype::kFloat16) {
      load_from(static_cast<const __half*>(from.data) + base, from.k, from.v, tile);
    } else {
      load_from(static_cast<const __nv_bfloat16*>(from.data) + base, from.k, from.v, tile);
    }
  }
  template <class From>
  GDN_DEVICE void load_from(const From* at, int64_t stride_k, int64_t stride_v, const Tile& tile) {
    if constexpr (C::kPool && C::kKeys == 256) return load_in_pieces(at, stride_k, stride_v, tile);
    const float factor = exp2_approx(-Frame<T>::kTop);
    at += value_channel(tile) * stride_v + key_channel() * stride_k;
#pragma unroll
    for (int j = 0; j < kSize / 4; ++j, at += 8 * stride_k) {
      if constexpr (C::kExact) {
        S[4 * j] = float(at[0]) * factor;
        S[4 * j + 1] = float(at[stride_k]) * factor;
        S[4 * j + 2] = float(at[8 * stride_v]) * factor;
        S[4 * j + 3] = float(at[8 * stride_v + stride_k]) * factor;
      } else {
        const bool low = inside(tile, j, 0), high = inside(tile, j, 8);
        S[4 * j] = low ? float(at[0]) * factor : 0.f;
        S[4 * j + 1] = low ? float(at[stride_k]) * factor : 0.f;
        S[4 * j + 2] = high ? float(at[8 * stride_v]) * factor : 0.f;
        S[4 * j + 3] = high ? float(at[8 * stride_v + stride_k]) * factor : 0.f;
      }
    }
  }
  // Whether the call has columns 8 j to 8 j + 7 of this thread's first row + rows_on: K and V are
  // multiples of 8.
  GDN_DEVICE bool inside(const Tile& tile, int j, int rows_on) const {
    return 8 * j < params.problem.K && value_channel(tile) + rows_on < params.problem.V;
  }

  GDN_DEVICE void store(const Tile& tile, float factor) const {
    const ChunkForward& p = params.problem;
    if constexpr (C::kPass == Pass::kMaps) {
      store_to<true>(map_of(tile.segment, tile.hv, tile.map), 1, C::kKeys, tile, factor);
    } else if (C::kPass == Pass::kSegments && tile.begins && !tile.ends) {
      store_to<true>(start_of(tile.segment, tile.hv), 1, C::kKeys, tile, factor);
    } else if (p.ht != nullptr && tile.ends) {
      store_to(p.ht + tile.n * p.ht_n + tile.hv * p.ht_h, p.ht_k, p.ht_v, tile, factor);
    }
  }
  // kWhole: the memory has rows and columns past the call's own.
  template <bool kWhole = C::kExact>
  GDN_DEVICE void store_to(float* at, int64_t stride_k, int64_t stride_v, const Tile& tile,
                           float factor) const {
    at += value_channel(tile) * stride_v + key_channel() * stride_k;
#pragma unroll
    for (int j = 0; j < kSize / 4; ++j, at += 8 * stride_k) {
      if (kWhole || inside(tile, j, 0)) {
        at[0] = S[4 * j] * factor;
        at[stride_k] = S[4 * j + 1] * factor;
      }
      if (kWhole || inside(tile, j, 8)) {
        at[8 * stride_v] = S[4 * j + 2] * factor;
        at[8 * stride_v + stride_k] = S[4 * j + 3] * factor;
      }
    }
  }

  // Whether the next segment started from an assumed state, which this segment has to check.
  GDN_DEVICE static bool has_guessed(const Tile& tile) {
    return unsigned(tile.frame_begins) < unsigned(tile.length);
  }
  // Stores the final state of this segment in place of its map, and marks the next segment where
  // that one started from a different state. S rotates by quarters, as in store_row.
  GDN_DEVICE void compare_with_next(const Tile& tile, float factor) {
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < kSize; ++i) most = fmaxf(most, fabsf(S[i]));
#pragma unroll
    for (int d = 16; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
    const float enough = fminf(most * factor, FLT_MAX) * kSameStart<T>;
    const int64_t own = int64_t{value_channel(tile)} * C::kKeys + key_channel();
    float* to = map_of(tile.segment, tile.hv, 0) + own;
    const float* next = start_of(tile.segment + 1, tile.hv) + own;
    bool same = true;
    constexpr int kPiece = kSize / 4;
#pragma unroll 1
    for (int first = 0; first < kSize / 4; first += kPiece / 4) {
#pragma unroll
      for (int j = 0; j < kPiece / 4; ++j, step(to, 8), step(next, 8)) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (!C::kExact && !inside(tile, first + j, i / 2 * 8)) continue;
          const int at = i % 2 + i / 2 * 8 * C::kKeys;
          const float x = S[4 * j + i] * factor;
          to[at] = x;
          same &= fabsf(x - next[at]) <= enough;  // false for a NaN
        }
      }
      go_around();
    }
    const int64_t pair = int64_t{tile.n} * params.problem.HV + tile.hv;
    const int64_t mark = pair * (rows() / 64) + first_value_channel<C>(tile, warpgroup) / 64;
    if (!__all_sync(~0u, same) && lane == 0)
      atomicMin(params.segments.marks + mark, tile.segment + 1);
  }

  // ---- with a pool of states

  GDN_DEVICE int64_t not_skipped(int64_t row) const {
    return row > params.pool.last_skipped ? row : -1;
  }

  // at += by, opaque to the compiler: it would otherwise keep many multiples of `by` in registers.
  template <class At>
  GDN_DEVICE static void step(At*& at, int64_t by) {
    at += by;
    asm volatile("" : "+l"(at));
  }

  // Loads S in four quarters, each of which is appended at the back of S: the addresses of all
  // loads at once would spill (K = 256 on a pool).
  template <class From>
  GDN_DEVICE void load_in_pieces(const From* at, int64_t stride_k, int64_t stride_v,
                                 const Tile& tile) {
    const float factor = exp2_approx(-Frame<T>::kTop);
    constexpr int kPiece = kSize / 4, kRest = kSize - kPiece;
    at += value_channel(tile) * stride_v + key_channel() * stride_k;
#pragma unroll 1
    for (int first = 0; first < kSize / 4; first += kPiece / 4) {
#pragma unroll
      for (int i = 0; i < kRest; ++i) S[i] = S[i + kPiece];
#pragma unroll
      for (int j = 0; j < kPiece / 4; ++j, step(at, 8 * stride_k)) {
        const bool low = inside(tile, first + j, 0), high = inside(tile, first + j, 8);
        S[kRest + 4 * j] = low ? float(at[0]) * factor : 0.f;
        S[kRest + 4 * j + 1] = low ? float(at[stride_k]) * factor : 0.f;
        S[kRest + 4 * j + 2] = high ? float(at[8 * stride_v]) * factor : 0.f;
        S[kRest + 4 * j + 3] = high ? float(at[8 * stride_v + stride_k]) * factor : 0.f;
      }
    }
  }

  // The slot that the tile starts from; -1: zeros.
  GDN_DEVICE int64_t first_row(const Tile& tile) const {
    const Pool& pool = params.pool;
    if (pool.from.data == nullptr) return -1;
    if (pool.has_state != nullptr && !pool.has_state[tile.n]) return -1;
    return not_skipped(slot_at(pool.read_slots, tile.n));
  }

  // The number of the sequence's tokens before the last `left` of its tile.
  GDN_DEVICE int tokens_before(const Tile& tile, int left) const {
    const ChunkForward& p = params.problem;
    int tokens = tile.length - left;
    if (C::kPass == Pass::kSegments)
      tokens += tile.first - (p.cu_seqlens ? int(sequence_bound(p, tile.n)) : 0);
    return tokens;
  }
  // The rows of the tile that are left, counted from `left`, when a state is stored next.
  GDN_DEVICE int next_stop(const Tile& tile, int left) const {
    const int interval = params.pool.checkpoint_interval;
    return interval == 0 ? 0 : max(0, left - (interval - tokens_before(tile, left) % interval));
  }
  // Stores the state there: as a checkpoint, as the final state or the start of the second segment,
  // or as both.
  GDN_DEVICE void store_at_stop(const Tile& tile, int left, float factor) {
    const Pool& pool = params.pool;
    if (is_skipped(pool, tile.n)) return;
#pragma unroll 1
    for (int final = 0; final < 2; ++final) {
      int64_t row = final ? final_row(tile, left) : checkpoint_row(tile, left);
      States to = pool.to;
      if (!final) to = pool.checkpoints;
      if (C::kPass == Pass::kSegments && final && left <= 0 && tile.begins && !tile.ends) {
        to = {start_of(tile.segment, tile.hv), 0, 0, 1, C::kKeys, Dtype::kFloat32};
        row = 0;
      }
      if (row >= 0) store_row(to, row, tile, factor);
    }
  }
  // The slot of the final state, and of a checkpoint; -1: none.
  GDN_DEVICE int64_t final_row(const Tile& tile, int left) const {
    if (params.pool.to.data == nullptr) return -1;
    return left <= 0 && tile.ends ? not_skipped(slot_at(params.pool.write_slots, tile.n)) : -1;
  }
  GDN_DEVICE int64_t checkpoint_row(const Tile& tile, int left) const {
    const ChunkForward& p = params.problem;
    const Pool& pool = params.pool;
    const int tokens = tokens_before(tile, left);
    if (pool.checkpoint_interval == 0 || left < 0 || tokens == 0 ||
        tokens % pool.checkpoint_interval != 0)
      return -1;
    const int index = tokens / pool.checkpoint_interval - 1;
    if (pool.checkpoint_slots.data == nullptr) {
      const int64_t first = p.cu_seqlens ? sequence_bound(p, tile.n) : tile.n * p.T;
      return first / pool.checkpoint_interval + index;
    }
    if (index >= pool.checkpoint_columns) return -1;
    return not_skipped(slot_at(pool.checkpoint_slots, tile.n * pool.checkpoint_columns + index));
  }

  // Stores S to a row of states of any dtype, in four pieces between which S rotates, since
  // registers have no index: without the loop there would be much code that seldom runs.
  GDN_DEVICE void store_row(const States& to, int64_t row, const Tile& tile, float factor) {
    const int size = to.dtype == Dtype::kFloat64 ? 8 : to.dtype == Dtype::kFloat32 ? 4 : 2;
    const int64_t next_k = to.k * size, next_8_v = to.v * size * 8;
    uint8_t* at = static_cast<uint8_t*>(to.data) +
                  (row * to.row + tile.hv * to.head + value_channel(tile) * to.v) * size +
                  key_channel() * next_k;
    // Two adjacent channels of K are stored at once: there are half as many stores, and each fills
    // the sectors that it writes to.
    const bool in_pairs = C::kExact && to.dtype == Dtype::kFloat32 && to.k == 1 &&
                          reinterpret_cast<uintptr_t>(at) % 8 == 0;
    constexpr int kPiece = kSize / 4;
#pragma unroll 1
    for (int first = 0; first < kSize / 4; first += kPiece / 4) {
#pragma unroll
      for (int j = 0; j < kPiece / 4; ++j, step(at, 8 * next_k)) {
        if (in_pairs) {
          *reinterpret_cast<float2*>(at) = make_float2(S[4 * j] * factor, S[4 * j + 1] * factor);
          *reinterpret_cast<float2*>(at + next_8_v) =
              make_float2(S[4 * j + 2] * factor, S[4 * j + 3] * factor);
          continue;
        }
        if (C::kExact || inside(tile, first + j, 0)) {
          store_as(to.dtype, at, S[4 * j] * factor);
          store_as(to.dtype, at + next_k, S[4 * j + 1] * factor);
        }
        if (C::kExact || inside(tile, first + j, 8)) {
          store_as(to.dtype, at + next_8_v, S[4 * j + 2] * factor);
          store_as(to.dtype, at + next_8_v + next_k, S[4 * j + 3] * factor);
        }
      }
      go_around();
    }
  }
  // Rotates S by a quarter.
  GDN_DEVICE void go_around() {
    constexpr int kPiece = kSize / 4;
    float piece[kPiece];
#pragma unroll
    for (int i = 0; i < kPiece; ++i) piece[i] = S[i];
#pragma unroll
    for (int i = 0; i < kSize - kPiece; ++i) S[i] = S[i + kPiece];
#pragma unroll
    for (int i = 0; i < kPiece; ++i) S[kSize - kPiece + i] = piece[i];
  }
  GDN_DEVICE static void store_as(Dtype dtype, uint8_t* at, float x) {
    if (dtype == Dtype::kFloat32) {
      *reinterpret_cast<float*>(at) = x;
    } else if (dtype == Dtype::kFloat64) {
      *reinterpret_cast<double*>(at) = x;
    } else {
      *reinterpret_cast<uint16_t*>(at) = dtype == Dtype::kFloat16
                                             ? __half_as_ushort(__float2half_rn(x))
                                             : __bfloat16_as_ushort(__float2bfloat16_rn(x));
    }
  }

  // Zeroes o of a skipped sequence, in this warpgroup's channels.
  GDN_DEVICE void zero_skipped(const Tile& tile) const {
    const ChunkForward& p = params.problem;
    if (!is_skipped(params.pool, tile.n)) return;
    const int64_t end = p.cu_seqlens ? sequence_bound(p, tile.n + 1) : p.T;
    int thread = thread_of<C>() % 128;
    asm volatile(
        ""
        : "+r"(thread));  // values that depend on it would occupy registers in the whole loop
    const int column = first_value_channel<C>(tile, warpgroup) + thread % 8 * 8;
    if (!C::kExact && column >= p.V) return;
#pragma unroll 1
    for (int64_t at = tile.first + thread / 8; at < end; at += 16)
      *o_line(params.pool, tile.batch, at, tile.hv, column) = make_uint4(0, 0, 0, 0);
  }
};

}  // namespace gdn::sm90
