"""The public recurrence: `fused_recurrent_gated_delta_rule` for sequences, and `recurrent_step` for
decoding from a pool of states."""

import inspect
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from gdn_triton._host.arguments import refuse_head_first
from gdn_triton._host.deprecated import deprecated_state_layout
from gdn_triton._host.records import Options, constructor, made, new_options
from gdn_triton._host.tensors import is_traced
from gdn_triton.recurrent.operators import traced_sequences, traced_step
from gdn_triton.recurrent.plans import judge_step, run_sequences, run_step
from gdn_triton.recurrent.problem import Operands, SequenceCall, StepCall

# The adapters of engines import these from here.
from gdn_triton.recurrent.ring_problem import MOST_DRAFTS as MOST_DRAFTS
from gdn_triton.recurrent.ring_problem import MOST_ROWS as MOST_ROWS
from gdn_triton.recurrent.ring_problem import RingOperands as RingOperands
from gdn_triton.recurrent.rings import fold_rings as fold_rings
from gdn_triton.recurrent.rings import ring_drafts as ring_drafts
from gdn_triton.recurrent.rings import ring_step as ring_step
from gdn_triton.recurrent.validation import validate_step
from gdn_triton.recurrent.window import StepWindow, check_kind

new_operands = constructor(Operands)
new_sequence_call = constructor(SequenceCall)
new_step_call = constructor(StepCall)


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
    head_first: None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes the gated delta rule token by token, for decoding and for a few tokens at a time.

    For each sequence and value head `hv`, with key head `hv // (HV // H)` and a state S of [K, V]:

        S_t = diag(exp(gk_t)) exp(g_t) S_{t-1} diag(exp(gv_t))
        S_t = S_t + k_t (x) beta_t * (v_t - S_t^T k_t)        S_t on the right is the decayed one
        o_t = scale * S_t^T q_t

    With g alone this is equation 10 of Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024
    (arXiv:2412.06464). The parameters, their order and their defaults are those of
    flash-linear-attention 0.6.0. `docs/decode.md` says how it differs from
    `gdn_triton.chunk_gated_delta_rule`.

    Sizes: B batch, T tokens, H heads of q and k, HV heads of v (a multiple of H), K and V channels
    of a head, N sequences. "Float" is float16, bfloat16, float32 or float64. Any tensor may be a
    strided view; none is copied. All tensors are on one device.

    Args:
        q, k: [B, T, H, K], float; they may differ in dtype. K is at most 256 in the Triton backend
            and unlimited in the reference.
        v: [B, T, HV, V], float; any V.
        g: [B, T, HV], float: the natural logarithm of the decay, <= 0, -inf allowed. None: 0. With
            `use_gate_in_kernel`, the gate before its activation.
        gk: [B, T, HV, K], float: natural logarithms of a decay of each row of the state. None: 0.
        gv: [B, T, HV, V], float: natural logarithms of a decay of each column of the state. None:
            0.
        beta: [B, T, HV], or [B, T, HV, V] with one number for each value channel; float, 0 to 1 (to
            2 with negative eigenvalues). None: 1. With `use_beta_sigmoid_in_kernel`, its logit.
        scale: factor of the output, any real number. None: K ** -0.5.
        initial_state: [N, HV, K, V], or [N, HV, V, K] with `state_v_first`; float. None: zeros.
        output_final_state: return the states after the last token.
        use_qk_l2norm_in_kernel: normalise each q and k, x / sqrt(sum(x^2) + 1e-6), in float32. The
            result stays float32; `chunk_gated_delta_rule` rounds it to the input's dtype.
        use_gate_in_kernel: the decay is -exp(A_log) * softplus(g + dt_bias), in float32.
        A_log: [HV], float. Needed by, and only allowed with, `use_gate_in_kernel`.
        dt_bias: [HV], float. Only with `use_gate_in_kernel`. None: 0.
        use_beta_sigmoid_in_kernel: beta is a logit, and the rule uses its sigmoid.
        allow_neg_eigval: use 2 * sigmoid(beta). Only with `use_beta_sigmoid_in_kernel`.
        state_v_first: both states are [N, HV, V, K].
        cu_seqlens: [N + 1], int32 or int64: the N sequences are packed in one row (B = 1), sequence
            n in the tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1. The offsets start at 0, do not
            decrease, and end at or before T. A sequence may be empty: its final state is its
            initial state. The o of tokens at or after cu_seqlens[-1] is 0. The host does not read
            the offsets on an accelerator. Therefore the offsets are not checked there, and may
            change in place between calls or replays of a CUDA graph. The reference backend reads
            the offsets, and waits for the device.
        transpose_state_layout: deprecated name of `state_v_first`.
        head_first: raises a TypeError. flash-linear-attention has removed this option: tokens come
            before heads.

    Returns:
        o: [B, T, HV, V], the dtype of v, contiguous.
        final_state: laid out like `initial_state`, float32 (float64 if q or v is float64), a new
            tensor; None unless `output_final_state`.

    `GDN_BACKEND` chooses the backend (`gdn_triton._host.backends`). The reference is
    differentiable. The Triton kernel has no backward and refuses a call that needs gradients,
    before any launch. With `auto` such a call runs in the reference, which is slow on a GPU and
    issues a warning there.

    Raises:
        TypeError, ValueError: an argument that does not fit, with its name, the expected and the
            given value; nothing has been launched. ValueError also for an unknown `GDN_BACKEND`.
        RuntimeError: the backend asked for by name cannot run this call, with its reason.
    """
    if head_first is not None:
        refuse_head_first(head_first)
    if transpose_state_layout is not None:
        state_v_first = deprecated_state_layout(state_v_first, transpose_state_layout)
    call = new_sequence_call(
        inputs=new_operands(
            q=q,
            k=k,
            v=v,
            g=g,
            gk=gk,
            gv=gv,
            beta=beta,
            A_log=A_log,
            dt_bias=dt_bias,
            state=initial_state,
            cu_seqlens=cu_seqlens,
        ),
        options=new_options(
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            state_v_first=state_v_first,
            use_gate_in_kernel=use_gate_in_kernel,
        ),
        scale=scale,
        output_final_state=output_final_state,
    )
    if is_traced(q):
        return traced_sequences(call)
    return run_sequences(call)


fused_recurrent_gdn = fused_recurrent_gated_delta_rule


def recurrent_step(
    state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor | None = None,
    *,
    num_accepted_tokens: Tensor | None = None,
    parents: Tensor | None = None,
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    mixed_qkv: Tensor | None = None,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    allow_neg_eigval: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    scale: float | None = None,
    state_v_first: bool = False,
    skip: str = "negative",
    cu_seqlens: Tensor | None = None,
    out: Tensor | None = None,
    window: StepWindow | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Runs one decode step, or several tokens, from a pool of states that is updated in place.

    The rule is that of `gdn_triton.fused_recurrent_gated_delta_rule`. Sequence n starts from the
    state in slot read_slots[n]. Its last state is written to slot write_slots[n], or the state
    after each token is written to that token's slot. The state is rounded to the pool's dtype after
    every token, so a call of several tokens gives the same bits as several calls of one token.
    `docs/decode.md` shows decoding, verifying speculated tokens and CUDA graphs.

    Sizes are as in `gdn_triton.fused_recurrent_gated_delta_rule`, with N sequences. Tokens have one
    of these layouts:

        [N, ...]            one token a sequence
        [N, T, ...]         T tokens a sequence
        [T, ...], [1, T, ...] with cu_seqlens: the tokens of all sequences, packed

    Any tensor may be a strided view; none is copied. All tensors are on one device. "Float" is
    float16, bfloat16, float32 or float64. The call writes `state` and `out` in place, and autograd
    sees the writes. No two elements of `state` and `out` may share an address, and neither tensor
    may share memory with another argument.

    Args:
        state: [slots, HV, K, V], or [slots, HV, V, K] with `state_v_first`; float, or int8 with the
            scales of a window. Written in place. The stride between slots may be any number.
        read_slots: [N], int32 or int64: the slot of each sequence's state. A slot that is padding
            (`skip`) skips its sequence: no state is written, and its o is 0.
        write_slots: int32 or int64. [N]: the slot for each sequence's state after its last token.
            [N, T], or packed [1, T]: the slot for the state after each token. A state whose write
            slot is padding is not stored. None: read_slots. At most one state may be written to a
            slot, and only the sequence that writes a slot may read it. On an accelerator this is
            not checked; violations, and slots past the pool, are undefined behaviour. The write
            slots of skipped sequences, and of tokens of no sequence, are not used.
        num_accepted_tokens: [N], int32 or int64, for verifying drafts: the number of tokens of the
            previous call that were accepted. Then read_slots is [N, S], the slots for the states
            after each token of a sequence, and write_slots is None. Sequence n starts from slot
            read_slots[n, num_accepted_tokens[n] - 1], and the state after its token t is written to
            slot read_slots[n, t]. States after more than S tokens are not stored. A sequence whose
            number is not in 1 to S is skipped. None: read_slots is [N].
        parents: [N, T], or packed [1, T], int32 or int64: the tokens of a sequence are the nodes of
            trees. Token i starts from the state after token parents[n, i] of its sequence, an
            earlier token, or, for -1, from the sequence's own state. Without a window write_slots
            must have a slot for each token. None of these slots may be the sequence's read slot,
            except the first token's slot if no other token has the parent -1. A token whose slot is
            padding may be the parent of the next token only. With a window, whose max_tokens is at
            most 32, `gdn_triton.accept_window` accepts the tokens of one path. On an accelerator
            these conditions are not checked, and violations are undefined behaviour. Excludes
            num_accepted_tokens. None: each token follows the one before it.
        q, k: [.., H, K], float. v: [.., HV, V], float.
        mixed_qkv: [.., 2 * H * K + HV * V], float: q, k and v concatenated, instead of q, k and v.
            H is derived from the state's sizes.
        g, beta: [.., HV], float: the natural logarithm of the decay, and the write strength.
        a, b, A_log, dt_bias: the inputs of the activations, instead of g and beta: g = -exp(A_log)
            * softplus(a + dt_bias) and beta = sigmoid(b), in float32. a, b are [.., HV], A_log and
            dt_bias [HV], float; dt_bias may be None.
        allow_neg_eigval: beta = 2 * sigmoid(b). Only with b.
        use_qk_l2norm_in_kernel: normalise each q and k, x / sqrt(sum(x^2) + 1e-6), in float32.
        scale: factor of the output, any real number. None: K ** -0.5.
        state_v_first: the pool is [slots, HV, V, K].
        skip: which slots are padding: "negative", or "non_positive" where slot 0 is unused.
        cu_seqlens: [N + 1], int32 or int64: the tokens of sequence n are cu_seqlens[n] to
            cu_seqlens[n + 1] - 1. The offsets start at 0, do not decrease, and end at or before T.
            A sequence may be empty: its state is copied from its read slot to its write slot. The o
            of tokens at or after cu_seqlens[-1] is 0.
        out: [.., HV, V], the dtype of v, any strides: the tensor to which o is written. None: a new
            tensor.
        window: the records of the last tokens of each slot, from `gdn_triton.make_window`. The step
            writes a record of each token, writes each head's state once in a fold period, and
            otherwise only reads states. The pool and the records together then hold the state of a
            slot, and only steps with this window and `gdn_triton.fold_window` may read or write it.
            Excludes write_slots and num_accepted_tokens. A sequence has at most window.max_tokens
            tokens in a call. In a packed call on an accelerator this is not checked, and more
            tokens are undefined behaviour.
        positions: [N], int32 or int64, with window: the number of tokens of each sequence before
            the call, at least 0 and below 2^30. After a call at position p with T tokens the next
            position is p + 1 to p + T: p plus the number of accepted tokens. Drafted tokens are
            thus accepted without copying states. A position must not be less than window.start of
            the slot, and no call of a sequence may be repeated. On an accelerator neither condition
            is checked, and violations are undefined behaviour. The positions of skipped sequences,
            and of sequences without tokens in the call, are not used.

    Returns:
        o: [.., HV, V], the dtype of v; `out` if that was given.

    The host does not read slots, offsets and positions on an accelerator, so they may change in
    place between replays of a CUDA graph. The reference backend reads these tensors, and waits for
    the device.

    Raises:
        TypeError, ValueError: an argument that does not fit, with its name, the expected and the
            given value; nothing has been launched or written. The contents of slots, offsets and
            positions are checked if they are CPU tensors.
        NotImplementedError: an input requires a gradient; a step has no backward.
        RuntimeError: the backend that `GDN_BACKEND` asks for cannot run this call.
    """
    q, k, v, g, beta = _in_place_of(q=q, k=k, v=v, mixed_qkv=mixed_qkv, g=g, beta=beta, a=a, b=b)
    # CPython passes more than 15 keywords in a dictionary, which takes 0.6 us more.
    operands = new_operands(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        A_log=A_log,
        dt_bias=dt_bias,
        state=state,
        read_slots=read_slots,
        write_slots=write_slots,
        cu_seqlens=cu_seqlens,
        out=out,
        num_accepted_tokens=num_accepted_tokens,
        parents=parents,
        positions=positions,
    )
    call = new_step_call(
        inputs=operands if window is None else _with_window(operands, window),
        options=new_options(
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel=a is not None,
            allow_neg_eigval=allow_neg_eigval,
            state_v_first=state_v_first,
            use_gate_in_kernel=a is not None,
        ),
        scale=scale,
        skip=skip,
        is_mixed=mixed_qkv is not None,
        max_tokens=None if window is None else window.max_tokens,
    )
    if is_traced(state):
        return traced_step(call)
    return run_step(call)


