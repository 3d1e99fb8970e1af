"""The specification of steps on rings as a backend: plain torch on any device. It reads slots and
cursors on the host, and so waits for the device."""

from contextlib import ExitStack

import torch
from torch import Tensor

from gdn_triton._host.tensors import writing
from gdn_triton.recurrent.ring_problem import RingOperands, RingProblem
from gdn_triton.reference.rings import Ring, append, replayed, ring_tokens


def step(p: RingProblem, x: RingOperands) -> None:
    _tokens(p, x, is_step=True)


def drafts(p: RingProblem, x: RingOperands) -> None:
    _tokens(p, x, is_step=False)


def fold(p: RingProblem, x: RingOperands) -> None:
    assert x.ring_slots is not None and x.flags is not None and x.bases is not None
    slots, rings = x.slots.tolist(), x.ring_slots.tolist()
    counts, bases, flags = x.counts.tolist(), x.bases.tolist(), x.flags.tolist()
    with _writing_all(x.state, x.counts, x.bases, x.flags):
        for n, (slot, r) in enumerate(zip(slots, rings, strict=True)):
            if slot <= p.last_skipped:
                continue
            for layer in range(p.layers):
                ring, before = _ring(x, r, layer), x.state[layer, slot].clone()
                if x.track_slots is not None:
                    _track(x, n, layer, ring, before, bases[r], counts[r], p.last_skipped)
                if flags[r]:
                    states = replayed(before, ring, bases[r], counts[r])
                    x.state[layer, slot] = states.to(x.state.dtype)
            if flags[r]:
                x.bases[r] = (bases[r] + counts[r]) % p.L
                x.counts[r] = 0
                x.flags[r] = 0


def _track(
    x: RingOperands,
    n: int,
    layer: int,
    ring: Ring,
    before: Tensor,
    base: int,
    count: int,
    last_skipped: int,
) -> None:
    assert x.track_slots is not None and x.track_steps is not None and x.accepted is not None
    slot, step = int(x.track_slots[n]), int(x.track_steps[n])
    if slot > last_skipped and step >= 0:
        states = replayed(before, ring, base, count - int(x.accepted[n]) + step + 1)
        x.state[layer, slot] = states.to(x.state.dtype)


def _ring(x: RingOperands, ring: int, layer: int | None = None) -> Ring:
    def of(y: Tensor | None) -> Tensor | None:
        return None if y is None else y[ring] if layer is None else y[layer, ring]

    d, k, g = of(x.d), of(x.k_rows), of(x.g_rows)
    assert d is not None and k is not None and g is not None
    return Ring(u=d, k=k, g=g, u_low=of(x.d_low), k_low=of(x.k_low))


def _writing_all(*written: Tensor | None) -> ExitStack:
    stack = ExitStack()
    stack.enter_context(torch.no_grad())
    for y in written:
        if y is not None:
            stack.enter_context(writing(y))
    return stack


def _tokens(p: RingProblem, x: RingOperands, *, is_step: bool) -> None:
    assert x.q is not None and x.k is not None and x.v is not None and x.out is not None
    assert x.a is not None and x.b is not None and x.A_log is not None and x.dt_bias is not None
    slots = x.slots.tolist()
    rings = slots if x.ring_slots is None else x.ring_slots.tolist()
    offsets = list(range(p.N + 1)) if x.cu_seqlens is None else x.cu_seqlens.tolist()
    with _writing_all(x.state, x.out, x.d, x.k_rows, x.g_rows, x.d_low, x.k_low):
        for n, (slot, r) in enumerate(zip(slots, rings, strict=True)):
            rows = slice(offsets[n], offsets[n + 1])
            if slot <= p.last_skipped:
                x.out[rows] = 0
                continue
            at = n if x.ring_slots is None else r
            count, base = int(x.counts[at]), 0 if x.bases is None else int(x.bases[at])
            has_flag = x.flags is not None and bool(x.flags[at])
            if has_flag and not is_step:
                continue
            ring = _ring(x, r)
            found = ring_tokens(
                x.q[rows],
                x.k[rows],
                x.v[rows],
                x.a[rows],
                x.b[rows],
                x.A_log,
                x.dt_bias,
                replayed(x.state[slot], ring, base, count),
                scale=p.scale,
                use_qk_l2norm=p.use_qk_l2norm,
            )
            x.out[rows] = found.o.to(x.out.dtype)
            if is_step and (has_flag or count == p.L - 1):
                x.state[slot] = found.state.to(x.state.dtype)
            else:
                append(ring, found, base, count)
