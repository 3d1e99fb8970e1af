"""Finds kernels whose sums have an order that depends on the alignment of a call.

    python tests/support/sum_layouts.py

The compiler chooses the register layout of a tile by what it knows of alignment, and the layout
fixes the order of a sum or a scan over the tile. The sequences of a padded call begin at aligned
addresses if they have a multiple of 16 tokens, and those of a packed call may begin anywhere. Each
kernel of the chunked op is compiled for Hopper in both kinds of calls, with both kinds of numbers
of tokens. Exits with 1 and a list of the kernels whose sums of floats have several layouts. The
program needs no GPU, and must not run under TRITON_INTERPRET.
"""

import os
import re
import sys
from collections import defaultdict
from pathlib import Path

import torch

if __name__ == "__main__":
    # The file is run by its path, so the package is found next to this folder, installed or not.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from target_calls import BF16, Shape, make_call, run_backward
from target_code import compile_only
from triton.backends.compiler import GPUTarget

# Two value heads for each key head, and the sizes of most models.
SHAPE = Shape(128, 128, BF16, HV=8, full=False)
# A multiple of 16, and another number.
TOKENS = (64, 63)


def layouts_of_sums(ttgir: str) -> list[str]:
    """The layouts of the operands of all sums and scans of floats, in the kernel's order."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    found = []
    for operands in re.findall(r"^\s*}\) : \((tensor.*)\) -> ", ttgir, re.MULTILINE):
        for sizes, name in re.findall(r"tensor<([\dx]+)xf32, (#\w+)>", operands):
            found.append(f"{sizes} {layouts.get(name, name)}")
    return found


def main() -> int:
    from gdn_triton.chunk.triton import forward as chunk_fwd

    assert os.environ.get("TRITON_INTERPRET", "0") == "0", "nothing compiles in the interpreter"
    seen: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    with compile_only(GPUTarget("cuda", 90, 32)) as compiled:
        for T in TOKENS:
            for packed in (True, False):
                compiled.clear()
                cu_seqlens = torch.tensor([0, T], dtype=torch.int32) if packed else None
                problem, x = make_call(1, T, SHAPE.HV // 2, SHAPE, cu_seqlens)
                chunk_fwd.forward_by_steps(problem, x)
                chunk_fwd.forward_fused(problem, x)
                run_backward(problem, x)
                for one in compiled:
                    sums = "\n    ".join(layouts_of_sums(one.kernel.asm["ttgir"]))
                    call = f"{T} tokens, {'packed' if packed else 'padded'}"
                    if call not in seen[one.name][sums]:
                        seen[one.name][sums].append(call)
    wrong = {name: sums for name, sums in seen.items() if len(sums) > 1}
    for name, sums in wrong.items():
        for layouts, calls in sums.items():
            print(f"WRONG {name}: {'; '.join(calls)}:\n    {layouts}")
    print(f"{len(seen)} kernels compiled, {len(wrong)} have sums of several orders")
    return 1 if wrong or not seen else 0


if __name__ == "__main__":
    sys.exit(main())
