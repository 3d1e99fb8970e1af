"""`num_accepted_tokens` of `recurrent_step` and `causal_conv1d_update`: verifying drafts call after
call leaves what decoding the accepted tokens one by one leaves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import same_bits
from torch import Tensor

from gdn_triton import causal_conv1d_update, recurrent_step

N, T, S = 4, 3, 3
H, HV, K, V = 1, 2, 16, 8
D, W = 24, 4
BACKENDS = ["reference", "triton"]
DTYPES = [torch.float32, torch.float16]  # Triton's interpreter has no bfloat16
PADDED = 2  # the sequence whose slots are padding


@pytest.fixture(autouse=True, params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("GDN_BACKEND", request.param)
    return str(request.param)


def rows(device: str) -> Tensor:
    """The slots of each sequence, of a pool whose slot 0 is nobody's."""
    slots = torch.arange(1, N * S + 1, dtype=torch.int32, device=device).view(N, S).flip(1)
    slots[PADDED] = 0
    return slots


def step_inputs(device: str, tokens: int = T) -> dict[str, Any]:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    return {
        "mixed_qkv": random(N, tokens, 2 * H * K + HV * V),
        "a": random(N, tokens, HV),
        "b": random(N, tokens, HV),
        "A_log": random(HV),
        "dt_bias": random(HV),
        "use_qk_l2norm_in_kernel": True,
        "state_v_first": True,
        "skip": "non_positive",
    }


def tokens_of(x: dict[str, Any], t: int) -> dict[str, Any]:
    return {**x, **{name: x[name][:, t] for name in ("mixed_qkv", "a", "b")}}


def packed(x: dict[str, Any], lengths: list[int], *names: str) -> dict[str, Any]:
    """The first tokens of each sequence, one after the other, and two of none."""
    parts = {
        name: torch.cat(
            [*(x[name][n, :length] for n, length in enumerate(lengths)), x[name][0, :2]]
        )
        for name in names
    }
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return {**x, **parts, "cu_seqlens": offsets.to(x[names[0]].device)}


def assert_same(found: Tensor, expected: Tensor, backend: str, pool: torch.dtype) -> None:
    """The kernels give the same bits. In the reference, torch on a CPU may give an activation
    another last bit in a full vector than in the rest of a tensor, so it depends on how many tokens
    the call has: states then differ by about a unit in the last place of the pool's dtype."""
    if backend == "triton":
        assert same_bits(found, expected)
        return
    x, y = found.double(), expected.double()
    assert x.isfinite().all()
    assert (x - y).abs().max() <= 4 * torch.finfo(pool).eps * y.abs().max()


@pytest.mark.parametrize("pool", DTYPES, ids=str)
def test_step_from_accepted(pool: torch.dtype, backend: str, device: str) -> None:
    """Sequences accept 1, 2, 3 and 3 of the first call's tokens: the second goes on from there."""
    slots = rows(device)
    first, second = step_inputs(device), step_inputs(device)
    second |= {name: first[name] for name in ("A_log", "dt_bias")}
    state = torch.randn(N * S + 1, HV, V, K, device=device).to(pool)
    decoded = state.clone()
    begin = torch.ones(N, dtype=torch.int32, device=device)
    recurrent_step(state, slots, **first, num_accepted_tokens=begin)
    for t in range(T):
        # One slot a sequence, which a sequence leaves once its tokens are all accepted.
        accepts = torch.tensor([t < 1, t < 2, False, True], device=device)
        recurrent_step(decoded, torch.where(accepts, slots[:, 0], 0), **tokens_of(first, t))
    accepted = torch.tensor([1, 2, 1, 3], dtype=torch.int32, device=device)
    before = state.clone()
    o = recurrent_step(state, slots, **second, num_accepted_tokens=accepted)
    for t in range(T):
        o_t = recurrent_step(decoded, slots[:, 0], **tokens_of(second, t))
        assert_same(o[:, t], o_t, backend, pool)
        for n in (0, 1, 3):
            assert_same(state[slots[n, t]], decoded[slots[n, 0]], backend, pool)
    assert not o[PADDED].any() and same_bits(state[0], before[0])


