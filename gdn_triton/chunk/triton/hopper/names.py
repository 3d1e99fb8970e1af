"""Names of Gluon that differ between releases of Triton (`_host/gluon.py` lists them), and
helpers that every role needs."""

import triton
from packaging.version import Version
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# The number of tokens of a chunk.
CHUNK = gl.constexpr(64)
# The layouts of a product [64, 64] of four warps, of its left operand in registers, and of a vector
# along its columns; and of a vector of which every thread of four warps holds four elements.
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OPERAND = gl.constexpr(gl.DotOperandLayout(0, PRODUCT, 2))
TOKEN = gl.constexpr(gl.SliceLayout(0, PRODUCT))
ONE = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))

load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
# Whether Triton copies an operand in registers before each product that reads it.
COPIES = gl.constexpr(Version(triton.__version__) >= Version("3.8"))


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


@gluon.jit
def here(n):
    """n, an int32, by such an instruction. What is computed from it in a branch of a loop is not
    computed before the loop, where it would take registers of the whole loop."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [n], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def widened(x, nothing):
    """x, of a 16-bit dtype, in fp32. nothing: the number 0, as an int32. Where the assembler does
    not know this number, the result does not share registers with another conversion of x."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "mad.lo.s32 $0, $2, 65536, $3; lop3.b32 $1, $2, 0xffff0000, $3, 0xea;",
            "=&r,=r,r,r,r",
            [x, nothing],
            dtype=gl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return either(x, gl.cast(nothing, gl.int16)).to(gl.float32)


@gluon.jit
def power(x):
    """2^x, where a power below the normal numbers of fp32 is 0."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def times_power(x, row, column):
    """x, of a 16-bit dtype, times 2^(row + column), two elements at once. row, column: whole
    numbers, int16; row plus the bias of the dtype's exponent, 127 or 15. A power below the normal
    numbers of the dtype is 0. The greatest power is 2^127 in bfloat16, 2 in float16. The compiler
    neither removes nor moves the instructions (`opaque`)."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "add.s16x2 $0, $2, $3; min.s16x2.relu $0, $0, $4;"
            " shl.b32 $0, $0, 7; mul.bf16x2 $0, $1, $0;",
            "=&r,r,r,r,r",
            [x, row, column, row * 0 + 254],
            dtype=gl.bfloat16,
            is_pure=False,
            pack=2,
        )
    else:
        return gl.inline_asm_elementwise(
            "add.s16x2 $0, $2, $3; min.s16x2.relu $0, $0, $4;"
            " shl.b32 $0, $0, 10; mul.f16x2 $0, $1, $0;",
            "=&r,r,r,r,r",
            [x, row, column, row * 0 + 16],
            dtype=gl.float16,
            is_pure=False,
            pack=2,
        )


@gluon.jit
def masked(x, mask):
    """x, of a 16-bit dtype, where mask, of int16, is -1, and 0 where it is 0; two elements at once,
    where a select takes one."""
    return gl.inline_asm_elementwise(
        "and.b32 $0, $1, $2;", "=r,r,r", [x, mask], dtype=x.dtype, is_pure=True, pack=2
    )


@gluon.jit
def either(x, y):
    """x or y, of a 16-bit dtype, of which one is 0."""
    return gl.inline_asm_elementwise(
        "or.b32 $0, $1, $2;", "=r,r,r", [x, y], dtype=x.dtype, is_pure=True, pack=2
    )


@gluon.jit
def rounded(x, dtype: gl.constexpr, AGAIN: gl.constexpr = False):
    """x, fp32, in a 16-bit dtype, two elements at once. The compiler does not move a select of x
    past this instruction, to where it would select one element at a time. With AGAIN the compiler
    does not replace the instructions by an earlier result of the same x."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;",
            "=r,r,r",
            [x],
            dtype=gl.bfloat16,
            is_pure=not AGAIN,
            pack=2,
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;",
            "=r,r,r",
            [x],
            dtype=gl.float16,
            is_pure=not AGAIN,
            pack=2,
        )


@gluon.jit
def halves(x):
    """The left and the right half of the columns of x, in the registers of x."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def joined(a, b):
    """The matrix with the halves a and b, in their registers."""
    return gl.reshape(gl.permute(gl.join(a, b), (0, 2, 1)), [a.shape[0], 2 * a.shape[1]])
