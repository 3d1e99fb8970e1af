"""Views of shared memory and copies to it in Gluon, whose names differ between releases of
Triton."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

# A barrier at which all warps of a program wait for each other.
meet = getattr(gl, "barrier", None) or gl.thread_barrier
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_PUBLIC_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def viewed(tile, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """Returns the bytes of a tile in shared memory as a tile of another dtype, shape and layout."""
    if _PUBLIC_REINTERPRET:
        return tile.reinterpret(dtype, shape, layout)
    else:
        return tile._reinterpret(dtype, shape, layout)
