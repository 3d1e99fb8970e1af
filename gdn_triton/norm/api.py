"""The public gated norm: validate, choose a backend, run it."""

from torch import Tensor

from gdn_triton._host.tensors import is_traced
from gdn_triton.norm.backends import run_norm
from gdn_triton.norm.operators import traced


def rms_norm_gated(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    activation: str = "silu",
    round_norm: bool = False,
) -> Tensor:
    """The norm between the gated delta rule and the output's projection, in one pass.

        y = weight * x / sqrt(mean(x^2) + eps) * activation(gate)

    with the mean over the channels of one head. Of a Gated DeltaNet layer it takes o and the
    projection z, each [B, T, HV, V].

    "Float" is float16, bfloat16, float32 or float64. All tensors are on one device.

    Args:
        x: [..., D], float: rows to norm. Its channels and its last but one dimension may have any
            distance apart in memory that is dense in its channels, as a view of a projection has;
            what is otherwise strided is copied first by the Triton backend.
        gate: the shape of x, float, before its activation. Strides as those of x.
        weight: [D], float.
        eps: added to the mean square, at least 0.
        activation: of the gate, "silu" (z * sigmoid(z)) or "sigmoid".
        round_norm: round x / sqrt(..) to the dtype of x, and its product with weight to the dtype
            that torch gives it, as the models of transformers do. False: nothing but the result is
            rounded, as in FLA's fused norm. In float32 it changes nothing.

    Returns:
        The shape and the dtype of x, contiguous.

    Computed in float32 (in float64 if any input is). x, gate and weight have gradients, in the same
    bits at every run; the Triton backend makes them in float32, without the roundings of
    `round_norm` in between, and has no second derivative. The backend is chosen by `GDN_BACKEND`
    among triton, with D up to 8192, and reference. Nothing waits for the device, so a call can be
    captured in a CUDA graph; under torch.compile it is one operator.

    Raises:
        TypeError, ValueError: an argument that does not fit, with its name, what was expected and
            what came; nothing has been launched. ValueError also for an unknown `GDN_BACKEND`.
        RuntimeError: the backend asked for by name cannot run this call, with its reason.
    """
    if is_traced(x):
        return traced(x, gate, weight, eps, activation, round_norm)
    return run_norm(x, gate, weight, eps, activation, round_norm)
