"""No bit of a result depends on the number of runs, on the neighbours in a batch, on the layout of
the sequences, or on later tokens. No call changes its inputs.

Bit for bit because nothing else is claimed: a result that moves with its neighbours is a race, or a
tile that was chosen by something else than the problem.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import (
    BF16,
    FP16,
    FP32,
    RUNS,
    Case,
    Inputs,
    assert_within_budget,
    make_inputs,
    pieces,
    same_bits,
)
from torch import Tensor

import gdn_triton
from gdn_triton import chunk_prefill, explain_call
from gdn_triton._host.records import made
from gdn_triton._triton import tiles
from gdn_triton._triton.tiles import Gpu, segment_chunks
from gdn_triton.chunk.problem import ChunkCall
from gdn_triton.chunk.triton.forward import choose_segments
from gdn_triton.chunk.validation import validate_chunk


@pytest.fixture(autouse=True)
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "triton")


# Ragged ends, an empty sequence and rows of none.
PACKED = Case("packed", "", lengths=(17, 0, 1, 40), orphans=5, H=1, HV=2, K=16, V=24)
PADDED = Case("padded", "", T=37, B=2, H=1, HV=2, K=16, V=24)
LARGE = Case(
    "large",
    "",
    lengths=(700, 1, 64, 129, 0, 1000),
    orphans=70,
    H=4,
    HV=8,
    K=128,
    V=128,
    chunk_size=64,
    spare=8,
)


def call(x: Inputs, case: Case, **options: Any) -> tuple[Tensor, Tensor]:
    options = {"cu_seqlens": x.cu_seqlens, "initial_state": x.initial_state, **options}
    o, state = gdn_triton.chunk_gated_delta_rule(
        *x.tensors, output_final_state=True, chunk_size=case.chunk_size, **options
    )
    assert state is not None
    return o, state


def sequence(x: Inputs, n: int, first: int, end: int, *, packed: bool) -> Inputs:
    """Sequence n of packed inputs, in tensors of its own."""
    tokens = {name: getattr(x, name)[:, first:end].clone() for name in ("q", "k", "v", "g", "beta")}
    offsets = torch.tensor([0, end - first], dtype=torch.int32, device=x.q.device)
    return x.but(
        **tokens, initial_state=x.initial_state[n : n + 1], cu_seqlens=offsets if packed else None
    )


def check_alone(case: Case, x: Inputs) -> None:
    """Every sequence of a packed call alone, packed and padded."""
    o, state = call(x, case)
    offsets = case.offsets()
    for n, inside in enumerate(pieces(o, offsets)):
        for packed in (True, False):
            part = sequence(x, n, offsets[n], offsets[n + 1], packed=packed)
            alone, alone_state = call(part, case)
            name = f"sequence {n}, {'packed' if packed else 'padded'}"
            assert same_bits(inside, alone), f"o of {name}"
            assert same_bits(state[n], alone_state[0]), f"final state of {name}"


@pytest.mark.parametrize(("dataflow", "dtype"), RUNS, indirect=["dataflow"])
def test_again(dtype: torch.dtype, dataflow: str, device: str) -> None:
    x = make_inputs(PACKED, dtype, device)
    first = call(x, PACKED)
    for _ in range(2):
        assert all(same_bits(a, b) for a, b in zip(first, call(x, PACKED), strict=True))


@pytest.mark.gpu("races need many programs at once")
@pytest.mark.parametrize(("dataflow", "dtype"), RUNS, indirect=["dataflow"])
def test_again_at_size(dtype: torch.dtype, dataflow: str, device: str) -> None:
    x = make_inputs(LARGE, dtype, device)
    first = call(x, LARGE, use_qk_l2norm_in_kernel=True)
    for _ in range(20):
        again = call(x, LARGE, use_qk_l2norm_in_kernel=True)
        assert all(same_bits(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(("dataflow", "dtype"), RUNS, indirect=["dataflow"])
def test_alone(dtype: torch.dtype, dataflow: str, device: str) -> None:
    check_alone(PACKED, make_inputs(PACKED, dtype, device))


@pytest.mark.gpu("a real size, where tiles are chosen by the number of states")
@pytest.mark.parametrize(("dataflow", "dtype"), RUNS, indirect=["dataflow"])
def test_alone_at_size(dtype: torch.dtype, dataflow: str, device: str) -> None:
    check_alone(LARGE, make_inputs(LARGE, dtype, device))


@pytest.mark.gpu("a real size, where tiles are chosen by the number of states")
@pytest.mark.parametrize(("dataflow", "dtype"), RUNS, indirect=["dataflow"])
def test_alone_among_many(dtype: torch.dtype, dataflow: str, device: str) -> None:
    """From one sequence to a hundred, which have other tiles and fill the GPU."""
    case = replace(LARGE, lengths=(130,) * 100)
    x = make_inputs(case, dtype, device)
    o, state = call(x, case)
    for n in (0, 57):
        part = sequence(x, n, 130 * n, 130 * n + 130, packed=True)
        alone, alone_state = call(part, case)
        assert same_bits(o[:, 130 * n : 130 * n + 130], alone)
        assert same_bits(state[n], alone_state[0])


@pytest.mark.gpu("long sequences, and many")
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_alone_with_nothing_forced(dtype: torch.dtype, device: str, monkeypatch: Any) -> None:
    """In the batch-invariant mode and no other: a long sequence and a short one, then thirty."""
    monkeypatch.setenv("GDN_BATCH_INVARIANT", "1")
    case = Case("choice", "", lengths=(40, 6200), H=2, HV=4, K=64, V=64, chunk_size=64, spare=8)
    check_alone(case, make_inputs(case, dtype, device))
    case = replace(case, lengths=(300,) * 30)
    check_alone(case, make_inputs(case, dtype, device))


def test_segments_are_for_few_long_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which calls are cut; the batch-invariant mode cuts nothing."""
    cut = functools.partial(segment_chunks, Gpu("cuda", 90, 132))
    few = {"N": 1, "HV": 8, "K": 128, "V": 128, "BT": 64}
    assert cut(32768, **few) == 64
    assert cut(8192, **few) == 16
    assert cut(2048, **few) == 8
    assert cut(1024, **few) == 0
    assert cut(4096, **{**few, "HV": 16}) == 16
    assert cut(32768, **{**few, "HV": 16}) == 128
    assert cut(20000, **{**few, "HV": 16}) == 79
    assert cut(2048, **{**few, "HV": 16}) == 0
    for name, value in {"N": 64, "HV": 32, "K": 256}.items():
        assert cut(32768, **{**few, name: value}) == 0, name
    monkeypatch.setitem(tiles._gpus, torch.device("meta"), Gpu("cuda", 90, 132))
    problem = functools.partial(validate_chunk, sized_call(T=32768, HV=8, K=128, V=128))
    assert choose_segments(problem()) == 64
    monkeypatch.setenv("GDN_BATCH_INVARIANT", "1")
    assert choose_segments(problem()) == 0
    monkeypatch.setenv("GDN_BATCH_INVARIANT", "0")
    assert choose_segments(problem()) == 64


