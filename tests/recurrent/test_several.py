"""Steps of several tokens: the Gluon kernel has the bits of the portable one."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from helpers import BF16, FP32, same_bits
from torch import Tensor

from gdn_triton.recurrent.problem import StepCall
from gdn_triton.recurrent.validation import validate_step

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("triton.experimental.gluon", reason="this release of Triton has no Gluon")


TOKENS = ("q", "k", "v", "g", "beta")


def on(device: str, call: StepCall) -> StepCall:
    from gluon_several import copied

    x = call.inputs
    moved = {name: copied(y, device) for name, y in x._asdict().items() if y is not None}
    if call.is_mixed:
        # The three are one tensor.
        moved |= dict.fromkeys(("q", "k", "v"), moved["q"])
    return call._replace(inputs=x._replace(**moved))


def run(call: StepCall, form: object) -> tuple[Tensor, Tensor]:
    from gluon_several import copied

    from gdn_triton.recurrent.triton import plan

    x = call.inputs
    assert x.state is not None
    problem = validate_step(call)
    lead = x.v.shape[: 1 if x.cu_seqlens is not None else 2]
    out = torch.full((*lead, problem.HV, problem.V), torch.nan, dtype=x.v.dtype, device=x.v.device)
    x = x._replace(state=copied(x.state, str(x.state.device)), out=out)
    with mock.patch.object(plan, "_several_form", lambda *_: form):
        o, _ = plan.plan(problem, x)(x)
    assert x.state is not None
    return o, x.state


@pytest.mark.gpu("the kernel is for compute capability 9.0")
@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("pool", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("every_token", [False, True])
@pytest.mark.parametrize("tokens", [0, 2, 3, 4, 5, 70])
def test_bits(
    tokens: int, every_token: bool, pool: torch.dtype, v_first: bool, device: str
) -> None:
    from gluon_several import forms, make_call

    from gdn_triton._host.gluon import gluon_refusal

    if why := gluon_refusal(torch.device(device)):
        pytest.skip(why)
    chosen = {
        form for dtype, layout, form in forms(every_token) if (dtype, layout) == (pool, v_first)
    }
    assert chosen
    for seed in range(4):
        call = make_call(
            pool,
            v_first=v_first,
            slots=(("every", "accepted") if every_token else ("own", "other"))[seed % 2],
            norm=seed < 2,
            seed=seed,
            tokens=tokens,
            apart=seed in (1, 2),
        )
        call = on(device, call)
        expected = run(call, None)
        assert not expected[0].isnan().any()
        for form in chosen:
            for found, y in zip(run(call, form), expected, strict=True):
                assert same_bits(found, y)


FOUR = torch.arange(20, dtype=torch.int32).view(5, 4)
ACCEPTED = {"read_slots": lambda _: FOUR, "num_accepted_tokens": lambda _: FOUR[:, 1] % 4}


@pytest.mark.parametrize(
    ("changes", "serves"),
    [
        ({}, True),
        ({"state": lambda x: x.bfloat16()}, True),
        ({"state": lambda x: x.mT}, False),
        ({"state": lambda x: x.half()}, False),
        (dict.fromkeys(("q", "k", "v"), Tensor.half), False),
        (dict.fromkeys(TOKENS, lambda x: x[:, :1]), False),
        (dict.fromkeys(TOKENS, lambda x: x.repeat_interleave(2, 1)), False),
        ({"write_slots": lambda _: FOUR}, True),
        (ACCEPTED, True),
        ({"parents": lambda _: FOUR % 4 - 1, "write_slots": lambda _: FOUR}, False),
    ],
)
def test_which_steps(
    changes: dict[str, Callable[[Tensor], Tensor]], serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gluon_several import make_call

    from gdn_triton.recurrent.triton import plan

    call = make_call(FP32, v_first=True, slots="own", norm=False, seed=0, tokens=4)
    given = {name: change(getattr(call.inputs, name)) for name, change in changes.items()}
    call = call._replace(inputs=call.inputs._replace(**given))
    monkeypatch.setattr(plan, "gluon_refusal", lambda device: None)
    assert (plan._several_form(validate_step(call), call.inputs) is not None) == serves
    monkeypatch.undo()
    monkeypatch.setenv("GDN_GLUON", "0")
    assert plan._several_form(validate_step(call), call.inputs) is None


def test_key_first_rows_after_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The portable kernel is faster for 20 states of this kind."""
    from gluon_several import make_call

    from gdn_triton.recurrent.triton import plan

    monkeypatch.setattr(plan, "gluon_refusal", lambda device: None)
    call = make_call(FP32, v_first=False, slots="every", norm=False, seed=0, tokens=4)
    assert plan._several_form(validate_step(call), call.inputs) is None
