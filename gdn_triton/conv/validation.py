"""Validates the arguments of the convolution alone, in a step and before the preparation."""

from __future__ import annotations

import functools
from typing import Final, NamedTuple

import torch
from torch import Tensor

from gdn_triton._host.arguments import (
    FLAG_DTYPES,
    FLOAT_DTYPES,
    FLOATS,
    INDEX_DTYPES,
    INDICES,
    check_dtype,
    check_tensors,
    count_sequences,
    must,
    shape_of,
    shaped,
    value_of,
)
from gdn_triton._host.memory import Apart, Layout, layout_of
from gdn_triton._host.slots import LAST_SKIPPED, check_contents, check_parents, check_skip
from gdn_triton._host.tensors import check_written, resolved, why_unreadable
from gdn_triton.conv.problem import ConvOperands, ConvProblem
from gdn_triton.prep.problem import Sizes
from gdn_triton.prep.validation import validate_post_conv

ACTIVATIONS: Final = {"silu": True, None: False}
# The arguments that may be None.
_OPTIONAL: Final = (
    *("bias", "state", "read_slots", "write_slots", "has_initial_state", "cu_seqlens"),
    *("num_accepted_tokens", "parents"),
)


class ConvArguments(NamedTuple):
    """The arguments of a caller. x may lack the batch dimension or, in a step, the token
    dimension."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    activation: str | None
    state: Tensor | None
    read_slots: Tensor | None
    write_slots: Tensor | None
    has_initial_state: Tensor | None
    skip: str
    cu_seqlens: Tensor | None
    num_accepted_tokens: Tensor | None = None
    parents: Tensor | None = None


class Form(NamedTuple):
    """name: the name of x in errors. is_step: tokens have the layouts of
    `gdn_triton.recurrent_step`."""

    name: str = "x"
    is_step: bool = False


PLAIN: Final = Form()
STEP: Final = Form(is_step=True)
PREPARED: Final = Form("mixed_qkv")
# The names of the arguments for each name of x.
_NAMES: Final = {
    form.name: (form.name, *ConvArguments._fields[1:]) for form in (PLAIN, STEP, PREPARED)
}


def validate_conv(args: ConvArguments, form: Form) -> ConvProblem:
    """Checks the arguments of `gdn_triton.causal_conv1d`, which documents them.

    The order is: types, devices, ranks, sizes, dtypes, sequences, the state and its slots. Raises
    TypeError or ValueError with the argument, the expected and the given value, and
    NotImplementedError for a gradient that does not exist. `check_contents` checks the contents of
    slots and offsets at run time.
    """
    x, weight, bias, state, cu_seqlens = args.x, args.weight, args.bias, args.state, args.cu_seqlens
    _check_types(args, form)
    packed = cu_seqlens is not None
    _check_rank(x, form, packed)
    if weight.dim() != 2:
        raise ValueError(must("weight", "have 2 dimensions [D, W]", shape_of(weight)))
    D, W = x.shape[-1], weight.shape[1]
    if D < 1:
        raise ValueError(must(form.name, "have at least one channel", shape_of(x)))
    if weight.shape[0] != D or W < 1:
        expected = f"have shape {shaped(D=D)[:-1]}, W >= 1]"
        raise ValueError(must("weight", expected, shape_of(weight)))
    if bias is not None and bias.shape != (D,):
        raise ValueError(must("bias", f"have shape {shaped(D=D)}", shape_of(bias)))
    for name, given in ((form.name, x), ("weight", weight), ("bias", bias), ("state", state)):
        if given is not None:
            check_dtype(name, given, FLOAT_DTYPES, FLOATS)

    B, T = _batch(x, form, packed)
    N = B
    if cu_seqlens is not None:
        check_dtype("cu_seqlens", cu_seqlens, INDEX_DTYPES, INDICES)
        N = count_sequences(cu_seqlens)
    _check_state(args, form, B, T, N, D, W)
    trained = (x, weight) if bias is None else (x, weight, bias)
    needs_grad = torch.is_grad_enabled() and any(y.requires_grad for y in trained)
    _check_gradients(args, form, needs_grad)
    return ConvProblem(
        B=B,
        T=T,
        N=N,
        D=D,
        W=W,
        dtype=x.dtype,
        device=x.device,
        silu=ACTIVATIONS[args.activation],
        last_skipped=LAST_SKIPPED[args.skip],
        every_token=args.write_slots is not None and args.write_slots.dim() == 2,
        has_state=state is not None,
        wide=any(y.dtype == torch.float64 for y in trained),
        needs_grad=needs_grad,
        unreadable=why_unreadable(_NAMES[form.name], args),
        columns=0 if state is None or args.num_accepted_tokens is None else state.shape[2],
    )


def _check_types(args: ConvArguments, form: Form) -> None:
    optional = {name: getattr(args, name) for name in _OPTIONAL}
    check_tensors({form.name: args.x, "weight": args.weight}, optional)
    if type(args.activation) not in (str, type(None)) or args.activation not in ACTIVATIONS:
        raise ValueError(must("activation", 'be "silu" or None', value_of(args.activation)))
    check_skip(args.skip)
    device = args.x.device
    for name, given in zip(args._fields, args, strict=True):
        if isinstance(given, Tensor) and given.device != device:
            expected = f"be on the device of {form.name}, {device}"
            raise ValueError(must(name, expected, str(given.device)))


def _check_rank(x: Tensor, form: Form, packed: bool) -> None:
    forms = "[T, D] or [B, T, D]"
    if packed:
        forms = "[T, D] or [1, T, D] with cu_seqlens"
    elif form.is_step:
        forms = "[N, D] or [N, T, D]"
    if x.dim() not in (2, 3) or (packed and x.dim() == 3 and x.shape[0] != 1):
        raise ValueError(must(form.name, f"have shape {forms}", shape_of(x)))


def _batch(x: Tensor, form: Form, packed: bool) -> tuple[int, int]:
    """Returns B and T of x [B, T, D]."""
    if x.dim() == 3:
        return x.shape[0], x.shape[1]
    return (x.shape[0], 1) if form.is_step and not packed else (1, x.shape[0])


def _check_state(args: ConvArguments, form: Form, B: int, T: int, N: int, D: int, W: int) -> None:
    state = args.state
    if state is None:
        for name in (
            *("read_slots", "write_slots", "has_initial_state", "num_accepted_tokens", "parents"),
        ):
            if getattr(args, name) is not None:
                raise ValueError(must(name, "be None without state", "a tensor"))
        return
    if args.num_accepted_tokens is not None:
        _check_accepted(args, N, D, W)
    elif state.dim() != 3 or state.shape[1:] != (D, W - 1):
        expected = f"have shape [slots, D={D}, W - 1={W - 1}]"
        raise ValueError(must("state", expected, shape_of(state)))
    if torch.promote_types(args.x.dtype, state.dtype) != state.dtype:
        expected = f"have a dtype that holds that of {form.name}, {args.x.dtype}"
        raise ValueError(must("state", expected, str(state.dtype)))
    check_written("state", state)
    if args.read_slots is None:
        if args.write_slots is not None:
            raise ValueError(must("write_slots", "come with read_slots", "read_slots=None"))
        if state.shape[0] != N:
            expected = f"have a slot for each of the N={N} sequences, without read_slots"
            raise ValueError(must("state", expected, shape_of(state)))
    elif args.read_slots.shape != (N,):
        expected = f"have shape [N={N}], a slot a sequence"
        raise ValueError(must("read_slots", expected, shape_of(args.read_slots)))
    if args.write_slots is not None and args.write_slots.shape not in ((N,), (B, T)):
        expected = f"have shape [{N}], a slot a sequence, or [{B}, {T}], a slot a token"
        raise ValueError(must("write_slots", expected, shape_of(args.write_slots)))
    _check_parents(args, B, T)
    flags = args.has_initial_state
    if flags is not None and flags.shape != (N,):
        expected = f"have shape [N={N}], a flag a sequence"
        raise ValueError(must("has_initial_state", expected, shape_of(flags)))
    for name, slots in (("read_slots", args.read_slots), ("write_slots", args.write_slots)):
        if slots is not None:
            check_dtype(name, slots, INDEX_DTYPES, INDICES)
    if flags is not None:
        check_dtype("has_initial_state", flags, FLAG_DTYPES, "bool")


def _check_accepted(args: ConvArguments, N: int, D: int, W: int) -> None:
    """Checks the arguments whose rules differ with num_accepted_tokens."""
    state, accepted = args.state, args.num_accepted_tokens
    assert state is not None and accepted is not None
    if W < 2:
        raise ValueError(must("weight", "have W >= 2 with num_accepted_tokens", f"W={W}"))
    if state.dim() != 3 or state.shape[1] != D or state.shape[2] < W - 1:
        expected = f"have shape [slots, D={D}, at least W - 1={W - 1}] with num_accepted_tokens"
        raise ValueError(must("state", expected, shape_of(state)))
    if accepted.shape != (N,):
        expected = f"have shape [N={N}], one a sequence"
        raise ValueError(must("num_accepted_tokens", expected, shape_of(accepted)))
    check_dtype("num_accepted_tokens", accepted, INDEX_DTYPES, INDICES)
    for name in ("write_slots", "has_initial_state"):
        if getattr(args, name) is not None:
            raise ValueError(must(name, "be None with num_accepted_tokens", "a tensor"))


def _check_parents(args: ConvArguments, B: int, T: int) -> None:
    """The other arguments of such a call are judged as without parents."""
    parents = args.parents
    if parents is None:
        return
    if parents.shape != (B, T):
        raise ValueError(
            must("parents", f"have shape [{B}, {T}], a parent a token", shape_of(parents))
        )
    check_dtype("parents", parents, INDEX_DTYPES, INDICES)
    if args.num_accepted_tokens is not None:
        raise ValueError(must("num_accepted_tokens", "be None with parents", "a tensor"))
    if args.write_slots is None or args.write_slots.dim() != 2:
        given = "None" if args.write_slots is None else shape_of(args.write_slots)
        expected = f"have shape [{B}, {T}], a slot a token, with parents"
        raise ValueError(must("write_slots", expected, given))


def _check_gradients(args: ConvArguments, form: Form, needs_grad: bool) -> None:
    if not torch.is_grad_enabled():
        return
    if args.state is not None and args.state.requires_grad:
        raise NotImplementedError(
            "state is updated in place and has no gradient, and requires one: detach it"
        )
    if form.is_step and needs_grad:
        raise NotImplementedError(
            "gdn_triton.causal_conv1d_update has no gradient; an input requires one. Call under "
            "torch.no_grad(), or use causal_conv1d"
        )


def operands(
    problem: ConvProblem, args: ConvArguments, form: Form, prep: PrepArguments | None = None
) -> ConvOperands:
    """Returns the tensors, with x as a view [B, T, D]. Checks that written memory, also of a
    preparation in the same pass, is not shared, and checks slots and offsets where the host can
    read them."""
    p = problem
    x = args.x.view(p.B, p.T, p.D) if args.x.dim() == 3 else _with_batch(args.x, p)
    given = ConvOperands(
        x=x,
        weight=args.weight,
        bias=args.bias,
        state=args.state,
        read_slots=args.read_slots,
        write_slots=args.write_slots,
        has_initial_state=args.has_initial_state,
        cu_seqlens=args.cu_seqlens,
        num_accepted_tokens=args.num_accepted_tokens,
        parents=args.parents,
    )
    if given.state is not None and p.unreadable is None:  # else it may have no address
        tensors = given if prep is None else (*given, *prep.tensors)
        _memory(form.name, tuple(map(layout_of, tensors))).check(tensors)
    check_contents(p, given, given.has_initial_state)
    check_parents(p, given, reads_states=False)
    return resolved(given)


@functools.lru_cache(1024)
def _memory(x_name: str, layouts: tuple[Layout | None, ...]) -> Apart:
    """layouts: the layouts of the operands, and then those of a preparation, if there is one."""
    names = (x_name, *ConvOperands._fields[1:], *PREP_TENSORS)
    return Apart(dict(zip(names, layouts, strict=False)), ("state",))


def _with_batch(x: Tensor, p: ConvProblem) -> Tensor:
    return x.unsqueeze(0) if p.B == 1 and p.T == x.shape[0] else x.unsqueeze(1)


# ------------------------------------------------------------------------- before the preparation


class PrepArguments(NamedTuple):
    """A caller's arguments of the preparation."""

    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    num_k_heads: int
    head_k_dim: int
    head_v_dim: int
    apply_l2norm: bool
    output_g_exp: bool

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.a, self.b, self.A_log, self.dt_bias


PREP_TENSORS: Final = ("a", "b", "A_log", "dt_bias")


def validate_conv_prep(args: ConvArguments, prep: PrepArguments) -> tuple[ConvProblem, Sizes]:
    """Checks the arguments of `gdn_triton.fused_conv_prep`: the convolution's, then the others."""
    problem = validate_conv(args, PREPARED)
    sizes = validate_post_conv(args.x, *prep, first="mixed_qkv", ranks=(2, 3))
    # If no kernel can convolve x, no kernel gets a result to prepare.
    return problem, sizes if problem.unreadable is None else sizes._replace(
        unreadable=problem.unreadable
    )


def prep_needs_grad(problem: ConvProblem, prep: PrepArguments) -> bool:
    return problem.needs_grad or (
        torch.is_grad_enabled()
        and any(x.requires_grad for x in (prep.a, prep.b, prep.A_log, prep.dt_bias))
    )