@pytest.mark.parametrize("lengths", [[3, 1, 2, 0], [0, 5, 1, 2]], ids=str)
def test_step_packed(lengths: list[int], backend: str, device: str) -> None:
    """Ragged drafts. The states of tokens that have no column are not kept; a sequence without
    tokens keeps nothing, and tokens of no sequence give 0."""
    if backend == "reference":  # torch's sums on a GPU depend on the number of all tokens
        device = "cpu"
    slots = rows(device)
    x = step_inputs(device, tokens=5)
    state = torch.randn(N * S + 1, HV, V, K, device=device)
    accepted = torch.tensor([2, 3, 1, 1], device=device)
    before = state.clone()
    ragged = packed(x, lengths, "mixed_qkv", "a", "b")
    o = recurrent_step(state, slots, **ragged, num_accepted_tokens=accepted)
    row, touched = 0, {0}
    for n, length in enumerate(lengths):
        alone = before.clone()
        start = slots[n : n + 1, accepted[n] - 1]
        for t in range(length):
            one = {name: x[name][n : n + 1, t] for name in ("mixed_qkv", "a", "b")}
            o_t = recurrent_step(alone, start, **{**x, **one})
            assert_same(o[row + t], o_t[0], backend, state.dtype)
            if t < S and n != PADDED:
                touched.add(int(slots[n, t]))
                assert_same(state[slots[n, t]], alone[start[0]], backend, state.dtype)
        row += length
    assert not o[row:].any()
    others = [slot for slot in range(N * S + 1) if slot not in touched]
    assert same_bits(state[others], before[others]) and same_bits(state[0], before[0])


