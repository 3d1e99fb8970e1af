"""The convolution and the preparation in one call: its backends, and the functions that run it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gdn_triton._host.backends import Backend, Operator, reference_supports
from gdn_triton._host.device import on_device
from gdn_triton._host.tensors import resolved
from gdn_triton.conv.backends import NO_CUDA, conv_refusal, run_valid_conv
from gdn_triton.conv.problem import ConvProblem, PrepOperands
from gdn_triton.conv.validation import (
    PREPARED,
    ConvArguments,
    PrepArguments,
    operands,
    prep_needs_grad,
    validate_conv_prep,
)
from gdn_triton.prep.backends import POST_CONV, run_post_conv, triton_refusal
from gdn_triton.prep.problem import PreparedInputs, Sizes, with_gradients


class PrepProblem(NamedTuple):
    """A validated call of `gdn_triton.fused_conv_prep`: the problems of its two parts, from which
    its backend is chosen."""

    conv: ConvProblem
    sizes: Sizes

    @property
    def device(self) -> torch.device:
        return self.conv.device


PrepRun = Callable[[ConvArguments, PrepArguments, PrepProblem], PreparedInputs]


def conv_prep_refusal(problem: PrepProblem) -> str | None:
    """A sentence why the fused kernel cannot run the call, or None."""
    if problem.sizes.needs_grad:
        return (
            "The fused kernel has no backward; an input requires a gradient. Call under "
            "torch.no_grad() if none is wanted."
        )
    return conv_refusal(problem.conv) or triton_refusal(problem.sizes)


CONV_PREP: Operator[PrepProblem, PrepRun] = Operator(
    "fused_conv_prep",
    (
        NO_CUDA,
        Backend("triton", conv_prep_refusal, lambda: _run_fused),
        Backend("reference", reference_supports, lambda: _run_parts),
    ),
)


def prep_problem(args: ConvArguments, prep: PrepArguments) -> PrepProblem:
    """Validates the call, with the errors of `validate_conv_prep`."""
    conv, sizes = validate_conv_prep(args, prep)
    return PrepProblem(conv, with_gradients(sizes, prep_needs_grad(conv, prep)))


def run_conv_prep(args: ConvArguments, prep: PrepArguments) -> PreparedInputs:
    """Returns q, k, v, g and beta, and writes the states.

    The call is one kernel where Triton can run all of it without gradients, which the fused kernel
    does not have. Otherwise the convolution and then the preparation run, each in its own backend.
    """
    problem = prep_problem(args, prep)
    if problem.sizes.needs_grad:
        # Each part reports for itself whether it has a gradient.
        return _run_parts(args, prep, problem)
    return CONV_PREP.choose(problem).run(args, prep, problem)


def _run_parts(args: ConvArguments, prep: PrepArguments, problem: PrepProblem) -> PreparedInputs:
    sizes, lead = problem.sizes, args.x.shape[:-1]
    # Choose before anything runs: a refusal then leaves the states as they are.
    second = POST_CONV.choose(sizes).run
    y = run_valid_conv(problem.conv, args, PREPARED, prep).flatten(0, -2)
    flat = prep._replace(a=prep.a.reshape(-1, sizes.HV), b=prep.b.reshape(-1, sizes.HV))
    bounds = args.cu_seqlens if sizes.needs_grad else None
    parts = of_sequences(bounds, flat, lambda given: run_post_conv(second, y, *given))
    q, k, v, g, beta = (x.unflatten(0, lead) for x in parts)
    return q, k, v, g, beta


def of_sequences(
    cu_seqlens: Tensor | None,
    prep: PrepArguments,
    run: Callable[[PrepArguments], PreparedInputs],
) -> PreparedInputs:
    """Returns `run(prep)`, with a and b [L, HV], but lets no gradient pass to tokens of no
    sequence: a NaN in such a token, multiplied by a gradient of 0, would make the gradients of
    A_log and dt_bias NaN."""
    from gdn_triton.reference.activations import beta_sigmoid, gate

    if cu_seqlens is None:
        return run(prep)
    token = torch.arange(len(prep.a), device=prep.a.device)[:, None]
    owned = (token >= cu_seqlens[0]) & (token < cu_seqlens[-1])
    clean = prep._replace(a=prep.a.where(owned, 0), b=prep.b.where(owned, 0))
    q, k, v, g, beta = run(clean)
    a, b, A_log, dt_bias = (x.detach().to(g.dtype) for x in prep.tensors)
    others = gate(a, A_log, dt_bias)
    if prep.output_g_exp:
        others = others.exp()
    return q, k, v, g.where(owned, others), beta.where(owned, beta_sigmoid(b))


def _run_fused(args: ConvArguments, prep: PrepArguments, problem: PrepProblem) -> PreparedInputs:
    from gdn_triton.conv.triton.forward import conv_prep_fwd

    sizes = problem.sizes
    given = operands(problem.conv, args, PREPARED, prep)
    a, b, A_log, dt_bias = resolved(prep.tensors)
    others = PrepOperands(
        a=a if a.dim() == 3 else a.unsqueeze(0),
        b=b if b.dim() == 3 else b.unsqueeze(0),
        A_log=A_log,
        dt_bias=dt_bias,
        H=sizes.H,
        HV=sizes.HV,
        K=sizes.K,
        V=sizes.V,
        use_l2norm=prep.apply_l2norm,
        g_exp=prep.output_g_exp,
    )
    with on_device(problem.device):
        parts = conv_prep_fwd(problem.conv, given, others)
    if args.x.dim() == 3:
        return parts
    q, k, v, g, beta = (x.squeeze(0) for x in parts)
    return q, k, v, g, beta
