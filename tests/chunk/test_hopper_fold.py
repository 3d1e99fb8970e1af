"""The fold of the maps of segments (gdn_triton/chunk/triton/hopper/fold.py) against its sum in
torch. The kernel is in Triton, so the interpreter runs it, too."""

import pytest
import torch

from gdn_triton.chunk.triton.hopper.fold import fold_maps

HV, K, V = 2, 16, 24


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize(
    ("lengths", "first", "segment"),
    [((700, 70, 0, 1030, 300), 192, 128), ((90, 1000), 128, 64), (None, 64, 64)],
)
def test_fold(
    lengths: tuple[int, ...] | None, first: int, segment: int, windowed: bool, device: str
) -> None:
    """Of sequences with several later segments, with one and with none; padded ones without
    lengths. An M that was not made is NaN."""
    counts, cu_seqlens = [3, 3], None
    if lengths is not None:
        counts = [-(-max(n - first, 0) // segment) for n in lengths]
        cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    slots = sum(counts) + 1
    generator = torch.Generator().manual_seed(0)
    starts = torch.randn(slots, HV, K, V, generator=generator)
    shifts = torch.randn(slots, HV, K * V, generator=generator) / K
    windows = torch.randint(0, 2, (slots, HV, 2), generator=generator, dtype=torch.int32)
    if windowed:
        shifts[windows[..., 0] > 0] = torch.nan
    expected, end = starts.double(), 0
    for count in counts:
        end += count
        for i in range(end - count, end - 1):
            for head in range(HV):
                if not windowed or windows[i, head, 0] == 0:
                    M = shifts[i, head, : K * K].view(K, K).double()
                    expected[i + 1, head] += M @ expected[i, head]
    found = starts.to(device)
    fold_maps(
        found,
        shifts.to(device),
        windows.to(device) if windowed else None,
        cu_seqlens,
        N=len(counts),
        most_long=len(counts),
        BN=128,
        NS=3,
        first=first,
        segment=segment,
    )
    torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-5, atol=1e-5)
