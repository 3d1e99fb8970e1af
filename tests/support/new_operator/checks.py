"""`gdn_triton.scale_channels` against its specification, under a compiler, and its errors."""

import pytest
import torch
from helpers import FP16, FP32

from gdn_triton import explain_call, scale_channels
from gdn_triton.reference import scale as specification


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
def test_kernel(dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "triton")
    x, weight = torch.randn(2, 3, 20, device=device).to(dtype), torch.randn(20, device=device)
    assert explain_call(scale_channels, x, weight).chosen == "triton"
    assert torch.equal(scale_channels(x, weight), specification.scale_channels(x, weight))


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_compiled(backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", backend)
    x, weight = torch.randn(1, 5, 8, device=device), torch.randn(8, device=device)
    compiled = torch.compile(scale_channels, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weight), scale_channels(x, weight))
    monkeypatch.setenv("GDN_BACKEND", "auto")
    leaf = weight.clone().requires_grad_()
    (dweight,) = torch.autograd.grad(compiled(x, leaf).sum(), leaf)
    torch.testing.assert_close(dweight, x.sum((0, 1)))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": 1}, TypeError, "x must be a torch.Tensor, got int"),
        ({"x": torch.ones(1, 2, 0)}, ValueError, "x must have at least 1 channel in its last"),
        ({"weight": torch.ones(3)}, ValueError, r"weight must have shape \[D=2\], got shape \[3\]"),
        ({"weight": torch.ones(2).int()}, ValueError, "weight must be float16, .*, got torch.int"),
    ],
)
def test_errors(change: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        scale_channels(**({"x": torch.ones(1, 4, 2), "weight": torch.ones(2)} | change))


@pytest.mark.gpu("a CUDA graph")
def test_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "triton")
    x, weight = torch.ones(1, 2, 8, device="cuda"), torch.ones(8, device="cuda")
    scale_channels(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = scale_channels(x, weight)
    x += 1
    graph.replay()
    assert torch.equal(y, x)
