"""The GPUs that the CUDA library has kernels for, and the limits of these kernels.

Each row here has a folder of kernels in csrc, a row in `csrc/build.py` and a row in
`csrc/dispatch.cpp`. `tests/fast/test_architectures.py` compares them.
"""

from typing import NamedTuple

import torch


class Architecture(NamedTuple):
    """One folder of kernels, and the limits of the calls that it serves."""

    name: str  # the name of the folder in csrc
    chunk_size: int  # tokens
    max_K: int
    head_multiple: int  # K and V are multiples of it
    max_tokens: int  # T is less
    dtypes: tuple[torch.dtype, ...]  # the dtypes of q, k and v
    pool_dtypes: tuple[torch.dtype, ...]  # the dtypes of a pool's states
    backward_max_K: int
    walks_max_K: int  # for the walks in the Triton backward
    backward_V: int  # a value head has ceil(V / backward_V) slices
    backward_least_use: float  # share of a tile's channels that auto needs
    backward_max_chunks: int  # (B * T / chunk_size + N) * HV, times the slices, is less
    backward_max_tokens: int  # B * T is less
    part_backward_channels: int  # K and V of the backward of a part of a sequence
    part_backward_dtype: torch.dtype


# The architectures by the compute capability of a GPU.
ARCHITECTURES = {
    (9, 0): Architecture(
        name="sm90",
        chunk_size=64,
        max_K=256,
        head_multiple=8,  # TMA takes rows of whole multiples of 16 bytes
        # TMA's coordinates, and the kernels' token numbers, are 32-bit, with room for a chunk or a
        # segment that the last token does not fill.
        max_tokens=2**30,
        dtypes=(torch.bfloat16, torch.float16),
        pool_dtypes=(torch.float32, torch.bfloat16, torch.float16),
        backward_max_K=128,
        walks_max_K=256,
        backward_V=128,
        backward_least_use=0.5,  # time over Triton's: 1.18 at 0.25, 0.65 at 0.56
        backward_max_chunks=2**28,  # blocks of scratch memory have 32-bit numbers
        backward_max_tokens=2**31,  # rows of sums have 32-bit numbers
        part_backward_channels=128,
        part_backward_dtype=torch.bfloat16,
    ),
}
