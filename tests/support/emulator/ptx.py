"""Reads the PTX of a module: its kernels, and the statements of each.

It knows the grammar that nvcc writes, inline assembly with scopes of its own included, and nothing
of what an instruction does.
"""

import re
from typing import NamedTuple

_LABEL = re.compile(r"([$\w]+):")
_COMMENT = re.compile(r"//[^\n]*")
_TARGETS = re.compile(r"([$\w]+):\s*\.branchtargets\s+([^;]*);")
_DIRECTIVE_LINE = re.compile(r"\.(loc|file|section|version|target|address_size)\b[^\n]*")
_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\(")
_BOUND = re.compile(r"\.(maxntid|minnctapersm|maxnreg)\s+([\d,\s]*\d)")
_PARAM = re.compile(r"\.param(?:\s+\.align\s+(\d+))?\s+\.(\w+)\s+(\w+)(?:\[(\d+)\])?")
_SHARED = re.compile(r"\.shared(?:\s+\.align\s+(\d+))?\s+\.(\w+)\s+([$\w]+)(?:\[(\d*)\])?")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.DOTALL)
_COUNTED = re.compile(r"(%\w+)<(\d+)>")


class Variable(NamedTuple):
    """Memory with a name: a parameter, or shared memory. bytes: None for what a launch gives."""

    name: str
    alignment: int
    bytes: int | None


class Instruction(NamedTuple):
    """guard: the predicate that it runs under, with a ! in front of one that must be false."""

    line: int
    guard: str | None
    opcode: tuple[str, ...]
    operands: tuple[str, ...]


class Label(NamedTuple):
    name: str


class Registers(NamedTuple):
    """All names, of one width in bits; 1 for predicates."""

    names: tuple[str, ...]
    bits: int


class Entry(NamedTuple):
    """A kernel. Names that a scope of inline assembly declares have its number behind them.
    bounds: the numbers of its .maxntid, .minnctapersm and .maxnreg, of those that it has. targets:
    the labels of each list that a branch chooses from."""

    name: str
    bounds: dict[str, tuple[int, ...]]
    params: tuple[Variable, ...]
    shared: tuple[Variable, ...]
    statements: tuple[Instruction | Label | Registers, ...]
    targets: dict[str, list[str]]


def width(type_name: str) -> int:
    """Bits of a type such as f32; 1 for pred."""
    return 1 if type_name == "pred" else int(type_name[1:])


def _variable(found: re.Match[str]) -> Variable:
    alignment, type_name, name, count = found.groups()
    size = width(type_name) // 8
    length = None if count == "" else size * int(count or 1)
    return Variable(name, int(alignment or size), length)


def split_operands(text: str) -> tuple[str, ...]:
    """At the commas that lie in no bracket."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "[{(":
            depth += 1
        elif c in "]})":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return tuple(part for part in parts if part)


class _Body:
    """The statements of a kernel, read from behind its opening brace to the closing one."""

    def __init__(self, text: str, at: int, line: int) -> None:
        self.text, self.at, self.line = text, at, line
        self.scopes: list[tuple[int, set[str]]] = []
        self.opened = 0
        self.shared: list[Variable] = []
        self.statements: list[Instruction | Label | Registers] = []
        self.targets: dict[str, list[str]] = {}
        while self._statement():
            pass

    def _skip(self, end: int) -> str:
        part = self.text[self.at : end]
        self.line += part.count("\n")
        self.at = end
        return part

    def _statement(self) -> bool:
        """Reads one; False at the end of the body."""
        blank = re.compile(r"\s*").match(self.text, self.at)
        assert blank is not None
        self._skip(blank.end())
        c = self.text[self.at]
        if c == "{":
            self.opened += 1
            self.scopes.append((self.opened, set()))
            self._skip(self.at + 1)
        elif c == "}":
            self._skip(self.at + 1)
            if not self.scopes:
                return False
            self.scopes.pop()
        elif directive := _DIRECTIVE_LINE.match(self.text, self.at):
            self._skip(directive.end())
        elif targets := _TARGETS.match(self.text, self.at):
            self.targets[targets[1]] = [name.strip() for name in targets[2].split(",")]
            self._skip(targets.end())
        elif label := _LABEL.match(self.text, self.at):
            self.statements.append(Label(label[1]))
            self._skip(label.end())
        else:
            line = self.line
            end = self.text.index(";", self.at)
            self._instruction(self._skip(end).strip(), line)
            self._skip(end + 1)
        return True

    def _instruction(self, text: str, line: int) -> None:
        if not text or text.startswith(".pragma"):
            return
        if shared := _SHARED.match(text):
            self.shared.append(_variable(shared))
        elif registers := _REGISTERS.match(text):
            self._registers(registers)
        else:
            guard = None
            if text.startswith("@"):
                mark, text = text[1:].split(None, 1)
                negated = mark.startswith("!")
                guard = "!" * negated + self._named(mark.lstrip("!"))
            opcode, _, rest = text.partition(" " if " " in text else "\t")
            opcode, _, more = opcode.partition("\t")
            operands = split_operands(self._named(more + rest))
            parts = tuple(opcode.split("."))
            self.statements.append(Instruction(line, guard, parts, operands))

    def _registers(self, found: re.Match[str]) -> None:
        names: list[str] = []
        for name in found[2].split(","):
            if counted := _COUNTED.fullmatch(name.strip()):
                names += (f"{counted[1]}{i}" for i in range(int(counted[2])))
            elif self.scopes:
                number, own = self.scopes[-1]
                own.add(name.strip())
                names.append(f"{name.strip()}_{number}")
            else:
                names.append(name.strip())
        self.statements.append(Registers(tuple(names), width(found[1])))

    def _named(self, text: str) -> str:
        """With the names of scopes told apart."""
        for number, own in reversed(self.scopes):
            for name in own:
                text = re.sub(rf"(?<![\w%$]){name}(?![\w$])", f"{name}_{number}", text)
        return text


def entries(text: str) -> list[Entry]:
    """All kernels of a module."""
    text = _COMMENT.sub("", text)
    heads = list(_ENTRY.finditer(text))
    result = []
    for head in heads:
        params_end = text.index(")", head.end())
        params = tuple(_variable(x) for x in _PARAM.finditer(text, head.end(), params_end))
        start = text.index("{", params_end) + 1
        bounds = {
            x[1]: tuple(map(int, x[2].split(","))) for x in _BOUND.finditer(text, params_end, start)
        }
        body = _Body(text, start, text.count("\n", 0, start) + 1)
        before = {x.name: x for x in map(_variable, _SHARED.finditer(text, 0, head.start()))}
        used = {
            name
            for s in body.statements
            if isinstance(s, Instruction)
            for operand in s.operands
            for name in re.findall(r"[$\w]+", operand)
        }
        shared = [x for x in before.values() if x.name in used] + body.shared
        statements = tuple(body.statements)
        result.append(Entry(head[1], bounds, params, tuple(shared), statements, body.targets))
    return result
