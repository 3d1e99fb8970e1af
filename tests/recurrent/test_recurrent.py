"""The recurrence: the kernel against the specification, alone, in pools of states, and as the other
half of the chunked op.

The budget is that of helpers.py. The independent narrow computation is the specification's own line
in float32, whose products are in another order than the kernel's.
"""

import itertools
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import BF16, DTYPES, FP16, FP32, FP64, assert_within_budget, memory_of, same_bits
from torch import Tensor

import gdn_triton
from gdn_triton import fused_recurrent_gated_delta_rule, recurrent_step, reference
from gdn_triton.recurrent import plans
from gdn_triton.reference.recurrent import recurrent

pytest.importorskip("triton", reason="Triton is not installed")

_BF16_MARK = pytest.mark.gpu("bf16 is not used in Triton's interpreter")
POOLS = [
    pytest.param(FP32, id="pool-fp32"),
    pytest.param(FP16, id="pool-fp16"),
    pytest.param(BF16, id="pool-bf16", marks=_BF16_MARK),
]


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel, wherever a test does not choose."""
    monkeypatch.setenv("GDN_BACKEND", "triton")


# -------------------------------------------------------------------------------------- all pairs


def all_pairs(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows that have every two values of two factors together, found greedily."""
    names = list(factors)
    missing = {
        (a, x, b, y)
        for a, b in itertools.combinations(names, 2)
        for x, y in itertools.product(range(len(factors[a])), range(len(factors[b])))
    }
    rows: list[dict[str, Any]] = []
    while missing:
        a, x, b, y = min(missing)
        row = {a: x, b: y}
        for name in names:
            if name not in row:
                row[name] = max(
                    range(len(factors[name])),
                    key=lambda value: sum(
                        pair in missing
                        for other, chosen in row.items()
                        for pair in ((other, chosen, name, value), (name, value, other, chosen))
                    ),
                )
        missing -= {(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)}
        rows.append({name: factors[name][row[name]] for name in names})
    return rows


def identified(rows: Sequence[dict[str, Any]]) -> list[Any]:
    """pytest parameters; those with bf16 need a GPU."""
    parameters = []
    for n, row in enumerate(rows):
        marks = [_BF16_MARK] if BF16 in row.values() else []
        parameters.append(pytest.param(row, id=str(n), marks=marks))
    return parameters


# ------------------------------------------------------------------------------------------ inputs


@dataclass
class Sizes:
    B: int = 2
    T: int = 3
    H: int = 2
    HV: int = 4
    K: int = 16
    V: int = 24


def uniform(*shape: int, device: str = "cpu") -> Tensor:
    """The values come from the CPU's generator, so they are the same on every machine."""
    return torch.rand(*shape).to(device)


