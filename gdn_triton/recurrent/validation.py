"""Judges the calls of the recurrence before anything is launched, as `gdn_triton.chunk.validation`
does those of the chunked op: the same order, the same words, nothing read from an accelerator.

What depends on shapes, strides, dtypes and flags only is judged by `validate_sequences` and
`validate_step`, whose result callers keep; contents, where the host can read them, by
`check_contents` at every call.
"""

from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor

from gdn_triton._host.arguments import (
    FLOAT_DTYPES,
    FLOATS,
    INDEX_DTYPES,
    INDICES,
    check_dtype,
    check_offsets,
    count_sequences,
    must,
    real_or_none,
    shape_of,
    shaped,
    type_of,
    value_of,
)
from gdn_triton._host.memory import Apart, layout_of
from gdn_triton._host.slots import (
    check_once,
    check_read_in_pool,
    check_readers,
    check_written_in_pool,
    final_writes,
    readers,
    token_writes,
)
from gdn_triton._host.tensors import check_written, why_unreadable
from gdn_triton.conv.problem import ConvOperands, ConvProblem
from gdn_triton.recurrent.problem import Operands, RecurrentProblem

# `skip` by name: the largest slot number that is padding.
LAST_SKIPPED: Final = {"negative": -1, "non_positive": 0}


def validate_sequences(
    x: Operands,
    *,
    scale: float | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    state_v_first: bool,
) -> RecurrentProblem:
    """Checks the arguments of `gdn_triton.fused_recurrent_gated_delta_rule`."""
    for name, given in (("q", x.q), ("k", x.k), ("v", x.v)):
        _check_tensor(name, given)
    _check_tensors(x, "initial_state")
    _check_flags(
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
    )
    scale = real_or_none("scale", scale)
    _check_devices(x, "initial_state")
    for name, given, dims in (
        ("q", x.q, "[B, T, H, K]"),
        ("k", x.k, "[B, T, H, K]"),
        ("v", x.v, "[B, T, HV, V]"),
    ):
        if given.dim() != 4:
            raise ValueError(must(name, f"have 4 dimensions {dims}", shape_of(given)))
    B, T, H, K, HV, V = _check_qkv(x.q, x.k, x.v)
    for name, maybe, shape, dims in (
        ("g", x.g, (B, T, HV), shaped(B=B, T=T, HV=HV)),
        ("gk", x.gk, (B, T, HV, K), shaped(B=B, T=T, HV=HV, K=K)),
        ("gv", x.gv, (B, T, HV, V), shaped(B=B, T=T, HV=HV, V=V)),
    ):
        if maybe is not None and maybe.shape != shape:
            raise ValueError(must(name, f"have shape {dims}", shape_of(maybe)))
    if x.beta is not None and x.beta.shape not in ((B, T, HV), (B, T, HV, V)):
        either = f"{shaped(B=B, T=T, HV=HV)} or {shaped(B=B, T=T, HV=HV, V=V)}"
        raise ValueError(must("beta", f"have shape {either}", shape_of(x.beta)))
    _check_dtypes(x, "initial_state")
    N = B
    if x.cu_seqlens is not None:
        N = int(count_sequences(x.cu_seqlens))
        if B != 1:
            raise ValueError(must("q", "have batch size B=1 with cu_seqlens", f"B={B}"))
    if x.state is not None:
        _check_state("initial_state", x.state, "N", N, HV, K, V, state_v_first)
    if use_gate_in_kernel and x.g is None:
        raise ValueError(must("g", "be given with use_gate_in_kernel=True", "None"))
    _check_gate(x, HV, use_gate_in_kernel, "use_gate_in_kernel=True")
    if use_beta_sigmoid_in_kernel and x.beta is None:
        raise ValueError(must("beta", "be given with use_beta_sigmoid_in_kernel=True", "None"))
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        expected = "come with use_beta_sigmoid_in_kernel=True"
        raise ValueError(must("allow_neg_eigval", expected, "False"))
    double = torch.float64 in (x.q.dtype, x.v.dtype)
    return RecurrentProblem(
        B=B,
        T=T,
        N=N,
        H=H,
        HV=HV,
        K=K,
        V=V,
        q_dtype=x.q.dtype,
        k_dtype=x.k.dtype,
        v_dtype=x.v.dtype,
        state_dtype=torch.float64 if double else torch.float32,
        tile_span=_tile_span(x),
        device=x.q.device,
        scale=_resolved(scale, K),
        is_varlen=x.cu_seqlens is not None,
        state_v_first=state_v_first,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        use_gate=use_gate_in_kernel,
        use_beta_sigmoid=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        output_final_state=output_final_state,
        needs_grad=_needs_grad(x),
        unreadable=_why_unreadable(x, "q", "initial_state", "g", "beta"),
    )


