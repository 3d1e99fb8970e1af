"""`gdn_triton.warmup`: the first request after it compiles nothing.

Without a GPU in a process of its own, where Triton is asked for every variant of a kernel, as for
an H200, and compiles none: what counts is what it would have compiled.
"""

from typing import Any

import pytest
import torch
from compilations import run_watched
from helpers import BF16, FP32

from gdn_triton import (
    causal_conv1d,
    chunk_gated_delta_rule,
    chunk_prefill,
    fused_recurrent_gated_delta_rule,
    recurrent_step,
    warmup,
)
from gdn_triton._host.gluon import release_refusal

COUNT = """
import sys
from compilations import asked, watch
watch(gluon="gluon" in sys.argv)
import torch
from gdn_triton import (
    chunk_gated_delta_rule, chunk_prefill, fused_recurrent_gated_delta_rule, recurrent_step, warmup
)
from gdn_triton import warming

H, HV, K, V, BF16 = 3, 6, 64, 128, torch.bfloat16
TOKENS, SEQUENCES = 2304, 40
PADDED, SHARED = [(3, 200)], dict(state_v_first=True, use_qk_l2norm_in_kernel=True)
warming.STEP = float(sys.argv[2])

def inputs(*lead, v_size=V):
    widths = (H * K, H * K, HV * v_size)
    parts = torch.empty(*lead, sum(widths), dtype=BF16).split(widths, -1)
    q, k, v = (x.unflatten(-1, (n, -1)) for x, n in zip(parts, (H, H, HV)))
    g, beta = torch.empty(*lead, HV), torch.empty(*lead, HV)
    return dict(q=q, k=k, v=v, g=g, beta=beta)

def offsets(N, T):
    return torch.tensor([0] + [T] * N, dtype=torch.int32)

def requests():
    for N in (*range(1, 12), 17, 25, 33, 40):
        for T in (*range(N, 400, 97), *range(400, TOKENS, 419), TOKENS):
            yield N, T
    yield from ((29, 1208), (17, 904))  # multiples of 8, and not of 16

def prefill(N, T, v_size=V):
    slots = torch.arange(N, dtype=torch.int32)
    pool = torch.empty(N, HV, v_size, K)
    chunk_prefill(pool, slots, **inputs(1, T, v_size=v_size), cu_seqlens=offsets(N, T), **SHARED)

def step(N, T):
    slots = torch.arange(N * T, dtype=torch.int32)
    pool = torch.empty(N * T, HV, V, K)
    lead, write = ((N,), None) if T == 1 else ((N, T), slots.view(N, T))
    recurrent_step(pool, slots.view(N, T)[:, 0].contiguous(), write, **inputs(*lead), **SHARED)

def sequences(N, T, function):
    state = torch.empty(N, HV, V, K)
    function(**inputs(1, T), cu_seqlens=offsets(N, T), initial_state=state,
             output_final_state=True, **SHARED)

def train(*lead, N=None):
    leaves = {name: x.detach().requires_grad_() for name, x in inputs(*lead).items()}
    packed = {} if N is None else {"cu_seqlens": offsets(N, lead[1])}
    o, _ = chunk_gated_delta_rule(**leaves, **packed, **SHARED)
    torch.autograd.grad(o, list(leaves.values()), torch.empty_like(o))

def ask(what):
    if what == "prefill":
        for N, T in requests():
            prefill(N, T)
    if what == "steps":
        for N in range(1, SEQUENCES + 1):
            step(N, 1)
            step(N, 4)
    if what == "sequences":
        for N, T in requests():
            sequences(N, T, chunk_gated_delta_rule)
        sequences(7, 300, fused_recurrent_gated_delta_rule)
    if what == "training":
        for N, T in requests():
            train(1, T, N=N)
        train(*PADDED[0])

CALLS = {
    "prefill": dict(calls=[chunk_prefill]),
    "steps": dict(calls=[recurrent_step], tokens_per_step=(1, 4)),
    "sequences": dict(calls=[chunk_gated_delta_rule, fused_recurrent_gated_delta_rule]),
    "training": dict(calls=[chunk_gated_delta_rule], backward=True, padded=PADDED),
}
made = warmup(H, HV, K, V, BF16, "cpu", max_tokens=TOKENS, max_sequences=SEQUENCES,
              **CALLS[sys.argv[1]], **SHARED)
before = len(asked)
ask(sys.argv[1])
after = len(asked)
prefill(2, 300, v_size=64)
print(made > 0, before > 0, after - before, len(asked) > after)
"""


