"""The numbers of the CUDA library on a Hopper GPU: every regime against the float64 specification
and Triton."""

import math

import pytest
import torch
from fast_cases import (
    DTYPES,
    EDGES,
    LESS,
    OPTIONS,
    PADDED,
    RAGGED,
    SEGMENTS,
    WHOLE,
    fast_case,
    gpu,
    sized,
)
from fast_parity import check_parity
from helpers import BF16, FP16, FP32, FP64, Case, same_bits, unit_rows
from parity_calls import SIZES, Options, make_call, random_call

from gdn_triton.chunk.cuda import calls

CASES = [
    *(fast_case(f"padded-{T}", "a side of a chunk", T=T, B=2) for T in (*EDGES[1:], 128, 200)),
    *(fast_case(f"packed-{n}", "one sequence, and rows of none", lengths=(n,), orphans=9)
      for n in EDGES),
    *(fast_case(f"group-{G}", "value heads on a key head", H=2, HV=2 * G, lengths=(70, 0, 130))
      for G in (1, 2, 3, 4, 8)),
    fast_case("edges", "every length next to every other", lengths=(*EDGES, *EDGES[::-1])),
    fast_case("one-head", "", T=300, H=1, HV=1),
    fast_case("odd-rows", "rows that TMA cannot read, so copies", T=150, B=2, spare=3),
    fast_case("orphans", "more rows of no sequence than a chunk", lengths=(5, 80), orphans=200),
    fast_case("documents", "very different lengths", lengths=(1, 1500, 63, 0, 64, 700) + (17,) * 40,
              orphans=100, H=4, HV=8),
    fast_case("wide", "more heads than multiprocessors", T=130, B=2, H=16, HV=96),
    fast_case("long", "few heads and many chunks: segments side by side", T=8192, H=1, HV=2),
    fast_case("segments", "cut sequences and a short one",
              lengths=(9000, 1, 6000), orphans=70, H=1, HV=1),
    fast_case("chunks", "many chunks, no segment", T=900, B=4, H=8, HV=32),
    fast_case("halves", "more chunks than buffers, few heads", T=500, B=2, H=1, HV=3),
]  # fmt: skip


@gpu
@pytest.mark.parametrize("size", [(128, 128), *SIZES], ids=lambda size: "K{}-V{}".format(*size))
def test_segments_are_cut(size: tuple[int, int], cuda: str) -> None:
    """Without the norm, a call has scratch memory for its segments only."""
    s = SEGMENTS
    layout = (None, s.B, s.tokens, s.H, s.HV, *size, s.N)
    assert calls.workspace_floats(*layout, True, True, False, False, 0, 0, 0) > 0
    assert calls.workspace_floats(*layout, True, True, False, True, 0, 0, 0) == 0


@gpu
@DTYPES
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parity(case: Case, dtype: torch.dtype, cuda: str) -> None:
    check_parity(make_call(case, dtype, cuda, Options()), ("reference", "triton", "cuda"))


ONE_OF_NINE = (700, 12000, 300, 0, 650, 70, 500, 900, 680)
LONGEST = fast_case("longest", "one is long", lengths=ONE_OF_NINE, orphans=9, H=2, HV=8)


@gpu
@DTYPES
@pytest.mark.parametrize("size", [(128, 128), (64, 64)], ids=lambda size: "K{}-V{}".format(*size))
def test_told_the_longest(size: tuple[int, int], dtype: torch.dtype, cuda: str) -> None:
    """It is cut then, and not else; and whatever is told, the results are right."""
    s = sized(LONGEST, *size)
    layout = (None, s.B, s.tokens, s.H, s.HV, *size, s.N, True, True, False, False)
    assert calls.workspace_floats(*layout, 12000, 900, 700) > calls.workspace_floats(
        *layout, 0, 0, 0
    )
    call = make_call(s, dtype, cuda, Options())
    for told in (s.offsets(), [0, *[s.tokens] * s.N], [n * 1700 for n in range(s.N + 1)]):
        check_parity(call._replace(told=tuple(told)), ("triton", "cuda"), chunked=True)


@gpu
@DTYPES
@pytest.mark.parametrize("size", SIZES, ids=lambda size: "K{}-V{}".format(*size))
@pytest.mark.parametrize("case", [PADDED, RAGGED, SEGMENTS], ids=lambda case: case.name)
def test_sizes(case: Case, size: tuple[int, int], dtype: torch.dtype, cuda: str) -> None:
    check_parity(
        make_call(sized(case, *size), dtype, cuda, Options()), ("reference", "triton", "cuda")
    )


