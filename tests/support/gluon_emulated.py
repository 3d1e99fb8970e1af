"""Runs the Gluon kernels on a CPU, looks for races, and holds their results to float64.

    PYTHONPATH=.:tests/support python -m gluon_emulated [--random 20] [--select REGEX]

With the installed Triton, of whose releases the package lists some (RELEASES of
gdn_triton/_host/gluon.py). Needs g++ on x86_64. `--random` adds random calls, of
every size, length and kind of gate.
"""

import argparse
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from backward_cases import STRENGTHS as OF_BACKWARD
from backward_cases import every_nth
from emulator.gluon import emulated
from gluon_gradients import check_gradients
from helpers import BF16, FP16, FP32, FP64, Case, Inputs, assert_within_budget, make_inputs
from narrow import Arithmetic, narrow_forward
from torch import Tensor

from gdn_triton import reference
from gdn_triton._triton.tiles import Gpu
from gdn_triton.chunk.problem import Inputs as Operands
from gdn_triton.chunk.problem import Problem
from gdn_triton.chunk.triton.forward import readable_inputs
from gdn_triton.chunk.triton.hopper import fold, launch
from gdn_triton.chunk.triton.hopper.gradients import launch as gradients
from gdn_triton.chunk.triton.hopper.segments import Cut
from gdn_triton.chunk.triton.steps.l2norm import l2norm_kernel, launch_rows

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "mild": lambda g: g,
    "none": torch.zeros_like,
    "strong": lambda g: 60 * g,
    # About 2^-150 in a chunk, but for a token that grows in the second one.
    "steep": lambda g: torch.where(every_nth(g, 100), torch.full_like(g, 1.0), 0.1 * g - 1.6),
    "growing": lambda g: -0.02 * g,
    # Some heads forget everything at some tokens.
    "far": lambda g: torch.where(_every_37th(g), torch.full_like(g, -80.0), 0.05 * g),
    # A segment of two chunks forgets its start by its last chunk alone, but not by both.
    "returning": lambda g: torch.where(_every_second_chunk(g), 0.75, -0.75) + 0 * g,
    "alternating": OF_BACKWARD["alternating"],
    "infinite": lambda g: torch.where(_every_37th(g), torch.full_like(g, -torch.inf), 0.05 * g),
}


def _every_37th(g: Tensor) -> Tensor:
    return (torch.arange(g.shape[1]) % 37 == 5)[None, :, None]


