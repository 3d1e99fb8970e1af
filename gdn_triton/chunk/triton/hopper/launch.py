"""Launching the forward for compute capability 9.0."""

import functools
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gdn_triton._triton.states import empty_state
from gdn_triton._triton.strides import head_arguments, head_strides, named, state_strides
from gdn_triton._triton.tiles import gpu_of
from gdn_triton.chunk.problem import Inputs, Problem
from gdn_triton.chunk.triton.hopper.kernel import hopper_fwd_kernel
from gdn_triton.chunk.triton.steps.l2norm import l2norm_fwd
from gdn_triton.constants import LOG2_DECAY_FLOOR, RCP_LN2, SOFTPLUS_THRESHOLD

ROWS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
CHUNK = 64
# What TMA reads: strides of whole 16 bytes.
TMA_ALIGNMENT = 8


class Shape(NamedTuple):
    """Columns of V that a block has, and how its warps share its 64K registers: of a thread of the
    triangles' warps, and of the single warps. The state's have the rest."""

    BV: int
    num_warps: int
    triangles_registers: int
    single_registers: int


WIDE = Shape(BV=128, num_warps=8, triangles_registers=112, single_registers=32)
NARROW = Shape(BV=64, num_warps=4, triangles_registers=168, single_registers=40)


def choose_shape(multiprocessors: int, states: int, V: int) -> Shape:
    """Half of V a block, where even so each block has a multiprocessor of its own. Both give the
    same bits."""
    return NARROW if V <= 64 or 2 * states <= multiprocessors else WIDE


def tma_readable(x: torch.Tensor) -> torch.Tensor:
    """x [B, T, heads, D], D a multiple of 8, itself where TMA can read it, else a contiguous
    copy. The last dimension is dense, and the first element at a multiple of 16 bytes."""
    far = [stride for n, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if n > 1]
    if all(0 < stride < 2**38 and stride % TMA_ALIGNMENT == 0 for stride in far):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def descriptor(x: torch.Tensor, width: int) -> TensorDescriptor:
    """Of tiles of a chunk and a head of x [B, T, heads, D]. Beyond an edge a tile holds zeros, and
    is not stored."""
    # A dimension of one has any stride.
    strides = [
        stride if n > 1 else TMA_ALIGNMENT
        for n, stride in zip(x.shape[:3], x.stride()[:3], strict=True)
    ]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, CHUNK, 1, width], ROWS)


@functools.lru_cache(maxsize=64)
def fixed_arguments(
    shape: Shape, K: int, V: int, sigmoid: bool, neg_eigval: bool, varlen: bool
) -> dict[str, Any]:
    return {
        "RCP_LN2": RCP_LN2,
        "FLOOR": LOG2_DECAY_FLOOR[torch.float32],
        "THRESHOLD": SOFTPLUS_THRESHOLD,
        "BETA_FACTOR": 2.0 if neg_eigval else 1.0,
        "K": K,
        "V": V,
        "BK": 64 if K <= 64 else 128,
        "BV": shape.BV,
        "STAGES": 3,
        "T_STAGES": 2,
        "TRIANGLES_REGISTERS": shape.triangles_registers,
        "SINGLE_REGISTERS": shape.single_registers,
        "USE_SIGMOID": sigmoid,
        "IS_VARLEN": varlen,
        "num_warps": shape.num_warps,
    }


def hopper_fwd(problem: Problem, x: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """o [B, T, HV, V] in q's dtype and the final state, or None. x as ``readable_inputs`` of
    forward.py leaves it; of problems that ``hopper_refusal`` of support.py does not refuse."""
    p = problem
    q, k = l2norm_fwd(x.q, x.k) if p.use_qk_l2norm else (x.q, x.k)
    q, k, v = tma_readable(q), tma_readable(k), tma_readable(x.v)
    o = torch.empty(p.B, p.T, p.HV, p.V, dtype=p.q_dtype, device=p.device)
    final_state = None
    if p.output_final_state:
        final_state = empty_state(p.N, p.HV, p.K, p.V, p.state_v_first, p.device)
    shape = choose_shape(gpu_of(p.device).multiprocessors, p.N * p.HV, p.V)
    fixed = fixed_arguments(shape, p.K, p.V, p.use_beta_sigmoid, p.allow_neg_eigval, p.is_varlen)
    BK = fixed["BK"]
    hopper_fwd_kernel[(-(-p.V // shape.BV) * p.HV * p.N,)](
        q_desc=descriptor(q, BK),
        k_desc=descriptor(k, BK),
        v_desc=descriptor(v, shape.BV),
        o_desc=descriptor(o, shape.BV),
        g=x.g,
        beta=x.beta,
        A_log=x.A_log,
        dt_bias=x.dt_bias,
        h0=x.initial_state,
        o=o,
        ht=final_state,
        cu_seqlens=None if x.cu_seqlens is None else x.cu_seqlens.contiguous(),
        scale=p.scale,
        T=p.T,
        N=p.N,
        H=p.H,
        HV=p.HV,
        **head_arguments("g", head_strides(x.g)),
        **head_arguments("beta", head_strides(x.beta)),
        **named("h0n h0h h0k h0v", state_strides(x.initial_state, p.state_v_first)),
        **named("htk htv", state_strides(final_state, p.state_v_first)[2:]),
        **fixed,
    )
    return o, final_state