@gpu
@DTYPES
@pytest.mark.parametrize("size", LESS, ids=lambda size: "K{}-V{}".format(*size))
def test_many_tiles(size: tuple[int, int], dtype: torch.dtype, cuda: str) -> None:
    """More parts of V than multiprocessors: a block has several tiles."""
    case = sized(fast_case("many", "", lengths=(70, 0, 130, 1), orphans=9, HV=96), *size)
    check_parity(make_call(case, dtype, cuda, OPTIONS["all"]))


@gpu
@DTYPES
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    "case", [PADDED, RAGGED, *(sized(RAGGED, *s) for s in LESS)], ids=lambda case: case.name
)
def test_options(case: Case, name: str, dtype: torch.dtype, cuda: str) -> None:
    check_parity(make_call(case, dtype, cuda, OPTIONS[name]))


@gpu
@DTYPES
@pytest.mark.parametrize("g", [0.0, -1e-4, -20.0, -1e30, -math.inf])
@pytest.mark.parametrize(
    "case",
    [
        *(RAGGED, SEGMENTS),
        *(sized(case, *s) for case in (RAGGED, SEGMENTS) for s in WHOLE),
    ],
    ids=lambda case: case.name,
)
def test_one_gate_everywhere(case: Case, g: float, dtype: torch.dtype, cuda: str) -> None:
    """From a state that never forgets to one that keeps nothing, in full and ragged chunks."""
    call = make_call(case, dtype, cuda, Options())
    check_parity(call._replace(x=call.x.but(g=torch.full_like(call.x.g, g))))


@gpu
@DTYPES
def test_some_gates_forget_all(dtype: torch.dtype, cuda: str) -> None:
    """-inf among mild gates: at a chunk's start, end, twice in a row, and in the ragged end."""
    call = make_call(PADDED, dtype, cuda, Options())
    gates = call.x.g.clone()
    gates[:, [0, 5, 6, 63, 64, 140]] = -torch.inf
    check_parity(call._replace(x=call.x.but(g=gates)))


@gpu
@DTYPES
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("key", ["axis", "one", "many"])
def test_one_beta(key: str, beta: float, dtype: torch.dtype, cuda: str) -> None:
    """No decay: beta 0 writes nothing, 1 replaces, 2 reflects; under one key for all tokens, along
    an axis (exactly of length 1) or not, and under keys of their own."""
    call = make_call(PADDED, dtype, cuda, Options())
    x = call.x.but(
        beta=torch.full_like(call.x.beta, beta), g=torch.zeros_like(call.x.g), k=call.x.k.clone()
    )
    if key == "axis":
        x.k.zero_()[..., 3] = 1
    elif key == "one":
        # A little shorter than 1: under rounding a reflection must not grow.
        x.k.copy_(0.9 * unit_rows(128))
    results = check_parity(call._replace(x=x))
    if beta == 0:
        assert same_bits(results["cuda"][1], x.initial_state.float())


@gpu
@DTYPES
def test_zero_keys(dtype: torch.dtype, cuda: str) -> None:
    """Rows of zeros under the norm: no NaN, nothing written."""
    call = make_call(PADDED, dtype, cuda, Options(l2norm=True))
    k = call.x.k.clone()
    k[:, ::2] = 0
    check_parity(call._replace(x=call.x.but(k=k)))


@gpu
@pytest.mark.parametrize("scale", [0.0, -0.5, 2.5])
def test_scale(scale: float, cuda: str) -> None:
    o, _ = check_parity(make_call(PADDED, BF16, cuda, Options(scale=scale)))["cuda"]
    assert bool((o == 0).all()) == (scale == 0)


@gpu
@pytest.mark.parametrize("state", [BF16, FP16, FP32, FP64], ids=str)
@pytest.mark.parametrize("side", [BF16, FP16, FP32, FP64], ids=str)
def test_side_inputs_of_any_dtype(side: torch.dtype, state: torch.dtype, cuda: str) -> None:
    call = make_call(RAGGED, BF16, cuda, Options(gate=True, bias=True))
    x = call.x.but(
        g=call.x.g.to(side),
        beta=call.x.beta.to(FP16 if side == BF16 else side),
        initial_state=call.x.initial_state.to(state),
    )
    A_log, dt_bias = (y.to(side) for y in (call.A_log, call.dt_bias) if y is not None)
    check_parity(call._replace(x=x, A_log=A_log, dt_bias=dt_bias), ("cuda",))


@gpu
@DTYPES
@pytest.mark.parametrize("number", range(1000, 1020))
def test_random(number: int, dtype: torch.dtype, cuda: str) -> None:
    """`tests/support/fast_parity.py` makes as many as one likes."""
    call, own = random_call(number, cuda, small=False)
    if own != dtype:
        call = call._replace(x=call.x.but(**{n: getattr(call.x, n).to(dtype) for n in "qkv"}))
    check_parity(call, ("cuda",))
