"""Validates the calls of `gdn_triton.chunk_prefill` in the order and with the words of
`gdn_triton.chunk.validation`. Nothing is read from an accelerator.

The arguments that the chunked op has as well are checked there. `validate_prefill` checks the
others by shapes, dtypes, devices and flags. At every call `check_memory` checks strides and
addresses, and `check_slots` the contents of slots that the host can read.
"""

import dataclasses
import functools
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from gdn_triton._host.arguments import (
    FLAG_DTYPES,
    check_devices,
    check_dtype,
    check_dtypes,
    check_shape,
    check_state,
    check_tensors,
    must,
    shape_of,
    value_of,
)
from gdn_triton._host.memory import Apart, Layout, layout_of, span
from gdn_triton._host.remembered import MOST_REMEMBERED, remembered
from gdn_triton._host.slots import (
    Write,
    check_once,
    check_read_in_pool,
    check_readers,
    check_skip,
    check_written_in_pool,
    final_writes,
    readers,
)
from gdn_triton._host.tensors import why_unreadable
from gdn_triton.chunk.problem import ChunkCall, Inputs, Pool, PoolArguments, PrefillCall, Problem
from gdn_triton.chunk.validation import validate_chunk
from gdn_triton.constants import MAX_ROW_STRIDE, MAX_STATE_SPAN


@remembered
def validate_prefill(call: PrefillCall) -> Problem:
    """Checks a `gdn_triton.chunk.problem.PrefillCall`, field by field.

    In this order: what the chunked op would check; then types, devices, dtypes, state, slots,
    has_initial_state, out, checkpoints, gradients.
    """
    problem = validate_chunk(
        ChunkCall(
            inputs=call.inputs,
            options=call.options,
            cu_seqlens_cpu=call.cu_seqlens_cpu,
            chunk_indices=None,
            scale=call.scale,
            output_final_state=False,
            chunk_size=call.chunk_size,
        )
    )
    p = problem

    state, read_slots, out = call.pool.state, call.pool.read_slots, call.pool.out
    write_slots, has_initial_state = call.pool.write_slots, call.pool.has_initial_state
    state_checkpoints = call.pool.state_checkpoints
    checkpoint_slots = call.pool.checkpoint_slots

    # Types, devices, dtypes.
    optional = call.pool._asdict()
    required = {name: optional.pop(name) for name in ("state", "read_slots")}
    check_tensors(required, optional)
    check_skip(call.skip)
    every = call.checkpoint_every_n_tokens
    if type(every) is not int:
        raise TypeError(must("checkpoint_every_n_tokens", "be an int", value_of(every)))
    check_devices("q", p.device, call.pool._asdict())
    slots = {
        "read_slots": read_slots,
        "write_slots": write_slots,
        "checkpoint_slots": checkpoint_slots,
    }
    check_dtypes({"state": state, "state_checkpoints": state_checkpoints, **slots}, slots)
    if has_initial_state is not None:
        check_dtype("has_initial_state", has_initial_state, FLAG_DTYPES, "torch.bool")
    if out is not None and out.dtype != p.q_dtype:
        raise ValueError(must("out", f"be {p.q_dtype}, as q is", str(out.dtype)))

    # Shapes.
    _check_states("state", state, "slots", p)
    for name, maybe in (
        ("read_slots", read_slots),
        ("write_slots", write_slots),
        ("has_initial_state", has_initial_state),
    ):
        if maybe is not None and maybe.shape != (p.N,):
            raise ValueError(must(name, f"have shape [N={p.N}], one a sequence", shape_of(maybe)))
    check_shape("out", out, B=p.B, T=p.T, HV=p.HV, V=p.V)

    # Checkpoints. Kernels take their distance as a number of 32 bits.
    if not 0 <= every < 2**31 or every % p.chunk_size != 0:
        expected = f"be 0 or a multiple of chunk_size={p.chunk_size} below 2^31"
        raise ValueError(must("checkpoint_every_n_tokens", expected, str(every)))
    if every == 0:
        for name in ("state_checkpoints", "checkpoint_slots"):
            if getattr(call.pool, name) is not None:
                expected = "be None without checkpoint_every_n_tokens"
                raise ValueError(must(name, expected, "a tensor"))
    if checkpoint_slots is not None and (
        checkpoint_slots.dim() != 2 or checkpoint_slots.shape[0] != p.N
    ):
        expected = f"have shape [N={p.N}, M], a row a sequence"
        raise ValueError(must("checkpoint_slots", expected, shape_of(checkpoint_slots)))
    if state_checkpoints is not None:
        _check_states("state_checkpoints", state_checkpoints, "rows", p)
        least = 0 if checkpoint_slots is not None else checkpoint_rows(p, every)
        if state_checkpoints.shape[0] < least:
            expected = f"have at least B * T // checkpoint_every_n_tokens = {least} rows"
            raise ValueError(must("state_checkpoints", expected, shape_of(state_checkpoints)))

    if p.needs_grad or (
        torch.is_grad_enabled()
        and any(x.requires_grad for x in (state, out, state_checkpoints) if x is not None)
    ):
        raise NotImplementedError(
            "gdn_triton.chunk_prefill updates states in place and has no gradient; an input "
            "requires one. Call under torch.no_grad(), or use chunk_gated_delta_rule"
        )
    unreadable = problem.unreadable or why_unreadable(PoolArguments._fields, call.pool)
    return dataclasses.replace(problem, pool_dtype=state.dtype, unreadable=unreadable)


