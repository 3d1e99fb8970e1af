"""`explain_call`, and a request for a backend that an operator does not have."""

import copy
import logging

import pytest
import torch

import gdn_triton

pytestmark = pytest.mark.usefixtures("bare")


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
    window = gdn_triton.make_window(1, 1, 2, 4, 4, torch.float32, "cpu")
    return [
        (gdn_triton.chunk_gated_delta_rule, (), rule),
        (gdn_triton.chunk_prefill, (pool, slots), rule),
        (gdn_triton.fused_recurrent_gated_delta_rule, (), rule),
        (gdn_triton.recurrent_step, (pool, slots), tokens),
        (gdn_triton.fold_window, (pool, window, slots, slots), {}),
        (gdn_triton.restart_window, (window, slots, slots), {}),
        (gdn_triton.accept_window, (window, slots, slots, slots[:, None]), {}),
        (gdn_triton.causal_conv1d, (mixed, weight), {}),
        (gdn_triton.causal_conv1d_update, (mixed[:1], weight), {"state": conv_pool}),
        (gdn_triton.fused_conv_prep, (mixed, weight, *prep), {}),
        (gdn_triton.fused_post_conv_prep, (mixed, *prep), {}),
        (gdn_triton.rms_norm_gated, (mixed, mixed, mixed[0]), {}),
    ]


def run(function, args, kwargs):
    """The results of a call and the tensors that it writes; the given arguments do not change."""
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
    bad = [
        (x.long() if x.is_floating_point() else x.double()) if isinstance(x, torch.Tensor) else x
        for x in args
    ]
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
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


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
    """A kernel without a backward; the parts of a fused call choose their own backends."""
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
