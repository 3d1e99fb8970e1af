"""Functions that a call runs inside of a trace of torch's compiler.

torch's marks for its compiler import the compiler, which takes seconds. Therefore only calls that
are being traced import this module.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch


def _warn_deprecated(message: str) -> bool:
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return True


# A warning cannot be part of a graph. This function gives it while the call is traced, which is
# once for each compilation. It has to return a constant.
warn_deprecated: Callable[[str], bool] = torch.compiler.assume_constant_result(_warn_deprecated)


@torch.compiler.disable(reason="a call with cp_context talks to other ranks")  # type: ignore[untyped-decorator]
def _untraced(run: Callable[..., Any], *args: Any) -> Any:
    return run(*args)


def untraced(run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls `run` outside of the graph: a trace breaks at this call."""
    return functools.partial(_untraced, run)
