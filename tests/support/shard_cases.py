"""Helpers that the tests of calls that are split over ranks share: a case, its tensors, and the
call on one rank."""

import itertools
import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from helpers import FP32, FP64, TRANSCENDENTALS, assert_within_budget
from torch import Tensor

from gdn_triton import chunk_gated_delta_rule
from gdn_triton.distributed import ContextParallel

GATE = {"use_gate_in_kernel": True}
NORM = {"use_qk_l2norm_in_kernel": True}
SIGMOID = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}


@dataclass(frozen=True)
class Case:
    """One call. sequences: their lengths. shards: tokens of each slot; None: even. like_fla: by a
    context that has FLA's attributes only. inner: the states at the cuts get gradients too. pieces:
    cut every local sequence into walks of one chunk. lasting: as `make_lasting_call`."""

    name: str
    why: str
    sequences: tuple[int, ...]
    world: int = 2
    shards: tuple[int, ...] | None = None
    layout: str = "contiguous"
    like_fla: bool = False
    dtype: torch.dtype = FP64
    backend: str = "reference"
    H: int = 1
    HV: int = 2
    K: int = 8
    V: int = 12
    chunk_size: int = 16
    options: dict[str, Any] = field(default_factory=dict)
    v_first: bool = False
    with_state: bool = True
    inner: bool = False
    pieces: bool = False
    orphans: int = 0
    lasting: bool = False
    gpu: bool = False

    @property
    def offsets(self) -> list[int]:
        return [0, *itertools.accumulate(self.sequences)]

    @property
    def tokens(self) -> int:
        return sum(self.sequences) + self.orphans


def make_call(case: Case, device: str) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """All tensors of the whole call, and the gradients of o and of the final states."""
    generator = torch.Generator().manual_seed(sum(map(ord, case.name)))
    T, H, HV, K, V, N = case.tokens, case.H, case.HV, case.K, case.V, len(case.sequences)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=FP64)

    raw_gate = "use_gate_in_kernel" in case.options
    k = normal(1, T, H, K)
    beta = normal(1, T, HV)
    x = {
        "q": normal(1, T, H, K),
        "k": k if case.options.keys() & NORM else torch.nn.functional.normalize(k, dim=-1),
        "v": normal(1, T, HV, V),
        "g": normal(1, T, HV) if raw_gate else -(10 ** (-3 * normal(1, T, HV).sigmoid())),
        "beta": beta if case.options.keys() & SIGMOID else beta.sigmoid(),
    }
    x = {name: y.to(device, case.dtype) for name, y in x.items()}
    state = (N, HV, V, K) if case.v_first else (N, HV, K, V)
    wide = FP64 if case.dtype == FP64 or case.name == "mixed" else FP32
    if case.with_state:
        x["initial_state"] = normal(*state).to(device, wide)
    if raw_gate:
        x["A_log"] = (normal(HV) / 4).to(device, wide)
        x["dt_bias"] = normal(HV).to(device, wide)
    out = FP64 if case.dtype == FP64 else FP32
    return x, normal(1, T, HV, V).to(device, case.dtype), normal(*state).to(device, out)


def make_lasting_call(case: Case, device: str) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """As `make_call`, but the state that comes in is still present after the last token, so an
    error in the map that it takes is no smaller than one in the tokens' part."""
    x, do, dht = make_call(case, device)
    if "dt_bias" in x:
        x["dt_bias"] -= math.log(case.tokens)
    else:
        x["g"] *= 10 / case.tokens
    if case.options.keys() & SIGMOID:
        x["beta"] -= math.log(case.tokens / case.K)
    else:
        x["beta"] *= case.K / case.tokens
    return x, do, dht


def like_fla(context: ContextParallel) -> SimpleNamespace:
    """The context that FLA 0.6.0 would have made of the same arguments, for even shards without
    empty sequences, counted from one rank's tokens."""
    kernel = context.conv1d_kernel_size
    both = {
        "group": context.group,
        "cu_seqlens": context.cu_seqlens,
        "cu_seqlens_cpu": context.cu_seqlens_cpu,
        "conv1d_kernel_size": kernel,
        "layout": context.layout,
    }
    slots = context.intervals
    numbers = [(len(i.before), len(i.after), not i.before, not i.after, i.history) for i in slots]
    names = ("pre_num_ranks", "post_num_ranks", "is_first", "is_last", "pre_num_conv_tokens")
    columns = dict(zip(names, zip(*numbers, strict=True), strict=True))
    if context.layout == "zigzag":
        by_part = {f"{name}_by_part": column for name, column in columns.items()}
        first = slots[0].last - slots[0].first + 1
        part = {"part_len": context.lengths[0], "front_num_seqs": first}
        return SimpleNamespace(**both, **by_part, **part)
    return SimpleNamespace(**both, **{name: column[0] for name, column in columns.items()})


def leaves(x: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: y.detach().clone().requires_grad_() for name, y in x.items()}


def run_whole(case: Case, x: dict[str, Tensor], do: Tensor, dht: Tensor) -> dict[str, Tensor]:
    """The call on one rank: its results and gradients by name."""
    x = leaves(x)
    offsets = torch.tensor(case.offsets, device=do.device)
    o, ht = chunk_gated_delta_rule(
        **x,
        cu_seqlens=offsets,
        output_final_state=True,
        chunk_size=case.chunk_size,
        state_v_first=case.v_first,
        **case.options,
    )
    grads = torch.autograd.grad([o, ht], list(x.values()), [do.to(o.dtype), dht.to(ht.dtype)])
    return {"o": o, "ht": ht, **{f"d{name}": y for name, y in zip(x, grads, strict=True)}}


def expect_shard(
    case: Case, context: ContextParallel, whole: dict[str, Tensor]
) -> dict[str, Tensor]:
    """This rank's part of the results of the whole call."""
    rows = list(context.sequences)
    part = {}
    for name, y in whole.items():
        if name in ("ht", "dinitial_state"):
            part[name] = y[rows].clone()
        else:
            part[name] = y if name in ("dA_log", "ddt_bias") else context.shard(y)
    for i in context.intervals:
        if i.before and "dinitial_state" in part:
            part["dinitial_state"][i.first] = 0
    return part


def assert_near_whole(case: Case, name: str, y: Tensor, exact: Tensor, narrow: Tensor) -> None:
    """y as near to `exact` as the whole call on one rank, `narrow`."""
    unit = torch.finfo(case.dtype).eps / 2
    if name in ("dA_log", "ddt_bias"):
        # A few sums over all tokens, of either sign: as many roundings in a row.
        unit *= case.tokens**0.5
    # In narrower dtypes the unit of the arguments is larger than these errors.
    if case.backend == "triton" and case.dtype == FP32:
        unit += TRANSCENDENTALS
    assert_within_budget(name, y, exact.double(), narrow, dtype=narrow.dtype, unit=unit)
