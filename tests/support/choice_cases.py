"""What the tests of the choice of a backend share."""

import dataclasses

import torch

from gdn_triton.chunk.problem import Problem

NO_CUDA = "The CUDA library is absent in this test."


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
