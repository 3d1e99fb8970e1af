"""The sums of a token over K, alone: against float64, and in any order of K; and the forms."""

import itertools

import pytest
import torch
from helpers import BF16, FP16, FP32, same_bits
from recurrent_cases import STEPS, Sizes, step_call
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl

from gdn_triton import recurrent_step
from gdn_triton._triton.tiles import UNFUSED, Tile
from gdn_triton.recurrent import plans
from gdn_triton.recurrent.triton import plan
from gdn_triton.recurrent.triton.form import RecurrentForm, recurrent_form
from gdn_triton.recurrent.triton.sums import column_sums, products, sum_of_rows, sum_of_shared_rows


@triton.jit
def products_kernel(q, k, out, K: tl.constexpr):
    i = tl.arange(0, K)
    qq, kk, qk = products(tl.load(q + i), tl.load(k + i))
    tl.store(out, qq)
    tl.store(out + 1, kk)
    tl.store(out + 2, qk)


@triton.jit
def column_sums_kernel(
    s,
    q,
    k,
    out,
    K: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    FOLD: tl.constexpr,
    V_FIRST: tl.constexpr,
    WHOLE: tl.constexpr,
):
    i, j = tl.arange(0, K // ROWS), tl.arange(0, V)
    tiles, b_q, b_k = (), (), ()
    for row in tl.static_range(ROWS):
        i_k = i + row * (K // ROWS)
        tiles += (tl.load(s + i_k[:, None] * V + j[None, :]),)
        b_q += (tl.load(q + i_k),)
        b_k += (tl.load(k + i_k),)
    sq, sk = column_sums(tiles, 0, b_q, b_k, ROWS, FOLD, V_FIRST, WHOLE)
    tl.store(out + j, sq)
    tl.store(out + V + j, sk)


_BF16_MARK = pytest.mark.gpu("bf16 is not used in Triton's interpreter")


def sum_of_neighbours(x: Tensor) -> Tensor:
    """The sum of x [K] by steps that add neighbours."""
    while x.numel() > 1:
        x = x[0::2] + x[1::2]
    return x[0]


@pytest.mark.parametrize("warps", [1, 4, 8])
@pytest.mark.parametrize("K", [16, 256])
@pytest.mark.parametrize("kind", ["normal", "one large", "opposite", "tiny", "zero"])
def test_products(kind: str, K: int, warps: int, device: str) -> None:
    """Against float64. The order of the sums is fixed, so warps that share q and k change no
    bit."""
    q, k = torch.randn(2, K)
    if kind == "one large":
        q[3] = 1e6
    elif kind == "opposite":
        q = torch.full((K,), 2 - 2.0**-23)
        k = -q
    elif kind == "tiny":
        q, k = q * 1e-12, k * 1e-15
    elif kind == "zero":
        k = torch.zeros(K)
    q, k = q.to(device), k.to(device)
    found = torch.empty(3, device=device)
    products_kernel[(1,)](q, k, found, K, num_warps=warps, **UNFUSED)
    assert same_bits(found, torch.stack([sum_of_neighbours(x) for x in (q * q, k * k, q * k)]))
    a, b = q.double(), k.double()
    exact = torch.stack([(a * a).sum(), (b * b).sum(), (a * b).sum()])
    # A product is rounded, and then once in each step.
    most = torch.stack([exact[0], exact[1], (a * b).abs().sum()])
    steps = K.bit_length()
    assert ((found.double() - exact).abs() <= steps * torch.finfo(FP32).eps / 2 * most).all()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("fold", [0, 1, 3])
@pytest.mark.parametrize("rows", [1, 4])
def test_column_sums(rows: int, fold: int, v_first: bool, whole: bool, device: str) -> None:
    """Every row counts once, whatever is folded."""
    K, V = 32, 16
    s, q, k = torch.randn(K, V), torch.randn(K), torch.randn(K)
    s, q, k = s.to(device), q.to(device), k.to(device)
    out = torch.empty(2, V, device=device)
    sizes = (K, V, rows, fold, v_first, whole)
    column_sums_kernel[(1,)](s, q, k, out, *sizes, num_warps=1, **UNFUSED)
    for x, found in ((q, out[0]), (k, out[1])):
        exact = x.double() @ s.double()
        most = x.double().abs() @ s.double().abs()
        bound = K * torch.finfo(FP32).eps / 2 * most
        assert ((found.double() - exact).abs() <= bound).all()


@triton.jit
def sum_of_rows_kernel(x, out, ROWS: tl.constexpr, V: tl.constexpr, SHARED: tl.constexpr):
    i, j = tl.arange(0, ROWS), tl.arange(0, V)
    p = x + i[:, None] * V + j[None, :]
    both = tl.join(tl.load(p), -tl.load(p))
    sums = sum_of_shared_rows(both) if SHARED else sum_of_rows(both)
    tl.store(out + j, tl.split(sums)[0])


@pytest.mark.parametrize(
    ("warps", "rows", "shared"),
    [(1, 8, False), (4, 8, False), *itertools.product((2, 4), (4, 8, 32), (True,))],
)
@pytest.mark.parametrize("V", [4, 16, 64])
def test_sum_of_rows(V: int, warps: int, rows: int, shared: bool, device: str) -> None:
    """The order of the additions is that of the function's text in every register layout.
    An infinity stays in its column."""
    x = torch.randn(rows, V)
    x[2, 2] = torch.inf
    if device != "cpu":
        x[:, 1] = -0.0  # The sums of Triton's interpreter begin with 0.
    x, out = x.to(device), torch.empty(V, device=device)
    sum_of_rows_kernel[(1,)](x, out, rows, V, shared, num_warps=warps, **UNFUSED)
    sums = x[0::2] + x[1::2]
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    assert same_bits(out, sums[0])


# Bytes of all states of a call: a few, more, those that fit the cache, and still more.
STATE_BYTES = [0, 2**22, 2**23, 2**24, 2**25, 2**28]


# One token, and several with the state after each of them, or after the last alone.
CALLS = [
    {"one_token": True},
    {"one_token": False, "every_token": True},
    {"one_token": False, "every_token": False},
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("state_bytes", STATE_BYTES)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("K", [1, 3, 16, 64, 128, 200, 256])
@pytest.mark.parametrize("V", [1, 8, 24, 128, 512])
def test_forms(V: int, K: int, v_first: bool, state_bytes: int, call: dict[str, bool]) -> None:
    """A thread holds no more than it has registers for, and folds no more rows than it holds; no
    part lies past V. What sums depend on is the same for all calls."""
    for itemsize in (2, 4):
        form = recurrent_form(K, V, v_first, itemsize, state_bytes=state_bytes, **call)
        BK, BV, warps = form.tile[:3]
        assert BK >= K and BK % form.rows == 0 and form.fold >= 0
        assert BK * BV * form.parts * itemsize <= 64 * 32 * warps * 4
        assert (form.parts - 1) * BV < V
        BR = BK // form.rows
        assert 2**form.fold < BR or BK == form.rows * 2**form.fold
        common = recurrent_form(K, V, v_first, itemsize)
        assert call["one_token"] or not form.compact
        if v_first:
            assert form.groups == 1
            assert warps == 1 and form.rows == 1 and form.fold == common.fold
            # A thread holds the rows of its load.
            assert 2**form.fold <= 16 // itemsize
            continue
        # The number of sums of a column that threads share, and the rows in each sum.
        shared = BR // 2**form.fold
        assert shared == BK // common.rows // 2**common.fold
        assert shared * form.rows * 2**form.fold == BK
        # Each of these sums lies in one thread, which loads four numbers at once, or eight. The
        # columns of a group lie in one warp.
        assert 32 * warps * (16 // itemsize) >= shared * BV or 128 == shared * BV
        assert form.groups == 1 or (form.groups == warps and form.compact)
        # A thread has one row of a tile.
        assert form.fold == 0 or not form.compact


def test_sequences_have_one_tile_of_rows() -> None:
    """The rows of their states may have decays, by which the kernel multiplies one tile."""
    for K in (16, 64, 128, 256):
        for one_token in (False, True):
            form = recurrent_form(K, 128, False, 4, is_step=False, one_token=one_token)
            other = recurrent_form(K, 128, False, 4, one_token=one_token)
            assert form.rows == 1
            assert form.rows * 2**form.fold == other.rows * 2**other.fold


def test_forms_of_the_common_head() -> None:
    """Those that were the fastest."""
    for state_bytes, tile, parts, compact in (
        (0, Tile(128, 4, 1, 1), 1, False),
        (2**23, Tile(128, 16, 1, 1), 1, False),
        (2**24, Tile(128, 8, 1, 1, 128), 4, False),
        (2**28, Tile(128, 32, 1, 1, 168), 1, True),
    ):
        form = recurrent_form(128, 128, True, 2, state_bytes=state_bytes)
        assert form == RecurrentForm(tile, parts, 1, fold=3, ordered=True, compact=compact)
    for state_bytes, tile, rows, fold, compact, groups in (
        (0, Tile(128, 16, 1, 1), 16, 0, False, 1),
        (2**22, Tile(128, 32, 1, 1), 4, 2, False, 1),
        (2**24, Tile(128, 128, 4, 1), 16, 0, True, 4),
    ):
        form = recurrent_form(128, 128, False, 2, state_bytes=state_bytes)
        assert form == RecurrentForm(tile, 1, rows, fold, True, compact, groups)
    for state_bytes, tile, rows, fold, compact in (
        (0, Tile(128, 16, 1, 1), 16, 0, True),
        (2**24, Tile(128, 32, 2, 1), 16, 0, False),
        (2**25, Tile(128, 64, 4, 1), 1, 4, False),
    ):
        form = recurrent_form(128, 128, False, 4, state_bytes=state_bytes)
        assert form == RecurrentForm(tile, 1, rows, fold, compact=compact)
    for state_bytes, BV in ((0, 4), (2**23, 16)):
        form = recurrent_form(128, 128, True, 4, state_bytes=state_bytes)
        assert form == RecurrentForm(Tile(128, BV, 1, 1), fold=2)


@pytest.mark.parametrize("tokens", ["one", "several", "packed"])
@pytest.mark.parametrize("V", [36, 100])
@pytest.mark.parametrize("pool", [FP32, FP16, pytest.param(BF16, marks=_BF16_MARK)])
@pytest.mark.parametrize("v_first", [False, True])
def test_forms_change_no_bits(
    v_first: bool, pool: torch.dtype, V: int, tokens: str, device: str,
    monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """A column's o and state are the same in the forms of all numbers of states and of tokens.
    With V = 36 and value-first states of 16 bits, the last of two programs with four tiles owns
    half of a tile, and three tiles past V."""
    monkeypatch.setenv("GDN_BACKEND", "triton")
    row = {name: values[0] for name, values in STEPS.items()}
    row |= {"dtype": FP16, "pool": pool, "tokens": tokens, "v_first": v_first, "l2norm": True}
    row |= {"sizes": Sizes(B=3, T=2, H=1, HV=2, K=128, V=V), "mixed": True, "raw": True}
    x = step_call(row, device).arguments
    found, forms = [], set()
    for state_bytes, call in itertools.product(STATE_BYTES, CALLS):
        chosen = {"state_bytes": state_bytes, **call}
        form = recurrent_form(128, V, v_first, pool.itemsize, **chosen)
        if form in forms:
            continue
        forms.add(form)
        monkeypatch.setattr(plan, "recurrent_form", lambda *_, form=form, **__: form)
        # Plans that one call made must not serve the next one.
        monkeypatch.setattr(plans, "_plans", {})
        state = x["state"].clone()
        found.append((recurrent_step(**{**x, "state": state}), state))
    assert len(found) > 1
    for o, state in found[1:]:
        assert same_bits(o, found[0][0]) and same_bits(state, found[0][1])
