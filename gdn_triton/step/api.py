"""The public decode step of a layer: `layer_step`."""

from torch import Tensor

from gdn_triton._host.tensors import is_traced
from gdn_triton.recurrent.window import StepWindow
from gdn_triton.step.operators import traced_layer
from gdn_triton.step.plans import run_layer
from gdn_triton.step.problem import MOST_TOKENS, LayerCall, LayerOperands, LayerOptions

__all__ = ["MOST_TOKENS", "layer_step"]


def layer_step(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None = None,
    *,
    state: Tensor,
    read_slots: Tensor,
    conv_state: Tensor | None = None,
    conv_weight: Tensor | None = None,
    conv_bias: Tensor | None = None,
    activation: str | None = "silu",
    gate: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_activation: str = "silu",
    counters: Tensor | None = None,
    allow_neg_eigval: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    scale: float | None = None,
    state_v_first: bool = False,
    skip: str = "negative",
    window: StepWindow | None = None,
    positions: Tensor | None = None,
    write_slots: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    parents: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_tokens: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Runs the decode step of a Gated DeltaNet layer between its projections, in one launch.

    The step is the convolution, the rule on a pool of states, and the gated norm:

        x = causal_conv1d_update(mixed_qkv, conv_weight, conv_bias, activation, ..)
        o = recurrent_step(state, read_slots, mixed_qkv=x, a=a, b=b, A_log=A_log, ..)
        y = rms_norm_gated(o, gate, norm_weight, norm_eps, norm_activation)

    The convolution and the norm are optional. The states, and o without a norm, have the bits of
    these three functions. With a norm the squares of a head may be summed in another order, which
    changes y by at most a factor of 1 + V * 2^-24 before its rounding.

    Sizes: N sequences, T tokens each, H heads of q and k, HV of v, K and V channels, W taps,
    D = 2 * H * K + HV * V. "Float" is float16, bfloat16, float32 or float64. All tensors are on one
    device, and may be strided views. With cu_seqlens the T tokens of all sequences are packed: for
    [N, T, ...] read [T, ...] or [1, T, ...], and [1, T] for slots and parents of tokens.

    Args:
        mixed_qkv: [N, D], one token for each sequence, or [N, T, D], float: q, k and v
            concatenated, before the convolution.
        a, b: [N, HV] or [N, T, HV], float: the gates before their activations.
        A_log, dt_bias: [HV], float; dt_bias may be None.
        state: [slots, HV, K, V], or [slots, HV, V, K] with `state_v_first`, float. Written in
            place.
        read_slots: [N], int32 or int64: the slot of each sequence in both pools, all different. A
            slot that is padding (`skip`) skips its sequence: no state is written, and its y is 0.
            [N, S] with num_accepted_tokens and without a window.
        write_slots: [N] or [N, T], int32 or int64: as `gdn_triton.recurrent_step`, in both pools.
            With a window and parents: the slots of the convolution's states alone. None:
            read_slots.
        num_accepted_tokens: [N], int32 or int64, for verifying drafts: as
            `gdn_triton.recurrent_step` and `gdn_triton.causal_conv1d_update`. The convolution's
            state is in slot read_slots[n, 0], and is padding only if the slot of the state is. A
            sequence whose number is not in 1 to S is skipped. With a window the number selects the
            columns of the convolution's state, positions select the records, and S is
            window.max_tokens; then another number is undefined behaviour on an accelerator.
        parents: [N, T], int32 or int64, for trees of drafts: as `gdn_triton.recurrent_step` and
            `gdn_triton.causal_conv1d_update`. With a convolution write_slots is [N, T], and none is
            the sequence's read slot. With a window write_slots may be slots of conv_state that
            state does not have; after `gdn_triton.accept_window` the caller copies the
            convolution's state of the last accepted node to the slot of the sequence.
        cu_seqlens: [N + 1], int32 or int64: sequences with different numbers of tokens, as
            `gdn_triton.recurrent_step`. The y of tokens at or after cu_seqlens[-1] is 0.
        max_tokens: the largest number of tokens of a sequence, with cu_seqlens and without a
            window, which has a bound of its own. On an accelerator more tokens are undefined
            behaviour. None: T, which is seldom few enough for one launch.
        conv_state: [slots, D, W - 1], float, wide enough for mixed_qkv's dtype, with conv_weight:
            the last tokens before the convolution, the latest at W - 2. Written in place. With
            num_accepted_tokens it has W - 2 + S columns or more, and the first W - 2 + S are used.
            None: mixed_qkv has been convolved already.
        conv_weight, conv_bias: [D, W] and [D], float; conv_bias may be None.
        activation: the activation of the convolution, "silu" or None.
        gate: [N, HV, V] or [N, T, HV, V], float, with norm_weight: the gate of the norm. None: y is
            o.
        norm_weight: [V], float.
        counters: [slots, H], int32, contiguous, without a window: zeros before and after a call, in
            which the programs of a call count each other. All calls on these pools may share them.
            None: a call of several tokens is three launches, and one token is slower for few
            sequences. A window has tickets of its own.
        norm_eps, norm_activation: eps and activation of `gdn_triton.rms_norm_gated`.
        allow_neg_eigval, scale, state_v_first, skip: as `gdn_triton.recurrent_step`.
        use_qk_l2norm_in_kernel: normalise each q and k. The default is True, as in the models.
        window, positions: as `gdn_triton.recurrent_step`.
        out: [.., HV, V], the dtype of mixed_qkv, any strides: the tensor to which y is written.
            None: a new tensor.

    Returns:
        y: [N, HV, V] or [N, T, HV, V], the dtype of mixed_qkv, contiguous; `out` if that was given.

    On Triton a call is one launch or three, if it has 1 to 8 tokens per sequence, 2 to 4 taps or no
    convolution, HV / H up to 8, V up to 256, and, without a window, value-first rows [K] of up to
    512 bytes. One launch serves

        one token per sequence, with value-first states, or key-first states of float32;

    and, if the sequences are few (three launches of more have the same bits),

        with counters: one token with key-first states of 16 bits, or 2 to 8 tokens, also with
            num_accepted_tokens, write_slots [N, T] or cu_seqlens; K up to 128 if key-first;
        with a window: one token; or 2 to 4 tokens with states of float32, and 2 with states of 16
            bits, where K and V are multiples of 16 and parents is None.

    Calls outside of these limits, and all calls of the reference backend, run the three functions
    above one after the other, each in the backend that is chosen for it; `gdn_triton.explain_call`
    names the backends. On an accelerator the host reads no contents, so a call can be captured in a
    CUDA graph. Under torch.compile a call is one operator.

    Raises:
        TypeError, ValueError: an argument that does not fit, with its name, the expected and the
            given value; nothing has been launched or written.
        NotImplementedError: an input requires a gradient.
        RuntimeError: the backend asked for by name cannot run this call, with its reason.
    """
    call = LayerCall(
        inputs=LayerOperands(
            mixed_qkv=mixed_qkv,
            a=a,
            b=b,
            A_log=A_log,
            dt_bias=dt_bias,
            state=state,
            read_slots=read_slots,
            conv_state=conv_state,
            conv_weight=conv_weight,
            conv_bias=conv_bias,
            gate=gate,
            norm_weight=norm_weight,
            counters=counters,
            write_slots=write_slots,
            num_accepted_tokens=num_accepted_tokens,
            parents=parents,
            cu_seqlens=cu_seqlens,
            out=out,
        ),
        options=LayerOptions(
            activation=activation,
            norm_eps=norm_eps,
            norm_activation=norm_activation,
            allow_neg_eigval=allow_neg_eigval,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            scale=scale,
            state_v_first=state_v_first,
            skip=skip,
            max_tokens=max_tokens,
        ),
        window=window,
        positions=positions,
    )
    if is_traced(mixed_qkv):
        return traced_layer(call)
    return run_layer(call)
