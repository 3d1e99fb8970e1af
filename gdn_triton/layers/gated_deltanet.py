"""The Gated DeltaNet layer: projections, short convolution, the rule, gated norm, projection."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Final, Literal

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from gdn_triton._host.arguments import (
    check_flags,
    check_float_dtype,
    must,
    real_or_none,
    value_of,
)
from gdn_triton._host.slots import LAST_SKIPPED
from gdn_triton.chunk.api import chunk_gated_delta_rule
from gdn_triton.layers.cache import GatedDeltaNetCache, empty_cache
from gdn_triton.layers.convolution import convolved, joined_weights, served_rows
from gdn_triton.layers.decoding import by_token, is_step, normed, step
from gdn_triton.layers.qwen import weights_from_qwen
from gdn_triton.layers.validation import check_call, check_sizes, value_channels
from gdn_triton.layers.weight_decay import MarksUndecayed
from gdn_triton.recurrent.api import fused_recurrent_gated_delta_rule

__all__ = ["GatedDeltaNet"]

# The longest sequence that runs token by token without gradients, as in FLA's layer.
RECURRENT_TOKENS: Final = 64

_MODES: Final = ("chunk", "fused_recurrent")
_ACTIVATIONS: Final = ("swish", "silu", "sigmoid")

# The ranges of the initial weights. The time step softplus(dt_bias) is log-uniform between the
# first two numbers, and the rate of the decay exp(A_log) is uniform between 0 and the last one.
_DT_RANGE: Final = (1e-3, 1e-1)
_MOST_RATE: Final = 16.0


class GatedDeltaNet(MarksUndecayed):
    """A Gated DeltaNet layer (Yang, Kautz and Hatamizadeh, 2024, arXiv:2412.06464, section 3.4).

        q, k, v = silu(conv(W_qkv x))        a, b = W_ab x        z = W_g x
        g    = -exp(A_log) * softplus(a + dt_bias)        beta = sigmoid(b), or twice that
        o    = the gated delta rule of q and k over their lengths, v, g and beta
        y    = W_o (rms_norm(o) * silu(z))

    There is one norm for each head of o. The constructor's parameters, their order and their
    defaults are those of the layer of that name in flash-linear-attention 0.6.0, and so are the
    names and shapes of its weights. A state dict of one layer loads into the other.

    Sizes: B batch, T tokens, N sequences, H = num_heads, HV = num_v_heads, K = head_dim,
    V = expand_v * head_dim.

    Args:
        hidden_size: channels of x and y.
        expand_v: V over K; V must be whole.
        head_dim: K, at most 256 in the Triton backend.
        num_heads: H, heads of q and k.
        num_v_heads: HV, heads of v, a multiple of H. None: H.
        mode: the form of the rule without gradients. "chunk": the recurrence for sequences of up to
            64 tokens, otherwise the chunked form. "fused_recurrent": always the recurrence. With
            gradients the chunked form always runs.
        use_gate: whether the layer has the output gate z.
        use_short_conv: whether the layer has the convolution. False: q, k, v = silu(W_qkv x).
        allow_neg_eigval: beta is 2 * sigmoid(b), so that a state's eigenvalues reach -1.
        conv_size: tokens that the convolution spans. The Triton backend has kernels for 2 to 4.
        conv_bias: whether the convolution has a bias.
        layer_idx: the number of the layer. The layer stores the number but does not use it.
        norm_eps: added to the mean square in the norm, at least 0.
        output_gate_activation: the activation of z: "swish" or its other name "silu", or "sigmoid".
        device, dtype: the device and dtype of the weights. A_log and dt_bias are always float32.

    Raises:
        TypeError, ValueError: an argument that does not fit.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_gate: bool = True,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        output_gate_activation: str = "swish",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        check_sizes(
            hidden_size=hidden_size,
            head_dim=head_dim,
            num_heads=num_heads,
            num_v_heads=num_v_heads,
            conv_size=conv_size,
        )
        check_flags(
            use_gate=use_gate,
            use_short_conv=use_short_conv,
            allow_neg_eigval=allow_neg_eigval,
            conv_bias=conv_bias,
        )
        if dtype is not None:
            check_float_dtype("dtype", dtype)
        head_v_dim = value_channels(head_dim, expand_v)
        if mode not in _MODES:
            raise ValueError(must("mode", f"be one of {', '.join(_MODES)}", repr(mode)))
        if output_gate_activation not in _ACTIVATIONS:
            expected = f"be one of {', '.join(_ACTIVATIONS)}"
            given = repr(output_gate_activation)
            raise ValueError(must("output_gate_activation", expected, given))

        eps = real_or_none("norm_eps", norm_eps)
        if eps is None or not 0 <= eps < math.inf:
            raise ValueError(must("norm_eps", "be finite and at least 0", value_of(norm_eps)))

        self.hidden_size = hidden_size
        self.expand_v = expand_v
        self.head_dim = self.head_k_dim = head_dim
        self.head_v_dim = head_v_dim
        self.num_heads = num_heads
        self.num_v_heads = num_v_heads
        self.key_dim = num_heads * head_dim
        self.value_dim = num_v_heads * head_v_dim
        self.mode = mode
        self.use_gate = use_gate
        self.use_short_conv = use_short_conv
        self.allow_neg_eigval = allow_neg_eigval
        self.conv_size = conv_size
        self.conv_bias = conv_bias
        self.layer_idx = layer_idx
        self.output_gate_activation = output_gate_activation

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)

        def conv(channels: int) -> nn.Conv1d:
            # These modules hold the weights. Their three convolutions run as one.
            return nn.Conv1d(
                channels,
                channels,
                conv_size,
                padding=conv_size - 1,
                groups=channels,
                bias=conv_bias,
                device=device,
                dtype=dtype,
            )

        self.q_proj = linear(hidden_size, self.key_dim)
        self.k_proj = linear(hidden_size, self.key_dim)
        self.v_proj = linear(hidden_size, self.value_dim)
        self.a_proj = linear(hidden_size, num_v_heads)
        self.b_proj = linear(hidden_size, num_v_heads)
        self.A_log = nn.Parameter(torch.empty(num_v_heads, device=device, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(num_v_heads, device=device, dtype=torch.float32))
        if use_short_conv:
            self.q_conv1d = conv(self.key_dim)
            self.k_conv1d = conv(self.key_dim)
            self.v_conv1d = conv(self.value_dim)
        if use_gate:
            self.g_proj = linear(hidden_size, self.value_dim)
        self.o_norm = nn.RMSNorm(head_v_dim, eps=norm_eps, device=device, dtype=dtype)
        self.o_proj = linear(self.value_dim, hidden_size)
        self._reset_gate()

    @classmethod
    def from_qwen(
        cls,
        state_dict: Mapping[str, Tensor],
        num_heads: int,
        *,
        prefix: str = "",
        norm_eps: float = 1e-6,
    ) -> GatedDeltaNet:
        """Makes a layer with the linear-attention weights of Qwen3-Next or Qwen3.5.

        num_heads and norm_eps cannot be derived from the weights. The weights are copied and keep
        their dtypes and devices.

        Args:
            state_dict, num_heads, prefix: as for `gdn_triton.layers.weights_from_qwen`.
            norm_eps: `rms_norm_eps` of the configuration.
        """
        weights = weights_from_qwen(state_dict, num_heads, prefix)
        head_dim = weights["q_proj.weight"].shape[0] // num_heads
        layer = cls(
            hidden_size=weights["o_proj.weight"].shape[0],
            expand_v=weights["o_norm.weight"].shape[0] / head_dim,
            head_dim=head_dim,
            num_heads=num_heads,
            num_v_heads=weights["A_log"].shape[0],
            conv_size=weights["q_conv1d.weight"].shape[2],
            norm_eps=norm_eps,
            device="meta",
        )
        layer.load_state_dict(weights, assign=True)
        return layer

    def reset_parameters(self) -> None:
        """Draws all weights anew. A layer made on the meta device needs this call after
        `to_empty`."""
        for child in self.children():
            child.reset_parameters()  # type: ignore[operator]
        self._reset_gate()

    @torch.no_grad()
    def _reset_gate(self) -> None:
        # rand is below 1, so the rate is not 0, whose logarithm is -inf.
        self.A_log.copy_((_MOST_RATE * (1 - torch.rand_like(self.A_log))).log())
        least, most = map(math.log, _DT_RANGE)
        dt = (torch.rand_like(self.dt_bias) * (most - least) + least).exp()
        self.dt_bias.copy_(dt + (-(-dt).expm1()).log())  # softplus(dt_bias) is dt
        self._mark_undecayed()

    def no_weight_decay(self) -> set[str]:
        """The names of the weights that an optimizer does not decay: A_log and dt_bias.
        `gdn_triton.layers.parameter_groups` makes an optimizer's groups of a whole model."""
        return {"A_log", "dt_bias"}

    def extra_repr(self) -> str:
        return (
            f"H={self.num_heads}, HV={self.num_v_heads}, K={self.head_k_dim}, V={self.head_v_dim}, "
            f"mode={self.mode}, allow_neg_eigval={self.allow_neg_eigval}"
        )

    def make_cache(
        self,
        slots: int,
        *,
        dtype: torch.dtype | None = None,
        state_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        skip: str = "negative",
        window: bool | Literal["auto"] = False,
    ) -> GatedDeltaNetCache:
        """Makes a cache for this layer with all slots empty.

        Args:
            slots: the number of sequences that the cache can hold.
            dtype: the dtype of the convolution's states. None: the dtype of the weights. Under
                autocast the dtype of autocast is sufficient.
            state_dtype: the dtype of the recurrent states, rounded after every token, or every call
                in the chunked form. None: float32, or float64 if the weights are float64.
            device: None: the device of the weights.
            skip: which slots are padding: "negative", or "non_positive" if no sequence uses slot 0.
            window: store the last tokens of each slot as records: most steps of one token then read
                a state without writing it (`docs/decode.md`). "auto": do so if slots times value
                heads are at least 1024, or 2048 with 16-bit states. With fewer states a step takes
                less time without a window (`docs/layers.md`).

        Raises:
            TypeError, ValueError: an argument that does not fit.
        """
        state_shape, conv_shape = self._slot_shapes()
        return empty_cache(
            slots,
            state_shape=state_shape,
            conv_shape=conv_shape,
            num_heads=self.num_heads,
            weight=self.q_proj.weight,
            dtype=dtype,
            state_dtype=state_dtype,
            device=device,
            skip=skip,
            window=window,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        cache: GatedDeltaNetCache | None = None,
        slots: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        cp_context: object | None = None,
    ) -> Tensor:
        """Runs the layer on whole sequences, or on the next tokens of sequences in a cache.

        Args:
            hidden_states: [B, T, hidden_size], float.
            attention_mask: [B, S], S >= T, bool, integer or float. The last T columns are 0 where
                there is no token; earlier columns are not read. Masked tokens may be anywhere in a
                row. Their values change no other result, and their y and gradient are 0. A float
                mask may hold only 0 and 1, which is checked on a CPU; an additive mask would be
                read with the opposite meaning.
            cache: from `make_cache`. Each sequence continues from its slot, which the call updates.
                Gradients do not flow to earlier calls. Gradient checkpointing must not repeat a
                call.
            slots: [N], int32 or int64, with a cache: the slot of each sequence, all different. A
                padding slot (`skip` of the cache) skips its sequence: no state is written, and its
                y is 0. None: the first N slots.
            cu_seqlens: [N + 1], int32 or int64: the N sequences are packed in one row (B = 1), as
                for `gdn_triton.chunk_gated_delta_rule`. Tokens at or after cu_seqlens[-1] are
                masked. Excludes attention_mask.
            cu_seqlens_cpu: the same offsets on the CPU, if the host knows them, for
                `gdn_triton.chunk_gated_delta_rule`.
            cp_context: for sequences that are split over ranks, as in `chunk_gated_delta_rule`.
                hidden_states has this rank's tokens in one row (B = 1), and every other argument is
                None. All ranks must make the call, and either all or no ranks run its backward.

        Returns:
            y: [B, T, hidden_size].

        The host does not read masks, slots and offsets on an accelerator. Therefore their contents
        are not checked there and may change between replays of a CUDA graph. The reference backend
        reads the contents. `torch.compile(fullgraph=True)` works with and without gradients.

        Raises:
            TypeError, ValueError: an argument that does not fit, here or in a function that the
                layer calls. No state has changed.
            NotImplementedError: a state of the cache requires a gradient.
        """
        state_shape, conv_shape = self._slot_shapes()
        N = check_call(
            *(hidden_states, attention_mask, cache, slots),
            *(cu_seqlens, cu_seqlens_cpu, cp_context),
            hidden_size=self.hidden_size,
            state_shape=state_shape,
            conv_shape=conv_shape,
        )
        B, T, _ = hidden_states.shape
        if cp_context is not None:
            # A rank without tokens also runs the layer, because the exchange needs all ranks.
            local = cp_context.cu_seqlens  # type: ignore[attr-defined]
            return self._run(hidden_states, None, None, local, T, False, cp_context=cp_context)
        if T == 0:
            return self.o_proj(hidden_states.new_zeros(B, 0, self.value_dim))
        skips = slots is not None
        if cache is not None and slots is None:
            first = LAST_SKIPPED[cache.skip] + 1
            slots = torch.arange(first, first + N, device=hidden_states.device)
        if attention_mask is None:
            return self._run(hidden_states, cache, slots, cu_seqlens, T, skips, cu_seqlens_cpu)

        # The order is: the tokens of each sequence, then all masked tokens, which belong to no
        # sequence.
        kept = attention_mask[:, -T:] != 0
        offsets = F.pad(kept.sum(1).cumsum(0), (1, 0))
        kept = kept.flatten()
        place = torch.where(kept, kept.cumsum(0) - 1, offsets[-1] + (~kept).cumsum(0) - 1)
        x = hidden_states.flatten(0, 1)
        x = x.new_zeros(x.shape).index_copy(0, place, x)
        y = self._run(x[None], cache, slots, offsets, T, skips)
        return y[0].index_select(0, place).unflatten(0, (B, T))

    def _run(
        self,
        x: Tensor,
        cache: GatedDeltaNetCache | None,
        slots: Tensor | None,
        cu_seqlens: Tensor | None,
        longest: int,
        skips: bool,
        cu_seqlens_cpu: Tensor | None = None,
        cp_context: object | None = None,
    ) -> Tensor:
        """Runs the layer. longest: an upper bound of a sequence's tokens. skips: slots may hold
        padding; otherwise they are the first slots of the cache."""
        live = None
        if skips:
            assert cache is not None and slots is not None
            live = cache.is_live(slots)
        served = served_rows(x.shape[1], live, cu_seqlens)
        if served is not None and torch.is_grad_enabled():
            # Rows of no sequence may hold NaN. A weight's gradient sums over all rows, and 0 * NaN
            # in this sum would be NaN.
            x = torch.where(served, x, 0)
        qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        a, b = self.a_proj(x), self.b_proj(x)
        z = self.g_proj(x).unflatten(-1, (self.num_v_heads, -1)) if self.use_gate else None
        gate = "sigmoid" if self.output_gate_activation == "sigmoid" else "silu"
        if self.use_gate and is_step(qkv, cache, cu_seqlens):
            assert cache is not None and slots is not None and z is not None
            y = step(
                *(qkv, a, b, z, cache, slots),
                are_first=not skips,
                weights=self._conv_weights() if self.use_short_conv else None,
                A_log=self.A_log,
                dt_bias=self.dt_bias,
                allow_neg_eigval=self.allow_neg_eigval,
                norm=self.o_norm,
                activation=gate,
            )
        else:
            o = self._mix(qkv, a, b, cache, slots, cu_seqlens, cu_seqlens_cpu, longest, cp_context)
            if served is not None and torch.is_grad_enabled():
                # Rows of no sequence are 0 in o, and with norm_eps=0 the norm has no derivative at
                # 0.
                o = torch.where(served[..., None], o, 1)
            y = normed(o, z, self.o_norm, gate)
        y = self.o_proj(y.flatten(-2))
        # Select instead of multiplying, because 0 * NaN is NaN.
        return y if served is None else torch.where(served, y, 0)

    def _mix(
        self,
        qkv: Tensor,
        a: Tensor,
        b: Tensor,
        cache: GatedDeltaNetCache | None,
        slots: Tensor | None,
        cu_seqlens: Tensor | None,
        cu_seqlens_cpu: Tensor | None,
        longest: int,
        cp_context: object | None,
    ) -> Tensor:
        """Runs the convolution and the rule, the operations that mix tokens. Returns o
        [B, T, HV, V] for the projections qkv [B, T, 2 H K + HV V] and a, b [B, T, HV], and updates
        the cache's slots."""
        conv_state = None
        if self.use_short_conv:
            weights = self._conv_weights()
            qkv, conv_state = convolved(
                qkv, *weights, cache, slots, cu_seqlens, longest, cp_context=cp_context
            )
        else:
            qkv = F.silu(qkv)
        # Test the length last, because the test of a symbolic length adds a guard to the trace.
        is_by_token = (
            cp_context is None
            and not torch.is_grad_enabled()
            and (self.mode == "fused_recurrent" or longest <= RECURRENT_TOKENS)
        )
        if is_by_token and cache is not None:
            assert slots is not None
            o = by_token(
                *(qkv, a, b, cache, slots, cu_seqlens, longest),
                A_log=self.A_log,
                dt_bias=self.dt_bias,
                allow_neg_eigval=self.allow_neg_eigval,
            )
        else:
            initial_state = None
            if cache is not None:
                assert slots is not None
                initial_state = cache.read("recurrent_state", slots)
            q, k, v = qkv.split([self.key_dim, self.key_dim, self.value_dim], -1)
            rule: Callable[..., tuple[Tensor, Tensor | None]]
            if is_by_token:
                rule = fused_recurrent_gated_delta_rule
            else:
                rule = functools.partial(
                    chunk_gated_delta_rule, cu_seqlens_cpu=cu_seqlens_cpu, cp_context=cp_context
                )
            o, final_state = rule(
                q=rearrange(q, "B T (H K) -> B T H K", K=self.head_k_dim),
                k=rearrange(k, "B T (H K) -> B T H K", K=self.head_k_dim),
                v=rearrange(v, "B T (HV V) -> B T HV V", V=self.head_v_dim),
                g=a,
                beta=b,
                initial_state=initial_state,
                output_final_state=cache is not None,
                use_qk_l2norm_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
                allow_neg_eigval=self.allow_neg_eigval,
                state_v_first=True,
                cu_seqlens=cu_seqlens,
                use_gate_in_kernel=True,
                A_log=self.A_log,
                dt_bias=self.dt_bias,
            )
            if cache is not None:
                assert slots is not None and final_state is not None
                cache.write("recurrent_state", slots, final_state)
        # Write the states last: a call that raises an error must not change a state.
        if cache is not None and conv_state is not None:
            assert slots is not None
            cache.write("conv_state", slots, conv_state)
        return o

    def _slot_shapes(self) -> tuple[tuple[int, int, int], tuple[int, int] | None]:
        channels = 2 * self.key_dim + self.value_dim
        conv_shape = (channels, self.conv_size - 1) if self.use_short_conv else None
        return (self.num_v_heads, self.head_v_dim, self.head_k_dim), conv_shape

    def _conv_weights(self) -> tuple[Tensor, Tensor | None]:
        return joined_weights((self.q_conv1d, self.k_conv1d, self.v_conv1d))
