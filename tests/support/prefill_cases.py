"""Helpers that the tests of prefill share."""

import inspect
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from helpers import FP32, FP64, Case, Inputs, assert_within_budget, make_inputs, same_bits
from narrow import Arithmetic, narrow_forward
from torch import Tensor

from gdn_triton import chunk_gated_delta_rule, chunk_prefill, fast, reference

gpu = pytest.mark.gpu("the CUDA library runs on GPUs only")


def ask_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend; skips where the CUDA library is asked for and not there."""
    reason = fast.why_unavailable() if name == "cuda" else None
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setenv("GDN_BACKEND", name)


SENTINEL = 123.0


@dataclass
class Call:
    """The tensors of a call, and what each sequence does. Skipped, unkept: sequences whose read and
    whose write slot is padding."""

    case: Case
    x: Inputs
    state: Tensor
    read: list[int]
    write: list[int]
    fresh: list[bool]
    v_first: bool
    skip: str
    given: dict[str, Any] = field(default_factory=dict)

    @property
    def padding(self) -> int:
        return 0 if self.skip == "non_positive" else -1

    @property
    def lengths(self) -> tuple[int, ...]:
        case = self.case
        return (case.T,) * case.B if case.lengths is None else case.lengths

    @property
    def starts(self) -> list[int]:
        return list(itertools.accumulate(self.lengths, initial=0))[:-1]

    def live(self, n: int) -> bool:
        return self.read[n] > self.padding

    def k_first(self, states: Tensor) -> Tensor:
        return states.transpose(-1, -2) if self.v_first else states

    def run(self, **more: Any) -> tuple[Tensor, Tensor | None]:
        device = self.x.q.device
        q, k, v, g, beta = self.x.tensors
        return chunk_prefill(
            self.state,
            torch.tensor(self.read, device=device),
            torch.tensor(self.write, device=device, dtype=torch.int32),
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            has_initial_state=torch.tensor([not fresh for fresh in self.fresh], device=device),
            cu_seqlens=self.x.cu_seqlens,
            chunk_size=self.case.chunk_size,
            state_v_first=self.v_first,
            skip=self.skip,
            **self.given,
            **more,
        )


def make_call(
    case: Case,
    dtype: torch.dtype,
    device: str,
    pool: torch.dtype = FP32,
    *,
    v_first: bool = False,
    skip: str = "negative",
    spare: int = 0,
) -> Call:
    """Sequence 1 is skipped, sequence 2 keeps nothing, every third is fresh, and a slot that no
    sequence may read holds NaN. Slots lie apart in memory. spare: slots after all others."""
    x = make_inputs(case, dtype, device)
    N, shape = case.N, (case.HV, case.V, case.K) if v_first else (case.HV, case.K, case.V)
    around = torch.full((2 * N + 2 + spare, 3 + math.prod(shape)), torch.nan, dtype=pool)
    around = around.to(device)
    state = around[:, 3:].unflatten(1, shape)
    # Slot 0 is nobody's.
    generator = torch.Generator().manual_seed(1)
    slots = torch.randperm(2 * N, generator=generator).add(1).tolist()
    read, write = slots[:N], slots[N:]
    fresh = [n % 3 == 0 for n in range(N)]
    padding = 0 if skip == "non_positive" else -1
    if N > 2:
        read[1], write[2] = padding, padding
    for n in range(N):
        if read[n] > 0 and not fresh[n]:
            state[read[n]] = torch.randn(shape, generator=generator).to(device, pool)
    return Call(case, x, state, read, write, fresh, v_first, skip)


def begun(call: Call) -> Tensor:
    """The states that sequences start from, [N, HV, K, V], K first, fp32."""
    case = call.case
    found = torch.zeros(case.N, case.HV, case.K, case.V, device=call.state.device)
    for n in range(case.N):
        if call.live(n) and not call.fresh[n]:
            found[n] = call.k_first(call.state)[call.read[n]].float()
    return found


def prefix(call: Call, initial: Tensor, tokens: int | None) -> tuple[Inputs, Case]:
    """The call packed, of each sequence its first `tokens` tokens or, if it has less, none."""
    lengths, rows = [], []
    for start, length in zip(call.starts, call.lengths, strict=True):
        kept = length if tokens is None else tokens * (length >= tokens)
        lengths.append(kept)
        rows += range(start, start + kept)
    index = torch.tensor(rows, dtype=torch.long, device=initial.device)
    case = replace(call.case, B=1, lengths=tuple(lengths), orphans=0)
    flat = [y.flatten(0, 1)[index][None] for y in call.x.tensors]
    return Inputs(*flat, initial, case.cu_seqlens(str(initial.device))), case


def expected(
    call: Call, initial: Tensor, tokens: int | None = None
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """o of the tokens of all sequences, packed, and final states K first: exact, and narrow."""
    x, case = prefix(call, initial, tokens)
    exact = reference.chunk_gated_delta_rule(
        *x.exact(),
        initial_state=initial.to(FP64),
        cu_seqlens=x.cu_seqlens,
        chunk_size=case.chunk_size,
    )
    arithmetic = Arithmetic(x.q.dtype, "cpu" if initial.device.type == "cpu" else "cuda")
    narrow = narrow_forward(x, case, arithmetic)
    return (exact.o, exact.final_state), narrow


def assert_state(
    name: str, call: Call, got: Tensor, exact: Tensor, narrow: Tensor, dtype: torch.dtype
) -> None:
    unit = Arithmetic(call.x.q.dtype, call.state.device.type).unit
    got = call.k_first(got)
    assert_within_budget(name, got, exact, narrow.to(dtype), dtype=dtype, unit=unit)


def assert_prefilled(call: Call, before: Tensor, o: Tensor, initial: Tensor) -> None:
    """o and the pool. `before`: the pool before the call, `initial` as `begun` found it then."""
    (exact_o, exact_final), (narrow_o, narrow_final) = expected(call, initial)
    case, dtype = call.case, call.x.q.dtype
    flat = o.flatten(0, 1)
    unit = Arithmetic(dtype, call.state.device.type).unit
    first = 0
    for n, (start, length) in enumerate(zip(call.starts, call.lengths, strict=True)):
        of_n, rows = slice(first, first + length), flat[start : start + length]
        first += length
        if not call.live(n):
            assert not rows.any(), "o of a skipped sequence is 0"
            continue
        assert_within_budget(
            f"o of {n}", rows, exact_o[0, of_n], narrow_o[0, of_n], dtype=dtype, unit=unit
        )
        if call.write[n] > call.padding:
            got, pool = call.state[call.write[n]], call.state.dtype
            assert_state(f"state {n}", call, got, exact_final[n], narrow_final[n], pool)
    assert not flat[sum(call.lengths) :].any() or case.lengths is None, "o of no sequence is 0"
    written = {call.write[n] for n in range(case.N) if call.live(n)}
    for slot in range(call.state.shape[0]):
        if slot not in written:
            assert same_bits(call.state[slot], before[slot]), f"slot {slot} was written"


def checkpoint_of(call: Call, every: int) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """(sequence, its checkpoint, exact, narrow) of all, from `call` before it has run."""
    initial = begun(call)
    for j in range(max(call.lengths) // every):
        (_, exact), (_, narrow) = expected(call, initial, (j + 1) * every)
        for n, length in enumerate(call.lengths):
            if call.live(n) and length >= (j + 1) * every:
                yield n, j, exact[n], narrow[n]


def assert_checkpoints(
    call: Call, checkpoints: Tensor, every: int, kept: list[tuple[int, int, Tensor, Tensor]]
) -> None:
    """All at once: after few tokens, the error of one state is a matter of luck."""
    found = [
        (checkpoints[call.starts[n] // every + j], exact, narrow) for n, j, exact, narrow in kept
    ]
    got, exact, narrow = (torch.stack(states) for states in zip(*found, strict=True))
    assert_state("checkpoints", call, got, exact, narrow, call.state.dtype)


def replace_tokens(x: Inputs, tokens: list[Tensor]) -> Inputs:
    return x.but(**dict(zip(("q", "k", "v", "g", "beta"), tokens, strict=True)))


def around(call: Call) -> tuple[Tensor, Tensor]:
    """o and the final states of the chunked op, from states that are gathered before it."""
    initial = begun(call)
    o, state = chunk_gated_delta_rule(
        *call.x.tensors,
        initial_state=initial.mT if call.v_first else initial,
        output_final_state=True,
        state_v_first=call.v_first,
        cu_seqlens=call.x.cu_seqlens,
        chunk_size=call.case.chunk_size,
    )
    assert state is not None
    return o, state


def arguments(
    device: str = "cpu", K: int = 16, V: int = 16, dtype: torch.dtype = FP32
) -> dict[str, Any]:
    """A good call: 3 sequences packed in 64 tokens, 8 slots."""
    q = torch.randn(1, 64, 1, K, device=device).to(dtype)
    return {
        "state": torch.zeros(8, 2, K, V, device=device),
        "read_slots": torch.arange(3, device=device),
        "q": q,
        "k": q.clone(),
        "v": torch.randn(1, 64, 2, V, device=device).to(dtype),
        "g": -torch.rand(1, 64, 2, device=device),
        "beta": torch.rand(1, 64, 2, device=device),
        "cu_seqlens": torch.tensor([0, 10, 26, 64], device=device),
    }


def validated(x: dict[str, Any]) -> dict[str, Any]:
    defaults = inspect.signature(chunk_prefill).parameters.values()
    return {p.name: p.default for p in defaults if p.default is not p.empty} | x


KEPT = {"checkpoint_every_n_tokens": 16, "chunk_size": 16}
