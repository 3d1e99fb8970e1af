"""Helpers that the tests of a layer's step share: arguments of calls, and the parts in a row."""

from dataclasses import dataclass
from typing import Any

import torch
from helpers import FP32
from torch import Tensor

from gdn_triton import causal_conv1d_update, recurrent_step, rms_norm_gated

POOLS = ("state", "conv_state")


@dataclass(frozen=True)
class Case:
    """The second sequence is padding, if there are three."""

    H: int = 1
    HV: int = 2
    K: int = 16
    V: int = 24
    N: int = 3
    W: int = 4
    dtype: torch.dtype = FP32
    pool: torch.dtype = FP32
    conv_pool: torch.dtype | None = None
    v_first: bool = True
    bias: bool = False
    sigmoid: bool = False

    @property
    def D(self) -> int:
        return 2 * self.H * self.K + self.HV * self.V

    def arguments(self, device: str, T: int = 0) -> dict[str, Any]:
        """T: tokens of a sequence; 0: one, without a dimension for it."""
        torch.manual_seed(0)
        lead = (self.N, T) if T else (self.N,)

        def normal(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.randn(*shape).to(device, dtype)

        heads = (self.V, self.K) if self.v_first else (self.K, self.V)
        slots = torch.randperm(self.N + 2)[: self.N].int()
        if self.N > 2:
            slots[1] = -1
        # Views whose rows and heads lie apart, as those of a projection do.
        a, b = normal(*lead, 2, self.HV).unbind(-2)
        gate = normal(*lead, self.HV, 2 * self.V)[..., : self.V]
        return {
            "mixed_qkv": normal(*lead, self.D + 8)[..., 8:],
            "a": a,
            "b": b,
            "A_log": normal(self.HV, dtype=FP32) / 2,
            "dt_bias": normal(self.HV, dtype=FP32),
            "state": normal(self.N + 2, self.HV, *heads, dtype=self.pool),
            "read_slots": slots.to(device),
            "conv_state": normal(
                self.N + 2, self.D, self.W - 1, dtype=self.conv_pool or self.dtype
            ),
            "conv_weight": normal(self.D, self.W),
            "conv_bias": normal(self.D) if self.bias else None,
            "gate": gate,
            "norm_weight": normal(self.V),
            "norm_activation": "sigmoid" if self.sigmoid else "silu",
            "norm_eps": 1e-5,
            "state_v_first": self.v_first,
        }


def copied(x: dict[str, Any]) -> dict[str, Any]:
    return {**x, **{name: x[name].clone() for name in POOLS if x.get(name) is not None}}


def in_a_row(x: dict[str, Any], norm: bool = True) -> Tensor:
    """The public functions one after the other, without what makes skipped rows 0 after a norm."""
    mixed, slots = x["mixed_qkv"], x["read_slots"]
    write, accepted = x.get("write_slots"), x.get("num_accepted_tokens")
    drafts = {
        name: x[name] for name in ("num_accepted_tokens", "parents", "cu_seqlens") if name in x
    }
    if x.get("conv_weight") is not None:
        mixed = causal_conv1d_update(
            mixed,
            x["conv_weight"],
            x["conv_bias"],
            x.get("activation", "silu"),
            state=conv_columns(x),
            read_slots=slots if slots.dim() == 1 else slots[:, 0],
            write_slots=write,
            **drafts,
        )
    gates = {name: x[name] for name in ("a", "b", "A_log", "dt_bias")}
    rest = {name: x[name] for name in ("window", "positions") if name in x}
    if rest:
        # With a window only the convolution has these arguments.
        write, accepted = None, None
    o = recurrent_step(
        x["state"],
        slots,
        write,
        num_accepted_tokens=accepted,
        parents=x.get("parents"),
        cu_seqlens=x.get("cu_seqlens"),
        mixed_qkv=mixed,
        **gates,
        **rest,
        use_qk_l2norm_in_kernel=True,
        state_v_first=x["state_v_first"],
    )
    if not norm:
        return o
    return rms_norm_gated(o, x["gate"], x["norm_weight"], x["norm_eps"], x["norm_activation"])


def conv_columns(x: dict[str, Any]) -> Tensor:
    """The columns of the convolution's state that a call uses, as a view."""
    if x.get("num_accepted_tokens") is None:
        return x["conv_state"]
    window, slots = x.get("window"), x["read_slots"]
    S = slots.shape[1] if window is None else window.max_tokens
    return x["conv_state"][..., : x["conv_weight"].shape[1] - 2 + S]


def without(x: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: y for name, y in x.items() if name not in names}


NORM = ("gate", "norm_weight", "norm_eps", "norm_activation")
CONV = ("conv_weight", "conv_bias", "conv_state")
