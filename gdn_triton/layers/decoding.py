"""Decoding token by token from a cache, and the norm of all calls."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gdn_triton._host.arguments import must
from gdn_triton.layers.cache import GatedDeltaNetCache
from gdn_triton.norm.api import rms_norm_gated
from gdn_triton.recurrent.api import recurrent_step
from gdn_triton.step.api import MOST_TOKENS, layer_step

__all__ = ["by_token", "is_step", "normed", "step"]


def is_step(qkv: Tensor, cache: GatedDeltaNetCache | None, cu_seqlens: Tensor | None) -> bool:
    """Returns whether `layer_step` can run a call. `layer_step` writes the pools in place, and
    needs pools at least as wide as the tokens qkv [B, T, D] and a window whose keys have the
    tokens' dtype."""
    if torch.is_grad_enabled() or cache is None or cu_seqlens is not None:
        return False
    if cache.window is not None and cache.window.k.dtype != qkv.dtype:
        return False
    pool = cache.conv_state
    if pool is not None and torch.promote_types(pool.dtype, qkv.dtype) != pool.dtype:
        return False
    most = MOST_TOKENS if cache.window is None else min(MOST_TOKENS, cache.window.max_tokens)
    # Test the length last, because the test of a symbolic length adds a guard to the trace.
    return qkv.shape[1] <= most


def step(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    z: Tensor,
    cache: GatedDeltaNetCache,
    slots: Tensor,
    *,
    are_first: bool,
    weights: tuple[Tensor, Tensor | None] | None,
    A_log: Tensor,
    dt_bias: Tensor,
    allow_neg_eigval: bool,
    norm: nn.RMSNorm,
    activation: str,
) -> Tensor:
    """Returns y [B, T, HV, V] of a call for which `is_step` is true. are_first: as for
    `GatedDeltaNetCache.slot_positions`. weights: the weights of the convolution, or None without a
    convolution."""
    weight, bias = (None, None) if weights is None else weights
    assert norm.eps is not None
    given = None if cache.window is None else cache.slot_positions(slots, are_first=are_first)
    y = layer_step(
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
        counters=cache.counters,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=True,
        skip=cache.skip,
        window=cache.window,
        positions=None if given is None else given.now,
    )
    if given is not None:
        cache.advance(given, qkv.shape[1])
    return y


def by_token(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    cache: GatedDeltaNetCache,
    slots: Tensor,
    cu_seqlens: Tensor | None,
    longest: int,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    allow_neg_eigval: bool,
) -> Tensor:
    """Returns o [B, T, HV, V] of the rule, computed token by token on the pool from qkv [B, T, D]
    after the convolution. longest: an upper bound of the tokens of a sequence."""
    window, given, tokens = cache.window, None, qkv
    if window is not None and longest > window.max_tokens:
        cache.fold(slots)
        window = None
    if window is not None:
        given = cache.slot_positions(slots)
        tokens = _widened(qkv, window.k.dtype)
    o = recurrent_step(
        cache.recurrent_state,
        slots,
        mixed_qkv=tokens,
        a=a,
        b=b,
        A_log=A_log,
        dt_bias=dt_bias,
        allow_neg_eigval=allow_neg_eigval,
        use_qk_l2norm_in_kernel=True,
        state_v_first=True,
        skip=cache.skip,
        cu_seqlens=cu_seqlens,
        window=window,
        positions=None if given is None else given.now,
    )
    if given is not None:
        cache.advance(given, qkv.shape[1] if cu_seqlens is None else cu_seqlens.diff())
    return o.to(qkv.dtype)


def _widened(qkv: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts qkv to the dtype of a window's keys. Under autocast tokens are narrower than the
    weights."""
    if torch.promote_types(qkv.dtype, dtype) != dtype:
        expected = f"have a window whose keys hold the tokens' {qkv.dtype}"
        raise ValueError(must("cache", expected, f"keys of {dtype}"))
    return qkv.to(dtype)


def normed(o: Tensor, z: Tensor | None, norm: nn.RMSNorm, activation: str) -> Tensor:
    """Returns o [B, T, HV, V] after the norm of each head and, with z, after the gate."""
    if z is not None:
        assert norm.eps is not None
        return rms_norm_gated(o, z, norm.weight, norm.eps, activation)
    wide = torch.promote_types(o.dtype, torch.float32)
    size = norm.normalized_shape
    return F.rms_norm(o.to(wide), size, norm.weight.to(wide), norm.eps).to(o.dtype)
