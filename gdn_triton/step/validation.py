"""Validates the calls of `gdn_triton.layer_step` before anything is launched or written."""

import functools
import math
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor

from gdn_triton._host.arguments import (
    check_devices,
    check_dtypes,
    check_flags,
    check_rank,
    check_shape,
    check_tensors,
    count_sequences,
    must,
    real_or_none,
    shape_of,
    shaped,
    type_of,
    value_of,
)
from gdn_triton._host.memory import Apart, Layout, layout_of
from gdn_triton._host.slots import (
    LAST_SKIPPED,
    check_once,
    check_read_in_pool,
    check_skip,
    final_writes,
)
from gdn_triton._host.tensors import check_written, why_unreadable
from gdn_triton.conv.validation import STEP, ConvArguments, validate_conv
from gdn_triton.conv.validation import operands as conv_operands
from gdn_triton.recurrent.api import call_of, check_step
from gdn_triton.recurrent.validation import validate_step
from gdn_triton.recurrent.validation_window import STEP_WRITES, WINDOW_NAMES
from gdn_triton.recurrent.window import StepWindow, check_kind
from gdn_triton.step.problem import (
    WRITTEN,
    LayerCall,
    LayerOperands,
    LayerOptions,
    LayerProblem,
    conv_arguments,
    most_accepted,
    step_arguments,
)

_OPTIONAL: Final = (
    *("dt_bias", "conv_state", "conv_weight", "conv_bias", "gate", "norm_weight", "counters"),
    *("write_slots", "num_accepted_tokens", "parents", "cu_seqlens", "out"),
)
_INDICES: Final = (
    *("read_slots", "write_slots", "num_accepted_tokens", "parents"),
    "cu_seqlens",
)
_ACTIVATIONS: Final = ("silu", "sigmoid")