def validate_step(
    x: Operands,
    *,
    is_mixed: bool,
    is_raw: bool,
    scale: float | None,
    use_qk_l2norm_in_kernel: bool,
    allow_neg_eigval: bool,
    state_v_first: bool,
    skip: str,
) -> RecurrentProblem:
    """Checks the arguments of `gdn_triton.recurrent_step`. x.g and x.beta hold what came as g or a,
    and as beta or b; `is_raw`: a and b came."""
    g_name, beta_name = ("a", "b") if is_raw else ("g", "beta")
    for name, given in (
        ("state", x.state),
        ("read_slots", x.read_slots),
        *((("mixed_qkv", x.q),) if is_mixed else (("q", x.q), ("k", x.k), ("v", x.v))),
        (g_name, x.g),
        (beta_name, x.beta),
    ):
        _check_tensor(name, given)
    _check_tensors(x, "state")
    _check_flags(
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
    )
    scale = real_or_none("scale", scale)
    if type(skip) is not str or skip not in LAST_SKIPPED:
        raise ValueError(must("skip", f"be one of {', '.join(LAST_SKIPPED)}", value_of(skip)))
    assert x.state is not None and x.read_slots is not None
    assert x.g is not None and x.beta is not None
    _check_devices(x, "state", g_name, beta_name)

    # The state, from which the sizes of a mixed tensor follow.
    if x.state.dim() != 4:
        layout = "[slots, HV, V, K]" if state_v_first else "[slots, HV, K, V]"
        raise ValueError(must("state", f"have 4 dimensions {layout}", shape_of(x.state)))
    HV, K, V = x.state.shape[1:]
    if state_v_first:
        K, V = V, K
    if is_mixed:
        lead, H = _check_mixed(x.q, HV, K, V, x.cu_seqlens is not None)
    else:
        for name, given, dims in (("q", x.q, "H, K"), ("k", x.k, "H, K"), ("v", x.v, "HV, V")):
            _check_lead(name, given, 2, dims, x.cu_seqlens is not None)
        lead = x.q.shape[:-2]
        H = _check_qkv(x.q, x.k, x.v, (HV, K, V))[2]
    _check_heads(H, HV, K, V)
    _check_dtypes(x, "state", g_name, beta_name)

    # Sequences and slots.
    N, columns = _check_read_slots(x)
    if x.cu_seqlens is None:
        if lead[0] != N:
            name = "mixed_qkv" if is_mixed else "q"
            expected = f"have a row for each of the N={N} read_slots"
            raise ValueError(must(name, expected, shape_of(x.q)))
        B, T = N, lead[1] if len(lead) == 2 else 1
    else:
        if count_sequences(x.cu_seqlens) != N:
            expected = f"have shape [{N + 1}], with N={N} read_slots"
            raise ValueError(must("cu_seqlens", expected, shape_of(x.cu_seqlens)))
        B, T = 1, lead[-1]
    for name, given in ((g_name, x.g), (beta_name, x.beta)):
        if given.shape != (*lead, HV):
            raise ValueError(must(name, f"have shape {[*lead, HV]}, HV last", shape_of(given)))
    every_token = False
    if x.write_slots is not None:
        if x.write_slots.shape not in ((N,), (B, T)):
            expected = f"have shape [{N}], a slot a sequence, or [{B}, {T}], a slot a token"
            raise ValueError(must("write_slots", expected, shape_of(x.write_slots)))
        every_token = x.write_slots.dim() == 2
    every_token = every_token or columns > 0
    check_written("state", x.state)
    check_written("out", x.out)
    _check_gate(x, HV, is_raw, "a and b")
    if allow_neg_eigval and not is_raw:
        raise ValueError(must("allow_neg_eigval", "come with b, not with beta", "beta"))
    if x.out is not None:
        v_dtype = x.v.dtype
        if x.out.shape != (*lead, HV, V):
            raise ValueError(must("out", f"have shape {[*lead, HV, V]}", shape_of(x.out)))
        if x.out.dtype != v_dtype:
            name = "mixed_qkv" if is_mixed else "v"
            raise ValueError(must("out", f"be {v_dtype}, as {name} is", str(x.out.dtype)))
    if _needs_grad(x):
        raise NotImplementedError(
            "gdn_triton.recurrent_step updates states in place and has no gradient; an input "
            "requires one. Call under torch.no_grad(), or use fused_recurrent_gated_delta_rule"
        )
    return RecurrentProblem(
        B=B,
        T=T,
        N=N,
        H=H,
        HV=HV,
        K=K,
        V=V,
        q_dtype=x.q.dtype,
        k_dtype=x.k.dtype,
        v_dtype=x.v.dtype,
        state_dtype=x.state.dtype,
        tile_span=_tile_span(x),
        device=x.q.device,
        scale=_resolved(scale, K),
        is_varlen=x.cu_seqlens is not None,
        state_v_first=state_v_first,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        use_gate=is_raw,
        use_beta_sigmoid=is_raw,
        allow_neg_eigval=allow_neg_eigval,
        is_step=True,
        is_mixed=is_mixed,
        every_token=every_token,
        last_skipped=LAST_SKIPPED[skip],
        columns=columns,
        unreadable=_why_unreadable(x, "mixed_qkv" if is_mixed else "q", "state", g_name, beta_name),
    )


