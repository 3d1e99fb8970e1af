"""Every public function that runs something, with a small valid call. `tests/functions` runs over
this table. A new function, and a new tensor of an old one, gets its entry here."""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from call_cases import (
    LONG,
    ROWS,
    SHORT,
    SKIPPED,
    SPARE,
    Batch,
    call_layer,
    make_accept,
    make_accepted_step,
    make_accepted_update,
    make_cached_layer,
    make_chunk,
    make_conv,
    make_fold,
    make_layer,
    make_layer_drafts,
    make_layer_packed,
    make_layer_step,
    make_layer_tokens,
    make_layer_tree,
    make_mixed_step,
    make_norm,
    make_pooled_conv,
    make_pooled_prep,
    make_post_conv,
    make_prefill,
    make_prep,
    make_restart,
    make_sequences,
    make_split_chunk,
    make_step,
    make_tree_step,
    make_tree_update,
    make_tree_window_step,
    make_whole_chunk,
    make_window_layer_step,
    make_window_layer_tokens,
    make_window_step,
    with_window,
)
from torch import Tensor, nn

import gdn_triton

LAYER = "layers.GatedDeltaNet"
BOTH = ("triton", "reference")


@dataclass(frozen=True)
class Function:
    """One way to call a public function.

    exports: the function's name in the package. make: the arguments of a valid call, by name, on
    torch's default device. batch: of which tokens. written: what the call writes in place.
    gradients: the backends that have them, for all floats that are not written. nobody: rows of
    arguments that belong to nobody, as an index. meaningless: rows of results that then belong to
    nobody either. named: the names that errors give to arguments of other names here.
    """

    name: str
    exports: str
    call: Callable[..., Any]
    make: Callable[[Batch], dict[str, Any]]
    batch: Batch
    written: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    nobody: Mapping[str, Any] = field(default_factory=dict)
    meaningless: Mapping[str, Any] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)

    def arguments(self, device: str, batch: Batch | None = None) -> dict[str, Any]:
        """The arguments of a valid call, equal each time."""
        torch.manual_seed(0)
        with torch.device(device):
            return self.make(batch or self.batch)

    def run(self, x: Mapping[str, Any]) -> dict[str, Tensor]:
        """All results by name, with what was written."""
        found = self.call(**x)
        results = found if isinstance(found, tuple) else (found,)
        named = {f"result {i}": y for i, y in enumerate(results) if y is not None}
        return named | {name: x[name] for name in self.written if name in x}

    def floats(self, x: Mapping[str, Any]) -> list[str]:
        """The tensors of floats that are not written."""
        read = [name for name in tensors(x) if name not in self.written]
        return [name for name in read if x[name].is_floating_point()]

    def all_floats(self, x: Mapping[str, Any]) -> list[str]:
        """The tensors that are read, and then those that are written."""
        return [*self.floats(x), *(n for n in self.written if x[n].is_floating_point())]

    def known_as(self, name: str) -> str:
        return self.named.get(name, name)


def tensors(x: Mapping[str, Any]) -> list[str]:
    return [name for name, y in x.items() if isinstance(y, Tensor)]


