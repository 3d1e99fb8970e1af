"""FlashInfer's decode steps on this package's op."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gdn_triton._host.arguments import check_flags, check_rank, check_tensors, must, shape_of
from gdn_triton.integrations._decode import draft_states
from gdn_triton.integrations._results import (
    check_apart,
    check_result,
    check_same_shape,
    fill,
)
from gdn_triton.integrations.flashinfer._checks import (
    DECODE_BACKENDS,
    check_backend,
    check_scale,
)
from gdn_triton.recurrent.api import check_step, recurrent_step


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
    """Runs a decode step on value-first states, like the function of this name in
    `flashinfer.gdn_decode`.

    B sequences of T tokens. q, k: [B, T, H, K]. v: [B, T, HV, V]. a, b: [B, T, HV]. A_log, dt_bias:
    [HV]. The states are either `state` [B, HV, V, K], updated in place, or the pool `initial_state`
    [slots, HV, V, K] with `initial_state_indices` [B]. `output_state_indices` [B] are the slots to
    which states are written, if they differ. A negative index is padding. In
    `initial_state_indices` it makes o 0 and leaves every state unchanged, whatever the dtype of the
    pool (FlashInfer uses slot 0 for bfloat16 states instead). In `output_state_indices` it drops
    the new state.

    `intermediate_states_buffer` [rows, steps, HV, V, K], of the pool's dtype, with B rows and T
    steps or more: the state after token t of sequence n is written to [n, t]. The start states of
    the sequences are first copied to their first step in the buffer. If the last state is also
    written to the pool, it is computed a second time, because a step writes only one tensor.
    `backend` is one of the names of FlashInfer's kernels; it is checked and has no effect. `output`
    is written directly if it has the dtype of v, and otherwise o is copied to it.

    Sizes and float dtypes may be any; otherwise the step is that of `gdn_triton.recurrent_step`.

    Returns:
        (o [B, T, HV, V] in the dtype of v, or `output`; the state or the pool).

    Raises:
        TypeError, ValueError, NotImplementedError: see `gdn_triton.recurrent_step`.
    """
    check_backend(backend, DECODE_BACKENDS)
    optional = {
        "state": state,
        "output": output,
        "initial_state": initial_state,
        "initial_state_indices": initial_state_indices,
        "output_state_indices": output_state_indices,
    }
    check_tensors({"q": q, "v": v}, optional)
    check_flags(use_qk_l2norm=use_qk_l2norm, disable_state_update=disable_state_update)
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
    name = "intermediate_states_buffer"
    check_tensors({name: intermediate_states_buffer}, {})
    check_rank("q", q, "B", "T", "H", "K")
    check_rank(name, intermediate_states_buffer, "rows", "steps", "HV", "V", "K")
    B, T = q.shape[:2]
    if intermediate_states_buffer.shape[0] < B or intermediate_states_buffer.shape[1] < T:
        raise ValueError(
            f"{name} must have at least {B} rows of {T} steps, got "
            f"{list(intermediate_states_buffer.shape)}"
        )
    step["state_v_first"] = True
    pool_name = "state" if initial_state is None else "initial_state"
    slots_name = "initial_state_indices"
    if slots.shape != (B,):
        raise ValueError(must(slots_name, f"have shape [B={B}], one a sequence", shape_of(slots)))
    drafts = draft_states(
        intermediate_states_buffer,
        _order(q),
        pool,
        slots,
        T,
        None,
        names={"indices": "q", "pool": pool_name, "slots": slots_name},
        others={"output": output},
    )
    # Check the arguments of both steps before either step runs.
    direct = _direct(output, pool, slots, step)
    check_step(drafts.rows, drafts.read_slots, drafts.write_slots, out=direct, **step)
    if not disable_state_update:
        check_step(pool, slots, write_slots, **step)
        check_apart({"output": output}, {pool_name: pool})
    drafts.begin()
    o = recurrent_step(drafts.rows, drafts.read_slots, drafts.write_slots, out=direct, **step)
    if output is not None and direct is None:
        o = fill(output, o)
    if not disable_state_update:
        recurrent_step(pool, slots, write_slots, **step)
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
    """Runs a decode step on key-first states [B, HV, K, V], like the function of this name in
    `flashinfer.gdn_decode`.

    The other arguments, the result and the errors are those of
    `gated_delta_rule_decode_pretranspose`.
    """
    check_backend(backend, DECODE_BACKENDS)
    check_tensors({"q": q, "v": v, "state": state}, {"output": output})
    check_flags(use_qk_l2norm=use_qk_l2norm)
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
    """Runs several tokens per sequence from a pool, to verify speculated tokens, like the function
    of this name in `flashinfer.gdn_decode`.

    The shapes are those of `gated_delta_rule_decode_pretranspose`. `ssm_state_indices` [B, T]: the
    slots to which the state after each token is written; no other slot is written. Without
    `ssm_state_indices` the last state is written to `output_state_indices`, by default the slots
    that were read, unless `disable_state_update` is set. That flag must be given, because
    FlashInfer's default is True and will become False.

    `intermediate_states_buffer` as for that function; it excludes ssm_state_indices. The ReplaySSM
    window (`cache_replayssm` and its tensors) is not supported.
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
    """Runs a step and returns o, which is output if that is given."""
    direct = _direct(output, pool, slots, step)
    o = recurrent_step(pool, slots, write_slots, out=direct, **step)
    return o if output is None or direct is not None else fill(output, o)


def _direct(
    output: Tensor | None, pool: Tensor, slots: Tensor, step: Mapping[str, Any]
) -> Tensor | None:
    """Returns output if a step can write to it directly; the step then checks it. Otherwise checks
    output here and returns None; the caller then copies o to output."""
    v = step["v"]
    if output is None or output.dtype == v.dtype:
        return output
    check_result("output", output, "v", v.device)
    check_same_shape("output", output, v.shape)
    tensors = {name: x for name, x in step.items() if isinstance(x, Tensor)}
    check_apart({"output": output}, {"state": pool, "slots": slots, **tensors})
    return None


def _order(q: Tensor) -> Tensor:
    return torch.arange(q.shape[0], device=q.device, dtype=torch.int32)


def _rows(q: Tensor, state: Tensor) -> Tensor:
    """Returns the slots of states that are in the order of their sequences."""
    rows, B = (x.shape[0] if x.dim() > 0 else 0 for x in (state, q))
    if rows != B:
        raise ValueError(f"state must have one row a sequence, {B}, got {rows}")
    return _order(q)
