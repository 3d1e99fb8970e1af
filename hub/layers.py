"""The layers of the kernel, with which the package `kernels` replaces functions of transformers'
models.

The parameters are those of transformers' own torch functions. A model's layer also passes on every
keyword of the model's call. These layers use the options of the op and ignore the other keywords,
which belong to other parts of the model, as transformers' own functions do. Only `seq_idx`, the
numbers of packed sequences, is refused if the sequences' offsets are missing, because the op would
mix the sequences.
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


def _options(names: frozenset[str], given: dict[str, Any], T: int) -> dict[str, Any]:
    if given.get("seq_idx") is not None and given.get("cu_seqlens") is None and T > 1:
        raise ValueError("cu_seqlens must be given with seq_idx, got seq_idx alone")
    return {name: x for name, x in given.items() if name in names}


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
            **_options(_CHUNK, kwargs, query.shape[1]),
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
            **_options(_RECURRENT, kwargs, query.shape[1]),
        )


# In the mapping of transformers 5 this is the name of the layer for the function
# fused_recurrent_gated_delta_rule.
recurrent_gated_delta_rule = fused_recurrent_gated_delta_rule
