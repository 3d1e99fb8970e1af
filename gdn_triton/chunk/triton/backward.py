"""The Triton backward: the gradients of every input from those of the output and the final state.

It computes the intermediate results of the forward again from the inputs, so a training step keeps
only the inputs between forward and backward. docs/backward.md has the steps.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from gdn_triton._host.device import on_device
from gdn_triton.chunk.problem import Gradients, Inputs, Problem
from gdn_triton.chunk.triton.forward import (
    activate,
    compute_dtype,
    prepare,
    readable_inputs,
    readable_state,
)
from gdn_triton.chunk.triton.fused.prepare import whole_lines
from gdn_triton.chunk.triton.gradients.gate import ChunkGradients, gate_bwd
from gdn_triton.chunk.triton.gradients.norm import l2norm_bwd
from gdn_triton.chunk.triton.gradients.pairs import pairs_bwd
from gdn_triton.chunk.triton.gradients.query_key import query_key_bwd
from gdn_triton.chunk.triton.gradients.scores import scores
from gdn_triton.chunk.triton.gradients.state import state_bwd
from gdn_triton.chunk.triton.shared.chunks import ChunkTable, make_chunks
from gdn_triton.chunk.triton.steps.l2norm import l2norm_with_factors
from gdn_triton.chunk.triton.steps.wy import wy_fwd
from gdn_triton.constants import LINE


class Recomputed(NamedTuple):
    """The results of the forward's first steps. q, k: [B, T, H, K_row], normalised if asked for,
    zero beyond K. g_cumsum, beta: [B, T, HV]. A_inv: [B, T, HV, chunk_size], without its unit
    diagonal if ``A_is_strict``. A_qk: [B, T, HV, chunk_size], strictly lower. own: [B, T, HV], the
    diagonal of A_qk, in fp32 and with the strides of g_cumsum. The walks of Hopper compute A_inv,
    A_qk and own, which are empty here for them. factors: those of ``l2norm_with_factors``."""

    q: torch.Tensor
    k: torch.Tensor
    g_cumsum: torch.Tensor
    beta: torch.Tensor
    A_inv: torch.Tensor
    A_is_strict: bool
    A_qk: torch.Tensor
    own: torch.Tensor
    factors: torch.Tensor | None = None


# Runs both walks over the states. Takes the arguments of state_bwd by name, and returns States or a
# record of the same fields.
Walk = Callable[..., Any]


def in_lines(x: torch.Tensor) -> torch.Tensor:
    """Returns x [B, T, heads, D], which comes from ``readable``, itself if its rows are whole
    lines, otherwise a copy in rows of whole lines, zero beyond D. The compiler then sees the same
    alignment for the same D, and sums have one order wherever a sequence lies in memory."""
    if whole_lines(x):
        return x
    D = x.shape[3]
    copy = x.new_zeros(*x.shape[:3], -(-D // LINE) * LINE)
    copy[..., :D] = x
    return copy


def recompute(
    problem: Problem,
    x: Inputs,
    chunks: ChunkTable,
    *,
    on_hopper: bool = False,
    keep_factors: bool = False,
) -> Recomputed:
    """Runs the kernels that the forward runs for this dtype, which give the same bits. on_hopper:
    the walks of Hopper follow. keep_factors: keep the factors of a norm of q and k."""
    if keep_factors and problem.use_qk_l2norm:
        q, k, factors = l2norm_with_factors(x.q, x.k)
        problem = replace(problem, use_qk_l2norm=False)
        found = recompute(problem, x._replace(q=q, k=k), chunks, on_hopper=on_hopper)
        return found._replace(factors=factors)
    dtype = compute_dtype(problem)
    if on_hopper:
        q, k, g_cumsum, beta = activate(problem, x, chunks)
        nothing = q.new_empty(0)
        return Recomputed(
            q=in_lines(q),
            k=in_lines(k),
            g_cumsum=g_cumsum,
            beta=beta,
            A_inv=nothing,
            A_is_strict=True,
            A_qk=nothing,
            own=nothing,
        )
    if dtype.itemsize == 2:
        prepared = prepare(problem, x, chunks)
        g_cumsum, write, own = prepared.scalars.transpose(2, 3)
        q, k = in_lines(prepared.q), in_lines(prepared.k)
        return Recomputed(
            q=q,
            k=k,
            g_cumsum=g_cumsum,
            beta=write,
            A_inv=prepared.A_inv,
            A_is_strict=True,
            A_qk=prepared.A_qk,
            own=own,
        )
    q, k, g_cumsum, beta = activate(problem, x, chunks)
    _, _, A_inv = wy_fwd(k, x.v, g_cumsum, beta, chunks, dtype, store_A_inv=True)
    assert A_inv is not None
    q, k = in_lines(q), in_lines(k)
    A_qk, own = scores(q, k, g_cumsum, chunks, problem.scale, dtype)
    return Recomputed(
        q=q,
        k=k,
        g_cumsum=g_cumsum,
        beta=beta,
        A_inv=A_inv,
        A_is_strict=False,
        A_qk=A_qk,
        own=own,
    )


def in_dtype_of(
    x: torch.Tensor | None, dx: torch.Tensor | None, *, copy: bool = False
) -> torch.Tensor | None:
    """The gradient of an input in the input's dtype; None without gradient or input."""
    return None if x is None or dx is None else dx.to(x.dtype, copy=copy)


