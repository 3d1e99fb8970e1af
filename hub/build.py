"""Builds a kernel for Hugging Face's package `kernels` from this checkout: one folder of Python
files.

    python hub/build.py FOLDER

FOLDER/build/torch-universal then holds the package's operators. The package `kernels` imports a
kernel by its path, and one process may import several versions of it, and an installed gdn_triton
too. Therefore the imports are relative, and the operators are registered in torch's library under a
namespace that is a digest of the sources. `hub/layers.py` has the layers to which transformers maps
its functions. A universal kernel contains no machine code: it runs on Triton, and on the CPU in the
reference. The script needs only Python.
"""

import argparse
import ast
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "gdn_triton"
VARIANT = "torch-universal"
# Adapters, the layer and the demonstration are for programs that install the package.
LEFT_OUT = ("integrations", "layers", "demo.py", "__main__.py")


def sources() -> list[Path]:
    """Returns the paths of the source files, relative to the package and sorted."""
    found = (path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
    return sorted(path for path in found if path.parts[0] not in LEFT_OUT)


def rewritten(path: Path, text: str, namespace: str) -> str:
    """Returns a module's text with relative imports, and with its operators in `namespace`."""
    dots = "." * len(path.parts)
    text = re.sub(
        r"^(\s*)from gdn_triton(?:\.([\w.]+))? import ",
        lambda found: f"{found[1]}from {dots}{found[2] or ''} import ",
        text,
        flags=re.MULTILINE,
    )
    text = text.replace('"gdn_triton::', f'"{namespace}::')
    text = text.replace("torch.ops.gdn_triton.", f"torch.ops.{namespace}.")
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        if any(name.split(".")[0] == PACKAGE.name for name in names):
            raise SystemExit(f"{path}: an import of the package by its name: {names}")
    return text


def build(folder: Path) -> Path:
    """Writes the kernel's variant under `folder`, and replaces an older one there."""
    texts = {path: (PACKAGE / path).read_text(encoding="utf-8") for path in sources()}
    texts[Path("layers.py")] = (ROOT / "hub" / "layers.py").read_text(encoding="utf-8")
    contents = "".join(f"{path}\n{text}" for path, text in texts.items())
    namespace = f"gdn_triton_{hashlib.sha256(contents.encode()).hexdigest()[:12]}"
    variant = folder / "build" / VARIANT
    shutil.rmtree(variant, ignore_errors=True)
    for path, text in texts.items():
        target = variant / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(rewritten(path, text, namespace), encoding="utf-8")
    with (variant / "__init__.py").open("a", encoding="utf-8") as file:
        file.write("\nfrom . import layers  # noqa: E402\n")
    metadata = {
        "id": namespace,
        "name": "gdn-triton",
        "version": 1,
        "license": "MIT",
        "python-depends": ["einops"],
        # Every variant must name a backend. The tensors of each call decide which backend runs.
        "backend": {"type": "cuda"},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    shutil.copy(ROOT / "LICENSE", folder)
    return variant


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a kernel for the package kernels.")
    parser.add_argument("folder", type=Path, help="the kernel's repository")
    print(f"made {build(parser.parse_args().folder)}")


if __name__ == "__main__":
    sys.exit(main())
