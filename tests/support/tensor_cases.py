"""Helpers that the tests of tensors share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import gdn_triton

H, HV, K, V, T, W = 1, 2, 8, 8, 5, 4
D = 2 * H * K + HV * V
SLOTS = 3


@dataclass(frozen=True)
class Op:
    """run(tensors): the function's results, without None, with `tensors` by name. It writes those
    of `written` in place."""

    name: str
    make: Callable[[str], dict[str, Tensor]]
    run: Callable[[dict[str, Tensor]], list[Tensor]]
    written: tuple[str, ...] = ()

    def inputs(self, tensors: dict[str, Tensor]) -> list[str]:
        """The floats that are not written."""
        floats = [name for name, x in tensors.items() if x.is_floating_point()]
        return [name for name in floats if name not in self.written]


def listed(result: Any) -> list[Tensor]:
    results = result if isinstance(result, tuple) else (result,)
    return [x for x in results if x is not None]


def tokens(device: str, *sizes: tuple[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Random tensors by name; a g is at most 0, a beta between 0 and 1."""
    made = {name: torch.randn(*shape, device=device) for name, shape in sizes}
    if "g" in made:
        made["g"] = -made["g"].abs()
    if "beta" in made:
        made["beta"] = made["beta"].sigmoid()
    return made


HEADS = [("q", (1, T, H, K)), ("k", (1, T, H, K)), ("v", (1, T, HV, V))]
GATES = [("g", (1, T, HV)), ("beta", (1, T, HV))]
RAW = [("A_log", (HV,)), ("dt_bias", (HV,))]


def chunk_tensors(device: str) -> dict[str, Tensor]:
    return tokens(device, *HEADS, *GATES, *RAW, ("initial_state", (1, HV, K, V)))


def chunk(x: dict[str, Tensor]) -> list[Tensor]:
    options = {"use_gate_in_kernel": True, "output_final_state": True}
    return listed(gdn_triton.chunk_gated_delta_rule(**x, **options, use_qk_l2norm_in_kernel=True))


def recurrent_tensors(device: str) -> dict[str, Tensor]:
    more = [("gk", (1, T, HV, K)), ("gv", (1, T, HV, V)), ("initial_state", (1, HV, K, V))]
    return tokens(device, *HEADS, *GATES, *RAW, *more)


def recurrent(x: dict[str, Tensor]) -> list[Tensor]:
    options = {"use_gate_in_kernel": True, "output_final_state": True}
    return listed(
        gdn_triton.fused_recurrent_gated_delta_rule(**x, **options, use_qk_l2norm_in_kernel=True)
    )


def slots(device: str) -> dict[str, Tensor]:
    return {"read_slots": torch.tensor([1], device=device)}


def step_tensors(device: str) -> dict[str, Tensor]:
    pool = tokens(device, *HEADS, *GATES, ("state", (SLOTS, HV, K, V)), ("out", (1, T, HV, V)))
    return pool | slots(device)


def step(x: dict[str, Tensor]) -> list[Tensor]:
    return listed(gdn_triton.recurrent_step(**x))


def mixed_tensors(device: str) -> dict[str, Tensor]:
    gates = [("a", (1, T, HV)), ("b", (1, T, HV)), *RAW]
    mixed = tokens(device, ("mixed_qkv", (1, T, D)), *gates, ("state", (SLOTS, HV, K, V)))
    return mixed | slots(device)


def prefill_tensors(device: str) -> dict[str, Tensor]:
    x = tokens(device, *HEADS, *GATES, *RAW, ("state", (SLOTS, HV, K, V)), ("out", (1, T, HV, V)))
    return x | slots(device)


def prefill(x: dict[str, Tensor]) -> list[Tensor]:
    return listed(gdn_triton.chunk_prefill(**x, use_gate_in_kernel=True))


CONV = [("x", (1, T, D)), ("weight", (D, W)), ("bias", (D,))]
POOL = [("state", (SLOTS, D, W - 1))]
PREP = [("a", (1, T, HV)), ("b", (1, T, HV)), *RAW]


def conv(x: dict[str, Tensor]) -> list[Tensor]:
    return listed(gdn_triton.causal_conv1d(**x))


def conv_update(x: dict[str, Tensor]) -> list[Tensor]:
    return listed(gdn_triton.causal_conv1d_update(**x))


def conv_prep(x: dict[str, Tensor]) -> list[Tensor]:
    rest = {name: y for name, y in x.items() if name != "x"}
    sizes = {"num_k_heads": H, "head_k_dim": K, "head_v_dim": V}
    return listed(gdn_triton.fused_conv_prep(x["x"], **rest, **sizes))


def post_conv(x: dict[str, Tensor]) -> list[Tensor]:
    sizes = {"num_k_heads": H, "head_k_dim": K, "head_v_dim": V}
    return listed(gdn_triton.fused_post_conv_prep(**x, **sizes))


def post_conv_tensors(device: str) -> dict[str, Tensor]:
    return tokens(device, ("conv_output", (T, D)), ("a", (T, HV)), ("b", (T, HV)), *RAW)


def norm(x: dict[str, Tensor]) -> list[Tensor]:
    return listed(gdn_triton.rms_norm_gated(**x))


def norm_tensors(device: str) -> dict[str, Tensor]:
    return tokens(device, ("x", (T, HV, V)), ("gate", (T, HV, V)), ("weight", (V,)))


STATE = ("state",)
OPS = [
    Op("chunk", chunk_tensors, chunk),
    Op("recurrent", recurrent_tensors, recurrent),
    Op("step", step_tensors, step, ("state", "out")),
    Op("step-mixed", mixed_tensors, step, STATE),
    Op("prefill", prefill_tensors, prefill, ("state", "out")),
    Op("conv", lambda device: tokens(device, *CONV), conv),
    Op("conv-state", lambda device: tokens(device, *CONV, *POOL) | slots(device), conv, STATE),
    Op("update", lambda device: tokens(device, *CONV, *POOL) | slots(device), conv_update, STATE),
    Op("conv-prep", lambda device: tokens(device, *CONV, *PREP), conv_prep),
    Op("post-conv", post_conv_tensors, post_conv),
    Op("norm", norm_tensors, norm),
]
each_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
each_backend = pytest.mark.parametrize("backend", ["triton", "reference"])


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in tensors.items()}


def outcome(op: Op, tensors: dict[str, Tensor]) -> list[Tensor]:
    """The returned and the written tensors."""
    return [*op.run(tensors), *(tensors[name] for name in op.written)]


def negative(x: Tensor) -> Tensor:
    """x, whose memory holds -x."""
    y = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert y.is_neg() and torch.equal(y, x)
    return y


class Wrapped(torch.Tensor):
    """A tensor in another one, with no memory of its own."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapped":
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(unwrapped, (args, kwargs or {}))
        return tree_map(
            lambda y: Wrapped(y) if isinstance(y, Tensor) else y, operation(*args, **kwargs)
        )


def unwrapped(x: Any) -> Any:
    return x.inner if isinstance(x, Wrapped) else x


class Named(torch.Tensor):
    """A tensor of another type, with memory like any other."""
