"""Runs the Gluon kernel of steps of several tokens on a CPU, and compares its bits with those of
the portable kernel.

    PYTHONPATH=.:tests/support python -m gluon_several

With the installed Triton, of whose releases the package lists some (RELEASES of
gdn_triton/_host/gluon.py). Needs g++ on x86_64. Each case is a call of sequences of which one is
padding. Exits with 1 and a list of what is wrong.
"""

import itertools
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Literal
from unittest import mock

import torch
from emulator.gluon import emulated
from gluon_window import Case, differences, forms_of
from torch import Tensor

from gdn_triton._host.records import Options
from gdn_triton.recurrent.problem import Operands, StepCall
from gdn_triton.recurrent.triton import plan
from gdn_triton.recurrent.triton.form import SeveralForm, several_form
from gdn_triton.recurrent.validation import validate_step

K = V = 128
KERNEL = "recurrent_several_fwd_kernel"
LENGTHS = (4, 7, 0, 3, 1)

# "own": each state returns to its own slot. "other": it goes to another slot. "every": the state
# after each token goes to a slot of `write_slots`. "accepted": it goes to a slot of `read_slots`,
# of which `num_accepted_tokens` names the one to read.
Slots = Literal["own", "other", "every", "accepted"]


def pool(slots: int, shape: tuple[int, ...], dtype: torch.dtype, gap: int) -> Tensor:
    """States with a gap of so many elements before each."""
    return torch.randn(slots, gap + math.prod(shape)).to(dtype)[:, gap:].unflatten(1, shape)


def copied(x: Tensor, device: str = "cpu") -> Tensor:
    """A copy at the same place of another storage."""
    storage = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())
    return storage.clone().to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def make_call(
    dtype: torch.dtype,
    *,
    v_first: bool,
    slots: Slots,
    norm: bool,
    seed: int,
    tokens: int,
    apart: bool = False,
) -> StepCall:
    """5 sequences of 4 value heads. norm: with 2 key heads, of a mixed call with every option,
    dt_bias unless `slots` is "own"; otherwise as many key heads. tokens: of each sequence; 0:
    packed, LENGTHS. apart: no state begins at a multiple of 16 bytes. Two of the
    numbers of accepted tokens are out of range, and the longest sequence has more tokens than
    `read_slots` has columns."""
    N, H, HV = 5, 2 if norm else 4, 4
    torch.manual_seed(seed)
    rows, columns = sum(LENGTHS) + 2, max(2, (tokens or max(LENGTHS)) - 1)
    lead = (N, tokens) if tokens else (rows,)
    mixed = torch.randn(*lead, 2 * H * K + HV * V + 8).bfloat16()[..., 8:]
    q, k, v = mixed.split((H * K, H * K, HV * V), -1)
    q, k, v = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))
    a, b = torch.randn(2, *lead, HV).bfloat16()
    every = (N, tokens) if tokens else (1, rows)
    order = torch.randperm(N + max(N * columns, math.prod(every)) + 1).int()
    read, write, accepted = order[:N].clone(), None, None
    read[1] = -1
    if slots == "other":
        write = order[N : 2 * N].clone()
        write[3] = -1
    elif slots == "every":
        write = order[N : N + math.prod(every)].view(every).clone()
        write[0, 1] = write[-1, -2] = -1
    elif slots == "accepted":
        read = order[: N * columns].view(N, columns).clone()
        read[0, 1] = -1
        accepted = torch.tensor([1, columns, -1, 2, columns + 1], dtype=torch.int32)
    ends = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
    x = Operands(
        q=mixed if norm else q,
        k=mixed if norm else k,
        v=mixed if norm else v,
        g=a if norm else -a.float().exp(),
        beta=b if norm else b.float().sigmoid(),
        A_log=torch.rand(HV) if norm else None,
        dt_bias=torch.rand(HV) - 2 if norm and slots != "own" else None,
        state=pool(len(order), (HV, V, K) if v_first else (HV, K, V), dtype, 2 if apart else 0),
        read_slots=read,
        write_slots=write,
        cu_seqlens=None if tokens else ends,
        num_accepted_tokens=accepted,
    )
    options = Options(
        use_qk_l2norm_in_kernel=norm,
        use_beta_sigmoid_in_kernel=norm,
        allow_neg_eigval=norm,
        state_v_first=v_first,
        use_gate_in_kernel=norm,
    )
    return StepCall(x, options, None, "negative", is_mixed=norm)


def run(call: StepCall, form: SeveralForm | None, seed: int) -> dict[str, Tensor]:
    """o and the pool, by the kernel in Gluon or, without a form, by the portable one."""
    assert call.inputs.state is not None
    x = call.inputs._replace(state=copied(call.inputs.state))
    launched = {KERNEL: ("o", "state")} if form else {}
    with ExitStack() as patches:
        for name, replacement in {
            "dependent_launch": lambda _: {"DEPENDENT": False},
            "_several_form": lambda *_: form,
        }.items():
            patches.enter_context(mock.patch.object(plan, name, replacement))
        patches.enter_context(emulated(launched, seed=seed, races=form is not None))
        o, _ = plan.plan(validate_step(call), x)(x)
    assert x.state is not None
    return {"o": o, "state": x.state}


def forms(every_token: bool) -> Iterator[Case[SeveralForm]]:
    return forms_of(partial(several_form, every_token=every_token))


def shapes() -> Iterator[tuple[torch.dtype, bool, SeveralForm, bool]]:
    """Every form of the kernel, and whether the state after every token is kept. The forms that
    keep the last state come first."""
    for every_token in (False, True):
        for case in forms(every_token):
            yield *case, every_token


def main() -> int:
    failed = 0
    kept: dict[bool, tuple[tuple[int, Slots, bool], ...]] = {
        False: ((4, "own", True), (6, "other", False), (0, "other", True)),
        True: ((4, "accepted", True), (3, "every", False), (0, "every", True)),
    }
    for seed, (dtype, v_first, form, every_token) in enumerate(shapes()):
        # Each form has one of the three calls.
        tokens, slots, norm = kept[every_token][seed % 3]
        call = make_call(
            dtype,
            v_first=v_first,
            slots=slots,
            norm=norm,
            seed=seed,
            tokens=tokens,
            apart=tokens == 6,
        )
        wrong = differences(run(call, form, seed), run(call, None, seed))
        failed += bool(wrong)
        layout = f"{'value' if v_first else 'key'}-first, {form}"
        print(f"{dtype}, {layout}, {tokens} tokens: {', '.join(wrong) or 'right'}", flush=True)
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
