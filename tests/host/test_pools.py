"""What calls write in place and where tensors may lie: any operand may be a strided view, what is
written shares memory with nothing else, autograd sees that it is written, and only the slots that
are used are judged."""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import FP32, FP64, assert_within_budget, same_bits
from torch import Tensor

import gdn_triton
from gdn_triton._host import memory
from gdn_triton.layers import GatedDeltaNet

pytest.importorskip("triton", reason="Triton is not installed")

T, H, HV, K, V = 40, 1, 2, 16, 16
D, W = 2 * H * K + HV * V, 4
OFFSETS = (0, 17, 17, 36)  # an empty sequence, and tokens of none
N = len(OFFSETS) - 1


@dataclass(frozen=True)
class Op:
    """call: with the tensors and the options of `make`. written: the names of what it writes."""

    call: Callable[..., Any]
    make: Callable[[], dict[str, Any]]
    written: tuple[str, ...] = ()


def unit(*shape: int) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(*shape), dim=-1)


def tokens(*lead: int) -> dict[str, Tensor]:
    return {"q": unit(*lead, H, K), "k": unit(*lead, H, K), "v": torch.randn(*lead, HV, V)}


def gates(*lead: int) -> dict[str, Tensor]:
    """What comes before the activations."""
    return {
        "A_log": torch.randn(HV) * 0.5,
        "dt_bias": torch.randn(HV),
        "a": torch.randn(*lead, HV),
        "b": torch.randn(*lead, HV),
    }


def raw(*lead: int) -> dict[str, Any]:
    """The same by the names of the chunked op."""
    x = gates(*lead)
    flags = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    return {"g": x.pop("a"), "beta": x.pop("b"), **x, **flags}


def offsets() -> Tensor:
    return torch.tensor(OFFSETS)


def states(count: int) -> Tensor:
    return torch.randn(count, HV, K, V)


def slots() -> dict[str, Tensor]:
    return {"read_slots": torch.tensor([4, 1, 2]), "write_slots": torch.tensor([4, 0, 5])}


def make_chunk() -> dict[str, Any]:
    chunks = [[0, 0], [0, 1], [2, 0], [2, 1]]
    return {
        **tokens(1, T),
        **raw(1, T),
        "initial_state": states(N),
        "output_final_state": True,
        "cu_seqlens": offsets(),
        "cu_seqlens_cpu": offsets().cpu(),
        "chunk_indices": torch.tensor(chunks),
        "chunk_size": 16,
    }


def make_prefill() -> dict[str, Any]:
    return {
        "state": states(9),
        **slots(),
        "has_initial_state": torch.tensor([True, False, True]),
        **tokens(1, T),
        **raw(1, T),
        "cu_seqlens": offsets(),
        "out": torch.zeros(1, T, HV, V),
        "state_checkpoints": torch.zeros(5, HV, K, V),
        "checkpoint_slots": torch.tensor([[3, -1], [-1, -1], [1, 0]]),
        "checkpoint_every_n_tokens": 16,
        "chunk_size": 16,
    }


def make_sequences() -> dict[str, Any]:
    x = {**tokens(1, T), **raw(1, T), "beta": torch.randn(1, T, HV, V)}
    decays = {"gk": -torch.rand(1, T, HV, K), "gv": -torch.rand(1, T, HV, V)}
    more = {"initial_state": states(N), "output_final_state": True, "cu_seqlens": offsets()}
    return {**x, **decays, **more}


def make_step() -> dict[str, Any]:
    """Packed, with a slot for each token; those of no sequence have one that is in use."""
    write = torch.arange(3, 3 + T)
    write[OFFSETS[-1] :] = 3
    x = {"state": states(3 + T), "read_slots": torch.arange(3), "write_slots": write[None]}
    return {
        **x,
        **tokens(1, T),
        **gates(1, T),
        "cu_seqlens": offsets(),
        "out": torch.zeros(1, T, HV, V),
    }


def make_mixed_step() -> dict[str, Any]:
    decays = {"g": -torch.rand(N, HV), "beta": torch.rand(N, HV)}
    x = {"state": states(6), **slots(), "mixed_qkv": torch.randn(N, D), **decays}
    return {**x, "use_qk_l2norm_in_kernel": True, "out": torch.zeros(N, HV, V)}


