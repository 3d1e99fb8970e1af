"""Optional steps before the rule: the activations of the gate and of beta, and the norm of q and
k."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gdn_triton.constants import L2NORM_EPS, SOFTPLUS_THRESHOLD
from gdn_triton.reference.arithmetic import compute_dtype


def gate(g_raw: Tensor, A_log: Tensor, dt_bias: Tensor | None = None) -> Tensor:
    """Computes the natural-log decay g = -exp(A_log) * softplus(g_raw + dt_bias).

    This is the parametrisation of Mamba-2 (arXiv:2405.21060), as used in arXiv:2412.06464, section
    3.4.

    Args:
        g_raw: [B, T, HV], any float dtype. A_log: [HV]. dt_bias: [HV], or None for 0.

    Returns:
        g [B, T, HV], natural log, at most 0, float32 (float64 if any input is). softplus(x) is x
        above SOFTPLUS_THRESHOLD. Where the product is too large for the dtype, g is -inf and has no
        gradient: the decay is 0, and the gradient of exp is 0 there.
    """
    dtype = compute_dtype(g_raw, A_log, dt_bias)
    x, log_rate = g_raw.to(dtype), A_log.to(dtype)
    if dt_bias is not None:
        x = x + dt_bias.to(dtype)
    with torch.no_grad():
        overflows = _log_decay(x, log_rate).isinf()
    # Select the inputs first: the derivatives at inf, multiplied by a gradient of 0, would be NaN.
    x, log_rate = x.masked_fill(overflows, 0), torch.where(overflows, 0, log_rate)
    return _log_decay(x, log_rate).masked_fill(overflows, -torch.inf)


def _log_decay(x: Tensor, log_rate: Tensor) -> Tensor:
    # Far below 0 softplus(x) is e^x, so compute the product as exp(log_rate + x): exp(log_rate) may
    # overflow where e^x underflows, and inf * 0 is NaN.
    is_exp = x < -2 * SOFTPLUS_THRESHOLD
    softplus = torch.where(is_exp, 1, F.softplus(x, threshold=SOFTPLUS_THRESHOLD))
    return -torch.where(is_exp, log_rate + x, log_rate).exp() * softplus


def beta_sigmoid(beta_raw: Tensor, allow_neg_eigval: bool = False) -> Tensor:
    """Computes the write strength sigmoid(beta_raw), in (0, 1), or twice that with
    `allow_neg_eigval`.

    With |k| = 1 the state's transition has the eigenvalue 1 - beta along k, which explains the name
    of the option (arXiv:2411.12537).

    Args:
        beta_raw: [B, T, HV], any float dtype.

    Returns:
        beta [B, T, HV], float32 (float64 if beta_raw is).
    """
    beta = sigmoid(beta_raw.to(compute_dtype(beta_raw)))
    return 2 * beta if allow_neg_eigval else beta


def sigmoid(x: Tensor) -> Tensor:
    """Returns 1 / (1 + e^-x) in x's dtype, with an accurate derivative for large x too. torch
    computes the derivative of its sigmoid as s (1 - s). For large x the rounding of s makes 1 - s
    lose e^-x."""
    negative = x < 0
    e = torch.where(negative, x, -x).exp()
    return torch.where(negative, e, 1) / (1 + e)


def l2norm(x: Tensor) -> Tensor:
    """Computes x / sqrt(sum(x^2) + L2NORM_EPS) over the last dimension in float32 or float64 and
    rounds it.

    Args:
        x: [..., K], any float dtype.

    Returns:
        [..., K] in x's dtype. The rounding is part of the specification: the rule reads the rounded
        keys.
    """
    wide = x.to(compute_dtype(x))
    return (wide * (wide.square().sum(-1, keepdim=True) + L2NORM_EPS).rsqrt()).to(x.dtype)
