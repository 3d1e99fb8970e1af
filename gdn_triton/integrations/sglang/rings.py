"""ReplaySSM in SGLang's Gated DeltaNet layers: its functions, with the parameters, their order and
their defaults of SGLang 0.5.23, which is not needed.

SGLang keeps a ring of records with each state: normalised keys, the u of each token, and log
decays. It counts the records, folds all heads of a slot in one call, and caches a prefix up to the
token that the state in memory holds. These functions therefore read and write SGLang's own rings.
"""

from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from gdn_triton._host.arguments import check_rank, check_tensors, must, shape_of
from gdn_triton.integrations._results import check_apart
from gdn_triton.recurrent.api import (
    MOST_DRAFTS,
    MOST_ROWS,
    RingOperands,
    fold_rings,
    ring_drafts,
    ring_step,
)

_TOKENS: Final = {"state": "initial_state", "d": "d_cache", "k_rows": "k_cache"}
_STEP: Final = {
    **_TOKENS,
    "g_rows": "g_cache",
    "slots": "ssm_state_indices",
    "counts": "write_pos",
    "flags": "force_flush",
    **dict.fromkeys(("q", "k", "v"), "mixed_qkv"),
}
_DRAFTS: Final = {
    "state": "checkpoint_state",
    "d": "d_cache",
    "k_rows": "k_cache",
    "g_rows": "g_cache",
    "d_low": "rawv_cache",
    "k_low": "rawk_cache",
    "slots": "ssm_state_indices",
    "ring_slots": "replay_indices",
    "counts": "write_pos",
    "bases": "cache_base",
    "flags": "is_flush",
    "cu_seqlens": "query_start_loc",
}
_FOLD: Final = {
    **_DRAFTS,
    "d_low": "d_residual_cache",
    "k_low": "k_residual_cache",
    "slots": "state_batch_indices",
    "accepted": "accept_lens",
    "track_slots": "mamba_track_indices",
    "track_steps": "mamba_steps_to_track",
}
_WRITTEN: Final = ("state", "d", "k_rows", "g_rows", "d_low", "k_low", "out")
_CURSORS: Final = ("counts", "bases", "flags")


def fused_recurrent_gdn_replayssm_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    d_cache: Tensor,
    k_cache: Tensor,
    g_cache: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    write_pos: Tensor,
    force_flush: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    is_kda: bool = False,
    block_v: int | None = None,
    num_warps: int = 1,
    num_stages: int = 3,
    nk: int = 2,
) -> tuple[Tensor, Tensor]:
    """A token a sequence, as the function of that name in
    `sglang.kernels.ops.attention.linear.fused_recurrent_linear_replayssm`.

    mixed_qkv: [B, 2 * H * K + HV * V]. a, b: [B, HV]. A_log, dt_bias: [HV]. initial_state: the pool
    [slots, HV, V, K]. d_cache: [slots, HV, L, V]. k_cache: [slots, H, L, K]. g_cache:
    [slots, HV, L], float32. out: [B, 1, HV, V]. ssm_state_indices: [B]; negative is padding.
    write_pos: [B], the records of each sequence. In row L - 1, or where force_flush [B] is not 0,
    the state takes the records and the token; otherwise the token's record is written.

    The records keep the bits of their dtype, which SGLang's own kernel rounds to those of the
    tokens first. beta stays float32. `block_v`, `num_warps`, `num_stages` and `nk` are the tile of
    SGLang's kernel, and have no effect.

    Returns (out, initial_state).

    Raises:
        NotImplementedError: `is_kda`, more than 32 rows, or an input that requires a gradient.
        TypeError, ValueError, RuntimeError: see `gdn_triton.recurrent.rings.ring_step`.
    """
    if is_kda:
        raise NotImplementedError("is_kda is not served: the gate is one number a head")
    check_tensors({"mixed_qkv": mixed_qkv, "initial_state": initial_state, "out": out}, {})
    check_rank("mixed_qkv", mixed_qkv, "B", "channels")
    check_rank("initial_state", initial_state, "slots", "HV", "V", "K")
    HV, V, K = initial_state.shape[1:]
    H, rest = divmod(mixed_qkv.shape[1] - HV * V, max(2 * K, 1))
    if rest != 0 or H < 1:
        expected = f"have 2 * H * K + HV * V channels with HV={HV}, K={K} and V={V}"
        raise ValueError(must("mixed_qkv", expected, shape_of(mixed_qkv)))
    if out.dim() != 4 or out.shape[1] != 1:
        raise ValueError(f"out must have shape [B, 1, HV, V], got {list(out.shape)}")
    q, k, v = mixed_qkv.split((H * K, H * K, HV * V), -1)
    x = RingOperands(
        state=initial_state,
        d=d_cache,
        k_rows=k_cache,
        g_rows=g_cache,
        slots=ssm_state_indices,
        counts=write_pos,
        q=q.unflatten(-1, (H, K)),
        k=k.unflatten(-1, (H, K)),
        v=v.unflatten(-1, (HV, V)),
        a=a,
        b=b,
        A_log=A_log,
        dt_bias=dt_bias,
        out=out.squeeze(1),
        flags=force_flush,
    )
    _check_apart(x, _STEP, _WRITTEN, mixed_qkv=mixed_qkv)
    ring_step(x, scale=scale, use_qk_l2norm=use_qk_l2norm_in_kernel, names=_STEP)
    return out, initial_state


