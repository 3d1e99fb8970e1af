"""Builds the CUDA library for a CPU: its own host code, and C++ made from the PTX of its kernels.

`PYTHONPATH=.:tests/support python -m emulator.build` writes `_gdn_fast.so` to `build/emulator`. It
registers the same operators for CPU tensors. The build needs nvcc, g++ and torch, as
`csrc/build.py` does.
"""

import argparse
import concurrent.futures
import hashlib
import os
import re
import shlex
import subprocess
from pathlib import Path

from library_wheel import load_builder

from emulator.translate import translate

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
FOLDER = ROOT / "build" / "emulator"
LIBRARY = "_gdn_fast.so"

# PTX alone: the machine code, which is not needed, takes most of the time of a build.
_TARGET = "-gencode=arch=compute_90a,code=compute_90a"
# No contraction: in PTX a fused product and sum is one instruction already.
_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-w", "-march=native", "-ffp-contract=off")

# Some installations of g++ have libstdc++ only as an archive, which is then copied into each
# library. The symbols of an exported copy would be mixed with those of torch's libstdc++.
PRIVATE = "-Wl,--exclude-libs,ALL"

# ops.cpp, which takes tensors of the CPU for those of a GPU.
_OPERATORS = """
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#define is_cuda is_cpu
#include "ops.cpp"
"""
# Where torch has no CUDA this function raises.
_GUARDS = """
#include <cstdint>
extern "C" int32_t aoti_torch_create_device_guard(int32_t, void** guard) {
  *guard = nullptr;
  return 0;
}
extern "C" int32_t aoti_torch_delete_device_guard(void*) { return 0; }
"""


class _Build:
    """The files of one folder. A file of an earlier build that has not changed stays."""

    def __init__(self, folder: Path, csrc: Path, defines: tuple[str, ...] = ()) -> None:
        self.folder, self.csrc = folder, csrc
        self.builder = builder = load_builder(csrc)
        self.tools = tools = builder.find_toolchain()
        folder.mkdir(parents=True, exist_ok=True)
        flags = [*_FLAGS, "-I", str(HERE)]
        settings = [f'-DEMULATOR_FOLDER="{folder}"', f'-DEMULATOR_FLAGS="{shlex.join(flags)}"']
        self.machine = [tools.cxx, *flags, "-O2", *builder.cuda_includes(tools), *settings]
        self.host = [*builder.cxx_command(tools), "-fvisibility=default", "-w"]
        self.device = [
            *(tools.nvcc, "-ccbin", tools.cxx, "-std=c++17", "-O3", _TARGET, "-DNDEBUG"),
            *("-lineinfo", "-I", str(csrc), "-Xcompiler", "-fPIC,-w", "-w", *defines),
        ]
        self.jobs: list[tuple[list[str], Path, Path]] = []

    def add(self, command: list[str], source: Path) -> Path:
        """The object that a source will be."""
        under = source.relative_to(self.csrc) if self.csrc in source.parents else Path(source.name)
        name = str(under.with_suffix("")).replace("/", "_")
        if source.suffix == ".cu":
            keep = self.folder / f"{name}.keep"
            keep.mkdir(exist_ok=True)
            command = [*command, "--keep", "--keep-dir", str(keep)]
        target = self.folder / f"{name}.o"
        self.jobs.append((command, source, target))
        return target

    def made(self, name: str, text: str) -> Path:
        """A source that is written here."""
        path = self.folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        return path

    def compile(self) -> None:
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            work = [pool.submit(self.builder.compile_one, *job) for job in self.jobs]
            for done in work:
                done.result()
        self._translate([target for _, source, target in self.jobs if source.suffix == ".cu"])

    def _translate(self, objects: list[Path]) -> None:
        """C++ of every kernel, and which file has which. Files are named by what they contain and
        include, so that the machine code that a run makes of them is found again."""
        index = []
        included = (HERE / "machine.h").read_bytes()
        for target in objects:
            (ptx,) = target.with_suffix(".keep").glob("*.ptx")
            for name, text in translate(ptx.read_text(), str(ptx)).items():
                digest = hashlib.sha256(included + text.encode()).hexdigest()[:20]
                index.append(f"{name} {self.made(f'kernel_{digest}.cpp', text).name}\n")
        (self.folder / "kernels.txt").write_text("".join(index))

    def link(self, output: Path, objects: list[Path], *options: str) -> Path:
        linker = [f"-L{self.folder}", f"-Wl,-rpath,{self.folder}", "-lemulator", PRIVATE]
        command = [self.tools.cxx, *map(str, objects), "-o", str(output), *linker, *options]
        self.builder.run(command)
        return output


