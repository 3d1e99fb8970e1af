"""Compiles every kernel of the package for a GPU that is not present, and checks the result.

    python tests/support/compile_targets.py cuda 90 [--all]

The package's own launch code runs on CPU tensors (target_calls.py), so each kernel gets exactly the
signature, the specialisation and the tile of a real call; Triton compiles and launches nothing
(target_code.py). The contents of the tensors are then meaningless. The checks are that every kernel
of the package was compiled; the stack (spills); shared memory; the matrix instructions; and the
sizes of the grids. Without --all it compiles the sample of the tests (target_calls.py): for Hopper
every kernel of three shapes, for another target the kernels with the widest tiles. With --all it
compiles every kernel of every shape, and steps from every pool. It needs no GPU, and must not run
under TRITON_INTERPRET. Exits with 1 and a list of the faults.
"""

import argparse
import importlib
import os
import pkgutil
import sys
from pathlib import Path

if __name__ == "__main__":
    # The file is run by its path, so the package is found next to this folder, installed or not.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from target_calls import (
    BF16,
    POOLS,
    SAMPLED_POOLS,
    SAMPLES,
    SHAPES,
    TESTED,
    WHOLE,
    Shape,
    run_conv,
    run_norm,
    run_package,
    run_post_conv,
    run_recurrent,
    run_sample,
    run_states,
    run_wide_grids,
)
from target_code import (
    Compiled,
    accesses_before_the_wait,
    compile_only,
    disassembled,
    narrow_strides,
    overlong_layouts,
    stack_and_registers,
    unwritten_uniform_registers,
)
from target_layers import run_layer_step
from target_rings import run_rings
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import gdn_triton

# Bytes of shared memory (LDS) that a block may have on the target.
SHARED_MEMORY = {
    ("cuda", 80): 163 * 1024,
    ("cuda", 90): 227 * 1024,
    ("cuda", 100): 227 * 1024,
    ("cuda", 120): 99 * 1024,
    ("cuda", 121): 99 * 1024,
    ("hip", "gfx942"): 64 * 1024,
    ("hip", "gfx950"): 160 * 1024,
}

# Instructions in the compiled code of a matrix product.
MATRIX_INSTRUCTION = {
    ("cuda", 80): ("ptx", "mma.sync"),
    ("cuda", 90): ("ptx", "wgmma.mma_async"),
    ("cuda", 100): ("ptx", "tcgen05.mma"),
    ("cuda", 120): ("ptx", "mma.sync"),
    ("cuda", 121): ("ptx", "mma.sync"),
    ("hip", "gfx942"): ("amdgcn", "v_mfma"),
    ("hip", "gfx950"): ("amdgcn", "v_mfma"),
}
# Kernels that must contain it where all inputs are bf16 and K = V = 128.
MATRIX_KERNELS = ("wy_fwd_kernel", "state_fwd_kernel", "output_fwd_kernel")
# The least copies of 16 bytes from global to shared memory in the code of a kernel for Hopper that
# copies its states so. Copies of 4 bytes, or loads into registers, take longer. int8 has copies of
# fewer bytes, and the form of bf16 states, which is a dependent launch, loads into registers.
LEAST_COPIES = {"window_fwd_kernel": 15}

