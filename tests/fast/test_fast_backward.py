"""The CUDA library's backward on a Hopper GPU: its numbers, against float64 autograd of the
specification, its bits, and the operator's checks."""

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import pytest
import torch
from backward_cases import (
    NAMES,
    STRENGTHS,
    TaskOptions,
    by_op,
    check_alone,
    check_forgetting,
    check_rows_of_no_sequence,
    check_task,
    make_task,
)
from fast_backward_cases import (
    ARGUMENTS,
    check_nan_stays,
    check_repeats,
    check_replays,
    poison,
    random_task,
    small_betas,
)
from fast_cases import EDGES, ROOT, fast_case, gpu, output
from gate_cases import GateCall, Gates, far_gates, strong_gates
from helpers import BF16, FP16, FP32, Case, make_inputs, same_bits
from torch import Tensor

from gdn_triton.chunk.cuda import calls
from gdn_triton.chunk.triton import backward as triton_backward
from gdn_triton.constants import RCP_LN2

# --------------------------------------------------------------------------- numbers, on a Hopper


@pytest.fixture
def own(cuda: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device, on which no call may have its gradients from Triton."""

    def forbidden(*args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError("the Triton backward ran")

    monkeypatch.setattr(triton_backward, "gradients", forbidden)
    monkeypatch.setenv("GDN_BACKEND", "cuda")
    return cuda


CASES = [
    *(fast_case(f"padded-{T}", "a side of a chunk", T=T, B=2) for T in (*EDGES[1:], 128, 200)),
    *(fast_case(f"packed-{n}", "one sequence, and rows of none", lengths=(n,), orphans=9)
      for n in EDGES),
    *(fast_case(f"group-{G}", "value heads on a key head", HV=2 * G, lengths=(70, 0, 130))
      for G in (1, 2, 3, 4, 6, 8)),
    fast_case("groups-padded", "pairs of heads, a part of a chunk", T=200, B=3, H=3, HV=12),
    fast_case("edges", "every length next to every other", lengths=(*EDGES, *EDGES[::-1])),
    fast_case("odd-rows", "rows that TMA cannot read, so copies", T=150, B=2, spare=3),
    fast_case("orphans", "more rows of no sequence than a chunk", lengths=(5, 80), orphans=200),
    fast_case("wide", "more heads than multiprocessors", T=130, B=2, H=16, HV=96),
    fast_case("segments", "the walk forward in parts", T=2500, H=1, HV=2),
    fast_case("pairs-with-dq", "q k^T and k k^T in the memory of dq", T=4150, B=2, H=1, HV=2),
    fast_case("pairs-with-dq-packed", "the same, and last chunks that are apart",
              lengths=(4200, 0, 8000, 4190), orphans=10, H=2, HV=4),
    fast_case("pairs-with-dq-three", "the same, without clusters", lengths=(5000, 4097), HV=6),
    fast_case("segments-packed", "a long sequence among short ones",
          lengths=(2100, 1, 0, 300, 1024), orphans=70, H=1, HV=1),
]  # fmt: skip


@gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("make", [far_gates, strong_gates], ids=["far", "strong"])
def test_gates_in_the_kernel(make: Callable[[], Gates], dtype: torch.dtype, own: str) -> None:
    """The forward too. Factors that leave float32, and decays of up to e^-20 a token."""
    call = GateCall(make(), dtype, own)
    call.check(call.by_op())


@gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case: Case, own: str) -> None:
    check_task(make_task(case, BF16, own, TaskOptions()), BF16, own)


@gpu
@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sizes", [{"T": 450, "B": 2}, {"T": 200, "B": 5, "HV": 16}], ids=str)
def test_gates(sizes: dict[str, int], strength: str, seed: int, own: str) -> None:
    case = fast_case("gates", "", **sizes)
    x = make_inputs(case, BF16, own, seed=seed)
    x = x.but(g=STRENGTHS[strength](x.g))
    check_task(make_task(case, BF16, own, TaskOptions(), x), BF16, own)


# One and two slices of V, whole and in part; fewer channels than a tile has, and more.
SIZES = [(128, 128), (96, 192), (40, 24), (128, 72), (64, 256), (8, 328)]


@gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(("K", "V"), SIZES)
@pytest.mark.parametrize("name", ["none", "all"])
def test_sizes(name: str, K: int, V: int, dtype: torch.dtype, own: str) -> None:
    check_task(make_task(replace(RAGGED, K=K, V=V), dtype, own, OPTIONS[name]), dtype, own)
    segments = fast_case("segments", "", T=2500, H=1, HV=2, K=K, V=V)
    check_task(make_task(segments, dtype, own, OPTIONS[name]), dtype, own)


@gpu
@pytest.mark.parametrize("number", range(60))
def test_random(number: int, own: str) -> None:
    task, dtype = random_task(number, own, longest=130 if number % 2 else 2500)
    check_task(task, dtype, own)


@gpu
@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("sizes", [{"T": 450, "B": 2}, {"T": 200, "B": 5, "HV": 16}], ids=str)
def test_gates_in_float16(sizes: dict[str, int], strength: str, own: str) -> None:
    case = fast_case("gates", "", **sizes)
    x = make_inputs(case, FP16, own)
    x = x.but(g=STRENGTHS[strength](x.g))
    check_task(make_task(case, FP16, own, TaskOptions(), x), FP16, own)


@gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("strength", ["mild", "strong", "closed"])
@pytest.mark.parametrize(("K", "V"), [(128, 128), (96, 192)])
def test_small_betas(K: int, V: int, strength: str, dtype: torch.dtype, own: str) -> None:
    case = replace(RAGGED, K=K, V=V)
    check_task(small_betas(case, dtype, own, strength), dtype, own)


# Few long sequences, of which both walks go in segments. With as many tokens as SEVERAL_KEPT has,
# the forward leaves states.
CUT = fast_case("cut", "", T=8192, H=4, HV=8)
SEVERAL = {"lengths": (2000, 0, 14000, 64, 300), "orphans": 92, "told": True}
SEVERAL_KEPT = {"lengths": (4000, 16000, 368, 0, 12400), "told": True}


@gpu
@pytest.mark.parametrize("strength", ["none", "mild", "model", "strong"])
@pytest.mark.parametrize(
    "sizes",
    [{}, {"T": 32768}, {"lengths": (8100,), "orphans": 92}, SEVERAL, SEVERAL_KEPT],
    ids=["8192", "32768", "packed", "several", "several-kept"],
)
def test_both_walks_in_segments(sizes: dict[str, Any], strength: str, own: str) -> None:
    case = replace(CUT, **sizes)
    x = make_inputs(case, BF16, own)
    x = x.but(g=STRENGTHS[strength](x.g))
    task = make_task(case, BF16, own, TaskOptions(), x)
    check_task(task, BF16, own)
    check_repeats(task, rounds=3)


@gpu
@pytest.mark.parametrize(
    "sizes",
    [{}, {"lengths": (8100,), "orphans": 92}, {**SEVERAL, "lengths": (14000, 0, 2000, 64, 300)}],
    ids=["8192", "packed", "several"],
)
def test_segments_that_forget(sizes: dict[str, Any], own: str) -> None:
    check_forgetting(replace(CUT, **sizes), own)


@gpu
def test_one_answer_whether_a_segment_forgets(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment has 24 chunks. The sum of their decays from the first to the last is 2^-18 beyond
    the limit of 64, and from the last to the first it is not. If two kernels used different sums,
    the fold would read a map that no walk has made, here NaN."""
    case = replace(CUT, T=280 * 64)
    unit = 2.0**-18  # of a number below 64
    log2 = torch.zeros(case.T // 64)
    log2[0::24] = -(64 - unit)
    for i in range(8, 24):
        log2[i::24] = -0.05 * unit
    # By two tokens: not every number is one token's decay in log2 units.
    most = torch.where(log2 < -1, -40.0, 0.0)
    g = torch.zeros(1, case.T, case.HV)
    g[:, ::64] = most[:, None]
    g[:, 1::64] = ((log2 - most * torch.tensor(RCP_LN2)) / torch.tensor(RCP_LN2))[:, None]
    assert torch.equal((g * torch.tensor(RCP_LN2)).view(-1, 64, case.HV).sum(1)[:24, 0], log2[:24])
    x = make_inputs(case, BF16, own)
    task = make_task(case, BF16, own, TaskOptions(), x.but(g=g.to(own)))
    poison()
    found = by_op(task)
    monkeypatch.setenv("GDN_BATCH_INVARIANT", "1")
    for name, y in by_op(task).items():
        assert (found[name] - y).double().norm() < 2e-2 * y.double().norm(), name


@gpu
@pytest.mark.parametrize("name", ["none", "all"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"T": 8190, "B": 2, "H": 1, "HV": 2},
        {"lengths": (8100,), "orphans": 92, "H": 1, "HV": 4},
        {"lengths": (100,), "orphans": 8092, "H": 2, "HV": 2},
        {"lengths": (0,), "orphans": 8192, "H": 2, "HV": 2},
        {"lengths": (900, 0, 8000, 130), "orphans": 92, "H": 1, "HV": 1, "told": True},
        {"lengths": (8192, 1), "H": 1, "HV": 3, "told": True},
        {"lengths": (*(64,) * 28, 0, 9000), "H": 2, "HV": 2, "told": True},
    ],
    ids=str,
)
def test_sizes_of_both_walks_in_segments(sizes: dict[str, Any], name: str, own: str) -> None:
    task = make_task(fast_case("cut", "", **sizes), BF16, own, OPTIONS[name])
    check_task(task, BF16, own)
    check_repeats(task)


OPTIONS = {
    "none": TaskOptions(state=False, dht=False),
    "state": TaskOptions(dht=False, v_first=True),
    "dht": TaskOptions(state=False, v_first=True),
    "norm": TaskOptions(l2norm=True, scale=-0.7),
    "gate": TaskOptions(gate=True, dt_bias=False),
    "sigmoid": TaskOptions(sigmoid=True, negative=True),
    "all": TaskOptions(l2norm=True, sigmoid=True, negative=True, gate=True, v_first=True),
}
RAGGED = fast_case("ragged", "", lengths=(65, 0, 1, 127, 64, 63, 200), orphans=70)


@gpu
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, own: str) -> None:
    check_task(make_task(RAGGED, BF16, own, OPTIONS[name]), BF16, own)


