"""The convolution and the gated norm of FLA's layers on this package's ops: FLA's functions
`causal_conv1d` and `rms_norm_gated`, with the parameters of FLA 0.5.2 to 0.6.x.

FLA's own functions run the calls for which this package has no counterpart: a convolution with a
state, a residual, context parallelism or another backend than FLA's Triton kernels; a norm with a
residual or a bias, or without a weight; and the decode step `causal_conv1d_update`. (A state of FLA
has W columns, the oldest of which is never read, and a state of this package has W - 1.)
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from gdn_triton.conv.api import causal_conv1d as conv
from gdn_triton.norm.api import rms_norm_gated as norm

ACTIVATIONS = {None: None, "silu": "silu", "swish": "silu"}
GATES = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}

# A function of (our function, its arguments) that returns whether our function runs the call.
Judge = Callable[..., bool]


def convolution(theirs: Callable[..., Any], is_ours: Judge) -> Callable[..., Any]:
    """Returns a replacement of FLA's `causal_conv1d`. theirs: FLA's own function."""

    @functools.wraps(theirs)
    def causal_conv1d(
        x: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool | None = False,
        activation: str | None = None,
        backend: str | None = "triton",
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        chunk_indices: Tensor | None = None,
        cp_context: object | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        others = (residual, initial_state, cp_context)
        if (
            all(y is None for y in others)
            and not output_final_state
            and not kwargs
            and backend == "triton"
            and activation in ACTIVATIONS
            and weight is not None
            and x.shape[-1] == weight.shape[0]
        ):
            call = (x, weight, bias, ACTIVATIONS[activation])
            if is_ours(conv, *call, cu_seqlens=cu_seqlens):
                return conv(*call, cu_seqlens=cu_seqlens), None
        return theirs(  # type: ignore[no-any-return]
            x,
            weight=weight,
            bias=bias,
            residual=residual,
            initial_state=initial_state,
            output_final_state=output_final_state,
            activation=activation,
            backend=backend,
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens_cpu,
            chunk_indices=chunk_indices,
            cp_context=cp_context,
            **kwargs,
        )

    return causal_conv1d


def gated_norm(theirs: Callable[..., Any], is_ours: Judge) -> Callable[..., Any]:
    """Returns a replacement of FLA's `rms_norm_gated`, which rounds only its result. theirs: FLA's
    own function."""

    @functools.wraps(theirs)
    def rms_norm_gated(
        x: Tensor,
        g: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        activation: str = "swish",
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
        eps: float = 1e-6,
    ) -> Any:
        is_plain = bias is None and residual is None and not prenorm and not residual_in_fp32
        if is_plain and weight is not None and activation in GATES and x.shape == g.shape:
            call = (x, g, weight, eps, GATES[activation])
            if is_ours(norm, *call):
                return norm(*call)
        return theirs(x, g, weight, bias, activation, residual, prenorm, residual_in_fp32, eps)

    return rms_norm_gated
