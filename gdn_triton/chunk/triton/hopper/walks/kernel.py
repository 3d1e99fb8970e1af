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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gdn_triton.chunk.triton.hopper.names import CHUNK
from gdn_triton.chunk.triton.hopper.places import sequence_of
from gdn_triton.chunk.triton.hopper.walks.back import back_block
from gdn_triton.chunk.triton.hopper.walks.forward import forward_block


@gluon.jit(do_not_specialize=["scale", "T", "N", "NT", "stride_gb", "stride_betab"])
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
    IS_VARLEN: gl.constexpr,
    LEADS: gl.constexpr,
    FOLLOWS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """LEADS: the kernel after this one may run at the same time. FOLLOWS: this kernel may run at
    the same time as the kernel before it, and ends after that kernel."""
    COLUMNS: gl.constexpr = STATES * BV
    BLOCKS: gl.constexpr = (V + COLUMNS - 1) // COLUMNS
    HAS_H0: gl.constexpr = h0 is not None
    HAS_DHT: gl.constexpr = dht is not None
    STORE_DH0: gl.constexpr = dh0 is not None
    if LEADS:
        # The next kernel of the stream may begin when all programs of this one have.
        gdc_launch_dependents()
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

    batch = i_b.to(gl.int64)
    head = i_hv.to(gl.int64)
    start = first_row.to(gl.int64)
    n = i_n.to(gl.int64)
    p_g = g_cumsum + batch * stride_gb + start * stride_gt + head * stride_gh
    p_beta = beta + batch * stride_betab + start * stride_betat + head * stride_betah
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

    walk = (n_chunks, n_rows, n_rest)
    heads = (i_b, first_row, i_h, i_hv, first_v)
    gates = (p_g, p_beta, stride_gt, stride_betat)
    back_sources = (q_desc, k_desc, do_desc)
    back_outputs = (dx_desc, dh_desc)
    back_ends = (dx + first_value, p_dht, p_dh0)
    back_strides = (stride_t, stride_dhtk, stride_dhtv, stride_dh0k, stride_dh0v)
    sources = (k_desc, v_desc)
    outputs = (u_desc, h_desc)
    ends = (u + first_value, p_h0)
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
            HAS_DHT,
            STORE_DH0,
            STORE_DV,
            LEAST_BETA,
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
            HAS_H0,
            IS_VARLEN,
        )
    if FOLLOWS:  # The kernel after this one waits for this one alone.
        if pid == gl.num_programs(0) - 1:
            gdc_wait()