def normal(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randn(*shape).to(device)


def strided(x: Tensor) -> Tensor:
    """The same values in memory that is dense in no dimension, with NaN between."""
    around = torch.full((*x.shape[:-1], x.shape[-1] * 2 + 1), torch.nan, dtype=x.dtype)
    around = around.to(x.device)
    view = around[..., 1::2]
    view.copy_(x)
    return view


def decays(*shape: int, device: str) -> Tensor:
    """Natural logarithms from -1e-3 to -1."""
    return -(10 ** (-3 * uniform(*shape, device=device)))


def exact(x: Any) -> Any:
    return x.to(FP64) if isinstance(x, Tensor) and x.is_floating_point() else x


def spec_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The op's options by the names of the specification."""
    renamed = {
        "use_qk_l2norm_in_kernel": "use_qk_l2norm",
        "use_beta_sigmoid_in_kernel": "use_beta_sigmoid",
        "use_gate_in_kernel": "use_gate",
    }
    left = {renamed.get(name, name): x for name, x in options.items()}
    left.pop("output_final_state", None)
    return left


def assert_matches(
    x: Mapping[str, Any], options: Mapping[str, Any], o: Tensor, final_state: Tensor | None
) -> None:
    """o and the final state of a sequence call against the specification."""
    given = {**x, **spec_options(options)}
    expected = recurrent(**{name: exact(y) for name, y in given.items()})
    narrow = recurrent(**given)
    unit = torch.finfo(FP32).eps / 2
    dtype = x["v"].dtype
    assert_within_budget("o", o, expected.o, narrow.o.to(dtype), dtype=dtype, unit=unit)
    assert o.is_contiguous()
    if final_state is None:
        return
    assert final_state.is_contiguous()
    assert_within_budget(
        "final_state",
        final_state,
        expected.final_state,
        narrow.final_state,
        dtype=FP32,
        unit=unit,
    )


# ---------------------------------------------------------------------------------- sequence calls

SEQUENCES = {
    "dtype": [FP32, FP16, BF16],
    "v_dtype": [None, FP32],
    "sizes": [
        Sizes(),
        Sizes(B=1, T=1, H=1, HV=1, K=3, V=5),
        Sizes(T=2, H=1, HV=3, K=32, V=40),
        Sizes(B=3, T=1, K=20, V=70),
    ],
    "packed": [False, True],
    "g": [None, "decay", "gate", "gate and bias"],
    "gk": [False, True],
    "gv": [False, True],
    "beta": [None, "head", "value", "sigmoid", "value sigmoid", "twice sigmoid"],
    "scale": [None, 0.3, -1.0],
    "state": [None, FP32, FP16],
    "final": [True, False],
    "l2norm": [False, True],
    "v_first": [False, True],
    "strided": [False, True],
    "index": [torch.int32, torch.int64],
}


def sequence_call(row: Mapping[str, Any], device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors and options of a sequence call, by the op's names."""
    s: Sizes = row["sizes"]
    dtype = row["dtype"]
    B, T, N = s.B, s.T, s.B
    offsets = None
    if row["packed"]:
        # An empty sequence, and rows that belong to none.
        offsets = torch.tensor([0, T, T, 2 * T + 1], dtype=row["index"], device=device)
        B, T, N = 1, 2 * T + 3, 3
    q, k = normal(B, T, s.H, s.K, device=device), normal(B, T, s.H, s.K, device=device)
    if not row["l2norm"]:
        k = torch.nn.functional.normalize(k, dim=-1)
    x: dict[str, Any] = {
        "q": q.to(dtype),
        "k": k.to(dtype),
        "v": normal(B, T, s.HV, s.V, device=device).to(row["v_dtype"] or dtype),
    }
    options: dict[str, Any] = {
        "scale": row["scale"],
        "output_final_state": row["final"],
        "use_qk_l2norm_in_kernel": row["l2norm"],
        "state_v_first": row["v_first"],
    }
    if row["g"] == "decay":
        x["g"] = decays(B, T, s.HV, device=device)
    elif row["g"] is not None:
        x["g"] = normal(B, T, s.HV, device=device).to(dtype)
        x["A_log"] = normal(s.HV, device=device) * 0.5
        x["dt_bias"] = normal(s.HV, device=device) if row["g"] == "gate and bias" else None
        options["use_gate_in_kernel"] = True
    if row["gk"]:
        x["gk"] = decays(B, T, s.HV, s.K, device=device)
    if row["gv"]:
        x["gv"] = decays(B, T, s.HV, s.V, device=device).to(dtype)
    if row["beta"] is not None:
        shape = (B, T, s.HV, s.V) if "value" in row["beta"] else (B, T, s.HV)
        raw = "sigmoid" in row["beta"]
        x["beta"] = normal(*shape, device=device) if raw else uniform(*shape, device=device)
        options["use_beta_sigmoid_in_kernel"] = raw
        options["allow_neg_eigval"] = row["beta"] == "twice sigmoid"
    if row["state"] is not None:
        shape = (N, s.HV, s.V, s.K) if row["v_first"] else (N, s.HV, s.K, s.V)
        x["initial_state"] = normal(*shape, device=device).to(row["state"])
    if row["strided"]:
        x = {name: None if y is None else strided(y) for name, y in x.items()}
    if offsets is not None:
        x["cu_seqlens"] = offsets
    return x, options


def copies(x: Mapping[str, Any]) -> dict[str, Any]:
    return {name: y.clone() if isinstance(y, Tensor) else y for name, y in x.items()}


@pytest.mark.parametrize("row", identified(all_pairs(SEQUENCES)))
def test_sequences_match_the_specification(row: dict[str, Any], device: str) -> None:
    x, options = sequence_call(row, device)
    before = copies(x)
    o, final_state = fused_recurrent_gated_delta_rule(**x, **options)
    assert (final_state is not None) == row["final"]
    assert_matches(x, options, o, final_state)
    if row["packed"]:
        assert not o[:, int(x["cu_seqlens"][-1]) :].any(), "rows of no sequence are 0"
    for name, y in before.items():
        if isinstance(y, Tensor):
            assert torch.equal(y, x[name]), f"{name} was written"


REAL = [
    Sizes(B=3, T=5, H=16, HV=32, K=128, V=128),
    Sizes(B=2, T=3, H=4, HV=4, K=256, V=512),
    Sizes(B=2, T=70, H=2, HV=4, K=64, V=64),
    Sizes(B=2, T=3, H=2, HV=4, K=100, V=300),
]


@pytest.mark.gpu("real sizes, which would take minutes in the interpreter")
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sizes", REAL, ids=lambda s: f"{s.K}-{s.V}-{s.T}")
@pytest.mark.parametrize("dtype", DTYPES)
def test_real_sizes(
    dtype: torch.dtype, sizes: Sizes, packed: bool, v_first: bool, device: str
) -> None:
    row = {name: values[0] for name, values in SEQUENCES.items()}
    row |= {"dtype": dtype, "sizes": sizes, "packed": packed, "v_first": v_first, "l2norm": True}
    row |= {"g": "gate and bias", "beta": "sigmoid", "state": FP32}
    x, options = sequence_call(row, device)
    assert_matches(x, options, *fused_recurrent_gated_delta_rule(**x, **options))


def test_specification_is_the_recurrence_of_the_chunked_op() -> None:
    """Where both have a meaning they are one formula, written twice."""
    row = {name: values[0] for name, values in SEQUENCES.items()}
    row |= {"packed": True, "g": "decay", "beta": "head", "state": FP32}
    x, _ = sequence_call(row, "cpu")
    x = {name: exact(y) for name, y in x.items()}
    o, final_state = reference.recurrent_gated_delta_rule(**x)
    result = recurrent(**x)
    torch.testing.assert_close(result.o, o)
    torch.testing.assert_close(result.final_state, final_state)


@pytest.mark.parametrize("backend_name", ["triton", "reference"])
def test_empty_calls(backend_name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tokens: the state passes through. No sequences: nothing but rows of none."""
    monkeypatch.setenv("GDN_BACKEND", backend_name)
    q, v = torch.zeros(2, 0, 1, 4, device=device), torch.zeros(2, 0, 2, 3, device=device)
    state = normal(2, 2, 4, 3, device=device)
    options = {"initial_state": state, "output_final_state": True}
    o, final_state = fused_recurrent_gated_delta_rule(q, q, v, **options)
    assert o.shape == v.shape
    assert final_state is not None and torch.equal(final_state, state)
    q, v = normal(1, 3, 1, 4, device=device), normal(1, 3, 2, 3, device=device)
    offsets = torch.zeros(1, dtype=torch.int64, device=device)
    o, final_state = fused_recurrent_gated_delta_rule(
        q, q, v, output_final_state=True, cu_seqlens=offsets
    )
    assert final_state is not None and final_state.shape == (0, 2, 4, 3)
    assert torch.equal(o, torch.zeros_like(v))


def test_gates_of_minus_infinity_forget(device: str) -> None:
    row = {name: values[0] for name, values in SEQUENCES.items()}
    x, options = sequence_call({**row, "g": "decay", "beta": "head", "state": FP32}, device)
    x["g"][:, 1] = -torch.inf
    o, final_state = fused_recurrent_gated_delta_rule(**x, **options)
    assert_matches(x, options, o, final_state)


def test_a_nan_stays_in_its_sequence(device: str) -> None:
    row = {name: values[0] for name, values in SEQUENCES.items()}
    row |= {"packed": True, "g": "decay", "beta": "head", "state": FP32}
    x, options = sequence_call(row, device)
    clean, clean_state = fused_recurrent_gated_delta_rule(**x, **options)
    T = row["sizes"].T
    for name in ("q", "k", "v", "g", "beta"):
        x[name][:, :T] = torch.nan  # the first sequence
        x[name][:, 2 * T + 1 :] = torch.nan  # rows of none
    x["initial_state"][0] = torch.nan
    o, final_state = fused_recurrent_gated_delta_rule(**x, **options)
    assert o[:, :T].isnan().all()
    assert same_bits(o[:, T:], clean[:, T:])
    assert clean_state is not None and final_state is not None
    assert final_state[0].isnan().all()
    assert same_bits(final_state[1:], clean_state[1:])


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_has_its_bits_in_any_batch(
    dtype: torch.dtype, v_first: bool, device: str
) -> None:
    """Alone, among others, padded and packed."""
    row = {name: values[0] for name, values in SEQUENCES.items()}
    row |= {"dtype": dtype, "sizes": Sizes(B=3, T=2, H=1, HV=2)}
    row |= {"g": "gate", "beta": "sigmoid", "state": FP32}
    x, options = sequence_call({**row, "v_first": v_first, "l2norm": True}, device)
    together, states = fused_recurrent_gated_delta_rule(**x, **options)
    assert states is not None
    heads = ("A_log", "dt_bias")
    for n in (0, 2):
        one = {k: y if y is None or k in heads else y[n : n + 1] for k, y in x.items()}
        alone, state = fused_recurrent_gated_delta_rule(**one, **options)
        assert same_bits(alone, together[n : n + 1])
        assert state is not None and same_bits(state, states[n : n + 1])
    tokens = ("q", "k", "v", "g", "beta")
    B, T = x["q"].shape[:2]
    flat = {k: y.flatten(0, 1)[None] if k in tokens else y for k, y in x.items()}
    flat["cu_seqlens"] = torch.arange(0, B * T + 1, T, device=device)
    packed, packed_states = fused_recurrent_gated_delta_rule(**flat, **options)
    assert same_bits(packed.view_as(together), together)
    assert packed_states is not None and same_bits(packed_states, states)


# -------------------------------------------------------------------------------------- step calls


@dataclass
class Step:
    """A step call: its arguments, the tokens of each sequence, and where its states go."""

    arguments: dict[str, Any]
    spans: list[tuple[int, int, int]]  # of each sequence: row of [B, T], first token, end
    last_skipped: int
    v_first: bool

    def plain(self) -> dict[str, Any]:
        """Tokens as [B, T, ...] and the options by the specification's names, without states."""
        x = self.arguments
        state = x["state"].mT if self.v_first else x["state"]
        HV, K, V = state.shape[1:]
        packed = x.get("cu_seqlens") is not None
        if x.get("mixed_qkv") is not None:
            mixed = x["mixed_qkv"]
            H = (mixed.shape[-1] - HV * V) // (2 * K)
            q, k, v = mixed.split((H * K, H * K, HV * V), -1)
            q, k = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K))
            v = v.unflatten(-1, (HV, V))
        else:
            q, k, v = x["q"], x["k"], x["v"]
        raw = x.get("a") is not None
        g, beta = (x["a"], x["b"]) if raw else (x["g"], x["beta"])

        def tokens(y: Tensor, dims: int) -> Tensor:
            return y if y.dim() == dims else y[None] if packed else y[:, None]

        return {
            "q": tokens(q, 4),
            "k": tokens(k, 4),
            "v": tokens(v, 4),
            "g": tokens(g, 3),
            "beta": tokens(beta, 3),
            "A_log": x.get("A_log"),
            "dt_bias": x.get("dt_bias"),
            "scale": x.get("scale"),
            "use_gate": raw,
            "use_beta_sigmoid": raw,
            "allow_neg_eigval": x.get("allow_neg_eigval", False),
            "use_qk_l2norm": x.get("use_qk_l2norm_in_kernel", False),
            "state_v_first": self.v_first,
        }


STEPS = {
    "dtype": [FP32, FP16, BF16],
    "pool": [FP32, FP16, BF16],
    "tokens": ["one", "several", "packed", "packed row"],
    "mixed": [False, True],
    "raw": [False, True],
    "bias": [False, True],
    "twice": [False, True],
    "l2norm": [False, True],
    "v_first": [False, True],
    "write": ["same", "sequence", "token"],
    "skip": ["negative", "non_positive"],
    "index": [torch.int32, torch.int64],
    "out": [False, True],
    "strided": [False, True],
    "scale": [None, 0.4],
    "sizes": [Sizes(B=4, H=1), Sizes(B=3, T=2, H=1, HV=2, K=20, V=70)],
}


def step_call(row: Mapping[str, Any], device: str) -> Step:
    """Sequence 1 is skipped, and so is one write where there are any."""
    s: Sizes = row["sizes"]
    N, T, HV, K, V = s.B, s.T, s.HV, s.K, s.V
    lead: tuple[int, ...]
    cu_seqlens = None
    if row["tokens"] == "one":
        lead, spans = (N,), [(n, 0, 1) for n in range(N)]
        B, T = N, 1
    elif row["tokens"] == "several":
        lead, spans = (N, T), [(n, 0, T) for n in range(N)]
        B = N
    else:
        # The last sequence is empty, and two rows belong to none.
        offsets = [min(n * T, (N - 1) * T) for n in range(N + 1)]
        spans = [(0, a, b) for a, b in itertools.pairwise(offsets)]
        cu_seqlens = torch.tensor(offsets, dtype=row["index"], device=device)
        B, T = 1, offsets[-1] + 2
        lead = (T,) if row["tokens"] == "packed" else (1, T)
    dtype = row["dtype"]
    widths = (s.H * K, s.H * K, HV * V)
    mixed = normal(*lead, sum(widths) + 3, device=device).to(dtype)
    mixed = mixed[..., : sum(widths)]
    if row["strided"]:
        mixed = strided(mixed)
    x: dict[str, Any] = {
        "scale": row["scale"],
        "use_qk_l2norm_in_kernel": row["l2norm"],
        "state_v_first": row["v_first"],
        "skip": row["skip"],
        "cu_seqlens": cu_seqlens,
    }
    if not row["l2norm"]:
        key = mixed[..., widths[0] : 2 * widths[0]]
        key /= key.float().norm(dim=-1, keepdim=True).to(dtype)
    if row["mixed"]:
        x["mixed_qkv"] = mixed
    else:
        q, k, v = mixed.split(widths, -1)
        x["q"], x["k"] = q.unflatten(-1, (s.H, K)), k.unflatten(-1, (s.H, K))
        x["v"] = v.unflatten(-1, (HV, V))
    if row["raw"]:
        x["a"], x["b"] = normal(2, *lead, HV, device=device).to(dtype)
        x["A_log"] = normal(HV, device=device) * 0.5
        x["dt_bias"] = normal(HV, device=device).to(dtype) if row["bias"] else None
        x["allow_neg_eigval"] = row["twice"]
    else:
        x["g"], x["beta"] = decays(*lead, HV, device=device), uniform(*lead, HV, device=device)
    slots = 3 + N + B * T
    last = 0 if row["skip"] == "non_positive" else -1
    order = [slot for slot in torch.randperm(slots).tolist() if slot > last]
    read = order[:N]
    read[1] = last
    x["read_slots"] = torch.tensor(read, dtype=row["index"], device=device)
    write: Any = None
    if row["write"] == "sequence":
        write = order[N : 2 * N]
        write[2] = last - 3 if last < 0 else last
    elif row["write"] == "token":
        write = [[order[N + b * T + t] for t in range(T)] for b in range(B)]
        write[-1][0] = last
    if write is not None:
        x["write_slots"] = torch.tensor(write, dtype=row["index"], device=device)
    shape = (slots, HV, V, K) if row["v_first"] else (slots, HV, K, V)
    pool = normal(*shape, device=device).to(row["pool"])
    if row["strided"]:
        # As a page of a cache, with other things between the states.
        around = torch.full((slots, HV * K * V + 7), torch.nan, dtype=row["pool"], device=device)
        page = around[:, : HV * K * V].unflatten(1, shape[1:])
        page.copy_(pool)
        pool = page
    x["state"] = pool
    if row["out"]:
        x["out"] = torch.full((*lead, HV, V + 2), torch.nan, dtype=dtype, device=device)[..., :V]
    return Step(x, spans, last, row["v_first"])


def expected_step(call: Step, wide: bool) -> tuple[Tensor, dict[int, Tensor]]:
    """o [B, T, HV, V] and the states written, by slot, each sequence on its own. wide: in float64,
    no state rounded; else in float32, rounded as a pool of that dtype does."""
    x, plain = call.arguments, call.plain()
    tokens = ("q", "k", "v", "g", "beta")
    if wide:
        plain = {name: exact(y) for name, y in plain.items()}
    pool, write = x["state"], x.get("write_slots")
    o = torch.zeros(plain["v"].shape, dtype=FP64 if wide else FP32, device=pool.device)
    states: dict[int, Tensor] = {}
    for n, (b, start, end) in enumerate(call.spans):
        slot = int(x["read_slots"][n])
        if slot <= call.last_skipped:
            continue
        part = {k: y[b : b + 1, start:end] if k in tokens else y for k, y in plain.items()}
        initial = pool[slot : slot + 1]
        result = recurrent(
            **part,
            initial_state=exact(initial) if wide else initial,
            kept=None if wide else pool.dtype,
            keep_states=True,
        )
        o[b, start:end] = result.o[0]
        assert result.states is not None
        if write is not None and write.dim() == 2:
            for t in range(start, end):
                states[int(write[b, t])] = result.states[0, t - start]
        else:
            states[slot if write is None else int(write[n])] = result.final_state[0]
    return o, {slot: y for slot, y in states.items() if slot > call.last_skipped}


def assert_step_matches(call: Step, before: Tensor, o: Tensor) -> None:
    """o, the written states, and that nothing else of the pool was touched. before: the pool."""
    pool = call.arguments["state"]
    at_start = Step(
        {**call.arguments, "state": before}, call.spans, call.last_skipped, call.v_first
    )
    exact_o, exact_states = expected_step(at_start, wide=True)
    narrow_o, narrow_states = expected_step(at_start, wide=False)
    unit = torch.finfo(pool.dtype).eps / 2
    assert_within_budget(
        "o", o.view(exact_o.shape), exact_o, narrow_o.to(o.dtype), dtype=o.dtype, unit=unit
    )
    assert exact_states, "nothing is written"
    slots = sorted(exact_states)
    assert_within_budget(
        "states",
        pool[slots],
        torch.stack([exact_states[slot] for slot in slots]),
        torch.stack([narrow_states[slot] for slot in slots]).to(pool.dtype),
        dtype=pool.dtype,
        unit=unit,
    )
    others = [slot for slot in range(len(pool)) if slot not in exact_states]
    assert same_bits(pool[others], before[others]), "a slot that nobody writes was touched"


@pytest.mark.parametrize("row", identified(all_pairs(STEPS)))
@pytest.mark.parametrize("backend_name", ["triton", "reference"])
def test_steps_match_the_specification(
    row: dict[str, Any], backend_name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDN_BACKEND", backend_name)
    call = step_call(row, device)
    x = call.arguments
    before = x["state"].clone()
    copied = copies({name: y for name, y in x.items() if name not in ("state", "out")})
    o = recurrent_step(**x)
    assert_step_matches(call, before, o)
    if row["out"]:
        assert o is x["out"]
    for name, y in copied.items():
        if isinstance(y, Tensor):
            assert torch.equal(y, x[name]), f"{name} was written"
    # Skipped rows are 0, and so are those of no sequence.
    b, start, end = call.spans[1]
    rows = o if o.dim() == 4 else o[None] if x["cu_seqlens"] is not None else o[:, None]
    assert not rows[b, start:end].any()
    if x["cu_seqlens"] is not None:
        assert not rows[0, call.spans[-1][2] :].any()
    if row["strided"]:
        between = x["state"]._base
        assert between is not None and between[:, -7:].isnan().all()


@pytest.mark.gpu("real sizes, which would take minutes in the interpreter")
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("tokens", ["one", "several"])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(
    "sizes",
    [Sizes(B=70, T=4, H=16, HV=32, K=128, V=128), Sizes(B=3, T=3, H=2, HV=2, K=256, V=512)],
    ids=["128", "256"],
)
def test_real_steps(
    sizes: Sizes, pool: torch.dtype, tokens: str, v_first: bool, device: str
) -> None:
    row = {name: values[0] for name, values in STEPS.items()}
    row |= {"dtype": BF16, "pool": pool, "sizes": sizes, "tokens": tokens, "v_first": v_first}
    row |= {"mixed": True, "raw": True, "l2norm": True, "bias": True}
    call = step_call(row, device)
    before = call.arguments["state"].clone()
    assert_step_matches(call, before, recurrent_step(**call.arguments))


def one_token(x: Mapping[str, Any], t: int) -> dict[str, Any]:
    """The step call of token t alone."""
    tokens = ("q", "k", "v", "mixed_qkv", "g", "beta", "a", "b")
    one = {name: y[:, t] if name in tokens and y is not None else y for name, y in x.items()}
    return {**one, "out": None, "write_slots": None}


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(Sizes(B=2, T=3, H=1, HV=2), id="small"),
        pytest.param(
            Sizes(B=5, T=4, H=16, HV=32, K=128, V=128),
            id="real",
            marks=pytest.mark.gpu("a real size, which would take minutes in the interpreter"),
        ),
    ],
)
def test_verifying_is_decoding(
    sizes: Sizes, dtype: torch.dtype, pool: torch.dtype, v_first: bool, device: str
) -> None:
    """Bit for bit: after k of T tokens are accepted, the state kept for token k - 1 and the o up to
    it are those of k calls of one token. Padded and packed; and a call of T tokens that keeps the
    last state only."""
    row = {name: values[0] for name, values in STEPS.items()}
    row |= {"dtype": dtype, "pool": pool, "sizes": sizes, "tokens": "several", "write": "token"}
    row |= {"mixed": True, "raw": True, "l2norm": True, "v_first": v_first}
    call = step_call(row, device)
    x = call.arguments
    N, T = sizes.B, sizes.T
    x["read_slots"] = torch.arange(N, device=device)
    x["write_slots"] = N + torch.arange(N * T, device=device).view(N, T)
    decoded = x["state"].clone()
    last_only = x["state"].clone()
    o = recurrent_step(**x)
    for t in range(T):
        o_t = recurrent_step(**{**one_token(x, t), "state": decoded})
        assert same_bits(o[:, t], o_t)
        assert same_bits(x["state"][x["write_slots"][:, t]], decoded[:N])

    o_last = recurrent_step(**{**x, "state": last_only, "write_slots": None})
    assert same_bits(o_last, o)
    assert same_bits(last_only[:N], decoded[:N])

    flat = {k: x[k].flatten(0, 1) for k in ("mixed_qkv", "a", "b")}
    flat["cu_seqlens"] = torch.arange(0, N * T + 1, T, device=device)
    flat["write_slots"] = x["write_slots"].view(1, -1)
    packed = last_only.clone()
    packed[:N] = x["state"][:N]
    o_packed = recurrent_step(**{**x, **flat, "state": packed})
    assert same_bits(o_packed.view_as(o), o)
    assert same_bits(packed[N : N + N * T], x["state"][N : N + N * T])


