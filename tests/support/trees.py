"""Reads the trees of files in pages."""

import re


def files_shown(block: str) -> list[str]:
    """The files of a block in which a line names a folder, and more indented lines name its files.
    After the name of a folder, or of some files, a line has their description."""
    folders: list[tuple[int, str]] = []
    shown = []
    for line in block.splitlines():
        names = re.match(r"( *)(\w+/|\w+\.\w+(?: \w+\.\w+)*)(?: |$)", line)
        assert names, line
        indent, entries = len(names[1]), names[2].split()
        while folders and folders[-1][0] >= indent:
            folders.pop()
        inside = "".join(name for _, name in folders)
        if entries[0].endswith("/"):
            folders.append((indent, entries[0]))
        else:
            shown += [inside + entry for entry in entries]
    return shown