class Begun(NamedTuple):
    """The inputs of a backward before its walks. x: from ``readable``; do: [B, T, HV, V], dense."""

    x: Inputs
    do: torch.Tensor
    chunks: ChunkTable
    recomputed: Recomputed


def begin(
    problem: Problem,
    x: Inputs,
    do: torch.Tensor | None,
    *,
    on_hopper: bool = False,
    keep_factors: bool = False,
) -> Begun:
    """Makes all that needs no gradient of a state. Runs on the device of the inputs. on_hopper,
    keep_factors: as for `recompute`."""
    p, x = problem, readable_inputs(x)
    do = x.v.new_zeros(p.B, p.T, p.HV, p.V) if do is None else do.contiguous()
    chunks = make_chunks(p.B, p.T, p.chunk_size, x.cu_seqlens)
    recomputed = recompute(p, x, chunks, on_hopper=on_hopper, keep_factors=keep_factors)
    return Begun(x=x, do=do, chunks=chunks, recomputed=recomputed)


def of_chunks(
    problem: Problem, begun: Begun, v: torch.Tensor, states: Any, *, on_hopper: bool
) -> ChunkGradients:
    """Returns the gradients of the chunks from the states and their gradients. v: from
    ``in_lines``; states: `States`, or a record of the same fields. on_hopper: the walk stored dv
    instead of dx."""
    p, (_, do, chunks, c) = problem, begun
    if on_hopper:
        # Releases of Triton that `_host/gluon.py` does not list may lack names of Gluon.
        from gdn_triton.chunk.triton.hopper.gradients.launch import chunk_gradients

        return chunk_gradients(
            q=c.q,
            k=c.k,
            do=do,
            h=states.h,
            u=states.v_new,
            dh=states.dh,
            dv=states.dx,
            g_cumsum=c.g_cumsum,
            beta=c.beta,
            chunks=chunks,
            scale=p.scale,
            factors=c.factors,
            K=p.K,
        )
    # Keep the gradients of the normalised q and k in float32 until the norm's own step has read
    # them; otherwise they would be rounded twice.
    dq_dtype, dk_dtype = (torch.float32,) * 2 if p.use_qk_l2norm else (p.q_dtype, p.k_dtype)
    pairs = pairs_bwd(
        c.q,
        c.k,
        v,
        do,
        states.v_new,
        states.dx,
        c.g_cumsum,
        c.beta,
        chunks,
        p.scale,
    )
    dq, dk, dv, shares, across = query_key_bwd(
        c.q,
        c.k,
        do,
        states,
        pairs,
        c.g_cumsum,
        c.beta,
        chunks,
        p.scale,
        dq_dtype,
        dk_dtype,
        p.v_dtype,
        K=p.K,
    )
    return ChunkGradients(
        dq=dq, dk=dk, dv=dv, pair_shares=pairs.shares, shares=shares, across=across
    )


