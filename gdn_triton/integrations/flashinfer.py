"""This package's ops under FlashInfer's names, with its arguments and its meaning of them.

For a program that was written for `flashinfer.gdn_prefill` and `flashinfer.gdn_decode`: it changes
the import. The parameters, their order and their defaults are those of FlashInfer 0.7.2, which is
not needed. Where its convention differs from this package's:

- tokens are packed, [T, H, K], without a batch dimension; states are value-first, [N, HV, V, K];
- `g` of the prefill is the decay alpha itself, in 0 to 1, not its logarithm (`log_decay`);
- there may be fewer k and v heads than q heads; heads of k and v are repeated then, in a copy;
- states are read from and written to the caller's tensors, and `output` is filled if it is given.

What chooses between FlashInfer's own kernels (`use_cp`, `backend`) must be "auto". What is not
served is an error, never ignored.
"""

from numbers import Real

import torch
from torch import Tensor

from gdn_triton._host.arguments import count_sequences
from gdn_triton.integrations._prefill import prefill
from gdn_triton.recurrent.api import recurrent_step


def log_decay(alpha: Tensor) -> Tensor:
    """The natural logarithm of a decay alpha in 0 to 1, in float32 (float64 stays): the `g` of
    `gdn_triton.chunk_gated_delta_rule`. 0, which forgets the state, gives -inf.

    alpha is rounded once already: near 1 its logarithm has an absolute error of 2^-25, however
    small it is. Where the logarithm is at hand, pass that. There is no gradient at 0.
    """
    return (alpha if alpha.dtype == torch.float64 else alpha.float()).log()


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: Tensor | None = None,
    output_state: Tensor | None = None,
    state_checkpoints: Tensor | None = None,
    checkpoint_cu_starts: Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    use_cp: str | bool = "auto",
    state_indices: Tensor | None = None,
    _cp_chunk_len: int | None = None,
    backend: str = "auto",
    max_seqlen: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Prefill, as `flashinfer.gdn_prefill.chunk_gated_delta_rule`.

    Sizes: T tokens of N sequences, packed; H heads of q, HK of k, HV of v; HO = max(H, HV).
    "Float" is float16, bfloat16, float32 or float64.

    Args:
        q: [T, H, K], k: [T, HK, K], v: [T, HV, V]; float. Either HK = H and HV is a multiple of it,
            or HK = HV and H is a multiple of that.
        g: [T, HO], float: the decay alpha, 0 to 1. None: 1.
        beta: [T, HO], float. None: 1.
        scale: factor of the output. None: K ** -0.5. 0, which FlashInfer takes for None, is an
            error.
        initial_state: [N, HO, V, K], or with `state_indices` a pool [slots, HO, V, K]; float. None:
            zeros.
        output_final_state: return the final states too.
        cu_seqlens: [N + 1], int32 or int64. Needed.
        use_qk_l2norm_in_kernel: normalise each q and k.
        output: [T, HO, V], contiguous, q's dtype: where o is written. None: a new tensor.
        output_state: [N, HO, V, K], or the pool: where the final states are written, in its dtype,
            whether they are returned or not. None: a new float32 tensor; with `state_indices` and
            `output_final_state` it is needed. It may be `initial_state`.
        state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens: the state of sequence n
            after each so many of its tokens (a multiple of 64) is written to the rows from
            checkpoint_cu_starts[n] to checkpoint_cu_starts[n + 1] - 1 of [rows, HO, V, K].
            checkpoint_cu_starts: [N + 1], int32 or int64.
        state_indices: [N], int32 or int64: the slots of the sequences, no two equal, none negative.
            Where `output_state` is `initial_state` the pool is read and written as it lies.
        max_seqlen: the length of the longest sequence, or more; an int. Nothing needs it here.
            Less than T / N is an error, as it is in FlashInfer, and so is, where cu_seqlens is on
            the CPU, less than the longest sequence. On an accelerator cu_seqlens is not read: a
            max_seqlen that is too small for the longest sequence then changes nothing, since every
            sequence may have as many checkpoints as T tokens have.
        use_cp, backend: "auto". _cp_chunk_len: None.

    Returns:
        o [T, HO, V]; with `output_final_state` (o, final states).

    Raises:
        TypeError, ValueError: an argument that does not fit.
        NotImplementedError: what is not served, or an input that requires a gradient.
    """
    if use_cp != "auto" or _cp_chunk_len is not None:
        raise NotImplementedError(
            'use_cp must be "auto" and _cp_chunk_len None: whether a long sequence is cut follows '
            f"from the sizes, or GDN_BATCH_INVARIANT; got {use_cp!r} and {_cp_chunk_len!r}"
        )
    _check_backend(backend)
    buffers = (state_checkpoints, checkpoint_cu_starts)
    if any((x is None) == (checkpoint_every_n_tokens != 0) for x in buffers):
        raise ValueError(
            "state_checkpoints and checkpoint_cu_starts must be given with "
            "checkpoint_every_n_tokens, and not without, got "
            f"checkpoint_every_n_tokens={checkpoint_every_n_tokens}"
        )
    scale = _check_scale(scale)
    if cu_seqlens is None:
        raise ValueError("cu_seqlens must be given: the tokens are packed, got None")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ValueError(f"{name} must have 3 dimensions [T, heads, size], got {list(x.shape)}")
    T, H = q.shape[:2]
    _check_max_seqlen(max_seqlen, T, cu_seqlens)
    HK, HV = k.shape[1], v.shape[1]
    if H > HV:
        if HK != HV or HV < 1 or H % HV != 0:
            raise ValueError(
                "k must have the heads of v, and q a multiple of them, where q has more heads than "
                f"v, got {H} heads of q, {HK} of k, {HV} of v"
            )
        k, v = k.repeat_interleave(H // HV, 1), v.repeat_interleave(H // HV, 1)
    HO = max(H, HV)
    for name, gate in (("g", g), ("beta", beta)):
        if gate is not None and gate.shape != (T, HO):
            raise ValueError(f"{name} must have shape [T={T}, heads={HO}], got {list(gate.shape)}")
    ones = q.new_ones((T, HO), dtype=torch.float32)
    if output is not None and output.shape != v.shape:
        raise ValueError(f"output must have shape {list(v.shape)}, got {list(output.shape)}")
    if state_indices is not None and output_final_state and output_state is None:
        raise ValueError(
            "output_state must be given with state_indices and output_final_state: the pool that "
            "the final states are written to"
        )
    o, final_state = prefill(
        q.unsqueeze(0),
        k.unsqueeze(0),
        v.unsqueeze(0),
        log_decay(ones if g is None else g).unsqueeze(0),
        (ones if beta is None else beta).unsqueeze(0),
        cu_seqlens=cu_seqlens,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        slots=state_indices,
        out=output,
        out_state=output_state,
        checkpoint_every_n_tokens=checkpoint_every_n_tokens,
        state_checkpoints=state_checkpoints,
        checkpoint_slots=None
        if checkpoint_cu_starts is None
        else _checkpoint_rows(checkpoint_cu_starts, T, checkpoint_every_n_tokens),
    )
    o = o.squeeze(0) if output is None else output
    return o if final_state is None else (o, final_state)


def gated_delta_rule_decode_pretranspose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    use_qk_l2norm: bool = True,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    disable_state_update: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """A decode step on value-first states, as `flashinfer.gdn_decode`'s of that name.

    B sequences of T tokens. q, k: [B, T, H, K]. v: [B, T, HV, V]. a, b: [B, T, HV]. A_log, dt_bias:
    [HV]. Either `state` [B, HV, V, K], updated in place, or the pool `initial_state`
    [slots, HV, V, K] with `initial_state_indices` [B], and `output_state_indices` [B] where the
    states go elsewhere. A negative index is padding: of the first, o is 0 and no state is touched,
    whatever the dtype of the pool (FlashInfer takes slot 0 for bfloat16 states instead); of the
    second, the state is not kept. `intermediate_states_buffer` is not served.

    Any sizes and any float dtypes; the rest is that of `gdn_triton.recurrent_step`.

    Returns:
        (o [B, T, HV, V] in the dtype of v, or `output`; the state or the pool).

    Raises:
        TypeError, ValueError, NotImplementedError: see `gdn_triton.recurrent_step`.
    """
    _check_backend(backend)
    _refuse_buffer(intermediate_states_buffer)
    if (initial_state is None) != (initial_state_indices is None):
        raise ValueError("initial_state and initial_state_indices must be given together")
    if (initial_state is None) == (state is None):
        raise ValueError("either state or initial_state must be given, and not both")
    pool, slots = initial_state, initial_state_indices
    if pool is None or slots is None:
        assert state is not None
        if output_state_indices is not None:
            raise ValueError("output_state_indices must be None without initial_state")
        pool, slots = state, _rows(q, state)
    o = recurrent_step(
        pool,
        slots,
        torch.full_like(slots, -1) if disable_state_update else output_state_indices,
        q=q,
        k=k,
        v=v,
        a=a,
        b=b,
        A_log=A_log,
        dt_bias=dt_bias,
        use_qk_l2norm_in_kernel=use_qk_l2norm,
        scale=_check_scale(scale),
        state_v_first=True,
        out=output,
    )
    return o, pool


def gated_delta_rule_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    use_qk_l2norm: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """A decode step on key-first states [B, HV, K, V], as `flashinfer.gdn_decode`'s of that name.

    The other arguments, the result and the errors are those of
    `gated_delta_rule_decode_pretranspose`.
    """
    _check_backend(backend)
    o = recurrent_step(
        state,
        _rows(q, state),
        q=q,
        k=k,
        v=v,
        a=a,
        b=b,
        A_log=A_log,
        dt_bias=dt_bias,
        use_qk_l2norm_in_kernel=use_qk_l2norm,
        scale=_check_scale(scale),
        out=output,
    )
    return o, state


def gated_delta_rule_mtp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    disable_state_update: bool | None = None,
    use_qk_l2norm: bool = True,
    output_state_indices: Tensor | None = None,
    cache_replayssm: bool = False,
    replayssm_rawv: Tensor | None = None,
    replayssm_rawk: Tensor | None = None,
    replayssm_g: Tensor | None = None,
    replayssm_beta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Several tokens a sequence from a pool, to verify speculated ones, as the function of that
    name in `flashinfer.gdn_decode`.

    The shapes are those of `gated_delta_rule_decode_pretranspose`. `ssm_state_indices` [B, T]: the
    slot that the state after each token is written to, and nothing else is. Without it the last
    state is written to `output_state_indices`, by default where it was read; with
    `disable_state_update` it is not. That flag has to be given: FlashInfer's own default is True
    and about to become False.

    `intermediate_states_buffer` and the ReplaySSM window (`cache_replayssm` and its tensors) are
    not served.
    """
    _refuse_buffer(intermediate_states_buffer)
    replay = (replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta)
    if cache_replayssm or any(x is not None for x in replay):
        raise NotImplementedError("the ReplaySSM window is not served: cache_replayssm must be off")
    if disable_state_update is None:
        raise ValueError("disable_state_update must be given as True or False, got None")
    if ssm_state_indices is not None:
        if disable_state_update or output_state_indices is not None:
            raise ValueError(
                "ssm_state_indices must come with disable_state_update=False and without "
                "output_state_indices"
            )
        output_state_indices = ssm_state_indices
    return gated_delta_rule_decode_pretranspose(
        q,
        k,
        v,
        None,
        A_log,
        a,
        dt_bias,
        b,
        scale,
        output,
        use_qk_l2norm,
        initial_state,
        initial_state_indices,
        output_state_indices,
        disable_state_update=disable_state_update,
    )


