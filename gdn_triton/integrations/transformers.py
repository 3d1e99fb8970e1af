"""The Gated DeltaNet layers of transformers' models on this package's ops.

    from gdn_triton.integrations.transformers import disable, enable, status

    print(enable())  # before or after the models are imported, made or loaded
    ...
    disable()

A modeling file of transformers calls the chunked op and the recurrent op in one of two ways
(`docs/integrations_transformers.md` has the versions):

- its layer calls functions of the module, `torch_chunk_gated_delta_rule` and
  `torch_recurrent_gated_delta_rule`, which a decorator may have replaced by FLA's. `enable`
  replaces them in the module by ours.
- its layer has attributes `chunk_gated_delta_rule` and `recurrent_gated_delta_rule`, which its
  `__init__` sets. `enable` adds a property of the same name to the class. Therefore all existing
  and later instances run our ops, and their own attributes remain for `disable`.

`enable` also replaces the convolution's functions in modules of the first kind. In both kinds it
replaces the method `forward` of the gated norm's class if the source text of `forward` is known.

A finder on `sys.meta_path` applies the replacements to modules that are imported later. This module
imports nothing of transformers, and importing it changes nothing.

`enable` and `disable` assign to modules and classes one after the other, without a lock. Call them
while no other thread imports, enables or disables. A forward pass that runs at the same time may
use one implementation in one layer and the other in the next. A model that `torch.compile` has
already traced runs the functions of the trace until `torch.compiler.reset()`.
"""

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from gdn_triton.chunk.api import chunk_gated_delta_rule
from gdn_triton.integrations import _transformers_window as _window
from gdn_triton.integrations._places import ABSENT, Patches, Place, Target
from gdn_triton.integrations._transformers_conv import refuse_numbers_alone, step, whole
from gdn_triton.integrations._transformers_lengths import ON_HOST, WithHostOffsets, as_tensor
from gdn_triton.integrations._transformers_norm import SUFFIX, gated, rounds
from gdn_triton.recurrent.api import fused_recurrent_gated_delta_rule

__all__ = ["Place", "Status", "disable", "enable", "status", "with_host_offsets"]

Op = Callable[..., Any]

# The two ways: names that a layer's methods use, each with the name of our op.
FUNCTIONS = {
    "torch_chunk_gated_delta_rule": "chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule": "fused_recurrent_gated_delta_rule",
}
ATTRIBUTES = {
    "chunk_gated_delta_rule": "chunk_gated_delta_rule",
    "recurrent_gated_delta_rule": "fused_recurrent_gated_delta_rule",
}
# Further functions of the modules, since transformers 5.15.
CONVOLUTION = {
    "causal_conv1d_fn": "causal_conv1d",
    "causal_conv1d_update": "causal_conv1d_update",
}
NORM = "rms_norm_gated"  # in the classes that `_norms` finds
_WINDOW = "update_recurrent_state"  # in a layer of a cache, with a window
PACKAGES = ("transformers", "transformers_modules")  # the second holds a model repository's code


@dataclass(frozen=True, slots=True)
class Status:
    """Whether our ops are enabled, transformers' version (None: not installed), and every place
    found in the modeling modules imported so far. `print` it."""

    enabled: bool
    version: str | None
    places: tuple[Place, ...]

    def __str__(self) -> str:
        state = "enabled" if self.enabled else "disabled"
        lines = [f"gdn_triton is {state} in transformers {self.version or '(not installed)'}"]
        lines += [f"  {place}" for place in self.places]
        if not self.places:
            lines.append("  no module with a gated delta rule has been imported yet")
        return "\n".join(lines)


_patches = Patches()
_asked: list[ModuleType] = []  # modules that were passed to `enable`


# ------------------------------------------------------------------------------------------- public


