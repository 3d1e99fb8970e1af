"""The Triton forward, in three dataflows that compute the same results.

`forward_by_steps` runs one kernel for each mathematical step and writes every intermediate to
memory, where a backward can read it. `forward_fused` runs two kernels: one for all that needs no
state, and one for the walk over the chunks, with the state and the output. ``choose_dataflow``
chooses between these two. `forward_hopper` runs one kernel, for compute capability 9.0.
"""

from collections.abc import Callable

import torch

from gdn_triton._host.device import on_device
from gdn_triton._host.memory import span
from gdn_triton._triton.tiles import gpu_of, segment_chunks
from gdn_triton.chunk.problem import Inputs, Pool, Problem, new_inputs
from gdn_triton.chunk.triton.fused.prepare import ChunkFactors, prepare_fwd
from gdn_triton.chunk.triton.fused.walk import fused_fwd
from gdn_triton.chunk.triton.shared.chunks import ChunkTable, make_chunks
from gdn_triton.chunk.triton.steps.gate import beta_sigmoid_fwd, gate_cumsum_fwd
from gdn_triton.chunk.triton.steps.l2norm import l2norm_fwd
from gdn_triton.chunk.triton.steps.output import output_fwd
from gdn_triton.chunk.triton.steps.state import state_fwd
from gdn_triton.chunk.triton.steps.wy import wy_fwd
from gdn_triton.constants import MAX_ROW_STRIDE, MAX_STATE_SPAN


def readable(x: torch.Tensor) -> torch.Tensor:
    """Returns x [B, T, heads, D] itself if kernels can read it in place, as most views of a
    projection. Otherwise returns a contiguous copy: if the last dimension is strided, if rows lie
    too far apart for 32-bit offsets inside of a chunk, or if the first row does not start at a
    multiple of 16 bytes. From the narrow loads of the last case Triton 3.6's assembler makes matrix
    products that read unwritten registers (docs/tried.md)."""
    dense = x.stride(3) == 1 or x.shape[3] == 1
    if dense and x.stride(1) < MAX_ROW_STRIDE and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def readable_state(x: torch.Tensor | None) -> torch.Tensor | None:
    """Returns states, or their gradients, [N, HV, ...], in place or, if the elements of one state
    lie too far apart for 32-bit offsets, as a contiguous copy."""
    if x is None or span(x.shape[2:], x.stride()[2:]) <= MAX_STATE_SPAN:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def readable_heads(x: torch.Tensor) -> torch.Tensor:
    """Returns x [B, T, HV] itself or, if its tokens lie too far apart for 32-bit offsets inside of
    a chunk, a contiguous copy."""
    if x.stride(1) < MAX_ROW_STRIDE:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def readable_inputs(x: Inputs) -> Inputs:
    """The inputs in the form that kernels read: q, k and v ``readable``, beta ``readable_heads``,
    the initial state ``readable_state``, A_log and dt_bias without a stride. g is read once, at
    64-bit offsets."""
    A_log = None if x.A_log is None else x.A_log.contiguous()
    dt_bias = None if x.dt_bias is None else x.dt_bias.contiguous()
    return new_inputs(
        q=readable(x.q),
        k=readable(x.k),
        v=readable(x.v),
        g=x.g,
        beta=readable_heads(x.beta),
        initial_state=readable_state(x.initial_state),
        A_log=A_log,
        dt_bias=dt_bias,
        cu_seqlens=x.cu_seqlens,
    )


def compute_dtype(problem: Problem) -> torch.dtype:
    """The dtype of products: the common dtype of q, k and v."""
    p = problem
    if p.q_dtype is p.k_dtype is p.v_dtype:
        return p.q_dtype
    return torch.promote_types(torch.promote_types(p.q_dtype, p.k_dtype), p.v_dtype)


def skipped(pool: Pool | None) -> tuple[torch.Tensor | None, int]:
    """The last arguments of ``make_chunks``."""
    return (None, -1) if pool is None else (pool.read_slots, pool.last_skipped)


def prepare(problem: Problem, x: Inputs, chunks: ChunkTable) -> ChunkFactors:
    """Runs the first kernel of the fused dataflow."""
    p = problem
    return prepare_fwd(
        x.q,
        x.k,
        x.g,
        x.beta,
        chunks,
        p.scale,
        compute_dtype(p),
        A_log=x.A_log,
        dt_bias=x.dt_bias,
        use_qk_l2norm=p.use_qk_l2norm,
        use_beta_sigmoid=p.use_beta_sigmoid,
        allow_neg_eigval=p.allow_neg_eigval,
    )