def _check_max_seqlen(max_seqlen: int | None, T: int, cu_seqlens: Tensor) -> None:
    if max_seqlen is None:
        return
    if type(max_seqlen) is not int or max_seqlen < 0:
        raise ValueError(f"max_seqlen must be an int of 0 or more, or None, got {max_seqlen!r}")
    N = count_sequences(cu_seqlens)
    if max_seqlen * N < T and N > 0:
        raise ValueError(
            f"max_seqlen must be at least T / N, the mean of N={N} sequences of T={T} tokens, got "
            f"{max_seqlen}"
        )
    if cu_seqlens.device.type == "cpu" and N > 0:
        longest = int(cu_seqlens.diff().max())
        if max_seqlen < longest:
            raise ValueError(
                f"max_seqlen must be at least {longest}, the length of the longest sequence, got "
                f"{max_seqlen}"
            )


def _checkpoint_rows(starts: Tensor, longest: int, every: int) -> Tensor:
    """[N, M]: the row of each sequence's j-th checkpoint, -1 where it has none."""
    rows = starts[:-1, None] + torch.arange(longest // every, device=starts.device)
    return torch.where(rows < starts[1:, None], rows, -1)


def _rows(q: Tensor, state: Tensor) -> Tensor:
    """The slots of states that lie in the order of their sequences."""
    if state.shape[0] != q.shape[0]:
        raise ValueError(f"state must have one row a sequence, {q.shape[0]}, got {state.shape[0]}")
    return torch.arange(q.shape[0], device=q.device, dtype=torch.int32)


def _check_scale(scale: float | None) -> float | None:
    if isinstance(scale, Real) and not isinstance(scale, bool) and scale == 0:
        raise ValueError("scale must not be 0, which FlashInfer takes for None, got 0")
    return scale


def _check_backend(backend: str) -> None:
    if backend != "auto":
        raise ValueError(
            f'backend must be "auto", the others being FlashInfer\'s own kernels, got {backend!r}'
        )


def _refuse_buffer(intermediate_states_buffer: Tensor | None) -> None:
    if intermediate_states_buffer is not None:
        raise NotImplementedError(
            "intermediate_states_buffer is not served: give each token a slot of the pool, "
            "ssm_state_indices of gated_delta_rule_mtp"
        )
