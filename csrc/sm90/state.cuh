// A state warpgroup: 64 channels of V, all chunks of a sequence, with its part of the state in
// registers.
//
// Everything is transposed: rows are channels of V, columns are channels of K (the state) or tokens
// (all else). The state [64 x kKeys] fp32 is the accumulator of its update and, rounded, the register
// operand of its reads. A thread holds rows 16 warp + lane/4 (+8), and of every 8 columns
// 2 (lane % 4) (+1).
#pragma once
#include "gates.cuh"
#include "triangles.cuh"

namespace gdn::sm90 {

template <class C>
struct State {
  using T = typename C::T;
  SharedMemory<C>& sm;
  const KernelParams& params;
  const int lane, slot;  // slot: which state warpgroup of the block
  const uint32_t tile_line;  // this lane's line in a [64 tokens][64 channels] tile, for ldmatrix

  static constexpr int kSize = C::kKeys / 2;
  float S[kSize];
  using Rounded = uint32_t[C::kKeepsRounded ? kSize / 2 : 1];  // S in 16 bits

  GDN_DEVICE State(SharedMemory<C>& s, const KernelParams& p, int slot)
      : sm(s), params(p), lane(threadIdx.x % 32), slot(slot), tile_line(line(threadIdx.x)) {}

  GDN_DEVICE static uint32_t line(int thread) {
    const int lane = thread % 32, w = thread / 32 % 4;
    const int token = lane / 16 * 8 + lane % 8, column = 2 * w + lane / 8 % 2;
    return token * 128 + ((column ^ (token % 8)) * 16);
  }

  // Row and column of S[0] in the whole state, transposed.
  GDN_DEVICE int value_channel(const Tile& tile) const {
    return first_value_channel<C>(tile, slot) + threadIdx.x / 32 % 4 * 16 + lane / 4;
  }
  GDN_DEVICE int key_channel() const { return lane % 4 * 2; }

