"""The part of one rank by Triton's kernels, in one process that plays the part of the others: what
the rank sends and takes, for a sequence that began before it, goes on after it, or both."""

from typing import Any

import pytest
import torch
from far import far, far_strides
from helpers import BF16, FP16, FP32, same_bits
from shard_cases import (
    GATE,
    NORM,
    SIGMOID,
    Case,
    assert_near_whole,
    make_lasting_call,
    run_whole,
)
from torch import Tensor

from gdn_triton._ranks.layout import Interval, ShardLayout
from gdn_triton.chunk.problem import Inputs, Problem

ALONE = [
    Case("fp32", "one walk", (50,), dtype=FP32),
    Case("fp16", "one walk, fused", (50,), dtype=FP16),
    Case("walks", "the rank composes maps", (50,), dtype=FP16, pieces=True),
    Case("options", "all in the kernel", (20,), dtype=FP32, options=GATE | NORM | SIGMOID),
    *(
        Case(
            name,
            "real sizes",
            (T,),
            dtype=dtype,
            H=H,
            HV=HV,
            K=K,
            V=V,
            chunk_size=64,
            options=GATE | NORM | SIGMOID if name == "real-options" else {},
            pieces=pieces,
            gpu=True,
        )
        for name, T, dtype, H, HV, K, V, pieces in [
            # As many chunks as a call is cut at: several walks, of several chunks, by choice.
            ("real-bf16", 2085, BF16, 2, 4, 128, 128, False),
            ("real-fp32", 1100, FP32, 2, 4, 128, 128, False),
            ("real-fp32-walks", 1100, FP32, 2, 4, 128, 128, True),
            ("real-64", 1000, BF16, 4, 8, 64, 128, False),
            ("real-fp16", 1100, FP16, 2, 4, 128, 64, False),
            ("real-wide", 900, BF16, 1, 2, 256, 512, False),
            ("real-options", 1100, BF16, 2, 4, 128, 128, False),
        ]
    ),
]


def alone(cases: list[Case]) -> list[Any]:
    """As pytest parameters."""
    mark = pytest.mark.gpu("real sizes")
    return [pytest.param(case, id=case.name, marks=[mark] if case.gpu else []) for case in cases]


def run_alone(
    case: Case, x: dict[str, Tensor], do: Tensor, dht: Tensor, *, begun: bool, unfinished: bool
) -> dict[str, Tensor]:
    """The call as the part of one rank, with the others' part played here: they send the initial
    state where the sequence has `begun`, and dht where it is `unfinished`. Beside the results and
    gradients, what the maps that this rank sends make of those: the final state (`sent`) and the
    gradient of the initial state (`dsent`)."""
    from gdn_triton.chunk.sharded import triton as shard_triton

    T, state = case.tokens, x["initial_state"]
    before, after = (0,) * begun, (2,) * unfinished
    interval = Interval(1, 0, 0, before, after, T * begun)
    offsets = torch.tensor([0, T], dtype=torch.int32, device=do.device)
    layout = ShardLayout(None, offsets, (0, T), (interval,), (T, T, T), (0, 1, 2), True)
    # Where it comes from another rank, that in the arguments is not read.
    mine = x | {"initial_state": torch.full_like(state, torch.nan)} if begun else x
    inputs = Inputs(**{name: mine.get(name) for name in Inputs._fields})
    problem = Problem(
        B=1,
        T=T,
        H=case.H,
        HV=case.HV,
        K=case.K,
        V=case.V,
        N=1,
        q_dtype=case.dtype,
        k_dtype=case.dtype,
        v_dtype=case.dtype,
        device=do.device,
        scale=case.K**-0.5,
        chunk_size=case.chunk_size,
        is_varlen=True,
        has_initial_state=True,
        output_final_state=True,
        state_v_first=False,
        use_qk_l2norm=bool(case.options.keys() & NORM),
        use_beta_sigmoid=bool(case.options.keys() & SIGMOID),
        allow_neg_eigval=bool(case.options.keys() & SIGMOID),
        use_gate=bool(case.options.keys() & GATE),
        needs_grad=True,
    )
    summary, local = shard_triton.forward_prepare(problem, layout, inputs)
    coming = [state[0].mT if begun else None]
    o, ht, kept = shard_triton.forward_apply(problem, layout, inputs, local, lambda: coming)
    back, local = shard_triton.backward_prepare(
        problem, layout, inputs, kept, do, torch.zeros_like(dht) if unfinished else dht
    )
    needed = {name: y is not None for name, y in inputs._asdict().items()}
    coming_back = [dht[0].mT if unfinished else None]
    grads = shard_triton.backward_apply(
        problem, layout, inputs, kept, local, needed, lambda: coming_back
    )
    found = {f"d{n}": y for n, y in zip(Inputs._fields, grads, strict=True) if y is not None}
    (b, M), (c, M_back) = (x[0].mT.double().split([case.V, case.K], -1) for x in (summary, back))
    if unfinished:
        found["sent"] = (b + M @ state.double()).to(ht.dtype)
    if begun:
        found["dsent"] = (c + M_back.mT @ dht.double()).to(dht.dtype)
        assert not found.pop("dinitial_state").any()
    return {"o": o, "ht": ht, **found}


