"""Compilers, cuda graphs: see test_prefill.py."""

from typing import Any

import pytest
import torch
from helpers import (
    BF16,
    FP32,
    same_bits,
)
from prefill_cases import KEPT, SENTINEL, arguments, ask_for, validated
from torch import Tensor

import gdn_triton
from gdn_triton import chunk_prefill
from gdn_triton._host.environment import invariant_calls
from gdn_triton.chunk.prefill import run as prefill_run
from gdn_triton.chunk.prefill.validation import validate_prefill

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels, wherever a test does not choose."""
    monkeypatch.setenv("GDN_BACKEND", "triton")


# -------------------------------------------------------------------------- compilers, CUDA graphs


@pytest.mark.parametrize("kept_in", ["none", "new", "rows", "pool"])
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled(kept_in: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        monkeypatch.setenv("GDN_BACKEND", "reference")
    more: dict[str, Any] = {} if kept_in == "none" else dict(KEPT)
    if kept_in == "rows":
        more["state_checkpoints"] = torch.full((4, 2, 16, 16), SENTINEL, device=device)
    if kept_in == "pool":
        table = torch.tensor([[-1, -1], [3, -1], [4, 5]], device=device)
        more["checkpoint_slots"] = table

    def function(x: dict[str, Any], more: dict[str, Any]) -> Any:
        q = x["q"] * 1
        o, checkpoints = chunk_prefill(**{**x, "q": q}, **more)
        return o + 1, checkpoints, x["state"].sum()

    x = arguments(device)
    if kept_in != "none":
        x["out"] = torch.empty_like(x["v"])
    y = {name: given.clone() for name, given in x.items()}
    more_y = {name: z.clone() if isinstance(z, Tensor) else z for name, z in more.items()}
    eager = function(x, more)
    traced = torch.compile(function, fullgraph=True, backend="aot_eager")(y, more_y)
    assert torch.equal(eager[0], traced[0]) and torch.equal(eager[2], traced[2])
    assert same_bits(x["state"], y["state"])
    assert (eager[1] is None) == (traced[1] is None)
    if kept_in == "new":
        # Rows of no checkpoint hold anything.
        assert same_bits(eager[1][[0, 1, 2]], traced[1][[0, 1, 2]])
    if kept_in == "rows":
        assert same_bits(eager[1], traced[1]) and same_bits(eager[1], more_y["state_checkpoints"])
    if "out" in x:
        assert same_bits(x["out"], y["out"])


@pytest.mark.parametrize("by", ["trace", "caller"])
@pytest.mark.usefixtures("fresh_compiler")
def test_batch_invariance_is_passed_on(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is asked for in what is traced, and where it is by the caller of that, who may ask
    for it at one call and not at the next one."""
    monkeypatch.setenv("GDN_BACKEND", "reference")
    found = []

    def noted(x: Any) -> Any:
        problem = validate_prefill(x)
        found.append(problem.batch_invariant)
        return problem

    def function(asked: bool, x: dict[str, Any]) -> Any:
        with invariant_calls(asked):
            return chunk_prefill(**x)

    monkeypatch.setattr(prefill_run, "validate_prefill", noted)
    call = chunk_prefill if by == "caller" else function
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for asked in (False, True, False, True):
        if by == "trace":
            compiled(asked, arguments())
        else:
            with invariant_calls(asked):
                compiled(**arguments())
    assert found == [False, True, False, True]


