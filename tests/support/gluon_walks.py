"""Runs the Gluon walks of the backward on a CPU, looks for races, and holds their results to
float64.

    PYTHONPATH=.:tests/support python -m gluon_walks [--select REGEX]

With the installed Triton, of whose releases the package lists some (RELEASES of
gdn_triton/_host/gluon.py). Needs g++ on x86_64.
"""

import argparse
import re
import time
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import torch
from backward_cases import STRENGTHS
from emulator.gluon import emulated
from helpers import BF16, FP32, FP64, Case, assert_within_budget, make_inputs
from torch import Tensor

from gdn_triton._triton.tiles import Gpu
from gdn_triton.chunk.triton.fused import segments as fused
from gdn_triton.chunk.triton.gradients.state import States
from gdn_triton.chunk.triton.hopper.walks import launch
from gdn_triton.chunk.triton.hopper.walks.launch import ONE, TWO, Plan
from gdn_triton.chunk.triton.shared.chunks import ChunkTable, make_chunks, max_chunks
from gdn_triton.constants import LOG2_DECAY_FLOOR, RCP_LN2

SCALE = -0.3
# With "forgets" a chunk decays by about 2^70, so a window has one or two chunks.
GATES = {**STRENGTHS, "forgets": lambda g: 6 * g}
WRITES = {
    "hopper_walks_kernel": (
        *("dx", "dh0", "dx_desc", "dh_desc", "u", "u_desc", "h_desc"),
        *("starts", "shifts", "windows", "marks"),
    )
}


def table_of(
    B: int, T: int, size: int, cu_seqlens: Tensor | None = None, *skipped: Any
) -> ChunkTable:
    """As ``make_chunks``, of sequences of which none is skipped."""
    assert skipped in ((), (None, -1))
    if cu_seqlens is None:
        return make_chunks(B, T, size)
    offsets = cu_seqlens.tolist()
    rows: list[tuple[int, int]] = []
    firsts = [0]
    for first, end in pairwise(offsets):
        rows += [(row, min(end - row, size)) for row in range(first, end, size)]
        firsts.append(len(rows))
    rows += [(row, -min(T - row, size)) for row in range(offsets[-1], T, size)]
    NT = max_chunks(T, len(offsets) - 1, size)
    rows += [(0, 0)] * (NT - len(rows))
    tables = [torch.tensor(x, dtype=torch.int32) for x in (rows, firsts)]
    return ChunkTable(size, NT, NT, cu_seqlens, *tables)


