"""Helpers of the tests of windows: sequences that are decoded with a window, and the exact
results."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers import BF16, FP16, FP32, FP64, assert_within_budget, same_bits
from recurrent_cases import exact, normal, uniform
from torch import Tensor

import gdn_triton
from gdn_triton import StepWindow, recurrent_step
from gdn_triton.recurrent.problem import fold_period, turns
from gdn_triton.reference.recurrent import recurrent
from gdn_triton.reference.window import scaled_to_int8


@dataclass(frozen=True)
class Case:
    """max_tokens: D of the window. The second sequence is padding."""

    K: int = 16
    V: int = 24
    H: int = 1
    HV: int = 3
    N: int = 3
    rows: int = 6
    max_tokens: int = 1
    dtype: torch.dtype = FP32
    pool: torch.dtype = FP32
    v_first: bool = False
    raw: bool = False
    mixed: bool = False
    l2norm: bool = True
    index: torch.dtype = torch.int32

    @property
    def period(self) -> int:
        return fold_period(self.rows, self.max_tokens)


_BF16_MARK = pytest.mark.gpu("bf16 is not used in Triton's interpreter")
POOLS = [
    pytest.param(FP32, id="pool-fp32"),
    pytest.param(FP16, id="pool-fp16"),
    pytest.param(BF16, id="pool-bf16", marks=_BF16_MARK),
    pytest.param(torch.int8, id="pool-int8"),
]


def tokens_of(pool: torch.dtype) -> torch.dtype:
    """The dtype of the tokens of a test that has the tokens in the pool's dtype."""
    return FP16 if pool == torch.int8 else pool


LAYOUTS = pytest.mark.parametrize("v_first", [False, True], ids=["key-first", "value-first"])
TOKENS = ("q", "k", "v", "mixed_qkv", "g", "beta", "a", "b")
DRAFTS = Case(rows=7, max_tokens=3)
REAL = [
    Case(K=128, V=128, H=16, HV=32, N=5, rows=16, dtype=BF16, raw=True, mixed=True),
    Case(K=128, V=128, H=16, HV=32, N=5, rows=16, max_tokens=4, dtype=BF16, raw=True, mixed=True),
    Case(K=256, V=300, H=2, HV=4, rows=16, max_tokens=2, dtype=FP16),
    Case(K=100, V=300, H=2, HV=2, rows=32, dtype=FP32),
]


def rounded_states(states: Tensor, pool: torch.dtype) -> Tensor:
    """States [.., K, V] as a pool of this dtype keeps them."""
    if pool != torch.int8:
        return states.to(pool).to(states.dtype)
    numbers, scales = scaled_to_int8(states)
    return numbers * scales[..., None, :]


def half_a_step(pool: torch.dtype) -> float:
    """The largest error of a number that is stored, over the number or, in int8, over the largest
    of its channel."""
    return 1 / 254 if pool == torch.int8 else torch.finfo(pool).eps / 2


def poisoned_window(case: Case, slots: int, device: str) -> StepWindow:
    """Rows as former owners might have left them: NaN, and calls at positions to come."""
    sizes = (slots, case.H, case.HV, case.K, case.V, case.dtype, device)
    window = gdn_triton.make_window(
        *sizes, rows=case.rows, max_tokens=case.max_tokens, with_scales=case.pool == torch.int8
    )
    for x in (window.u, window.k, window.g):
        x.fill_(torch.nan)
    window.calls.fill_(2**31 - 1)
    return window


def cloned_window(window: StepWindow) -> StepWindow:
    parts = window._asdict().items()
    return window._replace(**{name: y.clone() for name, y in parts if isinstance(y, Tensor)})


