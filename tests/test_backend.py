"""The choice of a backend: the truth table, every refusal, and what is logged."""

import dataclasses
import itertools
import logging

import pytest
import torch

import gdn_triton
from gdn_triton import backend, fast
from gdn_triton.backend import Backend, choose, explain_choice
from gdn_triton.problem import Problem

NO_CUDA = "The CUDA library is absent in this test."


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    """Neither the machine nor the shell decides: no request, Triton there, no interpreter."""
    monkeypatch.delenv("GDN_BACKEND", raising=False)
    monkeypatch.setattr(backend, "_triton_missing", lambda: None)
    monkeypatch.setattr(backend, "_interpreting", lambda: False)
    monkeypatch.setattr(backend, "_logged", set())
    monkeypatch.setattr(fast, "why_unavailable", lambda: NO_CUDA)


def problem(device="cuda", dtype=torch.bfloat16, **changes):
    """A problem that Triton takes, on a device that need not be there."""
    base = Problem(
        B=1,
        T=8,
        H=1,
        HV=2,
        K=16,
        V=32,
        N=1,
        q_dtype=dtype,
        k_dtype=dtype,
        v_dtype=dtype,
        device=torch.device(device),
        scale=0.25,
        chunk_size=64,
        is_varlen=False,
        has_initial_state=False,
        output_final_state=True,
        state_v_first=False,
        use_qk_l2norm=False,
        use_beta_sigmoid=False,
        allow_neg_eigval=False,
        use_gate=False,
        needs_grad=False,
    )
    return dataclasses.replace(base, **changes)


def inputs(dtype=torch.float32, K=8):
    q = torch.randn(1, 5, 1, K, dtype=dtype)
    return q, q, q, -torch.rand(1, 5, 1), torch.rand(1, 5, 1)


def install(monkeypatch, refusals):
    """Replaces the backends by ones that refuse, or not, by decree; their order stays."""
    fakes = tuple(
        Backend(b.name, lambda _, reason=refusals[b.name]: reason, b.load) for b in backend.BACKENDS
    )
    monkeypatch.setattr(backend, "BACKENDS", fakes)


def test_order():
    assert [b.name for b in backend.BACKENDS] == ["cuda", "triton", "reference"]


def test_auto_takes_cuda_where_it_serves(monkeypatch):
    monkeypatch.setattr(fast, "why_unavailable", lambda: None)
    monkeypatch.setattr(fast, "why_not_on", lambda index: None)
    assert explain_choice(problem(K=128, V=128)).chosen == "cuda"
    assert explain_choice(problem(K=128, V=128, chunk_size=32)).chosen == "triton"


@pytest.mark.parametrize("requested", ["auto", "cuda", "triton", "reference"])
@pytest.mark.parametrize("cuda", [True, False])
@pytest.mark.parametrize("triton", [True, False])
def test_truth_table(monkeypatch, requested, cuda, triton):
    refusals = {
        "cuda": None if cuda else "No cuda here.",
        "triton": None if triton else "No triton here.",
        "reference": None,
    }
    install(monkeypatch, refusals)
    monkeypatch.setenv("GDN_BACKEND", requested)
    if requested == "auto":
        expected = "cuda" if cuda else "triton" if triton else "reference"
    else:
        expected = requested if refusals[requested] is None else None

    explanation = explain_choice(problem())
    assert explanation.requested == requested
    assert explanation.chosen == expected
    if expected is None:
        with pytest.raises(RuntimeError, match=refusals[requested]):
            choose(problem())
    else:
        assert choose(problem()).name == expected
    for name, refusal in refusals.items():
        reason = explanation.reasons[name]
        if name == expected:
            assert reason is None
        elif refusal is not None:
            assert reason == refusal
        else:
            assert reason.startswith("It could run this call, but ")
            assert requested != "auto" or f"{expected} comes before it" in reason
            assert requested == "auto" or f"GDN_BACKEND asks for {requested}" in reason


# Each row: what is wrong, and words of the sentence that says so.
TRITON_REFUSALS = [
    (problem(device="cpu"), "CPU, where Triton only runs with TRITON_INTERPRET=1"),
    (problem(device="mps"), "Triton runs on cuda and xpu devices; the tensors are on mps"),
    (problem(dtype=torch.float64), "float32 at most; one of q, k, v is float64"),
    (problem(v_dtype=torch.float64), "float32 at most; one of q, k, v is float64"),
    (problem(K=257), "keys of up to 256 channels; K is 257"),
    (problem(HV=2**18, V=128), "less than 33554432 elements; a token's HV * max(K, V) is 33554432"),
]


