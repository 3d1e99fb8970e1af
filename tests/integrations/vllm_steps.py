"""Steps of a Gated DeltaNet layer as vLLM runs them: a layer, its pools, and the metadata of a
batch, on stand-ins that have what vLLM's own have; and what the specification, in float64 and from
a sequence's first token on, says that a step must give."""

import math
from dataclasses import dataclass, field, make_dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gdn_triton.integrations.vllm import layer as ours
from gdn_triton.reference import chunk_gated_delta_rule, recurrent_gated_delta_rule
from gdn_triton.reference.conv import causal_conv1d
from gdn_triton.reference.recurrent import recurrent

H, HV, K, V, W = 2, 4, 16, 8, 4
D = 2 * H * K + HV * V
DRAFTS = 2  # speculated tokens of a step, in addition to the sure one
SLOTS = 16

# Fields that only vLLM's own method reads.
THEIRS = ("has_initial_state", "chunk_indices", "chunk_offsets", "aiter_prefill_metadata")
Metadata = make_dataclass(
    "Metadata", [(name, Any, field(default=None)) for name in (*ours.METADATA, *THEIRS)]
)


def make_layer(dtype: torch.dtype = torch.float32, doubles_beta: bool = False) -> Any:
    random = torch.randn
    return SimpleNamespace(
        prefix="model.layers.0",
        A_log=random(HV),
        dt_bias=random(HV).to(dtype),
        activation="silu",
        conv1d=SimpleNamespace(weight=random(D, 1, W).to(dtype), bias=None),
        head_k_dim=K,
        head_v_dim=V,
        num_k_heads=2 * H,
        num_v_heads=2 * HV,
        tp_size=2,
        key_dim=2 * H * K,
        value_dim=2 * HV * V,
        allow_neg_eigval=doubles_beta,
        kv_cache=(
            random(SLOTS, W - 1 + DRAFTS, D).to(dtype),
            random(SLOTS, HV, V, K),
        ),
    )


def conv_state_of(layer: Any) -> Tensor:
    return layer.kv_cache[0].transpose(-1, -2)


