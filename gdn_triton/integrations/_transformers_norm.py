"""The gated norm of transformers' layers on this package's op, which replaces the method `forward`
of a class in each modeling file."""

import hashlib
import inspect
from collections.abc import Callable
from typing import Any, Final

from torch import Tensor

from gdn_triton.norm.api import rms_norm_gated

# The endings of the names of these classes.
SUFFIX: Final = "RMSNormGated"
ACTIVATIONS: Final = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}
# The known source texts of `forward`, by their sha256, each with the value of `round_norm` that
# rounds in the same way.
KNOWN: Final = {
    # 5.17.0 to 5.24.0: Qwen3-Next, Qwen3.5, Qwen4-Exp, OlmoHybrid
    "5a4bd64da7fd08bd737b2e023db367adc1a60de12c0ec6aba8298741bfb415cf": True,
    # 5.24.0: Lara Mini
    "536ae00bbdc7d8e7670b319fb653b19b7d4bc4f65b1155ba6f80546d71b10658": False,
}


def rounds(forward: object) -> bool | None:
    """Returns the `round_norm` of a method `forward`, or None if its source text is not known."""
    try:
        text = inspect.getsource(forward)  # type: ignore[arg-type]
    except (OSError, TypeError):  # the class has no file, or `forward` is not a function
        return None
    return KNOWN.get(hashlib.sha256(text.encode()).hexdigest())


def gated(theirs: Callable[..., Tensor], round_norm: bool) -> Callable[..., Tensor]:
    """Returns a replacement of `forward` of such a class. theirs: the method that ours replaces."""

    def forward(self: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        activation = ACTIVATIONS.get(self.activation)
        if activation is None or gate is None:
            return theirs(self, hidden_states, gate)
        eps = self.variance_epsilon
        return rms_norm_gated(hidden_states, gate, self.weight, eps, activation, round_norm)

    return forward
