"""Random calls of the backward, whose gradients are compared with float64.

    python tests/support/random_gradients.py --count 1000 --backend triton --workers 8

`check_task` has the allowed errors. A case that fails prints its number, which `--only` runs again.
Cases of odd numbers have GDN_BATCH_INVARIANT=1, with which the Triton backend runs the Gluon
kernels for few states too.
"""

import argparse
import sys
from functools import partial

from backward_cases import check_task
from fast_backward_cases import random_task
from fast_parity import add_numbers, check_numbers, requested, set_for_a_while


def check_random(number: int, backend: str) -> str | None:
    """The fault of a random case, or None."""
    task, dtype = random_task(number, "cuda", longest=130 if number % 3 else 2500)
    try:
        with requested(backend), set_for_a_while("GDN_BATCH_INVARIANT", str(number % 2)):
            check_task(task, dtype, "cuda")
    except AssertionError as why:
        return f"FAILED {number}: {task.case}, {task.options}\n    {why}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description="Random gradients of one backend.")
    add_numbers(parser)
    options = parser.parse_args()
    sys.exit(check_numbers(partial(check_random, backend=options.backend), options))


if __name__ == "__main__":
    main()
