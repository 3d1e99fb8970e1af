"""The part of vLLM's Gated DeltaNet layers between the projections and the norm: the method
`_forward_core` of its layers for Qwen and OLMo, on this package's ops.

vLLM's own method calls its kernels one after the other and copies states and tokens between them:
it splits and copies q, k and v, gathers the states of a prefill, sets some states to zero, and
scatters the final states. The method of this module reads and writes all tensors in place:

- plain decodes: `causal_conv1d_update` and `recurrent_step`, from the projection into the output;
- prefills: `fused_conv_prep` and `chunk_prefill`, on the pools of the convolution and of states;
- drafts: `layer_step` with `num_accepted_tokens` and without a norm, which is one launch for few
  sequences.

For a batch of decodes and prefills the method runs the ops on the two parts. For a batch of drafts
and other tokens it first copies the two kinds of tokens to separate tensors, as vLLM does, which
lists their tokens by index, and afterwards copies the results back.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdn_triton._host.arguments import (
    check_devices,
    check_dtypes,
    check_rank,
    check_shape,
    check_state,
    check_tensors,
    must,
    shape_of,
)
from gdn_triton._host.memory import check_own_memory
from gdn_triton.chunk.prefill.api import chunk_prefill
from gdn_triton.conv.api import causal_conv1d_update, fused_conv_prep
from gdn_triton.integrations._lengths import offsets_on_host
from gdn_triton.integrations.vllm.functions import SKIP, silu_or_none
from gdn_triton.integrations.vllm.window import LayerWindow, window_of
from gdn_triton.recurrent.api import recurrent_step
from gdn_triton.step.api import layer_step

# The fields of a layer, and of vLLM's metadata of a step, that this module reads.
LAYER = (
    *("A_log", "activation", "conv1d", "dt_bias", "head_k_dim", "head_v_dim", "kv_cache"),
    *("num_k_heads", "prefix", "tp_size"),
)
METADATA = (
    *("checkpoint", "flashinfer_checkpoint_plan", "non_spec_query_start_loc"),
    *("non_spec_state_indices_tensor", "non_spec_token_indx", "num_accepted_tokens"),
    *("num_actual_tokens", "num_decode_tokens", "num_decodes", "num_prefills", "num_spec_decodes"),
    *("prefill_has_initial_state", "prefill_query_start_loc", "prefill_state_indices"),
    *("spec_query_start_loc", "spec_sequence_masks", "spec_state_indices_tensor"),
    "spec_token_indx",
)


# The attribute of a layer that holds its counters.
COUNTERS = "gdn_triton_counters"


@dataclass(frozen=True, slots=True)
class Tokens:
    """Some tokens of a step: the convolution's input [T, channels], a and b [T, HV], and the tensor
    [T, HV, V] to which their o is written."""

    mixed_qkv: Tensor
    a: Tensor
    b: Tensor
    out: Tensor

    def part(self, start: int, end: int | None = None) -> "Tokens":
        rows = slice(start, end)
        return Tokens(self.mixed_qkv[rows], self.a[rows], self.b[rows], self.out[rows])

    def select(self, rows: Tensor) -> "Tokens":
        """Returns copies of these tokens, with an output of their own."""
        return Tokens(
            self.mixed_qkv.index_select(0, rows),
            self.a.index_select(0, rows),
            self.b.index_select(0, rows),
            self.out.new_empty(rows.shape[0], *self.out.shape[1:]),
        )


def forward_core(
    layer: Any,
    metadata: Any,
    conv_state: Tensor,
    mixed_qkv: Tensor,
    b: Tensor,
    a: Tensor,
    core_attn_out: Tensor,
) -> None:
    """Runs one step of a layer and writes o to the first rows of core_attn_out.

    layer: a layer of vLLM. metadata: vLLM's `GDNAttentionMetadata` of the step. conv_state:
    [slots, channels, W - 1 + drafted tokens], layer.kv_cache[0] with its channels second.
    mixed_qkv: [T, channels]. a, b: [T, HV]. core_attn_out: [T, HV, V].

    Raises:
        AttributeError: metadata of prefills or drafts lacks a field that vLLM sets.
        TypeError, ValueError, RuntimeError: as for `gdn_triton.fused_conv_prep`,
            `gdn_triton.chunk_prefill`, `gdn_triton.causal_conv1d_update` and
            `gdn_triton.recurrent_step`.
    """
    m, window = metadata, window_of(layer, metadata)
    given = {"mixed_qkv": mixed_qkv, "b": b, "a": a, "core_attn_out": core_attn_out}
    check_tensors(given, {})
    tokens = Tokens(mixed_qkv, a, b, core_attn_out).part(0, m.num_actual_tokens)
    _check(layer, conv_state, tokens)
    if m.spec_sequence_masks is None:
        if m.num_prefills == 0:
            # A padded step of a graph passes all its tokens, some of which have no slot.
            if m.num_decodes > 0:
                _decode(layer, conv_state, tokens, m.non_spec_state_indices_tensor, window)
            return
        decodes = m.num_decode_tokens
        if m.num_decodes > 0:
            slots = m.non_spec_state_indices_tensor
            _decode(layer, conv_state, tokens.part(0, decodes), slots, window)
        _prefill(layer, m, conv_state, tokens.part(decodes), window)
        _export(layer, m, conv_state, tokens.mixed_qkv)
        return
    if m.num_prefills == 0:
        _verify(layer, m, conv_state, tokens)
        return
    # In a batch with drafts, vLLM counts one-token sequences without drafts as prefills.
    drafts, others = tokens.select(m.spec_token_indx), tokens.select(m.non_spec_token_indx)
    _verify(layer, m, conv_state, drafts)
    _prefill(layer, m, conv_state, others, None)
    _export(layer, m, conv_state, others.mixed_qkv)
    tokens.out.index_copy_(0, m.spec_token_indx, drafts.out)
    tokens.out.index_copy_(0, m.non_spec_token_indx, others.out)


def _check(layer: Any, conv_state: Tensor, x: Tokens) -> None:
    """Checks the tensors that the second op of a step reads and writes, before the first op writes
    the convolution's states."""
    state, A_log = layer.kv_cache[1], layer.A_log
    tokens = {"mixed_qkv": x.mixed_qkv, "a": x.a, "b": x.b, "core_attn_out": x.out}
    others = {"A_log": A_log, "dt_bias": layer.dt_bias, "conv1d.weight": layer.conv1d.weight}
    pools = {"kv_cache[0]": conv_state, "kv_cache[1]": state}
    named = {**tokens, **others, **pools}
    check_tensors(named, {})
    check_devices("mixed_qkv", x.mixed_qkv.device, named)
    check_dtypes(named, ())
    check_rank("A_log", A_log, "HV")
    H, HV = layer.num_k_heads // layer.tp_size, A_log.shape[0]
    K, V = layer.head_k_dim, layer.head_v_dim
    check_rank("mixed_qkv", x.mixed_qkv, "T", "channels")
    T = x.mixed_qkv.shape[0]
    D, weight = 2 * H * K + HV * V, layer.conv1d.weight
    check_shape("mixed_qkv", x.mixed_qkv, T=T, channels=D)
    if weight.dim() < 2 or weight.shape[0] != D or weight.numel() != D * weight.shape[-1]:
        expected = f"have shape [channels={D}, 1, W]"
        raise ValueError(must("conv1d.weight", expected, shape_of(weight)))
    check_shape("a", x.a, T=T, HV=HV)
    check_shape("b", x.b, T=T, HV=HV)
    check_shape("core_attn_out", x.out, T=T, HV=HV, V=V)
    check_shape("dt_bias", layer.dt_bias, HV=HV)
    sizes = {"HV": HV, "K": K, "V": V}
    check_state("kv_cache[1]", state, "slots", None, **sizes, state_v_first=True)
    if x.out.dtype != x.mixed_qkv.dtype:
        expected = f"be {x.mixed_qkv.dtype}, as mixed_qkv is"
        raise ValueError(must("core_attn_out", expected, str(x.out.dtype)))
    for name, written in (("core_attn_out", x.out), ("kv_cache[1]", state)):
        if 0 not in written.shape:
            check_own_memory(name, (written.shape, written.stride(), written.dtype))
    if torch.is_grad_enabled() and any(y.requires_grad for y in named.values()):
        raise NotImplementedError(
            "a step of vLLM's layer writes states in place and has no gradient; an input requires "
            "one. Call under torch.no_grad()"
        )


