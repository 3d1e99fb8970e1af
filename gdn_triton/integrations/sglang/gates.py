"""The gates of SGLang's prefills. Our prefill computes them, and SGLang computes them in a launch
before its prefill.

SGLang's `GDNAttnBackend.forward_extend` calls `_prefill_gates` for g and beta, and passes both to
its kernel. If `chunk_gated_delta_rule` of that kernel is ours, our `_prefill_gates` returns a and
b, the values before the gates, and our prefill recognises the tensor that it gets as g.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# Maps g of a call to A_log and dt_bias. An entry is deleted together with its tensor.
_parameters = WeakTensorKeyDictionary()


def raw_gates(layer: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a and b [T, HV] instead of g and beta [1, T, HV]. layer: SGLang's layer, with A_log
    and dt_bias."""
    g = a.unsqueeze(0)
    _parameters[g] = (layer.A_log, layer.dt_bias)
    return g, b.unsqueeze(0)


def prefill_gates(
    theirs: Callable[..., tuple[Tensor, Tensor]], module: str
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns a replacement of `_prefill_gates` of SGLang's backend, as a method. theirs: SGLang's
    own static method. module: the module of SGLang's kernel in which our functions are installed.
    Other kernels get g and beta from theirs."""

    def _prefill_gates(self: Any, layer: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        if type(self.kernel_dispatcher.extend_kernel).__module__ != module:
            return theirs(layer, a, b)
        return raw_gates(layer, a, b)

    return _prefill_gates


def gates_of(g: Tensor) -> dict[str, Any]:
    """Returns the options with which `gdn_triton.chunk_prefill` computes the gates itself, if g is
    from `raw_gates`. Otherwise returns no options: g is the logarithm of the decay."""
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
