"""The inverse of a unit lower triangular chunk, (I + A)^-1 with A strictly lower [BT, BT].

Diagonal blocks are inverted by substitution in fp32. Each block belongs to one warp. Substitution
is stable for any keys, where a Neumann product would grow binomially. Then blocks of twice the size
follow by

    [[X, 0], [L, Y]]^-1 = [[X^-1, 0], [-Y^-1 L X^-1, Y^-1]]

with all blocks of a level in two full products. For 16-bit inputs the operands of these products
are fp16, which has the eleven significant bits of tf32 at half the traffic, and which the tensor
cores read without a transpose. `fits_half` decides whether the range of fp16 suffices; otherwise
blocks and products stay in fp32 and tf32.
"""

import triton
import triton.language as tl


@triton.jit
def merge_blocks(
    b_X, b_A, BT: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr, HALF: tl.constexpr
):
    """Computes the inverses of the diagonal blocks of 2 SIZE rows from those of SIZE rows."""
    o_t = tl.arange(0, BT)
    o_block, o_pair = o_t // SIZE, o_t // (2 * SIZE)
    below = (o_pair[:, None] == o_pair[None, :]) & (o_block[:, None] > o_block[None, :])
    b_L = tl.where(below, b_A, 0.0)
    if HALF:
        b_Xh = b_X.to(tl.float16)
        b_L = tl.dot(b_Xh, b_L.to(tl.float16))
        return b_X - tl.dot(b_L.to(tl.float16), b_Xh)
    b_L = tl.dot(b_X, b_L, input_precision=PRECISION)
    return b_X - tl.dot(b_L, b_X, input_precision=PRECISION)


@triton.jit
def invert_blocks(
    b_A, BT: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr, HALF: tl.constexpr
):
    """Returns (I + b_A)^-1 by substitution in blocks of BC, 8 or 16, and products."""
    NC: tl.constexpr = BT // BC
    o_c = tl.arange(0, BC)
    o_n = tl.arange(0, NC)
    same_block = (o_n[:, None] == o_n[None, :])[:, None, :, None]
    # The diagonal blocks [NC, BC, BC].
    b_D = tl.sum(tl.where(same_block, tl.reshape(b_A, [NC, BC, NC, BC]), 0.0), 2)
    # Right-looking substitution: once row j of X is final, column j of D removes it from all rows
    # below. Column and row broadcast along the tile's own axes, so no step moves data between
    # warps.
    b_X = tl.where((o_c[:, None] == o_c[None, :])[None, :, :], 1.0, 0.0) + tl.zeros_like(b_D)
    for j in tl.static_range(BC - 1):
        b_col = tl.sum(tl.where((o_c == j)[None, None, :], b_D, 0.0), 2)
        b_row = tl.sum(tl.where((o_c == j)[None, :, None], b_X, 0.0), 1)
        b_X -= b_col[:, :, None] * b_row[:, None, :]
    b_X = tl.where(same_block, b_X[:, :, None, :], 0.0)
    b_X = tl.reshape(b_X, [BT, BT])
    if BC < 16:
        b_X = merge_blocks(b_X, b_A, BT, 8, PRECISION, HALF)
    if BT > 16:
        b_X = merge_blocks(b_X, b_A, BT, 16, PRECISION, HALF)
    if BT > 32:
        b_X = merge_blocks(b_X, b_A, BT, 32, PRECISION, HALF)
    return b_X


@triton.jit
def invert_unit_lower(b_A, BT: tl.constexpr, PRECISION: tl.constexpr, HALF: tl.constexpr):
    """Returns (I + b_A)^-1 of a strictly lower triangular [BT, BT] fp32 tile, BT in 16, 32, 64.
    HALF: products have fp16 operands, which ``fits_half`` must have allowed."""
    BC: tl.constexpr = 8 if HALF and BT > 16 else 16
    return invert_blocks(b_A, BT, BC, PRECISION, HALF)


@triton.jit
def fits_half(b_kk, b_beta, BT: tl.constexpr):
    """Whether fp16 holds all values of an inversion. b_kk [BT, BT] = k k^T.

    While beta |k|^2 <= 2 each I - beta k k^T is a contraction, so an entry of the inverse is at
    most beta_i |k_i| |k_j|, which is 16 with beta and |k|^2 up to 4. A sum of 64 products of two
    such entries is a quarter of fp16's largest number. Normalised keys always fit. The choice
    depends on the chunk's own keys, so it is the same in any batch.
    """
    o_t = tl.arange(0, BT)
    # 2.1: a length of 1 after rounding.
    b_most = b_kk * tl.maximum(b_beta / 2.1, 0.25)[:, None]
    b_most = tl.maximum(b_most, b_beta[:, None] / 4)
    b_most = tl.where(o_t[:, None] == o_t[None, :], b_most, 0.0)
    # A single reduction of a vector: for Blackwell, Triton 3.6 cannot compile two reductions of a
    # product in a row.
    return tl.max(tl.reshape(b_most, [BT * BT]), 0) <= 1
