"""The launch of a layer's step in which every program has a part of one value head."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from gdn_triton._host.device import on_device
from gdn_triton._host.memory import count_writes
from gdn_triton._triton.launch import Launch, taken_by
from gdn_triton._triton.strides import named, state_strides
from gdn_triton._triton.tiles import UNFUSED, compiler, dependent_launch, gpu_of
from gdn_triton.constants import L2NORM_EPS, RCP_LN2, SOFTPLUS_THRESHOLD
from gdn_triton.recurrent.problem import Operands, RecurrentProblem, views
from gdn_triton.recurrent.triton.form import eviction_policy, recurrent_form
from gdn_triton.recurrent.triton.window_plan import launch_arguments, step_grid
from gdn_triton.step.problem import LayerCall, LayerOperands, LayerProblem
from gdn_triton.step.triton.kernel import (
    all_tokens,
    output,
    parts_arguments,
    shares_rows,
    slot_strides,
    strides,
    wide_form,
)
from gdn_triton.step.triton.tokens_kernel import layer_tokens_kernel
from gdn_triton.step.triton.window_tokens import layer_window_kernel


class TokensForm(NamedTuple):
    """The form of a program: a tile of BV columns, and warps, which change no bit."""

    BK: int
    BV: int
    warps: int
    fold: int


# The most warps of a program with value-first states, and the warps with key-first states of 16
# bits, where one warp would spill.
MOST_WARPS, NARROW_WARPS = 8, 4
# The largest K with key-first states, whose programs have a whole column.
MOST_COLUMN = 128


def tokens_form(p: LayerProblem, warps: int = MOST_WARPS) -> TokensForm:
    """Returns the form, derived from `recurrent_form`. With value-first states a warp computes the
    sums over K of its own columns, so warps share the columns and change no bit."""
    if not p.state_v_first:
        narrow = p.state_dtype.itemsize == 2
        # With one token a program of the step has narrow states in tiles of four times the columns.
        form = wide_form(p, one_token=not narrow)
        warps = NARROW_WARPS if narrow else form.tile.num_warps
        # The rows of the step's tiles are one tile here, whose pieces are added in the same order.
        fold = form.fold + form.rows.bit_length() - 1
        return TokensForm(form.tile.BK, form.tile.BV, warps, fold)
    form = recurrent_form(p.K, p.V, True, p.state_dtype.itemsize)
    BV = form.tile.BV
    warps = min(warps, max(1, triton.next_power_of_2(p.V) // BV))
    return TokensForm(form.tile.BK, BV * warps, warps, form.fold)


# The largest number of programs in one launch, by the bytes of an element of the states. On an H200
# up to 256 programs of four tokens took 0.70 to 0.86 of the time of three launches
# (`python -m benchmarks.layer`); key-first drafts, with an older kernel in three launches, 0.84 to
# 0.97. With 512 programs most calls took more, because every program repeats the convolution of q
# and k.
MOST_PROGRAMS = {4: 256, 2: 256}
# The same with num_accepted_tokens, or for trees, of more than FEW_TOKENS tokens: 0.71 to 0.91 with
# 8 tokens, and up to 1.14 with twice as many programs, of which one fits a multiprocessor.
MOST_DRAFTS = {4: 128, 2: 128}
FEW_TOKENS = 4
# The same for one token, where `layer_step_kernel` is the other form: 0.48 to 0.77 of its time with
# float32 states and 0.67 to 0.77 with bfloat16 states. With twice as many programs this kernel took
# 0.85 to 1.26 of the time of an older form of `layer_step_kernel`.
# Key-first float32 states take 0.73 to 0.83, and bfloat16 states 0.76 to 0.85 of three functions.
MOST_ONE_TOKEN = {4: 256, 2: 256}
# The largest numbers of tokens and of programs with a window: 0.87 to 0.99 of the time of three
# launches. Twice as many programs take 1.0 to 1.25; 8 tokens, or 4 with bfloat16 states, take 0.94
# to 1.15.
MOST_WINDOW_PROGRAMS = {4: (4, 256), 2: (2, 512)}
# With a window the order of the sums over K depends on the register layout of q and k, and the
# layout on how many of their elements are known to be aligned: both forms have rows of multiples of
# 16 elements.
ALIGNED = 16


def grid_size(p: LayerProblem, BV: int) -> int:
    """Returns the number of programs of BV columns. A packed call has programs for the rows after
    the last sequence."""
    return -(-p.V // BV) * (p.N + p.is_packed) * p.HV


def serves_tokens(p: LayerProblem) -> bool:
    """Returns whether a call without a window runs `layer_tokens_kernel`."""
    has_parts = p.W > 0 or p.has_norm
    if not has_parts or not p.has_tickets or not (p.state_v_first or p.K <= MOST_COLUMN):
        return False
    if p.has_write_slots and not (p.every_token and p.N <= p.slots):
        return False
    most, has_drafts = MOST_PROGRAMS, p.most_accepted > 0 or p.has_write_slots
    if has_drafts and p.T > FEW_TOKENS:
        most = MOST_DRAFTS
    elif p.T == 1 and not has_drafts:
        most = MOST_ONE_TOKEN
    programs = grid_size(p, tokens_form(p).BV)
    return programs <= most.get(p.state_dtype.itemsize, 0)


def serves_window_tokens(p: LayerProblem, rule: RecurrentProblem) -> bool:
    """Returns whether a call of several tokens with a window runs `layer_window_kernel`. rule: the
    step of the recurrence."""
    tokens, most = MOST_WINDOW_PROGRAMS.get(p.state_dtype.itemsize, (0, 0))
    has_parts = p.W > 0 or p.has_norm
    has_rows = p.W == 0 or (p.K % ALIGNED == 0 and p.V % ALIGNED == 0)
    # Programs that write zeros after the last sequence of a packed call do not count.
    programs = step_grid(rule)[0] // max(1, p.N + p.is_packed) * p.N
    few = p.T <= tokens and programs <= most
    return has_parts and has_rows and p.has_tickets and few


def make_launch(p: LayerProblem, x: LayerOperands, form: TokensForm) -> Launch:
    """Returns the launch. x: the result of `all_tokens`."""
    return Launch(
        layer_tokens_kernel,
        scale=p.scale,
        **named("xn xt xc", strides(x.mixed_qkv, 3)),
        **named("an at ah", strides(x.a, 3)),
        **named("bn bt bh", strides(x.b, 3)),
        **named("A", strides(x.A_log, 1)),
        **named("dt", strides(x.dt_bias, 1)),
        **named("hn hh hk hv", state_strides(x.state, p.state_v_first)),
        **named("s sc", slot_strides(x)),
        **named("acc", strides(x.num_accepted_tokens, 1)),
        **named("wb wt", strides(x.write_slots, 2)),
        **named("pb pt", strides(x.parents, 2)),
        **named("seq", strides(x.cu_seqlens, 1)),
        **named("ob ot oh ov", strides(x.out, 4)),
        **parts_arguments(p, x),
        S=p.most_accepted,
        H=p.H,
        HV=p.HV,
        K=p.K,
        V=p.V,
        T=p.T,
        BK=form.BK,
        BV=form.BV,
        BT=triton.next_power_of_2(p.T),
        FOLD=form.fold,
        SHARED=shares_rows(p, form.warps),
        STATE_V_FIRST=p.state_v_first,
        RCP_LN2=RCP_LN2,
        EPS=L2NORM_EPS,
        THRESHOLD=SOFTPLUS_THRESHOLD,
        USE_QK_L2NORM=p.use_qk_l2norm,
        BETA_FACTOR=2.0 if p.allow_neg_eigval else 1.0,
        LAST_SKIPPED=p.last_skipped,
        POLICY=eviction_policy(p.N * p.HV * p.K * p.V * p.state_dtype.itemsize),
        **dependent_launch(gpu_of(p.device)),
        **UNFUSED,
        **_registers(p, form),
        num_warps=form.warps,
        num_stages=1,
    )


def _registers(p: LayerProblem, form: TokensForm) -> dict[str, int]:
    """Returns the limit of registers of a thread, with which two programs of 8 warps fit a
    multiprocessor. No register is spilled with up to 4 tokens of 2 bytes."""
    limited = p.T <= FEW_TOKENS and form.BK <= 128 and p.dtype.itemsize == 2
    return {"maxnreg": 128} if limited and p.state_v_first and compiler() == "cuda" else {}


def plan(problem: LayerProblem, call: LayerCall) -> Callable[[LayerCall], Tensor]:
    """Returns a function that runs all calls that differ from this one only in contents and
    addresses."""
    p, form = problem, tokens_form(problem)
    x = call.inputs._replace(out=output(p, call.inputs))
    launch = make_launch(p, all_tokens(p, x), form)
    programs, BT = grid_size(p, form.BV), triton.next_power_of_2(p.T)

    def run(given: LayerCall) -> Tensor:
        x = given.inputs
        y = output(p, x)
        if programs == 0:
            return y
        rows = torch.empty(programs * BT * (2 * form.BK + form.BV), dtype=p.dtype, device=p.device)
        factors = torch.empty(programs * BT * 8, dtype=torch.float32, device=p.device)
        count_writes(x.state, x.conv_state, x.out)
        with on_device(p.device):
            launch(
                (programs, 1, 1),
                x=x.mixed_qkv,
                a=x.a,
                b=x.b,
                A_log=x.A_log,
                dt_bias=x.dt_bias,
                state=x.state,
                slots=x.read_slots,
                conv_state=x.conv_state,
                conv_weight=x.conv_weight,
                conv_bias=x.conv_bias,
                gate=x.gate,
                norm_weight=x.norm_weight,
                y=y,
                tickets=x.counters,
                num_accepted_tokens=x.num_accepted_tokens,
                write_slots=x.write_slots,
                parents=x.parents,
                cu_seqlens=x.cu_seqlens,
                rows=rows,
                factors=factors,
                N=p.N,
                ROWS=p.tokens,
            )
        return y

    return run


def plan_window(
    problem: LayerProblem, call: LayerCall, rule: RecurrentProblem, operands: Operands
) -> Callable[[LayerCall], Tensor]:
    """Does the same as `plan` for a step with a window. rule, operands: the call's step of the
    recurrence and its operands."""
    p = problem
    x = all_tokens(p, call.inputs._replace(out=output(p, call.inputs)))
    assert x.out is not None
    _, step = launch_arguments(rule, views(rule, operands), x.out)
    fixed = {
        **step,
        **named("xn xt xc", strides(x.mixed_qkv, 3)),
        **parts_arguments(p, x),
        **named("acc", strides(x.num_accepted_tokens, 1)),
        "S": p.most_accepted,
        "ROWS": triton.next_power_of_2(p.T),
    }
    # The limit of registers of the rule's kernel is left out: it makes room for further programs,
    # which few sequences do not have, and the convolution would spill.
    fixed.pop("maxnreg", None)
    launch = Launch(layer_window_kernel, **taken_by(layer_window_kernel, fixed))
    programs = grid_size(p, fixed["BV"])
    row = fixed["ROWS"] * (2 * fixed["BK"] + fixed["BV"])

    def run(given: LayerCall) -> Tensor:
        x, window = given.inputs, given.window
        y = output(p, x)
        if programs == 0:
            return y
        rows = None
        if p.W > 0:
            rows = torch.empty(programs * row, dtype=p.dtype, device=p.device)
        written = (window.u, window.k, window.g, window.calls)
        count_writes(x.state, x.conv_state, x.out, *written)
        with on_device(p.device):
            launch(
                (programs, 1, 1),
                x=x.mixed_qkv,
                a=x.a,
                b=x.b,
                A_log=x.A_log,
                dt_bias=x.dt_bias,
                y=y,
                state=x.state,
                u_rows=window.u,
                k_rows=window.k,
                g_rows=window.g,
                call_rows=window.calls,
                start=window.start,
                slots=x.read_slots,
                positions=given.positions,
                conv_state=x.conv_state,
                conv_weight=x.conv_weight,
                conv_bias=x.conv_bias,
                gate=x.gate,
                norm_weight=x.norm_weight,
                tickets=window.tickets,
                num_accepted_tokens=x.num_accepted_tokens,
                cu_seqlens=x.cu_seqlens,
                rows=rows,
                N=p.N,
                T=p.tokens if p.is_packed else p.T,
            )
        return y

    return run
