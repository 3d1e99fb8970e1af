"""The specification against itself, on a CPU: the two forms, the steps, and the promises in words.

The token-by-token form is checked against a loop in NumPy that shares no code with it, the chunked
form against the token-by-token form, every step against its formula written element by element.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad as fwAD

from gdn_triton import reference
from gdn_triton.constants import CHUNK_SIZES, L2NORM_EPS, LOG2_DECAY_FLOOR, SOFTPLUS_THRESHOLD
from gdn_triton.reference import (
    ChunkResult,
    chunk_gated_delta_rule,
    recurrent_gated_delta_rule,
)

FP64, FP32 = torch.float64, torch.float32
INTERMEDIATES = ("g_cumsum", "A", "A_inv", "w", "u", "h", "v_new")


# ------------------------------------------------------------------------------------------- inputs


@dataclass(frozen=True)
class Case:
    """One regime. `lengths` is packed; None is padded with B rows of T tokens."""

    T: int = 40
    B: int = 1
    lengths: tuple[int, ...] | None = None
    H: int = 2
    HV: int = 2
    K: int = 8
    V: int = 8
    chunk_size: int = 16
    g: float | None = None  # None: uniform in (-1, 0); a number: that gate at every token
    holes: bool = False  # a third of the gates are -inf
    beta: float | None = None  # None: uniform in (0, 1)
    same_key: bool = False
    orphans: int = 0  # tokens past the last sequence
    spread: bool = False  # gates between -1e-3 and -20, log-uniform


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor
    cu_seqlens: Tensor | None

    @property
    def tokens(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.g, self.beta

    def options(self) -> dict[str, Any]:
        return {"initial_state": self.initial_state, "cu_seqlens": self.cu_seqlens}

    def to(self, dtype: torch.dtype) -> "Inputs":
        cast = {
            name: getattr(self, name).to(dtype)
            for name in ("q", "k", "v", "g", "beta", "initial_state")
        }
        return replace(self, **cast)


def make(case: Case, seed: int = 0) -> Inputs:
    """float64 inputs whose values float32 holds exactly, so a narrower run has the same problem."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).double()

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator).double()

    B, T, N = case.B, case.T, case.B
    cu_seqlens = None
    if case.lengths is not None:
        B, T, N = 1, sum(case.lengths) + case.orphans, len(case.lengths)
        cu_seqlens = torch.tensor([0, *np.cumsum(case.lengths, dtype=np.int64).tolist()])
    q, k = normal(B, T, case.H, case.K), normal(B, T, case.H, case.K)
    v = normal(B, T, case.HV, case.V)
    if case.same_key:
        k = k[:, :1].expand_as(k).clone() if T else k
    # Unit keys, as the layer has them: with beta in [0, 2] no step then amplifies the state.
    k = torch.nn.functional.normalize(k, dim=-1).float().double()
    g = -uniform(B, T, case.HV) if case.g is None else torch.full((B, T, case.HV), case.g).double()
    if case.spread:
        g = -(1e-3 * (20 / 1e-3) ** uniform(B, T, case.HV)).float().double()
    if case.holes:
        g = g.masked_fill(uniform(B, T, case.HV) < 1 / 3, -math.inf)
    beta = uniform(B, T, case.HV) if case.beta is None else torch.full_like(g, case.beta)
    initial_state = normal(N, case.HV, case.K, case.V)
    return Inputs(q, k, v, g, beta, initial_state, cu_seqlens)


# Each entry is a place where the two forms, the two layouts or the arithmetic could part ways.
REGIMES = {
    "one_token": Case(T=1),
    "below_chunk": Case(T=15),
    "at_chunk": Case(T=16),
    "above_chunk": Case(T=17),
    "two_rows_with_tail": Case(B=2, T=39),
    "chunk_32": Case(T=75, chunk_size=32),
    "chunk_64": Case(T=150, chunk_size=64),
    "grouped_heads": Case(B=2, H=2, HV=6),
    "one_key_head": Case(H=1, HV=3),
    "wide_value": Case(K=5, V=12),
    "wide_key": Case(K=12, V=5, HV=4),
    "tiny_heads": Case(K=1, V=1),
    "no_tokens": Case(B=2, T=0),
    "no_rows": Case(B=0, T=5),
    "packed": Case(lengths=(3, 40, 16, 17), HV=4, K=6),
    "packed_aligned": Case(lengths=(32, 16, 48)),
    "packed_with_empty": Case(lengths=(0, 5, 0, 0, 33, 1, 0), HV=4),
    "packed_all_empty": Case(lengths=(0, 0)),
    "packed_none": Case(lengths=()),
    "packed_orphans": Case(lengths=(20, 7), orphans=9),
    "packed_only_orphans": Case(lengths=(), orphans=9),
    "strong_decay": Case(g=-20.0),
    "forget_all": Case(g=-math.inf),
    "forget_some": Case(B=2, T=50, holes=True, HV=4),
    "packed_forget_some": Case(lengths=(40, 1, 19), holes=True),
    "no_decay": Case(g=0.0),
    "spread_decay": Case(T=100, spread=True),
    "no_write": Case(beta=0.0),
    "full_write": Case(beta=1.0),
    "reflect": Case(beta=2.0),
    "same_key_full_write": Case(beta=1.0, same_key=True, g=0.0),
    "same_key_reflect": Case(beta=2.0, same_key=True, g=0.0, T=70, chunk_size=64),
}
regimes = pytest.mark.parametrize("case", REGIMES.values(), ids=REGIMES.keys())


# -------------------------------------------------------------------------------------- comparisons


def relative_error(actual: Tensor, expected: Tensor, at_least: float = 0.0) -> float:
    """Largest error over the largest expected magnitude, or over 1 where all that is expected is 0.

    `at_least` bounds that magnitude from below.
    """
    if expected.numel() == 0:
        return 0.0
    error = (actual.double() - expected.double()).abs().max().item()
    size = max(expected.double().abs().max().item(), at_least)
    return error / size if size > 0 else error