def _weight(layer: Any) -> Tensor:
    """Returns the convolution's weight [D, W]."""
    weight: Tensor = layer.conv1d.weight
    return weight.view(weight.shape[0], weight.shape[-1])


def _gates(layer: Any) -> dict[str, Any]:
    """Returns the arguments of `recurrent_step` that are attributes of a layer."""
    return {
        "A_log": layer.A_log,
        "dt_bias": layer.dt_bias,
        "allow_neg_eigval": _doubles_beta(layer),
        "use_qk_l2norm_in_kernel": True,
        "state_v_first": True,
        "skip": SKIP,
    }


def _doubles_beta(layer: Any) -> bool:
    # OLMo's layer has this attribute, Qwen's does not.
    return bool(getattr(layer, "allow_neg_eigval", False))


def _decode(
    layer: Any, conv_state: Tensor, x: Tokens, slots: Tensor, window: LayerWindow | None
) -> None:
    """Decodes one token per sequence."""
    slots, weight = slots[: x.mixed_qkv.shape[0]], _weight(layer)
    mixed_qkv = causal_conv1d_update(
        x.mixed_qkv,
        weight,
        layer.conv1d.bias,
        silu_or_none(layer.activation),
        state=conv_state[..., : weight.shape[1] - 1],
        read_slots=slots,
        skip=SKIP,
    )
    recurrent_step(
        layer.kv_cache[1],
        slots,
        mixed_qkv=mixed_qkv,
        a=x.a,
        b=x.b,
        out=x.out,
        **_gates(layer),
        **({} if window is None else window.of_decodes(slots.shape[0])),
    )


