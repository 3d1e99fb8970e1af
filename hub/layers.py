"""The layers of the kernel, by which the package `kernels` replaces functions of transformers'
models.

The parameters are those of transformers' own torch functions. A model's layer also passes on every
keyword of the model's call. The options of the op are used; the others belong to other parts of the
model, and are ignored, as transformers' own functions ignore them.
"""

import inspect
from typing import Any

from torch import Tensor, nn

from . import chunk_gated_delta_rule as chunk
from . import fused_recurrent_gated_delta_rule as recurrent

__all__ = [
    "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "recurrent_gated_delta_rule",
]

_CHUNK = frozenset(inspect.signature(chunk).parameters)
_RECURRENT = frozenset(inspect.signature(recurrent).parameters)


class chunk_gated_delta_rule(nn.Module):
    can_torch_compile = True
    has_backward = True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        return chunk(
            query,
            key,
            value,
            g,
            beta,
            chunk_size=chunk_size,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            **{name: x for name, x in kwargs.items() if name in _CHUNK},
        )


class fused_recurrent_gated_delta_rule(nn.Module):
    can_torch_compile = True
    has_backward = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        return recurrent(
            query,
            key,
            value,
            g,
            beta=beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            **{name: x for name, x in kwargs.items() if name in _RECURRENT},
        )


# As the mapping of transformers 5 names the layer for the function of the long name.
recurrent_gated_delta_rule = fused_recurrent_gated_delta_rule
