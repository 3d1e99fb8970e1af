"""Small valid calls of the public functions, from which `function_cases` makes its table."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import gdn_triton
from gdn_triton._ranks.layout import Interval
from gdn_triton.distributed import ContextParallel
from gdn_triton.layers import GatedDeltaNet, GatedDeltaNetCache

H, HV, K, V, W = 1, 2, 4, 6, 4
D = 2 * H * K + HV * V
HIDDEN = 5
CHUNK = 16
SIZES = {"num_k_heads": H, "head_k_dim": K, "head_v_dim": V}


@dataclass(frozen=True)
class Batch:
    """The tokens of a call: B rows of T, or with `offsets` one row of packed sequences."""

    B: int
    T: int
    offsets: tuple[int, ...] | None = None

    @property
    def lead(self) -> tuple[int, int]:
        return self.B, self.T

    @property
    def N(self) -> int:
        return self.B if self.offsets is None else len(self.offsets) - 1

    def packed(self) -> dict[str, Tensor]:
        return {} if self.offsets is None else {"cu_seqlens": torch.tensor(self.offsets)}

    def on_host(self) -> dict[str, Tensor]:
        if self.offsets is None:
            return {}
        return {"cu_seqlens_cpu": torch.tensor(self.offsets, device="cpu")}


# Two sequences that are computed, one without tokens, one that calls on a pool skip, and a token of
# no sequence.
SHORT = Batch(1, 6, (0, 2, 2, 4, 5))
# The first sequence is longer than a chunk.
LONG = Batch(1, 21, (0, 17, 17, 19, 20))
ROWS = Batch(2, 3)
# The tokens on which no result depends: those of no sequence, and of a skipped one.
SPARE = {SHORT: [5], LONG: [20]}
SKIPPED = {SHORT: [2, 3, 5], LONG: [17, 18, 20]}

EMPTY = {
    "no tokens": Batch(1, 0, (0,)),
    "no sequences": Batch(1, 3, (0,)),
    "a sequence without tokens": Batch(1, 0, (0, 0)),
    "no rows": Batch(0, 3),
    "rows without tokens": Batch(2, 0),
}


def unit(*shape: int) -> Tensor:
    return nn.functional.normalize(torch.randn(*shape), dim=-1)


def tokens(batch: Batch) -> dict[str, Tensor]:
    lead = batch.lead
    return {"q": unit(*lead, H, K), "k": unit(*lead, H, K), "v": torch.randn(*lead, HV, V)}


def parameters() -> dict[str, Tensor]:
    return {"A_log": torch.randn(HV) / 2, "dt_bias": torch.randn(HV)}


def logits(batch: Batch, g: str = "a", beta: str = "b") -> dict[str, Tensor]:
    """The inputs of the activations."""
    return {g: torch.randn(*batch.lead, HV), beta: torch.randn(*batch.lead, HV), **parameters()}


def gates(batch: Batch) -> dict[str, Tensor]:
    return {"g": -torch.rand(*batch.lead, HV), "beta": torch.rand(*batch.lead, HV)}


def slots(batch: Batch) -> dict[str, Tensor]:
    """The arguments of at most four sequences. The third one is skipped."""
    read, write = torch.tensor([4, 1, -1, 2]), torch.tensor([4, 0, 3, 5])
    return {"read_slots": read[: batch.N], "write_slots": write[: batch.N]}


def has_initial_state(batch: Batch) -> Tensor:
    return torch.tensor([True, True, True, False])[: batch.N]


ACTIVATED = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
RULE = {**ACTIVATED, "use_qk_l2norm_in_kernel": True, "scale": 0.7}


def make_chunk(batch: Batch) -> dict[str, Any]:
    x = {**tokens(batch), **logits(batch, "g", "beta"), **batch.packed(), **batch.on_host(), **RULE}
    if batch.offsets is not None:
        lengths = [b - a for a, b in itertools.pairwise(batch.offsets)]
        rows = [[n, i] for n, length in enumerate(lengths) for i in range(-(-length // CHUNK))]
        x["chunk_indices"] = torch.tensor(rows, dtype=torch.int64).view(-1, 2)
    state = torch.randn(batch.N, HV, K, V)
    return {**x, "initial_state": state, "output_final_state": True, "chunk_size": CHUNK}


def make_whole_chunk(batch: Batch) -> dict[str, Any]:
    """The only flags are those of a call without options."""
    return {**tokens(batch), **gates(batch), "chunk_size": CHUNK}


def make_split_chunk(batch: Batch) -> dict[str, Any]:
    x = make_chunk(batch)
    for name in ("cu_seqlens_cpu", "chunk_indices"):
        x.pop(name, None)
    offsets = x.pop("cu_seqlens").to(torch.int32)
    context = ContextParallel(
        group=None,  # type: ignore[arg-type]  # nobody is asked for anything
        cu_seqlens=offsets,
        cu_seqlens_cpu=offsets.cpu(),
        conv1d_kernel_size=None,
        layout="contiguous",
        sequences=tuple(range(batch.N)),
        lengths=(batch.T,),
        rank=0,
        world_size=1,
        intervals=(Interval(0, 0, batch.N - 1, (), (), 0),),
        crosses=False,
    )
    return {**x, "cp_context": context}


def make_sequences(batch: Batch) -> dict[str, Any]:
    x = {**tokens(batch), **logits(batch, "g", "beta"), **batch.packed(), **RULE}
    x["beta"] = torch.randn(*batch.lead, HV, V)
    decays = {"gk": -torch.rand(*batch.lead, HV, K), "gv": -torch.rand(*batch.lead, HV, V)}
    state = torch.randn(batch.N, HV, K, V)
    return {**x, **decays, "initial_state": state, "output_final_state": True}


def make_prefill(batch: Batch) -> dict[str, Any]:
    kept = torch.tensor([[1], [0], [0], [2]])[: batch.N]
    return {
        "state": torch.randn(7, HV, K, V),
        **slots(batch),
        "has_initial_state": has_initial_state(batch),
        **tokens(batch),
        **logits(batch, "g", "beta"),
        **batch.packed(),
        **batch.on_host(),
        **RULE,
        "out": torch.zeros(*batch.lead, HV, V),
        "state_checkpoints": torch.zeros(3, HV, K, V),
        "checkpoint_slots": kept,
        "checkpoint_every_n_tokens": CHUNK,
        "chunk_size": CHUNK,
    }


def make_step(batch: Batch) -> dict[str, Any]:
    """A slot for each token; those of no sequence have one that is in use."""
    write = torch.tensor([[3, 4, 3, 3, 5, 3], [6, 7, 3, 3, 3, 3]])[: batch.B, : batch.T]
    x = {"state": torch.randn(8, HV, K, V), "read_slots": torch.tensor([0, 1, -1, 2])[: batch.N]}
    out = torch.zeros(*batch.lead, HV, V)
    return {
        **x,
        "write_slots": write,
        **tokens(batch),
        **logits(batch),
        **batch.packed(),
        "out": out,
    }


def make_accepted_step(batch: Batch) -> dict[str, Any]:
    table = torch.arange(8).view(4, 2)[: batch.N]
    accepted = torch.tensor([2, 1, 0, 1])[: batch.N]
    x = {"state": torch.randn(8, HV, K, V), "read_slots": table, "num_accepted_tokens": accepted}
    return {**x, **tokens(batch), **gates(batch), **batch.packed()}


def make_tree_step(batch: Batch) -> dict[str, Any]:
    """Both tokens of a sequence are roots."""
    parents = torch.tensor([[-1, -1, 0, 3, -1, 0], [-1, 0, 0, 0, 0, 0]])[: batch.B, : batch.T]
    x = make_step(batch)
    del x["out"]
    return {**x, "parents": parents}


def make_mixed_step(batch: Batch) -> dict[str, Any]:
    x = {"state": torch.randn(7, HV, K, V), **slots(batch), **batch.packed()}
    mixed = {"mixed_qkv": torch.randn(*batch.lead, D), **gates(batch)}
    out = torch.zeros(*batch.lead, HV, V)
    return {**x, **mixed, "use_qk_l2norm_in_kernel": True, "out": out}


def window(batch: Batch) -> dict[str, Any]:
    """The tensors of a window by the names that errors give them; each row holds a record. The
    call before was at position 3, and one of the two heads is folded at position 4."""
    rows = torch.randn(7, 8, HV, V), unit(7, 8, H, K), -torch.rand(7, 8, HV)
    calls, start = torch.full((7, 8), 3, dtype=torch.int32), torch.zeros(7, dtype=torch.int32)
    parts = dict(zip(("u", "k", "g", "calls", "start"), (*rows, calls, start), strict=True))
    named = {f"window.{name}": part for name, part in parts.items()}
    return {**named, "positions": torch.tensor([5, 5, 5, 5])[: batch.N]}


def make_window_step(batch: Batch) -> dict[str, Any]:
    x = {"state": torch.randn(7, HV, K, V), "read_slots": slots(batch)["read_slots"]}
    out = torch.zeros(*batch.lead, HV, V)
    return {**x, **tokens(batch), **logits(batch), **batch.packed(), "out": out, **window(batch)}


def make_restart(batch: Batch) -> dict[str, Any]:
    return {"slots": slots(batch)["read_slots"], **window(batch)}


def make_fold(batch: Batch) -> dict[str, Any]:
    return {"state": torch.randn(7, HV, K, V), **make_restart(batch)}


def make_tree_window_step(batch: Batch) -> dict[str, Any]:
    tree = make_tree_step(batch)
    return {**make_window_step(batch), "parents": tree["parents"]}


def make_accept(batch: Batch) -> dict[str, Any]:
    """The last two of three tokens at position 3 are kept."""
    path = torch.tensor([[1, 2], [1, 2], [0, 0], [1, 2]])[: batch.N]
    x = make_restart(batch)
    return {**x, "positions": x["positions"] - 2, "path": path}


def with_window(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the tensors of a window as arguments of their own."""

    @functools.wraps(function)
    def call(**x: Any) -> Any:
        fields = ("u", "k", "g", "calls", "start", "tickets")
        parts = {name: x.pop(f"window.{name}") for name in fields if f"window.{name}" in x}
        return function(**{"window": gdn_triton.StepWindow(**parts, max_tokens=3), **x})

    return call