def _verify(layer: Any, m: Any, conv_state: Tensor, x: Tokens) -> None:
    """Runs drafted tokens, after the accepted tokens of the previous step."""
    N = m.num_spec_decodes
    slots = m.spec_state_indices_tensor[:N]
    layer_step(
        x.mixed_qkv,
        x.a,
        x.b,
        state=layer.kv_cache[1],
        read_slots=slots,
        num_accepted_tokens=m.num_accepted_tokens[:N],
        conv_state=conv_state,
        conv_weight=_weight(layer),
        conv_bias=layer.conv1d.bias,
        activation=silu_or_none(layer.activation),
        counters=_counters(layer),
        cu_seqlens=m.spec_query_start_loc[: N + 1],
        max_tokens=slots.shape[1],
        out=x.out,
        **_gates(layer),
    )


def _counters(layer: Any) -> Tensor | None:
    """Returns the counters of `layer_step`, which the layer keeps, or None during the capture of a
    CUDA graph, whose memory a later call must not use."""
    state = layer.kv_cache[1]
    shape = state.shape[0], layer.num_k_heads // layer.tp_size
    kept: Tensor | None = getattr(layer, COUNTERS, None)
    if kept is None or kept.shape != shape or kept.device != state.device:
        if state.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        kept = torch.zeros(shape, dtype=torch.int32, device=state.device)
        setattr(layer, COUNTERS, kept)
    return kept


