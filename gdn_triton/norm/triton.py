"""The gated norm of each head and its gradients, each in one pass over the rows:

    r = 1 / sqrt(mean(x^2) + eps)      n = r x      y = weight n act(gate)

    dgate = dy weight n act'(gate)     dn = dy act(gate) weight
    dx    = r (dn - n mean(dn n))      dweight = the sum over the rows of dy act(gate) n

A program of the forward has one tile of rows. A program of the backward has a run of tiles, keeps
the run's part of dweight in registers and writes it once. The parts are summed in one order, so
dweight has the same bits at every run. Only the inputs are saved for the backward.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn_triton._host.derivatives import IN_TRITON, found_once
from gdn_triton._host.device import on_device
from gdn_triton._host.tensors import readable_gradient
from gdn_triton._triton.activations import sigmoid
from gdn_triton._triton.launch import Launch
from gdn_triton._triton.strides import named
from gdn_triton.norm.problem import Norm

# The elements of a tile, 16 for each thread of four warps. A longer row is a tile by itself.
TILE: Final = 2048
# The programs of the backward, and so the parts of dweight: eight for each multiprocessor of a
# large GPU.
MOST_RUNS: Final = 1024


@triton.jit
def rows_of(x, i, o_d, heads, stride_t, stride_h, mask):
    """Loads the rows i of x [tokens, heads, D] in float32; 0 where the mask is false."""
    p_x = x + ((i // heads) * stride_t + (i % heads) * stride_h)[:, None] + o_d[None, :]
    return tl.load(p_x, mask=mask, other=0).to(tl.float32)


@triton.jit
def weighted(b_n, b_w, DTYPE: tl.constexpr, ROUND: tl.constexpr, ROUND_PRODUCT: tl.constexpr):
    """Returns the normalised rows, rounded if `round_norm` asks for it, and their product with the
    weight."""
    if ROUND:
        b_n = b_n.to(DTYPE).to(tl.float32)
    b_y = b_n * b_w[None, :]
    if ROUND_PRODUCT:
        b_y = b_y.to(DTYPE).to(tl.float32)
    return b_n, b_y


@triton.jit(do_not_specialize=["M"])
def norm_fwd_kernel(
    x,
    gate,
    weight,
    y,
    M,
    stride_xt,
    stride_xh,
    stride_zt,
    stride_zh,
    stride_w,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    EPS: tl.constexpr,
    R: tl.constexpr,
    BD: tl.constexpr,
    SIGMOID: tl.constexpr,
    ROUND: tl.constexpr,
    ROUND_PRODUCT: tl.constexpr,
):
    DTYPE: tl.constexpr = x.dtype.element_ty
    i = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    o_d = tl.arange(0, BD)
    mask = (i < M)[:, None] & (o_d < D)[None, :]
    b_x = rows_of(x, i, o_d, HEADS, stride_xt, stride_xh, mask)
    b_z = rows_of(gate, i, o_d, HEADS, stride_zt, stride_zh, mask)
    b_w = tl.load(weight + o_d.to(tl.int64) * stride_w, mask=o_d < D, other=0).to(tl.float32)
    b_r = tl.rsqrt(tl.sum(b_x * b_x, 1) / D + EPS)
    _, b_y = weighted(b_x * b_r[:, None], b_w, DTYPE, ROUND, ROUND_PRODUCT)
    b_s = sigmoid(b_z, 1.0)
    b_y *= b_s if SIGMOID else b_z * b_s
    tl.store(y + (i * D)[:, None] + o_d[None, :], b_y.to(DTYPE), mask=mask)


@triton.jit(do_not_specialize=["M", "run", "tiles"])
def norm_bwd_kernel(
    x,
    gate,
    weight,
    dy,
    dx,
    dgate,
    sums,
    M,
    run,
    tiles,
    stride_xt,
    stride_xh,
    stride_zt,
    stride_zh,
    stride_yt,
    stride_yh,
    stride_w,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    EPS: tl.constexpr,
    R: tl.constexpr,
    BD: tl.constexpr,
    SIGMOID: tl.constexpr,
    ROUND: tl.constexpr,
    ROUND_PRODUCT: tl.constexpr,
):
    """run: the number of tiles of rows of one program. tiles: the number of all tiles. sums: [runs,
    D]."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    i_run = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    b_w = tl.load(weight + o_d.to(tl.int64) * stride_w, mask=o_d < D, other=0).to(tl.float32)
    b_dw = tl.zeros([R, BD], dtype=tl.float32)
    for i_tile in range(i_run * run, tl.minimum((i_run + 1) * run, tiles)):
        # Triton's interpreter counts loops in 32 bits.
        i = tl.cast(i_tile, tl.int64) * R + tl.arange(0, R)
        mask = (i < M)[:, None] & (o_d < D)[None, :]
        b_x = rows_of(x, i, o_d, HEADS, stride_xt, stride_xh, mask)
        b_z = rows_of(gate, i, o_d, HEADS, stride_zt, stride_zh, mask)
        b_dy = rows_of(dy, i, o_d, HEADS, stride_yt, stride_yh, mask)
        b_r = tl.rsqrt(tl.sum(b_x * b_x, 1) / D + EPS)[:, None]
        b_n = b_x * b_r
        b_m, b_y = weighted(b_n, b_w, DTYPE, ROUND, ROUND_PRODUCT)
        b_s = sigmoid(b_z, 1.0)
        if SIGMOID:
            b_a = b_s
            # 1 - sigmoid(z) is computed as sigmoid(-z), because the rounding of b_s loses e^-z for
            # large z.
            b_da = b_s * sigmoid(-b_z, 1.0)
        else:
            b_a = b_z * b_s
            b_da = b_s * (1 + b_z * (1 - b_s))
        p = (i * D)[:, None] + o_d[None, :]
        tl.store(dgate + p, (b_dy * b_y * b_da).to(dgate.dtype.element_ty), mask=mask)
        b_dp = b_dy * b_a
        # With eps = 0 a row that does not exist has 1 / 0, and its product with 0 would be NaN.
        b_dw += tl.where(mask, b_dp * b_m, 0.0)
        b_dn = b_dp * b_w[None, :]
        b_dx = b_r * (b_dn - b_n * (tl.sum(b_dn * b_n, 1) / D)[:, None])
        tl.store(dx + p, b_dx.to(DTYPE), mask=mask)
    tl.store(sums + i_run * D + o_d, tl.sum(b_dw, 0), mask=o_d < D)


