"""A window of records in the caches of transformers' models.

A layer of a cache stores its states as tensors. With a window, a `WindowedState` replaces the
tensor of a state. It shares that tensor's memory and holds the records of the tokens that are not
yet in the memory. When a function of torch is called on a `WindowedState`, the records are folded
and the function gets the plain tensor. Therefore transformers' own code moves, reorders, copies and
resets complete states. Only the step of one token reads the records without a fold.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from gdn_triton._host.tensors import writing
from gdn_triton.integrations._places import Target
from gdn_triton.recurrent.api import recurrent_step
from gdn_triton.recurrent.window import StepWindow, fold_window, make_window

__all__ = ["WindowedState", "keeping", "target", "whole", "windowed_step"]


class WindowedState(Tensor):
    """States [B, HV, K, V] whose last tokens are stored as records.

    memory: the plain tensor of the same memory. slots, positions: [B], the arguments of the steps.
    is_whole: the memory includes all tokens, because no step followed the last fold. is_captured: a
    CUDA graph contains a step. The host does not see its replays, so `is_whole` is then never set.
    """

    memory: Tensor
    records: StepWindow
    slots: Tensor
    positions: Tensor
    is_whole: bool
    is_captured: bool

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        change = plain if func in _WITHOUT_CONTENTS else whole
        args, kwargs = _pytree.tree_map(change, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)

    def fold(self) -> None:
        if not self.is_whole:
            fold_window(self.memory, self.records, self.slots, self.positions)
            self.is_whole = not self.is_captured


_WITHOUT_CONTENTS = frozenset(
    (
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout")),
        *(Tensor.dim, Tensor.size, Tensor.numel),
    )
)


def plain(x: Any) -> Any:
    """Returns the plain tensor that shares the memory of a `WindowedState`; returns anything else
    unchanged."""
    return x.memory if isinstance(x, WindowedState) else x


def whole(x: Any) -> Any:
    """Returns a `WindowedState` as a plain tensor that includes all tokens; returns anything else
    unchanged."""
    if isinstance(x, WindowedState):
        x.fold()
        return x.memory
    return x


def _windowed(state: Tensor, key: Tensor) -> WindowedState:
    """Returns the state with a window for keys like these [B, 1, H, K]."""
    if isinstance(state, WindowedState):
        rows = state.records.k
        if rows.dtype == key.dtype and rows.shape[2:] == key.shape[2:]:
            return state
        state = whole(state)
    B, HV, K, V = state.shape
    made = state.as_subclass(WindowedState)
    made.memory = state
    made.records = make_window(B, key.shape[2], HV, K, V, key.dtype, state.device)
    made.slots = torch.arange(B, dtype=torch.int32, device=state.device)
    made.positions = torch.zeros(B, dtype=torch.int32, device=state.device)
    made.is_whole, made.is_captured = True, False
    return made


def windowed_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    use_qk_l2norm: bool,
) -> tuple[Tensor, Tensor] | None:
    """Returns o [B, 1, HV, V] and the state after one token per sequence. Returns None for calls
    without window support: several tokens, no state, gradients, or a trace."""
    if state is None or query.shape[1] != 1 or query.shape[0] == 0:
        return None
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    held = _windowed(state, key)
    o = recurrent_step(
        held.memory,
        held.slots,
        q=query,
        k=key,
        v=value,
        g=g,
        beta=beta,
        use_qk_l2norm_in_kernel=use_qk_l2norm,
        window=held.records,
        positions=held.positions,
    )
    with writing(held.positions):
        held.positions += 1
    if held.memory.is_cuda and torch.cuda.is_current_stream_capturing():
        held.is_captured = True
    held.is_whole = False
    return o, held


def target() -> Target:
    """Returns the method with which a layer of a cache stores the state of a call.

    Raises:
        RuntimeError: transformers' caches have no such method, or its source text is not known.
    """
    from transformers import cache_utils

    owner = getattr(cache_utils, "LinearAttentionLayer", None)
    found = Target(owner, "update_recurrent_state", "recurrent_step")
    if owner is None or not inspect.isfunction(found.now):
        raise RuntimeError("window=True needs transformers' LinearAttentionLayer, of 5.24 or newer")
    text = inspect.getsource(inspect.unwrap(found.now))
    if "self.recurrent_states[state_idx].copy_(recurrent_states)" not in text:
        raise RuntimeError(f"window=True does not know the text of {found.path}")
    return found


def keeping(before: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a replacement of the method, which stores a `WindowedState` of its own memory without
    copying it."""

    @functools.wraps(before)
    def update_recurrent_state(
        layer: Any, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        if isinstance(recurrent_states, WindowedState):
            now = layer.recurrent_states[state_idx]
            if now is recurrent_states or now is recurrent_states.memory:
                layer.recurrent_states[state_idx] = recurrent_states
                return recurrent_states
        kept: Tensor = before(layer, whole(recurrent_states), state_idx, **kwargs)
        return kept

    return update_recurrent_state
