"""The fold of the maps of segments from both ends (gdn_triton/chunk/triton/hopper/walks/fold.py)
against its sum in torch. The kernel is in Triton, so the interpreter runs it, too."""

import pytest
import torch

from gdn_triton._triton.tiles import gpu_of
from gdn_triton.chunk.triton.hopper.walks.fold import fold_walks

HV, K, V = 2, 16, 24


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize(
    ("lengths", "segment"), [((700, 70, 0, 1030, 300), 128), ((90, 1000), 64), (None, 64)]
)
def test_fold(lengths: tuple[int, ...] | None, segment: int, windowed: bool, device: str) -> None:
    """Of sequences with several later segments, with one and with none; padded ones without
    lengths. An M that is not made, of the last segment or of one with a window, is NaN."""
    counts, cu_seqlens = [3, 3], None
    if lengths is not None:
        counts = [-(-max(n - segment, 0) // segment) for n in lengths]
        cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    slots = sum(counts) + 1
    generator = torch.Generator().manual_seed(0)
    starts, d_starts = torch.randn(2, slots, HV, K, V, generator=generator)
    shifts = torch.randn(slots, HV, K * V, generator=generator) / K
    maps = shifts[..., : K * K].unflatten(2, (K, K)).double()
    windows = torch.randint(0, 2, (slots, HV, 2), generator=generator, dtype=torch.int32)
    if windowed:
        maps[windows[..., 0] > 0] = 0
        shifts[windows[..., 0] > 0] = torch.nan
    right, d_right, end = starts.double(), d_starts.double(), 0
    for count in counts:
        end += count
        for i in range(end - count, end - 1):
            right[i + 1] += maps[i] @ right[i]
        for i in reversed(range(end - count, end - 1)):
            d_right[i] += maps[i].mT @ d_right[i + 1]
        shifts[end - 1] = torch.nan
    found, d_found = starts.to(device), d_starts.to(device)
    fold_walks(
        found,
        d_found,
        shifts.to(device),
        windows.to(device) if windowed else None,
        cu_seqlens,
        gpu=gpu_of(found.device),
        N=len(counts),
        most_long=len(counts),
        BN=128,
        NS=3,
        segment=segment,
    )
    torch.testing.assert_close(found.double().cpu(), right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(d_found.double().cpu(), d_right, rtol=1e-5, atol=1e-5)