def checkpoint_rows(problem: Problem, every: int) -> int:
    """The least number of rows for checkpoints without slots."""
    return problem.B * problem.T // every


def check_memory(x: Sequence[Tensor | None]) -> None:
    """Raises ValueError if memory that the call writes has strides that do not allow it, or is
    shared. x: the `PoolArguments` of a call, without checkpoints that are slots of the pool, and
    its `Inputs`."""
    _judged_memory(tuple(map(layout_of, x))).check(x)


@functools.lru_cache(MOST_REMEMBERED)
def _judged_memory(layouts: tuple[Layout | None, ...]) -> Apart:
    named = dict(zip((*PoolArguments._fields, *Inputs._fields), layouts, strict=True))
    for name in ("state", "state_checkpoints"):
        layout = named[name]
        if layout is not None and span(layout[0][1:], layout[1][1:]) > MAX_STATE_SPAN:
            expected = "have the elements of a slot within 2^31 of each other"
            raise ValueError(must(name, expected, f"strides {list(layout[1])}"))
    apart = Apart(named, ("out", "state_checkpoints", "state"))
    if named["out"] is not None:
        shape, strides, _ = named["out"]
        if shape[3] > 1 and strides[3] != 1:
            raise ValueError(must("out", "have a dense last dimension", f"strides {list(strides)}"))
        if strides[1] >= MAX_ROW_STRIDE:
            expected = f"have rows of less than {MAX_ROW_STRIDE} elements"
            raise ValueError(must("out", expected, f"strides {list(strides)}"))
    return apart


def check_slots(p: Problem, pool: Pool, cu_seqlens: Tensor | None) -> None:
    """Checks the contents of slots that are CPU tensors."""
    if p.device.type != "cpu":
        return
    last, slots = pool.last_skipped, pool.state.shape[0]
    read: list[int] = pool.read_slots.tolist()
    check_read_in_pool(read, slots)
    name = "read_slots" if pool.write_slots is pool.read_slots else "write_slots"
    writes = final_writes(read, pool.write_slots.tolist(), last)
    check_written_in_pool(name, writes, slots)
    check_once(name, writes)
    if pool.checkpoint_slots is not None and pool.checkpoints is not None:
        kept = _checkpoint_writes(p, pool, cu_seqlens, read)
        check_once("checkpoint_slots", kept)
        if pool.checkpoints is pool.state:
            writes += kept
            check_once("checkpoint_slots", writes)
    flags = pool.has_initial_state
    check_readers(readers(read, None if flags is None else flags.tolist(), last), writes)


def _checkpoint_writes(
    p: Problem, pool: Pool, cu_seqlens: Tensor | None, read: list[int]
) -> list[Write]:
    """The checkpoints that are kept, except one that is a final state too."""
    assert pool.checkpoint_slots is not None and pool.checkpoints is not None
    lengths = [p.T] * p.N
    if cu_seqlens is not None:
        lengths = [end - first for first, end in pairwise(cu_seqlens.tolist())]
    rows, write = pool.checkpoints.shape[0], pool.write_slots.tolist()
    found = []
    for n, (line, length) in enumerate(zip(pool.checkpoint_slots.tolist(), lengths, strict=True)):
        if read[n] <= pool.last_skipped:
            continue
        for j, row in enumerate(line[: length // pool.every]):
            if row >= rows:
                expected = f"be less than the {rows} slots or rows that there are"
                raise ValueError(must("checkpoint_slots", expected, f"{row} at [{n}, {j}]"))
            final = (j + 1) * pool.every == length and pool.checkpoints is pool.state
            if row > pool.last_skipped and not (final and row == write[n]):
                found.append(Write(row, n, j))
    return found


def _check_states(name: str, x: Tensor, count: str, p: Problem) -> None:
    sizes = {"HV": p.HV, "K": p.K, "V": p.V}
    check_state(name, x, count, None, **sizes, state_v_first=p.state_v_first)
