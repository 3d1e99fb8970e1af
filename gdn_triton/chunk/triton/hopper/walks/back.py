"""The walk back of the backward for compute capability 9.0.

A program owns the columns of one or two gradients dh, 64 each, of one sequence and value head. Its
warps have four roles: the state (state.py), the triangles (hopper/triangles.py), the gates
(gates.py) and the loader (loaders.py). As in the forward (hopper/kernel.py), each buffer has a
barrier that says it is full, and one more barrier for each stage says that all buffers of its chunk
are empty.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gdn_triton.chunk.triton.hopper.gates import FLAGS, VECTORS
from gdn_triton.chunk.triton.hopper.names import CHUNK
from gdn_triton.chunk.triton.hopper.places import sequence_of
from gdn_triton.chunk.triton.hopper.triangles import BLOCKED_TILE, triangles_role
from gdn_triton.chunk.triton.hopper.walks.gates import gates_role
from gdn_triton.chunk.triton.hopper.walks.loaders import back_loader_role
from gdn_triton.chunk.triton.hopper.walks.state import back_role


@gluon.jit(do_not_specialize=["scale", "T", "N", "NT", "stride_gb", "stride_betab"])
def hopper_walk_back_kernel(
    q_desc,
    k_desc,
    do_desc,
    dx_desc,
    dh_desc,
    g_cumsum,
    beta,
    dx,
    dht,
    dh0,
    cu_seqlens,
    chunk_offsets,
    scale,
    T,
    N,
    NT,
    H,
    HV,
    stride_gb,
    stride_gt,
    stride_gh,
    stride_betab,
    stride_betat,
    stride_betah,
    stride_dhtn,
    stride_dhth,
    stride_dhtk,
    stride_dhtv,
    stride_dh0n,
    stride_dh0h,
    stride_dh0k,
    stride_dh0v,
    K: gl.constexpr,
    V: gl.constexpr,
    BK: gl.constexpr,
    BV: gl.constexpr,
    STATES: gl.constexpr,
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    T_STAGES: gl.constexpr,
    STATE_REGISTERS: gl.constexpr,
    TRIANGLES_REGISTERS: gl.constexpr,
    SINGLE_REGISTERS: gl.constexpr,
    IS_VARLEN: gl.constexpr,
    num_warps: gl.constexpr,
):
    COLUMNS: gl.constexpr = STATES * BV
    BLOCKS: gl.constexpr = (V + COLUMNS - 1) // COLUMNS
    dtype: gl.constexpr = k_desc.dtype
    pid = gl.program_id(0)
    first_v = pid % BLOCKS * COLUMNS
    i_hv = pid // BLOCKS % HV
    i_n = pid // BLOCKS // HV
    i_h = i_hv // (HV // H)
    i_b, first_row, n_rows, n_rest = sequence_of(i_n, cu_seqlens, T, N, IS_VARLEN)
    n_chunks = (n_rows + CHUNK - 1) // CHUNK
    first_slot = i_n * NT
    if IS_VARLEN:
        first_slot = gl.load(chunk_offsets + i_n)

    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, BK], TILE)
    q_s = gl.allocate_shared_memory(dtype, [Q_STAGES, CHUNK, BK], TILE)
    do_s = gl.allocate_shared_memory(dtype, [Q_STAGES, CHUNK, COLUMNS], TILE)
    p_s = gl.allocate_shared_memory(dtype, [T_STAGES, CHUNK, CHUNK], TILE)
    dx_s = gl.allocate_shared_memory(dtype, [STATES, CHUNK, BV], TILE)
    dh_s = gl.allocate_shared_memory(dtype, [STATES, BK, BV], TILE)
    t_s = gl.allocate_shared_memory(dtype, [T_STAGES, CHUNK, CHUNK], TILE)
    a_s = gl.allocate_shared_memory(gl.float16, [CHUNK, CHUNK], TILE)
    x_s = gl.allocate_shared_memory(gl.float16, [CHUNK, CHUNK], TILE)
    blocks_s = gl.allocate_shared_memory(gl.float16, [CHUNK, CHUNK], BLOCKED_TILE)
    vectors = gl.allocate_shared_memory(gl.float32, [STAGES * VECTORS, CHUNK], FLAT)
    writes = gl.allocate_shared_memory(gl.float32, [STAGES, CHUNK], FLAT)
    flags = gl.allocate_shared_memory(gl.float32, [STAGES, FLAGS], FLAT)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES + 1, 1], BARRIER)
    p_full = gl.allocate_shared_memory(gl.int64, [T_STAGES, 1], BARRIER)
    gates_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    t_full = gl.allocate_shared_memory(gl.int64, [T_STAGES, 1], BARRIER)
    for s in gl.static_range(STAGES):
        mbarrier.init(gates_full.index(s), count=1)
        mbarrier.init(empty.index(s), count=STATES)
    for s in gl.static_range(STAGES + 1):
        mbarrier.init(k_full.index(s), count=1)
    for s in gl.static_range(Q_STAGES + 1):
        mbarrier.init(q_full.index(s), count=1)
    for s in gl.static_range(T_STAGES):
        mbarrier.init(t_full.index(s), count=1)
        mbarrier.init(p_full.index(s), count=1)

    batch = i_b.to(gl.int64)
    head = i_hv.to(gl.int64)
    start = first_row.to(gl.int64)
    p_g = g_cumsum + batch * stride_gb + start * stride_gt + head * stride_gh
    p_beta = beta + batch * stride_betab + start * stride_betat + head * stride_betah
    stride_t = HV * V
    p_dx = dx + batch * T * stride_t + head * V + first_v
    # A role takes no None: in its place a pointer that the role does not use.
    p_dht = g_cumsum
    if dht is not None:
        p_dht = dht + i_n.to(gl.int64) * stride_dhtn + head * stride_dhth
    HAS_DHT: gl.constexpr = dht is not None
    p_dh0 = g_cumsum
    if dh0 is not None:
        p_dh0 = dh0 + i_n.to(gl.int64) * stride_dh0n + head * stride_dh0h
    STORE_DH0: gl.constexpr = dh0 is not None

    walk = (n_chunks, n_rows, n_rest)
    heads = (i_b, first_row, i_h, i_hv, first_v)
    place = (i_b, first_row, i_hv, first_v, first_slot)
    gates = (p_g, p_beta, stride_gt, stride_betat)
    factors = (vectors, writes, flags, gates_full, empty)
    inverses = (k_s, t_s, vectors, flags, k_full, gates_full, t_full, empty)
    scratch = (a_s, x_s, blocks_s)
    states = (q_s, k_s, do_s, t_s, p_s, dx_s, dh_s, vectors, writes, flags, empty)
    fulls = (k_full, q_full, gates_full, t_full, p_full)
    outputs = (dx_desc, dh_desc)
    ends = (p_dx, p_dht, p_dh0)
    strides = (stride_t, stride_dhtk, stride_dhtv, stride_dh0k, stride_dh0v)
    tiles = (q_s, k_s, do_s, k_full, q_full, empty)
    sources = (q_desc, k_desc, do_desc)
    if STATES == 1:
        gl.warp_specialize(
            [
                (
                    back_role,
                    (
                        states,
                        fulls,
                        outputs,
                        ends,
                        strides,
                        place,
                        walk,
                        dtype,
                        K,
                        V,
                        BK,
                        BV,
                        0,
                        STATES,
                        STAGES,
                        Q_STAGES,
                        T_STAGES,
                        HAS_DHT,
                        STORE_DH0,
                        IS_VARLEN,
                    ),
                ),
                (
                    triangles_role,
                    (inverses, scratch, walk, dtype, BK, STAGES, T_STAGES, False),
                ),
                (
                    gates_role,
                    (factors, gates, walk, scale, STAGES, True),
                ),
                (
                    back_loader_role,
                    (tiles, sources, heads, walk, dtype, BK, COLUMNS, STAGES, Q_STAGES, IS_VARLEN),
                ),
            ],
            [4, 1, 1],
            [TRIANGLES_REGISTERS, SINGLE_REGISTERS, SINGLE_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (
                    back_role,
                    (
                        states,
                        fulls,
                        outputs,
                        ends,
                        strides,
                        place,
                        walk,
                        dtype,
                        K,
                        V,
                        BK,
                        BV,
                        0,
                        STATES,
                        STAGES,
                        Q_STAGES,
                        T_STAGES,
                        HAS_DHT,
                        STORE_DH0,
                        IS_VARLEN,
                    ),
                ),
                (
                    back_role,
                    (
                        states,
                        fulls,
                        outputs,
                        ends,
                        strides,
                        place,
                        walk,
                        dtype,
                        K,
                        V,
                        BK,
                        BV,
                        1,
                        STATES,
                        STAGES,
                        Q_STAGES,
                        T_STAGES,
                        HAS_DHT,
                        STORE_DH0,
                        IS_VARLEN,
                    ),
                ),
                (
                    triangles_role,
                    (inverses, scratch, walk, dtype, BK, STAGES, T_STAGES, False),
                ),
                (
                    gates_role,
                    (factors, gates, walk, scale, STAGES, True),
                ),
                (
                    back_loader_role,
                    (tiles, sources, heads, walk, dtype, BK, COLUMNS, STAGES, Q_STAGES, IS_VARLEN),
                ),
            ],
            [4, 4, 1, 1],
            [STATE_REGISTERS, TRIANGLES_REGISTERS, SINGLE_REGISTERS, SINGLE_REGISTERS],
        )
