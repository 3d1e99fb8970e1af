"""The rule of SGLang's Gated DeltaNet layers on this package's ops. The functions have the
parameters, order and defaults of SGLang 0.5.23, which need not be installed.

States are value-first, g is the logarithm of the decay, and a negative slot is padding: in decoding
its o is 0, and its state is not changed. If rows of a batch share a slot, as SGLang's padded rows
share its reserved slot 0, the state in that slot is undefined afterwards. (On CPU tensors, shared
slots are an error.)
"""

from typing import Any

import torch
from torch import Tensor

from gdn_triton._host.arguments import (
    check_devices,
    check_dtypes,
    check_flags,
    check_rank,
    check_tensors,
    must,
    shape_of,
)
from gdn_triton.chunk.prefill.api import chunk_prefill
from gdn_triton.constants import DEFAULT_CHUNK_SIZE
from gdn_triton.integrations._decode import (
    check_softplus,
    check_tokens,
    draft_states,
    gates_of_tokens,
    packed_decode,
    refuse,
)
from gdn_triton.integrations._lengths import offsets_on_host
from gdn_triton.integrations._results import check_below, check_indices
from gdn_triton.recurrent.api import check_step, recurrent_step


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
    """Runs a prefill, like the function of this name in `sglang.kernels.ops.attention.fla.chunk`.

    q, k: [B, T, H, K]. v: [B, T, HV, V]. g, beta: [B, T, HV], g the logarithm of the decay.
    initial_state: the pool [slots, HV, V, K], to which final states are written unless
    `inplace_update` is False. initial_state_indices: [N], int32 or int64. Both are required, as in
    SGLang. cu_seqlens: [N + 1]. head_first: False.

    Returns o [B, T, HV, V] in the dtype of q, None, and h, the state before each chunk of 64
    tokens, in the dtype of k: [B, ceil(T / 64), HV, V, K], or packed [1, T // 64 + N, HV, V, K],
    sequence after sequence. Rows past the last chunk are undefined. SGLang has no such rows,
    because it reads the number of chunks from the device.

    A sequence with a negative slot starts from zeros, as in SGLang, and its final state is not
    stored.

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
    slots, name = initial_state_indices, "initial_state_indices"
    N = check_tokens(v, slots, name, cu_seqlens)
    check_tensors({"k": k, "g": g, "initial_state": initial_state}, {})
    device = initial_state.device
    check_devices("initial_state", device, {"k": k, "v": v, "cu_seqlens": cu_seqlens})
    check_flags(inplace_update=inplace_update)
    check_rank("initial_state", initial_state, "slots", "HV", "V", "K")
    floats = {"k": k, "initial_state": initial_state}
    check_dtypes({**floats, "cu_seqlens": cu_seqlens}, ("cu_seqlens",))
    check_indices(name, slots, "initial_state", device)
    if slots.shape != (N,):
        raise ValueError(f"{name} must have shape [N={N}], got {list(slots.shape)}")
    if initial_state.shape[0] == 0:
        raise ValueError(must("initial_state", "have a slot at least", shape_of(initial_state)))
    check_below(name, slots, initial_state.shape[0], "slots of initial_state")
    B, T = v.shape[:2]
    h, rows = _chunk_states(k, initial_state, slots, B, T, cu_seqlens)
    o, _ = chunk_prefill(
        initial_state,
        slots.clamp(min=0),
        slots if inplace_update else torch.full_like(slots, -1),
        has_initial_state=slots >= 0,
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        scale=scale,
        state_v_first=True,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=offsets_on_host(cu_seqlens),
        checkpoint_every_n_tokens=0 if rows is None else DEFAULT_CHUNK_SIZE,
        state_checkpoints=None if rows is None else h,
        checkpoint_slots=rows,
    )
    h = h[:-1]
    return o, None, h.unsqueeze(0) if cu_seqlens is not None else h.unflatten(0, (B, -1))


def _chunk_states(
    k: Tensor, pool: Tensor, slots: Tensor, B: int, T: int, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Returns (h, rows). h: the states before each chunk, with the states before first chunks
    copied from the pool, and one further row for sequences without chunks. rows: [N, M], the row of
    h for each sequence's state after 64, 128, ... tokens, or -1 if no chunk follows. rows is None
    if no sequence can have a second chunk."""
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
    before = pool.index_select(0, slots.clamp(min=0))
    before = torch.where((slots >= 0)[:, None, None, None], before, 0).to(h.dtype)
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
    """Decodes one token per sequence, like the function of this name in
    `sglang.kernels.ops.attention.fla.fused_recurrent`.

    mixed_qkv: [B, 2 * H * K + HV * V], q, k and v concatenated. a, b: [B, HV]. A_log, dt_bias:
    [HV]. initial_state: the pool [slots, HV, V, K], updated in place at ssm_state_indices [B]. out:
    [B, 1, HV, V], to which o is written.

    Returns (out, initial_state). The errors are those of `gdn_triton.recurrent_step`. beta stays
    float32; SGLang's function rounds beta to the dtype of b.
    """
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
        "negative",
    )


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
    """Decodes tokens or verifies drafted tokens, like the function of this name in
    `sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent`.

    q, k: [B, T, H, K]. v: [B, T, HV, V]. a, b: [B, T, HV], or [B * T, HV]. A_log, dt_bias: [HV].
    initial_state_source: the pool [slots, HV, V, K]; sequence n's state is in slot
    initial_state_indices[n], and is updated there unless `disable_state_update` is set. cu_seqlens:
    [N + 1]. There may be more indices than sequences.

    intermediate_states_buffer: [rows, steps, HV, V, K], of the pool's dtype; only with
    `disable_state_update`. The state after token t of sequence n is written to
    [intermediate_state_indices[n], t] if t is below steps. The indices of sequences that are not
    padding must differ and not be negative; the indices of padding are not used. The start states
    of the sequences are first copied to their first step in the buffer. cache_steps is not read,
    because the buffer's shape has the number of steps.

    retrieve_parent_token: [N, steps], with intermediate_states_buffer: each sequence has `steps`
    tokens, which are the nodes of a tree. Token t starts from the state after token
    retrieve_parent_token[n, t] of its sequence. The first token is the root and starts from the
    sequence's own state.

    The state is rounded to the pool's dtype after every token, as when tokens are decoded one by
    one. SGLang rounds only the states that it writes, and continues a chain in float32.

    Returns o, [B, T, HV, V] in the dtype of v.

    Raises:
        NotImplementedError: an argument that is not supported (key-wise gates, `is_kda` and
            `lower_bound`; raw values of drafts in rings; `match_cutedsl_decode`; another softplus
            than 1.0 and 20.0; a tree without a buffer; a buffer without `disable_state_update`), or
            an input that requires a gradient.
        TypeError, ValueError, RuntimeError: see `gdn_triton.recurrent_step`.
    """
    rings = (replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta)
    refuse("is_kda", is_kda, "the gate is one number a head")
    refuse("lower_bound", lower_bound is not None, "the gate is -exp(A_log) * softplus")
    refuse("cache_ring", cache_ring or any(x is not None for x in rings), "there are no rings")
    refuse("match_cutedsl_decode", match_cutedsl_decode, "it is another kernel's rounding")
    names = ("softplus_beta", "softplus_threshold")
    check_softplus(names, softplus_beta, softplus_threshold)
    return _step(
        {**gates_of_tokens(v, a=a, b=b), "A_log": A_log, "dt_bias": dt_bias},
        (q, k, v),
        initial_state_source,
        initial_state_indices,
        scale,
        use_qk_l2norm_in_kernel,
        cu_seqlens,
        disable_state_update,
        (intermediate_states_buffer, intermediate_state_indices),
        retrieve_parent_token,
    )


