"""SGLang's Gated DeltaNet layers on this package's ops: its three functions, and `enable`, which
puts ours in their place.

The parameters, their order and their defaults are those of SGLang 0.5.23, which is not needed for
the functions themselves:

- `chunk_gated_delta_rule`: prefill from and to a pool of states;
- `fused_recurrent_gated_delta_rule_packed_decode`: a token a sequence, from one `mixed_qkv`;
- `fused_sigmoid_gating_delta_rule_update`: decoding from q, k and v, and the verification of
  drafted tokens, with the state after each of them kept in a buffer.

States are value-first, g is the logarithm of the decay, and a negative slot is padding: its o is 0
and its state is not touched. Rows of a batch that share a slot, as SGLang's padded rows share its
reserved slot 0, leave in it what nobody may read. (CPU tensors are checked, and this is an error.)

SGLang's kernel for "triton" finds the functions as globals of its module at every call, so that
`enable` needs to run only once in a process, before or after a model is built: from an entry point
of the group `sglang.srt.plugins` (`docs/integrations.md` shows one).
"""

import functools
import importlib
import inspect
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gdn_triton.chunk.prefill import chunk_prefill
from gdn_triton.constants import DEFAULT_CHUNK_SIZE
from gdn_triton.recurrent.api import recurrent_step

# Where SGLang's kernel for --linear-attn-backend triton looks the functions up.
MODULE = "sglang.srt.layers.attention.linear.kernels.gdn_triton"

_logger = logging.getLogger("gdn_triton")
_replaced: dict[str, tuple[Any, Any]] = {}  # name: what was there, ours


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    inplace_update: bool = True,
) -> tuple[Tensor, None, Tensor]:
    """Prefill, as `sglang.kernels.ops.attention.fla.chunk`'s of that name.

    q, k: [B, T, H, K]. v: [B, T, HV, V]. g, beta: [B, T, HV], g the logarithm of the decay.
    initial_state: the pool [slots, HV, V, K], which final states are written to unless
    `inplace_update` is False. initial_state_indices: [N], int32 or int64. Both are needed, as they
    are there. cu_seqlens: [N + 1]. head_first: False.

    Returns o [B, T, HV, V] in the dtype of q, None, and h, the state before each chunk of 64
    tokens, in the dtype of k: [B, ceil(T / 64), HV, V, K], or packed [1, T // 64 + N, HV, V, K],
    one sequence's chunks after the other's. Rows past the last chunk, which SGLang does not have
    since it asks the device for their number, and those of padded sequences are undefined.

    Raises:
        NotImplementedError: `head_first`, or an input that requires a gradient.
        TypeError, ValueError, RuntimeError: see `gdn_triton.chunk_prefill`.
    """
    if head_first:
        raise NotImplementedError("head_first must be False: tokens come before heads here")
    if initial_state is None or initial_state_indices is None:
        raise ValueError(
            "initial_state and initial_state_indices must be given: the pool of states, and the "
            "slot of each sequence"
        )
    B, T = v.shape[:2]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_state_indices.shape != (N,):
        raise ValueError(
            f"initial_state_indices must have shape [N={N}], got "
            f"{list(initial_state_indices.shape)}"
        )
    h, rows = _chunk_states(k, initial_state, initial_state_indices, B, T, cu_seqlens)
    o, _ = chunk_prefill(
        initial_state,
        initial_state_indices,
        None if inplace_update else torch.full_like(initial_state_indices, -1),
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        scale=scale,
        state_v_first=True,
        cu_seqlens=cu_seqlens,
        checkpoint_every_n_tokens=0 if rows is None else DEFAULT_CHUNK_SIZE,
        state_checkpoints=None if rows is None else h,
        checkpoint_slots=rows,
    )
    h = h[:-1]
    return o, None, h.unsqueeze(0) if cu_seqlens is not None else h.unflatten(0, (B, -1))


