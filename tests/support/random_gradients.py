r"""Random calls of the backward, whose gradients are compared with float64.

    python tests/support/random_gradients.py --count 1000
    python tests/support/random_gradients.py --backend triton --count 100000 --seconds 150 \
        --workers 16

`check_task` has the allowed errors. A case that fails prints the arguments that run it again.
`random_runs.py` says how cases are numbered and shared among processes, and what `--alike` and
`--seconds` do. With `--backend triton` 64 cases in a row have one variant. Most cases have
sequences of up to 130 tokens, every eighth up to 2500. Variants of odd numbers have
GDN_BATCH_INVARIANT=1, with which the Triton backend runs the Gluon kernels for few states too.
Memory that the package allocates holds NaN.
"""

import argparse
import sys
from functools import partial

from backward_cases import check_task
from fast_backward_cases import random_task
from fast_parity import requested, set_for_a_while
from poison import poisoned_allocations
from random_runs import add_numbers, check_numbers, options_of


def check_random(number: int, options: argparse.Namespace) -> str | None:
    """The fault of a random case, or None."""
    longest = 130 if number % 8 else 2500
    task, dtype = random_task(number, "cuda", longest=longest, alike=options.alike)
    invariant = set_for_a_while("GDN_BATCH_INVARIANT", str(number // options.alike % 2))
    try:
        with requested(options.backend), invariant, poisoned_allocations():
            check_task(task, dtype, "cuda")
    except AssertionError as why:
        return f"FAILED {number}: {task.case}, {task.options}\n    {why}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description="Random gradients of one backend.")
    add_numbers(parser, alike=64)
    options = options_of(parser)
    sys.exit(check_numbers(partial(check_random, options=options), options))


if __name__ == "__main__":
    main()