def fused_recurrent_gated_delta_rule_update(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state_source: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    disable_state_update: bool = False,
    disable_output_calculation: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: Tensor | None = None,
) -> Tensor:
    """Runs the recurrence of jet_nemotron's layer, like the function of this name in
    `sglang.kernels.ops.attention.fla.fused_recurrent`.

    q, k: [B, T, H, K]. v: [B, T, HV, V]. g, beta: [B, T, HV], g the logarithm of the decay; beta
    None: 1. The other arguments and the result are those of
    `fused_sigmoid_gating_delta_rule_update`. o is always computed; in SGLang
    `disable_output_calculation` leaves o undefined.
    """
    if initial_state_source is None or initial_state_indices is None:
        raise ValueError(
            "initial_state_source and initial_state_indices must be given: the pool of states, and "
            "the slot of each sequence"
        )
    if beta is None:
        check_tensors({"v": v}, {})
        beta = v.new_ones(()).expand(v.shape[:3])
    return _step(
        {"g": g, "beta": beta},
        (q, k, v),
        initial_state_source,
        initial_state_indices,
        scale,
        use_qk_l2norm_in_kernel,
        cu_seqlens,
        disable_state_update,
        (intermediate_states_buffer, intermediate_state_indices),
        retrieve_parent_token,
    )


