"""Tile configurations: fixed tables, no search. The same call runs the same code every time.

Each function returns the tile of one kernel. It depends on the head dimensions and the width of the
dtype of the products, for some kernels on the GPU of the tensors (`gpu_of`), and for the serial
kernels on the number of states. Numbers without another reason were the fastest of those measured
on an H200 (docs/tried.md).

The docstring of a `..._tile` or `..._config` function lists the tiles that one stage of the
pipeline loads ("Per stage") and the tiles that a program holds once ("Held").
"""

import functools
from typing import Any, NamedTuple

import torch
import triton

from gdn_triton._host.device import on_device

# The result for a set of sizes is kept for the next call with these sizes. The cache is bounded
# because the sizes include the numbers of tokens and states, which may never repeat in a server.
MOST_KEPT = 1024
_kept = functools.lru_cache(maxsize=MOST_KEPT)


class Tile(NamedTuple):
    """Tile widths over K and V, and the launch options of the kernel. maxnreg: the most registers
    of a thread, for kernels that gain more from another block on the multiprocessor than they lose
    by fewer registers."""

    BK: int
    BV: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        launch = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.maxnreg is not None and compiler() == "cuda":
            launch["maxnreg"] = self.maxnreg
        return launch


# Options for kernels that must match another kernel, or another specialisation of themselves, bit
# for bit: the compiler fuses no product with a sum, because it would choose other pairs in each
# kernel. `tl.fma` stays fused.
UNFUSED = {"enable_fp_fusion": False}
# The option of all other kernels. Every launch has one of the two, because Triton's default depends
# on TRITON_DEFAULT_FP_FUSION, and will change with Triton 3.10, of which 3.9 warns.
FUSED = {"enable_fp_fusion": True}

# KiB of shared memory that one block may use, by the architecture that Triton compiles for. A
# kernel that needs more does not launch. A tile chosen for less is only slower.
SHARED_MEMORY = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
LEAST_SHARED_MEMORY = 64


@functools.cache
def compiler() -> str:
    """The kind of GPU that Triton compiles for in this process: "cuda", "hip", ...; "interpreter"
    if it compiles nothing. The GPU itself may differ between calls (`gpu_of`)."""
    if triton.knobs.runtime.interpret:
        return "interpreter"
    return str(triton.runtime.driver.active.get_current_target().backend)


class Gpu(NamedTuple):
    """The properties of a GPU that tiles depend on. arch: Triton's name of it, as 90 or
    "gfx942"."""

    compiler: str
    arch: int | str
    multiprocessors: int

    @property
    def shared_memory(self) -> int:
        """The bytes of shared memory that one block may use at least."""
        return SHARED_MEMORY.get(self.arch, LEAST_SHARED_MEMORY) * 1024  # type: ignore[arg-type]


# The number of multiprocessors of an H200, which is assumed where there is no GPU.
MULTIPROCESSORS = 132

_gpus: dict[torch.device, Gpu] = {}


def gpu_of(device: torch.device) -> Gpu:
    """The GPU of a device. A process may have several kinds of GPUs."""
    gpu = _gpus.get(device)
    if gpu is None:
        gpu = _gpus[device] = _ask(device)
    return gpu


def _ask(device: torch.device) -> Gpu:
    if compiler() == "interpreter":
        return Gpu(compiler(), 0, MULTIPROCESSORS)
    with on_device(device):
        arch = triton.runtime.driver.active.get_current_target().arch
    count = MULTIPROCESSORS
    if device.type == "cuda":
        count = torch.cuda.get_device_properties(device).multi_processor_count
    return Gpu(compiler(), arch, count)


# The first architecture with programmatic dependent launch.
DEPENDENT_ARCH = 90


def dependent_launch(gpu: Gpu) -> dict[str, Any]:
    """The options of a kernel whose programs may start before the previous kernel of the stream has
    ended. With DEPENDENT the kernel calls `gdc_wait` before it reads or writes memory: the previous
    kernel has then ended, and its writes are visible. On an H100 a step in a row of steps took 0.3
    microseconds less."""
    if gpu.compiler != "cuda" or int(gpu.arch) < DEPENDENT_ARCH:
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": True}


