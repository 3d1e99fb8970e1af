"""Both serial walks of the backward for compute capability 9.0: the results of
gradients/state.py.

A program owns the columns of one or two states, or of their gradients, 64 each, of one sequence and
value head. Its warps have four roles: the state (state.py), the triangles (hopper/triangles.py),
the gates (gates.py) and the loader (loaders.py). As in the forward (hopper/kernel.py), each buffer
has a barrier that says it is full, and one more barrier for each stage says that all buffers of its
chunk are empty.

PART: whole sequences; or, of a call in segments (segments.py), the maps of the segments, their
walks from given states, or the whole walks again of sequences and heads with a segment whose end
differs from the next start. The states of maps begin with zeros or, in a walk forward, with columns
of the identity, for which columns of v beyond V are zeros; their walks store the last state alone.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gdn_triton.chunk.triton.hopper.gates import FLAGS, VECTORS
from gdn_triton.chunk.triton.hopper.names import CHUNK
from gdn_triton.chunk.triton.hopper.places import sequence_of
from gdn_triton.chunk.triton.hopper.roles import run_roles
from gdn_triton.chunk.triton.hopper.triangles import BLOCKED_TILE, triangles_walk
from gdn_triton.chunk.triton.hopper.walks.gates import gates_role
from gdn_triton.chunk.triton.hopper.walks.loaders import back_loader_role, forward_loader_role
from gdn_triton.chunk.triton.hopper.walks.places import any_differs, segment_at, windows_of
from gdn_triton.chunk.triton.hopper.walks.state import back_role, forward_role


@gluon.jit(
    do_not_specialize=["scale", "T", "N", "NT", "NS", "segment", "stride_gb", "stride_betab"]
)
def hopper_walks_kernel(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    dx_desc,
    dh_desc,
    u_desc,
    h_desc,
    g_cumsum,
    beta,
    dx,
    u,
    h0,
    dht,
    dh0,
    starts,
    shifts,
    windows,
    marks,
    cu_seqlens,
    chunk_offsets,
    segment_rows,
    segment_offsets,
    scale,
    T,
    N,
    NT,
    NS,
    segment,
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
    STORE_DV: gl.constexpr,
    LEAST_BETA: gl.constexpr,
    IS_BACK: gl.constexpr,
    PART: gl.constexpr,
    IS_VARLEN: gl.constexpr,
    LEADS: gl.constexpr,
    FOLLOWS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """LEADS: the kernel after this one may run at the same time. FOLLOWS: this kernel may run at
    the same time as the kernel before it, and ends after that kernel."""
    COLUMNS: gl.constexpr = STATES * BV
    OUTPUT: gl.constexpr = PART != "maps"
    # A block of a map forward has columns of b, or after them columns of M.
    V_BLOCKS: gl.constexpr = (V + COLUMNS - 1) // COLUMNS
    K_BLOCKS: gl.constexpr = (K + COLUMNS - 1) // COLUMNS
    BLOCKS: gl.constexpr = V_BLOCKS + (0 if OUTPUT or IS_BACK else K_BLOCKS)
    CHECKED: gl.constexpr = PART == "segments"
    HAS_H0: gl.constexpr = h0 is not None and OUTPUT
    HAS_DHT: gl.constexpr = dht is not None and OUTPUT
    STORE_DH0: gl.constexpr = dh0 is not None
    if LEADS:
        # The next kernel of the stream may begin when all programs of this one have.
        gdc_launch_dependents()
    pid = gl.program_id(0)
    block = pid % BLOCKS
    first_v = block * COLUMNS
    i_hv = pid // BLOCKS % HV
    i_w = pid // BLOCKS // HV
    i_h = i_hv // (HV // H)
    head = i_hv.to(gl.int64)
    # Of a map: whether it is M, the first column that it stores, and where M begins.
    of_keys, first_out, identity = first_v * 0, first_v, first_v * 0
    # The end of the columns that a last state has.
    end_out = first_v * 0 + V
    i_n, tokens = i_w, i_w * 0
    # Numbers for each 64 columns: whether the end of a segment differs from the next start.
    MARKS: gl.constexpr = (V + BV - 1) // BV
    slot = i_w.to(gl.int64) * HV + head
    has_next = i_w * 0
    if PART == "whole" or PART == "again":
        i_b, first_row, n_rows, n_rest = sequence_of(i_n, cu_seqlens, T, N, IS_VARLEN)
    else:
        n_rest = i_w * 0
        i_n, i_b, tokens, first_row, n_rows, is_last = segment_at(
            *(i_w, cu_seqlens, segment_rows, segment_offsets, T, N, NS, segment, IS_VARLEN)
        )
        is_first = (tokens == 0).to(gl.int32)
    runs = n_rows > 0
    if PART == "again":
        p_head = marks + head * MARKS
        runs = any_differs(i_n, p_head, HV * MARKS, segment_offsets, NS, MARKS)
    if PART == "segments":
        end_out *= is_first
        if CHECKED:
            has_next = 1 - is_first if IS_BACK else 1 - is_last
            has_next *= gl.load(windows + slot, mask=runs, other=0)
    if PART == "maps":
        p_decays = g_cumsum + i_b.to(gl.int64) * stride_gb + head * stride_gh
        p_decays += first_row.to(gl.int64) * stride_gt
        at_start, at_end = windows_of(p_decays, stride_gt, n_rows)
        forgets = at_start > 0
        if IS_BACK:
            runs = runs & (is_first == 0)
            n_rows = gl.where(forgets, gl.minimum(n_rows, at_start * CHUNK), n_rows)
        else:
            of_keys = (block >= V_BLOCKS).to(gl.int32)
            gl.store(windows + slot, forgets.to(gl.int32), mask=runs & (block == 0))
            first_out -= of_keys * (V_BLOCKS * COLUMNS)
            end_out = gl.where(of_keys == 1, K, V)
            # M of a segment that forgets is 0. Folds that begin with a given state alone read M of
            # a first segment, or of a last one.
            unread = is_first * is_last
            if h0 is None:
                unread = is_first
            if dht is None:
                unread = gl.maximum(unread, is_last)
            runs = runs & (gl.where(of_keys == 1, unread, is_last) == 0)
            identity = of_keys * (1 - forgets.to(gl.int32))
            rows = gl.where(forgets, at_end * CHUNK * (1 - of_keys), n_rows)
            first_row += n_rows - rows
            n_rows = rows
    if PART != "whole":
        if not runs:
            if FOLLOWS:
                if pid == gl.num_programs(0) - 1:
                    gdc_wait()
            return
    n_chunks = (n_rows + CHUNK - 1) // CHUNK
    first_slot = i_n * NT
    if IS_VARLEN:
        first_slot = gl.load(chunk_offsets + i_n)
    first_slot += tokens // CHUNK

    batch = i_b.to(gl.int64)
    start = first_row.to(gl.int64)
    # Segments begin with states of their own, and the gradients of maps end with such.
    n = i_w.to(gl.int64)
    n_out = i_n.to(gl.int64) if OUTPUT else n
    p_g = g_cumsum + batch * stride_gb + start * stride_gt + head * stride_gh
    p_beta = beta + batch * stride_betab + start * stride_betat + head * stride_betah
    stride_t = HV * V
    first_value = batch * T * stride_t + head * V + first_v
    # A role takes no None, so a pointer that the role does not use stands in its place.
    p_h0 = g_cumsum
    if HAS_H0:
        p_h0 = h0 + n * stride_h0n + head * stride_h0h
    p_dht = g_cumsum
    if HAS_DHT:
        p_dht = dht + n * stride_dhtn + head * stride_dhth
    p_dh0 = g_cumsum
    if STORE_DH0:
        p_dh0 = dh0 + n_out * stride_dh0n + head * stride_dh0h
    p_map, stride_map = g_cumsum, 1
    if not OUTPUT and not IS_BACK:
        p_map = gl.where(of_keys == 1, shifts + slot * (K * K), starts + slot * (K * V))
        stride_map = gl.where(of_keys == 1, K, V)

    # The state that a segment's last state is compared with.
    p_next, p_marks = g_cumsum, cu_seqlens if IS_VARLEN else g_cumsum
    if CHECKED:
        others = (dht if IS_BACK else h0) + head * (K * V)
        p_next = others + (n - 1 if IS_BACK else n + 1) * (HV * K * V)
        p_marks = marks + slot * MARKS
    check = (has_next, p_next, p_marks)

    walk = (n_chunks, n_rows, n_rest)
    heads = (i_b, first_row, i_h, i_hv, first_v)
    place = (i_b, first_row, i_hv, first_v, first_slot)
    gates = (p_g, p_beta, stride_gt, stride_betat)

    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    dtype: gl.constexpr = k_desc.dtype
    k_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, BK], TILE)
    if IS_BACK:
        q_s = gl.allocate_shared_memory(dtype, [Q_STAGES, CHUNK, BK], TILE)
        do_s = gl.allocate_shared_memory(dtype, [Q_STAGES, CHUNK, COLUMNS], TILE)
        p_s = gl.allocate_shared_memory(dtype, [T_STAGES, CHUNK, CHUNK], TILE)
    else:
        v_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, COLUMNS], TILE)
    # The values and the state of a chunk that go to memory: dx and dh, or u and h.
    values_s = gl.allocate_shared_memory(dtype, [STATES, CHUNK, BV], TILE)
    states_s = gl.allocate_shared_memory(dtype, [STATES, BK, BV], TILE)
    t_s = gl.allocate_shared_memory(dtype, [T_STAGES, CHUNK, CHUNK], TILE)
    a_s = gl.allocate_shared_memory(gl.float16, [CHUNK, CHUNK], TILE)
    x_s = gl.allocate_shared_memory(gl.float16, [CHUNK, CHUNK], TILE)
    blocks_s = gl.allocate_shared_memory(gl.float16, [CHUNK, CHUNK], BLOCKED_TILE)
    vectors = gl.allocate_shared_memory(gl.float32, [STAGES * VECTORS, CHUNK], FLAT)
    writes = gl.allocate_shared_memory(gl.float32, [STAGES, CHUNK], FLAT)
    flags = gl.allocate_shared_memory(gl.float32, [STAGES, FLAGS], FLAT)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], BARRIER)
    if IS_BACK:
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
    if IS_BACK:
        for s in gl.static_range(Q_STAGES + 1):
            mbarrier.init(q_full.index(s), count=1)
    for s in gl.static_range(T_STAGES):
        mbarrier.init(t_full.index(s), count=1)
        if IS_BACK:
            mbarrier.init(p_full.index(s), count=1)
    # TMA arrives at these barriers, and overwrites memory through which sums of the whole block
    # have passed.
    fence_async_shared()

    factors = (vectors, writes, flags, gates_full, empty)
    inverses = (k_s, t_s, vectors, flags, k_full, k_full, gates_full, t_full, empty)
    scratch = (a_s, x_s, blocks_s)
    if IS_BACK:
        memory = (q_s, k_s, do_s, t_s, p_s, values_s, states_s, vectors, writes, flags, empty)
        fulls = (k_full, q_full, gates_full, t_full, p_full)
        tiles = (q_s, k_s, do_s, k_full, q_full, empty)
        sources, outputs = (q_desc, k_desc, do_desc), (dx_desc, dh_desc)
        ends = (dx + first_value, p_dht, p_dh0, end_out)
        strides = (stride_t, stride_dhtk, stride_dhtv, stride_dh0k, stride_dh0v)
    else:
        memory = (k_s, v_s, t_s, values_s, states_s, vectors, flags, empty)
        fulls = (k_full, gates_full, t_full)
        tiles = (k_s, v_s, k_full, empty)
        sources, outputs = (k_desc, v_desc), (u_desc, h_desc)
        ends = (u + first_value, p_h0, p_map, stride_map, first_out, end_out, identity)
        strides = (stride_t, stride_h0k, stride_h0v)
    run_roles(
        (
            back_role if IS_BACK else forward_role,
            (memory, fulls, outputs, ends, strides, place, check, walk),
            (dtype, K, V, BK, BV, STATES, STAGES, T_STAGES, OUTPUT, CHECKED, IS_VARLEN),
            (Q_STAGES, HAS_DHT, STORE_DH0) if IS_BACK else (HAS_H0,),
        ),
        (
            triangles_walk,
            (inverses, scratch, walk, (0, 0, 0, 0)),
            (dtype, BK, STAGES, T_STAGES),
            (False,),
        ),
        (gates_role, (factors, gates, walk, scale), (STAGES,), (IS_BACK, STORE_DV, LEAST_BETA)),
        (
            back_loader_role if IS_BACK else forward_loader_role,
            (tiles, sources, heads, walk),
            (dtype, BK, COLUMNS, STAGES, IS_VARLEN),
            (Q_STAGES,) if IS_BACK else (),
        ),
        None,
        *(STATES, STATE_REGISTERS, TRIANGLES_REGISTERS, SINGLE_REGISTERS),
    )
    if FOLLOWS:  # The kernel after this one waits for this one alone.
        if pid == gl.num_programs(0) - 1:
            gdc_wait()
