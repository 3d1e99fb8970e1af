"""The folds of the maps of segments (fold_maps of gdn_triton/chunk/triton/fused/segments.py)
forward and back against sums in torch."""

import pytest
import torch

from gdn_triton.chunk.triton.fused.segments import fold_maps
from gdn_triton.chunk.triton.shared.chunks import make_chunks

HV, K, V, SEGMENT = 2, 16, 24, 128


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("lengths", [(300, 70, 0, 700), None])
def test_fold(lengths: tuple[int, ...] | None, given: bool, back: bool, device: str) -> None:
    """An M that is not read is NaN. Of a sequence without a token, the fold stores the state after
    the sequence."""
    N = 2 if lengths is None else len(lengths)
    T = 600 if lengths is None else sum(lengths)
    cu_seqlens = None
    if lengths is not None:
        cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    segments = make_chunks(N if lengths is None else 1, T, SEGMENT, cu_seqlens)
    generator = torch.Generator().manual_seed(0)
    b = torch.randn(segments.slots, HV, K, V, generator=generator)
    M = torch.randn(segments.slots, HV, K, K, generator=generator) / 4
    state = torch.randn(N, HV, K, V, generator=generator)
    last = torch.full_like(state, torch.nan)
    expected, ends = torch.full_like(b, torch.nan).double(), last.double()
    end = 0
    for n in range(N):
        count = -(-(T if lengths is None else lengths[n]) // SEGMENT)
        end += count
        slots = list(range(end - count, end))
        now = state[n].double() if given else torch.zeros(HV, K, V, dtype=torch.float64)
        if not slots:
            ends[n] = now
        for i in slots[::-1] if back else slots:
            expected[i] = now
            now = (M[i].mT if back else M[i]).double() @ now + b[i].double()
        if slots:
            M[slots[0 if back else -1]] = torch.nan
            if not given:
                M[slots[-1 if back else 0]] = torch.nan
    found, final = b.to(device), last.to(device)
    start = state.to(device) if given else None
    fold_maps(found, M.to(device), segments, start, final, N=N, state_v_first=False, back=back)
    torch.testing.assert_close(found[:end].double().cpu(), expected[:end], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(final.double().cpu(), ends, rtol=1e-5, atol=1e-5, equal_nan=True)
