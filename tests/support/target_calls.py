"""Calls that launch every kernel of the package, on CPU tensors with meaningless contents.
compile_targets.py compiles them."""

import dataclasses
import itertools
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from target_windows import run_windows

from gdn_triton._triton.tiles import MOST_SEGMENT_K
from gdn_triton.chunk.problem import Inputs, Pool, Problem


@dataclass(frozen=True)
class Shape:
    """One call. HV sets the number of states, by which tiles are chosen. `full`: packed, every
    option, strided views; otherwise padded without options."""

    K: int
    V: int
    dtype: torch.dtype
    HV: int
    full: bool
    chunk_size: int = 64

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        kind = "packed" if self.full else "padded"
        return f"K={self.K} V={self.V} {name} HV={self.HV} chunk={self.chunk_size} {kind}"


BF16 = torch.bfloat16
SHAPES = [
    # The common head, with few states and with many.
    Shape(128, 128, BF16, HV=4, full=True),
    Shape(128, 128, BF16, HV=128, full=False),
    # The small one, at the number of states between; a smaller chunk.
    Shape(64, 64, BF16, HV=64, full=True, chunk_size=32),
    # The widest, FLA's own layer.
    Shape(256, 512, BF16, HV=4, full=False),
    # The least, whose products take one instruction, at rows of odd strides.
    Shape(16, 20, BF16, HV=6, full=True),
    # Products of four-byte inputs.
    Shape(128, 128, torch.float32, HV=4, full=False),
]
# Targets for which a test compiles `run_sample` of some shapes. Tiles are chosen for Hopper, and
# the other targets must run the same tiles. sm_120 and sm_121 have sm_80's instructions and three
# fifths of its shared memory, so there the sample is enough: the common head, and the widest one.
SAMPLES = {
    ("cuda", 80): SHAPES[:1],
    ("cuda", 100): SHAPES[:1],
    ("cuda", 120): SHAPES[:1],
    ("cuda", 121): SHAPES[3:4],
    ("hip", "gfx942"): SHAPES[:1],
    ("hip", "gfx950"): SHAPES[:1],
}
# For Hopper a test compiles every kernel for these: the common head, the widest one, and products
# of four-byte inputs.
TESTED = [SHAPES[0], SHAPES[3], SHAPES[5]]
# The pools of states from which a step is compiled, each by whether it is value-first and by its
# dtype. The tests compile the common head for all of them, and other shapes for the sample, which
# has both layouts and both dtypes in half of the variants.
POOLS = list(itertools.product((False, True), (torch.float32, BF16)))
SAMPLED_POOLS = [(False, BF16), (True, torch.float32)]
# Targets for which every kernel can be compiled for every shape, as before a release.
WHOLE = (("cuda", 80), ("cuda", 90), ("cuda", 100), ("hip", "gfx942"), ("hip", "gfx950"))
LEAST = SHAPES[4]
# The shape for which the outputs that no forward asks for are compiled.
EXTRAS = SHAPES[2]


def make_call(
    B: int, T: int, H: int, shape: Shape, cu_seqlens: torch.Tensor | None
) -> tuple[Problem, Inputs]:
    """A problem and its tensors."""
    K, V, HV, full = shape.K, shape.V, shape.HV, shape.full
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if full:
        projection = torch.empty(B, T, 2 * H * K + HV * V, dtype=shape.dtype)
        q, k, v = projection.split([H * K, H * K, HV * V], -1)
        q, k, v = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))
    else:
        q, k = torch.empty(2, B, T, H, K, dtype=shape.dtype)
        v = torch.empty(B, T, HV, V, dtype=shape.dtype)
    g, beta = torch.empty(B, T, HV), torch.empty(B, T, HV)
    parameters = torch.empty(2, HV)
    problem = Problem(
        B=B,
        T=T,
        H=H,
        HV=HV,
        K=K,
        V=V,
        N=N,
        q_dtype=shape.dtype,
        k_dtype=shape.dtype,
        v_dtype=shape.dtype,
        device=q.device,
        scale=K**-0.5,
        chunk_size=shape.chunk_size,
        is_varlen=cu_seqlens is not None,
        has_initial_state=full,
        output_final_state=full,
        state_v_first=full,
        use_qk_l2norm=full,
        use_beta_sigmoid=full,
        allow_neg_eigval=full,
        use_gate=full,
        needs_grad=False,
    )
    initial_state = torch.empty(N, HV, V, K) if full else None
    A_log, dt_bias = parameters if full else (None, None)
    return problem, Inputs(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        initial_state=initial_state,
        A_log=A_log,
        dt_bias=dt_bias,
        cu_seqlens=cu_seqlens,
    )


