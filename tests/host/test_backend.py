"""The choice of a backend: the truth table, every refusal, and what is logged."""

import copy
import dataclasses
import itertools
import logging

import pytest
import torch

import gdn_triton
from gdn_triton import fast
from gdn_triton._host import backends
from gdn_triton._host.backends import Backend
from gdn_triton.chunk import backends as chunk_backends
from gdn_triton.chunk.backends import CHUNK
from gdn_triton.chunk.problem import Problem

NO_CUDA = "The CUDA library is absent in this test."


@pytest.fixture(autouse=True)
def bare(monkeypatch, no_interpreter):
    """Neither the machine nor the shell decides: no request, Triton there, no interpreter."""
    monkeypatch.delenv("GDN_BACKEND", raising=False)
    monkeypatch.setattr(backends, "_triton_missing", lambda: None)
    monkeypatch.setattr(backends, "_logged", set())
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
        Backend(b.name, lambda _, reason=refusals[b.name]: reason, b.load) for b in CHUNK.backends
    )
    monkeypatch.setattr(CHUNK, "backends", fakes)


def test_order():
    assert [b.name for b in CHUNK.backends] == ["cuda", "triton", "reference"]


def test_auto_takes_cuda_where_it_serves(monkeypatch):
    monkeypatch.setattr(fast, "why_unavailable", lambda: None)
    monkeypatch.setattr(fast, "why_not_on", lambda index: None)
    assert CHUNK.explain(problem(K=128, V=128)).chosen == "cuda"
    assert CHUNK.explain(problem(K=128, V=128, chunk_size=32)).chosen == "triton"


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

    explanation = CHUNK.explain(problem())
    assert explanation.requested == requested
    assert explanation.chosen == expected
    if expected is None:
        with pytest.raises(RuntimeError, match=refusals[requested]):
            CHUNK.choose(problem())
    else:
        assert CHUNK.choose(problem()).name == expected
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
    reason = chunk_backends.triton_supports(refused)
    assert words in reason and reason.endswith(".")
    assert CHUNK.choose(refused).name == "reference"
    monkeypatch.setenv("GDN_BACKEND", "triton")
    with pytest.raises(RuntimeError, match="GDN_BACKEND=triton cannot run") as error:
        CHUNK.choose(refused)
    assert str(error.value).endswith(reason)
    assert CHUNK.explain(refused).chosen is None


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
    assert chunk_backends.triton_supports(taken) is None
    assert CHUNK.choose(taken).name == "triton"


def test_interpreter(monkeypatch):
    monkeypatch.setattr(backends, "_interpreting", lambda: True)
    assert chunk_backends.triton_supports(problem("cpu", torch.float32)) is None
    assert chunk_backends.triton_supports(problem("cpu", torch.float16)) is None
    for changes in ({"dtype": torch.bfloat16}, {"dtype": torch.float32, "k_dtype": torch.bfloat16}):
        reason = chunk_backends.triton_supports(problem("cpu", **changes))
        assert "interpreter multiplies bfloat16 matrices wrongly" in reason


@pytest.mark.parametrize("version, refused", [("3.5.1", True), ("3.6.0", False), ("4.0", False)])
def test_triton_version(monkeypatch, version, refused):
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.undo()
    backends._triton_missing.cache_clear()
    monkeypatch.setattr(triton, "__version__", version)
    try:
        reason = backends._triton_missing()
    finally:
        backends._triton_missing.cache_clear()
    assert (reason is not None) == refused
    if refused:
        assert reason == "Triton 3.6 or newer is needed; 3.5.1 is installed."


def test_triton_absent(monkeypatch):
    sentence = "Triton 3.6 or newer is needed and cannot be imported (no such module)."
    monkeypatch.setattr(backends, "_triton_missing", lambda: sentence)
    assert chunk_backends.triton_supports(problem()) == sentence


def test_cuda_says_why_it_is_unavailable(monkeypatch):
    assert CHUNK.explain(problem()).reasons["cuda"] == NO_CUDA
    monkeypatch.setenv("GDN_BACKEND", "cuda")
    with pytest.raises(RuntimeError, match=f"GDN_BACKEND=cuda cannot run this call. {NO_CUDA}"):
        CHUNK.choose(problem())