def test_a_long_sequence_among_short_ones_is_cut_where_the_host_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By cu_seqlens_cpu, and only where the longest sequence is several segments long."""
    cut = functools.partial(segment_chunks, Gpu("cuda", 90, 132))
    uneven = {"N": 21, "HV": 8, "K": 128, "V": 128, "BT": 64}
    assert cut(8192, **uneven, longest=6912) == 16
    assert cut(8192, **uneven) == 0
    assert cut(8192, **uneven, longest=3000) == 0
    assert cut(8192, **{**uneven, "HV": 16}, longest=6912) == 32
    assert cut(32768, **{**uneven, "N": 4}, longest=16000) == 64
    # The states of many heads fill the GPU with two sequences; as many as there is no segment for.
    for HV in (32, 128):
        assert cut(8192, **{**uneven, "HV": HV}, longest=6912) == 0
    monkeypatch.setitem(tiles._gpus, torch.device("meta"), Gpu("cuda", 90, 132))
    offsets = torch.tensor([0, *range(64, 1281, 64), 8192], dtype=torch.int32)
    call = sized_call(T=8192, HV=8, K=128, V=128)
    call = call._replace(inputs=call.inputs._replace(cu_seqlens=offsets.to("meta")))
    assert choose_segments(validate_chunk(call)) == 0
    call = call._replace(cu_seqlens_cpu=offsets)
    assert choose_segments(validate_chunk(call)) == 16
    monkeypatch.setenv("GDN_BATCH_INVARIANT", "1")
    assert choose_segments(validate_chunk(call)) == 0


def test_known_lengths_cut_and_give_the_same(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the lengths on the host are no longer those on the device."""
    monkeypatch.setenv("GDN_BACKEND", "triton")
    monkeypatch.setenv("GDN_GLUON", "0")
    monkeypatch.setattr(tiles, "LEAST_KNOWN_SEGMENT", 1)
    segment_chunks.cache_clear()
    offsets = torch.tensor([0, 5, 8, 70, 75], dtype=torch.int32)
    k, q = torch.nn.functional.normalize(torch.randn(2, 1, 75, 1, 16), dim=-1)
    x = {"q": q, "k": k, "v": torch.randn(1, 75, 2, 16)}
    x = {name: y.to(device, FP16) for name, y in x.items()}
    x |= {"g": -torch.rand(1, 75, 2, device=device), "beta": torch.rand(1, 75, 2, device=device)}
    options = {"cu_seqlens": offsets.to(device), "chunk_size": 16, "output_final_state": True}
    wide = {name: y.double() for name, y in x.items()}
    # On a CPU the call compares both offsets.
    then = torch.tensor([0, 30, 31, 31, 74]) if device != "cpu" else offsets
    for now in (offsets, then):
        options["cu_seqlens"] = now.to(device, torch.int32)
        whole = gdn_triton.chunk_gated_delta_rule(**x, **options)
        cut = gdn_triton.chunk_gated_delta_rule(**x, **options, cu_seqlens_cpu=offsets)
        with monkeypatch.context() as patch:
            patch.setenv("GDN_BACKEND", "reference")
            exact = gdn_triton.chunk_gated_delta_rule(**wide, **options)
        for name, y, z, w in zip(("o", "final_state"), cut, whole, exact, strict=True):
            assert not same_bits(y, z), f"{name}: the call was not cut"
            unit = torch.finfo(FP16).eps / 2
            assert_within_budget(name, y, w, z, dtype=z.dtype, unit=unit)
    segment_chunks.cache_clear()