def enable(*modules: ModuleType, window: bool = False) -> Status:
    """Runs the Gated DeltaNet layers of transformers' models on this package, until `disable`.

    Covers every modeling module of transformers, whether it has been imported or is imported later,
    and the modeling files of model repositories that have been imported (`trust_remote_code`
    bypasses the import system, so call `enable` again after loading such a model). A second call
    changes nothing that is already replaced.

    Args:
        modules: further modules with such layers, of other packages.
        window: decode with a window in each layer of a cache (`docs/decode.md`) until `disable`,
            with transformers 5.24 or later. Without gradients and a compiler, a step of one token
            then writes a record instead of the state. Functions of torch that read the state get
            the complete state; C++ extensions that read the tensor's memory do not.

    Returns:
        `status()`: every place found, and whether ours runs there, or why not.

    Raises:
        ImportError: transformers is not installed, and no module was given.
        TypeError: an argument is not a module, or window is not a bool.
        RuntimeError: window is set, and the caches of this version of transformers are not known.
    """
    for module in modules:
        if not isinstance(module, ModuleType):
            raise TypeError(f"enable: expected modules, got a {type(module).__name__}")
    if not modules and not _is_installed():
        raise ImportError("transformers is not installed: there is nothing to enable")
    if type(window) is not bool:
        raise TypeError(f"window must be True or False, got {window!r}")
    kept = _window.target() if window else None
    if kept is not None and not _patches.is_ours(kept):
        _patches.put(kept, _window.keeping(kept.now))
    _asked.extend(module for module in modules if module not in _asked)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    for module in _modules():
        _patch(module)
    return status()


def disable() -> Status:
    """Restores the functions that `enable` replaced. A place that has another replacement by now is
    not changed, and the returned status names it."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
    _patches.take_back()
    found = status()
    _patches.made.clear()
    _asked.clear()
    return found


def status() -> Status:
    """Returns a report of the places in the modules that are imported now. Changes nothing."""
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        version = None
    enabled = _FINDER in sys.meta_path
    places = [place for module in _modules() for place in _places(module, enabled)]
    kept = [patch.target for patch in _patches.made if patch.target.name == _WINDOW]
    places += _patches.places(kept[:1], enabled, "")
    return Status(enabled, version, tuple(places))


def with_host_offsets(collator: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Wraps a data collator of packed sequences. Its batches then also have the offsets on the
    host, for the plan of `gdn_triton.chunk_gated_delta_rule`: the keyword `cu_seqlens_cpu` of a
    model's call.

    The offsets are a list of integers, because a trainer moves every tensor of a batch to the
    device. In a training loop of your own, pass a CPU tensor as `cu_seqlens_cpu`, because
    `torch.compile` retraces a list whenever the offsets change.

    Args:
        collator: `DataCollatorWithFlattening(return_flash_attn_kwargs=True)`, or another one with
            `cu_seq_lens_q` on the CPU in its batches.

    Raises:
        ValueError: at a call, a batch without `cu_seq_lens_q`, or with one that is not on the CPU.
    """
    return WithHostOffsets(collator)


# ---------------------------------------------------------------------------------------- the ops