def chunk_table(case: Case) -> ChunkTable:
    """The table of a case of chunks of 64, as ``make_chunks`` makes it; packed cases have one empty
    slot more. The walks do not read the rows of slots."""
    if not case.packed:
        NT = -(-case.T // 64)
        return ChunkTable(64, NT, case.B * NT, None, None, None)
    first = [0]
    for length in case.lengths or ():
        first.append(first[-1] - (-length // 64))
    offsets = torch.tensor(first, dtype=torch.int32)
    return ChunkTable(64, first[-1] + 1, first[-1] + 1, case.cu_seqlens("cpu"), None, offsets)


class Given(NamedTuple):
    """q, k, v, do, g_cumsum, beta and states as ``state_bwd`` takes them."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    g_cumsum: Tensor
    beta: Tensor
    initial_state: Tensor
    dht: Tensor

    def to(self, dtype: torch.dtype) -> "Given":
        return Given(*(x.to(dtype) for x in self))


def make_given(case: Case, gates: str, seed: int) -> Given:
    """Tokens of no sequence are NaN."""
    x = make_inputs(case, BF16, "cpu", seed=seed)
    generator = torch.Generator().manual_seed(seed)
    do = torch.randn(*x.v.shape, generator=generator).to(BF16)
    decays = (GATES[gates](x.g).float() * RCP_LN2).clamp_min(LOG2_DECAY_FLOOR[FP32])
    g_cumsum = torch.zeros_like(decays)
    for _, b, first, end in case.spans():
        g_cumsum[b, first:end] = decays[b, first:end].cumsum(0)
    if case.packed:
        for y in (x.q, x.k, x.v, do):
            y[:, case.offsets()[-1] :] = torch.nan
    state = x.initial_state
    dht = torch.randn(*state.shape, generator=generator)
    return Given(x.q, x.k, x.v, do, g_cumsum, x.beta.float(), state.float(), dht)


def expected(case: Case, x: Given, slots: int, *, rounds: bool) -> dict[str, Tensor]:
    """dh, dx, dh0, h and v_new in the dtype of x, zeros where there is no chunk. rounds: operands
    of products to bfloat16."""

    def operand(y: Tensor) -> Tensor:
        return y.to(BF16).to(y.dtype) if rounds else y

    HV, G = case.HV, case.HV // case.H
    of_slots = x.q.new_zeros(slots, HV, case.K, case.V)
    out = {
        "dh": of_slots,
        "dx": torch.zeros_like(x.v),
        "dh0": x.dht.clone(),
        "h": of_slots.clone(),
        "v_new": torch.zeros_like(x.v),
    }
    now = x.initial_state.clone()
    spans = list(enumerate(case.spans()))
    chunks: dict[tuple[int, int], tuple[Tensor, ...]] = {}
    for slot, (_, b, first, end) in spans:
        for hv in range(HV):
            q, k = (y[b, first:end, hv // G] for y in (x.q, x.k))
            v, do = (y[b, first:end, hv] for y in (x.v, x.do))
            g, beta = (y[b, first:end, hv, None] for y in (x.g_cumsum, x.beta))
            decay = (g - g.mT).tril().exp2().tril()
            A = (beta * (k @ k.mT) * decay).tril(-1)
            eye = torch.eye(end - first, dtype=A.dtype)
            inverse = torch.linalg.solve_triangular(eye + A, eye, upper=False, unitriangular=True)
            P = operand(SCALE * (q @ k.mT) * decay)
            chunks[slot, hv] = (q, k, v, do, g, beta, operand(inverse - eye), P)
    for slot, (n, b, first, end) in reversed(spans):
        for hv in range(HV):
            q, k, _, do, g, beta, T, P = chunks[slot, hv]
            dh = out["dh0"][n, hv].clone()
            out["dh"][slot, hv] = dh
            y = P.mT @ do + (g[-1] - g).exp2() * (k @ operand(dh))
            dx = y + T.mT @ operand(y)
            out["dx"][b, first:end, hv] = dx
            read = q.mT @ operand(SCALE * g.exp2() * do)
            written = k.mT @ operand(beta * g.exp2() * dx)
            out["dh0"][n, hv] = g[-1].exp2() * dh + read - written
    for slot, (n, b, first, end) in spans:
        for hv in range(HV):
            _, k, v, _, g, beta, T, _ = chunks[slot, hv]
            h = now[n, hv].clone()
            out["h"][slot, hv] = h
            y = beta * (v - g.exp2() * (k @ operand(h)))
            u = y + T @ operand(y)
            out["v_new"][b, first:end, hv] = u
            now[n, hv] = g[-1].exp2() * h + k.mT @ operand((g[-1] - g).exp2() * u)
    return out


def walks_of(
    case: Case,
    x: Given,
    chunks: ChunkTable,
    plan: Plan,
    *,
    v_first: bool,
    store_dv: bool = False,
) -> States:
    """Launches both walks."""

    def laid_out(state: Tensor) -> Tensor:
        return state.mT.contiguous() if v_first else state

    states = {"initial_state": laid_out(x.initial_state), "dht": laid_out(x.dht)}
    return launch.walks(
        **x._asdict() | states,
        A_inv=x.q[:0],
        A_qk=x.q[:0],
        own=x.q[:0],
        chunks=chunks,
        scale=SCALE,
        N=case.N,
        K=case.K,
        A_is_strict=True,
        store_dh0=True,
        state_v_first=v_first,
        store_dv=store_dv,
        plan=plan,
    )


def check_walks(case: Case, gates: str, plan: launch.Plan, seed: int) -> None:
    chunks, x = chunk_table(case), make_given(case, gates, seed)
    v_first, store_dv = seed % 2 == 1, seed % 4 == 2
    if store_dv:
        x.beta[:, 3] = 2.0**-70
    again = "again" in case.name
    if again:
        # Nothing is written or read in the windows around the segments' border at row 128, where
        # the states then are what hardly survives of earlier ones.
        x.beta[:, 64:192], x.do[:, 64:192] = 0, 0
    with (
        mock.patch.object(launch, "make_chunks", table_of),
        mock.patch.object(fused, "gpu_of", lambda _: Gpu("cuda", 90, 132)),
        emulated(WRITES, seed=seed, races=True),
    ):
        states = walks_of(case, x, chunks, plan, v_first=v_first, store_dv=store_dv)
    found = states._asdict()
    if v_first and states.dh0 is not None:
        found["dh0"] = states.dh0.mT
    exact = expected(case, x.to(FP64), chunks.slots, rounds=False)
    narrow = expected(case, x.to(FP32), chunks.slots, rounds=True)
    if store_dv:
        factor = torch.where(x.beta < launch.LEAST_BETA, 1.0, x.beta)[..., None]
        exact["dx"], narrow["dx"] = exact["dx"] * factor, narrow["dx"] * factor
    used, end = len(list(case.spans())), case.offsets()[-1] if case.packed else case.T
    for name, right in exact.items():
        owned = {"dh": slice(used), "h": slice(used), "dh0": slice(None)}
        part: Any = owned.get(name, (slice(None), slice(end)))
        got, near = found[name][part], narrow[name][part]
        near = near if name == "dh0" else near.to(BF16)
        dtype = FP32 if name == "dh0" else BF16
        unit = torch.finfo(BF16).eps / 2
        assert_within_budget(name, got, right[part], near, dtype=dtype, unit=unit)
        if again and name in ("dh", "h"):
            slot = 1 if name == "dh" else 2
            error = (got[slot].to(FP64) - right[slot]).norm() / right[slot].norm()
            assert error < 0.02, f"{name}: a walk from a wrong state, {error:.2e}"


def walk_case(name: str, **sizes: Any) -> Case:
    sizes = {"H": 1, "HV": 2, "K": 128, "V": 128, "spare": 8, **sizes}
    return Case(name, "", chunk_size=64, **sizes)


WALKS = [
    (walk_case("packed", lengths=(0, 70, 64, 1, 130), orphans=70), "mild", Plan(TWO, TWO)),
    (walk_case("padded", T=330, HV=1), "closed", Plan(ONE, TWO)),
    (walk_case("padded", T=150, B=2, HV=1), "strong", Plan(ONE, ONE)),
    (walk_case("small", lengths=(100, 3), K=40, V=72), "all-closed", Plan(ONE, ONE)),
    (walk_case("several", T=70, K=64, V=200, HV=1), "none", Plan(TWO, TWO)),
    (walk_case("segments", T=330, HV=1), "mild", Plan(TWO, ONE, segment=2)),
    (
        walk_case("packed segments", lengths=(0, 70, 258, 64), orphans=70, HV=1),
        "mild",
        Plan(ONE, TWO, segment=1),
    ),
    (walk_case("windows of segments", T=520, HV=1), "forgets", Plan(TWO, TWO, segment=3)),
    (walk_case("segments again", T=330, HV=1), "forgets", Plan(ONE, TWO, segment=2)),
    (walk_case("small segments", T=150, B=2, K=40, V=72), "strong", Plan(TWO, ONE, segment=1)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the Gluon walks of the backward on a CPU.")
    parser.add_argument("--select", default="", metavar="REGEX", help="some of the calls")
    options = parser.parse_args()
    failed = 0
    for seed, (case, gates, plan) in enumerate(WALKS):
        name = f"walks-{case.name}-{gates}-{plan.forward.states}-{plan.back.states}"
        if not re.search(options.select, name):
            continue
        start = time.monotonic()
        try:
            check_walks(case, gates, plan, seed)
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
