"""Builds the CUDA library, without setuptools and without importing torch.

`python csrc/build.py` builds it in a checkout, where `gdn_triton.fast` finds it; `setup.py` and
`csrc/backend.py` call the same functions for an install. With `--wheel FOLDER` it makes a wheel
that has it, with `--install` it installs that wheel for the Python that runs this. Needs Linux,
nvcc 12.8 or newer, g++, and a torch 2.10 or newer of that Python, CUDA or CPU: its headers and
libraries are linked with. No GPU and no driver. The extra `cuda` of the package brings nvcc. The
environment variables NVCC, CUDA_HOME (or CUDA_PATH) and CXX choose the compilers.

What comes out is one shared library: LibTorch's stable ABI, machine code for the GPUs of
`ARCHITECTURES` only, CUDA's runtime linked in, nothing of Python. The build fails where ptxas says
that a kernel spills, uses local memory, or waits after every WGMMA: the last is only a note of
ptxas, with exit code 0.
"""

import argparse
import concurrent.futures
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCE_DIR = ROOT / "csrc"
LIBRARY = ROOT / "gdn_triton" / "fast" / "_gdn_fast.so"
OBJECTS = ROOT / "build" / "cuda"

TORCH_TARGET = (2, 10)  # the least torch whose stable ABI has what ops.cpp calls
CUDA_MIN = (12, 8)
# The packages that pip installs for a build.
TORCH_REQUIREMENT = "torch>=2.10"
NVCC_REQUIREMENT = "cuda-toolkit[nvcc,cudart,cccl]==13.0.*"
# The architectures: a folder of csrc with kernels, and the GPUs that nvcc compiles them for. sm_90
# without the a compiles too, into kernels without WGMMA.
ARCHITECTURES = {"sm90": "-gencode=arch=compute_90a,code=sm_90a"}


class Unbuildable(Exception):
    """Something that the build needs is not there: a sentence without its full stop."""


class BuildFailed(Exception):
    """A compiler failed, or made code that must not be used."""


class Toolchain(NamedTuple):
    nvcc: str
    cuda: tuple[int, int]
    cxx: str
    torch: Path


class Kernel(NamedTuple):
    """The report of ptxas on one kernel. stack: bytes of local memory, including spills."""

    name: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int


# --------------------------------------------------------------------------------------- toolchain


def package_folders(name: str) -> list[Path]:
    """Where a package is installed: for the Python that runs this, and in the environment that pip
    installs into. pip hides that environment's packages from the builds that it isolates; here
    files of torch and nvcc are used, and nothing is imported, so that the path is enough."""
    spec = importlib.util.find_spec(name)
    found = [Path(x) for x in (spec.submodule_search_locations or ())] if spec else []
    found += [Path(sysconfig.get_path(x)) / name for x in ("purelib", "platlib")]
    return [x for x in dict.fromkeys(found) if x.is_dir()]