@gpu
@pytest.mark.parametrize("HV", [1, 3, 4, 8])
def test_norm_of_a_group(HV: int, own: str) -> None:
    """The norm's own step is behind the sum, of which two parts may have been added before."""
    check_task(make_task(replace(RAGGED, H=1, HV=HV), BF16, own, OPTIONS["norm"]), BF16, own)


@gpu
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, torch.float64])
def test_side_inputs_of_any_dtype(dtype: torch.dtype, own: str) -> None:
    task = make_task(RAGGED, BF16, own, TaskOptions())
    for name in ("g", "beta", "initial_state"):
        task.leaves[name] = task.leaves[name].to(dtype)
    check_task(task, BF16, own)


# ------------------------------------------------------------------------------------------- bits

LARGE = fast_case("large", "", lengths=(700, 1, 64, 129, 0, 3000), orphans=70, H=4, HV=8)


@gpu
@pytest.mark.parametrize("name", ["mild", "model"])
def test_one_result_of_many_runs(name: str, own: str) -> None:
    x = make_inputs(LARGE, BF16, own)
    x = x.but(g=STRENGTHS[name](x.g))
    check_repeats(make_task(LARGE, BF16, own, TaskOptions(), x), rounds=5)


@gpu
def test_a_sequence_alone(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without batch invariance the sequence alone would be cut into segments, and the longest of
    three sequences would decide whether a walk goes over whole slices."""
    monkeypatch.setenv("GDN_BATCH_INVARIANT", "1")
    check_alone(LARGE, BF16, own)
    check_alone(replace(LARGE, lengths=(CUT.T, 300)), BF16, own)
    check_alone(replace(LARGE, K=96, V=192), FP16, own)
    for HV, lengths in ((64, LARGE.lengths), (32, (1500, 1400, 1400)), (32, (3000, 1000, 300))):
        check_alone(replace(LARGE, H=16, HV=HV, lengths=lengths), BF16, own)


@gpu
def test_nan_stays_in_its_sequence(own: str) -> None:
    check_nan_stays(make_task(RAGGED, BF16, own, TaskOptions()))


@gpu
@pytest.mark.parametrize("options", ["all", "none"])
def test_rows_of_no_sequence(options: str, own: str) -> None:
    check_rows_of_no_sequence(make_task(RAGGED, BF16, own, OPTIONS[options]))


@gpu
@pytest.mark.parametrize("name", NAMES[:5])
def test_nan_of_a_cut_sequence(name: str, own: str) -> None:
    case = replace(CUT, B=2, H=1, HV=2)
    task = make_task(case, BF16, own, TaskOptions())
    expected = by_op(task)
    x = task.leaves[name].clone()
    x[0, 3000] = torch.nan
    task.leaves[name] = x
    for other, y in by_op(task).items():
        assert same_bits(y[1], expected[other][1]), other


@gpu
@pytest.mark.parametrize("T", [300, 8192])
def test_one_head_of_many(T: int, own: str) -> None:
    """A value head's own gradients are the same bits whatever the other key heads hold."""
    case = fast_case("heads", "", T=T, H=2, HV=4)
    task = make_task(case, BF16, own, TaskOptions())
    expected = by_op(task)
    for name in NAMES[:5]:
        x = task.leaves[name].clone()
        x[:, :, x.shape[2] // 2 :] = torch.nan
        task.leaves[name] = x
    for name, x in by_op(task).items():
        half = 2 if name in ("v", "g", "beta") else 1
        kept = (
            (x[:, :2], expected[name][:, :2])
            if name == "initial_state"
            else (x[:, :, :half], expected[name][:, :, :half])
        )
        assert same_bits(*kept), name


@gpu
def test_graph_replay(own: str) -> None:
    """Nothing waits for the device, and other offsets in the same graph are other sequences."""
    task = make_task(LARGE, BF16, own, OPTIONS["all"])
    check_replays(task, (3000, 64, 1, 0, 700, 129))


@gpu
def test_strided_gradients_from_above(own: str) -> None:
    task = make_task(fast_case("strided", "", T=150, B=2), BF16, own, TaskOptions())
    expected = by_op(task)

    def spread(x: Tensor) -> Tensor:
        return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]

    task.do, task.dht = spread(task.do), spread(task.dht)
    for name, x in by_op(task).items():
        assert same_bits(x, expected[name]), name


# ------------------------------------------------------------------------- the operator's checks

# Each changes one argument of a right call of the operator; words of what it then says.
BAD: list[tuple[str, Any, str]] = [
    ("do", lambda x: x.float(), "do must be BFloat16, got Float"),
    ("do", lambda x: x[:, 1:], "do must have shape"),
    ("dht", lambda x: x.bfloat16(), "dht must be Float, got BFloat16"),
    ("dq", lambda x: x.mT.contiguous().mT, "dq must be contiguous"),
    ("dk", lambda x: x.float(), "dk must be BFloat16, got Float"),
    ("dg", lambda x: x[:, :, :1].contiguous(), "dg must have shape"),
    ("dh0", lambda x: x.half(), "dh0 must be Float, got Half"),
    ("gate_sums", lambda x: torch.zeros(2, 4, device="cuda"), "gate_sums must be a tensor if and"),
    ("states", lambda x: torch.zeros(1, 2, 128, 128, device="cuda"), "states must be a tensor if"),
    ("checkpoint_interval", lambda x: 64, "states must be a tensor if and only if"),
    ("checkpoint_interval", lambda x: 65, "checkpoint_interval must be 0 or a multiple of 64"),
    ("workspace", lambda x: x[:-1], "workspace must have"),
]


@gpu
@pytest.mark.parametrize(("name", "change", "words"), BAD, ids=[f"{b[0]}-{b[2][:12]}" for b in BAD])
def test_operator_checks_its_arguments(
    name: str,
    change: Any,
    words: str,
    own: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed: list[Any] = []
    operators = calls.library_operator
    right = operators("chunk_backward")

    def noting(asked: str) -> Callable[..., None]:
        return (lambda *x: passed.extend(x)) if asked == "chunk_backward" else operators(asked)

    monkeypatch.setattr(calls, "library_operator", noting)
    by_op(make_task(fast_case("checked", "", T=70), BF16, own, TaskOptions()))
    right(*passed)
    at = ARGUMENTS.index(name)
    passed[at] = change(passed[at])
    with pytest.raises(RuntimeError, match=words):
        right(*passed)


UNDER_SANITIZER = """
import torch, gdn_triton
from gdn_triton.chunk.cuda import calls
torch.manual_seed(0)
def leaf(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype).requires_grad_()
# Without states that the forward leaves, and with one after so many tokens each.
for lengths, every in (((70, 0, 400, 64), 0), ((330,), 0), ((70, 0, 400, 128), 64), ((330,), 128)):
    calls.best_checkpoint_interval = lambda *sizes, every=every: every
    N, T = len(lengths), sum(lengths) + 9
    cu_seqlens = torch.tensor([0, *lengths], device="cuda").cumsum(0, dtype=torch.int32)
    x = (leaf(1, T, 1, 128), leaf(1, T, 1, 128), leaf(1, T, 2, 128), leaf(1, T, 2), leaf(1, T, 2))
    o, state = gdn_triton.chunk_gated_delta_rule(
        *x, initial_state=leaf(N, 2, 128, 128, dtype=torch.float32), output_final_state=True,
        use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_gate_in_kernel=True,
        A_log=leaf(2, dtype=torch.float32), dt_bias=leaf(2, dtype=torch.float32),
        cu_seqlens=cu_seqlens)
    torch.autograd.backward([o, state], [torch.ones_like(o), torch.ones_like(state)])
torch.cuda.synchronize()
print("done")
"""


@gpu
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_sanitizer(tool: str, cuda: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("there is no compute-sanitizer on the PATH")
    report = output(
        *(sanitizer, "--tool", tool, "--kernel-name", "kernel_substring=gdn"),
        *("--error-exitcode", "1", sys.executable, "-c", UNDER_SANITIZER),
        # Each tensor in an allocation of its own, so that a read past its end is one.
        PYTORCH_NO_CUDA_MEMORY_CACHING="1",
        PYTHONPATH=str(ROOT),
        GDN_BACKEND="cuda",
    )
    assert "done" in report
