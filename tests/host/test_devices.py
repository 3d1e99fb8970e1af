"""GPUs that differ in one process: every call goes by the one that its tensors are on."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from helpers import BF16, FP16, FP32, Case, make_inputs, same_bits

import gdn_triton
from gdn_triton._triton import tiles
from gdn_triton._triton.tiles import Gpu, gpu_of
from gdn_triton.chunk.triton import forward as chunk_fwd
from gdn_triton.chunk.triton.fused import walk
from gdn_triton.chunk.triton.gradients import pairs as pair_gradients
from gdn_triton.chunk.triton.gradients import state as state_gradients
from gdn_triton.chunk.triton.steps import output, state

LARGE, SMALL, TINY = Gpu("cuda", 90, 132), Gpu("cuda", 86, 16), Gpu("cuda", 86, 1)


class TwoGpus:
    """The properties that torch and Triton report for cuda:0 and cuda:1, and the current device."""

    GPUS = (LARGE, SMALL)

    def __init__(self) -> None:
        self.current = 0

    def on_device(self, device: torch.device) -> "TwoGpus":
        self.chosen = device.index
        return self

    def __enter__(self) -> None:
        self.before, self.current = self.current, self.chosen

    def __exit__(self, *error: object) -> None:
        self.current = self.before

    def get_current_target(self) -> Any:
        return SimpleNamespace(backend="cuda", arch=self.GPUS[self.current].arch)

    def get_device_properties(self, device: torch.device) -> Any:
        return SimpleNamespace(multi_processor_count=self.GPUS[device.index].multiprocessors)


@pytest.mark.of_no_device
def test_each_device_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is the current one, and whichever was asked first."""
    for order in ((0, 1), (1, 0)):
        two = TwoGpus()
        monkeypatch.setattr(tiles, "_gpus", {})
        monkeypatch.setattr(tiles, "compiler", lambda: "cuda")
        monkeypatch.setattr(tiles, "on_device", two.on_device)
        monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=two))
        monkeypatch.setattr(torch.cuda, "get_device_properties", two.get_device_properties)
        for current in (0, 1):
            two.current = current
            for index in order:
                assert gpu_of(torch.device("cuda", index)) == TwoGpus.GPUS[index]
            assert two.current == current


@pytest.mark.of_no_device
def test_tiles_fit_each_gpu() -> None:
    """The operands in flight of every table fit the GPU's shared memory, and programs are narrower
    on a GPU with more multiprocessors."""
    assert (LARGE.shared_memory, SMALL.shared_memory) == (227 * 1024, 99 * 1024)
    assert Gpu("hip", "gfx942", 304).shared_memory == 64 * 1024
    stage, other = (128 * 128 + 8192 + 64 * 64) * 2, (128 + 192) * 64 * 2
    for gpu in (LARGE, SMALL):
        tile = tiles.fused_config(gpu, 128, 128, 1000, False)
        assert tile.BV == 64 and tile.num_stages * stage + other <= gpu.shared_memory
    large, small = (tiles.fused_config(gpu, 128, 128, 32, False) for gpu in (LARGE, SMALL))
    assert (large.BV, small.BV) == (32, 64)
    large, small = (tiles.state_config(gpu, 128, 128, BF16, 16) for gpu in (LARGE, SMALL))
    assert (large.BV, small.BV) == (16, 64)
    assert tiles.state_bwd_config(LARGE, 128, 128, BF16, 32)[1] is None
    assert tiles.state_bwd_config(SMALL, 128, 128, BF16, 32)[1] is not None
    sizes = {"N": 1, "HV": 8, "K": 128, "V": 128, "BT": 64}
    assert tiles.segment_chunks(LARGE, 32768, **sizes) == 64
    assert tiles.segment_chunks(SMALL, 32768, **sizes) == 0


def noted(monkeypatch: pytest.MonkeyPatch) -> list[Gpu]:
    """The GPUs that the tables are asked for, from now on."""
    asked: list[Gpu] = []

    def noting(table: Callable[..., Any]) -> Callable[..., Any]:
        return lambda gpu, *rest, **options: asked.append(gpu) or table(gpu, *rest, **options)

    for module, name in (
        (chunk_fwd, "segment_chunks"),
        (walk, "fused_config"),
        (state, "state_config"),
        (output, "output_config"),
        (state_gradients, "state_bwd_config"),
        (pair_gradients, "pairs_bwd_config"),
    ):
        monkeypatch.setattr(module, name, noting(getattr(module, name)))
    return asked


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=["fp16", "fp32"])
def test_calls_go_by_the_device_of_their_tensors(
    dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward on a device that is one GPU, then another: none of what the first call
    found is taken for the second."""
    monkeypatch.setenv("GDN_BACKEND", "triton")
    asked, chosen = noted(monkeypatch), []
    launch = walk.fused_launch
    monkeypatch.setattr(
        walk, "fused_launch", lambda tile, *rest: chosen.append(tile) or launch(tile, *rest)
    )
    case = Case("two", "", T=40, H=1, HV=2, K=16, V=64)
    x = make_inputs(case, dtype, device)
    q, *rest = x.tensors
    for gpu in (LARGE, TINY, LARGE):
        monkeypatch.setitem(tiles._gpus, q.device, gpu)
        leaf = q.detach().clone().requires_grad_()
        o, _ = gdn_triton.chunk_gated_delta_rule(leaf, *rest, chunk_size=case.chunk_size)
        o.sum().backward()
        assert set(asked) == {gpu}
        asked.clear()
    if dtype == FP16:  # narrow programs, of which there are more, where there is room for them
        assert [tile.BV for tile in chosen] == [16, 64, 16]


@pytest.mark.two_gpus("the devices of the tensors and the current one")
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_on_the_second_gpu(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward on each of two GPUs, whichever is the current one: by the limits of its
    own, and to the same bits where the two are alike."""
    if backend == "cuda":
        from gdn_triton import fast

        for index in (0, 1):
            refusal = fast.why_unavailable() or fast.why_not_on(index)
            if refusal is not None:
                pytest.skip(refusal)
    monkeypatch.setenv("GDN_BACKEND", backend)
    case = Case("two", "", T=5000, H=2, HV=4, K=128, V=128, chunk_size=64, spare=8)
    x = make_inputs(case, BF16, "cuda:0")
    results = []
    for current in (0, 1):
        for index in (0, 1):
            device = torch.device("cuda", index)
            properties = torch.cuda.get_device_properties(device)
            assert gpu_of(device).multiprocessors == properties.multi_processor_count
            assert gpu_of(device).arch == properties.major * 10 + properties.minor
            leaves = [y.to(device).requires_grad_() for y in x.tensors]
            with torch.cuda.device(current):
                o, state = gdn_triton.chunk_gated_delta_rule(*leaves, output_final_state=True)
                found = o, state, *torch.autograd.grad(o.sum() + state.sum(), leaves)
                assert torch.cuda.current_device() == current
            assert all(y.device == device for y in found)
            results.append([y.cpu() for y in found])
    pairs = [(0, 2), (1, 3)]  # of one GPU, with either one current
    if gpu_of(torch.device("cuda:0")) == gpu_of(torch.device("cuda:1")):
        pairs.append((0, 1))
    for a, b in pairs:
        assert all(map(same_bits, results[a], results[b]))
