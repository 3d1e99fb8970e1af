"""Compiles the Gluon kernels for compute capability 9.0 without a GPU, and judges their code.

    python tests/support/gluon_code.py

With the installed Triton, of whose releases the package lists some (RELEASES of
gdn_triton/_host/gluon.py). The package's own launch code runs on CPU tensors, as
in compile_targets.py. Judged: that the assembler serialises no matrix product (its advisories C7500
to C7599), stack, its use in the state's loop, shared memory, that no matrix product reads a
register that nothing wrote, and that the memory of barriers holds nothing else. Exits with 1 and a
list of what is wrong.
"""

import itertools
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if __name__ == "__main__":
    # Run by its path: the package is beside this folder, installed or not.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gluon_gradients
import gluon_several
import gluon_window
import torch
from gluon_walks import chunk_table, make_given, walk_case, walks_of
from helpers import Case
from target_calls import BF16, Shape, make_call
from target_code import (
    accesses_before_the_wait,
    accesses_to_barriers,
    compile_only,
    disassembled,
    loads_in_flight,
    local_memory_around,
    narrow_strides,
    overlong_layouts,
    overwritten_operands,
    stack_and_registers,
    stale_uniform_registers,
    unwritten_uniform_registers,
)
from triton.backends.compiler import GPUTarget

from gdn_triton.chunk.triton.hopper.walks.launch import ONE, TWO, Plan
from gdn_triton.recurrent.triton.window_form import WindowForm

if TYPE_CHECKING:
    from gdn_triton.chunk.problem import Pool, Problem

FP16 = torch.float16
TARGET = GPUTarget("cuda", 90, 32)
# The product that updates a state of 64 columns and 128 channels, which no other loop has.
UPDATE = "HGMMA.64x128"
SHARED_MEMORY = 227 * 1024
# By whether sequences are packed: bytes of spilled registers, which are mostly addresses of the
# triangles' warps, and accesses to them in the loop of the state warps. Padded whole sequences have
# addresses for P' of every second chunk; the others have the places in the rings of buffers, too.
STACK = {False: 160, True: 288}
IN_LOOP = {False: 8, True: 24}
IN_LOOP_OF_SEGMENTS = 24
# The same with a pool: most are in the branch that stores a checkpoint.
IN_LOOP_WITH_POOL = 44
# By how much these limits, and those below, are higher with a release of Triton that copies
# operands in registers (COPIES of names.py).
MORE_WITH_COPIES = 120
# The arrivals at barriers while loads of shared memory are in flight, of blocks with several tiles:
# the barrier stands for the keys of the chunk before, and the loads are of this chunk's gates.
IN_FLIGHT_OF_TILES = 1
# The advisory that the assembler waits for a product once more.
ONE_MORE_WAIT = "(C7517)"
# Bytes of stack that a kernel with a window may use, by the dtype of the states, whether they are
# value-first, and the tokens; 0 for all others. Triton 3.8 and 3.9 spill 8 to 40 bytes here, in no
# loop. With 128 registers nothing is spilled, and 512 states took 5 percent longer on an H200.
WINDOW_STACK = {(torch.float32, True, 4): 64}
# The same for the kernel of several tokens. `SeveralForm.registers` says why it has few registers.
SEVERAL_STACK = 96
# The limits of the kernel of the gradients: bytes of stack, which are mostly addresses of the warps
# of dk, and instructions of 16 bytes, because the loops of all roles share the instruction
# cache.
GRADIENTS_STACK = 32
GRADIENTS_INSTRUCTIONS = 5400


@dataclass(frozen=True)
class Call:
    """N sequences of a shape, padded or, where the shape is `full`, packed and with every option.
    Many states have blocks with two states, few have blocks with one. segments: of so many chunks,
    or 0. pool: the states are in slots of a pool, with checkpoints. norm: of q and k, which calls
    with every option have anyway. key_first: with states [K, V] at both ends, and without norm."""

    shape: Shape
    N: int
    segments: int = 0
    pool: bool = False
    norm: bool = False
    key_first: bool = False


