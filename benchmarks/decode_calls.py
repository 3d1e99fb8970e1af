"""The implementations of a decode step, ours, FlashInfer's and FLA's, for `benchmarks.decode`.

FLA's `fused_recurrent_gated_delta_rule` has no pool: it writes as many bytes of final states to new
memory, and keeps no state for each token. FlashInfer keeps its pools value-first. Its
`gated_delta_rule_decode` takes key-first states without slots. Several tokens on bfloat16 states
are calls of its `gated_delta_rule_decode_pretranspose`, and on float32 states of its
`gated_delta_rule_mtp`.
"""

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.shapes import Random, gate_parameters
from gdn_triton import make_window, recurrent_step, reference, restart_window

K = V = 128


class Step(NamedTuple):
    """T tokens of N sequences; `slots` leads to every state once, in random order."""

    q: Tensor  # [N, T, H, K]
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    slots: Tensor
    states: Tensor  # [N, HV, K, V], float32


def make_step(N: int, T: int, H: int, HV: int, gates: str, device: torch.device) -> Step:
    make = partial(torch.randn, device=device)
    q, k = (make(N, T, H, K).bfloat16() for _ in range(2))
    v, a, b = make(N, T, HV, V).bfloat16(), make(N, T, HV).bfloat16(), make(N, T, HV).bfloat16()
    A, dt_bias = gate_parameters(gates, HV, Random(0, device))
    slots = torch.randperm(N, device=device).int()
    return Step(q, k, v, a, b, A.log(), dt_bias, slots, make(N, HV, K, V))


def exact(step: Step, heads: int) -> Tensor:
    """o of the first `heads` sequences in float64: [heads, T, HV, V]."""
    q, k, v, a, b = (x[:heads].double() for x in step[:5])
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    g = -step.A_log.double().exp() * torch.nn.functional.softplus(a + step.dt_bias.double())
    state = step.states[step.slots[:heads].long()].double()
    o, _ = reference.recurrent_gated_delta_rule(q, k, v, g, b.sigmoid(), initial_state=state)
    return o


SEVERAL_ONLY = "several tokens a call only"

# An implementation: makes a call that returns o from a step and the pool's dtype, or returns a
# sentence why it cannot.
Maker = Callable[[Step, torch.dtype], Callable[[], Any] | str]


def own_arguments(step: Step, v_first: bool) -> dict[str, Any]:
    """The arguments of `recurrent_step` except the states. One token has no dimension of tokens."""
    q, k, v, a, b = step[:5] if step.q.shape[1] > 1 else (x[:, 0] for x in step[:5])
    return {
        "mixed_qkv": torch.cat([x.flatten(-2) for x in (q, k, v)], -1),
        "a": a,
        "b": b,
        "A_log": step.A_log,
        "dt_bias": step.dt_bias,
        "use_qk_l2norm_in_kernel": True,
        "state_v_first": v_first,
    }


def own_pool(states: Tensor, dtype: torch.dtype, v_first: bool) -> Tensor:
    x = states.mT if v_first else states
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)


def ours(step: Step, dtype: torch.dtype, v_first: bool) -> Callable[[], Any] | str:
    if dtype == torch.int8:
        return "a pool of int8 needs a window"
    N, T = step.q.shape[:2]
    rest = own_arguments(step, v_first)
    if T == 1:
        return partial(recurrent_step, own_pool(step.states, dtype, v_first), step.slots, **rest)
    # All T tokens of the previous call were accepted; slot (n, T - 1) has the state.
    states = step.states.new_zeros(N, T, *step.states.shape[1:])
    states[:, -1] = step.states[step.slots.long()]
    pool = own_pool(states.flatten(0, 1), dtype, v_first)
    slots = torch.arange(N * T, device=pool.device, dtype=torch.int32).view(N, T)
    accepted = torch.full_like(slots[:, 0], T)
    return partial(recurrent_step, pool, slots, num_accepted_tokens=accepted, **rest)


def ours_last(step: Step, dtype: torch.dtype, v_first: bool) -> Callable[[], Any] | str:
    if step.q.shape[1] == 1:
        return SEVERAL_ONLY
    if dtype == torch.int8:
        return "a pool of int8 needs a window"
    pool = own_pool(step.states, dtype, v_first)
    return partial(recurrent_step, pool, step.slots, **own_arguments(step, v_first))


class WindowSteps:
    """A call is the next step of a fold period; half of the drafted tokens are accepted."""

    def __init__(self, step: Step, dtype: torch.dtype, v_first: bool) -> None:
        N, T, H = step.q.shape[:3]
        HV, device = step.v.shape[2], step.q.device
        packed = dtype == torch.int8
        window = make_window(N, H, HV, K, V, device=device, max_tokens=T, with_scales=packed)
        base = torch.randint(100, 1000, (N,), device=device, dtype=torch.int32)
        restart_window(window, step.slots, base)
        moved = 1 if T == 1 else T // 2
        self.period = window.k.shape[1] + 1 - 2 * T
        self.positions = [base + moved * i for i in range(self.period)]
        self.made = 0
        pool, rest = own_pool(step.states, dtype, v_first), own_arguments(step, v_first)
        if packed:
            states = own_pool(step.states, torch.float32, v_first)
            every = torch.arange(N, device=device)
            window.pack(pool, every, states, state_v_first=v_first)
        self.step = partial(recurrent_step, pool, step.slots, window=window, **rest)

    def __call__(self) -> Tensor:
        positions = self.positions[self.made % self.period]
        self.made += 1
        return self.step(positions=positions)


