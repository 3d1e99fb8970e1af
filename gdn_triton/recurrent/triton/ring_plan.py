"""Steps on rings and their folds on Triton. The engine captures them in CUDA graphs, so the host
keeps no plan."""

from typing import Any

import triton
from torch import Tensor

from gdn_triton._host.device import on_device
from gdn_triton._host.memory import count_writes
from gdn_triton._triton.strides import named
from gdn_triton._triton.tiles import UNFUSED
from gdn_triton.constants import L2NORM_EPS, RCP_LN2, SOFTPLUS_THRESHOLD
from gdn_triton.recurrent.ring_problem import RingOperands, RingProblem
from gdn_triton.recurrent.triton.plan import strides
from gdn_triton.recurrent.triton.rings import (
    ring_drafts_kernel,
    ring_fold_kernel,
    ring_one_kernel,
    ring_restart_kernel,
)
from gdn_triton.recurrent.triton.window import WindowForm, window_form
from gdn_triton.recurrent.triton.window_plan import BLOCK, LEAST_BLOCK, LEAST_TOKENS, MOST_WARPS


def ring_form(itemsize: int, one_token: bool) -> WindowForm:
    """The form of K = V = 128, as `window_form`. Drafts on 16-bit states take twice the warps,
    because the low parts of keys would spill with two."""
    if one_token or itemsize > 2:
        return window_form(itemsize, one_token)
    return WindowForm(BV=64, warps=4, KI=64, FI=32)


def _tile(form: WindowForm, p: RingProblem) -> dict[str, Any]:
    BK = max(LEAST_BLOCK, triton.next_power_of_2(p.K))
    return {
        "BK": BK,
        "BV": min(form.BV, max(LEAST_BLOCK, triton.next_power_of_2(p.V))),
        "BR": max(LEAST_BLOCK, triton.next_power_of_2(p.L)),
        "num_warps": min(form.warps * max(1, BK // 128), MOST_WARPS),
        "num_stages": 1,
    }


def _sizes(p: RingProblem) -> dict[str, Any]:
    sizes = {"H": p.H, "HV": p.HV, "K": p.K, "V": p.V, "L": p.L}
    return {**sizes, "RCP_LN2": RCP_LN2, "LAST_SKIPPED": p.last_skipped}


def _of_tokens(p: RingProblem, x: RingOperands) -> dict[str, Any]:
    return {
        "scale": p.scale,
        **named("qt qh qk", strides(x.q, 3)),
        **named("kt kh kk", strides(x.k, 3)),
        **named("vt vh vv", strides(x.v, 3)),
        **named("at ah", strides(x.a, 2)),
        **named("bt bh", strides(x.b, 2)),
        **named("A", strides(x.A_log, 1)),
        **named("dt", strides(x.dt_bias, 1)),
        **named("ot oh ov", strides(x.out, 3)),
        "EPS": L2NORM_EPS,
        "THRESHOLD": SOFTPLUS_THRESHOLD,
        "USE_QK_L2NORM": p.use_qk_l2norm,
    }


def _pointers(x: RingOperands) -> dict[str, Tensor | None]:
    tokens = {name: getattr(x, name) for name in ("q", "k", "v", "a", "b", "A_log", "dt_bias")}
    rows = {"d_rows": x.d, "k_rows": x.k_rows, "g_rows": x.g_rows}
    return {**tokens, "o": x.out, "state": x.state, **rows}


def step(p: RingProblem, x: RingOperands) -> None:
    if p.N == 0:
        return
    matches = p.state_dtype == p.q_dtype and p.q_dtype.itemsize == 2
    form = ring_form(2 if matches else 4, one_token=True)
    tile = _tile(form, p)
    with on_device(p.device):
        count_writes(x.state, x.out, x.d, x.k_rows, x.g_rows)
        ring_one_kernel[(-(-p.V // tile["BV"]) * p.N * p.HV, 1, 1)](
            **_pointers(x),
            slots=x.slots,
            counts=x.counts,
            forced=x.flags,
            **_of_tokens(p, x),
            **named("hn hh hv hk", x.state.stride()),
            **named("dn kn gn", (x.d.stride(0), x.k_rows.stride(0), x.g_rows.stride(0))),
            **named("s c f", (*strides(x.slots, 1), *strides(x.counts, 1), *strides(x.flags, 1))),
            **_sizes(p),
            KI=min(tile["BK"], form.KI),
            FI=min(tile["BK"], form.FI),
            DOT=form.dot,
            **UNFUSED,
            **tile,
        )


def drafts(p: RingProblem, x: RingOperands) -> None:
    if p.N == 0 or p.T == 0:
        return
    assert x.ring_slots is not None and x.bases is not None and x.flags is not None
    assert x.cu_seqlens is not None
    itemsize = max(p.state_dtype.itemsize, p.q_dtype.itemsize)
    form = ring_form(itemsize, one_token=False)
    tile = _tile(form, p)
    at = (x.slots, x.ring_slots, x.counts, x.bases, x.flags, x.cu_seqlens)
    with on_device(p.device):
        count_writes(x.out, x.d, x.k_rows, x.g_rows, x.d_low, x.k_low)
        ring_drafts_kernel[(-(-p.V // tile["BV"]) * p.N * p.HV, 1, 1)](
            **_pointers(x),
            d_low=x.d_low,
            k_low=x.k_low,
            slots=x.slots,
            rings=x.ring_slots,
            counts=x.counts,
            bases=x.bases,
            idle=x.flags,
            cu_seqlens=x.cu_seqlens,
            **_of_tokens(p, x),
            **named("hn hh hv hk", x.state.stride()),
            **named("dn kn gn", (x.d.stride(0), x.k_rows.stride(0), x.g_rows.stride(0))),
            **named("s r c e f u", tuple(y.stride(0) for y in at)),
            **_sizes(p),
            BT=max(LEAST_TOKENS, triton.next_power_of_2(p.most)),
            KI=min(tile["BK"], form.KI),
            **UNFUSED,
            **tile,
        )


def fold(p: RingProblem, x: RingOperands) -> None:
    if p.N == 0 or p.layers == 0:
        return
    assert x.ring_slots is not None and x.bases is not None and x.flags is not None
    form = ring_form(max(p.state_dtype.itemsize, p.q_dtype.itemsize), one_token=False)
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
            **cursors, N=p.N, **places, L=p.L, LAST_SKIPPED=p.last_skipped, BLOCK=BLOCK
        )
