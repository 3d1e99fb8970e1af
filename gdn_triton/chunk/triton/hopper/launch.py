"""Launches the forward for compute capability 9.0."""

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
# TMA needs strides that are multiples of 16 bytes: this many elements of 2 bytes.
TMA_ALIGNMENT = 8


class Shape(NamedTuple):
    """The columns of V of a block, and the registers of a thread of the triangles' warps and of the
    single warps. The state's warps have the rest of the block's 64K registers."""

    BV: int
    num_warps: int
    triangles_registers: int
    single_registers: int


WIDE = Shape(BV=128, num_warps=8, triangles_registers=112, single_registers=32)
NARROW = Shape(BV=64, num_warps=4, triangles_registers=168, single_registers=40)


def choose_shape(multiprocessors: int, states: int, V: int) -> Shape:
    """A block has half of V if even then each block has a multiprocessor of its own. Both shapes
    give the same bits."""
    return NARROW if V <= 64 or 2 * states <= multiprocessors else WIDE


def tma_readable(x: torch.Tensor) -> torch.Tensor:
    """Returns x [B, T, heads, D], D a multiple of 8, if TMA can read it, and otherwise a contiguous
    copy. The last dimension must be dense, and the first element at a multiple of 16 bytes."""
    far = [stride for n, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if n > 1]
    if all(0 < stride < 2**38 and stride % TMA_ALIGNMENT == 0 for stride in far):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def descriptor(x: torch.Tensor, width: int) -> TensorDescriptor:
    """Returns a TMA descriptor of x [B, T, heads, D] whose tiles are one chunk of one head. TMA
    fills tiles past an edge with zeros and does not store past an edge."""
    # The stride of a dimension of length 1 may be any number, so replace it by one that TMA
    # accepts.
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
    """Returns o [B, T, HV, V] in q's dtype, and the final state or None. x: the result of
    ``readable_inputs`` of forward.py. ``hopper_refusal`` of support.py must have accepted the
    problem."""
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