CALLS = [
    Call(Shape(128, 128, BF16, HV=32, full=False), N=4),
    Call(Shape(128, 128, BF16, HV=32, full=True), N=4),
    # More tiles than blocks.
    Call(Shape(128, 128, BF16, HV=32, full=True), N=48),
    Call(Shape(128, 128, BF16, HV=32, full=True), N=48, key_first=True),
    Call(Shape(128, 128, BF16, HV=32, full=False), N=48, key_first=True),
    Call(Shape(128, 128, BF16, HV=8, full=False), N=1),
    Call(Shape(128, 128, BF16, HV=8, full=True), N=2),
    Call(Shape(128, 128, FP16, HV=32, full=False), N=4),
    Call(Shape(128, 128, FP16, HV=32, full=True), N=4),
    Call(Shape(128, 128, FP16, HV=8, full=True), N=2),
    Call(Shape(128, 128, BF16, HV=32, full=False), N=4, norm=True),
    Call(Shape(64, 64, BF16, HV=64, full=False), N=2),
    Call(Shape(96, 72, BF16, HV=64, full=True), N=4),
    Call(Shape(128, 128, BF16, HV=32, full=False), N=4, segments=2),
    Call(Shape(128, 128, BF16, HV=32, full=True), N=4, segments=1),
    Call(Shape(128, 128, FP16, HV=32, full=True), N=4, segments=1),
    Call(Shape(128, 128, BF16, HV=32, full=True), N=4, pool=True),
    Call(Shape(256, 512, BF16, HV=8, full=False), N=4),
    Call(Shape(192, 256, BF16, HV=8, full=True), N=4),
    Call(Shape(256, 256, FP16, HV=8, full=False), N=4),
    Call(Shape(200, 72, FP16, HV=8, full=True), N=4),
    Call(Shape(256, 256, BF16, HV=8, full=True), N=4, pool=True),
]

# The walks of the backward in blocks of two states or of one. Their spills are addresses of the
# triangles' warps. By whether the sequences are packed or in segments: accesses in the loop.
WALKS = [
    (walk_case("of two", T=128, H=16, HV=32), Plan(TWO, TWO, together=False)),
    (walk_case("the same, packed", lengths=(70, 70), H=16, HV=32), Plan(TWO, TWO, together=False)),
    (walk_case("apart, of one", T=128, H=16, HV=32), Plan(ONE, ONE, together=False)),
    (walk_case("of one", T=128), Plan(ONE, ONE)),
    (walk_case("the same, packed", lengths=(70, 70)), Plan(ONE, ONE)),
    (walk_case("small", lengths=(70, 70), K=96, V=72), Plan(TWO, TWO, together=False)),
    (walk_case("least", T=128, K=64, V=64), Plan(ONE, ONE)),
    (walk_case("segments of two", T=200), Plan(TWO, TWO, segment=1)),
    (walk_case("the same, packed", lengths=(200, 70)), Plan(TWO, TWO, segment=1)),
    (walk_case("segments of one", T=200), Plan(ONE, ONE, segment=1)),
]
STACK_OF_WALKS = 128
IN_LOOP_OF_WALKS = {False: 4, True: 32}


