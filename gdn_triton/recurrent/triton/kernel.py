"""The recurrence, token by token, for decoding: one kernel for sequences and for pools of states.

    S = exp(g) S,    v_new = beta (v - S^T k),    o = scale (S^T q + (q . k) v_new),
    S = S + k (x) v_new

S on the right of a line is the S of the line before. Both products read the decayed state, so they
are independent of each other. A program holds PARTS times BV columns of the state [K, V] of one
sequence and value head in registers, from the first token to the last. Memory bandwidth bounds a
decode step: it loads and stores the state, and all other data is a few hundred bytes.

The arithmetic of a token and its order do not depend on the other tokens of a call. Therefore a
call of several tokens gives the same bits as several calls of one token.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from gdn_triton._triton.activations import log_decay, sigmoid
from gdn_triton.recurrent.triton.sums import column_sums, products


@triton.jit
def decay_of(b_g, RCP_LN2: tl.constexpr):
    """Returns exp(b_g) of natural-log decays in fp32."""
    return tl.exp2(b_g.to(tl.float32) * RCP_LN2)


@triton.jit
def joined(x):
    """Returns x [BR, GROUPS, BV / GROUPS] as [BR, BV], and any other x as it is."""
    return tl.reshape(x, [x.shape[0], x.shape[1] * x.shape[2]]) if len(x.shape) == 3 else x


@triton.jit
def in_groups(x, GROUPS: tl.constexpr):
    """Returns x [BR, BV] as [BR, GROUPS, BV / GROUPS], and x itself if there is one group."""
    return tl.reshape(x, [x.shape[0], GROUPS, x.shape[1] // GROUPS]) if GROUPS > 1 else x


@triton.jit
def load_columns(p, stride, at_v, end, BV: tl.constexpr, PARTS: tl.constexpr):
    """Loads the columns at_v below `end` of each part. p points to the first part."""
    parts = ()
    for part in tl.static_range(PARTS):
        b_v = tl.load(p + part * BV * stride, mask=at_v < end - part * BV, other=0)
        parts += (joined(b_v),)
    return parts


@triton.jit
def load_rows(p, stride, o_r, end, ROWS: tl.constexpr):
    """Loads the elements o_r below `end` of each of ROWS pieces of a token. p points to the first
    element."""
    BR: tl.constexpr = o_r.shape[0]
    rows = ()
    for i in tl.static_range(ROWS):
        rows += (tl.load(p + (o_r + i * BR) * stride, mask=o_r < end - i * BR, other=0),)
    return rows


@triton.jit
def like_columns(x, columns):
    """Returns x [BV], repeated in each row if `columns` is [BR, BV]."""
    return tl.broadcast_to(x[None, :], columns.shape) if len(columns.shape) == 2 else x


@triton.jit
def unpacked(x, one):
    """Returns x in float32. one: the number 1, which the compiler does not know. The compiler does
    not see that `x.to(tl.float32)` has the same numbers. It would otherwise keep the numbers of the
    sums until the state is written, in twice the registers of 16-bit numbers."""
    if x.dtype == tl.bfloat16:
        # A bfloat16 number is the upper half of a float32 number.
        x = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif x.dtype == tl.float16:
        x = x * one.to(tl.float16)
    return x.to(tl.float32)


@triton.jit
def strength(b_beta, FACTOR: tl.constexpr):
    """Returns FACTOR times the sigmoid of b_beta in fp32, or b_beta itself if FACTOR is 0."""
    b_beta = b_beta.to(tl.float32)
    return sigmoid(b_beta, FACTOR) if FACTOR != 0 else b_beta


@triton.jit
def normalizer(square, scale, EPS: tl.constexpr):
    """Returns scale over the norm of a vector whose sum of squares is given, off by up to two units
    in the last place."""
    return scale * tl.rsqrt(square + EPS)


@triton.jit
def store_state(p, kept, in_k, in_v, GROUPS: tl.constexpr, POLICY: tl.constexpr):
    tl.store(p, in_groups(kept, GROUPS), mask=in_k & in_v, eviction_policy=POLICY)


@triton.jit
def tiles_of_parent(
    tiles, p_ht, p_slot, i_0, parent, i_t, stride_n, o_r, o_v, stride_k: tl.constexpr,
    stride_v: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, LAST_SKIPPED: tl.constexpr
):  # fmt: skip
    """Returns the tiles of the state from which token i_t starts. tiles: the state after the token
    before. i_0: the slot of the sequence's own state. p_slot: points to the slot of the parent's
    state."""
    BR: tl.constexpr = o_r.shape[0]
    BV: tl.constexpr = o_v.shape[0]
    # A thread may load elements that another thread has written.
    tl.debug_barrier()
    moves = parent != i_t - 1
    slot = tl.load(p_slot, mask=moves & (parent >= 0), other=LAST_SKIPPED).to(tl.int64)
    slot = tl.where(parent < 0, i_0, slot)
    moves = moves & (slot > LAST_SKIPPED)
    end_k = tl.where(moves, K, 0)
    found = ()
    for part in tl.static_range(PARTS):
        for i in tl.static_range(ROWS):
            p = p_ht + slot * stride_n + part * BV * stride_v + i * BR * stride_k
            mask = (o_r < end_k - i * BR)[:, None] & (o_v < V - part * BV)[None, :]
            tile = tl.load(p, mask=mask, other=0)
            found += (tl.where(moves, tile, tiles[part * ROWS + i]),)
    return found


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
    parents,
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
    stride_pb,
    stride_pt,
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
    ROWS: tl.constexpr,
    FOLD: tl.constexpr,
    ORDERED: tl.constexpr,
    COMPACT: tl.constexpr,
    GROUPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """BETA_FACTOR: beta is this factor times the sigmoid of the given beta; 0: beta is the given
    one. The strides inside a state are constants, so that an address is a base plus an offset that
    the load or store instruction contains. PARTS, ROWS, FOLD, ORDERED, COMPACT, GROUPS: see
    `RecurrentForm`. DEPENDENT: see `dependent_launch`."""
    # Only float32 states have decays of rows, and their form has one tile of rows.
    tl.static_assert(ROWS == 1 or gk is None)
    pid = tl.program_id(0).to(tl.int64)
    V_BLOCKS: tl.constexpr = (V + PARTS * BV - 1) // (PARTS * BV)
    i_v, i_nh = pid % V_BLOCKS, pid // V_BLOCKS
    i_n, i_hv = i_nh // HV, i_nh % HV
    i_h = i_hv // (HV // H)
    BR: tl.constexpr = BK // ROWS
    o_k, o_r = tl.arange(0, BK), tl.arange(0, BR)
    # These are the columns of the first part. The columns of other parts are multiples of BV
    # further.
    first_v = i_v.to(tl.int32) * (PARTS * BV)
    o_v = first_v + tl.arange(0, BV)
    in_k = o_k < K
    # These are the rows and columns of a tile.
    at_row, at_column = o_r[:, None], o_v[None, :]
    if GROUPS > 1:
        # The compiler spreads the warps over the second dimension, so each has all rows of a group.
        WIDTH: tl.constexpr = BV // GROUPS
        at_row = o_r[:, None, None]
        at_column = tl.arange(0, GROUPS)[None, :, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
        at_column += first_v
    # These are the columns of v and o. In a compact key-first form a thread has one row of a tile.
    # It loads its columns of v in the layout of the tile, because [BV] would go through shared
    # memory. The first row of o is stored.
    ONE_ROW: tl.constexpr = COMPACT and not STATE_V_FIRST
    at_v = o_v
    if ONE_ROW:
        tl.static_assert(FOLD == 0 and gv is None and not BETA_PER_VALUE)
        at_v = at_column + at_row * 0

    if DEPENDENT:
        gdc_wait()
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
    end_k, end_v = tl.where(any_token, K, 0), tl.where(any_token, V, 0)
    p_q = q + i_b * stride_qb + row * stride_qt + i_h * stride_qh
    p_k = k + K_OFFSET * stride_kk + i_b * stride_kb + row * stride_kt + i_h * stride_kh
    p_v = (
        v
        + V_OFFSET * stride_vv
        + i_b * stride_vb
        + row * stride_vt
        + i_hv * stride_vh
        + at_v * stride_vv
    )
    next_q = tl.load(p_q + o_k * stride_qk, mask=o_k < end_k, other=0)
    next_k = tl.load(p_k + o_k * stride_kk, mask=o_k < end_k, other=0)
    if ROWS > 1:
        next_q_rows = load_rows(p_q, stride_qk, o_r, end_k, ROWS)
        next_k_rows = load_rows(p_k, stride_kk, o_r, end_k, ROWS)
    next_v = load_columns(p_v, stride_vv, at_v, end_v, BV, PARTS)
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
    if parents is not None:
        p_parent = parents + i_b * stride_pb + row * stride_pt
        p_slots = write_slots + i_b * stride_wb + row * stride_wt
    slot = i_0
    if ht is not None:
        if write_slots is not None and not EVERY_TOKEN:
            p_write = write_slots + i_n * stride_wb
            slot = tl.load(p_write, mask=i_n < N, other=LAST_SKIPPED).to(tl.int64)
        p_ht = ht + i_hv * stride_hth
        p_ht += at_row * stride_htk + at_column * stride_htv

    p_o = o + i_b * stride_ob + row * stride_ot + i_hv * stride_oh + at_v * stride_ov
    if ORDERED:
        tl.debug_barrier()
    if read_slots is not None:
        live = i_0 > LAST_SKIPPED
    if not live:
        nothing = tl.zeros(at_v.shape, dtype=o.dtype.element_ty)
        for _ in range(0, n_tokens):
            for part in tl.static_range(PARTS):
                in_o = at_v < V - part * BV
                in_o = in_o & (at_row == 0) if ONE_ROW else in_o
                tl.store(p_o + part * BV * stride_ov, nothing, mask=in_o)
            p_o += stride_ot
        return

    # Round the state between two tokens as a store would, so that the next token reads the same
    # numbers as in a call of its own.
    KEPT: tl.constexpr = ht.dtype.element_ty if ht is not None else tl.float32
    if h0 is not None:
        p_h0 = h0 + i_0 * stride_h0n + i_hv * stride_h0h
        p_h0 += at_row * stride_h0k + at_column * stride_h0v
    tiles = ()
    for part in tl.static_range(PARTS):
        for i in tl.static_range(ROWS):
            if h0 is not None:
                p_tile = p_h0 + part * BV * stride_h0v + i * BR * stride_h0k
                in_tile = (at_row < K - i * BR) & (at_column < V - part * BV)
                tile = joined(tl.load(p_tile, mask=in_tile, other=0, eviction_policy=POLICY))
            else:
                tile = tl.zeros([BR, BV], dtype=KEPT)
            tiles += (tile.to(KEPT),)
    if ORDERED:
        tl.debug_barrier()
        if COMPACT:
            # ptxas moves instructions that wait for the token up across a barrier, and then issues
            # the loads of the state one by one. It moves none across a branch. No T is negative.
            if T < 0:
                return

    for i_t in range(0, n_tokens):
        if parents is not None and not ONE_TOKEN:
            parent = tl.load(p_parent).to(tl.int32)
            p_parent += stride_pt
            tiles = tiles_of_parent(
                tiles, p_ht, p_slots + parent * tl.cast(stride_wt, tl.int64), i_0, parent, i_t,
                stride_htn, o_r, o_v, stride_htk, stride_htv, K, V, PARTS, ROWS, LAST_SKIPPED
            )  # fmt: skip
        b_q, b_k, token_v = next_q.to(tl.float32), next_k.to(tl.float32), next_v
        more = i_t + 1 < n_tokens
        end_k, end_v = tl.where(more, K, 0), tl.where(more, V, 0)
        p_q += stride_qt
        p_k += stride_kt
        p_v += stride_vt
        next_q = tl.load(p_q + o_k * stride_qk, mask=o_k < end_k, other=0)
        next_k = tl.load(p_k + o_k * stride_kk, mask=o_k < end_k, other=0)
        read_q, read_k, k_rows = (b_q,), (b_k,), (b_k,)
        if ROWS > 1:
            read_q, read_k, k_rows = next_q_rows, next_k_rows, next_k_rows
            next_q_rows = load_rows(p_q, stride_qk, o_r, end_k, ROWS)
            next_k_rows = load_rows(p_k, stride_kk, o_r, end_k, ROWS)
        next_v = load_columns(p_v, stride_vv, at_v, end_v, BV, PARTS)

        # Multiply the sums of q or k, not their elements, by a scalar factor of q or k.
        of_q, of_k = scale, 1.0
        qq, kk, qk = products(b_q, b_k)
        if USE_QK_L2NORM:
            of_q = normalizer(qq, scale, EPS)
            of_k = normalizer(kk, 1.0, EPS)
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
        if gk is not None:
            row_decay = decay_of(tl.load(p_gk, mask=in_k, other=0), RCP_LN2)
            p_gk += stride_gkt
            read_q, read_k = (b_q * row_decay,), (b_k * row_decay,)
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
            b_o, stored = column_sums(
                tiles, part * ROWS, read_q, read_k, ROWS, FOLD, STATE_V_FIRST, K == BK
            )  # fmt: skip
            b_o, stored = b_o * (of_q * decay), stored * (of_k * decay)
            b_o, stored = like_columns(b_o, token_v[part]), like_columns(stored, token_v[part])
            if gv is not None:
                p_decay = p_gv + part * BV * stride_gvv
                column_decay = decay_of(tl.load(p_decay, mask=in_v, other=0), RCP_LN2)
                b_o, stored = b_o * column_decay, stored * column_decay
            b_v = (token_v[part].to(tl.float32) - stored) * of_k
            if beta is not None:
                if BETA_PER_VALUE:
                    b_beta = strength(token_beta[part], BETA_FACTOR)
                b_v *= b_beta
            b_o = in_groups(tl.fma(b_v, qk, b_o).to(o.dtype.element_ty), GROUPS)
            in_o = at_v < V - part * BV
            if not COMPACT:
                tl.store(p_o + part * BV * stride_ov, b_o, mask=in_o)

            columns = b_v if ONE_ROW else b_v[None, :]
            in_kept = at_column < V - part * BV
            if EVERY_TOKEN or write_slots is not None:
                in_kept = at_column < tl.where(slot > LAST_SKIPPED, V - part * BV, 0)
            for i in tl.static_range(ROWS):
                b_h = tiles[part * ROWS + i]  # type: ignore[var-annotated]
                b_h = unpacked(b_h, T > 0) if COMPACT else b_h.to(tl.float32)
                if gk is not None:
                    b_h *= row_decay[:, None]
                if gv is not None:
                    b_h *= column_decay[None, :]
                token_k = k_rows[i].to(tl.float32)
                kept = tl.fma(b_h, decay, token_k[:, None] * columns).to(KEPT)
                kept_tiles += (kept,)
                if ht is not None and (EVERY_TOKEN or ONE_TOKEN):
                    p_kept = p_ht + slot * stride_htn + part * BV * stride_htv + i * BR * stride_htk
                    store_state(p_kept, kept, at_row < K - i * BR, in_kept, GROUPS, POLICY)
            if COMPACT:
                # Stores keep their order. After an earlier store of o, ptxas computes the whole new
                # state in float32 before it writes the first of it.
                in_o = in_o & (at_row == 0) if ONE_ROW else in_o
                tl.store(p_o + part * BV * stride_ov, b_o, mask=in_o)
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
            for i in tl.static_range(ROWS):
                p_kept = p_ht + slot * stride_htn + part * BV * stride_htv + i * BR * stride_htk
                in_v = at_column < end_v - part * BV
                store_state(
                    p_kept, tiles[part * ROWS + i], at_row < K - i * BR, in_v, GROUPS, POLICY
                )