def as_rows(x: Tensor) -> Tensor:
    """Returns x [..., D] as [tokens, heads, D], dense in D. It is a view if the strides allow it,
    otherwise a copy."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
    return x.reshape(-1, x.shape[-2] if x.dim() > 2 else 1, x.shape[-1])


def strides(x: Tensor) -> tuple[int, int]:
    """The strides of a token and of a head. The stride of a dimension of size 1 is 0, because torch
    may give it any number."""
    return (0 if x.shape[0] == 1 else x.stride(0), 0 if x.shape[1] == 1 else x.stride(1))


@functools.lru_cache(maxsize=256, typed=True)
def launch_of(
    kernel: Any,
    heads: int,
    D: int,
    eps: float,
    sigmoid: bool,
    round_norm: bool,
    round_product: bool,
    all_strides: tuple[int, ...],
) -> tuple[int, Launch]:
    """Returns the rows of a tile, and the kernel with all arguments that do not depend on lengths.
    all_strides: the strides of tokens and heads of each tensor, and the stride of the weight."""
    BD = triton.next_power_of_2(D)
    R = max(1, TILE // BD)
    names = "xt xh zt zh w" if len(all_strides) == 5 else "xt xh zt zh yt yh w"
    launch = Launch(
        kernel,
        **named(names, all_strides),
        HEADS=heads,
        D=D,
        EPS=eps,
        R=R,
        BD=BD,
        SIGMOID=sigmoid,
        ROUND=round_norm,
        ROUND_PRODUCT=round_product,
        num_warps=8 if BD > TILE else 4,
    )
    return R, launch


def options(p: Norm) -> tuple[float, bool, bool, bool]:
    same = p.dtypes[0] == p.dtypes[2]
    return p.eps, p.activation == "sigmoid", p.round_norm, p.round_norm and same


def norm_fwd(p: Norm, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    y = x.new_empty(x.shape)
    if y.numel() == 0:
        return y
    x, gate = as_rows(x), as_rows(gate)
    M = x.shape[0] * x.shape[1]
    layout = (*strides(x), *strides(gate), weight.stride(0))
    R, launch = launch_of(norm_fwd_kernel, x.shape[1], p.D, *options(p), layout)
    launch((triton.cdiv(M, R), 1, 1), x=x, gate=gate, weight=weight, y=y, M=M)
    return y


def norm_bwd(
    p: Norm, dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dx, dgate and dweight in the dtypes of x, gate and weight."""
    dx, dgate = x.new_empty(x.shape), gate.new_empty(gate.shape)
    if dx.numel() == 0:
        return dx, dgate, weight.new_zeros(weight.shape)
    x, gate, dy = as_rows(x), as_rows(gate), as_rows(dy)
    M = x.shape[0] * x.shape[1]
    layout = (*strides(x), *strides(gate), *strides(dy), weight.stride(0))
    R, launch = launch_of(norm_bwd_kernel, x.shape[1], p.D, *options(p), layout)
    tiles = triton.cdiv(M, R)
    run = triton.cdiv(tiles, MOST_RUNS)
    runs = triton.cdiv(tiles, run)
    sums = x.new_empty((runs, p.D), dtype=torch.float32)
    launch(
        (runs, 1, 1),
        x=x,
        gate=gate,
        weight=weight,
        dy=dy,
        dx=dx,
        dgate=dgate,
        sums=sums,
        M=M,
        run=run,
        tiles=tiles,
    )
    return dx, dgate, sums.sum(0).to(weight.dtype)


class _RMSNormGated(torch.autograd.Function):
    """Saves only its inputs for the backward."""

    @staticmethod
    def forward(ctx: Any, problem: Norm, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        ctx.problem = problem
        ctx.save_for_backward(x, gate, weight)
        return norm_fwd(problem, x, gate, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dy = readable_gradient("y", dy)
        find = functools.partial(norm_bwd, ctx.problem)
        name = "gdn_triton.rms_norm_gated"
        with on_device(dy.device):
            found = found_once(find, dy, *ctx.saved_tensors, operator=name, backends=IN_TRITON)
        return None, *found


def forward(problem: Norm, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """Returns y in the shape of x, contiguous."""
    if problem.needs_grad:
        y: Tensor = _RMSNormGated.apply(problem, x, gate, weight)  # type: ignore[no-untyped-call]
        return y
    return norm_fwd(problem, x, gate, weight)
