"""The decode steps of serving engines: value-first states in a pool, and buffers of the states
after drafted tokens."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gdn_triton._host.arguments import (
    check_devices,
    check_dtypes,
    check_rank,
    check_tensors,
    count_sequences,
    must,
    shape_of,
)
from gdn_triton._host.tensors import writing
from gdn_triton.integrations._results import check_apart, check_below, check_indices
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
    """Decodes one token per sequence from one mixed_qkv, and writes o to out [B, 1, HV, V]. Returns
    (out, the pool)."""
    check_tensors({"out": out}, {})
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


def check_convolved(x: Tensor, weight: Tensor, name: str, state: Tensor) -> None:
    """Checks the properties of the convolution's arguments that an adapter reads before the op
    validates all arguments. name: the name of the state."""
    check_tensors({"x": x, "weight": weight, name: state}, {})
    check_rank("weight", weight, "D", "W")
    check_rank(name, state, "slots", "D", "columns")
    check_dtypes({"x": x, name: state}, ())
    if x.dim() not in (2, 3):
        raise ValueError(must("x", "have 2 or 3 dimensions", shape_of(x)))


def check_tokens(v: Tensor, slots: Tensor, name: str, cu_seqlens: Tensor | None) -> int:
    """Checks the arguments that divide a step's tokens [B, T, HV, V] into sequences. Returns N, the
    number of sequences. name: the name of the slots."""
    check_tensors({"v": v, name: slots}, {"cu_seqlens": cu_seqlens})
    check_rank("v", v, "B", "T", "HV", "V")
    return v.shape[0] if cu_seqlens is None else count_sequences(cu_seqlens)


def gates_of_tokens(v: Tensor, **gates: Tensor) -> dict[str, Tensor]:
    """Returns a and b as [B, T, HV]; the caller may pass them as [B * T, HV]. v: [B, T, HV, V]."""
    check_tensors({"v": v, **gates}, {})
    check_rank("v", v, "B", "T", "HV", "V")
    B, T, HV = v.shape[:3]
    for name, x in gates.items():
        if x.dim() < 2 or x.shape[-1] != HV or x.numel() != B * T * HV:
            expected = f"have shape [B={B}, T={T}, HV={HV}] or [{B * T}, {HV}]"
            raise ValueError(must(name, expected, shape_of(x)))
    return {name: x.reshape(B, T, HV) for name, x in gates.items()}


class Drafts(NamedTuple):
    """A buffer of the states after drafted tokens, viewed as one pool `rows` [states, HV, V, K].
    After a call of `begin` it also holds the states from which the sequences start.

    read_slots, write_slots: the slots of the start states, and the slot of the state after each
    token. first, states: the rows that `begin` writes, and the new contents of these rows.
    """

    rows: Tensor
    read_slots: Tensor
    write_slots: Tensor
    first: Tensor
    states: Tensor

    def begin(self) -> None:
        if self.first.shape[0] > 0:
            with writing(self.rows):
                self.rows.index_copy_(0, self.first, self.states)


def draft_states(
    buffer: Tensor,
    indices: Tensor,
    pool: Tensor,
    slots: Tensor,
    T: int,
    cu_seqlens: Tensor | None,
    *,
    names: Mapping[str, str],
    others: Mapping[str, Tensor | None],
) -> Drafts:
    """Returns the `Drafts` of a buffer [rows, steps, HV, V, K] for the states after drafted tokens.
    indices: [N], the row of each sequence; the indices of padded sequences are not used.

    A step reads and writes one pool, so the start states of the sequences must first be copied to
    the buffer. The copy reads and writes one state per sequence, in addition to the state that the
    step reads and the T states that it writes. This function itself writes nothing.

    names: the caller's names of indices, pool and slots. others: further tensors that, like the
    pool, must not share memory with the buffer.
    """
    name = "intermediate_states_buffer"
    check_tensors({name: buffer, names["pool"]: pool}, {})
    for given, x in (("indices", indices), ("slots", slots)):
        check_indices(names[given], x, names["pool"], pool.device)
    check_devices(names["pool"], pool.device, {name: buffer})
    check_rank(names["pool"], pool, "slots", "HV", "V", "K")
    check_dtypes({names["pool"]: pool}, ())
    if torch.is_grad_enabled() and pool.requires_grad:
        raise NotImplementedError(
            f"{names['pool']} is a pool of states, which have no gradient, and requires one: "
            "detach it"
        )
    if buffer.dim() != 5 or buffer.shape[2:] != pool.shape[1:] or buffer.dtype != pool.dtype:
        raise ValueError(
            f"{name} must have shape [rows, steps, HV, V, K] and dtype with "
            f"[HV, V, K] = {list(pool.shape[1:])} and {pool.dtype} of the pool, got "
            f"{list(buffer.shape)} and {buffer.dtype}"
        )
    if 0 in (*buffer.shape[:2], pool.shape[0]):
        raise ValueError(
            f"{name} and {names['pool']} must have a row, a step and a slot at least, got "
            f"{list(buffer.shape)} and {list(pool.shape)}"
        )
    if indices.shape != slots.shape:
        expected = f"have shape {list(slots.shape)}, one a sequence"
        raise ValueError(must(names["indices"], expected, shape_of(indices)))
    check_below(names["slots"], slots, pool.shape[0], f"slots of {names['pool']}")
    check_apart({name: buffer}, {names["pool"]: pool, **others})
    steps = buffer.shape[1]
    # The buffer may have fewer steps than its stride has room for.
    unit = buffer.stride(1) if steps > 1 else buffer.stride(0) or 1
    pitch, rest = divmod(buffer.stride(0), unit) if buffer.shape[0] > 1 else (steps, 0)
    if rest or pitch < steps:
        raise ValueError(
            f"{name} must have rows a whole number of steps apart, got strides "
            f"{list(buffer.stride())}"
        )
    count = (buffer.shape[0] - 1) * pitch + steps
    rows = buffer.as_strided((count, *buffer.shape[2:]), (unit, *buffer.stride()[2:]))
    live = slots >= 0
    first = indices.long() * pitch
    read_slots = torch.where(live, first, -1)
    step = torch.arange(T, device=buffer.device)
    if cu_seqlens is None:
        start, kept = read_slots[:, None], step < steps
    elif slots.shape[0] == 0:
        start, kept = step[None], torch.zeros_like(step, dtype=torch.bool)
    else:
        step = step.to(cu_seqlens.dtype)
        # Tokens after the last sequence belong to no sequence.
        sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), step, right=True)
        is_token = sequence < slots.shape[0]
        sequence = sequence.clamp(max=slots.shape[0] - 1)
        step = (step - cu_seqlens[sequence])[None]
        start, kept = read_slots[sequence][None], is_token & (step < steps)
    write_slots = torch.where(kept & (start >= 0), start + step, -1)
    written, states = _first_states(rows, first, pool, slots, live)
    return Drafts(rows, read_slots, write_slots, written, states)


def _first_states(
    rows: Tensor, first: Tensor, pool: Tensor, slots: Tensor, live: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the writes of the states of sequences that are `live`, whose rows are `first`: (the
    rows [N], the states [N, HV, V, K]).

    The index of a padded sequence may be the row of another sequence. The host does not know which
    sequences are padding, so each of the N sequences has a write. The write of a padded sequence
    repeats the write of a live sequence. If all sequences are padding, the write stores the first
    row's own state back to that row.
    """
    N = slots.shape[0]
    if N == 0:
        return first, rows[:0]
    order = torch.arange(N, device=slots.device)
    source = torch.where(live, order, live.int().argmax())
    any_live = live.index_select(0, source)
    written = torch.where(any_live, first.index_select(0, source), 0)
    states = pool.index_select(0, slots.index_select(0, source).clamp(min=0))
    return written, torch.where(any_live[:, None, None, None], states, rows[:1])
