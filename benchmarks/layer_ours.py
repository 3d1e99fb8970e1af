"""The calls of a layer's part that benchmarks.layer times, for this package."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.layer_calls import (
    DECODE,
    DRAFTS,
    EPS,
    PACKED,
    PARENTS,
    PREFILL,
    ROWS,
    TREE,
    Call,
    Step,
)
from gdn_triton import (
    chunk_prefill,
    fused_conv_prep,
    layer_step,
    make_window,
    restart_window,
    rms_norm_gated,
)


def ours(step: Step) -> Call:
    if step.what == PREFILL:
        return prefilled(step)
    return stepped(step, counters=True)


def ours_in_three(step: Step) -> Call:
    if step.what == PREFILL:
        raise NotImplementedError("a prefill always makes several launches")
    if step.what == DECODE:
        raise NotImplementedError("one token makes one launch without counters too")
    return stepped(step, counters=False)


@dataclass(frozen=True)
class WindowCall:
    """A step with a window at the positions of one tensor, which an engine advances once for all
    layers."""

    call: Call
    positions: Tensor
    tokens: Tensor

    def __call__(self) -> Tensor:
        return self.call()

    def advance(self) -> None:
        self.positions.add_(self.tokens)


def ours_with_window(step: Step) -> WindowCall:
    if step.what not in (DECODE, DRAFTS, PACKED):
        raise NotImplementedError("measured for one token, drafts, and packed sequences")
    H, HV, K, V = step.sizes
    device, N = step.slots.device, len(step.lengths)
    window = make_window(
        *(step.state.shape[0], H, HV, K, V, step.mixed_qkv.dtype, device),
        rows=ROWS,
        max_tokens=max(step.lengths),
    )
    positions = torch.zeros(N, dtype=torch.int32, device=device)
    restart_window(window, step.slots, positions)
    call = stepped(step, counters=False, window=window, positions=positions)
    return WindowCall(call, positions, step.cu_seqlens.diff())


def prefilled(step: Step) -> Call:
    H, HV, K, V = step.sizes
    begins: dict[str, Any] = {
        "has_initial_state": step.has_initial_state,
        "cu_seqlens": step.cu_seqlens,
    }
    conv_state = step.conv_state.mT
    out = step.mixed_qkv.new_empty(sum(step.lengths), HV, V)

    def prefill() -> Tensor:
        q, k, v, g, beta = fused_conv_prep(
            step.mixed_qkv,
            step.weight,
            step.a,
            step.b,
            step.A_log,
            step.dt_bias,
            H,
            K,
            V,
            None,
            "silu",
            state=conv_state,
            read_slots=step.slots,
            skip="non_positive",
            **begins,
        )
        chunk_prefill(
            step.state,
            step.slots,
            q=q[None],
            k=k[None],
            v=v[None],
            g=g[None],
            beta=beta[None],
            state_v_first=True,
            out=out[None],
            skip="non_positive",
            **begins,
        )
        return rms_norm_gated(out, step.z, step.norm, EPS)

    return prefill


def stepped(step: Step, *, counters: bool, **window: Any) -> Call:
    """A step of any kind. Without a window a slot of its own keeps the state after each draft, or
    after each node of a tree. No sequence uses slot 0, as in vLLM."""
    N, T, slots, what = len(step.lengths), max(step.lengths), step.slots, step.what
    pool, read, conv_state = step.state, slots, step.conv_state.mT
    rest = dict(window)
    if what == DRAFTS:
        rest["num_accepted_tokens"] = torch.full_like(slots, T)
        conv_state = torch.nn.functional.pad(conv_state, (T - 1, 0)).contiguous()
        if not window:
            read = 1 + torch.arange(N * T, device=slots.device).int().view(N, T)
            pool = moved(pool, slots, read[:, -1], 1 + N * T)
            conv_state = moved(conv_state, slots, read[:, 0], 1 + N * T)
    elif what == TREE:
        nodes = 1 + N + torch.arange(N * T, device=slots.device).int().view(N, T)
        parents = torch.tensor(PARENTS, device=slots.device).int().expand(N, T)
        rest |= {"write_slots": nodes, "parents": parents}
        pool, conv_state = (moved(x, slots, slots, 1 + N + N * T) for x in (pool, conv_state))
    elif what == PACKED:
        rest |= {"cu_seqlens": step.cu_seqlens}
        if not window:
            rest["max_tokens"] = T
    if counters:
        rest["counters"] = torch.zeros(
            len(pool), step.sizes.H, dtype=torch.int32, device=slots.device
        )
    tokens = (step.mixed_qkv, step.a, step.b, step.z)
    if what not in (DECODE, PACKED):
        tokens = tuple(x.unflatten(0, (N, T)) for x in tokens)
    mixed_qkv, a, b, z = tokens

    def call() -> Tensor:
        y = layer_step(
            mixed_qkv,
            a,
            b,
            step.A_log,
            step.dt_bias,
            state=pool,
            read_slots=read,
            conv_state=conv_state,
            conv_weight=step.weight,
            gate=z,
            norm_weight=step.norm,
            norm_eps=EPS,
            state_v_first=True,
            skip="non_positive",
            **rest,
        )
        return y.flatten(0, -3)

    return call


def moved(pool: Tensor, slots: Tensor, to: Tensor, count: int) -> Tensor:
    """A pool of `count` slots with the states of `slots` in the slots `to`, and zeros elsewhere."""
    result = pool.new_zeros(count, *pool.shape[1:])
    result[to.long()] = pool[slots.long()]
    return result