@pytest.mark.parametrize("refused, words", TRITON_REFUSALS)
def test_triton_refusals(monkeypatch, refused, words):
    reason = backend.triton_supports(refused)
    assert words in reason and reason.endswith(".")
    assert choose(refused).name == "reference"
    monkeypatch.setenv("GDN_BACKEND", "triton")
    with pytest.raises(RuntimeError, match="GDN_BACKEND=triton cannot run") as error:
        choose(refused)
    assert str(error.value).endswith(reason)
    assert explain_choice(refused).chosen is None


@pytest.mark.parametrize(
    "taken",
    [
        problem(needs_grad=True),
        problem(),
        problem(K=256, V=512),
        problem(K=1, V=1),
        problem(k_dtype=torch.float32, v_dtype=torch.float16),
        problem(device="cuda:1"),
        problem(device="xpu"),
    ],
)
def test_triton_takes(taken):
    assert backend.triton_supports(taken) is None
    assert choose(taken).name == "triton"


def test_interpreter(monkeypatch):
    monkeypatch.setattr(backend, "_interpreting", lambda: True)
    assert backend.triton_supports(problem("cpu", torch.float32)) is None
    assert backend.triton_supports(problem("cpu", torch.float16)) is None
    for changes in ({"dtype": torch.bfloat16}, {"dtype": torch.float32, "k_dtype": torch.bfloat16}):
        reason = backend.triton_supports(problem("cpu", **changes))
        assert "interpreter multiplies bfloat16 matrices wrongly" in reason


@pytest.mark.parametrize("version, refused", [("3.5.1", True), ("3.6.0", False), ("4.0", False)])
def test_triton_version(monkeypatch, version, refused):
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.undo()
    backend._triton_missing.cache_clear()
    monkeypatch.setattr(triton, "__version__", version)
    try:
        reason = backend._triton_missing()
    finally:
        backend._triton_missing.cache_clear()
    assert (reason is not None) == refused
    if refused:
        assert reason == "Triton 3.6 or newer is needed; 3.5.1 is installed."


def test_triton_absent(monkeypatch):
    sentence = "Triton 3.6 or newer is needed and cannot be imported (no such module)."
    monkeypatch.setattr(backend, "_triton_missing", lambda: sentence)
    assert backend.triton_supports(problem()) == sentence


def test_cuda_says_why_it_is_unavailable(monkeypatch):
    assert explain_choice(problem()).reasons["cuda"] == NO_CUDA
    monkeypatch.setenv("GDN_BACKEND", "cuda")
    with pytest.raises(RuntimeError, match=f"GDN_BACKEND=cuda cannot run this call. {NO_CUDA}"):
        choose(problem())


def test_reference_refuses_nothing():
    for refused, _ in TRITON_REFUSALS:
        assert backend.reference_supports(refused) is None


@pytest.mark.parametrize("value", ["", "Triton", "fla", "auto,triton"])
def test_bad_request(monkeypatch, value):
    monkeypatch.setenv("GDN_BACKEND", value)
    for call in (gdn_triton.chunk_gated_delta_rule, gdn_triton.explain):
        with pytest.raises(ValueError) as error:
            call(*inputs())
        message = str(error.value)
        assert "GDN_BACKEND" in message and repr(value) in message
        for name in ("auto", "triton", "cuda", "reference"):
            assert name in message


def test_request_is_read_at_every_call(monkeypatch):
    for requested in ("reference", "auto", "triton"):
        monkeypatch.setenv("GDN_BACKEND", requested)
        assert explain_choice(problem()).requested == requested


def test_named_backend_never_falls_back(monkeypatch):
    for requested in ("triton", "cuda"):
        monkeypatch.setenv("GDN_BACKEND", requested)
        with pytest.raises(RuntimeError, match=f"GDN_BACKEND={requested} cannot run this call"):
            gdn_triton.chunk_gated_delta_rule(*inputs())
        explanation = gdn_triton.explain(*inputs())
        assert explanation.chosen is None
        assert f"GDN_BACKEND={requested}: no backend would run" in str(explanation)


def test_named_backend_is_the_one_called(monkeypatch):
    calls = []
    fakes = tuple(
        Backend(b.name, lambda _: None, lambda name=b.name: lambda *a: calls.append((name, a)))
        for b in backend.BACKENDS
    )
    monkeypatch.setattr(backend, "BACKENDS", fakes)
    args = inputs()
    for name in ("reference", "triton", "cuda"):
        monkeypatch.setenv("GDN_BACKEND", name)
        gdn_triton.chunk_gated_delta_rule(*args, scale=2, use_qk_l2norm_in_kernel=True)
        called, (judged, x, cu_seqlens) = calls.pop()
        assert called == name and not calls
        assert judged.scale == 2.0 and judged.use_qk_l2norm
        assert all(given is y for given, y in zip(x[:5], args, strict=True))
        assert x[5:] == (None,) * 3 and cu_seqlens is None


