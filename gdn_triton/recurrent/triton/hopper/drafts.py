"""Decoding with a window, for up to four tokens in each sequence, in Gluon. A program copies its
part of a state and the records to shared memory, as in the kernel of one token. `../window.py`
computes the same bits, and has the equations."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gdn_triton._triton.activations import log_decay
from gdn_triton._triton.views import copy_async, meet
from gdn_triton.recurrent.triton.hopper.parts import (
    ROWS,
    K,
    add_product,
    fold,
    is_alive,
    lane_sums_after,
    sum_of_channels,
    sum_of_rows,
    whole_warps,
)
from gdn_triton.recurrent.triton.kernel import strength
from gdn_triton.recurrent.triton.window_records import (
    age_of,
    folds_of,
    rows_to_load,
    upper_bits,
)

# The tokens of a sequence, and the columns of their operand: q and k of each token.
TOKENS, COLUMNS = gl.constexpr(4), gl.constexpr(8)


@gluon.jit
def moved(x, BOTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Moves x within each warp, without shared memory. BOTH: a square layout, along whose columns x
    comes, and along whose rows it leaves."""
    n: gl.constexpr = x.shape[0]
    o_row, o_x = gl.arange(0, n, gl.SliceLayout(1, BOTH)), gl.arange(0, n, gl.SliceLayout(0, BOTH))
    x = gl.convert_layout(x, gl.SliceLayout(0, BOTH))
    x = gl.sum(gl.where(o_row[:, None] == o_x[None, :], x[None, :], 0.0), 1)
    return gl.convert_layout(x, LAYOUT)


@gluon.jit
def sum_of_tokens(x, LAYOUT: gl.constexpr):
    """Returns the sum of x [COLUMNS, TOKENS] over the tokens in the order of the other kernel."""
    x = gl.sum(gl.reshape(x, [COLUMNS, 2, 2]), 1)
    return gl.convert_layout(gl.sum(x, 1), LAYOUT)


