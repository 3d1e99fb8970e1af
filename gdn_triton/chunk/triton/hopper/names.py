"""Names of Gluon that differ between releases of Triton (support.py lists the releases), and
helpers that every role needs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# The number of tokens of a chunk.
CHUNK = gl.constexpr(64)

load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_PUBLIC_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def viewed(tile, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """Returns the bytes of a tile in shared memory as a tile of another dtype, shape and layout."""
    if _PUBLIC_REINTERPRET:
        return tile.reinterpret(dtype, shape, layout)
    else:
        return tile._reinterpret(dtype, shape, layout)


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """Returns the next place in a ring of buffers: the phase flips after each round. A reader waits
    for ``phase`` at the barrier of a full buffer, and a writer for the other phase at the barrier
    of an empty buffer."""
    stage += 1
    wraps = (stage == STAGES).to(gl.int32)
    return stage * (1 - wraps), phase ^ wraps


@gluon.jit
def scalar_of(flags, n: gl.constexpr):
    """Returns number n of a vector of which every thread holds all elements. Gluon cannot index one
    element, so the function sums bits; the compiler turns the sum into a move."""
    o_n = gl.arange(0, flags.shape[0], flags.type.layout)
    bits = gl.where(o_n == n, flags.to(gl.int32, bitcast=True), 0)
    return gl.sum(bits, 0).to(gl.float32, bitcast=True)


@gluon.jit
def opaque(x):
    """Returns x, a number in fp32, through an instruction that the compiler neither removes nor
    moves. A rare branch that contains this instruction stays a branch. Otherwise the compiler would
    replace the branch by selects of all its results."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=False, pack=1
    )