def validate_layer(call: LayerCall) -> LayerProblem:
    """Checks the arguments of `gdn_triton.layer_step`, which documents them. The window's arguments
    are checked as in `gdn_triton.recurrent_step`."""
    x, options = call.inputs, call.options
    named: dict[str, Any] = x._asdict()
    optional = {name: named[name] for name in _OPTIONAL}
    check_tensors({name: y for name, y in named.items() if name not in optional}, optional)
    _check_parts(x)
    scale, norm_eps = _check_options(options)
    check_devices("mixed_qkv", x.mixed_qkv.device, named)

    v_first, mixed = options.state_v_first, x.mixed_qkv
    check_rank("state", x.state, "slots", "HV", *(("V", "K") if v_first else ("K", "V")))
    HV, K, V = x.state.shape[1:]
    if v_first:
        K, V = V, K
    lead, N, T = _check_lead(x)
    D = mixed.shape[-1]
    keys = D - HV * V
    if K < 1 or V < 1 or HV < 1 or keys < 2 * K or keys % (2 * K) != 0 or HV % (keys // (2 * K)):
        expected = (
            f"have 2 * H * K + HV * V channels, where state has {shaped(HV=HV, K=K, V=V)} and HV "
            "is a multiple of H"
        )
        raise ValueError(must("mixed_qkv", expected, shape_of(mixed)))
    if call.window is not None:
        check_kind(call.window)
    _check_most(call)
    _check_drafts(call, N, 1 if x.cu_seqlens is not None else N, T)
    check_shape("a", x.a, **lead, HV=HV)
    check_shape("b", x.b, **lead, HV=HV)
    check_shape("A_log", x.A_log, HV=HV)
    check_shape("dt_bias", x.dt_bias, HV=HV)
    check_shape("gate", x.gate, **lead, HV=HV, V=V)
    check_shape("norm_weight", x.norm_weight, V=V)
    check_shape("out", x.out, **lead, HV=HV, V=V)
    S = most_accepted(call)
    W = _check_conv(x, D, S)
    check_dtypes({name: y for name, y in named.items() if name != "counters"}, _INDICES)
    if x.conv_state is not None:
        held = torch.promote_types(mixed.dtype, x.conv_state.dtype)
        if held != x.conv_state.dtype:
            expected = f"have a dtype that holds that of mixed_qkv, {mixed.dtype}"
            raise ValueError(must("conv_state", expected, str(x.conv_state.dtype)))
    if x.out is not None and x.out.dtype != mixed.dtype:
        raise ValueError(must("out", f"be {mixed.dtype}, as mixed_qkv is", str(x.out.dtype)))
    for name in WRITTEN:
        check_written(name, named[name])
    H = keys // (2 * K)
    tickets, (rows, columns) = x.counters, x.state.stride()[2:]
    _check_tickets("counters", tickets, x.state, H)
    span = (x.state.shape[2] - 1) * rows + (x.state.shape[3] - 1) * columns
    if _needs_parts(x):
        check_step(mixed_qkv=mixed, **step_arguments(call))
    if call.window is not None or call.positions is not None:
        check_step(mixed_qkv=mixed, **step_arguments(call))
        if not torch.compiler.is_compiling():
            span = validate_step(call_of(mixed_qkv=mixed, **step_arguments(call))).tile_span
        if x.counters is not None:
            raise ValueError(
                must("counters", "be None with a window, which has tickets", "a tensor")
            )
        tickets = call.window.tickets
        _check_tickets("window.tickets", tickets, x.state, H)
    given = tuple(y for y in x if y is not None)
    read = {**named, "window.tickets": None if call.window is None else tickets}
    if torch.is_grad_enabled() and any(y.requires_grad for y in given):
        raise NotImplementedError(
            "gdn_triton.layer_step updates states in place and has no gradient; an input requires "
            "one. Call under torch.no_grad()"
        )
    return LayerProblem(
        N=N,
        T=_most_tokens(call, T),
        tokens=mixed.shape[:-1].numel(),
        H=H,
        HV=HV,
        K=K,
        V=V,
        W=W,
        dtype=mixed.dtype,
        dtypes=tuple(y.dtype for y in given),
        state_dtype=x.state.dtype,
        device=mixed.device,
        scale=K**-0.5 if scale is None else scale,
        silu=options.activation is not None,
        norm_eps=norm_eps,
        norm_sigmoid=options.norm_activation == "sigmoid",
        allow_neg_eigval=options.allow_neg_eigval,
        use_qk_l2norm=options.use_qk_l2norm_in_kernel,
        state_v_first=v_first,
        last_skipped=LAST_SKIPPED[options.skip],
        tile_span=span,
        has_window=call.window is not None,
        has_tickets=tickets is not None,
        has_norm=x.norm_weight is not None,
        most_accepted=S,
        has_write_slots=x.write_slots is not None,
        every_token=x.write_slots is not None and x.write_slots.dim() == 2,
        slots=x.state.shape[0],
        is_tree=x.parents is not None,
        is_packed=x.cu_seqlens is not None,
        unreadable=why_unreadable(read, tuple(read.values())),
    )


def _check_parts(x: LayerOperands) -> None:
    """Checks that tensors that need each other are given together."""
    for first, second in (("conv_weight", "conv_state"), ("norm_weight", "gate")):
        one, other = getattr(x, first), getattr(x, second)
        if (one is None) != (other is None):
            name, given = (second, other) if other is not None else (first, one)
            missing = first if name == second else second
            raise ValueError(must(missing, f"come with {name}", f"None, and {type_of(given)}"))
    if x.conv_bias is not None and x.conv_weight is None:
        raise ValueError(must("conv_bias", "be None without conv_weight", "a tensor"))


def _check_lead(x: LayerOperands) -> tuple[dict[str, int], int, int]:
    """Returns the dimensions of the tokens before their channels, N and T, which is the number of
    all tokens in a packed call."""
    mixed, packed = x.mixed_qkv, x.cu_seqlens is not None
    if mixed.dim() not in (2, 3) or (packed and mixed.dim() == 3 and mixed.shape[0] != 1):
        first, both = ("T", "1, T") if packed else ("N", "N, T")
        expected = f"have shape [{first}, 2 * H * K + HV * V] or [{both}, 2 * H * K + HV * V]"
        expected += " with cu_seqlens" if packed else ""
        raise ValueError(must("mixed_qkv", expected, shape_of(mixed)))
    if x.cu_seqlens is None:
        lead = dict(zip(("N", "T"), mixed.shape[:-1], strict=False))
        return lead, lead["N"], lead.get("T", 1)
    names = ("B", "T") if mixed.dim() == 3 else ("T",)
    lead = dict(zip(names, mixed.shape[:-1], strict=True))
    return lead, count_sequences(x.cu_seqlens), lead["T"]


def _check_most(call: LayerCall) -> None:
    """Checks max_tokens."""
    most = call.options.max_tokens
    if most is None:
        return
    if type(most) is not int:
        raise TypeError(must("max_tokens", "be an int or None", value_of(most)))
    if not 1 <= most < 2**31:
        raise ValueError(must("max_tokens", "be 1 to 2^31 - 1", value_of(most)))
    if call.inputs.cu_seqlens is None:
        raise ValueError(must("max_tokens", "be None without cu_seqlens", str(most)))
    if call.window is not None:
        expected = "be None with a window, which has max_tokens"
        raise ValueError(must("max_tokens", expected, str(most)))


def _most_tokens(call: LayerCall, T: int) -> int:
    """Returns T of the problem. T: as returned by `_check_lead`."""
    if call.inputs.cu_seqlens is None:
        return T
    if call.window is not None:
        most: int = call.window.max_tokens
        return most
    return T if call.options.max_tokens is None else call.options.max_tokens


def _needs_parts(x: LayerOperands) -> bool:
    """Returns whether the parts check the contents of a call."""
    given = (x.write_slots, x.num_accepted_tokens, x.parents, x.cu_seqlens)
    return any(y is not None for y in given)


def _check_drafts(call: LayerCall, N: int, B: int, T: int) -> None:
    """Checks the shapes of the slots and of what says which tokens follow each other. B: rows of
    tokens, 1 when packed."""
    x, has_window = call.inputs, call.window is not None
    has_conv, slots, write = x.conv_state is not None, x.read_slots, x.write_slots
    accepted, parents = x.num_accepted_tokens, x.parents
    if accepted is None or has_window:
        check_shape("read_slots", slots, N=N)
    elif slots.dim() != 2 or slots.shape[0] != N or slots.shape[1] < 1:
        expected = f"have shape [N={N}, S], S >= 1, with num_accepted_tokens"
        raise ValueError(must("read_slots", expected, shape_of(slots)))
    check_shape("num_accepted_tokens", accepted, N=N)
    check_shape("parents", parents, **{"N" if B == N else "B": B, "T": T})
    if write is not None and write.shape not in ((N,), (B, T)):
        expected = f"have shape [{N}], a slot a sequence, or [{B}, {T}], a slot a token"
        raise ValueError(must("write_slots", expected, shape_of(write)))
    if accepted is not None:
        if has_window and type(call.window.max_tokens) is not int:
            raise TypeError(
                must("window.max_tokens", "be an int", value_of(call.window.max_tokens))
            )
        _refuse("with num_accepted_tokens", write_slots=write, parents=parents)
    if has_window and not has_conv:
        # With a window only the convolution has these arguments.
        where = "with window and without conv_weight"
        _refuse(where, write_slots=write, num_accepted_tokens=accepted)
    if has_window and write is not None and parents is None:
        raise ValueError(must("parents", "be given with write_slots and window", "None"))
    if parents is None or (has_window and not has_conv):
        return
    if write is None or write.dim() != 2:
        found = "None" if write is None else shape_of(write)
        expected = f"have shape [{B}, {T}], a slot a token, with parents"
        raise ValueError(must("write_slots", expected, found))


def _refuse(where: str, **tensors: Tensor | None) -> None:
    for name, given in tensors.items():
        if given is not None:
            raise ValueError(must(name, f"be None {where}", "a tensor"))


def _check_tickets(name: str, tickets: Tensor | None, state: Tensor, H: int) -> None:
    """Checks the counters of a call or of a window that is otherwise valid."""
    if tickets is None:
        return
    check_tensors({name: tickets}, {})
    check_devices("state", state.device, {name: tickets})
    check_shape(name, tickets, slots=state.shape[0], H=H)
    if tickets.dtype != torch.int32:
        raise ValueError(must(name, "be torch.int32", str(tickets.dtype)))
    check_written(name, tickets)
    if not tickets.is_contiguous():
        raise ValueError(must(name, "be contiguous", f"strides {list(tickets.stride())}"))


def _check_options(options: LayerOptions) -> tuple[float | None, float]:
    """Checks the options and returns scale and norm_eps."""
    check_flags(
        allow_neg_eigval=options.allow_neg_eigval,
        use_qk_l2norm_in_kernel=options.use_qk_l2norm_in_kernel,
        state_v_first=options.state_v_first,
    )
    scale, eps = real_or_none("scale", options.scale), real_or_none("norm_eps", options.norm_eps)
    if eps is None:
        raise TypeError(must("norm_eps", "be a real number", value_of(options.norm_eps)))
    if not 0.0 <= eps < math.inf:
        raise ValueError(must("norm_eps", "be finite and at least 0", value_of(options.norm_eps)))
    activation, of_norm = options.activation, options.norm_activation
    if activation is not None and (type(activation) is not str or activation != "silu"):
        raise ValueError(must("activation", 'be "silu" or None', value_of(activation)))
    if type(of_norm) is not str or of_norm not in _ACTIVATIONS:
        names = " or ".join(f'"{name}"' for name in _ACTIVATIONS)
        raise ValueError(must("norm_activation", f"be {names}", value_of(of_norm)))
    check_skip(options.skip)
    return scale, eps


def _check_conv(x: LayerOperands, D: int, S: int) -> int:
    """Checks the convolution's arguments and returns the number of taps, 0 without a convolution.
    S: the largest number of accepted tokens, 0 without."""
    weight, state = x.conv_weight, x.conv_state
    if weight is None or state is None:
        return 0
    if weight.dim() != 2 or weight.shape[0] != D or weight.shape[1] < 1:
        expected = f"have shape {shaped(D=D)[:-1]}, W >= 1]"
        raise ValueError(must("conv_weight", expected, shape_of(weight)))
    W = weight.shape[1]
    if S > 0:
        if W < 2:
            raise ValueError(must("conv_weight", "have W >= 2 with num_accepted_tokens", f"W={W}"))
        if state.dim() != 3 or state.shape[1] != D or state.shape[2] < W - 2 + S:
            expected = f"have shape [slots, D={D}, at least W - 2 + S={W - 2 + S}]"
            raise ValueError(must("conv_state", expected, shape_of(state)))
    elif state.dim() != 3 or state.shape[1:] != (D, W - 1):
        expected = f"have shape [slots, D={D}, W - 1={W - 1}]"
        raise ValueError(must("conv_state", expected, shape_of(state)))
    check_shape("conv_bias", x.conv_bias, D=D)
    return W


def all_tensors(call: LayerCall) -> tuple[Tensor | None, ...]:
    """Returns the tensors of the inputs and of a window, in the order of `_NAMES`."""
    window: tuple[Tensor | None, ...] = (None,) * (len(WINDOW_NAMES) + 1)
    if isinstance(call.window, StepWindow):
        window = (*call.window[:5], call.window.scales, call.window.tickets)
    return (*call.inputs, *window, call.positions)


_NAMES: Final = (
    *LayerOperands._fields,
    *WINDOW_NAMES.values(),
    "window.tickets",
    "positions",
)


def layer_memory(call: LayerCall) -> Apart:
    """Returns the memory check of all calls like this one. The check takes `all_tensors`."""
    return _apart(tuple(map(layout_of, all_tensors(call))))


@functools.lru_cache(1024)
def _apart(layouts: tuple[Layout | None, ...]) -> Apart:
    named = dict(zip(_NAMES, layouts, strict=True))
    return Apart(
        named, tuple(n for n in (*WRITTEN, *STEP_WRITES, "window.tickets") if named[n] is not None)
    )


def check_contents(p: LayerProblem, call: LayerCall) -> None:
    """Checks the contents of slots and of a window's positions on the CPU."""
    if p.device.type != "cpu":
        return
    x = call.inputs
    if p.has_window or _needs_parts(x):
        check_step(mixed_qkv=x.mixed_qkv, **step_arguments(call))
    if _needs_parts(x):
        if p.W > 0:
            given = {"has_initial_state": None, "cu_seqlens": None, **conv_arguments(call)}
            args = ConvArguments(x=x.mixed_qkv, **given)
            conv_operands(validate_conv(args, STEP), args, STEP)
        _check_accepted(p, x)
        _check_lengths(p, x)
        return
    slots = x.read_slots.tolist()
    for pool in (x.state, x.conv_state):
        if isinstance(pool, Tensor):
            check_read_in_pool(slots, pool.shape[0])
    check_once("read_slots", final_writes(slots, slots, p.last_skipped))


def _check_lengths(p: LayerProblem, x: LayerOperands) -> None:
    if x.cu_seqlens is None or p.has_window:
        return
    for n, (start, end) in enumerate(pairwise(x.cu_seqlens.tolist())):
        if end - start > p.T:
            expected = f"give a sequence at most max_tokens={p.T} tokens"
            raise ValueError(must("cu_seqlens", expected, f"{end - start} for sequence {n}"))


def _check_accepted(p: LayerProblem, x: LayerOperands) -> None:
    """Checks that the convolution and the rule skip the same sequences."""
    if x.num_accepted_tokens is None or p.W == 0:
        return
    last, S = p.last_skipped, p.most_accepted
    slots = x.read_slots if x.read_slots.dim() == 2 else x.read_slots[:, None]
    rows = slots.tolist()
    for n, (row, accepted) in enumerate(zip(rows, x.num_accepted_tokens.tolist(), strict=True)):
        known = 1 <= accepted <= S
        if p.has_window and row[0] > last and not known:
            given = f"{accepted} at index {n}"
            raise ValueError(must("num_accepted_tokens", f"be 1 to {S} with window", given))
        if not p.has_window and known and (row[accepted - 1] > last) != (row[0] > last):
            expected = "have padding in none or in both of column 0 and the column of the state"
            raise ValueError(must("read_slots", expected, f"{row} for sequence {n}"))
