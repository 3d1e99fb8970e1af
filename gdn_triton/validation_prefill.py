"""Judges the calls of `gdn_triton.chunk_prefill`, as `gdn_triton.validation` does those of the
chunked op: the same order, the same words, nothing read from an accelerator.

What a call shares with the chunked op is judged there. `validate_prefill` judges what it has beside
by shapes, dtypes, devices and flags; `check_memory`, at every call, strides, addresses and, where
the host can read them, the contents of slots.
"""

import dataclasses
from itertools import pairwise

import torch
from torch import Tensor

from gdn_triton.arguments import (
    FLOAT_DTYPES,
    FLOATS,
    INDEX_DTYPES,
    INDICES,
    check_dtype,
    check_own_memory,
    must,
    shape_of,
    shaped,
    type_of,
    value_of,
)
from gdn_triton.constants import MAX_ROW_STRIDE
from gdn_triton.problem import Pool, Problem
from gdn_triton.validation import remembered, validate_chunk
from gdn_triton.validation_recurrent import LAST_SKIPPED, _check_state, _check_tensor


@remembered
def validate_prefill(
    state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor | None,
    has_initial_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    out: Tensor | None,
    state_checkpoints: Tensor | None,
    checkpoint_slots: Tensor | None,
    scale: float | None,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    state_v_first: bool,
    skip: str,
    checkpoint_every_n_tokens: int,
    chunk_size: int,
) -> Problem:
    """Checks a `gdn_triton.prefill_call.PrefillCall`, field by field.

    In this order: what the chunked op would check; then types, devices, dtypes, state, slots,
    has_initial_state, out, checkpoints, gradients.
    """
    problem = validate_chunk(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=None,
        chunk_indices=None,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        chunk_size=chunk_size,
    )
    p = problem

    # Types, devices, dtypes.
    _check_tensor("state", state)
    _check_tensor("read_slots", read_slots)
    indices = {
        "read_slots": read_slots,
        "write_slots": write_slots,
        "checkpoint_slots": checkpoint_slots,
    }
    floats = {"state": state, "state_checkpoints": state_checkpoints}
    others = {"has_initial_state": has_initial_state, "out": out}
    given = {name: x for name, x in {**floats, **indices, **others}.items() if x is not None}
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise TypeError(must(name, "be a torch.Tensor or None", type_of(x)))
    if type(skip) is not str or skip not in LAST_SKIPPED:
        raise ValueError(must("skip", f"be one of {', '.join(LAST_SKIPPED)}", value_of(skip)))
    every = checkpoint_every_n_tokens
    if type(every) is not int:
        raise TypeError(must("checkpoint_every_n_tokens", "be an int", value_of(every)))
    for name, x in given.items():
        if x.device != p.device:
            raise ValueError(must(name, f"be on the device of q, {p.device}", str(x.device)))
        if name in floats:
            check_dtype(name, x, FLOAT_DTYPES, FLOATS)
        elif name in indices:
            check_dtype(name, x, INDEX_DTYPES, INDICES)
    if has_initial_state is not None and has_initial_state.dtype != torch.bool:
        raise ValueError(must("has_initial_state", "be torch.bool", str(has_initial_state.dtype)))
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
    if out is not None and out.shape != (p.B, p.T, p.HV, p.V):
        expected = shaped(B=p.B, T=p.T, HV=p.HV, V=p.V)
        raise ValueError(must("out", f"have shape {expected}", shape_of(out)))

    # Checkpoints.
    if every < 0 or every % p.chunk_size != 0:
        expected = f"be 0 or a multiple of chunk_size={p.chunk_size}"
        raise ValueError(must("checkpoint_every_n_tokens", expected, str(every)))
    if every == 0:
        for name in ("state_checkpoints", "checkpoint_slots"):
            if name in given:
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
    return dataclasses.replace(problem, pool_dtype=state.dtype)


def checkpoint_rows(problem: Problem, every: int) -> int:
    """Rows that checkpoints may have where no slots say which."""
    return problem.B * problem.T // every


