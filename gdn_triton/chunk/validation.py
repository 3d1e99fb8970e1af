"""Validates the arguments of a call before anything is launched, and unpacks them into a `Problem`.

Shapes are checked only here, and backends rely on a `Problem`. A call that one backend cannot serve
is a refusal of that backend (`gdn_triton._host.backends`), not an error here.

Nothing here reads a value on an accelerator: the host would wait for the device, and a CUDA graph
could not be captured. Validation runs at every call. Messages are therefore built only after a
check has failed, and a call that is like an accepted one is not checked again.
"""

import heapq
from itertools import pairwise

import torch
from torch import Tensor

from gdn_triton._host.arguments import (
    check_devices,
    check_dtypes,
    check_eigenvalues,
    check_flags,
    check_gate,
    check_offsets,
    check_on_host,
    check_qkv,
    check_rank,
    check_same_offsets,
    check_shape,
    check_state,
    check_tensors,
    count_sequences,
    must,
    real_or_none,
    shape_of,
    value_of,
)
from gdn_triton._host.environment import batch_invariant
from gdn_triton._host.remembered import remembered
from gdn_triton._host.tensors import is_traced, why_unreadable
from gdn_triton.chunk.problem import ChunkCall, Inputs, Problem
from gdn_triton.constants import CHUNK_SIZES


def judge_chunk(call: ChunkCall) -> Problem:
    """Checks a `gdn_triton.chunk.problem.ChunkCall`, field by field.

    The order is: types, devices, ranks, head counts, sizes, dtypes, chunk_size, cu_seqlens,
    cu_seqlens_cpu, chunk_indices, initial_state, gate, allow_neg_eigval. Raises TypeError or
    ValueError with the argument, the expected and the given value.

    The contents of cu_seqlens are checked where the host can read them: in cu_seqlens_cpu, and in
    cu_seqlens itself if it is a CPU tensor. On any other device offsets that do not start at 0,
    decrease or pass T are undefined behaviour.
    """
    q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens = call.inputs
    cu_seqlens_cpu, chunk_indices = call.cu_seqlens_cpu, call.chunk_indices
    options, chunk_size = call.options, call.chunk_size

    # Types.
    required = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    floats = {"initial_state": initial_state, "A_log": A_log, "dt_bias": dt_bias}
    indices = {"cu_seqlens": cu_seqlens, "chunk_indices": chunk_indices}
    on_host = {"cu_seqlens_cpu": cu_seqlens_cpu}
    check_tensors(required, {**floats, **indices, **on_host})
    check_flags(output_final_state=call.output_final_state, **options._asdict())
    scale = real_or_none("scale", call.scale)
    if type(chunk_size) is not int:
        raise TypeError(
            must("chunk_size", f"be an int, one of {CHUNK_SIZES}", value_of(chunk_size))
        )

    # Devices.
    device = q.device
    check_devices("q", device, {**required, **floats, **indices})

    # Ranks, head counts, sizes.
    check_rank("q", q, "B", "T", "H", "K")
    check_rank("k", k, "B", "T", "H", "K")
    check_rank("v", v, "B", "T", "HV", "V")
    check_rank("g", g, "B", "T", "HV")
    check_rank("beta", beta, "B", "T", "HV")
    B, T = q.shape[:2]
    H, HV, K, V = check_qkv(q, k, v, B=B, T=T)
    check_shape("g", g, B=B, T=T, HV=HV)
    check_shape("beta", beta, B=B, T=T, HV=HV)

    check_dtypes({**required, **floats, **indices, **on_host}, (*indices, *on_host))
    if chunk_size not in CHUNK_SIZES:
        raise ValueError(must("chunk_size", f"be one of {CHUNK_SIZES}", str(chunk_size)))

    # Packed sequences.
    longest = (0, 0, 0)
    if cu_seqlens_cpu is not None:
        check_on_host(cu_seqlens_cpu, cu_seqlens)
    if cu_seqlens is not None:
        N, longest = _check_packed(B, T, chunk_size, cu_seqlens, cu_seqlens_cpu, chunk_indices)
    else:
        N = B
        if chunk_indices is not None:
            raise ValueError(must("chunk_indices", "come with cu_seqlens", "cu_seqlens=None"))

    if initial_state is not None:
        v_first = options.state_v_first
        check_state("initial_state", initial_state, "N", N, HV=HV, K=K, V=V, state_v_first=v_first)
    gate = options.use_gate_in_kernel
    check_gate(A_log, dt_bias, HV, use_gate=gate, asked="use_gate_in_kernel=True")
    check_eigenvalues(options)

    return Problem(
        B=B,
        T=T,
        H=H,
        HV=HV,
        K=K,
        V=V,
        N=N,
        q_dtype=q.dtype,
        k_dtype=k.dtype,
        v_dtype=v.dtype,
        device=device,
        scale=K**-0.5 if scale is None else scale,
        chunk_size=chunk_size,
        is_varlen=cu_seqlens is not None,
        has_initial_state=initial_state is not None,
        output_final_state=call.output_final_state,
        state_v_first=options.state_v_first,
        use_qk_l2norm=options.use_qk_l2norm_in_kernel,
        use_beta_sigmoid=options.use_beta_sigmoid_in_kernel,
        allow_neg_eigval=options.allow_neg_eigval,
        use_gate=options.use_gate_in_kernel,
        needs_grad=torch.is_grad_enabled()
        and any(x is not None and x.requires_grad for x in call.inputs),
        batch_invariant=batch_invariant(),
        longest=longest,
        unreadable=why_unreadable(Inputs._fields, call.inputs),
    )


