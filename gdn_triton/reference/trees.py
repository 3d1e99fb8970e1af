"""The specification of the recurrence over tokens that are nodes of trees, in plain torch.

Each sequence has nodes 0, 1, ... in an order in which a parent comes before its children. Node i
starts from the state after its parent, node parents[i], or from the initial state if parents[i] is
-1:

    S_i = exp(g_i) S_(parent of i) + k_i (x) beta_i (v_i - exp(g_i) S_(parent of i)^T k_i)

Therefore the path from a root to a node is a sequence in the sense of
`gdn_triton.reference.recurrent`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdn_triton.reference.recurrent import recurrent

__all__ = ["TreeResult", "ancestors", "padded_rows", "recurrent_tree"]


class TreeResult(NamedTuple):
    """The results of `recurrent_tree`, in the arithmetic's dtype. They are 0 for tokens of no
    sequence."""

    o: Tensor  # [B, T, HV, V]
    states: Tensor  # [B, T, HV, K, V], or [B, T, HV, V, K] if state_v_first: after each node
    written: Tensor  # [B, T, HV, V]: the value that each node writes


def padded_rows(B: int, T: int, cu_seqlens: Tensor | None, device: Any) -> tuple[Tensor, Tensor]:
    """Returns the indices of the tokens of N sequences among the B * T tokens of a call:
    [N, most tokens], int64, and a mask of the indices that are tokens."""
    if cu_seqlens is None:
        places = torch.arange(B * T, device=device).view(B, T)
        return places, torch.ones_like(places, dtype=torch.bool)
    begin, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    lengths = (end - begin).tolist()
    steps = torch.arange(max(lengths, default=0), device=device)
    places = begin[:, None] + steps
    is_token = places < end[:, None]
    return torch.where(is_token, places, 0), is_token


def ancestors(parents: Tensor, count: int) -> Tensor:
    """Returns [N, T, count] for parents [N, T]: the parent of each node, the parent's parent, and
    so on. After a root come -1, -2, -3, ...: the tokens before the call, the latest first."""
    N, T = parents.shape
    node = torch.arange(T, device=parents.device).expand(N, T)
    found = []
    for _ in range(count):
        above = parents.long().gather(1, node.clamp(min=0)) if T > 0 else node
        node = torch.where(node >= 0, above, node - 1)
        found.append(node)
    return torch.stack(found, 2) if found else parents.new_zeros(N, T, 0)


def recurrent_tree(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    parents: Tensor,
    initial_state: Tensor,
    beta: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> TreeResult:
    """Computes the recurrence over trees, node by node.

    Args:
        q, k, v, g, beta, cu_seqlens, options: as for `gdn_triton.reference.recurrent`.
        parents: [B, T], int64: the index of each token's parent in its sequence, which is less than
            the token's own index, or -1. The parents of tokens of no sequence are not used.
        initial_state: [N, HV, K, V], or [N, HV, V, K] if state_v_first.
    """
    B, T = q.shape[:2]
    places, is_token = padded_rows(B, T, cu_seqlens, q.device)
    N, longest = places.shape

    def padded(x: Tensor) -> Tensor:
        return x.flatten(0, 1)[places]

    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    nodes = {name: padded(x) for name, x in given.items() if x is not None}
    above = torch.where(is_token, padded(parents.long()), -1)
    every = torch.arange(N, device=q.device)
    states, outputs, values = [initial_state], [], []
    for t in range(longest):
        before = torch.stack(states, 1)[every, above[:, t] + 1]
        one: dict[str, Any] = {name: x[:, t : t + 1] for name, x in nodes.items()}
        result = recurrent(**one, initial_state=before, keep_written=True, **options)
        assert result.written is not None
        states.append(result.final_state)
        states[0] = states[0].to(result.final_state.dtype)
        outputs.append(result.o[:, 0])
        values.append(result.written[:, 0])

    def merged(rows: list[Tensor], like: Tensor) -> Tensor:
        """Converts a tensor [N, ...] per token to [B, T, ...]."""
        whole = like.new_zeros(B * T, *like.shape[1:])
        if rows:
            whole[places[is_token]] = torch.stack(rows, 1)[is_token]
        return whole.unflatten(0, (B, T))

    no_value = states[-1].new_zeros(0, *v.shape[2:])
    return TreeResult(
        merged(outputs, outputs[0] if outputs else no_value),
        merged(states[1:], states[-1]),
        merged(values, values[0] if values else no_value),
    )
