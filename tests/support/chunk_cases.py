"""Helpers that the tests of chunk share."""

from typing import Any

import torch
from helpers import FP32, FP64, SMALL, Case, Inputs, assert_within_budget
from narrow import Arithmetic, narrow_forward
from torch import Tensor

import gdn_triton
from gdn_triton import reference

PACKED = next(case for case in SMALL if case.name == "packed")
PADDED = next(case for case in SMALL if case.name == "chunks-and-tail")


def call(x: Inputs, case: Case, **options: Any) -> tuple[Tensor, Tensor | None]:
    options = {"chunk_size": case.chunk_size, "cu_seqlens": x.cu_seqlens, **options}
    return gdn_triton.chunk_gated_delta_rule(*x.tensors, **options)


def call_with_state(x: Inputs, case: Case, **options: Any) -> tuple[Tensor, Tensor]:
    options = {"initial_state": x.initial_state, "output_final_state": True, **options}
    o, final_state = call(x, case, **options)
    assert final_state is not None
    return o, final_state


def check(
    case: Case,
    x: Inputs,
    device: str,
    *,
    scale: float | None = None,
    with_state: bool = True,
    state_v_first: bool = False,
    l2norm: bool = False,
    sigmoid: bool = False,
    negative: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One call, its o and final state held to the budget; returns them."""
    dtype = torch.promote_types(torch.promote_types(x.q.dtype, x.k.dtype), x.v.dtype)
    arithmetic = Arithmetic(dtype, device)
    shared: dict[str, Any] = {
        "scale": scale,
        "use_qk_l2norm": l2norm,
        "use_beta_sigmoid": sigmoid,
        "allow_neg_eigval": negative,
        "A_log": A_log,
        "dt_bias": dt_bias,
    }
    exact_o, exact_state = reference.recurrent_gated_delta_rule(
        *x.exact(),
        initial_state=x.initial_state.to(FP64) if with_state else None,
        cu_seqlens=x.cu_seqlens,
        use_gate=A_log is not None,
        **shared,
    )
    narrow_o, narrow_state = narrow_forward(x, case, arithmetic, with_state=with_state, **shared)
    given = x.initial_state.mT if state_v_first else x.initial_state
    o, state = call_with_state(
        x,
        case,
        scale=scale,
        initial_state=given if with_state else None,
        state_v_first=state_v_first,
        use_qk_l2norm_in_kernel=l2norm,
        use_beta_sigmoid_in_kernel=sigmoid,
        allow_neg_eigval=negative,
        use_gate_in_kernel=A_log is not None,
        A_log=A_log,
        dt_bias=dt_bias,
    )
    assert o.is_contiguous() and state.is_contiguous()
    assert o.device == state.device == x.q.device
    unit = arithmetic.unit
    assert_within_budget("o", o, exact_o, narrow_o, dtype=x.q.dtype, unit=unit)
    used = state.mT if state_v_first else state
    assert_within_budget("final_state", used, exact_state, narrow_state, dtype=FP32, unit=unit)
    if case.packed:
        assert (o[:, case.offsets()[-1] :] == 0).all(), "tokens of no sequence"
    return o, state
