"""Decode steps on the rings of records that an engine keeps with its states.

An engine with rings counts their records itself, and decides in which call all heads of a slot are
folded. Its caches read these counts: a cached prefix ends where the state in memory does. A
`gdn_triton.StepWindow` folds its heads in turns, so it cannot take the place of the rings.

The adapters of `gdn_triton.integrations` call these functions, which have no operators: under
torch.compile they are refused.
"""

from collections.abc import Callable, Mapping
from typing import Final

import torch

from gdn_triton._host.arguments import (
    check_devices,
    check_dtypes,
    check_flags,
    check_offsets,
    check_qkv,
    check_rank,
    check_shape,
    check_tensors,
    must,
    real_or_none,
    type_of,
    value_of,
)
from gdn_triton._host.backends import (
    Backend,
    Operator,
    missing,
    reference_supports,
    states_refusal,
    triton_refusal,
)
from gdn_triton._host.memory import span
from gdn_triton._host.tensors import check_written, host_reads, is_traced, why_unreadable
from gdn_triton.constants import MAX_STATE_SPAN, MAX_TOKENS
from gdn_triton.recurrent.ring_problem import MOST_DRAFTS, MOST_ROWS, RingOperands, RingProblem

Names = Mapping[str, str]
Run = Callable[[RingProblem, RingOperands], None]


def ring_step(
    x: RingOperands,
    *,
    scale: float | None,
    use_qk_l2norm: bool,
    last_skipped: int = -1,
    names: Names | None = None,
) -> None:
    """One token of each sequence: writes o, and the token's record to row counts[n] of the ring. If
    that is the last row, or the sequence has a flag, the state in memory takes all records and the
    token instead. The caller then sets counts[n] to 0, and otherwise adds 1.

    last_skipped: slots up to it are padding: their o is 0. names: the caller's names of fields, for
    errors.

    Raises:
        TypeError, ValueError, NotImplementedError: an argument that does not fit; nothing has been
            written. The contents of slots and counts are checked where they are CPU tensors.
        RuntimeError: the backend that `GDN_BACKEND` asks for cannot run the call.
    """
    names = names or {}
    problem = _judged(x, scale, use_qk_l2norm, 1, last_skipped, names)
    if host_reads(x.slots):
        _check_contents(x, problem, names, problem.L - 1)
    STEP.choose(problem).run(problem, x)


def ring_drafts(
    x: RingOperands,
    *,
    scale: float | None,
    use_qk_l2norm: bool,
    most: int,
    last_skipped: int = -1,
    names: Names | None = None,
) -> None:
    """At most `most` tokens of each sequence: writes their o, and their records to the rows after
    those that count. No state is written. A count plus the call's tokens may not exceed the ring.
    The o of a sequence that is left out, and of tokens of no sequence, is not written.

    Arguments and errors are those of `ring_step`.
    """
    names = names or {}
    problem = _judged(x, scale, use_qk_l2norm, most, last_skipped, names)
    if host_reads(x.slots):
        assert x.cu_seqlens is not None
        name = names.get("cu_seqlens", "cu_seqlens")
        check_offsets(name, x.cu_seqlens.tolist(), problem.T)
        longest = int(x.cu_seqlens.diff().max()) if problem.N else 0
        if longest > most:
            raise ValueError(must(name, f"have at most {most} tokens a sequence", str(longest)))
        _check_contents(x, problem, names, problem.L - longest)
    DRAFTS.choose(problem).run(problem, x)


def fold_rings(x: RingOperands, *, last_skipped: int = -1, names: Names | None = None) -> None:
    """Folds all records of the rings with a flag into the states of all layers, and empties these
    rings: counts and flags become 0, and bases move to the next row. Before, the states after
    earlier tokens are written to their slots.

    Errors are those of `ring_step`.
    """
    names = names or {}
    problem = _judged(x, None, False, 1, last_skipped, names)
    if host_reads(x.slots):
        _check_contents(x, problem, names, problem.L)
    FOLD.choose(problem).run(problem, x)


