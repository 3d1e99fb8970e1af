"""Tensors that are not strided, and options that have no hash: refused by name, whether a call like
it has been accepted before or not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool_cases import OPS, Op, copied, tensors_of
from torch import Tensor

import gdn_triton
from gdn_triton.layers import GatedDeltaNet


def make_norm() -> dict[str, Any]:
    return {"x": torch.randn(3, 2, 8), "gate": torch.randn(3, 2, 8), "weight": torch.randn(8)}


def make_layer_call() -> dict[str, Any]:
    return {"hidden_states": torch.randn(2, 3, 8), "attention_mask": torch.ones(2, 3)}


LAYER = GatedDeltaNet(hidden_size=8, head_dim=4, num_heads=1)
CALLS = {
    **OPS,
    "norm": Op(gdn_triton.rms_norm_gated, make_norm),
    "layer": Op(LAYER, make_layer_call),
    "explain": Op(gdn_triton.explain, OPS["chunk"].make),
}


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "reference")


def compressed(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], -1).to_sparse_csr()


# How a tensor of each layout is made, and what an error says that came.
LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "coo": (lambda x: x.to_sparse(), "one of layout torch.sparse_coo"),
    "csr": (compressed, "one of layout torch.sparse_csr"),
    "nested": (lambda x: torch.nested.nested_tensor([x, x]), "a nested one"),
    "jagged": (
        lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged),
        "a nested one",
    ),
    "mkldnn": (lambda x: x.float().to_mkldnn(), "one of layout torch._mkldnn"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CALLS)
def test_layouts(name: str, layout: str) -> None:
    op, (make, words) = CALLS[name], LAYOUTS[layout]
    good = op.make()
    for _ in ("before a call", "after one"):
        for given in tensors_of(good):
            bad = {**copied(good), given: make(good[given])}
            with pytest.raises(
                ValueError, match=rf"^{given} must be a strided tensor, got {words}$"
            ):
                op.call(**bad)
        op.call(**copied(good))


def test_a_sparse_tensor_with_the_strides_of_a_dense_one() -> None:
    """A COO tensor has the strides 0, as one number that is repeated."""
    x = OPS["mixed step"].make()
    x["beta"] = torch.ones(()).expand(x["beta"].shape)
    gdn_triton.recurrent_step(**x)
    sparse = torch.ones(x["beta"].shape).to_sparse()
    assert sparse.stride() == x["beta"].stride()
    before = copied(x)
    with pytest.raises(ValueError, match="beta must be a strided tensor"):
        gdn_triton.recurrent_step(**{**x, "beta": sparse})
    assert all(torch.equal(x[name], before[name]) for name in ("state", "out"))


@pytest.mark.parametrize("name", ["sequences", "step", "mixed step", "chunk", "prefill"])
@pytest.mark.parametrize("bad", [[1], {1: 2}, {3}], ids=["list", "dict", "set"])
def test_options_without_a_hash(name: str, bad: Any) -> None:
    """By validation's sentence, and with no error of the search for it in between."""
    op = OPS[name]
    options = {"scale": "scale must be a real number or None", "state_v_first": "state_v_first mu"}
    if name in ("step", "mixed step", "prefill"):
        options["skip"] = "skip must be one of negative, non_positive"
    for option, words in options.items():
        with pytest.raises((TypeError, ValueError), match=words) as caught:
            op.call(**{**op.make(), option: bad})
        assert caught.value.__cause__ is None and caught.value.__suppress_context__ == (
            name in ("sequences", "step", "mixed step")
        )


def test_other_options_without_a_hash() -> None:
    with pytest.raises(ValueError, match="activation must be 'silu' or 'sigmoid'"):
        gdn_triton.rms_norm_gated(**make_norm(), activation=["silu"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="skip must be one of negative, non_positive"):
        LAYER.make_cache(2, skip=["negative"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="scale must be a real number or None, got a nested tensor"):
        x = OPS["chunk"].make()
        gdn_triton.chunk_gated_delta_rule(**x, scale=torch.nested.nested_tensor([x["q"]]))
