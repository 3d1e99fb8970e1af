"""Environment variables that a validated call depends on; their rows are in
`docs/environment.md`."""

import os


def batch_invariant() -> bool:
    """`GDN_BATCH_INVARIANT`: whether a sequence must give the same bits in any batch.

    Validation reads it at every call; ValueError for another value than 0 and 1.
    """
    asked = os.environ.get("GDN_BATCH_INVARIANT", "0")
    if asked not in ("0", "1"):
        raise ValueError(f"GDN_BATCH_INVARIANT must be 0 or 1, got {asked!r}")
    return asked == "1"