def gdn_replayssm_spec_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    checkpoint_state: Tensor,
    d_cache: Tensor,
    k_cache: Tensor,
    g_cache: Tensor,
    rawv_cache: Tensor | None,
    rawk_cache: Tensor | None,
    beta_cache: Tensor | None,
    out: Tensor,
    query_start_loc: Tensor,
    ssm_state_indices: Tensor,
    replay_indices: Tensor,
    write_pos: Tensor,
    cache_base: Tensor,
    is_flush: Tensor,
    max_cache_len: int,
    max_spec_len: int,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    null_block_id: int = 0,
    block_v: int = 64,
    num_warps: int = 1,
    num_stages: int = 2,
    nk: int = 2,
    bs_min: int = 4,
    block_v_flush: int = 64,
    num_warps_flush: int = 1,
    num_stages_flush: int = 2,
    nk_flush: int = 2,
    launch_mode: str = "both",
    dot_precision: str = "tf32",
) -> Tensor:
    """The verification of drafted tokens, as the function of that name in
    `sglang.kernels.ops.attention.linear.gdn_replayssm_spec_decode` with `launch_mode="verify"`,
    which is how SGLang calls it.

    q, k: [T, H, K]. v, out: [T, HV, V]. a, b: [T, HV]. query_start_loc: [N + 1].
    checkpoint_state: the pool [slots, HV, V, K], which is read. d_cache, k_cache, g_cache: the
    rings of requests, [rings, HV, L, V], [rings, H, L, K] and [rings, HV, L]; rawv_cache,
    rawk_cache: what the first two round off, or None. replay_indices: [N], the ring of each
    sequence. write_pos, cache_base, is_flush: by ring, its records, the row of the oldest one, and
    whether SGLang has still to fold it, in which case the sequence is left out.

    The products use all parts of the records, in float32; `dot_precision` and the sizes of tiles
    belong to SGLang's kernel, and have no effect.

    Returns out. The records of all tokens are written to the rows after those that count.

    Raises:
        NotImplementedError: another `launch_mode`, `beta_cache` (the raw values of drafts), more
            than 32 rows or 8 tokens a sequence, or an input that requires a gradient.
        TypeError, ValueError, RuntimeError: see `gdn_triton.recurrent.rings.ring_step`.
    """
    if launch_mode != "verify":
        raise NotImplementedError(f'launch_mode must be "verify", got {launch_mode!r}')
    if beta_cache is not None:
        raise NotImplementedError("beta_cache must be None: rings have records, not raw values")
    x = RingOperands(
        state=checkpoint_state,
        d=d_cache,
        k_rows=k_cache,
        g_rows=g_cache,
        slots=ssm_state_indices,
        counts=write_pos,
        q=q,
        k=k,
        v=v,
        a=a,
        b=b,
        A_log=A_log,
        dt_bias=dt_bias,
        out=out,
        d_low=rawv_cache,
        k_low=rawk_cache,
        ring_slots=replay_indices,
        bases=cache_base,
        flags=is_flush,
        cu_seqlens=query_start_loc,
    )
    _check_apart(x, _DRAFTS, _WRITTEN[1:])
    _check_needed(x, _DRAFTS, "ring_slots", "bases", "flags", "cu_seqlens")
    if max_cache_len != d_cache.shape[2]:
        expected = f"be the {d_cache.shape[2]} rows of d_cache"
        raise ValueError(must("max_cache_len", expected, repr(max_cache_len)))
    ring_drafts(
        x,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        most=max_spec_len,
        last_skipped=null_block_id,
        names=_DRAFTS,
    )
    return out


