"""Parts that all validations share: the allowed dtypes, common checks, and the format of an error,
which names the argument, the expected and the given value."""

import sys
from collections.abc import Collection, Mapping, Sequence
from numbers import Real
from operator import gt
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from gdn_triton._host.records import Options

MOST_FLOAT = sys.float_info.max
FLOAT_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
INDEX_DTYPES = frozenset((torch.int32, torch.int64))
FLAG_DTYPES = frozenset((torch.bool,))
STRIDED = torch.strided
FLOATS = "float16, bfloat16, float32 or float64"
INDICES = "int32 or int64"


def check_offsets(name: str, offsets: Sequence[int], T: int) -> None:
    if offsets[0] != 0:
        raise ValueError(must(name, "start at 0", str(offsets[0])))
    if any(map(gt, offsets, offsets[1:])):
        i = next(i for i in range(1, len(offsets)) if offsets[i - 1] > offsets[i])
        raise ValueError(
            must(name, "not decrease", f"{offsets[i - 1]} then {offsets[i]} at index {i}")
        )
    if offsets[-1] > T:
        raise ValueError(must(name, f"end at or before T={T}", str(offsets[-1])))


def check_same_offsets(offsets: Sequence[int], on_host: Sequence[int]) -> None:
    """Checks that cu_seqlens_cpu has the offsets of cu_seqlens, which is on the CPU too."""
    for i, (offset, told) in enumerate(zip(offsets, on_host, strict=True)):
        if offset != told:
            expected = f"equal cu_seqlens, which has {offset} at index {i}"
            raise ValueError(must("cu_seqlens_cpu", expected, str(told)))


def count_sequences(cu_seqlens: Tensor) -> int:
    """Returns N of cu_seqlens [N + 1] from its shape alone."""
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(must("cu_seqlens", "have shape [N + 1], N >= 0", shape_of(cu_seqlens)))
    return cu_seqlens.shape[0] - 1


def check_on_host(cu_seqlens_cpu: Tensor, cu_seqlens: Tensor | None) -> None:
    """Checks that cu_seqlens_cpu is on the CPU and has the shape of cu_seqlens. Reads no
    contents."""
    name = "cu_seqlens_cpu"
    if cu_seqlens is None:
        raise ValueError(must(name, "come with cu_seqlens", "cu_seqlens=None"))
    if cu_seqlens_cpu.device.type != "cpu":
        raise ValueError(must(name, "be on the CPU", str(cu_seqlens_cpu.device)))
    if cu_seqlens_cpu.shape != cu_seqlens.shape:
        expected = f"have the shape of cu_seqlens, {list(cu_seqlens.shape)}"
        raise ValueError(must(name, expected, shape_of(cu_seqlens_cpu)))


def check_dtype(name: str, x: Tensor, allowed: frozenset[torch.dtype], expected: str) -> None:
    if x.dtype not in allowed:
        raise ValueError(must(name, f"be {expected}", str(x.dtype)))
    if allowed is not FLOAT_DTYPES:
        _check_contents_are_readable(name, x)


def _check_contents_are_readable(name: str, x: Tensor) -> None:
    """Raises TypeError for an integer or bool tensor of a subclass with operations of its own:
    neither the host nor a kernel can read its contents, and every backend needs these contents."""
    if type(x) is Tensor or isinstance(x, FakeTensor | FunctionalTensor):
        return
    if torch.compiler.is_compiling():
        return  # checked again in the operator
    if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        expected = "be a tensor whose contents lie in memory"
        given = f"a {type_of(x)}, a subclass of torch.Tensor with operations of its own"
        raise TypeError(must(name, expected, given))


