"""Tensors that calls write in place may lie next to tensors that they read, and only slots that are
used are judged. Shared memory is refused (tests/functions/test_refusals.py)."""

import itertools
import random
from typing import Any

import pytest
import torch
from helpers import FP32, same_bits
from pool_cases import (
    HV,
    OPS,
    WRITING,
    D,
    H,
    K,
    V,
    W,
    arena,
    copied,
    make_prefill,
    run,
    tensors_of,
    tokens,
    up,
)

import gdn_triton
from gdn_triton._host import memory

pytest.importorskip("triton", reason="Triton is not installed")

pytestmark = pytest.mark.usefixtures("on_device")

# ---------------------------------------------------------------------------- memory that is shared


@pytest.mark.parametrize("name", WRITING)
def test_neighbours_in_memory(name: str, backend: str) -> None:
    """All tensors of a call one after the other."""
    op = OPS[name]
    x = op.make()
    expected = run(op, copied(x))
    starts, end = {}, 0
    for given in tensors_of(x):
        starts[given], end = end, up(end + x[given].nbytes)
    found = run(op, arena(x, starts)[0])
    assert all(same_bits(y, expected[result]) for result, y in found.items())


@pytest.mark.parametrize("name", ["prefill", "step", "mixed step"])
def test_columns_of_one_tensor(name: str, backend: str) -> None:
    """q, k, v and o side by side in each row: they start and end within each other, and share no
    element. One column more, and they do."""
    op = OPS[name]
    x = op.make()
    expected = run(op, copied(x))
    names = ["mixed_qkv", "out"] if name == "mixed step" else ["q", "k", "v", "out"]
    dims = 1 if name == "mixed step" else 2
    widths = [D, HV * V] if name == "mixed step" else [H * K, H * K, HV * V, HV * V]
    lead = x[names[0]].shape[:-dims]
    for spare, wrong in ((0, False), (-1, True)):
        rows = torch.zeros(*lead, sum(widths))
        moved, end = copied(x), 0
        for given, width in zip(names, widths, strict=True):
            end += width + (spare if given == "out" else 0)
            part = rows[..., end - width : end]
            moved[given] = part.view(x[given].shape).copy_(x[given])
        if wrong:
            with pytest.raises(ValueError, match=f"out must lie apart from {names[-2]} in memory"):
                op.call(**moved)
        else:
            found = run(op, moved)
            assert all(same_bits(y, expected[result]) for result, y in found.items())


def test_checkpoints_in_the_pool() -> None:
    """`state` itself, or a view of all of it, is the pool; another part of it is refused."""
    x = make_prefill()
    table = torch.tensor([[3, -1], [-1, -1], [7, 8]])
    del x["state_checkpoints"]
    alone = copied(x, checkpoint_slots=table)
    o, kept = gdn_triton.chunk_prefill(**alone)
    assert kept is None
    for view in (lambda y: y, lambda y: y[:], lambda y: y.view(9, HV, K, V)):
        y = copied(x, checkpoint_slots=table)
        found, kept = gdn_triton.chunk_prefill(**y, state_checkpoints=view(y["state"]))
        assert kept is None and same_bits(found, o) and same_bits(y["state"], alone["state"])
        y["checkpoint_slots"] = torch.tensor([[2, -1], [-1, -1], [7, 8]])
        if x["state"].is_cpu:  # where the host reads slots
            with pytest.raises(ValueError, match="slot that another sequence writes, got slot 2"):
                gdn_triton.chunk_prefill(**y, state_checkpoints=view(y["state"]))
        y["checkpoint_slots"] = None
        with pytest.raises(ValueError, match="must come with checkpoint_slots where it is state"):
            gdn_triton.chunk_prefill(**y, state_checkpoints=view(y["state"]))
    with pytest.raises(ValueError, match="state_checkpoints must lie apart from state"):
        gdn_triton.chunk_prefill(**x, state_checkpoints=x["state"][4:])