def commit_gdn_replayssm_circular(
    *,
    checkpoint_state: Tensor,
    d_cache: Tensor,
    k_cache: Tensor,
    g_cache: Tensor,
    d_residual_cache: Tensor | None,
    k_residual_cache: Tensor | None,
    state_batch_indices: Tensor,
    replay_indices: Tensor,
    write_pos: Tensor,
    cache_base: Tensor,
    is_flush: Tensor,
    accept_lens: Tensor,
    mamba_track_indices: Tensor | None = None,
    mamba_steps_to_track: Tensor | None = None,
    null_block_id: int = -1,
) -> None:
    """The fold of all layers' rings after drafts were accepted, as the function of that name in
    `sglang.kernels.ops.attention.linear.gdn_replayssm_spec_decode`.

    checkpoint_state: [layers, slots, HV, V, K]; the rings have the layers first too. write_pos
    counts the accepted tokens already. Rings whose is_flush is not 0 are folded and emptied. The
    state after token mamba_steps_to_track[n] of the accept_lens[n] last tokens is written to slot
    mamba_track_indices[n], where neither is negative.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `gdn_replayssm_spec_decode`.
    """
    has_track = mamba_track_indices is not None and mamba_steps_to_track is not None
    x = RingOperands(
        state=checkpoint_state,
        d=d_cache,
        k_rows=k_cache,
        g_rows=g_cache,
        slots=state_batch_indices,
        counts=write_pos,
        d_low=d_residual_cache,
        k_low=k_residual_cache,
        ring_slots=replay_indices,
        bases=cache_base,
        flags=is_flush,
        accepted=accept_lens,
        track_slots=mamba_track_indices if has_track else None,
        track_steps=mamba_steps_to_track if has_track else None,
    )
    _check_apart(x, _FOLD, ("state", *_CURSORS))
    _check_needed(x, _FOLD, "ring_slots", "bases", "flags", "accepted")
    fold_rings(x, last_skipped=null_block_id, names=_FOLD)


def is_left_to_sglang(given: Mapping[str, Any]) -> bool:
    """Whether a call of one of these functions, by its keywords, is one that it refuses for its
    size or its mode."""
    d_cache = given.get("d_cache")
    return (
        bool(given.get("is_kda"))
        or given.get("launch_mode", "verify") != "verify"
        or given.get("beta_cache") is not None
        or given.get("max_spec_len", 1) > MOST_DRAFTS
        or (d_cache is not None and d_cache.shape[-2] > MOST_ROWS)
    )


def _check_apart(
    x: RingOperands, names: Mapping[str, str], written: tuple[str, ...], **read: Tensor
) -> None:
    """read: tensors in place of those operands that are views of them."""
    replaced = {field for field, name in names.items() if name in read}
    given = {f: y for f, y in x._asdict().items() if f not in replaced}
    check_apart(
        {names.get(f, f): given.pop(f) for f in written},
        {**{names.get(f, f): y for f, y in given.items()}, **read},
    )


def _check_needed(x: RingOperands, names: Mapping[str, str], *fields: str) -> None:
    check_tensors({names[f]: getattr(x, f) for f in fields}, {})