def _runtime(made: _Build) -> list[Path]:
    """The objects of the machine and of the replacement of CUDA's runtime."""
    sources = (*sorted(HERE.glob("*.cpp")), made.made("guards.cpp", _GUARDS))
    return [made.add(made.machine, source) for source in sources]


def _link_runtime(made: _Build, objects: list[Path]) -> None:
    library = str(made.folder / "libemulator.so")
    command = [made.tools.cxx, "-shared", *map(str, objects), "-o", library, "-ldl", PRIVATE]
    made.builder.run(command)


def build(
    folder: Path = FOLDER,
    csrc: Path = ROOT / "csrc",
    defines: tuple[str, ...] = (),
    heads: str = "",
) -> Path:
    """The library. `heads`: a regular expression for the kernels of the forward that are wanted, by
    the names in `sm90/instantiations`; a call of another one ends the process."""
    made = _Build(folder, csrc, defines)
    runtime = _runtime(made)
    objects = [
        made.add(made.host, made.made("operators.cpp", _OPERATORS)),
        made.add(made.host, csrc / "dispatch.cpp"),
    ]
    for source in made.builder.sources():
        is_instance = source.parent.name == "instantiations"
        if source.suffix == ".cu" and not (is_instance and not re.search(heads, source.stem)):
            objects.append(made.add(made.device, source))
    made.compile()
    _link_runtime(made, runtime)
    left_out = made.made("left_out.cpp", _left_out(objects))
    made.builder.run([*made.host, "-c", str(left_out), "-o", str(left_out.with_suffix(".o"))])
    objects.append(left_out.with_suffix(".o"))
    torch_libraries = (
        f"-L{made.tools.torch / 'lib'}",
        "-Wl,--no-as-needed",
        "-ltorch",
        "-ltorch_cpu",
    )
    return made.link(folder / LIBRARY, objects, "-shared", *torch_libraries)


def build_program(folder: Path, source: Path, csrc: Path = ROOT / "csrc") -> Path:
    """A program of one .cu file, host code and kernels."""
    made = _Build(folder, csrc)
    runtime = _runtime(made)
    program = made.add(made.device, source)
    made.compile()
    _link_runtime(made, runtime)
    return made.link(folder / source.stem, [program])


def _symbols(objects: list[Path], which: str) -> set[str]:
    done = subprocess.run(
        ["nm", "--format=just-symbols", which, *map(str, objects)],
        capture_output=True,
        text=True,
        check=True,
    )
    return {word for word in done.stdout.split() if word.startswith("_ZN3gdn")}


def _left_out(objects: list[Path]) -> str:
    """Source of the library's functions that no object has."""
    missing = _symbols(objects, "--undefined-only") - _symbols(objects, "--defined-only")
    return "\n".join(
        (
            "#include <cstdio>",
            "#include <cstdlib>",
            'extern "C" void emulator_left_out() {',
            '  std::fputs("this build of the emulated library leaves the kernel out\\n", stderr);',
            "  std::abort();",
            "}",
            *(f'asm(".globl {x}\\n{x}: call emulator_left_out@PLT\\n");' for x in sorted(missing)),
            "",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the CUDA library for a CPU.")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="default: %(default)s")
    parser.add_argument("--csrc", type=Path, default=ROOT / "csrc", help="default: %(default)s")
    parser.add_argument("--define", action="append", default=[], metavar="NAME[=VALUE]")
    parser.add_argument(
        "--heads", default="", metavar="REGEX", help="some of the forward's kernels"
    )
    options = parser.parse_args()
    defines = tuple(f"-D{x}" for x in options.define)
    library = build(options.folder.resolve(), options.csrc.resolve(), defines, options.heads)
    print(f"built {library}")


if __name__ == "__main__":
    main()