def finish(
    problem: Problem,
    begun: Begun,
    dht: torch.Tensor | None,
    *,
    store_dh0: bool,
    walk: Walk = state_bwd,
    gradients_on_hopper: bool = False,
) -> Gradients:
    """Returns the gradients from the results of `begin`. dht: fp32, dense in its last dimension, or
    None. gradients_on_hopper: as for `gradients`."""
    p, (x, do, chunks, c) = problem, begun
    v = in_lines(x.v)
    if gradients_on_hopper:
        walk = functools.partial(walk, store_dv=True)
    states = walk(
        q=c.q,
        k=c.k,
        v=v,
        do=do,
        A_inv=c.A_inv,
        A_qk=c.A_qk,
        g_cumsum=c.g_cumsum,
        own=c.own,
        beta=c.beta,
        chunks=chunks,
        scale=p.scale,
        initial_state=x.initial_state,
        dht=dht,
        N=p.N,
        K=p.K,
        A_is_strict=c.A_is_strict,
        store_dh0=store_dh0,
        state_v_first=p.state_v_first,
    )
    parts = of_chunks(p, begun, v, states, on_hopper=gradients_on_hopper)
    dq, dk = parts.dq, parts.dk
    if p.use_qk_l2norm and not gradients_on_hopper:
        dq, dk = l2norm_bwd(x.q, x.k, dq, dk)
    gates = gate_bwd(
        parts.pair_shares,
        parts.shares,
        parts.across,
        c.beta,
        x.g,
        x.beta,
        chunks,
        x.A_log,
        x.dt_bias,
        *((v, parts.dv) if gradients_on_hopper else ()),
        use_beta_sigmoid=p.use_beta_sigmoid,
        allow_neg_eigval=p.allow_neg_eigval,
    )
    return Gradients(
        q=dq,
        k=dk,
        v=parts.dv,
        g=gates.dg,
        beta=gates.dbeta,
        initial_state=in_dtype_of(x.initial_state, states.dh0),
        # Copy, because the results of gate_bwd are halves of one tensor.
        A_log=in_dtype_of(x.A_log, gates.dA_log, copy=True),
        dt_bias=in_dtype_of(x.dt_bias, gates.ddt_bias, copy=True),
    )


def gradients(
    problem: Problem,
    x: Inputs,
    do: torch.Tensor | None,
    dht: torch.Tensor | None,
    *,
    store_dh0: bool,
    walk: Walk = state_bwd,
    walks_on_hopper: bool = False,
    gradients_on_hopper: bool = False,
) -> Gradients:
    """Returns all gradients, the gradient of the initial state only with ``store_dh0``. do: [B, T,
    HV, V], or None for zeros. dht: fp32, laid out like the final state, or None for zeros. walk:
    the function that makes the states. walks_on_hopper: the kernels for compute capability 9.0 do
    so instead; gradients_on_hopper: the kernel for it makes the gradients of chunks."""
    if walks_on_hopper:
        # Releases of Triton that `_host/gluon.py` does not list may lack names of Gluon.
        from gdn_triton.chunk.triton.hopper.walks.launch import choose_plan, walks

        walk = functools.partial(walks, plan=choose_plan(problem))
    with on_device(x.q.device):
        begun = begin(problem, x, do, on_hopper=walks_on_hopper, keep_factors=gradients_on_hopper)
        return finish(
            problem,
            begun,
            readable_state(dht),
            store_dh0=store_dh0,
            walk=walk,
            gradients_on_hopper=gradients_on_hopper,
        )