def activate(
    problem: Problem, x: Inputs, chunks: ChunkTable
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Runs the first steps of the dataflow by steps. Returns q, k, g_cumsum and beta after norm,
    gate and sigmoid, if these are asked for."""
    p = problem
    q, k = l2norm_fwd(x.q, x.k) if p.use_qk_l2norm else (x.q, x.k)
    beta = beta_sigmoid_fwd(x.beta, p.allow_neg_eigval) if p.use_beta_sigmoid else x.beta
    return q, k, gate_cumsum_fwd(x.g, chunks, x.A_log, x.dt_bias), beta


def forward_by_steps(
    problem: Problem, x: Inputs, pool: Pool | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Runs gate and cumsum, norm and sigmoid; then A, its inverse, w and u; then the state; then
    the output. x: from ``readable_inputs``."""
    p = problem
    chunks = make_chunks(p.B, p.T, p.chunk_size, x.cu_seqlens, *skipped(pool))
    q, k, g_cumsum, beta = activate(p, x, chunks)
    w, u, _ = wy_fwd(k, x.v, g_cumsum, beta, chunks, compute_dtype(p))
    h, v_new, final_state = state_fwd(
        k,
        w,
        u,
        g_cumsum,
        chunks,
        x.initial_state,
        N=p.N,
        output_final_state=p.output_final_state,
        state_v_first=p.state_v_first,
        pool=pool,
    )
    assert h is not None
    o = output_fwd(q, k, v_new, h, g_cumsum, chunks, p.scale, p.q_dtype, pool)
    return o, final_state


def forward_fused(
    problem: Problem, x: Inputs, pool: Pool | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Runs all that needs no state, then state and output. x: from ``readable_inputs``."""
    p = problem
    chunks = make_chunks(p.B, p.T, p.chunk_size, x.cu_seqlens, *skipped(pool))
    segments = None
    length = choose_segments(p)
    if length > 0:
        segments = make_chunks(p.B, p.T, length * p.chunk_size, x.cu_seqlens, *skipped(pool))
    return fused_fwd(
        prepare(p, x, chunks),
        x.v,
        chunks,
        p.scale,
        p.q_dtype,
        x.initial_state,
        N=p.N,
        K=p.K,
        output_final_state=p.output_final_state,
        state_v_first=p.state_v_first,
        segments=segments,
        pool=pool,
    )


def choose_segments(problem: Problem) -> int:
    """The number of chunks of the segments that sequences are cut into; 0: no cut. It depends on
    the sizes of the whole call and the longest sequence that the host knows of, and is therefore 0
    in the batch-invariant mode, where a sequence has the same bits in any batch."""
    p = problem
    if p.batch_invariant:
        return 0
    gpu, longest = gpu_of(p.device), p.longest[0] if p.N > 1 else 0
    return segment_chunks(gpu, p.B * p.T, p.N, p.HV, p.K, p.V, p.chunk_size, longest)


def choose_dataflow(problem: Problem) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """By steps for fp32, whose tiles do not fit the fused kernel's shared memory; otherwise fused.
    The choice never depends on the number or the lengths of the sequences, so a sequence has the
    same bits alone and in any batch."""
    return forward_by_steps if compute_dtype(problem).itemsize == 4 else forward_fused


def forward(
    problem: Problem, x: Inputs, pool: Pool | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns o [B, T, HV, V] in q's dtype and the final state or None. With a ``pool``, o and the
    states are those of the pool, written in place."""
    run = choose_dataflow(problem)
    with on_device(x.q.device):
        return run(problem, readable_inputs(x), pool)


def forward_hopper(
    problem: Problem, x: Inputs, pool: Pool | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Does the same in one kernel, for problems that ``hopper_refusal`` (hopper/support.py) does
    not refuse."""
    # Import here: releases of Triton that `_host/gluon.py` does not list may lack names of Gluon.
    from gdn_triton.chunk.triton.hopper.launch import hopper_fwd

    with on_device(x.q.device):
        return hopper_fwd(problem, readable_inputs(x), pool)