def test_slots_and_neighbours_change_no_bits(device: str) -> None:
    """A sequence's o and state are the same wherever its state lies and whoever is beside it."""
    row = {name: values[0] for name, values in STEPS.items()}
    call = step_call({**row, "mixed": True, "raw": True, "sizes": Sizes(B=5)}, device)
    x = call.arguments
    x["read_slots"] = torch.tensor([6, 2, 0, 3, 1], device=device)
    before = x["state"].clone()
    o = recurrent_step(**x)
    for n, slot in enumerate(x["read_slots"].tolist()):
        tokens = ("mixed_qkv", "a", "b")
        alone = {name: y[n : n + 1] if name in tokens else y for name, y in x.items()}
        alone["state"] = before[slot : slot + 1].clone()
        alone["read_slots"] = torch.zeros(1, dtype=torch.int32, device=device)
        assert same_bits(recurrent_step(**alone), o[n : n + 1])
        assert same_bits(alone["state"][0], x["state"][slot])


def test_unread_memory_may_hold_anything(device: str) -> None:
    """NaN in slots that no sequence reads, and in the tokens of skipped ones, reaches nobody."""
    row = {name: values[0] for name, values in STEPS.items()}
    call = step_call({**row, "mixed": True, "raw": True, "tokens": "several"}, device)
    x = call.arguments
    clean = recurrent_step(**{**x, "state": x["state"].clone()})
    read = [slot for slot in x["read_slots"].tolist() if slot >= 0]
    unread = [slot for slot in range(len(x["state"])) if slot not in read]
    x["state"][unread] = torch.nan
    for name in ("mixed_qkv", "a", "b"):
        x[name][1] = torch.nan
    assert same_bits(recurrent_step(**x), clean)
    assert x["state"][unread].isnan().all()
    assert x["state"][read].isfinite().all()