def assert_close(
    actual: Tensor | None, expected: Tensor, tolerance: float = 1e-12, at_least: float = 0.0
) -> None:
    assert actual is not None
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert torch.isfinite(expected).all()
    assert torch.isfinite(actual).all()
    error = relative_error(actual, expected, at_least)
    assert error <= tolerance, f"relative error {error:.3e} above {tolerance:.3e}"


def sequences(inputs: Inputs) -> list[tuple[int, slice]]:
    """(batch row, tokens) of each sequence."""
    if inputs.cu_seqlens is None:
        B, T = inputs.g.shape[:2]
        return [(b, slice(0, T)) for b in range(B)]
    bounds = inputs.cu_seqlens.tolist()
    return [(0, slice(bounds[n], bounds[n + 1])) for n in range(len(bounds) - 1)]


def alone(inputs: Inputs, n: int) -> Inputs:
    """Sequence n as a padded batch of one."""
    b, tokens = sequences(inputs)[n]
    q, k, v, g, beta = (x[b : b + 1, tokens] for x in inputs.tokens)
    return Inputs(q, k, v, g, beta, inputs.initial_state[n : n + 1], None)


# -------------------------------------------------------------------------- the token-by-token form


def numpy_recurrence(inputs: Inputs, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta = (x.numpy() for x in inputs.tokens)
    group = v.shape[2] // q.shape[2]
    o, states = np.zeros_like(v), inputs.initial_state.numpy().copy()
    for n, (b, tokens) in enumerate(sequences(inputs)):
        for hv in range(v.shape[2]):
            S, h = states[n, hv], hv // group
            for t in range(tokens.start, tokens.stop):
                S = math.exp(g[b, t, hv]) * S
                error = v[b, t, hv] - S.T @ k[b, t, h]
                S = S + np.outer(k[b, t, h], beta[b, t, hv] * error)
                o[b, t, hv] = scale * S.T @ q[b, t, h]
            states[n, hv] = S
    return torch.from_numpy(o), torch.from_numpy(states)


@regimes
def test_recurrent_is_the_formula(case: Case) -> None:
    inputs = make(case)
    o, final_state = recurrent_gated_delta_rule(*inputs.tokens, **inputs.options())
    expected_o, expected_state = numpy_recurrence(inputs, case.K**-0.5)
    assert_close(o, expected_o)
    assert_close(final_state, expected_state)


@pytest.mark.parametrize("form", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
@pytest.mark.parametrize("scale", [0.0, -1.5, 1.0])
def test_scale_is_taken_literally(form: Callable[..., tuple], scale: float) -> None:
    inputs = make(Case())
    o, final_state = form(*inputs.tokens, scale=scale, **inputs.options())[:2]
    expected_o, expected_state = numpy_recurrence(inputs, scale)
    assert_close(o, expected_o)
    assert_close(final_state, expected_state)


@pytest.mark.parametrize("form", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
def test_no_initial_state_is_zero(form: Callable[..., tuple]) -> None:
    inputs = make(Case(lengths=(20, 0, 3), HV=4, V=5))
    zero = torch.zeros_like(inputs.initial_state)
    without = form(*inputs.tokens, cu_seqlens=inputs.cu_seqlens)
    given = form(*inputs.tokens, initial_state=zero, cu_seqlens=inputs.cu_seqlens)
    assert torch.equal(without[0], given[0])
    assert torch.equal(without[1], given[1])
    assert not without[1][1].any()


# -------------------------------------------------------------------------------- chunk = recurrent


@regimes
def test_chunk_is_recurrent(case: Case) -> None:
    inputs = make(case)
    expected = recurrent_gated_delta_rule(*inputs.tokens, **inputs.options())
    result = chunk_gated_delta_rule(*inputs.tokens, **inputs.options(), chunk_size=case.chunk_size)
    # -inf gates leave sums near -1100 * BT, whose rounding is about 1e-11 of a factor.
    assert_close(result.o, expected[0], 1e-10)
    assert_close(result.final_state, expected[1], 1e-10)


@pytest.mark.parametrize("chunk_size", [1, 5, *CHUNK_SIZES, 1000])
def test_every_chunk_size_gives_the_same(chunk_size: int) -> None:
    for case in (Case(B=2, T=70, HV=4), Case(lengths=(70, 0, 33), HV=4)):
        inputs = make(case)
        expected = recurrent_gated_delta_rule(*inputs.tokens, **inputs.options())
        result = chunk_gated_delta_rule(*inputs.tokens, **inputs.options(), chunk_size=chunk_size)
        assert_close(result.o, expected[0])
        assert_close(result.final_state, expected[1])


def test_full_write_of_one_key_recalls_the_last_value() -> None:
    """The delta rule's point: with beta = 1, no decay and k = q of length 1, o is scale * v."""
    inputs = make(REGIMES["same_key_full_write"])
    result = chunk_gated_delta_rule(
        inputs.k, *inputs.tokens[1:], **inputs.options(), scale=1.0, chunk_size=16
    )
    assert_close(result.o, inputs.v, 1e-6)  # k is of length 1 only as far as float32 goes


@pytest.mark.parametrize("form", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
@pytest.mark.parametrize("dtype", [FP32, FP64])
@pytest.mark.parametrize("at", [0, 7, 64, 80])
def test_minus_infinity_forgets_everything(
    form: Callable[..., tuple], dtype: torch.dtype, at: int
) -> None:
    inputs = make(Case(T=100)).to(dtype)
    inputs.g[:, at] = -math.inf
    o, final_state = form(*inputs.tokens, **inputs.options())[:2]
    fresh_o, fresh_state = form(*(x[:, at:] for x in inputs.tokens))[:2]
    # The chunked form sums the floor into g_cumsum, which rounds the chunk's later gates.
    tolerance = 1e-4 if dtype == FP32 else 1e-11
    assert_close(o[:, at:], fresh_o, tolerance)
    assert_close(final_state, fresh_state, tolerance)


@pytest.mark.parametrize("dtype", [FP32, FP64])
def test_floor_is_an_exact_zero(dtype: torch.dtype) -> None:
    floor = LOG2_DECAY_FLOOR[dtype]
    assert torch.tensor(floor, dtype=dtype).exp2().item() == 0.0
    g = torch.full((1, 64, 1), -math.inf, dtype=dtype)
    g_cumsum = reference.gate_cumsum(g)
    assert torch.isfinite(g_cumsum).all()
    assert not (g_cumsum[:, 1:] - g_cumsum[:, :-1]).exp2().any()
    assert not g_cumsum.exp2().any()


@regimes
def test_float32_chunk_is_about_as_good_as_float32_recurrent(case: Case) -> None:
    """Budget: 4 times the float32 token-by-token run's own error, and a band of rounding."""
    inputs = make(case)
    exact = recurrent_gated_delta_rule(*inputs.tokens, **inputs.options())
    narrow = inputs.to(FP32)
    peer = recurrent_gated_delta_rule(*narrow.tokens, **narrow.options())
    result = chunk_gated_delta_rule(*narrow.tokens, **narrow.options(), chunk_size=case.chunk_size)
    eps = torch.finfo(FP32).eps
    band = 8 * eps
    if case.holes:
        # After a floored gate 2^(g_i - g_j) is only as exact as two sums beyond 160 are.
        floored = inputs.g.clamp_min(LOG2_DECAY_FLOOR[FP32] * math.log(2))
        sums = reference.chunk_local_cumsum(floored, case.chunk_size, cu_seqlens=inputs.cu_seqlens)
        band += eps * sums.abs().max().item()
    for ours, theirs, right in zip(result[:2], peer, exact, strict=True):
        assert ours.dtype == FP32
        assert torch.isfinite(ours).all()
        budget = 4 * relative_error(theirs, right) + band
        error = relative_error(ours, right)
        assert error <= budget, f"relative error {error:.3e} above {budget:.3e}"


# -------------------------------------------------------------------------------------------- steps


def formulas(inputs: Inputs, chunk_size: int, scale: float) -> dict[str, Tensor]:
    """Every intermediate, element by element from its definition, one chunk and head at a time."""
    q, k, v, g, beta = (x.numpy() for x in inputs.tokens)
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    BT = chunk_size
    spans = [
        (n, b, range(start, min(start + BT, tokens.stop)))
        for n, (b, tokens) in enumerate(sequences(inputs))
        for start in range(tokens.start, tokens.stop, BT)
    ]
    out = {
        "g_cumsum": np.zeros((B, T, HV)),
        "A": np.zeros((B, T, HV, BT)),
        "A_inv": np.zeros((B, T, HV, BT)),
        "w": np.zeros((B, T, HV, K)),
        "u": np.zeros((B, T, HV, V)),
        "v_new": np.zeros((B, T, HV, V)),
        "o": np.zeros((B, T, HV, V)),
        "h": np.zeros((len(spans), HV, K, V)),
        "final_state": inputs.initial_state.numpy().copy(),
    }
    for c, (n, b, tokens) in enumerate(spans):
        for hv in range(HV):
            h, size = hv // (HV // H), len(tokens)
            q_c, k_c = q[b, tokens, h], k[b, tokens, h]
            v_c, beta_c = v[b, tokens, hv], beta[b, tokens, hv]
            log2_decay = [max(g[b, t, hv] / math.log(2), -1100.0) for t in tokens]
            G = [math.fsum(log2_decay[: i + 1]) for i in range(size)]
            A, A_qk = np.zeros((size, size)), np.zeros((size, size))
            for i in range(size):
                for j in range(i + 1):
                    factor = math.prod(math.exp(g[b, tokens[m], hv]) for m in range(j + 1, i + 1))
                    A_qk[i, j] = q_c[i] @ k_c[j] * factor
                    if j < i:
                        A[i, j] = beta_c[i] * (k_c[i] @ k_c[j]) * factor
            A_inv = np.linalg.inv(np.eye(size) + A)
            to_start = np.array([2.0**x for x in G])[:, None]
            to_end = np.array([2.0 ** (G[-1] - x) for x in G])[:, None]
            state = out["final_state"][n, hv].copy()
            w = A_inv @ (beta_c[:, None] * to_start * k_c)
            u = A_inv @ (beta_c[:, None] * v_c)
            v_new = u - w @ state
            out["g_cumsum"][b, tokens, hv] = G
            out["A"][b, tokens, hv, :size] = A
            out["A_inv"][b, tokens, hv, :size] = A_inv
            out["w"][b, tokens, hv] = w
            out["u"][b, tokens, hv] = u
            out["v_new"][b, tokens, hv] = v_new
            out["h"][c, hv] = state
            out["o"][b, tokens, hv] = scale * (to_start * (q_c @ state) + A_qk @ v_new)
            out["final_state"][n, hv] = to_start[-1] * state + (to_end * k_c).T @ v_new
    out["h"] = out["h"].reshape(B, -1, HV, K, V)
    return {name: torch.from_numpy(x) for name, x in out.items()}


STEP_CASES = {
    "padded_tail": Case(B=2, T=39, HV=4, K=5, V=7),
    "padded_aligned": Case(B=2, T=32, HV=4, K=5, V=7),
    "packed": Case(lengths=(0, 17, 1, 0, 40, 16), HV=4, K=7, V=5),
    "packed_orphans": Case(lengths=(20, 12), orphans=6, HV=2, H=1),
    "forget_some": Case(B=1, T=45, holes=True),
    "reflect": Case(T=70, chunk_size=32, beta=2.0, g=0.0),
}


@pytest.mark.parametrize("case", STEP_CASES.values(), ids=STEP_CASES.keys())
def test_every_intermediate_is_its_formula(case: Case) -> None:
    inputs = make(case)
    result = chunk_gated_delta_rule(
        *inputs.tokens, **inputs.options(), chunk_size=case.chunk_size, keep_intermediates=True
    )
    expected = formulas(inputs, case.chunk_size, case.K**-0.5)
    assert set(expected) == set(ChunkResult._fields)
    for name, value in expected.items():
        # 1e-10 for the rounding of sums near -1100 * BT, as above.
        assert_close(getattr(result, name), value, 1e-10 if case.holes else 1e-12)


@pytest.mark.parametrize("case", STEP_CASES.values(), ids=STEP_CASES.keys())
def test_steps_in_a_row_are_the_whole(case: Case) -> None:
    inputs = make(case)
    q, k, v, g, beta = inputs.tokens
    at: dict[str, Any] = {"cu_seqlens": inputs.cu_seqlens}
    sized: dict[str, Any] = {"chunk_size": case.chunk_size, **at}
    whole = chunk_gated_delta_rule(
        *inputs.tokens, **inputs.options(), keep_intermediates=True, chunk_size=case.chunk_size
    )
    g_cumsum = reference.gate_cumsum(g, case.chunk_size, **at)
    A = reference.kkt(k, g_cumsum, beta, **sized)
    A_inv = reference.solve(A, **at)
    w, u = reference.wy(k, v, g_cumsum, beta, A_inv, **at)
    h, v_new, final_state = reference.state_pass(k, w, u, g_cumsum, inputs.initial_state, **sized)
    o = reference.output(q, k, v_new, h, g_cumsum, **sized)
    steps = ChunkResult(o, final_state, g_cumsum, A, A_inv, w, u, h, v_new)
    for name in ChunkResult._fields:
        assert_close(getattr(steps, name), getattr(whole, name), 1e-14)
        assert getattr(steps, name).is_contiguous()
        assert getattr(whole, name).is_contiguous()


def test_state_pass_without_initial_state_starts_from_zero() -> None:
    inputs = make(Case(lengths=(20, 3)))
    _, k, v, g, _ = inputs.tokens
    arguments = (k, k, v, reference.gate_cumsum(g, 16, cu_seqlens=inputs.cu_seqlens))
    zero = torch.zeros_like(inputs.initial_state)
    options: dict[str, Any] = {"chunk_size": 16, "cu_seqlens": inputs.cu_seqlens}
    without = reference.state_pass(*arguments, **options)
    given = reference.state_pass(*arguments, zero, **options)
    for a, b in zip(without, given, strict=True):
        assert torch.equal(a, b)
    assert without.final_state.any()


def test_output_scale_defaults_to_rsqrt_K() -> None:
    inputs = make(Case())
    q, k, v, g, _ = inputs.tokens
    h = torch.randn(1, 3, 2, 8, 8, dtype=FP64)
    arguments = (q, k, v, h, reference.gate_cumsum(g, 16))
    default = reference.output(*arguments, chunk_size=16)
    assert torch.equal(default, reference.output(*arguments, 8**-0.5, chunk_size=16))
    assert not reference.output(*arguments, 0.0, chunk_size=16).any()


@pytest.mark.parametrize("lengths", [None, (0, 17, 1, 40, 0)])
def test_cumsum_is_its_formula_and_reverse_its_transpose(lengths: tuple[int, ...] | None) -> None:
    inputs = make(Case(B=2, T=39, lengths=lengths, orphans=3))
    x, y = inputs.g, inputs.beta
    forward = reference.chunk_local_cumsum(x, 16, scale=0.5, cu_seqlens=inputs.cu_seqlens)
    reverse = reference.chunk_local_cumsum(
        y, 16, scale=0.5, reverse=True, cu_seqlens=inputs.cu_seqlens
    )
    expected, expected_reverse = torch.zeros_like(x), torch.zeros_like(y)
    for b, tokens in sequences(inputs):
        for start in range(tokens.start, tokens.stop, 16):
            end = min(start + 16, tokens.stop)
            for t in range(start, end):
                expected[b, t] = 0.5 * x[b, start : t + 1].sum(0)
                expected_reverse[b, t] = 0.5 * y[b, t:end].sum(0)
    assert_close(forward, expected)
    assert_close(reverse, expected_reverse)
    torch.testing.assert_close((forward * y).sum(), (x * reverse).sum(), rtol=1e-12, atol=0)


def test_cumsum_keeps_minus_infinity_and_the_gate_floors_it() -> None:
    g = torch.tensor([-1.0, -math.inf, -1.0], dtype=FP64).reshape(1, 3, 1)
    plain = reference.chunk_local_cumsum(g, 16).flatten()
    assert plain.tolist() == [-1.0, -math.inf, -math.inf]
    floored = reference.gate_cumsum(g, 16).flatten()
    per_token = 1 / math.log(2)
    expected = torch.tensor([-per_token, -per_token - 1100, -2 * per_token - 1100], dtype=FP64)
    assert_close(floored, expected)


# --------------------------------------------------------------------- norm, sigmoid, gate, options


def test_gate_is_its_formula() -> None:
    g_raw = torch.tensor([-50.0, -1.0, 0.0, 3.0, 19.9, 20.1, 300.0], dtype=FP64)
    g_raw = g_raw.reshape(1, -1, 1).expand(1, 7, 2)
    A_log, dt_bias = torch.tensor([0.3, -2.0]).double(), torch.tensor([0.1, -0.4]).double()
    for bias in (dt_bias, None):
        x = g_raw if bias is None else g_raw + bias
        softplus = torch.where(x > SOFTPLUS_THRESHOLD, x, torch.log1p(x.exp()))
        assert_close(reference.gate(g_raw, A_log, bias), -A_log.exp() * softplus)
    assert reference.gate(g_raw, A_log, dt_bias).max() < 0


def test_beta_sigmoid_is_its_formula() -> None:
    x = torch.linspace(-30, 30, 13, dtype=FP64)
    assert_close(reference.beta_sigmoid(x), 1 / (1 + (-x).exp()))
    assert_close(reference.beta_sigmoid(x, allow_neg_eigval=True), 2 / (1 + (-x).exp()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP32, FP64])
def test_l2norm_is_computed_wide_and_rounded(dtype: torch.dtype) -> None:
    x = make(Case()).q.to(dtype)
    x[0, 0] = 0
    exact = x.double() / (x.double().pow(2).sum(-1, keepdim=True) + L2NORM_EPS).sqrt()
    actual = reference.l2norm(x)
    assert actual.dtype == dtype
    assert not actual[0, 0].any()
    # A narrow type's half unit is the one rounding at the end; wide types round at every operation.
    half_units = 1.01 if dtype.itemsize == 2 else 10
    error = (actual.double() - exact).abs()
    assert (error <= half_units * torch.finfo(dtype).eps / 2 * exact.abs()).all()


@pytest.mark.parametrize("form", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
@pytest.mark.parametrize("neg_eigval", [False, True])
def test_options_are_the_functions_applied_first(
    form: Callable[..., tuple], neg_eigval: bool
) -> None:
    inputs = make(Case(lengths=(20, 3), HV=4))
    q, k, v, _, _ = inputs.tokens
    q, k = 3 * q.bfloat16(), 3 * k.bfloat16()
    g_raw, beta_raw = torch.randn(2, 1, 23, 4, dtype=FP64).unbind()
    A_log, dt_bias = torch.randn(2, 4, dtype=FP64).unbind()
    whole = form(
        q,
        k,
        v,
        g_raw,
        beta_raw,
        **inputs.options(),
        use_qk_l2norm=True,
        use_beta_sigmoid=True,
        allow_neg_eigval=neg_eigval,
        use_gate=True,
        A_log=A_log,
        dt_bias=dt_bias,
    )
    apart = form(
        reference.l2norm(q),
        reference.l2norm(k),
        v,
        reference.gate(g_raw, A_log, dt_bias),
        reference.beta_sigmoid(beta_raw, neg_eigval),
        **inputs.options(),
    )
    assert torch.equal(whole[0], apart[0])
    assert torch.equal(whole[1], apart[1])


@pytest.mark.parametrize("form", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
def test_contradictory_options_raise(form: Callable[..., tuple]) -> None:
    inputs = make(Case())
    with pytest.raises(ValueError, match="A_log"):
        form(*inputs.tokens, use_gate=True)
    with pytest.raises(ValueError, match="allow_neg_eigval"):
        form(*inputs.tokens, allow_neg_eigval=True)


def test_chunk_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"chunk_size.*0"):
        chunk_gated_delta_rule(*make(Case()).tokens, chunk_size=0)


def test_intermediates_are_kept_only_when_asked() -> None:
    inputs = make(Case(lengths=(20, 3)))
    plain = chunk_gated_delta_rule(*inputs.tokens, **inputs.options())
    kept = chunk_gated_delta_rule(*inputs.tokens, **inputs.options(), keep_intermediates=True)
    assert all(getattr(plain, name) is None for name in INTERMEDIATES)
    assert all(getattr(kept, name) is not None for name in INTERMEDIATES)
    assert torch.equal(plain.o, kept.o)
    assert torch.equal(plain.final_state, kept.final_state)


@pytest.mark.parametrize("form", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
@pytest.mark.parametrize("case", [Case(HV=4, K=5, V=7), Case(lengths=(20, 0, 1), K=3)])
def test_state_v_first_transposes_the_states(form: Callable[..., tuple], case: Case) -> None:
    inputs = make(case)
    o, final_state = form(*inputs.tokens, **inputs.options())[:2]
    state = inputs.initial_state.transpose(-1, -2).contiguous()
    o_v, final_v = form(
        *inputs.tokens, initial_state=state, cu_seqlens=inputs.cu_seqlens, state_v_first=True
    )[:2]
    assert torch.equal(o_v, o)
    assert torch.equal(final_v, final_state.transpose(-1, -2))
    assert final_v.is_contiguous()


# ---------------------------------------------------------------------- sequences, heads and layout


@pytest.mark.parametrize("form", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
@pytest.mark.parametrize("cut", [0, 1, 37, 64, 100, 150])
def test_split_and_carry_is_the_whole(form: Callable[..., tuple], cut: int) -> None:
    inputs = make(Case(B=2, T=150, HV=4))
    o, final_state = form(*inputs.tokens, **inputs.options())[:2]
    head = form(*(x[:, :cut] for x in inputs.tokens), initial_state=inputs.initial_state)
    tail = form(*(x[:, cut:] for x in inputs.tokens), initial_state=head[1])
    assert_close(torch.cat([head[0], tail[0]], dim=1), o)
    assert_close(tail[1], final_state)


@pytest.mark.parametrize("form", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
def test_split_and_carry_is_the_whole_packed(form: Callable[..., tuple]) -> None:
    lengths = (130, 0, 64, 5, 90)
    cuts = (70, 0, 64, 0, 1)  # inside, in an empty one, at the end, at the start, after one token
    inputs = make(Case(lengths=lengths, HV=4))
    o, final_state = form(*inputs.tokens, **inputs.options())[:2]
    spans = [tokens for _, tokens in sequences(inputs)]
    heads = torch.cat(
        [torch.arange(s.start, s.start + c) for s, c in zip(spans, cuts, strict=True)]
    )
    tails = torch.cat([torch.arange(s.start + c, s.stop) for s, c in zip(spans, cuts, strict=True)])
    cu_heads = torch.tensor([0, *np.cumsum(cuts).tolist()])
    assert inputs.cu_seqlens is not None
    head = form(
        *(x[:, heads] for x in inputs.tokens),
        initial_state=inputs.initial_state,
        cu_seqlens=cu_heads,
    )
    tail = form(
        *(x[:, tails] for x in inputs.tokens),
        initial_state=head[1],
        cu_seqlens=inputs.cu_seqlens - cu_heads,
    )
    assert_close(head[0], o[:, heads])
    assert_close(tail[0], o[:, tails])
    assert_close(tail[1], final_state)


@pytest.mark.parametrize("form", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
@pytest.mark.parametrize("name", ["packed", "packed_with_empty", "packed_forget_some"])
def test_packed_is_each_sequence_alone(form: Callable[..., tuple], name: str) -> None:
    inputs = make(REGIMES[name])
    o, final_state = form(*inputs.tokens, **inputs.options())[:2]
    for n, (b, tokens) in enumerate(sequences(inputs)):
        one = alone(inputs, n)
        expected = form(*one.tokens, initial_state=one.initial_state)
        # Not bit for bit: a batched product may choose its blocking by the size of the batch.
        assert_close(o[b : b + 1, tokens], expected[0], 1e-14)
        assert_close(final_state[n : n + 1], expected[1], 1e-14)


@pytest.mark.parametrize("form", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_rows_are_padded_rows(form: Callable[..., tuple], dtype: torch.dtype) -> None:
    inputs = make(Case(B=3, T=39, HV=4))
    o, final_state = form(*inputs.tokens, **inputs.options())[:2]
    packed = form(
        *(x.flatten(0, 1).unsqueeze(0) for x in inputs.tokens),
        initial_state=inputs.initial_state,
        cu_seqlens=torch.arange(4, dtype=dtype) * 39,
    )
    assert torch.equal(packed[0].reshape_as(o), o)
    assert torch.equal(packed[1], final_state)


@pytest.mark.parametrize("lengths", [(0, 17, 1, 0, 40, 16), (32, 16), (16, 16, 0), (0, 0), ()])
@pytest.mark.parametrize("orphans", [0, 5])
def test_chunk_view(lengths: tuple[int, ...], orphans: int) -> None:
    """Where each token goes, by hand; and that every rearrangement has its inverse."""
    total = sum(lengths)
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths, dtype=np.int64).tolist()])
    chunks = reference.Chunks(total + orphans, 1, 16, cu_seqlens)
    x = torch.arange(1.0, 1 + total + orphans).reshape(1, -1, 1)
    rows, held, valid, steps = [], [], [], []
    start = 0
    for n, length in enumerate(lengths):
        for step, first in enumerate(range(0, length, 16)):
            size = min(16, length - first)
            tokens = [1.0 + start + first + i for i in range(size)]
            rows.append(tokens + [0.0] * (16 - size))
            held.append(tokens + tokens[-1:] * (16 - size))
            valid.append([i < size for i in range(16)])
            steps.append((step, -(-length // 16), n))
        start += length
    assert chunks.lengths == list(lengths)
    assert chunks.C == chunks.offsets[-1] == sum(chunks.num_chunks) == len(rows)
    assert chunks.split(x).flatten(1).tolist() == rows
    assert chunks.split(x, hold=True).flatten(1).tolist() == held
    assert chunks.valid.tolist() == valid
    assert chunks.merge(chunks.split(x)).flatten().tolist() == [
        *range(1, 1 + total),
        *[0.0] * orphans,
    ]
    # At each step the chunk's sequence, longest sequence first, ties in order.
    sequence = torch.tensor([n for _, _, n in steps], dtype=FP32)
    by_step = [s.tolist() for s in chunks.steps(sequence)]
    last = max(chunks.num_chunks, default=0)
    assert by_step == [
        [n for _, _, n in sorted((s for s in steps if s[0] == t), key=lambda s: (-s[1], s[2]))]
        for t in range(max(last, 1))
    ]
    assert [len(s) for s in by_step] == chunks.counts
    assert torch.equal(chunks.unsteps(chunks.steps(sequence)), sequence)
    order = torch.arange(len(lengths))
    assert torch.equal(chunks.unsort_sequences(chunks.sort_sequences(order)), order)


@pytest.mark.parametrize("form", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
def test_grouped_heads_are_repeated_key_heads(form: Callable[..., tuple]) -> None:
    inputs = make(Case(H=2, HV=6))
    q, k, v, g, beta = inputs.tokens
    o, final_state = form(*inputs.tokens, **inputs.options())[:2]
    # Value head hv reads key head hv // 3: each key head repeated in place, not the list repeated.
    repeated = form(
        q.repeat_interleave(3, 2), k.repeat_interleave(3, 2), v, g, beta, **inputs.options()
    )
    assert_close(repeated[0], o)
    assert_close(repeated[1], final_state)


@pytest.mark.parametrize("form", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
@pytest.mark.parametrize("poisoned", ["q", "k", "v", "g", "beta", "initial_state"])
def test_nan_stays_in_its_sequence(form: Callable[..., tuple], poisoned: str) -> None:
    inputs = make(Case(lengths=(20, 37, 1, 70), HV=4))
    clean = form(*inputs.tokens, **inputs.options())[:2]
    bad = 1
    _, tokens = sequences(inputs)[bad]
    target = getattr(inputs, poisoned)
    # The last token: the one a ragged chunk repeats past its end.
    target[(bad, 0) if poisoned == "initial_state" else (0, tokens.stop - 1, 0)] = math.nan
    leaves = [x.requires_grad_() for x in (*inputs.tokens, inputs.initial_state)]
    o, final_state = form(*inputs.tokens, **inputs.options())[:2]
    others = torch.ones(o.shape[1], dtype=torch.bool)
    others[tokens] = False
    keep = [0, 2, 3]
    assert torch.isnan(o[:, tokens]).any()
    assert torch.equal(o[:, others], clean[0][:, others])
    assert torch.equal(final_state[keep], clean[1][keep])
    (o.sum() + final_state.sum()).backward()
    for leaf in leaves[:5]:
        assert leaf.grad is not None
        assert torch.isfinite(leaf.grad[:, others]).all()
    assert inputs.initial_state.grad is not None
    assert torch.isfinite(inputs.initial_state.grad[keep]).all()


@pytest.mark.parametrize("form", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
@pytest.mark.parametrize("lengths", [(20, 7), (16, 16), ()])
@pytest.mark.parametrize("fused", [False, True])
def test_tokens_of_no_sequence_are_not_read(
    form: Callable[..., tuple], lengths: tuple[int, ...], fused: bool
) -> None:
    inputs = make(Case(lengths=lengths, orphans=16))
    total = sum(lengths)
    options, parameters = inputs.options(), []
    if fused:
        # Shared by all tokens: one NaN that reached the gate's gradient would spoil it whole.
        parameters = [torch.full((2,), x, dtype=FP64, requires_grad=True) for x in (0.5, -0.5)]
        options |= {"use_qk_l2norm": True, "use_beta_sigmoid": True, "use_gate": True}
        options |= dict(zip(("A_log", "dt_bias"), parameters, strict=True))
    with torch.no_grad():
        clean = form(*inputs.tokens, **options)[:2]
    for x in inputs.tokens:
        x[:, total:] = math.nan
        x.requires_grad_()
    o, final_state = form(*inputs.tokens, **options)[:2]
    assert torch.equal(o, clean[0])
    assert torch.equal(final_state, clean[1])
    assert not o[:, total:].any()
    o.sum().backward()
    for x in inputs.tokens:
        assert x.grad is not None
        assert torch.isfinite(x.grad).all()
        assert not x.grad[:, total:].any()
        assert x.grad[:, :total].any() == (total > 0)
    for x in parameters:
        assert x.grad is not None
        assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("form", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
def test_strided_views_are_read_where_they_lie(form: Callable[..., tuple]) -> None:
    inputs = make(Case(B=2, T=39))
    expected = form(*inputs.tokens, **inputs.options())[:2]
    joined = torch.cat([inputs.q, inputs.k, inputs.v], dim=-1)
    q, k, v = joined.split(8, dim=-1)
    assert not q.is_contiguous()
    g, beta = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (inputs.g, inputs.beta))
    o, final_state = form(q, k, v, g, beta, **inputs.options())[:2]
    assert torch.equal(o, expected[0])
    assert torch.equal(final_state, expected[1])


@pytest.mark.parametrize("form", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
@pytest.mark.parametrize("case", [Case(), Case(T=0), Case(lengths=(0, 0)), Case(lengths=(0, 30))])
def test_inputs_are_left_alone_and_the_state_is_new(form: Callable[..., tuple], case: Case) -> None:
    inputs = make(case)
    before = [x.clone() for x in (*inputs.tokens, inputs.initial_state)]
    _, final_state = form(*inputs.tokens, **inputs.options())[:2]
    final_state.fill_(7.0)
    for x, y in zip((*inputs.tokens, inputs.initial_state), before, strict=True):
        assert torch.equal(x, y)


# ------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("form", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
@pytest.mark.parametrize(
    "dtypes",
    [
        # q, k, v, g, beta, initial_state
        (torch.bfloat16,) * 6,
        (torch.float16,) * 6,
        (FP32,) * 6,
        (FP64,) * 6,
        (torch.bfloat16, torch.float16, FP32, FP32, torch.bfloat16, FP32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16, FP32, FP32, FP64),
        (FP32, FP32, FP64, FP32, FP32, FP32),
        (FP64, FP32, FP32, FP32, FP32, FP32),
    ],
)
def test_dtypes(form: Callable[..., tuple], dtypes: tuple[torch.dtype, ...]) -> None:
    """o in q's dtype, the state in the compute dtype, narrow inputs upcast before anything else."""
    inputs = make(Case(lengths=(20, 3), HV=4))
    cast = [
        x.to(dtype) for x, dtype in zip((*inputs.tokens, inputs.initial_state), dtypes, strict=True)
    ]
    compute = FP64 if FP64 in dtypes else FP32
    at = {"cu_seqlens": inputs.cu_seqlens}
    o, final_state = form(*cast[:5], initial_state=cast[5], **at)[:2]
    wide = [x.to(compute) for x in cast]
    expected = form(*wide[:5], initial_state=wide[5], **at)
    assert o.dtype == dtypes[0]
    assert final_state.dtype == compute
    assert torch.equal(o, expected[0].to(dtypes[0]))
    assert torch.equal(final_state, expected[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP32, FP64])
def test_step_dtypes(dtype: torch.dtype) -> None:
    inputs = make(Case()).to(dtype)
    q, k, v, g, beta = inputs.tokens
    compute = FP64 if dtype == FP64 else FP32
    A_log = torch.zeros(2, dtype=dtype)
    h = torch.zeros(1, 3, 2, 8, 8, dtype=dtype)
    A = torch.zeros(1, 40, 2, 16, dtype=dtype)
    results = [
        reference.gate(g, A_log, A_log),
        reference.beta_sigmoid(beta),
        reference.chunk_local_cumsum(g, 16),
        reference.gate_cumsum(g, 16),
        reference.kkt(k, g, beta, chunk_size=16),
        reference.solve(A),
        *reference.wy(k, v, g, beta, A),
        *reference.state_pass(k, k, v, g, inputs.initial_state, chunk_size=16),
        reference.output(q, k, v, h, g, chunk_size=16),
    ]
    assert [x.dtype for x in results] == [compute] * len(results)


@pytest.mark.parametrize("form", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
def test_autocast_changes_nothing(form: Callable[..., tuple]) -> None:
    inputs = make(Case()).to(FP32)
    expected = form(*inputs.tokens, **inputs.options())[:2]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (inputs.q @ inputs.k.mT).dtype == torch.bfloat16
        actual = form(*inputs.tokens, **inputs.options())[:2]
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])


# ---------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("form", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
def test_autocast_changes_no_gradient(form: Callable[..., tuple]) -> None:
    """Wherever backward is called, and at second order."""
    inputs = make(Case()).to(FP32)
    leaves = [x.requires_grad_() for x in inputs.tokens]

    def both(autocast_forward: bool, autocast_backward: bool) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast_forward):
            o = form(*leaves)[0]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast_backward):
            first = torch.autograd.grad(o.square().sum(), leaves, create_graph=True)
            loss = sum(x.square().sum() for x in first)
            assert isinstance(loss, Tensor)
            return [*first, *torch.autograd.grad(loss, leaves)]

    expected = both(False, False)
    for where in ((True, True), (False, True), (True, False)):
        for x, y in zip(both(*where), expected, strict=True):
            assert torch.equal(x, y), where


FORMS = pytest.mark.parametrize("form", [recurrent_gated_delta_rule, chunk_gated_delta_rule])


def small_call(form: Callable[..., tuple]) -> tuple[Callable[..., tuple], list[Tensor]]:
    """A packed call as a function of its differentiable inputs, and those."""
    inputs = make(Case(lengths=(2, 0, 1), H=1, HV=2, K=2, V=2, orphans=1))
    options = {"chunk_size": 2} if form is chunk_gated_delta_rule else {}

    def run(*x: Tensor) -> tuple:
        return form(*x[:5], initial_state=x[5], cu_seqlens=inputs.cu_seqlens, **options)[:2]

    return run, [x.requires_grad_() for x in (*inputs.tokens, inputs.initial_state)]


@FORMS
def test_derivatives_of_every_kind(form: Callable[..., tuple]) -> None:
    """Second ones, batched ones, and forward-mode ones of inputs that require no gradient."""
    run, leaves = small_call(form)
    kinds = {"check_forward_ad": True, "check_batched_grad": True}
    assert torch.autograd.gradcheck(run, leaves, **kinds)
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


@FORMS
def test_forward_mode_of_inputs_that_require_a_gradient(form: Callable[..., tuple]) -> None:
    run, leaves = small_call(form)
    tangents = [torch.randn_like(x) for x in leaves]

    def directional(inputs: list[Tensor]) -> list[Tensor]:
        with fwAD.dual_level():
            results = run(*map(fwAD.make_dual, inputs, tangents))
            return [fwAD.unpack_dual(y).tangent.detach() for y in results]

    expected = directional([x.detach() for x in leaves])
    for got, right in zip(directional(leaves), expected, strict=True):
        assert_close(got, right, 1e-14, at_least=1.0)


def test_derivatives_of_solve() -> None:
    """Of entries at and above the diagonal, which are not read, they are 0."""
    A = torch.randn(1, 3, 2, 2, dtype=FP64, requires_grad=True)
    assert torch.autograd.gradcheck(reference.solve, (A,), check_forward_ad=True)
    with fwAD.dual_level():
        tangent = torch.randn_like(A)
        of_leaf, of_other = (
            fwAD.unpack_dual(reference.solve(fwAD.make_dual(x, tangent))).tangent
            for x in (A, A.detach())
        )
    assert_close(of_leaf.detach(), of_other, 1e-14, at_least=1.0)


def gradients(form: Callable[..., tuple], inputs: Inputs, **options: int) -> list[Tensor]:
    """Of q, k, v, g, beta, initial_state, for random upstream gradients on both outputs."""
    leaves = [x.clone().requires_grad_() for x in (*inputs.tokens, inputs.initial_state)]
    o, final_state = form(
        *leaves[:5], initial_state=leaves[5], cu_seqlens=inputs.cu_seqlens, **options
    )[:2]
    generator = torch.Generator().manual_seed(1)
    do = torch.randn(o.shape, generator=generator, dtype=o.dtype)
    dht = torch.randn(final_state.shape, generator=generator, dtype=o.dtype)
    return list(torch.autograd.grad([o, final_state], leaves, [do, dht]))


@regimes
def test_chunk_gradients_are_recurrent_gradients(case: Case) -> None:
    inputs = make(case)
    expected = gradients(recurrent_gated_delta_rule, inputs)
    actual = gradients(chunk_gated_delta_rule, inputs, chunk_size=case.chunk_size)
    for ours, right in zip(actual, expected, strict=True):
        # Strong decay leaves a gradient of g near 1e-9, as a difference of terms near 1; -inf gates
        # round the sums.
        assert_close(ours, right, 1e-10, at_least=1.0)


@pytest.mark.parametrize(
    "name", ["forget_all", "forget_some", "packed_forget_some", "strong_decay"]
)
def test_float32_gradients_are_finite(name: str) -> None:
    case = REGIMES[name]
    inputs = make(case).to(FP32)
    for gradient in gradients(chunk_gated_delta_rule, inputs, chunk_size=case.chunk_size):
        assert torch.isfinite(gradient).all()
        assert gradient.any() or name == "forget_all"


@pytest.mark.parametrize("n", [0, 1, 8, 32, 56])
def test_what_gates_of_minus_infinity_cost_in_float32(n: int) -> None:
    """The rest of their chunk: each adds the floor to sums of which differences are taken, so a
    decay's logarithm is off by the unit roundoff of the sum. The recurrence takes no differences.
    """
    inputs = make(Case(T=64, chunk_size=64))
    others = -inputs.g[:, n:].sum(1).min().item()
    inputs.g[:, :n] = -torch.inf
    exact = recurrent_gated_delta_rule(*inputs.tokens)
    narrow = inputs.to(FP32).tokens
    unit = 2.0**-24
    lost = unit * (math.log(2) * -LOG2_DECAY_FLOOR[FP32] * n + others)
    for form, allowed in ((recurrent_gated_delta_rule, 0.0), (chunk_gated_delta_rule, lost)):
        o, final_state = form(*narrow)[:2]
        assert relative_error(o[:, n:], exact[0][:, n:]) < allowed + 16 * unit
        assert relative_error(final_state, exact[1]) < allowed + 16 * unit


@pytest.mark.parametrize(
    "case",
    [
        Case(T=5, H=1, HV=2, K=3, V=2, chunk_size=4),
        Case(lengths=(3, 0, 5), H=1, K=2, V=3, chunk_size=2, orphans=1),
    ],
    ids=["padded", "packed"],
)
def test_gradcheck(case: Case) -> None:
    inputs = make(case)

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple:
        return chunk_gated_delta_rule(
            q,
            k,
            v,
            g,
            beta,
            initial_state=state,
            cu_seqlens=inputs.cu_seqlens,
            chunk_size=case.chunk_size,
        )[:2]

    leaves = [x.requires_grad_() for x in (*inputs.tokens, inputs.initial_state)]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=False)


def test_gradcheck_through_norm_sigmoid_and_gate() -> None:
    inputs = make(Case(T=5, H=1, HV=2, K=3, V=2))
    generator = torch.Generator().manual_seed(2)
    A_log, dt_bias = torch.randn(2, 2, generator=generator, dtype=FP64).unbind()

    def run(*x: Tensor) -> tuple:
        return chunk_gated_delta_rule(
            *x[:5],
            A_log=x[5],
            dt_bias=x[6],
            use_gate=True,
            use_qk_l2norm=True,
            use_beta_sigmoid=True,
            allow_neg_eigval=True,
            chunk_size=4,
        )[:2]

    leaves = [x.clone().requires_grad_() for x in (*inputs.tokens, A_log, dt_bias)]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=False)
