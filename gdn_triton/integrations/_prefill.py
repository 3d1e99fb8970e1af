"""The prefill that serving engines ask for: value-first states, which may lie in a pool."""

import torch
from torch import Tensor

from gdn_triton.chunk.prefill import chunk_prefill


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
) -> tuple[Tensor, Tensor | None]:
    """`gdn_triton.chunk_prefill` from states [N, HV, V, K] to others.

    initial_state: None: zeros.
    slots: [N], where in the pools `initial_state` and `out_state` sequence n's state lies; each
        once. Where the two are one, its slots are read and written as they lie; else states are
        gathered and scattered.
    out: contiguous, of q's dtype, with as many elements as o or more; o is written to the first of
        them. None: a new tensor.
    out_state: [N, HV, V, K], or a pool: where the final states are written, in its dtype.

    Returns o [B, T, HV, V], and the final states: `out_state` if that was given, else [N, HV, V, K]
    in float32 (float64 if q is); None unless they are asked for by `output_final_state`.
    """
    if out is not None:
        size = v.numel()
        if out.dtype != q.dtype or not out.is_contiguous() or out.numel() < size:
            raise ValueError(
                f"the tensor for o must be contiguous, {q.dtype} and of {size} elements or more, "
                f"got {out.dtype}, {list(out.shape)} with strides {list(out.stride())}"
            )
        out = out.view(-1)[:size].view(v.shape)
    in_place = slots is not None and initial_state is not None and out_state is initial_state
    if in_place:
        pool, rows = initial_state, slots
    else:
        N = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        shape = (N, v.shape[-2], v.shape[-1], q.shape[-1])
        if out_state is not None and slots is None:
            _check_shape("final", out_state, shape)
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        rows = torch.arange(N, device=q.device)
        if initial_state is None:
            pool = q.new_zeros(shape, dtype=wide)
        else:
            if slots is not None:
                initial_state = initial_state.index_select(0, slots)
            _check_shape("initial", initial_state, shape)
            # A gathered state is nobody else's; the caller's is copied once, and widened thereby.
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
        out=out,
        checkpoint_every_n_tokens=checkpoint_every_n_tokens,
        state_checkpoints=state_checkpoints,
        checkpoint_slots=checkpoint_slots,
    )
    if out_state is not None and not in_place:
        if slots is None:
            out_state.copy_(pool)
        else:
            out_state.index_copy_(0, slots.long(), pool.to(out_state.dtype))
    if not output_final_state:
        return o, None
    return o, pool if out_state is None else out_state


def checkpoint_rows(starts: Tensor, longest: int, every: int) -> Tensor:
    """[N, M]: the row of each sequence's j-th checkpoint, of the rows from starts[n] to
    starts[n + 1] - 1; -1 where it has none. starts: [N + 1]."""
    rows = starts[:-1, None] + torch.arange(longest // every, device=starts.device)
    return torch.where(rows < starts[1:, None], rows, -1)


def _check_shape(what: str, states: Tensor, shape: tuple[int, ...]) -> None:
    if states.shape != shape:
        raise ValueError(
            f"the {what} states must have shape [N, HV, V, K] = {list(shape)}, got "
            f"{list(states.shape)}"
        )
