"""Gradients of the Triton backend against float64 autograd of the specification."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backward_cases import (
    NAMES,
    Task,
    TaskOptions,
    assert_gradients,
    by_op,
    check,
    check_alone,
    check_rows_of_no_sequence,
    check_task,
    decays_of,
    exact,
    make_task,
    narrow,
    run_op,
)
from helpers import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    FP64,
    REAL,
    SMALL,
    Case,
    cases,
    make_inputs,
    same_bits,
)
from narrow import Arithmetic
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import gdn_triton
from gdn_triton._triton import tiles
from gdn_triton.chunk.triton.gradients import state as state_gradients


@pytest.fixture(autouse=True)
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "triton")


# Few programs, for questions of bits and of autograd.
BITS = Case("bits", "", lengths=(0, 17, 2), orphans=3, HV=1)


# ----------------------------------------------------------------------------------------- values

# Every way in which a chunk, a sequence or a tile can end, at the least size that shows it: a
# program of the backward takes the interpreter a quarter of a second.
LEAST = [
    Case("one-token", "the least sequence", T=1, HV=1),
    Case("chunks-and-tail", "state passes through chunks, and B > 1", T=18, B=2, HV=1),
    Case("groups", "three value heads on each of two key heads", T=3, H=2, HV=6, spare=8),
    Case("chunk-32", "one merge of the inverse's blocks", T=34, HV=1, K=32, chunk_size=32, spare=0),
    Case("chunk-64", "two merges of the inverse's blocks", T=66, HV=1, V=32, chunk_size=64),
    Case("wide-key", "K > V, ragged blocks of both", T=17, HV=1, K=68, V=36),
    Case("wide-value", "V > K, several ragged value tiles", T=17, HV=1, K=24, V=100),
    Case("tiny-heads", "K and V below any tile", T=5, HV=1, K=3, V=5),
    Case("packed", "empty sequences, one token, a chunk", lengths=(0, 1, 17, 0), orphans=5, HV=1),
    Case("packed-orphans", "more rows of no sequence than a chunk", lengths=(5,), orphans=20, HV=1),
    Case("packed-empty", "only empty sequences, and rows of none", lengths=(0, 0), orphans=3),
]
MORE = [replace(case, name=f"gpu-{case.name}", gpu=True) for case in SMALL + REAL]
# Where fp32 takes other tiles, or another path, than 16 bits; the rest of it on a GPU.
IN_FP32 = ("groups", "chunk-64", "wide-key", "packed")


def on_a_gpu(device: str, dtype: torch.dtype, name: str, names: tuple[str, ...]) -> None:
    if device == "cpu" and dtype == FP32 and name not in names:
        pytest.skip("the interpreter has done it in float16, and takes seconds")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", cases(LEAST) + cases(MORE))
def test_gradients(case: Case, dtype: torch.dtype, device: str) -> None:
    on_a_gpu(device, dtype, case.name, IN_FP32)
    check(case, dtype, device)


# Every pair of options that touch the same kernel; each option on and off.
OPTIONS = {
    "none": TaskOptions(state=False, dht=False),
    "state": TaskOptions(dht=False, v_first=True),
    "dht": TaskOptions(state=False, v_first=True),
    "norm": TaskOptions(l2norm=True, scale=-0.7),
    "norm-gate": TaskOptions(l2norm=True, gate=True, dt_bias=False, v_first=True),
    "sigmoid": TaskOptions(sigmoid=True, state=False),
    "sigmoid-gate": TaskOptions(sigmoid=True, negative=True, gate=True, dht=False),
    "norm-sigmoid": TaskOptions(l2norm=True, sigmoid=True, negative=True),
    "all": TaskOptions(l2norm=True, sigmoid=True, negative=True, gate=True, v_first=True),
}
TINY = Case("tiny", "", T=19, HV=1, K=24, V=20)
TINY_PACKED = Case("tiny-packed", "", lengths=(0, 3, 17), orphans=4, HV=1, K=20)
# More columns than a program of the chunk's kernel takes, so that shares are added up.
TWO_BLOCKS = Case("two-blocks", "", T=5, HV=1, K=132)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, dtype: torch.dtype, device: str) -> None:
    on_a_gpu(device, dtype, name, ("all",))
    check(TINY if dtype == FP32 else TINY_PACKED, dtype, device, OPTIONS[name])


@pytest.mark.parametrize("dtype", DTYPES)
def test_shares_of_blocks(dtype: torch.dtype, device: str) -> None:
    on_a_gpu(device, dtype, "", ())
    check(TWO_BLOCKS, dtype, device, OPTIONS["all"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_walks_apart(dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch for each walk, of tiles that differ, as calls with many states have."""
    launched = []

    def apart(
        gpu: tiles.Gpu, K: int, V: int, dtype: torch.dtype, states: int
    ) -> tuple[tiles.Tile, tiles.Tile]:
        launched.append(states)
        BK = tiles.padded(K, 256)
        return tuple(tiles.state_bwd_tile(gpu, BK, BV, 2, dtype) for BV in (16, 32))

    monkeypatch.setattr(state_gradients, "state_bwd_config", apart)
    check(Case("apart", "", T=19, HV=2, K=24, V=36), dtype, device)
    assert launched


