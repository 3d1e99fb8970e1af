"""The files of csrc: includes, namespaces and lengths, and the page that lists them."""

import re
from pathlib import Path

from trees import files_shown

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
ARCHITECTURES = sorted(path.name for path in CSRC.glob("sm*"))
SOURCES = {
    path: path.read_text(encoding="utf-8")
    for ending in ("cpp", "cu", "cuh", "h")
    for path in sorted(CSRC.rglob(f"*.{ending}"))
}
MOST_LINES = 500


def included(text: str) -> list[str]:
    return re.findall(r'^#include "(.*)"$', text, re.M)


def test_includes_name_a_file_by_its_path_from_csrc() -> None:
    """In one order; a .cpp's own header comes first."""
    for path, text in SOURCES.items():
        names = included(text)
        missing = [name for name in names if ".." in name or not (CSRC / name).is_file()]
        assert not missing, path
        own = f"{path.stem}.h"
        assert names == sorted(names, key=lambda name: (name != own, name)), path
        assert len(set(names)) == len(names), path


def test_a_file_says_what_it_is_and_a_header_is_read_once() -> None:
    for path, text in SOURCES.items():
        assert text.startswith("// "), path
        assert ("\n#pragma once\n" in text) == (path.suffix in (".cuh", ".h")), path
        assert text.count("\n") < MOST_LINES, path


def test_an_architecture_is_known_by_its_entry_alone() -> None:
    """Its folder includes what all share, and of its own; the dispatch alone includes its entry."""
    for path, text in SOURCES.items():
        folder = path.relative_to(CSRC).parts[0]
        names = included(text)
        of_one = [name for name in names if name.split("/")[0] in ARCHITECTURES]
        if folder in ARCHITECTURES:
            assert {name.split("/")[0] for name in of_one} <= {folder}, path
            assert "dispatch.h" not in names, path
        elif path.name == "dispatch.cpp":
            assert of_one == [f"{name}/entry.h" for name in ARCHITECTURES]
        else:
            assert of_one == [], path


# The rooms of an architecture's folder, and the other rooms whose files they include.
ROOMS: dict[str, set[str]] = {
    "tile": set(),
    "plan": {"tile"},
    "forward": {"tile", "plan"},
    "backward": {"tile", "plan"},
}


def test_rooms_include_those_below_them() -> None:
    """The two directions do not know each other, and what is decided knows no kernel. Files at the
    top of the folder are below all rooms."""
    for path, text in SOURCES.items():
        parts = path.relative_to(CSRC).parts
        if parts[0] not in ARCHITECTURES:
            continue
        room = parts[1] if len(parts) > 2 else None
        inside = [name.split("/")[1:] for name in included(text) if name.startswith(parts[0])]
        rooms = {first for first, *rest in inside if rest}
        allowed = set() if room is None else ROOMS[room] | {room}
        assert rooms <= allowed, path


def test_namespaces_are_those_of_the_folders() -> None:
    """`gdn`, then an architecture's folder, then `backward` of what is in such a folder. The last
    one may be opened by itself, in a file that has something of the one around it too."""
    for path, text in SOURCES.items():
        folders = path.relative_to(CSRC).parts[:-1]
        names = ["gdn", *(name for name in folders if name in (*ARCHITECTURES, "backward"))]
        found = set(re.findall(r"^namespace (gdn[\w:]*) \{$", text, re.M))
        if path.name == "ops.cpp":  # it registers operators, and nothing calls it
            assert found == set()
        elif found != {"::".join(names)}:
            assert found == {"::".join(names[:-1])}, path
            assert f"\nnamespace {names[-1]} {{\n" in text, path


def test_the_table_lists_the_build_macros() -> None:
    """Those that a build may define; `csrc/README.md` says what each sets."""
    asked = {
        name
        for text in SOURCES.values()
        for name in re.findall(r"^#if(?:n?def| defined\() ?(GDN_\w+)", text, re.M)
    }
    table = (CSRC / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(GDN_\w+)` \|", table, re.M)) == asked


def test_torch_is_seen_by_the_operators_alone() -> None:
    seen = [path.name for path, text in SOURCES.items() if re.search(r"<torch/|\btorch::", text)]
    assert sorted(seen) == ["arguments.h", "ops.cpp", "tensors.h"]


def test_the_pages_list_the_files() -> None:
    """The first block of csrc/sm90/README.md, and for what is not in that folder csrc/README.md."""
    text = (CSRC / "sm90" / "README.md").read_text(encoding="utf-8")
    block = re.findall(r"^```text\n(csrc/\n.*?)^```$", text, re.S | re.M)[0]
    files = [f"csrc/{path.relative_to(CSRC)}" for path in (*SOURCES, *CSRC.rglob("*.py"))]
    of_sm90 = [name for name in files if name.startswith("csrc/sm90/")]
    assert sorted(files_shown(block)) == sorted(of_sm90)
    table = (CSRC / "README.md").read_text(encoding="utf-8")
    others = set(files) - set(of_sm90)
    assert not sorted(name for name in others if f"`{name}`" not in table)
