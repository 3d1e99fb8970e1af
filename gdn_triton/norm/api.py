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

    with the mean over the channels of one head. In a Gated DeltaNet layer x is o and gate is the
    projection z, each [B, T, HV, V].

    "Float" is float16, bfloat16, float32 or float64. All tensors are on one device.

    Args:
        x: [..., D], float: the rows to normalise. A view of a projection is read in place: the
            channels have to be dense, and tokens and heads may be any distance apart. The Triton
            backend first copies an x with other strides.
        gate: the shape of x, float, before its activation. Its strides follow the rule of x.
        weight: [D], float.
        eps: added to the mean square, at least 0.
        activation: the activation of the gate, "silu" (z * sigmoid(z)) or "sigmoid".
        round_norm: round x / sqrt(..) to the dtype of x, and its product with weight to the dtype
            that torch gives it, as the models of transformers do. False: only the result is
            rounded, as in FLA's fused norm. In float32 it changes nothing.

    Returns:
        The shape and the dtype of x, contiguous.

    The arithmetic is float32 (float64 if any input is). x, gate and weight have gradients, with the
    same bits at every run. The Triton backend computes the gradients in float32 without the
    intermediate roundings of `round_norm`, and has no second derivative. `GDN_BACKEND` chooses the
    backend, triton (D up to 8192) or reference. The host does not wait for the device, so a call
    can be captured in a CUDA graph. Under torch.compile a call is one operator.

    Raises:
        TypeError, ValueError: an argument that does not fit, with its name, the expected and the
            given value; nothing has been launched. ValueError also for an unknown `GDN_BACKEND`.
        RuntimeError: the backend asked for by name cannot run this call, with its reason.
    """
    if is_traced(x):
        return traced(x, gate, weight, eps, activation, round_norm)
    return run_norm(x, gate, weight, eps, activation, round_norm)
