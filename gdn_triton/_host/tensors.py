"""Features of tensors that kernels cannot see, and how a call treats each of them.

Kernels get an address, so they see elements only. The reference consists of torch's operations,
which see all of these features:

- A tensor without memory (on the meta device, of a FakeTensorMode, traced by `make_fx`): every
  backend's call runs through its operator, whose fake makes the shapes (`is_traced`).
- The negative bit, a sign that is not yet applied to the elements in memory: it is applied first
  (`resolved`). A tensor that is written in place may not have one (`check_written`).
- A tangent of forward-mode AD, a level of a transform of torch.func, a subclass with operations of
  its own: a reason for the kernels to refuse the call (`why_unreadable`), which `auto` then gives
  to the reference.
- A DTensor, which has one rank's part of a tensor: a TypeError in every backend.
"""

import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from gdn_triton._host.arguments import must, type_of

_Tensors = TypeVar("_Tensors", bound=tuple[Any, ...])
_Gradient = TypeVar("_Gradient", Tensor, Tensor | None)

PLAIN_TENSORS: Final = frozenset((Tensor, Parameter))
_PLAIN: Final = PLAIN_TENSORS | {bool, float, int, str, type(None)}
# Modes that record operations. The result of a recorded operation has no elements or is no
# constant.
_TRACING_MODES: Final = (
    torch._C._TorchDispatchModeKey.FAKE,
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
)
# The dispatch key that torch excludes below autograd, for example inside an operator's
# implementation.
_AUTOGRAD: Final = torch._C.DispatchKey.AutogradFunctionality


def is_traced(x: object) -> bool:
    """Whether a call whose first tensor is x runs through its operator of torch's library. It does
    under a compiler, and where x, or the result of any operation, has no memory."""
    if torch.compiler.is_compiling():
        return True
    if torch._C._len_torch_dispatch_stack() > 0 and any(
        torch._C._get_dispatch_mode(mode) is not None for mode in _TRACING_MODES
    ):
        return True
    if type(x) is Tensor:
        return x.is_meta
    return isinstance(x, FakeTensor) or (isinstance(x, Tensor) and x.is_meta)


def is_transformed() -> bool:
    """Whether a transform of torch.func or a level of forward-mode AD is active. Then the type of a
    tensor does not show a tangent or a batch dimension that the tensor may have."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def why_unreadable(names: Iterable[str], tensors: Sequence[object]) -> str | None:
    """A sentence why no kernel can take these arguments, or None. Arguments that are no tensors are
    skipped.

    Raises TypeError for a DTensor, and NotImplementedError inside of an operator while a level of
    forward-mode AD is active: there a tangent cannot be seen, and no backend makes one.
    """
    if torch.compiler.is_dynamo_compiling():
        return None  # checked again in the operator
    if not is_transformed() and _PLAIN.issuperset(map(type, tensors)):
        return None
    if forward_ad._current_level >= 0 and torch._C._dispatch_tls_is_dispatch_key_excluded(
        _AUTOGRAD
    ):
        raise NotImplementedError(
            "gdn_triton has no forward-mode derivative (torch.func.jvp, "
            "torch.autograd.forward_ad) under a compiler: call it outside of one, with "
            "GDN_BACKEND=reference"
        )
    for name, x in zip(names, tensors, strict=True):
        if isinstance(x, Tensor):
            sentence = _why_unreadable(name, x)
            if sentence is not None:
                return sentence
    return None


def _why_unreadable(name: str, x: Tensor) -> str | None:
    check_local(name, x)
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return (
            "The kernels do not run inside of the transforms of torch.func (vmap, grad, jvp, ...); "
            f"{name} is a tensor of one."
        )
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        return f"The kernels have no forward-mode derivative; {name} carries a tangent."
    if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return (
            f"The kernels read memory; {name} is a {type_of(x)}, a subclass of torch.Tensor with "
            "operations of its own, which need not have any."
        )
    return None


def check_local(name: str, x: Tensor) -> None:
    """Raises TypeError for a DTensor."""
    if torch.compiler.is_dynamo_compiling():
        return
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(x, distributed.DTensor):
        expected = "be a tensor of this process alone, as to_local() returns one"
        raise TypeError(must(name, expected, type_of(x)))


def resolved(tensors: _Tensors) -> _Tensors:
    """The tensors, with a copy in place of each one that has a negative bit. Some may be None."""
    for x in tensors:
        if x is not None and x.is_neg():
            break
    else:
        return tensors
    made = tuple(None if x is None else x.resolve_neg() for x in tensors)
    return tensors._make(made) if hasattr(tensors, "_make") else made  # type: ignore[return-value]


def check_written(name: str, x: Tensor | None) -> None:
    """Raises ValueError if x, which a call writes, has a negative bit: its memory holds -x."""
    if x is not None and not torch.compiler.is_dynamo_compiling() and x.is_neg():
        expected = "be written where it lies"
        raise ValueError(must(name, expected, "a tensor with a negative bit: see resolve_neg()"))


def writing(x: Tensor) -> AbstractContextManager[object]:
    """The context in which torch's operations can write x in place. Torch writes a tensor that was
    made in inference mode only in that mode, since such a tensor has no version. No graph of
    autograd can hold it, and therefore no backward can miss the write. A compiler cannot query the
    mode; under a compiler torch's own rule holds."""
    if torch.compiler.is_compiling():
        return nullcontext()
    if x.is_inference() and not torch.is_inference_mode_enabled():
        return torch.inference_mode()
    return nullcontext()


def host_reads(x: Tensor) -> bool:
    """Whether the host checks the contents of an argument. Reading another device would wait for
    it, and a tensor of the meta device has no contents."""
    return x.device.type == "cpu" and not is_traced(x) and not is_transformed()


def readable_gradient(name: str, gradient: _Gradient) -> _Gradient:
    """An incoming gradient in a form that kernels can read. name: the tensor whose gradient it is.
    Raises RuntimeError if the gradient is not in memory."""
    if gradient is None:
        return gradient
    sentence = why_unreadable((f"the gradient of {name}",), (gradient,))
    if torch._C._functorch.is_legacy_batchedtensor(gradient):
        sentence = f"The gradient of {name} is a batch of several (is_grads_batched, vectorize)."
    if sentence is not None:
        raise RuntimeError(
            f"gdn_triton cannot differentiate by kernels here. {sentence} GDN_BACKEND=reference can"
        )
    # A tensor of zeros without memory, which autograd may make, is cloned into one with memory.
    return gradient.clone() if gradient._is_zerotensor() else gradient.resolve_neg()