def _in_place_of(
    *,
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    mixed_qkv: Tensor | None,
    g: Tensor | None,
    beta: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
) -> tuple[Any, Any, Any, Any, Any]:
    """Returns q, k, v, g and beta of a `recurrent_step`. a and b are stored as g and beta, and
    mixed_qkv as q, k and v. Validation refuses a call that lacks one of them."""
    if mixed_qkv is not None:
        _refuse("mixed_qkv", q=q, k=k, v=v)
        q = k = v = mixed_qkv
    if a is not None:
        _refuse("a", g=g, beta=beta)
        g, beta = a, b
    elif b is not None:
        _refuse("g", b=b)
    return q, k, v, g, beta


def _with_window(operands: Operands, window: StepWindow) -> Operands:
    """Returns the operands with the tensors of a window."""
    check_kind(window)
    u_rows, k_rows, g_rows, call_rows, start, _, scales, _ = window
    return operands._replace(
        u_rows=u_rows,
        k_rows=k_rows,
        g_rows=g_rows,
        call_rows=call_rows,
        start=start,
        scales=scales,
    )


def step_call(given: Mapping[str, Any]) -> StepCall:
    """Builds the call from all arguments of `recurrent_step`, by name."""
    is_raw, window = given["a"] is not None, given["window"]
    q, k, v, g, beta = _in_place_of(**{name: given[name] for name in _REPLACED})
    tensors = {**given, "q": q, "k": k, "v": v, "g": g, "beta": beta}
    operands = new_operands(**{name: tensors[name] for name in _TENSORS})
    raw = {"use_beta_sigmoid_in_kernel": is_raw, "use_gate_in_kernel": is_raw}
    return new_step_call(
        inputs=operands if window is None else _with_window(operands, window),
        options=made(Options, {**given, **raw}),
        scale=given["scale"],
        skip=given["skip"],
        is_mixed=given["mixed_qkv"] is not None,
        max_tokens=None if window is None else window.max_tokens,
    )