def check_memory(
    problem: Problem,
    pool: Pool,
    inputs: dict[str, Tensor | None],
    cu_seqlens: Tensor | None,
    *,
    out_given: bool,
) -> None:
    """Raises ValueError if what is written may not be: by its strides, by where it lies, and, on a
    CPU, by what the slots hold. `inputs`: what `out` must not overlap, by name."""
    for name, x in (("state", pool.state), ("state_checkpoints", pool.checkpoints)):
        if x is None:
            continue
        check_own_memory(name, x)
        span = _span(x[0]) if x.shape[0] > 0 else 0
        if span > 2**31:
            expected = "have the elements of a slot within 2^31 of each other"
            raise ValueError(must(name, expected, f"strides {list(x.stride())}"))
    if out_given:
        out = pool.out
        check_own_memory("out", out)
        if out.shape[3] > 1 and out.stride(3) != 1:
            expected = "have a dense last dimension"
            raise ValueError(must("out", expected, f"strides {list(out.stride())}"))
        if out.stride(1) >= MAX_ROW_STRIDE:
            expected = f"have rows of less than {MAX_ROW_STRIDE} elements"
            raise ValueError(must("out", expected, f"strides {list(out.stride())}"))
        for name, x in inputs.items():
            if x is not None and _overlap(out, x):
                expected = f"lie apart from {name} in memory"
                raise ValueError(must("out", expected, f"memory that {name} has too"))
    if problem.device.type == "cpu":
        _check_slots(problem, pool, cu_seqlens)


def _check_slots(p: Problem, pool: Pool, cu_seqlens: Tensor | None) -> None:
    """What the slots hold: elsewhere reading them would wait for the device, and what is refused
    here is undefined behaviour there."""
    last, slots = pool.last_skipped, pool.state.shape[0]
    read: list[int] = pool.read_slots.tolist()
    write: list[int] = pool.write_slots.tolist()
    for name, given in (("read_slots", read), ("write_slots", write)):
        if given and max(given) >= slots:
            found = f"{max(given)} at index {given.index(max(given))}"
            raise ValueError(must(name, f"be less than the {slots} slots of state", found))
    # (slot, sequence) of all that is written to the pool.
    writes = [(w, n) for n, w in enumerate(write) if w > last and read[n] > last]
    name = "read_slots" if pool.write_slots is pool.read_slots else "write_slots"
    _check_once(name, writes)
    if pool.checkpoint_slots is not None and pool.checkpoints is not None:
        writes_kept = _checkpoint_writes(p, pool, cu_seqlens, read, write)
        _check_once("checkpoint_slots", writes_kept)
        if pool.checkpoints is pool.state:
            writes += writes_kept
            _check_once("checkpoint_slots", writes)
    owners = dict(writes)
    for n, slot in enumerate(read):
        if slot > last and owners.get(slot, n) != n:
            found = f"slot {slot}, read by sequence {n} and written by {owners[slot]}"
            raise ValueError(must("read_slots", "read no slot that another sequence writes", found))


def _checkpoint_writes(
    p: Problem, pool: Pool, cu_seqlens: Tensor | None, read: list[int], write: list[int]
) -> list[tuple[int, int]]:
    """(row, sequence) of the checkpoints that are kept, but for one that is a final state too."""
    assert pool.checkpoint_slots is not None and pool.checkpoints is not None
    lengths = [p.T] * p.N
    if cu_seqlens is not None:
        lengths = [end - first for first, end in pairwise(cu_seqlens.tolist())]
    rows = pool.checkpoints.shape[0]
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
                found.append((row, n))
    return found


def _check_once(name: str, writes: list[tuple[int, int]]) -> None:
    slots = [slot for slot, _ in writes]
    if len(set(slots)) < len(slots):
        slot = next(slot for slot in slots if slots.count(slot) > 1)
        raise ValueError(must(name, "name no slot twice: each is written", f"{slot} twice"))


def _check_states(name: str, x: Tensor, count: str, p: Problem) -> None:
    if x.dim() != 4:
        layout = "HV, V, K" if p.state_v_first else "HV, K, V"
        raise ValueError(must(name, f"have 4 dimensions [{count}, {layout}]", shape_of(x)))
    _check_state(name, x, count, x.shape[0], p.HV, p.K, p.V, p.state_v_first)


def _span(x: Tensor) -> int:
    """Elements from the first to the last, both counted."""
    return 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Whether there is memory between the first and the last element of both."""
    if x.numel() == 0 or y.numel() == 0:
        return False
    first_x, first_y = x.data_ptr(), y.data_ptr()
    end_x = first_x + _span(x) * x.element_size()
    return first_x < first_y + _span(y) * y.element_size() and first_y < end_x