@dataclass
class Sequence:
    """All tokens of a sequence so far."""

    slots: list[int]  # of the pools: one a token of a step
    mixed_qkv: Tensor = field(default_factory=lambda: torch.empty(0, D))
    a: Tensor = field(default_factory=lambda: torch.empty(0, HV))
    b: Tensor = field(default_factory=lambda: torch.empty(0, HV))
    accepted: int = 1  # of the tokens of the step before

    def draw(self, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """mixed_qkv, a and b of the next tokens."""
        return tuple(torch.randn(tokens, n).to(dtype) for n in (D, HV, HV))  # type: ignore[return-value]

    def extend(self, tokens: tuple[Tensor, Tensor, Tensor]) -> None:
        self.mixed_qkv = torch.cat([self.mixed_qkv.to(tokens[0].dtype), tokens[0]])
        self.a = torch.cat([self.a.to(tokens[1].dtype), tokens[1]])
        self.b = torch.cat([self.b.to(tokens[2].dtype), tokens[2]])

    def undo(self, tokens: int) -> None:
        """Takes the last tokens back."""
        keep = self.a.shape[0] - tokens
        self.mixed_qkv, self.a, self.b = self.mixed_qkv[:keep], self.a[:keep], self.b[:keep]

    def run(self, layer: Any) -> tuple[Tensor, Tensor]:
        """o of all tokens [T, HV, V], and the state after each [T, HV, V, K], from the start."""
        result = recurrent(**self._rule(layer, torch.float64), keep_states=True)
        assert result.states is not None
        return result.o[0], result.states[0]

    def narrow(self, layer: Any, chunked: bool) -> tuple[Tensor, Tensor]:
        """o of all tokens and the last state in float32, in one of the specification's two forms:
        what errors are measured by."""
        form = chunk_gated_delta_rule if chunked else recurrent_gated_delta_rule
        o, state = form(**self._rule(layer, torch.float32))[:2]
        return o[0], state[0]

    def _rule(self, layer: Any, wide: torch.dtype) -> dict[str, Any]:
        weight = layer.conv1d.weight[:, 0].to(wide)
        x = causal_conv1d(self.mixed_qkv.to(wide), weight, None, True, None)
        q, k, v = x.split([H * K, H * K, HV * V], -1)
        return {
            "q": q.view(1, -1, H, K),
            "k": k.view(1, -1, H, K),
            "v": v.view(1, -1, HV, V),
            "g": self.a.to(wide)[None],
            "beta": self.b.to(wide)[None],
            "use_qk_l2norm": True,
            "use_gate": True,
            "A_log": layer.A_log.to(wide),
            "dt_bias": layer.dt_bias.to(wide),
            "use_beta_sigmoid": True,
            "allow_neg_eigval": layer.allow_neg_eigval,
            "state_v_first": True,
        }


@dataclass
class Step:
    """A batch: the tokens of each sequence. drafts: sequences that verify drafts; prefills:
    sequences with several tokens, or without a state; the others decode a token."""

    layer: Any
    sequences: list[Sequence]
    counts: list[int]
    drafts: list[int]
    padding: int = 0  # sequences without a slot and without tokens, at the end
    dtype: torch.dtype = torch.float32
    checkpoints: dict[int, tuple[int, int]] = field(default_factory=dict)  # n: (offset, slot)

    def __post_init__(self) -> None:
        tokens = [s.draw(n, self.dtype) for s, n in zip(self.sequences, self.counts, strict=True)]
        self.before = [s.a.shape[0] for s in self.sequences]
        self.mixed_qkv, self.a, self.b = (torch.cat(x) for x in zip(*tokens, strict=True))
        for s, x in zip(self.sequences, tokens, strict=True):
            s.extend(x)

    def is_prefill(self, n: int) -> bool:
        return n not in self.drafts and (self.counts[n] > 1 or self.before[n] == 0)

    @property
    def metadata(self) -> Any:
        """As `GDNAttentionMetadataBuilder.build` makes it: decodes come before prefills."""
        everyone = range(len(self.sequences))
        starts = torch.tensor([0, *self.counts]).cumsum(0).int()
        prefills = [n for n in everyone if self.is_prefill(n)]
        decodes = [n for n in everyone if n not in prefills and n not in self.drafts]
        tokens = int(starts[-1])
        made = {"num_actual_tokens": tokens, "num_spec_decodes": len(self.drafts)}
        rows = [n for n in everyone if n not in self.drafts]
        slots = torch.tensor([self.sequences[n].slots[0] for n in rows], dtype=torch.int32)
        flags = torch.tensor([self.before[n] > 0 for n in rows])
        offsets = torch.tensor([0, *(self.counts[n] for n in rows)]).cumsum(0).int()
        if self.drafts:
            is_draft = torch.tensor(
                [n in self.drafts for n in everyone for _ in range(self.counts[n])]
            )
            counts = [self.counts[n] for n in self.drafts]
            # vLLM counts plain decodes as prefills beside drafts.
            prefills, decodes, first = rows, [], 0
            made |= {
                "spec_sequence_masks": torch.tensor([n in self.drafts for n in everyone]),
                "spec_token_indx": is_draft.nonzero().flatten(),
                "non_spec_token_indx": (~is_draft).nonzero().flatten(),
                "spec_state_indices_tensor": torch.tensor(
                    [self.sequences[n].slots for n in self.drafts]
                    + [[0] * (DRAFTS + 1)] * self.padding
                ).int(),
                "spec_query_start_loc": torch.tensor([0, *counts, *[0] * self.padding])
                .cumsum(0)
                .int(),
                "num_accepted_tokens": torch.tensor(
                    [self.sequences[n].accepted for n in self.drafts] + [1] * self.padding
                ).int(),
            }
            made["num_spec_decodes"] += self.padding
        else:
            first = len(decodes)
            slots = torch.cat([slots, slots.new_zeros(self.padding)])
        made |= {
            "num_decodes": len(decodes),
            "num_decode_tokens": len(decodes),
            "num_prefills": len(prefills),
            "non_spec_query_start_loc": offsets,
            "non_spec_state_indices_tensor": slots if rows else None,
            "has_initial_state": flags,
        }
        if self.padding and not prefills and not self.drafts:
            made["num_actual_tokens"] = tokens + self.padding
        if prefills:
            made |= {
                "prefill_query_start_loc": offsets[first:] - first,
                "prefill_state_indices": slots[first:],
                "prefill_has_initial_state": flags[first:],
            }
        if self.checkpoints:
            places = [self.checkpoints.get(n, (0, 0)) for n in rows]
            offset, slot = (list(x) for x in zip(*places, strict=True))
            made["checkpoint"] = SimpleNamespace(
                offsets=offset,
                checkpoint_offsets=torch.tensor(offset).int(),
                state_indices=torch.tensor(slot).int(),
            )
            made["flashinfer_checkpoint_plan"] = SimpleNamespace(every_n_tokens=math.gcd(*offset))
        return Metadata(**made)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """mixed_qkv, b, a and core_attn_out, with the rows of padding and two of no sequence."""
        more = self.padding + 2
        pad = [
            torch.cat([x, x.new_ones(more, x.shape[1])]) for x in (self.mixed_qkv, self.b, self.a)
        ]
        out = torch.zeros(pad[0].shape[0], HV, V, dtype=self.dtype)
        return *pad, out  # type: ignore[return-value]