def test_reference_refuses_nothing():
    for refused, _ in TRITON_REFUSALS:
        assert backends.reference_supports(refused) is None


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
        assert CHUNK.explain(problem()).requested == requested


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
        for b in CHUNK.backends
    )
    monkeypatch.setattr(CHUNK, "backends", fakes)
    args = inputs()
    for name in ("reference", "triton", "cuda"):
        monkeypatch.setenv("GDN_BACKEND", name)
        gdn_triton.chunk_gated_delta_rule(*args, scale=2, use_qk_l2norm_in_kernel=True)
        called, (judged, x) = calls.pop()
        assert called == name and not calls
        assert judged.scale == 2.0 and judged.use_qk_l2norm
        assert all(given is y for given, y in zip(x[:5], args, strict=True))
        assert x[5:] == (None,) * 4


def test_load_reference():
    from gdn_triton.chunk import reference as reference_chunk

    assert CHUNK.choose(problem("cpu")).load() is reference_chunk.forward


def test_load_triton():
    pytest.importorskip("triton", reason="Triton is not installed")
    from gdn_triton.chunk.triton import autograd as chunk

    assert CHUNK.choose(problem()).load() is chunk.forward


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

    fakes = tuple(Backend(b.name, b.supports, load) for b in CHUNK.backends)
    monkeypatch.setattr(CHUNK, "backends", fakes)
    assert gdn_triton.explain(*inputs()).chosen == "reference"


def test_explain_judges_the_arguments():
    q, k, v, g, _ = inputs()
    with pytest.raises(ValueError, match="beta must have 3 dimensions"):
        gdn_triton.explain(q, k, v, g, q)


def test_automatic_choice_is_logged_once(caplog):
    caplog.set_level(logging.INFO, logger="gdn_triton")
    for _ in range(3):
        CHUNK.choose(problem())
    (record,) = caplog.records
    assert record.name == "gdn_triton" and record.levelno == logging.INFO
    message = record.getMessage()
    assert message == f"GDN_BACKEND=auto chose triton. Not cuda: {NO_CUDA}"


def test_reference_on_a_gpu_is_a_warning(caplog):
    caplog.set_level(logging.INFO, logger="gdn_triton")
    for _ in range(3):
        CHUNK.choose(problem(dtype=torch.float64))
        CHUNK.choose(problem(device="cpu"))
    assert [r.levelno for r in caplog.records] == [logging.WARNING, logging.INFO]
    assert "chose reference, which is slow on cuda." in caplog.text
    assert "Not triton: The Triton kernels compute in float32 at most" in caplog.text


def test_same_reasons_on_cpu_do_not_hide_the_warning(caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="gdn_triton")
    install(monkeypatch, {"cuda": "No.", "triton": "No.", "reference": None})
    CHUNK.choose(problem(device="cpu"))
    CHUNK.choose(problem())
    assert [r.levelno for r in caplog.records] == [logging.INFO, logging.WARNING]


def test_named_choice_is_not_logged(caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="gdn_triton")
    monkeypatch.setenv("GDN_BACKEND", "reference")
    CHUNK.choose(problem())
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


# A name that an operator has no backend of.


