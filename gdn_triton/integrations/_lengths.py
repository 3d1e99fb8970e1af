"""The host's offsets of packed sequences, for calls of an engine that pass them on the device only.

An engine's host knows the lengths of a batch, and its layers get a tensor on the device. An adapter
keeps the host's offsets for that tensor, where the engine makes both, and gives them to
`gdn_triton.chunk_prefill` as `cu_seqlens_cpu`. Nothing is copied from the device.
"""

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# Keyed by the tensor itself, not by its contents: an entry ends with its tensor.
_on_host = WeakTensorKeyDictionary()


def tell_offsets(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None) -> None:
    """Keeps the host's offsets for cu_seqlens [N + 1], a tensor of the device. None: the host does
    not know them, and those that were kept for this tensor are forgotten."""
    if cu_seqlens_cpu is None:
        _on_host.pop(cu_seqlens, None)
    else:
        _on_host[cu_seqlens] = cu_seqlens_cpu


def offsets_on_host(cu_seqlens: Tensor | None) -> Tensor | None:
    """The offsets that were kept for this tensor, or None."""
    if cu_seqlens is None or torch.compiler.is_compiling():
        return None
    found: Tensor | None = _on_host.get(cu_seqlens)
    return found
