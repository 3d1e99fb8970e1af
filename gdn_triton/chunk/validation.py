"""Judges the arguments of a call before anything is launched, and unpacks them into a `Problem`.

The only place where shapes are judged. Backends rely on a `Problem` without looking again; what one
of them cannot serve is a refusal of that backend (`gdn_triton._host.backends`), not an error here.

Nothing here reads a value that lies on an accelerator: that would stop the host until the device
has caught up, and would break the capture of a CUDA graph. It runs on every call, so messages are
only built once a check has failed, and a call that is like an accepted one in all that is judged is
not judged again.
"""

import functools
from collections.abc import Callable, Hashable
from itertools import pairwise
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from gdn_triton._host.arguments import (
    FLOAT_DTYPES,
    FLOATS,
    INDEX_DTYPES,
    INDICES,
    check_dtype,
    check_offsets,
    count_sequences,
    must,
    real_or_none,
    shape_of,
    shaped,
    type_of,
    value_of,
)
from gdn_triton._host.environment import batch_invariant
from gdn_triton._host.tensors import PLAIN_TENSORS, is_traced, is_transformed, why_unreadable
from gdn_triton.chunk.problem import ChunkCall, Problem
from gdn_triton.constants import CHUNK_SIZES

_Arguments = ParamSpec("_Arguments")
_Judgement = TypeVar("_Judgement")

# How many calls `remembered` keeps: a bound, as lengths may never repeat.
MOST_REMEMBERED = 1024
# Of a call's tensors, those that kernels read: up to cu_seqlens.
_READ = ChunkCall._fields.index("cu_seqlens") + 1
_COUNTED = frozenset((bool, int, str, type(None)))