def test_load_reference():
    from gdn_triton.ops import reference_chunk

    assert choose(problem("cpu")).load() is reference_chunk.forward


def test_load_triton():
    pytest.importorskip("triton", reason="Triton is not installed")
    from gdn_triton.ops import chunk

    assert choose(problem()).load() is chunk.forward


def test_explain():
    explanation = gdn_triton.explain(*inputs())
    assert explanation.requested == "auto"
    assert explanation.chosen == "reference"
    assert list(explanation.reasons) == ["cuda", "triton", "reference"]
    lines = str(explanation).splitlines()
    assert len(lines) == 4
    assert lines[0] == "GDN_BACKEND=auto: reference would run"
    assert lines[1].startswith("  cuda: The CUDA library runs on NVIDIA GPUs; the tensors are on")
    assert lines[2].startswith("  triton: The tensors are on the CPU")
    assert lines[3] == "  reference: chosen"
    with pytest.raises(dataclasses.FrozenInstanceError):
        explanation.chosen = "cuda"


def test_explain_runs_nothing(monkeypatch):
    def load():
        raise AssertionError("explain loaded a backend")

    fakes = tuple(Backend(b.name, b.supports, load) for b in backend.BACKENDS)
    monkeypatch.setattr(backend, "BACKENDS", fakes)
    assert gdn_triton.explain(*inputs()).chosen == "reference"


def test_explain_judges_the_arguments():
    q, k, v, g, _ = inputs()
    with pytest.raises(ValueError, match="beta must have 3 dimensions"):
        gdn_triton.explain(q, k, v, g, q)


def test_automatic_choice_is_logged_once(caplog):
    caplog.set_level(logging.INFO, logger="gdn_triton")
    for _ in range(3):
        choose(problem())
    (record,) = caplog.records
    assert record.name == "gdn_triton" and record.levelno == logging.INFO
    message = record.getMessage()
    assert message == f"GDN_BACKEND=auto chose triton. Not cuda: {NO_CUDA}"


def test_reference_on_a_gpu_is_a_warning(caplog):
    caplog.set_level(logging.INFO, logger="gdn_triton")
    for _ in range(3):
        choose(problem(dtype=torch.float64))
        choose(problem(device="cpu"))
    assert [r.levelno for r in caplog.records] == [logging.WARNING, logging.INFO]
    assert "chose reference, which is slow on cuda." in caplog.text
    assert "Not triton: The Triton kernels compute in float32 at most" in caplog.text


def test_same_reasons_on_cpu_do_not_hide_the_warning(caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="gdn_triton")
    install(monkeypatch, {"cuda": "No.", "triton": "No.", "reference": None})
    choose(problem(device="cpu"))
    choose(problem())
    assert [r.levelno for r in caplog.records] == [logging.INFO, logging.WARNING]


def test_named_choice_is_not_logged(caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="gdn_triton")
    monkeypatch.setenv("GDN_BACKEND", "reference")
    choose(problem())
    assert not caplog.records


# The reference backend through the public op. Its numbers are judged in the specification's own
# tests; here it is what the op promises about dtypes, shapes and the edges.

H, HV, K, V = 2, 4, 8, 6