def sized_call(T: int, HV: int, K: int, V: int) -> ChunkCall:
    """A call without memory."""
    q, v = torch.empty(1, T, HV, K, device="meta"), torch.empty(1, T, HV, V, device="meta")
    call = inspect.signature(gdn_triton.chunk_gated_delta_rule).bind(q, q, v, v[..., 0], v[..., 0])
    call.apply_defaults()
    return made(ChunkCall, call.arguments)


def small_calls(device: str, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Calls of all that GDN_BATCH_INVARIANT may change, too short to be cut."""
    case = Case("small", "", T=3, B=2, H=1, HV=1, K=8, V=8)
    x = make_inputs(case, dtype, device)
    given = dict(zip(("q", "k", "v", "g", "beta"), x.tensors, strict=True))
    pool = torch.zeros(2, 1, 8, 8, device=device)
    slots = torch.arange(2, device=device)
    leaf = given["q"].detach().clone().requires_grad_()
    chunk = gdn_triton.chunk_gated_delta_rule
    return {
        "chunk": lambda: chunk(**given),
        "with a gradient": lambda: chunk(**{**given, "q": leaf}),
        "prefill": lambda: gdn_triton.chunk_prefill(pool, slots, **given),
        "explain": lambda: gdn_triton.explain(**given),
        "explain a prefill": lambda: explain_call(chunk_prefill, pool, slots, **given),
    }


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=["fp16", "fp32"])
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_the_mode_is_judged_at_every_call(
    backend: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of calls that are too short to be cut, that were accepted before, or that run nothing;
    in every backend. Nothing is written."""
    monkeypatch.setenv("GDN_BACKEND", backend)
    calls = small_calls(device, dtype)
    for call in calls.values():
        call()
    for value in ("true", "", "2"):
        monkeypatch.setenv("GDN_BATCH_INVARIANT", value)
        for name, call in calls.items():
            with pytest.raises(ValueError) as error:
                call()
            message = f"GDN_BATCH_INVARIANT must be 0 or 1, got {value!r}"
            assert str(error.value) == message, name
    monkeypatch.setenv("GDN_BATCH_INVARIANT", "1")
    for call in calls.values():
        call()


def test_what_is_kept_of_lengths_is_bounded() -> None:
    """A server never sees one length twice."""
    gpu = Gpu("cuda", 90, 132)
    for rows in range(1, 2 * tiles.MOST_KEPT):
        segment_chunks(gpu, rows, 1, 8, 128, 128, 64)
        tiles.fused_config(gpu, 128, 128, rows, False)
    for kept in (segment_chunks, tiles.fused_config):
        assert kept.cache_info().currsize <= tiles.MOST_KEPT


@pytest.mark.parametrize(("dataflow", "dtype"), RUNS, indirect=["dataflow"])
def test_batch_rows(dtype: torch.dtype, dataflow: str, device: str) -> None:
    """Padded = packed = each row alone, and in either order."""
    x = make_inputs(PADDED, dtype, device)
    names = ("q", "k", "v", "g", "beta")
    o, state = call(x, PADDED)
    flat = {n: getattr(x, n).flatten(0, 1)[None] for n in names}
    offsets = torch.tensor([0, 37, 74], device=device)
    packed_o, packed_state = call(x.but(**flat, cu_seqlens=offsets), PADDED)
    assert same_bits(packed_o.unflatten(1, (2, 37))[0], o)
    assert same_bits(packed_state, state)
    flipped = {n: getattr(x, n).flip(0) for n in (*names, "initial_state")}
    flipped_o, flipped_state = call(x.but(**flipped), PADDED)
    assert same_bits(flipped_o.flip(0), o) and same_bits(flipped_state.flip(0), state)


@pytest.mark.parametrize(("dataflow", "dtype"), RUNS, indirect=["dataflow"])
def test_order_of_sequences(dtype: torch.dtype, dataflow: str, device: str) -> None:
    """Packed in reverse order; each sequence then lies in other rows, slots and programs."""
    case = replace(PACKED, orphans=0)
    x = make_inputs(case, dtype, device)
    offsets = case.offsets()
    backwards = replace(case, lengths=tuple(reversed(case.lengths or ())))
    tokens = {
        n: torch.cat(pieces(getattr(x, n), offsets)[::-1], 1) for n in ("q", "k", "v", "g", "beta")
    }
    y = x.but(
        **tokens,
        initial_state=x.initial_state.flip(0),
        cu_seqlens=backwards.cu_seqlens(device),
    )
    (o, state), (got_o, got_state) = call(x, case), call(y, backwards)
    assert same_bits(torch.cat(pieces(got_o, backwards.offsets())[::-1], 1), o)
    assert same_bits(got_state.flip(0), state)


@pytest.mark.parametrize(("dataflow", "dtype"), RUNS, indirect=["dataflow"])
@pytest.mark.parametrize("cut", [3, 16, 20, 36])
def test_later_tokens(cut: int, dtype: torch.dtype, dataflow: str, device: str) -> None:
    """o up to a token depends on nothing after it: inside a chunk, at its edge, in the tail."""
    x, y = make_inputs(PADDED, dtype, device), make_inputs(PADDED, dtype, device, seed=1)
    mixed = {
        n: torch.cat([getattr(x, n)[:, :cut], getattr(y, n)[:, cut:]], 1)
        for n in ("q", "k", "v", "g", "beta")
    }
    o, _ = call(x, PADDED)
    assert same_bits(call(x.but(**mixed), PADDED)[0][:, :cut], o[:, :cut])


@pytest.mark.parametrize(("dataflow", "dtype"), RUNS, indirect=["dataflow"])
def test_heads(dtype: torch.dtype, dataflow: str, device: str) -> None:
    """Value heads know nothing of each other."""
    case = replace(PADDED, H=2, HV=4)
    x = make_inputs(case, dtype, device)
    o, state = call(x, case)
    one = x.but(
        q=x.q[:, :, 1:],
        k=x.k[:, :, 1:],
        v=x.v[:, :, 3:],
        g=x.g[:, :, 3:],
        beta=x.beta[:, :, 3:],
        initial_state=x.initial_state[:, 3:],
    )
    alone, alone_state = call(one, case)
    assert same_bits(o[:, :, 3:], alone) and same_bits(state[:, 3:], alone_state)


@pytest.mark.parametrize(("dataflow", "dtype"), RUNS, indirect=["dataflow"])
@pytest.mark.parametrize("case", [PADDED, PACKED], ids=["padded", "packed"])
def test_inputs_are_left_alone(case: Case, dtype: torch.dtype, dataflow: str, device: str) -> None:
    """All of their memory, also what lies between and around the views."""
    x = make_inputs(case, dtype, device, raw=True)
    A_log, dt_bias = torch.randn(2, case.HV).to(device)
    held = [*x.around, A_log, dt_bias]
    if x.cu_seqlens is not None:
        held.append(x.cu_seqlens)
    before = [y.clone() for y in held]
    for norm in (True, False):
        call(
            x,
            case,
            use_qk_l2norm_in_kernel=norm,
            use_beta_sigmoid_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=A_log,
            dt_bias=dt_bias,
        )
    assert all(same_bits(a, b) for a, b in zip(before, held, strict=True))


@pytest.mark.parametrize(("dataflow", "dtype"), RUNS, indirect=["dataflow"])
def test_results_are_new_tensors(dtype: torch.dtype, dataflow: str, device: str) -> None:
    """Neither a view of an input nor of what an earlier call returned."""
    x = make_inputs(PADDED, dtype, device)
    results = [*call(x, PADDED), *call(x, PADDED)]
    storages = [y.untyped_storage().data_ptr() for y in (*results, *x.tensors, x.initial_state)]
    assert len(set(storages[:4])) == 4 and not set(storages[:4]) & set(storages[4:])
