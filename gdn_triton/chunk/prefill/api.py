"""The public prefill: `chunk_prefill`, whole sequences from and to a pool of states."""

from torch import Tensor

from gdn_triton._host.records import new_options
from gdn_triton._host.tensors import is_traced
from gdn_triton.chunk.prefill.operators import traced_prefill
from gdn_triton.chunk.prefill.run import run_prefill
from gdn_triton.chunk.problem import new_inputs, new_pool_arguments, new_prefill_call
from gdn_triton.constants import DEFAULT_CHUNK_SIZE


def chunk_prefill(
    state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor | None = None,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    use_gate_in_kernel: bool = False,
    skip: str = "negative",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    out: Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    state_checkpoints: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
) -> tuple[Tensor, Tensor | None]:
    """Computes whole sequences in the chunked form, from and to a pool of states that is updated in
    place.

    The rule, the tokens and the options are those of `gdn_triton.chunk_gated_delta_rule`. The pool,
    its slots and its padding are those of `gdn_triton.recurrent_step`, which continues from the
    final states. Sequence n starts from the state in slot read_slots[n], and its final state is
    written to slot write_slots[n]. `docs/prefill.md` shows prefix caching and CUDA graphs.

    Sizes: B batch, T tokens, H heads of q and k, HV heads of v, K and V channels of a head, N
    sequences. "Float" is float16, bfloat16, float32 or float64. All tensors are on one device,
    except `cu_seqlens_cpu`. The call writes `state`, `out` and `state_checkpoints` in place, and
    autograd sees the writes. No two elements of these tensors may share an address, and no other
    argument may share their memory.

    Args:
        state: [slots, HV, K, V], or [slots, HV, V, K] with `state_v_first`; float. Written in
            place; the walk itself is in float32. Slots may lie any distance apart.
        read_slots: [N], int32 or int64: where each sequence's state is. A slot that is padding
            (`skip`) skips its sequence: no state is written, and its o is 0. Several sequences may
            start from one slot, if none writes it.
        write_slots: [N], int32 or int64: where each sequence's final state goes. A slot that is
            padding keeps nothing. None: read_slots. No slot may be written twice, or be written by
            one sequence and read by another, or lie outside of the pool. On an accelerator this is
            not checked, and a violation is undefined behaviour. The slots of skipped sequences are
            not used and may hold anything.
        q, k: [B, T, H, K], float. v: [B, T, HV, V], float.
        g, beta: [B, T, HV], float: the natural logarithm of the decay, and the write strength; with
            the flags below, the inputs of the gate and of the sigmoid.
        A_log, dt_bias: [HV], float. Only with `use_gate_in_kernel`; dt_bias may be None.
        has_initial_state: [N], bool: where False, the sequence starts from zeros, whatever its read
            slot holds; that memory is not read. None: True for all.
        scale: factor of the output, any real number. None: K ** -0.5.
        use_qk_l2norm_in_kernel: normalise each q and k, x * rsqrt(sum(x^2) + 1e-6), computed in
            float32 and rounded to the dtype of the input.
        use_beta_sigmoid_in_kernel: beta is a logit; its sigmoid is used.
        allow_neg_eigval: use 2 * sigmoid(beta). Only with `use_beta_sigmoid_in_kernel`.
        state_v_first: the pool, and checkpoints, are [.., HV, V, K].
        use_gate_in_kernel: the decay is -exp(A_log) * softplus(g + dt_bias), in float32.
        skip: which slots are padding: "negative", or "non_positive" where slot 0 is unused.
        cu_seqlens: [N + 1], int32 or int64: the N sequences are packed in one row (B = 1), sequence
            n in the tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1. Starts at 0, does not decrease,
            ends at or before T. A sequence may be empty: its state goes from its read slot to its
            write slot. The o of tokens at or after cu_seqlens[-1] is 0. None: N = B.
        cu_seqlens_cpu: the same offsets on the CPU, if the host knows them: kernels plan
            for the longest sequences, which is faster where one is much longer than the others.
            If cu_seqlens has changed since, results stay right.
        out: [B, T, HV, V], the dtype of q: the memory of o. Its last dimension is dense, and its
            other strides are free. None: a new tensor.
        checkpoint_every_n_tokens: keep each sequence's state after every so many of its tokens: a
            multiple of `chunk_size`, the same for all sequences. 0: none.
        state_checkpoints: [rows, HV, K, V], or V first; float: the memory of the checkpoints. The
            state after (j + 1) * n tokens, n = checkpoint_every_n_tokens, of a sequence whose first
            token is token s of all B * T (packed: s = cu_seqlens[i]; else s = i * T) is written to
            row s // n + j, so there are at least B * T // n rows. Other rows are not written. With
            checkpoint_slots it may be `state` itself, which is the meaning of None there. None,
            without checkpoint_slots: a new tensor of the pool's dtype, whose other rows are
            undefined.
        checkpoint_slots: [N, M], int32 or int64, in place of that formula: the row of
            state_checkpoints, or, if that is None, the slot of the pool, to which checkpoint j of
            sequence n, from 0 on, is written. A checkpoint whose slot is padding, or that has no
            column, is not kept. The rules of write_slots hold; only the checkpoint after a
            sequence's last token may share a slot with its final state.
        chunk_size: tokens of a chunk: 16, 32 or 64. Changes the rounding, not the meaning.

    Returns:
        o: [B, T, HV, V], the dtype of q; `out` if that was given.
        state_checkpoints: the given or the new tensor; None without checkpoints, or if they are in
            the pool.

    On an accelerator no contents are read by the host: slots, flags and offsets may change in place
    between replays of a CUDA graph. The reference backend reads them, and waits for the device.

    Raises:
        TypeError, ValueError: an argument that does not fit, with its name, the expected and the
            given value; nothing has been launched or written. The contents of slots and offsets are
            checked if they are CPU tensors.
        NotImplementedError: an input requires a gradient, which a prefill does not have.
        RuntimeError: the backend that `GDN_BACKEND` asks for cannot run this call.
    """
    x = new_prefill_call(
        pool=new_pool_arguments(
            state=state,
            read_slots=read_slots,
            write_slots=write_slots,
            has_initial_state=has_initial_state,
            out=out,
            state_checkpoints=state_checkpoints,
            checkpoint_slots=checkpoint_slots,
        ),
        inputs=new_inputs(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
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
        scale=scale,
        skip=skip,
        checkpoint_every_n_tokens=checkpoint_every_n_tokens,
        chunk_size=chunk_size,
        cu_seqlens_cpu=cu_seqlens_cpu,
    )
    if is_traced(state):
        return traced_prefill(x)
    return run_prefill(x)
