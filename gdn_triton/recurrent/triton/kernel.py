"""The recurrence, token by token, for decoding: one kernel for sequences and for pools of states.

    S = exp(g) S,    v_new = beta (v - S^T k),    o = scale (S^T q + (q . k) v_new),
    S = S + k (x) v_new

Each line reads the S of the line before. Both products read the decayed state, and therefore do not
depend on each other. A program holds PARTS tiles of BV columns of the state [K, V] of one sequence
and value head in registers, from the first token to the last. A decode step is bound by reading and
writing the state; all other tensors have a few hundred bytes.

The arithmetic of a token and its order do not depend on the other tokens of a call, so a call of
several tokens gives the bits of several calls of one token.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from gdn_triton._triton.activations import log_decay
from gdn_triton._triton.tiles import Tile, padded
from gdn_triton.recurrent.triton.sums import column_sums, products


@triton.jit
def decay_of(b_g, RCP_LN2: tl.constexpr):
    """exp(b_g) of natural-log decays in fp32."""
    return tl.exp2(b_g.to(tl.float32) * RCP_LN2)


@triton.jit
def load_columns(p, stride, o_v, end, BV: tl.constexpr, PARTS: tl.constexpr):
    """Loads the columns o_v below `end` of each part. p points to the first part."""
    parts = ()
    for part in tl.static_range(PARTS):
        parts += (tl.load(p + part * BV * stride, mask=o_v < end - part * BV, other=0),)
    return parts


@triton.jit
def strength(b_beta, FACTOR: tl.constexpr):
    """FACTOR times the sigmoid of b_beta; with FACTOR 0, b_beta itself. fp32."""
    b_beta = b_beta.to(tl.float32)
    if FACTOR != 0:
        b_beta = tl.div_rn(FACTOR, 1 + tl.exp(-b_beta))
    return b_beta


@triton.jit
def store_state(p, kept, in_k, in_v, POLICY: tl.constexpr):
    tl.store(p, kept, mask=in_k[:, None] & in_v[None, :], eviction_policy=POLICY)


@triton.jit(do_not_specialize=["N", "T"])
def recurrent_fwd_kernel(
    q,
    k,
    v,
    g,
    gk,
    gv,
    beta,
    A_log,
    dt_bias,
    o,
    h0,
    ht,
    read_slots,
    write_slots,
    cu_seqlens,
    num_accepted_tokens,
    N,
    T,
    scale,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_qk,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_kk,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_vv,
    stride_gb,
    stride_gt,
    stride_gh,
    stride_gkb,
    stride_gkt,
    stride_gkh,
    stride_gkk,
    stride_gvb,
    stride_gvt,
    stride_gvh,
    stride_gvv,
    stride_bb,
    stride_bt,
    stride_bh,
    stride_bv,
    stride_A,
    stride_dt,
    stride_ob,
    stride_ot,
    stride_oh,
    stride_ov,
    stride_h0n,
    stride_h0h,
    stride_htn,
    stride_hth,
    stride_r,
    stride_rt,
    stride_wb,
    stride_wt,
    stride_c,
    stride_n,
    stride_h0k: tl.constexpr,
    stride_h0v: tl.constexpr,
    stride_htk: tl.constexpr,
    stride_htv: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    K_OFFSET: tl.constexpr,
    V_OFFSET: tl.constexpr,
    RCP_LN2: tl.constexpr,
    EPS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    USE_QK_L2NORM: tl.constexpr,
    BETA_PER_VALUE: tl.constexpr,
    BETA_FACTOR: tl.constexpr,
    EVERY_TOKEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    LAST_SKIPPED: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    POLICY: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
    PARTS: tl.constexpr,
    FOLD: tl.constexpr,
    ORDERED: tl.constexpr,
    WORDS: tl.constexpr,
):
    """BETA_FACTOR: beta is this factor times the sigmoid of the argument; 0: the argument is beta.
    The strides inside a state are constants, so that the loads and stores encode the offsets from
    one base address. PARTS, FOLD, ORDERED, WORDS: see `Form`."""
    pid = tl.program_id(0).to(tl.int64)
    V_BLOCKS: tl.constexpr = (V + PARTS * BV - 1) // (PARTS * BV)
    i_v, i_nh = pid % V_BLOCKS, pid // V_BLOCKS
    i_n, i_hv = i_nh // HV, i_nh % HV
    i_h = i_hv // (HV // H)
    o_k = tl.arange(0, BK)
    # These are the columns of the first part. The next parts follow at multiples of BV.
    o_v = i_v.to(tl.int32) * (PARTS * BV) + tl.arange(0, BV)
    in_k = o_k < K

    i_0 = i_n
    live = i_n < N
    if read_slots is not None:
        p_read = read_slots + i_n * stride_r
        if num_accepted_tokens is not None:
            accepted = tl.load(num_accepted_tokens + i_n * stride_n, mask=live, other=0)
            live &= (accepted > 0) & (accepted <= COLUMNS)
            p_read += (accepted.to(tl.int64) - 1) * stride_rt
        i_0 = tl.load(p_read, mask=live, other=LAST_SKIPPED).to(tl.int64)
    if cu_seqlens is None:
        i_b = i_n
        row = i_n * 0
        n_tokens = 1 if ONE_TOKEN else T
    else:
        # Program N of a head writes zeros to the rows after the last sequence.
        i_b = i_n * 0
        p_end = cu_seqlens + (i_n + 1) * stride_c
        row = tl.load(p_end - stride_c).to(tl.int64)
        end = tl.load(p_end, mask=i_n < N, other=T).to(tl.int64)
        n_tokens = (end - row).to(tl.int32)

    # Load the first token before the slot of the state is known. The loop loads one token ahead.
    any_token = n_tokens > 0
    in_q, end_v = o_k < tl.where(any_token, K, 0), tl.where(any_token, V, 0)
    p_q = q + i_b * stride_qb + row * stride_qt + i_h * stride_qh + o_k * stride_qk
    p_k = (
        k
        + K_OFFSET * stride_kk
        + i_b * stride_kb
        + row * stride_kt
        + i_h * stride_kh
        + o_k * stride_kk
    )
    p_v = (
        v
        + V_OFFSET * stride_vv
        + i_b * stride_vb
        + row * stride_vt
        + i_hv * stride_vh
        + o_v * stride_vv
    )
    next_q = tl.load(p_q, mask=in_q, other=0)
    next_k = tl.load(p_k, mask=in_q, other=0)
    next_v = load_columns(p_v, stride_vv, o_v, end_v, BV, PARTS)
    if g is not None:
        p_g = g + i_b * stride_gb + row * stride_gt + i_hv * stride_gh
        next_g = tl.load(p_g, mask=any_token, other=0)
    if beta is not None:
        p_beta = beta + i_b * stride_bb + row * stride_bt + i_hv * stride_bh
        if BETA_PER_VALUE:
            p_beta += o_v * stride_bv
            next_beta = load_columns(p_beta, stride_bv, o_v, end_v, BV, PARTS)
        else:
            next_beta = tl.load(p_beta, mask=any_token, other=0)
    if gk is not None:
        p_gk = gk + i_b * stride_gkb + row * stride_gkt + i_hv * stride_gkh + o_k * stride_gkk
    if gv is not None:
        p_gv = gv + i_b * stride_gvb + row * stride_gvt + i_hv * stride_gvh + o_v * stride_gvv
    if A_log is not None:
        b_A = tl.load(A_log + i_hv * stride_A).to(tl.float32)
        rate = tl.exp(b_A)
    if dt_bias is not None:
        b_bias = tl.load(dt_bias + i_hv * stride_dt).to(tl.float32)
    if num_accepted_tokens is not None:
        p_slot = read_slots + i_n * stride_r
    elif EVERY_TOKEN:
        p_slot = write_slots + i_b * stride_wb + row * stride_wt
    slot = i_0
    if ht is not None:
        if write_slots is not None and not EVERY_TOKEN:
            p_write = write_slots + i_n * stride_wb
            slot = tl.load(p_write, mask=i_n < N, other=LAST_SKIPPED).to(tl.int64)
        p_ht = ht + i_hv * stride_hth
        p_ht += o_k[:, None] * stride_htk + o_v[None, :] * stride_htv

    p_o = o + i_b * stride_ob + row * stride_ot + i_hv * stride_oh + o_v * stride_ov
    if ORDERED:
        tl.debug_barrier()
    if read_slots is not None:
        live = i_0 > LAST_SKIPPED
    if not live:
        nothing = tl.zeros([BV], dtype=o.dtype.element_ty)
        for _ in range(0, n_tokens):
            for part in tl.static_range(PARTS):
                tl.store(p_o + part * BV * stride_ov, nothing, mask=o_v < V - part * BV)
            p_o += stride_ot
        return

    # Between two tokens the state is rounded as in memory, so that the next token reads the same
    # numbers as in a call of its own.
    KEPT: tl.constexpr = ht.dtype.element_ty if ht is not None else tl.float32
    if h0 is not None:
        p_h0 = h0 + i_0 * stride_h0n + i_hv * stride_h0h
        p_h0 += o_k[:, None] * stride_h0k + o_v[None, :] * stride_h0v
    tiles = ()
    for part in tl.static_range(PARTS):
        if h0 is not None:
            p_tile = p_h0 + part * BV * stride_h0v
            in_tile = in_k[:, None] & (o_v < V - part * BV)[None, :]
            tile = tl.load(p_tile, mask=in_tile, other=0, eviction_policy=POLICY)
        else:
            tile = tl.zeros([BK, BV], dtype=KEPT)
        tiles += (tile.to(KEPT),)
    if ORDERED:
        tl.debug_barrier()

    for i_t in range(0, n_tokens):
        b_q, b_k, token_v = next_q.to(tl.float32), next_k.to(tl.float32), next_v
        more = i_t + 1 < n_tokens
        in_q, end_v = o_k < tl.where(more, K, 0), tl.where(more, V, 0)
        p_q += stride_qt
        p_k += stride_kt
        p_v += stride_vt
        next_q = tl.load(p_q, mask=in_q, other=0)
        next_k = tl.load(p_k, mask=in_q, other=0)
        next_v = load_columns(p_v, stride_vv, o_v, end_v, BV, PARTS)

        # A scalar factor of q or k multiplies the sums of q or k, not their elements.
        of_q, of_k = scale, 1.0
        qq, kk, qk = products(b_q, b_k, WORDS)
        if USE_QK_L2NORM:
            of_q = tl.div_rn(scale, tl.sqrt_rn(qq + EPS))
            of_k = tl.div_rn(1.0, tl.sqrt_rn(kk + EPS))
        qk *= of_q
        decay = 1.0
        if g is not None:
            b_g = next_g.to(tl.float32)
            p_g += stride_gt
            next_g = tl.load(p_g, mask=more, other=0)
            if A_log is not None:
                if dt_bias is not None:
                    b_g += b_bias
                b_g = log_decay(b_g, b_A, rate, THRESHOLD)
            decay = decay_of(b_g, RCP_LN2)
        read_q, read_k = b_q, b_k
        if gk is not None:
            row_decay = decay_of(tl.load(p_gk, mask=in_k, other=0), RCP_LN2)
            p_gk += stride_gkt
            read_q, read_k = b_q * row_decay, b_k * row_decay
        if beta is not None:
            token_beta = next_beta
            p_beta += stride_bt
            if BETA_PER_VALUE:
                next_beta = load_columns(p_beta, stride_bv, o_v, end_v, BV, PARTS)
            else:
                next_beta = tl.load(p_beta, mask=more, other=0)
                b_beta = strength(token_beta, BETA_FACTOR)
        if EVERY_TOKEN:
            if num_accepted_tokens is not None:
                slot = tl.load(p_slot, mask=i_t < COLUMNS, other=LAST_SKIPPED).to(tl.int64)
                p_slot += stride_rt
            else:
                slot = tl.load(p_slot).to(tl.int64)
                p_slot += stride_wt

        kept_tiles = ()
        for part in tl.static_range(PARTS):
            in_v = o_v < V - part * BV
            b_h = tiles[part].to(tl.float32)  # type: ignore[var-annotated]
            b_o, stored = column_sums(b_h, read_q, read_k, FOLD, STATE_V_FIRST)
            b_o, stored = b_o * (of_q * decay), stored * (of_k * decay)
            if gv is not None:
                p_decay = p_gv + part * BV * stride_gvv
                column_decay = decay_of(tl.load(p_decay, mask=in_v, other=0), RCP_LN2)
                b_o, stored = b_o * column_decay, stored * column_decay
            b_v = (token_v[part].to(tl.float32) - stored) * of_k
            if beta is not None:
                if BETA_PER_VALUE:
                    b_beta = strength(token_beta[part], BETA_FACTOR)
                b_v *= b_beta
            b_o = tl.fma(b_v, qk, b_o).to(o.dtype.element_ty)
            tl.store(p_o + part * BV * stride_ov, b_o, mask=in_v)

            if gk is not None:
                b_h *= row_decay[:, None]
            if gv is not None:
                b_h *= column_decay[None, :]
            kept = tl.fma(b_h, decay, b_k[:, None] * b_v[None, :]).to(KEPT)
            kept_tiles += (kept,)
            if ht is not None and (EVERY_TOKEN or ONE_TOKEN):
                if EVERY_TOKEN or write_slots is not None:
                    in_v = o_v < tl.where(slot > LAST_SKIPPED, V - part * BV, 0)
                p_kept = p_ht + slot * stride_htn + part * BV * stride_htv
                store_state(p_kept, kept, in_k, in_v, POLICY)
        tiles = kept_tiles
        p_o += stride_ot
        if gv is not None:
            p_gv += stride_gvt

    # With one token the loop stores the state of a part before it computes the next part.
    if ht is not None and not (EVERY_TOKEN or ONE_TOKEN):
        end_v = V
        if write_slots is not None:
            end_v = tl.where(slot > LAST_SKIPPED, V, 0)
        for part in tl.static_range(PARTS):
            p_kept = p_ht + slot * stride_htn + part * BV * stride_htv
            store_state(p_kept, tiles[part], in_k, o_v < end_v - part * BV, POLICY)


# The elements of the state that a thread holds. They give enough loads in flight, and leave enough
# registers for several programs on a multiprocessor.
STATE_OF_A_THREAD = 64


class Form(NamedTuple):
    """The way in which a program loads and sums its columns. No bit depends on `parts` and
    `ordered`.

    parts: the number of tiles of `tile.BV` columns of a program. All tiles are loaded before the
    first one is used, and are held in the states' dtype until then. fold: 2^fold rows of the state
    that lie in one thread are added up with fused multiplications
        and additions.
    ordered: barriers keep the loads of a token before the wait for the slot, and the loads of the
    state before the wait for the token. Without barriers ptxas moves the loads after these waits.
    words: the sums of q q, k k and q k use words of 32 bits.
    """

    tile: Tile
    parts: int = 1
    fold: int = 0
    ordered: bool = False
    words: bool = False


# The number of 2-byte elements that a thread loads at once.
VECTOR = 8


def recurrent_form(K: int, V: int, state_v_first: bool, itemsize: int) -> Form:
    """The form depends on a head's sizes, the states' layout and the bytes of their elements. It
    does not depend on the batch, because it fixes the order of the sums over K.

    A value-first row [K] lies in one warp, which computes its sums alone. In a key-first layout a
    program takes rows of 256 bytes of a float32 state, or of 64 bytes of a 16-bit state, and its
    warps share the sums. In measurements (docs/tried.md) float32 states reach the speed of memory
    without the other options, and 16-bit states need these options.
    """
    BK = padded(K, 256)
    narrow = itemsize == 2
    if state_v_first:
        BV = padded(V, 32 * STATE_OF_A_THREAD // BK // (2 if narrow else 1), least=1)
        tile, rows = Tile(BK, BV, 1, 1), min(VECTOR, BK // 2)
    else:
        BV = padded(V, 32 if narrow else 64)
        warps = max(1, BK * BV // (32 * STATE_OF_A_THREAD))
        tile, rows = Tile(BK, BV, warps, 1), max(1, BK * BV // (32 * warps * VECTOR))
    if not narrow:
        return Form(tile)
    parts = 2 if state_v_first and V > BV else 1
    return Form(tile, parts, rows.bit_length() - 1, ordered=True, words=state_v_first)


# Above this size the L2 cache evicts states before the next step reads them.
STATES_BEYOND_CACHE = 2**26


def eviction_policy(state_bytes: int) -> str:
    """The eviction policy for all states of a call, read and written. No bit depends on it. In
    measurements states that exceed the cache are faster with "evict_last", as their writes then
    leave the cache together, and smaller states with "evict_first"."""
    return "evict_last" if state_bytes >= STATES_BEYOND_CACHE else "evict_first"
