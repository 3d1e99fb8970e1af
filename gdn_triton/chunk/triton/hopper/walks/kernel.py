"""Both serial walks of the backward for compute capability 9.0: the results of
gradients/state.py.

A program owns the columns of one or two states, or of their gradients, 64 each, of one sequence and
value head. Its warps have four roles: the state (state.py), the triangles (hopper/triangles.py),
the gates (gates.py) and the loader (loaders.py). As in the forward (hopper/kernel.py), each buffer
has a barrier that says it is full, and one more barrier for each stage says that all buffers of its
chunk are empty.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gdn_triton.chunk.triton.hopper.names import CHUNK
from gdn_triton.chunk.triton.hopper.walks.back import back_block
from gdn_triton.chunk.triton.hopper.walks.forward import forward_block
from gdn_triton.chunk.triton.hopper.walks.places import any_differs, first_window, walk_of


@gluon.jit(
    do_not_specialize=[
        *("scale", "T", "N", "NT", "NS", "segment"),
        *("stride_gb", "stride_betab"),
    ]
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
    d_starts,
    windows,
    differs,
    cu_seqlens,
    chunk_offsets,
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
    BN: gl.constexpr,
    BS: gl.constexpr,
    PART: gl.constexpr,
    IS_BACK: gl.constexpr,
    IS_VARLEN: gl.constexpr,
    WAITS: gl.constexpr,
    LEADS: gl.constexpr,
    FOLLOWS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """PART: whole sequences, or a part of a call in segments (segments.py). WAITS: for the kernel
    before this one. LEADS: the kernel after this one may run at the same time; FOLLOWS: it may run
    at the same time as the one before, and ends after it."""
    COLUMNS: gl.constexpr = STATES * BV
    BLOCKS: gl.constexpr = (V + COLUMNS - 1) // COLUMNS
    HAS_H0: gl.constexpr = h0 is not None
    HAS_DHT: gl.constexpr = dht is not None
    STORE_DH0: gl.constexpr = dh0 is not None
    if WAITS:
        gdc_wait()
    if LEADS:
        # The next kernel of the stream may begin when all programs of this one have.
        gdc_launch_dependents()
    pid = gl.program_id(0)
    of_map = pid < 0
    number = pid
    if PART == "ends" and IS_BACK:
        # The programs that walk back inner segments from zeros follow the others.
        of_map = pid >= BLOCKS * HV * N
        number = gl.where(of_map, pid - BLOCKS * HV * N, pid)
    first_v = number % BLOCKS * COLUMNS
    i_hv = number // BLOCKS % HV
    i_h = i_hv // (HV // H)
    i_b, i_n, tokens, first_row, n_rows, slot, is_inner = walk_of(
        *(number // BLOCKS // HV, of_map, cu_seqlens, T, N, NS, segment),
        *(BN, PART, IS_BACK, IS_VARLEN),
    )
    batch = i_b.to(gl.int64)
    head = i_hv.to(gl.int64)
    n = i_n.to(gl.int64)
    start = first_row.to(gl.int64)
    p_g = g_cumsum + batch * stride_gb + start * stride_gt + head * stride_gh
    p_beta = beta + batch * stride_betab + start * stride_betat + head * stride_betah
    # Of a segment: the windows of its two maps, and by walks and columns if its end differs.
    WINDOWS: gl.constexpr = windows is not None
    PARTS: gl.constexpr = (V + BV - 1) // BV
    MARKS: gl.constexpr = 1 + PARTS
    p_differs = g_cumsum
    is_checked = pid < 0
    if WINDOWS:
        of_slot = slot.to(gl.int64) * HV + head
        p_windows = windows + of_slot * MARKS
        p_differs = differs + of_slot * (2 * PARTS)
        if PART == "ends" and IS_BACK:
            window = gl.where(of_map, first_window(p_g, stride_gt, n_rows), 0)
            gl.store(p_windows + 1, window, mask=of_map & is_inner & (first_v == 0))
            n_rows = gl.where(window > 0, window * CHUNK, n_rows)
        if PART == "later":
            if IS_BACK:
                p_differs += PARTS
                p_windows -= HV * MARKS
                is_checked = gl.load(p_windows + 1, mask=is_inner, other=0) > 0
            is_checked |= gl.load(p_windows, mask=is_inner, other=0) > 0
        if PART == "again":
            n_rows *= any_differs(p_differs, HV, 2 * PARTS, (n_rows - 1) // segment, BS)
    if PART != "whole":
        # Sums of the whole block, as in `segment_of`, pass through memory that tiles take later.
        fence_async_shared()
    n_chunks = (n_rows + CHUNK - 1) // CHUNK
    first_slot = i_n * NT
    if IS_VARLEN:
        first_slot = gl.load(chunk_offsets + i_n)
    first_slot += tokens // CHUNK

    stride_t = HV * V
    first_value = batch * T * stride_t + head * V + first_v
    # A role takes no None: in its place a pointer that the role does not use.
    p_h0 = g_cumsum
    if HAS_H0:
        p_h0 = h0 + n * stride_h0n + head * stride_h0h
    p_dht = g_cumsum
    if HAS_DHT:
        p_dht = dht + n * stride_dhtn + head * stride_dhth
    p_dh0 = g_cumsum
    if STORE_DH0:
        p_dh0 = dh0 + n * stride_dh0n + head * stride_dh0h
    p_next = g_cumsum
    # The columns of the first state that are read, and of the last one that are stored. The head
    # of dx and dh: a map has none, and TMA stores nothing of a head that does not exist.
    end_in, end_out, i_stored = first_v * 0 + V, first_v * 0 + V, i_hv
    if PART == "ends" or PART == "later":
        of_slot = (slot.to(gl.int64) * HV + head) * (K * V)
    if PART == "ends":
        p_next = starts + of_slot
        end_next = gl.where(is_inner, V, 0)
        end_in = gl.where(of_map, 0, V)
        i_stored = gl.where(of_map, HV, i_hv)
        end_out = end_next
        if STORE_DH0 and IS_BACK:
            is_of_slot = is_inner | of_map
            p_dh0 = gl.where(is_of_slot, d_starts + of_slot, p_dh0)
            stride_dh0k = gl.where(is_of_slot, V, stride_dh0k)
            stride_dh0v = gl.where(is_of_slot, 1, stride_dh0v)
            end_out = gl.where(of_map, end_next, V)
        else:
            p_dh0 = d_starts + of_slot
            stride_dh0k, stride_dh0v = V, 1
    if PART == "later":
        p_h0, p_dht = starts + of_slot, d_starts + of_slot
        stride_h0k, stride_h0v, stride_dhtk, stride_dhtv = V, 1, V, 1
        end_out = gl.where((tokens == 0) & (n_rows > 0), V, 0)
        # The state that the walk should end with, by the maps.
        of_next = -HV * (K * V) if IS_BACK else HV * (K * V)
        p_next = (d_starts if IS_BACK else starts) + of_slot + of_next
    if PART == "again":
        end_out = gl.where(n_rows > 0, V, 0)

    columns = (i_stored, end_in, end_out)
    walk = (n_chunks, n_rows, n_rows * 0)
    heads = (i_b, first_row, i_h, i_hv, first_v)
    gates = (p_g, p_beta, stride_gt, stride_betat)
    back_sources = (q_desc, k_desc, do_desc)
    back_outputs = (dx_desc, dh_desc)
    back_ends = (dx + first_value, p_dht, p_dh0, p_next, p_differs, is_checked)
    back_strides = (stride_t, stride_dhtk, stride_dhtv, stride_dh0k, stride_dh0v)
    sources = (k_desc, v_desc)
    outputs = (u_desc, h_desc)
    ends = (u + first_value, p_h0, p_next, p_differs, is_checked)
    strides = (stride_t, stride_h0k, stride_h0v)
    if IS_BACK:
        back_block(
            back_sources,
            back_outputs,
            gates,
            back_ends,
            back_strides,
            heads,
            first_slot,
            columns,
            walk,
            scale,
            K,
            V,
            BK,
            BV,
            STATES,
            STAGES,
            Q_STAGES,
            T_STAGES,
            STATE_REGISTERS,
            TRIANGLES_REGISTERS,
            SINGLE_REGISTERS,
            HAS_DHT or PART == "later",
            STORE_DH0 or PART == "ends",
            STORE_DV,
            LEAST_BETA,
            PART,
            WINDOWS,
            IS_VARLEN,
        )
    else:
        forward_block(
            sources,
            outputs,
            gates,
            ends,
            strides,
            heads,
            first_slot,
            columns,
            walk,
            scale,
            K,
            V,
            BK,
            BV,
            STATES,
            STAGES,
            T_STAGES,
            STATE_REGISTERS,
            TRIANGLES_REGISTERS,
            SINGLE_REGISTERS,
            HAS_H0 or PART == "later",
            PART,
            WINDOWS,
            IS_VARLEN,
        )
    if FOLLOWS:  # The kernel after this one waits for this one alone.
        if pid == gl.num_programs(0) - 1:
            gdc_wait()
