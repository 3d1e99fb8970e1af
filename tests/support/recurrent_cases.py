"""Helpers that the tests of recurrent share."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from helpers import BF16, FP16, FP32, FP64, assert_within_budget, same_bits
from torch import Tensor

from gdn_triton import fused_recurrent_gated_delta_rule
from gdn_triton.reference.recurrent import recurrent


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


def gradients(
    x: Mapping[str, Tensor], options: Mapping[str, Any], autocast: bool = False
) -> dict[str, Tensor]:
    """The gradients of the sum of squares of o and the final state, with backward inside or outside
    of autocast."""
    leaves = {
        name: y.clone().requires_grad_() if y.is_floating_point() else y for name, y in x.items()
    }
    o, state = fused_recurrent_gated_delta_rule(**leaves, **options)
    assert state is not None
    with torch.autocast("cpu", BF16, enabled=autocast):
        (o.square().sum() + state.square().sum()).backward()
    return {name: y.grad for name, y in leaves.items() if y.grad is not None}


def step_arguments() -> dict[str, Any]:
    q, v = torch.zeros(3, 2, 8), torch.zeros(3, 4, 6)
    slots = torch.arange(3)
    heads = {"g": v[..., 0], "beta": v[..., 0]}
    return {"state": torch.zeros(5, 4, 8, 6), "read_slots": slots, "q": q, "k": q, "v": v, **heads}
