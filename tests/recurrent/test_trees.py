"""`parents` of `recurrent_step` and `causal_conv1d_update`: each node of a tree has what the path
from its root to it has when that is decoded alone."""

from typing import Any

import pytest
import torch
from helpers import FP16, FP32, assert_within_budget, same_bits
from recurrent_cases import exact, normal
from torch import Tensor

from gdn_triton import causal_conv1d_update, recurrent_step
from gdn_triton.reference.recurrent import recurrent

N, T = 4, 6
H, HV, K, V = 1, 2, 16, 8
D, W = 24, 4
PADDED = 2  # the sequence whose slots are padding
LENGTHS = [4, 6, 3, 0]  # of the packed calls
READ = torch.tensor([1, 3, -1, 0])
SLOTS = 4 + N * T
DTYPES = [FP32, FP16]  # Triton's interpreter has no bfloat16


@pytest.fixture(autouse=True, params=["reference", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("GDN_BACKEND", request.param)
    return str(request.param)


def random_trees() -> Tensor:
    """parents [N, T]: a random earlier node for each node, or -1."""
    trees = torch.stack([torch.randint(-1, t, (N,)) if t > 0 else -torch.ones(N) for t in range(T)])
    return trees.T.to(torch.int32).contiguous()


def path_to(parents: Tensor, n: int, t: int) -> list[int]:
    path = [t]
    while parents[n, path[0]] >= 0:
        path.insert(0, int(parents[n, path[0]]))
    return path


def node_slots() -> Tensor:
    """[N, T]: a slot for each node, in no order."""
    return (4 + torch.randperm(N * T)).view(N, T)


def packed(x: dict[str, Any], *names: str) -> dict[str, Any]:
    """The arguments of a packed call, made from those of a padded one.

    Each named tensor [N, T, ...] becomes one row [1, tokens, ...]: sequence n keeps its first
    LENGTHS[n] tokens, the sequences follow one another, and two tokens of no sequence come last.
    `cu_seqlens` ends before these two.
    """
    parts = {}
    for name in names:
        rows = [x[name][n, :length] for n, length in enumerate(LENGTHS)]
        parts[name] = torch.cat([*rows, x[name][0, :2]])[None]
    ends = torch.tensor([0, *LENGTHS], dtype=torch.int32, device=x[names[0]].device).cumsum(0)
    return {**x, **parts, "cu_seqlens": ends.to(torch.int32)}


def unpacked(x: Tensor) -> Tensor:
    """[N, T, ...] of [1, tokens, ...], with zeros past the length of a sequence."""
    rows = x.new_zeros(N, T, *x.shape[2:])
    start = 0
    for n, length in enumerate(LENGTHS):
        rows[n, :length] = x[0, start : start + length]
        start += length
    assert not x[0, start:].any()
    return rows


def assert_same(found: Tensor, expected: Tensor, backend: str) -> None:
    """The kernels give the same bits. In the reference, torch on a CPU may give an activation
    another last bit in a full vector than in the rest of a tensor."""
    if backend == "triton":
        assert same_bits(found, expected)
        return
    x, y = found.double(), expected.double()
    assert x.isfinite().all()
    assert (x - y).abs().max() <= 4 * torch.finfo(found.dtype).eps * y.abs().max()


def served(n: int, t: int, is_packed: bool) -> bool:
    return n != PADDED and (not is_packed or t < LENGTHS[n])


# ------------------------------------------------------------------------------ the recurrence

TOKENS = ("q", "k", "v", "a", "b")


def step_inputs(device: str) -> dict[str, Any]:
    q, k = normal(2, N, T, H, K, device=device)
    a, b = normal(2, N, T, HV, device=device)
    return {
        "q": q,
        "k": k,
        "v": normal(N, T, HV, V, device=device),
        "a": a,
        "b": b,
        "A_log": normal(HV, device=device) * 0.5,
        "dt_bias": normal(HV, device=device),
    }


def expected(x: dict[str, Any], state: Tensor, path: list[int], n: int, wide: bool) -> Any:
    """o and the state of the last node of a path, in float64 or as float32 has it."""
    given = {name: x[name][n : n + 1, path] for name in ("q", "k", "v")}
    given |= {"g": x["a"][n : n + 1, path], "beta": x["b"][n : n + 1, path]}
    given |= {"A_log": x["A_log"], "dt_bias": x["dt_bias"], "initial_state": state[None]}
    result = recurrent(
        **{name: exact(y) if wide else y for name, y in given.items()},
        use_qk_l2norm=True,
        use_gate=True,
        use_beta_sigmoid=True,
        kept=None if wide else state.dtype,
    )
    return result.o[0, -1], result.final_state[0]


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("pool", DTYPES, ids=str)
def test_step(pool: torch.dtype, v_first: bool, is_packed: bool, backend: str, device: str) -> None:
    """Against float64; the kernels give each node the bits of its path, a token a call."""
    x, parents, write, read = step_inputs(device), random_trees(), node_slots(), READ
    before = normal(SLOTS, HV, K, V, device=device).to(pool)
    state = (before.mT if v_first else before).contiguous()
    options = {"use_qk_l2norm_in_kernel": True, "state_v_first": v_first}
    given = {**x, "parents": parents.to(device), "write_slots": write.to(device)}
    if is_packed:
        given = packed(given, *TOKENS, "parents", "write_slots")
        # Tokens of no sequence may have any parent.
        given["parents"][0, -2:] = 99
    o = recurrent_step(state, read.to(device), **given, **options)
    o = unpacked(o) if is_packed else o
    after = state.mT if v_first else state

    written = {-1}
    names = "o", "state"
    pairs: dict[str, list[list[Tensor]]] = {name: [] for name in names}
    for n in range(N):
        for t in range(T):
            if not served(n, t, is_packed):
                assert not o[n, t].any()
                continue
            path, first = path_to(parents, n, t), before[read[n]]
            exactly = expected(x, first, path, n, True)
            narrow = expected(x, first, path, n, False)
            slot = int(write[n, t])
            written.add(slot)
            for name, *three in zip(names, (o[n, t], after[slot]), exactly, narrow, strict=True):
                pairs[name].append(three)
            if backend == "triton":
                alone = torch.stack([first.mT if v_first else first])
                for i in path:
                    one = {name: x[name][n : n + 1, i] for name in TOKENS}
                    where = torch.zeros(1, dtype=torch.int64, device=device)
                    y = recurrent_step(alone, where, **{**x, **one}, **options)
                assert same_bits(y[0], o[n, t]) and same_bits(alone[0], state[slot])
    for name, dtype in zip(names, (FP32, pool), strict=True):
        found, exactly, narrow = (torch.stack(list(y)) for y in zip(*pairs[name], strict=True))
        unit = torch.finfo(pool).eps / 2
        assert_within_budget(name, found, exactly, narrow.to(dtype), dtype=dtype, unit=unit)
    kept = [slot for slot in range(SLOTS) if slot not in written]
    assert same_bits(after[kept], before[kept])


def test_chain(backend: str, device: str) -> None:
    """Each node the parent of the next one: the call without parents, even if no state is kept."""
    x = {**step_inputs(device), "use_qk_l2norm_in_kernel": True}
    chain = torch.arange(-1, T - 1, device=device).expand(N, T)
    before = normal(SLOTS, HV, K, V, device=device)
    for write in (node_slots().to(device), torch.full((N, T), -1, device=device)):
        one, other = before.clone(), before.clone()
        o = recurrent_step(one, READ.to(device), write, **x, parents=chain)
        assert_same(o, recurrent_step(other, READ.to(device), write, **x), backend)
        assert_same(one, other, backend)


def test_states_that_are_not_kept(device: str) -> None:
    """Leaves, and nodes whose only child comes next, need no slot: other nodes stay the same."""
    x = {**step_inputs(device), "use_qk_l2norm_in_kernel": True}
    parents = torch.tensor([-1, 0, 0, 2, 2, -1], device=device).expand(N, T)
    write = node_slots().to(device)
    some = write.clone()
    some[:, [1, 3, 5]] = -1
    before = normal(SLOTS, HV, K, V, device=device)
    one, other = before.clone(), before.clone()
    o = recurrent_step(one, READ.to(device), write, **x, parents=parents)
    assert same_bits(o, recurrent_step(other, READ.to(device), some, **x, parents=parents))
    kept = [n for n in range(N) if n != PADDED]
    assert same_bits(one[write[kept][:, [0, 2, 4]]], other[write[kept][:, [0, 2, 4]]])
    assert same_bits(other[write[:, [1, 3, 5]]], before[write[:, [1, 3, 5]]])


# ------------------------------------------------------------------------------ the convolution


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_conv(dtype: torch.dtype, width: int, is_packed: bool, backend: str, device: str) -> None:
    """Each node has the bits of its path, one call for all of its tokens; so have the states."""
    x = normal(N, T, D, device=device).to(dtype)
    weight, bias = normal(D, width, device=device), normal(D, device=device)
    parents, write = random_trees(), node_slots()
    if is_packed:
        write[0, 1] = -1  # a parent's state may be dropped
    before = normal(SLOTS, D, width - 1, device=device)
    has_state = torch.tensor([True, False, True, True], device=device)
    given = {"x": x, "parents": parents.to(device), "write_slots": write.to(device)}
    if is_packed:
        given = packed(given, "x", "parents", "write_slots")
    state = before.clone()
    options = {"weight": weight, "bias": bias}
    y = causal_conv1d_update(
        **given, **options, state=state, read_slots=READ.to(device), has_initial_state=has_state
    )
    y = unpacked(y) if is_packed else y
    written = {-1}
    for n in range(N):
        for t in range(T):
            if not served(n, t, is_packed):
                assert not y[n, t].any()
                continue
            alone = torch.where(has_state[n], before[READ[n]], 0)[None]
            path = path_to(parents, n, t)
            last = causal_conv1d_update(x[n : n + 1, path], **options, state=alone)[0, -1]
            assert_same(y[n, t], last, backend)
            slot = int(write[n, t])
            written.add(slot)
            assert slot < 0 or same_bits(state[slot], alone[0])
    kept = [slot for slot in range(SLOTS) if slot not in written]
    assert same_bits(state[kept], before[kept])


# ------------------------------------------------------------------------------ the call


def test_compiled(device: str) -> None:
    """One graph, the bits of eager calls."""

    def both(state: Tensor, conv: Tensor, x: dict[str, Any], y: dict[str, Any]) -> Any:
        return recurrent_step(state, **x), causal_conv1d_update(state=conv, **y)

    tree = {"read_slots": READ.to(device), "write_slots": node_slots().to(device)}
    tree |= {"parents": random_trees().to(device)}
    x = {**step_inputs(device), **tree, "use_qk_l2norm_in_kernel": True}
    y = {**tree, "x": normal(N, T, D, device=device), "weight": normal(D, W, device=device)}
    state = normal(SLOTS, HV, K, V, device=device)
    conv = normal(SLOTS, D, W - 1, device=device)
    pools = state.clone(), conv.clone()
    eager = both(state, conv, x, y)
    compiled: Any = torch.compile(both, fullgraph=True, backend="aot_eager")
    got = compiled(*pools, x, y)
    assert all(same_bits(a, b) for a, b in zip((*got, *pools), (*eager, state, conv), strict=True))


def changed(x: Tensor, n: int, t: int, value: int) -> Tensor:
    x = x.clone()
    x[n, t] = value
    return x


TREE = torch.tensor([-1, 0, 0, 1, 1, -1], dtype=torch.int32).expand(N, T)
WRITE = 4 + torch.arange(N * T).view(N, T)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"parents": TREE[:, :3]}, r"parents must have shape \[4, 6\], a parent a token"),
    ({"parents": TREE.float()}, "parents must be int32 or int64"),
    ({"parents": changed(TREE, 1, 3, 3)}, "parents must be -1 or an earlier token of the same se"),
    ({"parents": changed(TREE, 1, 3, -2)}, "parents .* got -2 for token 3 of sequence 1"),
    ({"write_slots": None}, r"write_slots must have shape \[4, 6\], a slot a token, with parents"),
    ({"write_slots": WRITE[:, 0]}, r"write_slots must have shape \[4, 6\], a slot a token, with"),
    ({"write_slots": changed(WRITE, 1, 2, 3)}, "write_slots must keep the read slot, with parents"),
]