# Bytes of stack (spilled registers) that a kernel may use on an NVIDIA target, over all shapes: by
# (architecture, bytes of an input), then kernel. A quarter above what was seen, in whole 64, as a
# compiler's versions differ by that. Where nothing is written: 0 on 90, whose tiles are chosen, and
# UNCHOSEN_STACK elsewhere.
UNCHOSEN_STACK = 64
STACK: dict[tuple[int, int], dict[str, int]] = {
    # Tiles are chosen here. Fewer registers than the code would like leave room for one more block
    # on a multiprocessor, which gains more than these spills cost.
    (90, 2): {
        "affine_fwd_kernel": 64,  # K = 256
        "wy_fwd_kernel": 192,
        "output_fwd_kernel": 192,
        "prepare_fwd_kernel": 256,
        "fused_fwd_kernel": 384,  # with checkpoints; 128 without
        "state_fwd_kernel": 64,
        "segment_starts_kernel": 64,
        "pairs_bwd_kernel": 384,
        "query_key_bwd_kernel": 384,
        "conv_bwd_kernel": 64,
        "window_fwd_kernel": 256,  # few states: 200 with Triton 3.9.0, 104 with 3.6.0
        "window_early_fwd_kernel": 64,  # many states
        "layer_window_kernel": 64,  # accepted drafts, key-first bf16 states
        "layer_tokens_kernel": 64,  # the same
    },
    # Four-byte operands hold twice the registers; accuracy comes first there, not speed.
    (90, 4): {
        "norm_bwd_kernel": 64,  # rows of 8192 channels
        "window_fwd_kernel": 64,  # 8 with Triton 3.6.0
        "affine_fwd_kernel": 1088,
        "affine_bwd_kernel": 3136,
        "wy_fwd_kernel": 448,
        "state_fwd_kernel": 768,
        "output_fwd_kernel": 64,
        "state_bwd_kernel": 3072,
        "pairs_bwd_kernel": 960,
        "query_key_bwd_kernel": 960,
    },
    # The tiles of 90 on another architecture: they must run, and must not fall off a cliff.
    (80, 2): {
        "affine_fwd_kernel": 256,
        "affine_bwd_kernel": 576,  # K = 256; 320 at 128
        "wy_fwd_kernel": 384,
        "output_fwd_kernel": 128,
        "prepare_fwd_kernel": 2112,  # K = 256; 640 at 128
        "fused_fwd_kernel": 704,
        "state_fwd_kernel": 256,  # with checkpoints; 128 without
        "state_bwd_kernel": 704,  # K = 256
        "pairs_bwd_kernel": 256,
        "query_key_bwd_kernel": 640,  # K = 256; 448 at 128
    },
    (80, 4): {
        "affine_fwd_kernel": 448,
        "affine_bwd_kernel": 1024,
        "wy_fwd_kernel": 576,
        "state_fwd_kernel": 192,
        "output_fwd_kernel": 704,
        "state_bwd_kernel": 2112,
        "pairs_bwd_kernel": 1024,
        "query_key_bwd_kernel": 896,
    },
    (100, 2): {
        "affine_bwd_kernel": 128,
        "wy_fwd_kernel": 384,
        "prepare_fwd_kernel": 704,
        "fused_fwd_kernel": 128,
        "pairs_bwd_kernel": 832,
        "state_bwd_kernel": 128,
        "query_key_bwd_kernel": 896,
    },
    (100, 4): {
        "affine_fwd_kernel": 832,
        "affine_bwd_kernel": 384,
        "wy_fwd_kernel": 384,
        "state_fwd_kernel": 384,
        "state_bwd_kernel": 1344,
        "pairs_bwd_kernel": 640,
        "query_key_bwd_kernel": 384,
    },
    (120, 2): {
        "prepare_fwd_kernel": 1024,
        "segment_maps_kernel": 128,  # 88 with Triton 3.6.0
        "pairs_bwd_kernel": 576,
        "query_key_bwd_kernel": 640,
    },
    (121, 2): {  # K = 256
        "prepare_fwd_kernel": 1856,
        "fused_fwd_kernel": 128,
        "state_bwd_kernel": 576,
        "pairs_bwd_kernel": 576,
        "query_key_bwd_kernel": 704,  # 528 with Triton 3.6.0
    },
}


def kernels_of_package() -> set[str]:
    """The names of all kernels that are launched (helpers that kernels inline end otherwise),
    except those in Gluon, which gluon_code.py compiles."""
    names = [
        info.name.split(".") for info in pkgutil.walk_packages(gdn_triton.__path__, "gdn_triton.")
    ]
    portable = [name for name in names if "triton" in name and "hopper" not in name]
    modules = [importlib.import_module(".".join(name)) for name in portable]
    return {
        name
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and name.endswith("_kernel")
    }


