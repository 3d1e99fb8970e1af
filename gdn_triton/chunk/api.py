"""The public operation: validate, choose a backend, run it."""

import torch
from torch import Tensor

from gdn_triton._host.arguments import refuse_head_first
from gdn_triton._host.deprecated import deprecated_state_layout
from gdn_triton._host.records import new_options
from gdn_triton._host.tensors import is_traced, resolved
from gdn_triton.chunk.autograd import differentiable
from gdn_triton.chunk.backends import CHUNK
from gdn_triton.chunk.operators import traced
from gdn_triton.chunk.problem import new_chunk_call, new_inputs
from gdn_triton.chunk.validation import validate_chunk
from gdn_triton.constants import DEFAULT_CHUNK_SIZE


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    transpose_state_layout: bool | None = None,
    head_first: None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes the gated delta rule over whole sequences, in its chunked form.

    For each sequence and value head `hv`, with key head `hv // (HV // H)` and a state S of [K, V]:

        S_t = exp(g_t) * S_{t-1}
        S_t = S_t + k_t (x) beta_t * (v_t - S_t^T k_t)        S_t on the right is the decayed one
        o_t = scale * S_t^T q_t

    which is equation 10 of Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024
    (arXiv:2412.06464), with alpha_t = exp(g_t). The chunked form is the WY form of Yang et al.,
    "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", 2024
    (arXiv:2406.06484), extended by the gate. The parameters, their order and their defaults are
    those of flash-linear-attention 0.6.0, whose `**kwargs` are keyword-only arguments here.

    Sizes: B batch, T tokens, H heads of q and k, HV heads of v (a multiple of H), K and V channels
    of a head, N sequences. "Float" is float16, bfloat16, float32 or float64. q, k, v may be strided
    views. All tensors are on one device, except `cu_seqlens_cpu`.

    Args:
        q, k: [B, T, H, K], float; they may differ in dtype. K is at most 256 in the Triton backend
            and unlimited in the reference.
        v: [B, T, HV, V], float; any V.
        g: [B, T, HV], float: the natural logarithm of the decay, <= 0. 0 keeps the whole state,
            -inf forgets it. With `use_gate_in_kernel`, the gate before its activation.
        beta: [B, T, HV], float: how far the value under a key moves to the new one, 0 to 1 (to 2
            with negative eigenvalues). With `use_beta_sigmoid_in_kernel`, its logit.
        scale: factor of the output, any real number. None: K ** -0.5.
        initial_state: [N, HV, K, V], or [N, HV, V, K] with `state_v_first`; float. None: zeros.
        output_final_state: return the states after the last token.
        use_qk_l2norm_in_kernel: normalise each q and k, x * rsqrt(sum(x^2) + 1e-6), computed in
            float32 and rounded to the dtype of the input.
        use_beta_sigmoid_in_kernel: beta is a logit; its sigmoid is used.
        allow_neg_eigval: use 2 * sigmoid(beta), so that a state's eigenvalues reach -1. Only with
            `use_beta_sigmoid_in_kernel`.
        state_v_first: both states are [N, HV, V, K].
        cu_seqlens: [N + 1], int32 or int64: the N sequences are packed in one row (B = 1), sequence
            n in the tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1. Starts at 0, does not decrease,
            ends at or before T. An empty sequence keeps its initial state. Tokens
            at or after cu_seqlens[-1] belong to no sequence and their o is 0. On an accelerator the
            contents are not read by the host: they are not checked, and may change in place
            between calls or replays of a CUDA graph. Only the reference backend reads them, and
            waits for the device.
        cu_seqlens_cpu: the same offsets on the CPU. Never needed; if given, its contents are
            checked, and kernels plan for the longest sequences, which is faster where one is much
            longer than the others. If cu_seqlens has changed since, results stay right.
        chunk_indices: [NT, 2], int32 or int64: the (sequence, chunk) table that some callers
            compute. Never needed; if given, its shape is checked.
        cp_context: the sequences are split over the ranks of a process group, and the arguments
            are this rank's part: what `gdn_triton.distributed.build_cp_context` returned, or any
            object like `fla.ops.cp.FLACPContext`. Its offsets are used in place of `cu_seqlens` and
            `cu_seqlens_cpu`. N is then the number of local sequences. The state of a sequence that
            began on an earlier rank comes from that rank; its row of `initial_state` is not read
            and has a gradient of 0. Each row of the final state is the state after the last local
            token. The gradients of A_log and dt_bias are those of this rank's tokens, and have to
            be summed over the ranks. Every rank has to make the call and its backward
            (docs/context_parallel.md).
        use_gate_in_kernel: the decay is -exp(A_log) * softplus(g + dt_bias), in float32.
        A_log: [HV], float. Needed by, and only allowed with, `use_gate_in_kernel`.
        dt_bias: [HV], float. Only with `use_gate_in_kernel`. None: 0.
        chunk_size: tokens of a chunk: 16, 32 or 64. Changes the rounding, not the meaning.
        transpose_state_layout: deprecated name of `state_v_first`.
        head_first: raises a TypeError, because tokens always come before heads.

    Returns:
        o: [B, T, HV, V], the dtype of q, contiguous.
        final_state: laid out like `initial_state`, float32 (float64 if q is float64), a new tensor;
            None unless `output_final_state`.

    Every float tensor among the arguments has a gradient. The Triton and CUDA backends are
    differentiable once, and save only the arguments and, in some calls of the CUDA backend, states;
    the reference is differentiable any number of times.

    The backend is chosen by `GDN_BACKEND` (`gdn_triton._host.backends`); `explain` names it and
    the reason. Only the reference serves forward-mode AD, the transforms of torch.func and
    subclasses of Tensor with operations of their own (docs/design.md).

    Raises:
        TypeError, ValueError: an argument that does not fit, with its name, the expected and the
            given value; nothing has been launched. ValueError also for an unknown `GDN_BACKEND`.
        NotImplementedError: a `cp_context` whose numbers of ranks lie on the device.
        RuntimeError: the backend asked for by name cannot run this call, with its reason. Also for
            a second derivative in the Triton or CUDA backend, with `cp_context`, or under a
            compiler.
    """
    if head_first is not None:
        refuse_head_first(head_first)
    if transpose_state_layout is not None:
        state_v_first = deprecated_state_layout(state_v_first, transpose_state_layout)
    x = new_chunk_call(
        inputs=new_inputs(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            initial_state=initial_state,
            A_log=A_log,
            dt_bias=dt_bias,
            cu_seqlens=cu_seqlens,
        ),
        options=new_options(
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            state_v_first=state_v_first,
            use_gate_in_kernel=use_gate_in_kernel,
        ),
        cu_seqlens_cpu=cu_seqlens_cpu,
        chunk_indices=chunk_indices,
        scale=scale,
        output_final_state=output_final_state,
        chunk_size=chunk_size,
    )
    if cp_context is not None:
        # Imported here because only calls with cp_context need torch.distributed.
        from gdn_triton.chunk.sharded.run import sharded

        if torch.compiler.is_compiling():
            from gdn_triton._host.traces import untraced

            sharded = untraced(sharded)
        return sharded(x, cp_context)
    if is_traced(q):
        return traced(x)
    problem = validate_chunk(x)
    choice, inputs = CHUNK.choose(problem), resolved(x.inputs)
    if choice.gradients is None:
        return choice.run(problem, inputs)
    return differentiable(choice.gradients, problem, inputs)


chunk_gdn = chunk_gated_delta_rule