@pytest.mark.parametrize("what", ["prefill", "steps", "sequences", "training"])
def test_requests_compile_nothing(what: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    # Something was compiled before, nothing by requests, and something by a model of other heads.
    assert run_watched(COUNT, what, "1.25") == ["True", "True", "0", "True"]


GLUON = ("hopper_fwd_kernel", "hopper_walks_kernel", "hopper_gradients_kernel")


@pytest.mark.parametrize("what, kernels", [("prefill", GLUON[:1]), ("training", GLUON)])
def test_requests_compile_nothing_in_gluon(what: str, kernels: tuple[str, ...]) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    script = COUNT + "print(*(name in asked[:before] for name in sys.argv[4:]))"
    answers = run_watched(script, what, "1.25", "gluon", *kernels)
    assert answers == ["True", "True", "0", "True", *("True" for _ in kernels)]


def test_sizes_further_apart_miss_variants() -> None:
    """The count sees what is missing."""
    pytest.importorskip("triton", reason="Triton is not installed")
    made, before, new, other = run_watched(COUNT, "prefill", "64.0")
    assert (made, before, other) == ("True", "True", "True") and int(new) > 0


@pytest.mark.gpu("counts what Triton compiles")
def test_requests_compile_nothing_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    compiled = []

    def note(*, fn: Any, **kwargs: Any) -> None:
        compiled.append(fn.name)

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", note)
    monkeypatch.setenv("GDN_BACKEND", "triton")
    # Heads that no other test has.
    H, HV, K, V = 3, 6, 48, 80
    sizes = {"max_tokens": 4096, "max_sequences": 64}
    calls = (chunk_prefill, recurrent_step, chunk_gated_delta_rule)
    warmup(H, HV, K, V, BF16, "cuda", calls=calls, backward=True, **sizes)
    on_hopper = torch.cuda.get_device_capability() == (9, 0) and release_refusal() is None
    assert set(compiled) >= set(GLUON if on_hopper else GLUON[:0])
    assert compiled
    compiled.clear()
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        T = int(torch.randint(1, 4097, (), generator=generator))
        N = int(torch.randint(1, min(T, 64) + 1, (), generator=generator))
        cu_seqlens = torch.randint(0, T, (N + 1,), generator=generator).sort().values
        cu_seqlens[0], cu_seqlens[-1] = 0, T
        cu_seqlens = cu_seqlens.to("cuda", torch.int32)
        q, k = torch.randn(2, 1, T, H, K, dtype=BF16, device="cuda")
        v = torch.randn(1, T, HV, V, dtype=BF16, device="cuda")
        strength = 10.0 ** int(torch.randint(-2, 3, (), generator=generator))
        g, beta = torch.rand(2, 1, T, HV, device="cuda")
        g *= -strength
        rule = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        pool = torch.zeros(N, HV, K, V, device="cuda")
        slots = torch.arange(N, dtype=torch.int32, device="cuda")
        options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True}
        chunk_prefill(pool, slots, **rule, cu_seqlens=cu_seqlens, **options)
        token = {name: x[0, :1].expand(N, *x.shape[2:]).contiguous() for name, x in rule.items()}
        recurrent_step(pool, slots, **token, **options)
        leaves = {name: x.requires_grad_() for name, x in rule.items()}
        o, _ = chunk_gated_delta_rule(**leaves, cu_seqlens=cu_seqlens, **options)
        o.backward(torch.randn_like(o))
    torch.cuda.synchronize()
    assert compiled == []


EVERY = (
    chunk_gated_delta_rule,
    chunk_prefill,
    fused_recurrent_gated_delta_rule,
    recurrent_step,
)


