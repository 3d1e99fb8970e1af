"""Streams, threads, devices and CUDA graphs: a replay with other lengths, sequences in another
order, and kernels of one call beside those of others."""

import itertools
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from fast_cases import DTYPES, OPTIONS, PADDED, RAGGED, SEGMENTS, WHOLE, fast_case, gpu, same, sized
from fast_parity import check_parity, run
from helpers import BF16, Case, make_inputs, same_bits
from parity_calls import Options, make_call
from torch import Tensor

from gdn_triton import fast


@pytest.fixture
def loud_syncs() -> Iterator[None]:
    """Any wait of the host for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@gpu
@pytest.mark.parametrize("case", [PADDED, RAGGED], ids=lambda case: case.name)
def test_no_host_sync(case: Case, cuda: str, request: Any) -> None:
    call = make_call(case, BF16, cuda, OPTIONS["all"])
    run("cuda", call)
    request.getfixturevalue("loud_syncs")
    run("cuda", call)


@gpu
def test_current_stream(cuda: str) -> None:
    """A kernel on another stream would read q before it is there."""
    call = make_call(RAGGED, BF16, cuda, Options())
    expected = run("cuda", call)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        late = torch.full_like(call.x.q, torch.nan)
        torch.cuda._sleep(100_000_000)
        late.copy_(call.x.q)
        got = run("cuda", call._replace(x=call.x.but(q=late)))
    side.synchronize()
    assert same(expected, got)


@gpu
def test_thread_without_a_context(cuda: str) -> None:
    """A thread's first call, with memory from torch's cache, so that nothing before has made the
    device's context current there; autograd's threads are such."""
    call = make_call(RAGGED, BF16, cuda, Options())
    expected = run("cuda", call)
    run("cuda", call)  # leaves memory of every size in the cache
    torch.cuda.synchronize()
    found: list[tuple[Tensor, Tensor]] = []
    thread = threading.Thread(target=lambda: found.append(run("cuda", call)))
    thread.start()
    thread.join()
    assert found and same(expected, found[0])


@gpu
@DTYPES
def test_graph_replay(dtype: torch.dtype, cuda: str) -> None:
    """Captured once; replayed after cu_seqlens and the inputs have changed in place."""
    first = fast_case("graph", "", lengths=(100, 0, 64, 300, 1), orphans=20)
    second = replace(first, lengths=(0, 250, 3, 200, 12))
    third = replace(first, lengths=(0, 0, 0, 0, 485), orphans=0)
    check_replay(first, (first, second, second, third, first), dtype, cuda)


@gpu
@DTYPES
@pytest.mark.parametrize("size", [(128, 128), *WHOLE], ids=lambda size: "K{}-V{}".format(*size))
def test_graph_replay_of_segments(size: tuple[int, int], dtype: torch.dtype, cuda: str) -> None:
    first = sized(SEGMENTS, *size)
    second = replace(first, lengths=(0, 15000, 0))
    third = replace(first, lengths=(65, 600, 14163), orphans=242)
    check_replay(first, (first, second, third, first), dtype, cuda)


def draw_lengths(rng: random.Random, parts: int, tokens: int) -> tuple[int, ...]:
    """`parts` lengths of at most `tokens` together, some of them 0 and often one most of them."""

    def weight() -> float:
        return rng.choice((0.0, rng.random(), rng.random(), 30 * rng.random()))

    weights = [weight() for _ in range(parts)]
    whole = sum(weights) or 1.0
    return tuple(int(tokens * x / whole) for x in weights)


@gpu
@DTYPES
@pytest.mark.parametrize("size", [(128, 128), (64, 64), (96, 192), (256, 512)], ids=str)
def test_graph_replay_of_many_tiles(
    size: tuple[int, int], dtype: torch.dtype, cuda: str, batch_invariant: None
) -> None:
    """More tiles than multiprocessors, which go to blocks by the lengths: those of each replay, not
    those of the capture."""
    rng, tokens, parts = random.Random(7), 3000, 9
    first = sized(fast_case("tiles", "", lengths=(tokens // parts,) * parts, H=8, HV=16), *size)
    orphans = tokens - sum(first.lengths or ())
    cases = [replace(first, orphans=orphans)]
    for _ in range(12):
        lengths = draw_lengths(rng, parts, tokens)
        cases.append(replace(first, lengths=lengths, orphans=tokens - sum(lengths)))
    check_replay(cases[0], tuple(cases), dtype, cuda)


@gpu
@pytest.mark.parametrize("parts", [57, 1024, 1025, 3000])
def test_order_of_sequences(parts: int, cuda: str) -> None:
    """Given in another order, each sequence has the same bits, up to the number of sequences that
    blocks take by their lengths and beyond."""
    rng = random.Random(parts)
    lengths = [rng.choice((0, 1, 5, 64, 65, rng.randrange(200))) for _ in range(parts)]
    case = fast_case("order", "", lengths=tuple(lengths), orphans=5, H=2, HV=4)
    call = make_call(case, BF16, cuda, Options())
    order = sorted(range(parts), key=lambda n: lengths[n])
    starts = [0, *itertools.accumulate(lengths)]
    tokens = [t for n in order for t in range(starts[n], starts[n + 1])]
    rows = torch.tensor([*tokens, *range(starts[-1], case.tokens)], device=cuda)
    x = call.x
    moved = {n: getattr(x, n)[:, rows] for n in ("q", "k", "v", "g", "beta")}
    bounds = torch.tensor([0, *itertools.accumulate(lengths[n] for n in order)], device=cuda)
    sorted_x = x.but(**moved, initial_state=x.initial_state[order], cu_seqlens=bounds.int())
    o, state = run("cuda", call)
    sorted_o, sorted_state = run("cuda", call._replace(x=sorted_x))
    assert same_bits(o[:, rows], sorted_o) and same_bits(state[order], sorted_state)


@gpu
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("size", [(128, 128), *WHOLE], ids=lambda size: "K{}-V{}".format(*size))
def test_kernels_before_and_after(size: tuple[int, int], captured: bool, cuda: str) -> None:
    """Kernels of a call in segments run beside each other: none before its inputs are written, or
    after the call is over."""
    call = make_call(sized(SEGMENTS, *size), BF16, cuda, Options())
    expected = run("cuda", call)
    given = [x.clone() for x in call.x.tensors]
    o, state = (torch.empty_like(x) for x in expected)

    def calls() -> None:
        for _ in range(10):
            for x, values in zip(call.x.tensors, given, strict=True):
                x.copy_(values)
            found = run("cuda", call)
            for x in call.x.tensors:
                x.fill_(torch.nan)
            o.copy_(found[0])
            state.copy_(found[1])

    calls()
    if captured:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()
        o.fill_(torch.nan)
        graph.replay()
    assert same(expected, (o, state))


def check_replay(first: Case, cases: tuple[Case, ...], dtype: torch.dtype, cuda: str) -> None:
    call = make_call(first, dtype, cuda, OPTIONS["layer"])
    assert call.x.cu_seqlens is not None
    run("cuda", call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run("cuda", call)
    for seed, case in enumerate(cases):
        assert case.tokens == first.tokens
        call.x.cu_seqlens.copy_(torch.tensor(case.offsets()))
        call.x.around[0].copy_(make_inputs(first, dtype, cuda, seed=seed, raw=True).around[0])
        expected = run("cuda", call._replace(case=case))
        for y in captured:
            y.fill_(torch.nan)
        graph.replay()
        assert same(expected, captured), case.lengths
        check_parity(call._replace(case=case), ("cuda",))


@gpu
@pytest.mark.two_gpus("a tensor on a device that is not the current one")
def test_another_device(cuda: str) -> None:
    call = make_call(RAGGED, BF16, "cuda:0", Options())
    expected = run("cuda", call)
    if fast.why_not_on(1) is not None:
        pytest.skip(str(fast.why_not_on(1)))
    o, state = run("cuda", call.to("cuda:1"))
    assert o.device.index == state.device.index == 1 and torch.cuda.current_device() == 0
    assert same(expected, (o.to("cuda:0"), state.to("cuda:0")))