def _ops(module: ModuleType) -> dict[str, Op]:
    """Returns our ops for the calls of one modeling module.

    The ops have the parameters of transformers' own torch functions. A layer also passes on every
    keyword of its model's call. Our ops use the keywords that they know and ignore others, such as
    `seq_idx` or `max_length_q`, which are for other parts of the model; transformers' own functions
    ignore them too. Only `seq_idx` without offsets is refused.
    """
    convolution = _before(module, "causal_conv1d_fn")
    convolve = whole(convolution)
    # Our replacement from an earlier call of `enable` may be in place.
    packing = [convolve, *_patches.put_at(module, "causal_conv1d_fn")]
    installed = importlib.util.find_spec("causal_conv1d") is not None
    in_torch = convolution is None or (inspect.isroutine(convolution) and not installed)

    def mixes() -> bool:
        """Returns whether the convolution before these ops is transformers' own torch function,
        which convolves across the bounds of packed sequences."""
        now = getattr(module, "causal_conv1d_fn", None)
        if any(now is ours for ours in packing):
            return False
        if not isinstance(convolution, nn.Module):
            return in_torch
        # The package `kernels` may have turned the function into a module, to replace its forward.
        own = getattr(convolution.forward, "__func__", None) is type(convolution).forward
        return own and not installed

    def options(
        names: frozenset[str],
        given: dict[str, Any],
        cu_seqlens: Tensor | None,
        initial_state: Tensor | None,
        T: int,
    ) -> dict[str, Any]:
        refuse_numbers_alone(given.get("seq_idx"), cu_seqlens, T)
        if cu_seqlens is not None and cu_seqlens.shape[0] > 2:
            found = f"got {cu_seqlens.shape[0] - 1} sequences"
            if mixes():
                raise ValueError(
                    f"cu_seqlens must be None or hold one sequence in {module.__name__} as long as "
                    f"the package causal_conv1d is not installed, {found}: the "
                    "convolution before the gated delta rule would mix them"
                )
            if initial_state is not None:
                raise ValueError(
                    f"cu_seqlens must be None or hold one sequence in {module.__name__} where a "
                    f"cache has tokens before them, {found}: the cache has the convolution's state "
                    "of one sequence for each row"
                )
        used = {name: value for name, value in given.items() if name in names}
        if ON_HOST in used:
            used[ON_HOST] = as_tensor(used[ON_HOST])
        return used

    def chunk(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        return chunk_gated_delta_rule(
            query,
            key,
            value,
            g,
            beta,
            initial_state=_window.whole(initial_state),
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=cu_seqlens,
            chunk_size=chunk_size,
            **options(_CHUNK_OPTIONS, kwargs, cu_seqlens, initial_state, query.shape[1]),
        )

    def recurrent(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        T = query.shape[1]
        further = options(_RECURRENT_OPTIONS, kwargs, cu_seqlens, initial_state, T)
        if output_final_state and cu_seqlens is None and not further and _keeps_window():
            found = _window.windowed_step(
                query, key, value, g, beta, initial_state, use_qk_l2norm_in_kernel
            )
            if found is not None:
                return found
        return fused_recurrent_gated_delta_rule(
            query,
            key,
            value,
            g=g,
            beta=beta,
            initial_state=_window.whole(initial_state),
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=cu_seqlens,
            **further,
        )

    return {
        "chunk_gated_delta_rule": chunk,
        "fused_recurrent_gated_delta_rule": recurrent,
        "causal_conv1d": convolve,
        "causal_conv1d_update": step(_before(module, "causal_conv1d_update")),
    }


def _keeps_window() -> bool:
    """Returns whether a layer of a cache stores a state with a window."""
    return any(patch.target.name == _WINDOW and patch.in_place for patch in _patches.made)


def _before(owner: ModuleType | type, name: str) -> Any:
    """Returns the object that a module or a class has under a name, or had before ours replaced
    it."""
    for patch in _patches.made:
        if patch.target.owner is owner and patch.target.name == name and patch.in_place:
            return patch.before
    return vars(owner).get(name, ABSENT)


# These are globals, because torch.compile traces the calls and cannot trace `inspect.signature`.
_CHUNK_OPTIONS = frozenset(inspect.signature(chunk_gated_delta_rule).parameters)
_RECURRENT_OPTIONS = frozenset(inspect.signature(fused_recurrent_gated_delta_rule).parameters)


# ------------------------------------------------------------------------------------- the modules


def _is_installed() -> bool:
    return "transformers" in sys.modules or importlib.util.find_spec("transformers") is not None


def _is_modeling(name: str) -> bool:
    package, _, rest = name.partition(".")
    return package in PACKAGES and rest.rpartition(".")[2].startswith("modeling_")


def _modules() -> Iterator[ModuleType]:
    """Returns the modeling modules imported so far, and the modules passed to `enable`."""
    imported = [module for name, module in sorted(sys.modules.items()) if _is_modeling(name)]
    # An entry is None if its import is forbidden.
    yield from dict.fromkeys(x for x in (*imported, *_asked) if isinstance(x, ModuleType))


def _names(function: Any, seen: set[Any]) -> set[str]:
    """Returns every name that a function uses, including the names used by a function in its
    closure. Some decorators do not set `__wrapped__`, but all have the decorated function in a
    closure."""
    if not inspect.isfunction(function) or function in seen:
        return set()
    seen.add(function)
    names = set(function.__code__.co_names)
    for cell in function.__closure__ or ():
        try:
            names |= _names(cell.cell_contents, seen)
        except ValueError:  # an empty cell
            continue
    return names


def _layers(module: ModuleType) -> Iterator[tuple[type, set[str]]]:
    """Returns the layers that a module defines, with every name that their methods use. `__init__`
    is excluded, because it does not call the functions that it names."""
    for cls in vars(module).values():
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            continue
        if cls.__module__ == module.__name__:
            methods = [method for name, method in vars(cls).items() if name != "__init__"]
            yield cls, set().union(*(_names(method, set()) for method in methods))


def _targets(module: ModuleType) -> tuple[list[Target], str | None]:
    """Returns the targets of our ops in a module. If a module with gated delta rules has no target,
    returns the reason too."""
    if not any("gated_delta_rule" in name for name in vars(module)):
        return [], None
    targets: list[Target] = []
    called, used = False, set[str]()
    for cls, names in _layers(module):
        if names.issuperset(FUNCTIONS):
            called, used = True, used | names
        if names.issuperset(ATTRIBUTES):
            targets += [Target(cls, name, op) for name, op in ATTRIBUTES.items()]
    if called:
        targets += [Target(module, name, op) for name, op in FUNCTIONS.items()]
        targets += [
            Target(module, name, op)
            for name, op in CONVOLUTION.items()
            if name in used and callable(_before(module, name))
        ]
    if targets:
        return targets + [
            Target(cls, "forward", NORM) for cls, known in _norms(module) if known
        ], None
    return [], "no layer calls its gated delta rule in a way that is known here"


def _norms(module: ModuleType) -> Iterator[tuple[type, bool]]:
    """Returns the classes of gated norms that a module defines, and whether our norm computes the
    same."""
    for name, cls in vars(module).items():
        if name.endswith(SUFFIX) and isinstance(cls, type) and cls.__module__ == module.__name__:
            yield cls, rounds(_before(cls, "forward")) is not None


def _patch(module: ModuleType) -> None:
    ops: dict[str, Op] | None = None
    for target in _targets(module)[0]:
        if _patches.is_ours(target):
            continue
        ops = ops or _ops(module)
        ours: Any
        if target.op == NORM:
            ours = gated(target.now, bool(rounds(target.now)))
        elif isinstance(target.owner, type):
            ours = _attribute(target.name, ops[target.op])
        else:
            ours = ops[target.op]
        _patches.put(target, ours)


def _attribute(name: str, ours: Op) -> Any:
    """Returns a property that always reads as `ours`. Values that the instance has, or that are
    assigned to it, remain stored in the instance."""

    def get(layer: nn.Module) -> Op:
        return ours

    def keep(layer: nn.Module, value: Any) -> None:
        layer.__dict__[name] = value

    def drop(layer: nn.Module) -> None:
        del layer.__dict__[name]

    return property(get, keep, drop)


def _places(module: ModuleType, enabled: bool) -> Iterator[Place]:
    targets, reason = _targets(module)
    if reason is not None:
        yield Place(module.__name__, None, f"{reason}.")
    for cls, known in _norms(module) if targets else ():
        if not known:
            why = "its text is of no version that is known here."
            yield Place(f"{module.__name__}.{cls.__name__}.forward", None, why)
    missed = "imported past the import system: call `enable` again."
    yield from _patches.places(targets, enabled, missed)


# -------------------------------------------------------------------------------- later imports


class _Finder(importlib.abc.MetaPathFinder):
    """Enables our ops in each modeling module as soon as it has been imported.

    The finder itself finds no files. For the name of a modeling module it asks the other finders of
    `sys.meta_path` and puts a `_Loader` around the loader that they found. The `_Loader` executes
    the module and then calls `_patch` on it.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not _is_modeling(fullname):
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Replaces a module's loader until the module is executed, and restores the module's own loader
    just before that."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        _patch(module)


_FINDER = _Finder()
