"""Random steps with a window; `tests/support/random_windows.py` makes as many as one likes."""

import pytest
from fast_parity import requested
from random_windows import check_case


@pytest.mark.parametrize("kind", range(0, 48, 7))
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_random(kind: int, backend: str, device: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton", reason="Triton is not installed")
    with requested(backend):
        check_case(11 * kind, device, backend, small=device == "cpu", alike=11)