@pytest.mark.gpu("the product instructions that were wrong exist on Hopper only")
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("K", [64, 128, 256])
@pytest.mark.parametrize("strength", [0.0, 1e-3, 1.0, 20.0, torch.inf])
@pytest.mark.parametrize("seed", range(4))
def test_gates_of_every_strength(
    seed: int, strength: float, K: int, dtype: torch.dtype, device: str
) -> None:
    """The gradients that compilers have got wrong (docs/backward.md): of k, g and beta, where pairs
    of tokens of a chunk weigh most, and where they weigh nothing."""
    case = Case("gates", "", T=200, H=2, HV=4, K=K, V=128, chunk_size=64, spare=8)
    x = make_inputs(case, dtype, device, seed=seed)
    g = x.g * strength if strength < torch.inf else torch.where(x.g < -0.1, -torch.inf, x.g)
    check_task(make_task(case, dtype, device, TaskOptions(), x.but(g=g)), dtype, device)


def test_a_state_that_is_almost_forgotten(device: str) -> None:
    """The gradient of the initial state is near the smallest number of float16, in which the
    operands of its products are rounded."""
    case = Case("forgotten", "", T=20, HV=1, K=32, V=32)
    x = make_inputs(case, FP16, device)
    g = torch.zeros_like(x.g)
    g[:, 0] = -15
    check_task(make_task(case, FP16, device, TaskOptions(dht=False), x.but(g=g)), FP16, device)


def cancelling(dtype: torch.dtype, seed: int) -> Task:
    """Two sequences with opposite gradients of A_log: the second one's gradients from above are
    multiplied by a number."""
    case = Case("cancelling", "", lengths=(70, 66), HV=1, chunk_size=64)
    task = make_task(case, dtype, "cpu", TaskOptions(gate=True), seed=seed)
    is_first = torch.arange(136)[:, None, None] < 70

    def times(first: float, second: float) -> Task:
        do = (task.do * torch.where(is_first, first, second)).to(dtype)
        return replace(
            task, do=do, dht=task.dht * torch.tensor([first, second])[:, None, None, None]
        )

    return times(1, -(exact(times(1, 0))["A_log"] / exact(times(0, 1))["A_log"]).item())


@pytest.mark.parametrize(("dtype", "seed"), [(BF16, 3), (FP16, 0), (FP16, 4)])
def test_budget_of_a_sum_that_cancels(dtype: torch.dtype, seed: int) -> None:
    """The same gradients times other numbers, which have other roundings, are within the budget.
    Without one of the 20 tokens that matter most a sum is not."""
    task, arithmetic = cancelling(dtype, seed), Arithmetic(dtype, "cpu")
    right = exact(task)
    for factor in (1.3, 0.9, 0.7, 1.1):
        scaled = replace(task, do=(task.do * factor).to(dtype), dht=task.dht * factor)
        near, other = narrow(scaled, arithmetic), exact(scaled)
        found = {
            name: (right[name] + (near[name] - other[name]) / factor).to(x.dtype)
            for name, x in task.leaves.items()
        }
        assert_gradients(task, found, arithmetic)
    decays = decays_of({name: x.double() for name, x in task.leaves.items()})
    terms = (right["decays"] * decays).flatten()
    found["A_log"] -= terms[terms.abs().argsort(descending=True)[19]].float()
    with pytest.raises(AssertionError, match="dA_log"):
        assert_gradients(task, found, arithmetic)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mixed_dtypes(dtype: torch.dtype, device: str) -> None:
    """Each gradient in its input's dtype: q, k, v, g, beta and the state may all differ."""
    task = make_task(TINY, FP16, device, TaskOptions())
    task.leaves["v"] = task.leaves["v"].to(FP32)
    task.leaves["g"] = task.leaves["g"].to(dtype)
    task.leaves["beta"] = task.leaves["beta"].to(dtype)
    task.leaves["initial_state"] = task.leaves["initial_state"].to(dtype)
    found, right = by_op(task), exact(task)
    for name, x in found.items():
        assert x.dtype == task.leaves[name].dtype, name
        torch.testing.assert_close(x.to(FP64), right[name], rtol=2e-2, atol=2e-2)


