"""The state warps of the walks: 64 columns of h, or of its gradient dh, in registers.

All matrices are transposed: rows are channels of V, and columns are channels of K in h and dh and
tokens elsewhere. The fp32 state is the accumulator of its own update and, rounded, the register
operand of its product with k. gates.py has the equations.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gdn_triton._triton.views import viewed
from gdn_triton.chunk.triton.hopper.gates import D_VECTOR, STEEP, VECTORS
from gdn_triton.chunk.triton.hopper.names import (
    CHUNK,
    ONE,
    OPERAND,
    PRODUCT,
    TOKEN,
    advance,
    here,
    rounded,
    scalar_of,
    store_tile,
)
from gdn_triton.chunk.triton.hopper.state import SAME_START, differ, scores, store_values
from gdn_triton.chunk.triton.hopper.walks.gates import (
    FIRST_VECTOR,
    LAST,
    OUT_VECTOR,
    SECOND_VECTOR,
    TO_END_VECTOR,
)


@gluon.jit
def check_end(state, check, o_v, o_k, first_v, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr):
    """Stores whether the last state of a segment differs from the state that the next one begins
    with, where the call says that it may."""
    has_next, p_next, p_marks = check
    differs = gl.to_tensor(0)
    if has_next > 0:
        inside = (o_v < V)[:, None] & (o_k < K)[None, :]
        following = gl.load(p_next + (o_k[None, :] * V + o_v[:, None]), mask=inside, other=0)
        differs = differ(state, following, SAME_START)
    gl.store(p_marks + first_v // BV, differs, mask=first_v < V)


@gluon.jit
def back_role(
    memory,
    fulls,
    descs,
    ends,
    strides,
    place,
    check,
    walk,
    dtype: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BK: gl.constexpr,
    BV: gl.constexpr,
    STATES: gl.constexpr,
    STAGES: gl.constexpr,
    T_STAGES: gl.constexpr,
    OUTPUT: gl.constexpr,
    CHECKED: gl.constexpr,
    IS_VARLEN: gl.constexpr,
    Q_STAGES: gl.constexpr,
    HAS_DHT: gl.constexpr,
    STORE_DH0: gl.constexpr,
    NUMBER: gl.constexpr,
):
    q_s, k_s, do_s, t_s, p_s, dx_s, dh_s, vectors, writes, flags, empty = memory
    k_full, q_full, gates_full, t_full, p_full = fulls
    dx_desc, dh_desc = descs
    p_dx, p_dht, p_dh0, end_out = ends
    stride_dxt, stride_dhtk, stride_dhtv, stride_dh0k, stride_dh0v = strides
    i_b, first_row, i_hv, first_v, first_slot = place
    n_chunks, n_rows, _ = walk
    first_v += NUMBER * BV
    p_dx += NUMBER * BV
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    UPDATE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    o_t = gl.arange(0, CHUNK, TOKEN)
    o_r = gl.arange(0, CHUNK, gl.SliceLayout(1, PRODUCT))
    o_v = first_v + gl.arange(0, BV, gl.SliceLayout(1, STATE))
    o_k = gl.arange(0, BK, gl.SliceLayout(0, STATE))
    dh = gl.zeros([BV, BK], gl.float32, STATE)
    if HAS_DHT:
        inside = (o_v < V)[:, None] & (o_k < K)[None, :]
        offsets = o_v[:, None] * stride_dhtv + o_k[None, :] * stride_dhtk
        dh = gl.load(p_dht + offsets, mask=inside, other=0).to(gl.float32)
    # The accumulator of the first product, which overwrites it. Later the registers of other dead
    # accumulators are given: zeros would be live at the same time, and spill.
    x = gl.zeros([BV, CHUNK], gl.float32, PRODUCT)
    dx_tile = dx_s.index(NUMBER)
    dh_tile = dh_s.index(NUMBER)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    q_stage = gl.to_tensor(0)
    q_phase = gl.to_tensor(0)
    t_stage = gl.to_tensor(0)
    t_phase = gl.to_tensor(0)
    row = first_row + (n_chunks - 1) * CHUNK
    left = n_rows - (n_chunks - 1) * CHUNK
    slot = first_slot + n_chunks - 1
    for i in range(n_chunks):
        base = stage * VECTORS
        mbarrier.wait(gates_full.index(stage), phase)
        numbers = flags.index(stage).load(ONE)
        mbarrier.wait(k_full.index(stage), phase)
        mbarrier.wait(q_full.index(q_stage), q_phase)
        k = k_s.index(stage)
        q = q_s.index(q_stage)
        # Where a block has two states, each makes P' of every second chunk.
        if (i + NUMBER) % STATES == 0:
            if STATES > 1:
                # P' overwrites that of chunk i - T_STAGES, which the other state also reads.
                past = gl.maximum(i - T_STAGES, 0)
                past_phase = (past // STAGES) & 1
                mbarrier.wait(empty.index(past % STAGES), past_phase, pred=i >= T_STAGES)
            steep = scalar_of(numbers, STEEP)
            # With the number 0, which the assembler does not know to be 0. It would else take the
            # addresses of q from this branch in chunks without it, too (docs/tried.md).
            zero = (here(n_rows) < 0).to(gl.int32)
            q_here = q_s.index(q_stage + zero)
            k_here = k_s.index(stage + zero)
            x = scores(q_here, k_here, x, vectors, base, steep, D_VECTOR, PRODUCT)
            o_row = o_r + here(i * 0)
            P = gl.where(o_row[:, None] >= o_t[None, :], x, 0.0)
            p_s.index(t_stage).store(rounded(P, dtype))
            fence_async_shared()
            mbarrier.arrive(p_full.index(t_stage), count=1)
        dhb = dh.to(dtype)
        if OUTPUT:
            # At most the newest copy to memory, that of dx, still reads its tile.
            tma.store_wait(1)
            dh_tile.permute((1, 0)).store(dhb)
            fence_async_shared()
            dh_block = viewed(dh_tile, dtype, [1, 1, BK, BV], ROWS)
            store_tile(dh_desc, [slot, i_hv, 0, first_v], dh_block)
        dho = gl.convert_layout(dhb, OPERAND, assert_trivial=True)
        x = warpgroup_mma(dho, k.permute((1, 0)), x, use_acc=False, is_async=True)
        last = scalar_of(numbers, LAST)
        to_end = vectors.index(base + TO_END_VECTOR).load(TOKEN)
        do_tile = do_s.index(q_stage)
        if STATES > 1:
            do_tile = do_tile.slice(NUMBER * BV, BV, 1)
        do = do_tile.permute((1, 0)).load(PRODUCT)
        factor = vectors.index(base + FIRST_VECTOR).load(TOKEN)
        read = (do.to(gl.float32) * factor[None, :]).to(dtype)
        x = warpgroup_mma_wait(0, deps=[x])
        dh = dh * last
        x = x * to_end[None, :]
        mbarrier.wait(p_full.index(t_stage), t_phase)
        read = gl.convert_layout(read, OPERAND, assert_trivial=True)
        x = warpgroup_mma(read, p_s.index(t_stage), x, is_async=True)
        factor = vectors.index(base + SECOND_VECTOR).load(TOKEN)
        read = (do.to(gl.float32) * factor[None, :]).to(dtype)
        read = gl.convert_layout(read, UPDATE, assert_trivial=True)
        dh = warpgroup_mma(read, q, dh, is_async=True)
        x = warpgroup_mma_wait(1, deps=[x])
        xo = gl.convert_layout(x.to(dtype), OPERAND, assert_trivial=True)
        mbarrier.wait(t_full.index(t_stage), t_phase)
        x = warpgroup_mma(xo, t_s.index(t_stage), x, is_async=True)
        factor = writes.index(stage).load(TOKEN)
        x = warpgroup_mma_wait(0, deps=[x])
        written = gl.convert_layout((x * factor[None, :]).to(dtype), UPDATE, assert_trivial=True)
        dh = warpgroup_mma(written, k, dh, is_async=True)
        if OUTPUT:
            factor = vectors.index(base + OUT_VECTOR).load(TOKEN)
            tma.store_wait(1)
            dx_tile.permute((1, 0)).store((x * factor[None, :]).to(dtype))
            at = (i_b, row, i_hv, first_v)
            store_values(*(dx_desc, p_dx, dx_tile, at, left, stride_dxt, V, BV, IS_VARLEN, True))
        dh = warpgroup_mma_wait(0, deps=[dh])
        mbarrier.arrive(empty.index(stage), count=1)
        row -= CHUNK
        left += CHUNK
        slot -= 1
        stage, phase = advance(stage, phase, STAGES)
        q_stage, q_phase = advance(q_stage, q_phase, Q_STAGES)
        t_stage, t_phase = advance(t_stage, t_phase, T_STAGES)
    tma.store_wait(0)
    if STORE_DH0:
        stored = (o_v < end_out)[:, None] & (o_k < K)[None, :]
        offsets = o_v[:, None] * stride_dh0v + o_k[None, :] * stride_dh0k
        gl.store(p_dh0 + offsets, dh, mask=stored)
    if CHECKED:
        check_end(dh, check, o_v, o_k, first_v, K, V, BV)


@gluon.jit
def forward_role(
    memory,
    fulls,
    descs,
    ends,
    strides,
    place,
    check,
    walk,
    dtype: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BK: gl.constexpr,
    BV: gl.constexpr,
    STATES: gl.constexpr,
    STAGES: gl.constexpr,
    T_STAGES: gl.constexpr,
    OUTPUT: gl.constexpr,
    CHECKED: gl.constexpr,
    IS_VARLEN: gl.constexpr,
    HAS_H0: gl.constexpr,
    NUMBER: gl.constexpr,
):
    k_s, v_s, t_s, u_s, h_s, vectors, flags, empty = memory
    k_full, gates_full, t_full = fulls
    u_desc, h_desc = descs
    p_u, p_h0, p_map, stride_map, first_out, end_out, identity = ends
    stride_ut, stride_h0k, stride_h0v = strides
    i_b, first_row, i_hv, first_v, first_slot = place
    n_chunks, n_rows, _ = walk
    first_v += NUMBER * BV
    p_u += NUMBER * BV
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    UPDATE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    o_v = first_v + gl.arange(0, BV, gl.SliceLayout(1, STATE))
    o_k = gl.arange(0, BK, gl.SliceLayout(0, STATE))
    h = gl.zeros([BV, BK], gl.float32, STATE)
    if HAS_H0:
        inside = (o_v < V)[:, None] & (o_k < K)[None, :]
        offsets = o_v[:, None] * stride_h0v + o_k[None, :] * stride_h0k
        h = gl.load(p_h0 + offsets, mask=inside, other=0).to(gl.float32)
    o_out = first_out + NUMBER * BV + gl.arange(0, BV, gl.SliceLayout(1, STATE))
    if not OUTPUT:
        h = gl.where((o_out[:, None] == o_k[None, :]) & (identity == 1), 1.0, h)
    x = gl.zeros([BV, CHUNK], gl.float32, PRODUCT)
    u_tile = u_s.index(NUMBER)
    h_tile = h_s.index(NUMBER)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    t_stage = gl.to_tensor(0)
    t_phase = gl.to_tensor(0)
    for i in range(n_chunks):
        base = stage * VECTORS
        hb = h.to(dtype)
        if OUTPUT:
            # At most the newest copy to memory, that of v_new, still reads its tile.
            tma.store_wait(1)
            h_tile.permute((1, 0)).store(hb)
            fence_async_shared()
            h_block = viewed(h_tile, dtype, [1, 1, BK, BV], ROWS)
            store_tile(h_desc, [first_slot + i, i_hv, 0, first_v], h_block)
        mbarrier.wait(k_full.index(stage), phase)
        k = k_s.index(stage)
        ho = gl.convert_layout(hb, OPERAND, assert_trivial=True)
        x = warpgroup_mma(ho, k.permute((1, 0)), x, use_acc=False, is_async=True)
        mbarrier.wait(gates_full.index(stage), phase)
        last = scalar_of(flags.index(stage).load(ONE), LAST)
        of_v = vectors.index(base + FIRST_VECTOR).load(TOKEN)
        of_k = vectors.index(base + SECOND_VECTOR).load(TOKEN)
        v_tile = v_s.index(stage)
        if STATES > 1:
            v_tile = v_tile.slice(NUMBER * BV, BV, 1)
        v = v_tile.permute((1, 0)).load(PRODUCT)
        x, h = warpgroup_mma_wait(0, deps=[x, h])
        h = h * last
        x = v.to(gl.float32) * of_v[None, :] - x * of_k[None, :]
        xo = gl.convert_layout(x.to(dtype), OPERAND, assert_trivial=True)
        mbarrier.wait(t_full.index(t_stage), t_phase)
        x = warpgroup_mma(xo, t_s.index(t_stage).permute((1, 0)), x, is_async=True)
        factor = vectors.index(base + TO_END_VECTOR).load(TOKEN)
        x = warpgroup_mma_wait(0, deps=[x])
        written = gl.convert_layout((x * factor[None, :]).to(dtype), UPDATE, assert_trivial=True)
        h = warpgroup_mma(written, k, h, is_async=True)
        if OUTPUT:
            factor = vectors.index(base + OUT_VECTOR).load(TOKEN)
            tma.store_wait(1)
            u_tile.permute((1, 0)).store((x * factor[None, :]).to(dtype))
            at = (i_b, first_row + i * CHUNK, i_hv, first_v)
            left = n_rows - i * CHUNK
            store_values(*(u_desc, p_u, u_tile, at, left, stride_ut, V, BV, IS_VARLEN, True))
        h = warpgroup_mma_wait(0, deps=[h])
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = advance(stage, phase, STAGES)
        t_stage, t_phase = advance(t_stage, t_phase, T_STAGES)
    tma.store_wait(0)
    if not OUTPUT:
        stored = (o_out < end_out)[:, None] & (o_k < K)[None, :]
        gl.store(p_map + (o_k[None, :] * stride_map + o_out[:, None]), h, mask=stored)
    if CHECKED:
        check_end(h, check, o_v, o_k, first_v, K, V, BV)
