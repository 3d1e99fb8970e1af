"""The choice of a backend: the truth table, every refusal, and what is logged."""

import dataclasses
import logging

import pytest
import torch
from choice_cases import NO_CUDA, problem

import gdn_triton
from gdn_triton import fast
from gdn_triton._host import backends
from gdn_triton._host.backends import Backend
from gdn_triton.chunk.backends import CHUNK
from gdn_triton.chunk.triton import support
from gdn_triton.fast.architectures import ARCHITECTURES

pytestmark = pytest.mark.usefixtures("bare")


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
    monkeypatch.setattr(fast, "architecture_on", lambda index: ARCHITECTURES[9, 0])
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
    reason = support.triton_supports(refused)
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
    assert support.triton_supports(taken) is None
    assert CHUNK.choose(taken).name == "triton"


def test_interpreter(monkeypatch):
    monkeypatch.setattr(backends, "_interpreting", lambda: True)
    assert support.triton_supports(problem("cpu", torch.float32)) is None
    assert support.triton_supports(problem("cpu", torch.float16)) is None
    for changes in ({"dtype": torch.bfloat16}, {"dtype": torch.float32, "k_dtype": torch.bfloat16}):
        reason = support.triton_supports(problem("cpu", **changes))
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
    assert support.triton_supports(problem()) == sentence


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


def test_a_choice_is_made_once_for_calls_that_are_decided_alike(monkeypatch):
    loaded = []
    fakes = tuple(
        Backend(b.name, b.supports, lambda name=b.name: loaded.append(name) or name)
        for b in CHUNK.backends
    )
    monkeypatch.setattr(CHUNK, "backends", fakes)
    choice = CHUNK.choose(problem())
    assert not loaded, "a choice loads nothing"
    assert (choice.name, choice.refusals) == ("triton", (("cuda", NO_CUDA),))
    assert CHUNK.choose(problem(T=9)) is choice
    assert choice.run == choice.run == "triton" and loaded == ["triton"]
    # Other gradients, another request and another device are other decisions.
    others = [CHUNK.choose(problem(needs_grad=True)), CHUNK.choose(problem("cpu"))]
    monkeypatch.setenv("GDN_BACKEND", "triton")
    others.append(CHUNK.choose(problem()))
    assert len({*others, choice}) == 4
    assert [(x.name, bool(x.refusals)) for x in others] == [
        ("triton", True),
        ("reference", True),
        ("triton", False),
    ]


def test_load_reference():
    from gdn_triton.chunk import reference as reference_chunk

    assert CHUNK.choose(problem("cpu")).run is reference_chunk.forward


@pytest.mark.parametrize("why", [None, "A reason."])
def test_load_triton(why: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from gdn_triton.chunk import backends
    from gdn_triton.chunk.triton import autograd as chunk

    asked = []
    monkeypatch.setattr(backends, "hopper_refusal", lambda problem: why)
    for name in ("forward", "forward_hopper"):
        monkeypatch.setattr(chunk.chunk_fwd, name, lambda *args, name=name: asked.append(name))
    CHUNK.choose(problem()).run(problem(), None)
    assert asked == ["forward_hopper" if why is None else "forward"]


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