def _judged(
    x: RingOperands,
    scale: float | None,
    use_qk_l2norm: bool,
    most: int,
    last_skipped: int,
    names: Names,
) -> RingProblem:
    named = {names.get(field, field): y for field, y in x._asdict().items()}

    def name(field: str) -> str:
        return names.get(field, field)

    folds = x.q is None
    needed: tuple[str, ...] = ("state", "d", "k_rows", "g_rows", "slots", "counts")
    if not folds:
        needed += ("q", "k", "v", "a", "b", "A_log", "dt_bias", "out")
    check_tensors({name(f): getattr(x, f) for f in needed}, named)
    for n, y in named.items():
        if y is not None and is_traced(y):
            expected = "be a tensor in memory: steps on rings have no operator for torch.compile"
            raise NotImplementedError(must(n, expected, type_of(y)))
    integers = {
        name(f) for f in ("slots", "ring_slots", "cu_seqlens", "accepted", "track_slots")
    } | {name("track_steps")}
    cursors = {name(f): getattr(x, f) for f in ("counts", "bases", "flags")}
    others = {n: y for n, y in named.items() if n not in cursors}
    check_dtypes(others, integers)
    for n, y in cursors.items():
        if y is not None and (y.is_floating_point() or y.is_complex()):
            raise ValueError(must(n, "hold integers or bools", str(y.dtype)))
    check_devices(name("state"), x.state.device, named)
    lead = ("layers",) if folds else ()
    check_rank(name("state"), x.state, *lead, "slots", "HV", "V", "K")
    layers = x.state.shape[0] if folds else 1
    sizes = {"layers": layers} if folds else {}
    HV, V, K = x.state.shape[-3:]
    check_rank(name("d"), x.d, *lead, "rings", "HV", "L", "V")
    check_rank(name("k_rows"), x.k_rows, *lead, "rings", "H", "L", "K")
    rings, L, H = x.d.shape[-4], x.d.shape[-2], x.k_rows.shape[-3]
    if x.ring_slots is None and rings != x.state.shape[-4]:
        expected = f"have a ring for each of the {x.state.shape[-4]} slots"
        raise ValueError(must(name("d"), expected, str(rings)))
    if min(H, HV, K, V, L) < 1 or HV % H != 0:
        raise ValueError(f"{name('k_rows')} must have heads that divide HV={HV}, got H={H}")
    for field in ("d", "d_low"):
        check_shape(name(field), getattr(x, field), **sizes, rings=rings, HV=HV, L=L, V=V)
    for field in ("k_rows", "k_low"):
        check_shape(name(field), getattr(x, field), **sizes, rings=rings, H=H, L=L, K=K)
    check_shape(name("g_rows"), x.g_rows, **sizes, rings=rings, HV=HV, L=L)
    if x.g_rows.dtype != torch.float32:
        raise ValueError(must(name("g_rows"), "be torch.float32", str(x.g_rows.dtype)))
    for field, low, count in (("d", "d_low", 3), ("k_rows", "k_low", 3), ("g_rows", None, 2)):
        y = getattr(x, field)
        if not y[(0,) * (y.dim() - count)].is_contiguous() if y.numel() else False:
            expected = "have dense rings"
            raise ValueError(must(name(field), expected, f"strides {list(y.stride())}"))
        z = None if low is None else getattr(x, low)
        if z is not None and z.stride() != y.stride():
            expected = f"have the strides of {name(field)}, {list(y.stride())}"
            raise ValueError(must(name(low or ""), expected, str(list(z.stride()))))
    if (x.d_low is None) != (x.k_low is None):
        raise ValueError(f"{name('d_low')} and {name('k_low')} must be both given, or both None")
    check_rank(name("slots"), x.slots, "N")
    N = x.slots.shape[0]
    for field in ("ring_slots", "accepted", "track_slots", "track_steps"):
        check_shape(name(field), getattr(x, field), N=N)
    by = {"N": N} if x.ring_slots is None else {"rings": rings}
    for field in ("counts", "bases", "flags"):
        check_shape(name(field), getattr(x, field), **by)
    T = 0
    if not folds:
        T = _check_tokens(x, name, H, HV, K, V)
        check_shape(name("cu_seqlens"), x.cu_seqlens, **{"N + 1": N + 1})
        if x.cu_seqlens is None and N != T:
            raise ValueError(must(name("slots"), f"have shape [{T}], one a token", str(N)))
    for what, number in (("most", most), ("last_skipped", last_skipped)):
        if type(number) is not int:
            raise TypeError(must(names.get(what, what), "be an int", value_of(number)))
    if L > MOST_ROWS or most > MOST_DRAFTS:
        expected = f"have at most {MOST_ROWS} rows, with at most {MOST_DRAFTS} tokens a sequence"
        raise NotImplementedError(must(name("d"), expected, f"{L} and {most}"))
    check_flags(use_qk_l2norm_in_kernel=use_qk_l2norm)
    factor = real_or_none("scale", scale)
    for field, y in x._asdict().items():
        if y is not None and torch.is_grad_enabled() and y.requires_grad:
            raise NotImplementedError(
                f"{name(field)} has no gradient in a step, and requires one: detach it"
            )
    for field in ("state", "d", "k_rows", "g_rows", "d_low", "k_low", "out"):
        check_written(name(field), getattr(x, field))
    present = {n: y for n, y in named.items() if y is not None}
    return RingProblem(
        N=N,
        T=T,
        H=H,
        HV=HV,
        K=K,
        V=V,
        L=L,
        layers=layers,
        most=most,
        last_skipped=last_skipped,
        scale=K**-0.5 if factor is None else factor,
        use_qk_l2norm=use_qk_l2norm,
        q_dtype=x.k_rows.dtype if x.q is None else x.q.dtype,
        dtypes=tuple(y.dtype for y in (x.q, x.k, x.v, x.d, x.k_rows) if y is not None),
        state_dtype=x.state.dtype,
        tile_span=span(x.state.shape[-2:], x.state.stride()[-2:]),
        device=x.state.device,
        unreadable=why_unreadable(tuple(present), tuple(present.values())),
    )


