"""The functions of vLLM's Gated DeltaNet layers on this package's ops. The functions have the
parameters, order and defaults of vLLM 0.33.0, which need not be installed.

No sequence uses vLLM's block 0, so a slot of 0 or less is padding: its state is not changed, and
its o, or the result of its convolution, is 0. (Some kernels of vLLM do not write those rows.)
States are value-first, and g is the logarithm of the decay.
"""

from typing import Any

import torch
from torch import Tensor

from gdn_triton._host.arguments import check_rank, check_tensors, must, shape_of
from gdn_triton.conv.api import causal_conv1d
from gdn_triton.conv.api import causal_conv1d_update as conv_update
from gdn_triton.integrations._decode import (
    check_convolved,
    check_softplus,
    check_tokens,
    gates_of_tokens,
    packed_decode,
    refuse,
)
from gdn_triton.integrations._prefill import checkpoint_rows, prefill
from gdn_triton.integrations._results import check_apart, check_result, fill
from gdn_triton.prep.api import fused_post_conv_prep as post_conv_prep
from gdn_triton.recurrent.api import recurrent_step

SKIP = "non_positive"
# vLLM's padding: block 0, and -1 in the convolution.
NULL_BLOCK_ID, PAD_SLOT_ID = 0, -1


def silu_or_none(activation: bool | str | None) -> str | None:
    """Converts the names of vLLM's activations to ours: True and "swish" are "silu"."""
    if isinstance(activation, bool):
        return "silu" if activation else None
    return "silu" if activation == "swish" else activation


