"""The state warps: they carry columns of a state through all chunks of a sequence and compute o.

All matrices are transposed: rows are channels of V, and columns are channels of K in the state and
tokens elsewhere. The fp32 state is the accumulator of its own update and, rounded, the register
operand of its reads. gates.py explains the frame in which the state is stored.
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

from gdn_triton.chunk.triton.hopper.gates import (
    C_VECTOR,
    DECAY,
    END,
    ENTER,
    F_VECTOR,
    R_VECTOR,
    VECTORS,
)
from gdn_triton.chunk.triton.hopper.names import (
    CHUNK,
    advance,
    opaque,
    scalar_of,
    store_tile,
    viewed,
)


@gluon.jit
def store_rows(p_o, tile, stride_t, n_rows, n_columns, COLUMNS: gl.constexpr):
    """Stores the first rows and columns of a tile [64, COLUMNS] to memory."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    o_t = gl.arange(0, CHUNK, gl.SliceLayout(1, LANES))
    o_v = gl.arange(0, COLUMNS, gl.SliceLayout(0, LANES))
    mask = (o_t < n_rows)[:, None] & (o_v < n_columns)[None, :]
    gl.store(p_o + (o_t.to(gl.int64)[:, None] * stride_t + o_v[None, :]), tile.load(LANES), mask)


