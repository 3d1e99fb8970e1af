"""Host code of the CUDA forward and backward: each function passes a validated problem and its
tensors to one operator.

The operator writes into memory that is allocated here, or into a pool's memory. Under torch.compile
the whole op is opaque already (`gdn_triton.chunk.operators`, `gdn_triton.chunk.prefill.operators`).
This operator is therefore never traced and has no fake.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from gdn_triton import fast
from gdn_triton.chunk.problem import Gradients, Inputs, Pool, Problem
from gdn_triton.fast.arguments import (
    BackwardArguments,
    ForwardArguments,
    PoolArguments,
    WalkArguments,
)

# The states that a forward leaves for its backward, if it leaves any.
States = Tensor | None

# The dtypes in which the kernels read g, beta and the initial state.
_SIDE_DTYPES = frozenset((torch.bfloat16, torch.float16, torch.float32))


def tma_reaches(x: Tensor) -> bool:
    """Whether TMA can read or write x [B, T, heads, D] of 2-byte elements in place.

    TMA requires a dense last dimension, and a base address and strides that are multiples of 16
    bytes. A split of a projection meets this if the widths of its parts are multiples of 8.
    """
    batch, row, head, last = x.stride()
    return last == 1 and not (batch | row | head) & 7 and not x.data_ptr() & 15


def tma_readable(x: Tensor) -> Tensor:
    """x itself if TMA can read it in place, otherwise a copy."""
    return x if tma_reaches(x) else x.clone(memory_format=torch.contiguous_format)


def side_readable(x: Tensor) -> Tensor:
    """g, beta or a state: at any strides, but not in float64."""
    return x if x.dtype in _SIDE_DTYPES else x.float()


def head_vector(x: Tensor | None) -> Tensor | None:
    """A_log or dt_bias [HV], dense and in float32."""
    return None if x is None else x.float().contiguous()


# The library's answers for a call's sizes (`PLAN_SIZES`) are remembered: asking takes longer.


@functools.lru_cache(1024)
def workspace_floats(*sizes: int | None) -> int:
    """Scratch memory of a forward, in float32 elements."""
    return ask("chunk_forward_workspace", sizes)


@functools.lru_cache(1024)
def backward_floats(*sizes: int | None, checkpoint_interval: int) -> int:
    """Scratch memory of a backward, in float32 elements; checkpoint_interval: 0 without states."""
    return ask("chunk_backward_workspace", sizes, checkpoint_interval)


@functools.lru_cache(1024)
def best_checkpoint_interval(*sizes: int | None) -> int:
    """The number of tokens from one state that a forward should leave for the backward to the next;
    0: the backward takes no less time with states."""
    return ask("chunk_backward_checkpoint_interval", sizes)


def ask(name: str, sizes: tuple[int | None, ...], *more: int) -> int:
    device, *numbers = sizes
    index = torch.cuda.current_device() if device is None else device
    answer: int = getattr(torch.ops.gdn_fast, name)(index, [int(x or 0) for x in numbers], *more)
    return answer


def plan_sizes(p: Problem, device: torch.device) -> tuple[int | None, ...]:
    """The values that the library plans a call by, in the order of `PLAN_SIZES`."""
    return (
        *(device.index, p.B, p.T, p.H, p.HV, p.K, p.V, p.N, p.q_dtype is torch.bfloat16),
        *(p.is_varlen, p.use_qk_l2norm, p.batch_invariant, *p.longest),
    )


@functools.cache
def library_operator(name: str) -> torch._ops.OpOverload:
    unavailable = fast.why_unavailable()
    if unavailable is not None:
        raise RuntimeError(unavailable)
    operator: torch._ops.OpOverload = getattr(torch.ops.gdn_fast, name).default
    return operator


def forward(problem: Problem, x: Inputs, pool: Pool | None = None) -> tuple[Tensor, Tensor | None]:
    """Returns o [B, T, HV, V] in q's dtype and the final state or None. With a ``pool``, returns
    the pool's o, and writes its states and checkpoints in place.

    q, k and v that TMA cannot read in place, and side inputs in float64, are copied first. Raises
    RuntimeError with the reason if the library is missing, or reports that it did not run.
    """
    if pool is not None:
        return _prefill(problem, x, pool), None
    o, final_state, _ = _forward(problem, x, keeps=False)
    return o, final_state


def forward_for_gradients(problem: Problem, x: Inputs) -> tuple[Tensor, Tensor | None, States]:
    """Runs `forward`, with the same bits, and also returns states for `gradients`: [rows, HV, V, K]
    in fp32, at most 32 bytes a token and value head, or None where the library's backward takes no
    less time with them."""
    return _forward(problem, x, keeps=True)


def _forward(problem: Problem, x: Inputs, *, keeps: bool) -> tuple[Tensor, Tensor | None, States]:
    p, initial_state = problem, x.initial_state
    run, device = library_operator("chunk_forward"), x.q.device
    o = torch.empty((p.B, p.T, p.HV, p.V), dtype=p.q_dtype, device=device)
    final_state = None
    if p.output_final_state:
        shape = (p.N, p.HV, p.V, p.K) if p.state_v_first else (p.N, p.HV, p.K, p.V)
        final_state = torch.empty(shape, dtype=torch.float32, device=device)
    if p.T == 0 or p.N == 0:
        return o.zero_(), _untouched(final_state, initial_state), None
    states, interval = None, best_checkpoint_interval(*plan_sizes(p, device)) if keeps else 0
    if interval > 0:
        shape = (p.B * p.T // interval, p.HV, p.V, p.K)
        states = torch.empty(shape, dtype=torch.float32, device=device)
    arguments = ForwardArguments(
        initial_state=None if initial_state is None else side_readable(initial_state),
        o=o,
        final_state=final_state,
        states=states,
        checkpoint_interval=interval,
        workspace=_workspace(p, device),
    )
    run(*_readable(x), *_options(p), *arguments)
    return o, final_state, states


def _prefill(problem: Problem, x: Inputs, pool: Pool) -> Tensor:
    """Returns the pool's o. If TMA cannot write it in place, the kernel writes a dense tensor,
    which is then copied."""
    p = problem
    run = library_operator("chunk_prefill")
    if p.N == 0:  # without a token there are states to move
        return pool.out.zero_()
    o = pool.out
    if not tma_reaches(o):
        o = torch.empty((p.B, p.T, p.HV, p.V), dtype=p.q_dtype, device=x.q.device)
    arguments = PoolArguments(
        state=pool.state,
        read_slots=pool.read_slots,
        write_slots=pool.write_slots,
        has_initial_state=pool.has_initial_state,
        last_skipped=pool.last_skipped,
        o=o,
        checkpoint_interval=pool.every,
        checkpoints=pool.checkpoints,
        checkpoint_slots=pool.checkpoint_slots,
        workspace=_workspace(p, x.q.device),
    )
    run(*_readable(x), *_options(p), *arguments)
    return o if o is pool.out else pool.out.copy_(o)


def gradients(
    problem: Problem,
    x: Inputs,
    do: Tensor | None,
    dht: Tensor | None,
    *,
    store_dh0: bool,
    states: States = None,
) -> Gradients:
    """Returns all gradients, the gradient of the initial state only with ``store_dh0``. do: [B, T,
    HV, V], or None for zeros. dht: laid out like the final state, or None for zeros. states: the
    states of `forward_for_gradients` of the same problem.

    Raises RuntimeError with the reason if the library is missing, or reports that it did not run.
    """
    p, device = problem, x.q.device
    run = library_operator("chunk_backward")
    dq, dk = (torch.empty(y.shape, dtype=y.dtype, device=device) for y in (x.q, x.k))
    dv = torch.empty(x.v.shape, dtype=x.v.dtype, device=device)
    dg, dbeta = (torch.empty(y.shape, dtype=y.dtype, device=device) for y in (x.g, x.beta))
    dh0 = None
    if store_dh0:
        shape = (p.N, p.HV, p.V, p.K) if p.state_v_first else (p.N, p.HV, p.K, p.V)
        dh0 = torch.empty(shape, dtype=torch.float32, device=device)
    gate_sums = None
    if x.A_log is not None:
        gate_sums = torch.empty(2, p.HV, dtype=torch.float32, device=device)
    if p.T == 0 or p.N == 0:
        for y in (dq, dk, dv, dg, dbeta, gate_sums):
            if y is not None:
                y.zero_()
        if dh0 is not None:
            _ = dh0.zero_() if dht is None else dh0.copy_(dht)
    else:
        sizes = plan_sizes(p, device)
        interval = 0 if states is None else best_checkpoint_interval(*sizes)
        floats = backward_floats(*sizes, checkpoint_interval=interval)
        arguments = BackwardArguments(
            initial_state=None if x.initial_state is None else side_readable(x.initial_state),
            do=torch.zeros_like(dv) if do is None else tma_readable(do),
            dht=None if dht is None else dht.float(),
            states=states,
            checkpoint_interval=interval,
            dq=dq,
            dk=dk,
            dv=dv,
            dg=dg,
            dbeta=dbeta,
            dh0=dh0,
            gate_sums=gate_sums,
            workspace=torch.empty(floats, dtype=torch.float32, device=device),
        )
        run(*_readable(x), *_options(p), *arguments)
    return Gradients(
        q=dq,
        k=dk,
        v=dv,
        g=dg,
        beta=dbeta,
        initial_state=None
        if dh0 is None or x.initial_state is None
        else dh0.to(x.initial_state.dtype),
        A_log=None
        if gate_sums is None or x.A_log is None
        else gate_sums[0].to(x.A_log.dtype, copy=True),
        dt_bias=None
        if gate_sums is None or x.dt_bias is None
        else gate_sums[1].to(x.dt_bias.dtype, copy=True),
    )


class Walks(NamedTuple):
    """h, dh: [slots, HV, K, V], the state before each chunk and the gradient of the state after it.
    v_new, dx: [B, T, HV, V]. All four have the dtype of A_inv. dh0: fp32, in the requested layout.
    """

    h: Tensor
    v_new: Tensor
    dh: Tensor
    dx: Tensor
    dh0: Tensor | None


def walks(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    A_inv: Tensor,
    A_qk: Tensor,
    g_cumsum: Tensor,
    own: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    dht: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_offsets: Tensor | None,
    slots: int,
    scale: float,
    N: int,
    K: int,
    store_dh0: bool,
    state_v_first: bool,
) -> Walks:
    """Runs both walks of a backward whose other steps run in Triton, in chunks of 64 tokens.

    q, k: [B, T, H, K_row], zero beyond K; v, do: [B, T, HV, V]; A_inv, A_qk: [B, T, HV, 64], dense
    and strictly lower; g_cumsum (log2), own (A_qk's diagonal), beta: [B, T, HV], fp32;
    chunk_offsets: [N + 1], int32, the chunk slot of each packed sequence's first chunk. Empty chunk
    slots are not written. Raises RuntimeError with the reason if the library is missing, or did not
    run.
    """
    B, T, HV, V = do.shape
    device = do.device
    h = torch.empty((slots, HV, K, V), dtype=do.dtype, device=device)
    dh = torch.empty((slots, HV, K, V), dtype=do.dtype, device=device)
    v_new = torch.empty((B, T, HV, V), dtype=do.dtype, device=device)
    dx = torch.empty((B, T, HV, V), dtype=do.dtype, device=device)
    dh0 = None
    if store_dh0:
        shape = (N, HV, V, K) if state_v_first else (N, HV, K, V)
        dh0 = torch.empty(shape, dtype=torch.float32, device=device)
    if N > 0 and T > 0:
        arguments = WalkArguments(
            q=tma_readable(q),
            k=tma_readable(k),
            v=tma_readable(v),
            do=tma_readable(do),
            A_inv=A_inv,
            A_qk=A_qk,
            g_cumsum=g_cumsum,
            beta=beta,
            own=own,
            initial_state=None if initial_state is None else side_readable(initial_state),
            dht=None if dht is None else dht.float(),
            cu_seqlens=None if cu_seqlens is None else cu_seqlens.contiguous(),
            chunk_offsets=chunk_offsets,
            scale=scale,
            state_v_first=state_v_first,
            h=h,
            v_new=v_new,
            dh=dh,
            dx=dx,
            dh0=dh0,
        )
        library_operator("backward_walks")(*arguments)
    elif dh0 is not None:
        _ = dh0.zero_() if dht is None else dh0.copy_(dht)
    return Walks(h=h, v_new=v_new, dh=dh, dx=dx, dh0=dh0)


def inputs_and_options(p: Problem, x: Inputs) -> tuple[object, ...]:
    """The `INPUTS` and `OPTIONS` of a call in the form that the operators read."""
    return (*_readable(x), *_options(p))


def _readable(x: Inputs) -> tuple[Tensor | None, ...]:
    """The `INPUTS`, all tensors but the state, in the form that the operators read."""
    return (
        tma_readable(x.q),
        tma_readable(x.k),
        tma_readable(x.v),
        side_readable(x.g),
        side_readable(x.beta),
        head_vector(x.A_log),
        head_vector(x.dt_bias),
        None if x.cu_seqlens is None else x.cu_seqlens.contiguous(),
    )


def _options(p: Problem) -> tuple[float | bool | tuple[int, int, int], ...]:
    """The `OPTIONS` of a call."""
    activations = p.use_qk_l2norm, p.use_beta_sigmoid, p.allow_neg_eigval
    return p.scale, p.state_v_first, *activations, p.batch_invariant, p.longest


def _workspace(problem: Problem, device: torch.device) -> Tensor:
    size = workspace_floats(*plan_sizes(problem, device))
    return torch.empty(size, dtype=torch.float32, device=device)


def _untouched(final_state: Tensor | None, initial_state: Tensor | None) -> Tensor | None:
    """The final states of a call in which no sequence has a token."""
    if final_state is None:
        return None
    return final_state.zero_() if initial_state is None else final_state.copy_(initial_state)
