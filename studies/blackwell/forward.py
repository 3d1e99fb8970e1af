"""Launches the forward for compute capability 10.0 and checks it.

    python -m studies.blackwell.forward                                 on a GPU of that kind
    PYTHONPATH=.:tests/support python -m studies.blackwell.forward --compile    without one

The second command compiles the kernel and checks its machine code. README.md describes the kernel's
state.
"""

import argparse
import re
import sys
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gdn_triton._triton.tiles import FUSED
from gdn_triton.constants import LOG2_DECAY_FLOOR, RCP_LN2, SOFTPLUS_THRESHOLD
from gdn_triton.reference import chunk_gated_delta_rule as specification
from studies.blackwell.kernel import blackwell_fwd_kernel

CHUNK, DIM = 64, 128
SHARED_MEMORY = 227 * 1024
TENSOR_COLUMNS = 512
# The most bytes of stack. Most of these spilled registers hold addresses of the triangles role.
STACK = 256


def descriptor(x: Tensor) -> TensorDescriptor:
    """Returns a TMA descriptor of x [B, T, heads, 128] whose tiles are one chunk of one head."""
    rows = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, CHUNK, 1, DIM], rows)


def blackwell_fwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns o [B, T, HV, 128] and the final state [B, HV, 128, 128], fp32. q, k [B, T, H, 128]
    and v [B, T, HV, 128] are bfloat16, g and beta [B, T, HV] fp32, all contiguous."""
    B, T, H, _ = q.shape
    HV = v.shape[2]
    o = torch.empty_like(v)
    state = torch.empty(B, HV, DIM, DIM, dtype=torch.float32, device=v.device)
    blackwell_fwd_kernel[(B * HV,)](
        q_desc=descriptor(q),
        k_desc=descriptor(k),
        v_desc=descriptor(v),
        o_desc=descriptor(o),
        g=g,
        beta=beta,
        ht=state,
        scale=scale,
        T=T,
        H=H,
        HV=HV,
        RCP_LN2=RCP_LN2,
        FLOOR=LOG2_DECAY_FLOOR[torch.float32],
        THRESHOLD=SOFTPLUS_THRESHOLD,
        num_warps=4,
        **FUSED,
    )
    return o, state


def make_inputs(B: int, T: int, H: int, HV: int, decay: float, device: str) -> dict[str, Any]:
    """Returns random inputs. decay: the mean of -g."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    q, k = torch.nn.functional.normalize(normal(2, B, T, H, DIM), dim=-1).bfloat16()
    return {
        "q": q,
        "k": k,
        "v": normal(B, T, HV, DIM).bfloat16(),
        "g": -decay * normal(B, T, HV).square(),
        "beta": normal(B, T, HV).sigmoid(),
        "scale": DIM**-0.5,
    }


def compile_here() -> list[str]:
    """Compiles the kernel without a GPU and returns the faults of its machine code."""
    from target_code import compile_only, stack_and_registers
    from triton.backends.compiler import GPUTarget

    with compile_only(GPUTarget("cuda", 100, 32)) as kernels:
        blackwell_fwd(**make_inputs(1, 100, 1, 2, 0.1, "cpu"))
    (one,) = kernels
    asm, metadata = one.kernel.asm, one.kernel.metadata
    stack, registers = stack_and_registers(asm["cubin"])
    found = {
        name: len(re.findall(name, asm["ptx"]))
        for name in ("tcgen05.mma", "tcgen05.ld", "tcgen05.st", "cp.async.bulk.tensor")
    }
    print(found, f"shared {metadata.shared}, tensor memory {metadata.tmem_size},", end=" ")
    print(f"registers {registers}, stack {stack}")
    wrong = [f"no {name}" for name, count in found.items() if count == 0]
    if metadata.shared > SHARED_MEMORY:
        wrong.append(f"{metadata.shared} bytes of shared memory, of {SHARED_MEMORY}")
    if metadata.tmem_size > TENSOR_COLUMNS:
        wrong.append(f"{metadata.tmem_size} columns of tensor memory, of {TENSOR_COLUMNS}")
    if stack > STACK:
        wrong.append(f"{stack} bytes of stack, of {STACK}")
    return wrong


def check_here() -> list[str]:
    """Runs the kernel, prints its errors and a time, and returns the faults of its results."""
    wrong = []
    for B, T, H, HV, decay in ((1, 64, 1, 1, 0.01), (2, 1000, 2, 4, 0.01), (4, 8192, 16, 32, 1.0)):
        x = make_inputs(B, T, H, HV, decay, "cuda")
        o, state = blackwell_fwd(**x)
        exact = {n: y.double() if isinstance(y, Tensor) else y for n, y in x.items()}
        expected, expected_state = specification(**exact, output_final_state=True)[:2]
        errors = [
            float((y.double() - z).norm() / z.norm())
            for y, z in ((o, expected), (state, expected_state))
        ]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            blackwell_fwd(**x)
        end.record()
        torch.cuda.synchronize()
        line = f"{H}/{HV} {B}x{T}, decay {decay}: errors {errors[0]:.1e} {errors[1]:.1e}"
        print(f"{line}, {100 * start.elapsed_time(end):.0f} us")
        # The kernel for compute capability 9.0 has an error of 2.9e-3.
        if not max(errors) < 6e-3:
            wrong.append(line)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="The forward for compute capability 10.0.")
    parser.add_argument("--compile", action="store_true", help="for a GPU that is not there")
    wrong = compile_here() if parser.parse_args().compile else check_here()
    for text in wrong:
        print("WRONG", text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
