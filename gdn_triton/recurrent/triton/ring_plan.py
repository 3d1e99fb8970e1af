"""Steps on rings and their folds on Triton. The engine captures them in CUDA graphs, so the host
keeps no plan."""

from typing import Any, Final

import torch
import triton
from torch import Tensor

from gdn_triton._host.device import on_device
from gdn_triton._host.gluon import gluon_refusal
from gdn_triton._host.memory import count_writes
from gdn_triton._triton.launch import taken_by
from gdn_triton._triton.strides import named
from gdn_triton._triton.tiles import FUSED, UNFUSED, compiler, dependent_launch, gpu_of
from gdn_triton.constants import L2NORM_EPS, RCP_LN2, SOFTPLUS_THRESHOLD
from gdn_triton.recurrent.ring_problem import RingOperands, RingProblem
from gdn_triton.recurrent.triton.plan import strides
from gdn_triton.recurrent.triton.rings import ring_fold_kernel, ring_restart_kernel
from gdn_triton.recurrent.triton.window import window_fwd_kernel
from gdn_triton.recurrent.triton.window_early import window_early_fwd_kernel
from gdn_triton.recurrent.triton.window_form import (
    FEW_STATES,
    MOST_STATES,
    WindowForm,
    copied_form,
    early_form,
    most_registers,
    window_form,
)
from gdn_triton.recurrent.triton.window_plan import (
    BLOCK,
    LEAST_BLOCK,
    LEAST_TOKENS,
    MOST_PIECES,
    MOST_ROWS,
    MOST_WARPS,
    begin_whole,
    strides_copy,
)

# With more 16-bit states than this, the kernel of `hopper/window.py` is faster. On an H200 a step
# of 32 states took 2.5 us with it instead of 2.3, and one of 256 states 6.0 instead of 6.6.
FEWEST_COPIED_RINGS: Final = 64
# Arguments of the kernels for the turns in which the heads of a window fold.
NO_WINDOW: Final = {"D": 1, "PERIOD": 1, "TURNS": 1}


def step_form(p: RingProblem) -> WindowForm:
    """Returns the form of a step of one token. The matrix units multiply 16-bit states if q has
    their dtype."""
    matches = p.state_dtype == p.q_dtype and p.q_dtype.itemsize == 2
    if (p.K, p.V) == (128, 128) and p.q_dtype == torch.bfloat16:
        states = p.N * p.HV
        # The form of two warps has not been timed with rings.
        if not matches and states > FEW_STATES:
            return WindowForm(BV=64, warps=4, KI=32, FI=32, early=True, registers=128)
        # Programs with all columns have not been timed with rings.
        form = early_form(2 if matches else 4, True, min(states, MOST_STATES))
        assert form is not None
        return form
    return window_form(2 if matches else 4, one_token=True)


def copied_step_form(p: RingProblem, x: RingOperands) -> WindowForm | None:
    """Returns the form of a step that runs the kernel of `hopper/window.py`, or None. All batches
    of float32 states run the same kernel, because the other one adds in another order."""
    stored = {p.state_dtype, x.d.dtype, x.k_rows.dtype}
    if (p.K, p.V) != (128, 128) or p.q_dtype != torch.bfloat16 or p.L > MOST_ROWS:
        return None
    if stored not in ({torch.float32}, {torch.bfloat16}) or x.g_rows.dtype != torch.float32:
        return None
    hn, hh, hv, hk = x.state.stride()
    if (hv, hk) != (p.K, 1) or not strides_copy(hn, hh, x.d, x.k_rows):
        return None
    if not begin_whole(x.state, x.d, x.k_rows):
        return None
    if gluon_refusal(p.device) is not None:
        return None
    states = p.N * p.HV
    if p.state_dtype.itemsize == 2 and states <= FEWEST_COPIED_RINGS:
        return None
    return copied_form(p.state_dtype.itemsize, True, max(states, FEW_STATES))