@pytest.mark.usefixtures("fresh_compiler")
def test_offsets_on_the_host_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their contents, at each call of what was compiled once."""
    monkeypatch.setenv("GDN_BACKEND", "reference")
    found, graphs = [], []

    def noted(x: Any) -> Any:
        problem = validate_prefill(x)
        found.append(problem.longest)
        return problem

    def compiler(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    monkeypatch.setattr(prefill_run, "validate_prefill", noted)
    compiled = torch.compile(chunk_prefill, fullgraph=True, backend=compiler)
    for offsets in ([0, 30, 60, 64], [0, 1, 2, 64]):
        told = {name: torch.tensor(offsets) for name in ("cu_seqlens", "cu_seqlens_cpu")}
        compiled(**{**arguments(), **told})
    assert found == [(30, 30, 4), (62, 1, 1)]
    assert len(graphs) == 1


@pytest.mark.usefixtures("fresh_compiler")
def test_errors_while_tracing() -> None:
    x = arguments()
    x["read_slots"] = x["read_slots"][:2]
    with pytest.raises(Exception, match=r"read_slots must have shape \[N=3\]"):
        torch.compile(chunk_prefill, fullgraph=True, backend="eager")(**x)


def test_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schema, fake and mutations, as torch's own checker sees them."""
    operator = torch.ops.gdn_triton.chunk_prefill.default
    names = [argument.name for argument in operator._schema.arguments]
    monkeypatch.setenv("GDN_BACKEND", "reference")
    for more in ({}, {"out": torch.empty(1, 64, 2, 16), **KEPT}):
        given = validated({**arguments(), **more, "batch_invariant": False})
        tests = ("test_schema", "test_faketensor")
        call = tuple(given[name] for name in names)
        torch.library.opcheck(operator, call, test_utils=tests)


@pytest.mark.gpu("CUDA graphs")
@pytest.mark.parametrize("name,dtype", [("triton", FP32), ("triton", BF16), ("cuda", BF16)])
def test_cuda_graph(
    name: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots, flags, offsets and the table of checkpoints change in place between replays."""
    ask_for(name, monkeypatch)
    T, N, HV, K = 700, 4, 2, 64
    q, k = torch.nn.functional.normalize(torch.randn(2, 1, T, 1, K, device=device), dim=-1)
    v = torch.randn(1, T, HV, K, device=device)
    q, k, v = (y.to(dtype) for y in (q, k, v))
    g, beta = -torch.rand(1, T, HV, device=device), torch.rand(1, T, HV, device=device)
    start = torch.randn(16, HV, K, K, device=device)
    state, out = start.clone(), torch.empty_like(v)
    batches = [
        ([0, 100, 100, 400, 650], [0, 1, 2, 3], [4, 5, -1, 7], [True, False, True, True]),
        ([0, 0, 64, 65, 700], [9, -1, 3, 2], [9, 8, 10, 2], [True, True, False, True]),
    ]
    tables = [torch.full((N, 5), -1, device=device) for _ in range(2)]
    tables[0][2], tables[1][3, :3] = torch.arange(11, 16), torch.arange(11, 14)

    def inputs(batch: int) -> list[Tensor]:
        offsets, read, write, started = batches[batch]
        return [*(torch.tensor(y, device=device) for y in (offsets, read, write, started))]

    offsets, read, write, started = inputs(0)
    table = tables[0].clone()

    def call() -> None:
        chunk_prefill(
            state,
            read,
            write,
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            has_initial_state=started,
            cu_seqlens=offsets,
            out=out,
            checkpoint_every_n_tokens=128,
            checkpoint_slots=table,
        )

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for batch in (1, 0):
        for now, then in zip((offsets, read, write, started), inputs(batch), strict=True):
            now.copy_(then)
        table.copy_(tables[batch])
        state.copy_(start)
        out.fill_(torch.nan)
        graph.replay()
        replayed_state, replayed_out = state.clone(), out.clone()
        state.copy_(start)
        call()
        assert same_bits(replayed_state, state) and same_bits(replayed_out, out)
        assert out.isfinite().all() and not same_bits(state, start)


@pytest.mark.gpu("a wait for the device has to be one")
@pytest.mark.parametrize("name", ["triton", "cuda"])
def test_no_wait_for_the_device(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ask_for(name, monkeypatch)
    x = arguments(device, dtype=BF16)
    more: dict[str, Any] = {"checkpoint_every_n_tokens": 64}
    more["has_initial_state"] = torch.ones(3, dtype=torch.bool, device=device)
    chunk_prefill(**x, **more)
    torch.cuda.set_sync_debug_mode("error")
    try:
        chunk_prefill(**x, **more)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_public() -> None:
    assert gdn_triton.chunk_prefill is chunk_prefill
