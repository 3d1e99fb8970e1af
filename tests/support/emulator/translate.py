"""Makes C++ of a kernel's PTX, an instruction a line, for the functions of machine.h.

Each CUDA thread runs the function on a stack of its own. Registers are its local variables, as
bits. What threads do together, and what may fail, is told the line of PTX that it comes from.
"""

import math
import re
from collections.abc import Callable

from emulator.ptx import Entry, Instruction, Label, Registers, Variable, entries, width

_FLOAT = re.compile(r"0[fF]([0-9A-Fa-f]{8})")
_DOUBLE = re.compile(r"0[dD]([0-9A-Fa-f]{16})")
_NUMBER = re.compile(r"-?(0x[0-9A-Fa-f]+|\d+)U?")
_SPACES = {"param", "global", "shared", "shared::cta", "local", "const"}
_SHARED_START = 1024  # kSharedStart of machine.h
_DYNAMIC_ALIGNMENT = 1024
_REGISTERS = 65536  # of a multiprocessor


class Untranslatable(Exception):
    """An instruction that machine.h has no function for."""


def _c_type(type_name: str) -> str:
    signed = "" if type_name[0] == "s" else "u"
    return f"{signed}int{width(type_name)}_t"


def _register(name: str) -> str:
    return "v_" + name.lstrip("%").replace("$", "_")