def advisories(ptx: str) -> list[str]:
    """The assembler's warnings about products that it cannot run as the code asks."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", source, "-o", f"{folder}/cubin"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return re.findall(r"\(C75\d\d\).*", done.stdout + done.stderr)


def pool_of(call: Call, problem: "Problem") -> "Pool":
    from gdn_triton.chunk.problem import Pool

    p = problem
    slots = torch.zeros(call.N, dtype=torch.int32)
    states = torch.zeros(call.N, p.HV, p.K, p.V)
    return Pool(
        state=states,
        read_slots=slots,
        write_slots=slots,
        has_initial_state=slots == 0,
        last_skipped=-1,
        out=torch.zeros(p.B, p.T, p.HV, p.V, dtype=p.q_dtype),
        every=64,
        checkpoints=states,
        checkpoint_slots=slots[:, None],
    )


def compiled(call: Call) -> list[Any]:
    """The kernels of a call in Gluon."""
    from gdn_triton.chunk.triton.forward import readable_inputs
    from gdn_triton.chunk.triton.hopper import launch
    from gdn_triton.chunk.triton.hopper.releases import most_states
    from gdn_triton.chunk.triton.hopper.segments import Cut

    shape, B, cu_seqlens = call.shape, call.N, None
    if shape.full:
        B, cu_seqlens = 1, torch.arange(call.N + 1, dtype=torch.int32) * 75
    problem, x = make_call(B, 300, shape.HV // 2, shape, cu_seqlens)
    problem = replace(problem, use_qk_l2norm=shape.full or call.norm)
    if call.key_first:
        problem = replace(problem, has_initial_state=True, output_final_state=True)
        problem = replace(problem, state_v_first=False, use_qk_l2norm=False)
        x = x._replace(initial_state=torch.zeros(call.N, shape.HV, shape.K, shape.V))
    pool = pool_of(call, problem) if call.pool else None
    cut = Cut(call.segments, call.segments, most_states(), 1) if call.segments else None
    with (
        mock.patch.object(launch, "choose_cut", lambda *_: cut),
        mock.patch.object(
            launch, "norm_inside", lambda p, _, shape: p.use_qk_l2norm and shape.states == 2
        ),
        compile_only(TARGET) as kernels,
    ):
        launch.hopper_fwd(problem, readable_inputs(x), pool)
    return [x.kernel for x in kernels if x.name == "hopper_fwd_kernel"]


def more_with_copies() -> int:
    from gdn_triton.chunk.triton.hopper.names import COPIES

    return MORE_WITH_COPIES if COPIES.value else 0


def wrong_accesses(sass: str) -> list[str]:
    """To registers, and to the memory of barriers."""
    overwritten = (f"{text}, which a product still reads" for text in overwritten_operands(sass))
    of_barriers = (f"{text}, where a barrier is" for text in accesses_to_barriers(sass))
    return [*unwritten_uniform_registers(sass), *overwritten, *of_barriers]


def in_flight(sass: str, allowed: int) -> list[str]:
    """All arrivals during loads, if there are more than are allowed."""
    found = [f"{text}, while a load is in flight" for text in loads_in_flight(sass)]
    return found if len(found) > allowed else []


def has_several_tiles(call: Call) -> bool:
    """Whether a block walks several tiles (`is_dealt` of hopper/launch.py)."""
    return call.shape.K <= 128 and call.segments == 0 and call.N * call.shape.HV > 132


def in_loop_allowed(call: Call) -> int:
    allowed = IN_LOOP_OF_SEGMENTS if call.segments else IN_LOOP[call.shape.full]
    return more_with_copies() + (IN_LOOP_WITH_POOL if call.pool else allowed)


GRADIENTS = [
    Case("padded", "", T=200, H=1, HV=2, K=128, V=128, chunk_size=64, spare=8),
    Case("packed", "", lengths=(70, 130), H=1, HV=2, K=128, V=128, chunk_size=64, spare=8),
    Case("small", "", lengths=(70, 130), H=1, HV=2, K=64, V=64, chunk_size=64, spare=8),
]


def compiled_gradients(case: Case, *, norm: bool) -> Any:
    from gdn_triton.chunk.triton.hopper.gradients.launch import chunk_gradients

    chunks = gluon_gradients.chunk_table(case, "cpu")
    x = gluon_gradients.make_given(case, "cpu", slots=chunks.slots, strength=0.2, seed=0)
    factors = torch.ones(2, *x.q.shape[:3]) if norm else None
    with compile_only(TARGET) as kernels:
        chunk_gradients(**x._asdict(), chunks=chunks, scale=0.1, factors=factors, K=case.K)
    (one,) = kernels
    return one.kernel


def judge_gradients() -> list[str]:
    wrong = []
    for case, norm in itertools.product(GRADIENTS, (False, True)):
        kernel = compiled_gradients(case, norm=norm)
        stack, registers = stack_and_registers(kernel.asm["cubin"])
        shared, sass = kernel.metadata.shared, disassembled(kernel.asm["cubin"])
        count = len(re.findall(r"(?m)^\s+/\*[0-9a-f]{4,}\*/", sass))
        line = f"gradients {case.name:6} norm {norm:1} shared {shared:7} stack {stack:4}"
        print(f"{line} instructions {count:5} registers {registers:3}", flush=True)
        found = [*advisories(kernel.asm["ptx"]), *wrong_accesses(sass)]
        # The places in the rings change in chunks that have rows, and in no others. Only a move or
        # a product that reads such a register reads an address.
        stale = stale_uniform_registers(sass)
        found += [text for text in stale if re.search(r" (UMOV|R2UR|HGMMA)\b", text)]
        found += in_flight(sass, 0)
        if shared > SHARED_MEMORY:
            found.append(f"{shared} bytes of shared memory, of {SHARED_MEMORY}")
        if stack > (allowed := GRADIENTS_STACK + more_with_copies()):
            found.append(f"{stack} bytes of stack, {allowed} allowed")
        if count > GRADIENTS_INSTRUCTIONS:
            found.append(f"{count} instructions, {GRADIENTS_INSTRUCTIONS} allowed")
        wrong += [f"gradients, {case.name}, norm {norm}: {text}" for text in found]
    return wrong


def compiled_walks(case: Case, plan: Plan) -> list[tuple[Any, int]]:
    """The kernels in Gluon of a case, each with the number of its programs."""
    with compile_only(TARGET) as kernels:
        walks_of(case, make_given(case, "mild", 0), chunk_table(case), plan, v_first=False)
    return [(x.kernel, x.grid[0]) for x in kernels if x.name == "hopper_walks_kernel"]


def judge_walks() -> list[str]:
    wrong = []
    for case, plan in WALKS:
        for kernel, blocks in compiled_walks(case, plan):
            stack, registers = stack_and_registers(kernel.asm["cubin"])
            shared, sass = kernel.metadata.shared, disassembled(kernel.asm["cubin"])
            local = local_memory_around(sass, UPDATE) if case.K > 64 else 0
            line = f"walks {case.name:20} blocks {blocks:3} shared {shared:7} stack {stack:4}"
            print(f"{line} in loop {local:3} registers {registers:3}", flush=True)
            found = [*advisories(kernel.asm["ptx"]), *wrong_accesses(sass)]
            found += [*stale_uniform_registers(sass), *in_flight(sass, 0)]
            if shared > SHARED_MEMORY:
                found.append(f"{shared} bytes of shared memory, of {SHARED_MEMORY}")
            if stack > (allowed := STACK_OF_WALKS + more_with_copies()):
                found.append(f"{stack} bytes of stack, {allowed} allowed")
            if local > IN_LOOP_OF_WALKS[case.packed or plan.segment > 0] + more_with_copies():
                found.append(f"{local} accesses to the stack in the state's loop")
            wrong += [f"walks, {case.name}: {text}" for text in found]
    return wrong


def compiled_window(dtype: torch.dtype, *, v_first: bool, form: WindowForm, tokens: int) -> Any:
    """The kernel of a step with a window."""
    from gdn_triton.recurrent.triton import window_plan
    from gdn_triton.recurrent.validation import validate_step

    call = gluon_window.make_call(dtype, v_first=v_first, norm=True, seed=0, tokens=tokens)
    choice = "_copied_form" if tokens == 1 else "_copied_drafts_form"
    with (
        compile_only(TARGET) as kernels,
        mock.patch.object(window_plan, choice, lambda *_: form),
    ):
        window_plan.plan(validate_step(call), call.inputs)(call.inputs)
    (one,) = kernels
    return one.kernel


def judge_windows() -> list[str]:
    wrong = []
    cases = [(1, *case) for case in gluon_window.forms()]
    cases += [(4, *case) for case in gluon_window.drafts_forms()]
    for tokens, dtype, v_first, form in cases:
        kernel = compiled_window(dtype, v_first=v_first, form=form, tokens=tokens)
        stack, registers = stack_and_registers(kernel.asm["cubin"])
        shared, sass = kernel.metadata.shared, disassembled(kernel.asm["cubin"])
        name = f"window of {dtype}, value-first {v_first:1}, {form.BV} columns, {tokens} tokens"
        print(f"{name} shared {shared:7} stack {stack:4} registers {registers:3}", flush=True)
        found = [f"before the wait: {text}" for text in accesses_before_the_wait(sass)]
        found += [*unwritten_uniform_registers(sass), *overlong_layouts(kernel.asm["ttgir"])]
        found += narrow_strides(kernel.asm["ttgir"])
        allowed = WINDOW_STACK.get((dtype, v_first, tokens), 0)
        if stack > allowed:
            found.append(f"{stack} bytes of stack, {allowed} allowed")
        wrong += [f"{name}: {text}" for text in found]
    return wrong


def judge_several() -> list[str]:
    from gdn_triton.recurrent.triton import plan
    from gdn_triton.recurrent.validation import validate_step

    wrong = []
    # The forms with the most columns use the most registers, and are judged for packed calls too.
    cases = [
        (*case, tokens)
        for case in gluon_several.shapes()
        for tokens in ((4, 0) if case[2].columns == 4 else (4,))
    ]
    for dtype, v_first, form, every_token, tokens in cases:
        slots: gluon_several.Slots = "other"
        if every_token:
            slots = "accepted" if tokens else "every"
        call = gluon_several.make_call(
            dtype, v_first=v_first, slots=slots, norm=True, seed=0, tokens=tokens
        )
        with (
            compile_only(TARGET) as kernels,
            mock.patch.object(plan, "_several_form", lambda *_, form=form: form),
        ):
            plan.plan(validate_step(call), call.inputs)(call.inputs)
        (one,) = kernels
        kernel = one.kernel
        stack, registers = stack_and_registers(kernel.asm["cubin"])
        sass = disassembled(kernel.asm["cubin"])
        name = f"{tokens} tokens, {slots} slots, {dtype}, value-first {v_first:1}, {form}"
        print(f"{name} stack {stack:4} registers {registers:3}", flush=True)
        found = [f"before the wait: {text}" for text in accesses_before_the_wait(sass)]
        found += [*unwritten_uniform_registers(sass), *narrow_strides(kernel.asm["ttgir"])]
        if stack > SEVERAL_STACK:
            found.append(f"{stack} bytes of stack, {SEVERAL_STACK} allowed")
        wrong += [f"{name}: {text}" for text in found]
    return wrong


def main() -> int:
    wrong = [*judge_windows(), *judge_several(), *judge_walks(), *judge_gradients()]
    for call in CALLS:
        for kernel in compiled(call):
            stack, registers = stack_and_registers(kernel.asm["cubin"])
            shared = kernel.metadata.shared
            sass = disassembled(kernel.asm["cubin"])
            local = local_memory_around(sass, UPDATE) if call.shape.K > 64 else 0
            form = "pool" if call.pool else f"segments {call.segments}"
            line = f"{call.shape!s:52} N={call.N} {form:10} shared {shared:7}"
            print(f"{line} stack {stack:4} in loop {local:3} registers {registers:3}", flush=True)
            found = [*advisories(kernel.asm["ptx"]), *wrong_accesses(sass)]
            if call.shape.K > 128 and more_with_copies():
                found = [text for text in found if not text.startswith(ONE_MORE_WAIT)]
            found += stale_uniform_registers(sass)
            found += in_flight(sass, IN_FLIGHT_OF_TILES if has_several_tiles(call) else 0)
            if shared > SHARED_MEMORY:
                found.append(f"{shared} bytes of shared memory, of {SHARED_MEMORY}")
            allowed = STACK[call.shape.full or call.key_first] + more_with_copies()
            if stack > allowed:
                found.append(f"{stack} bytes of stack, {allowed} allowed")
            if local > in_loop_allowed(call):
                found.append(f"{local} accesses to the stack in the state's loop")
            if "wgmma.mma_async" not in kernel.asm["ptx"]:
                found.append("no wgmma")
            wrong += [f"{call}: {text}" for text in found]
    for text in wrong:
        print("WRONG", text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
