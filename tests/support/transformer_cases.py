"""Helpers that the tests of transformers' models share: the families, made small and random, and
the comparison of a model's results.

A model's exact results come from a copy in float64 whose layers run the recurrence of
`gdn_triton.reference`. The error of ours must be within the budget of helpers.py, in which the
model on transformers' own torch functions is the independent computation at the same precision.
"""

import contextlib
import copy
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers import BUDGET_RMS, BUDGET_WORST, FP64, assert_within_budget
from narrow import Arithmetic
from torch import Tensor

from gdn_triton import reference
from gdn_triton.integrations import transformers as integration

transformers = pytest.importorskip(
    "transformers", minversion="4.57", reason="transformers 4.57 or newer is not installed"
)

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
SEED = 5
VOCABULARY = 97
LAYERS = ["linear_attention", "linear_attention", "full_attention"]
LINEAR = LAYERS.count("linear_attention")
TWENTY_TWO_BITS = "the kernels' products keep 22 bits on a GPU and torch's 24: see the bf16 case"
TERMS = 8  # a gradient is a sum of terms that cancel, each with a rounding of its own
# The functions that run in a modeling file, in the order of the places.
OPS = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]
if VERSION >= (5, 15):
    OPS += ["causal_conv1d", "causal_conv1d_update"]
if VERSION >= (5, 17):
    # Versions before write the norm's method otherwise, which then stays theirs.
    OPS += ["rms_norm_gated"]
FUNCTIONS = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
ATTRIBUTES = ("chunk_gated_delta_rule", "recurrent_gated_delta_rule")


@dataclass(frozen=True)
class Family:
    """A modeling file, one of its models, and what its configuration has of its own."""

    name: str
    model: str
    config: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def modeling(self) -> Any:
        return importlib.import_module(f"transformers.models.{self.name}.modeling_{self.name}")

    def make(self, dtype: torch.dtype, device: str, experts_per_token: int = 2) -> Any:
        """Two value heads for each key head, K != V, a ragged vocabulary."""
        config = getattr(transformers, self.config)(
            vocab_size=VOCABULARY,
            hidden_size=48,
            num_hidden_layers=len(LAYERS),
            layer_types=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=24,
            max_position_embeddings=512,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=None,
            **{
                **self.options,
                **(
                    {}
                    if "num_experts" not in self.options
                    else {"num_experts_per_tok": experts_per_token}
                ),
            },
        )
        # The grouped product of the experts has no float64.
        config._experts_implementation = "eager"
        torch.manual_seed(SEED)
        return getattr(self.modeling, self.model)(config).to(device, dtype).eval()


EXPERTS = 4
MIXTURE = {
    "num_experts": EXPERTS,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "head_dim": 16,
}
QWEN3_NEXT = Family("qwen3_next", "Qwen3NextForCausalLM", "Qwen3NextConfig", MIXTURE)


def exact_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    o, final_state = reference.recurrent_gated_delta_rule(
        query,
        key,
        value,
        g,
        beta,
        initial_state=initial_state,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
    )
    return o, final_state if output_final_state else None


@contextlib.contextmanager
def exact(model: Any) -> Iterator[Any]:
    """The model in float64, on the recurrence."""
    model = copy.deepcopy(model).to(FP64)
    module = sys.modules[type(model).__module__]
    with pytest.MonkeyPatch.context() as patch:
        for layer in model.modules():
            for name in ATTRIBUTES:
                if name in vars(layer):
                    patch.setitem(vars(layer), name, exact_rule)
        for name in FUNCTIONS:
            patch.setattr(module, name, exact_rule)
        yield model


@contextlib.contextmanager
def ours(model: Any) -> Iterator[Any]:
    status = integration.enable()
    name = type(model).__module__
    used = [place.op for place in status.places if place.name.startswith(f"{name}.")]
    assert set(used) == set(OPS)
    yield model
    integration.disable()


@contextlib.contextmanager
def theirs(model: Any) -> Iterator[Any]:
    assert not integration.status().enabled
    yield model


Result = dict[str, Tensor]


def compare(model: Any, compute: Callable[[Any], Result], device: str, units: float) -> None:
    """All results of `compute`, ours by the budget, whose unit is `units` roundoffs of the model's
    arithmetic."""
    with exact(model) as it:
        right = compute(it)
    with theirs(model) as it:
        narrow = compute(it)
    with ours(model) as it:
        got = compute(it)
    assert right.keys() == narrow.keys() == got.keys()
    dtype = next(model.parameters()).dtype
    unit = units * Arithmetic(dtype, device).unit
    for name in right:
        # Else the exact model is not this model. They differ by roundings only, though by many
        # where the torch functions' terms cancel, as in the gradients of A_log and dt_bias.
        size, distance = right[name].norm(), (narrow[name].double() - right[name]).norm()
        assert distance <= 0.3 * size, f"{name}: {distance:.3e} from {size:.3e}"
        # The root mean square of a few numbers is as random as their maximum.
        luck = BUDGET_WORST / BUDGET_RMS if right[name].numel() < 64 else 1.0
        allowed = right[name] + luck * (narrow[name].double() - right[name])
        assert_within_budget(
            name, got[name], right[name], allowed, dtype=got[name].dtype, unit=unit
        )


def tokens(B: int, T: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(1, VOCABULARY, (B, T), generator=generator).to(device)


def cache_name(model: Any) -> str:
    """The argument for a model's cache, and the field of its result, by the version."""
    arguments = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in arguments else "past_key_values"


def prefill_and_decode(ids: Tensor, steps: int) -> Callable[[Any], Result]:
    """The logits of a prefill, of tokens one by one from its cache, and of a few at once."""

    @torch.no_grad()
    def compute(model: Any) -> Result:
        first = ids.shape[1] - steps - 3
        out = model(ids[:, :first], use_cache=True)
        name = cache_name(model)
        prefill, cached = out.logits, {name: getattr(out, name), "use_cache": True}
        decoded = []
        for t in range(first, first + steps):
            out = model(ids[:, t : t + 1], **cached)
            decoded.append(out.logits)
        results = {"prefill": prefill, "decode": torch.cat(decoded, 1)}
        if VERSION >= (5, 10):  # the layer used to start anew, whatever the cache held
            results["more"] = model(ids[:, first + steps :], **cached).logits
        return results

    return compute


def gradients(ids: Tensor) -> Callable[[Any], Result]:
    def compute(model: Any) -> Result:
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}

    return compute