def _check_tokens(
    x: RingOperands, name: Callable[[str], str], H: int, HV: int, K: int, V: int
) -> int:
    """Checks the tensors of tokens, and returns their number."""
    assert x.q is not None and x.k is not None and x.v is not None and x.out is not None
    check_rank(name("q"), x.q, "T", "H", "K")
    check_rank(name("k"), x.k, "T", "H", "K")
    check_rank(name("v"), x.v, "T", "HV", "V")
    T = x.q.shape[0]
    check_qkv(x.q, x.k, x.v, T=T)
    check_shape(name("q"), x.q, T=T, H=H, K=K)
    check_shape(name("v"), x.v, T=T, HV=HV, V=V)
    check_shape(name("out"), x.out, T=T, HV=HV, V=V)
    if x.out.dtype != x.v.dtype or x.q.dtype != x.k.dtype:
        expected = "have one dtype with k, and out that of v"
        raise ValueError(must(name("q"), expected, f"{x.q.dtype} and {x.out.dtype}"))
    for field in ("a", "b"):
        check_shape(name(field), getattr(x, field), T=T, HV=HV)
    for field in ("A_log", "dt_bias"):
        check_shape(name(field), getattr(x, field), HV=HV)
    return T


def _check_contents(x: RingOperands, p: RingProblem, names: Names, most: int) -> None:
    """Checks the contents of CPU tensors. most: the most records that a ring may hold."""

    def check(field: str, found: list[int], least: int, end: int) -> None:
        bad = [i for i in found if not least <= i < end]
        if bad:
            expected = f"be at least {least} and less than {end}"
            raise ValueError(must(names.get(field, field), expected, str(bad[0])))

    slots = x.slots.tolist()
    rings = slots if x.ring_slots is None else x.ring_slots.tolist()
    live = [n for n, slot in enumerate(slots) if slot > p.last_skipped]
    ends = {"slots": x.state.shape[-4], "ring_slots": x.d.shape[-4]}
    for field, found in (("slots", slots), ("ring_slots", rings)):
        used, name = [found[n] for n in live], names.get(field, field)
        check(field, used, 0, ends[field])
        if len(set(used)) < len(used):
            raise ValueError(must(name, "hold each live slot at most once", str(used)))
    at = {n: n if x.ring_slots is None else rings[n] for n in live}
    held = {n: int(x.counts[i]) for n, i in at.items()}
    check("counts", list(held.values()), 0, most + 1)
    if x.bases is not None:
        check("bases", [int(x.bases[i]) for i in at.values()], 0, p.L)
    if x.track_slots is None or x.track_steps is None or x.accepted is None:
        return
    for n in live:
        slot, step, accepted = int(x.track_slots[n]), int(x.track_steps[n]), int(x.accepted[n])
        check("accepted", [accepted], 0, held[n] + 1)
        if slot > p.last_skipped and step >= 0:
            check("track_slots", [slot], 0, ends["slots"])
            check("track_steps", [step], 0, max(accepted, 1))
            if slot in slots:
                expected = "be no slot of the call's sequences"
                raise ValueError(must(names.get("track_slots", ""), expected, str(slot)))


def _triton_supports(problem: RingProblem) -> str | None:
    if problem.unreadable is not None:
        return problem.unreadable
    refusal = triton_refusal(problem.dtypes, problem.device.type, problem.K)
    refusal = refusal or states_refusal(problem.state_dtype)
    if refusal is not None:
        return refusal
    if problem.tile_span >= MAX_STATE_SPAN or problem.T >= MAX_TOKENS:
        return "The Triton kernel takes less than 2^31 elements between a state's first and last."
    return None


def _load_triton(name: str) -> Callable[[], Run]:
    def load() -> Run:
        from gdn_triton.recurrent.triton import ring_plan

        found: Run = getattr(ring_plan, name)
        return found

    return load


def _load_reference(name: str) -> Callable[[], Run]:
    def load() -> Run:
        from gdn_triton.recurrent import reference_rings

        found: Run = getattr(reference_rings, name)
        return found

    return load


def _operator(title: str, name: str) -> Operator[RingProblem, Run]:
    return Operator(
        title,
        (
            missing("cuda", "The CUDA library has no kernel for rings of records."),
            Backend("triton", _triton_supports, _load_triton(name)),
            Backend("reference", reference_supports, _load_reference(name)),
        ),
    )


STEP: Final = _operator("ring_step", "step")
DRAFTS: Final = _operator("ring_drafts", "drafts")
FOLD: Final = _operator("fold_rings", "fold")