def remembered(judge: Callable[_Arguments, _Judgement]) -> Callable[_Arguments, _Judgement]:
    """judge, which must not look further than `likeness`, run once for calls that are alike.

    What it raises is not remembered: a bad call is always judged. Once full it starts anew.
    """
    accepted: dict[Hashable, _Judgement] = {}

    @functools.wraps(judge)
    def judged(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Judgement:
        key = likeness(tuple(kwargs), (*args, *kwargs.values()))
        if key is None:
            return judge(*args, **kwargs)
        judgement = accepted.get(key)
        if judgement is None:
            judgement = judge(*args, **kwargs)
            if len(accepted) >= MOST_REMEMBERED:
                accepted.clear()
            accepted[key] = judgement
        return judgement

    return judged


def likeness(names: tuple[str, ...], values: tuple[Any, ...]) -> Hashable | None:
    """All that may be judged of the arguments of a call, in a form that is equal for calls that are
    alike; None if no such form holds it. ValueError for a bad `GDN_BATCH_INVARIANT`.

    Of a tensor: shape, dtype, device, and whether it requires a gradient (and whether gradients are
    on at all). Of a number its type too, as 1 is equal to True, and a float to the last bit, as 0.0
    is equal to -0.0. Of the environment `GDN_BATCH_INVARIANT`. No form has the contents of integer
    tensors that the host can read, what a subclass of Tensor knows (symbolic sizes), what a tensor
    is to a transform of torch.func or to forward-mode AD, or an object of another type.
    """
    if is_transformed():
        return None
    types = tuple(map(type, values))
    key: list[Hashable] = [names, types, torch.is_grad_enabled(), batch_invariant()]
    for x, kind in zip(values, types, strict=True):
        if kind in _COUNTED:
            key.append(x)
        elif kind in PLAIN_TENSORS:
            dtype = x.dtype
            if x.is_cpu and dtype in INDEX_DTYPES:
                return None
            key.append((x.shape, dtype, x.device, x.requires_grad))
        elif kind is float:
            key.append(x.hex())
        else:
            return None
    return tuple(key)


@remembered
def validate_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    chunk_indices: Tensor | None,
    scale: float | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    state_v_first: bool,
    use_gate_in_kernel: bool,
    chunk_size: int,
) -> Problem:
    """Checks a `gdn_triton.chunk.problem.ChunkCall`, field by field.

    In this order: types, devices, ranks, head counts, sizes, dtypes, chunk_size, cu_seqlens,
    cu_seqlens_cpu, chunk_indices, initial_state, gate, allow_neg_eigval. Raises TypeError or
    ValueError with the argument, what was expected and what came.

    The contents of cu_seqlens are checked where the host can read them: in cu_seqlens_cpu, and in
    cu_seqlens itself when that is a CPU tensor. On any other device they are not read, and offsets
    that do not start at 0, decrease or pass T are then undefined behaviour.
    """
    # Types.
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)):
        if not isinstance(x, Tensor):
            raise TypeError(must(name, "be a torch.Tensor", type_of(x)))
    on_device: list[tuple[str, Tensor]] = [("k", k), ("v", v), ("g", g), ("beta", beta)]
    for name, maybe in (
        ("initial_state", initial_state),
        ("cu_seqlens", cu_seqlens),
        ("chunk_indices", chunk_indices),
        ("A_log", A_log),
        ("dt_bias", dt_bias),
    ):
        if maybe is None:
            continue
        if not isinstance(maybe, Tensor):
            raise TypeError(must(name, "be a torch.Tensor or None", type_of(maybe)))
        on_device.append((name, maybe))
    if cu_seqlens_cpu is not None and not isinstance(cu_seqlens_cpu, Tensor):
        raise TypeError(
            must("cu_seqlens_cpu", "be a torch.Tensor or None", type_of(cu_seqlens_cpu))
        )
    for name, flag in (
        ("output_final_state", output_final_state),
        ("use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel),
        ("use_beta_sigmoid_in_kernel", use_beta_sigmoid_in_kernel),
        ("allow_neg_eigval", allow_neg_eigval),
        ("state_v_first", state_v_first),
        ("use_gate_in_kernel", use_gate_in_kernel),
    ):
        if flag is not True and flag is not False:
            raise TypeError(must(name, "be True or False", value_of(flag)))
    scale = real_or_none("scale", scale)
    if type(chunk_size) is not int:
        raise TypeError(
            must("chunk_size", f"be an int, one of {CHUNK_SIZES}", value_of(chunk_size))
        )

    # Devices.
    device = q.device
    for name, x in on_device:
        if x.device != device:
            raise ValueError(must(name, f"be on the device of q, {device}", str(x.device)))
    if cu_seqlens_cpu is not None and cu_seqlens_cpu.device.type != "cpu":
        raise ValueError(must("cu_seqlens_cpu", "be on the CPU", str(cu_seqlens_cpu.device)))

    # Ranks.
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if len(q_shape) != 4:
        raise ValueError(must("q", "have 4 dimensions [B, T, H, K]", shape_of(q)))
    if len(k_shape) != 4:
        raise ValueError(must("k", "have 4 dimensions [B, T, H, K]", shape_of(k)))
    if len(v_shape) != 4:
        raise ValueError(must("v", "have 4 dimensions [B, T, HV, V]", shape_of(v)))
    if g.dim() != 3:
        raise ValueError(must("g", "have 3 dimensions [B, T, HV]", shape_of(g)))
    if beta.dim() != 3:
        raise ValueError(must("beta", "have 3 dimensions [B, T, HV]", shape_of(beta)))

    # Head counts.
    B, T, H, K = q_shape
    HV, V = v_shape[2], v_shape[3]
    if k_shape[2] != H:
        raise ValueError(must("k", f"have the heads of q, H={H}", f"{k_shape[2]} heads"))
    if H < 1:
        raise ValueError(must("q", "have at least one head", shape_of(q)))
    if HV < H or HV % H != 0:
        raise ValueError(must("v", f"have a positive multiple of H={H} heads", f"HV={HV}"))

    # Sizes.
    if K < 1:
        raise ValueError(must("q", "have a key size K of at least 1", shape_of(q)))
    if V < 1:
        raise ValueError(must("v", "have a value size V of at least 1", shape_of(v)))
    if k_shape != q_shape:
        raise ValueError(
            must("k", f"have the shape of q, {shaped(B=B, T=T, H=H, K=K)}", shape_of(k))
        )
    if v_shape[0] != B or v_shape[1] != T:
        raise ValueError(must("v", f"have shape {shaped(B=B, T=T, HV=HV, V=V)}", shape_of(v)))
    if g.shape != (B, T, HV):
        raise ValueError(must("g", f"have shape {shaped(B=B, T=T, HV=HV)}", shape_of(g)))
    if beta.shape != (B, T, HV):
        raise ValueError(must("beta", f"have shape {shaped(B=B, T=T, HV=HV)}", shape_of(beta)))

    # Dtypes.
    q_dtype, k_dtype, v_dtype = q.dtype, k.dtype, v.dtype
    if (
        q_dtype not in FLOAT_DTYPES
        or k_dtype not in FLOAT_DTYPES
        or v_dtype not in FLOAT_DTYPES
        or g.dtype not in FLOAT_DTYPES
        or beta.dtype not in FLOAT_DTYPES
    ):
        for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)):
            check_dtype(name, x, FLOAT_DTYPES, FLOATS)
    for name, maybe in (("initial_state", initial_state), ("A_log", A_log), ("dt_bias", dt_bias)):
        if maybe is not None:
            check_dtype(name, maybe, FLOAT_DTYPES, FLOATS)
    for name, maybe in (
        ("cu_seqlens", cu_seqlens),
        ("cu_seqlens_cpu", cu_seqlens_cpu),
        ("chunk_indices", chunk_indices),
    ):
        if maybe is not None:
            check_dtype(name, maybe, INDEX_DTYPES, INDICES)

    if chunk_size not in CHUNK_SIZES:
        raise ValueError(must("chunk_size", f"be one of {CHUNK_SIZES}", str(chunk_size)))

    # Packed sequences.
    if cu_seqlens is not None:
        N = _check_packed(B, T, chunk_size, cu_seqlens, cu_seqlens_cpu, chunk_indices)
    else:
        N = B
        if cu_seqlens_cpu is not None:
            raise ValueError(must("cu_seqlens_cpu", "come with cu_seqlens", "cu_seqlens=None"))
        if chunk_indices is not None:
            raise ValueError(must("chunk_indices", "come with cu_seqlens", "cu_seqlens=None"))

    if initial_state is not None:
        layout = (N, HV, V, K) if state_v_first else (N, HV, K, V)
        if initial_state.shape != layout:
            expected = (
                shaped(N=N, HV=HV, V=V, K=K) if state_v_first else shaped(N=N, HV=HV, K=K, V=V)
            )
            raise ValueError(
                must(
                    "initial_state",
                    f"have shape {expected} (state_v_first={state_v_first}, one state a sequence)",
                    shape_of(initial_state),
                )
            )

    # Gate and beta.
    if use_gate_in_kernel:
        if A_log is None:
            raise ValueError(must("A_log", "be given with use_gate_in_kernel=True", "None"))
        if A_log.shape != (HV,):
            raise ValueError(must("A_log", f"have shape {shaped(HV=HV)}", shape_of(A_log)))
        if dt_bias is not None and dt_bias.shape != (HV,):
            raise ValueError(must("dt_bias", f"have shape {shaped(HV=HV)}", shape_of(dt_bias)))
    else:
        for name, maybe in (("A_log", A_log), ("dt_bias", dt_bias)):
            if maybe is not None:
                raise ValueError(must(name, "be None without use_gate_in_kernel=True", "a tensor"))
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        expected = "come with use_beta_sigmoid_in_kernel=True"
        raise ValueError(must("allow_neg_eigval", expected, "False"))

    return Problem(
        B=B,
        T=T,
        H=H,
        HV=HV,
        K=K,
        V=V,
        N=N,
        q_dtype=q_dtype,
        k_dtype=k_dtype,
        v_dtype=v_dtype,
        device=device,
        scale=K**-0.5 if scale is None else scale,
        chunk_size=chunk_size,
        is_varlen=cu_seqlens is not None,
        has_initial_state=initial_state is not None,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        use_beta_sigmoid=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        use_gate=use_gate_in_kernel,
        needs_grad=torch.is_grad_enabled()
        and (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or g.requires_grad
            or beta.requires_grad
            or (initial_state is not None and initial_state.requires_grad)
            or (A_log is not None and A_log.requires_grad)
            or (dt_bias is not None and dt_bias.requires_grad)
        ),
        batch_invariant=batch_invariant(),
        unreadable=why_unreadable(
            ChunkCall._fields[:_READ],
            (q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens),
        ),
    )


