"""The memory and the roles of a block that walks back (kernel.py)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gdn_triton.chunk.triton.hopper.gates import FLAGS, VECTORS
from gdn_triton.chunk.triton.hopper.names import CHUNK
from gdn_triton.chunk.triton.hopper.roles import run_roles
from gdn_triton.chunk.triton.hopper.triangles import BLOCKED_TILE, triangles_walk
from gdn_triton.chunk.triton.hopper.walks.gates import gates_role
from gdn_triton.chunk.triton.hopper.walks.loaders import back_loader_role
from gdn_triton.chunk.triton.hopper.walks.state import back_role


@gluon.jit
def back_block(
    sources,
    outputs,
    gates,
    ends,
    strides,
    heads,
    first_slot,
    check,
    walk,
    scale,
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
    HAS_DHT: gl.constexpr,
    STORE_DH0: gl.constexpr,
    STORE_DV: gl.constexpr,
    LEAST_BETA: gl.constexpr,
    OUTPUT: gl.constexpr,
    CHECKED: gl.constexpr,
    IS_VARLEN: gl.constexpr,
):
    COLUMNS: gl.constexpr = STATES * BV
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    dtype: gl.constexpr = sources[0].dtype
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

    i_b, first_row, _, i_hv, first_v = heads
    place = (i_b, first_row, i_hv, first_v, first_slot)
    factors = (vectors, writes, flags, gates_full, empty)
    inverses = (k_s, t_s, vectors, flags, k_full, k_full, gates_full, t_full, empty)
    scratch = (a_s, x_s, blocks_s)
    states = (q_s, k_s, do_s, t_s, p_s, dx_s, dh_s, vectors, writes, flags, empty)
    fulls = (k_full, q_full, gates_full, t_full, p_full)
    tiles = (q_s, k_s, do_s, k_full, q_full, empty)
    run_roles(
        (
            back_role,
            (states, fulls, outputs, ends, strides, place, check, walk),
            (dtype, K, V, BK, BV, STATES, STAGES, Q_STAGES, T_STAGES),
            (HAS_DHT, STORE_DH0, OUTPUT, CHECKED, IS_VARLEN),
        ),
        (
            triangles_walk,
            (inverses, scratch, walk, (0, 0, 0, 0)),
            (dtype, BK, STAGES, T_STAGES),
            (False,),
        ),
        (gates_role, (factors, gates, walk, scale), (STAGES,), (True, STORE_DV, LEAST_BETA)),
        (
            back_loader_role,
            (tiles, sources, heads, walk),
            (dtype, BK, COLUMNS, STAGES, Q_STAGES),
            (IS_VARLEN,),
        ),
        None,
        *(STATES, STATE_REGISTERS, TRIANGLES_REGISTERS, SINGLE_REGISTERS),
    )