def make_layer_step(batch: Batch) -> dict[str, Any]:
    """One token for each of N sequences."""
    N, raw = batch.N, logits(batch)
    x = {"mixed_qkv": torch.randn(N, D), "A_log": raw["A_log"], "dt_bias": raw["dt_bias"]}
    a, b = torch.randn(2, N, HV)
    read_slots = torch.tensor([4, 1, -1, 2])[:N]
    pools = {"state": torch.randn(7, HV, K, V), "conv_state": torch.randn(7, D, W - 1)}
    conv = {"conv_weight": torch.randn(D, W), "conv_bias": torch.randn(D)}
    norm = {"gate": torch.randn(N, HV, V), "norm_weight": torch.randn(V)}
    return {**x, "a": a, "b": b, "read_slots": read_slots, **pools, **conv, **norm}


def make_window_layer_step(batch: Batch) -> dict[str, Any]:
    tickets = torch.zeros(7, H, dtype=torch.int32)
    return {**make_layer_step(batch), **window(batch), "window.tickets": tickets}


def make_layer_tokens(batch: Batch) -> dict[str, Any]:
    """Two tokens for each of N sequences, in one launch."""
    x, N = make_layer_step(batch), batch.N
    a, b = torch.randn(2, N, 2, HV)
    x |= {"mixed_qkv": torch.randn(N, 2, D), "a": a, "b": b, "gate": torch.randn(N, 2, HV, V)}
    x |= {"state": torch.randn(7, HV, V, K), "state_v_first": True}
    return {**x, "counters": torch.zeros(7, H, dtype=torch.int32)}


