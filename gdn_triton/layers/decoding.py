"""The decode step of a layer with one token for each sequence, and the norm of any call."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gdn_triton.layers.cache import GatedDeltaNetCache
from gdn_triton.norm.api import rms_norm_gated
from gdn_triton.step.api import layer_step

__all__ = ["is_step", "normed", "step"]


def is_step(qkv: Tensor, cache: GatedDeltaNetCache | None, cu_seqlens: Tensor | None) -> bool:
    """Whether a call can run as `layer_step`, which writes the pools in place. `layer_step` takes
    no pool with a narrower dtype than the tokens qkv [B, T, D]."""
    if torch.is_grad_enabled() or cache is None or cu_seqlens is not None:
        return False
    pool = cache.conv_state
    if pool is not None and torch.promote_types(pool.dtype, qkv.dtype) != pool.dtype:
        return False
    # Test the length last, because the test of a symbolic length adds a guard to the trace.
    return qkv.shape[1] == 1


def step(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    z: Tensor,
    cache: GatedDeltaNetCache,
    slots: Tensor,
    *,
    weights: tuple[Tensor, Tensor | None] | None,
    A_log: Tensor,
    dt_bias: Tensor,
    allow_neg_eigval: bool,
    norm: nn.RMSNorm,
    activation: str,
) -> Tensor:
    """Returns y [B, 1, HV, V] of a call for which `is_step` is true. weights: the weights of the
    convolution, None without one."""
    weight, bias = (None, None) if weights is None else weights
    assert norm.eps is not None
    return layer_step(
        F.silu(qkv) if weights is None else qkv,
        a,
        b,
        A_log,
        dt_bias,
        state=cache.recurrent_state,
        read_slots=slots,
        conv_state=cache.conv_state,
        conv_weight=weight,
        conv_bias=bias,
        gate=z,
        norm_weight=norm.weight,
        norm_eps=norm.eps,
        norm_activation=activation,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=True,
        skip=cache.skip,
    )


def normed(o: Tensor, z: Tensor | None, norm: nn.RMSNorm, activation: str) -> Tensor:
    """Returns o [B, T, HV, V] after the norm of each head and, with z, after the gate."""
    if z is not None:
        assert norm.eps is not None
        return rms_norm_gated(o, z, norm.weight, norm.eps, activation)
    wide = torch.promote_types(o.dtype, torch.float32)
    size = norm.normalized_shape
    return F.rms_norm(o.to(wide), size, norm.weight.to(wide), norm.eps).to(o.dtype)