def judge(one: Compiled, shape: Shape, target: GPUTarget) -> tuple[str, list[str]]:
    """A line about a kernel, and its faults."""
    key = (target.backend, target.arch)
    wrong = []
    shared = one.kernel.metadata.shared
    line = f"{one.name:24} {shape!s:52} shared {shared:7}"
    if shared > SHARED_MEMORY[key]:
        wrong.append(f"{shared} bytes of shared memory, of {SHARED_MEMORY[key]}")
    if target.backend == "cuda":
        stack, registers = stack_and_registers(one.kernel.asm["cubin"])
        line += f" stack {stack:5} registers {registers:3}"
        least = 0 if target.arch == 90 else UNCHOSEN_STACK
        allowed = STACK[int(target.arch), shape.dtype.itemsize].get(one.name, least)
        if stack > allowed:
            wrong.append(f"{stack} bytes of stack, {allowed} allowed")
        if target.arch == 90:
            sass = disassembled(one.kernel.asm["cubin"])
            wrong += [f"unwritten register: {text}" for text in unwritten_uniform_registers(sass)]
            wrong += overlong_layouts(one.kernel.asm["ttgir"])
            if one.kernel.metadata.launch_pdl:
                wrong += [f"before the wait: {text}" for text in accesses_before_the_wait(sass)]
    wrong += narrow_strides(one.kernel.asm["ttir"])
    stage, instruction = MATRIX_INSTRUCTION[key]
    common = (shape.K, shape.V, shape.dtype) == (128, 128, BF16)
    if common and one.name in MATRIX_KERNELS and instruction not in one.kernel.asm[stage]:
        wrong.append(f"no {instruction}")
    is_int8 = "!tt.ptr<i8>" in one.kernel.asm["ttir"]
    common = common and target.arch == 90 and not is_int8
    if common and one.name in LEAST_COPIES and not one.kernel.metadata.launch_pdl:
        ptx = one.kernel.asm["ptx"]
        copies, narrow = ptx.count("cp.async.cg.shared"), ptx.count("cp.async.ca.shared")
        if copies < LEAST_COPIES[one.name] or narrow > 0:
            wrong.append(f"{copies} copies of 16 bytes to shared memory, and {narrow} of fewer")
    return line, [f"{one.name}, {shape}: {text}" for text in wrong]


def main(backend: str, arch: str, everything: bool) -> int:
    assert os.environ.get("TRITON_INTERPRET", "0") == "0", "nothing compiles in the interpreter"
    target = GPUTarget(
        backend, int(arch) if arch.isdigit() else arch, 64 if backend == "hip" else 32
    )
    wrong: list[str] = []
    names: set[str] = set()
    key = (backend, target.arch)
    whole = everything and key in WHOLE
    sample = None if whole else SAMPLES.get(key)
    pools = POOLS if everything else SAMPLED_POOLS
    with compile_only(target) as compiled:
        for shape in sample or (SHAPES if whole else TESTED):
            compiled.clear()
            if sample is not None:
                run_sample(shape)
                if backend == "hip":
                    # Products of float32 have another precision there.
                    run_recurrent(shape, pools)
            else:
                run_package(shape)
                run_post_conv(shape)
                run_norm(shape)
                run_conv(shape)
                run_layer_step(shape, pools)
                run_recurrent(shape, POOLS if shape is SHAPES[0] else pools)
                run_rings(shape)
            seen: set[int] = set()
            for one in compiled:
                names.add(one.name)
                if id(one.kernel) not in seen:
                    seen.add(id(one.kernel))
                    line, faults = judge(one, shape, target)
                    print(line, flush=True)
                    wrong += faults
        compiled.clear()
        if sample is None:
            run_states()
            run_wide_grids()
        for one in compiled:
            if one.grid[0] >= 2**31 or any(n > 65_535 for n in one.grid[1:]):
                wrong.append(f"{one.name}: grid {one.grid} passes the limits of a launch")
    missing = kernels_of_package() - names if sample is None else set()
    wrong += [f"{name}: never compiled" for name in sorted(missing)]
    for text in wrong:
        print("WRONG", text)
    print(f"{len(names)} kernels compiled for {backend} {arch}, {len(wrong)} faults")
    return 1 if wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("backend", choices=sorted({backend for backend, _ in SHARED_MEMORY}))
    parser.add_argument("arch", choices=[str(arch) for _, arch in SHARED_MEMORY])
    parser.add_argument("--all", action="store_true", help="every kernel of every shape")
    options = parser.parse_args()
    sys.exit(main(options.backend, options.arch, options.all))
