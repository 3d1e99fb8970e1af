"""The plan of a call on Triton, which does not depend on the contents and addresses of tensors."""

from typing import Any, Final

import torch
from torch import Tensor

from gdn_triton._host.device import on_device
from gdn_triton._host.gluon import gluon_refusal
from gdn_triton._host.memory import count_writes
from gdn_triton._triton.launch import Launch, taken_by
from gdn_triton._triton.states import empty_state
from gdn_triton._triton.strides import named, state_strides
from gdn_triton._triton.tiles import UNFUSED, dependent_launch, gpu_of
from gdn_triton.constants import L2NORM_EPS, RCP_LN2, SOFTPLUS_THRESHOLD
from gdn_triton.recurrent.problem import Operands, PlannedCall, RecurrentProblem, views
from gdn_triton.recurrent.triton.form import (
    RecurrentForm,
    SeveralForm,
    eviction_policy,
    recurrent_form,
    several_form,
)
from gdn_triton.recurrent.triton.kernel import recurrent_fwd_kernel

# The most tokens of a sequence for which the kernel of `hopper/several.py` was timed. The average
# counts if a call is packed.
FEW_TOKENS: Final = 4


def strides(x: Tensor | None, count: int) -> tuple[int, ...]:
    """Returns `count` strides of x. The stride is 0 for a dimension that x does not have, and for a
    first dimension of length 1, whose own stride may be any number."""
    if x is None:
        return (0,) * count
    first = 0 if x.shape[0] == 1 else x.stride(0)
    return (first, *x.stride()[1:], *(0,) * (count - x.dim()))


def form_of(problem: RecurrentProblem) -> RecurrentForm:
    p = problem
    return recurrent_form(
        p.K,
        p.V,
        p.state_v_first,
        p.state_dtype.itemsize,
        is_step=p.is_step,
        one_token=_is_one_token(p),
        every_token=p.every_token,
        state_bytes=_state_bytes(p),
    )


def _is_one_token(p: RecurrentProblem) -> bool:
    return p.T == 1 and not p.is_varlen


def _state_bytes(p: RecurrentProblem) -> int:
    return p.N * p.HV * p.K * p.V * p.state_dtype.itemsize


def make_launch(problem: RecurrentProblem, x: Operands, o: Tensor, ht: Tensor | None) -> Launch:
    """Returns the launch. The arguments are those of `launch_arguments`."""
    return Launch(recurrent_fwd_kernel, **launch_arguments(problem, x, o, ht))


def launch_arguments(
    problem: RecurrentProblem, x: Operands, o: Tensor, ht: Tensor | None
) -> dict[str, Any]:
    """Returns the fixed arguments of `recurrent_fwd_kernel`. x: the result of `views`. o:
    [B, T, HV, V]. ht: the tensor to which the states are written."""
    p = problem
    per_value = x.beta is not None and x.beta.dim() == 4
    form = form_of(p)
    return dict(
        scale=p.scale,
        **named("qb qt qh qk", strides(x.q, 4)),
        **named("kb kt kh kk", strides(x.k, 4)),
        **named("vb vt vh vv", strides(x.v, 4)),
        **named("gb gt gh", strides(x.g, 3)),
        **named("gkb gkt gkh gkk", strides(x.gk, 4)),
        **named("gvb gvt gvh gvv", strides(x.gv, 4)),
        **named("bb bt bh bv", strides(x.beta, 4)),
        **named("A", strides(x.A_log, 1)),
        **named("dt", strides(x.dt_bias, 1)),
        **named("ob ot oh ov", strides(o, 4)),
        **named("h0n h0h h0k h0v", state_strides(x.state, p.state_v_first)),
        **named("htn hth htk htv", state_strides(ht, p.state_v_first)),
        **named("r rt", strides(x.read_slots, 2)),
        **named("wb wt", strides(x.write_slots, 2)),
        **named("c", strides(x.cu_seqlens, 1)),
        **named("n", strides(x.num_accepted_tokens, 1)),
        **named("pb pt", strides(x.parents, 2)),
        H=p.H,
        HV=p.HV,
        K=p.K,
        V=p.V,
        BK=form.tile.BK,
        BV=form.tile.BV,
        K_OFFSET=p.H * p.K if p.is_mixed else 0,
        V_OFFSET=2 * p.H * p.K if p.is_mixed else 0,
        RCP_LN2=RCP_LN2,
        EPS=L2NORM_EPS,
        THRESHOLD=SOFTPLUS_THRESHOLD,
        USE_QK_L2NORM=p.use_qk_l2norm,
        BETA_PER_VALUE=per_value,
        BETA_FACTOR=(2.0 if p.allow_neg_eigval else 1.0) if p.use_beta_sigmoid else 0.0,
        EVERY_TOKEN=p.every_token,
        COLUMNS=p.columns,
        LAST_SKIPPED=p.last_skipped,
        ONE_TOKEN=_is_one_token(p),
        POLICY=eviction_policy(_state_bytes(p)),
        STATE_V_FIRST=p.state_v_first,
        PARTS=form.parts,
        ROWS=form.rows,
        FOLD=form.fold,
        ORDERED=form.ordered,
        COMPACT=form.compact,
        GROUPS=form.groups,
        **dependent_launch(gpu_of(p.device)),
        **UNFUSED,
        **form.tile.options,
    )


