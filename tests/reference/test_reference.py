"""The specification against itself, on a CPU: the two forms, the steps, and the promises in words.

The token-by-token form is checked against a loop in NumPy that shares no code with it, the chunked
form against the token-by-token form, every step against its formula written element by element.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from reference_cases import (
    FP32,
    FP64,
    REGIMES,
    Case,
    Inputs,
    assert_close,
    make,
    regimes,
    relative_error,
    sequences,
)
from torch import Tensor

from gdn_triton import reference
from gdn_triton.constants import CHUNK_SIZES, L2NORM_EPS, LOG2_DECAY_FLOOR, SOFTPLUS_THRESHOLD
from gdn_triton.reference import (
    ChunkResult,
    chunk_gated_delta_rule,
    recurrent_gated_delta_rule,
)

INTERMEDIATES = ("g_cumsum", "A", "A_inv", "w", "u", "h", "v_new")


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
