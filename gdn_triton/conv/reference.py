"""The specification of the convolution as a backend: plain torch on any device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gdn_triton._host.tensors import writing
from gdn_triton.conv.problem import ConvOperands, ConvProblem
from gdn_triton.reference import conv as reference_conv
from gdn_triton.reference.trees import ancestors, padded_rows


class Span(NamedTuple):
    """The tokens from `start` to `end` of each row of x, which belong to `sequences`."""

    sequences: slice
    start: int
    end: int


def spans(p: ConvProblem, given: ConvOperands) -> list[Span]:
    """One span for all sequences of a padded call, or one for each sequence of a packed call."""
    if given.cu_seqlens is None:
        return [Span(slice(None), 0, p.T)]
    ends = given.cu_seqlens.tolist()
    return [Span(slice(n, n + 1), ends[n], ends[n + 1]) for n in range(p.N)]


def forward(p: ConvProblem, given: ConvOperands) -> Tensor:
    """Returns y [B, T, D] and writes the states. y is differentiable, except by the states. Reads
    offsets and slots on the host, and so waits for the device."""
    x, state = given.x, given.state
    slots = live = initial = None
    if state is not None:
        slots = given.read_slots
        if slots is None:
            slots = torch.arange(p.N, device=p.device)
        live = slots > p.last_skipped
        known = live if given.has_initial_state is None else live & given.has_initial_state
        if given.num_accepted_tokens is not None:
            first = given.num_accepted_tokens.long() - 1
            live = known = live & (first >= 0) & (first + p.W - 1 <= p.columns)
        initial = state.new_zeros(p.N, p.D, p.W - 1)
        if given.num_accepted_tokens is None:
            initial[known] = state.detach()[slots[known].long()]
        else:
            windows = state.detach().unfold(2, p.W - 1, 1)
            initial[known] = windows[slots[known].long(), :, first[known]]

    if given.parents is not None:
        assert initial is not None and live is not None
        return _trees(p, given, live, initial)
    walks = spans(p, given)
    lengths = [span.end - span.start for span in walks]
    after = p.T - sum(lengths)
    # This is one split, because in the backward a slice for each sequence would cost a gradient of
    # x's size each.
    *parts, _ = x.split([*lengths, after], 1)
    pieces = []
    for span, tokens in zip(walks, parts, strict=True):
        before = None if initial is None else initial[span.sequences]
        if live is not None:
            # A skipped sequence may hold anything, and 0 * NaN is NaN in the weight's gradient.
            tokens = torch.where(live[span.sequences, None, None], tokens, 0)
        y = reference_conv.causal_conv1d(tokens, given.weight, given.bias, p.silu, before)
        if live is not None:
            y = torch.where(live[span.sequences, None, None], y, 0)
        pieces.append(y)
        if initial is not None:
            before_and_tokens = reference_conv.with_earlier(
                tokens.detach().to(initial.dtype), p.W, before
            )
            _write(p, given, span, slots, live, before_and_tokens)
    if not pieces:
        # A caller may ask for gradients without any sequence, so y must depend on its inputs.
        pieces.append(reference_conv.causal_conv1d(x[:, :0], given.weight, given.bias, p.silu))
    return torch.cat([*pieces, x.new_zeros(p.B, after, p.D)], 1)


@torch.no_grad()
def _trees(p: ConvProblem, given: ConvOperands, live: Tensor, initial: Tensor) -> Tensor:
    """[B, T, D] where the tokens are nodes of trees: each is the last of a sequence of W tokens.
    initial: [N, D, W - 1]."""
    state, write, parents = given.state, given.write_slots, given.parents
    assert state is not None and write is not None and parents is not None
    places, is_token = padded_rows(p.B, p.T, given.cu_seqlens, p.device)
    is_token = is_token & live[:, None]
    tokens = given.x.flatten(0, 1)[places].to(state.dtype)
    rows = torch.cat([initial.mT, tokens], 1)
    above = torch.where(is_token, parents.flatten()[places], -1)
    # Column 0: the node itself.
    of = torch.arange(places.shape[1], device=p.device).expand_as(places)[..., None]
    nodes = torch.cat([of, ancestors(above, p.W - 1)], 2).flip(2)
    every = torch.arange(p.N, device=p.device)[:, None, None]
    windows = rows[every, nodes + p.W - 1]
    y = reference_conv.causal_conv1d(
        windows[..., -1:, :].to(p.dtype), given.weight, given.bias, p.silu, windows[..., :-1, :].mT
    )
    result = given.x.new_zeros(p.B * p.T, p.D)
    result[places[is_token]] = y[is_token].squeeze(1)
    slots = torch.where(is_token, write.flatten()[places], p.last_skipped)
    kept = slots > p.last_skipped
    with writing(state):
        state[slots[kept].long()] = windows[..., 1:, :][kept].mT
    return result.view(p.B, p.T, p.D)


@torch.no_grad()
def _write(
    p: ConvProblem,
    given: ConvOperands,
    span: Span,
    slots: Tensor | None,
    live: Tensor | None,
    tokens: Tensor,
) -> None:
    """Writes the states of a span. tokens: the result of `with_earlier` for the span."""
    state = given.state
    assert state is not None and slots is not None and live is not None
    write = slots if given.write_slots is None else given.write_slots
    T, last = span.end - span.start, p.last_skipped
    for n in range(p.N)[span.sequences]:
        if not live[n]:
            continue
        row = tokens[n if given.cu_seqlens is None else 0]
        if p.columns > 0:
            if T > 0 and write[n] > last:
                kept = row[1:][: p.columns].mT.to(state.dtype)
                with writing(state):
                    state[write[n], :, : kept.shape[1]] = kept
            continue
        if p.every_token:
            places = write[n if given.cu_seqlens is None else 0, span.start : span.end]
            ends = [(slot, t + 1) for t, slot in enumerate(places.tolist())]
        else:
            ends = [(int(write[n]), T)]
        with writing(state):
            for slot, t in ends:
                if slot > last:
                    state[slot] = row[t : t + p.W - 1].mT.to(state.dtype)