def make_conv() -> dict[str, Any]:
    return {
        "x": torch.randn(1, T, D),
        "weight": torch.randn(D, W),
        "bias": torch.randn(D),
        "state": torch.randn(6, D, W - 1),
        **slots(),
        "has_initial_state": torch.tensor([True, True, False]),
        "cu_seqlens": offsets(),
    }


def make_prep() -> dict[str, Any]:
    x = make_conv()
    sizes = {"num_k_heads": H, "head_k_dim": K, "head_v_dim": V}
    return {"mixed_qkv": x.pop("x"), **x, **gates(1, T), **sizes}


def make_post_conv() -> dict[str, Any]:
    sizes = {"num_k_heads": H, "head_k_dim": K, "head_v_dim": V}
    return {"conv_output": torch.randn(T, D), **gates(T), **sizes}


OPS = {
    "chunk": Op(gdn_triton.chunk_gated_delta_rule, make_chunk),
    "sequences": Op(gdn_triton.fused_recurrent_gated_delta_rule, make_sequences),
    "post_conv": Op(gdn_triton.fused_post_conv_prep, make_post_conv),
    "prefill": Op(gdn_triton.chunk_prefill, make_prefill, ("out", "state_checkpoints", "state")),
    "step": Op(gdn_triton.recurrent_step, make_step, ("out", "state")),
    "mixed step": Op(gdn_triton.recurrent_step, make_mixed_step, ("out", "state")),
    "conv": Op(gdn_triton.causal_conv1d, make_conv, ("state",)),
    "conv update": Op(gdn_triton.causal_conv1d_update, make_conv, ("state",)),
    "conv prep": Op(gdn_triton.fused_conv_prep, make_prep, ("state",)),
}
WRITING = [name for name, op in OPS.items() if op.written]


