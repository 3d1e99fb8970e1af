"""Gradients of calls that the CUDA library's forward serves, by whichever backward, eager and
compiled."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fast_cases import DTYPES, OPTIONS, PADDED, RAGGED, SEGMENTS, Operator, gpu, same, sized
from fast_parity import requested, run
from helpers import BF16, FP16, Case, same_bits
from parity_calls import Call, Options, make_call
from torch import Tensor

import gdn_triton
from gdn_triton import fast
from gdn_triton.chunk.cuda import calls, support
from gdn_triton.fast.architectures import ARCHITECTURES


def gradients(
    name: str, call: Call, by: Callable[..., Any] = gdn_triton.chunk_gated_delta_rule
) -> list[Tensor]:
    """o, the final state, and the gradient of each float input of one backend, for random ones of
    both outputs."""
    tensors = {n: getattr(call.x, n) for n in ("q", "k", "v", "g", "beta", "initial_state")}
    tensors |= {n: x for n in ("A_log", "dt_bias") if (x := getattr(call, n)) is not None}
    leaves = {n: x.detach().clone().requires_grad_() for n, x in tensors.items()}
    with requested(name):
        o, state = by(
            **leaves,
            output_final_state=True,
            use_qk_l2norm_in_kernel=call.options.l2norm,
            use_beta_sigmoid_in_kernel=call.options.sigmoid,
            use_gate_in_kernel=call.options.gate,
            cu_seqlens=call.x.cu_seqlens,
        )
        generator = torch.Generator().manual_seed(7)
        above = [torch.randn(y.shape, generator=generator).to(y) for y in (o, state)]
        found = torch.autograd.grad([o, state], list(leaves.values()), above)
    return [o.detach(), state.detach(), *found]


class Sevens(Operator):
    """Sevens for o and eights for the final state: no other forward has those."""

    def __call__(self, *arguments: Any) -> None:
        super().__call__(*arguments)
        self.calls[-1]["o"].fill_(7)
        self.calls[-1]["final_state"].fill_(8)


@pytest.fixture
def sevens(operator: Operator, monkeypatch: pytest.MonkeyPatch, device: str) -> Sevens:
    """The library's operator, by decree there and able."""
    pytest.importorskip("triton", reason="Triton is not installed")
    noted = Sevens()
    monkeypatch.setattr(calls, "library_operator", noted.named)
    monkeypatch.setattr(support, "supports", lambda problem: None)
    monkeypatch.setattr(support, "walks_support", lambda problem: "Not here.")
    monkeypatch.setattr(fast, "architecture_on", lambda device: ARCHITECTURES[9, 0])
    return noted


TRAINED = Case("trained", "", lengths=(70, 0, 5), orphans=3, K=136, V=24, chunk_size=64)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_librarys_forward_with_tritons_gradients(
    compiled: bool, sevens: Sevens, device: str
) -> None:
    call = make_call(TRAINED, FP16, device, Options(l2norm=True, gate=True, bias=True))
    op: Callable[..., Any] = gdn_triton.chunk_gated_delta_rule
    by = torch.compile(op, fullgraph=True, backend="aot_eager") if compiled else op
    (o, state, *found), (_, _, *expected) = (gradients(n, call, by) for n in ("cuda", "triton"))
    assert (o == 7).all() and (state == 8).all() and len(sevens.calls) == 1
    assert len(found) == 8
    for got, want in zip(found, expected, strict=True):
        assert want.count_nonzero() > 0 and same_bits(got, want)


def test_no_gradient_no_triton(sevens: Sevens, device: str, monkeypatch: Any) -> None:
    """A forward alone imports no kernel of Triton's."""
    # A choice keeps the kernels that it has loaded, and a package the modules that it has imported.
    monkeypatch.setattr("gdn_triton._host.backends._choices", {})
    for name in ("autograd", "backward"):
        monkeypatch.setitem(sys.modules, f"gdn_triton.chunk.triton.{name}", None)
        monkeypatch.delattr(f"gdn_triton.chunk.triton.{name}", raising=False)
    call = make_call(TRAINED, FP16, device, Options())
    o, _ = run("cuda", call)
    assert (o == 7).all()
    with pytest.raises(ImportError):
        gradients("cuda", call)


def test_a_second_derivative_is_an_error(sevens: Sevens, device: str) -> None:
    x = make_call(TRAINED, FP16, device, Options()).x
    v = x.v.detach().clone().requires_grad_()
    with requested("cuda"):
        o, _ = gdn_triton.chunk_gated_delta_rule(
            *(x.q, x.k, v, x.g, x.beta.requires_grad_()),
            cu_seqlens=x.cu_seqlens,
            output_final_state=True,
        )
        (dv,) = torch.autograd.grad(o.float().square().sum(), v, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative in the Triton backend, nor in"):
        torch.autograd.grad(dv.sum(), x.beta)


@gpu
def test_compiled(cuda: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op is opaque to torch.compile: the same kernel, the same bits."""
    monkeypatch.setenv("GDN_BACKEND", "cuda")
    x = make_call(RAGGED, BF16, cuda, Options()).x

    def layer(*tensors: Tensor) -> tuple[Tensor, Tensor | None]:
        return gdn_triton.chunk_gated_delta_rule(
            *tensors, cu_seqlens=x.cu_seqlens, output_final_state=True
        )

    compiled = torch.compile(layer, fullgraph=True)(*x.tensors)
    assert same(layer(*x.tensors), compiled)


@gpu
@DTYPES
@pytest.mark.parametrize("options", [Options(), OPTIONS["layer"]], ids=["plain", "layer"])
@pytest.mark.parametrize(
    "case", [PADDED, RAGGED, SEGMENTS, sized(RAGGED, 96, 192)], ids=lambda case: case.name
)
def test_trained(case: Case, options: Options, dtype: torch.dtype, cuda: str) -> None:
    """The forward has its own bits, with gradients too, and the gradients have the same ones every
    time; compiled too."""
    call = make_call(case, dtype, cuda, options)
    expected = [*run("cuda", call), *gradients("cuda", call)[2:]]
    torch.compiler.reset()  # a function has a limit of variants, for all cases of a process
    op = torch.compile(gdn_triton.chunk_gated_delta_rule, fullgraph=True)
    for by in (gdn_triton.chunk_gated_delta_rule, op):
        for got, want in zip(gradients("cuda", call, by), expected, strict=True):
            assert same_bits(got, want)