def _every_second_chunk(g: Tensor) -> Tensor:
    return (torch.arange(g.shape[1]) // 64 % 2 == 1)[None, :, None]


def problem_of(
    case: Case, dtype: torch.dtype, *, v_first: bool = False, norm: bool = False
) -> Problem:
    return Problem(
        B=case.B,
        T=case.tokens,
        H=case.H,
        HV=case.HV,
        K=case.K,
        V=case.V,
        N=case.N,
        q_dtype=dtype,
        k_dtype=dtype,
        v_dtype=dtype,
        device=torch.device("cpu"),
        scale=case.K**-0.5,
        chunk_size=64,
        is_varlen=case.packed,
        has_initial_state=True,
        output_final_state=True,
        state_v_first=v_first,
        use_qk_l2norm=norm,
        use_beta_sigmoid=False,
        allow_neg_eigval=False,
        use_gate=False,
        needs_grad=False,
    )


def operands_of(x: Inputs, *, v_first: bool = False) -> Operands:
    return readable_inputs(
        Operands(
            q=x.q,
            k=x.k,
            v=x.v,
            g=x.g,
            beta=x.beta,
            initial_state=x.initial_state.mT if v_first else x.initial_state,
            A_log=None,
            dt_bias=None,
            cu_seqlens=x.cu_seqlens,
        )
    )


class _RowsOfQueries:
    """The kernel of ``l2norm_fwd`` on the first dimension of its grid, as the emulator's grids have
    one dimension: the kernel then normalises q alone."""

    arg_names = l2norm_kernel.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return l2norm_kernel[grid[:1]]


def normalized_apart(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """As ``l2norm_fwd``, in two launches."""
    made = torch.empty(q.shape, dtype=q.dtype), torch.empty(k.shape, dtype=k.dtype)
    for x, y in zip((q, k), made, strict=True):
        launch_rows(_RowsOfQueries(), x, x, q_out=y, k_out=y, factors=None)
    return made


def check_forward(
    case: Case,
    gates: str,
    shape: launch.Shape,
    dtype: torch.dtype,
    seed: int,
    *,
    races: bool,
    segments: int = 0,
    norm: bool = False,
) -> None:
    """segments: chunks of each but the first, which has one more if the seed is odd, or 0 for whole
    sequences. norm: q and k are normalised. Where the kernel does this itself, the result has the
    same bits as with a separate norm."""
    x = make_inputs(case, dtype, "cpu", seed=seed)
    x = x.but(g=GATES[gates](x.g))
    if norm:
        x = x.but(q=7 * x.q, k=0.01 * x.k)
    v_first = seed % 2 == 1
    problem = problem_of(case, dtype, v_first=v_first, norm=norm)
    operands = operands_of(x, v_first=v_first)
    if seed % 4 != 2:
        # TMA loads these states of several tiles, if their channels of V are contiguous.
        assert operands.initial_state is not None
        operands = operands._replace(initial_state=operands.initial_state.contiguous())
    written = ("o", "ht", "o_desc", "taken", "starts", "shifts", "windows")
    cut = None
    if segments > 0:
        cut = Cut(
            first=segments + seed % 2,
            rest=segments,
            first_states=shape.states,
            later_states=shape.states,
            windows=gates != "none",
        )
    with (
        mock.patch.object(launch, "shape_of_whole", lambda *_: shape),
        mock.patch.object(launch, "choose_cut", lambda *_: cut),
        # With few multiprocessors a block has several tiles.
        mock.patch.object(launch, "gpu_of", lambda _: Gpu("cuda", 90, 2 if seed % 3 else 132)),
        mock.patch.object(fold, "gpu_of", lambda _: Gpu("cuda", 90, 132)),
        mock.patch.object(launch, "l2norm_fwd", side_effect=normalized_apart) as separate_norm,
        mock.patch.object(
            launch, "norm_inside", lambda p, _, shape: p.use_qk_l2norm and shape.states == 2
        ),
        emulated(
            {"hopper_fwd_kernel": written, "l2norm_kernel": ("q_out", "k_out")},
            seed=seed,
            races=races,
        ),
    ):
        o, state = launch.hopper_fwd(problem, operands)
        if norm and segments == 0 and shape is launch.TWO:
            assert not separate_norm.called
            with mock.patch.object(launch, "norm_inside", lambda *_: False):
                other_o, other_state = launch.hopper_fwd(problem, operands)
            assert separate_norm.called
            assert torch.equal(o, other_o) and torch.equal(state, other_state), "other bits"
    assert state is not None
    exact_o, exact_state = reference.recurrent_gated_delta_rule(
        *x.exact(),
        initial_state=x.initial_state.to(FP64),
        cu_seqlens=x.cu_seqlens,
        use_qk_l2norm=norm,
    )
    arithmetic = Arithmetic(dtype, "cuda")
    narrow_o, narrow_state = narrow_forward(x, case, arithmetic, use_qk_l2norm=norm)
    unit = arithmetic.unit
    assert_within_budget("o", o, exact_o, narrow_o, dtype=dtype, unit=unit)
    state = state.mT if v_first else state
    assert_within_budget("state", state, exact_state, narrow_state, dtype=FP32, unit=unit)
    if case.packed:
        assert (o[:, case.offsets()[-1] :] == 0).all(), "tokens of no sequence"


# The arguments that the kernel of the gradients writes.
GRADIENTS = {"hopper_gradients_kernel": ("dq", "dk", "shares", "across")}
# The largest decay of a token in log2 units.
STRENGTHS = (0.2, 0.0, 20.0)


def check_chunks(case: Case, strength: float, seed: int, *, races: bool, norm: bool) -> None:
    # Two programs, so that each has several items.
    gradients.gpu_of = lambda device: Gpu("cuda", 90, 2)  # type: ignore[assignment]
    with emulated(GRADIENTS, seed=seed, races=races):
        run = gradients.chunk_gradients
        check_gradients(case, "cpu", run, strength=strength, seed=seed, norm=norm)


def gluon_case(name: str, **sizes: Any) -> Case:
    sizes = {"H": 1, "HV": 2, "K": 128, "V": 128, "spare": 8, **sizes}
    return Case(name, "", chunk_size=64, **sizes)


PACKED = gluon_case("packed", lengths=(0, 70, 64, 1, 130), orphans=70)
PADDED = gluon_case("padded", T=150, B=2, HV=1)
LONG = gluon_case("long", lengths=(0, 70, 64, 330), orphans=170, HV=1)
FORWARD = [
    (PACKED, "mild", launch.ONE, BF16, 0),
    (PACKED, "far", launch.TWO, BF16, 0),
    (PADDED, "strong", launch.TWO, BF16, 0),
    (gluon_case("small", T=130, K=40, V=72), "mild", launch.ONE, BF16, 0),
    # More tiles without a chunk, one after the other, than the loader announces at once.
    (gluon_case("empty", lengths=(0,) * 6 + (70,) + (0,) * 6 + (64,)), "mild", launch.TWO, BF16, 0),
    (PACKED, "far", launch.TWO, FP16, 0),
    (PADDED, "strong", launch.ONE, FP16, 0),
    (PADDED, "steep", launch.TWO, BF16, 0),
    (PADDED, "steep", launch.ONE, FP16, 0),
    (LONG, "none", launch.TWO, BF16, 2),
    (LONG, "far", launch.ONE, FP16, 1),
    (gluon_case("small", T=200, B=2, K=40, V=72, HV=1), "strong", launch.TWO, BF16, 1),
    (gluon_case("wide", T=460, K=40, V=72, HV=1), "returning", launch.ONE, BF16, 2),
    # The later segments of one sequence have all slots, and there are programs for another.
    (gluon_case("alone", lengths=(257, 17), K=40, V=72, HV=1), "mild", launch.ONE, BF16, 1),
    (
        gluon_case("keys", lengths=(0, 70, 330), orphans=70, HV=1, K=200, V=72),
        "far",
        launch.WIDE,
        BF16,
        0,
    ),
    (gluon_case("keys", T=330, HV=1, K=256, V=64), "steep", launch.WIDE, FP16, 0),
    # Maps of more chunks than their rings have stages.
    (gluon_case("maps", T=830, HV=1), "none", launch.TWO, BF16, 6),
    (gluon_case("sums", T=64, K=64, V=64, HV=1), "alternating", launch.ONE, FP16, 0),
    (gluon_case("sums", T=64, K=64, V=64, HV=1), "alternating", launch.ONE, BF16, 0),
]


# With the norm of q and k.
NORMALIZED = [
    (PACKED, "mild", launch.TWO, BF16, 0),
    (gluon_case("small", T=130, K=40, V=72), "far", launch.TWO, FP16, 0),
]
# The last field: with the norm of q and k.
CHUNKS = [
    (PACKED, 0.2, False),
    (PACKED, 0.2, True),
    (gluon_case("three", T=150, B=2, H=2, HV=6), 20.0, True),
    (gluon_case("small", lengths=(70, 0, 64), K=40, V=72, H=2, HV=2), 0.2, False),
    (gluon_case("least", T=65, K=64, V=8, HV=1), 0.0, True),
]


def listed() -> Iterator[tuple[str, Callable[[], None]]]:
    for seed, (case, gates, shape, dtype, segments) in enumerate([*FORWARD, *NORMALIZED]):
        norm = seed >= len(FORWARD)
        name = f"forward-{case.name}-{gates}-{shape.states}-{dtype}-segments-{segments}"
        check = partial(check_forward, case, gates, shape, dtype, seed, segments=segments)
        yield f"{name}{'-norm' * norm}", partial(check, races=True, norm=norm)
    for seed, (case, strength, norm) in enumerate(CHUNKS):
        name = f"gradients-{case.name}-{strength}{'-norm' * norm}"
        yield name, partial(check_chunks, case, strength, seed, races=True, norm=norm)


def drawn(seed: int) -> tuple[str, Callable[[], None]]:
    draw = random.Random(seed)
    sizes: dict[str, Any] = {
        "K": draw.choice([8, 40, 64, 96, 128]),
        "V": draw.choice([8, 24, 64, 72, 128, 200]),
        "HV": draw.choice([1, 2]),
        "spare": 8 * draw.randrange(2),
    }
    if draw.random() < 0.6:
        some = [0, 1, draw.randrange(2, 63), 64, 65, draw.randrange(66, 200)]
        sizes["lengths"] = tuple(draw.choice(some) for _ in range(draw.randrange(1, 5)))
        sizes["orphans"] = draw.choice([0, 3, 70])
        if sum(sizes["lengths"]) == 0:
            sizes["lengths"] = (5,)
    else:
        sizes |= {"T": draw.choice([1, 63, 64, 65, 130, 200]), "B": draw.choice([1, 2])}
    if draw.random() < 0.5 and sizes["V"] <= 128:
        H = draw.choice([1, 2])
        case = gluon_case("random", **{**sizes, "H": H, "HV": H * draw.choice([1, 2, 3])})
        strength, name = draw.choice(STRENGTHS), f"gradients-random-{seed}-{sizes}"
        races, norm = draw.random() < 0.5, draw.random() < 0.5
        return name, partial(check_chunks, case, strength, seed, races=races, norm=norm)
    case, gates = gluon_case("random", **sizes), draw.choice(list(GATES))
    shape, dtype = draw.choice([launch.ONE, launch.TWO]), draw.choice([BF16, FP16])
    races, segments = draw.random() < 0.5, draw.choice([0, 0, 1, 2])
    if draw.random() < 0.2:
        sizes["K"] = draw.choice([136, 192, 256])
        case = replace(case, K=sizes["K"])
        shape, segments = launch.WIDE, 0
    if sizes.get("T", 200) <= 64 * (segments + 1):
        segments = 0  # nothing follows the first segment
    if dtype is FP16 and gates == "returning":
        gates = "far"  # o would exceed float16
    norm = draw.random() < 0.25
    name = f"forward-random-{seed}-{gates}-{shape.states}-{dtype}-segments-{segments}-{sizes}"
    name += "-norm" * norm
    check = partial(check_forward, case, gates, shape, dtype, seed, segments=segments, norm=norm)
    return name, partial(check, races=races)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the Gluon kernels on a CPU.")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="random calls")
    parser.add_argument("--first", type=int, default=0, help="seed of the first random call")
    parser.add_argument("--select", default="", metavar="REGEX", help="some of the calls")
    options = parser.parse_args()
    calls = [*listed(), *(drawn(options.first + i) for i in range(options.random))]
    failed = 0
    for name, check in calls:
        if not re.search(options.select, name):
            continue
        start = time.monotonic()
        try:
            check()
            said = "right"
        except (AssertionError, RuntimeError) as error:
            failed += 1
            said = f"FAILED: {error}"
        print(f"{name}: {said} ({time.monotonic() - start:.1f} s)", flush=True)
    print(f"{failed} failed")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
