// The triangles of a chunk, by a warpgroup: T = (I + A)^-1 and P = q k^T.
//
// Warp w has rows 16 w to 16 w + 15 of q k^T and k k^T, in the layout of WGMMA's accumulators. The
// inverse is built from 8 x 8 diagonal blocks by substitution in fp32; two of them make a 16 x 16
// block by
//     [[X, 0], [L, Y]]^-1 = [[X^-1, 0], [-(Y^-1 L) X^-1, Y^-1]]
// and then each warp solves for a block column, in fp16 with fp32 sums. Warps exchange blocks
// through shared memory, in fp16.
#pragma once
#include "sm90/tile/block.cuh"
#include "sm90/tile/gates.cuh"
#include "sm90/tile/wgmma.cuh"

namespace gdn::sm90 {

// The place of a lane's 16-byte line in a swizzled tile, for a 16 x 16 block (row lane % 16, two
// lines a row) and for an 8 x 8 block (row lane % 8). The swizzle is an exclusive or with the row,
// and so is the step to another column block.
struct Lines {
  uint32_t block, small;
  GDN_DEVICE explicit Lines(int lane)
      : block(lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16), small(lane % 8 * (128 + 16)) {}
  // Block (row, column) in units of 16.
  GDN_DEVICE uint32_t block_at(uint32_t tile, int row, int column) const {
    return tile + row * 2048 + (block ^ column * 32);
  }
  // Block (row, column) in units of 8.
  GDN_DEVICE uint32_t small_at(uint32_t tile, int row, int column) const {
    return tile + row * 1024 + (small ^ column * 16);
  }
};

// d += a b^T for 16 x 16 blocks, b from shared memory.
GDN_DEVICE void product_transposed(float (&d)[2][4], const uint32_t (&a)[4], uint32_t b_line) {
  uint32_t b[4];
  ldmatrix_x4(b_line, b);
  mma_16816(__half{}, d[0], a, b[0], b[2]);
  mma_16816(__half{}, d[1], a, b[1], b[3]);
}
template <class T>
GDN_DEVICE void pack_block(const float (&d)[2][4], uint32_t (&r)[4], float sign) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    r[i] = pack(T{}, sign * d[i / 2][i % 2 * 2], sign * d[i / 2][i % 2 * 2 + 1]);
}

// Zeroes rows of a tile from `rows` on, by the 128 threads of a warpgroup.
template <class C>
GDN_DEVICE void clear_rows(uint8_t* tile, int rows) {
#pragma unroll 1
  for (int line = rows * 8 + thread_of<C>() % 128; line < 64 * 8; line += 128)
    reinterpret_cast<uint4*>(tile)[line] = make_uint4(0, 0, 0, 0);
}

template <class C>
struct Triangles {
  using T = typename C::T;
  const int named, lane, w;  // named: the warpgroup's barrier; w: the warp of the warpgroup
  const Lines lines;
  const uint32_t a_tile, inverse_tile;  // of an inverse warpgroup

  GDN_DEVICE Triangles(int named, int lane, int warp, const uint8_t* a = nullptr,
                       const uint8_t* inverse = nullptr)
      : named(named),
        lane(lane),
        w(warp),
        lines(lane),
        a_tile(shared_address(a)),
        inverse_tile(shared_address(inverse)) {}

  GDN_DEVICE void barrier() const { named_barrier(named, 128); }