def copied(x: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    return {name: y.clone() if isinstance(y, Tensor) else y for name, y in x.items()} | changes


def wide(x: Mapping[str, Any]) -> dict[str, Any]:
    """Copies in float64, except records that are float32 in every call."""

    def widened(name: str, y: Any) -> Any:
        if name in ("window.u", "window.g"):
            return y.clone()
        if isinstance(y, nn.Module):
            return copy.deepcopy(y).double()
        if not isinstance(y, Tensor):
            return y
        return y.detach().double() if y.is_floating_point() else y.clone()

    return {name: widened(name, y) for name, y in x.items()}


# -------------------------------------------------------------------------------------- the table


def rows(indices: list[int], *names: str) -> dict[str, Any]:
    """An index of those tokens of [1, T, ...], or of those slots of a pool by the name of one."""
    return {name: (slice(None), indices) for name in names}


_RULE = ("q", "k", "v", "g", "beta")
_CACHE = {"conv_state": "cache", "recurrent_state": "cache"}
_POOL = {"state": [0, 2, 3, 5, 6]}  # not read: unused, written only, or without an initial state
_LEFT = {"state": [2, 3, 6]}  # not written either

# Not read by any sequence.
_UNUSED = [0, 3, 5, 6]
_LAYER = {name: [2] for name in ("mixed_qkv", "a", "b", "gate")}
_WINDOW = {f"window.{name}": f"window.{name}" for name in ("u", "k", "g", "calls", "start")}
_UNUSED_STATES = {"state": _UNUSED, "conv_state": _UNUSED}
_UNUSED_WINDOW = dict.fromkeys(("state", *_WINDOW), _UNUSED)

layer_step = partial(Function, exports="layer_step", call=gdn_triton.layer_step, batch=SHORT)

TABLE = (
    Function(
        "chunk",
        "chunk_gated_delta_rule",
        gdn_triton.chunk_gated_delta_rule,
        make_chunk,
        LONG,
        gradients=BOTH,
        nobody=rows(SPARE[LONG], *_RULE),
    ),
    Function(
        "chunk of rows",
        "chunk_gated_delta_rule",
        gdn_triton.chunk_gated_delta_rule,
        make_whole_chunk,
        ROWS,
        gradients=BOTH,
    ),
    Function(
        "chunk with cp_context",
        "chunk_gated_delta_rule",
        gdn_triton.chunk_gated_delta_rule,
        make_split_chunk,
        SHORT,
        gradients=BOTH,
        nobody=rows(SPARE[SHORT], *_RULE),
    ),
    Function(
        "sequences",
        "fused_recurrent_gated_delta_rule",
        gdn_triton.fused_recurrent_gated_delta_rule,
        make_sequences,
        SHORT,
        gradients=("reference",),
        nobody=rows(SPARE[SHORT], *_RULE, "gk", "gv"),
    ),
    Function(
        "prefill",
        "chunk_prefill",
        gdn_triton.chunk_prefill,
        make_prefill,
        LONG,
        ("out", "state_checkpoints", "state"),
        nobody=rows(SKIPPED[LONG], *_RULE)
        | {
            **_POOL,
            "state_checkpoints": [0, 1, 2],
            "write_slots": [2],
            "checkpoint_slots": [1, 2, 3],
        },
        meaningless={**_LEFT, "state_checkpoints": [0, 2], "result 1": [0, 2]},
    ),
    Function(
        "step",
        "recurrent_step",
        gdn_triton.recurrent_step,
        make_step,
        SHORT,
        ("out", "state"),
        nobody=rows(SKIPPED[SHORT], "q", "k", "v", "a", "b", "write_slots")
        | {"state": [3, 4, 5, 6, 7]},
        meaningless={"state": [6, 7]},
    ),
    Function(
        "step of accepted",
        "recurrent_step",
        gdn_triton.recurrent_step,
        make_accepted_step,
        SHORT,
        ("state",),
        nobody=rows(SKIPPED[SHORT], *_RULE) | {"state": [0, 3, 4, 5, 7]},
        meaningless={"state": [3, 4, 5, 7]},
    ),
    Function(
        "step of trees",
        "recurrent_step",
        gdn_triton.recurrent_step,
        make_tree_step,
        SHORT,
        ("state",),
        nobody=rows(SKIPPED[SHORT], "q", "k", "v", "a", "b", "write_slots", "parents")
        | {"state": [3, 4, 5, 6, 7]},
        meaningless={"state": [6, 7]},
    ),
    Function(
        "mixed step",
        "recurrent_step",
        gdn_triton.recurrent_step,
        make_mixed_step,
        SHORT,
        ("out", "state"),
        nobody=rows(SKIPPED[SHORT], "mixed_qkv", "g", "beta")
        | {"state": [0, 3, 5, 6], "write_slots": [2]},
        meaningless={"state": [3, 6]},
    ),
    Function(
        "step with a window",
        "recurrent_step",
        with_window(gdn_triton.recurrent_step),
        make_window_step,
        SHORT,
        ("out", "state", "window.u", "window.k", "window.g", "window.calls"),
        nobody=rows(SKIPPED[SHORT], "q", "k", "v", "a", "b")
        | {**_UNUSED_WINDOW, "positions": [1, 2]},
        meaningless=_UNUSED_WINDOW,
        named=_WINDOW,
    ),
    Function(
        "fold",
        "fold_window",
        with_window(gdn_triton.fold_window),
        make_fold,
        SHORT,
        ("state", "window.start"),
        nobody={**_UNUSED_WINDOW, "positions": [2]},
        meaningless=_UNUSED_WINDOW,
        named=_WINDOW,
    ),
    Function(
        "restart",
        "restart_window",
        with_window(gdn_triton.restart_window),
        make_restart,
        SHORT,
        ("window.start",),
        nobody={**_UNUSED_WINDOW, "positions": [2]},
        meaningless=_UNUSED_WINDOW,
        named=_WINDOW,
    ),
    Function(
        "step of trees with a window",
        "recurrent_step",
        with_window(gdn_triton.recurrent_step),
        make_tree_window_step,
        SHORT,
        ("out", "state", "window.u", "window.k", "window.g", "window.calls"),
        nobody=rows(SKIPPED[SHORT], "q", "k", "v", "a", "b", "parents")
        | {**_UNUSED_WINDOW, "positions": [1, 2]},
        meaningless=_UNUSED_WINDOW,
        named=_WINDOW,
    ),
    Function(
        "accept",
        "accept_window",
        with_window(gdn_triton.accept_window),
        make_accept,
        SHORT,
        ("window.u", "window.k", "window.g"),
        nobody={**_UNUSED_WINDOW, "positions": [2], "path": [2]},
        meaningless=_UNUSED_WINDOW,
        named=_WINDOW,
    ),
    Function(
        "conv",
        "causal_conv1d",
        gdn_triton.causal_conv1d,
        make_conv,
        SHORT,
        gradients=BOTH,
        nobody=rows(SPARE[SHORT], "x"),
    ),
    Function(
        "conv on a pool",
        "causal_conv1d",
        gdn_triton.causal_conv1d,
        make_pooled_conv,
        SHORT,
        ("state",),
        gradients=("reference",),
        nobody=rows(SKIPPED[SHORT], "x") | {**_POOL, "write_slots": [2]},
        meaningless=_LEFT,
    ),
    Function(
        "update",
        "causal_conv1d_update",
        gdn_triton.causal_conv1d_update,
        make_pooled_conv,
        SHORT,
        ("state",),
        nobody=rows(SKIPPED[SHORT], "x") | {**_POOL, "write_slots": [2]},
        meaningless=_LEFT,
    ),
    Function(
        "update of accepted",
        "causal_conv1d_update",
        gdn_triton.causal_conv1d_update,
        make_accepted_update,
        SHORT,
        ("state",),
        nobody=rows(SKIPPED[SHORT], "x") | {"state": [0, 3, 5, 6]},
        meaningless={"state": [0, 3, 5, 6]},
    ),
    Function(
        "update of trees",
        "causal_conv1d_update",
        gdn_triton.causal_conv1d_update,
        make_tree_update,
        SHORT,
        ("state",),
        nobody=rows(SKIPPED[SHORT], "x", "write_slots", "parents") | {"state": [3, 4, 5, 6, 7]},
        meaningless={"state": [6, 7]},
    ),
    Function(
        "prep",
        "fused_conv_prep",
        gdn_triton.fused_conv_prep,
        make_prep,
        SHORT,
        gradients=("reference",),
        nobody=rows(SPARE[SHORT], "mixed_qkv", "a", "b"),
        meaningless=rows(SPARE[SHORT], "result 3", "result 4"),
    ),
    Function(
        "prep on a pool",
        "fused_conv_prep",
        gdn_triton.fused_conv_prep,
        make_pooled_prep,
        SHORT,
        ("state",),
        gradients=("reference",),
        nobody=rows(SPARE[SHORT], "a", "b")
        | rows(SKIPPED[SHORT], "mixed_qkv")
        | {**_POOL, "write_slots": [2]},
        meaningless=_LEFT | rows(SPARE[SHORT], "result 3", "result 4"),
    ),
    Function(
        "post-conv",
        "fused_post_conv_prep",
        gdn_triton.fused_post_conv_prep,
        make_post_conv,
        ROWS,
        gradients=("reference",),
    ),
    layer_step(
        "layer step",
        make=make_layer_step,
        written=("state", "conv_state"),
        nobody=_LAYER | _UNUSED_STATES,
        meaningless=_UNUSED_STATES,
    ),
    layer_step(
        "layer step with a window",
        call=with_window(gdn_triton.layer_step),
        make=make_window_layer_step,
        written=("state", "conv_state", "window.u", "window.k", "window.g", "window.calls"),
        nobody={**_LAYER, "positions": [2], **_UNUSED_WINDOW, "conv_state": _UNUSED},
        meaningless={**_UNUSED_WINDOW, "conv_state": _UNUSED},
        named={**_WINDOW, "window.tickets": "window.tickets"},
    ),
    layer_step(
        "layer step of tokens",
        make=make_layer_tokens,
        written=("state", "conv_state"),
        nobody=_LAYER | _UNUSED_STATES,
        meaningless=_UNUSED_STATES,
        named={"counters": "counters"},
    ),
    layer_step(
        "layer step of tokens with a window",
        call=with_window(gdn_triton.layer_step),
        make=make_window_layer_tokens,
        written=("state", "conv_state", "window.u", "window.k", "window.g", "window.calls"),
        nobody={**_LAYER, "positions": [2], **_UNUSED_WINDOW, "conv_state": _UNUSED},
        meaningless={**_UNUSED_WINDOW, "conv_state": _UNUSED},
        named={**_WINDOW, "window.tickets": "window.tickets"},
    ),
    layer_step(
        "layer step of drafts",
        make=make_layer_drafts,
        written=("state", "conv_state"),
        nobody={**_LAYER, "state": [2, 3, 4, 6], "conv_state": _UNUSED},
        meaningless={"state": [6], "conv_state": _UNUSED},
        named={"counters": "counters"},
    ),
    layer_step(
        "layer step of trees",
        make=make_layer_tree,
        written=("state", "conv_state"),
        nobody={
            **{**_LAYER, "write_slots": [2], "parents": [2]},
            **{name: [0, 3, *range(5, 14)] for name in ("state", "conv_state")},
        },
        meaningless={name: [0, 3, 9, 10, 13] for name in ("state", "conv_state")},
        named={"counters": "counters"},
    ),
    layer_step(
        "layer step of packed tokens",
        make=make_layer_packed,
        written=("out", "state", "conv_state"),
        nobody=rows(SKIPPED[SHORT], "mixed_qkv", "a", "b", "gate") | _UNUSED_STATES,
        meaningless=_UNUSED_STATES,
        named={"counters": "counters"},
    ),
    Function("norm", "rms_norm_gated", gdn_triton.rms_norm_gated, make_norm, ROWS, gradients=BOTH),
    Function(
        "layer",
        LAYER,
        call_layer,
        make_layer,
        ROWS,
        gradients=BOTH,
        nobody={"hidden_states": ([0], [0])},
    ),
    Function(
        "layer with a cache",
        LAYER,
        call_layer,
        make_cached_layer,
        SHORT,
        ("conv_state", "recurrent_state"),
        gradients=BOTH,
        nobody=rows(SKIPPED[SHORT], "hidden_states")
        | {"conv_state": [0, 3, 5], "recurrent_state": [0, 3, 5]},
        meaningless={"conv_state": [0, 3, 5, 6], "recurrent_state": [0, 3, 5, 6]},
        named=_CACHE,
    ),
)


def each(functions: Iterable[Function]) -> Any:
    """A test that takes one `function`, of these."""
    return pytest.mark.parametrize("function", [*functions], ids=lambda function: function.name)


def each_with_gradients(functions: Iterable[Function]) -> Any:
    """A test that takes a `function` of these, and as `backend` one that has its gradients."""
    pairs = [
        pytest.param(function, backend, id=f"{backend}-{function.name}")
        for function in functions
        for backend in function.gradients
    ]
    return pytest.mark.parametrize(("function", "backend"), pairs, indirect=["backend"])


each_function = each(TABLE)
WRITING = tuple(function for function in TABLE if function.written)
