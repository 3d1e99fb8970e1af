"""The gated norm of vLLM's Gated DeltaNet layers on `gdn_triton.rms_norm_gated`.

vLLM's `rmsnorm_fn` copies a gate that is a view of a projection, as in the layers of Qwen3.5. Our
function reads the view in place. vLLM calls the function if its custom op for the norm is enabled,
as in a run without compilation. In compiled graphs vLLM's compiler generates the norm.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

from torch import Tensor

from gdn_triton.norm.api import rms_norm_gated

GATES: Final = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}


def gated_norm(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a replacement of vLLM's `rmsnorm_fn`. theirs: vLLM's own function, which runs calls
    that have no counterpart here: without a gate, with a bias, with groups, or with the gate before
    the norm."""

    @functools.wraps(theirs)
    def rmsnorm_fn(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        z: Tensor | None = None,
        eps: float = 1e-6,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        activation: str = "swish",
    ) -> Any:
        if (
            z is not None
            and bias is None
            and group_size in (None, x.shape[-1])
            and norm_before_gate
            and activation in GATES
        ):
            return rms_norm_gated(x, z, weight, eps, GATES[activation])
        return theirs(x, weight, bias, z, eps, group_size, norm_before_gate, activation)

    return rmsnorm_fn
