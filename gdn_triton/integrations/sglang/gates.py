"""The gates of SGLang's prefills: the rule makes them, and SGLang a launch before the rule.

`GDNAttnBackend.forward_extend` of SGLang calls its `_prefill_gates` for g and beta, and gives both
to its kernel. Where that is the kernel whose `chunk_gated_delta_rule` is ours, the method returns
a and b, the values before the gates, and our function recognises the tensor g.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# g of a call -> A_log and dt_bias. An entry ends with its tensor.
_parameters = WeakTensorKeyDictionary()


def raw_gates(layer: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a and b [T, HV] in the place of g and beta [1, T, HV]. layer: SGLang's, with A_log and
    dt_bias."""
    g = a.unsqueeze(0)
    _parameters[g] = (layer.A_log, layer.dt_bias)
    return g, b.unsqueeze(0)


def prefill_gates(
    theirs: Callable[..., tuple[Tensor, Tensor]], module: str
) -> Callable[..., tuple[Tensor, Tensor]]:
    """`_prefill_gates` of SGLang's backend, as a method. theirs: SGLang's own, a static method.
    module: that of the kernel whose functions are ours."""

    def _prefill_gates(self: Any, layer: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        if type(self.kernel_dispatcher.extend_kernel).__module__ != module:
            return theirs(layer, a, b)
        return raw_gates(layer, a, b)

    return _prefill_gates


def gates_of(g: Tensor) -> dict[str, Any]:
    """The options of `gdn_triton.chunk_prefill` by which it makes the gates itself, if g is from
    `raw_gates`. Otherwise none: g is the logarithm of the decay."""
    found = None if torch.compiler.is_compiling() else _parameters.get(g)
    if found is None:
        return {}
    A_log, dt_bias = found
    return {
        "A_log": A_log,
        "dt_bias": dt_bias,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
    }