@functools.cache
def dot_precision(dtype: torch.dtype) -> str:
    """The precision of products of fp32 values. With 16-bit inputs and outputs the error of tf32 is
    below the rounding of the result. fp32 inputs get fp32-accurate products."""
    if compiler() != "cuda":
        return "ieee"
    return "tf32x3" if dtype.itemsize == 4 else "tf32"


def stages(gpu: Gpu, most: int, stage_bytes: int, other_bytes: int) -> int:
    """The largest number of pipeline stages, up to ``most``, whose tiles fit the GPU's shared
    memory together with the tiles that a program holds once. AMD gets at most two: with more, the
    pipeliner of Triton 3.6 fails on loops with narrow loads ("operation destroyed but still has
    uses")."""
    if gpu.compiler == "hip":
        most = min(most, 2)
    return max(1, min(most, (gpu.shared_memory - other_bytes) // stage_bytes))


def padded(n: int, most: int, least: int = 16) -> int:
    """The tile width for a dimension of n: a power of two from ``least`` to ``most``. A matrix
    instruction needs at least 16."""
    return min(max(triton.next_power_of_2(n), least), most)


# The least width of a tile in the kernels of single chunks. With tiles as wide as one instruction,
# or narrow loads into them, Triton 3.6's assembler (ptxas 12.8) builds shared-memory descriptors
# from a register that nothing has written.
LEAST_WIDTH = 32


@_kept
def wy_config(K: int, V: int, dtype: torch.dtype) -> Tile:
    """The tile for four-byte inputs is narrower, because their products take three passes of the
    tensor cores."""
    if dtype.itemsize == 4:
        return Tile(32, 32, num_warps=4, num_stages=2)
    BK = padded(K, 256, LEAST_WIDTH)
    if BK <= 64:
        return Tile(BK, padded(V, 64, LEAST_WIDTH), num_warps=4, num_stages=2)
    if BK <= 128:
        maxnreg = 168 if K % 16 == 0 else None
        return Tile(64, padded(V, 128, LEAST_WIDTH), num_warps=4, num_stages=1, maxnreg=maxnreg)
    return Tile(128, padded(V, 128, LEAST_WIDTH), num_warps=4, num_stages=1)


def state_tile(
    gpu: Gpu, BK: int, BV: int, warps: int, most_stages: int, dtype: torch.dtype
) -> Tile:
    """Per stage: w, k [64, BK] and u [64, BV]. Held: the state and v_new as operands."""
    size = dtype.itemsize
    stage, other = (128 * BK + 64 * BV) * size, (BK + 128) * BV * size
    return Tile(BK, BV, warps, stages(gpu, most_stages, stage, other))


@_kept
def state_config(gpu: Gpu, K: int, V: int, dtype: torch.dtype, states: int) -> Tile:
    """BK spans K, as the program holds whole columns of the state. The fewer states, the narrower
    the program, until every multiprocessor has one."""
    BK = padded(K, 256)
    columns = states * V / gpu.multiprocessors
    if columns <= 16:
        return state_tile(gpu, BK, padded(V, 16), 4, 4, dtype)
    if dtype.itemsize == 4 or columns <= 32 or (BK <= 128 and columns <= 64):
        return state_tile(gpu, BK, padded(V, 32), 4, 4, dtype)
    return state_tile(gpu, BK, padded(V, 64), 8 if BK > 128 else 4, 2, dtype)


@_kept
def output_config(gpu: Gpu, K: int, V: int, dtype: torch.dtype) -> Tile:
    """BV spans V up to 128, so that q k^T is computed once."""
    BK, BV = padded(K, 64), padded(V, 128, LEAST_WIDTH)
    if dtype.itemsize == 4:
        return Tile(padded(K, 32), padded(V, 64), num_warps=4, num_stages=1)
    count = stages(gpu, 3 if K > 128 else 2, (128 + BV) * BK * 2, (BV + 64) * 128)
    return Tile(BK, BV, 4, count, maxnreg=168 if 64 < K <= 128 else None)


@_kept
def prepare_config(K: int, dtype: torch.dtype) -> Tile:
    """BK spans K, because the norm of a row needs all of the row."""
    BK = padded(K, 256, LEAST_WIDTH)
    return Tile(BK, 0, num_warps=4, num_stages=1, maxnreg=128 if BK <= 128 else 168)


def fused_tile(gpu: Gpu, BK: int, BV: int, warps: int, most_stages: int) -> Tile:
    """Per stage: q, k [64, BK], A_inv, A_qk [64, 64] and v [64, BV]. Held: the state and three
    tiles [64, BV] as operands. Each element has two bytes."""
    stage, other = (128 * BK + 8192 + 64 * BV) * 2, (BK + 192) * BV * 2
    return Tile(BK, BV, warps, stages(gpu, most_stages, stage, other))


@_kept
def fused_config(gpu: Gpu, K: int, V: int, states: int, short: bool) -> Tile:
    """BK spans K, as the program holds whole columns of the state. The fewer states, the narrower
    the program, until every multiprocessor has one. Walks of a chunk or two (``short``) are bound
    by reading and writing the states, and are faster with several programs on a multiprocessor.

    A tile that uses Hopper's matrix instructions has at least two stages: with one stage Triton 3.6
    gave a BV = 32 program wrong shared-memory descriptors (compute-sanitizer: an out-of-bounds
    read)."""
    BK = padded(K, 256)
    columns = states * V / gpu.multiprocessors
    if columns <= (8 if BK <= 64 else 16):
        return fused_tile(gpu, BK, padded(V, 16), 4, 3)
    if BK > 128:
        if columns <= 32:
            return fused_tile(gpu, BK, padded(V, 32), 4, 2)
        return fused_tile(gpu, BK, padded(V, 64), 8, 2)
    if short:
        return fused_tile(gpu, BK, padded(V, 32), 4, 2)
    return fused_tile(gpu, BK, padded(V, 32 if columns <= 32 else 64), 4, 3)


# The largest K of calls in segments. A larger map [K, K] is too large for one program to fold.
MOST_SEGMENT_K = 128
# Above this number of state columns for each multiprocessor, segments cost more than they save.
MOST_SEGMENT_COLUMNS = 16


# Chunks of the shortest segments of a call whose lengths the host knows, and how many of these
# segments its longest sequence has at least. The walk over a sequence without a cut takes as long
# as maps and walks of one segment each would with two, and the fold as long as half a segment.
LEAST_KNOWN_SEGMENT = 16
LEAST_KNOWN_SEGMENTS = 3


@_kept
def segment_chunks(
    gpu: Gpu, rows: int, N: int, HV: int, K: int, V: int, BT: int, longest: int = 0
) -> int:
    """The chunks of a segment; 0 to walk whole sequences. Segments at least double the work, so
    only calls are cut whose states leave most of the GPU idle: few states, or a sequence that the
    others' programs have ended long before. rows: the tokens of all N sequences. longest: the
    tokens of the longest of several packed sequences, or 0 where the host does not know them."""
    if rows == 0 or N == 0 or K > MOST_SEGMENT_K:
        return 0
    chunks = triton.cdiv(rows, BT)
    # One program of 64 columns for each multiprocessor.
    segments = gpu.multiprocessors * 64 // (HV * V)
    columns = N * HV * V / gpu.multiprocessors
    if columns <= MOST_SEGMENT_COLUMNS:
        # The gain of shorter segments does not cover the fold, 2 to 4 us for each segment, and maps
        # that fill the GPU twice. A sequence has at least four segments.
        least = 8 if columns <= MOST_SEGMENT_COLUMNS / 2 else 16
        if chunks >= 4 * N * least:
            return max(triton.cdiv(chunks, segments), least)
    if segments > 0:
        length = max(triton.cdiv(chunks, segments), LEAST_KNOWN_SEGMENT)
        if triton.cdiv(longest, BT) >= LEAST_KNOWN_SEGMENTS * length:
            return length
    return 0


@_kept
def maps_config(gpu: Gpu, K: int) -> Tile:
    """Per stage: k [64, BK], A_inv [64, 64] and v [64, BV]. Held: the state and two tiles [64, BV]
    as operands. Each element has two bytes."""
    BK, BV = padded(K, MOST_SEGMENT_K), 64
    stage, other = (64 * BK + 4096 + 64 * BV) * 2, (BK + 128) * BV * 2
    return Tile(BK, BV, num_warps=4, num_stages=stages(gpu, 3, stage, other))


@_kept
def affine_config(gpu: Gpu, K: int, dtype: torch.dtype) -> Tile:
    """The tile of the maps between ranks. It is the tile of ``maps_config`` where K and dtype allow
    it."""
    if dtype.itemsize == 4:
        return state_bwd_tile(gpu, padded(K, 256), 16, 2, dtype)
    return maps_config(gpu, K) if K <= MOST_SEGMENT_K else fused_tile(gpu, padded(K, 256), 32, 4, 2)


@_kept
def affine_bwd_config(gpu: Gpu, K: int, V: int, dtype: torch.dtype, states: int) -> Tile:
    """The tile of the maps of the walk back. Four-byte operands take eight warps, because four
    would spill kilobytes on sm_80. On Hopper they take four, which spill no more than eight there:
    with eight, Triton 3.6 lays the products of 64 rows out over 128 rows, an illegal memory
    access."""
    back, _ = state_bwd_config(gpu, K, V, dtype, states)
    eight = dtype.itemsize == 4 and (gpu.compiler, gpu.arch) != ("cuda", 90)
    return back._replace(num_warps=8) if eight else back


@_kept
def starts_config(gpu: Gpu, K: int, V: int) -> Tile:
    """Per stage: a map [BK, BK]. Held: the state [BK, BV] as an operand, in two parts. All are
    fp32."""
    BK, BV = padded(K, MOST_SEGMENT_K), 16
    count = stages(gpu, 2, BK * BK * 4, BK * BV * 8)
    return Tile(BK, padded(V, BV), num_warps=8 if BK > 64 else 4, num_stages=count)


# The functions below have the tiles of the backward.


def quarter_tile(K: int, V: int) -> Tile:
    """The tile of single chunks of four-byte inputs, whose products take three passes."""
    return Tile(padded(K, 32), padded(V, 32), num_warps=4, num_stages=1)


@_kept
def scores_config(K: int, dtype: torch.dtype) -> Tile:
    return quarter_tile(K, K)


def state_bwd_tile(gpu: Gpu, BK: int, BV: int, most_stages: int, dtype: torch.dtype) -> Tile:
    """Per stage: q, k [64, BK], A_inv, A_qk [64, 64] and do [64, BV]. Held: the state and three
    tiles [64, BV] as operands."""
    size = dtype.itemsize
    stage, other = (128 * BK + 8192 + 64 * BV) * size, (BK + 192) * BV * size
    return Tile(BK, BV, 4, stages(gpu, most_stages, stage, other))


@_kept
def state_bwd_config(
    gpu: Gpu, K: int, V: int, dtype: torch.dtype, states: int
) -> tuple[Tile, Tile | None]:
    """The tiles of the walk back and of the walk forward. The second is None where both walks are
    one launch with one tile. BK spans K, because a program holds whole columns of the state. Above
    16 columns for each multiprocessor two programs share a multiprocessor, with two stages each.
    Above 48 columns each walk has programs enough for a launch of its own, and the walk forward,
    which holds fewer tiles, has room for a wider one if K is at most 128. The bits of a column do
    not depend on the tiles."""
    BK = padded(K, 256)
    if dtype.itemsize == 4:
        return state_bwd_tile(gpu, BK, padded(V, 16), 2, dtype), None
    columns = states * V / gpu.multiprocessors
    if columns <= 16:
        return state_bwd_tile(gpu, BK, padded(V, 16), 3, dtype), None
    back = state_bwd_tile(gpu, BK, padded(V, 32), 2, dtype)
    if BK > 128 or columns <= 48:
        return back, None
    return back, state_bwd_tile(gpu, BK, padded(V, 64), 2, dtype)


@_kept
def pairs_bwd_config(gpu: Gpu, K: int, V: int, dtype: torch.dtype) -> Tile:
    """Per stage: q, k [64, BK], then v_new, dx, v [64, BV]."""
    if dtype.itemsize == 4:
        return quarter_tile(K, V)
    BK, BV = padded(K, 128), padded(V, 64)
    count = stages(gpu, 3, 64 * max(2 * BK, 3 * BV) * dtype.itemsize, 0)
    return Tile(BK, BV, num_warps=4, num_stages=count, maxnreg=168)


@_kept
def query_key_bwd_config(K: int, V: int, dtype: torch.dtype) -> Tile:
    if dtype.itemsize == 4:
        return quarter_tile(K, V)
    return Tile(padded(K, 64), padded(V, 64), num_warps=4, num_stages=2, maxnreg=168)