  // This tile's map or start in the workspace, or where a first segment leaves the second's.
  GDN_DEVICE int rows() const { return state_rows(values<C>(params.problem)); }
  GDN_DEVICE float* map_of(const Tile& tile) const {
    return params.segments.maps +
           ((int64_t{tile.slot} * params.problem.HV + tile.hv) * (rows() + C::kMapRows) +
            tile.map * rows()) * C::kKeys;
  }
  GDN_DEVICE float* start_of(const Tile& tile) const {
    return params.segments.starts +
           (int64_t{tile.slot} * params.problem.HV + tile.hv) * (rows() * C::kKeys);
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
      wait_for_prerequisites();  // the fold
      load_from(start_of(tile), 1, C::kKeys, tile);
    } else if constexpr (C::kPool) {
      const int64_t row = first_row(tile);
      if (row < 0) {
        clear();
      } else {
        const States& from = params.pool.states;
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
  // Whether columns 8 j to 8 j + 7 of this thread's first row, or of that so many further on, are
  // the call's: K and V are multiples of 8.
  GDN_DEVICE bool inside(const Tile& tile, int j, int rows_on) const {
    return 8 * j < params.problem.K && value_channel(tile) + rows_on < params.problem.V;
  }

  GDN_DEVICE void store(const Tile& tile, float factor) const {
    const ChunkForward& p = params.problem;
    if constexpr (C::kPass == Pass::kMaps) {
      store_to<true>(map_of(tile), 1, C::kKeys, tile, factor);
    } else if (C::kPass == Pass::kSegments && tile.begins && !tile.ends) {
      store_to<true>(start_of(tile), 1, C::kKeys, tile, factor);
    } else if (p.ht != nullptr && tile.ends) {
      store_to(p.ht + tile.n * p.ht_n + tile.hv * p.ht_h, p.ht_k, p.ht_v, tile, factor);
    }
  }
  // kWhole: there is memory for rows and columns that are not the call's.
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

  // ---- of a pool

  GDN_DEVICE int64_t not_skipped(int64_t row) const {
    return row > params.pool.last_skipped ? row : -1;
  }

  // at += by, and not as one of many multiples of it, each in registers of its own.
  template <class At>
  GDN_DEVICE static void step(At*& at, int64_t by) {
    at += by;
    asm volatile("" : "+l"(at));
  }

  // Loads S in four quarters, each shifted in at the back: issuing every load at once spills the addresses
  // (K = 256 on a pool).
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

  // What the tile starts from; -1: from zeros.
  GDN_DEVICE int64_t first_row(const Tile& tile) const {
    const Pool& pool = params.pool;
    if (pool.has_state != nullptr && !pool.has_state[tile.n]) return -1;
    return not_skipped(slot_at(pool.read_slots, tile.n));
  }

  // Tokens of the sequence before the last `left` of its tile.
  GDN_DEVICE int tokens_before(const Tile& tile, int left) const {
    const ChunkForward& p = params.problem;
    int tokens = tile.length - left;
    if (C::kPass == Pass::kSegments)
      tokens += tile.first - (p.cu_seqlens ? int(sequence_bound(p, tile.n)) : 0);
    return tokens;
  }
  // How much of the tile is left where a state has to be stored, after `left`.
  GDN_DEVICE int next_stop(const Tile& tile, int left) const {
    const int every = params.pool.every;
    return every == 0 ? 0 : max(0, left - (every - tokens_before(tile, left) % every));
  }
  // The state there: as a checkpoint, as the final state or the start of the second segment, or as both.
  GDN_DEVICE void store_at_stop(const Tile& tile, int left, float factor) {
    const Pool& pool = params.pool;
    if (is_skipped(pool, tile.n)) return;
#pragma unroll 1
    for (int final = 0; final < 2; ++final) {
      int64_t row = final ? final_row(tile, left) : checkpoint_row(tile, left);
      States to = pool.states;
      if (!final) to = pool.checkpoints;
      if (C::kPass == Pass::kSegments && final && left <= 0 && tile.begins && !tile.ends) {
        to = {start_of(tile), 0, 0, 1, C::kKeys, Dtype::kFloat32};
        row = 0;
      }
      if (row >= 0) store_row(to, row, tile, factor);
    }
  }
  // -1: there is none.
  GDN_DEVICE int64_t final_row(const Tile& tile, int left) const {
    return left <= 0 && tile.ends ? not_skipped(slot_at(params.pool.write_slots, tile.n)) : -1;
  }
  GDN_DEVICE int64_t checkpoint_row(const Tile& tile, int left) const {
    const ChunkForward& p = params.problem;
    const Pool& pool = params.pool;
    const int tokens = tokens_before(tile, left);
    if (pool.every == 0 || left < 0 || tokens == 0 || tokens % pool.every != 0) return -1;
    const int index = tokens / pool.every - 1;
    if (pool.checkpoint_slots.data == nullptr) {
      const int64_t first = p.cu_seqlens ? sequence_bound(p, tile.n) : tile.n * p.T;
      return first / pool.every + index;
    }
    if (index >= pool.checkpoint_columns) return -1;
    return not_skipped(slot_at(pool.checkpoint_slots, tile.n * pool.checkpoint_columns + index));
  }

  // To a row of states of any dtype. In four pieces, and S goes around for it, as registers have no
  // index: all in one would be much code that is executed once in a while.
  GDN_DEVICE void store_row(const States& to, int64_t row, const Tile& tile, float factor) {
    const int size = to.dtype == Dtype::kFloat64 ? 8 : to.dtype == Dtype::kFloat32 ? 4 : 2;
    const int64_t next_k = to.k * size, next_8_v = to.v * size * 8;
    uint8_t* at = static_cast<uint8_t*>(to.data) +
                  (row * to.row + tile.hv * to.head + value_channel(tile) * to.v) * size +
                  key_channel() * next_k;
    constexpr int kPiece = kSize / 4;
#pragma unroll 1
    for (int first = 0; first < kSize / 4; first += kPiece / 4) {
#pragma unroll
      for (int j = 0; j < kPiece / 4; ++j, step(at, 8 * next_k)) {
        if (C::kExact || inside(tile, first + j, 0)) {
          store_as(to.dtype, at, S[4 * j] * factor);
          store_as(to.dtype, at + next_k, S[4 * j + 1] * factor);
        }
        if (C::kExact || inside(tile, first + j, 8)) {
          store_as(to.dtype, at + next_8_v, S[4 * j + 2] * factor);
          store_as(to.dtype, at + next_8_v + next_k, S[4 * j + 3] * factor);
        }
      }
      float piece[kPiece];
#pragma unroll
      for (int i = 0; i < kPiece; ++i) piece[i] = S[i];
#pragma unroll
      for (int i = 0; i < kSize - kPiece; ++i) S[i] = S[i + kPiece];
#pragma unroll
      for (int i = 0; i < kPiece; ++i) S[kSize - kPiece + i] = piece[i];
    }
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

  // o of a sequence that is skipped, in this warpgroup's channels.
  GDN_DEVICE void zero_skipped(const Tile& tile) const {
    const ChunkForward& p = params.problem;
    if (!is_skipped(params.pool, tile.n)) return;
    const int64_t end = p.cu_seqlens ? sequence_bound(p, tile.n + 1) : p.T;
    int thread = threadIdx.x % 128;
    asm volatile("" : "+r"(thread));  // what is made of it would fill registers all along
    const int column = first_value_channel<C>(tile, slot) + thread % 8 * 8;
    if (!C::kExact && column >= p.V) return;
#pragma unroll 1
    for (int64_t at = tile.first + thread / 8; at < end; at += 16)
      *o_line(params.pool, tile.batch, at, tile.hv, column) = make_uint4(0, 0, 0, 0);
  }

  // The state in the chunk's frame, and as an operand.
  GDN_DEVICE void enter(Rounded& Sb, const GateVectors& gates) {
    if (gates.pre != 1.f) scale(gates.pre);
    if constexpr (C::kKeepsRounded) {
#pragma unroll
      for (int i = 0; i < kSize / 2; ++i) Sb[i] = pack(T{}, S[2 * i], S[2 * i + 1]);
    }
  }
  GDN_DEVICE void scale(float factor) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) S[i] *= factor;
  }

  // d [+]= S x^T for tiles x of 64 tokens x kKeys channels. Before these four: pin what they read and
  // write, then wgmma_fence().
  GDN_DEVICE void issue_read(float (&d)[32], const Rounded& Sb, uint32_t x, bool onto) {
    const Descriptor rows = k_major(x);
#pragma unroll
    for (int i = 0; i < C::kKeys / 16; ++i)
      wgmma_rs_n64(T{}, d, Sb + 4 * i, rows.at(i / 4 * kTileBytes + i % 4 * 32), onto || i > 0);
  }

  // x = S k^T and, for the output, o = S q^T, from a state that is rounded on the way: 32 columns at
  // a time, into the registers that the last piece but one has been read from. Both at once: of two
  // reads the compiler would keep all that it has rounded for the first.
  GDN_DEVICE void issue_reads(float (&x)[32], float (&o)[32], uint32_t k, uint32_t q) {
    const Descriptor k_rows = k_major(k), q_rows = k_major(q);
    uint32_t Sb[2][8];
#pragma unroll
    for (int j = 0; j < C::kKeys / 32; ++j) {
      uint32_t(&piece)[8] = Sb[j % 2];
      if (j >= 2) wgmma_wait<1>();
#pragma unroll
      for (int i = 0; i < 8; ++i) piece[i] = pack(T{}, S[16 * j + 2 * i], S[16 * j + 2 * i + 1]);
      pin(piece);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t bytes = j / 2 * kTileBytes + (j % 2 * 2 + i) * 32;
        wgmma_rs_n64(T{}, x, piece + 4 * i, k_rows.at(bytes), j + i > 0);
        if constexpr (C::kOutput)
          wgmma_rs_n64(T{}, o, piece + 4 * i, q_rows.at(bytes), j + i > 0);
      }
      wgmma_commit();
    }
  }

