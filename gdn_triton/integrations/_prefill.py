"""The prefill of serving engines: value-first states, which may be in a pool."""

from collections.abc import Mapping

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
    value_of,
)
from gdn_triton._host.tensors import host_reads, writing
from gdn_triton.chunk.prefill.api import chunk_prefill
from gdn_triton.constants import DEFAULT_CHUNK_SIZE
from gdn_triton.integrations._lengths import offsets_on_host
from gdn_triton.integrations._results import (
    check_apart,
    check_below,
    check_indices,
    check_result,
)


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    slots: Tensor | None = None,
    out: Tensor | None = None,
    out_state: Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    state_checkpoints: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
    out_name: str = "output",
) -> tuple[Tensor, Tensor | None]:
    """Runs `gdn_triton.chunk_prefill` on value-first states [N, HV, V, K].

    initial_state: None: zeros.
    slots: [N], the slot of sequence n's state in the pools `initial_state` and `out_state`; each
    slot at most once. If both are the same pool, the kernel reads and writes its slots in
    place; otherwise states are gathered and scattered.
    out: contiguous, of q's dtype, with at least as many elements as o; o is written to the first
    elements. None: a new tensor. out_name: the caller's name of `out`.
    out_state: [N, HV, V, K], or a pool, to which the final states are written in its dtype.

    Returns o [B, T, HV, V], and the final states: `out_state` if it was given, else [N, HV, V, K]
    in float32 (float64 if q is). The second result is None unless `output_final_state` is set.
    """
    states = {"initial_state": initial_state, "output_state": out_state}
    check_tensors({"q": q, "k": k, "v": v}, {**states, out_name: out, "cu_seqlens": cu_seqlens})
    check_rank("q", q, "B", "T", "H", "K")
    check_rank("v", v, "B", "T", "HV", "V")
    check_dtypes({"q": q, **states}, ())
    check_devices("q", q.device, states)
    N = v.shape[0] if cu_seqlens is None else count_sequences(cu_seqlens)
    shape = (N, v.shape[-2], v.shape[-1], q.shape[-1])
    for name, x in states.items():
        if x is not None:
            _check_states(name, x, shape, slots)
    if slots is not None:
        _check_slots("state_indices", slots, N, q.device, states)
    if out is not None:
        size = v.numel()
        if out.dtype != q.dtype or not out.is_contiguous() or out.numel() < size:
            raise ValueError(
                f"{out_name} must be contiguous, {q.dtype} and of {size} elements or more, got "
                f"{out.dtype}, {list(out.shape)} with strides {list(out.stride())}"
            )
        out = out.view(-1)[:size].view(v.shape)
    in_place = slots is not None and initial_state is not None and out_state is initial_state
    if in_place:
        pool, rows = initial_state, slots
    else:
        if out_state is not None:
            check_result("output_state", out_state, "q", q.device)
        # Read the states before output_state is written, because both may be the same tensor.
        is_read = initial_state is None or out_state is not initial_state
        read = {"initial_state": initial_state if is_read else None, "slots": slots}
        tokens = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "cu_seqlens": cu_seqlens}
        written = {"output_state": out_state, "state_checkpoints": state_checkpoints}
        check_apart({out_name: out, **written}, {**tokens, **read})
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        rows = torch.arange(N, device=q.device)
        if initial_state is None:
            pool = q.new_zeros(shape, dtype=wide)
        else:
            if slots is not None:
                initial_state = initial_state.index_select(0, slots)
            # A gathered state may be overwritten. The caller's state is copied once, which also
            # widens it.
            pool = initial_state.to(wide, copy=slots is None, memory_format=torch.contiguous_format)
    assert pool is not None and rows is not None
    o, _ = chunk_prefill(
        pool,
        rows,
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        scale=scale,
        state_v_first=True,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=offsets_on_host(cu_seqlens),
        out=out,
        checkpoint_every_n_tokens=checkpoint_every_n_tokens,
        state_checkpoints=state_checkpoints,
        checkpoint_slots=checkpoint_slots,
    )
    if out_state is not None and not in_place:
        with writing(out_state):
            if slots is None:
                out_state.copy_(pool)
            else:
                out_state.index_copy_(0, slots.long(), pool.to(out_state.dtype))
    if not output_final_state:
        return o, None
    return o, pool if out_state is None else out_state


def checkpoint_rows(
    state_checkpoints: Tensor | None,
    starts: Tensor | None,
    every: int,
    v: Tensor,
    cu_seqlens: Tensor | None,
) -> Tensor | None:
    """Returns [N, M]: the row of each sequence's j-th checkpoint, which is one of the rows
    starts[n] to starts[n + 1] - 1, or -1 if the sequence has no such checkpoint. Returns None
    without checkpoints. starts: [N + 1]. v: the tokens [B, T, HV, V]."""
    if type(every) is not int:
        raise TypeError(must("checkpoint_every_n_tokens", "be an int", value_of(every)))
    if any((x is None) == (every != 0) for x in (state_checkpoints, starts)):
        raise ValueError(
            "state_checkpoints and checkpoint_cu_starts must be given with "
            f"checkpoint_every_n_tokens, and not without, got checkpoint_every_n_tokens={every}"
        )
    if starts is None:
        return None
    name = "checkpoint_cu_starts"
    check_tensors({name: starts, "v": v}, {"cu_seqlens": cu_seqlens})
    check_rank("v", v, "B", "T", "HV", "V")
    check_devices("v", v.device, {name: starts})
    check_dtypes({name: starts}, (name,))
    N = v.shape[0] if cu_seqlens is None else count_sequences(cu_seqlens)
    if starts.shape != (N + 1,):
        raise ValueError(must(name, f"have shape [N + 1={N + 1}]", shape_of(starts)))
    if every < 0 or every % DEFAULT_CHUNK_SIZE != 0:
        expected = f"be 0 or a multiple of {DEFAULT_CHUNK_SIZE}"
        raise ValueError(must("checkpoint_every_n_tokens", expected, str(every)))
    rows = starts[:-1, None] + torch.arange(v.shape[1] // every, device=starts.device)
    return torch.where(rows < starts[1:, None], rows, -1)


def _check_states(name: str, x: Tensor, shape: tuple[int, ...], slots: Tensor | None) -> None:
    """Checks states. shape: the expected shape of all states; with slots the states are in a pool
    of any number of states."""
    if slots is None and x.shape != shape:
        expected = f"have shape [N, HV, V, K] = {list(shape)}"
        raise ValueError(must(name, expected, shape_of(x)))
    if slots is not None and (x.dim() != 4 or x.shape[1:] != shape[1:]):
        expected = f"have shape [slots, HV, V, K] with [HV, V, K] = {list(shape[1:])}"
        raise ValueError(must(name, expected, shape_of(x)))


def _check_slots(
    name: str, slots: Tensor, N: int, device: torch.device, pools: Mapping[str, Tensor | None]
) -> None:
    """Checks slots that are used as given: no slot is padding, and no slot occurs twice."""
    check_indices(name, slots, "q", device)
    if slots.shape != (N,):
        raise ValueError(must(name, f"have shape [N={N}], one a sequence", shape_of(slots)))
    if not host_reads(slots):
        return
    named: list[int] = slots.tolist()
    if min(named, default=0) < 0:
        raise ValueError(must(name, "be 0 or more", str(min(named))))
    for pool_name, pool in pools.items():
        if pool is not None:
            check_below(name, slots, pool.shape[0], f"slots of {pool_name}")
    if len(set(named)) < len(named):
        twice = next(slot for slot in named if named.count(slot) > 1)
        raise ValueError(must(name, "name no slot twice", f"{twice} twice"))
