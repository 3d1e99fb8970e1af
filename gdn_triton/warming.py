"""`warmup`: calls before the first request of a model, so that the request compiles nothing."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from gdn_triton._host.arguments import (
    INDEX_DTYPES,
    INDICES,
    check_flags,
    check_float_dtype,
    must,
    value_of,
)
from gdn_triton._host.slots import check_skip
from gdn_triton.chunk.api import chunk_gated_delta_rule
from gdn_triton.chunk.prefill.api import chunk_prefill
from gdn_triton.constants import CHUNK_SIZES, DEFAULT_CHUNK_SIZE
from gdn_triton.recurrent.api import fused_recurrent_gated_delta_rule, recurrent_step

# The largest ratio of two neighbours in a series of sizes. Where a product of sizes selects a tile
# (`gdn_triton._triton.tiles`), every tile is selected for an interval at least this wide.
STEP = 1.25


def warmup(
    H: int,
    HV: int,
    K: int,
    V: int,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    *,
    calls: Sequence[Callable[..., Any]] = (chunk_prefill, recurrent_step),
    max_tokens: int = 8192,
    max_sequences: int = 256,
    padded: Iterable[tuple[int, int]] = (),
    tokens_per_step: Iterable[int] = (1,),
    backward: bool = False,
    state_dtype: torch.dtype = torch.float32,
    gate_dtype: torch.dtype = torch.float32,
    beta_dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int32,
    raw_gates: bool = False,
    mixed_qkv: bool = False,
    state_v_first: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    skip: str = "negative",
    chunk_size: int = DEFAULT_CHUNK_SIZE,
) -> int:
    """Compiles, or loads from Triton's cache, every kernel that a model's calls will need.

    It makes the calls on tensors of zeros, which it frees again. It calls each function with a
    series of numbers of sequences and tokens up to the largest ones. The series is dense enough to
    include every tile, and every cut of a sequence into segments, that sizes can select. A server
    should call it before it gives memory to a cache, because the largest call takes the memory of a
    request of `max_tokens`. It returns when the device has run all calls.

    A later call compiles nothing if it has these heads, sizes, dtypes and options, and q, k and v
    that are contiguous or views of one projection. The numbers of sequences and tokens are free for
    packed calls and for steps. The strides of padded calls follow from their sizes, so `padded`
    lists these sizes. A later call may still compile a variant if it has tensors with other
    strides, tensors at addresses that are not multiples of 16 bytes, checkpoints of a prefill,
    scales or gates of the recurrence that this function does not pass, or a window. The convolution
    and the preparation are not called here.

    Args:
        H, HV, K, V: heads of q and k, heads of v, channels of a key and of a value.
        dtype: the dtype of q, k and v.
        device: the device of the model.
        calls: which of `chunk_gated_delta_rule`, `chunk_prefill`,
            `fused_recurrent_gated_delta_rule` and `recurrent_step` the model makes. The first and
            the third are called with a final state, and each with and without an initial state.
            Prefills are called with and without `has_initial_state`.
        max_tokens: the most tokens of a packed call.
        max_sequences: the most sequences of a packed call, and of a step.
        padded: the (B, T) of the model's padded calls.
        tokens_per_step: the tokens of a sequence in a `recurrent_step`: 1 for decoding, the number
            of verified tokens for speculation. With more than one token, each token has its own
            slot to write.
        backward: also call `chunk_gated_delta_rule` without states and compute its gradients.
        state_dtype: the dtype of the pool. Other states are float32.
        gate_dtype, beta_dtype: the dtypes of g and of beta, or with `raw_gates` of the raw gates.
        index_dtype: the dtype of `cu_seqlens` and of slots.
        raw_gates: the model passes gates before their activations, with A_log and dt_bias in
            float32: `use_gate_in_kernel` and `use_beta_sigmoid_in_kernel`, or a and b in a step.
        mixed_qkv: steps take q, k and v side by side.
        state_v_first, use_qk_l2norm_in_kernel, allow_neg_eigval, skip, chunk_size: as the functions
            take them; `allow_neg_eigval` only with `raw_gates`.

    Returns:
        The number of calls that were made.

    Raises:
        TypeError, ValueError: an argument that does not fit, here or in one of the functions.
        RuntimeError: the backend that `GDN_BACKEND` asks for cannot run one of the calls.
    """
    # An iterable may be read only once.
    calls = _known_calls(calls)
    padded, tokens_per_step = _pairs(padded), _numbers(tokens_per_step)
    _check_sizes(H=H, HV=HV, K=K, V=V, max_tokens=max_tokens, max_sequences=max_sequences)
    if HV % H != 0:
        raise ValueError(must("HV", f"be a multiple of H={H}", str(HV)))
    dtypes = {
        "dtype": dtype,
        "state_dtype": state_dtype,
        "gate_dtype": gate_dtype,
        "beta_dtype": beta_dtype,
    }
    for name, asked in dtypes.items():
        check_float_dtype(name, asked)
    if index_dtype not in INDEX_DTYPES:
        raise ValueError(must("index_dtype", f"be {INDICES}", value_of(index_dtype)))
    check_flags(
        backward=backward,
        raw_gates=raw_gates,
        mixed_qkv=mixed_qkv,
        state_v_first=state_v_first,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
    )
    check_skip(skip)
    if type(chunk_size) is not int or chunk_size not in CHUNK_SIZES:
        raise ValueError(must("chunk_size", f"be one of {CHUNK_SIZES}", value_of(chunk_size)))
    if allow_neg_eigval and not raw_gates:
        raise ValueError(must("allow_neg_eigval", "come with raw_gates=True", "False"))

    x = _Tensors(
        H=H,
        HV=HV,
        K=K,
        V=V,
        dtype=dtype,
        device=_usable(device),
        gate_dtype=gate_dtype,
        beta_dtype=beta_dtype,
        raw_gates=raw_gates,
        state=(HV, V, K) if state_v_first else (HV, K, V),
        state_dtype=state_dtype,
        index_dtype=index_dtype,
    )
    packed = [(N, T) for T in series(max_tokens) for N in series(max_sequences) if N == 1 or N <= T]
    shapes: list[tuple[int, int, int | None]] = [(1, T, N) for N, T in packed]
    shapes += [(B, T, None) for B, T in padded]
    options = {
        "state_v_first": state_v_first,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "allow_neg_eigval": allow_neg_eigval,
    }
    activated = {"use_gate_in_kernel": raw_gates, "use_beta_sigmoid_in_kernel": raw_gates}
    count = 0
    for call in calls:
        if call is recurrent_step:
            steps = product(series(max_sequences), tokens_per_step, (False, True))
            for n, tokens, split in steps:
                _step(x, n, tokens, split=split, mixed=mixed_qkv, skip=skip, **options)
                count += 1
            continue
        chunked = {} if call is fused_recurrent_gated_delta_rule else {"chunk_size": chunk_size}
        for (B, T, N), split in product(shapes, (False, True)):
            rule: dict[str, Any] = {**x.rule(B, T, split=split), **activated, **options, **chunked}
            if N is not None:
                rule["cu_seqlens"] = x.offsets(N, T)
            n = B if N is None else N
            for has_state in (False, True):
                if call is chunk_prefill:
                    _prefill(x, rule, n, has_state=has_state, skip=skip)
                else:
                    h0 = x.zeros(n, *x.state, dtype=torch.float32) if has_state else None
                    with torch.no_grad():
                        call(**rule, initial_state=h0, output_final_state=True)
                count += 1
            if backward and call is chunk_gated_delta_rule:
                _differentiate(rule)
                count += 1
    if x.device.type != "cpu":
        torch.accelerator.synchronize(x.device)
    return count


def _known_calls(calls: Sequence[Callable[..., Any]]) -> tuple[Callable[..., Any], ...]:
    """Returns the functions as a tuple. Raises TypeError for any other than the four functions."""
    known = (
        chunk_gated_delta_rule,
        chunk_prefill,
        fused_recurrent_gated_delta_rule,
        recurrent_step,
    )
    expected = "be of " + ", ".join(function.__name__ for function in known)
    if not isinstance(calls, Iterable):
        raise TypeError(must("calls", expected, value_of(calls)))
    asked = tuple(calls)
    for call in asked:
        if call not in known:
            raise TypeError(must("calls", expected, value_of(call)))
    return asked


def _check_sizes(**sizes: object) -> None:
    for name, size in sizes.items():
        if type(size) is not int or not 1 <= size < 2**31:
            raise ValueError(must(name, "be an int of at least 1, below 2^31", value_of(size)))


def _numbers(tokens_per_step: Iterable[int]) -> tuple[int, ...]:
    name = "tokens_per_step"
    if not isinstance(tokens_per_step, Iterable):
        raise TypeError(must(name, "be ints", value_of(tokens_per_step)))
    numbers = tuple(tokens_per_step)
    for tokens in numbers:
        _check_sizes(**{name: tokens})
    return numbers


def _pairs(padded: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    expected = "be pairs (B, T) of ints of at least 1, below 2^31"
    if not isinstance(padded, Iterable):
        raise TypeError(must("padded", expected, value_of(padded)))
    pairs = tuple(padded)
    for pair in pairs:
        if (
            not isinstance(pair, Sequence)
            or len(pair) != 2
            or any(type(size) is not int or not 1 <= size < 2**31 for size in pair)
        ):
            raise ValueError(must("padded", expected, value_of(pair)))
    return pairs


def _usable(device: object) -> torch.device:
    """Returns the device. Raises ValueError if torch does not know it or cannot allocate memory on
    it."""
    if not isinstance(device, str | torch.device):
        raise TypeError(must("device", "be a torch.device or its name", value_of(device)))
    try:
        usable = torch.device(device)
        torch.empty(0, device=usable)
    # Torch raises an AssertionError where it was built without the device's library.
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0]
        expected = "be a device that torch has memory on"
        raise ValueError(must("device", expected, f"{str(device)!r}: {why}")) from error
    return usable


def series(most: int) -> Iterator[int]:
    """Returns sizes from 1 to `most`. Each size is at most a quarter, or one, larger than the size
    before, so that together the sizes select every tile that any size selects."""
    n = 1
    while n < most:
        yield n
        n = max(n + 1, int(n * STEP))
    yield most


def _differentiate(rule: dict[str, Any]) -> None:
    """Makes the call without states, and computes the gradients of all inputs."""
    leaves = {
        name: y.detach().requires_grad_()
        for name, y in rule.items()
        if isinstance(y, Tensor) and y.is_floating_point()
    }
    with torch.inference_mode(False), torch.enable_grad():
        o, _ = chunk_gated_delta_rule(**{**rule, **leaves})
        torch.autograd.grad(o, list(leaves.values()), torch.zeros_like(o))


@dataclass(frozen=True)
class _Tensors:
    """The arguments of a model's calls: zeros, and the numbers of slots. state: the shape of a
    state."""

    H: int
    HV: int
    K: int
    V: int
    dtype: torch.dtype
    device: torch.device
    gate_dtype: torch.dtype
    beta_dtype: torch.dtype
    raw_gates: bool
    state: tuple[int, int, int]
    state_dtype: torch.dtype
    index_dtype: torch.dtype

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def pool(self, slots: int) -> Tensor:
        """States for this many slots, and for slot 0, which belongs to no sequence."""
        return self.zeros(1 + slots, *self.state, dtype=self.state_dtype)

    def slots(self, n: int) -> Tensor:
        """The numbers 1 to n."""
        return 1 + torch.arange(n, device=self.device, dtype=self.index_dtype)

    def offsets(self, N: int, T: int) -> Tensor:
        """`cu_seqlens` of N sequences, of which the first has all T tokens."""
        offsets = torch.full((N + 1,), T, device=self.device, dtype=self.index_dtype)
        offsets[0] = 0
        return offsets

    def rule(self, *lead: int, split: bool) -> dict[str, Tensor]:
        """q, k, v, g and beta [*lead, ...], and with raw gates A_log and dt_bias. split: q, k and v
        are views of one projection."""
        H, HV, K, V = self.H, self.HV, self.K, self.V
        widths = (H * K, H * K, HV * V)
        if split:
            parts = self.zeros(*lead, sum(widths), dtype=self.dtype).split(widths, -1)
        else:
            parts = tuple(self.zeros(*lead, width, dtype=self.dtype) for width in widths)
        q, k, v = (y.unflatten(-1, (heads, -1)) for y, heads in zip(parts, (H, H, HV), strict=True))
        g = self.zeros(*lead, HV, dtype=self.gate_dtype)
        beta = self.zeros(*lead, HV, dtype=self.beta_dtype)
        return {"q": q, "k": k, "v": v, "g": g, "beta": beta, **self.parameters()}

    def step(self, N: int, T: int, *, split: bool, mixed: bool) -> dict[str, Tensor]:
        """The tokens of a step as `recurrent_step` takes them: [N, ...] for T = 1."""
        lead = (N,) if T == 1 else (N, T)
        token = self.rule(*lead, split=split)
        if mixed:
            widths = 2 * self.H * self.K + self.HV * self.V
            token["mixed_qkv"] = self.zeros(*lead, widths, dtype=self.dtype)
            token = {name: y for name, y in token.items() if name not in ("q", "k", "v")}
        if self.raw_gates:
            token["a"], token["b"] = token.pop("g"), token.pop("beta")
        return token

    def parameters(self) -> dict[str, Tensor]:
        names = ("A_log", "dt_bias") if self.raw_gates else ()
        return {name: self.zeros(self.HV, dtype=torch.float32) for name in names}


@torch.no_grad()
def _step(x: _Tensors, N: int, T: int, *, split: bool, mixed: bool, **options: Any) -> None:
    """Makes a step of N sequences of T tokens, with a slot to write for each token if T > 1."""
    slots = x.slots(N * T).view(N, T)
    write = None if T == 1 else slots
    options.update(x.step(N, T, split=split, mixed=mixed))
    recurrent_step(x.pool(N * T), slots[:, 0].contiguous(), write, **options)


@torch.no_grad()
def _prefill(x: _Tensors, rule: dict[str, Any], N: int, *, has_state: bool, skip: str) -> None:
    """Makes a prefill of N sequences, with or without `has_initial_state`."""
    slots = x.slots(N)
    flags = slots > 0 if has_state else None
    chunk_prefill(x.pool(N), slots, **rule, has_initial_state=flags, skip=skip)
