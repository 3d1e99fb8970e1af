"""How the roles of a block share its warps and registers.

A role is a tuple of four: a function, its inputs, which are tensors and numbers, and its constants
in two groups. A function that two warps or warpgroups run takes their number as one more constant.

Inputs may be tuples. Triton 3.6 loses the constants of such a tuple (None, or a stride of 1) if a
tensor or a number follows the tuple in the inputs, or if a constant is itself an input. Tuples that
may have constants therefore stand last.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def run_role(role):
    role[0](*role[1], *role[2], *role[3])


@gluon.jit
def run_numbered_role(role, NUMBER: gl.constexpr):
    role[0](*role[1], *role[2], *role[3], NUMBER)


@gluon.jit
def run_roles(
    state,
    triangles,
    gates,
    loader,
    norm,
    STATES: gl.constexpr,
    STATE_REGISTERS: gl.constexpr,
    TRIANGLES_REGISTERS: gl.constexpr,
    SINGLE: gl.constexpr,
):
    """The roles of a block of one or two states. A block of two has two warps more, with the role
    ``norm``, unless that is None."""
    if STATES == 1:
        gl.warp_specialize(
            [
                (run_numbered_role, (state, 0)),
                (run_role, (triangles,)),
                (run_role, (gates,)),
                (run_role, (loader,)),
            ],
            [4, 1, 1],
            [TRIANGLES_REGISTERS, SINGLE, SINGLE],
        )
    elif norm is None:
        gl.warp_specialize(
            [
                (run_numbered_role, (state, 0)),
                (run_numbered_role, (state, 1)),
                (run_role, (triangles,)),
                (run_role, (gates,)),
                (run_role, (loader,)),
            ],
            [4, 4, 1, 1],
            [STATE_REGISTERS, TRIANGLES_REGISTERS, SINGLE, SINGLE],
        )
    else:
        gl.warp_specialize(
            [
                (run_numbered_role, (state, 0)),
                (run_numbered_role, (state, 1)),
                (run_role, (triangles,)),
                (run_role, (gates,)),
                (run_role, (loader,)),
                (run_numbered_role, (norm, 0)),
                (run_numbered_role, (norm, 1)),
            ],
            [4, 4, 1, 1, 1, 1],
            [STATE_REGISTERS, TRIANGLES_REGISTERS, SINGLE, SINGLE, SINGLE, SINGLE],
        )


@gluon.jit
def run_wide_roles(
    state,
    pairs,
    gates,
    keys,
    queries,
    TRIANGLES_REGISTERS: gl.constexpr,
    SINGLE: gl.constexpr,
):
    """The roles of a block for K above 128 (wide.py)."""
    gl.warp_specialize(
        [
            (run_role, (state,)),
            (run_numbered_role, (pairs, 0)),
            (run_numbered_role, (pairs, 1)),
            (run_role, (gates,)),
            (run_role, (keys,)),
            (run_role, (queries,)),
        ],
        [4, 4, 1, 1, 1],
        [TRIANGLES_REGISTERS, TRIANGLES_REGISTERS, SINGLE, SINGLE, SINGLE],
    )
