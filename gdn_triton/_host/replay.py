"""Gradients inside of an operator's implementation: its forward runs again under autograd."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def replayed_gradients(
    run: Callable[..., Sequence[Tensor | None]],
    tensors: Sequence[Tensor | None],
    wanted: Sequence[bool],
    from_above: Sequence[Tensor | None],
) -> list[Tensor]:
    """Returns the gradients of the tensors that are not None and whose entry in `wanted` is True,
    in the order of `tensors`.

    run: the forward. It takes `tensors` by position and returns one output for each entry of
    `from_above`, the incoming gradients. An output and an incoming gradient may be None.
    """
    # The dispatcher turns autograd off around an implementation. `enable_grad` alone does not turn
    # it on again; leaving inference mode does.
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [
            None if x is None else x.detach().requires_grad_(want)
            for x, want in zip(tensors, wanted, strict=True)
        ]
        sources = [x for x, want in zip(leaves, wanted, strict=True) if want and x is not None]
        pairs = zip(run(*leaves), from_above, strict=True)
        # An output may depend on none of the inputs whose gradients are wanted.
        given = [(y, dy) for y, dy in pairs if y is not None and y.requires_grad and dy is not None]
        if not given:
            return [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in sources]
        gradients = torch.autograd.grad(
            [y for y, _ in given],
            sources,
            [dy for _, dy in given],
            allow_unused=True,
            materialize_grads=True,
        )
    # Autograd may return views of its inputs, or one tensor for two inputs. An operator must return
    # neither.
    return [x.clone(memory_format=torch.contiguous_format) for x in gradients]
