"""Runs the Gluon kernel of a step with a window on a CPU, and compares its bits with those of the
other kernels.

    PYTHONPATH=.:tests/support python -m gluon_window

With the installed Triton, of whose releases the package lists some (RELEASES of
gdn_triton/_host/gluon.py). Needs g++ on x86_64. Each case is a call of sequences at random
positions, one of which is padding, whose states lack any number of records; some fold. The rows of
the records that a state includes are NaN. Exits with 1 and a list of what is wrong.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, TypeVar
from unittest import mock

import torch
from emulator.gluon import emulated
from torch import Tensor

from gdn_triton._host.records import Options
from gdn_triton.recurrent.problem import WINDOW_AND_SCALES, Operands, RecurrentProblem, StepCall
from gdn_triton.recurrent.triton import window_plan
from gdn_triton.recurrent.triton.window_form import WindowForm, copied_drafts_form, copied_form
from gdn_triton.recurrent.validation import validate_step
from gdn_triton.recurrent.window import make_window

K = V = 128
WRITTEN = ("state", "u_rows", "k_rows", "g_rows", "call_rows")
NAMES = ("window_copied_fwd_kernel", "window_drafts_fwd_kernel")


Form = TypeVar("Form", bound=tuple[Any, ...])
Case = tuple[torch.dtype, bool, Form]


def make_call(
    dtype: torch.dtype, *, v_first: bool, norm: bool, seed: int, tokens: int = 1
) -> StepCall:
    """5 sequences of 4 value heads. norm: with 2 key heads, of a mixed call with every option;
    otherwise as many key heads. tokens: of each sequence; 0: packed, up to 4."""
    N, H, HV, slots, D = 5, 2 if norm else 4, 4, 7, tokens or 4
    torch.manual_seed(seed)
    window = make_window(slots, H, HV, K, V, torch.bfloat16, "cpu", max_tokens=D)
    rows = {field: getattr(window, name) for field, name in WINDOW_AND_SCALES.items()}
    lengths = (4, 1, 0, 3, 2)
    lead = {0: (sum(lengths) + 2,), 1: (N,)}.get(tokens, (N, tokens))
    mixed = torch.randn(*lead, 2 * H * K + HV * V + 8).bfloat16()[..., 8:]
    q, k, v = mixed.split((H * K, H * K, HV * V), -1)
    q, k, v = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))
    a, b = torch.randn(2, *lead, HV).bfloat16()
    shape = (V, K) if v_first else (K, V)
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    x = Operands(
        q=mixed if norm else q,
        k=mixed if norm else k,
        v=mixed if norm else v,
        g=a if norm else -a.float().exp(),
        beta=b if norm else b.float().sigmoid(),
        A_log=torch.rand(HV) if norm else None,
        dt_bias=torch.rand(HV) - 2 if norm else None,
        state=torch.randn(slots, HV, *shape).to(dtype),
        read_slots=torch.randperm(slots)[:N].int(),
        positions=torch.randint(0, 100, (N,), dtype=torch.int32),
        cu_seqlens=None if tokens else ends,
        **rows,
    )
    assert x.read_slots is not None and x.positions is not None and x.start is not None
    assert x.u_rows is not None and x.k_rows is not None and x.g_rows is not None
    R = x.u_rows.shape[1]
    for slot, position in zip(x.read_slots.tolist(), x.positions.tolist(), strict=True):
        x.start[slot] = max(0, position - int(torch.randint(0, 20, ())))
        for y in (x.u_rows, x.k_rows, x.g_rows):
            y[slot] = torch.nan
        for age in range(min(R - D, position - int(x.start[slot]))):
            row = (position - 1 - age) % R
            x.u_rows[slot, row] = torch.randn(HV, V)
            x.k_rows[slot, row] = torch.randn(H, K).bfloat16()
            x.g_rows[slot, row] = -torch.rand(HV)
        if x.call_rows is not None:
            # The last call had up to D tokens.
            last = position - 1 - int(torch.randint(0, D, ()))
            x.call_rows[slot, (position - 1) % R] = max(last, int(x.start[slot]))
    x.read_slots[1] = -1
    options = Options(
        use_qk_l2norm_in_kernel=norm,
        use_beta_sigmoid_in_kernel=norm,
        allow_neg_eigval=norm,
        state_v_first=v_first,
        use_gate_in_kernel=norm,
    )
    return StepCall(x, options, None, "negative", is_mixed=norm, max_tokens=D)


def run(call: StepCall, form: WindowForm | None, seed: int) -> dict[str, Tensor]:
    """o and the tensors that a step writes, by a kernel in Gluon or, without a form, by another
    one."""
    problem, x = validate_step(call), call.inputs
    x = x._replace(**{name: getattr(x, name).clone() for name in WRITTEN})
    launched = dict.fromkeys(NAMES, ("o", *WRITTEN)) if form else {}
    chosen = window_plan._step_form

    def narrow(p: RecurrentProblem) -> WindowForm:
        # The emulator does not run the products of four warps in a fold.
        return chosen(p)._replace(BV=32, warps=2, early=False, registers=None)

    with ExitStack() as patches:
        for name, replacement in {
            "dependent_launch": lambda _: {"DEPENDENT": False},
            "_copied_form": lambda *_: form if problem.max_tokens == 1 else None,
            "_copied_drafts_form": lambda *_: form if problem.max_tokens > 1 else None,
            **({"_step_form": narrow} if problem.max_tokens > 1 else {}),
        }.items():
            patches.enter_context(mock.patch.object(window_plan, name, replacement))
        patches.enter_context(emulated(launched, seed=seed, races=form is not None))
        o, _ = window_plan.plan(problem, x)(x)
    return {"o": o, **{name: getattr(x, name) for name in WRITTEN}}


def differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    return [
        name
        for name, y in expected.items()
        if not torch.equal(y.view(torch.uint8), found[name].view(torch.uint8))
    ]


def forms_of(choose: Callable[[int, bool, int], Form | None]) -> Iterator[Case[Form]]:
    """Every form of a kernel: the dtype of the states, whether they are value-first, the form.
    choose: the form for the bytes of an element, the layout and the number of states."""
    for dtype, v_first in itertools.product((torch.bfloat16, torch.float32), (True, False)):
        of_states = [choose(dtype.itemsize, v_first, 2**i) for i in range(21)]
        for form in sorted({form for form in of_states if form is not None}):
            yield dtype, v_first, form


def forms() -> Iterator[Case[WindowForm]]:
    return forms_of(copied_form)


def drafts_forms() -> Iterator[Case[WindowForm]]:
    return forms_of(lambda itemsize, _, states: copied_drafts_form(itemsize, states))


def main() -> int:
    failed = 0
    cases = itertools.chain(
        itertools.product(forms(), (1,)), itertools.product(drafts_forms(), (4, 0, 2))
    )
    for seed, ((dtype, v_first, form), tokens) in enumerate(cases):
        # Each number of tokens has calls with the norm and without it.
        norm = seed % 2 == 1
        call = make_call(dtype, v_first=v_first, norm=norm, seed=seed, tokens=tokens)
        wrong = differences(run(call, form, seed), run(call, None, seed))
        failed += bool(wrong)
        layout = f"{'value' if v_first else 'key'}-first, {form.BV} columns, {tokens} tokens"
        print(f"{dtype}, {layout}, norm {norm:1}: {', '.join(wrong) or 'right'}", flush=True)
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
