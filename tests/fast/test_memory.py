"""Which memory the CUDA library reads and writes on a Hopper GPU: nothing beside its outputs, and
all of very long or very many sequences; compute-sanitizer watches some calls."""

import shutil
import sys
from typing import Any

import pytest
import torch
from fast_cases import LESS, OPTIONS, PADDED, RAGGED, ROOT, gpu, output, sized
from fast_parity import run
from helpers import BF16, Case, same_bits
from parity_calls import make_call
from torch import Tensor

import gdn_triton
from gdn_triton.chunk.cuda import calls

PARITY = ROOT / "tests" / "support" / "fast_parity.py"


@gpu
@pytest.mark.parametrize(
    "case", [PADDED, RAGGED, *(sized(RAGGED, *s) for s in LESS)], ids=lambda case: case.name
)
def test_writes_nothing_but_its_outputs(
    case: Case, cuda: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither an input, nor a byte before or after what it is given to write to."""
    margin, guarded, empty = 4096, [], torch.empty

    def inside(*shape: Any, **kwargs: Any) -> Tensor:
        x = empty(*shape, **kwargs)
        around = torch.full((x.numel() + 2 * margin,), 7.0, dtype=x.dtype, device=x.device)
        guarded.append(around)
        return around[margin:-margin].view(x.shape)

    monkeypatch.setattr(calls.torch, "empty", inside)
    call = make_call(case, BF16, cuda, OPTIONS["all"])
    held = [
        *call.x.around,
        *(y for y in (call.A_log, call.dt_bias, call.x.cu_seqlens) if y is not None),
    ]
    before = [y.clone() for y in held]
    run("cuda", call)
    assert len(guarded) == 3
    for around in guarded:
        assert (around[:margin] == 7).all() and (around[-margin:] == 7).all()
    assert all(same_bits(a, b) for a, b in zip(before, held, strict=True))


@gpu
def test_many_sequences(cuda: str) -> None:
    """70,000 of one token: more than a second grid dimension takes."""
    N, generator = 70_000, torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, N, 1, 128, generator=generator).to(cuda, BF16) for _ in range(3))
    beta = torch.rand(1, N, 1, generator=generator).to(cuda)
    cu_seqlens = torch.arange(N + 1, device=cuda)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GDN_BACKEND", "cuda")
        o, _ = gdn_triton.chunk_gated_delta_rule(
            q, k, v, -beta, beta, scale=1.0, cu_seqlens=cu_seqlens
        )
    exact = beta.double()[..., None] * (q.double() * k.double()).sum(-1, keepdim=True) * v.double()
    # Three roundings to bf16 of factors of the result, and one of the result.
    assert ((o.double() - exact).abs() <= 2.0**-6 * exact.abs() + 1e-6).all()


@gpu
def test_offsets_past_32_bits(cuda: str, batch_invariant: None) -> None:
    """A sequence at elements past 2^32 has the bits that it has at 0."""
    HV, before, length = 32, 2**20 + 64, 200
    T = before + length + 70
    generator = torch.Generator(cuda).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=BF16, device=cuda).normal_(generator=generator)

    q, k, v = normal(1, T, 1, 128), normal(1, T, 1, 128), normal(1, T, HV, 128)
    g = -torch.rand(1, T, HV, device=cuda, generator=generator)
    beta = torch.rand(1, T, HV, device=cuda, generator=generator)
    cu_seqlens = torch.tensor([0, before, before + length], device=cuda)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GDN_BACKEND", "cuda")
        o, state = gdn_triton.chunk_gated_delta_rule(
            q, k, v, g, beta, cu_seqlens=cu_seqlens, **options
        )
        part = slice(before, before + length)
        alone = gdn_triton.chunk_gated_delta_rule(
            *(x[:, part].clone() for x in (q, k, v, g, beta)), **options
        )
    assert same_bits(o[:, part], alone[0]) and same_bits(state[1:], alone[1])
    assert (o[:, before + length :] == 0).all()


@gpu
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_sanitizer(tool: str, cuda: str) -> None:
    """Random small cases under compute-sanitizer; `fast_parity` says how to run more."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("there is no compute-sanitizer on the PATH")
    report = output(
        *(
            sanitizer,
            "--tool",
            tool,
            "--kernel-name",
            "kernel_substring=gdn",
            "--error-exitcode",
            "1",
        ),
        *(sys.executable, PARITY, "--count", "3", "--small", "--quiet"),
        # Each tensor in an allocation of its own, so that a read past its end is one.
        PYTORCH_NO_CUDA_MEMORY_CACHING="1",
        PYTHONPATH=str(ROOT),
    )
    assert "3 cases of 3, 0 failed" in report
