"""The specification as a backend: plain torch on any device, differentiable."""

import torch
from torch import Tensor

from gdn_triton import reference
from gdn_triton.problem import Problem


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_indices: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """o [B, T, HV, V] in the dtype of q, and the final state or None.

    The one backend that reads the contents of cu_seqlens on the host, and so waits for the device;
    chunk_indices is not needed.
    """
    # The reference turns autocast off for itself.
    result = reference.chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        scale=problem.scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        chunk_size=problem.chunk_size,
        use_qk_l2norm=problem.use_qk_l2norm,
        use_beta_sigmoid=problem.use_beta_sigmoid,
        allow_neg_eigval=problem.allow_neg_eigval,
        use_gate=problem.use_gate,
        A_log=A_log,
        dt_bias=dt_bias,
        state_v_first=problem.state_v_first,
    )
    o = result.o.to(problem.q_dtype).contiguous()
    if not problem.output_final_state:
        return o, None
    state_dtype = torch.float64 if problem.q_dtype == torch.float64 else torch.float32
    return o, result.final_state.to(state_dtype).contiguous()
