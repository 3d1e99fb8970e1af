"""Compiles kernels for a GPU that is not present, and checks their code."""

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class AbsentDevice:
    """The parts of a driver that Triton needs until a kernel is compiled."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty


@dataclass
class Compiled:
    name: str
    kernel: Any
    grid: tuple[int, ...]


@contextlib.contextmanager
def compile_only(target: GPUTarget) -> Iterator[list[Compiled]]:
    """Launches compile for `target`, are listed, and do nothing else. Each one says whether
    products and sums are fused, because Triton's default depends on its release and on the
    environment."""
    compiled: list[Compiled] = []
    run = JITFunction.run

    def compile_one(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        assert "enable_fp_fusion" in kwargs, f"{self.fn.__name__} has neither FUSED nor UNFUSED"
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append(Compiled(self.fn.__name__, kernel, tuple(grid)))

    driver.set_active(AbsentDevice(target))
    JITFunction.run = compile_one
    try:
        yield compiled
    finally:
        JITFunction.run = run


def said_of(cubin: bytes, tool: str, *options: str) -> str:
    """The output of one of Triton's tools on a kernel."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [path, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def disassembled(cubin: bytes) -> str:
    """The instructions, each with its bits in two comments, the second on a line of its own."""
    options = "--print-code", "--no-dataflow", "--print-instruction-encoding"
    return said_of(cubin, "nvdisasm", *options)