def run_package(shape: Shape) -> None:
    """The dataflows of a call, and the outputs of steps that a forward does not ask for."""
    from gdn_triton.chunk.triton import forward as chunk_fwd
    from gdn_triton.chunk.triton.shared.chunks import make_chunks
    from gdn_triton.chunk.triton.steps import gate, state, wy

    cu_seqlens = torch.tensor([0, 100, 300], dtype=torch.int32) if shape.full else None
    H = shape.HV // 2
    problem, x = make_call(1, 300, H, shape, cu_seqlens)
    chunk_fwd.forward_by_steps(problem, x)
    if chunk_fwd.compute_dtype(problem).itemsize == 2:
        chunk_fwd.forward_fused(problem, x)
        run_segments(shape, chunk_fwd)
    if shape.K == shape.V == 128:
        run_pool(shape, chunk_fwd)
    run_shards(shape)
    run_backward(problem, x)
    if shape is not EXTRAS:
        return
    chunks = make_chunks(1, 300, shape.chunk_size, cu_seqlens)
    g_cumsum = gate.chunk_local_cumsum(x.g, chunks, reverse=True)
    w, u, _ = wy.wy_fwd(x.k, x.v, g_cumsum, x.beta, chunks, shape.dtype, store_A_inv=True)
    state.state_fwd(x.k, w, u, g_cumsum, chunks, N=problem.N, store_h=False)


