"""Steps with a window whose tokens are nodes of trees, and `accept_window`."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import FP16, FP32, same_bits
from torch import Tensor
from window_cases import Case, Decoding

from gdn_triton import accept_window, fold_window, make_window, recurrent_step

TREES = Case(rows=11, max_tokens=4)
LAYOUTS = pytest.mark.parametrize("v_first", [False, True])


@pytest.fixture(autouse=True, params=["triton", "reference"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "triton":
        pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setenv("GDN_BACKEND", request.param)
    return str(request.param)


def random_trees(N: int, T: int) -> Tensor:
    """[N, T]: of each node one before it, or none."""
    columns = [torch.randint(-1, t, (N,)) if t > 0 else torch.full((N,), -1) for t in range(T)]
    return torch.stack(columns, 1).to(torch.int32)


def path_to(parents: Tensor, n: int, t: int) -> list[int]:
    path = [t]
    while parents[n, path[0]] >= 0:
        path.insert(0, int(parents[n, path[0]]))
    return path


def along(x: dict[str, Tensor], path: list[int]) -> dict[str, Tensor]:
    return {name: y[:, path] for name, y in x.items()}


def check_nodes(run: Decoding, x: dict[str, Tensor], parents: Tensor, o: Tensor, n: int) -> None:
    """Takes the rows o [T, HV, V] of sequence n for `finish`, each against its path alone."""
    for t in range(o.shape[0]):
        path = path_to(parents, n, t)
        exactly, narrow = (
            run._walk(along(x, path), n, len(path), wide)[0][-1:] for wide in (True, False)
        )
        run.seen.append((o[t : t + 1].clone(), exactly, narrow.to(o.dtype)))


def accept(run: Decoding, x: dict[str, Tensor], parents: Tensor, lengths: list[int]) -> Tensor:
    """Some path of each sequence counts; [N, L]."""
    N, T = parents.shape
    rows = torch.full((N, T), -1)
    for n in range(N):
        if lengths[n] > 0:
            path = path_to(parents, n, int(torch.randint(0, lengths[n], ())))
            rows[n, : len(path)] = torch.tensor(path)
    given = rows.to(run.device, torch.int32)
    accept_window(run.window, run.slots, run.positions, given)
    counts = (rows >= 0).sum(1).tolist()
    for n in run.live:
        if counts[n] > 0:
            path = rows[n, : counts[n]].tolist()
            after = [run._walk(along(x, path), n, counts[n], w)[1][0] for w in (True, False)]
            run.exact[n], run.narrow[n] = after
    run.positions = run.positions + torch.tensor(counts).to(run.positions)
    return rows


@LAYOUTS
@pytest.mark.parametrize("pool", [FP32, FP16], ids=str)
def test_trees(pool: torch.dtype, v_first: bool, device: str) -> None:
    """Trees of one to four nodes, of which one path is accepted; heads are folded in between."""
    run = Decoding(replace(TREES, pool=pool, v_first=v_first, dtype=pool), device)
    for i in range(10):
        T = 4 - i % 4
        x, parents = run.tokens(T), random_trees(TREES.N, T)
        o = recurrent_step(**run.arguments(x), parents=parents.to(device))
        assert not o[1].any(), "padding gives 0"
        for n in run.live:
            check_nodes(run, x, parents, o[n], n)
        accept(run, x, parents, [T] * TREES.N)
    fold_window(run.pool, run.window, run.slots, run.positions, state_v_first=v_first)
    run.check_states()
    run.finish()


@LAYOUTS
def test_packed_trees(v_first: bool, device: str) -> None:
    """A sequence has no node, or up to four; one token of the call is of no sequence."""
    case = replace(TREES, N=4, v_first=v_first, raw=True, mixed=True, index=torch.int64)
    run = Decoding(case, device)
    for _ in range(8):
        lengths = torch.randint(0, 5, (4,)).tolist()
        x, parents = run.tokens(4), random_trees(4, 4)
        # Parents of skipped sequences, and of tokens of none, may hold anything.
        given = parents.clone()
        given[1] = 99
        row = torch.cat([*(given[n, :m] for n, m in enumerate(lengths)), torch.tensor([77])])
        row = row[None].to(device, torch.int32)
        o = recurrent_step(**run.arguments(x, lengths), parents=row)
        for n, part in enumerate(o[: sum(lengths)].split(lengths)):
            if n in run.live:
                check_nodes(run, x, parents, part, n)
        accept(run, x, parents, lengths)
    run.finish()


def cloned(run: Decoding) -> dict[str, Any]:
    window = run.window._replace(**{name: y.clone() for name, y in tensors(run).items()})
    return {"state": run.pool.clone(), "window": window}


def tensors(run: Decoding) -> dict[str, Tensor]:
    return dict(zip(run.window._fields[:5], run.window[:5], strict=True))


@LAYOUTS
def test_chain(v_first: bool, backend: str, device: str) -> None:
    """Each node the parent of the next one: the bits of a call without parents."""
    run = Decoding(replace(TREES, v_first=v_first), device)
    chain = torch.arange(-1, 3, device=device).expand(TREES.N, 4)
    for _ in range(3):
        x = run.tokens(4)
        beside = cloned(run)
        given = {**run.arguments(x), **beside}
        o = run.step(x, [3] * TREES.N)
        other = recurrent_step(**given, parents=chain)
        if backend == "triton":
            assert same_bits(o, other)
            for mine, theirs in zip(run.window[:5], beside["window"][:5], strict=True):
                assert same_bits(mine, theirs)
        torch.testing.assert_close(o, other)
        torch.testing.assert_close(run.pool, beside["state"])


def test_accept_moves_records(device: str) -> None:
    """The j-th node of a path to the row of token j, past the last row too; nothing else moves."""
    case = replace(TREES, N=3, raw=True)
    run = Decoding(case, device)
    run.positions = torch.tensor([9, 5, 90], device=device).to(case.index)
    for x in (run.window.u, run.window.k, run.window.g):
        x.copy_(torch.randn_like(x))
    run.window.calls.copy_(run.window.calls * 0)
    for n in run.live:
        run.window.calls[run.slots[n].long()] = int(run.positions[n])
    before = {name: y.clone() for name, y in tensors(run).items()}
    path = torch.tensor([[0, 2, 3, -1], [5, 1, 1, 0], [1, 2, -1, -1]], device=device)
    accept_window(run.window, run.slots, run.positions, path)
    expected = {name: y.clone() for name, y in before.items()}
    for n, moves in ((0, {1: 2, 2: 3}), (2, {0: 1, 1: 2})):
        slot, position = int(run.slots[n]), int(run.positions[n])
        for j, token in moves.items():
            for name in ("u", "k", "g"):
                source = before[name][slot, (position + token) % case.rows]
                expected[name][slot, (position + j) % case.rows] = source
    assert all(same_bits(y, expected[name]) for name, y in tensors(run).items())


def test_compiled(device: str) -> None:
    """A step and the move of the accepted path are one graph, with the bits of eager calls."""
    run = Decoding(TREES, device)
    parents = torch.tensor([-1, 0, 0, 2], device=device).expand(TREES.N, 4)
    path = torch.tensor([0, 2, 3], device=device).expand(TREES.N, 3)

    def both(x: dict[str, Any]) -> Tensor:
        o = recurrent_step(**x, parents=parents)
        accept_window(x["window"], x["read_slots"], x["positions"], path)
        return o

    x = run.arguments(run.tokens(4))
    beside = cloned(run)
    compiled: Any = torch.compile(both, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(x), both({**x, **beside}))
    for mine, theirs in zip(run.window[:5], beside["window"][:5], strict=True):
        assert same_bits(mine, theirs)


PATH = torch.tensor([[0, 2], [0, 1]])
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"path": None}, TypeError, "path must be a torch.Tensor, got NoneType"),
    ({"path": PATH[0]}, ValueError, "path must have 2 dimensions"),
    ({"path": PATH[:1]}, ValueError, "path must have shape .*N=2"),
    ({"path": PATH.float()}, ValueError, "path must be int32 or int64"),
    ({"path": PATH.flip(1)}, ValueError, r"path must have increasing tokens .* got \[2, 0\] at in"),
    ({"path": torch.tensor([[0, 1], [-1, 2]])}, ValueError, "path must have increasing tokens in"),
    ({"path": PATH + 2}, ValueError, "path must have tokens of the call at its position, got 4 at"),
    ({"slots": torch.tensor([1, 1])}, ValueError, "slots must name no slot twice"),
    ({"positions": torch.zeros(2)}, ValueError, "positions must be int32 or int64"),
    ({"window": None}, TypeError, "window must be a gdn_triton.StepWindow"),
]


@pytest.mark.parametrize("changes, error, message", WRONG, ids=[w[2][:30] for w in WRONG])
def test_wrong_paths(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    window = make_window(3, 1, 2, 16, 8, FP32, "cpu", rows=8, max_tokens=4)
    window.calls.fill_(-1)
    window.calls[:, 2:6] = 2
    x = {"window": window, "slots": torch.tensor([0, 2]), "positions": torch.tensor([2, 2])}
    with pytest.raises(error, match=message):
        accept_window(**{**x, "path": PATH, **changes})


def test_path_beyond_max_tokens() -> None:
    """No call has written these rows: `calls` of a new window holds 0, as a first call's does."""
    window = make_window(3, 1, 2, 16, 8, FP32, "cpu", rows=8, max_tokens=4)
    slots = torch.tensor([0, 2])
    with pytest.raises(ValueError, match=r"path must have tokens of the call at its .*, got 4 at"):
        accept_window(window, slots, slots * 0, torch.tensor([[0, 4], [0, 1]]))


def test_wrong_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    # Contents are judged on the CPU, where Triton runs nothing if there is a GPU.
    monkeypatch.setenv("GDN_BACKEND", "auto")
    run = Decoding(TREES, "cpu")
    x = run.arguments(run.tokens(4))
    for parents, message in (
        (torch.zeros(2, 4).int(), r"parents must have shape \[3, 4\], a parent a token"),
        (torch.full((3, 4), 2), "parents must be -1 or an earlier token of the same sequence"),
    ):
        with pytest.raises(ValueError, match=message):
            recurrent_step(**x, parents=parents)
    wide = replace(TREES, rows=80, max_tokens=33)
    run = Decoding(wide, "cpu")
    with pytest.raises(ValueError, match="window must have max_tokens of at most 32 with parents"):
        recurrent_step(**run.arguments(run.tokens(2)), parents=torch.tensor([[-1, 0]] * 3))
