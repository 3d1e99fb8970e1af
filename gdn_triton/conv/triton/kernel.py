"""The causal depthwise convolution of each channel c over the tokens of a sequence,

    y_t = silu(bias + sum over j of weight[c, W - 1 - j] x_(t - j))        j = W - 1 ... 0

alone, or in one pass with the preparation after it (`gdn_triton.prep.triton`). Tokens before a
sequence's first token come from its state, which holds W - 1 earlier tokens, or are 0.

All tokens run in parallel. A program has some columns, or the gates, of a block of tokens. Each
thread has R consecutive tokens of its channels, and therefore loads each token (R + W - 1) / R
times. The kernel reads states; `gdn_triton.conv.triton.update` writes them afterwards.

A sum is W fused multiply-adds in fp32, the oldest token first, here and in the kernel of `update`,
so the same token has the same bits in both. The sum is rounded to the input's dtype before the
norm.
"""

import triton
import triton.language as tl

from gdn_triton._triton.activations import normalized
from gdn_triton._triton.taps import Filter, logistic, taps, weighted
from gdn_triton.conv.triton.rows import Packed, States, sequence_of, state_of, token
from gdn_triton.prep.triton import prepare_gates


@triton.jit
def or_before(b_x, row, first, p_state, p_c, stride_w, in_c, known, W: tl.constexpr):
    """Replaces the rows of b_x before `first`, the first row of a sequence, by rows of the state or
    0. b_x: a row of each lane, fp32."""
    before = row < first
    old = 0.0
    if p_state is not None:
        i_w = W - 1 + row - first
        kept = before & (i_w >= tl.where(known, 0, W))
        p = p_state + (i_w.to(tl.int64) * stride_w)[:, None] + p_c[None, :]
        old = tl.load(p, mask=kept[:, None] & in_c[None, :], other=0).to(tl.float32)
    return tl.where(before[:, None], old, b_x)


@triton.jit
def all_or_before(before, row, first, p_state, p_c, stride_w, in_c, known, W: tl.constexpr):
    """Applies `or_before` to the W - 1 tokens before `row`."""
    found = (or_before(before[0], row - 1, first, p_state, p_c, stride_w, in_c, known, W),)
    for i in tl.static_range(1, W - 1):
        x = or_before(before[i], row - (1 + i), first, p_state, p_c, stride_w, in_c, known, W)
        found += (x,)
    return found


@triton.jit
def heads_normalized(y, HEAD: tl.constexpr, EPS: tl.constexpr):
    """Divides each group of HEAD columns of y by its norm."""
    HEADS: tl.constexpr = y.shape[1] // HEAD
    if HEADS == 1:
        return normalized(y, EPS)
    else:
        heads = tl.reshape(y, [y.shape[0] * HEADS, HEAD])
        return tl.reshape(normalized(heads, EPS), [y.shape[0], y.shape[1]])


@triton.jit
def starts_of(i_row, packed, BT: tl.constexpr):
    """A mask whose bit t is set if row t of a block is the first row of a sequence, or the first
    row after all sequences."""
    tl.static_assert(BT <= 64, "a bit for each row of a block")
    o_t = tl.arange(0, BT)
    n = sequence_of(i_row + o_t, packed)
    starts = tl.load(packed.cu_seqlens + n).to(tl.int64) == i_row + o_t
    return tl.sum(starts.to(tl.int64) << o_t, 0)


@triton.jit
def convolve(
    x0,
    before,
    w,
    b_bias,
    live,
    p_out,
    written,
    HEAD: tl.constexpr,
    EPS: tl.constexpr,
    NVIDIA: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    SELECT: tl.constexpr,
):
    """Stores the convolution of a row of each lane. HEAD: the channels of a head, which is divided
    by its norm; 0: no norm. SELECT: rows that are not live are 0."""
    y = weighted(x0, before, w, b_bias, W)
    if SILU:
        y = y * logistic(y, NVIDIA)
    if SELECT:
        y = tl.where(live[:, None], y, 0.0)
    y = y.to(p_out.dtype.element_ty)
    if HEAD > 0:
        y = heads_normalized(y, HEAD, EPS)
    tl.store(p_out, y, mask=written)


