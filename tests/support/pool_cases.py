"""Helpers that the tests of written and read memory share: a call of every op, its results by name,
and its tensors."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import gdn_triton

T, H, HV, K, V = 40, 1, 2, 16, 16
D, W = 2 * H * K + HV * V, 4
OFFSETS = (0, 17, 17, 36)  # an empty sequence, and tokens of none
N = len(OFFSETS) - 1


@dataclass(frozen=True)
class Op:
    """call: with the tensors and the options of `make`. written: the names of what it writes."""

    call: Callable[..., Any]
    make: Callable[[], dict[str, Any]]
    written: tuple[str, ...] = ()


def unit(*shape: int) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(*shape), dim=-1)


def tokens(*lead: int) -> dict[str, Tensor]:
    return {"q": unit(*lead, H, K), "k": unit(*lead, H, K), "v": torch.randn(*lead, HV, V)}


def gates(*lead: int) -> dict[str, Tensor]:
    """The inputs of the activations."""
    return {
        "A_log": torch.randn(HV) * 0.5,
        "dt_bias": torch.randn(HV),
        "a": torch.randn(*lead, HV),
        "b": torch.randn(*lead, HV),
    }


def raw(*lead: int) -> dict[str, Any]:
    """The same by the names of the chunked op."""
    x = gates(*lead)
    flags = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    return {"g": x.pop("a"), "beta": x.pop("b"), **x, **flags}


def offsets() -> Tensor:
    return torch.tensor(OFFSETS)


def states(count: int) -> Tensor:
    return torch.randn(count, HV, K, V)


def slots() -> dict[str, Tensor]:
    return {"read_slots": torch.tensor([4, 1, 2]), "write_slots": torch.tensor([4, 0, 5])}


def make_chunk() -> dict[str, Any]:
    chunks = [[0, 0], [0, 1], [2, 0], [2, 1]]
    return {
        **tokens(1, T),
        **raw(1, T),
        "initial_state": states(N),
        "output_final_state": True,
        "cu_seqlens": offsets(),
        "cu_seqlens_cpu": offsets().cpu(),
        "chunk_indices": torch.tensor(chunks),
        "chunk_size": 16,
    }


def make_prefill() -> dict[str, Any]:
    return {
        "state": states(9),
        **slots(),
        "has_initial_state": torch.tensor([True, False, True]),
        **tokens(1, T),
        **raw(1, T),
        "cu_seqlens": offsets(),
        "out": torch.zeros(1, T, HV, V),
        "state_checkpoints": torch.zeros(5, HV, K, V),
        "checkpoint_slots": torch.tensor([[3, -1], [-1, -1], [1, 0]]),
        "checkpoint_every_n_tokens": 16,
        "chunk_size": 16,
    }


def make_sequences() -> dict[str, Any]:
    x = {**tokens(1, T), **raw(1, T), "beta": torch.randn(1, T, HV, V)}
    decays = {"gk": -torch.rand(1, T, HV, K), "gv": -torch.rand(1, T, HV, V)}
    more = {"initial_state": states(N), "output_final_state": True, "cu_seqlens": offsets()}
    return {**x, **decays, **more}


def make_step() -> dict[str, Any]:
    """Packed, with a slot for each token; those of no sequence have one that is in use."""
    write = torch.arange(3, 3 + T)
    write[OFFSETS[-1] :] = 3
    x = {"state": states(3 + T), "read_slots": torch.arange(3), "write_slots": write[None]}
    return {
        **x,
        **tokens(1, T),
        **gates(1, T),
        "cu_seqlens": offsets(),
        "out": torch.zeros(1, T, HV, V),
    }


def make_mixed_step() -> dict[str, Any]:
    decays = {"g": -torch.rand(N, HV), "beta": torch.rand(N, HV)}
    x = {"state": states(6), **slots(), "mixed_qkv": torch.randn(N, D), **decays}
    return {**x, "use_qk_l2norm_in_kernel": True, "out": torch.zeros(N, HV, V)}


def make_windowed_step() -> dict[str, Any]:
    """Packed. The window's tensors by the names that errors give them. The call before had two
    tokens from position 5 on, and some heads are folded now."""
    device = torch.get_default_device()
    window = gdn_triton.make_window(6, H, HV, K, V, torch.float32, device, rows=8, max_tokens=2)
    parts = window._asdict()
    parts |= {"u": torch.randn_like(window.u), "k": torch.randn_like(window.k)}
    parts |= {"g": -torch.rand_like(window.g), "calls": window.calls + 5}
    parts |= {"start": torch.tensor([5] * 6, dtype=torch.int32)}
    del parts["tickets"]  # of a layer's step
    return {
        "state": states(6),
        "read_slots": torch.tensor([4, 1, 2]),
        **tokens(1, 4),
        **gates(1, 4),
        "cu_seqlens": torch.tensor([0, 2, 2, 3]),
        "out": torch.zeros(1, 4, HV, V),
        "positions": torch.tensor([7, 7, 7]),
        **{f"window.{name}": part for name, part in parts.items()},
    }


def with_window(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the parts of a window as arguments of their own."""

    @functools.wraps(function)
    def call(**x: Any) -> Any:
        fields = gdn_triton.StepWindow._fields
        parts = {name: x.pop(f"window.{name}") for name in fields if f"window.{name}" in x}
        return function(**x, window=gdn_triton.StepWindow(**parts))

    return call