def launch_registers(entry: Entry) -> int:
    """Registers that each thread has at launch, in a kernel with setmaxnreg; 0 where the kernel's
    bounds do not say how many, and ptxas ignores setmaxnreg.

    This is what ptxas of CUDA 13.0 was seen to do for sm_90a: as many as the launch bounds leave,
    the threads rounded up to warpgroups, and no more than the largest setmaxnreg.inc raises to. The
    numbers here are those that the hardware gives, which are multiples of 8: ptxas says 255 of 256.
    """
    counts = [256]
    if "maxnreg" in entry.bounds:
        counts += entry.bounds["maxnreg"]
    if "maxntid" in entry.bounds and "minnctapersm" in entry.bounds:
        threads = -(-math.prod(entry.bounds["maxntid"]) // 128) * 128
        counts.append(_REGISTERS // (threads * entry.bounds["minnctapersm"][0]))
    if len(counts) == 1:
        return 0
    raised = [
        int(x.operands[0])
        for x in entry.statements
        if isinstance(x, Instruction) and x.opcode[:2] == ("setmaxnreg", "inc")
    ]
    return min(*counts, max(raised, default=256)) // 8 * 8


class _Translation:
    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.lines: list[str] = []
        self.addresses: dict[str, str] = {}
        self.params: list[str] = []
        self.offsets: dict[str, int] = {}  # of parameters in their own space
        at = 0
        for param in entry.params:
            at = -(-at // param.alignment) * param.alignment
            self.addresses[param.name] = f"(params + {at})"
            self.offsets[param.name] = at
            assert param.bytes is not None
            self.params.append(f"{{{at}, {param.bytes}}}")
            at += param.bytes
        self._lay_out_shared(entry.shared)

    def _lay_out_shared(self, variables: tuple[Variable, ...]) -> None:
        at = _SHARED_START
        for x in variables:
            if x.bytes is not None:
                at = -(-at // x.alignment) * x.alignment
                self.addresses[x.name] = f"{at}u"
                at += x.bytes
        self.dynamic_start = -(-at // _DYNAMIC_ALIGNMENT) * _DYNAMIC_ALIGNMENT
        for x in variables:
            if x.bytes is None:
                self.addresses[x.name] = f"{self.dynamic_start}u"

    # ------------------------------------------------------------------------------------ operands

    def value(self, operand: str) -> str:
        if found := _FLOAT.fullmatch(operand):
            return f"0x{found[1]}u"
        if found := _DOUBLE.fullmatch(operand):
            return f"0x{found[1]}ull"
        if _NUMBER.fullmatch(operand):
            return operand.rstrip("U")
        if operand.startswith("!"):
            return f"!{self.value(operand[1:])}"
        if operand in self.addresses:
            return self.addresses[operand]
        if operand.startswith("%") and "." in operand:
            return self._special(operand)
        if operand in ("%laneid", "%cluster_ctarank", "%clock"):
            return self._special(operand)
        return _register(operand)

    @staticmethod
    def _special(operand: str) -> str:
        name, _, dimension = operand[1:].partition(".")
        at = "xyz".index(dimension) if dimension else 0
        if name == "tid":
            return "t.index" if at == 0 else "0u"
        if name == "laneid":
            return "t.lane"
        functions = {"ctaid": "block_index", "nctaid": "block_count", "ntid": "block_threads"}
        if name in functions:
            return f"{functions[name]}(t, {at})"
        if name == "cluster_ctarank":
            return "cluster_rank(t)"
        raise Untranslatable(operand)

    def address(self, operand: str) -> str:
        """The address that [register + number], [name] and the like mean."""
        base, _, offset = operand.strip("[]").partition("+")
        base = self.value(base.strip())
        return f"{base} + ({offset.strip()})" if offset else base

    @staticmethod
    def vector(operand: str) -> list[str]:
        return [x.strip() for x in operand.strip("{}").split(",")]

    # -------------------------------------------------------------------------------- instructions

    def instruction(self, x: Instruction) -> None:
        handler: Callable[[Instruction], str] | None = getattr(self, f"_{x.opcode[0]}", None)
        text = handler(x) if handler else self._plain(x)
        if x.guard is not None:
            condition = self.value(x.guard)
            text = f"if ({condition}) {{ {text} }}"
        self.lines.append(text)

    def _plain(self, x: Instruction) -> str:
        """One result, of operands that are registers and numbers."""
        to, *operands = x.operands
        return f"{self.value(to)} = {'_'.join(x.opcode)}({', '.join(map(self.value, operands))});"

    def _call(self, x: Instruction, function: str, *arguments: str, to: str = "") -> str:
        """A call of a function that may wait or fail. `to`: the operand for its result."""
        target = f"{self.value(to)} = " if to else ""
        return f"t.site = {x.line}; {target}{function}({', '.join(('t', *arguments))});"

    def _mov(self, x: Instruction) -> str:
        to, what = x.operands
        part = width(x.opcode[1]) // 2 if x.opcode[1] != "pred" else 1
        if what.startswith("{"):
            low, high = (self.value(y) for y in self.vector(what))
            kind = f"uint{2 * part}_t"
            return f"{self.value(to)} = {kind}({low}) | {kind}({high}) << {part};"
        if to.startswith("{"):
            source = self.value(what)
            names = self.vector(to)
            return " ".join(
                f"{self.value(name)} = uint{part}_t({source} >> {i * part});"
                for i, name in enumerate(names)
                if name != "_"
            )
        # In 32 bits the place of a parameter among all parameters, else its address.
        short = x.opcode[1] == "b32" and what in self.offsets
        return f"{self.value(to)} = {self.offsets[what] if short else self.value(what)};"

    def _cvta(self, x: Instruction) -> str:
        to, what = x.operands
        value = self.value(what)
        if "param" in x.opcode:
            value = f"({value} >> 32 ? {value} : params + {value})"
        return f"{self.value(to)} = {value};"

    def _memory(self, x: Instruction) -> tuple[str, str, int]:
        """The space, the type in C++ and the count of a load or store."""
        space = next((y for y in x.opcode if y in _SPACES), "generic")
        count = next((int(y[1]) for y in x.opcode[1:-1] if re.fullmatch(r"v[24]", y)), 1)
        return space, _c_type(x.opcode[-1]), count

    @staticmethod
    def _where(space: str) -> str:
        """Generic addresses are those of global memory: none of shared memory are taken."""
        if space not in ("shared", "shared::cta", "global", "generic"):
            raise Untranslatable(f"an access to the space {space}")
        return "shared" if space.startswith("shared") else "global"

    def _ld(self, x: Instruction) -> str:
        if "acquire" in x.opcode:
            to, where = x.operands
            return self._call(x, "load_published", self.address(where), to=to)
        space, kind, count = self._memory(x)
        to, where = x.operands
        targets = self.vector(to) if count > 1 else [to]
        at, size = self.address(where), f"sizeof({kind})"
        if space == "param" and re.match(r"\[%r\d", where):  # the place of a parameter (`_mov`)
            at = f"params + {at}"
        lines = [] if space == "param" else [f"t.site = {x.line};"]
        if len(targets) > 1:  # the address may be one of the targets
            lines.insert(0, f"const auto at = {at};")
            at = "at"
        for i, target in enumerate(targets):
            if target == "_":
                continue
            if space == "param":
                part = f"load<{kind}>({at} + {i} * {size})"
            else:
                part = f"load_{self._where(space)}<{kind}>(t, {at}, {count} * {size}, {i})"
            lines.append(f"{self.value(target)} = {part};")
        return "{ " + " ".join(lines) + " }"

    def _st(self, x: Instruction) -> str:
        if "release" in x.opcode:
            where, what = x.operands
            return self._call(x, "publish_global", self.address(where), self.value(what))
        space, kind, count = self._memory(x)
        where, what = x.operands
        sources = self.vector(what) if count > 1 else [what]
        at, size = self.address(where), f"sizeof({kind})"
        function = f"store_{self._where(space)}<{kind}>"
        lines = [f"t.site = {x.line};"]
        for i, source in enumerate(sources):
            content = f"{kind}({self.value(source)})"
            lines.append(f"{function}(t, {at}, {content}, {count} * {size}, {i});")
        return " ".join(lines)

    def _atom(self, x: Instruction) -> str:
        to, where, what = x.operands
        return self._change(x, where, what, to=to)

    def _red(self, x: Instruction) -> str:
        where, what = x.operands
        return self._change(x, where, what)

    def _change(self, x: Instruction, where: str, what: str, *, to: str = "") -> str:
        space, kind, _ = self._memory(x)
        changes = {
            "add": "a + b",
            "max": "a > b ? a : b",
            "min": "a < b ? a : b",
            "or": "a | b",
            "and": "a & b",
        }
        (operation,) = (part for part in x.opcode if part in changes)
        operand = f"const {kind} b = {kind}({self.value(what)});"
        function = f"[&]({kind} a) {{ {operand} return {kind}({changes[operation]}); }}"
        name = f"change_{self._where(space)}<{kind}>"
        return self._call(x, name, self.address(where), function, to=to)

    def _elect(self, x: Instruction) -> str:
        to, _, predicate = x.operands[0].partition("|")
        return f"{self.value(to)} = 0; {self.value(predicate)} = t.lane == 0;"

    def _brx(self, x: Instruction) -> str:
        labels = self.entry.targets[x.operands[1]]
        cases = (f"case {i}: goto {y.replace('$', 'L')};" for i, y in enumerate(labels))
        return f"switch ({self.value(x.operands[0])}) {{ {' '.join(cases)} }}"

    def _bra(self, x: Instruction) -> str:
        return f"goto {x.operands[0].replace('$', 'L')};"

    def _ret(self, x: Instruction) -> str:
        return "return;"

    def _trap(self, x: Instruction) -> str:
        return f't.site = {x.line}; fail(t, "a trap");'

    # ------------------------------------------------------------------------- what warps do

    def _bar(self, x: Instruction) -> str:
        if x.opcode[1] == "warp":
            return self._call(x, "sync_warp", self.value(x.operands[0]))
        number = self.value(x.operands[0])
        threads = self.value(x.operands[1]) if len(x.operands) > 1 else "0"
        waits = "false" if x.opcode[1] == "arrive" else "true"
        return self._call(x, "named_barrier", number, threads, waits)

    def _barrier(self, x: Instruction) -> str:
        if x.opcode[1] == "sync":
            return self._bar(x)
        if x.opcode[1] != "cluster":
            raise Untranslatable(".".join(x.opcode))
        return self._call(x, f"cluster_{x.opcode[2]}")

    def _shfl(self, x: Instruction) -> str:
        kinds = {"up": "kUp", "down": "kDown", "bfly": "kButterfly", "idx": "kIndex"}
        to, *operands = x.operands
        to, _, predicate = to.partition("|")
        where = f"&{self.value(predicate)}" if predicate else "nullptr"
        kind = f"Shuffle::{kinds[x.opcode[2]]}"
        return self._call(x, "shuffle", kind, *map(self.value, operands), where, to=to)

    def _vote(self, x: Instruction) -> str:
        to, what, mask = x.operands
        function = {"ballot": "ballot", "all": "vote_all", "any": "vote_any"}[x.opcode[2]]
        return self._call(x, function, self.value(what), self.value(mask), to=to)

    def _redux(self, x: Instruction) -> str:
        function = f"redux_{x.opcode[2]}_{x.opcode[3]}"
        to, *operands = x.operands
        return self._call(x, function, *map(self.value, operands), to=to)

    def _ldmatrix(self, x: Instruction) -> str:
        to, where = x.operands
        names = self.vector(to)
        transposed = "true" if "trans" in x.opcode else "false"
        call = self._call(x, "load_matrices", self.address(where), "x", str(len(names)), transposed)
        out = " ".join(f"{self.value(name)} = x[{i}];" for i, name in enumerate(names))
        return f"{{ uint32_t x[4]; {call} {out} }}"

    def _stmatrix(self, x: Instruction) -> str:
        where, what = x.operands
        values = [self.value(y) for y in self.vector(what)]
        transposed = "true" if "trans" in x.opcode else "false"
        call = self._call(
            x, "store_matrices", self.address(where), "x", str(len(values)), transposed
        )
        return f"{{ const uint32_t x[] = {{{', '.join(values)}}}; {call} }}"

    def _mma(self, x: Instruction) -> str:
        kind = ".".join(x.opcode)
        found = re.fullmatch(
            r"mma\.sync\.aligned\.m16n8k(8|16)\.row\.col\.f32\.(f16|bf16|tf32)\.\2\.f32", kind
        )
        if not found:
            raise Untranslatable(kind)
        to, a, b, c = (self.vector(y) for y in x.operands)
        arrays = (
            f"const uint32_t {name}[] = {{{', '.join(map(self.value, y))}}};"
            for name, y in zip("abc", (a, b, c), strict=True)
        )
        out = " ".join(f"{self.value(name)} = x[{i}];" for i, name in enumerate(to))
        call = self._call(x, "mma", "x", "a", "b", "c", found[1], f"Format::k_{found[2]}")
        return f"{{ uint32_t x[4]; {' '.join(arrays)} {call} {out} }}"

    # ------------------------------------------------------------------ barriers, copies, WGMMA

    def _mbarrier(self, x: Instruction) -> str:
        operands = [self.address(y) if "[" in y else self.value(y) for y in x.operands]
        if x.opcode[1] in ("init", "inval"):
            return self._call(x, f"barrier_{x.opcode[1]}", *operands)
        if x.opcode[1] == "try_wait":
            return self._call(x, "barrier_try_wait", *operands[1:], to=x.operands[0])
        if x.opcode[1] == "arrive" and x.operands[0] == "_":
            if x.opcode[2] == "expect_tx":
                return self._call(x, "barrier_expect", *operands[1:])
            in_cluster = "true" if "shared::cluster" in x.opcode else "false"
            return self._call(x, "barrier_arrive", operands[1], in_cluster, *operands[2:])
        raise Untranslatable(".".join(x.opcode))

    def _fence(self, x: Instruction) -> str:
        if x.opcode[1:3] == ("proxy", "async"):
            return self._call(x, "fence_proxy_async")
        if x.opcode[1] == "mbarrier_init":
            return self._call(x, "fence_mbarrier_init")
        raise Untranslatable(".".join(x.opcode))

    def _mapa(self, x: Instruction) -> str:
        to, *operands = x.operands
        return self._call(x, "map_to_rank", *map(self.value, operands), to=to)

    def _griddepcontrol(self, x: Instruction) -> str:
        names = {"wait": "wait_for_prerequisites", "launch_dependents": "launch_dependents"}
        return self._call(x, names[x.opcode[1]])

    def _setmaxnreg(self, x: Instruction) -> str:
        more = "true" if x.opcode[1] == "inc" else "false"
        return self._call(x, "set_registers", self.value(x.operands[0]), more)

    def _cp(self, x: Instruction) -> str:
        kind = ".".join(x.opcode)
        if kind in ("cp.async.cg.shared.global", "cp.async.ca.shared.global"):
            to, source, size, *read = x.operands
            sizes = self.value(size), self.value(read[0] if read else size)
            return self._call(x, "copy_async", self.address(to), self.address(source), *sizes)
        if kind == "cp.async.commit_group":
            return self._call(x, "copy_async_commit")
        if kind == "cp.async.wait_group":
            return self._call(x, "copy_async_wait", self.value(x.operands[0]))
        if kind == "cp.async.mbarrier.arrive.noinc.shared.b64":
            # Of a kernel without copies by cp.async, for which this arrival would wait.
            return self._call(x, "barrier_arrive", self.address(x.operands[0]), "false")
        if kind == "cp.async.bulk.commit_group":
            return self._call(x, "bulk_commit")
        if kind == "cp.async.bulk.wait_group":
            return self._call(x, "bulk_wait", self.value(x.operands[0]))
        if kind == "cp.async.bulk.wait_group.read":
            return self._call(x, "bulk_wait_read", self.value(x.operands[0]))
        if re.match(r"cp\.async\.bulk\.tensor\.4d\.shared::(cluster|cta)\.global\.mbarrier", kind):
            to, source, barrier = x.operands
            where = self._tensor(source)
            return self._call(x, "tensor_load", self.address(to), *where, self.address(barrier))
        if kind == "cp.async.bulk.prefetch.tensor.4d.L2.global":
            return ";"  # there is no L2
        stores = {
            "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group": "tensor_store",
            "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group": "tensor_add",
        }
        if kind in stores:
            target, source = x.operands
            return self._call(x, stores[kind], *self._tensor(target), self.address(source))
        if kind.startswith("cp.async.bulk.shared::cluster.global.mbarrier"):
            to, source, size, barrier, *blocks = x.operands  # blocks: of a multicast
            return self._call(
                x,
                "bulk_load",
                self.address(to),
                self.address(source),
                self.value(size),
                self.address(barrier),
                self.value(blocks[0]) if blocks else "kOwnBlock",
            )
        if kind == "cp.async.bulk.global.shared::cta.bulk_group":
            to, source, size = x.operands
            return self._call(
                x, "bulk_store", self.address(to), self.address(source), self.value(size)
            )
        raise Untranslatable(kind)

    def _tensor(self, operand: str) -> list[str]:
        """The map's address and the coordinates of [map, {...}]."""
        tensor_map, _, coordinates = operand.strip("[]").partition(",")
        return [
            self.value(tensor_map.strip()),
            *map(self.value, self.vector(coordinates.strip())),
        ]

    def _wgmma(self, x: Instruction) -> str:
        calls = {"fence": "wgmma_fence", "commit_group": "wgmma_commit", "wait_group": "wgmma_wait"}
        if x.opcode[1] in calls:
            return self._call(x, calls[x.opcode[1]], *map(self.value, x.operands))
        kind = ".".join(x.opcode[4:])
        shape = re.fullmatch(r"m64n(\d+)k(?:8|16)\.f32\.(bf16|f16|tf32)\.\2", kind)
        if not shape:
            raise Untranslatable(f"wgmma {kind}")
        out, a, b, adds, scale_a, scale_b, *transposed = x.operands
        if (scale_a, scale_b) != ("1", "1"):
            raise Untranslatable("wgmma with a negated operand")
        names = [self.value(y) for y in self.vector(out)]
        from_registers = a.startswith("{")
        # Operands of tf32 are never transposed.
        transposed = transposed or ["0", "0"]
        transpose_a = "0" if from_registers else transposed[0]
        registers, descriptor = "nullptr", self.value(a) if not from_registers else "0"
        lines = [f"uint32_t x[] = {{{', '.join(names)}}};"]
        if from_registers:
            lines.append(f"const uint32_t a[] = {{{', '.join(map(self.value, self.vector(a)))}}};")
            registers = "a"
        product = (
            f"Product{{{shape[1]}, Format::k_{shape[2]}, x, {registers}, "
            f"{descriptor}, {self.value(b)}, bool({self.value(adds)}), "
            f"bool({transpose_a}), bool({transposed[-1]})}}"
        )
        lines.append(self._call(x, "wgmma", product))
        lines += (f"{name} = x[{i}];" for i, name in enumerate(names))
        return "{ " + " ".join(lines) + " }"

    # --------------------------------------------------------------------------------- the whole

    def source(self, ptx_path: str) -> str:
        declared: dict[int, list[str]] = {}
        for s in self.entry.statements:
            if isinstance(s, Registers):
                declared.setdefault(s.bits, []).extend(s.names)
            elif isinstance(s, Label):
                self.lines.append(f"{s.name.replace('$', 'L')}:;")
            else:
                self.instruction(s)
        text = "\n".join(self.lines)
        used = set(re.findall(r"\bv_\w+", text))
        declarations: list[str] = []
        for size, names in declared.items():
            kind = "bool" if size == 1 else f"uint{size}_t"
            kept = [name for name in map(_register, names) if name in used]
            lines = (kept[i : i + 16] for i in range(0, len(kept), 16))
            declarations += (f"{kind} {', '.join(line)};" for line in lines)
        return "\n".join(
            (
                '#include "machine.h"',
                "using namespace emulator;",
                "static void run(Thread& t, uint64_t params) {",
                *declarations,
                text,
                "}",
                f"static const Parameter parameters[] = {{{', '.join(self.params)}}};",
                'extern "C" const Kernel kernel = {run, parameters, '
                f"{len(self.params)}, {self.dynamic_start}, {launch_registers(self.entry)}, "
                f'"{ptx_path}"}};',
                "",
            )
        )


def translate(module: str, ptx_path: str) -> dict[str, str]:
    """C++ of each kernel of a module's PTX, by its name."""
    return {x.name: _Translation(x).source(ptx_path) for x in entries(module)}