  // d [+]= y m^T for a triangle m. Its blocks above the diagonal are 0; to leave them out, with
  // N = 48, 32, 16 in the later steps, makes ptxas serialise all WGMMA (operands that overlap).
  GDN_DEVICE void issue_triangle(float (&d)[32], uint32_t (&y)[16], uint32_t m, bool onto) {
    const Descriptor rows = k_major(m);
#pragma unroll
    for (int i = 0; i < 4; ++i) wgmma_rs_n64(T{}, d, y + 4 * i, rows.at(i * 32), onto || i > 0);
  }

  // S += u k for the chunk's keys.
  GDN_DEVICE void issue_update(uint32_t (&u)[16], uint32_t k) {
    const Descriptor columns = mn_major(k);
    if constexpr (C::kKeys == 64) {
#pragma unroll
      for (int i = 0; i < 4; ++i) wgmma_rs_n64_mn(T{}, S, u + 4 * i, columns.at(i * 2048), 1);
    } else {
#pragma unroll
      for (int j = 0; j < C::kKeys / 128; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          wgmma_rs_n128_mn(T{}, S + 64 * j, u + 4 * i,
                           columns.at(j * 2 * kTileBytes + i * 2048), 1);
    }
  }

  // x = c v - f (S k), in fp32 in place of S k and rounded for the product with T.
  GDN_DEVICE void make_x(float (&x)[32], uint32_t (&rounded)[16], uint32_t v,
                         const GateVectors& gates, bool without_v) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t v4[4];
      ldmatrix_x4_trans(v + j * 2048 + tile_line, v4);
      if (C::kPass == Pass::kMaps && without_v) v4[0] = v4[1] = v4[2] = v4[3] = 0;
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const float4 cf = gates.x[(2 * j + b) * 4 + lane % 4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 pair = unpack(T{}, v4[2 * b + h]);
          const int at = 4 * (2 * j + b) + 2 * h;
          x[at] = cf.x * pair.x - cf.z * x[at];
          x[at + 1] = cf.y * pair.y - cf.w * x[at + 1];
          rounded[at / 2] = pack(T{}, x[at], x[at + 1]);
        }
      }
    }
  }

  // What tokens of a steep chunk give to the state: 2^(D - d) u'.
  GDN_DEVICE void decay_to_end(uint32_t (&u)[16], const GateVectors& gates) {
    const uint32_t decay = biased_power<T>(gates.decay);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint32_t left = reinterpret_cast<const uint32_t*>(gates.left)[j * 4 + lane % 4];
      const uint32_t factor = power_of_two<T>(decay, left);
#pragma unroll
      for (int h = 0; h < 2; ++h) u[2 * j + h] = multiply(T{}, u[2 * j + h], factor);
    }
  }
  // The part of o that comes first, in the units of the other.
  GDN_DEVICE void lift(float (&o)[32], const GateVectors& gates) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 factor = reinterpret_cast<const float2*>(gates.lift)[j * 4 + lane % 4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        o[4 * j + 2 * h] *= factor.x;
        o[4 * j + 2 * h + 1] *= factor.y;
      }
    }
  }

  // True in one lane of the warp, and not known before `value` is: an arrival is seen at once, while
  // loads from shared memory issued before it may still be on their way.
  GDN_DEVICE bool one_lane_after(uint32_t value) const {
    const uint32_t equal = __ballot_sync(~0u, value == 0x5eed5eed);
    return lane == (equal == ~0u ? 1 : 0);
  }

  // o = r O to its tile, for the store warp.
  GDN_DEVICE void emit(const float (&O)[32], const GateVectors& gates) {
    const uint32_t tile = shared_address(sm.o[slot]) + tile_line;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t o4[4];
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const float2 r = reinterpret_cast<const float2*>(gates.r)[(2 * j + b) * 4 + lane % 4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int at = 4 * (2 * j + b) + 2 * h;
          o4[2 * b + h] = pack(T{}, O[at] * r.x, O[at + 1] * r.y);
        }
      }
      stmatrix_x4_trans(tile + j * 2048, o4);
    }
    fence_async_proxy();
    __syncwarp();
  }
};

