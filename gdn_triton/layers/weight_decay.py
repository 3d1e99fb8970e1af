"""Marks the weights without weight decay, by name and by an attribute of the tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from gdn_triton._host.arguments import must, real_or_none, type_of, value_of

__all__ = ["MarksUndecayed", "parameter_groups"]


class MarksUndecayed(nn.Module):
    """A module that sets the attribute `_no_weight_decay`, as Mamba and flash-linear-attention do,
    on the parameters that its method `no_weight_decay` names.

    When a module is copied, converted or loaded, torch replaces its parameters by new ones without
    attributes. The methods of this class mark the new parameters too. `fully_shard` replaces
    parameters without calling a method of the module, so the attribute is lost and only the names
    remain.
    """

    def no_weight_decay(self) -> set[str]:
        raise NotImplementedError

    def _mark_undecayed(self) -> None:
        names = self.no_weight_decay()
        for name, parameter in self.named_parameters():
            if name in names:
                parameter._no_weight_decay = True  # type: ignore[attr-defined]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._mark_undecayed()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._mark_undecayed()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark_undecayed()


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Splits the parameters of a whole model into two groups for an optimizer of torch: with weight
    decay, and without.

        optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=1e-3)

    The group without weight decay has the parameters with fewer than two dimensions (gains of
    norms, biases), the parameters named by a method `no_weight_decay()` of a module of the model,
    as in `GatedDeltaNet` and the models of timm, and the parameters with a true attribute
    `_no_weight_decay`. The method's names refer to the module's own `named_parameters()`; other
    names are ignored, as in timm. A parameter with several names is not decayed if the method lists
    one of them.

    Args:
        model: the model in the form that the optimizer updates, so after `fully_shard`. It may be
            wrapped by DistributedDataParallel, `torch.compile` or an averaged model.
        weight_decay: the weight decay of the first group, finite and at least 0.

    Returns:
        [{"params": [...], "weight_decay": weight_decay}, {"params": [...], "weight_decay": 0.0}],
        each in the model's order, without parameters that require no gradient.

    Raises:
        TypeError: model is not a module, or weight_decay is not a real number.
        ValueError: weight_decay is out of range, or FullyShardedDataParallel has flattened the
            parameters, which then lack their dimensions.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(must("model", "be a torch.nn.Module", type_of(model)))
    decay = real_or_none("weight_decay", weight_decay)
    if decay is None or not 0 <= decay < math.inf:
        raise ValueError(must("weight_decay", "be finite and at least 0", value_of(weight_decay)))
    named: set[int] = set()
    for module in model.modules():
        names = getattr(module, "no_weight_decay", None)
        if callable(names):
            own = dict(module.named_parameters(remove_duplicate=False))
            named.update(id(own[name]) for name in names() if name in own)
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        if getattr(p, "_fsdp_flattened", False):
            raise ValueError(
                must("model", "have parameters of their own shapes, as with fully_shard", name)
                + ", which FullyShardedDataParallel has flattened"
            )
        if not p.requires_grad:
            continue
        exempt = p.dim() < 2 or id(p) in named or getattr(p, "_no_weight_decay", False)
        (undecayed if exempt else decayed).append(p)
    return [
        {"params": decayed, "weight_decay": decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
