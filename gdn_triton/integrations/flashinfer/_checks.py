"""What FlashInfer's functions take alike."""

from numbers import Real

# FlashInfer's own kernels, of which a caller of these functions may have chosen one.
PREFILL_BACKENDS = ("auto", "flashinfer", "cake_gdn", "cudnn")
DECODE_BACKENDS = ("auto", "flashinfer", "cake_gdn", "rubin")


def check_backend(backend: str, known: tuple[str, ...]) -> None:
    """A hint, which decides nothing here: `GDN_BACKEND` chooses."""
    if backend not in known:
        raise ValueError(f"backend must be one of {', '.join(known)}, got {backend!r}")


def check_scale(scale: float | None) -> float | None:
    if isinstance(scale, Real) and not isinstance(scale, bool) and scale == 0:
        raise ValueError("scale must not be 0, which FlashInfer takes for None, got 0")
    return scale
