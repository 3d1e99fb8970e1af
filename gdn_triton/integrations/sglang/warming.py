"""Runs every kind of call of SGLang's Gated DeltaNet layers ahead of time, so that no request
compiles a kernel of this package.

SGLang 0.5.23 calls `ModelRunner.alloc_memory_pool` after the model is loaded, to allocate its
pools. `enable` wraps that method with `before_memory`. `warm_up` calls SGLang's own kernel class
and the functions of its backend as the layers do: with the layers' parameters, and with pools of
two slots that have the dtypes of SGLang's later pools. Every sequence has slot -1, which is
padding.
"""

import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from gdn_triton.warming import series

_logger = logging.getLogger("gdn_triton")

LINEAR: Final = "sglang.srt.layers.attention.linear"
RINGS: Final = "sglang.kernels.ops.attention.linear.gdn_replayssm_spec_decode"


def before_memory(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a replacement of `ModelRunner.alloc_memory_pool` that first warms up the runner's
    model."""

    @functools.wraps(theirs)
    def alloc_memory_pool(self: Any, *args: Any, **kwargs: Any) -> Any:
        warm_up(self)
        return theirs(self, *args, **kwargs)

    return alloc_memory_pool


def warm_up(runner: Any) -> int:
    """Runs the calls of every kind of Gated DeltaNet layer in a runner's model, and nothing for
    other models. runner: SGLang's `ModelRunner` with its model loaded.

    Returns:
        The number of calls.

    Raises:
        TypeError, ValueError, RuntimeError: as for the functions of
            `gdn_triton.integrations.sglang.functions`.
    """
    config = importlib.import_module("sglang.srt.configs.hybrid_arch").hybrid_gdn_config(
        runner.model_config
    )
    if config is None:
        return 0
    states = config.mamba2_cache_params
    radix = importlib.import_module("sglang.srt.layers.radix_linear_attention")
    kinds: dict[Any, Any] = {}
    for layer in runner.model.modules():
        # Layers with a gate for each channel are of another kind.
        if isinstance(layer, radix.RadixLinearAttention) and layer.A_log.dim() == 1:
            parameters = (layer.conv_weights, layer.bias, layer.A_log, layer.dt_bias)
            key = [None if x is None else (x.dtype, x.device, x.shape) for x in parameters]
            kinds.setdefault((*key, layer.num_k_heads, layer.head_k_dim), layer)
    sizes = _sizes()
    count = 0
    for layer in kinds.values():
        for call in _Layer(layer, states, runner.dtype, *_rings()).calls(*sizes):
            call()
            count += 1
        if layer.A_log.device.type != "cpu":
            torch.accelerator.synchronize(layer.A_log.device)
            torch.accelerator.empty_cache()
    if count:
        _logger.info("gdn_triton has made %d calls of SGLang's layers to warm up.", count)
    return count


def _sizes() -> tuple[int, int, int]:
    """Returns the tokens of a prefill, the sequences of a step, and the tokens of a draft (0: no
    drafts)."""
    context = importlib.import_module("sglang.srt.runtime_context")
    schedule = context.get_schedule()
    tokens = schedule.chunked_prefill_size
    if tokens is None or tokens < 1:
        tokens = schedule.max_prefill_tokens
    sequences = schedule.max_running_requests
    if sequences is None:
        # SGLang derives the number from the remaining memory. Steps larger than those of its graphs
        # are rare.
        sequences = context.get_exec().graph.cuda_graph_config.decode.max_bs or 1
    return tokens, sequences, context.get_spec().speculative_num_draft_tokens or 0


def _rings() -> tuple[int, int]:
    """The rows of ReplaySSM's rings in decoding, and in the verification of drafts; 0: there are no
    rings."""
    mamba = importlib.import_module("sglang.srt.runtime_context").get_exec().mamba
    rows = mamba.linear_replayssm_cache_len
    decoding, drafts = mamba.enable_linear_replayssm, mamba.enable_linear_replayssm_spec
    return rows if decoding else 0, rows if drafts else 0


class _Layer:
    """The calls of one layer of SGLang's, on tokens that are zeros. step_rows, draft_rows: the
    result of `_rings`."""

    def __init__(
        self, layer: Any, states: Any, dtype: torch.dtype, step_rows: int = 0, draft_rows: int = 0
    ) -> None:
        self.layer = layer
        self.step_rows, self.draft_rows = step_rows, draft_rows
        self.dtype = dtype
        self.device = layer.A_log.device
        self.conv_state = self.zeros(2, *states.shape.conv[0], dtype=states.dtype.conv)
        self.state = self.zeros(2, *states.shape.temporal, dtype=states.dtype.temporal)
        self.kernel = importlib.import_module(f"{LINEAR}.kernels.gdn_triton").TritonGDNKernel()
        self.backend = importlib.import_module(f"{LINEAR}.gdn_backend")
        self.gates = {"A_log": layer.A_log, "dt_bias": layer.dt_bias}

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def indices(self, n: int, value: int) -> Tensor:
        return torch.full((n,), value, dtype=torch.int32, device=self.device)

    def calls(self, tokens: int, sequences: int, drafted: int) -> Iterator[Callable[[], None]]:
        for n in series(sequences):
            yield functools.partial(self.decode, n)
            if drafted:
                verify = self.verify_rings if self.draft_rows else self.verify
                yield functools.partial(verify, n, drafted)
        for T in series(tokens):
            for N in series(min(sequences, T)):
                yield functools.partial(self.prefill, N, T)

    def tokens(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns mixed_qkv, a and b."""
        x = self.layer
        widths = (x.q_dim + x.k_dim + x.v_dim, x.num_v_heads, x.num_v_heads)
        mixed_qkv, a, b = (self.zeros(n, width, dtype=self.dtype) for width in widths)
        return mixed_qkv, a, b

    def split(self, mixed_qkv: Tensor) -> dict[str, Tensor]:
        x = self.layer
        heads = (x.num_q_heads, x.num_k_heads, x.num_v_heads)
        parts = self.backend.fused_qkv_split_gdn_prefill(
            mixed_qkv, *heads, x.head_q_dim, x.head_k_dim, x.head_v_dim
        )
        return dict(zip(("q", "k", "v"), parts, strict=True))

    def decode(self, n: int) -> None:
        x, slots = self.layer, self.indices(n, -1)
        mixed_qkv, a, b = self.tokens(n)
        mixed_qkv = self.backend.causal_conv1d_update(
            mixed_qkv,
            self.conv_state,
            x.conv_weights,
            x.bias,
            x.activation,
            conv_state_indices=slots,
        )
        self.kernel.packed_decode(
            mixed_qkv,
            a,
            b,
            **self.gates,
            scale=x.head_k_dim**-0.5,
            ssm_states=self.state,
            cache_indices=slots,
            num_v_heads=x.num_v_heads,
            head_v_dim=x.head_v_dim,
            **self.step_rings(n),
        )

    def rings(self, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """The u, the keys and the log decays of records, of two layers and two slots."""
        x = self.layer
        d = self.zeros(2, 2, x.num_v_heads, rows, x.head_v_dim, dtype=dtype)
        k = self.zeros(2, 2, x.num_k_heads, rows, x.head_k_dim, dtype=dtype)
        return d, k, self.zeros(2, 2, x.num_v_heads, rows, dtype=torch.float32)

    def step_rings(self, n: int) -> dict[str, Tensor]:
        if not self.step_rows:
            return {}
        d, k, g = self.rings(self.step_rows, self.state.dtype)
        return {
            "replayssm_d": d[0],
            "replayssm_k": k[0],
            "replayssm_g": g[0],
            "replayssm_write_pos": self.indices(n, 0),
            "replayssm_force_flush": self.indices(n, 0),
        }

    def verify_rings(self, n: int, drafted: int) -> None:
        """The verification of drafts on rings, and the fold after it."""
        functions = importlib.import_module(RINGS)
        mixed_qkv, a, b = self.tokens(n * drafted)
        parts = {name: y[0] for name, y in self.split(mixed_qkv).items()}
        d, k, g = self.rings(self.draft_rows, self.conv_state.dtype)
        has_low = self.conv_state.dtype != torch.float32
        d_low, k_low, _ = self.rings(self.draft_rows, self.conv_state.dtype)
        cursors = {
            "replay_indices": self.indices(n, 0).long(),
            "write_pos": self.indices(2, 0),
            "cache_base": self.indices(2, 0),
            "is_flush": self.zeros(2, dtype=torch.int8),
            "null_block_id": -1,
        }
        slots = self.indices(n, -1)
        functions.gdn_replayssm_spec_decode(
            **parts,
            a=a,
            b=b,
            **self.gates,
            checkpoint_state=self.state,
            d_cache=d[0],
            k_cache=k[0],
            g_cache=g[0],
            rawv_cache=d_low[0] if has_low else None,
            rawk_cache=k_low[0] if has_low else None,
            beta_cache=None,
            out=torch.empty_like(parts["v"]),
            query_start_loc=drafted * torch.arange(n + 1, dtype=torch.int32, device=self.device),
            ssm_state_indices=slots,
            max_cache_len=self.draft_rows,
            max_spec_len=drafted,
            launch_mode="verify",
            **cursors,
        )
        for track in (None, slots.long()):
            functions.commit_gdn_replayssm_circular(
                checkpoint_state=self.state.expand(2, *self.state.shape).clone(),
                d_cache=d,
                k_cache=k,
                g_cache=g,
                d_residual_cache=d_low if has_low else None,
                k_residual_cache=k_low if has_low else None,
                state_batch_indices=slots,
                accept_lens=slots,
                mamba_track_indices=track,
                mamba_steps_to_track=track,
                **cursors,
            )

    def verify(self, n: int, drafted: int) -> None:
        """Runs the rule on drafted tokens. SGLang's own convolution runs on drafts."""
        mixed_qkv, a, b = self.tokens(n * drafted)
        self.kernel.target_verify(
            **self.gates,
            **self.split(mixed_qkv),
            a=a,
            b=b,
            ssm_states=self.state,
            cache_indices=self.indices(n, -1),
            query_start_loc=drafted * torch.arange(n + 1, dtype=torch.int32, device=self.device),
            intermediate_states_buffer=self.zeros(
                2, drafted, *self.state.shape[1:], dtype=self.state.dtype
            ),
            intermediate_state_indices=self.indices(n, 0),
            cache_steps=drafted,
            retrieve_parent_token=None,
        )

    def prefill(self, N: int, T: int) -> None:
        x, slots = self.layer, self.indices(N, -1)
        mixed_qkv, a, b = self.tokens(T)
        cu_seqlens = self.indices(N + 1, T)
        cu_seqlens[0] = 0
        mixed_qkv = self.backend.causal_conv1d_fn(
            mixed_qkv.transpose(0, 1),
            x.conv_weights,
            x.bias,
            activation=x.activation,
            conv_states=self.conv_state,
            has_initial_state=slots > 0,
            cache_indices=slots,
            query_start_loc=cu_seqlens,
            seq_lens_cpu=[T] + [0] * (N - 1),
        ).transpose(0, 1)
        g, beta = (self.zeros(1, *x.shape, dtype=torch.float32) for x in (a, b))
        self.kernel.extend(
            **self.split(mixed_qkv),
            g=g,
            beta=beta,
            ssm_states=self.state,
            cache_indices=slots,
            query_start_loc=cu_seqlens,
        )