@pytest.mark.parametrize("name", WRITING)
def test_layouts_are_judged_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call that is like the first looks at addresses only; it still looks at them."""
    op = OPS[name]
    x = op.make()
    op.call(**x)

    def again(*args: Any) -> None:
        raise AssertionError("judged again")

    monkeypatch.setattr(memory.Apart, "__init__", again)
    op.call(**copied(x))
    token = next(given for given in ("mixed_qkv", "q", "x", "slots") if given in x)
    written = "state" if "state" in x else op.written[0]
    moved, _ = arena(copied(x), {written: 0, token: up(x[written].nbytes) - 16})
    with pytest.raises(ValueError, match=f"{written} must lie apart from {token} in memory"):
        op.call(**moved)


# ------------------------------------------------------------------------------------ the predicate


def bytes_of(layout: memory.Layout, first: int) -> list[int]:
    shape, strides, dtype = layout
    return [
        first + sum(i * s for i, s in zip(index, strides, strict=True)) * dtype.itemsize + byte
        for index in itertools.product(*map(range, shape))
        for byte in range(dtype.itemsize)
    ]


def random_layout(rng: random.Random) -> memory.Layout:
    count = rng.randrange(1, 4)
    shape = tuple(rng.randrange(1, 5) for _ in range(count))
    strides = tuple(rng.choice((0, 1, 2, 3, 4, 5, 6, 8, 12, 20)) for _ in range(count))
    return shape, strides, rng.choice((torch.bool, torch.float16, FP32, torch.int64))


@pytest.mark.of_no_device
def test_sharing_against_every_byte() -> None:
    """Random layouts, overlapping or interleaved, against the set of all their bytes."""
    rng, found = random.Random(0), [0, 0]
    for _ in range(3000):
        x, y = random_layout(rng), random_layout(rng)
        distance = rng.randrange(-60, 60)
        expected = not set(bytes_of(x, 0)).isdisjoint(bytes_of(y, distance))
        assert memory._share(x, y, distance) is expected, (x, y, distance)
        found[expected] += 1
    assert min(found) > 500, "both answers have come"


@pytest.mark.of_no_device
def test_own_memory_against_every_byte() -> None:
    rng, found = random.Random(0), [0, 0]
    for _ in range(2000):
        layout = random_layout(rng)
        places = bytes_of(layout, 0)
        own = len(set(places)) == len(places)
        try:
            memory.check_own_memory("x", layout)
        except ValueError:
            assert not own, layout
        else:
            assert own, layout
        found[own] += 1
    assert min(found) > 300, "both answers have come"


@pytest.mark.of_no_device
def test_layouts_that_take_long_to_tell_apart() -> None:
    """They count as sharing memory: the search ends."""
    shape = (500, 500, 500, 500)
    x = shape, (1000003, 1000033, 1000037, 1000039), FP32
    assert memory._share(x, x, 4)
    # A split of rows takes a few steps however long it is.
    rows = (2**20, 2**15), (2**16, 1), FP32
    assert not memory._share(rows, rows, 2**17) and memory._share(rows, rows, 2**17 - 4)


# ------------------------------------------------------------------------------------- slots in use


def valid(
    read: list[int], write: list[list[int]], known: list[bool], last_skipped: int, count: int
) -> bool:
    """Whether the slots of a call keep the rules. write: of each sequence what it writes, in order;
    known: whether it starts from its slot."""
    live = [slot > last_skipped for slot in read]
    written = [
        [slot for slot in line if slot > last_skipped] if is_live else []
        for line, is_live in zip(write, live, strict=True)
    ]
    flat = [slot for line in written for slot in line]
    if any(slot >= count for slot in (*read, *flat)) or len(set(flat)) < len(flat):
        return False
    return not any(
        live[n] and known[n] and read[n] in line
        for n in range(len(read))
        for m, line in enumerate(written)
        if m != n
    )


SLOTTED = ["step", "step by tokens", "packed step", "conv", "update by tokens", "prefill"]


@pytest.mark.parametrize("skip", ["negative", "non_positive"])
@pytest.mark.parametrize("form", SLOTTED)
def test_slots_that_count(form: str, skip: str, backend: str, device: str) -> None:
    """Random slots are refused on a CPU if and only if two sequences would meet in one: those of
    sequences that are skipped, and of tokens of none, may hold anything. What is taken gives each
    sequence what it gets alone."""
    rng = random.Random(form + skip)
    last, count, lengths = (-1 if skip == "negative" else 0), 6, (2, 1, 2)
    packed, by_token = (
        form in ("packed step", "update by tokens"),
        "token" in form or "pack" in form,
    )
    starts = [0, 2, 3] if packed else [0, 2, 4]
    # A call of several sequences, and one of each alone, in the interpreter.
    wanted, outcomes = (12, 4 if backend == "triton" else 8), [0, 0]
    for _ in range(600):
        read = [rng.randrange(-1, 5) for _ in range(3)]
        pool = range(-1, 8) if rng.random() < 0.3 else range(-1, count)
        write = [
            [rng.choice(pool) for _ in range(n if by_token else 1)]
            for n in (lengths if packed else (2, 2, 2))
        ]
        flags = form in ("conv", "update by tokens", "prefill")
        known = [not flags or rng.random() < 0.7 for _ in range(3)]
        good = valid(read, write, known, last, count)
        if outcomes[good] >= wanted[good] or (not good and device != "cpu"):
            continue
        outcomes[good] += 1
        shape = (D, W - 1) if "conv" in form or "update" in form else (HV, K, V)
        call: dict[str, Any] = {"state": torch.randn(count, *shape), "skip": skip}
        call["read_slots"] = torch.tensor(read)
        length = 7 if packed else 2
        flat = [slot for line in write for slot in line]
        if packed:
            # Tokens of no sequence have slots that others have, or that are not there.
            flat += [rng.randrange(-1, 9) for _ in range(length - sum(lengths))]
            call["write_slots"] = torch.tensor(flat)[None]
            call["cu_seqlens"] = torch.tensor([0, 2, 3, 5])
        else:
            call["write_slots"] = torch.tensor(write) if by_token else torch.tensor(flat)
        lead = (1, length) if packed else (3, 2)
        if flags:
            call["has_initial_state"] = torch.tensor(known)
        if form in ("conv", "update by tokens"):
            token = {"x": torch.randn(*lead, D)}
            call["weight"] = torch.randn(D, W)
            function: Any = gdn_triton.causal_conv1d
            if form == "update by tokens":
                function = gdn_triton.causal_conv1d_update
        else:
            token = {**tokens(*lead), "g": -torch.rand(*lead, HV), "beta": torch.rand(*lead, HV)}
            function = gdn_triton.chunk_prefill if form == "prefill" else gdn_triton.recurrent_step
        before = call["state"].clone()
        if not good:
            with pytest.raises(ValueError, match=r"_slots must "):
                function(**call, **token)
            assert same_bits(call["state"], before)
            continue
        function(**call, **token)
        expected = before.clone()
        for n, line in enumerate(write):
            if read[n] <= last:
                continue
            alone = dict(call, state=before.clone(), read_slots=call["read_slots"][n : n + 1])
            if packed:
                cut = slice(starts[n], starts[n] + lengths[n])
                one = {name: y[:, cut] for name, y in token.items()}
                alone["write_slots"] = call["write_slots"][:, cut]
                alone["cu_seqlens"] = torch.tensor([0, lengths[n]])
            else:
                one = {name: y[n : n + 1] for name, y in token.items()}
                alone["write_slots"] = call["write_slots"][n : n + 1]
            if flags:
                alone["has_initial_state"] = call["has_initial_state"][n : n + 1]
            function(**alone, **one)
            for slot in line:
                if slot > last:
                    expected[slot] = alone["state"][slot]
        torch.testing.assert_close(call["state"], expected, rtol=1e-6, atol=1e-6)
    assert outcomes[1] == wanted[1] and (outcomes[0] == wanted[0] or device != "cpu")
