"""flash-linear-attention (FLA) on this package's kernels: FLA's layers and models train and
generate with this package's ops.

`register()` adds this package to FLA's registry of backends, which serves every caller of
`chunk_gated_delta_rule`. That registry does not cover `fused_recurrent_gated_delta_rule`.
`register()` therefore replaces this function in every loaded module that refers to it; modules
loaded later import the replacement from FLA's own module. `register()` replaces the convolution and
the gated norm of FLA's layers, `causal_conv1d` and `rms_norm_gated`, in the same way
(`gdn_triton.integrations._fla_layer`). `unregister()` undoes all of this, and `with routed():`
registers for one block.

A call that this package does not support runs on FLA's own path, as without registration, and the
logger `gdn_triton` warns once for each reason. With `GDN_BACKEND` set to the name of a backend, no
call falls back to FLA: a call that the backend cannot run is an error.
"""

import contextlib
import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from packaging.version import InvalidVersion, Version
from torch import Tensor

from gdn_triton._host.environment import batch_invariant
from gdn_triton._host.remembered import remembered
from gdn_triton.chunk.api import chunk_gated_delta_rule
from gdn_triton.conv.api import causal_conv1d
from gdn_triton.explanations import explain_call
from gdn_triton.integrations._fla_layer import convolution, gated_norm
from gdn_triton.norm.api import rms_norm_gated
from gdn_triton.recurrent.api import fused_recurrent_gated_delta_rule

# 0.5.2 is the first version whose registry covers the op. A later version may give an argument
# another meaning, so versions that have not been compared are refused.
OLDEST_FLA, FIRST_UNKNOWN_FLA = (0, 5, 2), (0, 7)

# FLA asks backends in increasing order of this number: its backend for Ascend has 0, FlashQLA has
# 3.
PRIORITY = 1

_logger = logging.getLogger("gdn_triton")
_warned: set[tuple[str, str]] = set()


class _Routes:
    """The state that `register` changes. The state is in attributes, because `_replace` would also
    replace a global."""

    active = False  # FLA's registry reads it at every call
    backend: object = None  # our entry in FLA's registry, which cannot remove entries
    # The functions of FLA that are replaced by name, each with our function.
    replaced: tuple[tuple[Callable[..., Any], Callable[..., Any]], ...] = ()


_routes = _Routes()


def register() -> None:
    """Routes FLA's two ops of the gated delta rule to this package, and the convolution and the
    gated norm of its layers. A second call does nothing.

    This function imports FLA with its ops and modules if they have not been imported yet.

    Raises:
        ImportError: FLA cannot be imported.
        RuntimeError: FLA's version is not one of 0.5.2 to 0.6.x, or FLA was imported with
            `FLA_DISABLE_BACKEND_DISPATCH=1` and therefore asks no backend.
    """
    if _routes.active:
        return
    version = _import_fla()
    ops = importlib.import_module("fla.ops.gated_delta_rule")
    # FLA 0.6 has its registry in fla.backends, 0.5 in fla.ops.backends.
    is_new = version.release >= (0, 6)
    backends = importlib.import_module("fla.backends" if is_new else "fla.ops.backends")
    if backends._DISPATCH_DISABLED:
        raise RuntimeError(
            "FLA_DISABLE_BACKEND_DISPATCH=1 was set when FLA was imported: it asks no backend, so "
            "none can be registered. Unset it and start anew."
        )
    if _routes.backend is None:
        backend = _backend_class(backends.BaseBackend)
        if is_new:
            backends.register("gated_delta_rule")(backend)
        else:
            registry = importlib.import_module("fla.ops.gated_delta_rule.backends").gdr_registry
            registry.register(backend())
        _routes.backend = backend
        conv = importlib.import_module("fla.modules.convolution").causal_conv1d
        norm = importlib.import_module("fla.modules.fused_norm_gate").rms_norm_gated
        recurrent = ops.fused_recurrent_gated_delta_rule
        _routes.replaced = (
            (recurrent, _recurrence(recurrent)),
            (conv, convolution(conv, _is_ours)),
            (norm, gated_norm(norm, _is_ours)),
        )
    _routes.active = True
    places = [_replace(original, ours) for original, ours in _routes.replaced]
    _logger.info(
        "FLA %s runs on gdn_triton: chunk_gated_delta_rule through its registry, "
        "fused_recurrent_gated_delta_rule, causal_conv1d and rms_norm_gated under %d, %d and %d "
        "names.",
        version,
        *places,
    )


def unregister() -> None:
    """Undoes `register` and restores FLA's ops. Does nothing if `register` was not called.

    A replacement that is referenced from a closure or a table, and not by a module's name, stays
    there and calls FLA's function.
    """
    if _routes.active:
        _routes.active = False
        for original, ours in _routes.replaced:
            _replace(ours, original)


@contextlib.contextmanager
def routed() -> Iterator[None]:
    """Calls `register()` for a block. A registration made before the block remains after the
    block."""
    before = _routes.active
    register()
    try:
        yield
    finally:
        if not before:
            unregister()


def _import_fla() -> Version:
    """Returns FLA's version. Raises ImportError or RuntimeError if FLA is missing or its version is
    unknown."""
    oldest, unknown = (".".join(map(str, v)) for v in (OLDEST_FLA, FIRST_UNKNOWN_FLA))
    try:
        found = getattr(importlib.import_module("fla"), "__version__", None)
    except ImportError as error:
        raise ImportError(
            f"gdn_triton.integrations.fla needs flash-linear-attention {oldest} or newer (the "
            f"distribution fla-core), which cannot be imported: {error}"
        ) from error
    try:
        version = Version(str(found))
    except InvalidVersion:
        version = None
    if version is None or not OLDEST_FLA <= version.release < FIRST_UNKNOWN_FLA:
        raise RuntimeError(
            f"gdn_triton.integrations.fla knows flash-linear-attention {oldest} to before "
            f"{unknown}; found {found}"
        )
    return version


