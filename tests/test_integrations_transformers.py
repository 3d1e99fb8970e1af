"""Models of transformers, made small and random, on this package's ops.

A model's exact results come from a copy in float64 whose layers run the recurrence of
`gdn_triton.reference`. Ours must be as near to them as the budget of helpers.py says, with the
model on transformers' own torch functions as the independent computation at the same precision.
"""

import contextlib
import copy
import importlib
import importlib.machinery
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers import (
    BUDGET_RMS,
    BUDGET_WORST,
    DTYPES,
    FP32,
    FP64,
    Arithmetic,
    assert_within_budget,
)
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
# What runs in a modeling file, in the order of the places.
OPS = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]
if VERSION >= (5, 15):
    OPS += ["causal_conv1d", "causal_conv1d_update"]
if VERSION >= (5, 23):
    # Of versions before, the text of the norm is not known.
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
FAMILIES = [
    QWEN3_NEXT,
    Family(
        "qwen3_5",
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextConfig",
        {"intermediate_size": 64, "head_dim": 16},
    ),
    Family("qwen3_5_moe", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", MIXTURE),
    Family("olmo_hybrid", "OlmoHybridForCausalLM", "OlmoHybridConfig", {"intermediate_size": 64}),
]
each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def available(family: Family) -> Any:
    """The family's modeling module, or a skip."""
    if not hasattr(transformers, family.config):
        pytest.skip(f"transformers {transformers.__version__} has no {family.name}")
    module = family.modeling
    if family.name == "olmo_hybrid" and not hasattr(module, "causal_conv1d_fn"):
        pytest.skip("before 5.15 OlmoHybrid needs the convolution of FLA")
    return module


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    """Ends disabled; and on one thread, since a second costs such small products more than it
    gives, above all beside other processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    integration.disable()


@pytest.fixture
def quick(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what is called with what, where the interpreter would take minutes."""
    monkeypatch.setenv("GDN_BACKEND", "reference" if device == "cpu" else "triton")


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
        # The root mean square of a few numbers is as much luck as their worst.
        luck = BUDGET_WORST / BUDGET_RMS if right[name].numel() < 64 else 1.0
        allowed = right[name] + luck * (narrow[name].double() - right[name])
        assert_within_budget(
            name, got[name], right[name], allowed, dtype=got[name].dtype, unit=unit
        )


def tokens(B: int, T: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(1, VOCABULARY, (B, T), generator=generator).to(device)


def prefill_and_decode(ids: Tensor, steps: int) -> Callable[[Any], Result]:
    """The logits of a prefill, of tokens one by one from its cache, and of a few at once."""

    @torch.no_grad()
    def compute(model: Any) -> Result:
        first = ids.shape[1] - steps - 3
        out = model(ids[:, :first], use_cache=True)
        prefill, cache = out.logits, out.past_key_values
        decoded = []
        for t in range(first, first + steps):
            out = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True)
            decoded.append(out.logits)
        results = {"prefill": prefill, "decode": torch.cat(decoded, 1)}
        if VERSION >= (5, 10):  # the layer used to start anew, whatever the cache held
            results["more"] = model(
                ids[:, first + steps :], past_key_values=cache, use_cache=True
            ).logits
        return results

    return compute


# ---------------------------------------------------------------------------------- Qwen3-Next

# Nobody's models are in float16, and the interpreter is slow.
model_dtypes = pytest.mark.parametrize("dtype", [case for case in DTYPES if case.id != "fp16"])


@model_dtypes
def test_logits(dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill, over more than one chunk, and cached decoding, on the kernels."""
    monkeypatch.setenv("GDN_BACKEND", "triton")
    # A choice of experts that flips with a rounding is no error of ours: 16 bits take all of them.
    model = QWEN3_NEXT.make(dtype, device, 2 if dtype == FP32 else EXPERTS)
    compare(model, prefill_and_decode(tokens(1, 71, device), 3), device, units=LINEAR)


def gradients(ids: Tensor) -> Callable[[Any], Result]:
    def compute(model: Any) -> Result:
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}

    return compute


@model_dtypes
def test_training_step(dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of every parameter, on the kernels."""
    if dtype == FP32 and device != "cpu":
        pytest.skip(TWENTY_TWO_BITS)
    monkeypatch.setenv("GDN_BACKEND", "triton")
    model = QWEN3_NEXT.make(dtype, device, 2 if dtype == FP32 else EXPERTS)
    compare(model, gradients(tokens(1, 66, device)), device, units=TERMS * LINEAR)


@pytest.mark.usefixtures("quick")
def test_left_padding(device: str) -> None:
    """Rows of 40 and 23 tokens, padded on the left: the logits, and those of each row alone."""
    ids = tokens(2, 40, device)
    mask = torch.ones_like(ids)
    mask[1, :17] = 0
    ids = ids * mask
    model = QWEN3_NEXT.make(FP32, device)

    @torch.no_grad()
    def compute(model: Any) -> Result:
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        return {"full row": logits[0], "padded row": logits[1, 17:]}

    compare(model, compute, device, units=LINEAR)
    with ours(model), torch.no_grad():
        alone = model(ids[1:, 17:], use_cache=False).logits[0]
        torch.testing.assert_close(compute(model)["padded row"], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left-padded"])
def test_generate(padded: bool, device: str) -> None:
    """Greedy tokens, and the scores that they were chosen by."""
    ids = tokens(2, 20, device)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :9] = 0
    model = QWEN3_NEXT.make(FP32, device)
    options = {"max_new_tokens": 12, "do_sample": False, "output_scores": True}
    options |= {"return_dict_in_generate": True, "attention_mask": mask}
    with theirs(model):
        expected = model.generate(ids * mask, **options)
    with ours(model):
        got = model.generate(ids * mask, **options)
    assert got.sequences.shape == (2, 32)
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(
        torch.stack(got.scores), torch.stack(expected.scores), rtol=1e-4, atol=1e-5
    )
    with ours(model):
        beams = model.generate(ids * mask, **{**options, "num_beams": 3, "max_new_tokens": 4})
    with theirs(model):
        expected = model.generate(ids * mask, **{**options, "num_beams": 3, "max_new_tokens": 4})
    assert torch.equal(beams.sequences, expected.sequences)


@pytest.mark.usefixtures("quick")
def test_dtype_of_the_cache(device: str) -> None:
    """The cached states are float32 in a 16-bit model, as they are on transformers' functions."""
    model = QWEN3_NEXT.make(torch.bfloat16, device)

    def states(model: Any) -> list[Tensor]:
        with torch.no_grad():
            cache = model(tokens(1, 9, device), use_cache=True).past_key_values
            found = [state_of(cache, layer) for layer in range(LINEAR)]
            model(tokens(1, 1, device), past_key_values=cache, use_cache=True)
            return [*found, *(state_of(cache, layer) for layer in range(LINEAR))]

    with theirs(model):
        expected = states(model)
    with ours(model):
        got = states(model)
    assert [x.dtype for x in got] == [x.dtype for x in expected] == [FP32] * 2 * LINEAR
    assert [x.shape for x in got] == [x.shape for x in expected]


def state_of(cache: Any, layer: int) -> Tensor:
    """A layer's recurrent state, where each version keeps it."""
    if hasattr(cache, "recurrent_states"):
        found = cache.recurrent_states[layer]
    else:
        found = cache.layers[layer].recurrent_states
    while not isinstance(found, Tensor):
        found = found[0]
    return found


def packed_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """What the package causal_conv1d computes: x [B, D, T], weight [D, W], seq_idx [B, T]."""
    T, W = x.shape[-1], weight.shape[-1]
    assert bias is None and activation == "silu"
    out = torch.zeros_like(x)
    for back in range(min(W, T)):
        term = weight[:, W - 1 - back, None] * x[..., : T - back]
        if seq_idx is not None:
            term = term * (seq_idx[:, None, back:] == seq_idx[:, None, : T - back])
        out[..., back:] += term
    return torch.nn.functional.silu(out)


@pytest.mark.usefixtures("quick")
def test_packed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sequences in one row: the logits of each alone; refused where they would be mixed."""
    if VERSION < (5, 15):
        pytest.skip("before 5.15 the layer hands on no bounds of sequences, or to FLA only")
    if importlib.util.find_spec("causal_conv1d") is not None:
        pytest.skip("the package causal_conv1d is installed")
    lengths = (11, 1, 17)
    ids = tokens(1, sum(lengths), device)
    offsets = torch.tensor([0, 11, 12, 29], dtype=torch.int32, device=device)
    numbers = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).to(device)
    packing = {
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None].to(device),
        "seq_idx": numbers[None].int(),
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "use_cache": False,
    }
    model = QWEN3_NEXT.make(FP32, device)
    with ours(model), torch.no_grad():
        # Ours, or, since 5.23, the model's own refusal, which comes first.
        with pytest.raises(ValueError, match="causal_conv1d"):
            model(ids, **packing)
        package = ModuleType("causal_conv1d")
        package.__spec__ = importlib.machinery.ModuleSpec("causal_conv1d", None)
        monkeypatch.setitem(sys.modules, "causal_conv1d", package)
        monkeypatch.setattr(QWEN3_NEXT.modeling, "causal_conv1d_fn", packed_conv1d)
        integration.disable()
        integration.enable()
        packed = model(ids, **packing).logits
        first = 0
        for length in lengths:
            alone = model(ids[:, first : first + length], use_cache=False).logits
            torch.testing.assert_close(
                packed[:, first : first + length], alone, rtol=1e-4, atol=1e-5
            )
            first += length


@pytest.mark.usefixtures("quick")
def test_compiled_layer(device: str) -> None:
    """No graph break in a layer, training or decoding."""
    model = QWEN3_NEXT.make(FP32, device)
    layer = next(x for x in model.modules() if type(x).__name__.endswith("GatedDeltaNet"))
    x = torch.randn(1, 9, model.config.hidden_size, device=device)
    with ours(model):
        torch.compiler.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), layer(x))
        torch.compiler.reset()


# -------------------------------------------------------------------------------- all families


@each_family
@pytest.mark.usefixtures("quick")
def test_families(family: Family, device: str) -> None:
    available(family)
    model = family.make(FP32, device)
    compare(model, prefill_and_decode(tokens(2, 24, device), 2), device, units=LINEAR)


@each_family
@pytest.mark.usefixtures("quick")
def test_training_step_of_families(family: Family, device: str) -> None:
    available(family)
    if device != "cpu":
        pytest.skip(TWENTY_TWO_BITS)
    model = family.make(FP32, device)
    compare(model, gradients(tokens(1, 20, device)), device, units=TERMS * LINEAR)


def test_no_model_is_missed() -> None:
    """Every modeling file of this transformers that names a gated delta rule: all ops are ours."""
    models = Path(transformers.__file__).parent / "models"
    files = [
        path
        for path in sorted(models.glob("*/modeling_*.py"))
        if "gated_delta_rule" in path.read_text(encoding="utf-8")
    ]
    assert files
    integration.enable()
    for path in files:
        importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
    found = integration.status().places
    for path in files:
        ops = [place.op for place in found if f".{path.stem}." in place.name]
        assert sorted(map(str, ops)) == sorted(OPS), path.stem


def test_in_a_fresh_process() -> None:
    """Enabled before transformers is imported: nothing of it is, and the model is ours."""
    from bare import run_python

    out = run_python(
        f"""
        import sys
        from gdn_triton.integrations.transformers import disable, enable, status
        assert enable().places == ()
        assert "transformers" not in sys.modules
        from transformers import Qwen3NextForCausalLM
        assert [place.op for place in status().places] == {OPS}
        print(disable())
        """
    )
    assert "is disabled in transformers" in out and out.count("not enabled") == len(OPS)


def test_dry_run_of_the_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    """One way, in a process of its own, at toy sizes on the CPU."""
    from benchmarks import transformers_model

    assert transformers_model.main(["--dry-run", "--ways", "gdn_triton", "--decode", "1"]) == 0
    out = capsys.readouterr().out
    assert "| prefill 9 tokens, ms | prefill 40 tokens, ms |" in out
    assert re.search(r"^\| gdn_triton( \| [0-9.]+){3} \| none at the same length \|$", out, re.M)