def check_float_dtype(name: str, dtype: object) -> None:
    """Checks a dtype that a caller asks for."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(must(name, "be a torch.dtype", value_of(dtype)))
    if dtype not in FLOAT_DTYPES:
        raise ValueError(must(name, f"be {FLOATS}", str(dtype)))


def real_or_none(name: str, x: object) -> float | None:
    """Returns x as a float. Raises TypeError if x is no real number, ValueError if x is outside of
    the range of float64."""
    if x is None or type(x) is float:
        return x
    # Refuse a tensor too, because its value would have to be fetched from the device.
    if isinstance(x, bool) or not isinstance(x, Real):
        raise TypeError(must(name, "be a real number or None", value_of(x)))
    try:
        return float(x)
    except OverflowError:
        expected = f"be within the range of float64, {MOST_FLOAT:.1e}"
        # An int may have too many digits to print.
        raise ValueError(must(name, expected, f"one beyond it ({type_of(x)})")) from None


def refuse_head_first(head_first: object) -> NoReturn:
    """Raises TypeError for a keyword that flash-linear-attention once had."""
    raise TypeError(
        f"head_first was removed, got {value_of(head_first)}: q, k, v, g and beta are [B, T, H, "
        "...], tokens before heads, which x.transpose(1, 2) makes of [B, H, T, ...]"
    )


def in_float64(x: Any) -> bool:
    """Whether a real number is finite, and within the range of float64."""
    return bool(-MOST_FLOAT <= x <= MOST_FLOAT)


# -------------------------------------------------------------- checks of tensors, flags and sizes


def check_tensors(required: Mapping[str, object], optional: Mapping[str, object]) -> None:
    for name, x in required.items():
        if not isinstance(x, Tensor):
            raise TypeError(must(name, "be a torch.Tensor", type_of(x)))
        if not is_strided(x):
            refuse_layout(name, x)
    for name, x in optional.items():
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(must(name, "be a torch.Tensor or None", type_of(x)))
        if not is_strided(x):
            refuse_layout(name, x)


def is_strided(x: Tensor) -> bool:
    """Whether the elements lie in memory by strides. A sparse tensor, an MKL-DNN tensor and a
    nested tensor have no strides, and some of them have no shape."""
    return x.layout is STRIDED and not x.is_nested


def refuse_layout(name: str, x: Tensor) -> NoReturn:
    """Raises ValueError for a tensor that is not strided."""
    raise ValueError(must(name, "be a strided tensor", _layout_of(x)))


def check_flags(**flags: object) -> None:
    for name, flag in flags.items():
        if flag is not True and flag is not False:
            raise TypeError(must(name, "be True or False", value_of(flag)))


def check_devices(first: str, device: torch.device, others: Mapping[str, Tensor | None]) -> None:
    """Checks that all `others` are on `device`, which is the device of the tensor named `first`."""
    for name, x in others.items():
        if x is not None and x.device != device:
            raise ValueError(must(name, f"be on the device of {first}, {device}", str(x.device)))


def check_dtypes(tensors: Mapping[str, Tensor | None], indices: Collection[str]) -> None:
    """Checks that the tensors named in `indices` hold integers, and all others floats."""
    for name, x in tensors.items():
        if x is not None and name in indices:
            check_dtype(name, x, INDEX_DTYPES, INDICES)
        elif x is not None:
            check_dtype(name, x, FLOAT_DTYPES, FLOATS)


def check_rank(name: str, x: Tensor, *dimensions: str) -> None:
    if x.dim() != len(dimensions):
        expected = f"have {len(dimensions)} dimensions [{', '.join(dimensions)}]"
        raise ValueError(must(name, expected, shape_of(x)))


def check_shape(name: str, x: Tensor | None, **sizes: int) -> None:
    """Accepts None whatever the sizes."""
    if x is not None and x.shape != tuple(sizes.values()):
        raise ValueError(must(name, f"have shape {shaped(**sizes)}", shape_of(x)))


def check_sizes(H: int, HV: int, K: int, V: int) -> None:
    if H < 1:
        raise ValueError(must("q", "have at least one head", f"H={H}"))
    if HV < H or HV % H != 0:
        raise ValueError(must("v", f"have a positive multiple of H={H} heads", f"HV={HV}"))
    if K < 1:
        raise ValueError(must("q", "have a key size K of at least 1", f"K={K}"))
    if V < 1:
        raise ValueError(must("v", "have a value size V of at least 1", f"V={V}"))


def check_qkv(q: Tensor, k: Tensor, v: Tensor, **lead: int) -> tuple[int, int, int, int]:
    """Checks q, k [.., H, K] and v [.., HV, V], and returns H, HV, K and V. lead: the sizes of the
    leading dimensions `..` of q."""
    (H, K), (HV, V) = q.shape[-2:], v.shape[-2:]
    if k.shape[-2] != H:
        raise ValueError(must("k", f"have the heads of q, H={H}", f"{k.shape[-2]} heads"))
    check_sizes(H, HV, K, V)
    if k.shape != q.shape:
        expected = f"have the shape of q, {shaped(**lead, H=H, K=K)}"
        raise ValueError(must("k", expected, shape_of(k)))
    if v.shape != (*lead.values(), HV, V):
        expected = f"have shape {shaped(**lead, HV=HV, V=V)}"
        raise ValueError(must("v", expected, shape_of(v)) + _hint_of_head_first(q, v))
    return H, HV, K, V


def _hint_of_head_first(q: Tensor, v: Tensor) -> str:
    """A sentence where q, v [B, H or HV, T, ...] explain an error of v's shape, else nothing."""
    if q.dim() != 4 or v.dim() != 4 or not 0 < q.shape[1] < q.shape[2]:
        return ""
    if v.shape[2] != q.shape[2] or v.shape[1] % q.shape[1] != 0:
        return ""
    return (
        ". They look like [B, H, T, ...]: q, k, v, g and beta are [B, T, H, ...], tokens before "
        "heads, which x.transpose(1, 2) makes"
    )


