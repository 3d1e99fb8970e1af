"""What a call does to the trace that it is in.

torch marks functions for its compiler by importing the compiler, which takes seconds. So this
module is imported by calls that are being traced, and by nothing else.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch


def _warn_deprecated(message: str) -> bool:
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return True


# A warning cannot be part of a graph. This one is given while the call is traced, so that there is
# one a compilation; a constant has to come back.
warn_deprecated: Callable[[str], bool] = torch.compiler.assume_constant_result(_warn_deprecated)


@torch.compiler.disable(reason="a call with cp_context talks to other ranks")  # type: ignore[untyped-decorator]
def _untraced(run: Callable[..., Any], *args: Any) -> Any:
    return run(*args)


def untraced(run: Callable[..., Any]) -> Callable[..., Any]:
    """run, at which a trace breaks."""
    return functools.partial(_untraced, run)
