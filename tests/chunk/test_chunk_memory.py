"""Memory; on a gpu: see test_chunk.py."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from chunk_cases import PACKED, PADDED, call_with_state, check
from helpers import (
    BF16,
    FP16,
    FP32,
    RUNS,
    Case,
    cases,
    make_inputs,
    same_bits,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gdn_triton.chunk.triton.forward import readable


@pytest.fixture(autouse=True)
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "triton")


# ------------------------------------------------------------------------------------------- memory


class Copies(TorchDispatchMode):
    """Notes every operation that copies from the storage of one of `tensors`."""

    COPYING = ("clone", "_to_copy", "copy_", "contiguous", "cat", "stack", "index", "mul", "add")

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = {x.untyped_storage().data_ptr() for x in tensors}
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        read = [y for y in (*args, *kwargs.values()) if isinstance(y, Tensor)]
        name = func.name().removeprefix("aten::").split(".")[0]
        storages = {y.untyped_storage().data_ptr() for y in read}
        # The interpreter writes every storage back to itself after a launch.
        to_itself = name == "copy_" and len(storages) == 1
        if name in self.COPYING and storages & self.storages and not to_itself:
            self.seen.append(name)
        return func(*args, **kwargs)


@pytest.mark.parametrize(("dataflow", "dtype"), RUNS, indirect=["dataflow"])
@pytest.mark.parametrize("case", cases([PADDED, PACKED]))
def test_views_are_read_where_they_lie(
    case: Case, dtype: torch.dtype, dataflow: str, device: str
) -> None:
    """q, k, v as a split of one projection; g, beta and the state strided in every dimension."""
    x = make_inputs(case, dtype, device)
    assert not any(y.is_contiguous() for y in (*x.tensors, x.initial_state))
    with Copies((*x.tensors, x.initial_state)) as copies:
        got = call_with_state(x, case)
    assert copies.seen == []
    dense = x.but(**{n: getattr(x, n).contiguous() for n in ("q", "k", "v", "g", "beta")})
    expected = call_with_state(dense, case)
    assert all(same_bits(a, b) for a, b in zip(expected, got, strict=True))


def test_copies_are_noticed(device: str) -> None:
    x = make_inputs(PADDED, FP32, device)
    with Copies(x.tensors) as copies:
        x.q.contiguous()
    assert copies.seen == ["clone"]


def test_views_of_other_orders(dataflow: str, device: str) -> None:
    """Heads before tokens, an expanded batch, rows that begin off a 16-byte line, and a last
    dimension that is strided, which has to be copied."""
    case = Case("orders", "", T=20, B=2, H=2, HV=4)
    x = make_inputs(case, FP16, device)
    expected = call_with_state(x, case)
    heads_first = {
        n: getattr(x, n).transpose(1, 2).contiguous().transpose(1, 2) for n in ("q", "k", "v")
    }
    columns = {n: getattr(x, n).mT.contiguous().mT for n in ("q", "k", "v")}
    shifted = {}
    for n in ("q", "k", "v"):
        y = getattr(x, n)
        wide = y.new_zeros(*y.shape[:3], y.shape[3] + 8)
        shifted[n] = wide[..., 1 : 1 + y.shape[3]].copy_(y)
    for views in (heads_first, columns, shifted):
        got = call_with_state(x.but(**views), case)
        assert all(same_bits(a, b) for a, b in zip(expected, got, strict=True))
    one = {n: getattr(x, n)[:1] for n in ("q", "k", "v", "g", "beta", "initial_state")}
    twice = {n: y.expand(2, *y.shape[1:]) for n, y in one.items()}
    got = call_with_state(x.but(**twice), case)
    for whole, part in zip(got, expected, strict=True):
        assert same_bits(whole[0], part[0]) and same_bits(whole[1], part[0])


@pytest.mark.gpu("the code that is compiled for such rows")
@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("moved", ["q", "k", "v"])
def test_rows_off_a_line(
    moved: str, K: int, dtype: torch.dtype, dataflow: str, device: str
) -> None:
    """q, k or v two bytes off a line of 16: the same bits as on it, each time."""
    case = Case("off", "", T=300, H=2, HV=4, K=K, V=K, chunk_size=64)
    x = make_inputs(case, dtype, device)
    x = x.but(**{n: getattr(x, n).contiguous() for n in ("q", "k", "v")})
    expected = call_with_state(x, case)
    y = getattr(x, moved)
    off = y.new_zeros(y.numel() + 1)[1:].view(y.shape).copy_(y)
    assert off.data_ptr() % 16 == 2
    for _ in range(5):
        got = call_with_state(x.but(**{moved: off}), case)
        assert all(same_bits(a, b) for a, b in zip(expected, got, strict=True))


def test_strided_parameters(dataflow: str, device: str) -> None:
    """A_log and dt_bias as columns of one tensor."""
    x = make_inputs(PADDED, FP16, device)
    both = torch.randn(PADDED.HV, 2, device=device)
    A_log, dt_bias = both.unbind(-1)
    assert not A_log.is_contiguous()
    got = call_with_state(x, PADDED, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias)
    A_log, dt_bias = A_log.contiguous(), dt_bias.contiguous()
    expected = call_with_state(x, PADDED, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias)
    assert all(same_bits(a, b) for a, b in zip(expected, got, strict=True))


def test_kernels_read_from_whole_lines() -> None:
    off = torch.arange(97, dtype=FP16)[1:].view(1, 2, 3, 16)
    assert off.data_ptr() % 16 == 2
    copy = readable(off)
    assert copy.data_ptr() % 16 == 0 and torch.equal(copy, off)
    later = copy[:, 1:]
    assert readable(copy) is copy and readable(later) is later


def test_autocast_changes_nothing(dataflow: str, device: str) -> None:
    x = make_inputs(PADDED, FP16, device)
    expected = call_with_state(x, PADDED)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = call_with_state(x, PADDED)
    assert all(same_bits(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.gpu("70,400 heads; without one, compile_targets.py checks the grids' sizes")
def test_more_heads_than_a_grid_dimension(dataflow: str, device: str) -> None:
    """B * HV past 65,535, the most that a grid's second and third dimensions take."""
    case = Case("heads", "", T=3, B=1100, HV=64, K=16, V=16)
    check(case, make_inputs(case, FP16, device), device)


