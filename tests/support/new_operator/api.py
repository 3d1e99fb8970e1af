"""The public product: validate, choose a backend, run it."""

from torch import Tensor

from gdn_triton._host.tensors import is_traced
from gdn_triton.scale.backends import run_scale
from gdn_triton.scale.operators import traced


def scale_channels(x: Tensor, weight: Tensor) -> Tensor:
    """Multiplies each channel with its weight, in float32 (in float64 if any input is).

    Args:
        x: [B, T, D], float16, bfloat16, float32 or float64.
        weight: [D], one of these dtypes.

    Returns:
        The shape and the dtype of x, contiguous.

    Raises:
        TypeError, ValueError: an argument that does not fit, with its name, what was expected and
            what came; nothing has been launched. ValueError also for an unknown `GDN_BACKEND`.
        RuntimeError: the backend asked for by name cannot run this call, with its reason.
    """
    if is_traced(x):
        return traced(x, weight)
    return run_scale(x, weight)
