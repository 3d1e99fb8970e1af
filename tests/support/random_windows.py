r"""Random sequences of steps with a window, whose outputs and states are compared with float64.

    python tests/support/random_windows.py --count 100000 --seconds 150 --workers 16

A case has one kind of call, and 48 cases in a row have the same kind: sizes, heads, dtypes, the
layout of states, inputs before or after their activations, and padded, packed or in trees. A case
draws slots, positions, padding, lengths, accepted tokens, folds and moves to other slots. Some
calls run twice from equal memory, once without half of their sequences: on Triton the others have
the same bits. A case that fails prints the arguments that run it again. `random_runs.py` says how
cases are numbered and shared among processes, and what `--alike` and `--seconds` do.
"""

import argparse
import random
import sys
from functools import partial
from typing import Any, NamedTuple

import torch
from fast_parity import requested
from helpers import BF16, FP16, FP32, FP64, assert_within_budget, same_bits
from narrow_window import NarrowWindow
from random_runs import add_numbers, check_numbers, options_of
from torch import Tensor
from window_cases import Case, cloned_window, half_a_step, poisoned_window, rounded_states

from gdn_triton import accept_window, fold_window, recurrent_step, reference, restart_window

SPARE = 3  # slots without a sequence


class Kind(NamedTuple):
    case: Case
    packed: bool
    tree: bool


def random_kind(number: int, small: bool) -> Kind:
    rng = random.Random(f"kind {number}")
    # One call in five has more than 512 states, from which programs have more columns.
    sizes = [(128, 128, 1, 2, 5), (128, 128, 2, 4, 9), (128, 128, 4, 4, 140), (64, 128, 1, 3, 4),
             (96, 40, 2, 4, 6)]  # fmt: skip
    if small:
        sizes = [(16, 24, 1, 3, 3), (32, 16, 2, 2, 4)]
    K, V, H, HV, N = rng.choice(sizes)
    max_tokens = rng.choice((1, 1, 1, 2, 4, 4))
    dtype = rng.choice((BF16, BF16, BF16, FP16, FP32))
    if small:
        dtype = rng.choice((FP16, FP32))
    case = Case(
        K=K,
        V=V,
        H=H,
        HV=HV,
        N=N,
        rows=rng.choice((16, 16, 11, 2 * max_tokens)),
        max_tokens=max_tokens,
        dtype=dtype,
        pool=rng.choice((dtype, dtype, FP32, torch.int8)),
        v_first=rng.random() < 0.6,
        raw=rng.random() < 0.7,
        mixed=rng.random() < 0.5,
        l2norm=rng.random() < 0.8,
        index=rng.choice((torch.int32, torch.int64)),
    )
    return Kind(case, packed=rng.random() < 0.3, tree=rng.random() < 0.35)


class Walk:
    """The states [N, HV, K, V] of all sequences in float64."""

    def __init__(self, case: Case, states: Tensor) -> None:
        self.case, self.states = case, states

    def nodes(self, x: dict[str, Tensor], parents: Tensor) -> tuple[Tensor, Tensor]:
        """o [N, T, HV, V] and the states [N, T, HV, K, V] after each node. parents: [N, T]."""
        group = self.case.HV // self.case.H
        q, k, v, g, beta = (x[name].to(self.states.dtype) for name in ("q", "k", "v", "g", "beta"))
        if self.case.l2norm:
            q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
        q, k = (y.repeat_interleave(group, 2) for y in (q, k))
        every = torch.arange(self.case.N, device=v.device)
        out: list[Tensor] = []
        after: list[Tensor] = []
        for t in range(v.shape[1]):
            state = self.states
            if after:
                others = torch.stack(after, 1)[every, parents[:, t].clamp(0, t - 1)]
                state = torch.where((parents[:, t] >= 0)[:, None, None, None], others, state)
            state = state * g[:, t, :, None, None].exp()
            u = (v[:, t] - torch.einsum("nhkv,nhk->nhv", state, k[:, t])) * beta[:, t, :, None]
            state = state + k[:, t, :, :, None] * u[:, :, None, :]
            out.append(torch.einsum("nhkv,nhk->nhv", state, q[:, t]) * self.case.K**-0.5)
            after.append(state)
        return torch.stack(out, 1), torch.stack(after, 1)


