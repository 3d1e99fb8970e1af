"""Decoding with a window, for one token in each sequence, in Gluon. A program copies its part of a
state and the records to shared memory. Until the state arrives, the program computes the numbers
that depend on the token and on the records alone.
`window_early.py` computes the same bits with the state in registers, and `window.py` has the
equations."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gdn_triton._triton.activations import log_decay
from gdn_triton._triton.views import copy_async, meet, viewed
from gdn_triton.recurrent.triton.hopper.parts import (
    ROWS,
    K,
    add_product,
    fold,
    inner,
    is_alive,
    is_read_of,
    own_columns,
    sum_of_rows,
    sums_after,
    whole_warps,
    with_columns,
)
from gdn_triton.recurrent.triton.kernel import strength
from gdn_triton.recurrent.triton.window_records import age_of, folds_of, turn_of, upper_bits

# The columns of the token's operand: q, k and zeros.
COLUMNS = gl.constexpr(8)


@gluon.jit
def window_copied_fwd_kernel(
    q, k, v, g, beta, A_log, dt_bias, o, state, u_rows, k_rows, g_rows, call_rows, start, slots,
    positions, scale,
    stride_qb, stride_qh, stride_qk, stride_kb, stride_kh, stride_kk, stride_vb, stride_vh,
    stride_vv, stride_gb, stride_gh, stride_bb, stride_bh, stride_A, stride_dt, stride_ob,
    stride_oh, stride_ov,
    stride_hn, stride_hh, stride_start, stride_s, stride_p,
    stride_hk: gl.constexpr, stride_hv: gl.constexpr, H: gl.constexpr, HV: gl.constexpr,
    V: gl.constexpr, BV: gl.constexpr, R: gl.constexpr, PERIOD: gl.constexpr,
    TURNS: gl.constexpr, K_OFFSET: gl.constexpr, V_OFFSET: gl.constexpr, RCP_LN2: gl.constexpr,
    EPS: gl.constexpr, THRESHOLD: gl.constexpr, USE_QK_L2NORM: gl.constexpr,
    BETA_FACTOR: gl.constexpr, LAST_SKIPPED: gl.constexpr, DEPENDENT: gl.constexpr,
    RELEASE: gl.constexpr, RING: gl.constexpr, stride_ur: gl.constexpr,
    stride_kr: gl.constexpr, stride_gr: gl.constexpr, stride_cr: gl.constexpr,
):  # fmt: skip
    """K = 128, and a window has at most ROWS rows. A program has BV columns of the state of one
    sequence and value head, bfloat16 or float32. It computes with the token, with the records and
    with the state in this order, in which they arrive. DEPENDENT: see `dependent_launch`. RELEASE:
    the programs of the next dependent launch may start once every program has issued its loads. The
    rows of a slot are contiguous in u_rows, k_rows, g_rows and call_rows, whose slots have the
    strides ur, kr, gr and cr.

    RING: see `window_early_fwd_kernel`. u_rows and k_rows have the dtype of the states."""
    NW: gl.constexpr = gl.num_warps()
    V_BLOCKS: gl.constexpr = V // BV
    KEY_FIRST: gl.constexpr = stride_hv == 1
    dtype: gl.constexpr = state.dtype.element_ty
    # The matrix units multiply a bfloat16 state. LINES: see `inner` of `window_records.py`.
    DOT: gl.constexpr = dtype == gl.bfloat16
    LINES: gl.constexpr = 2 if DOT else 1
    VECTOR: gl.constexpr = 16 // (dtype.primitive_bitwidth // 8)

    # Products [BV, ..], whose warps have 16 columns of a state each, and their operands; products
    # of the records' keys, which each warp computes for itself.
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NW, 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 2)
    LEFT_32: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 1)
    RIGHT_32: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 1)
    COLUMN: gl.constexpr = gl.SliceLayout(1, PRODUCT)
    RECORDS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, NW], [16, 8])
    # The orders of sums are those of `window_early.py`: over q and k, over the log decays of all
    # rows, over those after each row, and over the products of a float32 state.
    SAME: gl.constexpr = whole_warps(NW)
    PAIRS: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0], [0, 32], [0, 64]], [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]], SAME, [], [2, K]
    )
    SUMS: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0], [0, 4], [0, 8]],
        [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        SAME,
        [],
        [ROWS, ROWS],
    )
    AFTER: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [8, 0], [0, 8]],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        SAME,
        [],
        [ROWS, ROWS],
    )
    ROW_SUMS: gl.constexpr = gl.DistributedLinearLayout(
        with_columns(NW, BV, [0, 1], [0, 2], [4, 0], [8, 0]),
        [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]],
        own_columns(NW),
        [],
        [BV, 32],
    )
    COLUMN_SUMS: gl.constexpr = gl.DistributedLinearLayout(
        with_columns(NW, BV, [1, 0], [2, 0], [0, 8], [0, 16]),
        [[4, 0], [8, 0], [0, 4], [0, 1], [0, 2]],
        own_columns(NW),
        [],
        [BV, 32],
    )
    WEIGHTED: gl.constexpr = COLUMN_SUMS if KEY_FIRST else ROW_SUMS
    # Copies of 16 bytes from each thread, and their places in shared memory. Rows 0 and 1 of the
    # token are not permuted.
    LENGTH: gl.constexpr = (BV if KEY_FIRST else K) // VECTOR
    STATE: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // LENGTH, LENGTH], [NW, 1], [1, 0])
    TOKEN: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [NW, 1], [1, 0])
    keys_dtype: gl.constexpr = k_rows.dtype.element_ty
    VK: gl.constexpr = 16 // (keys_dtype.primitive_bitwidth // 8)
    KEYS: gl.constexpr = gl.BlockedLayout([1, VK], [VK // 4, 128 // VK], [NW, 1], [1, 0])
    u_dtype: gl.constexpr = u_rows.dtype.element_ty
    VU: gl.constexpr = 16 // (u_dtype.primitive_bitwidth // 8)
    U_LAYOUT: gl.constexpr = gl.BlockedLayout([1, VU], [32 * VU // BV, BV // VU], [NW, 1], [1, 0])
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    # With fewer columns than threads several threads would store the same number.
    V_IN_REGISTERS: gl.constexpr = BV < 32 * NW
    V_LAYOUT: gl.constexpr = COLUMN if V_IN_REGISTERS else LANES
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    FLAT_ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    PERMUTED: gl.constexpr = gl.SwizzledSharedLayout(VECTOR, 1, 8, [1, 0])
    STATE_ROWS: gl.constexpr = PERMUTED if DOT or KEY_FIRST else FLAT_ROWS
    state_s = gl.allocate_shared_memory(dtype, [K, BV] if KEY_FIRST else [BV, K], STATE_ROWS)
    keys_s = gl.allocate_shared_memory(
        keys_dtype, [ROWS, K], gl.SwizzledSharedLayout(VK, 1, 8, [1, 0])
    )
    u_s = gl.allocate_shared_memory(u_dtype, [ROWS, BV], gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))
    y_s = gl.allocate_shared_memory(
        gl.bfloat16, [COLUMNS, K], gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    )
    v_s = gl.allocate_shared_memory(gl.bfloat16, [BV], FLAT)
    g_s = gl.allocate_shared_memory(gl.float32, [ROWS], FLAT)

    i_v, i_nh = gl.program_id(0) % V_BLOCKS, gl.program_id(0) // V_BLOCKS
    i_n, i_hv = (i_nh // HV).to(gl.int64), (i_nh % HV).to(gl.int64)
    i_h = i_hv // (HV // H)
    if DEPENDENT:
        gdc_wait()
    slot = gl.load(slots + i_n * stride_s).to(gl.int64)
    position = gl.load(positions + i_n * stride_p).to(gl.int32)
    p_q = q + i_n * stride_qb + i_h * stride_qh
    p_k = k + K_OFFSET * stride_kk + i_n * stride_kb + i_h * stride_kh
    p_v = v + V_OFFSET * stride_vv + i_n * stride_vb + i_hv * stride_vh
    if RING:
        folds = position == R - 1
        if start is not None:
            folds = folds | (gl.load(start + i_n * stride_start) != 0)
    o_y = gl.arange(0, COLUMNS, gl.SliceLayout(1, TOKEN))
    o_k = gl.arange(0, K, gl.SliceLayout(0, TOKEN))
    p_y = gl.where((o_y == 1)[:, None], p_k + o_k[None, :] * stride_kk,
                   p_q + o_k[None, :] * stride_qk)  # fmt: skip
    b_y = gl.load(p_y, mask=(o_y < 2)[:, None] & (o_k >= 0)[None, :], other=0.0)
    b_v = gl.load(p_v + (i_v * BV + gl.arange(0, BV, V_LAYOUT)) * stride_vv)
    b_g = gl.load(g + i_n * stride_gb + i_hv * stride_gh).to(gl.float32)
    b_beta = gl.load(beta + i_n * stride_bb + i_hv * stride_bh)
    b_A, bias = 0.0, 0.0
    if A_log is not None:
        b_A = gl.load(A_log + i_hv * stride_A).to(gl.float32)
        if dt_bias is not None:
            bias = gl.load(dt_bias + i_hv * stride_dt).to(gl.float32)
    o_v = i_v * BV + gl.arange(0, BV, COLUMN)
    p_o = o + i_n * stride_ob + i_hv * stride_oh + o_v * stride_ov
    if slot <= LAST_SKIPPED:
        gl.store(p_o, gl.full([BV], 0.0, o.dtype.element_ty, COLUMN))
        return

    ROW_U: gl.constexpr = V if RING else HV * V
    ROW_K: gl.constexpr = K if RING else H * K
    ROW_G: gl.constexpr = 1 if RING else HV
    p_keys = k_rows + slot * stride_kr + i_h * (R * K if RING else K)
    p_u = u_rows + slot * stride_ur + i_hv * (R * V if RING else V)
    p_gr = g_rows + slot * stride_gr + i_hv * (R if RING else 1)
    o_r = gl.arange(0, ROWS, gl.SliceLayout(1, KEYS))
    is_read = is_read_of(o_r, position, i_hv, R, PERIOD, TURNS, RING)
    o_k = gl.arange(0, K, gl.SliceLayout(0, KEYS))
    copy_async(keys_s, p_keys + (o_r[:, None] * ROW_K + o_k[None, :]), mask=is_read[:, None])
    o_r = gl.arange(0, ROWS, LANES)
    is_read = is_read_of(o_r, position, i_hv, R, PERIOD, TURNS, RING)
    copy_async(g_s, p_gr + o_r * ROW_G, mask=is_read)
    o_r = gl.arange(0, ROWS, gl.SliceLayout(1, U_LAYOUT))
    is_read = is_read_of(o_r, position, i_hv, R, PERIOD, TURNS, RING)
    o_u = o_r[:, None] * ROW_U + gl.arange(0, BV, gl.SliceLayout(0, U_LAYOUT))[None, :]
    copy_async(u_s, p_u + i_v * BV + o_u, mask=is_read[:, None])
    async_copy.commit_group()
    o_a = gl.arange(0, K if KEY_FIRST else BV, gl.SliceLayout(1, STATE))
    o_b = gl.arange(0, BV if KEY_FIRST else K, gl.SliceLayout(0, STATE))
    p_state = state + slot * stride_hn + i_hv * stride_hh + i_v * BV * stride_hv
    p_tile = p_state + (o_a[:, None] * (V if KEY_FIRST else K) + o_b[None, :])
    copy_async(state_s, p_tile, cache_modifier=".cg")
    async_copy.commit_group()
    if not RING:
        b_start = gl.load(start + slot * stride_start).to(gl.int32)
    if RELEASE:
        gdc_launch_dependents()

    y_s.store(b_y)
    if not V_IN_REGISTERS:
        v_s.store(b_v)
    meet()
    token = viewed(y_s, gl.bfloat16, [COLUMNS, K], FLAT_ROWS).slice(0, 2, 0).load(PAIRS)
    b_q, b_k = gl.split(gl.permute(token.to(gl.float32), (1, 0)))
    b_beta = strength(b_beta, BETA_FACTOR)
    if A_log is not None:
        b_g = log_decay(b_g + bias, b_A, gl.exp(b_A), THRESHOLD)
    of_q, of_k = scale, 1.0
    qk = inner(b_k, b_q, LINES)
    if USE_QK_L2NORM:
        of_q = scale * gl.rsqrt(inner(b_q, b_q, LINES) + EPS)
        of_k = gl.rsqrt(inner(b_k, b_k, LINES) + EPS)
    qk = qk * of_q
    # The u of a window contains the factor that normalises k.
    of_new = of_k
    since = position.to(gl.uint32) * 0
    if RING:
        of_new = 1.0
        qk = qk * of_k
        limit = position.to(gl.uint32)
    else:
        turn = turn_of(i_hv.to(gl.int32), PERIOD, TURNS)
        held, due = folds_of(position, position - 1, b_start, turn, PERIOD)
        limit, folds = (position - held).to(gl.uint32), held < due
        since = (position - due).to(gl.uint32)
    if not V_IN_REGISTERS:
        b_v = v_s.load(COLUMN)

    async_copy.wait_group(1)
    meet()
    records = gl.zeros([ROWS, COLUMNS], gl.float32, RECORDS)
    if keys_dtype == gl.float32:
        for i in gl.static_range(K // 32):
            keys_i = keys_s.slice(i * 32, 32, 1).load(gl.DotOperandLayout(0, RECORDS, 1))
            y_i = y_s.slice(i * 32, 32, 1).permute((1, 0)).load(gl.DotOperandLayout(1, RECORDS, 1))
            k_upper, y_i = upper_bits(keys_i), y_i.to(gl.float32)
            records = mma_v2(keys_i - k_upper, y_i, records, input_precision="tf32")
            records = mma_v2(k_upper, y_i, records, input_precision="tf32")
    else:
        records = mma_v2(
            keys_s.load(gl.DotOperandLayout(0, RECORDS, 2)),
            y_s.permute((1, 0)).load(gl.DotOperandLayout(1, RECORDS, 2)), records
        )  # fmt: skip
    of_sums = is_alive(gl.arange(0, ROWS, gl.SliceLayout(0, SUMS)), position, limit, R)
    b_gr = gl.where(of_sums, g_s.load(gl.SliceLayout(0, SUMS)), 0.0)
    of_state = gl.exp2((sum_of_rows(b_gr) + b_g) * RCP_LN2)
    age = age_of(gl.arange(0, ROWS, gl.SliceLayout(0, AFTER)), position, R).to(gl.uint32)
    of_row = age_of(gl.arange(0, ROWS, gl.SliceLayout(1, AFTER)), position, R).to(gl.uint32)
    b_ga = gl.where(age < limit, g_s.load(gl.SliceLayout(0, AFTER)), 0.0)
    after = gl.convert_layout(sums_after(b_ga, age, of_row), gl.SliceLayout(1, RECORDS))
    w = gl.exp2((after + b_g) * RCP_LN2)
    of_records = is_alive(gl.arange(0, ROWS, gl.SliceLayout(1, RECORDS)), position, limit, R)
    o_y = gl.arange(0, COLUMNS, gl.SliceLayout(0, RECORDS))
    records = records * (w[:, None] * gl.where(o_y == 0, of_q, of_k)[None, :])
    b_r = gl.convert_layout(gl.where(of_records[:, None], records, 0.0), RIGHT_32)
    of_u = is_alive(gl.arange(0, ROWS, gl.SliceLayout(0, LEFT_32)), position, limit, R)
    b_u = gl.where(of_u[None, :], u_s.permute((1, 0)).load(LEFT_32).to(gl.float32), 0.0)
    added = add_product(b_u, b_r, gl.zeros([BV, COLUMNS], gl.float32, PRODUCT))

    state_q, state_k = 0.0, 0.0
    tokens = viewed(y_s, gl.bfloat16, [COLUMNS * K], FLAT)
    if DOT:
        b_y = y_s.permute((1, 0)).load(RIGHT)
    async_copy.wait_group(0)
    meet()
    if DOT:
        columns = state_s.permute((1, 0)) if KEY_FIRST else state_s
        both = mma_v2(columns.load(LEFT), b_y, gl.zeros([BV, COLUMNS], gl.float32, PRODUCT))
        o_y = gl.arange(0, COLUMNS, gl.SliceLayout(0, PRODUCT))
        both *= (gl.where(o_y == 0, of_q, of_k) * of_state)[None, :]
        added = both + added
    else:
        sum_q = gl.zeros([BV, 32], gl.float32, WEIGHTED)
        sum_k = gl.zeros([BV, 32], gl.float32, WEIGHTED)
        for i in gl.static_range(K // 32):
            q_i = tokens.slice(i * 32, 32, 0).load(gl.SliceLayout(0, WEIGHTED)).to(gl.float32)
            k_i = tokens.slice(K + i * 32, 32, 0).load(gl.SliceLayout(0, WEIGHTED)).to(gl.float32)
            if KEY_FIRST:
                h_i = state_s.slice(i * 32, 32, 0).permute((1, 0)).load(WEIGHTED)
            else:
                h_i = state_s.slice(i * 32, 32, 1).load(WEIGHTED)
            if i == 0:
                sum_q, sum_k = h_i * q_i[None, :], h_i * k_i[None, :]
            else:
                sum_q = gl.fma(h_i, gl.full_like(h_i, 0.0) + q_i[None, :], sum_q)
                sum_k = gl.fma(h_i, gl.full_like(h_i, 0.0) + k_i[None, :], sum_k)
        state_q = gl.sum(sum_q, 1) * (of_state * of_q)
        state_k = gl.sum(sum_k, 1) * (of_state * of_k)
    b_o, stored = gl.split(gl.sum(gl.reshape(added, [BV, COLUMNS // 2, 2]), 1))
    b_o = gl.convert_layout(b_o, COLUMN)
    stored = gl.convert_layout(stored, COLUMN)
    if not DOT:
        b_o += gl.convert_layout(state_q, COLUMN)
        stored += gl.convert_layout(state_k, COLUMN)
    new_u = (b_v.to(gl.float32) - stored) * (of_new * b_beta)
    b_o = gl.fma(new_u, gl.full_like(new_u, 0.0) + qk, b_o)
    gl.store(p_o, b_o.to(o.dtype.element_ty))
    new_r, keeps = position, not folds
    if not RING:
        new_r, keeps = position % R, True
    if keeps:
        gl.store(p_u + new_r * ROW_U + o_v, new_u.to(u_dtype))
        if i_v == 0:
            gl.store(p_gr + new_r * ROW_G, b_g)
            # Only one of the value heads that share a key head writes the key's record.
            if i_hv % (HV // H) == 0:
                key = tokens.slice(K, K, 0).load(LANES)
                if RING:
                    key = key.to(gl.float32) * of_k
                gl.store(p_keys + new_r * ROW_K + gl.arange(0, K, LANES), key.to(keys_dtype))
            if not RING:
                if i_hv == 0:
                    gl.store(call_rows + slot * stride_cr + new_r, position)
    if folds:
        fold(
            state_s, keys_s, tokens, p_state, b_u, b_gr, b_g, new_u * of_k, position, limit, since,
            stride_hk, stride_hv, BV, R, RCP_LN2, PRODUCT, SUMS, RING
        )  # fmt: skip