_DEFAULTS: Final = {
    name: parameter.default
    for name, parameter in inspect.signature(recurrent_step).parameters.items()
}
_REPLACED: Final = ("q", "k", "v", "mixed_qkv", "g", "beta", "a", "b")
_TENSORS: Final = tuple(name for name in Operands._fields if name in _DEFAULTS)


def call_of(*args: Tensor | None, **options: Any) -> StepCall:
    """Returns the call that `recurrent_step` would make of these arguments."""
    given = {**_DEFAULTS, **dict(zip(_DEFAULTS, args, strict=False)), **options}
    if len(given) > len(_DEFAULTS):
        unknown = ", ".join(sorted(given.keys() - _DEFAULTS.keys()))
        raise TypeError(f"recurrent_step has no argument {unknown}")
    return step_call(given)


def check_step(*args: Tensor | None, **options: Any) -> None:
    """Raises the errors that `recurrent_step` would raise for these arguments, and writes nothing.
    A caller uses this check before it writes something itself, or before the first of two steps. In
    a trace the check does nothing, because there the operator of the step checks shapes."""
    if torch.compiler.is_compiling():
        return
    call = call_of(*args, **options)
    if is_traced(call.inputs.state):
        validate_step(call)
    else:
        judge_step(call)


def _refuse(chosen: str, **others: Tensor | None) -> None:
    for name, x in others.items():
        if x is not None:
            raise ValueError(f"{name} must be None with {chosen}, got a {type(x).__name__}")