def arguments(B=2, T=20, dtype=torch.float32):
    torch.manual_seed(0)
    return {
        "q": torch.randn(B, T, H, K, dtype=dtype),
        "k": torch.randn(B, T, H, K, dtype=dtype) * K**-0.5,
        "v": torch.randn(B, T, HV, V, dtype=dtype),
        "g": -torch.rand(B, T, HV),
        "beta": torch.rand(B, T, HV),
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("autocast", [False, True])
def test_dtypes_and_shapes(dtype, autocast):
    given = arguments(dtype=dtype)
    with torch.autocast("cpu", enabled=autocast):
        o, state = gdn_triton.chunk_gated_delta_rule(**given, output_final_state=True)
    assert o.dtype == dtype and o.shape == (2, 20, HV, V) and o.is_contiguous()
    assert state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert state.shape == (2, HV, K, V) and state.is_contiguous()
    plain = gdn_triton.chunk_gated_delta_rule(**given)
    assert plain[1] is None
    assert torch.equal(plain[0], o), "autocast or output_final_state changed the numbers"


def test_state_v_first():
    initial = torch.randn(2, HV, K, V)
    given = arguments()
    o, state = gdn_triton.chunk_gdn(**given, initial_state=initial, output_final_state=True)
    first = initial.transpose(-1, -2).contiguous()
    again = {"initial_state": first, "output_final_state": True}
    o_first, state_first = gdn_triton.chunk_gdn(**given, **again, state_v_first=True)
    assert state_first.shape == (2, HV, V, K) and state_first.is_contiguous()
    torch.testing.assert_close(o_first, o)
    torch.testing.assert_close(state_first.transpose(-1, -2), state)
    with pytest.warns(DeprecationWarning):
        o_old, state_old = gdn_triton.chunk_gdn(**given, **again, transpose_state_layout=True)
    assert torch.equal(o_old, o_first) and torch.equal(state_old, state_first)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_is_each_sequence_alone(dtype):
    given = arguments(B=1, T=40)
    bounds = [0, 17, 17, 18, 35]  # one empty, one of a single token; 5 tokens of no sequence
    initial = torch.randn(4, HV, K, V)
    o, state = gdn_triton.chunk_gdn(
        **given,
        initial_state=initial,
        output_final_state=True,
        cu_seqlens=torch.tensor(bounds, dtype=dtype),
        cu_seqlens_cpu=torch.tensor(bounds),
        chunk_size=16,
    )
    assert o.shape == (1, 40, HV, V) and state.shape == (4, HV, K, V)
    assert not o[:, 35:].any()
    assert torch.equal(state[1], initial[1])
    for n, (bos, eos) in enumerate(itertools.pairwise(bounds)):
        alone = {name: x[:, bos:eos] for name, x in given.items()}
        o_n, state_n = gdn_triton.chunk_gdn(
            **alone, initial_state=initial[n : n + 1], output_final_state=True, chunk_size=16
        )
        torch.testing.assert_close(o[:, bos:eos], o_n)
        torch.testing.assert_close(state[n : n + 1], state_n)


@pytest.mark.parametrize("with_state", [False, True])
def test_no_token(with_state):
    initial = torch.randn(2, HV, K, V) if with_state else None
    o, state = gdn_triton.chunk_gdn(
        **arguments(T=0), initial_state=initial, output_final_state=True
    )
    assert o.shape == (2, 0, HV, V)
    assert torch.equal(state, initial if with_state else torch.zeros(2, HV, K, V))
    assert not with_state or state.data_ptr() != initial.data_ptr(), "the caller's own state"


def test_no_sequence():
    o, state = gdn_triton.chunk_gdn(
        **arguments(B=1), output_final_state=True, cu_seqlens=torch.tensor([0])
    )
    assert o.shape == (1, 20, HV, V) and not o.any()
    assert state.shape == (0, HV, K, V)
    o, state = gdn_triton.chunk_gdn(**arguments(B=0), output_final_state=True)
    assert o.shape == (0, 20, HV, V) and state.shape == (0, HV, K, V)


@pytest.mark.parametrize("bounds", [None, [0, 0, 9, 20]])
def test_final_state_is_a_new_tensor(bounds):
    B = 2 if bounds is None else 1
    N = 2 if bounds is None else 3
    initial = torch.randn(N, HV, K, V)
    kept = initial.clone()
    _, state = gdn_triton.chunk_gdn(
        **arguments(B=B),
        initial_state=initial,
        output_final_state=True,
        cu_seqlens=None if bounds is None else torch.tensor(bounds),
    )
    state.add_(1)
    assert torch.equal(initial, kept)


def test_inputs_are_not_touched():
    given = arguments()
    kept = {name: x.clone() for name, x in given.items()}
    gdn_triton.chunk_gdn(
        **given,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        use_gate_in_kernel=True,
        A_log=torch.zeros(HV),
    )
    for name, x in given.items():
        assert torch.equal(x, kept[name]), name


def test_gradients_reach_every_input():
    given = arguments()
    given["initial_state"] = torch.randn(2, HV, K, V)
    given["A_log"] = torch.rand(HV)
    given["dt_bias"] = torch.rand(HV)
    for x in given.values():
        x.requires_grad_()
    o, state = gdn_triton.chunk_gdn(
        **given,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        use_gate_in_kernel=True,
    )
    (o.sum() + state.sum()).backward()
    for name, x in given.items():
        assert x.grad is not None and x.grad.isfinite().all() and x.grad.any(), name
