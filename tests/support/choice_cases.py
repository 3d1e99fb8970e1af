"""What the tests of the choice of a backend share."""

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
    """The package asks once whether a backend can run a call, as the answer never changes outside
    of tests. What the modules of backends keep of it is dropped."""
    for name in [name for name in sys.modules if name.startswith("gdn_triton.")]:
        if name.endswith(".backends"):
            for value in vars(sys.modules[name]).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


@contextlib.contextmanager
def not_interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton's kernels are not interpreted, as the choice of a backend sees it. What is kept of a
    choice, refusals and the plans of the recurrence, is neither found inside nor left behind.
    monkeypatch: the test's own, since one that is undone in another order than it was made would
    bring back what the other one had put there."""
    monkeypatch.setattr(backends, "_interpreting", lambda: False)
    monkeypatch.setattr(plans, "_plans", {})
    forget_refusals()
    try:
        yield
    finally:
        forget_refusals()


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