@dataclass
class Decoding:
    """Sequences in the slots of a pool, and the states that they should have: `exact` in float64,
    `narrow` in float32 and rounded to the pool's dtype where a head is folded, [N, HV, K, V]."""

    case: Case
    device: str
    seen: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    slots: Tensor = field(init=False)
    positions: Tensor = field(init=False)
    pool: Tensor = field(init=False)
    window: StepWindow = field(init=False)
    exact: Tensor = field(init=False)
    narrow: Tensor = field(init=False)

    def __post_init__(self) -> None:
        case, device = self.case, self.device
        count = case.N + 2
        order = torch.randperm(count)[: case.N]
        order[1] = -1
        self.slots = order.to(device, case.index)
        self.positions = torch.tensor([7, 5, 90, 1, 33][: case.N], device=device).to(case.index)
        self.window = poisoned_window(case, count, device)
        states = normal(count, case.HV, case.K, case.V, device=device)
        if self.window.scales is None:
            stored = states = states.to(case.pool)
        else:
            stored, scales = scaled_to_int8(states)
            self.window.scales.copy_(scales)
            states = rounded_states(states, torch.int8)
        self.pool = stored.mT.contiguous() if case.v_first else stored
        gdn_triton.restart_window(self.window, self.slots, self.positions)
        self.exact = states[order].to(FP64)
        self.narrow = states[order].float()
        heads = case.HV
        self.A_log = normal(heads, device=device) * 0.5
        self.dt_bias = normal(heads, device=device)

    @property
    def live(self) -> list[int]:
        return [n for n in range(self.case.N) if n != 1]

    def tokens(self, T: int) -> dict[str, Tensor]:
        """q, k, v, and the gates as they are given, [N, T, ...]."""
        case, device = self.case, self.device
        q, k = normal(2, case.N, T, case.H, case.K, device=device)
        if not case.l2norm:
            k = torch.nn.functional.normalize(k, dim=-1)
        v = normal(case.N, T, case.HV, case.V, device=device)
        if case.raw:
            g, beta = normal(2, case.N, T, case.HV, device=device)
        else:
            g = -uniform(case.N, T, case.HV, device=device)
            beta = uniform(case.N, T, case.HV, device=device)
        x = {"q": q, "k": k, "v": v}
        return {**{name: y.to(case.dtype) for name, y in x.items()}, "g": g, "beta": beta}

    def arguments(self, x: dict[str, Tensor], lengths: list[int] | None = None) -> dict[str, Any]:
        """The arguments of a call with these tokens. lengths: the call is packed, and sequence n
        has its first lengths[n] tokens."""
        case = self.case
        if lengths is not None:
            x = {
                name: torch.cat([*(y[n, :m] for n, m in enumerate(lengths)), y[0, :1]])
                for name, y in x.items()
            }
        given: dict[str, Any] = dict(x)
        if case.mixed:
            parts = (given.pop(name).flatten(-2) for name in ("q", "k", "v"))
            given["mixed_qkv"] = torch.cat(list(parts), -1)
        if case.raw:
            given |= {"a": given.pop("g"), "b": given.pop("beta")}
            given |= {"A_log": self.A_log, "dt_bias": self.dt_bias}
        if lengths is not None:
            ends = torch.tensor([0, *lengths]).cumsum(0)
            given["cu_seqlens"] = ends.to(self.device, case.index)
        return {
            **given,
            "state": self.pool,
            "read_slots": self.slots,
            "use_qk_l2norm_in_kernel": case.l2norm,
            "state_v_first": case.v_first,
            "window": self.window,
            "positions": self.positions,
        }

    def _walk(self, x: dict[str, Tensor], n: int, m: int, wide: bool) -> tuple[Tensor, Tensor]:
        """o [m, HV, V] and the state after the first m tokens of sequence n, one at a time."""
        case = self.case
        state = (self.exact if wide else self.narrow)[n : n + 1].clone()
        heads = torch.tensor(turns(case.HV, case.period), device=self.device)
        out = []
        for t in range(m):
            one = {name: y[n : n + 1, t : t + 1] for name, y in x.items()}
            options = {"A_log": self.A_log, "dt_bias": self.dt_bias} if case.raw else {}
            given = {**one, **options, "initial_state": state}
            result = recurrent(
                **{name: exact(y) if wide else y for name, y in given.items()},
                use_qk_l2norm=case.l2norm,
                use_gate=case.raw,
                use_beta_sigmoid=case.raw,
            )
            out.append(result.o[0, 0])
            state = result.final_state
            if not wide:
                folds = (int(self.positions[n]) + t + 1 - heads) % case.period == 0
                rounded = rounded_states(state, case.pool)
                state = torch.where(folds[None, :, None, None], rounded, state)
        return torch.stack(out), state

    def check(self, x: dict[str, Tensor], o: Tensor, lengths: list[int]) -> None:
        """Takes o [N, T, HV, V] of the call, before the positions have moved on, for `finish`."""
        for n in self.live:
            if lengths[n] > 0:
                expected, _ = self._walk(x, n, lengths[n], wide=True)
                narrow, _ = self._walk(x, n, lengths[n], wide=False)
                self.seen.append((o[n, : lengths[n]].clone(), expected, narrow.to(o.dtype)))
                error = (o[n, : lengths[n]].double() - expected).abs().max()
                assert error < 0.1 * expected.abs().max(), "far off, whatever the arithmetic"

    def finish(self) -> None:
        """Compares all calls: a single one has too few values for a mean of their errors."""
        found, expected, narrow = (torch.cat(y) for y in zip(*self.seen, strict=True))
        unit = half_a_step(self.case.pool)
        dtype = self.case.dtype
        assert_within_budget("o", found, expected, narrow, dtype=dtype, unit=unit)

    def accept(self, x: dict[str, Tensor], accepted: list[int]) -> None:
        for n in self.live:
            if accepted[n] > 0:
                after = [self._walk(x, n, accepted[n], wide)[1][0] for wide in (True, False)]
                self.exact[n], self.narrow[n] = after
        self.positions = self.positions + torch.tensor(accepted).to(self.positions)

    def step(self, x: dict[str, Tensor], accepted: list[int] | None = None) -> Tensor:
        """A padded call that `finish` compares; then `accepted` of its tokens count, or all."""
        T = x["q"].shape[1]
        o = recurrent_step(**self.arguments(x))
        assert not o[1].any(), "padding gives 0"
        self.check(x, o, [T] * self.case.N)
        self.accept(x, [T] * self.case.N if accepted is None else accepted)
        return o

    def check_states(self) -> None:
        """Those in the pool, after they have been folded."""
        states = self.pool.mT if self.case.v_first else self.pool
        slots = self.slots[self.live].long()
        found, dtype = states[slots], self.case.pool
        narrow = rounded_states(self.narrow[self.live], dtype)
        unit = half_a_step(dtype)
        if self.window.scales is not None:
            found, dtype = found * self.window.scales[slots][..., None, :], FP32
        expected = self.exact[self.live]
        assert_within_budget("states", found, expected, narrow, dtype=dtype, unit=unit)


def copied(run: Decoding) -> dict[str, Any]:
    return {"state": run.pool.clone(), "window": cloned_window(run.window)}


def parts(run: Decoding) -> dict[str, Tensor]:
    return {name: y for name, y in run.window._asdict().items() if isinstance(y, Tensor)}


def same_windows(x: StepWindow, y: StepWindow) -> bool:
    scales = x.scales is None or same_bits(x.scales, y.scales)
    return scales and all(same_bits(*pair) for pair in zip(x[:5], y[:5], strict=True))
