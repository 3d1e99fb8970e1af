"""Compares the machine code of two CUDA libraries, kernel by kernel and but for names.

`python csrc/same_code.py before.so after.so` reads objects and cubins too. After a change of names,
files or host code alone every kernel has the instructions, registers and shared memory that it had,
so such a change needs no GPU to be judged. Exit code 0: all kernels are equal. Needs cuobjdump,
which comes with CUDA and with Triton, and c++filt.

A kernel is known by its name without namespaces, and by its template arguments. One whose name is
new is equal to one that is gone if their code is the same. Line numbers are not compared.
"""

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Kernel(NamedTuple):
    name: str  # as a reader writes it, without namespaces
    code: str  # the GPU, registers and memory, and then the instructions, a line each


class Comparison(NamedTuple):
    equal: list[str]
    renamed: list[tuple[str, str]]  # before, after
    different: list[str]  # a sentence each


def find_cuobjdump() -> str | None:
    """The toolkit's, or the one that comes in every wheel of Triton; None if there is none."""
    found = shutil.which("cuobjdump")
    spec = importlib.util.find_spec("triton")  # not import: it takes seconds
    if found is None and spec is not None and spec.origin is not None:
        wheel = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        found = str(wheel) if wheel.exists() else None
    return found


def output(*command: str | Path, given: str | None = None) -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def kernels_of(sass: str, usage: str) -> list[tuple[str, str]]:
    """Mangled names and code in the output of cuobjdump with --dump-sass and
    --dump-resource-usage."""
    used = re.findall(r"^ *Function (\S+):\s*\n\s*(REG:.*)$", usage, re.M)
    found, lines, gpu = [], [], ""
    for line in map(str.strip, sass.splitlines()):
        if starts := re.match(r"code for (\S+)$", line):
            gpu = starts[1]
        elif starts := re.match(r"Function : (\S+)$", line):
            lines = [gpu]
            found.append((starts[1], lines))
        elif line.startswith((".headerflags", "/*")):
            lines.append(re.sub(r"\s+", " ", line))
    # Both outputs list the kernels of each file in one order, which tells two kernels of one name
    # apart.
    if sorted(name for name, _ in found) != sorted(name for name, _ in used):
        raise SystemExit("cuobjdump lists other kernels with their code than with their registers")
    resources: dict[str, list[str]] = {}
    for name, line in used:
        resources.setdefault(name, []).append(line)
    return [
        (name, "\n".join([lines[0], resources[name].pop(0), *lines[1:]])) for name, lines in found
    ]


def without_namespaces(name: str) -> str:
    """A demangled name without the namespaces of anything that is named in it."""
    return re.sub(r"(\(anonymous namespace\)|\b[A-Za-z_]\w*)::", "", name)


def read(library: Path, cuobjdump: str) -> list[Kernel]:
    sass = output(cuobjdump, "--dump-sass", library)
    found = kernels_of(sass, output(cuobjdump, "--dump-resource-usage", library))
    if not found:
        raise SystemExit(f"{library} has no kernels")
    names = output("c++filt", given="\n".join(name for name, _ in found)).splitlines()
    return [
        Kernel(without_namespaces(name), code) for name, (_, code) in zip(names, found, strict=True)
    ]


def compare(before: Iterable[Kernel], after: Iterable[Kernel]) -> Comparison:
    left, right = Counter(before), Counter(after)
    same = left & right
    gone, new = list((left - same).elements()), list((right - same).elements())
    renamed, different = [], []
    new_names = {kernel.name for kernel in new}
    for kernel in gone:
        if kernel.name in new_names:
            other = next((x for x in new if x.name == kernel.name), None)
            if other is None:
                different.append(f"{kernel.name}: there are fewer of that name.")
                continue
            different.append(f"{kernel.name}: {_difference(kernel.code, other.code)}")
        else:
            other = next((x for x in new if x.code == kernel.code), None)
            if other is None:
                different.append(f"{kernel.name}: it is gone, and no new kernel has its code.")
                continue
            renamed.append((kernel.name, other.name))
        new.remove(other)
    different += [f"{kernel.name}: it is new, and no kernel had its code." for kernel in new]
    return Comparison(sorted(kernel.name for kernel in same.elements()), renamed, different)


def _difference(before: str, after: str) -> str:
    """Where two codes begin to differ."""
    left, right = before.splitlines(), after.splitlines()
    pairs = zip(left, right, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
    shown = [x[at] if at < len(x) else "nothing" for x in (left, right)]
    return f"{len(left)} lines and {len(right)}; line {at + 1} was `{shown[0]}`, is `{shown[1]}`."


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the machine code of two CUDA libraries.")
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    options = parser.parse_args()
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        raise SystemExit("There is no cuobjdump, neither CUDA's nor Triton's.")
    if shutil.which("c++filt") is None:
        raise SystemExit("There is no c++filt; it comes with binutils.")
    found = compare(read(options.before, cuobjdump), read(options.after, cuobjdump))
    for before, after in found.renamed:
        print(f"renamed: {before} is {after}")
    for sentence in found.different:
        print(f"different: {sentence}")
    equal = len(found.equal) + len(found.renamed)
    print(f"{equal} kernels are equal but for names, {len(found.different)} are not")
    sys.exit(bool(found.different))


if __name__ == "__main__":
    main()
