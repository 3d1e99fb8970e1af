"""The trees of files that pages show."""

import re


def files_shown(block: str) -> list[str]:
    """The files of a block with a folder's line, then its files', further in. A line has a folder,
    or some files, and then what they are."""
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