def operator_calls():
    """A call of each operator, on the CPU: (function, args, kwargs)."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape):
        return torch.rand(shape, generator=generator)

    q, v, gate = random(1, 5, 1, 4), random(1, 5, 2, 4), random(1, 5, 2)
    rule = {"q": q, "k": q, "v": v, "g": -gate, "beta": gate}
    slots = torch.arange(1)
    weight, mixed, A_log = random(16, 4), random(5, 16), random(2)
    prep = (random(5, 2), random(5, 2), A_log, A_log, 1, 4, 4)
    pool, conv_pool = random(1, 2, 4, 4), random(1, 16, 3)
    tokens = {"mixed_qkv": mixed[:1], "g": -gate[0, :1], "beta": gate[0, :1]}
    return [
        (gdn_triton.chunk_gated_delta_rule, (), rule),
        (gdn_triton.chunk_prefill, (pool, slots), rule),
        (gdn_triton.fused_recurrent_gated_delta_rule, (), rule),
        (gdn_triton.recurrent_step, (pool, slots), tokens),
        (gdn_triton.causal_conv1d, (mixed, weight), {}),
        (gdn_triton.causal_conv1d_update, (mixed[:1], weight), {"state": conv_pool}),
        (gdn_triton.fused_conv_prep, (mixed, weight, *prep), {}),
        (gdn_triton.fused_post_conv_prep, (mixed, *prep), {}),
        (gdn_triton.rms_norm_gated, (mixed, mixed, mixed[0]), {}),
    ]


def run(function, args, kwargs):
    """What it returns and what it writes; its arguments stay as they are."""
    args, kwargs = copy.deepcopy((args, kwargs))
    found = function(*args, **kwargs)
    tensors = (*(found if isinstance(found, tuple) else (found,)), *args, *kwargs.values())
    return [x for x in tensors if isinstance(x, torch.Tensor)]


CALLS = operator_calls()
by_operator = pytest.mark.parametrize("call", CALLS, ids=[call[0].__name__ for call in CALLS])
ON_THE_LIBRARY = ("chunk_gated_delta_rule", "chunk_prefill")


@by_operator
def test_explain_call(call, monkeypatch):
    function, args, kwargs = call
    monkeypatch.setenv("GDN_BACKEND", "auto")
    explanation = gdn_triton.explain_call(function, *args, **kwargs)
    assert explanation.operator == function.__name__
    assert explanation.chosen == "reference" and not explanation.as_auto
    assert list(explanation.reasons) == ["cuda", "triton", "reference"]
    assert "The tensors are on the CPU" in explanation.reasons["triton"]
    monkeypatch.setenv("GDN_BACKEND", "triton")
    assert gdn_triton.explain_call(function, *args, **kwargs).chosen is None
    with pytest.raises(
        RuntimeError, match=r"GDN_BACKEND=triton cannot run this call\. The tensors"
    ):
        run(*call)
    with pytest.raises(TypeError, match="unexpected keyword argument 'sclae'"):
        gdn_triton.explain_call(function, *args, **kwargs, sclae=1)
    bad = [x.double().long() if isinstance(x, torch.Tensor) else x for x in args]
    worse = {name: x.long() for name, x in kwargs.items()}
    with pytest.raises((TypeError, ValueError)) as explained:
        gdn_triton.explain_call(function, *bad, **worse)
    with pytest.raises((TypeError, ValueError)) as raised:
        function(*bad, **worse)
    assert str(explained.value) == str(raised.value)


def test_explain_call_knows_its_functions():
    with pytest.raises(TypeError, match=r"function must be one of .*recurrent_step.*, got sum"):
        gdn_triton.explain_call(sum, [1])


def test_explain_call_writes_nothing():
    for function, args, kwargs in CALLS:
        before = copy.deepcopy((args, kwargs))
        gdn_triton.explain_call(function, *args, **kwargs)
        for x, y in zip((*before[0], *before[1].values()), (*args, *kwargs.values()), strict=True):
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


@by_operator
def test_a_name_that_the_operator_does_not_have(call, monkeypatch, caplog):
    """It is auto for that operator: said by explain, logged once; a call of an operator that has
    such a backend, and does not fit it, is an error all the same."""
    function, args, kwargs = call
    caplog.set_level(logging.INFO, logger="gdn_triton")
    expected = run(*call)
    caplog.clear()
    monkeypatch.setenv("GDN_BACKEND", "cuda")
    explanation = gdn_triton.explain_call(function, *args, **kwargs)
    name = function.__name__
    if name in ON_THE_LIBRARY:
        assert explanation.chosen is None and not explanation.as_auto
        with pytest.raises(RuntimeError, match="GDN_BACKEND=cuda cannot run this call"):
            run(*call)
        return
    assert (explanation.requested, explanation.chosen) == ("cuda", "reference")
    assert explanation.as_auto
    assert explanation.reasons["cuda"].startswith("The CUDA library has no ")
    has_none = f"GDN_BACKEND=cuda: {name} has no such backend; as with auto, reference would run"
    assert str(explanation).splitlines()[0] == has_none
    for _ in range(2):
        assert all(map(torch.equal, run(*call), expected))
    messages = [m for m in map(logging.LogRecord.getMessage, caplog.records) if f"{name} " in m]
    (message,) = messages
    assert message.startswith(
        f"GDN_BACKEND=cuda, which {name} does not have and so takes for auto, chose reference."
    )
    assert explanation.reasons["cuda"] in message and explanation.reasons["triton"] in message


def test_explained_with_gradients():
    """What has a kernel without a backward; the parts of a fused call choose for themselves."""
    for function, args, kwargs in CALLS:
        if function.__name__ not in ("fused_conv_prep", "fused_post_conv_prep"):
            continue
        for device_type in ("cpu", "meta"):
            leaf = args[0].to(device_type).requires_grad_()
            others = [x.to(device_type) if isinstance(x, torch.Tensor) else x for x in args[1:]]
            reason = gdn_triton.explain_call(function, leaf, *others, **kwargs).reasons["triton"]
            assert "has no backward; an input requires a gradient" in reason
            with torch.no_grad():
                explanation = gdn_triton.explain_call(function, leaf, *others, **kwargs)
            assert "gradient" not in explanation.reasons["triton"]
