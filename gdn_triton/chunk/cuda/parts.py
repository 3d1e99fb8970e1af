"""Host code of the CUDA library's calls for a part of a sequence whose other parts are on other
devices. Each direction has two calls: the maps of the part, then the walks from the state or
gradient that another part sends.

A part is a padded problem of one sequence, with states [N, HV, K, V].
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from gdn_triton.chunk.cuda import calls
from gdn_triton.chunk.cuda.calls import side_readable, tma_readable
from gdn_triton.chunk.problem import Inputs, Problem
from gdn_triton.fast.arguments import (
    PartBackwardArguments,
    PartMapsArguments,
    PartWalkArguments,
)


@functools.lru_cache(1024)
def _floats(name: str, *sizes: int | None) -> int:
    return calls.ask(name, sizes)


class PartForward(NamedTuple):
    """Results of the maps that the walk needs. arguments: inputs and options in the form that the
    operators read. starts: fp32, the states that the segments start from, once the walk has run;
    for K = V = 128 [segments, HV, V, K]."""

    problem: Problem
    arguments: tuple[object, ...]
    starts: Tensor
    workspace: Tensor


def _memory(name: str, problem: Problem, device: torch.device) -> Tensor:
    floats = _floats(name, *calls.plan_sizes(problem, device))
    return torch.empty(floats, dtype=torch.float32, device=device)


def forward_maps(problem: Problem, x: Inputs, carry: Tensor | None, *, comes: bool) -> PartForward:
    """Makes the maps of the part's segments. carry: [HV, V + K, K], fp32, to which the part's own
    map is written, transposed, with b from the initial state of `x`; None if no state leaves the
    part. comes: whether another part sends a state; if not, M of the carry is not written."""
    device = x.q.device
    part = PartForward(
        problem=problem,
        arguments=calls.inputs_and_options(problem, x),
        starts=_memory("part_starts", problem, device),
        workspace=_memory("part_forward_workspace", problem, device),
    )
    arguments = PartMapsArguments(
        initial_state=None if x.initial_state is None else side_readable(x.initial_state),
        carry=carry,
        comes=comes,
        starts=part.starts,
        workspace=part.workspace,
    )
    calls.library_operator("part_forward_maps")(*part.arguments, *arguments)
    return part


def forward_walk(
    part: PartForward, initial_state: Tensor | None, o: Tensor, final_state: Tensor | None
) -> None:
    """Writes o [1, T, HV, V] and the state [1, HV, K, V] after the part. initial_state: the state
    [1, HV, K, V] that another part sends, which replaces the one given to `forward_maps`; None
    keeps that one."""
    arguments = PartWalkArguments(
        initial_state=initial_state,
        o=o,
        final_state=final_state,
        starts=part.starts,
        workspace=part.workspace,
    )
    calls.library_operator("part_forward_walk")(*part.arguments, *arguments)


class Outputs(NamedTuple):
    """The memory of the gradients; gate_sums: [2, HV], fp32, of A_log and dt_bias."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None
    gate_sums: Tensor | None


class PartBackward(NamedTuple):
    """Results of the reverse maps that the walks need."""

    arguments: tuple[object, ...]
    initial_state: Tensor
    do: Tensor
    outputs: Outputs
    starts: Tensor
    workspace: Tensor

    def run(self, *, walks: bool, dht: Tensor | None, carry: Tensor | None) -> None:
        out = self.outputs
        arguments = PartBackwardArguments(
            walks=walks,
            initial_state=self.initial_state,
            do=self.do,
            dht=dht,
            carry=carry,
            dq=out.q,
            dk=out.k,
            dv=out.v,
            dg=out.g,
            dbeta=out.beta,
            dh0=out.initial_state,
            gate_sums=out.gate_sums,
            starts=self.starts,
            workspace=self.workspace,
        )
        calls.library_operator("part_backward")(*self.arguments, *arguments)


def backward_maps(
    problem: Problem,
    x: Inputs,
    starts: Tensor,
    do: Tensor,
    dht: Tensor | None,
    outputs: Outputs,
    carry: Tensor | None,
) -> PartBackward:
    """Makes the reverse maps of the part's segments, for K = V = 128 in bfloat16. starts: from the
    forward. do: [1, T, HV, V]. dht: [1, HV, K, V], fp32, of the part alone, or None for zeros.
    carry: [HV, V + K, K]; the gradient of the state before the part is written, transposed, to its
    first V rows; None if no other part has sent the state."""
    HV, K, V = problem.HV, problem.K, problem.V
    part = PartBackward(
        arguments=calls.inputs_and_options(problem, x),
        initial_state=starts[: HV * K * V].view(1, HV, V, K).mT,
        do=tma_readable(do),
        outputs=outputs,
        starts=starts,
        workspace=_memory("part_backward_workspace", problem, x.q.device),
    )
    part.run(walks=False, dht=dht, carry=carry)
    return part


def backward_walks(part: PartBackward, dht: Tensor | None) -> None:
    """Writes the gradients. dht: [1, HV, K, V], fp32, with the gradient that other parts send."""
    part.run(walks=True, dht=dht, carry=None)