def _check_packed(
    B: int,
    T: int,
    chunk_size: int,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor | None,
    chunk_indices: Tensor | None,
) -> int:
    """Checks the three tensors of a packed call; returns N, the number of sequences."""
    N = count_sequences(cu_seqlens)
    if B != 1:
        raise ValueError(must("q", "have batch size B=1 with cu_seqlens", f"B={B}"))

    offsets: list[int] | None = None
    if cu_seqlens.device.type == "cpu" and not is_traced(cu_seqlens):
        offsets = cu_seqlens.tolist()
        check_offsets("cu_seqlens", offsets, T)
    if cu_seqlens_cpu is not None:
        if cu_seqlens_cpu.shape != (N + 1,):
            expected = f"have the shape of cu_seqlens, [{N + 1}]"
            raise ValueError(must("cu_seqlens_cpu", expected, shape_of(cu_seqlens_cpu)))
        if not is_traced(cu_seqlens_cpu):
            host_offsets: list[int] = cu_seqlens_cpu.tolist()
            check_offsets("cu_seqlens_cpu", host_offsets, T)
            if offsets is not None and offsets != host_offsets:
                i = next(i for i in range(N + 1) if offsets[i] != host_offsets[i])
                expected = f"equal cu_seqlens, which has {offsets[i]} at index {i}"
                raise ValueError(must("cu_seqlens_cpu", expected, str(host_offsets[i])))
            offsets = host_offsets

    if chunk_indices is not None:
        if chunk_indices.dim() != 2 or chunk_indices.shape[1] != 2:
            raise ValueError(must("chunk_indices", "have shape [NT, 2]", shape_of(chunk_indices)))
        # The rows after the last sequence need no chunk, so only the offsets tell the least NT.
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
    return N
