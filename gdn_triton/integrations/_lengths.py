"""The host's offsets of packed sequences, for calls of an engine that pass the offsets only on the
device.

An engine's host knows the lengths of a batch, but its layers get only a tensor on the device. Where
the engine makes that tensor, an adapter stores the host's offsets for it, and later passes them to
`gdn_triton.chunk_prefill` as `cu_seqlens_cpu`. Nothing is copied from the device.
"""

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# The key is the tensor object, not its contents. An entry is deleted together with its tensor.
_on_host = WeakTensorKeyDictionary()


def tell_offsets(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None) -> None:
    """Stores the host's offsets for cu_seqlens [N + 1], a tensor on the device. None: the host does
    not know the offsets, and offsets stored earlier for this tensor are deleted."""
    if cu_seqlens_cpu is None:
        _on_host.pop(cu_seqlens, None)
    else:
        _on_host[cu_seqlens] = cu_seqlens_cpu


def offsets_on_host(cu_seqlens: Tensor | None) -> Tensor | None:
    """Returns the offsets stored for this tensor, or None."""
    if cu_seqlens is None or torch.compiler.is_compiling():
        return None
    found: Tensor | None = _on_host.get(cu_seqlens)
    return found
