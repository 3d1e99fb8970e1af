"""One CUDA graph of a step with a window, replayed ten thousand times with other slots, positions
and drafts."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from helpers import BF16, FP32, FP64, assert_within_budget
from torch import Tensor

from gdn_triton import StepWindow, make_window, recurrent_step, restart_window

pytest.importorskip("triton", reason="Triton is not installed")

ROWS, DRAFTS = 6, 3  # sequences of a call, and the most tokens of one
SEQUENCES, SLOTS, HEADS = 11, 16, 2
LONGEST = 400  # tokens after which a sequence ends


class Call(NamedTuple):
    """Each row has a sequence and its slot, or SEQUENCES and -1 for padding; its position, the
    number of its tokens, and how many of them count. moved: the sequences that begin before the
    call, each in another slot than before."""

    sequence: list[int]
    slot: list[int]
    position: list[int]
    length: list[int]
    accepted: list[int]
    moved: list[tuple[int, int]]


def drawn_calls(count: int, seed: int) -> Iterator[Call]:
    number = torch.Generator().manual_seed(seed)
    order = torch.randperm(SLOTS, generator=number).tolist()
    slots, free = order[:SEQUENCES], order[SEQUENCES:]
    positions = [LONGEST] * SEQUENCES
    for _ in range(count):
        moved = []
        for n in range(SEQUENCES):
            if positions[n] >= LONGEST:
                free.append(slots[n])
                slots[n], positions[n] = free.pop(0), 0
                moved.append((n, slots[n]))
        drawn = torch.randperm(SEQUENCES, generator=number)[:ROWS].tolist()
        padding, tokens, share = torch.rand(3, ROWS, generator=number).tolist()
        rows = [SEQUENCES if x < 0.15 else n for n, x in zip(drawn, padding, strict=True)]
        length = [int(x * (DRAFTS + 1)) for x in tokens]
        accepted = [min(m, 1 + int(x * m)) for x, m in zip(share, length, strict=True)]
        yield Call(
            rows,
            [-1 if n == SEQUENCES else slots[n] for n in rows],
            [0 if n == SEQUENCES else positions[n] for n in rows],
            length,
            accepted,
            moved,
        )
        for n, m in zip(rows, accepted, strict=True):
            if n < SEQUENCES:
                positions[n] += m


class Recurrence:
    """The states of all sequences, and of padding, [SEQUENCES + 1, HEADS, K, V]."""

    def __init__(self, size: int, device: str, dtype: torch.dtype) -> None:
        self.states = torch.zeros(SEQUENCES + 1, HEADS, size, size, dtype=dtype, device=device)

    def step(self, x: dict[str, Tensor], sequence: Tensor, accepted: Tensor) -> Tensor:
        """o [ROWS, DRAFTS, HEADS, V], with the state of each token kept up to the accepted one."""
        q, k, v, g, beta = (y.to(self.states.dtype) for y in x.values())
        q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
        state = kept = self.states[sequence]
        out = []
        for t in range(DRAFTS):
            state = state * g[:, t, :, None, None].exp()
            u = (v[:, t] - (state * k[:, t, :, :, None]).sum(-2)) * beta[:, t, :, None]
            state = state + k[:, t, :, :, None] * u[:, :, None, :]
            out.append((state * q[:, t, :, :, None]).sum(-2) * q.shape[-1] ** -0.5)
            kept = torch.where((accepted > t)[:, None, None, None], state, kept)
        self.states[sequence] = kept
        return torch.stack(out, 1)


def drawn_tokens(size: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    q, k = torch.randn(2, ROWS, DRAFTS, 1, size, device=device).to(dtype)
    v = torch.randn(ROWS, DRAFTS, HEADS, size, device=device).to(dtype)
    g, beta = torch.randn(2, ROWS, DRAFTS, HEADS, device=device)
    return {"q": q, "k": k, "v": v, "g": -0.1 * g.abs(), "beta": beta.sigmoid()}


def begin(pool: Tensor, window: StepWindow, moved: list[tuple[int, int]]) -> None:
    """Makes the slots of new sequences as an engine does: a state of zeros, at position 0."""
    places = torch.tensor([slot for _, slot in moved], device=pool.device)
    pool[places] = 0
    restart_window(window, places, torch.zeros_like(places))


def check_replays(count: int, size: int, dtype: torch.dtype, device: str, seed: int = 0) -> None:
    pool = torch.full((SLOTS, HEADS, size, size), torch.nan, device=device)
    window = make_window(SLOTS, 1, HEADS, size, size, dtype, device, max_tokens=DRAFTS)
    for y in (window.u, window.k, window.g):
        y.fill_(torch.nan)
    capacity = ROWS * DRAFTS
    given = {name: y.flatten(0, 1) for name, y in drawn_tokens(size, dtype, device).items()}
    slots = torch.full((ROWS,), -1, dtype=torch.int32, device=device)
    positions = torch.zeros(ROWS, dtype=torch.int32, device=device)
    ends = torch.zeros(ROWS + 1, dtype=torch.int32, device=device)
    out = torch.empty(capacity, HEADS, size, dtype=dtype, device=device)

    def step() -> None:
        options = {"window": window, "positions": positions, "out": out, "cu_seqlens": ends}
        recurrent_step(pool, slots, **given, **options, use_qk_l2norm_in_kernel=True)

    step()
    replay = step
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        replay = graph.replay
    exact, narrow = (Recurrence(size, device, y) for y in (FP64, FP32))
    row = torch.arange(DRAFTS, device=device)
    seen: tuple[list[Tensor], list[Tensor], list[Tensor]] = [], [], []
    for call in drawn_calls(count, seed):
        if call.moved:
            begin(pool, window, call.moved)
            for n, _ in call.moved:
                exact.states[n], narrow.states[n] = 0, 0
        sequence, slot, position, length, accepted = torch.tensor(call[:5]).to(device)
        slots.copy_(slot)
        positions.copy_(position)
        ends[1:] = length.cumsum(0)
        has = row < length[:, None]
        # Rows that have fewer tokens than DRAFTS leave the last places of the call to nobody.
        place = torch.where(has, ends[:-1, None] + row, capacity - 1).flatten()
        x = drawn_tokens(size, dtype, device)
        for name, y in given.items():
            y.fill_(torch.nan)
            y[place] = torch.where(has[(...,) + (None,) * (y.dim() - 1)], x[name], y[-1]).flatten(
                0, 1
            )
        replay()
        is_token = (has & (slot >= 0)[:, None])[:, :, None, None]
        found = out[place].view(ROWS, DRAFTS, HEADS, size)
        results = found, *(y.step(x, sequence, accepted) for y in (exact, narrow))
        for kept, o in zip(seen, results, strict=True):
            kept.append(torch.where(is_token, o, 0.0).to(o.dtype))
    found, expected, near = (torch.cat(y) for y in seen)
    unit = torch.finfo(dtype).eps / 2
    assert_within_budget("o", found, expected, near.to(dtype), dtype=dtype, unit=unit)


@pytest.mark.gpu("CUDA graphs")
@pytest.mark.long(10)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_ten_thousand_replays(dtype: torch.dtype, device: str) -> None:
    check_replays(10_000, 128, dtype, device)


def test_calls_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same schedule in the reference backend, for as many calls as the first sequences need to
    begin, and to end where they are short."""
    monkeypatch.setenv("GDN_BACKEND", "reference")
    monkeypatch.setitem(globals(), "LONGEST", 9)
    check_replays(30, 16, FP32, "cpu")
