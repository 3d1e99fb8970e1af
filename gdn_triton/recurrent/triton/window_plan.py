"""Steps with a window, folds and restarts on Triton."""

from typing import Any, Final

import torch
import triton
from torch import Tensor

from gdn_triton._host.device import on_device
from gdn_triton._host.gluon import gluon_refusal
from gdn_triton._host.memory import count_writes
from gdn_triton._triton.launch import Launch, taken_by
from gdn_triton._triton.strides import named, state_strides
from gdn_triton._triton.tiles import FUSED, UNFUSED, compiler, dependent_launch, gpu_of
from gdn_triton.constants import L2NORM_EPS, RCP_LN2, SOFTPLUS_THRESHOLD
from gdn_triton.recurrent.problem import (
    FoldOperands,
    FoldProblem,
    Operands,
    PlannedCall,
    RecurrentProblem,
    turn_count,
    views,
)
from gdn_triton.recurrent.triton.plan import states_are_whole, strides
from gdn_triton.recurrent.triton.window import window_fwd_kernel
from gdn_triton.recurrent.triton.window_early import window_early_fwd_kernel
from gdn_triton.recurrent.triton.window_few import window_few_fwd_kernel
from gdn_triton.recurrent.triton.window_fold import (
    window_accept_kernel,
    window_fold_kernel,
    window_start_kernel,
)
from gdn_triton.recurrent.triton.window_form import (
    FEW_STATES,
    WindowForm,
    copied_drafts_form,
    copied_form,
    drafts_form,
    early_form,
    few_form,
    most_registers,
    window_form,
)
from gdn_triton.recurrent.triton.window_one import window_one_fwd_kernel

# The smallest sizes of products on matrix units. Each token has two columns.
LEAST_BLOCK: Final = 16
LEAST_TOKENS: Final = 4
# A product of 64 rows needs four warps. The layout of eight warps has 128 rows, and Triton 3.6 then
# reads shared memory past the operand.
MOST_WARPS: Final = 4
# The most pieces of a state that a program has in shared memory at once.
MOST_PIECES: Final = 4
# The rows of a window, and the bytes of a copy, in the kernel of `hopper/window.py`.
MOST_ROWS: Final = 16
COPIED: Final = 16