@pytest.fixture(autouse=True)
def on_device(
    request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """The reference, wherever a test does not take `backend`: there nothing depends on which."""
    if device == "cuda" and request.node.get_closest_marker("of_no_device"):
        pytest.skip("nothing of this depends on the device")
    monkeypatch.setenv("GDN_BACKEND", "reference")
    with torch.device(device):
        yield


@pytest.fixture(params=["triton", "reference"])
def backend(
    request: pytest.FixtureRequest, on_device: None, monkeypatch: pytest.MonkeyPatch
) -> str:
    monkeypatch.setenv("GDN_BACKEND", request.param)
    return str(request.param)


def run(op: Op, x: dict[str, Any]) -> dict[str, Tensor]:
    """All results by name, with what was written."""
    found = op.call(**x)
    results = found if isinstance(found, tuple) else (found,)
    named = {f"result {i}": y for i, y in enumerate(results) if y is not None}
    return {**named, **{name: x[name] for name in op.written}}


def copied(x: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {name: y.clone() if isinstance(y, Tensor) else y for name, y in x.items()} | changes


def tensors_of(x: dict[str, Any]) -> list[str]:
    return [name for name, y in x.items() if isinstance(y, Tensor)]


# ----------------------------------------------------------------------------------- strided views


def viewed(x: Tensor, rng: random.Random, *, dense_last: bool) -> Tensor:
    """The values of x in memory whose dimensions are in another order and have gaps, all of it
    poison but for the values."""
    order = list(range(x.dim()))
    if dense_last:
        order = rng.sample(order[:-1], x.dim() - 1) + order[-1:]
    else:
        rng.shuffle(order)
    steps = [rng.choice((1, 2, 3)) for _ in order]
    if dense_last:
        steps[-1] = 1
    elif x.dim() == 1:
        steps[0] = rng.choice((2, 3))
    firsts = [rng.randrange(3) for _ in order]
    shape = [f + x.shape[d] * s for f, d, s in zip(firsts, order, steps, strict=True)]
    poison = torch.nan if x.is_floating_point() else True if x.dtype == torch.bool else -(2**28)
    around = torch.full(shape, poison, dtype=x.dtype, device=x.device)
    cuts = [slice(f, f + x.shape[d] * s, s) for f, d, s in zip(firsts, order, steps, strict=True)]
    view = around[tuple(cuts)].permute([order.index(d) for d in range(x.dim())])
    assert view.shape == x.shape
    return view.copy_(x)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", OPS)
def test_strided_operands(
    name: str, seed: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor at random strides, those of integers and flags among them."""
    op, rng = OPS[name], random.Random(seed)
    x = op.make()
    dense = run(op, copied(x))
    views = copied(x)
    for given in tensors_of(x):
        views[given] = viewed(x[given], rng, dense_last=name == "prefill" and given == "out")
    before = copied(views)
    got = run(op, views)
    for given in set(tensors_of(x)) - set(op.written):
        assert torch.equal(views[given], before[given]), f"{given} was written"
    monkeypatch.setenv("GDN_BACKEND", "reference")
    wide = {k: y.to(FP64) if isinstance(y, Tensor) and y.dtype == FP32 else y for k, y in x.items()}
    exact = run(op, copied(wide))
    assert got.keys() == dense.keys() == exact.keys()
    for result, y in got.items():
        options = {"dtype": FP32, "unit": torch.finfo(FP32).eps / 2}
        assert_within_budget(result, y, exact[result].to(FP64), dense[result], **options)


def test_strided_offsets_of_a_layer(backend: str) -> None:
    """Few tokens, which a layer without gradients gives to the recurrence."""
    x, table = torch.randn(1, 9, 32), torch.tensor([[0, 3], [4, 3], [9, 3]])
    dense, column = table[:, 0].contiguous(), table[:, 0]
    layer = GatedDeltaNet(hidden_size=32, head_dim=16, num_heads=1).to(x.device)
    with torch.no_grad():
        assert same_bits(layer(x, cu_seqlens=column), layer(x, cu_seqlens=dense))
        caches = layer.make_cache(2), layer.make_cache(2)
        expected = layer(x, cu_seqlens=dense, cache=caches[0])
        assert same_bits(layer(x, cu_seqlens=column, cache=caches[1]), expected)
        assert same_bits(caches[1].recurrent_state, caches[0].recurrent_state)


# --------------------------------------------------------------------- versions, as autograd counts


@pytest.mark.parametrize("name", WRITING)
def test_versions_of_what_is_written(name: str, backend: str) -> None:
    """Raised by a kernel as by torch's own operations, and by nothing for what is only read."""
    op = OPS[name]
    x = op.make()
    op.call(**copied(x))
    before = {given: x[given]._version for given in tensors_of(x)}
    op.call(**x)
    for given, version in before.items():
        rise = x[given]._version - version
        if given not in op.written:
            assert rise == 0, f"{given} was not written"
        elif backend == "triton":
            assert rise == 1, given
        else:
            assert rise > 0, given


@pytest.mark.parametrize("name", WRITING)
def test_versions_of_views_and_checkpoints_in_the_pool(name: str, backend: str) -> None:
    """A view has its base's version, and so a saved slot of the pool has."""
    op = OPS[name]
    x = op.make()
    slot, version = x["state"][:1], x["state"]._version
    if name == "prefill":
        x["state_checkpoints"], x["checkpoint_slots"] = None, x["checkpoint_slots"] + 5
    op.call(**x)
    assert slot._version > version


def test_a_saved_state_that_is_overwritten(backend: str) -> None:
    x = make_step()
    call = {**tokens(1, T), "g": -torch.rand(1, T, HV), "beta": torch.rand(1, T, HV)}
    call["k"].requires_grad_()
    pool = x["state"]
    o, _ = gdn_triton.chunk_gated_delta_rule(**call, initial_state=pool[3:4])
    with torch.no_grad():
        gdn_triton.recurrent_step(**x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize("name", WRITING)
def test_versions_under_a_compiler(name: str, backend: str) -> None:
    """The operator's schema says what is written: torch raises the version once, and a kernel's
    caller does not once more."""
    op = OPS[name]
    x = op.make()
    torch.compiler.reset()

    def call(x: dict[str, Any]) -> Any:
        return op.call(**x)

    version = {given: x[given]._version for given in op.written}
    torch.compile(call, fullgraph=True, backend="eager")(x)
    torch.compiler.reset()
    for given in op.written:
        rise = x[given]._version - version[given]
        assert rise == 1 if backend == "triton" else rise > 0, given


@pytest.mark.parametrize("name", WRITING)
def test_in_inference_mode(name: str, backend: str) -> None:
    """Tensors of that mode have no version."""
    op = OPS[name]
    x = op.make()
    expected = run(op, copied(x))
    with torch.inference_mode():
        found = run(op, copied(x))
    assert all(same_bits(y, expected[result]) for result, y in found.items())


@pytest.mark.of_no_device
def test_versions_with_the_cuda_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is not here; its caller raises the versions before it runs."""
    from gdn_triton.chunk import cuda as cuda_chunk

    seen: list[int] = []
    pool = SimpleNamespace(state=states(2), out=torch.zeros(3), checkpoints=torch.zeros(4))
    written = (pool.state, pool.out, pool.checkpoints)

    def forward(*args: Any) -> tuple[Tensor, None]:
        seen.extend(x._version for x in written)
        return pool.out, None

    before = [x._version for x in written]
    monkeypatch.setattr(cuda_chunk, "fast_chunk", SimpleNamespace(forward=forward))
    cuda_chunk.forward(SimpleNamespace(needs_grad=False), None, pool)  # type: ignore[arg-type]
    assert seen == [version + 1 for version in before]


# ---------------------------------------------------------------------------- memory that is shared

PAIRS = [
    (name, written, other)
    for name in WRITING
    for written, other in itertools.product(OPS[name].written, tensors_of(OPS[name].make()))
    if written != other
]


def arena(x: dict[str, Any], starts: dict[str, int]) -> tuple[dict[str, Any], Tensor]:
    """The tensors of `starts` in one memory, each from that byte on; its bytes."""
    ends = [start + x[name].nbytes for name, start in starts.items()]
    memory = torch.zeros(max(ends), dtype=torch.uint8)
    moved = dict(x)
    for name, start in starts.items():
        place = memory[start : start + x[name].nbytes].view(x[name].dtype)
        moved[name] = place.view(x[name].shape).copy_(x[name])
    return moved, memory


def up(size: int) -> int:
    """The next multiple of 16 bytes."""
    return -(-size // 16) * 16


@pytest.mark.parametrize("name,written,other", PAIRS)
def test_what_is_written_lies_apart(name: str, written: str, other: str) -> None:
    """One starts in the last bytes of the other, either way. Nothing has been written then."""
    op = OPS[name]
    x = op.make()
    first, second = (up(x[given].nbytes) - 16 for given in (written, other))
    for starts in ({written: 0, other: first}, {other: 0, written: second}):
        moved, memory = arena(copied(x), starts)
        # Offsets are read before memory is judged: they have to be whole.
        moved[other].copy_(x[other])
        before = memory.clone()
        first_named, second_named = f"{written} must lie apart from {other}", ""
        if other in op.written:
            second_named = f"|{other} must lie apart from {written}"
        with pytest.raises(ValueError, match=f"({first_named}{second_named}) in memory"):
            op.call(**moved)
        assert torch.equal(memory, before)


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


@pytest.mark.parametrize("name", WRITING)
def test_elements_in_one_place(name: str) -> None:
    """A stride of 0, and one that is half of what it has to be."""
    op = OPS[name]
    for written in op.written:
        x = op.make()
        y = x[written]
        dim = next(dim for dim, size in enumerate(y.shape) if size > 1)
        strides = list(y.stride())
        for stride in (0, strides[dim] // 2):
            strides[dim] = stride
            wrong = torch.zeros(y.numel()).as_strided(y.shape, strides)
            with pytest.raises(ValueError, match=f"{written} must have memory of its own for ever"):
                op.call(**{**x, written: wrong})


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
    token = next(given for given in ("mixed_qkv", "q", "x") if given in x)
    moved, _ = arena(copied(x), {"state": 0, token: up(x["state"].nbytes) - 16})
    with pytest.raises(ValueError, match=f"state must lie apart from {token} in memory"):
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
    x = shape, (2 * 10**9, 2 * 10**9 + 2, 2 * 10**9 + 6, 2 * 10**9 + 14), FP32
    assert memory._share(x, x, 4)
    # A split of rows takes a few steps however long it is.
    rows = (2**20, 2**15), (2**16, 1), FP32
    assert not memory._share(rows, rows, 2**17) and memory._share(rows, rows, 2**17 - 4)


# ------------------------------------------------------------------------------------ slots in use


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