def flashinfer_pool(step: Step, dtype: torch.dtype) -> Callable[[], Any] | str:
    if step.q.shape[1] > 1:
        return "one token a call only"
    if dtype == torch.int8:
        return "takes float states only"
    run = importlib.import_module("flashinfer.gdn_decode").gated_delta_rule_decode_pretranspose
    return partial(
        run,
        *step[:3],
        None,
        step.A_log,
        step.a,
        step.dt_bias,
        step.b,
        use_qk_l2norm=True,
        initial_state=own_pool(step.states, dtype, v_first=True),
        initial_state_indices=step.slots,
    )


def flashinfer_states(step: Step, dtype: torch.dtype) -> Callable[[], Any] | str:
    if step.q.shape[1] > 1:
        return "one token a call only"
    if dtype != torch.float32:
        return "takes float32 states only"
    run = importlib.import_module("flashinfer.gdn_decode").gated_delta_rule_decode
    return partial(
        run,
        *step[:3],
        step.states[step.slots.long()].clone(),
        step.A_log,
        step.a,
        step.dt_bias,
        step.b,
        use_qk_l2norm=True,
    )


def flashinfer_drafts(step: Step, dtype: torch.dtype) -> Callable[[], Any] | str:
    N, T = step.q.shape[:2]
    if T == 1:
        return SEVERAL_ONLY
    if dtype == torch.int8:
        return "takes float states only"
    if dtype == torch.bfloat16:
        pool = own_pool(step.states, dtype, v_first=True)
        kept = pool.new_empty(N, T, *pool.shape[1:])
        options = {"intermediate_states_buffer": kept, "disable_state_update": True}
        return flashinfer_tokens(step, pool, **options)
    pool = step.states.new_empty(N + N * T, *step.states.mT.shape[1:])
    pool[:N] = step.states.mT
    kept = torch.arange(N, N + N * T, device=pool.device, dtype=torch.int32).view(N, T)
    return flashinfer_tokens(step, pool, ssm_state_indices=kept, disable_state_update=False)


def flashinfer_last(step: Step, dtype: torch.dtype) -> Callable[[], Any] | str:
    if step.q.shape[1] == 1:
        return SEVERAL_ONLY
    if dtype == torch.int8:
        return "takes float states only"
    pool = own_pool(step.states, dtype, v_first=True)
    return flashinfer_tokens(step, pool, disable_state_update=False)


def flashinfer_tokens(step: Step, pool: Tensor, **options: Any) -> Callable[[], Any]:
    """Several tokens on a value-first pool."""
    module = importlib.import_module("flashinfer.gdn_decode")
    gates = {"A_log": step.A_log, "a": step.a, "dt_bias": step.dt_bias, "b": step.b}
    states = {"initial_state": pool, "initial_state_indices": step.slots}
    common = {**gates, **states, **options, "use_qk_l2norm": True}
    if pool.dtype == torch.bfloat16:
        return partial(module.gated_delta_rule_decode_pretranspose, *step[:3], state=None, **common)
    return partial(module.gated_delta_rule_mtp, *step[:3], **common)


def fla(step: Step, dtype: torch.dtype) -> Callable[[], Any] | str:
    if dtype != torch.float32:
        return "returns float32 states only"
    run = importlib.import_module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule
    return partial(
        run,
        *step[:4],
        beta=step.b,
        initial_state=step.states[step.slots.long()].clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        A_log=step.A_log,
        dt_bias=step.dt_bias,
        use_beta_sigmoid_in_kernel=True,
    )


MAKERS: dict[str, Maker] = {
    "gdn_triton, key-first": partial(ours, v_first=False),
    "gdn_triton, value-first": partial(ours, v_first=True),
    "gdn_triton, key-first, last state": partial(ours_last, v_first=False),
    "gdn_triton, value-first, last state": partial(ours_last, v_first=True),
    "gdn_triton, key-first, with a window": partial(WindowSteps, v_first=False),
    "gdn_triton, value-first, with a window": partial(WindowSteps, v_first=True),
    "FlashInfer, pool, value-first": flashinfer_pool,
    "FlashInfer, states, key-first": flashinfer_states,
    "FlashInfer, a state a token, value-first": flashinfer_drafts,
    "FlashInfer, last state, value-first": flashinfer_last,
    "FLA, states": fla,
}
# Of several tokens these write the last state alone. Drafts that may be rejected need all states.
LAST_STATE = ("last state", "FLA")
PEERS = ("flashinfer", "fla")


def keeps_last_state(name: str, tokens: int) -> bool:
    """Whether an implementation writes only the last of the states of several tokens."""
    return tokens > 1 and any(word in name for word in LAST_STATE)


def output(result: Any, shape: Sequence[int]) -> Tensor:
    """o of any implementation as [N, *shape]."""
    o: Tensor = result[0] if isinstance(result, tuple) else result
    return o.reshape(-1, *shape)


def makers_of(peers: Sequence[str]) -> dict[str, Maker]:
    """Our implementations and those of the peers, by the first word of their names."""
    wanted = {"gdn_triton", *peers}
    return {name: maker for name, maker in MAKERS.items() if name.split(",")[0].lower() in wanted}