def check_state(
    name: str,
    x: Tensor,
    count: str,
    N: int | None,
    *,
    HV: int,
    K: int,
    V: int,
    state_v_first: bool,
) -> None:
    """Checks the shape of states. count: the name of the first dimension in errors. N: its size;
    None allows any size."""
    last = {"V": V, "K": K} if state_v_first else {"K": K, "V": V}
    check_rank(name, x, count, "HV", *last)
    sizes = {count: x.shape[0] if N is None else N, "HV": HV, **last}
    if x.shape != tuple(sizes.values()):
        expected = f"have shape {shaped(**sizes)} (state_v_first={state_v_first})"
        raise ValueError(must(name, expected, shape_of(x)))


def check_gate(
    A_log: Tensor | None, dt_bias: Tensor | None, HV: int, *, use_gate: bool, asked: str
) -> None:
    """Checks A_log and dt_bias. asked: the argument that turns the gate on, for errors."""
    if use_gate:
        if A_log is None:
            raise ValueError(must("A_log", f"be given with {asked}", "None"))
        check_shape("A_log", A_log, HV=HV)
        check_shape("dt_bias", dt_bias, HV=HV)
        return
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        if x is not None:
            raise ValueError(must(name, f"be None without {asked}", "a tensor"))


def check_eigenvalues(options: Options) -> None:
    if options.allow_neg_eigval and not options.use_beta_sigmoid_in_kernel:
        expected = "come with use_beta_sigmoid_in_kernel=True"
        raise ValueError(must("allow_neg_eigval", expected, "False"))


# --------------------------------------------------------------------------------- words of errors


def must(name: str, expected: str, given: str) -> str:
    return f"{name} must {expected}, got {given}"


def shaped(**sizes: int) -> str:
    return "[" + ", ".join(f"{name}={size}" for name, size in sizes.items()) + "]"


def shape_of(x: Tensor) -> str:
    return f"shape {list(x.shape)}"


def _layout_of(x: Tensor) -> str:
    return "a nested one" if x.is_nested else f"one of layout {x.layout}"


def type_of(x: Any) -> str:
    return type(x).__name__


def value_of(x: Any) -> str:
    # Describe a tensor instead of printing it, because printing would fetch its contents.
    if not isinstance(x, Tensor):
        return f"{x!r} ({type_of(x)})"
    return "a nested tensor" if x.is_nested else f"a tensor of shape {list(x.shape)}"
