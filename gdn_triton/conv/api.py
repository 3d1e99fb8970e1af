"""The public convolution: `causal_conv1d` over sequences, `causal_conv1d_update` for decoding, and
`fused_conv_prep`, which is `causal_conv1d` and the preparation in one pass."""

from torch import Tensor

from gdn_triton._host.tensors import is_traced
from gdn_triton.conv.backends import run_conv
from gdn_triton.conv.operators import traced_conv, traced_conv_prep
from gdn_triton.conv.prep import run_conv_prep
from gdn_triton.conv.validation import STEP, ConvArguments, PrepArguments


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    *,
    state: Tensor | None = None,
    read_slots: Tensor | None = None,
    write_slots: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    skip: str = "negative",
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The short causal convolution of a Gated DeltaNet layer, over each channel by itself.

        y_t = silu(bias + sum over j of weight[:, W - 1 - j] * x_(t - j)),   j = 0 .. W - 1

    (Yang, Kautz and Hatamizadeh, 2024, arXiv:2412.06464, section 3.4), which is torch's grouped
    `conv1d` of the sequence after W - 1 earlier tokens. The earlier tokens come from a state, or
    are 0.

    Sizes: D channels, W taps, N sequences, as padded batch B of T tokens or packed in one row.
    "Float" is float16, bfloat16, float32 or float64. All tensors are on one device.

    Args:
        x: [T, D] or [B, T, D], float; with `cu_seqlens` [T, D] or [1, T, D]. Dense channels, any
            distance between tokens, or dense tokens (as in a transposed [B, D, T]) are read where
            they lie; the Triton backend first copies an x that has neither.
        weight: [D, W], float: the last tap meets the token itself. 2 to 4 taps in the Triton
            backend, any number in the reference. Any strides.
        bias: [D], float. None: 0.
        activation: "silu", or None.
        state: [slots, D, W - 1], float, wide enough to hold x's dtype exactly: the last W - 1
            tokens before the call, the latest at W - 2. The call writes the last tokens after it in
            place, and autograd sees the write. The strides are free: a transposed [slots, W - 1, D]
            is possible. No two elements may share an address, and no memory may be shared with
            another argument.
        read_slots: [N], int32 or int64: where each sequence's state is. A slot that is padding
            (`skip`) skips its sequence: no state is written, and its y is 0. None: sequence n has
            slot n of N.
        write_slots: int32 or int64, with read_slots. [N]: where each sequence's state goes. [B, T]:
            where the state after each token goes. A slot that is padding keeps nothing. None:
            read_slots. No slot may be written twice, or be written by one sequence and read by
            another, or lie outside of the pool. On an accelerator this is not checked, and a
            violation is undefined behaviour. The slots of skipped sequences, and of tokens of no
            sequence, are not used and may hold anything.
        has_initial_state: [N], bool: False: the sequence starts from zeros, whatever its slot
            holds. None: every sequence starts from its slot.
        skip: which slots are padding: "negative", or "non_positive" where slot 0 is unused.
        cu_seqlens: [N + 1], int32 or int64: sequence n is in the tokens cu_seqlens[n] to
            cu_seqlens[n + 1] - 1. Starts at 0, does not decrease, ends at or before T. A sequence
            may be empty: its state goes from slot to slot. The y of tokens of no sequence is 0.

    Returns:
        y: the shape and dtype of x, contiguous, a new tensor.

    Sums and activation are in float32 (float64 if x, weight or bias is), and y is rounded once.
    `GDN_BACKEND` chooses the backend, triton or reference. Both have gradients of x, weight and
    bias; a call with a state has the reference's gradients. A state is a constant to autograd:
    neither the tokens that are read from it nor those that are written to it have a gradient. The
    host reads no contents on an accelerator, so a call can be captured in a CUDA graph. The
    reference reads slots and offsets, and waits for the device. Under torch.compile a call is one
    operator.

    Raises:
        TypeError, ValueError: an argument that does not fit, with its name, the expected and the
            given value; nothing has been launched or written. ValueError also for an unknown
            `GDN_BACKEND`.
        NotImplementedError: state requires a gradient; or, under a compiler, there is a state and
            another input requires one.
        RuntimeError: the backend asked for by name cannot run this call, with its reason.
    """
    args = ConvArguments(
        x=x,
        weight=weight,
        bias=bias,
        activation=activation,
        state=state,
        read_slots=read_slots,
        write_slots=write_slots,
        has_initial_state=has_initial_state,
        skip=skip,
        cu_seqlens=cu_seqlens,
    )
    if is_traced(x):
        return traced_conv(args)
    return run_conv(args)


def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    *,
    state: Tensor,
    read_slots: Tensor | None = None,
    write_slots: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    skip: str = "negative",
    cu_seqlens: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    parents: Tensor | None = None,
) -> Tensor:
    """The convolution of one decode step, or of several tokens, on a pool of states.

    It has the bits of `gdn_triton.causal_conv1d`, and runs in one kernel that walks over the tokens
    of a sequence. x has the layouts of the tokens of `gdn_triton.recurrent_step`, which takes the
    result as its mixed_qkv, with the same slots:

        y = causal_conv1d_update(x, weight, state=conv_state, read_slots=slots)
        o = recurrent_step(state, slots, mixed_qkv=y, a=a, b=b, A_log=A_log, dt_bias=dt_bias, ...)

    Args:
        x: [N, D], a token a sequence; [N, T, D]; or [T, D], [1, T, D] with cu_seqlens.
        weight, bias, activation, state, read_slots, has_initial_state, skip, cu_seqlens: as
            `gdn_triton.causal_conv1d`.
        write_slots: as `gdn_triton.causal_conv1d`. Slots for the states after each token are
            [N, T], also [N, 1] for x [N, D], or packed [1, T].
        num_accepted_tokens: [N], int32 or int64, for verifying drafts: the number of tokens of the
            previous call that were accepted. Then the state is [slots, D, C] with C >= W - 1
            columns. Sequence n starts from the W - 1 columns from num_accepted_tokens[n] - 1 on.
            The call writes the last W - 2 tokens before it to the first columns, and its own tokens
            to the next ones, so the next call finds its columns in the same way. Tokens past column
            C - 1 are not kept. Columns after the last token, and the slot of a sequence without
            tokens, do not change. A sequence whose number is not in 1 to C - W + 2 is skipped.
            write_slots and has_initial_state are None, and W is at least 2. None: the state has
            W - 1 columns.
        parents: [N, T], or packed [1, T], int32 or int64: the tokens of a sequence are the nodes of
            trees, as in `gdn_triton.recurrent_step`. Token i is convolved with token parents[n, i],
            which comes before it in x, with the parent of that token, and so on; a parent of -1
            stands for the tokens of the state. Then write_slots has a slot or padding for each
            token, of which none is the sequence's read slot, and num_accepted_tokens is None. On an
            accelerator this is not checked, and violations are undefined behaviour. None: each
            token follows the one before it.

    Returns:
        y: the shape and dtype of x, contiguous, a new tensor.

    Raises:
        TypeError, ValueError, RuntimeError: as `gdn_triton.causal_conv1d`; TypeError without a
            state.
        NotImplementedError: an input requires a gradient.
    """
    args = ConvArguments(
        x=x,
        weight=weight,
        bias=bias,
        activation=activation,
        state=state,
        read_slots=read_slots,
        write_slots=write_slots,
        has_initial_state=has_initial_state,
        skip=skip,
        cu_seqlens=cu_seqlens,
        num_accepted_tokens=num_accepted_tokens,
        parents=parents,
    )
    if is_traced(x):
        return traced_conv(args, STEP)
    return run_conv(args, STEP)


def fused_conv_prep(
    mixed_qkv: Tensor,
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    num_k_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    apply_l2norm: bool = True,
    output_g_exp: bool = False,
    *,
    state: Tensor | None = None,
    read_slots: Tensor | None = None,
    write_slots: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    skip: str = "negative",
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes the inputs of the gated delta rule from the projections in one pass: `causal_conv1d`
    of mixed_qkv, then `fused_post_conv_prep` of its result.

        q, k, v, g, beta = fused_conv_prep(mixed_qkv, weight, a, b, A_log, dt_bias, H, K, V, ...)
        chunk_gated_delta_rule(q[None], k[None], v[None], g[None], beta[None], ...)

    The result of the convolution is rounded to the dtype of mixed_qkv before the norm, as it is
    when the two functions run one after the other. It is not written to memory.

    Args:
        mixed_qkv: [T, D] or [B, T, D], float, with D = 2 * H * K + HV * V: in a row H heads of q,
            H of k, HV of v. With `cu_seqlens` [T, D] or [1, T, D].
        weight: [D, W], float. bias: [D], float, or None. activation: "silu", or None.
        a, b: [T, HV] or [B, T, HV], as mixed_qkv is, float. Any strides.
        A_log, dt_bias: [HV], float.
        num_k_heads, head_k_dim, head_v_dim: H, K, V.
        apply_l2norm, output_g_exp: as `gdn_triton.fused_post_conv_prep`.
        state, read_slots, write_slots, has_initial_state, skip, cu_seqlens: as
            `gdn_triton.causal_conv1d`. For tokens of no sequence, and of skipped sequences, q, k
            and v are 0. g and beta do not depend on sequences; for tokens of no sequence they pass
            no gradient.

    Returns:
        q, k: [.., H, K], v: [.., HV, V], the dtype of mixed_qkv, where `..` is [T] or [B, T].
        g, beta: [.., HV], float32 (float64 if mixed_qkv, a, b, A_log or dt_bias is).
        All five are new and contiguous.

    `GDN_BACKEND` chooses the backend, triton or reference. With gradients, and where the fused
    kernel cannot run, the two functions run one after the other, each in its own backend: the
    convolution's gradients have kernels, the preparation's are the reference's. CUDA graphs,
    torch.compile and reads of the host are as in these functions.

    Raises:
        TypeError, ValueError, RuntimeError: as `gdn_triton.causal_conv1d` and
            `gdn_triton.fused_post_conv_prep`.
    """
    args = ConvArguments(
        x=mixed_qkv,
        weight=weight,
        bias=bias,
        activation=activation,
        state=state,
        read_slots=read_slots,
        write_slots=write_slots,
        has_initial_state=has_initial_state,
        skip=skip,
        cu_seqlens=cu_seqlens,
    )
    prep = PrepArguments(
        a=a,
        b=b,
        A_log=A_log,
        dt_bias=dt_bias,
        num_k_heads=num_k_heads,
        head_k_dim=head_k_dim,
        head_v_dim=head_v_dim,
        apply_l2norm=apply_l2norm,
        output_g_exp=output_g_exp,
    )
    if is_traced(mixed_qkv):
        return traced_conv_prep(args, prep)
    return run_conv_prep(args, prep)
