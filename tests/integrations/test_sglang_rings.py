"""ReplaySSM's functions of SGLang on this package's kernels, driven as SGLang drives them. The
results are compared with the recurrence in float64, and with SGLang's own kernels where its wheel
is given."""

from typing import Any

import pytest
import torch
from engine_kernels import GIVEN, be_lenient
from engine_sources import load
from helpers import BF16, FP16, FP32, same_bits
from ring_runs import (
    HV,
    REAL,
    SLOTS,
    SMALL,
    Rings,
    assert_specified,
    decode,
    of_heads,
    parameters,
    specified,
    tokens_of,
)
from torch import Tensor

from gdn_triton.integrations.sglang import rings

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.fixture(autouse=True, params=["triton", "reference"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("GDN_BACKEND", request.param)
    return str(request.param)


@pytest.mark.parametrize("L", [1, 5, 16])
@pytest.mark.parametrize("forced", [False, True], ids=["", "forced"])
def test_decode(L: int, forced: bool, device: str) -> None:
    """As SGLang counts: a full ring and a forced row start again at 0."""
    own, gates = Rings(L, FP32, FP32, device), parameters(device)
    slots = torch.tensor([4, -1, 2], dtype=torch.int32, device=device)
    write_pos = torch.tensor([0, 0, min(2, L - 1)], dtype=torch.int32, device=device)
    own.d[2, :, : write_pos[2]], own.k[2, :, : write_pos[2]], own.g[2, :, : write_pos[2]] = 0, 0, 0
    before, kept = own.state.clone(), own.state[[0, 1, 3, 5]].clone()
    seen: dict[int, list[Any]] = {0: [], 2: []}
    for i in range(2 * L + 3):
        x = tokens_of(3, FP32, device)
        force = torch.tensor([i % 4 == 2, True, False], device=device).int() if forced else None
        o = decode(own, x, gates, slots, write_pos, force)
        assert not o[1].any()
        folded = write_pos == L - 1
        if force is not None:
            folded |= force != 0
        write_pos = torch.where(folded, 0, write_pos + 1).int()
        pairs = []
        for n in seen:
            seen[n].append({name: y[n] for name, y in x.items()})
            past = {name: torch.stack([y[name] for y in seen[n]]) for name in x}
            found = [
                specified(past, gates, before[slots[n]], dtype)
                for dtype in (torch.float64, torch.float32)
            ]
            pairs.append((found[0][0][-1], found[1][0][-1]))
            if folded[n]:
                states = [(found[0][1], found[1][1])]
                assert_specified("state", own.state[slots[n]][None], states)
        assert_specified("o", o[[0, 2]], pairs)
    assert same_bits(own.state[[0, 1, 3, 5]], kept)


@pytest.mark.parametrize(
    "pool, tokens",
    [
        pytest.param(FP16, FP16, id="fp16"),
        pytest.param(FP32, FP16, id="fp32-fp16"),
        pytest.param(BF16, BF16, id="bf16", marks=pytest.mark.gpu("bf16 is not used elsewhere")),
        pytest.param(FP32, BF16, id="fp32-bf16", marks=pytest.mark.gpu("as bf16")),
    ],
)
@pytest.mark.parametrize(
    "sizes", [SMALL, pytest.param(REAL, marks=pytest.mark.gpu("minutes in the interpreter"))]
)
def test_decode_in_16_bits(
    sizes: tuple[int, int], pool: torch.dtype, tokens: torch.dtype, device: str
) -> None:
    """The rings have the dtype of the pool, as SGLang allocates them. A record of 16 bits is
    rounded, so the allowed error is that of o plus that of a state in 16 bits."""
    own, gates = Rings(4, pool, pool, device, sizes=sizes), parameters(device)
    slots = torch.tensor([4, 2], device=device)
    before, seen = own.state.clone(), []
    for i in range(9):
        x = tokens_of(2, tokens, device, sizes)
        write_pos = torch.full((2,), i % 4, dtype=torch.int32, device=device)
        o = decode(own, x, gates, slots, write_pos, None)
        seen.append(x)
        pairs = []
        for n in range(2):
            past = {name: torch.stack([y[name][n] for y in seen]) for name in x}
            found = [
                specified(past, gates, before[slots[n]], dtype)[0][-1]
                for dtype in (torch.float64, torch.float32)
            ]
            pairs.append((found[0], found[1]))
        assert_specified("o", o, pairs, unit=2 * torch.finfo(pool).eps)


@pytest.mark.gpu("bf16 is not used in Triton's interpreter")
@pytest.mark.parametrize("L", [5, 16])
def test_decode_that_copies(
    L: int, device: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel in Gluon has the bits of the other kernel, for states of 16 bits."""
    if backend != "triton":
        pytest.skip("compares kernels of Triton")
    from gdn_triton.recurrent.triton import ring_plan

    own, gates = Rings(L, BF16, BF16, device, sizes=REAL), parameters(device)
    slots = torch.tensor([4, -1, 2, 0], device=device)
    for i in range(3 * L):
        write_pos = torch.tensor([i, 0, i + 2, i + 3], device=device).int() % L
        force = torch.tensor([i % 7 == 6, False, False, False], device=device).int()
        x = tokens_of(4, BF16, device, REAL)
        other = Rings(L, BF16, BF16, device, sizes=REAL)
        for y, z in zip(other.tensors(), own.tensors(), strict=True):
            y.copy_(z)
        o = decode(own, x, gates, slots, write_pos, force)
        with monkeypatch.context() as patch:
            patch.setattr(ring_plan, "copied_step_form", lambda *_: None)
            assert same_bits(decode(other, x, gates, slots, write_pos, force), o)
        assert all(same_bits(*both) for both in zip(own.tensors(), other.tensors(), strict=True))


def test_alone_and_in_a_batch(device: str) -> None:
    """The same bits, with other records in the other slots."""
    own, gates = Rings(4, FP32, FP32, device), parameters(device)
    slots = torch.tensor([4, 0, 2, 1], device=device)
    for i in range(5):
        write_pos = torch.full((4,), i % 4, dtype=torch.int32, device=device)
        x = tokens_of(4, FP32, device)
        alone = Rings(4, FP32, FP32, device)
        for y, z in zip(alone.tensors(), own.tensors(), strict=True):
            y.copy_(z)
        o = decode(own, x, gates, slots, write_pos, None)
        part = {name: y[2:3] for name, y in x.items()}
        assert same_bits(decode(alone, part, gates, slots[2:3], write_pos[2:3], None), o[2:3])
        assert all(
            same_bits(y[2], z[2]) for y, z in zip(alone.tensors(), own.tensors(), strict=True)
        )


# ------------------------------------------------------------------------ drafts and their folds


class Drafting:
    """Rings of requests, and the calls of a step with drafts: verify in each layer, advance the
    cursors (SGLang's own kernel), fold. Two layers share the cursors."""

    def __init__(
        self,
        pool: torch.dtype,
        tokens: torch.dtype,
        low: bool,
        device: str,
        sizes: tuple[int, int] = SMALL,
    ) -> None:
        self.L, self.most, self.device = 8, 3, device
        self.layers = [Rings(self.L, pool, tokens, device, low, sizes) for _ in range(2)]
        self.state = torch.stack([x.state for x in self.layers])
        self.rows = {
            name: None if getattr(self.layers[0], field) is None else
            torch.stack([getattr(x, field) for x in self.layers])
            for name, field in (
                ("d_cache", "d"), ("k_cache", "k"), ("g_cache", "g"),
                ("d_low", "d_low"), ("k_low", "k_low"),
            )
        }  # fmt: skip
        self.slots = torch.tensor([4, -1, 2], device=device, dtype=torch.int32)
        self.requests = torch.tensor([1, 0, 5], device=device)
        self.write_pos = torch.zeros(SLOTS, dtype=torch.int32, device=device)
        self.cache_base = torch.tensor([0, 6, 0, 0, 0, 3], dtype=torch.int32, device=device)
        self.is_flush = torch.zeros(SLOTS, dtype=torch.int8, device=device)
        self.gates = [parameters(device) for _ in self.layers]

    def verify(
        self, layer: int, x: dict[str, Tensor], offsets: list[int], **changes: Any
    ) -> Tensor:
        function = changes.pop("function", rings.gdn_replayssm_spec_decode)
        V, K = self.state.shape[-2:]
        q, k, v = of_heads(x["mixed_qkv"], K, V)
        rows = {n: None if y is None else y[layer] for n, y in self.rows.items()}
        if "function" not in changes:
            q, k, v = (y.contiguous() for y in (q, k, v))
        out = torch.full_like(v, torch.nan)
        given = {
            "q": q, "k": k, "v": v, "a": x["a"], "b": x["b"], **self.gates[layer],
            "checkpoint_state": self.state[layer],
            "d_cache": rows["d_cache"], "k_cache": rows["k_cache"], "g_cache": rows["g_cache"],
            "rawv_cache": rows["d_low"], "rawk_cache": rows["k_low"], "beta_cache": None,
            "out": out, "query_start_loc": torch.tensor(offsets, device=self.device).int(),
            "ssm_state_indices": self.slots, "replay_indices": self.requests,
            "write_pos": self.write_pos, "cache_base": self.cache_base, "is_flush": self.is_flush,
            "max_cache_len": self.L, "max_spec_len": self.most, "scale": K**-0.5,
            "null_block_id": -1, "launch_mode": "verify",
        }  # fmt: skip
        assert function(**(given | changes)) is out
        return out

    def commit(self, accepted: Tensor, track: dict[str, Tensor], every: bool, **own: Any) -> None:
        """Folds, and changes the cursors as `commit_gdn_replayssm_spec` does, in torch."""
        live = self.requests[self.slots >= 0]
        self.write_pos[live] += accepted[self.slots >= 0]
        full = self.write_pos[live] + 2 * self.most > self.L
        self.is_flush[live] = (self.write_pos[live] > 0 if every else full).to(torch.int8)
        own.get("function", rings.commit_gdn_replayssm_circular)(
            checkpoint_state=self.state,
            d_cache=self.rows["d_cache"],
            k_cache=self.rows["k_cache"],
            g_cache=self.rows["g_cache"],
            d_residual_cache=self.rows["d_low"],
            k_residual_cache=self.rows["k_low"],
            state_batch_indices=self.slots,
            replay_indices=self.requests,
            write_pos=self.write_pos,
            cache_base=self.cache_base,
            is_flush=self.is_flush,
            accept_lens=accepted,
            **track,
        )


DRAFTS = pytest.mark.parametrize(
    "pool, tokens, low",
    [
        pytest.param(FP32, FP32, False, id="fp32"),
        pytest.param(FP32, FP16, True, id="fp32-fp16"),
        pytest.param(FP16, FP16, True, id="fp16"),
        pytest.param(FP32, BF16, True, id="bf16", marks=pytest.mark.gpu("bf16 only there")),
    ],
)


@DRAFTS
def test_drafts(pool: torch.dtype, tokens: torch.dtype, low: bool, device: str) -> None:
    """Any number of drafts, any number of them accepted; folds, and the states of earlier tokens.
    Records have 22 bits with low parts of fp16 and 16 with those of bf16, and the states have
    those of the pool."""
    run = Drafting(pool, tokens, low, device)
    before = run.state.clone()
    seen: dict[int, list[Any]] = {0: [], 2: []}
    unit = max(2 * torch.finfo(pool).eps, torch.finfo(tokens).eps ** 2)
    for i in range(9):
        lengths = [1 + i % 3, 2, 3 - i % 2]
        offsets = [0, lengths[0], lengths[0] + 2, sum(lengths)]
        accepted = torch.tensor([1 + i % lengths[0], 1, max(1, i % 3)], device=device).int()
        xs = [tokens_of(offsets[-1], tokens, device) for _ in run.layers]
        folded = run.state.clone()
        outputs = [run.verify(layer, x, offsets) for layer, x in enumerate(xs)]
        assert same_bits(run.state, folded), "a verification writes no state"
        for n in seen:
            for layer, (x, o) in enumerate(zip(xs, outputs, strict=True)):
                assert not o[offsets[1] : offsets[2]].any()
                rows = slice(offsets[n], offsets[n + 1])
                past = [y[layer] for y in seen[n]] + [{m: y[rows] for m, y in x.items()}]
                past_x = {m: torch.cat([y[m] for y in past]) for m in x}
                start = before[layer, run.slots[n]]
                found = [
                    specified(past_x, run.gates[layer], start, dtype)[0][-lengths[n] :]
                    for dtype in (torch.float64, torch.float32)
                ]
                assert_specified("o", o[rows][None], [(found[0], found[1])], unit)
            end = offsets[n] + int(accepted[n])
            seen[n].append([{m: y[offsets[n] : end] for m, y in x.items()} for x in xs])
        track: dict[str, Tensor] = {}
        if i % 3 == 1:
            steps = torch.tensor([int(accepted[0]) - 1, 0, -1], device=device)
            track = {
                "mamba_track_indices": torch.tensor([3, 1, 5], device=device),
                "mamba_steps_to_track": steps,
            }
        others = run.state[:, [0, 1, 5]].clone()
        run.commit(accepted, track, every=pool != FP32)
        assert not run.is_flush.any() and same_bits(run.state[:, [0, 1, 5]], others)
        for n in seen:
            for layer in range(2):
                past = [y[layer] for y in seen[n]]
                past_x = {m: torch.cat([y[m] for y in past]) for m in past[0]}
                states = [
                    specified(past_x, run.gates[layer], before[layer, run.slots[n]], dtype)[1]
                    for dtype in (torch.float64, torch.float32)
                ]
                if run.write_pos[run.requests[n]] == 0:
                    got = run.state[layer, run.slots[n]][None]
                    assert_specified("state", got, [(states[0], states[1])], unit)
                if track and n == 0:
                    got = run.state[layer, 3][None]
                    assert_specified("tracked", got, [(states[0], states[1])], unit)


def test_left_out(device: str) -> None:
    """A sequence whose ring SGLang has still to fold is not touched."""
    run = Drafting(FP32, FP32, False, device)
    run.is_flush[1] = 1
    before = [y.clone() for y in run.rows.values() if y is not None]
    x = tokens_of(6, FP32, device)
    o = run.verify(0, x, [0, 2, 4, 6])
    assert o[:2].isnan().all() and not o[2:4].any() and not o[4:].isnan().any()
    after = [y for y in run.rows.values() if y is not None]
    for y, z in zip(before, after, strict=True):
        assert same_bits(y[:, 1], z[:, 1]) and not z[0, 5].isnan().all()


@pytest.mark.parametrize(
    "changes, error, match",
    [
        ({"launch_mode": "both"}, NotImplementedError, "launch_mode"),
        ({"beta_cache": torch.zeros(1)}, NotImplementedError, "beta_cache"),
        ({"max_cache_len": 4}, ValueError, "max_cache_len"),
        ({"max_spec_len": 9}, NotImplementedError, "8 tokens a sequence, got 8 and 9"),
        ({"max_spec_len": 1}, ValueError, "query_start_loc must have at most 1 tokens"),
        ({"cache_base": None}, TypeError, "cache_base must be a torch.Tensor"),
        ({"g_cache": torch.zeros(SLOTS, HV, 8).double()}, ValueError, "g_cache must be torch.flo"),
        ({"rawv_cache": torch.zeros(SLOTS, HV, 8, 40)}, ValueError, "must be both given"),
        ({"ssm_state_indices": torch.tensor([4, -1, 6])}, ValueError, "ssm_state_indices must be"),
        ({"replay_indices": torch.tensor([1, 0, 1])}, ValueError, "at most once"),
        ({"write_pos": torch.full((SLOTS,), 7)}, ValueError, "write_pos must be at least 0 and"),
        ({"out": torch.zeros(6, HV, 20)}, ValueError, "out must have shape"),
        ({"scale": "1"}, TypeError, "scale"),
    ],
)
def test_refused(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    run = Drafting(FP32, FP32, False, "cpu")
    with pytest.raises(error, match=match):
        run.verify(0, tokens_of(6, FP32, "cpu"), [0, 2, 4, 6], **changes)
    assert all(y is None or y.isnan().all() for y in run.rows.values())


def test_left_to_sglang() -> None:
    """`enable` leaves the calls to SGLang that are refused for their size or mode."""
    cache = torch.zeros(1, 1, 33, 1)
    assert rings.is_left_to_sglang({"d_cache": cache})
    assert not rings.is_left_to_sglang({"d_cache": cache[:, :, :32], "force_flush": None})
    assert rings.is_left_to_sglang({"launch_mode": "both"})
    assert not rings.is_left_to_sglang({"launch_mode": "verify", "max_spec_len": 8})
    with pytest.raises(NotImplementedError, match="at most 32 rows"):
        own = Rings(33, FP32, FP32, "cpu")
        at = torch.zeros(1, dtype=torch.int32)
        decode(own, tokens_of(1, FP32, "cpu"), parameters("cpu"), at, at, None)


# ------------------------------------------------------------------------------- SGLang's own

_LINEAR = "sglang/kernels/ops/attention/linear"


def theirs_of(file: str, *names: str) -> dict[str, Any]:
    given = {**GIVEN, "is_tf32_supported": False, "_IS_GFX95": False}
    return load("sglang", f"{_LINEAR}/{file}.py", names, given)


@pytest.mark.parametrize("forced", [False, True], ids=["", "forced"])
def test_decode_as_sglang(forced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both continue on their own rings. Without 16-bit numbers all records agree."""
    be_lenient(monkeypatch)
    name = "fused_recurrent_linear_replayssm_decode"
    theirs = theirs_of("fused_recurrent_linear_replayssm", f"{name}_kernel", name)[name]
    own, gates = Rings(4, FP32, FP32, "cpu"), parameters("cpu")
    other = Rings(4, FP32, FP32, "cpu")
    other.state.copy_(own.state)
    slots = torch.tensor([4, -1, 2], dtype=torch.int32)
    write_pos = torch.zeros(3, dtype=torch.int32)
    for i in range(10):
        x = tokens_of(3, FP32, "cpu")
        force = torch.tensor([i % 3 == 1, False, False]).int() if forced else None
        o = decode(own, x, gates, slots, write_pos, force)
        expected = decode(other, x, gates, slots, write_pos, force, theirs)
        torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-6)
        for y, z in zip(own.tensors(), other.tensors(), strict=True):
            torch.testing.assert_close(y, z, rtol=1e-5, atol=1e-6, equal_nan=True)
        folded = write_pos == 3
        if force is not None:
            folded |= force != 0
        write_pos = torch.where(folded, 0, write_pos + 1).int()


def test_drafts_as_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    be_lenient(monkeypatch)
    # Their fold has no mask for K, which has to be a power of two there.
    sizes = (32, 40)
    names = ("gdn_replayssm_spec_circular_kernel", "_launch_gdn_spec", "gdn_replayssm_spec_decode")
    folds = (
        *("gdn_replayssm_compact_commit_kernel", "_finish_gdn_replayssm_circular_fold_kernel"),
        "commit_gdn_replayssm_circular",
    )
    theirs = theirs_of("gdn_replayssm_spec_decode", *names, *folds)
    run, other = (Drafting(FP32, FP32, False, "cpu", sizes) for _ in range(2))
    other.state.copy_(run.state)
    other.gates = run.gates
    # SGLang multiplies rows without a record by 0, and allocates zeros.
    for y in (*run.rows.values(), *other.rows.values()):
        if y is not None:
            y.zero_()
    for i in range(6):
        xs = [tokens_of(6, FP32, "cpu", sizes) for _ in run.layers]
        for layer, x in enumerate(xs):
            o = run.verify(layer, x, [0, 2, 3, 6])
            expected = other.verify(layer, x, [0, 2, 3, 6], function=theirs[names[-1]])
            torch.testing.assert_close(o, expected, rtol=1e-5, atol=2e-6)
        accepted = torch.tensor([1 + i % 2, 1, 1 + i % 3]).int()
        track = {"mamba_track_indices": torch.tensor([3, -1, 1])}
        track["mamba_steps_to_track"] = torch.tensor([0, 0, i % 3 - 1])
        run.commit(accepted, track, every=False)
        other.commit(accepted, track, every=False, function=theirs[folds[-1]])
        for y, z in ((run.state, other.state), *zip(
            [y for y in run.rows.values() if y is not None],
            [y for y in other.rows.values() if y is not None], strict=True,
        )):  # fmt: skip
            torch.testing.assert_close(y, z, rtol=1e-5, atol=2e-6, equal_nan=True)
        for name in ("write_pos", "cache_base", "is_flush"):
            assert torch.equal(getattr(run, name), getattr(other, name)), name
