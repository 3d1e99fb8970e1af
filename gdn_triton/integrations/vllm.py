"""vLLM's prefill on this package's op: the class that its registry of custom ops takes in place of
its own `ChunkGatedDeltaRule`.

`register()` has to run in every process of vLLM before a model is built, so call it from an entry
point of the group `vllm.general_plugins` (`docs/integrations.md` shows one). vLLM looks up its own
class by name as it makes an instance and makes one of the registered class instead, which must be
a subclass: Python would not initialise it otherwise.

vLLM's preparation before this op and its decoding are not touched.
"""

import importlib
import logging
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gdn_triton.integrations._prefill import prefill

# Where the class is, newest first.
MODULES = (
    "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn",
    "vllm.model_executor.layers.mamba.gdn_linear_attn",
)
NAME = "ChunkGatedDeltaRule"

_logger = logging.getLogger("gdn_triton")
_registered: dict[Any, type[Any]] = {}  # vLLM's class: ours


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    output_final_state: bool,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    core_attn_out: Tensor | None = None,
    state_indices: Tensor | None = None,
    max_seqlen: int = 0,
    cu_seqlens_i32: Tensor | None = None,
    aiter_prefill_metadata: object | None = None,
) -> tuple[Tensor, Tensor | None]:
    """What vLLM calls: the arguments of the `forward` methods of its `ChunkGatedDeltaRule`.

    q, k: [1, T, H, K]. v: [1, T, HV, V]. g, beta: [1, T, HV], g the logarithm of the decay.
    initial_state: [N, HV, V, K], already gathered; with state_indices [N] the pool
    [slots, HV, V, K], which the final states are written to, too. cu_seqlens: [N + 1].
    core_attn_out: contiguous, of at least T * HV * V elements; o is written to the first of them.

    What other kernels need the host to make from cu_seqlens (chunk_indices, chunk_offsets,
    max_seqlen, cu_seqlens_i32, aiter_prefill_metadata) ours find on the device; it is not read.

    Returns o [1, T, HV, V] in the dtype of q, and the final states [N, HV, V, K] in float32, or the
    pool, or None. The errors are those of `gdn_triton.chunk_prefill`.
    """
    return prefill(
        q,
        k,
        v,
        g,
        beta,
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        slots=state_indices,
        out=core_attn_out,
        out_state=None if state_indices is None else initial_state,
    )


def register() -> type[Any]:
    """Registers with vLLM a subclass of its `ChunkGatedDeltaRule` that runs our op; returns it.

    A second call registers nothing. Models that exist already keep what they have.

    Raises:
        ImportError: vLLM, or the class in one of `MODULES`, is not there.
        AssertionError: vLLM's own, if another package has registered for this class.
    """
    in_tree = getattr(_module(), NAME)
    if in_tree in _registered:
        return _registered[in_tree]

    class GdnTritonChunkGatedDeltaRule(in_tree):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            super().__init__()
            # What vLLM chose from the hardware. Its layer prepares by it, which for "triton" is
            # nothing more than the arguments above.
            self.gdn_prefill_backend = "triton"
            # On Hopper it chose FlashInfer, and so g = exp(g) from its preparation.
            self.expects_exp_g = False
            # What forward() calls.
            self._forward_method = chunk_gated_delta_rule

        def updates_state_in_place(self, state_dtype: torch.dtype) -> bool:
            """vLLM then gives the pool and state_indices instead of gathered states. Versions that
            cannot do not ask."""
            return True

    custom_op = importlib.import_module("vllm.model_executor.custom_op").CustomOp
    custom_op.register_oot(GdnTritonChunkGatedDeltaRule, name=NAME)
    _registered[in_tree] = GdnTritonChunkGatedDeltaRule
    _logger.info("vLLM prefills Gated DeltaNet layers with gdn_triton.")
    return GdnTritonChunkGatedDeltaRule


def _module() -> ModuleType:
    """The module that has vLLM's class."""
    failures = []
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            failures.append(f"{name}: {error}")
            continue
        if hasattr(module, NAME):
            return module
        failures.append(f"{name} has no {NAME}")
    raise ImportError(
        f"gdn_triton.integrations.vllm finds no {NAME} in vLLM: {'; '.join(failures)}"
    )