def make_fold() -> dict[str, Any]:
    """Records of two tokens in each slot."""
    x = make_windowed_step()
    kept = {name: y for name, y in x.items() if name == "state" or name.startswith("window.")}
    return {**kept, "slots": x["read_slots"], "positions": x["positions"]}


def make_accept() -> dict[str, Any]:
    """The tokens of the call before were nodes, of which the second is a root that is accepted."""
    x = make_restart()
    path = torch.tensor([[1, -1], [0, 1], [1, -1]])
    return {**x, "positions": x["positions"] - 2, "path": path}


def make_restart() -> dict[str, Any]:
    x = make_fold()
    del x["state"]
    return x


def make_layer_step() -> dict[str, Any]:
    return {
        "mixed_qkv": torch.randn(N, D),
        **gates(N),
        "state": states(6),
        "read_slots": torch.tensor([4, 1, -1]),
        "conv_state": torch.randn(6, D, W - 1),
        "conv_weight": torch.randn(D, W),
        "conv_bias": torch.randn(D),
        "gate": torch.randn(N, HV, V),
        "norm_weight": torch.randn(V),
    }


def make_windowed_layer_step() -> dict[str, Any]:
    window = {n: y for n, y in make_windowed_step().items() if n.startswith("window.")}
    tickets = torch.zeros(6, H, dtype=torch.int32)
    positions = torch.tensor([7, 7, 7])
    return {**make_layer_step(), **window, "window.tickets": tickets, "positions": positions}


def make_conv() -> dict[str, Any]:
    return {
        "x": torch.randn(1, T, D),
        "weight": torch.randn(D, W),
        "bias": torch.randn(D),
        "state": torch.randn(6, D, W - 1),
        **slots(),
        "has_initial_state": torch.tensor([True, True, False]),
        "cu_seqlens": offsets(),
    }


def make_prep() -> dict[str, Any]:
    x = make_conv()
    sizes = {"num_k_heads": H, "head_k_dim": K, "head_v_dim": V}
    return {"mixed_qkv": x.pop("x"), **x, **gates(1, T), **sizes}


def make_post_conv() -> dict[str, Any]:
    sizes = {"num_k_heads": H, "head_k_dim": K, "head_v_dim": V}
    return {"conv_output": torch.randn(T, D), **gates(T), **sizes}


OPS = {
    "chunk": Op(gdn_triton.chunk_gated_delta_rule, make_chunk),
    "sequences": Op(gdn_triton.fused_recurrent_gated_delta_rule, make_sequences),
    "post_conv": Op(gdn_triton.fused_post_conv_prep, make_post_conv),
    "prefill": Op(gdn_triton.chunk_prefill, make_prefill, ("out", "state_checkpoints", "state")),
    "step": Op(gdn_triton.recurrent_step, make_step, ("out", "state")),
    "mixed step": Op(gdn_triton.recurrent_step, make_mixed_step, ("out", "state")),
    "windowed step": Op(
        with_window(gdn_triton.recurrent_step),
        make_windowed_step,
        ("out", "state", "window.u", "window.k", "window.g", "window.calls"),
    ),
    "fold": Op(with_window(gdn_triton.fold_window), make_fold, ("state", "window.start")),
    "accept": Op(
        with_window(gdn_triton.accept_window), make_accept, ("window.u", "window.k", "window.g")
    ),
    "restart": Op(with_window(gdn_triton.restart_window), make_restart, ("window.start",)),
    "layer step": Op(gdn_triton.layer_step, make_layer_step, ("state", "conv_state")),
    "windowed layer step": Op(
        with_window(gdn_triton.layer_step),
        make_windowed_layer_step,
        ("state", "conv_state", "window.u", "window.k", "window.g", "window.calls"),
    ),
    "conv": Op(gdn_triton.causal_conv1d, make_conv, ("state",)),
    "conv update": Op(gdn_triton.causal_conv1d_update, make_conv, ("state",)),
    "conv prep": Op(gdn_triton.fused_conv_prep, make_prep, ("state",)),
}
WRITING = [name for name, op in OPS.items() if op.written]


def run(op: Op, x: dict[str, Any]) -> dict[str, Tensor]:
    """All results by name, including the written tensors."""
    found = op.call(**x)
    results = found if isinstance(found, tuple) else (found,)
    named = {f"result {i}": y for i, y in enumerate(results) if y is not None}
    return {**named, **{name: x[name] for name in op.written}}


def copied(x: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {name: y.clone() if isinstance(y, Tensor) else y for name, y in x.items()} | changes


def tensors_of(x: dict[str, Any]) -> list[str]:
    return [name for name, y in x.items() if isinstance(y, Tensor)]


def arena(x: dict[str, Any], starts: dict[str, int]) -> tuple[dict[str, Any], Tensor]:
    """The tensors of `starts` in one memory, each from that byte on; its bytes."""
    ends = [start + x[name].nbytes for name, start in starts.items()]
    device = x[next(iter(starts))].device
    memory = torch.zeros(max(ends), dtype=torch.uint8, device=device)
    moved = dict(x)
    for name, start in starts.items():
        place = memory[start : start + x[name].nbytes].view(x[name].dtype)
        moved[name] = place.view(x[name].shape).copy_(x[name])
    return moved, memory


def up(size: int) -> int:
    """The next multiple of 16 bytes."""
    return -(-size // 16) * 16