def fused_post_conv_prep(
    conv_output: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    num_k_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    apply_l2norm: bool = True,
    output_g_exp: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Calls `gdn_triton.fused_post_conv_prep`, which has vLLM's parameters."""
    return post_conv_prep(
        conv_output,
        a,
        b,
        A_log,
        dt_bias,
        num_k_heads,
        head_k_dim,
        head_v_dim,
        apply_l2norm,
        output_g_exp,
    )


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: str | None = "silu",
    pad_slot_id: int = PAD_SLOT_ID,
    null_block_id: int = NULL_BLOCK_ID,
    metadata: object | None = None,
    validate_data: bool = False,
) -> Tensor:
    """Convolves whole sequences. x: [D, T], a transposed [T, D]. conv_states:
    [slots, D, W - 1 or more], of which the first W - 1 columns are the state. query_start_loc:
    [N + 1]. cache_indices: [N]. has_initial_state: [N]; it is required, because vLLM's kernel
    always reads it. `metadata` and `validate_data` are not read: blocks of tokens are found on the
    device, and every call is validated.

    Returns [D, T], a transposed tensor, in the dtype of x. The errors are those of
    `gdn_triton.causal_conv1d`.
    """
    if has_initial_state is None:
        raise ValueError("has_initial_state must be given, one flag a sequence, got None")
    _check_padding(pad_slot_id, null_block_id)
    check_convolved(x, weight, "conv_states", conv_states)
    check_rank("x", x, "D", "T")
    y = causal_conv1d(
        x.mT.to(conv_states.dtype),
        weight,
        bias,
        silu_or_none(activation),
        state=conv_states[..., : weight.shape[1] - 1],
        read_slots=cache_indices,
        has_initial_state=has_initial_state,
        skip=SKIP,
        cu_seqlens=query_start_loc,
    )
    return y.to(x.dtype).mT


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: bool | str | None = None,
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int = -1,
    null_block_id: int = NULL_BLOCK_ID,
    validate_data: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Runs a decode step. x: [N, D], one token per sequence, [N, D, T], or with query_start_loc
    [N + 1] packed [T, D]. conv_state: [slots, D, C], whose first W - 1 columns are the state; with
    num_accepted_tokens [N] the W - 1 + max_query_len - 1 columns that
    `gdn_triton.causal_conv1d_update` describes. `validate_data` is not read: every call is
    validated.

    Returns the result in the shape and dtype of x: out if that is given. Without out vLLM's
    function overwrites x; this function does not write x.
    """
    _check_padding(PAD_SLOT_ID, null_block_id)
    check_convolved(x, weight, "conv_state", conv_state)
    optional = {
        "conv_state_indices": conv_state_indices,
        "num_accepted_tokens": num_accepted_tokens,
        "query_start_loc": query_start_loc,
    }
    check_tensors({}, optional)
    for name, given in optional.items():
        if given is not None:
            check_rank(name, given, "N + 1" if name == "query_start_loc" else "N")
    if out is not None:
        check_result("out", out, "x", x.device)
        if out.shape != x.shape or out.dtype != x.dtype:
            raise ValueError(
                f"out must have the shape and dtype of x, {list(x.shape)} and {x.dtype}, got "
                f"{list(out.shape)} and {out.dtype}"
            )
        # vLLM's callers pass x itself as out.
        others = {"weight": weight, "bias": bias, "conv_state": conv_state, **optional}
        check_apart({"out": out}, others)
    W = weight.shape[1]
    tokens = 1 if x.dim() == 2 and query_start_loc is None else x.shape[-1]
    if query_start_loc is not None:
        tokens = max_query_len
        if num_accepted_tokens is not None and tokens < 1:
            raise ValueError(f"max_query_len must be 1 or more, got {max_query_len}")
    columns = W - 1 if num_accepted_tokens is None else W - 2 + tokens
    N = x.shape[0] if query_start_loc is None else query_start_loc.shape[0] - 1
    if conv_state_indices is not None:
        # A padded step has more offsets than sequences, and the buffers of a graph have more of
        # both.
        N = min(N, conv_state_indices.shape[0])
        conv_state_indices = conv_state_indices[:N]
    # vLLM's x is [N, D, T] with several tokens. The op reads [N, T, D], as a view.
    by_token = x.mT if x.dim() == 3 else x
    y = conv_update(
        by_token.to(conv_state.dtype),
        weight,
        bias,
        silu_or_none(activation),
        state=conv_state[..., :columns],
        read_slots=conv_state_indices,
        skip=SKIP,
        cu_seqlens=None if query_start_loc is None else query_start_loc[: N + 1],
        num_accepted_tokens=None if num_accepted_tokens is None else num_accepted_tokens[:N],
    )
    y = (y.mT if x.dim() == 3 else y).to(x.dtype)
    return y if out is None else fill(out, y)


def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """Decodes one token per sequence. mixed_qkv: [B, 2 * H * K + HV * V]. a, b: [B, HV].
    initial_state: the pool [slots, HV, V, K], updated at ssm_state_indices [B]. out: [B, 1, HV, V],
    to which o is written. Returns (out, initial_state)."""
    return packed_decode(
        mixed_qkv,
        a,
        b,
        A_log,
        dt_bias,
        scale,
        initial_state,
        out,
        ssm_state_indices,
        use_qk_l2norm_in_kernel,
        SKIP,
    )


def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    is_kda: bool = False,
) -> tuple[Tensor, Tensor]:
    """Decodes tokens or verifies drafted tokens, from the values before the gate.

    q, k: [B, T, H, K]. v: [B, T, HV, V]. a, b: [B, T, HV], or [B * T, HV]. Other arguments are as
    in `fused_recurrent_gated_delta_rule`. `beta` and `threshold` are the parameters of softplus.
    """
    check_softplus(("beta", "threshold"), beta, threshold)
    refuse("is_kda", is_kda, "the gate is one number a head")
    return _step(
        {**gates_of_tokens(v, a=a, b=b), "A_log": A_log, "dt_bias": dt_bias},
        (q, k, v),
        scale,
        initial_state,
        inplace_final_state,
        cu_seqlens,
        ssm_state_indices,
        num_accepted_tokens,
        use_qk_l2norm_in_kernel,
    )


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """Decodes tokens or verifies drafted tokens.

    q, k: [B, T, H, K]. v: [B, T, HV, V]. g, beta: [B, T, HV], g the logarithm of the decay; beta
    None: 1. initial_state: the pool [slots, HV, V, K]. cu_seqlens: [N + 1]. ssm_state_indices: [N],
    the slot in which each sequence's state is read and written, or [N, S]: the state after token t
    of sequence n is written to the slot in column t, and the sequence starts from the slot in
    column num_accepted_tokens[n] - 1, or in column 0 without num_accepted_tokens. Both tensors may
    have more rows than there are sequences. A state is rounded to the pool's dtype after every
    token, so verified tokens have the same bits as decoded tokens. vLLM rounds only the states that
    it writes and continues in float32.

    Returns o [B, T, HV, V] in the dtype of v, and the pool.

    Raises:
        NotImplementedError: states that are not in a pool (`inplace_final_state=False`), or an
            input that requires a gradient.
        TypeError, ValueError, RuntimeError: see `gdn_triton.recurrent_step`.
    """
    if beta is None:
        check_tensors({"v": v}, {})
        beta = v.new_ones(()).expand(v.shape[:3])
    return _step(
        {"g": g, "beta": beta},
        (q, k, v),
        scale,
        initial_state,
        inplace_final_state,
        cu_seqlens,
        ssm_state_indices,
        num_accepted_tokens,
        use_qk_l2norm_in_kernel,
    )


def _step(
    gates: dict[str, Any],
    qkv: tuple[Tensor, Tensor, Tensor],
    scale: float | None,
    pool: Tensor | None,
    inplace_final_state: bool,
    cu_seqlens: Tensor | None,
    slots: Tensor | None,
    accepted: Tensor | None,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[Tensor, Tensor]:
    if pool is None or slots is None or not inplace_final_state:
        raise NotImplementedError(
            "initial_state and ssm_state_indices must be given, with inplace_final_state=True: "
            "states are updated in a pool"
        )
    q, k, v = qkv
    N = check_tokens(v, slots, "ssm_state_indices", cu_seqlens)
    check_tensors({}, {"num_accepted_tokens": accepted})
    if slots.dim() not in (1, 2):
        expected = "have shape [N], a slot a sequence, or [N, S]"
        raise ValueError(must("ssm_state_indices", expected, shape_of(slots)))
    if accepted is not None:
        check_rank("num_accepted_tokens", accepted, "N")
    slots = slots[:N]
    if slots.dim() == 2 and accepted is None:
        accepted = torch.ones(N, dtype=torch.int32, device=slots.device)
    elif slots.dim() == 1 and accepted is not None:
        slots = slots[:, None]
    o = recurrent_step(
        pool,
        slots,
        num_accepted_tokens=None if accepted is None else accepted[:N],
        q=q,
        k=k,
        v=v,
        **gates,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        scale=scale,
        state_v_first=True,
        skip=SKIP,
        cu_seqlens=cu_seqlens,
    )
    return o, pool


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    core_attn_out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Runs a prefill from gathered states, as OLMo's layer calls it.

    q, k: [1, T, H, K]. v: [1, T, HV, V]. g, beta: [1, T, HV]. initial_state: [N, HV, V, K].
    cu_seqlens: [N + 1]. core_attn_out: contiguous, of at least T * HV * V elements; o is written to
    the first of them. chunk_indices and chunk_offsets are not read, because our kernels find chunks
    on the device.

    Returns o [1, T, HV, V] in the dtype of q, and the final states [N, HV, V, K] in float32, or
    None. The errors are those of `gdn_triton.chunk_prefill`.
    """
    return prefill(
        q,
        k,
        v,
        g,
        beta,
        cu_seqlens=cu_seqlens,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        out=core_attn_out,
        out_name="core_attn_out",
    )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    output_final_state: bool,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    core_attn_out: Tensor | None = None,
    aiter_prefill_metadata: object | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Runs `chunk_gated_delta_rule` with the parameters of the `forward` methods of vLLM's class
    `ChunkGatedDeltaRule`."""
    return chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        core_attn_out=core_attn_out,
    )


def fi_chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    output_final_state: bool,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    state_checkpoints: Tensor | None = None,
    checkpoint_cu_starts: Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    use_cp: bool | str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Runs a prefill with checkpoints, as vLLM calls FlashInfer's function. It runs
    `chunk_gated_delta_rule` and writes the state of sequence n after every checkpoint interval, a
    multiple of 64 tokens, to the rows from checkpoint_cu_starts[n] to checkpoint_cu_starts[n + 1] -
    1 of state_checkpoints [rows, HV, V, K]. g is the logarithm of the decay here too. `use_cp`
    chooses among FlashInfer's kernels and is not read."""
    rows = checkpoint_rows(
        state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens, v, cu_seqlens
    )
    return prefill(
        q,
        k,
        v,
        g,
        beta,
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        checkpoint_every_n_tokens=checkpoint_every_n_tokens,
        state_checkpoints=state_checkpoints,
        checkpoint_slots=rows,
    )


def _check_padding(pad_slot_id: int, null_block_id: int) -> None:
    if null_block_id != NULL_BLOCK_ID or pad_slot_id != PAD_SLOT_ID:
        raise NotImplementedError(
            f"pad_slot_id must be {PAD_SLOT_ID} and null_block_id {NULL_BLOCK_ID}, vLLM's own, got "
            f"{pad_slot_id!r} and {null_block_id!r}"
        )