@gluon.jit
def zero_rows(p_o, stride_t, n_rows, n_columns, COLUMNS: gl.constexpr):
    """Stores zeros in the first columns of ``n_rows`` rows of memory."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    o_t = gl.arange(0, CHUNK, gl.SliceLayout(1, LANES))
    o_v = gl.arange(0, COLUMNS, gl.SliceLayout(0, LANES))
    zeros = gl.zeros([CHUNK, COLUMNS], p_o.dtype.element_ty, LANES)
    offsets = o_t.to(gl.int64)[:, None] * stride_t + o_v[None, :]
    for start in range(0, n_rows, CHUNK):
        mask = (o_t < n_rows - start)[:, None] & (o_v < n_columns)[None, :]
        gl.store(p_o + offsets, zeros, mask)
        p_o += CHUNK * gl.cast(stride_t, gl.int64)


@gluon.jit
def state_role(
    memory,
    o_desc,
    p_o,
    p_h0,
    p_ht,
    strides,
    place,
    walk,
    dtype: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BK: gl.constexpr,
    BV: gl.constexpr,
    STAGES: gl.constexpr,
    T_STAGES: gl.constexpr,
    HAS_H0: gl.constexpr,
    STORE_HT: gl.constexpr,
    IS_VARLEN: gl.constexpr,
):
    k_s, q_s, v_s, t_s, p_s, o_s, vectors, flags, tile_full, gates_full, t_full, empty = memory
    stride_ot, stride_h0k, stride_h0v, stride_htk, stride_htv = strides
    i_b, first_row, i_hv, first_v = place
    n_chunks, n_rows, n_rest = walk
    WARPS: gl.constexpr = gl.num_warps()
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BK, 16])
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 64, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    UPDATE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    TOKEN: gl.constexpr = gl.SliceLayout(0, PRODUCT)
    ONE: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    o_t = gl.arange(0, CHUNK, TOKEN)
    o_v = first_v + gl.arange(0, BV, gl.SliceLayout(1, STATE))
    o_k = gl.arange(0, BK, gl.SliceLayout(0, STATE))
    inside = (o_v < V)[:, None] & (o_k < K)[None, :]

    S = gl.zeros([BV, BK], gl.float32, STATE)
    end = gl.to_tensor(1.0)
    if HAS_H0:
        offsets = o_v[:, None] * stride_h0v + o_k[None, :] * stride_h0k
        S = gl.load(p_h0 + offsets, mask=inside, other=0).to(gl.float32)
        # Multiply by 2^-TOP, because every sequence begins in the frame TOP (gates.py).
        S *= 5.9604644775390625e-08
        end = gl.to_tensor(16777216.0)
    # The first product overwrites this accumulator. Later products overwrite accumulators that are
    # dead: an accumulator of new zeros would be live together with those, and registers would
    # spill.
    x = gl.zeros([BV, CHUNK], gl.float32, PRODUCT)
    o_tile = o_s.index(0)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    t_stage = gl.to_tensor(0)
    t_phase = gl.to_tensor(0)
    for i in range(n_chunks):
        left = n_rows - i * CHUNK
        mbarrier.wait(gates_full.index(stage), phase)
        base = stage * VECTORS
        numbers = flags.index(stage).load(ONE)
        enter = scalar_of(numbers, ENTER)
        decay = scalar_of(numbers, DECAY)
        end = scalar_of(numbers, END)
        if enter != 1.0:
            S = S * opaque(enter)
        Sb = gl.convert_layout(S.to(dtype), OPERAND, assert_trivial=True)
        mbarrier.wait(tile_full.index(stage), phase)
        if IS_VARLEN:
            # T is written after the rows of k past the end have been set to zero (triangles.py).
            mbarrier.wait(t_full.index(t_stage), t_phase, pred=left < CHUNK)
        k = k_s.index(stage)
        q = q_s.index(stage)
        x = warpgroup_mma(Sb, k.permute((1, 0)), x, use_acc=False, is_async=True)
        c = vectors.index(base + C_VECTOR).load(TOKEN)
        f = vectors.index(base + F_VECTOR).load(TOKEN)
        v = v_s.index(stage).permute((1, 0)).load(PRODUCT)
        x = warpgroup_mma_wait(0, deps=[x])
        if decay != 1.0:
            S = S * opaque(decay)
        x = v.to(gl.float32) * c[None, :] - x * f[None, :]
        if IS_VARLEN:
            if left < CHUNK:
                # Rows past the end belong to another sequence and may be NaN.
                x = gl.where((o_t < left)[None, :], x, 0.0)
        xb = gl.convert_layout(x.to(dtype), OPERAND, assert_trivial=True)
        mbarrier.wait(t_full.index(t_stage), t_phase)
        t = t_s.index(t_stage)
        p = p_s.index(t_stage)
        x = warpgroup_mma(xb, t.permute((1, 0)), x, is_async=True)
        x = warpgroup_mma_wait(0, deps=[x])
        u = x.to(dtype)
        o = warpgroup_mma(Sb, q.permute((1, 0)), x, use_acc=False, is_async=True)
        uo = gl.convert_layout(u, OPERAND, assert_trivial=True)
        o = warpgroup_mma(uo, p.permute((1, 0)), o, is_async=True)
        S = warpgroup_mma(gl.convert_layout(u, UPDATE, assert_trivial=True), k, S, is_async=True)
        r = vectors.index(base + R_VECTOR).load(TOKEN)
        x = warpgroup_mma_wait(1, deps=[o])
        tma.store_wait(0)
        o_tile.permute((1, 0)).store((x * r[None, :]).to(dtype))
        row = first_row + i * CHUNK
        if IS_VARLEN:
            if left < CHUNK:
                p_row = p_o + row.to(gl.int64) * stride_ot
                store_rows(p_row, o_tile, stride_ot, left, V - first_v, BV)
            else:
                fence_async_shared()
                block = viewed(o_tile, dtype, [1, CHUNK, 1, BV], ROWS)
                store_tile(o_desc, [i_b, row, i_hv, first_v], block)
        else:
            fence_async_shared()
            block = viewed(o_tile, dtype, [1, CHUNK, 1, BV], ROWS)
            store_tile(o_desc, [i_b, row, i_hv, first_v], block)
        S = warpgroup_mma_wait(0, deps=[S])
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = advance(stage, phase, STAGES)
        t_stage, t_phase = advance(t_stage, t_phase, T_STAGES)
    tma.store_wait(0)
    if IS_VARLEN:
        # These rows come after the last sequence and belong to none.
        p_rest = p_o + (first_row + n_rows).to(gl.int64) * stride_ot
        zero_rows(p_rest, stride_ot, n_rest, V - first_v, BV)
    if STORE_HT:
        offsets = o_v[:, None] * stride_htv + o_k[None, :] * stride_htk
        gl.store(p_ht + offsets, S * end, mask=inside)
