"""Helpers that the tests of the gradients share: tasks, their gradients three times, and the
comparison.

The budget's independent computation is autograd as well, in float32 through the chunked form, with
a rounding wherever the kernels round: of a value in the forward, of its gradient in the backward.
It shares no line with the kernels.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers import BF16, FP32, FP64, Case, Inputs, assert_within_budget, make_inputs, same_bits
from narrow import Arithmetic, by_chunk, by_token, chunks_of, narrow_decay
from torch import Tensor

import gdn_triton
from gdn_triton import reference
from gdn_triton.constants import LOG2_DECAY_FLOOR, RCP_LN2
from gdn_triton.reference import States

NAMES = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")

# The changes to gates of logsigmoid(randn).
STRENGTHS: dict[str, Callable[[Tensor], Tensor]] = {
    "mild": lambda g: g / 16,
    "one": lambda g: g,
    "model": lambda g: g * torch.linspace(0, 40, g.shape[-1], device=g.device),
    "strong": lambda g: 20 * g,
    "none": lambda g: 0 * g,
    "closed": lambda g: torch.where(g < -0.7, -torch.inf, g / 16),
    "all-closed": lambda g: torch.full_like(g, -torch.inf),
    # Tokens that decay and tokens that do not, in turn. The sums of two such tokens are equal, but
    # a scan rounds them differently. In the first chunk a whole number lies between the two
    # roundings of five pairs (in the order of the scan of csrc/sm90/backward/frames.cu).
    "alternating": lambda g: torch.where(every_nth(g, 2), 0.0, -37.661) + 0 * g,
    # Tokens that grow, in chunks that decay by far more.
    "growing": lambda g: torch.where(every_nth(g, 16), 2.0, -4.0) + 0 * g,
}


def every_nth(g: Tensor, n: int) -> Tensor:
    """Whether a token of g [B, T, HV] is token n, 2 n, ..., counted from 1: [1, T, 1]."""
    return (torch.arange(g.shape[1], device=g.device) % n == n - 1)[None, :, None]


# ------------------------------------------------------------------------- the narrow computation


class Rounded(torch.autograd.Function):
    """A value that is stored, or is an operand of a product, in the kernels' precision; its
    gradient likewise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, arithmetic: Arithmetic) -> Tensor:
        ctx.arithmetic = arithmetic
        return arithmetic.operand(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.arithmetic.operand(dy), None


class Read(torch.autograd.Function):
    """The product of q or k with a rounded state. For the state's gradient, kernels round the
    gradient of the result, with its factors, as an operand. In float16 it may be below the normal
    numbers where the gradient of the state, a sum over tokens, is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, state: Tensor, arithmetic: Arithmetic) -> Tensor:
        ctx.save_for_backward(x, state)
        ctx.arithmetic = arithmetic
        return arithmetic.product(x, state)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, state = ctx.saved_tensors
        product, rounded = ctx.arithmetic.product, ctx.arithmetic.operand(dy)
        return product(dy, state.mT), product(x.mT, rounded), None


def narrow_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    scale: float,
    case: Case,
    arithmetic: Arithmetic,
) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V] and the final states [N, HV, K, V], fp32; g in natural log."""

    def stored(x: Tensor) -> Tensor:
        return Rounded.apply(x, arithmetic)

    HV, product = v.shape[2], arithmetic.product
    chunks = chunks_of(case, q.device)
    q_c, k_c, v_c = (stored(by_chunk(x, case, HV)) for x in (q, k, v))
    g_c, beta_c = by_chunk(g, case, HV), by_chunk(beta, case, HV)[..., None]
    g_c = (g_c * RCP_LN2).clamp_min(LOG2_DECAY_FLOOR[FP32])
    # Token by token: torch.cumsum adds up in float64 on a CPU. Past the end of a sequence the
    # gates are 0, and the sums repeat the last one.
    g_c = torch.stack(list(itertools.accumulate(g_c.unbind(-1))), -1)
    decay = narrow_decay(g_c, 0)
    A = (beta_c * product(k_c, k_c.mT) * decay).tril(-1)
    scores = stored(product(q_c, k_c.mT) * decay)
    from_start, g_last = g_c.exp2()[..., None], g_c[..., -1, None, None].exp2()
    to_end = (g_c[..., -1:] - g_c).exp2()[..., None]
    walk = States(chunks, states.float())
    out: list[Tensor] = []
    per_chunk = (q_c, k_c, v_c, beta_c, A, scores, from_start, to_end, g_last)
    for q_t, k_t, v_t, beta_t, A_t, scores_t, from_t, to_t, g_t in zip(
        *map(chunks.steps, per_chunk), strict=True
    ):
        state = walk.running(q_t.shape[0])
        read = stored(state)
        x_t = stored(beta_t * (v_t - from_t * Read.apply(k_t, read, arithmetic)))
        v_new = stored(torch.linalg.solve_triangular(A_t, x_t, upper=False, unitriangular=True))
        out.append(from_t * Read.apply(q_t, read, arithmetic) + product(scores_t, v_new))
        walk.now = g_t * state + product(k_t.mT, stored(to_t * v_new))
    return by_token(scale * chunks.unsteps(out), case), walk.final()


# -------------------------------------------------------------------------------- three gradients


@dataclass(frozen=True)
class TaskOptions:
    l2norm: bool = False
    sigmoid: bool = False
    negative: bool = False
    gate: bool = False
    dt_bias: bool = True
    state: bool = True
    v_first: bool = False
    dht: bool = True
    scale: float | None = None


@dataclass
class Task:
    """Inputs, and the gradients of o and of the final state that come from above."""

    case: Case
    options: TaskOptions
    leaves: dict[str, Tensor]
    cu_seqlens: Tensor | None
    do: Tensor
    dht: Tensor

    @property
    def scale(self) -> float:
        return self.case.K**-0.5 if self.options.scale is None else self.options.scale

    def copies(self, dtype: torch.dtype | None = None) -> dict[str, Tensor | None]:
        leaves = {x: y.detach().clone().to(dtype or y.dtype) for x, y in self.leaves.items()}
        return {name: x.requires_grad_() for name, x in leaves.items()}

    def backward(
        self, leaves: dict[str, Tensor | None], o: Tensor, final_state: Tensor | None
    ) -> dict[str, Tensor]:
        results, upstream = [o], [self.do.to(o.dtype)]
        if self.options.dht and final_state is not None:
            results.append(final_state)
            upstream.append(self.dht.to(final_state.dtype))
        names = [name for name, x in leaves.items() if x is not None]
        given = [leaves[name] for name in names]
        found = torch.autograd.grad(
            results, given, upstream, allow_unused=True, materialize_grads=True
        )
        return dict(zip(names, found, strict=True))


def make_task(
    case: Case,
    dtype: torch.dtype,
    device: str,
    options: TaskOptions,
    x: Inputs | None = None,
    *,
    seed: int = 0,
) -> Task:
    raw = options.l2norm or options.sigmoid or options.gate
    if x is None:
        x = make_inputs(case, dtype, device, seed=seed, raw=raw)
        if raw and not options.l2norm:
            x = x.but(k=torch.nn.functional.normalize(x.k.float(), dim=-1).to(dtype))
        if raw and not options.gate:
            x = x.but(g=-x.g.abs())
        if raw and not options.sigmoid:
            x = x.but(beta=x.beta.sigmoid())
    generator = torch.Generator().manual_seed(11 + seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    leaves = dict(zip(NAMES, x.tensors, strict=False))
    if options.state:
        leaves["initial_state"] = x.initial_state
    if options.gate:
        leaves["A_log"] = normal(case.HV) / 2
        if options.dt_bias:
            leaves["dt_bias"] = normal(case.HV)
    do = normal(*x.v.shape).to(x.q.dtype)
    dht = normal(case.N, case.HV, case.K, case.V)
    return Task(case, options, leaves, x.cu_seqlens, do, dht)


def run_op(task: Task, leaves: dict[str, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    options, given = task.options, dict(leaves)
    state = given.pop("initial_state", None)
    if options.v_first and state is not None:
        state = state.mT
    o, final_state = gdn_triton.chunk_gated_delta_rule(
        **given,
        scale=options.scale,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=options.l2norm,
        use_beta_sigmoid_in_kernel=options.sigmoid,
        allow_neg_eigval=options.negative,
        state_v_first=options.v_first,
        use_gate_in_kernel=options.gate,
        cu_seqlens=task.cu_seqlens,
        cu_seqlens_cpu=task.case.cu_seqlens("cpu") if task.case.told else None,
        chunk_size=task.case.chunk_size,
    )
    assert final_state is not None
    return o, final_state.mT if options.v_first else final_state


def by_op(task: Task) -> dict[str, Tensor]:
    leaves = task.copies()
    return task.backward(leaves, *run_op(task, leaves))


# The gate's parameters, whose gradients are sums over all tokens of a value head.
SUMS = ("A_log", "dt_bias")
# The name of the log decays that the gate makes. A term of such a sum is the gradient of a decay
# times a factor.
DECAYS = "decays"


def decays_of(leaves: dict[str, Tensor | None]) -> Tensor:
    """The log decays that the gate makes. They are added to the leaves."""
    leaves[DECAYS] = g = reference.gate(leaves["g"], leaves["A_log"], leaves.get("dt_bias"))
    return g


def exact(task: Task) -> dict[str, Tensor]:
    """The gradients of the leaves, and with a gate that of DECAYS."""
    leaves, options = task.copies(FP64), task.options
    given = dict(leaves)
    if options.gate:
        given = {name: x for name, x in leaves.items() if name not in SUMS}
        given["g"] = decays_of(leaves)
    result = reference.chunk_gated_delta_rule(
        **given,
        scale=task.scale,
        cu_seqlens=task.cu_seqlens,
        chunk_size=task.case.chunk_size,
        use_qk_l2norm=options.l2norm,
        use_beta_sigmoid=options.sigmoid,
        allow_neg_eigval=options.negative,
    )
    return task.backward(leaves, result.o, result.final_state)


def narrow(task: Task, arithmetic: Arithmetic) -> dict[str, Tensor]:
    """As `exact`, by the independent computation."""
    leaves, options, case = task.copies(), task.options, task.case
    q, k, v, g, beta = (leaves[name] for name in NAMES[:5])
    if options.l2norm:
        q, k = reference.l2norm(q), reference.l2norm(k)
    if options.gate:
        g = decays_of(leaves)
    if options.sigmoid:
        beta = reference.beta_sigmoid(beta, options.negative)
    states = leaves.get("initial_state")
    if states is None:
        states = torch.zeros(case.N, case.HV, case.K, case.V, device=q.device)
    o, final = narrow_chunks(q, k, v, g, beta, states, task.scale, case, arithmetic)
    return task.backward(leaves, o.to(q.dtype), final)


# A gradient is a sum of terms that cancel, each with a rounding of its own: beside the budget,
# which knows but one order of them, this many units of the result.
TERMS = 8


# The roundings of a call of few tokens are few draws, and a sum that the independent computation
# has almost right by luck would be held to that: so many tokens and heads are enough. For fewer,
# the same gradients times other numbers have other roundings, and a value's largest error counts.
ENOUGH, DRAWS = 64, (1.3, 0.9, 0.7)


def rounded_gradients(
    task: Task, arithmetic: Arithmetic, right: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The independent computation's gradients; `right` in float64, with the largest error of
    several draws, where one draw has too few values."""
    rounded = narrow(task, arithmetic)
    if sum(end - start for *_, start, end in task.case.spans()) * task.case.HV >= ENOUGH:
        return rounded
    for factor in DRAWS:
        scaled = replace(task, do=(task.do * factor).to(task.do.dtype), dht=task.dht * factor)
        found, expected = narrow(scaled, arithmetic), exact(scaled)
        for name, y in right.items():
            error, other = rounded[name] - y, (found[name] - expected[name]) / factor
            rounded[name] = y + torch.where(other.abs() > error.abs(), other, error)
    return rounded


def spread_of_sums(task: Task, errors: Tensor, name: str) -> Tensor:
    """[HV]: the standard deviation of the error of a gradient in SUMS, from the errors of the
    gradient of DECAYS, [B, T, HV].

    The error of a sum may be far smaller by luck, where errors of opposite signs cancel. A rounding
    of a product of two tokens is in the gradients of all decays between them, and few of these
    products matter where decays are strong. So the sums over one token, and those over as many
    consecutive tokens as a chunk has, are taken for independent errors, and the larger result
    counts. The windows of one length contain each token as many times as they have tokens.

    The root mean square of few errors may exceed their standard deviation. It is therefore raised
    so that BUDGET_RMS allows a single error three times its standard deviation. n: the number of
    value heads, of which those with small errors count less.
    """
    given = [task.leaves[x] for x in ("g", *SUMS) if x in task.leaves]
    raw, *parameters = (x.detach().to(FP64) for x in given)
    raw.requires_grad_()
    decays = reference.gate(raw, *parameters)
    factors = decays.detach()
    if name == "dt_bias":
        (factors,) = torch.autograd.grad(decays.sum(), raw)
    # A token whose decay is -inf has no gradient.
    terms = torch.where(errors == 0, 0, errors * factors)

    def variance(length: int) -> Tensor:
        sums = torch.nn.functional.pad(terms, (0, 0, length, length - 1)).cumsum(1)
        return (sums[:, length:] - sums[:, :-length]).square().sum((0, 1)) / length

    variances = torch.maximum(variance(1), variance(task.case.chunk_size))
    n = variances.sum().square() / variances.square().sum()
    return torch.where(variances > 0, variances.sqrt() * (1 + n.rsqrt()), 0)


def assert_gradients(task: Task, found: dict[str, Tensor], arithmetic: Arithmetic) -> None:
    right = exact(task)
    near = rounded_gradients(task, arithmetic, right)
    for name, leaf in task.leaves.items():
        if name in SUMS:
            spread = spread_of_sums(task, near[DECAYS] - right[DECAYS], name)
            near[name] = right[name] + torch.maximum((near[name] - right[name]).abs(), spread)
        unit = TERMS * arithmetic.unit
        assert_within_budget(
            f"d{name}", found[name], right[name], near[name], dtype=leaf.dtype, unit=unit
        )


def check_task(task: Task, dtype: torch.dtype, device: str) -> None:
    assert_gradients(task, by_op(task), Arithmetic(dtype, device))


def check(case: Case, dtype: torch.dtype, device: str, options: TaskOptions | None = None) -> None:
    check_task(make_task(case, dtype, device, options or TaskOptions()), dtype, device)


def check_forgetting(case: Case, device: str) -> None:
    """Checks a call whose walks are cut, with gates that forget within a segment. The gradients are
    right; if the guess that a segment forgets is wrong, they have the bits of whole walks. Without
    gates they have other bits than whole walks, which shows that the call is cut."""
    x = make_inputs(case, BF16, device)

    def gradients(inputs: Inputs, invariant: bool) -> dict[str, Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GDN_BATCH_INVARIANT", str(int(invariant)))
            return by_op(make_task(case, BF16, device, TaskOptions(), inputs))

    def same(inputs: Inputs) -> bool:
        cut, whole = (gradients(inputs, invariant) for invariant in (False, True))
        return all(same_bits(cut[name], y) for name, y in whole.items())

    assert not same(x.but(g=torch.zeros_like(x.g)))
    forgetting = x.but(g=torch.full_like(x.g, -0.2))
    check_task(make_task(case, BF16, device, TaskOptions(), forgetting), BF16, device)
    late, early = forgetting.v.clone(), forgetting.v.clone()
    early[:, 70] = torch.nan
    late[:, 3000] = torch.inf
    for wrong in (
        forgetting.but(v=early),
        forgetting.but(v=late),
        forgetting.but(k=2 * forgetting.k),
    ):
        assert same(wrong)


def check_alone(case: Case, dtype: torch.dtype, device: str) -> None:
    """Every sequence alone, packed and padded, has the gradients that it has in the batch."""
    task = make_task(case, dtype, device, TaskOptions())
    expected = by_op(task)
    offsets = case.offsets()
    for n, (first, end) in enumerate(itertools.pairwise(offsets)):
        for packed in (True, False):
            alone = replace(
                case,
                T=end - first,
                lengths=(end - first,) if packed else None,
                orphans=0,
            )
            leaves = {name: task.leaves[name][:, first:end].clone() for name in NAMES[:5]}
            leaves["initial_state"] = task.leaves["initial_state"][n : n + 1]
            part = Task(
                alone,
                task.options,
                leaves,
                alone.cu_seqlens(device),
                task.do[:, first:end],
                task.dht[n : n + 1],
            )
            for name, x in by_op(part).items():
                inside = expected[name]
                state = name == "initial_state"
                inside = inside[n : n + 1] if state else inside[:, first:end]
                assert same_bits(inside, x), f"d{name} of sequence {n}, packed: {packed}"


def check_rows_of_no_sequence(task: Task) -> None:
    """NaN in rows of no sequence, and in the gradient of their o, changes no gradient, and these
    rows have gradients of 0."""
    expected = by_op(task)
    end = sum(task.case.lengths or ())
    for name in NAMES[:5]:
        x = task.leaves[name].clone()
        x[:, end:] = torch.nan
        task.leaves[name] = x
    task.do[:, end:] = torch.nan
    for name, x in by_op(task).items():
        assert same_bits(x, expected[name]), name
        if name in NAMES[:5]:
            assert not x[:, end:].any(), name