def _chunk_states(
    k: Tensor, pool: Tensor, slots: Tensor, B: int, T: int, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(h, rows): the states before each chunk, those of first chunks filled in from the pool, with
    one row more for the sequences that have no chunk; and [N, M], the row of h for each sequence's
    state after 64, 128, ... tokens, -1 where no chunk follows. None if no sequence has a second."""
    size, device = DEFAULT_CHUNK_SIZE, k.device
    N = slots.shape[0]
    if cu_seqlens is None:
        chunks = torch.full((N,), -(-T // size), dtype=torch.int64, device=device)
        most = N * -(-T // size)
    else:
        chunks = (cu_seqlens.diff() + size - 1) // size
        most = T // size + N
    first = chunks.cumsum(0) - chunks
    h = k.new_empty((most + 1, *pool.shape[1:]))
    before = pool.index_select(0, slots.clamp(min=0)).to(h.dtype)
    h.index_copy_(0, torch.where(chunks > 0, first, most), before)
    if T <= size:
        return h, None
    later = torch.arange(1, -(-T // size), device=device)
    return h, torch.where(later < chunks[:, None], first[:, None] + later, -1)


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
    """A token a sequence, as `sglang.kernels.ops.attention.fla.fused_recurrent`'s of that name.

    mixed_qkv: [B, 2 * H * K + HV * V], q, k and v side by side. a, b: [B, HV]. A_log, dt_bias:
    [HV]. initial_state: the pool [slots, HV, V, K], updated in place at ssm_state_indices [B].
    out: [B, 1, HV, V], where o is written.

    Returns (out, initial_state). The errors are those of `gdn_triton.recurrent_step`. beta stays
    float32; SGLang rounds it to the dtype of b here.
    """
    if out.dim() != 4 or out.shape[1] != 1:
        raise ValueError(f"out must have shape [B, 1, HV, V], got {list(out.shape)}")
    recurrent_step(
        initial_state,
        ssm_state_indices,
        mixed_qkv=mixed_qkv,
        a=a,
        b=b,
        A_log=A_log,
        dt_bias=dt_bias,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        scale=scale,
        state_v_first=True,
        out=out.squeeze(1),
    )
    return out, initial_state


def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    softplus_beta: float,
    softplus_threshold: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    is_kda: bool = False,
    lower_bound: float | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: Tensor | None = None,
    cache_ring: bool = False,
    replayssm_rawv: Tensor | None = None,
    replayssm_rawk: Tensor | None = None,
    replayssm_g: Tensor | None = None,
    replayssm_beta: Tensor | None = None,
    match_cutedsl_decode: bool = False,
) -> Tensor:
    """Decoding and the verification of drafted tokens, as the function of that name in
    `sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent`.

    q, k: [B, T, H, K]. v: [B, T, HV, V]. a, b: [B, T, HV], or [B * T, HV]. A_log, dt_bias: [HV].
    initial_state_source: the pool [slots, HV, V, K]; sequence n's state is in slot
    initial_state_indices[n], and updated there unless `disable_state_update`. cu_seqlens: [N + 1].
    The indices may be more than there are sequences.

    intermediate_states_buffer: [rows, steps, HV, V, K], of the pool's dtype; only with
    `disable_state_update`. The state after token t of sequence n is written to
    [intermediate_state_indices[n], t], if there are so many steps; no index is negative, and of
    sequences that are not padding none comes twice. The states that the sequences start from are
    copied to their first step before. cache_steps is not read: the buffer has its own.

    The state is rounded to the pool's dtype after every token, as it is when tokens are decoded one
    by one; SGLang rounds what it writes and goes on in float32.

    Returns o, [B, T, HV, V] in the dtype of v.

    Raises:
        NotImplementedError: what is not served (key-wise gates, `is_kda` and `lower_bound`; drafts
            that are trees, `retrieve_parent_token`; ReplaySSM's rings; `match_cutedsl_decode`;
            another softplus than 1.0 and 20.0; a buffer without `disable_state_update`), or an
            input that requires a gradient.
        TypeError, ValueError, RuntimeError: see `gdn_triton.recurrent_step`.
    """
    rings = (replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta)
    _refuse("is_kda", is_kda, "the gate is one number a head")
    _refuse("lower_bound", lower_bound is not None, "the gate is -exp(A_log) * softplus")
    _refuse("retrieve_parent_token", retrieve_parent_token is not None, "drafts are chains")
    _refuse("cache_ring", cache_ring or any(x is not None for x in rings), "there are no rings")
    _refuse("match_cutedsl_decode", match_cutedsl_decode, "it is another kernel's rounding")
    if softplus_beta != 1.0 or softplus_threshold != 20.0:
        raise NotImplementedError(
            "softplus_beta must be 1.0 and softplus_threshold 20.0, got "
            f"{softplus_beta!r} and {softplus_threshold!r}"
        )
    N = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    pool, slots = initial_state_source, initial_state_indices[:N]
    write_slots = torch.full_like(slots, -1) if disable_state_update else None
    if intermediate_states_buffer is not None:
        if not disable_state_update or intermediate_state_indices is None:
            raise NotImplementedError(
                "intermediate_states_buffer must come with disable_state_update=True and with "
                "intermediate_state_indices: a call writes to the buffer or to the pool"
            )
        pool, slots, write_slots = _draft_states(
            intermediate_states_buffer,
            intermediate_state_indices[:N],
            pool,
            slots,
            v.shape[1],
            cu_seqlens,
        )
    return recurrent_step(
        pool,
        slots,
        write_slots,
        q=q,
        k=k,
        v=v,
        a=a.reshape(v.shape[:3]),
        b=b.reshape(v.shape[:3]),
        A_log=A_log,
        dt_bias=dt_bias,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        scale=scale,
        state_v_first=True,
        cu_seqlens=cu_seqlens,
    )


def _draft_states(
    buffer: Tensor,
    indices: Tensor,
    pool: Tensor,
    slots: Tensor,
    T: int,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, read_slots, write_slots): the buffer as one pool, holding the states that the
    sequences start from; where these are, and where the state after each token goes.

    A step reads and writes one pool, so these states are copied first: a state read and one written
    more, beside the one that is read and the T that are written.
    """
    if buffer.dim() != 5 or buffer.shape[2:] != pool.shape[1:] or buffer.dtype != pool.dtype:
        raise ValueError(
            "intermediate_states_buffer must have shape [rows, steps, HV, V, K] and dtype with "
            f"[HV, V, K] = {list(pool.shape[1:])} and {pool.dtype} of the pool, got "
            f"{list(buffer.shape)} and {buffer.dtype}"
        )
    steps = buffer.shape[1]
    # Fewer steps may be in use than there is room for: of a row, or of what its stride says.
    unit = buffer.stride(1) if steps > 1 else buffer.stride(0)
    pitch, rest = divmod(buffer.stride(0), unit)
    if rest or pitch < steps:
        raise ValueError(
            "intermediate_states_buffer must have rows a whole number of steps apart, got strides "
            f"{list(buffer.stride())}"
        )
    count = (buffer.shape[0] - 1) * pitch + steps
    rows = buffer.as_strided((count, *buffer.shape[2:]), (unit, *buffer.stride()[2:]))
    first = indices.long() * pitch
    rows.index_copy_(0, first, pool.index_select(0, slots.clamp(min=0)))
    read_slots = torch.where(slots < 0, -1, first)
    step = torch.arange(T, device=buffer.device)
    if cu_seqlens is None:
        start, kept = read_slots[:, None], step < steps
    else:
        step = step.to(cu_seqlens.dtype)
        # Tokens after the last sequence belong to none.
        sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), step, right=True)
        is_token = sequence < slots.shape[0]
        sequence = sequence.clamp(max=slots.shape[0] - 1)
        step = (step - cu_seqlens[sequence])[None]
        start, kept = read_slots[sequence][None], is_token & (step < steps)
    return rows, read_slots, torch.where(kept & (start >= 0), start + step, -1)