@pytest.mark.parametrize("raw", [False, True])
def test_runs_in_any_backend(raw: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call is a valid one, with every option."""
    monkeypatch.setenv("GDN_BACKEND", "reference")
    sizes = {"max_tokens": 2, "max_sequences": 2, "padded": [(2, 3)], "tokens_per_step": (1, 3)}
    flags = dict.fromkeys(("raw_gates", "mixed_qkv", "state_v_first", "allow_neg_eigval"), raw)
    made = warmup(1, 2, 8, 4, FP32, "cpu", calls=EVERY, backward=True, **sizes, **flags)  # type: ignore[arg-type]
    # (N, T) of 1x1, 1x2, 2x2 and the padded one, in two layouts, with a state and without; steps of
    # one and two sequences.
    packed = 4 * 2 * 2
    assert made == 3 * packed + 4 * 2 + 2 * 2 * 2


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "call": ({"calls": [causal_conv1d]}, TypeError, "calls must be of chunk_gated_delta_rule, "),
    "tokens": ({"max_tokens": 0}, ValueError, "max_tokens must be an int of at least 1, "),
    "sequences": ({"max_sequences": 1.5}, ValueError, "max_sequences must be an int"),
    "negative": ({"allow_neg_eigval": True}, ValueError, "allow_neg_eigval must come with raw"),
    "heads": ({"HV": 3}, ValueError, "HV must be a multiple of H=2, got 3"),
    "no heads": ({"H": 0, "HV": 0}, ValueError, "H must be an int of at least 1"),
    "half a head": ({"H": 2.0}, ValueError, r"H must be an int of .* got 2.0 \(float\)"),
    "channels": ({"K": 2**70}, ValueError, "K must be an int of at least 1, below 2"),
    "no function": ({"calls": 5}, TypeError, "calls must be of chunk_gated_delta_rule"),
    "no token": ({"tokens_per_step": (1, 0)}, ValueError, "tokens_per_step must be an int of"),
    "less": ({"tokens_per_step": (-1,)}, ValueError, "tokens_per_step must be an int of"),
    "a number": ({"tokens_per_step": 4}, TypeError, r"tokens_per_step must be ints, got 4"),
    "pair": ({"padded": [(-1, 3)]}, ValueError, r"padded must be pairs .* got \(-1, 3\)"),
    "no pair": ({"padded": [3]}, ValueError, r"padded must be pairs .* got 3"),
    "no pairs": ({"padded": 3}, TypeError, r"padded must be pairs .* got 3"),
    "device": ({"device": "nope"}, ValueError, "device must be a device .* got 'nope'"),
    "no device": ({"device": None}, TypeError, "device must be a torch.device or its name"),
    "dtype": ({"dtype": torch.int32}, ValueError, "dtype must be float16, .* got torch.int32"),
    "no dtype": ({"state_dtype": "f"}, TypeError, "state_dtype must be a torch.dtype"),
    "indices": ({"index_dtype": FP32}, ValueError, "index_dtype must be int32 or int64"),
    "flag": ({"mixed_qkv": 1}, TypeError, "mixed_qkv must be True or False"),
    "skip": ({"skip": ["negative"]}, ValueError, "skip must be one of negative"),
    "chunk": ({"chunk_size": 48}, ValueError, "chunk_size must be one of"),
}


@pytest.mark.parametrize("changes, error, words", BAD.values(), ids=BAD)
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    model = {"H": 2, "HV": 4, "K": 8, "V": 8, "dtype": FP32, "device": "cpu"}
    model |= {"max_tokens": 2, "max_sequences": 2}
    with pytest.raises(error, match=words):
        warmup(**{**model, **changes})


def test_iterables_that_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "reference")
    sizes: dict[str, Any] = {"max_tokens": 1, "max_sequences": 1}
    lists: dict[str, Any] = {"calls": EVERY, "padded": [(2, 3)], "tokens_per_step": (1, 3)}
    made = warmup(1, 2, 8, 4, FP32, "cpu", **sizes, **lists)
    again = {name: iter(values) for name, values in lists.items()}
    assert warmup(1, 2, 8, 4, FP32, "cpu", **sizes, **again) == made > 0
