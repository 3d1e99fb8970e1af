"""FlashInfer's prefill on this package's op."""

from typing import Any

import torch
from torch import Tensor

from gdn_triton._host.arguments import (
    check_devices,
    check_dtypes,
    check_flags,
    check_tensors,
    count_sequences,
)
from gdn_triton._host.environment import invariant_calls
from gdn_triton.integrations._prefill import checkpoint_rows, prefill
from gdn_triton.integrations._results import (
    check_apart,
    check_result,
    check_same_shape,
    fill,
)
from gdn_triton.integrations.flashinfer._checks import (
    PREFILL_BACKENDS,
    check_backend,
    check_scale,
)


def log_decay(alpha: Tensor) -> Tensor:
    """Returns the natural logarithm of a decay alpha from 0 to 1, in float32 (float64 stays): the
    `g` of `gdn_triton.chunk_gated_delta_rule`. alpha 0, which erases the state, gives -inf.

    alpha itself is rounded: near 1 its logarithm has an absolute error of 2^-25, however small the
    logarithm is. A caller that has the logarithm should pass it to
    `gdn_triton.chunk_gated_delta_rule` directly. The logarithm has no gradient at 0.
    """
    check_tensors({"alpha": alpha}, {})
    check_dtypes({"alpha": alpha}, ())
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
    """Runs a prefill, like `flashinfer.gdn_prefill.chunk_gated_delta_rule`.

    Sizes: T tokens of N sequences, packed; H heads of q, HK of k, HV of v; HO = max(H, HV).
    "Float" is float16, bfloat16, float32 or float64.

    Args:
        q: [T, H, K], k: [T, HK, K], v: [T, HV, V]; float. Either HK = H and HV is a multiple of it,
            or HK = HV and H is a multiple of that.
        g: [T, HO], float: the decay alpha, 0 to 1. None: 1.
        beta: [T, HO], float. None: 1.
        scale: factor of the output. None: K ** -0.5. FlashInfer reads 0 as None; here 0 is an
            error.
        initial_state: [N, HO, V, K], or with `state_indices` a pool [slots, HO, V, K]; float. None:
            zeros.
        output_final_state: also return the final states.
        cu_seqlens: [N + 1], int32 or int64. Required.
        use_qk_l2norm_in_kernel: normalise each q and k.
        output: [T, HO, V], float: the tensor to which o is written, directly if `output` is
            contiguous and has q's dtype, and otherwise by a copy. None: a new tensor.
        output_state: [N, HO, V, K], or the pool, to which the final states are written in its
            dtype, whether or not they are returned. It may be `initial_state`. None: a new float32
            tensor. It is required with `state_indices` and `output_final_state`.
        state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens: the state of sequence n
            after every checkpoint_every_n_tokens tokens (a multiple of 64) is written to the rows
            from checkpoint_cu_starts[n] to checkpoint_cu_starts[n + 1] - 1 of [rows, HO, V, K].
            checkpoint_cu_starts: [N + 1], int32 or int64.
        state_indices: [N], int32 or int64: the slots of the sequences, no two equal, none negative.
            If `output_state` is `initial_state`, the kernel reads and writes the pool in place.
        max_seqlen: an int, at least the length of the longest sequence. It is only checked: a value
            below T / N is an error, as in FlashInfer, and so is a value below the longest sequence
            if cu_seqlens is on the CPU. On an accelerator cu_seqlens is not read, and a value that
            is too small has no effect: every sequence may have as many checkpoints as T tokens
            allow.
        use_cp: False: no long sequence is split into parts, and a sequence gives the same bits in
            any batch, as with `GDN_BATCH_INVARIANT=1`. "auto" and True: the sizes decide.
        backend: one of the names of FlashInfer's kernels. The name is checked and has no effect.
        _cp_chunk_len: None.

    Returns:
        o [T, HO, V]; with `output_final_state` (o, final states).

    Raises:
        TypeError, ValueError: an argument that does not fit.
        NotImplementedError: an argument that is not supported, or an input that requires a
            gradient.
    """
    if use_cp != "auto" and type(use_cp) is not bool:
        raise ValueError(f'use_cp must be "auto", True or False, got {use_cp!r}')
    if _cp_chunk_len is not None:
        raise NotImplementedError(
            f"_cp_chunk_len must be None: parts have a length of their own here, got "
            f"{_cp_chunk_len!r}"
        )
    check_backend(backend, PREFILL_BACKENDS)
    scale = check_scale(scale)
    if cu_seqlens is None:
        raise ValueError("cu_seqlens must be given: the tokens are packed, got None")
    check_tensors({"q": q, "k": k, "v": v, "cu_seqlens": cu_seqlens}, {"g": g, "beta": beta})
    check_flags(
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel
    )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ValueError(f"{name} must have 3 dimensions [T, heads, size], got {list(x.shape)}")
    check_dtypes({"q": q, "k": k, "v": v, "g": g, "beta": beta}, ())
    check_devices("q", q.device, {"k": k, "v": v, "g": g, "beta": beta})
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
    if output is not None:
        check_result("output", output, "q", q.device)
        check_same_shape("output", output, v.shape)
    if state_indices is not None and output_final_state and output_state is None:
        raise ValueError(
            "output_state must be given with state_indices and output_final_state: the pool that "
            "the final states are written to"
        )
    is_direct = output is not None and output.dtype == q.dtype and output.is_contiguous()
    if not is_direct:
        states = {
            "initial_state": initial_state,
            "output_state": output_state,
            "state_checkpoints": state_checkpoints,
            "state_indices": state_indices,
        }
        tokens = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "cu_seqlens": cu_seqlens}
        check_tensors({}, states)
        check_apart({"output": output}, {**tokens, **states})
    call = prefill if use_cp is not False else _uncut_prefill
    o, final_state = call(
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
        out=output if is_direct else None,
        out_state=output_state,
        checkpoint_every_n_tokens=checkpoint_every_n_tokens,
        state_checkpoints=state_checkpoints,
        checkpoint_slots=checkpoint_rows(
            state_checkpoints,
            checkpoint_cu_starts,
            checkpoint_every_n_tokens,
            v.unsqueeze(0),
            cu_seqlens,
        ),
    )
    o = o.squeeze(0)
    if output is not None:
        o = output if is_direct else fill(output, o)
    return o if final_state is None else (o, final_state)


def _uncut_prefill(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    with invariant_calls():
        return prefill(*args, **kwargs)


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