def _refuse(name: str, is_given: bool, reason: str) -> None:
    if is_given:
        raise NotImplementedError(f"{name} is not served: {reason}")


# ---------------------------------------------------------------------------------------- the hook

FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        chunk_gated_delta_rule,
        fused_recurrent_gated_delta_rule_packed_decode,
        fused_sigmoid_gating_delta_rule_update,
    )
}


def enable() -> None:
    """Puts our functions in the place of SGLang's, where its kernel for "triton" calls them. A
    second call changes nothing that is in place.

    Drafts that are trees stay SGLang's, and so does all that its other kernels do.

    Raises:
        ImportError: SGLang, or one of its functions, is not there.
        RuntimeError: one takes an argument that is not known here.
    """
    module = _module()
    for name, ours in FUNCTIONS.items():
        if name in _replaced and vars(module)[name] is _replaced[name][1]:
            continue
        theirs = vars(module)[name]
        if name == "fused_sigmoid_gating_delta_rule_update":
            ours = _chains_only(ours, theirs)
        _replaced[name] = theirs, ours
        setattr(module, name, ours)
    _logger.info("SGLang runs Gated DeltaNet layers with gdn_triton, where it asks for triton.")


def disable() -> None:
    """Puts back what `enable` replaced. What has been replaced once more since is left alone."""
    if _replaced:
        module = importlib.import_module(MODULE)
        for name, (theirs, ours) in _replaced.items():
            if vars(module)[name] is ours:
                setattr(module, name, theirs)
        _replaced.clear()


def _chains_only(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(ours)
    def update(*args: Any, **kwargs: Any) -> Tensor:
        # SGLang passes it by name.
        is_tree = kwargs.get("retrieve_parent_token") is not None
        return (theirs if is_tree else ours)(*args, **kwargs)

    return update


def _module() -> ModuleType:
    """SGLang's module, if its functions are the ones that are known here."""
    try:
        module = importlib.import_module(MODULE)
    except ImportError as error:
        raise ImportError(f"gdn_triton.integrations.sglang finds no {MODULE}: {error}") from error
    for name, ours in FUNCTIONS.items():
        if not hasattr(module, name):
            raise ImportError(f"gdn_triton.integrations.sglang finds no {name} in {MODULE}")
        theirs = inspect.signature(getattr(module, name)).parameters
        unknown = sorted(theirs.keys() - inspect.signature(ours).parameters.keys())
        if unknown:
            raise RuntimeError(
                f"SGLang's {name} takes {', '.join(unknown)}, which gdn_triton does not know: it "
                "was written for SGLang 0.5.23"
            )
    return module