def conv_inputs(device: str, dtype: torch.dtype) -> dict[str, Any]:
    weight, bias = torch.randn(D, W, device=device), torch.randn(D, device=device)
    return {"weight": weight.to(dtype), "bias": bias.to(dtype), "skip": "non_positive"}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("unused", [0, 9], ids=["", "wide"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_conv_from_accepted(
    dtype: torch.dtype, unused: int, channels_last: bool, device: str
) -> None:
    """A row of W - 1 + S - 1 columns, and one too wide for a thread's registers: call after call
    the result of decoding the accepted tokens."""
    columns, slots = W + S - 2 + unused, torch.tensor([3, 1, 0, 5], device=device)
    x = conv_inputs(device, dtype)
    state = torch.randn(6, D, columns, device=device).to(dtype)
    if channels_last:
        state = state.mT.contiguous().mT
    kept = state.clone()
    narrow = state[..., : W - 1].clone()
    accepted = torch.ones(N, dtype=torch.int32, device=device)
    for seed in range(3):
        tokens = torch.randn(N, T, D, device=device).to(dtype)
        y = causal_conv1d_update(
            tokens, **x, state=state, read_slots=slots, num_accepted_tokens=accepted
        )
        now = narrow.clone()
        accepted = torch.tensor([1, 2, 1, 3], dtype=torch.int32, device=device).roll(seed)
        for t in range(T):
            y_t = causal_conv1d_update(tokens[:, t], **x, state=now, read_slots=slots)
            assert same_bits(y[:, t], y_t)
            done = accepted == t + 1
            narrow[slots[done]] = now[slots[done]]
    assert not y[PADDED].any()
    assert same_bits(state[[0, 2, 4]], kept[[0, 2, 4]])
    assert same_bits(state[..., W + S - 2 :], kept[..., W + S - 2 :])


def test_conv_packed(device: str) -> None:
    """Ragged: a slot holds W - 2 old tokens and the new ones, as many as fit; others stay."""
    columns, slots = W, torch.tensor([3, 1, 2, 5], device=device)
    x = conv_inputs(device, torch.float32)
    lengths = [1, 2, 0, 4]
    accepted = torch.tensor([2, 1, 1, 2], device=device)
    state = torch.randn(6, D, columns, device=device)
    before = state.clone()
    given = {"x": torch.randn(N, 4, D, device=device)}
    ragged = packed(given, lengths, "x")
    y = causal_conv1d_update(
        **ragged, **x, state=state, read_slots=slots, num_accepted_tokens=accepted
    )
    row = 0
    for n, length in enumerate(lengths):
        first = int(accepted[n]) - 1
        window = before[slots[n], :, first : first + W - 1]
        tokens = given["x"][n : n + 1, :length]
        if length:
            alone = causal_conv1d_update(
                tokens, **{**x, "skip": "negative"}, state=window[None].clone()
            )
            assert same_bits(y[row : row + length], alone[0])
            expected = before[slots[n]].clone()
            kept = torch.cat([window[:, 1:], tokens[0].mT], 1)[:, :columns]
            expected[:, : kept.shape[1]] = kept
            assert same_bits(state[slots[n]], expected), n
        else:
            assert same_bits(state[slots[n]], before[slots[n]])
        row += length
    assert not y[row:].any()


@pytest.mark.parametrize("number", [0, 4, -7])
def test_out_of_range_is_skipped(number: int, device: str) -> None:
    slots = rows(device)
    state = torch.randn(N * S + 1, HV, V, K, device=device)
    before = state.clone()
    accepted = torch.full((N,), number, device=device)
    o = recurrent_step(state, slots, **step_inputs(device), num_accepted_tokens=accepted)
    assert not o.any() and same_bits(state, before)
    conv = torch.randn(6, D, W + S - 2, device=device)
    kept = conv.clone()
    y = causal_conv1d_update(
        torch.randn(N, T, D, device=device),
        **conv_inputs(device, torch.float32),
        state=conv,
        read_slots=torch.tensor([3, 1, 2, 5], device=device),
        num_accepted_tokens=accepted,
    )
    assert not y.any() and same_bits(conv, kept)


def test_compiled(device: str) -> None:
    """One graph, the bits of eager calls."""

    def both(state: Tensor, conv: Tensor, x: dict[str, Any], y: dict[str, Any]) -> Any:
        return recurrent_step(state, **x), causal_conv1d_update(state=conv, **y)

    accepted = torch.tensor([1, 2, 1, 3], device=device)
    x = {**step_inputs(device), "read_slots": rows(device), "num_accepted_tokens": accepted}
    y = {**conv_inputs(device, torch.float32), "x": torch.randn(N, T, D, device=device)}
    y |= {"num_accepted_tokens": accepted, "read_slots": torch.arange(1, N + 1, device=device)}
    state = torch.randn(N * S + 1, HV, V, K, device=device)
    conv = torch.randn(6, D, W + S - 2, device=device)
    pools = state.clone(), conv.clone()
    eager = both(state, conv, x, y)
    compiled: Callable[..., Any] = torch.compile(both, fullgraph=True, backend="aot_eager")
    got = compiled(*pools, x, y)
    assert all(same_bits(a, b) for a, b in zip((*got, *pools), (*eager, state, conv), strict=True))


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"read_slots": torch.arange(N)},
            r"read_slots must have shape \[N, S\], S >= 1, with num_",
        ),
        ({"write_slots": torch.arange(N)}, "write_slots must be None with num_accepted_tokens"),
        ({"num_accepted_tokens": torch.ones(2).int()}, r"must have shape \[N=4\], one a sequence"),
        ({"num_accepted_tokens": torch.ones(N)}, "num_accepted_tokens must be int32 or int64"),
        ({"num_accepted_tokens": None}, r"read_slots must have shape \[N\], a slot a sequence"),
        ({"read_slots": torch.ones(N, S).int()}, "read_slots must name no slot twice"),
    ],
)
def test_step_errors(changes: dict[str, Any], message: str) -> None:
    good = {"read_slots": rows("cpu"), "num_accepted_tokens": torch.ones(N).int()}
    state = torch.zeros(N * S + 1, HV, V, K)
    with pytest.raises(ValueError, match=message):
        recurrent_step(state, **{**step_inputs("cpu"), **good, **changes})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"state": torch.zeros(6, D, W - 2)}, "at least W - 1=3] with num_accepted_tokens"),
        ({"num_accepted_tokens": torch.ones(3).int()}, r"must have shape \[N=4\], one a sequence"),
        ({"num_accepted_tokens": torch.ones(N)}, "num_accepted_tokens must be int32 or int64"),
        ({"num_accepted_tokens": None}, r"state must have shape \[slots, D=24, W - 1=3\]"),
        ({"write_slots": torch.arange(N)}, "write_slots must be None with num_accepted_tokens"),
        ({"has_initial_state": torch.ones(N).bool()}, "has_initial_state must be None with num_"),
        ({"weight": torch.zeros(D, 1)}, "weight must have W >= 2 with num_accepted_tokens"),
    ],
)
def test_conv_errors(changes: dict[str, Any], message: str) -> None:
    good = {**conv_inputs("cpu", torch.float32), "x": torch.zeros(N, T, D)}
    good |= {"state": torch.zeros(6, D, W + S - 2), "read_slots": torch.arange(1, N + 1)}
    good |= {"num_accepted_tokens": torch.ones(N).int()}
    with pytest.raises(ValueError, match=message):
        causal_conv1d_update(**{**good, **changes})
