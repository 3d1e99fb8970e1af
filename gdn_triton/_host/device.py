"""The device that kernels are launched on."""

from contextlib import AbstractContextManager, nullcontext

import torch

_STAY: AbstractContextManager[None] = nullcontext()


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Makes a tensor's device the current one, because Triton launches on the current device. Does
    nothing if the device is current already, or is no CUDA device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _STAY
    return torch.cuda.device(device)