def run_sample(shape: Shape) -> None:
    """The fused forward, whole and in segments, and the backward: the kernels that fill a
    multiprocessor's shared memory."""
    from gdn_triton.chunk.triton import forward as chunk_fwd

    cu_seqlens = torch.tensor([0, 100, 300], dtype=torch.int32) if shape.full else None
    problem, x = make_call(1, 300, shape.HV // 2, shape, cu_seqlens)
    chunk_fwd.forward_fused(problem, x)
    run_segments(shape, chunk_fwd)
    run_backward(problem, x)
    run_norm(shape)


def run_backward(problem: Problem, x: Inputs) -> None:
    """The gradients of every input, from those of o and, where there is one, of the final state."""
    from gdn_triton.chunk.triton.backward import gradients

    do, dht = torch.empty_like(x.v, memory_format=torch.contiguous_format), None
    if problem.output_final_state:
        dht = torch.empty_like(x.initial_state)
    gradients(problem, x, do, dht, store_dh0=problem.has_initial_state)


def run_states() -> None:
    """Calls that differ in their states and dtypes. A record of a tensor's pointer then has another
    type, and a branch on a device value must not assign it to a name of another type. The head is
    the least one, because tiles do not matter here."""
    from gdn_triton.chunk.triton import forward as chunk_fwd
    from gdn_triton.chunk.triton.backward import gradients

    for dtype, final in ((None, True), (torch.float16, True), (BF16, False)):
        for T in (300, 64 * LEAST.chunk_size):
            shape = LEAST if T == 300 else replace(LEAST, HV=2)
            cu_seqlens = torch.tensor([0, T], dtype=torch.int32)
            problem, x = make_call(1, T, shape.HV // 2, shape, cu_seqlens)
            assert (chunk_fwd.choose_segments(problem) > 0) == (shape is not LEAST)
            initial = None if dtype is None else x.initial_state.to(dtype)
            x = x._replace(initial_state=initial)
            problem = replace(
                problem, has_initial_state=initial is not None, output_final_state=final
            )
            chunk_fwd.forward_fused(problem, x)
            if shape is not LEAST:
                continue
            chunk_fwd.forward_by_steps(problem, x)
            dht = torch.empty(1, shape.HV, shape.V, shape.K) if final else None
            do = torch.empty_like(x.v, memory_format=torch.contiguous_format)
            gradients(problem, x, do, dht, store_dh0=initial is not None)


def run_segments(shape: Shape, chunk_fwd: Any) -> None:
    """A sequence of such a length, and so few heads, that it is cut into segments."""
    few = replace(shape, HV=2)
    T = 64 * shape.chunk_size
    cu_seqlens = torch.tensor([0, T], dtype=torch.int32) if shape.full else None
    problem, x = make_call(1, T, 1, few, cu_seqlens)
    if shape.K <= MOST_SEGMENT_K:
        assert chunk_fwd.choose_segments(problem) > 0
        chunk_fwd.forward_fused(problem, x)


def run_pool(shape: Shape, chunk_fwd: Any) -> None:
    """Prefill on a pool of states, with checkpoints, of whole sequences and of segments."""
    K, V, full = shape.K, shape.V, shape.full
    calls = [(shape, 300, chunk_fwd.forward_by_steps)]
    if shape.dtype.itemsize == 2:
        segmented = replace(shape, HV=2)
        calls.append((shape, 300, chunk_fwd.forward_fused))
        calls.append((segmented, 64 * shape.chunk_size, chunk_fwd.forward_fused))
    for one, T, forward in calls:
        HV = one.HV
        cu_seqlens = torch.tensor([0, T], dtype=torch.int32) if full else None
        problem, x = make_call(1, T, HV // 2, one, cu_seqlens)
        assert (chunk_fwd.choose_segments(problem) > 0) == (one is not shape)
        problem = replace(problem, has_initial_state=False, output_final_state=False)
        state = torch.empty(8, HV, *((V, K) if full else (K, V)), dtype=BF16 if full else None)
        pool = Pool(
            state=state,
            read_slots=torch.arange(1, dtype=torch.int32),
            write_slots=torch.arange(1),
            has_initial_state=torch.ones(1, dtype=torch.bool),
            last_skipped=-1,
            out=torch.empty(1, T, HV, V + 16, dtype=one.dtype)[..., :V],
            every=shape.chunk_size,
            checkpoints=state if full else torch.empty(T, HV, K, V),
            checkpoint_slots=torch.ones(1, 3, dtype=torch.int32) if full else None,
        )
        forward(problem, x._replace(initial_state=None), pool)


def run_shards(shape: Shape) -> None:
    """A rank's part of a sequence that is split over ranks, at its start and in its middle."""
    from gdn_triton._ranks.layout import Interval, ShardLayout
    from gdn_triton.chunk.sharded import triton as shard_triton

    T = 300
    cu_seqlens = torch.tensor([0, T], dtype=torch.int32)
    problem, x = make_call(1, T, shape.HV // 2, shape, cu_seqlens)
    problem = dataclasses.replace(problem, state_v_first=False)
    if x.initial_state is not None:
        x = x._replace(initial_state=x.initial_state.mT)
    needed = {name: y is not None for name, y in x._asdict().items()}
    for before in ((), (0,)):
        interval = Interval(1, 0, 0, before, (2,), T * len(before))
        lengths = (T, T, T)
        layout = ShardLayout(None, cu_seqlens, (0, T), (interval,), lengths, (0, 1, 2), True)
        summary, local = shard_triton.forward_prepare(problem, layout, x)
        coming = partial(list, [summary[0, :, : problem.V]])
        _, ends, kept = shard_triton.forward_apply(problem, layout, x, local, coming)
        do = torch.empty_like(x.v, memory_format=torch.contiguous_format)
        rest = (problem, layout, x, kept)
        _, back = shard_triton.backward_prepare(*rest, do, torch.zeros_like(ends))
        shard_triton.backward_apply(*rest, back, needed, coming)


def run_post_conv(shape: Shape) -> None:
    """The preparation after the convolution, from both layouts, with the norm and without."""
    from gdn_triton.prep.triton import post_conv_fwd

    L, H, HV, K, V = 300, shape.HV // 2, shape.HV, shape.K, shape.V
    columns = 2 * H * K + HV * V
    x = torch.empty(L, columns + 8, dtype=shape.dtype)[:, 8:]
    by_channel = torch.empty(columns, L, dtype=shape.dtype).t()
    a, b = torch.empty(L, 2 * HV, dtype=shape.dtype).split(HV, 1)
    parameters = torch.empty(2, HV)
    rest = (a, b, *parameters, H, K, V)
    post_conv_fwd(x, *rest, use_l2norm=shape.full, g_exp=not shape.full)
    post_conv_fwd(by_channel, *rest, use_l2norm=True, g_exp=False)


def run_norm(shape: Shape) -> None:
    """The gated norm and its gradients, of rows of V channels and of a row that fills a tile."""
    from gdn_triton.norm import triton as kernels
    from gdn_triton.norm.validation import validate_norm

    for D in (shape.V, 8192):
        x, gate = torch.empty(300, 2 * shape.HV, D, dtype=shape.dtype).split(shape.HV, 1)
        weight = torch.empty(D, dtype=torch.float32 if shape.full else shape.dtype)
        activation = "sigmoid" if shape.full else "silu"
        problem = validate_norm(x, gate, weight, 1e-6, activation, not shape.full)
        y = kernels.norm_fwd(problem, x, gate, weight)
        kernels.norm_bwd(problem, y, x, gate, weight)


def run_conv(shape: Shape) -> None:
    """The convolution: before the preparation and alone, from both layouts, with states and
    without; its step; its gradients. Its taps differ from shape to shape."""
    from gdn_triton.conv.problem import ConvOperands, ConvProblem, PrepOperands
    from gdn_triton.conv.triton.backward import conv_bwd
    from gdn_triton.conv.triton.forward import conv_fwd, conv_prep_fwd
    from gdn_triton.conv.triton.update import conv_update_fwd

    N, T, HV, full = 3, 300, shape.HV, shape.full
    H, W = HV // 2, 4 if shape.K == 128 else 3 if full else 2
    D = 2 * H * shape.K + HV * shape.V
    cu_seqlens = torch.arange(0, T + 1, T // N) if full else None
    x = torch.empty(1 if full else N, T, D + 8, dtype=shape.dtype)[..., 8:]
    by_channel = torch.empty(x.shape[0], D, T, dtype=shape.dtype).mT
    weight, bias = torch.empty(D, W, dtype=shape.dtype), torch.empty(D) if full else None
    a, b = torch.empty(*x.shape[:2], 2 * HV, dtype=shape.dtype).split(HV, -1)
    prep = PrepOperands(a, b, *torch.empty(2, HV), H, HV, shape.K, shape.V, full, not full)
    problem = ConvProblem(
        B=x.shape[0],
        T=T,
        N=N,
        D=D,
        W=W,
        dtype=x.dtype,
        device=x.device,
        silu=full,
        last_skipped=-1,
        every_token=False,
        has_state=False,
        wide=False,
        needs_grad=False,
    )
    given = ConvOperands(x, weight, bias, cu_seqlens=cu_seqlens)
    if full:
        conv_fwd(problem, given)
        conv_prep_fwd(problem, given._replace(x=by_channel), prep)
    else:
        conv_prep_fwd(problem, given, prep)
        conv_fwd(problem, given._replace(x=by_channel))
    conv_bwd(problem, torch.empty_like(x), x, weight, bias, cu_seqlens)

    slots = torch.arange(N, dtype=torch.int32)
    pool = torch.empty(N + N * T, W - 1, D, dtype=shape.dtype).mT
    given = given._replace(state=pool, read_slots=slots, write_slots=slots)
    problem = problem._replace(has_state=True)
    conv_prep_fwd(problem, given._replace(has_initial_state=slots > 0), prep)
    conv_update_fwd(problem, given)
    every = N + torch.arange(N * T).view(N, T)
    if not full:
        conv_update_fwd(problem._replace(every_token=True), given._replace(write_slots=every))
    state = torch.empty(N, W + 1, D, dtype=shape.dtype).mT
    given = given._replace(state=state, write_slots=None, num_accepted_tokens=slots + 1)
    conv_update_fwd(problem._replace(columns=W + 1), given)
    tree = torch.full((N, T), -1, dtype=torch.int32)
    given = given._replace(state=state[..., : W - 1], num_accepted_tokens=None, parents=tree)
    conv_update_fwd(problem._replace(every_token=True), given._replace(write_slots=every))


def run_recurrent(shape: Shape, pools: Collection[tuple[bool, torch.dtype]]) -> None:
    """Sequences, and steps of one token and of several from pools (`POOLS`)."""
    from gdn_triton._host.records import Options
    from gdn_triton.recurrent.problem import Operands, SequenceCall, StepCall
    from gdn_triton.recurrent.triton.plan import plan
    from gdn_triton.recurrent.validation import validate_sequences, validate_step

    N, T, H, HV, K, V = 3, 4, shape.HV // 2, shape.HV, shape.K, shape.V
    q, k = torch.empty(2, 1, N * T, H, K, dtype=shape.dtype)
    v = torch.empty(1, N * T, HV, V, dtype=shape.dtype)
    heads, parameters = torch.empty(1, N * T, HV), torch.empty(2, HV)
    cu_seqlens = torch.arange(0, N * T + 1, T) if shape.full else None
    x = Operands(q, k, v, heads, beta=heads, cu_seqlens=cu_seqlens)
    if shape.full:
        gates = {"gk": torch.empty(1, N * T, HV, K), "gv": torch.empty_like(v), "beta": v}
        x = x._replace(**gates, A_log=parameters[0], state=torch.empty(N, HV, V, K))
    options = Options(
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=shape.full,
        allow_neg_eigval=False,
        state_v_first=shape.full,
        use_gate_in_kernel=shape.full,
    )
    call = SequenceCall(inputs=x, options=options, scale=None, output_final_state=True)
    plan(validate_sequences(call), x)(x)

    mixed = torch.empty(N, T, 2 * H * K + HV * V + 8, dtype=shape.dtype)[..., 8:]
    a = torch.empty(N, T, HV, dtype=shape.dtype)
    slots = torch.arange(N, dtype=torch.int32)
    for v_first, dtype in pools:
        options = options._replace(
            use_beta_sigmoid_in_kernel=True, state_v_first=v_first, use_gate_in_kernel=True
        )
        pool = torch.empty(N + N * T, HV, *((V, K) if v_first else (K, V)), dtype=dtype)
        every = N + torch.arange(N * T).view(N, T)
        for tokens, write in ((0, None), (slice(None), every)):
            m, b = mixed[:, tokens], a[:, tokens]
            x = Operands(
                q=m,
                k=m,
                v=m,
                g=b,
                beta=b,
                A_log=parameters[0],
                dt_bias=parameters[1],
                state=pool,
                read_slots=slots,
                write_slots=write,
            )
            call = StepCall(x, options, scale=None, skip="negative", is_mixed=True)
            plan(validate_step(call), x)(x)
        tree = torch.full((N, T), -1, dtype=torch.int32)
        plan(validate_step(call._replace(inputs=x._replace(parents=tree))), x)(
            x._replace(parents=tree)
        )
        accepted = torch.ones(N, dtype=torch.int32)
        x = x._replace(read_slots=every[:, :3], write_slots=None, num_accepted_tokens=accepted)
        plan(validate_step(call._replace(inputs=x)), x)(x)
        x = x._replace(num_accepted_tokens=None, read_slots=slots)
        run_windows(call._replace(inputs=x), H)


def run_wide_grids() -> None:
    """More than 65,535 heads over a batch, and as many packed sequences."""
    from gdn_triton.chunk.triton import forward as chunk_fwd

    for full in (False, True):
        shape = Shape(16, 16, BF16, HV=32 if full else 64, full=full)
        B, T = (1, 70_000) if full else (1100, 1)
        cu_seqlens = torch.arange(70_001) if full else None
        problem, x = make_call(B, T, shape.HV, shape, cu_seqlens)
        chunk_fwd.forward_by_steps(problem, x)
        chunk_fwd.forward_fused(problem, x)
        run_backward(problem, x)
