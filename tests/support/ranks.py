"""Processes of a test, one for each rank of a process group."""

import faulthandler
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(world: int, work: Callable[..., None], *args: Any) -> None:
    """work(rank, *args), which starts the process group, in a process of its own for each rank
    below `world`. Ranks leave what they found in files. Raises what a rank raised; one that crashed
    says where on stderr."""
    mp.spawn(_rank, (work, args), nprocs=world)


def _rank(rank: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    work(rank, *args)
    dist.barrier()
    dist.destroy_process_group()
    # Gloo's threads outlive destroy_process_group wherever a device mesh still knows its group, and
    # one that drops a tensor while the interpreter is taken down under it ends the process by a
    # signal (pytorch issue 190489). Nothing is left to be done here, so it is not taken down.
    os._exit(0)
