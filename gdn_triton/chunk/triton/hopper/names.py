"""Names of Gluon that are not the same in all releases of Triton (support.py lists the releases),
and what every role needs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# Tokens of a chunk.
CHUNK = gl.constexpr(64)

load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_PUBLIC_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def viewed(tile, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The bytes of a tile in shared memory, as a tile of another dtype, shape and layout."""
    if _PUBLIC_REINTERPRET:
        return tile.reinterpret(dtype, shape, layout)
    else:
        return tile._reinterpret(dtype, shape, layout)


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The next place of a ring of buffers: the phase flips after each round. A reader waits for
    ``phase`` at the barrier of a full buffer, a writer for the other phase at that of an empty
    one."""
    stage += 1
    wraps = (stage == STAGES).to(gl.int32)
    return stage * (1 - wraps), phase ^ wraps


@gluon.jit
def scalar_of(flags, n: gl.constexpr):
    """Number n of a vector that every thread holds as a whole. A sum of bits, since Gluon has no
    access to one element; the compiler makes it a move."""
    o_n = gl.arange(0, flags.shape[0], flags.type.layout)
    bits = gl.where(o_n == n, flags.to(gl.int32, bitcast=True), 0)
    return gl.sum(bits, 0).to(gl.float32, bitcast=True)


@gluon.jit
def opaque(x):
    """x, a number in fp32, by an instruction that the compiler neither removes nor moves: a rare
    branch that has it stays a branch, where selects of all its results would replace it."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=False, pack=1
    )