def test_everything_skipped(device: str) -> None:
    row = {name: values[0] for name, values in STEPS.items()}
    x = step_call(row, device).arguments
    x["read_slots"] = torch.full_like(x["read_slots"], -1)
    before = x["state"].clone()
    assert not recurrent_step(**x).any()
    assert same_bits(x["state"], before)


# ------------------------------------------------------------------------- beside the chunked op


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_then_decode_is_prefill(dtype: torch.dtype, pool: torch.dtype, device: str) -> None:
    """n tokens by the chunked op and m by steps, against all n + m in float64. The narrow
    computation takes the same way: the chunked form, the state rounded to the pool's dtype."""
    n, m, N = 20, 3, 2
    row = {name: values[0] for name, values in SEQUENCES.items()}
    row |= {"dtype": dtype, "sizes": Sizes(B=N, T=n + m, H=1, HV=2), "g": "decay", "beta": "head"}
    x, _ = sequence_call(row, device)
    whole = recurrent(**{name: exact(y) for name, y in x.items()})
    prompt = {name: y[:, :n] for name, y in x.items()}
    o, final_state = gdn_triton.chunk_gated_delta_rule(
        **prompt, output_final_state=True, chunk_size=16
    )
    assert final_state is not None
    narrow = reference.chunk_gated_delta_rule(
        *(prompt[name].to(dtype).float() for name in ("q", "k", "v", "g", "beta")), chunk_size=16
    )
    narrow_state = narrow.final_state.to(dtype).to(pool)
    slots = torch.tensor([3, 1], device=device)
    state = torch.zeros(5, *final_state.shape[1:], dtype=pool, device=device)
    state[slots] = final_state.to(pool)
    unit = max(torch.finfo(pool).eps, torch.finfo(dtype).eps) / 2
    for t in range(n, n + m):
        token = {name: y[:, t] for name, y in x.items()}
        o = recurrent_step(state, slots, **token)
        step = {name: y[:, t : t + 1] for name, y in x.items()}
        narrow_step = recurrent(**step, initial_state=narrow_state, kept=pool)
        narrow_state = narrow_step.final_state.to(pool)
        assert_within_budget(
            f"o of token {t}",
            o,
            whole.o[:, t],
            narrow_step.o[:, 0].to(dtype),
            dtype=dtype,
            unit=2 * unit,
        )
    assert_within_budget(
        "state", state[slots], whole.final_state, narrow_state, dtype=pool, unit=2 * unit
    )