@triton.jit
def conv_block(
    x,
    f,
    states,
    packed,
    out,
    o_c,
    in_c,
    o_out,
    i_b,
    i_row,
    n_rows,
    T,
    stride_xt,
    stride_xc,
    OUT_WIDTH: tl.constexpr,
    HEAD: tl.constexpr,
    EPS: tl.constexpr,
    NVIDIA: tl.constexpr,
    W: tl.constexpr,
    LANES: tl.constexpr,
    R: tl.constexpr,
    LAST_SKIPPED: tl.constexpr,
    SILU: tl.constexpr,
):
    """Computes some columns of a block of LANES * R rows, of which the first n_rows exist. A lane
    has R rows and walks over them with the W - 1 rows before in registers. x and out point to the
    block's first row, which is row i_row of batch entry i_b. o_c: the channels; o_out: their
    columns in out."""
    BT: tl.constexpr = LANES * R
    IS_PACKED: tl.constexpr = packed.cu_seqlens is not None
    # This mask has the bit of each lane's first row.
    FIRST_ROWS: tl.constexpr = ((1 << BT) - 1) // ((1 << R) - 1) if R > 1 else 0
    row = tl.arange(0, LANES) * R
    p_c = o_c.to(tl.int64) * stride_xc
    p_sc = o_c.to(tl.int64) * states.stride_c
    p_out = out + (row * OUT_WIDTH)[:, None] + o_out[None, :]
    # Issue all loads of x first: they are then in flight during the search for the sequences and
    # during the barriers that distribute the taps.
    oldest = tl.maximum(-i_row, -W).to(tl.int32)
    stored = (token(x, row - 1, stride_xt, p_c, in_c, oldest, n_rows),)
    for i in tl.static_range(1, W - 1):
        stored += (token(x, row - (1 + i), stride_xt, p_c, in_c, oldest, n_rows),)
    rows = (token(x, row, stride_xt, p_c, in_c, oldest, n_rows),)
    for r in tl.static_range(1, R):
        rows += (token(x, row + r, stride_xt, p_c, in_c, oldest, n_rows),)

    if IS_PACKED:
        i_n = sequence_of(i_row, packed)
        first = tl.load(packed.cu_seqlens + i_n).to(tl.int64) - i_row
        # The rows after all sequences end with the last row of the call.
        p_end = packed.cu_seqlens + i_n + 1
        whole = tl.load(p_end, mask=i_n < packed.N, other=T).to(tl.int64) >= i_row + n_rows
        valid = i_n < packed.N
    else:
        i_n = i_b
        first = -i_row
        whole = True
        valid = True
    slot, live, known = state_of(i_n, states, valid, LAST_SKIPPED)
    before = (stored[0].to(tl.float32),)
    for i in tl.static_range(1, W - 1):
        before += (stored[i].to(tl.float32),)
    if whole & live:
        if (states.state is not None) | IS_PACKED:
            if first > -W:
                p_state = states.state
                if states.state is not None:
                    p_state += slot * states.stride_n
                near = first.to(tl.int32)
                before = all_or_before(
                    before, row, near, p_state, p_sc, states.stride_w, in_c, known, W
                )
        w, b_bias = taps(f, o_c, in_c, W, True)
        for r in tl.static_range(R):
            x0 = rows[r].to(tl.float32)
            p_row = p_out + r * OUT_WIDTH
            written = (row + r < n_rows)[:, None] & in_c[None, :]
            convolve(x0, before, w, b_bias, live, p_row, written, HEAD, EPS, NVIDIA, W, SILU, False)
            before = (x0,) + before[: W - 2]
    elif IS_PACKED | (states.read_slots is not None):
        if whole:
            nothing = tl.zeros([LANES, o_out.shape[0]], dtype=out.dtype.element_ty)
            for i_r in range(R):
                written = (row + i_r < n_rows)[:, None] & in_c[None, :]
                tl.store(p_out + i_r * OUT_WIDTH, nothing, mask=written)
        elif IS_PACKED:
            # The block has several sequences, or the end of the last one. Its rows are in the L1
            # cache now.
            starts = starts_of(i_row, packed, BT)
            are_live = row < 0
            w, b_bias = taps(f, o_c, in_c, W, True)
            for i_r in range(R):
                o_t = row + i_r
                if (i_r == 0) | (((starts >> i_r) & FIRST_ROWS) != 0):
                    # The lane starts in a sequence or enters the next one. Rows before a sequence's
                    # start may be replaced a second time, with the same values.
                    n = sequence_of(i_row + o_t, packed)
                    firsts = tl.load(packed.cu_seqlens + n).to(tl.int64) - i_row
                    firsts = tl.maximum(firsts, -W).to(tl.int32)
                    slots, are_live, are_known = state_of(n, states, n < packed.N, LAST_SKIPPED)
                    p_states = states.state
                    if states.state is not None:
                        p_states += (slots * states.stride_n)[:, None]
                    before = all_or_before(
                        before, o_t, firsts, p_states, p_sc, states.stride_w, in_c, are_known, W
                    )
                if R == 1:
                    x0 = rows[0].to(tl.float32)
                else:
                    x0 = token(x, o_t, stride_xt, p_c, in_c, oldest, n_rows).to(tl.float32)
                p_row = p_out + i_r * OUT_WIDTH
                written = (o_t < n_rows)[:, None] & in_c[None, :]
                convolve(
                    x0,
                    before,
                    w,
                    b_bias,
                    are_live,
                    p_row,
                    written,
                    HEAD,
                    EPS,
                    NVIDIA,
                    W,
                    SILU,
                    True,
                )
                before = (x0,) + before[: W - 2]


