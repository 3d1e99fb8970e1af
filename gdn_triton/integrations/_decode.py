"""The decode steps that serving engines ask for: value-first states in a pool, and what their
kernels take beside."""

import torch
from torch import Tensor

from gdn_triton.recurrent.api import recurrent_step


def packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool,
    skip: str,
) -> tuple[Tensor, Tensor]:
    """A token a sequence, from one mixed_qkv; o is written to out [B, 1, HV, V]. (out, the pool)"""
    if out.dim() != 4 or out.shape[1] != 1:
        raise ValueError(f"out must have shape [B, 1, HV, V], got {list(out.shape)}")
    recurrent_step(
        initial_state,
        ssm_state_indices,
        mixed_qkv=mixed_qkv,
        a=a,
        b=b,
        A_log=A_log,
        dt_bias=dt_bias,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        scale=scale,
        state_v_first=True,
        skip=skip,
        out=out.squeeze(1),
    )
    return out, initial_state


def check_softplus(names: tuple[str, str], beta: float, threshold: float) -> None:
    if beta != 1.0 or threshold != 20.0:
        raise NotImplementedError(
            f"{names[0]} must be 1.0 and {names[1]} 20.0, got {beta!r} and {threshold!r}"
        )


def refuse(name: str, is_given: bool, reason: str) -> None:
    if is_given:
        raise NotImplementedError(f"{name} is not served: {reason}")


def draft_states(
    buffer: Tensor,
    indices: Tensor,
    pool: Tensor,
    slots: Tensor,
    T: int,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, read_slots, write_slots): a buffer [rows, steps, HV, V, K] of the states after drafted
    tokens as one pool, which holds the states that the sequences start from; where these are, and
    where the state after each token goes. indices: the row of each sequence.

    A step reads and writes one pool, so these states are copied first: a state read and one written
    more, beside the one that is read and the T that are written.
    """
    if buffer.dim() != 5 or buffer.shape[2:] != pool.shape[1:] or buffer.dtype != pool.dtype:
        raise ValueError(
            "intermediate_states_buffer must have shape [rows, steps, HV, V, K] and dtype with "
            f"[HV, V, K] = {list(pool.shape[1:])} and {pool.dtype} of the pool, got "
            f"{list(buffer.shape)} and {buffer.dtype}"
        )
    steps = buffer.shape[1]
    # Fewer steps may be in use than there is room for: of a row, or of what its stride says.
    unit = buffer.stride(1) if steps > 1 else buffer.stride(0)
    pitch, rest = divmod(buffer.stride(0), unit)
    if rest or pitch < steps:
        raise ValueError(
            "intermediate_states_buffer must have rows a whole number of steps apart, got strides "
            f"{list(buffer.stride())}"
        )
    count = (buffer.shape[0] - 1) * pitch + steps
    rows = buffer.as_strided((count, *buffer.shape[2:]), (unit, *buffer.stride()[2:]))
    first = indices.long() * pitch
    rows.index_copy_(0, first, pool.index_select(0, slots.clamp(min=0)))
    read_slots = torch.where(slots < 0, -1, first)
    step = torch.arange(T, device=buffer.device)
    if cu_seqlens is None:
        start, kept = read_slots[:, None], step < steps
    else:
        step = step.to(cu_seqlens.dtype)
        # Tokens after the last sequence belong to none.
        sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), step, right=True)
        is_token = sequence < slots.shape[0]
        sequence = sequence.clamp(max=slots.shape[0] - 1)
        step = (step - cu_seqlens[sequence])[None]
        start, kept = read_slots[sequence][None], is_token & (step < steps)
    return rows, read_slots, torch.where(kept & (start >= 0), start + step, -1)