# ------------------------------------------------------------------------- backends and gradients


def test_o_has_the_dtype_of_v(device: str) -> None:
    q, v = normal(1, 2, 1, 4, device=device), normal(1, 2, 1, 4, device=device).to(FP16)
    assert fused_recurrent_gated_delta_rule(q, q, v)[0].dtype == FP16
    assert fused_recurrent_gated_delta_rule(q.to(FP16), q, v.to(FP32))[0].dtype == FP32


def test_unknown_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "tritn")
    x = torch.zeros(1, 1, 1, 4)
    with pytest.raises(ValueError, match="GDN_BACKEND must be one of auto, cuda, reference"):
        fused_recurrent_gated_delta_rule(x, x, x)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dtype": FP64}, "one of q, k, v is float64"),
        ({"K": 257}, "keys of up to 256 channels"),
        ({"grad": True}, "has no backward"),
    ],
)
def test_what_the_kernel_refuses(changes: dict[str, Any], sentence: str, device: str) -> None:
    q = torch.zeros(1, 1, 1, changes.get("K", 4), dtype=changes.get("dtype", FP32), device=device)
    q.requires_grad_(changes.get("grad", False))
    with pytest.raises(RuntimeError, match=sentence):
        fused_recurrent_gated_delta_rule(q, q, q)
    if q.requires_grad:
        with torch.no_grad():
            fused_recurrent_gated_delta_rule(q, q, q)


def test_pool_of_float64_is_refused_by_the_kernel(device: str) -> None:
    q = torch.zeros(1, 1, 4, device=device)
    pool = torch.zeros(1, 1, 4, 4, dtype=FP64, device=device)
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(RuntimeError, match="the states are float64"):
        recurrent_step(pool, slots, q=q, k=q, v=q, g=q[..., 0], beta=q[..., 0])