@pytest.mark.parametrize("changes, message", WRONG, ids=[message for _, message in WRONG])
def test_errors(changes: dict[str, Any], message: str) -> None:
    tree = {"read_slots": READ, "write_slots": WRITE, "parents": TREE, **changes}
    with pytest.raises(ValueError, match=message):
        recurrent_step(torch.zeros(SLOTS, HV, K, V), **step_inputs("cpu"), **tree)
    with pytest.raises(ValueError, match=message):
        causal_conv1d_update(
            torch.zeros(N, T, D), torch.zeros(D, W), state=torch.zeros(SLOTS, D, W - 1), **tree
        )


def test_root_in_the_read_slot(device: str) -> None:
    """The only token without a parent may leave its state where its sequence's state was."""
    tree = torch.tensor([-1, 0, 0, 1, 1, 3], dtype=torch.int32, device=device).expand(N, T)
    x = step_inputs(device)
    read, write = READ.to(device), WRITE.to(device)
    pool = torch.randn(SLOTS, HV, K, V, device=device)
    other, places = pool.clone(), write.clone()
    places[:, 0] = read
    o = recurrent_step(pool, read, write, parents=tree, **x)
    assert same_bits(recurrent_step(other, read, places, parents=tree, **x), o)
    live = [n for n in range(N) if READ[n] >= 0]
    assert same_bits(other[read[live]], pool[write[live, 0]])
    assert same_bits(other[write[live, 1:]], pool[write[live, 1:]])
    # The convolution's nodes all read the state of their sequence.
    with pytest.raises(ValueError, match="write_slots must keep the read slot"):
        causal_conv1d_update(
            torch.zeros(N, T, D),
            torch.zeros(D, W),
            state=torch.zeros(SLOTS, D, W - 1),
            read_slots=READ,
            write_slots=places.cpu(),
            parents=tree.cpu(),
        )


def test_errors_of_one_function() -> None:
    x, tree = step_inputs("cpu"), {"write_slots": WRITE, "parents": TREE}
    lost = changed(WRITE, 0, 1, -1)
    with pytest.raises(ValueError, match="no slot for token 1 of sequence 0, the parent of token"):
        state = torch.zeros(SLOTS, HV, K, V)
        recurrent_step(state, READ, **{**x, **tree, "write_slots": lost})
    slots, accepted = torch.arange(N * 2).view(N, 2), torch.ones(N).int()
    with pytest.raises(ValueError, match="num_accepted_tokens must be None with parents"):
        recurrent_step(state, slots, num_accepted_tokens=accepted, **x, parents=TREE)
    with pytest.raises(ValueError, match="num_accepted_tokens must be None with parents"):
        causal_conv1d_update(
            torch.zeros(N, T, D),
            torch.zeros(D, W),
            state=torch.zeros(SLOTS, D, W),
            read_slots=torch.arange(N),
            num_accepted_tokens=accepted,
            parents=TREE,
        )
    with pytest.raises(ValueError, match="parents must be None without state"):
        causal_conv1d_update(torch.zeros(N, T, D), torch.zeros(D, W), state=None, parents=TREE)  # type: ignore[arg-type]