def drafts_form(p: RingProblem) -> WindowForm:
    """Returns the form of drafted tokens. A fold has the same tiles."""
    itemsize = max(p.state_dtype.itemsize, p.q_dtype.itemsize)
    form = window_form(itemsize, one_token=False)
    if (p.K, p.V) == (128, 128) and p.q_dtype.itemsize == 2:
        form = form._replace(registers=most_registers(itemsize, p.most))
        # With pieces of 32, drafts of 256 sequences took 161 us on an H100, and with 64 they took
        # 149.
        return form if itemsize > 2 else form._replace(KI=64)
    return form


def _tile(form: WindowForm, p: RingProblem) -> dict[str, Any]:
    BK = max(LEAST_BLOCK, triton.next_power_of_2(p.K))
    tile: dict[str, Any] = {
        "BK": BK,
        "BV": min(form.BV, max(LEAST_BLOCK, triton.next_power_of_2(p.V))),
        "BR": max(LEAST_BLOCK, triton.next_power_of_2(p.L)),
        "num_warps": min(form.warps * max(1, BK // 128), MOST_WARPS),
        "num_stages": 1,
    }
    if form.registers is not None and compiler() == "cuda":
        tile["maxnreg"] = form.registers
    return tile


def _sizes(p: RingProblem) -> dict[str, Any]:
    sizes = {"H": p.H, "HV": p.HV, "K": p.K, "V": p.V, "R": p.L}
    return {**sizes, "RCP_LN2": RCP_LN2, "LAST_SKIPPED": p.last_skipped}


def _of_tokens(p: RingProblem, x: RingOperands, token: str) -> dict[str, Any]:
    """Returns the arguments of a call's tokens. token: the name of their dimension in strides."""
    t = token
    return {
        "scale": p.scale,
        **named(f"q{t} qh qk", strides(x.q, 3)),
        **named(f"k{t} kh kk", strides(x.k, 3)),
        **named(f"v{t} vh vv", strides(x.v, 3)),
        **named(f"g{t} gh", strides(x.a, 2)),
        **named(f"b{t} bh", strides(x.b, 2)),
        **named("A", strides(x.A_log, 1)),
        **named("dt", strides(x.dt_bias, 1)),
        **named(f"o{t} oh ov", strides(x.out, 3)),
        "EPS": L2NORM_EPS,
        "THRESHOLD": SOFTPLUS_THRESHOLD,
        "USE_QK_L2NORM": p.use_qk_l2norm,
        "BETA_FACTOR": 1.0,
        "K_OFFSET": 0,
        "V_OFFSET": 0,
    }


def _pointers(x: RingOperands) -> dict[str, Tensor | None]:
    return {
        "q": x.q,
        "k": x.k,
        "v": x.v,
        "g": x.a,
        "beta": x.b,
        "A_log": x.A_log,
        "dt_bias": x.dt_bias,
        "o": x.out,
        "state": x.state,
        "u_rows": x.d,
        "k_rows": x.k_rows,
        "g_rows": x.g_rows,
        "call_rows": None,
        "start": x.flags,
        "slots": x.slots,
        "positions": x.counts,
    }


def _of_rings(x: RingOperands) -> dict[str, Any]:
    steps = (x.d.stride(0), x.k_rows.stride(0), x.g_rows.stride(0))
    return {**NO_WINDOW, "RING": True, **named("ur kr gr cr", (*steps, 0))}


def step(p: RingProblem, x: RingOperands) -> None:
    if p.N == 0:
        return
    assert x.out is not None
    copied = copied_step_form(p, x)
    form = copied or step_form(p)
    tile = _tile(form, p)
    kernel: Any = window_early_fwd_kernel
    if copied is not None:
        # Import here: releases of Triton that `_host/gluon.py` does not list may lack names of
        # Gluon.
        from gdn_triton.recurrent.triton.hopper.window import window_copied_fwd_kernel as kernel
    given = {
        **_pointers(x),
        "scales": None,
        "N": p.N,
        **_of_tokens(p, x, "b"),
        **named("hn hh hv hk", x.state.stride()),
        **named("start", strides(x.flags, 1)),
        **named("s", strides(x.slots, 1)),
        **named("p", strides(x.counts, 1)),
        **_sizes(p),
        **_of_rings(x),
        "KI": min(tile["BK"], form.KI),
        "FI": min(tile["BK"], form.FI),
        "DOT": form.dot,
        "RELEASE": False,
        "RECORDS_FIRST": False,
        **dependent_launch(gpu_of(p.device)),
        **UNFUSED,
        **tile,
    }
    with on_device(p.device):
        count_writes(x.state, x.out, x.d, x.k_rows, x.g_rows)
        kernel[(-(-p.V // tile["BV"]) * p.N * p.HV, 1, 1)](**taken_by(kernel, given))


def drafts(p: RingProblem, x: RingOperands) -> None:
    if p.N == 0 or p.T == 0:
        return
    assert x.ring_slots is not None and x.bases is not None and x.flags is not None
    assert x.cu_seqlens is not None and x.q is not None and x.k is not None
    form = drafts_form(p)
    tile = _tile(form, p)
    KI = min(tile["BK"], form.KI)
    at = (x.flags, x.slots, x.counts, x.cu_seqlens, x.ring_slots, x.bases)
    with on_device(p.device):
        count_writes(x.out, x.d, x.k_rows, x.g_rows, x.d_low, x.k_low)
        window_fwd_kernel[(-(-p.V // tile["BV"]) * p.N * p.HV, 1, 1)](
            **_pointers(x),
            scales=None,
            cu_seqlens=x.cu_seqlens,
            parents=None,
            u_low=x.d_low,
            k_low=x.k_low,
            rings=x.ring_slots,
            bases=x.bases,
            N=p.N,
            T=p.T,
            **_of_tokens(p, x, "t"),
            **named("qb kb vb gb bb ob ab at", (0,) * 8),
            **named("hn hh hv hk", x.state.stride()),
            **named("start s p c ring base", tuple(y.stride(0) for y in at)),
            **_sizes(p),
            **_of_rings(x),
            BT=max(LEAST_TOKENS, triton.next_power_of_2(p.most)),
            KI=KI,
            FI=KI,
            STAGES=min(tile["BK"] // KI, MOST_PIECES) + 1,
            EARLY=False,
            DEPENDENT=False,
            RELEASE=False,
            # Triton 3.6 cannot compile the choice between two pointers for AMD's GPUs.
            ONE_LOAD=compiler() != "hip" and x.q.stride(-1) == x.k.stride(-1),
            **UNFUSED,
            **tile,
        )


def fold(p: RingProblem, x: RingOperands) -> None:
    if p.N == 0 or p.layers == 0:
        return
    assert x.ring_slots is not None and x.bases is not None and x.flags is not None
    form = drafts_form(p)._replace(registers=None)
    tile = _tile(form, p)
    cursors = {
        "slots": x.slots,
        "rings": x.ring_slots,
        "counts": x.counts,
        "bases": x.bases,
        "folding": x.flags,
    }
    places = named("s r c e f", tuple(y.stride(0) for y in cursors.values()))
    with on_device(p.device):
        count_writes(x.state, x.counts, x.bases, x.flags)
        ring_fold_kernel[(-(-p.V // tile["BV"]) * p.N * p.HV, p.layers, 1)](
            state=x.state,
            d_rows=x.d,
            k_rows=x.k_rows,
            g_rows=x.g_rows,
            d_low=x.d_low,
            k_low=x.k_low,
            **cursors,
            accepted=x.accepted,
            track_slots=x.track_slots,
            track_steps=x.track_steps,
            **named("hl hn hh hv hk", x.state.stride()),
            **named("dl dn", x.d.stride()[:2]),
            **named("kl kn", x.k_rows.stride()[:2]),
            **named("gl gn", x.g_rows.stride()[:2]),
            **places,
            **named("a", strides(x.accepted, 1)),
            **named("t", strides(x.track_slots, 1)),
            **named("ts", strides(x.track_steps, 1)),
            **_sizes(p),
            FI=min(tile["BK"], form.FI),
            **UNFUSED,
            **tile,
        )
        ring_restart_kernel[(-(-p.N // BLOCK), 1, 1)](
            **cursors,
            N=p.N,
            **places,
            R=p.L,
            LAST_SKIPPED=p.last_skipped,
            BLOCK=BLOCK,
            **FUSED,
        )
