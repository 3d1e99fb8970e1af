"""Checks of the arguments that FlashInfer's functions have in common."""

from numbers import Real

# FlashInfer's own kernels: a caller of these functions may have chosen one.
PREFILL_BACKENDS = ("auto", "flashinfer", "cake_gdn", "cudnn")
DECODE_BACKENDS = ("auto", "flashinfer", "cake_gdn", "rubin")


def check_backend(backend: str, known: tuple[str, ...]) -> None:
    """Judges the name only: `GDN_BACKEND` chooses the backend."""
    if backend not in known:
        raise ValueError(f"backend must be one of {', '.join(known)}, got {backend!r}")


def check_scale(scale: float | None) -> float | None:
    if isinstance(scale, Real) and not isinstance(scale, bool) and scale == 0:
        raise ValueError("scale must not be 0, which FlashInfer reads as None, got 0")
    return scale
