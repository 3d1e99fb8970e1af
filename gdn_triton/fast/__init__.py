"""The CUDA library: whether it is there, and why not."""


def why_unavailable() -> str | None:
    """A sentence why the CUDA library cannot be used, or None if it can."""
    return "The CUDA library is not there: this version has no CUDA kernels yet."


def is_available() -> bool:
    """Whether the CUDA library can be used."""
    return why_unavailable() is None