def make_window_layer_tokens(batch: Batch) -> dict[str, Any]:
    x = make_window_layer_step(batch) | make_layer_tokens(batch)
    del x["counters"]
    return x


def make_layer_drafts(batch: Batch) -> dict[str, Any]:
    """Two drafts of each sequence, after one or two accepted ones."""
    x, N = make_layer_tokens(batch), batch.N
    read_slots = torch.tensor([[4, 0], [1, 3], [-1, -1], [2, 5]])[:N]
    accepted = torch.tensor([2, 1, 1, 2])[:N]
    x |= {"read_slots": read_slots, "num_accepted_tokens": accepted}
    return {**x, "conv_state": torch.randn(7, D, W)}


def make_layer_tree(batch: Batch) -> dict[str, Any]:
    """Two nodes of each sequence."""
    x, N = make_layer_tokens(batch), batch.N
    x |= {"write_slots": torch.arange(5, 13).view(4, 2)[:N]}
    x |= {"parents": torch.tensor([[-1, 0], [-1, -1], [-1, 0], [-1, -1]])[:N]}
    x |= {name: x[name].repeat(2, *(1,) * (x[name].dim() - 1)) for name in ("state", "conv_state")}
    return {**x, "counters": x["counters"].repeat(2, 1)}


def make_layer_packed(batch: Batch) -> dict[str, Any]:
    """Sequences of at most two tokens, in one launch."""
    x = {"mixed_qkv": torch.randn(*batch.lead, D), **logits(batch), **batch.packed()}
    x |= {"state": torch.randn(7, HV, V, K), "state_v_first": True}
    x |= {"conv_state": torch.randn(7, D, W - 1), "conv_weight": torch.randn(D, W)}
    x |= {"gate": torch.randn(*batch.lead, HV, V), "norm_weight": torch.randn(V)}
    x |= {"read_slots": slots(batch)["read_slots"], "out": torch.zeros(*batch.lead, HV, V)}
    if batch.offsets is not None:
        x["max_tokens"] = 2
    return {**x, "counters": torch.zeros(7, H, dtype=torch.int32)}