@gluon.jit(do_not_specialize=["N", "T"])
def window_drafts_fwd_kernel(
    q, k, v, g, beta, A_log, dt_bias, o, state, u_rows, k_rows, g_rows, call_rows, start, slots,
    positions, cu_seqlens, N, T, scale,
    stride_qb, stride_qt, stride_qh, stride_qk, stride_kb, stride_kt, stride_kh, stride_kk,
    stride_vb, stride_vt, stride_vh, stride_vv, stride_gb, stride_gt, stride_gh, stride_bb,
    stride_bt, stride_bh, stride_A, stride_dt, stride_ob, stride_ot, stride_oh, stride_ov,
    stride_hn, stride_hh, stride_start, stride_s, stride_p, stride_c,
    stride_hk: gl.constexpr, stride_hv: gl.constexpr, H: gl.constexpr, HV: gl.constexpr,
    V: gl.constexpr, BV: gl.constexpr, R: gl.constexpr, D: gl.constexpr, PERIOD: gl.constexpr,
    TURNS: gl.constexpr, K_OFFSET: gl.constexpr, V_OFFSET: gl.constexpr, RCP_LN2: gl.constexpr,
    EPS: gl.constexpr, THRESHOLD: gl.constexpr, USE_QK_L2NORM: gl.constexpr,
    BETA_FACTOR: gl.constexpr, LAST_SKIPPED: gl.constexpr, DEPENDENT: gl.constexpr,
    RELEASE: gl.constexpr, stride_ur: gl.constexpr, stride_kr: gl.constexpr,
    stride_gr: gl.constexpr, stride_cr: gl.constexpr,
):  # fmt: skip
    """K = 128, and a window has at most ROWS rows. Runs T tokens of each sequence, or packed ones
    by cu_seqlens, of which program N of a head writes the zeros of the rows after the last
    sequence. The other arguments are those of `window_copied_fwd_kernel`."""
    NW: gl.constexpr = gl.num_warps()
    V_BLOCKS: gl.constexpr = V // BV
    KEY_FIRST: gl.constexpr = stride_hv == 1
    dtype: gl.constexpr = state.dtype.element_ty
    DOT: gl.constexpr = dtype == gl.bfloat16
    VECTOR: gl.constexpr = 16 // (dtype.primitive_bitwidth // 8)

    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NW, 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 2)
    LEFT_32: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 1)
    RIGHT_32: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 1)
    COLUMN: gl.constexpr = gl.SliceLayout(1, PRODUCT)
    OF_TOKEN: gl.constexpr = gl.SliceLayout(0, PRODUCT)
    RECORDS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, NW], [16, 8])
    SAME: gl.constexpr = whole_warps(NW)
    SUMS: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0], [0, 4], [0, 8]],
        [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        SAME,
        [],
        [ROWS, ROWS],
    )
    # A thread has all tokens for the two columns that it has of products.
    BETWEEN: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0]],
        [[2, 0], [4, 0], [0, 0], [0, 0], [0, 0]],
        SAME,
        [],
        [COLUMNS, TOKENS],
    )
    Y: gl.constexpr = gl.SliceLayout(1, BETWEEN)
    SQUARE: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0], [2, 0]],
        [[0, 1], [0, 2], [0, 0], [0, 0], [0, 0]],
        SAME,
        [],
        [TOKENS, TOKENS],
    )
    ONE: gl.constexpr = gl.SliceLayout(0, SQUARE)
    NORMS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [2, 0], [4, 0]],
        [[0, 8], [0, 16], [0, 32], [0, 64], [1, 0]],
        SAME,
        [],
        [COLUMNS, K],
    )
    OF_NORMS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 2], [0, 4], [1, 0]],
        [[2, 0], [4, 0], [0, 0], [0, 0], [0, 1]],
        SAME,
        [],
        [COLUMNS, COLUMNS],
    )
    LENGTH: gl.constexpr = (BV if KEY_FIRST else K) // VECTOR
    STATE: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // LENGTH, LENGTH], [NW, 1], [1, 0])
    KEYS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [NW, 1], [1, 0])
    U_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [128 // BV, BV // 4], [NW, 1], [1, 0])
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    PERMUTED: gl.constexpr = gl.SwizzledSharedLayout(VECTOR, 1, 8, [1, 0])
    state_s = gl.allocate_shared_memory(dtype, [K, BV] if KEY_FIRST else [BV, K], PERMUTED)
    keys_s = gl.allocate_shared_memory(
        gl.bfloat16, [ROWS, K], gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    )
    u_s = gl.allocate_shared_memory(
        gl.float32, [ROWS, BV], gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
    )
    # q and k of the tokens, twice: a left operand has 16 rows.
    y_s = gl.allocate_shared_memory(
        gl.bfloat16, [ROWS, K], gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    )
    g_s = gl.allocate_shared_memory(gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))

    i_v, i_nh = gl.program_id(0) % V_BLOCKS, gl.program_id(0) // V_BLOCKS
    i_n, i_hv = (i_nh // HV).to(gl.int64), (i_nh % HV).to(gl.int64)
    i_h = i_hv // (HV // H)
    if DEPENDENT:
        gdc_wait()
    live = i_n < N
    slot = gl.load(slots + i_n * stride_s, mask=live, other=LAST_SKIPPED).to(gl.int64)
    position = gl.load(positions + i_n * stride_p, mask=live, other=0).to(gl.int32)
    if cu_seqlens is None:
        i_b = i_n
        row = i_n * 0
        n_tokens = T
    else:
        i_b = i_n * 0
        p_end = cu_seqlens + (i_n + 1) * stride_c
        row = gl.load(p_end - stride_c).to(gl.int64)
        end = gl.load(p_end, mask=live, other=T).to(gl.int64)
        n_tokens = (end - row).to(gl.int32)
    p_o = o + i_b * stride_ob + row * stride_ot + i_hv * stride_oh
    p_q = q + i_b * stride_qb + row * stride_qt + i_h * stride_qh
    p_k = k + K_OFFSET * stride_kk + i_b * stride_kb + row * stride_kt + i_h * stride_kh
    p_v = v + V_OFFSET * stride_vv + i_b * stride_vb + row * stride_vt + i_hv * stride_vh
    o_v = i_v * BV + gl.arange(0, BV, COLUMN)
    if slot <= LAST_SKIPPED:
        for _ in range(0, n_tokens):
            gl.store(p_o + o_v * stride_ov, gl.full([BV], 0.0, o.dtype.element_ty, COLUMN))
            p_o += stride_ot
        return
    if n_tokens <= 0:
        return

    o_y = gl.arange(0, ROWS, gl.SliceLayout(1, KEYS))
    o_k = gl.arange(0, K, gl.SliceLayout(0, KEYS))
    y_t = (o_y % COLUMNS) // 2
    wide_t = y_t.to(gl.int64)
    p_y = gl.where((o_y % 2 == 1)[:, None], (p_k + wide_t * stride_kt)[:, None] +
                   o_k[None, :] * stride_kk, (p_q + wide_t * stride_qt)[:, None] +
                   o_k[None, :] * stride_qk)  # fmt: skip
    b_y = gl.load(p_y, mask=(y_t < n_tokens)[:, None] & (o_k >= 0)[None, :], other=0.0)
    y_t = gl.arange(0, COLUMNS, OF_TOKEN) // 2
    is_k = gl.arange(0, COLUMNS, OF_TOKEN) % 2 == 1
    with_token = y_t < n_tokens
    p_v += y_t.to(gl.int64)[None, :] * stride_vt + (o_v * stride_vv)[:, None]
    b_v = gl.load(p_v, mask=(with_token & is_k)[None, :] & (o_v >= 0)[:, None], other=0.0)
    o_t = gl.arange(0, TOKENS, ONE)
    wide_t = o_t.to(gl.int64)
    in_t = o_t < n_tokens
    p_g = g + i_b * stride_gb + row * stride_gt + i_hv * stride_gh + wide_t * stride_gt
    p_beta = beta + i_b * stride_bb + row * stride_bt + i_hv * stride_bh + wide_t * stride_bt
    b_g = gl.load(p_g, mask=in_t, other=0.0).to(gl.float32)
    b_beta = gl.load(p_beta, mask=in_t, other=0.0)
    b_A, bias = 0.0, 0.0
    if A_log is not None:
        b_A = gl.load(A_log + i_hv * stride_A).to(gl.float32)
        if dt_bias is not None:
            bias = gl.load(dt_bias + i_hv * stride_dt).to(gl.float32)

    p_keys = k_rows + slot * stride_kr + i_h * K
    p_u = u_rows + slot * stride_ur + i_hv * V
    p_gr = g_rows + slot * stride_gr + i_hv
    o_r = gl.arange(0, ROWS, gl.SliceLayout(1, KEYS))
    turn, _, is_read = rows_to_load(o_r, position, i_hv, R, D, PERIOD, TURNS)
    copy_async(keys_s, p_keys + (o_r[:, None] * (H * K) + o_k[None, :]), mask=is_read[:, None])
    o_r = gl.arange(0, ROWS, LANES)
    _, _, is_read = rows_to_load(o_r, position, i_hv, R, D, PERIOD, TURNS)
    copy_async(g_s, p_gr + o_r * HV, mask=is_read)
    o_r = gl.arange(0, ROWS, gl.SliceLayout(1, U_LAYOUT))
    _, _, is_read = rows_to_load(o_r, position, i_hv, R, D, PERIOD, TURNS)
    o_u = o_r[:, None] * (HV * V) + gl.arange(0, BV, gl.SliceLayout(0, U_LAYOUT))[None, :]
    copy_async(u_s, p_u + i_v * BV + o_u, mask=is_read[:, None])
    async_copy.commit_group()
    o_a = gl.arange(0, K if KEY_FIRST else BV, gl.SliceLayout(1, STATE))
    o_b = gl.arange(0, BV if KEY_FIRST else K, gl.SliceLayout(0, STATE))
    p_state = state + slot * stride_hn + i_hv * stride_hh + i_v * BV * stride_hv
    p_tile = p_state + (o_a[:, None] * (V if KEY_FIRST else K) + o_b[None, :])
    copy_async(state_s, p_tile, cache_modifier=".cg")
    async_copy.commit_group()
    b_start = gl.load(start + slot * stride_start).to(gl.int32)
    last_call = position - 1
    if D > 1:
        last_call = gl.load(call_rows + slot * stride_cr + (position + R - 1) % R)
    if RELEASE:
        gdc_launch_dependents()

    y_s.store(b_y)
    b_beta = strength(b_beta, BETA_FACTOR)
    if A_log is not None:
        b_g = gl.where(in_t, log_decay(b_g + bias, b_A, gl.exp(b_A), THRESHOLD), 0.0)
    all_g = moved(b_g, SQUARE, gl.SliceLayout(0, BETWEEN))
    all_beta = moved(b_beta, SQUARE, gl.SliceLayout(0, BETWEEN))
    f_t = gl.arange(0, TOKENS, gl.SliceLayout(0, BETWEEN))
    f_y = gl.arange(0, COLUMNS, Y)
    log_s = gl.where(f_t[None, :] <= (f_y // 2)[:, None], all_g[None, :], 0.0)
    log_s = sum_of_tokens(log_s, Y)
    y_beta = gl.sum(gl.where(f_t[None, :] == (f_y // 2)[:, None], all_beta[None, :], 0.0), 1)
    meet()
    of_y = gl.where(f_y % 2 == 1, 1.0, scale)
    if USE_QK_L2NORM:
        f_x = y_s.slice(0, COLUMNS, 0).load(NORMS).to(gl.float32)
        of_y *= moved(gl.rsqrt(sum_of_channels(f_x * f_x) + EPS), OF_NORMS, Y)
    of_v = gl.where(f_y % 2 == 1, of_y * y_beta, 0.0)
    of_y *= gl.where(f_y % 2 == 1, of_y * y_beta, 1.0)
    last = gl.where(f_y % 2 == 1, f_y // 2 - 1, f_y // 2)
    y_right = y_s.slice(0, COLUMNS, 0).permute((1, 0)).load(gl.DotOperandLayout(1, RECORDS, 2))
    own = mma_v2(
        y_s.load(gl.DotOperandLayout(0, RECORDS, 2)), y_right,
        gl.zeros([ROWS, COLUMNS], gl.float32, RECORDS)
    )  # fmt: skip
    held, due = folds_of(position, last_call, b_start, turn, PERIOD)
    limit = (position - held).to(gl.uint32)

    async_copy.wait_group(1)
    meet()
    records = mma_v2(
        keys_s.load(gl.DotOperandLayout(0, RECORDS, 2)), y_right,
        gl.zeros([ROWS, COLUMNS], gl.float32, RECORDS)
    )  # fmt: skip
    of_sums = is_alive(gl.arange(0, ROWS, gl.SliceLayout(0, SUMS)), position, limit, R)
    b_gr = gl.where(of_sums, g_s.load(gl.SliceLayout(0, SUMS)), 0.0)
    age = age_of(gl.arange(0, ROWS, gl.SliceLayout(0, SUMS)), position, R).to(gl.uint32)
    of_row = age_of(gl.arange(0, ROWS, gl.SliceLayout(1, SUMS)), position, R).to(gl.uint32)
    after = gl.convert_layout(lane_sums_after(b_gr, age, of_row), gl.SliceLayout(1, RECORDS))
    of_records = is_alive(gl.arange(0, ROWS, gl.SliceLayout(1, RECORDS)), position, limit, R)
    OF_RECORD: gl.constexpr = gl.SliceLayout(0, RECORDS)
    r_log, r_y = gl.convert_layout(log_s, OF_RECORD), gl.convert_layout(of_y, OF_RECORD)
    w = gl.exp2((after[:, None] + r_log[None, :]) * RCP_LN2)
    records = gl.where(of_records[:, None], records * w * r_y[None, :], 0.0)
    b_r = gl.convert_layout(records, RIGHT_32)
    of_u = is_alive(gl.arange(0, ROWS, gl.SliceLayout(0, LEFT_32)), position, limit, R)
    b_u = gl.where(of_u[None, :], u_s.permute((1, 0)).load(LEFT_32), 0.0)
    added = add_product(b_u, b_r, gl.zeros([BV, COLUMNS], gl.float32, PRODUCT))
    of_state = gl.exp2((log_s + sum_of_rows(b_gr)) * RCP_LN2) * of_y
    of_state = gl.convert_layout(of_state, OF_TOKEN)

    async_copy.wait_group(0)
    meet()
    both = gl.zeros([BV, COLUMNS], gl.float32, PRODUCT)
    if DOT:
        columns = state_s.permute((1, 0)) if KEY_FIRST else state_s
        b_y = y_s.slice(0, COLUMNS, 0).permute((1, 0)).load(RIGHT)
        both = mma_v2(columns.load(LEFT), b_y, both)
    else:
        for i in gl.static_range(K // 32):
            y_i = y_s.slice(0, COLUMNS, 0).slice(i * 32, 32, 1).permute((1, 0)).load(RIGHT)
            y_i = y_i.to(gl.float32)
            if KEY_FIRST:
                h_i = state_s.slice(i * 32, 32, 0).permute((1, 0)).load(LEFT)
            else:
                h_i = state_s.slice(i * 32, 32, 1).load(LEFT)
            upper = upper_bits(h_i)
            piece = gl.zeros([BV, COLUMNS], gl.float32, PRODUCT)
            piece = mma_v2(h_i - upper, y_i, piece, input_precision="tf32")
            both += mma_v2(upper, y_i, piece, input_precision="tf32")
    both *= of_state[None, :]
    both += added
    both = b_v.to(gl.float32) * gl.convert_layout(of_v, OF_TOKEN)[None, :] - both
    o_y = gl.arange(0, COLUMNS, OF_TOKEN)
    o_r = gl.arange(0, ROWS, gl.SliceLayout(1, RECORDS))
    last = gl.convert_layout(last, OF_TOKEN)
    for t in gl.static_range(TOKENS):
        between = (f_t[None, :] > t) & (f_t[None, :] <= (f_y // 2)[:, None])
        own_w = gl.exp2(sum_of_tokens(gl.where(between, all_g[None, :], 0.0), Y) * RCP_LN2)
        to_later = gl.sum(gl.where((o_r == 2 * t + 1)[:, None], own, 0.0), 0)
        to_later = gl.convert_layout(to_later, OF_TOKEN)
        to_later = to_later * gl.convert_layout(own_w, OF_TOKEN)
        to_later = to_later * gl.convert_layout(of_y, OF_TOKEN)
        new_u = gl.sum(gl.where((o_y == 2 * t + 1)[None, :], both, 0.0), 1)
        both = gl.where((last >= t)[None, :], both - new_u[:, None] * to_later[None, :], both)
    y_t = o_y // 2
    p_o += y_t.to(gl.int64)[None, :] * stride_ot + (o_v * stride_ov)[:, None]
    of_q = ((y_t < n_tokens) & (o_y % 2 == 0))[None, :] & (o_v >= 0)[:, None]
    gl.store(p_o, (0.0 - both).to(o.dtype.element_ty), mask=of_q)
    of_k = ((y_t < n_tokens) & (o_y % 2 == 1))[None, :] & (o_v >= 0)[:, None]
    gl.store(p_u + ((position + y_t) % R)[None, :] * (HV * V) + o_v[:, None], both, mask=of_k)
    if i_v == 0:
        new_r = (position + o_t) % R
        gl.store(p_gr + new_r * HV, b_g, mask=in_t)
        # Only one of the value heads that share a key head writes the keys' records.
        if i_hv % (HV // H) == 0:
            row_y = gl.arange(0, COLUMNS, gl.SliceLayout(1, KEYS))
            of_key = (row_y % 2 == 1) & (row_y // 2 < n_tokens)
            p_new = p_keys + ((position + row_y // 2) % R)[:, None] * (H * K) + o_k[None, :]
            keys = y_s.slice(0, COLUMNS, 0).load(KEYS)
            gl.store(p_new, keys, mask=of_key[:, None] & (o_k >= 0)[None, :])
        if i_hv == 0:
            gl.store(call_rows + slot * stride_cr + new_r, position + o_t * 0, mask=in_t)
    if held < due:
        fold(
            state_s, keys_s, y_s, p_state, b_u, b_gr, 0.0, 0.0, position, limit,
            (position - due).to(gl.uint32), stride_hk, stride_hv, BV, R, RCP_LN2, PRODUCT, SUMS,
            False
        )  # fmt: skip