def check_alone(
    case: Case, device: str, monkeypatch: pytest.MonkeyPatch, *, begun: bool, unfinished: bool
) -> None:
    """One rank's part against the same tokens in one call on one device."""
    from gdn_triton.chunk.triton import forward as chunk_fwd

    x, do, dht = make_lasting_call(case, device)
    monkeypatch.setenv("GDN_BACKEND", "triton")
    narrow = run_whole(case, x, do, dht)
    monkeypatch.setenv("GDN_BACKEND", "reference")
    exact = run_whole(case, {name: y.double() for name, y in x.items()}, do, dht)
    for whole in (narrow, exact):
        whole |= {"sent": whole["ht"], "dsent": whole["dinitial_state"]}
        whole |= {name: y.detach() for name, y in whole.items()}
    if case.pieces:
        monkeypatch.setattr(chunk_fwd, "choose_segments", lambda problem: 1)
    got = run_alone(case, x, do, dht, begun=begun, unfinished=unfinished)
    again = got
    if case.gpu or case.name == "fp16":
        again = run_alone(case, x, do, dht, begun=begun, unfinished=unfinished)
    for name, y in got.items():
        assert same_bits(y, again[name]), f"{name} differs between two runs"
        assert_near_whole(case, name, y, exact[name], narrow[name])


@pytest.mark.parametrize("case", alone(ALONE))
def test_middle_rank_alone(case: Case, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_alone(case, device, monkeypatch, begun=True, unfinished=True)


@pytest.mark.parametrize("begun", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("case", alone([case for case in ALONE if case.pieces or case.gpu]))
def test_outer_rank_alone(
    case: Case, begun: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_alone(case, device, monkeypatch, begun=begun, unfinished=not begun)


@pytest.mark.skipif(torch.cuda.is_available(), reason="only a CPU lends memory never touched")
@pytest.mark.parametrize("case", [case for case in ALONE if not case.gpu], ids=lambda c: c.name)
def test_far_operands(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements 2^31 apart, in each dimension in turn, give the bits of dense ones."""
    from gdn_triton.chunk.triton import forward as chunk_fwd

    if case.pieces:
        monkeypatch.setattr(chunk_fwd, "choose_segments", lambda problem: 1)
    x, do, dht = make_lasting_call(case, "cpu")
    given = {**x, "do": do, "dht": dht}

    def run(y: dict[str, Tensor]) -> dict[str, Tensor]:
        inputs = {n: z for n, z in y.items() if n not in ("do", "dht")}
        return run_alone(case, inputs, y["do"], y["dht"], begun=False, unfinished=True)

    dense = run(given)
    places = {name: list(far_strides(y)) for name, y in given.items()}
    for i in range(max(map(len, places.values()))):
        turn = {name: some[i % len(some)] for name, some in places.items() if some}
        got = run(given | {name: far(given[name], *place) for name, place in turn.items()})
        wrong = [name for name, y in dense.items() if not same_bits(y, got[name])]
        assert not wrong, f"{wrong} differ where (dimension, stride) are {turn}"