def random_parents(rng: random.Random, N: int, T: int, tree: bool) -> list[list[int]]:
    return [[rng.randint(-1, t - 1) if tree else t - 1 for t in range(T)] for _ in range(N)]


def path_to(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


class Run:
    """A pool with sequences that are decoded, and the states that they should have."""

    def __init__(self, kind: Kind, rng: random.Random, device: str, backend: str) -> None:
        self.kind, self.rng, self.device = kind, rng, device
        self.often = 0.2 if backend == "triton" else 0.0  # how often bits are compared
        case = kind.case
        self.free = list(range(case.N + SPARE))
        rng.shuffle(self.free)
        self.slots = [self.free.pop() for _ in range(case.N)]
        self.positions = [rng.choice((0, 1, rng.randint(2, 1000))) for _ in range(case.N)]
        self.window = poisoned_window(case, case.N + SPARE, device)
        states = torch.randn(case.N, case.HV, case.K, case.V, device=device)
        self.pool = torch.zeros(case.N + SPARE, case.HV, case.K, case.V, device=device)
        self.pool = (self.pool + torch.nan if case.pool != torch.int8 else self.pool).to(case.pool)
        if case.v_first:
            self.pool = self.pool.mT.contiguous()
        states = rounded_states(states, case.pool)
        places = self.index(self.slots)
        given = states.mT if case.v_first else states
        if self.window.scales is None:
            self.pool[places.long()] = given.to(case.pool)
        else:
            self.window.pack(self.pool, places, given, state_v_first=case.v_first)
        restart_window(self.window, places, self.index(self.positions))
        self.exact = Walk(case, states.to(FP64))
        self.narrow = NarrowWindow(
            case, states.to(FP32), self.positions, folds_first=backend == "reference"
        )
        self.gates = {
            "A_log": torch.randn(case.HV, device=device) * 0.5,
            "dt_bias": torch.randn(case.HV, device=device),
        }
        self.seen: tuple[list[Tensor], ...] = [], [], []

    def index(self, numbers: Any) -> Tensor:
        return torch.tensor(numbers, device=self.device).to(self.kind.case.index)

    def tokens(self, T: int) -> tuple[dict[str, Tensor], ...]:
        """The tokens [N, T, ...] as a call is given them, and twice with g and beta after their
        activations: in float64 and in float32."""
        case, N, device = self.kind.case, self.kind.case.N, self.device
        q, k = torch.randn(2, N, T, case.H, case.K, device=device)
        if not case.l2norm:
            k = torch.nn.functional.normalize(k, dim=-1)
        v = torch.randn(N, T, case.HV, case.V, device=device)
        tokens = {name: y.to(case.dtype) for name, y in (("q", q), ("k", k), ("v", v))}
        if not case.raw:
            g, beta = torch.rand(2, N, T, case.HV, device=device)
            tokens |= {"g": -g, "beta": beta}
            return tokens, tokens, tokens
        a, b = torch.randn(2, N, T, case.HV, device=device)
        found = [{**tokens, "a": a, "b": b}]
        for dtype in (FP64, FP32):
            g = reference.gate(a.to(dtype), *(y.to(dtype) for y in self.gates.values()))
            found.append({**tokens, "g": g, "beta": b.to(dtype).sigmoid()})
        return tuple(found)

    def arguments(self, x: dict[str, Tensor], live: list[bool], **more: Any) -> dict[str, Any]:
        case = self.kind.case
        if case.mixed:
            parts = [x[name].flatten(-2) for name in ("q", "k", "v")]
            x = {name: y for name, y in x.items() if name not in ("q", "k", "v")}
            x["mixed_qkv"] = torch.cat(parts, -1)
        slots = [s if is_live else -1 for s, is_live in zip(self.slots, live, strict=True)]
        return {
            **x,
            **(self.gates if case.raw else {}),
            "read_slots": self.index(slots),
            "positions": self.index(self.positions),
            "use_qk_l2norm_in_kernel": case.l2norm,
            "state_v_first": case.v_first,
            **more,
        }

    def call(self, x: dict[str, Tensor], live: list[bool], copied: bool, **more: Any) -> Any:
        """Runs a step. Returns o, and the memory that the call has written, or a copy of the memory
        that it would have written."""
        pool, window = self.pool, self.window
        if copied:
            pool, window = pool.clone(), cloned_window(window)
        given = self.arguments(x, live, **more)
        v = x["v"]
        given["out"] = torch.full_like(v, torch.nan)
        o = recurrent_step(pool, window=window, **given)
        return o, pool, window

    def step(self) -> None:
        kind, rng, case = self.kind, self.rng, self.kind.case
        N, T = case.N, rng.randint(1, case.max_tokens)
        live = [rng.random() < 0.85 for _ in range(N)]
        lengths = [rng.randint(0, T) if kind.packed else T for _ in range(N)]
        given, x, narrow_x = self.tokens(T)
        parents = random_parents(rng, N, T, kind.tree)
        more: dict[str, Any] = {}
        if kind.packed:
            # The last token belongs to no sequence.
            given = {
                name: torch.cat([*(y[n, :m] for n, m in enumerate(lengths)), y[0, :1]])
                for name, y in given.items()
            }
            more["cu_seqlens"] = self.index([0, *lengths]).cumsum(0).to(case.index)
        if kind.tree:
            rows: Any = parents
            if kind.packed:
                rows = [
                    [p for row, m in zip(parents, lengths, strict=True) for p in row[:m]] + [-1]
                ]
            more["parents"] = self.index(rows)
        half = [is_live and rng.random() < 0.5 for is_live in live]
        again = self.call(given, half, True, **more) if rng.random() < self.often else None
        o, _, _ = self.call(given, live, False, **more)
        if kind.packed:
            assert not o[sum(lengths) :].any(), "rows of no sequence are 0"
            parts = o[: sum(lengths)].split(lengths)
        else:
            parts = o.unbind()
        for n in range(N):
            if not live[n]:
                assert not parts[n].any(), "padding gives 0"
        if again is not None:
            self.check_bits(again, parts, half, lengths)
        self.compare(x, narrow_x, parts, parents, live, lengths)

    def check_bits(self, again: Any, parts: Any, half: list[bool], lengths: list[int]) -> None:
        """again: the results of the call with the sequences `half`."""
        o, pool, window = again
        others = o[: sum(lengths)].split(lengths) if self.kind.packed else o.unbind()
        for n, is_half in enumerate(half):
            if is_half:
                assert same_bits(parts[n], others[n]), "o has other bits among other sequences"
                slot = self.slots[n]
                assert same_bits(pool[slot], self.pool[slot]), "a state has other bits"
                for mine, other in ((self.window.u, window.u), (self.window.g, window.g)):
                    assert same_bits(mine[slot], other[slot]), "a record has other bits"

    def compare(
        self,
        x: dict[str, Tensor],
        narrow_x: dict[str, Tensor],
        parts: Any,
        parents: list[list[int]],
        live: list[bool],
        lengths: list[int],
    ) -> None:
        """Keeps the outputs for `finish`, and accepts some tokens of each sequence."""
        rng, case, tree, device = self.rng, self.kind.case, self.kind.tree, self.device
        paths: list[list[int]] = [[] for _ in live]
        called = [is_live and m > 0 for is_live, m in zip(live, lengths, strict=True)]
        for n, is_called in enumerate(called):
            if is_called:
                paths[n] = path_to(parents[n], rng.randint(0, lengths[n] - 1))
        counted = [[t < m and is_live for t in range(len(parents[0]))]
                   for m, is_live in zip(lengths, live, strict=True)]  # fmt: skip
        mask = torch.tensor(counted, device=device)
        last_node = torch.tensor([path[-1] if path else 0 for path in paths], device=device)
        moves = torch.tensor([bool(path) for path in paths], device=device)
        parent = torch.tensor(parents, device=device)
        o, after = self.exact.nodes(x, parent)
        narrow = self.narrow.step(narrow_x, parent, self.positions, called)
        if mask.any():
            found = [parts[n][: lengths[n]] for n, is_live in enumerate(live) if is_live]
            self.seen[0].append(torch.cat([y.reshape(-1, case.HV, case.V) for y in found]))
            self.seen[1].append(o[mask])
            self.seen[2].append(narrow[mask])
        chosen = after[torch.arange(case.N, device=device), last_node]
        self.exact.states = torch.where(moves[:, None, None, None], chosen, self.exact.states)
        self.narrow.accept(paths, self.positions)
        if tree:
            T = len(parents[0])
            rows = [path + [-1] * (T - len(path)) for path in paths]
            slots = [s if path else -1 for s, path in zip(self.slots, paths, strict=True)]
            places = self.index(self.positions)
            accept_window(self.window, self.index(slots), places, self.index(rows))
        self.positions = [p + len(path) for p, path in zip(self.positions, paths, strict=True)]

    def fold(self, chosen: list[int]) -> None:
        """Folds these sequences, as before a copy."""
        slots = self.index([self.slots[n] for n in chosen])
        places = self.index([self.positions[n] for n in chosen])
        v_first = self.kind.case.v_first
        fold_window(self.pool, self.window, slots, places, state_v_first=v_first)
        self.narrow.fold(chosen, self.positions)

    def move(self, n: int) -> None:
        """Continues sequence n in another slot."""
        self.fold([n])
        old, new = self.slots[n], self.free.pop(0)
        self.pool[new] = self.pool[old]
        if self.window.scales is not None:
            self.window.scales[new] = self.window.scales[old]
        restart_window(self.window, self.index([new]), self.index([self.positions[n]]))
        self.free.append(old)
        self.slots[n] = new

    def finish(self) -> None:
        case = self.kind.case
        # Products with 16-bit tokens keep 22 bits of a float32 operand, and a GPU's exponential has
        # a relative error of up to 2^-22, which all numbers of a decayed state share.
        unit = half_a_step(case.pool)
        if self.device != "cpu":
            unit = max(unit, 2.0**-22)
        found, expected, narrow = (torch.cat(y) for y in self.seen)
        narrow = narrow.to(found.dtype)
        assert_within_budget("o", found, expected, narrow, dtype=case.dtype, unit=unit)
        self.fold(list(range(case.N)))
        places = torch.tensor(self.slots, device=self.device)
        states, dtype = (self.pool.mT if case.v_first else self.pool)[places], case.pool
        if self.window.scales is not None:
            states, dtype = states * self.window.scales[places][..., None, :], FP32
        exact, close = self.exact.states, self.narrow.states.to(dtype)
        assert_within_budget("states", states, exact, close, dtype=dtype, unit=unit)


def check_case(number: int, device: str, backend: str, *, small: bool, alike: int) -> None:
    rng = random.Random(number)
    torch.manual_seed(number)
    kind = random_kind(number // alike, small)
    run = Run(kind, rng, device, backend)
    for _ in range(rng.randint(4, kind.case.period + 6)):
        run.step()
        if rng.random() < 0.1:
            run.fold(rng.sample(range(kind.case.N), 2))
        if rng.random() < 0.1:
            run.move(rng.randrange(kind.case.N))
    run.finish()


def check_random(number: int, options: argparse.Namespace) -> str | None:
    """The fault of a random case, or None."""
    backend, alike = options.backend, options.alike
    try:
        with requested(backend):
            check_case(number, "cuda", backend, small=False, alike=alike)
    except AssertionError as why:
        return f"FAILED {number}: {random_kind(number // alike, small=False)}\n    {why}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description="Random steps with a window.")
    add_numbers(parser, alike=48, backend="triton")
    options = options_of(parser)
    sys.exit(check_numbers(partial(check_random, options=options), options))


if __name__ == "__main__":
    main()