def states_are_whole(p: RecurrentProblem, x: Operands) -> bool:
    """Returns whether the elements of each state are contiguous in its layout."""
    inner = (1, p.K) if p.state_v_first else (p.V, 1)
    return state_strides(x.state, p.state_v_first)[2:] == inner


def _several_form(p: RecurrentProblem, x: Operands) -> SeveralForm | None:
    """Returns the form of a call that runs the kernel of `hopper/several.py`, or None."""
    if not p.is_step or _is_one_token(p) or x.parents is not None or (p.K, p.V) != (128, 128):
        return None
    if {p.q_dtype, p.k_dtype, p.v_dtype} != {torch.bfloat16}:
        return None
    if p.state_dtype not in (torch.bfloat16, torch.float32):
        return None
    if not states_are_whole(p, x):
        return None
    if p.T > FEW_TOKENS * (p.N if p.is_varlen else 1) or gluon_refusal(p.device) is not None:
        return None
    itemsize, states = p.state_dtype.itemsize, p.N * p.HV
    return several_form(itemsize, p.state_v_first, states, every_token=p.every_token)


def _several_launch(p: RecurrentProblem, x: Operands, o: Tensor, form: SeveralForm) -> Launch:
    # Import here: releases of Triton that `_host/gluon.py` does not list may lack names of Gluon.
    from gdn_triton.recurrent.triton.hopper.several import recurrent_several_fwd_kernel

    fixed = launch_arguments(p, x, o, x.state)
    fixed |= {
        "BV": form.BV,
        "EACH": p.T if p.T <= FEW_TOKENS and not p.is_varlen else 0,
        "num_warps": form.warps,
        "maxnreg": form.registers,
    }
    return Launch(recurrent_several_fwd_kernel, **taken_by(recurrent_several_fwd_kernel, fixed))


def plan(problem: RecurrentProblem, operands: Operands) -> PlannedCall:
    """Returns a function that runs all calls that differ from this one only in contents and
    addresses."""
    p = problem
    lead = operands.v.shape[:-1] if p.is_mixed else operands.v.shape[:-2]
    shape = (*lead, p.HV, p.V)
    layout = p.N, p.HV, p.K, p.V, p.state_v_first, p.device

    def output(y: Operands) -> Tensor:
        if y.out is not None:
            return y.out
        return torch.empty(shape, dtype=p.v_dtype, device=p.device)

    def final_state() -> Tensor | None:
        return empty_state(*layout) if p.output_final_state else None

    x = views(p, operands._replace(out=output(operands)))
    assert x.out is not None
    several = _several_form(p, x)
    if several is not None:
        launch = _several_launch(p, x, x.out, several)
        columns = several.BV
    else:
        launch = make_launch(p, x, x.out, x.state if p.is_step else final_state())
        form = form_of(p)
        columns = form.parts * form.tile.BV
    grid = (-(-p.V // columns) * (p.N + p.is_varlen) * p.HV, 1, 1)

    def run(y: Operands) -> tuple[Tensor, Tensor | None]:
        o = output(y)
        ht = final_state()
        if grid[0] == 0:
            return o, ht
        if p.is_step:
            count_writes(y.state, y.out)
        if several is not None:
            launch(
                grid,
                q=y.q,
                k=y.k,
                v=y.v,
                g=y.g,
                beta=y.beta,
                A_log=y.A_log,
                dt_bias=y.dt_bias,
                o=o,
                state=y.state,
                read_slots=y.read_slots,
                write_slots=y.write_slots,
                cu_seqlens=y.cu_seqlens,
                num_accepted_tokens=y.num_accepted_tokens,
                N=p.N,
                T=p.T,
            )
            return o, ht
        launch(
            grid,
            q=y.q,
            k=y.k,
            v=y.v,
            g=y.g,
            gk=y.gk,
            gv=y.gv,
            beta=y.beta,
            A_log=y.A_log,
            dt_bias=y.dt_bias,
            o=o,
            h0=y.state,
            ht=y.state if p.is_step else ht,
            read_slots=y.read_slots,
            write_slots=y.write_slots,
            cu_seqlens=y.cu_seqlens,
            num_accepted_tokens=y.num_accepted_tokens,
            parents=y.parents,
            N=p.N,
            T=p.T,
        )
        return o, ht

    def guarded(y: Operands) -> tuple[Tensor, Tensor | None]:
        with on_device(p.device):
            return run(y)

    return guarded