def make_conv(batch: Batch) -> dict[str, Any]:
    x = {"x": torch.randn(*batch.lead, D), "weight": torch.randn(D, W), "bias": torch.randn(D)}
    return {**x, **batch.packed()}


def conv_states(batch: Batch) -> dict[str, Any]:
    state = torch.randn(7, D, W - 1)
    return {"state": state, **slots(batch), "has_initial_state": has_initial_state(batch)}


def make_pooled_conv(batch: Batch) -> dict[str, Any]:
    return {**make_conv(batch), **conv_states(batch)}


def make_accepted_update(batch: Batch) -> dict[str, Any]:
    x = {"state": torch.randn(7, D, W + 1), "read_slots": torch.tensor([4, 1, 3, 2])[: batch.N]}
    accepted = torch.tensor([2, 1, 0, 1])[: batch.N]
    return {**make_conv(batch), **x, "num_accepted_tokens": accepted}


def make_tree_update(batch: Batch) -> dict[str, Any]:
    x = {"state": torch.randn(8, D, W - 1), **make_conv(batch)}
    tree = make_tree_step(batch)
    return {**x, **{name: tree[name] for name in ("read_slots", "write_slots", "parents")}}


def make_prep(batch: Batch) -> dict[str, Any]:
    x = make_conv(batch)
    return {"mixed_qkv": x.pop("x"), **x, **logits(batch), **SIZES}


def make_pooled_prep(batch: Batch) -> dict[str, Any]:
    return {**make_prep(batch), **conv_states(batch)}


def make_post_conv(batch: Batch) -> dict[str, Any]:
    x = logits(batch)
    a, b = x.pop("a").flatten(0, 1), x.pop("b").flatten(0, 1)
    return {"conv_output": torch.randn(batch.B * batch.T, D), "a": a, "b": b, **x, **SIZES}


def make_norm(batch: Batch) -> dict[str, Any]:
    shape = (*batch.lead, HV, V)
    return {"x": torch.randn(shape), "gate": torch.randn(shape), "weight": torch.randn(V)}


@cache
def a_layer(device: torch.device) -> GatedDeltaNet:
    torch.manual_seed(0)
    options = {"head_dim": K, "expand_v": V / K, "num_heads": H, "num_v_heads": HV}
    return GatedDeltaNet(hidden_size=HIDDEN, **options, device=device)


def make_layer(batch: Batch) -> dict[str, Any]:
    x = torch.randn(*batch.lead, HIDDEN)
    mask = torch.ones(*batch.lead, dtype=torch.int64)
    mask[:1, :1] = 0
    return {"layer": a_layer(x.device), "hidden_states": x, "attention_mask": mask}


def make_cached_layer(batch: Batch) -> dict[str, Any]:
    x = torch.randn(*batch.lead, HIDDEN)
    pools = {
        "conv_state": torch.randn(7, D, W - 1),
        "recurrent_state": torch.randn(7, HV, V, K),
        "slots": torch.tensor([4, 1, -1, 2])[: batch.N],
    }
    packed = {**batch.packed(), **batch.on_host()}
    return {"layer": a_layer(x.device), "hidden_states": x, **pools, **packed}


def call_layer(layer: GatedDeltaNet, **x: Any) -> Tensor:
    """The states of a cache are arguments here."""
    if "recurrent_state" in x:
        cache = GatedDeltaNetCache(x.pop("conv_state"), x.pop("recurrent_state"))
        x.setdefault("cache", cache)
    return layer(**x)  # type: ignore[no-any-return]
