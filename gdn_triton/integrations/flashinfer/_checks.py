"""Checks of the arguments that FlashInfer's functions share."""

from numbers import Real

# The names of FlashInfer's own kernels, which callers of these functions may pass.
PREFILL_BACKENDS = ("auto", "flashinfer", "cake_gdn", "cudnn")
DECODE_BACKENDS = ("auto", "flashinfer", "cake_gdn", "rubin")


def check_backend(backend: str, known: tuple[str, ...]) -> None:
    """Checks only the name. `GDN_BACKEND` chooses the backend."""
    if backend not in known:
        raise ValueError(f"backend must be one of {', '.join(known)}, got {backend!r}")


def check_scale(scale: float | None) -> float | None:
    if isinstance(scale, Real) and not isinstance(scale, bool) and scale == 0:
        raise ValueError("scale must not be 0, which FlashInfer reads as None, got 0")
    return scale
