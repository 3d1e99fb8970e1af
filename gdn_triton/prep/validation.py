"""Validates the calls of `gdn_triton.fused_post_conv_prep` before anything is launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from gdn_triton._host.arguments import (
    FLOAT_DTYPES,
    FLOATS,
    STRIDED,
    check_dtype,
    check_tensors,
    must,
    shape_of,
    shaped,
    value_of,
)
from gdn_triton._host.tensors import why_unreadable
from gdn_triton.prep.problem import GATE_TENSORS, Sizes

_SIZES: Final = ("num_k_heads", "head_k_dim", "head_v_dim")
_FLAGS: Final = ("apply_l2norm", "output_g_exp")


def validate_post_conv(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    num_k_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    apply_l2norm: bool,
    output_g_exp: bool,
    *,
    first: str = "conv_output",
    ranks: tuple[int, ...] = (2,),
) -> Sizes:
    """Checks the arguments of `gdn_triton.fused_post_conv_prep`, which documents them. first: the
    caller's name of x; ranks: the numbers of dimensions that x may have, the last being channels.

    The order is: types, devices, ranks, sizes, dtypes. Raises TypeError or ValueError with the
    argument, the expected and the given value. Reads shapes only, nothing on a device.
    """
    H, K, V = num_k_heads, head_k_dim, head_v_dim
    names = (first, *GATE_TENSORS)
    tensors = (x, a, b, A_log, dt_bias)
    # This is one test of all conditions, because every call pays for it. Only if it fails, the code
    # below finds the message.
    if not (
        isinstance(x, Tensor)
        and isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and isinstance(A_log, Tensor)
        and isinstance(dt_bias, Tensor)
        and x.layout is a.layout is b.layout is A_log.layout is dt_bias.layout is STRIDED
        and not (x.is_nested or a.is_nested or b.is_nested)
        and not (A_log.is_nested or dt_bias.is_nested)
        and type(H) is type(K) is type(V) is int
        and (apply_l2norm is True or apply_l2norm is False)
        and (output_g_exp is True or output_g_exp is False)
    ):
        _raise_for_types(names, tensors, (H, K, V), (apply_l2norm, output_g_exp))
    if H < 1 or K < 1 or V < 1:
        name, size = next((n, s) for n, s in zip(_SIZES, (H, K, V), strict=True) if s < 1)
        raise ValueError(must(name, "be at least 1", str(size)))

    device = x.device
    if not (a.device == device == b.device and A_log.device == device == dt_bias.device):
        name, y = next((n, y) for n, y in zip(names, tensors, strict=True) if y.device != device)
        raise ValueError(must(name, f"be on the device of {first}, {device}", f"{y.device}"))

    if x.dim() not in ranks:
        expected = "have 2 dimensions [L, 2 * H * K + HV * V]"
        raise ValueError(must(first, expected, shape_of(x)))
    if A_log.dim() != 1:
        raise ValueError(must("A_log", "have 1 dimension [HV]", shape_of(A_log)))
    *lead, columns = x.shape
    HV = A_log.shape[0]
    if HV < H or HV % H != 0:
        raise ValueError(must("A_log", f"have a positive multiple of H={H} heads", f"HV={HV}"))
    if columns != 2 * H * K + HV * V:
        expected = f"have 2 * H * K + HV * V = {2 * H * K + HV * V} columns"
        sizes = shaped(H=H, K=K, HV=HV, V=V)
        raise ValueError(must(first, f"{expected} ({sizes})", shape_of(x)))
    for name, y in (("a", a), ("b", b)):
        if y.shape != (*lead, HV):
            dims = dict(zip(("B", "T") if len(lead) == 2 else ("L",), lead, strict=True))
            raise ValueError(must(name, f"have shape {shaped(**dims, HV=HV)}", shape_of(y)))
    if dt_bias.shape != (HV,):
        raise ValueError(must("dt_bias", f"have shape {shaped(HV=HV)}", shape_of(dt_bias)))

    dtypes = {x.dtype, a.dtype, b.dtype, A_log.dtype, dt_bias.dtype}
    if not dtypes <= FLOAT_DTYPES:
        for name, y in zip(names, tensors, strict=True):
            check_dtype(name, y, FLOAT_DTYPES, FLOATS)
    unreadable = why_unreadable(names, tensors)
    return Sizes(
        H=H,
        HV=HV,
        K=K,
        V=V,
        device=device,
        dtype=x.dtype,
        wide=torch.float64 in dtypes,
        unreadable=unreadable,
    )


def _raise_for_types(
    names: Sequence[str], tensors: Sequence[Any], sizes: Sequence[Any], flags: Sequence[Any]
) -> NoReturn:
    check_tensors(dict(zip(names, tensors, strict=True)), {})
    for name, size in zip(_SIZES, sizes, strict=True):
        if type(size) is not int:
            raise TypeError(must(name, "be an int", value_of(size)))
    name, flag = next((n, f) for n, f in zip(_FLAGS, flags, strict=True) if type(f) is not bool)
    raise TypeError(must(name, "be True or False", value_of(flag)))