def nvcc_candidates() -> list[str]:
    chosen = chosen_nvcc()
    if chosen:
        return [chosen]
    # The last ones are of the wheels of NVCC_REQUIREMENT.
    wheels = [str(x / "cu13" / "bin" / "nvcc") for x in package_folders("nvidia")]
    return [x for x in (shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc", *wheels) if x]


def chosen_nvcc() -> str | None:
    """The compiler that an environment variable names, or None."""
    if "NVCC" in os.environ:
        return os.environ["NVCC"]
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return f"{home}/bin/nvcc" if home else None


def nvcc_version(nvcc: str) -> tuple[int, int] | None:
    """None if there is no such compiler."""
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    found = re.search(r"release (\d+)\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2])) if found else None


def find_toolchain() -> Toolchain:
    """All that the build needs; Unbuildable names the first thing that is missing."""
    if sys.platform != "linux":
        raise Unbuildable(f"it is built on Linux only, this is {sys.platform}")
    nvcc, cuda = find_nvcc()
    cxx = os.environ.get("CXX") or shutil.which("g++")
    if cxx is None:
        raise Unbuildable("there is no C++ compiler g++; set CXX")
    return Toolchain(nvcc, cuda, cxx, find_torch())


def find_nvcc() -> tuple[str, tuple[int, int]]:
    """The first compiler that is new enough, and its version."""
    versions = {nvcc: nvcc_version(nvcc) for nvcc in nvcc_candidates()}
    there = {nvcc: version for nvcc, version in versions.items() if version}
    new = {nvcc: version for nvcc, version in there.items() if version >= CUDA_MIN}
    if new:
        return next(iter(new.items()))
    if there:
        nvcc, cuda = next(iter(there.items()))
        least = ".".join(map(str, CUDA_MIN))
        raise Unbuildable(f"{nvcc} is CUDA {cuda[0]}.{cuda[1]}; {least} or newer is needed")
    tried = f" (tried {', '.join(versions)})" if versions else ""
    raise Unbuildable(
        f'there is no CUDA compiler{tried}; pip install ".[cuda]" brings one, or set CUDA_HOME '
        "or NVCC"
    )


def find_torch() -> Path:
    """The folder of a torch that is new enough. It is not imported, which would take seconds."""
    folders = package_folders("torch")
    new = [x for x in folders if (x / "include/torch/csrc/stable/c/shim.h").exists()]
    if new:
        return new[0]
    least = ".".join(map(str, TORCH_TARGET))
    if folders:
        raise Unbuildable(f"torch at {folders[0]} is too old; {least} or newer is needed")
    raise Unbuildable(f"there is no torch; {least} or newer is needed to link with")


def missing_requirements() -> list[str]:
    """The parts that the build does not find and pip can install. A compiler that an environment
    variable names is never replaced by another one."""
    found = []
    try:
        find_nvcc()
    except Unbuildable:
        if chosen_nvcc() is None:
            found.append(NVCC_REQUIREMENT)
    try:
        find_torch()
    except Unbuildable:
        found.append(TORCH_REQUIREMENT)
    return found


# ----------------------------------------------------------------------------------------- commands


def nvcc_command(tools: Toolchain, architecture: str) -> list[str]:
    target = ARCHITECTURES[architecture]
    return [
        tools.nvcc,
        *("-ccbin", tools.cxx, "-std=c++17", "-O3", target, "-DNDEBUG"),
        *("-I", str(SOURCE_DIR), "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall"),
        *("-Xptxas", "-v,-warn-spills,-warn-lmem-usage"),
    ]


def cxx_command(tools: Toolchain) -> list[str]:
    target = "0x{:02x}{:02x}000000000000".format(*TORCH_TARGET)
    return [
        tools.cxx,
        *("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-DNDEBUG"),
        *("-DTORCH_STABLE_ONLY", f"-DTORCH_TARGET_VERSION={target}", "-I", str(SOURCE_DIR)),
        *("-isystem", str(tools.torch / "include"), *cuda_includes(tools)),
        # Error messages name this file: not by where it was built.
        f"-ffile-prefix-map={ROOT}/=",
    ]


def cuda_includes(tools: Toolchain) -> list[str]:
    """Where nvcc finds its own headers: it may be a wrapper, whose path says nothing of that."""
    dry = subprocess.run(
        [tools.nvcc, "--dryrun", "-x", "cu", "-c", "-", "-o", "-"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    found = re.search(r"^#\$ INCLUDES=(.*)$", dry.stderr, re.MULTILINE)
    if found is None:
        raise Unbuildable(f"{tools.nvcc} --dryrun does not say where CUDA's headers are")
    folders = (word.removeprefix("-I") for word in shlex.split(found[1]))
    return [word for folder in folders for word in ("-isystem", folder)]


def link_command(tools: Toolchain, objects: list[Path], library: Path) -> list[str]:
    # In the wheels nvcc.profile points to a lib64 that is called lib.
    wheel = Path(tools.nvcc).resolve().parent.parent / "lib"
    own = [f"-L{wheel}"] if (wheel / "libcudart_static.a").exists() else []
    # libtorch.so must stay, although the link needs no symbol of it: with a CUDA torch it brings
    # libtorch_cuda.so into scope, where the weak symbol of the stream is found. libstdc++ comes
    # first, because the linker would else use the parts of it that libtorch_cpu.so exports. The
    # options are in -Xlinker, because nvcc moves plain -l options to the end.
    libraries = "--push-state,--no-as-needed,-lstdc++,-ltorch,-ltorch_cpu,--pop-state"
    return [
        tools.nvcc,
        *("-ccbin", tools.cxx, "-shared", "-nodlink", "-cudart", "static", "-cudadevrt", "none"),
        *("-o", str(library), *map(str, objects), *own, f"-L{tools.torch / 'lib'}"),
        *("-Xlinker", f"{libraries},--exclude-libs,ALL,-z,defs"),
    ]


# -------------------------------------------------------------------------------------------- build


def sources() -> list[Path]:
    """The host code, then the kernels of each architecture."""
    kernels = [x for name in ARCHITECTURES for x in sorted(SOURCE_DIR.glob(f"{name}/**/*.cu"))]
    return [*sorted(SOURCE_DIR.glob("*.cpp")), *kernels]


def compilers(tools: Toolchain) -> dict[Path, list[str]]:
    """The command that compiles each source, without its input and output."""
    host = cxx_command(tools)
    device = {name: nvcc_command(tools, name) for name in ARCHITECTURES}
    return {
        x: host if x.suffix == ".cpp" else device[x.relative_to(SOURCE_DIR).parts[0]]
        for x in sources()
    }


def run(command: list[str]) -> str:
    """The output of the command. Raises BuildFailed with it if the command failed."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0:
        raise BuildFailed(f"{shlex.join(command)}\n{done.stdout}")
    return done.stdout


def is_current(target: Path, command: list[str]) -> bool:
    """Whether `target` was made by this command from files that are no newer."""
    record, listed = target.with_suffix(".command"), target.with_suffix(".d")
    if not (target.exists() and record.exists() and listed.exists()):
        return False
    if record.read_text() != shlex.join(command):
        return False
    _, _, files = listed.read_text().replace("\\\n", " ").partition(":")
    built = target.stat().st_mtime_ns
    return all(Path(x).exists() and Path(x).stat().st_mtime_ns <= built for x in shlex.split(files))


def compile_one(compiler: list[str], source: Path, target: Path) -> None:
    """Compiles changed sources. The compiler's output is in a .log next to the object."""
    outputs = ["-MMD", "-MF", str(target.with_suffix(".d")), "-c", str(source), "-o", str(target)]
    command = [*compiler, *outputs]
    if is_current(target, command):
        return
    target.unlink(missing_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.with_suffix(".log").write_text(run(command))
    target.with_suffix(".command").write_text(shlex.join(command))


def build(
    tools: Toolchain, library: Path = LIBRARY, objects: Path = OBJECTS, jobs: int | None = None
) -> list[Kernel]:
    """Compiles changed sources, checks the code, and links `library`. Returns its kernels.

    An older library is removed first, so none is left after a build that fails.
    """
    library.unlink(missing_ok=True)
    kernel_sources = [source for source in sources() if source.suffix == ".cu"]
    for name in ARCHITECTURES:
        if not any(SOURCE_DIR / name in source.parents for source in kernel_sources):
            raise BuildFailed(f"there is no .cu file under {SOURCE_DIR / name}")
    commands = compilers(tools)
    targets = {x: objects / x.relative_to(SOURCE_DIR).with_suffix(".o") for x in commands}
    # Those of the forward take ten times as long as the others: none of them is left for the end.
    slowest_first = sorted(targets, key=lambda x: x.parent.name != "instantiations")
    with concurrent.futures.ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        work = [pool.submit(compile_one, commands[x], x, targets[x]) for x in slowest_first]
        for done in work:
            done.result()
    logs = {source: targets[source].with_suffix(".log").read_text() for source in kernel_sources}
    kernels = [kernel for log in logs.values() for kernel in kernels_of(log)]
    bad = [
        f"{source.relative_to(ROOT)}: {line}"
        for source, log in logs.items()
        for line in faults(log)
    ]
    if bad:
        raise BuildFailed("\n".join(bad))
    library.parent.mkdir(parents=True, exist_ok=True)
    run(link_command(tools, list(targets.values()), library))
    return kernels


# --------------------------------------------------------------------------------- what ptxas said


def kernels_of(log: str) -> list[Kernel]:
    """The kernels of an nvcc log written with -Xptxas -v."""
    pattern = re.compile(
        r"Function properties for (?P<name>\S+)\n"
        r"\s*(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
        r"(?P<loads>\d+) bytes spill loads\n"
        r"(?:.*\n)*?.*Used (?P<registers>\d+) registers"
    )
    return [
        Kernel(x["name"], int(x["registers"]), int(x["stack"]), int(x["stores"]), int(x["loads"]))
        for x in pattern.finditer(log)
    ]


def faults(log: str) -> list[str]:
    """Why the machine code that this log is about must not be used."""
    found = [
        f"{x.name}: {x.stack} bytes of local memory, {x.spill_stores} bytes of spill stores, "
        f"{x.spill_loads} of spill loads"
        for x in kernels_of(log)
        if x.stack or x.spill_stores or x.spill_loads
    ]
    # Serialised WGMMA (C7510 to C7514) and a setmaxnreg that was ignored (C7508).
    return found + [line for line in log.splitlines() if "Potential Performance Loss" in line]


# ------------------------------------------------------------------------------------------- wheel


def manylinux(library: Path) -> str:
    """The platform tag of a wheel with this library: of the newest glibc that it asks for, and at
    the least of the one that torch's own wheels ask for."""
    asked = {int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)\b", library.read_bytes())}
    return f"manylinux_2_{max({28, *asked})}_{platform.machine()}"


def make_wheel(library: Path, folder: Path) -> Path:
    """A wheel of this checkout with a library that is built: for every Python. setuptools leaves
    files where it builds, and takes what it finds there: so it builds a copy."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "source"
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        for name in ("gdn_triton", "csrc"):
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
        for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
        done = subprocess.run(
            [*command, "-w", scratch, str(source)],
            env={**os.environ, "GDN_BUILD_CUDA": str(library)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise BuildFailed(done.stdout)
        (wheel,) = Path(scratch).glob("*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(wheel, folder))


def show(tools: Toolchain, library: Path, objects: Path) -> None:
    """The commands that a build would run."""
    commands = compilers(tools)
    targets = {x: objects / x.relative_to(SOURCE_DIR).with_suffix(".o") for x in commands}
    for source, target in targets.items():
        print(shlex.join([*commands[source], "-c", str(source), "-o", str(target)]))
    print(shlex.join(link_command(tools, list(targets.values()), library)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the CUDA library in this checkout.")
    parser.add_argument("--library", type=Path, default=LIBRARY, help="default: %(default)s")
    parser.add_argument("--objects", type=Path, default=OBJECTS, help="default: %(default)s")
    parser.add_argument("--jobs", type=int, help="files at a time; default: one a core")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run none")
    parser.add_argument("--wheel", type=Path, metavar="FOLDER", help="also a wheel that has it")
    parser.add_argument(
        "--install", action="store_true", help="also install such a wheel for this Python"
    )
    options = parser.parse_args()
    try:
        tools = find_toolchain()
        if options.dry_run:
            return show(tools, options.library.resolve(), options.objects.resolve())
        kernels = build(tools, options.library.resolve(), options.objects.resolve(), options.jobs)
    except Unbuildable as why:
        sys.exit(f"The CUDA library cannot be built: {why}.")
    except BuildFailed as why:
        sys.exit(f"The build of the CUDA library failed.\n{why}")
    for kernel in kernels:
        print(f"{kernel.registers:4} registers  {kernel.name}")
    print(f"built {options.library} with CUDA {tools.cuda[0]}.{tools.cuda[1]}")
    if not (options.wheel or options.install):
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            wheel = make_wheel(options.library.resolve(), options.wheel or Path(folder))
        except BuildFailed as why:
            sys.exit(f"The wheel could not be made.\n{why}")
        print(f"made {wheel.name}")
        if options.install:
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
            done = subprocess.run([*command, "--force-reinstall", str(wheel)], check=False)
            if done.returncode != 0:
                sys.exit(done.returncode)
            print(f"installed {wheel.name}")


if __name__ == "__main__":
    main()