def _replace(old: object, new: object) -> int:
    """Replaces `old` by `new` in every loaded module that has it under a name. Returns the number
    of replaced names."""
    places = 0
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict):
            continue
        for name in [name for name, value in list(names.items()) if value is old]:
            names[name] = new
            places += 1
    return places


def _named() -> bool:
    """Returns whether `GDN_BACKEND` names a backend, or has a value that the op then refuses."""
    return os.environ.get("GDN_BACKEND", "auto") != "auto"


def _refusal(op: str, judge: Callable[..., bool], args: Any, kwargs: Any) -> str | None:
    """Returns a sentence why FLA's own path runs this call, or None. The sentence is logged
    once."""
    if _named():
        return None
    batch_invariant()  # an invalid variable is an error, whichever path runs the call
    try:
        judge(*args, **kwargs)
    except (TypeError, ValueError, NotImplementedError, _Unserved) as why:
        reason = f"{str(why).rstrip('.')}."
    else:
        return None
    if (op, reason) not in _warned:
        _warned.add((op, reason))
        _logger.warning("FLA's own path runs %s, not gdn_triton: %s", op, reason)
    return reason


def _is_ours(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Returns whether our function runs this call, which a layer of FLA makes."""
    if not _routes.active:
        return False
    if torch.compiler.is_compiling():  # nothing can be checked in a trace
        return True
    return _refusal(function.__name__, _SERVES[function], args, kwargs) is None


class _Unserved(Exception):
    """Raised if only the reference could run a call on an accelerator, where FLA's kernels are
    faster."""


@remembered
def _serves_chunk(*args: Any, **kwargs: Any) -> bool:
    return _serves(chunk_gated_delta_rule, args, kwargs)


@remembered
def _serves_recurrent(*args: Any, **kwargs: Any) -> bool:
    with torch.no_grad():  # the kernel is not asked for gradients here
        return _serves(fused_recurrent_gated_delta_rule, args, kwargs)


@remembered
def _serves_conv(*args: Any, **kwargs: Any) -> bool:
    return _serves(causal_conv1d, args, kwargs)


@remembered
def _serves_norm(*args: Any, **kwargs: Any) -> bool:
    return _serves(rms_norm_gated, args, kwargs)


_SERVES: dict[Callable[..., Any], Callable[..., bool]] = {
    causal_conv1d: _serves_conv,
    rms_norm_gated: _serves_norm,
}


def _serves(function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    explanation = explain_call(function, *args, **kwargs)
    tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
    if explanation.chosen == "reference" and not next(tensors).is_cpu:
        raise _Unserved(explanation.reasons["triton"])
    return True


def _backend_class(base: Any) -> Any:
    """Returns our entry class for FLA's registry. The registry calls methods by name: the op's
    name, and that name with `_verifier`, which returns (whether our op runs the call, the reason if
    not)."""

    class GdnTritonBackend(base):  # type: ignore[misc]
        backend_type = "gdn_triton"
        package_name = None
        priority = PRIORITY

        @classmethod
        def is_available(cls) -> bool:
            return True

        @classmethod
        def is_enabled(cls) -> bool:
            return _routes.active

        def chunk_gated_delta_rule_verifier(
            self, *args: Any, **kwargs: Any
        ) -> tuple[bool, str | None]:
            reason = _refusal("chunk_gated_delta_rule", _serves_chunk, args, kwargs)
            return reason is None, reason

        def chunk_gated_delta_rule(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
            return chunk_gated_delta_rule(*args, **kwargs)

    return GdnTritonBackend


def _recurrence(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the replacement of FLA's recurrence. `inspect.signature` of it gives FLA's
    parameters."""

    @functools.wraps(original)
    def routed_recurrence(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if not _routes.active:
            return original(*args, **kwargs)  # type: ignore[no-any-return]
        if torch.compiler.is_compiling():  # nothing can be checked in a trace
            return fused_recurrent_gated_delta_rule(*args, **kwargs)
        op = "fused_recurrent_gated_delta_rule"
        if _refusal(op, _serves_recurrent, args, kwargs) is not None:
            return original(*args, **kwargs)  # type: ignore[no-any-return]
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        forward_only = (
            torch.is_grad_enabled()
            and any(x.requires_grad for x in tensors)
            and not tensors[0].is_cpu
            and os.environ.get("GDN_BACKEND") != "reference"
        )
        if not forward_only:
            return fused_recurrent_gated_delta_rule(*args, **kwargs)
        run = functools.partial(fused_recurrent_gated_delta_rule, *args, **kwargs)
        return _ForwardOnly.apply(run, *tensors)  # type: ignore[no-any-return, no-untyped-call]

    return routed_recurrence


class _ForwardOnly(torch.autograd.Function):
    """Runs a forward and raises an error in the backward. FLA's recurrence also accepts inputs that
    require gradients and fails in the backward. This class does the same on an accelerator: our
    kernel has no backward, and the reference, which has one, would otherwise run instead."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], Any], *tensors: Tensor) -> Any:
        return run()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            "fused_recurrent_gated_delta_rule has no backward on this device. Train with "
            "chunk_gated_delta_rule."
        )