validate_chunk = remembered(judge_chunk)


def _check_packed(
    B: int,
    T: int,
    chunk_size: int,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor | None,
    chunk_indices: Tensor | None,
) -> tuple[int, tuple[int, int, int]]:
    """Checks the three tensors of a packed call. Returns N, the number of sequences, and the tokens
    of the three longest sequences by cu_seqlens_cpu, or zeros."""
    N = count_sequences(cu_seqlens)
    if B != 1:
        raise ValueError(must("q", "have batch size B=1 with cu_seqlens", f"B={B}"))

    longest = (0, 0, 0)
    offsets: list[int] | None = None
    if cu_seqlens.device.type == "cpu" and not is_traced(cu_seqlens):
        offsets = cu_seqlens.tolist()
        check_offsets("cu_seqlens", offsets, T)
    if cu_seqlens_cpu is not None and not is_traced(cu_seqlens_cpu):
        host_offsets: list[int] = cu_seqlens_cpu.tolist()
        check_offsets("cu_seqlens_cpu", host_offsets, T)
        if offsets is not None:
            check_same_offsets(offsets, host_offsets)
        offsets = host_offsets
        lengths = (b - a for a, b in pairwise(host_offsets))
        first, second, third, *_ = *heapq.nlargest(3, lengths), 0, 0, 0
        longest = first, second, third

    if chunk_indices is not None:
        if chunk_indices.dim() != 2 or chunk_indices.shape[1] != 2:
            raise ValueError(must("chunk_indices", "have shape [NT, 2]", shape_of(chunk_indices)))
        # The rows after the last sequence need no chunk, so the least NT follows from the offsets
        # alone.
        least = 0
        if offsets is not None:
            least = sum(-((b - e) // chunk_size) for b, e in pairwise(offsets))
        most = min(T, (T + N * (chunk_size - 1)) // chunk_size)
        NT = chunk_indices.shape[0]
        if not least <= NT <= most:
            expected = (
                f"have between {least} and {most} rows (N={N} sequences, T={T}, "
                f"chunk_size={chunk_size})"
            )
            raise ValueError(must("chunk_indices", expected, shape_of(chunk_indices)))
    return N, longest
