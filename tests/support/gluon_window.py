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
from collections.abc import Iterator
from unittest import mock

import torch
from emulator.gluon import emulated
from torch import Tensor

from gdn_triton._host.records import Options
from gdn_triton.recurrent.problem import WINDOW_AND_SCALES, Operands, StepCall
from gdn_triton.recurrent.triton import window_plan
from gdn_triton.recurrent.triton.window_form import WindowForm, copied_form
from gdn_triton.recurrent.validation import validate_step
from gdn_triton.recurrent.window import make_window

K = V = 128
WRITTEN = ("state", "u_rows", "k_rows", "g_rows", "call_rows")
NAME = "window_copied_fwd_kernel"


def make_call(dtype: torch.dtype, *, v_first: bool, norm: bool, seed: int) -> StepCall:
    """5 sequences of 4 value heads. norm: with 2 key heads, of a mixed call with every option;
    otherwise as many key heads."""
    N, H, HV, slots, R = 5, 2 if norm else 4, 4, 7, 16
    torch.manual_seed(seed)
    window = make_window(slots, H, HV, K, V, torch.bfloat16, "cpu", max_tokens=1)
    rows = {field: getattr(window, name) for field, name in WINDOW_AND_SCALES.items()}
    mixed = torch.randn(N, 2 * H * K + HV * V + 8).bfloat16()[:, 8:]
    q, k, v = mixed.split((H * K, H * K, HV * V), -1)
    q, k, v = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))
    a, b = torch.randn(2, N, HV).bfloat16()
    shape = (V, K) if v_first else (K, V)
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
        **rows,
    )
    assert x.read_slots is not None and x.positions is not None and x.start is not None
    assert x.u_rows is not None and x.k_rows is not None and x.g_rows is not None
    for slot, position in zip(x.read_slots.tolist(), x.positions.tolist(), strict=True):
        x.start[slot] = max(0, position - int(torch.randint(0, 20, ())))
        for y in (x.u_rows, x.k_rows, x.g_rows):
            y[slot] = torch.nan
        for age in range(min(R - 1, position - int(x.start[slot]))):
            row = (position - 1 - age) % R
            x.u_rows[slot, row] = torch.randn(HV, V)
            x.k_rows[slot, row] = torch.randn(H, K).bfloat16()
            x.g_rows[slot, row] = -torch.rand(HV)
    x.read_slots[1] = -1
    options = Options(
        use_qk_l2norm_in_kernel=norm,
        use_beta_sigmoid_in_kernel=norm,
        allow_neg_eigval=norm,
        state_v_first=v_first,
        use_gate_in_kernel=norm,
    )
    return StepCall(x, options, None, "negative", is_mixed=norm, max_tokens=1)


def run(call: StepCall, form: WindowForm | None, seed: int) -> dict[str, Tensor]:
    """o and the tensors that a step writes, by the kernel of `hopper/window.py` or, without a form,
    by another one."""
    x = call.inputs
    x = x._replace(**{name: getattr(x, name).clone() for name in WRITTEN})
    launched = {NAME: ("o", *WRITTEN)} if form else {}
    independent = mock.patch.object(window_plan, "dependent_launch", lambda _: {"DEPENDENT": False})
    chosen = mock.patch.object(window_plan, "_copied_form", lambda *_: form)
    with independent, chosen, emulated(launched, seed=seed, races=form is not None):
        o, _ = window_plan.plan(validate_step(call), x)(x)
    return {"o": o, **{name: getattr(x, name) for name in WRITTEN}}


def forms() -> Iterator[tuple[torch.dtype, bool, WindowForm]]:
    """Every form of the kernel: the dtype of the states, whether they are value-first, the form."""
    for dtype, v_first in itertools.product((torch.bfloat16, torch.float32), (True, False)):
        of_states = [copied_form(dtype.itemsize, v_first, 2**i) for i in range(21)]
        for form in sorted({form for form in of_states if form is not None}):
            yield dtype, v_first, form


def main() -> int:
    failed = 0
    for seed, ((dtype, v_first, form), norm) in enumerate(
        itertools.product(forms(), (True, False))
    ):
        call = make_call(dtype, v_first=v_first, norm=norm, seed=seed)
        found, expected = run(call, form, seed), run(call, None, seed)
        wrong = [
            name
            for name, y in expected.items()
            if not torch.equal(y.view(torch.uint8), found[name].view(torch.uint8))
        ]
        failed += bool(wrong)
        layout = f"{'value' if v_first else 'key'}-first, {form.BV} columns"
        print(f"{dtype}, {layout}, norm {norm:1}: {', '.join(wrong) or 'right'}", flush=True)
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