def test_a_closed_gate_has_no_gradient(device: str) -> None:
    task = make_task(TINY, FP32, device, TaskOptions())
    g = task.leaves["g"].clone()
    g[:, 3:9] = -torch.inf
    g[:, 12] = -200.0
    task.leaves["g"] = g
    found, right = by_op(task), exact(task)
    assert torch.equal(found["g"][:, 3:9], torch.zeros_like(g[:, 3:9]))
    assert torch.equal(found["g"][:, 12], torch.zeros_like(g[:, 12]))
    # g_cumsum falls by 160 at each closed gate: at 7 of them a difference of two sums of fp32 is
    # wrong by 2^-24 * 1120, and its power by 5e-5 of itself.
    for name, x in found.items():
        torch.testing.assert_close(x.to(FP64), right[name], rtol=5e-4, atol=5e-4)


def test_one_write_strength_of_zero(device: str) -> None:
    """beta = 0 writes nothing, and yet has a gradient."""
    task = make_task(TINY, FP32, device, TaskOptions())
    beta = task.leaves["beta"].clone()
    beta[:, ::2] = 0
    task.leaves["beta"] = beta
    found, right = by_op(task), exact(task)
    assert found["beta"][:, ::2].ne(0).all()
    for name, x in found.items():
        torch.testing.assert_close(x.to(FP64), right[name], rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------- which gradients, and how


@pytest.mark.parametrize("wanted", ["q", "v", "g", "initial_state", "dt_bias"])
def test_one_gradient(wanted: str, device: str) -> None:
    """Alone the same bits as with all others; nothing else is returned."""
    task = make_task(BITS, FP32, device, OPTIONS["all"])
    expected = by_op(task)[wanted]
    leaves = task.copies()
    for name, x in leaves.items():
        assert x is not None
        x.requires_grad_(name == wanted)
    o, final_state = run_op(task, leaves)
    assert o.requires_grad
    assert final_state is not None and final_state.requires_grad == (wanted != "q")
    results = [(o, task.do)] + ([(final_state, task.dht)] if wanted != "q" else [])
    torch.autograd.backward([y for y, _ in results], [dy for _, dy in results])
    assert all((x.grad is not None) == (name == wanted) for name, x in leaves.items())
    assert same_bits(leaves[wanted].grad, expected)


def test_only_the_state_is_used(device: str) -> None:
    task = make_task(BITS, FP32, device, TaskOptions())
    task.do.zero_()
    expected = by_op(task)
    leaves = task.copies()
    _, final_state = run_op(task, leaves)
    found = torch.autograd.grad(final_state, list(leaves.values()), task.dht)
    for (name, x), y in zip(expected.items(), found, strict=True):
        assert same_bits(x, y), name


def test_the_forward_has_the_same_bits(dataflow: str, device: str) -> None:
    task = make_task(BITS, FP16, device, OPTIONS["all"])
    with torch.no_grad():
        expected = run_op(task, task.copies())
    o, final_state = run_op(task, task.copies())
    assert o.requires_grad and same_bits(o.detach(), expected[0])
    assert same_bits(final_state.detach(), expected[1])


def test_nothing_but_inputs_is_kept(device: str) -> None:
    task = make_task(BITS, FP16, device, OPTIONS["all"])
    leaves = task.copies()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        run_op(task, leaves)
    inputs = {x.untyped_storage().data_ptr() for x in leaves.values()}
    inputs.add(task.cu_seqlens.untyped_storage().data_ptr())
    assert {x.untyped_storage().data_ptr() for x in kept} <= inputs


def test_a_second_derivative_is_an_error(device: str) -> None:
    task = make_task(BITS, FP32, device, TaskOptions())
    leaves = task.copies()
    o, _ = run_op(task, leaves)
    (dk,) = torch.autograd.grad(o.square().sum(), leaves["k"], create_graph=True)
    assert dk.requires_grad
    with pytest.raises(RuntimeError, match="has no second derivative in the Triton backend"):
        torch.autograd.grad(dk.sum(), leaves["q"])


def test_an_input_changed_in_place_is_an_error(device: str) -> None:
    task = make_task(BITS, FP32, device, TaskOptions())
    o, _ = run_op(task, task.copies())
    task.cu_seqlens[1] = 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_strided_gradients_from_above(device: str) -> None:
    task = make_task(BITS, FP32, device, TaskOptions())
    expected = by_op(task)
    task.do = task.do.transpose(1, 2).contiguous().transpose(1, 2)
    task.dht = task.dht.mT.contiguous().mT
    for name, x in by_op(task).items():
        assert same_bits(x, expected[name]), name


def test_checkpoint(device: str) -> None:
    task = make_task(BITS, FP32, device, OPTIONS["all"])
    expected = by_op(task)
    leaves = task.copies()

    def run(*given: Tensor) -> Any:
        return run_op(task, dict(zip(leaves, given, strict=True)))

    found = task.backward(leaves, *checkpoint(run, *leaves.values(), use_reentrant=False))
    for name, x in found.items():
        assert same_bits(x, expected[name]), name


def test_autocast_changes_nothing(device: str) -> None:
    task = make_task(BITS, FP32, device, OPTIONS["all"])
    expected = by_op(task)
    with torch.autocast(device, BF16):
        found = by_op(task)
    for name, x in found.items():
        assert same_bits(x, expected[name]), name


# ------------------------------------------------------------------------------------------- bits


def test_rows_of_no_sequence(device: str) -> None:
    check_rows_of_no_sequence(make_task(BITS, FP32, device, OPTIONS["all"]))


def test_nan_stays_in_its_sequence(device: str) -> None:
    task = make_task(BITS, FP32, device, TaskOptions())
    expected = by_op(task)
    first, end = BITS.offsets()[1:3]
    for name in NAMES[:5]:
        x = task.leaves[name].clone()
        x[:, end - 1] = torch.nan
        task.leaves[name] = x
    task.do[:, first] = torch.inf
    for name, x in by_op(task).items():
        if name == "initial_state":
            kept, right = x[[0, 2]], expected[name][[0, 2]]
        else:
            kept, right = x[:, end:], expected[name][:, end:]
        assert same_bits(kept, right), name


def test_batch_invariance(device: str) -> None:
    check_alone(BITS, FP16, device)


LARGE = Case(
    "large",
    "",
    lengths=(700, 1, 64, 129, 0, 1000),
    orphans=70,
    H=4,
    HV=8,
    K=128,
    V=128,
    chunk_size=64,
    spare=8,
)


@pytest.mark.gpu("races, and tiles chosen by the number of sequences")
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("K", [128, 100, 256])
def test_batch_invariance_large(K: int, dtype: torch.dtype, device: str) -> None:
    check_alone(replace(LARGE, K=K), dtype, device)


@pytest.mark.gpu("walks in two launches, of other tiles than those of a sequence alone")
def test_batch_invariance_of_many_states(device: str) -> None:
    check_alone(replace(LARGE, H=16, HV=32), BF16, device)


@pytest.mark.gpu("races do not show in the interpreter")
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_one_result_of_many_runs(dtype: torch.dtype, device: str) -> None:
    task = make_task(LARGE, dtype, device, OPTIONS["all"])
    expected = by_op(task)
    for _ in range(200):
        for name, x in by_op(task).items():
            assert same_bits(x, expected[name]), name


@pytest.mark.gpu("a CUDA graph")
def test_graph_capture(device: str) -> None:
    """The backward neither waits for the device nor depends on what cu_seqlens held."""
    task = make_task(BITS, BF16, device, OPTIONS["all"])
    expected = by_op(task)
    leaves = task.copies()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = task.backward(leaves, *run_op(task, leaves))
    graph.replay()
    for name, x in found.items():
        assert same_bits(x, expected[name]), name


# -------------------------------------------------------------------------------- several processes


class Layer(nn.Module):
    """The op between two projections, its gate's parameters trained too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 3 * 16 + 2)
        self.A_log = nn.Parameter(torch.zeros(1))
        self.dt_bias = nn.Parameter(torch.zeros(1))
        self.outer = nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, g, beta = self.inner(x).split([16, 16, 16, 1, 1], -1)
        o, _ = gdn_triton.chunk_gated_delta_rule(
            q.unsqueeze(2),
            k.unsqueeze(2),
            v.unsqueeze(2),
            g,
            beta,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            chunk_size=16,
        )
        return self.outer(o.squeeze(2))


def make_layer() -> tuple[Layer, Tensor]:
    torch.manual_seed(0)
    return Layer(), torch.randn(2, 20, 12)


def train_in_parallel(rank: int, directory: str) -> None:
    """One of two processes: its half of the batch, under DDP and under FSDP2."""
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2
    )
    for wrap in ("ddp", "fsdp"):
        layer, x = make_layer()
        if wrap == "ddp":
            run: nn.Module = nn.parallel.DistributedDataParallel(layer)
        else:
            run = fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
        run(x[rank : rank + 1]).square().sum().backward()
        found = {name: y.grad for name, y in layer.named_parameters()}
        found = {n: y.full_tensor() if wrap == "fsdp" else y for n, y in found.items()}
        if rank == 0:
            torch.save(found, f"{directory}/{wrap}.pt")


def test_training_in_two_processes(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP and FSDP2 average what one process computes from the whole batch."""
    monkeypatch.setenv("GDN_BACKEND", "reference")
    run_ranks(2, train_in_parallel, str(tmp_path))
    layer, x = make_layer()
    (layer(x).square().sum() / 2).backward()
    for wrap in ("ddp", "fsdp"):
        found = torch.load(tmp_path / f"{wrap}.pt")
        for name, y in layer.named_parameters():
            torch.testing.assert_close(found[name], y.grad, msg=f"{wrap}: {name}")
