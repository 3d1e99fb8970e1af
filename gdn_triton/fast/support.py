"""What the CUDA library serves, judged without a GPU."""

from gdn_triton import fast
from gdn_triton.problem import Problem


def supports(problem: Problem) -> str | None:
    """A sentence why the CUDA library cannot run this problem, or None."""
    return fast.why_unavailable()
