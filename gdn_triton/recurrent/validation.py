"""Validates the calls of the recurrence before a launch. Errors have the order and the words of
`gdn_triton.chunk.validation`, and nothing is read from an accelerator.

`validate_sequences` and `validate_step` check only shapes, strides, dtypes and flags, and callers
store their results. At every call `gdn_triton._host.slots.check_contents` checks contents that the
host can read.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from gdn_triton._host.arguments import (
    check_devices,
    check_dtypes,
    check_eigenvalues,
    check_flags,
    check_gate,
    check_qkv,
    check_rank,
    check_shape,
    check_sizes,
    check_state,
    check_tensors,
    count_sequences,
    must,
    real_or_none,
    shape_of,
    shaped,
)
from gdn_triton._host.memory import Apart, layout_of
from gdn_triton._host.slots import LAST_SKIPPED, check_skip
from gdn_triton._host.tensors import check_written, why_unreadable
from gdn_triton.recurrent.problem import Operands, RecurrentProblem, SequenceCall, StepCall
from gdn_triton.recurrent.validation_window import (
    STEP_WRITES,
    WINDOW_NAMES,
    check_pool_dtype,
    check_window_step,
    window_span,
)

# The largest number of tree nodes per sequence with a window.
MOST_NODES: Final = 32


def validate_sequences(call: SequenceCall) -> RecurrentProblem:
    """Checks the arguments of `gdn_triton.fused_recurrent_gated_delta_rule`."""
    x, options = call.inputs, call.options
    named = _named(x, {"state": "initial_state"})
    optional = {**named}
    required = {name: optional.pop(name) for name in ("q", "k", "v")}
    check_tensors(required, optional)
    check_flags(output_final_state=call.output_final_state, **options._asdict())
    scale = real_or_none("scale", call.scale)
    check_devices("q", x.q.device, named)
    check_rank("q", x.q, "B", "T", "H", "K")
    check_rank("k", x.k, "B", "T", "H", "K")
    check_rank("v", x.v, "B", "T", "HV", "V")
    B, T = x.q.shape[:2]
    H, HV, K, V = check_qkv(x.q, x.k, x.v, B=B, T=T)
    check_shape("g", x.g, B=B, T=T, HV=HV)
    check_shape("gk", x.gk, B=B, T=T, HV=HV, K=K)
    check_shape("gv", x.gv, B=B, T=T, HV=HV, V=V)
    if x.beta is not None and x.beta.shape not in ((B, T, HV), (B, T, HV, V)):
        either = f"{shaped(B=B, T=T, HV=HV)} or {shaped(B=B, T=T, HV=HV, V=V)}"
        raise ValueError(must("beta", f"have shape {either}", shape_of(x.beta)))
    check_dtypes(named, _INDICES)
    N = B
    if x.cu_seqlens is not None:
        N = int(count_sequences(x.cu_seqlens))
        if B != 1:
            raise ValueError(must("q", "have batch size B=1 with cu_seqlens", f"B={B}"))
    if x.state is not None:
        v_first = options.state_v_first
        check_state("initial_state", x.state, "N", N, HV=HV, K=K, V=V, state_v_first=v_first)
    gate, sigmoid = options.use_gate_in_kernel, options.use_beta_sigmoid_in_kernel
    if gate and x.g is None:
        raise ValueError(must("g", "be given with use_gate_in_kernel=True", "None"))
    check_gate(x.A_log, x.dt_bias, HV, use_gate=gate, asked="use_gate_in_kernel=True")
    if sigmoid and x.beta is None:
        raise ValueError(must("beta", "be given with use_beta_sigmoid_in_kernel=True", "None"))
    check_eigenvalues(options)
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
        state_v_first=options.state_v_first,
        use_qk_l2norm=options.use_qk_l2norm_in_kernel,
        use_gate=gate,
        use_beta_sigmoid=sigmoid,
        allow_neg_eigval=options.allow_neg_eigval,
        output_final_state=call.output_final_state,
        needs_grad=call.needs_grad or _needs_grad(x),
        unreadable=why_unreadable(named, tuple(named.values())),
    )


def validate_step(call: StepCall) -> RecurrentProblem:
    """Checks the arguments of `gdn_triton.recurrent_step`. The inputs' g holds the argument g or a,
    and their beta holds beta or b."""
    x, options, is_mixed = call.inputs, call.options, call.is_mixed
    is_raw, v_first = options.use_gate_in_kernel, options.state_v_first
    named = _step_named(x, is_mixed, is_raw)
    g_name, beta_name = ("a", "b") if is_raw else ("g", "beta")
    first = "mixed_qkv" if is_mixed else "q"
    optional = {**named}
    required = {name: optional.pop(name) for name in ("state", "read_slots")}
    for name in (first, *(() if is_mixed else ("k", "v")), g_name, beta_name):
        required[name] = optional.pop(name)
    check_tensors(required, optional)
    check_flags(
        use_qk_l2norm_in_kernel=options.use_qk_l2norm_in_kernel,
        allow_neg_eigval=options.allow_neg_eigval,
        state_v_first=v_first,
    )
    scale = real_or_none("scale", call.scale)
    check_skip(call.skip)
    assert x.state is not None and x.read_slots is not None
    assert x.g is not None and x.beta is not None
    check_devices(first, x.q.device, named)

    # Check the state first, because the sizes of a mixed tensor are derived from the state.
    packed = x.cu_seqlens is not None
    check_rank("state", x.state, "slots", "HV", *(("V", "K") if v_first else ("K", "V")))
    HV, K, V = x.state.shape[1:]
    if v_first:
        K, V = V, K
    if is_mixed:
        lead, H = _check_mixed(x.q, HV, K, V, packed)
    else:
        for name, given, dims in (("q", x.q, "H, K"), ("k", x.k, "H, K"), ("v", x.v, "HV, V")):
            _check_lead(name, given, 2, dims, packed)
        lead, H = x.q.shape[:-2], x.q.shape[-2]
        if x.q.shape[-1] != K:
            raise ValueError(must("q", f"have the K={K} channels of state", shape_of(x.q)))
        if x.v.shape[-2:] != (HV, V):
            expected = f"have the HV={HV} heads of V={V} channels of state"
            raise ValueError(must("v", expected, shape_of(x.v)))
    names = ("B" if packed else "N", "T") if len(lead) == 2 else ("T" if packed else "N",)
    sizes = dict(zip(names, lead, strict=True))
    if is_mixed:
        check_sizes(H, HV, K, V)
    else:
        check_qkv(x.q, x.k, x.v, **sizes)
    # The dtypes of a window are fixed, or derived from the dtype of k.
    judged_apart = ("state", *WINDOW_NAMES.values())
    check_dtypes({name: y for name, y in named.items() if name not in judged_apart}, _INDICES)
    check_pool_dtype(x.state, x.scales)

    # Check the sequences and slots.
    N, columns = _check_read_slots(x)
    if x.cu_seqlens is None:
        if lead[0] != N:
            expected = f"have a row for each of the N={N} read_slots"
            raise ValueError(must(first, expected, shape_of(x.q)))
        B, T = N, lead[1] if len(lead) == 2 else 1
    else:
        if count_sequences(x.cu_seqlens) != N:
            expected = f"have shape [{N + 1}], with N={N} read_slots"
            raise ValueError(must("cu_seqlens", expected, shape_of(x.cu_seqlens)))
        B, T = 1, lead[-1]
    check_shape(g_name, x.g, **sizes, HV=HV)
    check_shape(beta_name, x.beta, **sizes, HV=HV)
    every_token = False
    if x.write_slots is not None:
        if x.write_slots.shape not in ((N,), (B, T)):
            expected = f"have shape [{N}], a slot a sequence, or [{B}, {T}], a slot a token"
            raise ValueError(must("write_slots", expected, shape_of(x.write_slots)))
        every_token = x.write_slots.dim() == 2
    every_token = every_token or columns > 0
    check_written("state", x.state)
    check_written("out", x.out)
    check_gate(x.A_log, x.dt_bias, HV, use_gate=is_raw, asked="a and b")
    if options.allow_neg_eigval and not is_raw:
        raise ValueError(must("allow_neg_eigval", "come with b, not with beta", "beta"))
    if x.out is not None:
        v_dtype = x.v.dtype
        check_shape("out", x.out, **sizes, HV=HV, V=V)
        if x.out.dtype != v_dtype:
            name = "mixed_qkv" if is_mixed else "v"
            raise ValueError(must("out", f"be {v_dtype}, as {name} is", str(x.out.dtype)))
    is_varlen = x.cu_seqlens is not None
    window_rows, max_tokens = check_window_step(
        x, call.max_tokens, first=first, H=H, HV=HV, K=K, V=V, T=T, is_varlen=is_varlen
    )
    _check_parents(x, B, T, max_tokens)
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
        tile_span=_tile_span(x, max_tokens, is_mixed),
        device=x.q.device,
        scale=_resolved(scale, K),
        is_varlen=is_varlen,
        state_v_first=v_first,
        use_qk_l2norm=options.use_qk_l2norm_in_kernel,
        use_gate=is_raw,
        use_beta_sigmoid=options.use_beta_sigmoid_in_kernel,
        allow_neg_eigval=options.allow_neg_eigval,
        is_step=True,
        is_mixed=is_mixed,
        every_token=every_token,
        last_skipped=LAST_SKIPPED[call.skip],
        columns=columns,
        window_rows=window_rows,
        max_tokens=max_tokens,
        unreadable=why_unreadable(named, tuple(named.values())),
    )


def _check_read_slots(x: Operands) -> tuple[int, int]:
    """Returns N and the number of columns of read_slots, which is 0 if read_slots has one slot for
    each sequence."""
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


def _check_parents(x: Operands, B: int, T: int, most_tokens: int) -> None:
    """Checks parents. most_tokens: max_tokens of the window, 0 without a window."""
    if x.parents is None:
        return
    if x.parents.shape != (B, T):
        expected = f"have shape [{B}, {T}], a parent a token"
        raise ValueError(must("parents", expected, shape_of(x.parents)))
    if x.num_accepted_tokens is not None:
        raise ValueError(must("num_accepted_tokens", "be None with parents", "a tensor"))
    if most_tokens > 0:
        # The kernel has a bit for each token of a path.
        if most_tokens > MOST_NODES:
            expected = f"have max_tokens of at most {MOST_NODES} with parents"
            raise ValueError(must("window", expected, str(most_tokens)))
        return
    if x.write_slots is None or x.write_slots.dim() != 2:
        given = "None" if x.write_slots is None else shape_of(x.write_slots)
        expected = f"have shape [{B}, {T}], a slot a token, with parents"
        raise ValueError(must("write_slots", expected, given))


def step_memory(call: StepCall) -> Apart:
    """Returns the memory check of all steps like this one, whose arguments are valid. The check
    takes the inputs in their order. In a mixed call k and v are the same tensor as q."""
    given = _step_named(call.inputs, call.is_mixed, call.options.use_gate_in_kernel)
    first, *others = ((name, layout_of(x)) for name, x in given.items())
    again = {"k": None, "v": None} if call.is_mixed else {}
    written = ("out", "state", *(name for name in STEP_WRITES if given[name] is not None))
    return Apart({first[0]: first[1], **again, **dict(others)}, written)


# ---------------------------------------------------------------------------------- shared checks

_INDICES: Final = (
    *("read_slots", "write_slots", "cu_seqlens", "num_accepted_tokens", "parents"),
    "positions",
)


def _named(x: Operands, names: Mapping[str, str]) -> dict[str, Any]:
    """Returns the operands by the names that callers know. names: the callers' names that differ
    from the fields."""
    names = {**WINDOW_NAMES, **names}
    return {names.get(name, name): given for name, given in x._asdict().items()}


def _step_named(x: Operands, is_mixed: bool, is_raw: bool) -> dict[str, Any]:
    names = {"g": "a", "beta": "b"} if is_raw else {}
    if not is_mixed:
        return _named(x, names)
    named = _named(x, {**names, "q": "mixed_qkv"})
    return {name: given for name, given in named.items() if name not in ("k", "v")}


def _check_lead(name: str, x: Tensor, dims: int, sizes: str, packed: bool) -> None:
    """Checks that one dimension precedes the last `dims` if each sequence has one token, and that
    two dimensions precede them otherwise."""
    either = f"[T, {sizes}] or [1, T, {sizes}]" if packed else f"[N, {sizes}] or [N, T, {sizes}]"
    if x.dim() not in (dims + 1, dims + 2):
        raise ValueError(must(name, f"have shape {either}", shape_of(x)))
    if packed and x.dim() == dims + 2 and x.shape[0] != 1:
        raise ValueError(must(name, f"have shape {either} with cu_seqlens", shape_of(x)))


def _check_mixed(
    mixed: Tensor, HV: int, K: int, V: int, packed: bool
) -> tuple[tuple[int, ...], int]:
    """Checks mixed_qkv and returns its dimensions before the last, and H."""
    _check_lead("mixed_qkv", mixed, 1, "2 * H * K + HV * V", packed)
    keys = mixed.shape[-1] - HV * V
    if K < 1 or keys < 2 * K or keys % (2 * K) != 0:
        expected = (
            f"have 2 * H * K + HV * V channels, where state has {shaped(HV=HV, K=K, V=V)}: "
            f"{HV * V} more than a multiple of {2 * K}"
        )
        raise ValueError(must("mixed_qkv", expected, shape_of(mixed)))
    return tuple(mixed.shape[:-1]), keys // (2 * K)


def _resolved(scale: float | None, K: int) -> float:
    return K**-0.5 if scale is None else scale


def _needs_grad(x: Operands) -> bool:
    return torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in x)


def _tile_span(x: Operands, max_tokens: int = 0, is_mixed: bool = False) -> int:
    """Returns the number of elements of a tensor from the first to the last that a program reads at
    once."""
    rows = (x.q, x.k, x.v, x.gk, x.gv, x.beta, x.out)
    spans = [(y.shape[-1] - 1) * y.stride(-1) for y in rows if y is not None]
    if x.state is not None:
        sizes, strides = x.state.shape[2:], x.state.stride()[2:]
        spans.append(sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True)))
    if max_tokens > 1:
        # A program of a step with a window reads all tokens of a sequence at once.
        wide = 1 if is_mixed else 2
        given = ((x.q, wide), (x.k, wide), (x.v, wide), (x.out, 2), (x.g, 1), (x.beta, 1))
        for y, dims in given:
            if y is not None and (x.cu_seqlens is not None or y.dim() == dims + 2):
                row = (y.shape[-1] - 1) * y.stride(-1)
                spans.append((max_tokens - 1) * y.stride(-dims - 1) + row)
    spans += [window_span(y) for y in (x.u_rows, x.k_rows, x.g_rows) if y is not None]
    return max(spans)
