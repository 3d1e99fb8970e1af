"""The contract; on the device; the compiler: see test_conv.py."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conv_cases import BACKENDS, LENGTHS, PREPARED, compiled, make, make_prep, on, packed
from helpers import BF16, FP16, FP64, same_bits
from torch import Tensor

from gdn_triton import (
    causal_conv1d,
    causal_conv1d_update,
    fused_conv_prep,
)
from gdn_triton.reference import conv as reference_conv

# ------------------------------------------------------------------------------------- the contract


def call_args() -> dict[str, Any]:
    x, weight, bias = make(4, 6, batch=2)
    state, slots = torch.randn(5, 6, 3), torch.tensor([3, 1])
    return {"x": x, "weight": weight, "bias": bias, "state": state, "read_slots": slots}


def test_signatures() -> None:
    ours = inspect.signature(causal_conv1d).parameters
    required = inspect.Parameter.empty
    assert [(p.name, p.default) for p in ours.values()] == [
        ("x", required),
        ("weight", required),
        ("bias", None),
        ("activation", "silu"),
        ("state", None),
        ("read_slots", None),
        ("write_slots", None),
        ("has_initial_state", None),
        ("skip", "negative"),
        ("cu_seqlens", None),
    ]
    update = inspect.signature(causal_conv1d_update).parameters
    assert list(update) == [*ours, "num_accepted_tokens", "parents"]
    assert update["state"].default is required
    fused = inspect.signature(fused_conv_prep).parameters
    assert [fused[name].default for name in list(ours)[2:]] == [p.default for p in ours.values()][
        2:
    ]


WRONG = [
    ("x", None, TypeError, "x must be a torch.Tensor, got NoneType"),
    ("x", torch.zeros(4), ValueError, r"x must have shape \[T, D\] or \[B, T, D\], got"),
    (
        "x",
        torch.zeros(2, 4, 6, dtype=torch.int32),
        ValueError,
        "x must be float16, .* got torch.int",
    ),
    ("weight", torch.zeros(6), ValueError, r"weight must have 2 dimensions \[D, W\]"),
    ("weight", torch.zeros(5, 4), ValueError, r"weight must have shape \[D=6, W >= 1\], got"),
    (
        "weight",
        torch.zeros(6, 4, device="meta"),
        ValueError,
        "weight must be on the device of x, cpu",
    ),
    ("bias", torch.zeros(5), ValueError, r"bias must have shape \[D=6\], got shape \[5\]"),
    ("bias", 0.0, TypeError, "bias must be a torch.Tensor or None, got float"),
    ("activation", "swish", ValueError, "activation must be \"silu\" or None, got 'swish'"),
    ("activation", True, ValueError, "activation must be"),
    ("skip", "zero", ValueError, "skip must be one of negative, non_positive, got 'zero'"),
    ("state", torch.zeros(5, 6, 2), ValueError, r"state must have shape \[slots, D=6, W - 1=3\]"),
    ("state", torch.zeros(5, 6, 3, dtype=FP16), ValueError, "state must have a dtype that holds"),
    (
        "state",
        torch.zeros(1, 6, 3).expand(5, 6, 3),
        ValueError,
        "state must have memory of its own",
    ),
    ("state", None, ValueError, "read_slots must be None without state"),
    ("state", torch.zeros(5, 6, 3).requires_grad_(), NotImplementedError, "state is updated in pl"),
    ("read_slots", None, ValueError, "state must have a slot for each of the N=2 sequences"),
    ("read_slots", torch.tensor([1]), ValueError, r"read_slots must have shape \[N=2\]"),
    ("read_slots", torch.tensor([1.0, 2.0]), ValueError, "read_slots must be int32 or int64"),
    ("read_slots", torch.tensor([1, 5]), ValueError, "read_slots must be less than the 5 slots"),
    ("read_slots", torch.tensor([1, 1]), ValueError, "read_slots must name no slot twice"),
    ("write_slots", torch.tensor([1, 4]), ValueError, "read_slots must read no slot that another"),
    (
        "write_slots",
        torch.zeros(2, 3),
        ValueError,
        r"write_slots must have shape \[2\], .* \[2, 4\]",
    ),
    ("has_initial_state", torch.ones(3), ValueError, r"has_initial_state must have shape \[N=2\]"),
    ("has_initial_state", torch.ones(2), ValueError, "has_initial_state must be bool, got"),
    ("cu_seqlens", torch.tensor([0, 4]), ValueError, r"x must have shape .* with cu_seqlens"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), WRONG)
def test_wrong_arguments(name: str, value: Any, error: type[Exception], message: str) -> None:
    args = call_args()
    causal_conv1d(**args)
    before = args["state"].clone()
    given = {**args, name: value}
    with pytest.raises(error, match=message):
        causal_conv1d(**given)
    assert torch.equal(args["state"], before)


def test_wrong_offsets() -> None:
    x, weight, _ = make(8, 6)
    with pytest.raises(ValueError, match="cu_seqlens must end at or before T=8, got 9"):
        causal_conv1d(x, weight, cu_seqlens=torch.tensor([0, 9]))
    with pytest.raises(ValueError, match=r"cu_seqlens must have shape \[N \+ 1\]"):
        causal_conv1d(x, weight, cu_seqlens=torch.zeros(1, 2, dtype=torch.int32))


def test_wrong_arguments_of_the_others() -> None:
    args = call_args()
    with pytest.raises(TypeError, match="state"):
        causal_conv1d_update(args["x"], args["weight"])
    with pytest.raises(ValueError, match=r"x must have shape \[N, D\] or \[N, T, D\]"):
        causal_conv1d_update(**{**args, "x": torch.zeros(6)})
    args["x"].requires_grad_()
    with pytest.raises(NotImplementedError, match="causal_conv1d_update has no gradient"):
        causal_conv1d_update(**args)
    prep = list(make_prep((5, 1, 2, 4, 4), batch=2))
    with pytest.raises(ValueError, match=r"a must have shape \[B=2, T=5, HV=2\], got"):
        fused_conv_prep(*prep[:2], torch.zeros(2, 4, 2), *prep[3:])
    with pytest.raises(ValueError, match=r"mixed_qkv must have 2 .* = 18 columns"):
        fused_conv_prep(*prep[:8], 5)
    with pytest.raises(TypeError, match="apply_l2norm must be True or False"):
        fused_conv_prep(*prep, apply_l2norm=1)
    with pytest.raises(ValueError, match="mixed_qkv must have shape"):
        fused_conv_prep(torch.zeros(16), *prep[1:])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("float64", "one of the inputs is float64"),
        ("weight64", "one of the inputs is float64"),
        ("W", "take 2, 3 or 4 taps; the weight has 5"),
        ("grad", "The Triton backward starts from no state"),
    ],
)
def test_triton_refuses(
    change: str, reason: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    W = 5 if change == "W" else 4
    x, weight, bias = make(5, 6, W, device=device, batch=2)
    x = x.to(FP64) if change == "float64" else x
    weight = weight.to(FP64) if change == "weight64" else weight
    x.requires_grad_(change == "grad")
    pool = torch.randn(2, 6, W - 1, dtype=x.dtype, device=device)
    before = pool.clone()
    on("triton", monkeypatch)
    with pytest.raises(RuntimeError, match=f"GDN_BACKEND=triton cannot run this call.*{reason}"):
        causal_conv1d(x, weight, bias, state=pool)
    assert torch.equal(pool, before)
    on("auto", monkeypatch)
    y = causal_conv1d(x, weight, bias, state=pool)
    assert torch.equal(y, reference_conv.causal_conv1d(x, weight, bias, state=before))


def test_named_triton_and_gradients_of_the_preparation(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before the states are written."""
    args = make_prep((5, 1, 2, 4, 4), device=device)
    args[0].requires_grad_()
    pool = torch.randn(1, 16, 3, device=device)
    before = pool.clone()
    on("triton", monkeypatch)
    with pytest.raises(RuntimeError, match="GDN_BACKEND=triton cannot run this call"):
        fused_conv_prep(*args, state=pool)
    assert torch.equal(pool, before)