def stack_and_registers(cubin: bytes) -> tuple[int, int]:
    """Bytes of stack and registers of a thread."""
    text = said_of(cubin, "cuobjdump", "--dump-resource-usage")
    found = {name: int(n) for name, n in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return found["STACK"] + found["LOCAL"], found["REG"]


# Address, operation without its predicate, operands.
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")


def uniform_registers(name: str, parts: list[str]) -> tuple[set[int], set[int]]:
    """The uniform registers that an instruction reads, and those that it writes."""
    uniform = name.startswith("U") or name.split(".")[0] in ("R2UR", "S2UR", "VOTEU", "REDUX")
    read: set[int] = set()
    written: set[int] = set()
    for part in parts[1:] if uniform else parts:
        for text in re.findall(r"gdesc\[UR(\d+)\]", part):
            # Two registers a descriptor; of the left operand too, unless registers hold that.
            first = int(text) + (2 if re.match(r"R\d", parts[1]) else 0)
            read.update(range(first, int(text) + 4))
        for text in re.findall(r"\bUR(\d+)", re.sub(r"gdesc\[UR\d+\]", "", part)):
            read.update((int(text), int(text) + (uniform and ".64" in name)))
    if name == "UPRMT" and parts[2:] == ["0x7632", parts[0]] and parts[1] != parts[0]:
        # The upper half of a register to the lower one of its target, whose own upper half is
        # left: the second of two bfloat16.
        read.discard(int(parts[0].removeprefix("UR")))
    target = re.match(r"UR(\d+)", parts[0]) if uniform else None
    if name == "ELECT":
        # The number of the chosen lane, after the predicate.
        target = re.match(r"UR(\d+)", parts[1])
        read.clear()
    if target:
        width = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
        written.update(range(int(target[1]), int(target[1]) + width))
    return read, written


def accesses_before_the_wait(sass: str) -> list[str]:
    """The instructions of a Hopper kernel on global memory before `griddepcontrol.wait`, in the
    order of the text: there the kernel before it may still run."""
    found = []
    for line in sass.splitlines():
        match = INSTRUCTION.match(line)
        if match is None:
            continue
        address, name, operands = match.groups()
        if name.startswith("ACQBULK"):
            return found
        if re.match(r"(LDG|STG|ATOMG|REDG|RED|LDGSTS|LD|ST|ATOM)(\.|$)", name):
            found.append(f"{address} {name} {operands}")
    return [*found, "no wait"]


def unwritten_uniform_registers(sass: str) -> list[str]:
    """The instructions of a Hopper kernel that read a uniform register before any writes it, in the
    order of the text. ptxas 12.8 makes such code of some kernels (docs/tried.md): a matrix
    product then takes its shared-memory address from what an earlier program left there."""
    written: set[int] = set()
    found = []
    for line in sass.splitlines():
        match = INSTRUCTION.match(line) if "UR" in line else None
        if match is None:
            continue
        address, name, operands = match.groups()
        read, now = uniform_registers(name, [part.strip() for part in operands.split(",")])
        if read - written:
            found.append(f"{address} {name} {operands}")
        written |= now
    return found


class _Flow:
    """The instructions of a kernel and where each one leads. The loops of waits for barriers, which
    lie after the code of a kernel, are left out."""

    def __init__(self, sass: str) -> None:
        self.code: list[tuple[str, str, list[str], bool]] = []
        labels: dict[str, int] = {}
        for line in sass.splitlines():
            if label := re.match(r"\s*(\.L_x_\d+):", line):
                labels[label[1]] = len(self.code)
            elif match := INSTRUCTION.match(line):
                address, name, operands = match.groups()
                parts = [part.strip() for part in operands.split(",")]
                predicated = re.search(r"\*/\s+@", line) is not None
                self.code.append((address, name, parts, predicated))
        self.labels = labels
        self.next: list[list[int]] = []
        self.back: list[tuple[int, int]] = []
        for at, (_, name, _, predicated) in enumerate(self.code):
            ends = not predicated and name in ("BRA", "EXIT", "BRX", "RET")
            after = [] if ends else [at + 1]
            target = self._target(at)
            if target is not None and not self._waits(target):
                after.append(target)
                last = self._target(at - 1)
                if target <= at and (last is None or not self._waits(last)):
                    self.back.append((target, at))
            self.next.append([n for n in after if n < len(self.code)])

    def serves_a_predicate(self, at: int) -> bool:
        """Whether an instruction moves a uniform register to another one, which the next
        instructions read under a predicate alone."""
        _, name, parts, _ = self.code[at]
        if name != "IMAD.U32" or parts[1:3] != ["RZ", "RZ"]:
            return False
        for _, _, following, predicated in self.code[at + 1 : at + 6]:
            if parts[0] in following[1:]:
                return predicated
        return False

    def _target(self, at: int) -> int | None:
        _, name, parts, _ = self.code[at]
        label = re.search(r"\.L_x_\d+", parts[-1]) if name == "BRA" else None
        return self.labels[label[0]] if label else None

    def _waits(self, at: int) -> bool:
        """Whether the loop of a wait begins here."""
        for n in range(at, min(at + 3, len(self.code) - 1)):
            if "PHASECHK" in self.code[n][1]:
                return self._target(n + 1) == at
        return False

    def loop(self, header: int, end: int) -> set[int]:
        """The instructions of a loop: those from which its last one is reached, from its first."""
        before: dict[int, list[int]] = {}
        for at, after in enumerate(self.next):
            for n in after:
                before.setdefault(n, []).append(at)
        inside, todo = {header, end}, [end]
        while todo:
            at = todo.pop()
            if at != header:
                new = [n for n in before.get(at, []) if n not in inside]
                inside.update(new)
                todo += new
        return inside


def loads_in_flight(sass: str) -> list[str]:
    """The arrivals of a Hopper kernel at barriers of shared memory that are issued while a load of
    shared memory by the same warp has not returned, in the order of the text. An arrival does not
    wait for loads, and a warp that waits for the barrier may overwrite what is loaded.

    The upper bits of an instruction name the counter that a load holds until it returns, and the
    counters for which the instruction waits before it is issued. A wait for all matrix products
    outlasts the loads that were issued before these products."""
    flow = _Flow(sass)
    upper = re.findall(r"(?m)^\s+/\* 0x([0-9a-f]{16}) \*/", sass)
    assert len(upper) == len(flow.code), f"{len(upper)} encodings of {len(flow.code)} instructions"
    controls = [int(bits, 16) >> 41 for bits in upper]
    found: dict[int, str] = {}
    # By instruction: the counters that loads hold before it, on some path, a bit each. Six higher
    # bits are of those that a matrix product follows.
    held = [0] * len(flow.code)
    todo = list(range(len(flow.code)))[::-1]
    while todo:
        at = todo.pop()
        address, name, parts, _ = flow.code[at]
        waits = controls[at] >> 11 & 0x3F
        counters = held[at] & ~(waits | waits << 6)
        if counters and (name.startswith(("SYNCS.ARRIVE", "ARRIVES."))):
            found[at] = f"{address} {name} {', '.join(parts)}"
        if name.startswith(("FENCE.", "MEMBAR.")):
            counters = 0
        if name.startswith("HGMMA."):
            counters = (counters | counters << 6) & 0xFC0
        if name.startswith("WARPGROUP.DEPBAR") and parts[-1] == "0x0":
            counters &= 0x3F
        counter = controls[at] >> 5 & 7
        if re.match(r"(LDS|LDSM|ATOMS)(\.|$)", name) and counter < 6:
            counters |= 1 << counter
        for after in flow.next[at]:
            if counters & ~held[after]:
                held[after] |= counters
                todo.append(after)
    return [found[at] for at in sorted(found)]


def shared_address(operands: str) -> int | None:
    """The constant part of an address as [R4+UR9+0x2c0a0], or None if there is none."""
    match = re.search(r"\[(?:U?R\w+\s*\+\s*)*(0x[0-9a-f]+)\]", operands)
    return int(match[1], 16) if match else None


def accesses_to_barriers(sass: str) -> list[str]:
    """The loads and stores of a Hopper kernel in shared memory where it initialises a barrier, in
    the order of the text. The compiler gives the memory of a barrier that nothing waits for to
    other values. The initialisation is not ordered with a store by another warp, and may overwrite
    it. Loads of bytes are left out: their addresses, which have the number of the warp in a
    register, are those of the warps' own states."""
    barriers: set[int] = set()
    accesses: list[tuple[int, int, str]] = []
    for line in sass.splitlines():
        match = INSTRUCTION.match(line)
        if match is None:
            continue
        address, name, operands = match.groups()
        place = shared_address(operands)
        if place is None:
            continue
        if name.startswith("SYNCS.EXCH"):
            barriers.add(place)
        elif re.match(r"(LDS|STS|LDSM|STSM|ATOMS)(\.|$)", name) and not name.startswith("LDS.U8"):
            width = next((n for n in (8, 16) if f".{8 * n}" in name), 4)
            accesses.append((place, width, f"{address} {name} {operands}"))
    return [
        text
        for place, width, text in accesses
        if any(place < barrier + 8 and barrier < place + width for barrier in barriers)
    ]


def registers_from(part: str, count: int) -> set[int]:
    """The numbers of so many registers from the one that an operand names; of another operand
    none."""
    found = re.fullmatch(r"R(\d+)(\.reuse)?", part)
    return set(range(int(found[1]), int(found[1]) + count)) if found else set()


def written_registers(name: str, parts: list[str]) -> set[int]:
    """The registers that an instruction other than a matrix product writes."""
    wide = re.search(r"\.(64|128|WIDE)\b", name)
    count = {"64": 2, "128": 4, "WIDE": 2}[wide[1]] if wide else 1
    if name.startswith("LDSM"):
        count = int(name[-1]) if name[-1] in "24" else 1
    if name.startswith("CS2R"):
        count = 1 if name.endswith(".32") else 2
    # A predicate may stand before the register that is written.
    after_predicate = name.startswith(("SHFL", "LOP3")) and re.match(r"U?P[0-7T]$", parts[0])
    return registers_from(parts[1] if after_predicate else parts[0], count)


def overwritten_operands(sass: str) -> list[str]:
    """The instructions of a Hopper kernel that write a register which a matrix product in flight
    may still read as its left operand, in the order of the text. ptxas before 13.3 makes such code
    of some kernels (docs/tried.md).

    A group of products ends with the one that names gsb0, and a wait leaves at most so many groups
    in flight."""
    flow = _Flow(sass)
    found: dict[int, str] = {}
    # By instruction: the operands of each group in flight, and of products without a group.
    reached: list[set[tuple[frozenset[int], ...]]] = [{(frozenset(),)} for _ in flow.code]
    todo = [(at, (frozenset[int](),)) for at in range(len(flow.code))]
    while todo:
        at, groups = todo.pop()
        address, name, parts, _ = flow.code[at]
        if name.startswith("HGMMA."):
            groups = (*groups[:-1], groups[-1] | registers_from(parts[1], 4))
            if "gsb0" in parts:
                groups = (*groups, frozenset())
        elif name.startswith("WARPGROUP.DEPBAR"):
            ended = len(groups) - 1 - int(parts[-1], 16)
            groups = groups[max(ended, 0) :]
        elif parts and written_registers(name, parts) & frozenset().union(*groups):
            found[at] = f"{address} {name} {', '.join(parts)}"
        for after in flow.next[at]:
            if groups not in reached[after]:
                reached[after].add(groups)
                todo.append((after, groups))
    return [found[at] for at in sorted(found)]


def local_memory_around(sass: str, product: str) -> int:
    """Reads and writes of local memory in the innermost loop around a matrix product of a Hopper
    kernel. Where several loops have products of this name, as those of roles have, the most."""
    flow = _Flow(sass)
    loops = [flow.loop(*ends) for ends in flow.back]
    products = [at for at, (_, name, _, _) in enumerate(flow.code) if name.startswith(product)]
    assert products, f"no {product}"
    most = 0
    for at in products:
        around = [inside for inside in loops if at in inside]
        assert around, f"{product} at {flow.code[at][0]} is in no loop"
        local = (re.match(r"(LDL|STL)\b", flow.code[n][1]) for n in min(around, key=len))
        most = max(most, sum(map(bool, local)))
    return most


def stale_uniform_registers(sass: str) -> list[str]:
    """The instructions in loops with matrix products that read a uniform register which an
    iteration has written on some paths to them and not on others. ptxas 12.8 makes such code where
    a branch computes the address of an operand that is needed after the branch too
    (docs/tried.md): on the other path the product reads where an earlier iteration did.

    A loop around such loops goes over tiles. Numbers that change in a tile's chunks, as the places
    in rings, are then read in the next tile, whether or not this one had chunks. Such a read is
    found only where a product itself is the reader."""
    flow = _Flow(sass)
    found: dict[str, None] = {}
    loops = []
    for header, end in flow.back:
        inside = flow.loop(header, end)
        if any(flow.code[at][1].startswith("HGMMA") for at in inside):
            loops.append((header, inside))
    for header, inside in loops:
        of_tiles = any(other < inside for _, other in loops)
        effects = {at: uniform_registers(*flow.code[at][1:3]) for at in inside}
        # Written on all paths from the header to before an instruction, and on some.
        paths: dict[int, tuple[set[int], set[int]]] = {header: (set(), set())}
        todo = [header]
        while todo:
            at = todo.pop()
            every, some = paths[at]
            now = effects[at][1]
            every, some = (every if flow.code[at][3] else every | now), some | now
            for n in flow.next[at]:
                if n not in inside or n == header:
                    continue
                old = paths.get(n, (every, set()))
                new = old[0] & every, old[1] | some
                if n not in paths or new != old:
                    paths[n] = new
                    todo.append(n)
        for at in sorted(paths):
            address, name, parts, predicated = flow.code[at]
            if of_tiles and not name.startswith("HGMMA"):
                continue
            every, some = paths[at]
            if predicated or flow.serves_a_predicate(at):
                continue
            if effects[at][0] & (some - every):
                found[f"{address} {name} {', '.join(parts)}"] = None
    return list(found)


# A layout of Hopper's products, by its name; then its warps along the rows, of 16 rows each.
LAYOUT = re.compile(
    r"^(#\w+) = #ttg\.nvidia_mma<\{versionMajor = 3, .*warpsPerCTA = \[(\d+),", re.M
)


def overlong_layouts(ttgir: str) -> list[str]:
    """Products of fewer rows than their layout has. Triton 3.6 makes such for eight warps, 64 rows
    and 16 columns; the kernel ended in an illegal memory access on an H200. Tiles of one row are
    what is broadcast over a product."""
    found = []
    for name, warps in LAYOUT.findall(ttgir):
        for rows in set(re.findall(rf"tensor<(\d+)x\d+x\w+, {name}>", ttgir)):
            if 1 < int(rows) < 16 * int(warps):
                found.append(f"{rows} rows in a layout of {16 * int(warps)}")
    return found


# Strides that kernels multiply in 32 bits, as the host keeps them small (gdn_triton/constants.py):
# MAX_ROW_STRIDE: from row to row of q, k, v and beta, and of what the package makes, a copy where a
#   caller's is larger; of a pool's o, which is refused.
# MAX_STATE_SPAN: inside a state of the chunked op, its gradient, or a checkpoint, likewise; inside
#   what a program of the recurrence reads at once, which is refused.
NARROW_STRIDES = (
    *("stride_qt", "stride_kt", "stride_vt", "stride_ot", "stride_betat", "stride_gt"),
    *(f"stride_{name}{i}" for name in ("h0", "ht", "dht", "dh0", "c") for i in ("k", "v")),
    *(f"stride_{name}" for name in ("qk", "kk", "vv", "gkk", "gvv", "bv", "ov")),
)
# Operations that return numbers that they were given.
_PASSED_ON = ("tt.splat", "tt.expand_dims", "tt.broadcast", "tt.reshape", "arith.select")
_NARROWED = ("arith.muli", "arith.addi", "arith.subi", "arith.shli")
_OPERATION = re.compile(r"^\s*(%\w+)(?::\d+)? = ([\w.]+)\s+(.*?) : (.*?)(?: loc\(.*)?$")
_STRIDE = re.compile(r"(%stride_\w+): i32")


def narrow_strides(ttir: str) -> list[str]:
    """Sums and products in 32 bits of a stride that no host code keeps small. ttir: a kernel's
    code with everything inlined."""
    strides = {x for x in _STRIDE.findall(ttir) if x[1:] not in NARROW_STRIDES}
    origin = {x: x[1:] for x in strides}
    found = []
    for line in ttir.splitlines():
        match = _OPERATION.match(line)
        if match is None:
            continue
        result, operation, operands, kind = match.groups()
        used = [origin[x] for x in re.findall(r"%[\w#]+", operands) if x in origin]
        if not used:
            continue
        if operation in _PASSED_ON:
            origin[result] = used[0]
        elif operation in _NARROWED and "i32" in kind:
            found.append(f"{used[0]} in 32 bits: {line.strip().split(' loc(')[0]}")
    return found
