"""Helpers that the tests of the choice of a backend share."""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator

import pytest
import torch

from gdn_triton._host import backends
from gdn_triton.chunk.problem import Problem
from gdn_triton.recurrent import plans

NO_CUDA = "The CUDA library is absent in this test."


def forget_refusals() -> None:
    """The package asks only once whether a backend can run a call, because the answer never changes
    outside of tests. This drops the answers that modules of backends keep."""
    for name in [name for name in sys.modules if name.startswith("gdn_triton.")]:
        if name.endswith(".backends"):
            for value in vars(sys.modules[name]).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


@contextlib.contextmanager
def not_interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The choice of a backend sees a process without Triton's interpreter. Kept choices, refusals
    and plans of the recurrence are neither found inside nor left afterwards. monkeypatch: the
    test's own, because a patch that is undone in another order than it was made would restore the
    other one's value."""
    monkeypatch.setattr(backends, "_interpreting", lambda: False)
    monkeypatch.setattr(plans, "_plans", {})
    forget_refusals()
    try:
        yield
    finally:
        forget_refusals()


def problem(device="cuda", dtype=torch.bfloat16, **changes):
    """A problem that Triton serves, on a device that need not be present."""
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