def _tile(form: WindowForm, p: RecurrentProblem | FoldProblem) -> dict[str, Any]:
    """Returns the sizes of a program, which a step and a fold share, and its warps."""
    BK = max(LEAST_BLOCK, triton.next_power_of_2(p.K))
    tile: dict[str, Any] = {
        "BK": BK,
        "BV": min(form.BV, max(LEAST_BLOCK, triton.next_power_of_2(p.V))),
        "BR": max(LEAST_BLOCK, triton.next_power_of_2(p.window_rows)),
        "FI": min(BK, form.FI),
        # The form is chosen for K = 128. Its registers do not suffice for twice as many channels.
        "num_warps": min(form.warps * max(1, BK // 128), MOST_WARPS),
        "num_stages": 1,
    }
    if form.registers is not None and compiler() == "cuda":
        tile["maxnreg"] = form.registers
    return tile


def _sizes(p: RecurrentProblem | FoldProblem) -> dict[str, int]:
    return {
        "H": p.H,
        "HV": p.HV,
        "K": p.K,
        "V": p.V,
        "R": p.window_rows,
        "D": p.max_tokens,
        "PERIOD": p.fold_period,
        "TURNS": turn_count(p.fold_period),
    }


def _slot_strides(x: Operands | FoldOperands) -> dict[str, int]:
    """Returns the strides of slots in the tensors of a window."""
    rows = (x.u_rows, x.k_rows, x.g_rows, x.call_rows)
    return named("ur kr gr cr", tuple(strides(y, 4)[0] for y in rows))


def _takes_one(p: RecurrentProblem) -> bool:
    """Returns whether each sequence of a call has one token."""
    return p.T == 1 and not p.is_varlen


def _step_form(p: RecurrentProblem) -> WindowForm:
    """Returns the form of a step. The one-token form of 16-bit states needs the matrix units, whose
    operands must have one dtype. Without matrix units a program would need twice the registers. The
    same holds for float32 tokens, so they use the form of float32 states."""
    one, itemsize = _takes_one(p), p.state_dtype.itemsize
    if p.q_dtype.itemsize > 2:
        itemsize = max(itemsize, p.q_dtype.itemsize)
    multiplied = p.q_dtype if p.state_dtype == torch.int8 else p.state_dtype
    if one and not (multiplied == p.q_dtype == p.k_dtype and p.q_dtype.itemsize == 2):
        itemsize = 4
    form = window_form(itemsize, one)
    if not one and (p.K, p.V) == (128, 128) and p.q_dtype.itemsize == 2:
        form = form._replace(registers=most_registers(itemsize, p.max_tokens))
        takes_bf16 = {p.q_dtype, p.k_dtype} == {torch.bfloat16}
        if takes_bf16 and p.max_tokens <= 4 and p.state_dtype in (torch.bfloat16, torch.float32):
            return drafts_form(itemsize, p.state_v_first, p.N * p.HV) or form
    return form


EARLY_STATES: Final = (torch.bfloat16, torch.float32, torch.int8)


def _is_common(p: RecurrentProblem) -> bool:
    """Returns whether a step is one for which the registers of the kernels of `window_early.py`,
    `window_few.py` and `hopper/window.py` were chosen."""
    if not _takes_one(p) or p.max_tokens != 1 or (p.K, p.V) != (128, 128):
        return False
    return {p.q_dtype, p.k_dtype} == {torch.bfloat16} and p.state_dtype in EARLY_STATES


def _early_form(p: RecurrentProblem) -> WindowForm | None:
    """Returns the form of a step that runs the kernel of `window_early.py` or `window_few.py`, or
    None."""
    if not _is_common(p):
        return None
    of_states = p.state_dtype.itemsize, p.state_v_first, p.N * p.HV
    # Where a warp has 64 lanes, a sum over K would have another order in the kernel of few states.
    return (None if compiler() == "hip" else few_form(*of_states)) or early_form(*of_states)


def _copied_form(p: RecurrentProblem, x: Operands) -> WindowForm | None:
    """Returns the form of a step that runs the kernel of `hopper/window.py`, or None."""
    if not _is_common(p):
        return None
    form = copied_form(p.state_dtype.itemsize, p.state_v_first, p.N * p.HV)
    return form if form is not None and _may_copy(p, x) else None


def _copied_drafts_form(p: RecurrentProblem, x: Operands) -> WindowForm | None:
    """Returns the form of a step of several tokens that runs the kernel of `hopper/drafts.py`, or
    None."""
    if _takes_one(p) or p.max_tokens > 4 or (p.K, p.V) != (128, 128) or x.parents is not None:
        return None
    if {p.q_dtype, p.k_dtype} != {torch.bfloat16} or p.state_dtype not in EARLY_STATES:
        return None
    form = copied_drafts_form(p.state_dtype.itemsize, p.N * p.HV)
    return form if form is not None and _may_copy(p, x) else None


def _may_copy(p: RecurrentProblem, x: Operands) -> bool:
    """Returns whether the kernels in Gluon can copy the states and the records."""
    if p.v_dtype != torch.bfloat16 or p.window_rows > MOST_ROWS:
        return False
    assert x.state is not None and x.u_rows is not None and x.k_rows is not None
    hn, hh, _, _ = state_strides(x.state, p.state_v_first)
    if not states_are_whole(p, x) or not strides_copy(hn, hh, x.u_rows, x.k_rows):
        return False
    return gluon_refusal(p.device) is None


def strides_copy(hn: int, hh: int, *rows: Tensor) -> bool:
    """Returns whether the kernels in Gluon can copy 16 bytes at once from states with the strides
    hn of slots and hh of heads, and from these records. Triton only knows whether a stride of the
    states is a multiple of 16 elements."""
    whole = all(y.stride(0) * y.dtype.itemsize % COPIED == 0 for y in rows)
    return whole and hn % 16 == 0 and hh % 16 == 0


def begin_whole(*copied: Tensor | None) -> bool:
    """Returns whether all tensors begin at multiples of 16 bytes."""
    return all(y is not None and y.data_ptr() % COPIED == 0 for y in copied)


def _releases(p: RecurrentProblem) -> bool:
    """Returns whether the programs of the next dependent launch may start before those of this step
    end. A step that has many states, and therefore several programs for each place on a
    multiprocessor, then took 1 to 2 microseconds less in a row of steps. With few states some
    multiprocessors got more programs than others. In steps of several tokens float32 states were
    spilled."""
    narrow = p.state_dtype.itemsize <= 2
    return (narrow or _takes_one(p)) and p.N * p.HV > FEW_STATES


# These arguments of the kernel for one token belong to a layer's step.
NO_LAYER: Final = {
    **named("cn cc cw", (0, 0, 0)),
    **named("wc ww bias", (0, 0, 0)),
    **named("zn zh zv norm", (0, 0, 0, 0)),
    "W": 1,
    "SILU": False,
    "GROUP_BLOCK": 1,
    "V_BLOCK": 1,
    "NORM_EPS": 0.0,
    "SIGMOID": False,
    "NVIDIA": False,
}
NO_LAYER_TENSORS: Final[dict[str, Tensor | None]] = dict.fromkeys(
    ("conv_state", "conv_weight", "conv_bias", "gate", "norm_weight", "tickets")
)


# These arguments belong to an engine's rings.
NO_RING: Final = {"RING": False}
NO_RING_TENSORS: Final[dict[str, Tensor | None]] = dict.fromkeys(
    ("u_low", "k_low", "rings", "bases")
)


def make_launch(
    problem: RecurrentProblem, x: Operands, o: Tensor, layer: dict[str, Any] = NO_LAYER
) -> Launch:
    """Returns the launch. The arguments are those of `launch_arguments`."""
    kernel, fixed = launch_arguments(problem, x, o, layer)
    return Launch(kernel, **fixed)


def launch_arguments(
    problem: RecurrentProblem, x: Operands, o: Tensor, layer: dict[str, Any] = NO_LAYER
) -> tuple[Any, dict[str, Any]]:
    """Returns the kernel and its fixed arguments. x: the result of `views`. o: [B, T, HV, V].
    layer: the arguments named in `NO_LAYER`, for a call of one token."""
    p = problem
    assert x.read_slots is not None and x.positions is not None and x.start is not None
    one = _takes_one(p)
    form = (_early_form(p) if layer is NO_LAYER else None) or _step_form(p)
    tile = _tile(form, p)
    all_strides = {
        **named("qb qt qh qk", strides(x.q, 4)),
        **named("kb kt kh kk", strides(x.k, 4)),
        **named("vb vt vh vv", strides(x.v, 4)),
        **named("gb gt gh", strides(x.g, 3)),
        **named("bb bt bh", strides(x.beta, 3)),
        **named("A", strides(x.A_log, 1)),
        **named("dt", strides(x.dt_bias, 1)),
        **named("ob ot oh ov", strides(o, 4)),
        **named("hn hh hk hv", state_strides(x.state, p.state_v_first)),
        **named("start", x.start.stride()),
        **named("s", strides(x.read_slots, 1)),
        **named("p", strides(x.positions, 1)),
        **named("c", strides(x.cu_seqlens, 1)),
        **named("ab at", strides(x.parents, 2)),
    }
    if one:
        kernel, own = window_one_fwd_kernel, {"DOT": form.dot, **layer}
        if form.few:
            kernel = window_few_fwd_kernel
            own = {"DOT": form.dot, **dependent_launch(gpu_of(p.device))}
        elif form.early:
            kernel, own = window_early_fwd_kernel, {"DOT": form.dot, **NO_RING}
            own |= dependent_launch(gpu_of(p.device))
            own |= {
                "RELEASE": own["DEPENDENT"] and _releases(p),
                "RECORDS_FIRST": form.records_first,
            }
        of_tokens = [
            f"stride_{name}" for name in ("qt", "kt", "vt", "gt", "bt", "ot", "c", "ab", "at")
        ]
        all_strides = {n: y for n, y in all_strides.items() if n not in of_tokens}
    else:
        kernel = window_fwd_kernel
        pieces = tile["BK"] // min(tile["BK"], form.KI)
        own = {
            "BT": max(LEAST_TOKENS, triton.next_power_of_2(p.max_tokens)),
            "STAGES": min(pieces, MOST_PIECES) + 1,
            # Triton 3.6 cannot compile the choice between two pointers for AMD's GPUs.
            "ONE_LOAD": compiler() != "hip"
            and (x.q.dtype, x.q.stride(-1)) == (x.k.dtype, x.k.stride(-1)),
            "EARLY": form.early,
            **(dependent_launch(gpu_of(p.device)) if form.early else {"DEPENDENT": False}),
            "RELEASE": form.early and compiler() == "cuda" and _releases(p),
            **NO_RING,
            **named("ring base", (0, 0)),
        }
    return kernel, {
        "scale": p.scale,
        **all_strides,
        **_sizes(p),
        **_slot_strides(x),
        **own,
        "K_OFFSET": p.H * p.K if p.is_mixed else 0,
        "V_OFFSET": 2 * p.H * p.K if p.is_mixed else 0,
        "RCP_LN2": RCP_LN2,
        "EPS": L2NORM_EPS,
        "THRESHOLD": SOFTPLUS_THRESHOLD,
        "USE_QK_L2NORM": p.use_qk_l2norm,
        "BETA_FACTOR": (2.0 if p.allow_neg_eigval else 1.0) if p.use_beta_sigmoid else 0.0,
        "LAST_SKIPPED": p.last_skipped,
        "KI": min(tile["BK"], form.KI),
        **UNFUSED,
        **tile,
    }


def _copied_launch(p: RecurrentProblem, x: Operands, o: Tensor, form: WindowForm) -> Launch:
    # Import here: releases of Triton that `_host/gluon.py` does not list may lack names of Gluon.
    from gdn_triton.recurrent.triton.hopper import drafts, window

    one = _takes_one(p)
    kernel = window.window_copied_fwd_kernel if one else drafts.window_drafts_fwd_kernel
    _, fixed = launch_arguments(p, x, o)
    fixed |= _tile(form, p) | dependent_launch(gpu_of(p.device))
    fixed |= {"RELEASE": fixed["DEPENDENT"] and _releases(p), **NO_RING}
    return Launch(kernel, **taken_by(kernel, fixed))


def step_grid(p: RecurrentProblem, form: WindowForm | None = None) -> tuple[int, int, int]:
    BV = _tile(form or _step_form(p), p)["BV"]
    return (-(-p.V // BV) * (p.N + p.is_varlen) * p.HV, 1, 1)


def plan(problem: RecurrentProblem, operands: Operands) -> PlannedCall:
    """Returns a function that runs all steps that differ from this one only in contents and
    addresses."""
    p = problem
    lead = operands.v.shape[:-1] if p.is_mixed else operands.v.shape[:-2]
    shape = (*lead, p.HV, p.V)
    one = _takes_one(p)
    early = _early_form(p)
    grid = step_grid(p, early)

    def output(y: Operands) -> Tensor:
        if y.out is not None:
            return y.out
        return torch.empty(shape, dtype=p.v_dtype, device=p.device)

    x = views(p, operands._replace(out=output(operands)))
    assert x.out is not None
    launch = make_launch(p, x, x.out)
    copied = _copied_form(p, x) or _copied_drafts_form(p, x)
    if copied is not None:
        copied_launch = _copied_launch(p, x, x.out, copied)
        copied_grid = step_grid(p, copied)

    def run(y: Operands) -> tuple[Tensor, Tensor | None]:
        o = output(y)
        if grid[0] == 0 or p.T == 0:
            return o, None
        count_writes(y.state, y.out, y.u_rows, y.k_rows, y.g_rows, y.call_rows, y.scales)
        pointers = {
            "q": y.q,
            "k": y.k,
            "v": y.v,
            "g": y.g,
            "beta": y.beta,
            "A_log": y.A_log,
            "dt_bias": y.dt_bias,
            "o": o,
            "state": y.state,
            "u_rows": y.u_rows,
            "k_rows": y.k_rows,
            "g_rows": y.g_rows,
            "call_rows": y.call_rows,
            "start": y.start,
            "slots": y.read_slots,
            "positions": y.positions,
        }
        if copied is not None and begin_whole(y.state, y.u_rows, y.k_rows):
            more = {} if one else {"cu_seqlens": y.cu_seqlens, "N": p.N, "T": p.T}
            copied_launch(copied_grid, **pointers, **more)
        elif early is not None:
            launch(grid, **pointers, scales=y.scales, N=p.N)
        elif one:
            launch(grid, **pointers, scales=y.scales, **NO_LAYER_TENSORS, N=p.N)
        else:
            packed = {"scales": y.scales, "cu_seqlens": y.cu_seqlens, "parents": y.parents}
            launch(grid, **pointers, **packed, **NO_RING_TENSORS, N=p.N, T=p.T)
        return o, None

    def guarded(y: Operands) -> tuple[Tensor, Tensor | None]:
        with on_device(p.device):
            return run(y)

    return guarded


# The number of slots whose `start` one program writes.
BLOCK = 128
# The number of elements of a row that one program moves.
MOVED = 1024


def fold_slots(problem: FoldProblem, x: FoldOperands) -> None:
    """Runs `gdn_triton.fold_window` or, without a state, `gdn_triton.restart_window` or, with a
    path, `gdn_triton.accept_window`."""
    p = problem
    if p.N == 0:
        return
    if x.path is not None:
        _accept(p, x, x.path)
        return
    places = {
        **named("start", x.start.stride()),
        **named("s", strides(x.slots, 1)),
        **named("p", strides(x.positions, 1)),
    }
    with on_device(p.device):
        count_writes(x.state, x.start, x.scales)
        if x.state is not None and x.state.numel() > 0:
            itemsize = max(x.state.dtype.itemsize, p.k_dtype.itemsize)
            tile = _tile(window_form(itemsize, one_token=False), p)
            grid = (-(-p.V // tile["BV"]) * p.N * p.HV, 1, 1)
            window_fold_kernel[grid](
                state=x.state,
                u_rows=x.u_rows,
                k_rows=x.k_rows,
                g_rows=x.g_rows,
                call_rows=x.call_rows,
                start=x.start,
                slots=x.slots,
                positions=x.positions,
                scales=x.scales,
                **named("hn hh hk hv", state_strides(x.state, p.state_v_first)),
                **places,
                **_sizes(p),
                **_slot_strides(x),
                RCP_LN2=RCP_LN2,
                LAST_SKIPPED=p.last_skipped,
                **UNFUSED,
                **tile,
            )
        window_start_kernel[(-(-p.N // BLOCK), 1, 1)](
            start=x.start,
            slots=x.slots,
            positions=x.positions,
            N=p.N,
            **places,
            LAST_SKIPPED=p.last_skipped,
            BLOCK=BLOCK,
            **FUSED,
        )


def _accept(p: FoldProblem, x: FoldOperands, path: Tensor) -> None:
    most = max(p.HV * p.V, p.H * p.K, p.HV)
    with on_device(p.device):
        count_writes(x.u_rows, x.k_rows, x.g_rows)
        window_accept_kernel[(p.N, -(-most // MOVED), 1)](
            u_rows=x.u_rows,
            k_rows=x.k_rows,
            g_rows=x.g_rows,
            slots=x.slots,
            positions=x.positions,
            path=path,
            **named("s", strides(x.slots, 1)),
            **named("p", strides(x.positions, 1)),
            **named("ln lt", strides(path, 2)),
            **{name: y for name, y in _slot_strides(x).items() if name != "stride_cr"},
            LENGTH=path.shape[1],
            H=p.H,
            HV=p.HV,
            K=p.K,
            V=p.V,
            R=p.window_rows,
            LAST_SKIPPED=p.last_skipped,
            BLOCK=MOVED,
            **FUSED,
        )
