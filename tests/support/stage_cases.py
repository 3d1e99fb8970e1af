"""The four stages of a rank, by ranks that run one after another in one process, with what they
exchange put together here."""

from typing import Any

import pytest
import torch
from helpers import FP64, same_bits
from shard_cases import (
    Case,
    assert_near_whole,
    expect_shard,
    make_call,
    make_lasting_call,
    run_whole,
)
from torch import Tensor

from gdn_triton.distributed import (
    ContextParallel,
    backward_apply,
    backward_prepare,
    build_cp_context,
    forward_apply,
    forward_prepare,
)

TOKENS = ("q", "k", "v", "g", "beta")


def contexts(case: Case, device: str) -> list[ContextParallel]:
    offsets = torch.tensor(case.offsets, device=device)
    return [
        build_cp_context(
            offsets,
            None,
            lengths=case.shards,
            layout=case.layout,
            place=(rank, case.world),
        )
        for rank in range(case.world)
    ]


def local_inputs(case: Case, context: ContextParallel, x: dict[str, Tensor]) -> dict[str, Any]:
    local: dict[str, Any] = {
        name: context.shard(y) if name in TOKENS else y for name, y in x.items()
    }
    if case.with_state:
        local["initial_state"] = x["initial_state"][list(context.sequences)].clone()
        # The state of a sequence that began elsewhere is not read.
        for i in context.intervals:
            if i.before:
                local["initial_state"][i.first] = torch.nan
    return local


def run_stages(
    case: Case, x: dict[str, Tensor], do: Tensor, dht: Tensor
) -> list[dict[str, Tensor]]:
    """The results and gradients of every rank, by name."""
    ranks = contexts(case, str(do.device))
    inputs = [local_inputs(case, context, x) for context in ranks]
    begun = [
        forward_prepare(
            **local,
            cp_context=context,
            output_final_state=True,
            chunk_size=case.chunk_size,
            state_v_first=case.v_first,
            **case.options,
        )
        for context, local in zip(ranks, inputs, strict=True)
    ]
    gathered = torch.cat([summary for summary, _ in begun])
    applied = [forward_apply(local, gathered) for _, local in begun]
    back = []
    for context, (o, ht, saved) in zip(ranks, applied, strict=True):
        assert ht is not None
        mine = dht[list(context.sequences)].to(ht.dtype)
        for i in context.intervals:
            if i.after:  # the state at a cut is no result of the whole call
                mine[i.last] = 0
        back.append(backward_prepare(saved, context.shard(do).to(o.dtype), mine))
    gathered = torch.cat([summary for summary, _ in back])
    found = []
    for (o, ht, _), (_, local) in zip(applied, back, strict=True):
        gradients = backward_apply(local, gathered)
        named = {f"d{n}": y for n, y in gradients._asdict().items() if y is not None}
        found.append({"o": o, "ht": ht, **named})
    for name in ("dA_log", "ddt_bias"):
        if name in found[0]:
            total = torch.stack([y[name] for y in found]).sum(0)
            for y in found:
                y[name] = total
    return found


def check_stages(case: Case, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank's results against the same call on one device."""
    monkeypatch.setenv("GDN_BACKEND", case.backend)
    x, do, dht = (make_lasting_call if case.lasting else make_call)(case, device)
    got = run_stages(case, x, do, dht)
    again = run_stages(case, x, do, dht) if case.gpu else got
    narrow = exact = {n: y.detach() for n, y in run_whole(case, x, do, dht).items()}
    if case.dtype != FP64:
        monkeypatch.setenv("GDN_BACKEND", "reference")
        wide = {name: y.double() for name, y in x.items()}
        exact = {n: y.detach() for n, y in run_whole(case, wide, do, dht).items()}
    for rank, context in enumerate(contexts(case, device)):
        parts = [expect_shard(case, context, whole) for whole in (narrow, exact)]
        cut = {i.last for i in context.intervals if i.after}
        for name, y in got[rank].items():
            assert same_bits(y, again[rank][name]), f"{name} differs between two runs"
            expected_narrow, expected = (part[name] for part in parts)
            if name == "ht":
                ends = [n for n in range(len(y)) if n not in cut]
                y, expected_narrow, expected = y[ends], expected_narrow[ends], expected[ends]
            if case.dtype == FP64:
                torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
            else:
                assert_near_whole(case, name, y, expected, expected_narrow)