def test_gradients_go_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """auto: a call that needs them is served, and they are those of the formula."""
    monkeypatch.delenv("GDN_BACKEND")
    row = {name: values[0] for name, values in SEQUENCES.items()}
    row |= {"packed": True, "gk": True, "gv": True, "beta": "value sigmoid", "state": FP32}
    row |= {"sizes": Sizes(T=2, H=1, HV=2, K=3, V=2), "g": "gate and bias", "l2norm": True}
    x, options = sequence_call(row, "cpu")
    offsets = x.pop("cu_seqlens")
    x = {name: exact(y).requires_grad_() for name, y in x.items()}

    def call(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        given = dict(zip(x, leaves, strict=True))
        o, state = fused_recurrent_gated_delta_rule(**given, **options, cu_seqlens=offsets)
        assert state is not None
        return o, state

    assert torch.autograd.gradcheck(call, tuple(x.values()), fast_mode=True)


def trained_call() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A call with everything that has a gradient, whose last row belongs to no sequence."""
    row = {name: values[0] for name, values in SEQUENCES.items()}
    row |= {"packed": True, "gk": True, "gv": True, "beta": "value sigmoid", "state": FP32}
    x, options = sequence_call({**row, "g": "gate and bias", "l2norm": True}, "cpu")
    assert int(x["cu_seqlens"][-1]) < x["q"].shape[1]
    return x, options


def gradients(
    x: Mapping[str, Tensor], options: Mapping[str, Any], autocast: bool = False
) -> dict[str, Tensor]:
    """Of o and the final state, squared and summed, by backward inside or outside of autocast."""
    leaves = {
        name: y.clone().requires_grad_() if y.is_floating_point() else y for name, y in x.items()
    }
    o, state = fused_recurrent_gated_delta_rule(**leaves, **options)
    assert state is not None
    with torch.autocast("cpu", BF16, enabled=autocast):
        (o.square().sum() + state.square().sum()).backward()
    return {name: y.grad for name, y in leaves.items() if y.grad is not None}


def test_what_tokens_of_no_sequence_hold_reaches_no_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GDN_BACKEND", "reference")
    x, options = trained_call()
    expected = gradients(x, options)
    end = int(x["cu_seqlens"][-1])
    for name in ("q", "k", "v", "g", "gk", "gv", "beta"):
        x[name] = x[name].clone()
        x[name][:, end:] = torch.nan
    found = gradients(x, options)
    assert found.keys() == expected.keys() == x.keys() - {"cu_seqlens"}
    for name, gradient in found.items():
        assert same_bits(gradient, expected[name]), name
        if name not in ("A_log", "dt_bias", "initial_state"):
            assert not gradient[:, end:].any(), name


def test_autocast_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "reference")
    x, options = trained_call()
    expected = gradients(x, options)
    for name, gradient in gradients(x, options, autocast=True).items():
        assert same_bits(gradient, expected[name]), name


@pytest.mark.parametrize("T", [0, 3])
def test_gradients_without_sequences(T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are 0: the results hang on every input."""
    monkeypatch.setenv("GDN_BACKEND", "reference")
    x, options = trained_call()
    leaves = {
        name: (y[:, :T] if name not in ("A_log", "dt_bias") else y).clone().requires_grad_()
        for name, y in x.items()
        if name not in ("cu_seqlens", "initial_state")
    }
    offsets = torch.zeros(1, dtype=torch.int64)
    o, _ = fused_recurrent_gated_delta_rule(**leaves, **options, cu_seqlens=offsets)
    found = torch.autograd.grad(o.sum(), list(leaves.values()))
    for name, gradient in zip(leaves, found, strict=True):
        assert gradient.shape == leaves[name].shape and not gradient.any(), name


# --------------------------------------------------------------------------------- memory and time


def long_call(T: int, packed: bool = False) -> dict[str, Tensor]:
    """With all kinds of decays. The state is as large as what some fifty tokens hold."""
    HV, K = 2, 64
    x = {name: normal(1, T, HV, K) / 8 for name in ("q", "k", "v")}
    x |= {name: -uniform(1, T, HV, K) for name in ("gk", "gv")}
    x |= {"g": -uniform(1, T, HV), "beta": uniform(1, T, HV)}
    if packed:  # one long sequence and many short ones
        lengths = [T // 2] + [2] * (T // 4)
        x["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(lengths)])
    return x


@pytest.mark.parametrize("packed", [False, True])
def test_the_reference_keeps_one_state(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a gradient: the peak is what all tokens hold and a few states of each sequence, and
    no token leaves a piece of memory of its own behind."""
    monkeypatch.setenv("GDN_BACKEND", "reference")
    T = 128
    x = long_call(T, packed)
    N = x["cu_seqlens"].shape[0] - 1 if packed else 1
    state = 2 * 64 * 64 * 4
    memory = memory_of(lambda: fused_recurrent_gated_delta_rule(**x))
    tokens = sum(y.nbytes for name, y in x.items() if name != "cu_seqlens")
    assert memory.peak < 4 * tokens + 5 * N * state
    assert packed or memory.peak < T * state / 2
    assert memory.pieces < 64


@pytest.mark.parametrize("packed", [False, True])
def test_the_reference_s_backward_is_linear(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it writes to memory, to which its time is bound: twice for twice as many tokens."""
    monkeypatch.setenv("GDN_BACKEND", "reference")

    def made(T: int) -> int:
        x = long_call(T, packed)
        leaves = {name: y.requires_grad_() if y.is_floating_point() else y for name, y in x.items()}
        o, _ = fused_recurrent_gated_delta_rule(**leaves)
        return memory_of(o.sum().backward).made

    made(8)  # what is made once in a process
    assert made(256) < 2.2 * made(128)


def test_a_step_has_no_gradient(device: str) -> None:
    row = {name: values[0] for name, values in STEPS.items()}
    x = step_call(row, device).arguments
    x["q"] = x["q"].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="has no gradient"):
        recurrent_step(**x)
    with torch.no_grad():
        recurrent_step(**x)


# ------------------------------------------------------------------------------------ what is kept


def test_a_plan_keeps_no_tensor(device: str) -> None:
    row = {name: values[0] for name, values in STEPS.items()}
    x = step_call({**row, "mixed": True, "raw": True}, device).arguments
    recurrent_step(**x)
    held = [weakref.ref(y) for y in x.values() if isinstance(y, Tensor)]
    del x
    assert not any(ref() is not None for ref in held)


def test_plans_are_kept_and_bounded(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_plans", {})
    monkeypatch.setattr(plans, "MOST_PLANS", 2)
    for length in (1, 2, 1, 3):
        x = normal(1, length, 1, 4, device=device)
        fused_recurrent_gated_delta_rule(x, x, x)
    assert len(plans._plans) == 1, "two plans were dropped for the third"
    fused_recurrent_gated_delta_rule(x, x, x)
    fused_recurrent_gated_delta_rule(x.clone(), x, x)
    assert len(plans._plans) == 1


@pytest.mark.parametrize("change", ["dtype", "stride", "backend", "option", "alignment"])
def test_another_call_has_another_plan(
    change: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a plan depends on is looked at again in the next call."""
    row = {name: values[0] for name, values in SEQUENCES.items()}
    x, options = sequence_call({**row, "g": "decay", "beta": "head", "state": FP32}, device)
    for _ in range(2):
        o, final_state = fused_recurrent_gated_delta_rule(**x, **options)
    if change == "dtype":
        x["q"] = x["q"].to(FP16)
    elif change == "stride":
        x["v"] = strided(x["v"])
    elif change == "backend":
        monkeypatch.setenv("GDN_BACKEND", "reference")
    elif change == "option":
        options["use_qk_l2norm_in_kernel"] = True
    else:
        k = x["k"]
        x["k"] = torch.zeros(k.numel() + 1, device=device)[1:].view_as(k).copy_(k)
    for _ in range(2):
        o, final_state = fused_recurrent_gated_delta_rule(**x, **options)
        assert_matches(x, options, o, final_state)


# ------------------------------------------------------------------------------------------ errors


def sequence_arguments() -> dict[str, Any]:
    q, v = torch.zeros(2, 3, 2, 8), torch.zeros(2, 3, 4, 6)
    return {"q": q, "k": q, "v": v, "g": v[..., 0], "beta": v[..., 0]}


OFFSETS = torch.tensor([0, 2, 3])
ONE_ROW = {"q": torch.zeros(1, 3, 2, 8), "k": torch.zeros(1, 3, 2, 8)}
ONE_ROW |= {"v": torch.zeros(1, 3, 4, 6), "g": None, "beta": None}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": [1]}, TypeError, "q must be a torch.Tensor, got list"),
        ({"g": 1.0}, TypeError, "g must be a torch.Tensor or None, got float"),
        ({"state_v_first": 1}, TypeError, "state_v_first must be True or False, got 1"),
        ({"scale": True}, TypeError, "scale must be a real number or None, got True"),
        ({"scale": 10**400}, ValueError, "scale must be within the range of float64"),
        ({"scale": torch.ones(())}, TypeError, "scale must be a real number or None, got a tensor"),
        ({"k": torch.zeros(2, 3, 2, 8, device="meta")}, ValueError, "k must be on the device"),
        ({"q": torch.zeros(2, 3, 8)}, ValueError, "q must have 4 dimensions"),
        ({"k": torch.zeros(2, 3, 1, 8)}, ValueError, "k must have the heads of q, H=2, got 1"),
        ({"k": torch.zeros(2, 3, 2, 9)}, ValueError, "k must have the shape of q"),
        ({"v": torch.zeros(2, 3, 3, 6)}, ValueError, "v must have a positive multiple of H=2"),
        ({"v": torch.zeros(2, 4, 4, 6)}, ValueError, "v must have shape"),
        ({"g": torch.zeros(2, 3, 3)}, ValueError, "g must have shape"),
        ({"gk": torch.zeros(2, 3, 4, 6)}, ValueError, "gk must have shape .*K=8"),
        ({"gv": torch.zeros(2, 3, 4, 8)}, ValueError, "gv must have shape .*V=6"),
        ({"beta": torch.zeros(2, 3, 4, 8)}, ValueError, "beta must have shape .* or .*V=6"),
        ({"v": torch.zeros(2, 3, 4, 6).int()}, ValueError, "v must be float16"),
        ({"initial_state": torch.zeros(2, 4, 6, 8)}, ValueError, "initial_state must have shape"),
        ({"use_gate_in_kernel": True}, ValueError, "A_log must be given"),
        ({"use_gate_in_kernel": True, "g": None}, ValueError, "g must be given"),
        ({"A_log": torch.zeros(4)}, ValueError, "A_log must be None without use_gate_in_kernel"),
        ({"use_beta_sigmoid_in_kernel": True, "beta": None}, ValueError, "beta must be given"),
        ({"allow_neg_eigval": True}, ValueError, "allow_neg_eigval must come with"),
        ({"cu_seqlens": OFFSETS}, ValueError, "q must have batch size B=1 with cu_seqlens"),
        (
            ONE_ROW | {"cu_seqlens": OFFSETS.float()},
            ValueError,
            "cu_seqlens must be int32 or int64",
        ),
        (ONE_ROW | {"cu_seqlens": OFFSETS + 1}, ValueError, "cu_seqlens must start at 0, got 1"),
        (ONE_ROW | {"cu_seqlens": OFFSETS * 2}, ValueError, "cu_seqlens must end at or before T=3"),
        (ONE_ROW | {"cu_seqlens": OFFSETS[None]}, ValueError, "cu_seqlens must have shape"),
    ],
)
def test_wrong_sequences(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    for _ in range(2):
        with pytest.raises(error, match=message):
            fused_recurrent_gated_delta_rule(**{**sequence_arguments(), **changes})


def step_arguments() -> dict[str, Any]:
    q, v = torch.zeros(3, 2, 8), torch.zeros(3, 4, 6)
    slots = torch.arange(3)
    heads = {"g": v[..., 0], "beta": v[..., 0]}
    return {"state": torch.zeros(5, 4, 8, 6), "read_slots": slots, "q": q, "k": q, "v": v, **heads}


MIXED = {"q": None, "k": None, "v": None, "mixed_qkv": torch.zeros(3, 2 * 2 * 8 + 4 * 6)}
RAW = {"g": None, "beta": None, "a": torch.zeros(3, 4), "b": torch.zeros(3, 4)}
RAW |= {"A_log": torch.zeros(4)}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"state": None}, TypeError, "state must be a torch.Tensor, got NoneType"),
        ({"read_slots": [0, 1, 2]}, TypeError, "read_slots must be a torch.Tensor, got list"),
        ({"q": None}, TypeError, "q must be a torch.Tensor, got NoneType"),
        ({"mixed_qkv": torch.zeros(3, 56)}, ValueError, "q must be None with mixed_qkv"),
        (RAW | {"g": torch.zeros(3, 4)}, ValueError, "g must be None with a, got a Tensor"),
        ({"b": torch.zeros(3, 4)}, ValueError, "b must be None with g, got a Tensor"),
        (RAW | {"b": None}, TypeError, "b must be a torch.Tensor, got NoneType"),
        (RAW | {"A_log": None}, ValueError, "A_log must be given with a and b"),
        ({"A_log": torch.zeros(4)}, ValueError, "A_log must be None without a and b"),
        ({"allow_neg_eigval": True}, ValueError, "allow_neg_eigval must come with b"),
        ({"skip": "none"}, ValueError, "skip must be one of negative, non_positive, got 'none'"),
        ({"state": torch.zeros(5, 4, 8)}, ValueError, "state must have 4 dimensions"),
        ({"state": torch.zeros(5, 4, 6, 8)}, ValueError, "q must have the K=6 channels of state"),
        ({"state": torch.zeros(5, 4, 8, 7)}, ValueError, "v must have the HV=4 heads of V=7"),
        ({"state": torch.zeros(5, 4, 8, 6).long()}, ValueError, "state must be float16"),
        ({"state": torch.zeros(1, 4, 8, 6).expand(5, 4, 8, 6)}, ValueError, "state must have mem"),
        ({"q": torch.zeros(2, 8)}, ValueError, r"q must have shape \[N, H, K\] or \[N, T, H, K\]"),
        ({"read_slots": torch.arange(4)}, ValueError, "q must have a row for each of the N=4"),
        ({"read_slots": torch.zeros(3)}, ValueError, "read_slots must be int32 or int64"),
        ({"read_slots": torch.zeros(3, 1).int()}, ValueError, r"read_slots must have shape \[N\]"),
        (
            {"read_slots": torch.tensor([0, 5, 1])},
            ValueError,
            "less than the 5 slots of state, got",
        ),
        ({"read_slots": torch.tensor([0, 1, 0])}, ValueError, "read_slots must name no slot twice"),
        ({"write_slots": torch.zeros(4).int()}, ValueError, r"write_slots must have shape \[3\]"),
        (
            {"write_slots": torch.tensor([3, 4, 3])},
            ValueError,
            "write_slots must name no slot twice",
        ),
        ({"write_slots": torch.tensor([1, 3, 4])}, ValueError, "slot 1, read by sequence 1 and wr"),
        (
            {"write_slots": torch.tensor([3, 4, 5])},
            ValueError,
            "write_slots must be less than the 5",
        ),
        ({"g": torch.zeros(3, 1)}, ValueError, "g must have shape"),
        ({"g": torch.zeros(3, 4).int()}, ValueError, "g must be float16"),
        (MIXED | {"mixed_qkv": torch.zeros(3, 57)}, ValueError, "mixed_qkv must have 2 . H . K"),
        (
            MIXED | {"mixed_qkv": torch.zeros(2, 56)},
            ValueError,
            "mixed_qkv must have a row for each",
        ),
        ({"out": torch.zeros(3, 4, 7)}, ValueError, "out must have shape"),
        ({"out": torch.zeros(3, 4, 6, dtype=FP16)}, ValueError, "out must be torch.float32, as v"),
        ({"cu_seqlens": torch.tensor([0, 3])}, ValueError, r"cu_seqlens must have shape \[4\]"),
        ({"scale": "1"}, TypeError, "scale must be a real number"),
        ({"A_log": 3}, TypeError, "A_log must be a torch.Tensor or None"),
    ],
)
def test_wrong_steps(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    for _ in range(2):
        x = {**step_arguments(), **changes}
        with pytest.raises(error, match=message):
            recurrent_step(**x)


def test_read_and_write_of_one_sequence_may_meet(device: str) -> None:
    """In place for some, elsewhere for others; and per token, over the slot that is read."""
    row = {name: values[0] for name, values in STEPS.items()}
    call = step_call({**row, "tokens": "several", "write": "token"}, device)
    x = call.arguments
    x["write_slots"][:, 0] = torch.where(x["read_slots"] < 0, -1, x["read_slots"])
    before = x["state"].clone()
    assert_step_matches(call, before, recurrent_step(**x))


@pytest.mark.parametrize("function", [fused_recurrent_gated_delta_rule, recurrent_step])
def test_unknown_keyword(function: Any) -> None:
    with pytest.raises(TypeError, match="head_first"):
        function(torch.zeros(1), torch.zeros(1), torch.zeros(1), head_first=True)


def test_deprecated_layout(device: str) -> None:
    x = normal(1, 2, 1, 4, device=device)
    state = normal(1, 1, 4, 4, device=device)
    options = {"initial_state": state, "output_final_state": True}
    with pytest.warns(DeprecationWarning, match="use state_v_first"):
        old = fused_recurrent_gated_delta_rule(x, x, x, **options, transpose_state_layout=True)
    new = fused_recurrent_gated_delta_rule(x, x, x, **options, state_v_first=True)
    for a, b in zip(old, new, strict=True):
        assert a is not None and b is not None and same_bits(a, b)


# -------------------------------------------------------------------------------------- compilers


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(function: Any) -> Any:
    def call(**x: Any) -> Any:
        return function(**x)

    return torch.compile(call, fullgraph=True, backend="aot_eager")


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend_name", ["triton", "reference"])
def test_compiled_sequences(
    backend_name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDN_BACKEND", backend_name)
    row = {name: values[0] for name, values in SEQUENCES.items()}
    row |= {"packed": True, "g": "gate", "beta": "sigmoid", "state": FP32, "v_first": True}
    x, options = sequence_call({**row, "sizes": Sizes(T=2, H=1, HV=2)}, device)
    expected = fused_recurrent_gated_delta_rule(**x, **options)
    found = compiled(fused_recurrent_gated_delta_rule)(**x, **options)
    for a, b in zip(found, expected, strict=True):
        assert same_bits(a, b) and a.stride() == b.stride()
    options["output_final_state"] = False
    assert compiled(fused_recurrent_gated_delta_rule)(**x, **options)[1] is None


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GDN_BACKEND")
    row = {name: values[0] for name, values in SEQUENCES.items()}
    row |= {"g": "gate", "beta": "value", "state": FP32, "gk": True}
    x, options = sequence_call(row, "cpu")
    x = {name: y for name, y in x.items() if y is not None}
    gradients = []
    for function in (fused_recurrent_gated_delta_rule, compiled(fused_recurrent_gated_delta_rule)):
        leaves = {name: y.clone().requires_grad_() for name, y in x.items()}
        o, state = function(**leaves, **options)
        (o.square().sum() + state.square().sum()).backward()
        gradients.append([y.grad for y in leaves.values()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("backend_name", "form", "out"),
    [
        ("triton", "mixed", True),
        ("triton", "apart", False),
        ("reference", "mixed", False),
        ("reference", "apart", True),
    ],
)
def test_compiled_steps(
    backend_name: str, form: str, out: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool and `out` are written in place, as in the eager call."""
    monkeypatch.setenv("GDN_BACKEND", backend_name)
    row = {name: values[0] for name, values in STEPS.items()}
    row |= {"mixed": form == "mixed", "raw": form == "mixed", "tokens": "several", "out": out}
    row["sizes"] = Sizes(B=3, T=2, H=1, HV=2)
    x = step_call(row, device).arguments
    eager = {**x, "state": x["state"].clone(), "out": x["out"].clone() if out else None}
    expected = recurrent_step(**eager)
    found = compiled(recurrent_step)(**x)
    assert same_bits(found, expected)
    assert same_bits(x["state"], eager["state"])
    if out:
        assert same_bits(x["out"], expected)


@pytest.mark.usefixtures("fresh_compiler")
def test_errors_while_tracing() -> None:
    x = step_arguments()
    with pytest.raises(Exception, match="skip must be one of"):
        compiled(recurrent_step)(**x, skip="none")
    with pytest.raises(Exception, match="g must have shape"):
        compiled(recurrent_step)(**{**x, "g": torch.zeros(3, 1)})


@pytest.mark.gpu("a CUDA graph")
@pytest.mark.parametrize("v_first", [False, True])
def test_cuda_graph(v_first: bool, device: str) -> None:
    """Slots change between replays; the pool goes on from where the last replay left it."""
    row = {name: values[0] for name, values in STEPS.items()}
    row |= {"mixed": True, "raw": True, "dtype": BF16, "v_first": v_first, "out": True}
    x = step_call({**row, "sizes": Sizes(B=4, K=128, V=128)}, device).arguments
    eager = {**x, "state": x["state"].clone(), "out": x["out"].clone()}
    recurrent_step(**{**x, "state": x["state"].clone()})
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recurrent_step(**x)
    for slots in ([3, -1, 5, 0], [-1, 5, 3, 2], [1, 2, 3, 4]):
        x["read_slots"].copy_(torch.tensor(slots))
        x["mixed_qkv"].normal_()
        x["out"].fill_(torch.nan)
        graph.replay()
        recurrent_step(**eager)
        assert same_bits(x["out"], eager["out"])
        assert same_bits(x["state"], eager["state"])


@pytest.mark.two_gpus("tensors on a device that is not the current one")
def test_another_device() -> None:
    row = {name: values[0] for name, values in STEPS.items()}
    call = step_call(row, "cuda:1")
    before = call.arguments["state"].clone()
    for _ in range(2):
        call.arguments["state"].copy_(before)
        assert_step_matches(call, before, recurrent_step(**call.arguments))


def test_interpreter_or_gpu(device: str) -> None:
    """What the tests above run on is what they say."""
    assert (device == "cpu") == (os.environ.get("TRITON_INTERPRET") == "1")
