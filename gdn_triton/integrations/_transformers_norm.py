"""The gated norm of transformers' layers on this package's op: a class of each modeling file, of
which the method `forward` is replaced."""

import hashlib
import inspect
from collections.abc import Callable
from typing import Any, Final

from torch import Tensor

from gdn_triton.norm.api import rms_norm_gated

# The ends of the names of these classes.
SUFFIX: Final = "RMSNormGated"
ACTIVATIONS: Final = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}
# The texts of `forward` whose roundings are those of `round_norm=True`, by their sha256.
KNOWN: Final = (
    # 5.17.0 to 5.23.0: Qwen3-Next, Qwen3.5, Qwen4-Exp, OlmoHybrid
    "5a4bd64da7fd08bd737b2e023db367adc1a60de12c0ec6aba8298741bfb415cf",
)


def is_known(forward: object) -> bool:
    """Whether a method `forward` is one of those texts."""
    try:
        text = inspect.getsource(forward)  # type: ignore[arg-type]
    except (OSError, TypeError):  # of a class that no file has, or no function
        return False
    return hashlib.sha256(text.encode()).hexdigest() in KNOWN


def gated(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`forward` of such a class. theirs: what was there."""

    def forward(self: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
        activation = ACTIVATIONS.get(self.activation)
        if activation is None:
            return theirs(self, hidden_states, gate)
        eps = self.variance_epsilon
        return rms_norm_gated(hidden_states, gate, self.weight, eps, activation, round_norm=True)

    return forward