def _check_read_slots(x: Operands) -> tuple[int, int]:
    """N, and the columns of read_slots, 0 where it has one slot a sequence."""
    slots, accepted = x.read_slots, x.num_accepted_tokens
    assert slots is not None
    if accepted is None:
        if slots.dim() != 1:
            raise ValueError(
                must("read_slots", "have shape [N], a slot a sequence", shape_of(slots))
            )
        return slots.shape[0], 0
    if slots.dim() != 2 or slots.shape[1] < 1:
        expected = "have shape [N, S], S >= 1, with num_accepted_tokens"
        raise ValueError(must("read_slots", expected, shape_of(slots)))
    N, columns = slots.shape
    if accepted.shape != (N,):
        expected = f"have shape [N={N}], one a sequence"
        raise ValueError(must("num_accepted_tokens", expected, shape_of(accepted)))
    if x.write_slots is not None:
        raise ValueError(must("write_slots", "be None with num_accepted_tokens", "a tensor"))
    return N, columns


def step_memory(x: Operands, is_mixed: bool, is_raw: bool) -> Apart:
    """What must lie apart in the memory of steps like this one, whose operands are valid."""
    g, beta = ("a", "b") if is_raw else ("g", "beta")
    layouts = {
        "mixed_qkv" if is_mixed else "q": layout_of(x.q),
        "k": None if is_mixed else layout_of(x.k),
        "v": None if is_mixed else layout_of(x.v),
        **{name: layout_of(y) for name, y in _named(x, "state", g, beta)},
    }
    return Apart(layouts, ("out", "state"))


def check_contents(problem: RecurrentProblem | ConvProblem, x: Operands | ConvOperands) -> None:
    """What offsets and slots hold, where they are CPU tensors: elsewhere reading them would wait
    for the device, and what is refused here is undefined behaviour there."""
    if problem.device.type != "cpu":
        return
    if x.cu_seqlens is not None:
        check_offsets("cu_seqlens", x.cu_seqlens.tolist(), problem.T)
    if x.read_slots is None or x.state is None:
        return
    p, last = problem, problem.last_skipped
    if isinstance(x, Operands) and x.num_accepted_tokens is not None:
        read, write = accepted_slots(p, x)
    else:
        read = x.read_slots.tolist()
        write = read if x.write_slots is None else x.write_slots.flatten().tolist()
    check_read_in_pool(read, x.state.shape[0])
    name = "read_slots" if x.write_slots is None else "write_slots"
    if not p.every_token:
        writes = final_writes(read, write, last)
    else:
        writes = token_writes(read, write, _bounds(p, x), last)
    check_written_in_pool(name, writes, x.state.shape[0])
    check_once(name, writes)
    flags = x.has_initial_state if isinstance(x, ConvOperands) else None
    check_readers(readers(read, None if flags is None else flags.tolist(), last), writes)