@pytest.mark.parametrize("function", [causal_conv1d, causal_conv1d_update, fused_conv_prep])
def test_backends_by_name(
    function: Callable[..., Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = make_prep((5, 1, 2, 4, 4), device=device)
    given = args if function is fused_conv_prep else args[:2]
    options = {}
    if function is causal_conv1d_update:
        options["state"] = torch.zeros(5, 16, 3, device=device)
    on("tritn", monkeypatch)
    with pytest.raises(ValueError, match=r"GDN_BACKEND must be one of .*, got 'tritn'"):
        function(*given, **options)


# ----------------------------------------------------------------------------------- on the device


@pytest.mark.gpu("a CUDA graph")
def test_replay_of_a_graph_follows_its_inputs(device: str) -> None:
    """Contents, slots, flags and offsets, each read on the device."""
    T, cu_seqlens = packed(device)
    args = make_prep((T, 2, 4, 64, 64), dtype=BF16, device=device)
    N, D = len(LENGTHS), args[0].shape[1]
    pool = torch.randn(2 * N, 3, D, dtype=BF16, device=device).mT
    slots, flags = torch.arange(N, device=device), torch.ones(N, dtype=torch.bool, device=device)
    options = {"read_slots": slots, "has_initial_state": flags, "cu_seqlens": cu_seqlens}
    step = {"read_slots": slots}
    token = torch.randn(N, D, dtype=BF16, device=device)

    def run(state: Tensor) -> list[Tensor]:
        y = causal_conv1d_update(token, args[1], state=state, **step)
        return [*fused_conv_prep(*args, state=state, **options), y]

    run(pool.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(pool)
    for _ in range(2):
        for x in (*args[:6], token):
            x.normal_()
        slots.copy_(torch.randperm(2 * N)[:N])
        flags.copy_(torch.rand(N) < 0.5)
        cu_seqlens[1:-1] = torch.randint(0, T, (N - 1,)).sort().values
        cu_seqlens[-1] = T
        expected_pool = pool.clone()
        expected = run(expected_pool)
        graph.replay()
        assert all(same_bits(y, z) for y, z in zip(got, expected, strict=True))
        assert same_bits(pool.contiguous(), expected_pool.contiguous())


@pytest.mark.gpu("more than 2^31 elements")
@pytest.mark.parametrize("layout", ["dense", "channel-major"])
def test_offsets_above_32_bits(layout: str, device: str) -> None:
    T, H, HV, K, V = 300_000, 16, 32, 128, 128
    D = 2 * H * K + HV * V
    x = torch.zeros(T, D, dtype=BF16, device=device)
    if layout == "channel-major":
        x = torch.zeros(D, T, dtype=BF16, device=device).t()
    small = make_prep((64, H, HV, K, V), dtype=BF16, device=device)
    a, b = torch.zeros(2, T, HV, device=device)
    x[-64:], a[-64:], b[-64:] = small[0], small[2], small[3]
    got = fused_conv_prep(x, small[1], a, b, *small[4:])
    expected = fused_conv_prep(*small)
    for name, y, z in zip(PREPARED, got, expected, strict=True):
        assert torch.allclose(y[-64:].float(), z.float(), rtol=2.0**-7, atol=0), name


@pytest.mark.gpu("a pool of more than 2^31 elements")
@pytest.mark.parametrize("layout", ["taps dense", "channels dense"])
def test_pools_above_32_bits(layout: str, device: str) -> None:
    slots, D = 100_000, 8192
    pool = torch.zeros(slots, D, 3, dtype=BF16, device=device)
    if layout == "channels dense":
        pool = torch.zeros(slots, 3, D, dtype=BF16, device=device).mT
    x, weight, bias = make(2, D, dtype=BF16, device=device, batch=2)
    small = torch.randn(2, D, 3, device=device).to(BF16)
    pool[-2:] = small
    read = torch.tensor([slots - 2, slots - 1], device=device)
    y = causal_conv1d_update(x, weight, bias, state=pool, read_slots=read)
    assert same_bits(y, causal_conv1d(x, weight, bias, state=small))
    assert torch.equal(pool[-2:], small)


@pytest.mark.two_gpus("tensors on a device that is not the current one")
def test_on_another_device() -> None:
    args = make_prep((70, 2, 4, 16, 16), dtype=BF16, device="cuda:1")
    with torch.cuda.device(0):
        got = fused_conv_prep(*args)
        assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        expected = fused_conv_prep(*args)
    assert all(same_bits(y, z) for y, z in zip(got, expected, strict=True))


# ------------------------------------------------------------------------------------- the compiler


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("with_state", [False, True])
def test_compiled_equals_eager(
    backend: str,
    with_state: bool,
    device: str,
    fresh_compiler: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on(backend, monkeypatch)
    args = make_prep((6, 1, 2, 4, 4), device=device, batch=2)
    slots = torch.tensor([2, 0], device=device)
    pool = torch.randn(3, 16, 3, device=device)
    pools = [pool, pool.clone()]
    functions = [(causal_conv1d, args[:2]), (fused_conv_prep, args)]
    if with_state:
        functions.append((causal_conv1d_update, args[:2]))
    for function, given in functions:
        results = []
        for run, pool in ((function, pools[0]), (compiled(function), pools[1])):
            options = {"state": pool, "read_slots": slots} if with_state else {}
            y = run(*given, **options)
            results.append([y] if isinstance(y, Tensor) else list(y))
        for y, z in zip(*results, strict=True):
            assert y.stride() == z.stride() and same_bits(y, z)
        assert same_bits(*pools)


def test_compiling_warns_of_nothing(
    device: str,
    fresh_compiler: None,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    """A warning of the compiler about a line of the package does not help a caller."""
    monkeypatch.setattr("torch._dynamo.utils.warn_once_cache", set())
    args = make_prep((6, 1, 2, 4, 4), device=device)
    torch.compile(causal_conv1d, fullgraph=True, backend="eager")(*args[:2])
    assert not [str(one.message) for one in recwarn if "Dynamo" in str(one.message)]


@pytest.mark.parametrize("how", [lambda f: f, compiled], ids=["eager", "compiled"])
def test_nan_of_no_sequence_reaches_no_gradient(
    how: Callable[..., Any], device: str, fresh_compiler: None
) -> None:
    """The rows of no sequence, of which g and beta are what a and b make of them."""
    T, cu_seqlens = packed(device)
    args = make_prep((T, 1, 2, 4, 4), device=device)
    end = int(cu_seqlens[-1])
    found = []
    for rest in (0.0, torch.nan):
        leaves = [x.detach().clone() for x in args[:6]]
        for x in (leaves[0], *leaves[2:4]):
            x[end:] = rest
        for x in leaves:
            x.requires_grad_()
        parts = how(fused_conv_prep)(*leaves, *args[6:], cu_seqlens=cu_seqlens)
        assert all(x[end:].isnan().all() == (rest != 0) for x in parts[3:])
        loss = sum((x[:end].double().square().sum() for x in parts), torch.zeros((), device=device))
        found.append(torch.autograd.grad(loss, leaves))
    for clean, other in zip(*found, strict=True):
        assert same_bits(clean, other) and clean.isfinite().all()


def test_compiled_gradients(device: str, fresh_compiler: None) -> None:
    """The convolution alone, and with the preparation: each is one operator in a trace."""
    args = make_prep((6, 1, 2, 4, 4), device=device)

    def of(function: Callable[..., Any]) -> list[Tensor | None]:
        tensors = [x.detach().requires_grad_(i != 1) for i, x in enumerate(args[:6])]
        q, k, v, g, beta = function(*tensors, *args[6:])
        (q.sin().sum() + (k * 2).sum() + v.square().sum() + (g * beta).sum()).backward()
        return [x.grad for x in tensors]

    for y, z in zip(of(compiled(fused_conv_prep)), of(fused_conv_prep), strict=True):
        assert (y is None) == (z is None)
        if y is not None and z is not None:
            assert torch.allclose(y, z, rtol=1e-5, atol=1e-6)


def test_one_graph_for_every_length(device: str, fresh_compiler: None) -> None:
    """With a state, which is written."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(fused_conv_prep, fullgraph=True, backend=counter)
    pools = [torch.randn(1, 16, 3, device=device) for _ in range(2)]
    pools[1].copy_(pools[0])
    for T in (9, 5, 7):
        args = make_prep((T, 1, 2, 4, 4), device=device)
        expected = fused_conv_prep(*args, state=pools[0])
        got = run(*args, state=pools[1])
        assert all(same_bits(y, z) for y, z in zip(got, expected, strict=True))
        assert same_bits(*pools)
    # The first T is a constant until there is a second.
    assert counter.frame_count == 2


def test_no_gradient_from_a_state_under_a_compiler(fresh_compiler: None) -> None:
    args = call_args()
    args["x"].requires_grad_()
    with pytest.raises(Exception, match="with a state has no gradient under a compiler"):
        compiled(causal_conv1d)(**args)


def test_operators_pass_the_library_s_checks(device: str) -> None:
    x, weight, bias = make(9, 6, device=device)
    cu_seqlens = torch.tensor([0, 4, 9], device=device)
    operators = torch.ops.gdn_triton
    leaves = [y.clone().requires_grad_() for y in (x, weight, bias)]
    torch.library.opcheck(operators.causal_conv1d.default, (*leaves, "silu", cu_seqlens))
    state = torch.randn(2, 6, 3, device=device)
    slots = (None, None, None, "negative")
    stateful = (x, weight, bias, None, state, *slots, cu_seqlens, None, None, False)
    torch.library.opcheck(operators.causal_conv1d_state.default, stateful)
    prep = make_prep((6, 1, 2, 4, 4), device=device)
    rest = (*prep[2:6], *prep[6:], True, False)
    torch.library.opcheck(operators.fused_conv_prep.default, (*prep[:2], None, "silu", None, *rest))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("skip", 1, "skip must be one of"),
        ("activation", "relu", "activation must be"),
        ("bias", torch.zeros(4), "bias must have shape"),
    ],
)
def test_wrong_arguments_under_a_compiler(
    name: str, value: Any, message: str, fresh_compiler: None
) -> None:
    with pytest.raises(Exception, match=message):
        compiled(causal_conv1d)(**{**call_args(), name: value})