// Recomputes the tile: kept, its fields would stay live through the loop and cost registers.
template <class C>
GDN_DEVICE Tile tile_again(const SharedMemory<C>& sm, const KernelParams& params, int index) {
  if constexpr (C::kOneTile) {
    asm volatile("" ::: "memory");
    return sm.tile;
  } else {
    asm volatile("" : "+r"(index));
    return tile_at<C>(params, index);
  }
}

template <class C>
GDN_DEVICE void state_role(SharedMemory<C>& sm, const KernelParams& params, int slot, int warp) {
  using T = typename C::T;
  using F = Frame<T>;
  State<C> state(sm, params, slot);
  const bool lead = state.lane == 0;
  const uint32_t start = clock_now();
  uint32_t it = 0;  // chunks so far
  uint32_t q = 0;   // stage of the chunk's q
  static_assert(kTStages == 2 && kPStages == 2);
  constexpr bool kStops = C::kPool && C::kOutput;
  // Where P u' cannot have the units of q S', one of them is multiplied in between: P u', or q S' where
  // that comes first.
  constexpr bool kLiftsFirst = F::kLiftsOutput && C::kOutput && C::kKeepsRounded;
  constexpr bool kLiftsStatesPart = F::kLiftsOutput && C::kOutput && !C::kKeepsRounded;

#pragma unroll 1
  for (int index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    int left;
    bool without_v;
    {
      const Tile tile = tile_again(sm, params, index);
      state.load(tile);
      left = tile.length;
      without_v = C::kPass == Pass::kMaps && tile.map == 1;
    }
    float end = exp2_approx(Frame<T>::kTop);
    do {
      int stop = 0;  // as far as this the chunks go, before the state is stored
      if constexpr (kStops) {
        stop = state.next_stop(tile_again(sm, params, index), left);
        store_shared_4(shared_address(&sm.stop[slot][warp]), stop);
      }
#pragma unroll 1
      for (; left > stop; left -= kChunk, ++it) {
        const uint32_t pair = it % 2, pair_phase = it / 2 & 1;
        const uint32_t k = it % C::kKStages, v = it % C::kVStages;
        const GateVectors& gates = sm.gates[it % C::kGateStages];
        const uint32_t k_tile = shared_address(sm.k[k]);
        float x[32] = {}, o[32] = {};  // defined each turn, or they would live from turn to turn
        typename State<C>::Rounded Sb;
        uint32_t u[16];

        wait(sm, sm.gates_full[it % C::kGateStages], it / C::kGateStages & 1, kWaitGates);
        if (left < kChunk) wait(sm, sm.t_full[pair], pair_phase, kWaitT);  // the tail is cleared
        wait(sm, sm.k_full[k], it / C::kKStages & 1, kWaitK);
        if constexpr (C::kStatesMakeP) {
          if (int(it % C::kStates) == slot) {
            const uint32_t since_p = clock_now();
            const Triangles<C> own(sm, kStateBarrier + slot, fresh_lane(), warp);
            wait(sm, sm.q_full[q], it / C::kQStages & 1, kWaitP);
            own.issue_product(x, shared_address(sm.q[q]), k_tile);
            wgmma_wait<0>();
            pin(x);
            wait(sm, sm.p_empty[pair], pair_phase ^ 1, kWaitP);
            finish_p(own, x, pair, gates);
            arrive(sm.p_full[pair], lead);
            charge(sm, kMakeP, since_p);
          }
        }
        end = gates.end;
        state.enter(Sb, gates);
        if constexpr (C::kKeepsRounded) {
          pin(Sb);
          pin(x);
          wgmma_fence();
          state.issue_read(x, Sb, k_tile, false);
          wgmma_commit();
          if (gates.post != 1.f) state.scale(gates.post);  // beside the product
        } else {
          if constexpr (C::kOutput) {
            wait(sm, sm.q_full[q], it / C::kQStages & 1, kWaitP);
            pin(o);
          }
          pin(x);
          state.issue_reads(x, o, k_tile, shared_address(sm.q[q]));
        }

        wait(sm, sm.v_full[v], it / C::kVStages & 1, kWaitV);
        const uint32_t since_sk = clock_now();
        wgmma_wait<0>();
        pin(x);
        charge(sm, kWaitSk, since_sk);
        if constexpr (!C::kKeepsRounded) {
          if constexpr (C::kOutput) pin(o);
          if (gates.post != 1.f) state.scale(gates.post);
        }
        if (left < kChunk) {  // the rest of v is the next sequence's, perhaps NaN
          clear_rows(sm.v[v][slot], left);
          fence_async_proxy();
          named_barrier(kStateBarrier + slot, 128);
        }
        state.make_x(x, u, shared_address(sm.v[v][slot]), gates, without_v);
        arrive(sm.v_empty[v], state.one_lane_after(u[3] ^ u[7] ^ u[11] ^ u[15]));
        wait(sm, sm.t_full[pair], pair_phase, kWaitT);
        pin(x);
        pin(u);
        wgmma_fence();
        state.issue_triangle(x, u, shared_address(sm.t[pair]), true);
        wgmma_commit();
        const uint32_t since_u = clock_now();
        wgmma_wait<0>();
        pin(x);
        charge(sm, kWaitU, since_u);
        arrive(sm.t_empty[pair], lead);

#pragma unroll
        for (int i = 0; i < 16; ++i) u[i] = pack(T{}, x[2 * i], x[2 * i + 1]);
        if constexpr (C::kOutput) {
          wait(sm, sm.p_full[pair], pair_phase, kWaitP);
          if constexpr (C::kKeepsRounded) pin(Sb);
          if (kLiftsStatesPart && gates.steep) state.lift(o, gates);
          pin(o);
          pin(u);
          wgmma_fence();
          if constexpr (C::kKeepsRounded && !F::kLiftsOutput)
            state.issue_read(o, Sb, shared_address(sm.q[q]), false);
          state.issue_triangle(o, u, shared_address(sm.p[pair]), !kLiftsFirst);
          wgmma_commit();
        }
        if constexpr (F::kLiftsOutput) {
          if constexpr (C::kOutput) {
            wgmma_wait<0>();
            pin(o);
          }
          if (gates.steep) {
            if constexpr (kLiftsFirst) state.lift(o, gates);
            state.decay_to_end(u, gates);
          }
          if constexpr (kLiftsFirst) {
            pin(Sb);
            pin(o);
            wgmma_fence();
            state.issue_read(o, Sb, shared_address(sm.q[q]), true);
            wgmma_commit();
          }
        }
        pin(state.S);
        pin(u);
        wgmma_fence();
        state.issue_update(u, k_tile);
        wgmma_commit();

        if constexpr (C::kOutput) {
          wait(sm, sm.o_empty[slot], (it & 1) ^ 1, kWaitO);
          const uint32_t since_out = clock_now();
          wgmma_wait<1>();
          pin(o);
          charge(sm, kWaitOut, since_out);
          arrive(sm.p_empty[pair], lead);
          arrive(sm.q_empty[q], lead);
          if (++q == C::kQStages) q = 0;
          state.emit(o, gates);
          arrive(sm.o_full[slot], lead);
        }
        __syncwarp();
        arrive(sm.gates_empty[it % C::kGateStages], lead);
        if constexpr (kStops)  // no register has been free for it
          stop = load_shared_4(shared_address(&sm.stop[slot][warp]));
        const uint32_t since_kv = clock_now();
        wgmma_wait<0>();
        pin(state.S);
        charge(sm, kWaitKv, since_kv);
        arrive(sm.k_empty[k], lead);
      }
      const Tile tile = tile_again(sm, params, index);
      if constexpr (kStops) {
        state.zero_skipped(tile);
        state.store_at_stop(tile, left, end);
      } else {
        state.store(tile, end);
      }
    } while (kStops && left > 0);
  }
  charge(sm, kTotalState, start);
}

}  // namespace gdn::sm90