def accepted_slots(
    problem: RecurrentProblem | ConvProblem, x: Operands
) -> tuple[list[int], list[int]]:
    """With num_accepted_tokens, read on the host: the slot that each sequence starts from, and
    those of all tokens."""
    assert x.read_slots is not None and x.num_accepted_tokens is not None
    p, rows = problem, x.read_slots.tolist()
    read = [
        row[accepted - 1] if 1 <= accepted <= len(row) else p.last_skipped
        for row, accepted in zip(rows, x.num_accepted_tokens.tolist(), strict=True)
    ]
    write = [p.last_skipped] * (p.B * p.T)
    for row, (start, end) in zip(rows, pairwise(_bounds(p, x)), strict=True):
        kept = row[: end - start]
        write[start : start + len(kept)] = kept
    return read, write


def _bounds(p: RecurrentProblem | ConvProblem, x: Operands | ConvOperands) -> list[int]:
    """Sequence n has the tokens from bounds[n] to bounds[n + 1] - 1 of all."""
    if x.cu_seqlens is None:
        return [n * p.T for n in range(p.N + 1)]
    bounds: list[int] = x.cu_seqlens.tolist()
    return bounds


# ---------------------------------------------------------------------------------- shared checks


def _check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(must(name, "be a torch.Tensor", type_of(x)))


def _named(x: Operands, state: str, g: str = "g", beta: str = "beta") -> list[tuple[str, Any]]:
    """The operands that may be None, by the names that callers know."""
    names = {"state": state, "g": g, "beta": beta}
    return [
        (names.get(name, name), given) for name, given in zip(x._fields[3:], x[3:], strict=True)
    ]


def _why_unreadable(x: Operands, q: str, state: str, g: str, beta: str) -> str | None:
    """A sentence why no kernel can read an operand, by the names that callers know; or None."""
    names = {"q": q, "state": state, "g": g, "beta": beta}
    return why_unreadable([names.get(name, name) for name in x._fields], x)


def _check_tensors(x: Operands, state: str) -> None:
    for name, given in _named(x, state):
        if given is not None and not isinstance(given, Tensor):
            raise TypeError(must(name, "be a torch.Tensor or None", type_of(given)))


def _check_flags(**flags: object) -> None:
    for name, flag in flags.items():
        if flag is not True and flag is not False:
            raise TypeError(must(name, "be True or False", value_of(flag)))


def _check_devices(x: Operands, state: str, g: str = "g", beta: str = "beta") -> None:
    device = x.q.device
    for name, given in (("k", x.k), ("v", x.v), *_named(x, state, g, beta)):
        if isinstance(given, Tensor) and given.device != device:
            expected = f"be on the device of the tokens, {device}"
            raise ValueError(must(name, expected, str(given.device)))


def _check_qkv(
    q: Tensor, k: Tensor, v: Tensor, sizes: tuple[int, int, int] | None = None
) -> tuple[int, int, int, int, int, int]:
    """B, T (of the first dimensions), H, K, HV, V; `sizes`: the HV, K, V that they must have."""
    lead, (H, K), (HV, V) = list(q.shape[:-2]), q.shape[-2:], v.shape[-2:]
    if sizes is not None:
        if K != sizes[1]:
            raise ValueError(must("q", f"have the K={sizes[1]} channels of state", shape_of(q)))
        if (HV, V) != (sizes[0], sizes[2]):
            expected = f"have the HV={sizes[0]} heads of V={sizes[2]} channels of state"
            raise ValueError(must("v", expected, shape_of(v)))
    if k.shape[-2] != H:
        raise ValueError(must("k", f"have the heads of q, H={H}", f"{k.shape[-2]} heads"))
    if sizes is None:
        _check_heads(H, HV, K, V)
    if k.shape != q.shape:
        raise ValueError(must("k", f"have the shape of q, {list(q.shape)}", shape_of(k)))
    if list(v.shape[:-2]) != lead:
        raise ValueError(must("v", f"have shape {[*lead, HV, V]}", shape_of(v)))
    return lead[0], lead[1] if len(lead) == 2 else 1, H, K, HV, V


