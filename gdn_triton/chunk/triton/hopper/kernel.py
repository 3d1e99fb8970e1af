"""The fused forward of a sequence, for compute capability 9.0 (docs/gluon.md).

A program owns BV columns of the state [K, V] of one sequence and value head. Its warps have four
roles, which pass chunks to each other through rings of buffers in shared memory:

    state      the state in registers, x, u, o and the update (state.py)
    triangles  T and P of each chunk, which need no state (triangles.py)
    gates      factors of the tokens, and the frame of the state (gates.py)
    loader     copies q, k and v of a chunk to shared memory, by TMA

Each buffer has a barrier that completes when the buffer is full. The state warps are the last to
read a chunk. Therefore each stage has one more barrier, at which only the state warps arrive, and
which completes when all buffers of that chunk are empty.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gdn_triton.chunk.triton.hopper.gates import FLAGS, VECTORS, gates_role
from gdn_triton.chunk.triton.hopper.names import CHUNK, advance, load_tile, viewed
from gdn_triton.chunk.triton.hopper.state import state_role
from gdn_triton.chunk.triton.hopper.triangles import BLOCKED_TILE, triangles_role


@gluon.jit
def loader_role(
    memory,
    descs,
    place,
    walk,
    dtype: gl.constexpr,
    BK: gl.constexpr,
    BV: gl.constexpr,
    STAGES: gl.constexpr,
):
    k_s, q_s, v_s, tile_full, empty = memory
    q_desc, k_desc, v_desc = descs
    i_b, first_row, i_h, i_hv, first_v = place
    n_chunks, _, _ = walk
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for i in range(n_chunks):
        row = first_row + i * CHUNK
        mbarrier.wait(empty.index(stage), phase ^ 1)
        full = tile_full.index(stage)
        mbarrier.expect(full, (2 * BK + BV) * CHUNK * 2)
        k = viewed(k_s.index(stage), dtype, [1, CHUNK, 1, BK], ROWS)
        q = viewed(q_s.index(stage), dtype, [1, CHUNK, 1, BK], ROWS)
        v = viewed(v_s.index(stage), dtype, [1, CHUNK, 1, BV], ROWS)
        load_tile(k_desc, [i_b, row, i_h, 0], full, k)
        load_tile(q_desc, [i_b, row, i_h, 0], full, q)
        load_tile(v_desc, [i_b, row, i_hv, first_v], full, v)
        stage, phase = advance(stage, phase, STAGES)


@gluon.jit(do_not_specialize=["scale", "T", "N"])
def hopper_fwd_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    g,
    beta,
    A_log,
    dt_bias,
    h0,
    o,
    ht,
    cu_seqlens,
    scale,
    T,
    N,
    H,
    HV,
    stride_gb,
    stride_gt,
    stride_gh,
    stride_betab,
    stride_betat,
    stride_betah,
    stride_h0n,
    stride_h0h,
    stride_h0k,
    stride_h0v,
    stride_htk,
    stride_htv,
    RCP_LN2: gl.constexpr,
    FLOOR: gl.constexpr,
    THRESHOLD: gl.constexpr,
    BETA_FACTOR: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BK: gl.constexpr,
    BV: gl.constexpr,
    STAGES: gl.constexpr,
    T_STAGES: gl.constexpr,
    TRIANGLES_REGISTERS: gl.constexpr,
    SINGLE_REGISTERS: gl.constexpr,
    USE_SIGMOID: gl.constexpr,
    IS_VARLEN: gl.constexpr,
    num_warps: gl.constexpr,
):
    V_BLOCKS: gl.constexpr = (V + BV - 1) // BV
    dtype: gl.constexpr = k_desc.dtype
    pid = gl.program_id(0)
    first_v = pid % V_BLOCKS * BV
    i_hv = pid // V_BLOCKS % HV
    i_n = pid // V_BLOCKS // HV
    i_h = i_hv // (HV // H)
    if IS_VARLEN:
        i_b = i_n * 0
        first_row = gl.load(cu_seqlens + i_n).to(gl.int32)
        end = gl.load(cu_seqlens + i_n + 1).to(gl.int32)
        n_rows = end - first_row
        n_rest = gl.where(i_n == N - 1, T - end, 0)
    else:
        i_b = i_n
        first_row = i_n * 0
        n_rows = first_row + T
        n_rest = first_row
    n_chunks = (n_rows + CHUNK - 1) // CHUNK

    KEYS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, BK], KEYS)
    q_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, BK], KEYS)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, BV], KEYS)
    t_s = gl.allocate_shared_memory(dtype, [T_STAGES, CHUNK, CHUNK], KEYS)
    p_s = gl.allocate_shared_memory(dtype, [T_STAGES, CHUNK, CHUNK], KEYS)
    o_s = gl.allocate_shared_memory(dtype, [1, CHUNK, BV], KEYS)
    a_s = gl.allocate_shared_memory(gl.float16, [CHUNK, CHUNK], KEYS)
    x_s = gl.allocate_shared_memory(gl.float16, [CHUNK, CHUNK], KEYS)
    blocks_s = gl.allocate_shared_memory(gl.float16, [CHUNK, CHUNK], BLOCKED_TILE)
    vectors = gl.allocate_shared_memory(gl.float32, [STAGES * VECTORS, CHUNK], FLAT)
    flags = gl.allocate_shared_memory(gl.float32, [STAGES, FLAGS], FLAT)
    tile_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    gates_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    t_full = gl.allocate_shared_memory(gl.int64, [T_STAGES, 1], BARRIER)
    for s in gl.static_range(STAGES):
        mbarrier.init(tile_full.index(s), count=1)
        mbarrier.init(gates_full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    for s in gl.static_range(T_STAGES):
        mbarrier.init(t_full.index(s), count=1)

    batch = i_b.to(gl.int64)
    head = i_hv.to(gl.int64)
    walk_row = first_row.to(gl.int64)
    p_g = g + batch * stride_gb + walk_row * stride_gt + head * stride_gh
    p_beta = beta + batch * stride_betab + walk_row * stride_betat + head * stride_betah
    p_o = o + ((batch * T) * HV + head) * V + first_v
    # A role does not accept None. It gets a pointer that it does not use instead.
    p_h0 = o
    if h0 is not None:
        p_h0 = h0 + i_n.to(gl.int64) * stride_h0n + head * stride_h0h
    p_ht = o
    if ht is not None:
        p_ht = ht + (i_n.to(gl.int64) * HV + head) * (K * V)

    gate_inputs = (p_g, p_beta, stride_gt, stride_betat)
    p_A_log = g
    p_dt_bias = g
    if A_log is not None:
        p_A_log = A_log + i_hv
    if dt_bias is not None:
        p_dt_bias = dt_bias + i_hv
    HAS_H0: gl.constexpr = h0 is not None
    STORE_HT: gl.constexpr = ht is not None
    HAS_GATE: gl.constexpr = A_log is not None
    HAS_DT_BIAS: gl.constexpr = dt_bias is not None

    walk = (n_chunks, n_rows, n_rest)
    states = (k_s, q_s, v_s, t_s, p_s, o_s, vectors, flags, tile_full, gates_full, t_full, empty)
    strides = (HV * V, stride_h0k, stride_h0v, stride_htk, stride_htv)
    inverses = (k_s, q_s, t_s, p_s, vectors, flags, tile_full, gates_full, t_full, empty)
    scratch = (a_s, x_s, blocks_s)
    gl.warp_specialize(
        [
            (
                state_role,
                (
                    states,
                    o_desc,
                    p_o,
                    p_h0,
                    p_ht,
                    strides,
                    (i_b, first_row, i_hv, first_v),
                    walk,
                    dtype,
                    K,
                    V,
                    BK,
                    BV,
                    STAGES,
                    T_STAGES,
                    HAS_H0,
                    STORE_HT,
                    IS_VARLEN,
                ),
            ),
            (
                triangles_role,
                (inverses, scratch, walk, dtype, BK, STAGES, T_STAGES, IS_VARLEN),
            ),
            (
                gates_role,
                (
                    (vectors, flags, gates_full, empty),
                    gate_inputs,
                    p_A_log,
                    p_dt_bias,
                    walk,
                    scale,
                    RCP_LN2,
                    FLOOR,
                    THRESHOLD,
                    STAGES,
                    HAS_GATE,
                    HAS_DT_BIAS,
                    USE_SIGMOID,
                    BETA_FACTOR,
                ),
            ),
            (
                loader_role,
                (
                    (k_s, q_s, v_s, tile_full, empty),
                    (q_desc, k_desc, v_desc),
                    (i_b, first_row, i_h, i_hv, first_v),
                    walk,
                    dtype,
                    BK,
                    BV,
                    STAGES,
                ),
            ),
        ],
        [4, 1, 1],
        [TRIANGLES_REGISTERS, SINGLE_REGISTERS, SINGLE_REGISTERS],
    )
