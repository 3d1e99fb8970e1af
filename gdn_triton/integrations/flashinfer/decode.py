"""FlashInfer's decode steps on this package's op."""

from typing import Any

import torch
from torch import Tensor

from gdn_triton.integrations._decode import draft_states
from gdn_triton.integrations.flashinfer._checks import (
    DECODE_BACKENDS,
    check_backend,
    check_scale,
)
from gdn_triton.recurrent.api import recurrent_step


def gated_delta_rule_decode_pretranspose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    use_qk_l2norm: bool = True,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    disable_state_update: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """A decode step on value-first states, as `flashinfer.gdn_decode`'s of that name.

    B sequences of T tokens. q, k: [B, T, H, K]. v: [B, T, HV, V]. a, b: [B, T, HV]. A_log, dt_bias:
    [HV]. Either `state` [B, HV, V, K], updated in place, or the pool `initial_state`
    [slots, HV, V, K] with `initial_state_indices` [B], and `output_state_indices` [B] where the
    states go elsewhere. A negative index is padding: of the first, o is 0 and no state is touched,
    whatever the dtype of the pool (FlashInfer takes slot 0 for bfloat16 states instead); of the
    second, the state is not kept.

    `intermediate_states_buffer` [rows, steps, HV, V, K], of the pool's dtype, with B rows and T
    steps or more: the state after token t of sequence n is written to [n, t]. The states that the
    sequences start from are copied to their first step before; and where the last state goes to
    the pool too, it is computed a second time, for a step writes one tensor. `backend` is one of
    FlashInfer's names, which choose among its own kernels: it is not read beside. `output` is
    written directly if it has the dtype of v, and copied to otherwise.

    Any sizes and any float dtypes; the rest is that of `gdn_triton.recurrent_step`.

    Returns:
        (o [B, T, HV, V] in the dtype of v, or `output`; the state or the pool).

    Raises:
        TypeError, ValueError, NotImplementedError: see `gdn_triton.recurrent_step`.
    """
    check_backend(backend, DECODE_BACKENDS)
    if (initial_state is None) != (initial_state_indices is None):
        raise ValueError("initial_state and initial_state_indices must be given together")
    if (initial_state is None) == (state is None):
        raise ValueError("either state or initial_state must be given, and not both")
    pool, slots = initial_state, initial_state_indices
    if pool is None or slots is None:
        assert state is not None
        if output_state_indices is not None:
            raise ValueError("output_state_indices must be None without initial_state")
        pool, slots = state, _rows(q, state)
    step: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "a": a,
        "b": b,
        "A_log": A_log,
        "dt_bias": dt_bias,
    }
    step |= {"use_qk_l2norm_in_kernel": use_qk_l2norm, "scale": check_scale(scale)}
    write_slots = torch.full_like(slots, -1) if disable_state_update else output_state_indices
    if intermediate_states_buffer is None:
        return _step(pool, slots, write_slots, output, state_v_first=True, **step), pool
    B, T = q.shape[:2]
    if intermediate_states_buffer.shape[0] < B or intermediate_states_buffer.shape[1] < T:
        raise ValueError(
            f"intermediate_states_buffer must have at least {B} rows of {T} steps, got "
            f"{list(intermediate_states_buffer.shape)}"
        )
    drafts = draft_states(intermediate_states_buffer, _order(q), pool, slots, T, None)
    o = _step(*drafts, output, state_v_first=True, **step)
    if not disable_state_update:
        recurrent_step(pool, slots, write_slots, state_v_first=True, **step)
    return o, pool


def gated_delta_rule_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    use_qk_l2norm: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """A decode step on key-first states [B, HV, K, V], as `flashinfer.gdn_decode`'s of that name.

    The other arguments, the result and the errors are those of
    `gated_delta_rule_decode_pretranspose`.
    """
    check_backend(backend, DECODE_BACKENDS)
    o = _step(
        state,
        _rows(q, state),
        None,
        output,
        q=q,
        k=k,
        v=v,
        a=a,
        b=b,
        A_log=A_log,
        dt_bias=dt_bias,
        use_qk_l2norm_in_kernel=use_qk_l2norm,
        scale=check_scale(scale),
    )
    return o, state


def gated_delta_rule_mtp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    disable_state_update: bool | None = None,
    use_qk_l2norm: bool = True,
    output_state_indices: Tensor | None = None,
    cache_replayssm: bool = False,
    replayssm_rawv: Tensor | None = None,
    replayssm_rawk: Tensor | None = None,
    replayssm_g: Tensor | None = None,
    replayssm_beta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Several tokens a sequence from a pool, to verify speculated ones, as the function of that
    name in `flashinfer.gdn_decode`.

    The shapes are those of `gated_delta_rule_decode_pretranspose`. `ssm_state_indices` [B, T]: the
    slot that the state after each token is written to, and nothing else is. Without it the last
    state is written to `output_state_indices`, by default where it was read; with
    `disable_state_update` it is not. That flag has to be given: FlashInfer's own default is True
    and about to become False.

    `intermediate_states_buffer` as there; not with ssm_state_indices. The ReplaySSM window
    (`cache_replayssm` and its tensors) is not served.
    """
    replay = (replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta)
    if cache_replayssm or any(x is not None for x in replay):
        raise NotImplementedError("the ReplaySSM window is not served: cache_replayssm must be off")
    if disable_state_update is None:
        raise ValueError("disable_state_update must be given as True or False, got None")
    if ssm_state_indices is not None:
        others = (output_state_indices, intermediate_states_buffer)
        if disable_state_update or any(x is not None for x in others):
            raise ValueError(
                "ssm_state_indices must come with disable_state_update=False and without "
                "output_state_indices and intermediate_states_buffer"
            )
        output_state_indices = ssm_state_indices
    return gated_delta_rule_decode_pretranspose(
        q,
        k,
        v,
        None,
        A_log,
        a,
        dt_bias,
        b,
        scale,
        output,
        use_qk_l2norm,
        initial_state,
        initial_state_indices,
        output_state_indices,
        intermediate_states_buffer,
        disable_state_update,
    )


def _step(
    pool: Tensor,
    slots: Tensor,
    write_slots: Tensor | None,
    output: Tensor | None,
    **step: Any,
) -> Tensor:
    """o: output, if that is given."""
    if output is None or output.dtype == step["v"].dtype:
        return recurrent_step(pool, slots, write_slots, out=output, **step)
    o = recurrent_step(pool, slots, write_slots, **step)
    if output.shape != o.shape:
        raise ValueError(f"output must have shape {list(o.shape)}, got {list(output.shape)}")
    return output.copy_(o)


def _order(q: Tensor) -> Tensor:
    return torch.arange(q.shape[0], device=q.device, dtype=torch.int32)


def _rows(q: Tensor, state: Tensor) -> Tensor:
    """The slots of states that lie in the order of their sequences."""
    if state.shape[0] != q.shape[0]:
        raise ValueError(f"state must have one row a sequence, {q.shape[0]}, got {state.shape[0]}")
    return _order(q)