def _check_heads(H: int, HV: int, K: int, V: int) -> None:
    if H < 1:
        raise ValueError(must("q", "have at least one head", f"H={H}"))
    if HV < H or HV % H != 0:
        raise ValueError(must("v", f"have a positive multiple of H={H} heads", f"HV={HV}"))
    if K < 1:
        raise ValueError(must("q", "have a key size K of at least 1", f"K={K}"))
    if V < 1:
        raise ValueError(must("v", "have a value size V of at least 1", f"V={V}"))


def _check_lead(name: str, x: Tensor, dims: int, sizes: str, packed: bool) -> None:
    """One token a sequence or several: one dimension or two before the last `dims`."""
    either = f"[T, {sizes}] or [1, T, {sizes}]" if packed else f"[N, {sizes}] or [N, T, {sizes}]"
    if x.dim() not in (dims + 1, dims + 2):
        raise ValueError(must(name, f"have shape {either}", shape_of(x)))
    if packed and x.dim() == dims + 2 and x.shape[0] != 1:
        raise ValueError(must(name, f"have shape {either} with cu_seqlens", shape_of(x)))


def _check_mixed(
    mixed: Tensor, HV: int, K: int, V: int, packed: bool
) -> tuple[tuple[int, ...], int]:
    """Checks mixed_qkv; returns its dimensions before the last, and H."""
    _check_lead("mixed_qkv", mixed, 1, "2 * H * K + HV * V", packed)
    keys = mixed.shape[-1] - HV * V
    if K < 1 or keys < 2 * K or keys % (2 * K) != 0:
        expected = (
            f"have 2 * H * K + HV * V channels, where state has {shaped(HV=HV, K=K, V=V)}: "
            f"{HV * V} more than a multiple of {2 * K}"
        )
        raise ValueError(must("mixed_qkv", expected, shape_of(mixed)))
    return tuple(mixed.shape[:-1]), keys // (2 * K)


def _check_dtypes(x: Operands, state: str, g: str = "g", beta: str = "beta") -> None:
    for name, given in (("q", x.q), ("k", x.k), ("v", x.v), *_named(x, state, g, beta)):
        if not isinstance(given, Tensor):
            continue
        if name in ("read_slots", "write_slots", "cu_seqlens", "num_accepted_tokens"):
            check_dtype(name, given, INDEX_DTYPES, INDICES)
        else:
            check_dtype(name, given, FLOAT_DTYPES, FLOATS)


def _check_state(
    name: str, state: Tensor, count: str, N: int, HV: int, K: int, V: int, state_v_first: bool
) -> None:
    layout = (N, HV, V, K) if state_v_first else (N, HV, K, V)
    if state.shape != layout:
        heads = shaped(HV=HV, V=V, K=K) if state_v_first else shaped(HV=HV, K=K, V=V)
        expected = f"[{count}={N}, {heads[1:]}"
        raise ValueError(
            must(name, f"have shape {expected} (state_v_first={state_v_first})", shape_of(state))
        )


def _check_gate(x: Operands, HV: int, use_gate: bool, asked: str) -> None:
    if use_gate:
        if x.A_log is None:
            raise ValueError(must("A_log", f"be given with {asked}", "None"))
        for name, given in (("A_log", x.A_log), ("dt_bias", x.dt_bias)):
            if given is not None and given.shape != (HV,):
                raise ValueError(must(name, f"have shape {shaped(HV=HV)}", shape_of(given)))
        return
    for name, given in (("A_log", x.A_log), ("dt_bias", x.dt_bias)):
        if given is not None:
            raise ValueError(must(name, f"be None without {asked}", "a tensor"))


def _resolved(scale: float | None, K: int) -> float:
    return K**-0.5 if scale is None else scale


def _needs_grad(x: Operands) -> bool:
    return torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in x)


def _tile_span(x: Operands) -> int:
    """Elements from the first to the last that a program reads of a tensor at once."""
    rows = (x.q, x.k, x.v, x.gk, x.gv, x.beta, x.out)
    spans = [(y.shape[-1] - 1) * y.stride(-1) for y in rows if y is not None]
    if x.state is not None:
        sizes, strides = x.state.shape[2:], x.state.stride()[2:]
        spans.append(sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True)))
    return max(spans)