def _prefill(layer: Any, m: Any, conv_state: Tensor, x: Tokens, window: LayerWindow | None) -> None:
    slots, cu_seqlens = m.prefill_state_indices, m.prefill_query_start_loc
    starts = {"has_initial_state": m.prefill_has_initial_state, "skip": SKIP}
    weight = _weight(layer)
    q, k, v, g, beta = fused_conv_prep(
        x.mixed_qkv,
        weight,
        x.a,
        x.b,
        layer.A_log,
        layer.dt_bias,
        layer.num_k_heads // layer.tp_size,
        layer.head_k_dim,
        layer.head_v_dim,
        layer.conv1d.bias,
        silu_or_none(layer.activation),
        state=conv_state[..., : weight.shape[1] - 1],
        read_slots=slots,
        cu_seqlens=cu_seqlens,
        **starts,
    )
    if _doubles_beta(layer):
        beta *= 2
    if window is not None:
        window.fold(layer.kv_cache[1], slots, m.prefill_has_initial_state, SKIP)
    every, checkpoint_slots = 0, None
    if m.flashinfer_checkpoint_plan is not None:
        every = m.flashinfer_checkpoint_plan.every_n_tokens
        checkpoint_slots = _checkpoint_slots(m.checkpoint, every, slots.shape[0])
    chunk_prefill(
        layer.kv_cache[1],
        slots,
        q=q[None],
        k=k[None],
        v=v[None],
        g=g[None],
        beta=beta[None],
        state_v_first=True,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=offsets_on_host(cu_seqlens),
        out=x.out[None],
        checkpoint_every_n_tokens=every,
        checkpoint_slots=checkpoint_slots,
        **starts,
    )
    if window is not None:
        window.restart(slots, SKIP)


def _checkpoint_slots(checkpoint: Any, every: int, N: int) -> Tensor:
    """Returns [N, M]: the slot for the state of each prefill after every `every` tokens, which is 0
    except at the prefill's checkpoint. The last N of vLLM's rows belong to the prefills."""
    most = max(checkpoint.offsets) // every
    offsets, slots = checkpoint.checkpoint_offsets[-N:], checkpoint.state_indices[-N:]
    after = torch.arange(every, every * most + 1, every, device=slots.device)
    return torch.where(offsets[:, None] == after, slots[:, None], 0)


def _export(layer: Any, m: Any, conv_state: Tensor, mixed_qkv: Tensor) -> None:
    """Writes the convolution's states at the checkpoints with vLLM's exporter. The prefill has
    already written the other states."""
    if m.flashinfer_checkpoint_plan is not None:
        layer._checkpoint_exporter.export(
            m.checkpoint,
            raw_qkv=mixed_qkv,
            conv_state=conv_state,
            cu_seqlens=m.non_spec_query_start_loc,
        )


def method(module: Any, warm_up: Callable[..., object]) -> Callable[..., None]:
    """Returns `_forward_core` for the layer that a module of vLLM defines. warm_up: the function
    that runs on the tokens of vLLM's memory-profiling run
    (`gdn_triton.integrations.vllm.warming`)."""

    def _forward_core(
        self: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor
    ) -> None:
        metadata = module.get_forward_context().attn_metadata
        metadata = metadata.get(self.prefix) if isinstance(metadata, dict) else None
        if metadata is None:
            # This is the memory-profiling run, in which Qwen's layer allocates a workspace for
            # checkpoints.
            theirs = getattr(self, "_warmup_prefill_kernels", None)
            if theirs is not None:
                theirs(mixed_qkv, 0)
            # A later run, in which FlashInfer tunes its own kernels, has no config. Every kind of
            # step has run by then.
            config = importlib.import_module("vllm.config").get_current_vllm_config_or_none()
            if config is not None:
                warm_up(
                    self,
                    Tokens(mixed_qkv, a, b, torch.empty_like(core_attn_out)),
                    max_sequences=config.scheduler_config.max_num_seqs,
                    is_conv_state_dim_first=module.is_conv_state_dim_first(),
                )
            return
        conv_state = self.kv_cache[0]
        if not module.is_conv_state_dim_first():
            conv_state = conv_state.transpose(-1, -2)
        forward_core(self, metadata, conv_state, mixed_qkv, b, a, core_attn_out)

    return _forward_core
