"""Judges the arguments of `gdn_triton.fused_post_conv_prep`, chooses a backend and runs it.

The backends are those of `gdn_triton.backend`, with the same limits; no CUDA kernel is among them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from gdn_triton.backend import _log_once, requested_backend, triton_limits
from gdn_triton.device import on_device
from gdn_triton.validation import (
    _FLOAT_DTYPES,
    _FLOATS,
    _check_dtype,
    _dims,
    _must,
    _shape,
    _type,
    _value,
)

Prepared = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

_NO_CUDA = "The CUDA library has no preparation after the convolution."
_TENSORS = ("conv_output", "a", "b", "A_log", "dt_bias")
_SIZES = ("num_k_heads", "head_k_dim", "head_v_dim")
_FLAGS = ("apply_l2norm", "output_g_exp")


class Sizes(NamedTuple):
    """What a validated call is chosen a backend by. wide: some input is float64."""

    H: int
    HV: int
    K: int
    V: int
    device: torch.device
    dtype: torch.dtype
    wide: bool


def validate_post_conv(
    conv_output: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    num_k_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    apply_l2norm: bool,
    output_g_exp: bool,
) -> Sizes:
    """Checks the arguments of `gdn_triton.fused_post_conv_prep`, which documents them.

    In this order: types, devices, ranks, sizes, dtypes. Raises TypeError or ValueError with the
    argument, what was expected and what came. Reads shapes only, nothing on a device.
    """
    H, K, V = num_k_heads, head_k_dim, head_v_dim
    tensors = (conv_output, a, b, A_log, dt_bias)
    # One test of all, for it is on every call; the messages are looked for once it has failed.
    if not (
        isinstance(conv_output, Tensor)
        and isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and isinstance(A_log, Tensor)
        and isinstance(dt_bias, Tensor)
        and type(H) is type(K) is type(V) is int
        and (apply_l2norm is True or apply_l2norm is False)
        and (output_g_exp is True or output_g_exp is False)
    ):
        _raise_for_types(tensors, (H, K, V), (apply_l2norm, output_g_exp))
    if H < 1 or K < 1 or V < 1:
        name, size = next((n, s) for n, s in zip(_SIZES, (H, K, V), strict=True) if s < 1)
        raise ValueError(_must(name, "be at least 1", str(size)))

    device = conv_output.device
    if not (a.device == device == b.device and A_log.device == device == dt_bias.device):
        name, x = next((n, x) for n, x in zip(_TENSORS, tensors, strict=True) if x.device != device)
        raise ValueError(_must(name, f"be on the device of conv_output, {device}", f"{x.device}"))

    if conv_output.dim() != 2:
        expected = "have 2 dimensions [L, 2 * H * K + HV * V]"
        raise ValueError(_must("conv_output", expected, _shape(conv_output)))
    if A_log.dim() != 1:
        raise ValueError(_must("A_log", "have 1 dimension [HV]", _shape(A_log)))
    L, columns = conv_output.shape
    HV = A_log.shape[0]
    if HV < H or HV % H != 0:
        raise ValueError(_must("A_log", f"have a positive multiple of H={H} heads", f"HV={HV}"))
    if columns != 2 * H * K + HV * V:
        expected = f"have 2 * H * K + HV * V = {2 * H * K + HV * V} columns"
        sizes = _dims(H=H, K=K, HV=HV, V=V)
        raise ValueError(_must("conv_output", f"{expected} ({sizes})", _shape(conv_output)))
    if a.shape != (L, HV):
        raise ValueError(_must("a", f"have shape {_dims(L=L, HV=HV)}", _shape(a)))
    if b.shape != (L, HV):
        raise ValueError(_must("b", f"have shape {_dims(L=L, HV=HV)}", _shape(b)))
    if dt_bias.shape != (HV,):
        raise ValueError(_must("dt_bias", f"have shape {_dims(HV=HV)}", _shape(dt_bias)))

    dtypes = {conv_output.dtype, a.dtype, b.dtype, A_log.dtype, dt_bias.dtype}
    if not dtypes <= _FLOAT_DTYPES:
        for name, x in zip(_TENSORS, tensors, strict=True):
            _check_dtype(name, x, _FLOAT_DTYPES, _FLOATS)
    return Sizes(H, HV, K, V, device, conv_output.dtype, torch.float64 in dtypes)


def _raise_for_types(
    tensors: Sequence[Any], sizes: Sequence[Any], flags: Sequence[Any]
) -> NoReturn:
    for name, x in zip(_TENSORS, tensors, strict=True):
        if not isinstance(x, Tensor):
            raise TypeError(_must(name, "be a torch.Tensor", _type(x)))
    for name, size in zip(_SIZES, sizes, strict=True):
        if type(size) is not int:
            raise TypeError(_must(name, "be an int", _value(size)))
    name, flag = next((n, f) for n, f in zip(_FLAGS, flags, strict=True) if type(f) is not bool)
    raise TypeError(_must(name, "be True or False", _value(flag)))


@functools.cache
def triton_refusal(sizes: Sizes, needs_grad: bool) -> str | None:
    """A sentence why the Triton kernel cannot run the call, or None: its limits are those of the
    chunked op, whose inputs it makes. Cached, for none of it changes within a process."""
    if sizes.wide:
        return "The Triton kernels compute in float32 at most; one of the inputs is float64."
    if needs_grad:
        return (
            "The Triton kernel of the preparation has no backward; an input requires a gradient. "
            "Call under torch.no_grad() if none is wanted."
        )
    return triton_limits((sizes.dtype,), sizes.device.type, sizes.HV, sizes.K, sizes.V)


def choose_post_conv(sizes: Sizes, needs_grad: bool) -> str:
    """ "triton" or "reference". Raises as `gdn_triton.backend.choose` does."""
    requested = requested_backend()
    if requested == "reference":
        return requested
    reason = _NO_CUDA if requested == "cuda" else triton_refusal(sizes, needs_grad)
    if requested != "auto":
        if reason is not None:
            raise RuntimeError(f"GDN_BACKEND={requested} cannot run this call. {reason}")
        return requested
    if reason is None:
        return "triton"
    _log_once("reference", (("cuda", _NO_CUDA), ("triton", reason)), sizes.device.type)
    return "reference"


@functools.cache
def load_post_conv(backend: str) -> Callable[..., Prepared]:
    """The function that runs a validated call, which takes the public one's arguments by position.
    Imports the backend's modules, which may be heavy or absent."""
    if backend == "reference":
        from gdn_triton.reference_post_conv import fused_post_conv_prep

        return fused_post_conv_prep
    from gdn_triton.kernels.post_conv import post_conv_fwd

    return post_conv_fwd


def run_post_conv(backend: str, conv_output: Tensor, *args: Any) -> Prepared:
    """Runs a validated call on the backend chosen for it. args: the public function's others."""
    with on_device(conv_output.device):
        return load_post_conv(backend)(conv_output, *args)