def _step(
    gates: dict[str, Any],
    qkv: tuple[Tensor, Tensor, Tensor],
    pool: Tensor,
    slots: Tensor,
    scale: float | None,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor | None,
    disable_state_update: bool,
    drafted: tuple[Tensor | None, Tensor | None],
    tree: Tensor | None,
) -> Tensor:
    """Runs a step. drafted: the buffer of the states after each token, and the row of each sequence
    in the buffer. tree: the parent of each token of a sequence, [rows, T]."""
    q, k, v = qkv
    buffer, rows = drafted
    names = {
        "indices": "intermediate_state_indices",
        "pool": "initial_state_source",
        "slots": "initial_state_indices",
    }
    N = check_tokens(v, slots, names["slots"], cu_seqlens)
    check_flags(disable_state_update=disable_state_update)
    check_rank(names["slots"], slots, "N")
    slots = slots[:N]
    step: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        **gates,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "scale": scale,
        "state_v_first": True,
        "cu_seqlens": cu_seqlens,
    }
    if buffer is None:
        refuse("retrieve_parent_token", tree is not None, "a tree needs a state for each token")
        write_slots = torch.full_like(slots, -1) if disable_state_update else None
        return recurrent_step(pool, slots, write_slots, **step)
    if not disable_state_update or rows is None:
        raise NotImplementedError(
            "intermediate_states_buffer must come with disable_state_update=True and with "
            "intermediate_state_indices: a call writes to the buffer or to the pool"
        )
    check_tensors({names["indices"]: rows}, {})
    check_rank(names["indices"], rows, "N")
    drafts = draft_states(
        buffer, rows[:N], pool, slots, v.shape[1], cu_seqlens, names=names, others={}
    )
    if tree is not None:
        step["parents"] = _parents(tree, N, v, cu_seqlens)
    check_step(drafts.rows, drafts.read_slots, drafts.write_slots, **step)
    drafts.begin()
    return recurrent_step(drafts.rows, drafts.read_slots, drafts.write_slots, **step)


def _parents(tree: Tensor, N: int, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Returns the parents in the form of `gdn_triton.recurrent_step`, where the root of a tree has
    the parent -1. In SGLang a root is its own parent."""
    name = "retrieve_parent_token"
    check_tensors({name: tree}, {})
    check_dtypes({name: tree}, (name,))
    check_devices("v", v.device, {name: tree})
    check_rank(name, tree, "N", "T")
    tokens = v.shape[1] if cu_seqlens is None else v.shape[1] // max(N, 1)
    if tree.shape[0] < N or tree.shape[1] != tokens or N * tokens != v.shape[0] * v.shape[1]:
        expected = f"have a row of all tokens for each of {N} sequences of equal length"
        raise ValueError(must(name, expected, shape_of(tree)))
    is_root = torch.arange(tokens, device=tree.device) == 0
    parents = torch.where(is_root, -1, tree[:N])
    return parents if cu_seqlens is None else parents.reshape(1, -1)