@pytest.mark.gpu("70,000 sequences; without one, compile_targets.py checks the grids' sizes")
def test_more_sequences_than_a_grid_dimension(dataflow: str, device: str) -> None:
    case = Case("sequences", "", lengths=((0,) * 69 + (1,)) * 1000, HV=1, orphans=3)
    check(case, make_inputs(case, FP16, device), device)


# ---------------------------------------------------------------------------------------- on a GPU


@pytest.fixture
def loud_syncs() -> Iterator[None]:
    """Any wait of the host for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu("there is nothing to wait for on a CPU")
@pytest.mark.parametrize("name", ["padded", "packed", "all"])
def test_no_host_sync(name: str, dataflow: str, device: str, request: Any) -> None:
    case = PADDED if name == "padded" else PACKED
    x = make_inputs(case, BF16, device)
    options: dict[str, Any] = {}
    if name == "all":
        options = {
            "use_gate_in_kernel": True,
            "A_log": torch.zeros(case.HV, device=device),
            "dt_bias": torch.zeros(case.HV, device=device),
            "use_qk_l2norm_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "cu_seqlens_cpu": torch.tensor(case.offsets()),
        }
    # The first call compiles, and loads the kernels' code onto the device.
    call_with_state(x, case, **options)
    request.getfixturevalue("loud_syncs")
    call_with_state(x, case, **options)


@pytest.mark.gpu("CUDA graphs")
def test_graph_replay(dataflow: str, device: str) -> None:
    """Captured once; replayed after cu_seqlens and the inputs have changed in place."""
    first = Case(
        "graph", "", lengths=(100, 0, 64, 300, 1), orphans=20, H=2, HV=4, K=64, V=64, chunk_size=64
    )
    second = replace(first, lengths=(0, 250, 3, 200, 12))
    x = make_inputs(first, BF16, device)
    assert x.cu_seqlens is not None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call_with_state(x, first)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call_with_state(x, first)
    for case, seed in ((first, 0), (second, 0), (second, 1), (first, 2)):
        x.cu_seqlens.copy_(torch.tensor(case.offsets()))
        x.around[0].copy_(make_inputs(first, BF16, device, seed=seed).around[0])
        expected = call_with_state(x, case)
        for y in captured:
            y.fill_(torch.nan)
        graph.replay()
        for name, got, wanted in zip(("o", "final_state"), captured, expected, strict=True):
            assert same_bits(got, wanted), f"{name}, {case.lengths}, seed {seed}"


@pytest.mark.gpu("streams")
def test_runs_on_the_current_stream(dataflow: str, device: str) -> None:
    """Inputs that a side stream is still making are waited for by order alone."""
    case = Case("stream", "", T=500, H=4, HV=4, K=64, V=64, chunk_size=64)
    x = make_inputs(case, BF16, device)
    expected = call_with_state(x, case)
    late = torch.zeros_like(x.around[0])
    slices = {
        n: late.as_strided(y.shape, y.stride(), y.storage_offset())
        for n, y in (("q", x.q), ("k", x.k), ("v", x.v))
    }
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(x.around[0])
        got = call_with_state(x.but(**slices), case)
    stream.synchronize()
    assert all(same_bits(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.two_gpus("tensors on a device that is not the current one")
def test_second_gpu(dataflow: str) -> None:
    expected = call_with_state(make_inputs(PACKED, BF16, "cuda:0"), PACKED)
    with torch.cuda.device(0):
        got = call_with_state(make_inputs(PACKED, BF16, "cuda:1"), PACKED)
        assert torch.cuda.current_device() == 0
    for a, b in zip(expected, got, strict=True):
        assert b.device.index == 1
        assert same_bits(a.cpu(), b.cpu())
