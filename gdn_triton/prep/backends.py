"""The backends of `gdn_triton.fused_post_conv_prep`: their refusals, and the function that runs a
call.

The backends are triton and reference of `gdn_triton._host.backends`. There is no CUDA kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from gdn_triton._host.backends import Backend, Operator, missing, reference_supports, triton_limits
from gdn_triton._host.device import on_device
from gdn_triton._host.tensors import resolved
from gdn_triton.prep.problem import GATE_TENSORS, PreparedInputs, Sizes, with_gradients


@functools.cache
def triton_refusal(sizes: Sizes) -> str | None:
    """A sentence why the Triton kernel cannot run the call, or None. The limits are those of the
    chunked op, whose inputs the kernel makes. The result is cached, because it cannot change within
    a process."""
    if sizes.unreadable is not None:
        return sizes.unreadable
    if sizes.wide:
        return "The Triton kernels compute in float32 at most; one of the inputs is float64."
    if sizes.needs_grad:
        return (
            "The Triton kernel of the preparation has no backward; an input requires a gradient. "
            "Call under torch.no_grad() if none is wanted."
        )
    return triton_limits((sizes.dtype,), sizes.device.type, sizes.HV, sizes.K, sizes.V)


def _load_triton() -> Callable[..., PreparedInputs]:
    from gdn_triton.prep.triton import post_conv_fwd

    return post_conv_fwd


def _load_reference() -> Callable[..., PreparedInputs]:
    from gdn_triton.reference.prep import fused_post_conv_prep

    return fused_post_conv_prep


# The loaded function runs a validated call. It takes the public function's arguments by position.
POST_CONV: Operator[Sizes, Callable[..., PreparedInputs]] = Operator(
    "fused_post_conv_prep",
    (
        missing("cuda", "The CUDA library has no preparation after the convolution."),
        Backend("triton", triton_refusal, _load_triton),
        Backend("reference", reference_supports, _load_reference),
    ),
)


def choose_post_conv(sizes: Sizes, needs_grad: bool) -> Callable[..., PreparedInputs]:
    """Returns the function that runs the call, for `run_post_conv`."""
    return POST_CONV.choose(with_gradients(sizes, needs_grad)).run


def run_post_conv(
    run: Callable[..., PreparedInputs], conv_output: Tensor, *args: Any
) -> PreparedInputs:
    """Runs a validated call with the chosen function. args: the other arguments of the public
    function."""
    tensors = resolved((conv_output, *args[: len(GATE_TENSORS)]))
    with on_device(conv_output.device):
        return run(*tensors, *args[len(GATE_TENSORS) :])