@triton.jit(do_not_specialize=["T", "N", "STEPS", "stride_xb", "stride_xt", "stride_xc"])
def conv_kernel(
    x,
    weight,
    bias,
    state,
    read_slots,
    has_initial_state,
    cu_seqlens,
    a,
    b,
    A_log,
    dt_bias,
    q,
    k,
    v,
    g,
    beta,
    T,
    N,
    STEPS,
    stride_xb,
    stride_xt,
    stride_xc,
    stride_bc,
    stride_sn,
    stride_sc,
    stride_sw,
    stride_r,
    stride_i,
    stride_ab,
    stride_at,
    stride_ah,
    stride_bb,
    stride_bt,
    stride_bh,
    stride_wc: tl.constexpr,
    stride_ww: tl.constexpr,
    ALIGN: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V_COLUMNS: tl.constexpr,
    EPS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    NVIDIA: tl.constexpr,
    W: tl.constexpr,
    LANES: tl.constexpr,
    R: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    BG: tl.constexpr,
    QK_PARTS: tl.constexpr,
    V_PARTS: tl.constexpr,
    GATE_PARTS: tl.constexpr,
    LAST_SKIPPED: tl.constexpr,
    SILU: tl.constexpr,
    USE_L2NORM: tl.constexpr,
    G_EXP: tl.constexpr,
    CHANNEL_MAJOR: tl.constexpr,
):
    """For the convolution alone v is the output and has all columns: H and HV are 0. The stride of
    x that is 1 is passed as 0."""
    PARTS: tl.constexpr = 2 * QK_PARTS + V_PARTS + GATE_PARTS
    BT: tl.constexpr = LANES * R
    pid = tl.program_id(0).to(tl.int64)
    part = (pid % PARTS).to(tl.int32)
    i_block = pid // PARTS
    blocks = tl.cdiv(tl.cast(T, tl.int64), BT)
    i_b, i_row = i_block // blocks, (i_block % blocks) * BT
    n_rows = tl.minimum(T - i_row, BT).to(tl.int32)
    i_out = i_b * T + i_row
    if GATE_PARTS > 0:
        if part >= 2 * QK_PARTS + V_PARTS:
            prepare_gates(
                a + i_b * stride_ab + i_row * stride_at,
                b + i_b * stride_bb + i_row * stride_bt,
                A_log,
                dt_bias,
                g + i_out * HV,
                beta + i_out * HV,
                part - 2 * QK_PARTS - V_PARTS,
                n_rows,
                stride_at,
                stride_ah,
                stride_bt,
                stride_bh,
                HV,
                THRESHOLD,
                BG,
                G_EXP,
            )
            return
    if CHANNEL_MAJOR:
        stride_t = 1
        stride_c = stride_xc.to(tl.int64) * ALIGN
    else:
        stride_t = stride_xt.to(tl.int64) * ALIGN
        stride_c = 1
    x += i_b * stride_xb.to(tl.int64) * ALIGN + i_row * stride_t
    f = Filter(weight, bias, stride_wc, stride_ww, stride_bc)
    states = States(
        state,
        read_slots,
        has_initial_state,
        stride_sn,
        stride_sc,
        stride_sw,
        stride_r,
        stride_i,
    )
    packed = Packed(cu_seqlens, N, STEPS)
    i_f = tl.arange(0, BC)
    if QK_PARTS > 0:
        if part < 2 * QK_PARTS:
            out = q
            start = 0
            if part >= QK_PARTS:
                out = k
                start = H * K
                part -= QK_PARTS
            if USE_L2NORM:
                # A program has whole heads, each in BK columns.
                i_h = part * (BC // BK) + i_f // BK
                in_c = (i_h < H) & (i_f % BK < K)
                o_out = i_h * K + i_f % BK
            else:
                o_out = part * BC + i_f
                in_c = o_out < H * K
            conv_block(
                x,
                f,
                states,
                packed,
                out + i_out * (H * K),
                start + o_out,
                in_c,
                o_out,
                i_b,
                i_row,
                n_rows,
                T,
                stride_t,
                stride_c,
                H * K,
                BK if USE_L2NORM else 0,
                EPS,
                NVIDIA,
                W,
                LANES,
                R,
                LAST_SKIPPED,
                SILU,
            )
            return
    o_v = (part - 2 * QK_PARTS) * BC + i_f
    conv_block(
        x,
        f,
        states,
        packed,
        v + i_out * V_COLUMNS,
        2 * H * K + o_v,
        o_v < V_COLUMNS,
        o_v,
        i_b,
        i_row,
        n_rows,
        T,
        stride_t,
        stride_c,
        V_COLUMNS,
        0,
        EPS,
        NVIDIA,
        W,
        LANES,
        R,
        LAST_SKIPPED,
        SILU,
    )