  // d = x y^T over all channels, issued and committed.
  GDN_DEVICE void issue_product(float (&d)[32], uint32_t x, uint32_t y) const {
    const Descriptor x_rows = k_major(x), y_rows = k_major(y);
    pin(d);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::kKeys / 16; ++i) {
      const uint32_t bytes = i / 4 * kTileBytes + i % 4 * 32;
      wgmma_ss_n64(T{}, d, x_rows.at(bytes), y_rows.at(bytes), i > 0);
    }
    wgmma_commit();
  }

  // The two halves of a word that lie on (`least` 0) or below (1) the diagonal of an 8 x 8 block.
  GDN_DEVICE uint32_t lower(int least) const {
    const int above = lane / 4 - lane % 4 * 2;  // row - column of the first
    return (above >= least ? 0xffffu : 0u) | (above > least ? 0xffff0000u : 0u);
  }
  // Zeroes the entries of a packed 16 x 16 block above its diagonal (diagonal: the block lies on
  // that of the tile).
  GDN_DEVICE static void keep_lower(uint32_t (&r)[4], uint32_t lower, bool diagonal) {
    const uint32_t all = diagonal ? 0u : ~0u;
    r[0] &= lower | all;
    r[2] &= all;
    r[3] &= lower | all;
  }

  // Stores row strip w of a triangle: word(b, i) is word i of block column b, in the layout of
  // WGMMA's accumulators.
  template <class Word>
  GDN_DEVICE void store_strip(uint32_t tile, uint32_t lower, const Word& word) const {
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      if (b > w) break;
      uint32_t r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) r[i] = word(b, i);
      keep_lower(r, lower, b == w);
      stmatrix_x4(lines.block_at(tile, w, b), r);
    }
  }
  // Stores words of type E, in a steep chunk times the decay that stays in the triangle; power(row)
  // is the exponent of a row. Entries above the diagonal may become infinite or NaN, and are masked
  // after that.
  template <class E, class Power, class Word>
  GDN_DEVICE void store_triangle(uint32_t tile, uint32_t lower, const GateVectors& gates,
                                 const Power& power, const Word& word) const {
    const auto biased = [&](int i) { return biased_power<E>(power(w * 16 + lane / 4 + 8 * i)); };
    const auto times_decay = [&](uint32_t x, uint32_t row, int b, int i) {
      const auto* columns = reinterpret_cast<const uint32_t*>(gates.left);
      return multiply(E{}, x, power_of_two<E>(row, columns[8 * b + 4 * (i / 2) + lane % 4]));
    };
    if constexpr (C::kStates == 2) {  // a mild chunk does not fetch the instructions of a steep one
      if (!gates.steep) {
        store_strip(tile, lower, word);
      } else {
        const uint32_t rows[2] = {biased(0), biased(1)};
        store_strip(tile, lower,
                    [&](int b, int i) { return times_decay(word(b, i), rows[i % 2], b, i); });
      }
    } else {  // fewer instructions: where two inverse warpgroups take different paths, a block
              // fetches both
      uint32_t r[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) r[i] = word(i / 4, i % 4);
      if (gates.steep) {
        const uint32_t rows[2] = {biased(0), biased(1)};
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          if (i / 4 > w) break;
          r[i] = times_decay(r[i], rows[i % 2], i / 4, i % 4);
        }
      }
      store_strip(tile, lower, [&](int b, int i) { return r[4 * b + i]; });
    }
  }

  // Stores row strip w of A to scratch memory, in fp16.
  GDN_DEVICE void store_a(const float (&kk)[32], const GateVectors& gates) const {
    const float beta[2] = {gates.beta[w * 16 + lane / 4], gates.beta[w * 16 + lane / 4 + 8]};
    store_triangle<__half>(
        a_tile, lower(1), gates, [&](int row) { return -gates.left[row]; },
        [&](int b, int i) {
          return pack(__half{}, kk[8 * b + 2 * i] * beta[i % 2],
                      kk[8 * b + 2 * i + 1] * beta[i % 2]);
        });
  }

  // Stores row strip w of P.
  GDN_DEVICE void store_p(const float (&qk)[32], uint32_t p_tile, const GateVectors& gates) const {
    store_triangle<T>(
        p_tile, lower(0), gates, [&](int row) { return gates.score[row]; },
        [&](int b, int i) { return pack(T{}, qk[8 * b + 2 * i], qk[8 * b + 2 * i + 1]); });
  }
  // Stores P to its tile, from a q k^T that has been waited for.
  GDN_DEVICE void finish_p(const float (&qk)[32], const uint8_t* p_tile,
                           const GateVectors& gates) const {
    store_p(qk, shared_address(p_tile), gates);
    fence_async_proxy();
    __syncwarp();
  }

  // Inverts the two 8 x 8 diagonal blocks of warp w. A lane has one row x of a block's inverse: x
  // (I + L) = e, from the last column to the first.
  GDN_DEVICE void invert_8(uint32_t t_tile) const {
    const int block = 2 * w + lane / 8 % 2, row = lane % 8;
    float x[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = j == row ? 1.f : 0.f;
#pragma unroll
    for (int k = 7; k > 0; --k) {
      uint32_t line[4];
      load_shared_16(a_tile + block * 1024 + k * 128 + (block % 8 ^ k) * 16, line);
#pragma unroll
      for (int j = 0; j < k; ++j) {
        const float2 pair = unpack(__half{}, line[j / 2]);
        x[j] -= x[k] * (j % 2 ? pair.y : pair.x);
      }
    }
    if (lane < 16) {
      uint32_t r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) r[i] = pack(__half{}, x[2 * i], x[2 * i + 1]);
      store_shared_16(lines.small_at(inverse_tile, block, block), r);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        r[i] = pack(T{}, 2 * i < row ? x[2 * i] : 0.f, 2 * i + 1 < row ? x[2 * i + 1] : 0.f);
      store_shared_16(lines.small_at(t_tile, block, block), r);
    }
  }

  // Merges the two inverses into that of warp w's 16 x 16 diagonal block.
  GDN_DEVICE void merge_8(uint32_t t_tile) const {
    const int low = 2 * w, high = 2 * w + 1;
    const uint32_t y = ldmatrix_x1(lines.small_at(inverse_tile, high, high));
    const uint32_t l = ldmatrix_x1_trans(lines.small_at(a_tile, high, low));
    const uint32_t x = ldmatrix_x1_trans(lines.small_at(inverse_tile, low, low));
    float d[4];
    mma_1688(d, 0, y, l);
    const uint32_t yl = pack(__half{}, -d[2], -d[3]);
    mma_1688(d, 0, yl, x);
    stmatrix_x1(lines.small_at(inverse_tile, high, low), pack(__half{}, d[2], d[3]));
    stmatrix_x1(lines.small_at(t_tile, high, low), pack(T{}, d[2], d[3]));
  }

  // Makes block column j of the inverse, from the inverses D of the 16 x 16 diagonal blocks:
  //     T_jj = D_j,  T_ij = -D_i (sum over j <= k < i of A_ik T_kj)
  // All products are transposed: a block that has just been made is the register operand of the
  // next product.
  GDN_DEVICE void solve_column(int j, uint32_t t_tile) const {
    uint32_t y[3][4];  // -T_kj, transposed, k = j, j + 1, ...; D_j itself with its own sign
    {
      uint32_t r[4];
      ldmatrix_x4_trans(lines.block_at(inverse_tile, j, j), r);
      y[0][0] = r[0];
      y[0][1] = r[2];
      y[0][2] = r[1];
      y[0][3] = r[3];
    }
#pragma unroll
    for (int n = 1; n < 4; ++n) {  // block row i = j + n
      const int i = j + n;
      if (i > 3) break;
      float d[2][4] = {};
#pragma unroll
      for (int k = 0; k < n; ++k) product_transposed(d, y[k], lines.block_at(a_tile, i, j + k));
      uint32_t sum[4];
      pack_block<__half>(d, sum, -1.f);
      float t[2][4] = {};
      product_transposed(t, sum, lines.block_at(inverse_tile, i, i));
      if (n < 3) pack_block<__half>(t, y[n], 1.f);
      uint32_t r[4];
      pack_block<T>(t, r, 1.f);
      const uint32_t transposed[4] = {r[0], r[2], r[1], r[3]};
      stmatrix_x4_trans(lines.block_at(t_tile, i, j), transposed);
    }
  }

  GDN_DEVICE void invert(uint32_t t_tile) const {
    __syncwarp();
    invert_8(t_tile);
    __syncwarp();
    merge_8(t_tile);
    barrier();
    if (w < 3) solve_column(w, t_tile);
  }
};

}  // namespace gdn::sm90
