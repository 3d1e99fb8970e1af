"""The calls of a layer's part that benchmarks.layer times, for this package, vLLM and SGLang; their
tensors; and their results in float64."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.shapes import Random, gate_parameters
from gdn_triton import (
    chunk_prefill,
    fused_conv_prep,
    layer_step,
    make_window,
    restart_window,
    rms_norm_gated,
)
from gdn_triton.reference.chunk import recurrent_gated_delta_rule
from gdn_triton.reference.conv import causal_conv1d
from gdn_triton.reference.norm import rms_norm_gated as exact_norm
from gdn_triton.reference.prep import fused_post_conv_prep

W = 4
EPS = 1e-6
CHECKED = 200  # tokens of a prefill's first sequence, and sequences of a step, that are compared
ROWS = 16  # of a window

Call = Callable[[], Tensor]


class Sizes(NamedTuple):
    H: int
    HV: int
    K: int = 128
    V: int = 128

    @property
    def D(self) -> int:
        return 2 * self.H * self.K + self.HV * self.V


class Step(NamedTuple):
    """The tensors of a call of one implementation, which it may write. lengths: tokens of each
    sequence. conv_state: [slots, W - 1, D]; state: [slots, HV, V, K]. drafts: a decode step of that
    many tokens a sequence, [N * drafts, ...]; 0: of one token."""

    sizes: Sizes
    lengths: Sequence[int]
    mixed_qkv: Tensor
    a: Tensor
    b: Tensor
    z: Tensor
    weight: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    conv_state: Tensor
    state: Tensor
    slots: Tensor
    cu_seqlens: Tensor
    has_initial_state: Tensor
    drafts: int = 0

    @property
    def is_decode(self) -> bool:
        return max(self.lengths) == 1

    def copied(self) -> "Step":
        """The same call on its own copies of the tensors."""
        made: Any = [x.clone() if isinstance(x, Tensor) else x for x in self]
        return Step(*made)


def make_step(
    sizes: Sizes, lengths: Sequence[int], device: torch.device, dtype: torch.dtype
) -> Step:
    """Sequences of one token continue from states; longer ones begin."""
    N, T = len(lengths), sum(lengths)
    rand = Random(0, device)

    def normal(*shape: int) -> Tensor:
        return rand.normal(*shape).to(dtype)

    A, dt_bias = gate_parameters("model", sizes.HV, rand)
    decode = max(lengths) == 1
    state = rand.normal(N + 1, sizes.HV, sizes.V, sizes.K)
    conv_state = normal(N + 1, W - 1, sizes.D)
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
    return Step(
        sizes=sizes,
        lengths=lengths,
        mixed_qkv=normal(T, sizes.D),
        a=normal(T, sizes.HV),
        b=normal(T, sizes.HV),
        z=normal(T, sizes.HV, sizes.V),
        weight=0.5 * normal(sizes.D, W),
        A_log=A.clamp(min=1e-3).log(),
        dt_bias=dt_bias,
        norm=1 + 0.1 * normal(sizes.V),
        conv_state=conv_state if decode else torch.zeros_like(conv_state),
        state=state if decode else torch.zeros_like(state),
        # Slot 0 is unused in vLLM.
        slots=1 + torch.arange(N, device=device).int(),
        cu_seqlens=offsets.int(),
        has_initial_state=torch.full((N,), decode, device=device),
    )


def drafted(step: Step, drafts: int) -> Step:
    """The step of one token with further tokens in each sequence."""

    def more(x: Tensor) -> Tensor:
        return torch.cat([x, *(x.roll(i + 1, 0).flip(-1) for i in range(drafts - 1))])

    return step._replace(
        mixed_qkv=more(step.mixed_qkv),
        a=more(step.a),
        b=more(step.b),
        z=more(step.z),
        drafts=drafts,
    )


def exact(step: Step) -> Tensor:
    """The result in float64, of the first tokens of a prefill or the first sequences of a step."""
    H, HV, K, V = step.sizes
    n = min(CHECKED, step.lengths[0] if not step.is_decode else len(step.lengths))
    x = step.mixed_qkv[None, :n]
    if step.is_decode:
        T = max(1, step.drafts)
        x = step.mixed_qkv[: n * T].unflatten(0, (n, T))
        n *= T
    slots = step.slots[: x.shape[0]].long()
    earlier = step.conv_state[slots].mT.double()
    x = causal_conv1d(x.double(), step.weight.double(), None, True, earlier).flatten(0, 1)
    a, b = step.a[:n].double(), step.b[:n].double()
    rule = fused_post_conv_prep(x, a, b, step.A_log, step.dt_bias, H, K, V)
    lead = (n // T, T) if step.is_decode else (1, n)
    q, k, v, g, beta = (y.unflatten(0, lead) for y in rule)
    state = step.state[slots].mT.double()
    o, _ = recurrent_gated_delta_rule(q, k, v, g, beta, initial_state=state)
    return exact_norm(o.reshape(n, HV, V), step.z[:n].double(), step.norm.double(), EPS)


# ------------------------------------------------------------------------------ implementations


def ours(step: Step) -> Call:
    H, HV, K, V = step.sizes
    begins: dict[str, Any] = {
        "has_initial_state": step.has_initial_state,
        "cu_seqlens": step.cu_seqlens,
    }
    conv_state = step.conv_state.mT
    out = step.mixed_qkv.new_empty(sum(step.lengths), HV, V)

    def prefill() -> Tensor:
        q, k, v, g, beta = fused_conv_prep(
            step.mixed_qkv,
            step.weight,
            step.a,
            step.b,
            step.A_log,
            step.dt_bias,
            H,
            K,
            V,
            None,
            "silu",
            state=conv_state,
            read_slots=step.slots,
            skip="non_positive",
            **begins,
        )
        chunk_prefill(
            step.state,
            step.slots,
            q=q[None],
            k=k[None],
            v=v[None],
            g=g[None],
            beta=beta[None],
            state_v_first=True,
            out=out[None],
            skip="non_positive",
            **begins,
        )
        return rms_norm_gated(out, step.z, step.norm, EPS)

    if step.drafts:
        return verified(step)
    return one_token(step) if step.is_decode else prefill


@dataclass(frozen=True)
class WindowCall:
    """A step with a window at the positions of one tensor, which an engine advances once for all
    layers."""

    call: Call
    positions: Tensor
    tokens: int

    def __call__(self) -> Tensor:
        return self.call()

    def advance(self) -> None:
        self.positions.add_(self.tokens)


def ours_with_window(step: Step) -> WindowCall:
    if not step.is_decode:
        raise NotImplementedError("a prefill has no window")
    H, HV, K, V = step.sizes
    T, device, N = max(1, step.drafts), step.slots.device, len(step.lengths)
    window = make_window(
        *(step.state.shape[0], H, HV, K, V, step.mixed_qkv.dtype, device), rows=ROWS, max_tokens=T
    )
    positions = torch.zeros(N, dtype=torch.int32, device=device)
    restart_window(window, step.slots, positions)
    if step.drafts:
        return WindowCall(verified(step, window=window, positions=positions), positions, T)
    return WindowCall(one_token(step, window=window, positions=positions), positions, 1)


def _counters(step: Step, slots: int) -> Tensor:
    """The counters of `layer_step` for a pool of some slots."""
    return torch.zeros(slots, step.sizes.H, dtype=torch.int32, device=step.slots.device)


def one_token(step: Step, **window: Any) -> Call:
    """A decode step of one token for each sequence."""
    conv_state = step.conv_state.mT
    rest = window or {"counters": _counters(step, len(step.state))}

    def decode() -> Tensor:
        return layer_step(
            step.mixed_qkv,
            step.a,
            step.b,
            step.A_log,
            step.dt_bias,
            state=step.state,
            read_slots=step.slots,
            conv_state=conv_state,
            conv_weight=step.weight,
            gate=step.z,
            norm_weight=step.norm,
            norm_eps=EPS,
            state_v_first=True,
            skip="non_positive",
            **rest,
        )

    return decode


def verified(step: Step, **window: Any) -> Call:
    """A step of drafts, all of which were accepted in the step before. Without a window a slot
    keeps the state after each of them."""
    N, T, slots = len(step.lengths), step.drafts, step.slots
    accepted = torch.full_like(slots, T)
    conv_state = torch.nn.functional.pad(step.conv_state.mT, (T - 1, 0)).contiguous()
    mixed, a, b, z = (x.unflatten(0, (N, T)) for x in (step.mixed_qkv, step.a, step.b, step.z))
    pool, read, rest = step.state, slots, window
    if not window:  # Slot 0 is nobody's.
        read = 1 + torch.arange(N * T, device=slots.device).int().view(N, T)
        pool = step.state.new_zeros(1 + N * T, *step.state.shape[1:])
        pool[read[:, -1].long()] = step.state[slots.long()]
        tokens = conv_state.new_zeros(1 + N * T, *conv_state.shape[1:])
        tokens[read[:, 0].long()] = conv_state[slots.long()]
        conv_state = tokens
        rest = {"counters": _counters(step, len(pool))}

    def verify() -> Tensor:
        return layer_step(
            mixed,
            a,
            b,
            step.A_log,
            step.dt_bias,
            state=pool,
            read_slots=read,
            num_accepted_tokens=accepted,
            conv_state=conv_state,
            conv_weight=step.weight,
            gate=z,
            norm_weight=step.norm,
            norm_eps=EPS,
            state_v_first=True,
            skip="non_positive",
            **rest,
        ).flatten(0, 1)

    return verify


def conv_blocks(step: Step) -> SimpleNamespace:
    """vLLM's metadata of its convolution, which it computes once for all layers: the sequence of
    each block of 8 tokens, and the block's number in the sequence."""
    blocks = [(n, i) for n, length in enumerate(step.lengths) for i in range(-(-length // 8))]
    of, which = torch.tensor(blocks, dtype=torch.int32, device=step.slots.device).unbind(1)
    pad = of.new_full((max(1024, len(blocks)) * 2,), -1)
    batch, offset = pad.clone(), pad.clone()
    batch[: len(blocks)], offset[: len(blocks)] = of, which
    given = {
        "tot": len(blocks),
        "mlist": of,
        "mlist_len": len(blocks),
        "offsetlist": which,
        "batch_ptr": batch,
        "token_chunk_offset_ptr": offset,
    }
    return SimpleNamespace(nums_dict={8: given}, batch_ptr=batch, token_chunk_offset_ptr=offset)


def convolved(step: Step, f: SimpleNamespace, conv_state: Tensor, **more: Any) -> Tensor:
    """Calls the function of that name, which both engines have. more: arguments that one of them
    adds."""
    y: Tensor = f.causal_conv1d_fn(
        step.mixed_qkv.transpose(0, 1),
        step.weight,
        None,
        activation="silu",
        conv_states=conv_state,
        has_initial_state=step.has_initial_state,
        cache_indices=step.slots,
        query_start_loc=step.cu_seqlens,
        **more,
    )
    return y.transpose(0, 1)


def decoded(step: Step, f: SimpleNamespace, x: Tensor, out: Tensor) -> None:
    """Writes out by the function of that name, which both engines have."""
    f.fused_recurrent_gated_delta_rule_packed_decode(
        mixed_qkv=x,
        a=step.a,
        b=step.b,
        A_log=step.A_log,
        dt_bias=step.dt_bias,
        scale=step.sizes[2] ** -0.5,
        initial_state=step.state,
        out=out,
        ssm_state_indices=step.slots,
        use_qk_l2norm_in_kernel=True,
    )


def vllm(
    step: Step,
    theirs: dict[str, Callable[..., Any]],
    flashinfer: Callable[..., Any] | None = None,
) -> Call:
    """flashinfer: the rule of a prefill, in place of vLLM's Triton kernels, as on Hopper."""
    f = SimpleNamespace(**theirs)
    H, HV, K, V = step.sizes
    gates = {"A_log": step.A_log, "dt_bias": step.dt_bias}
    conv_state = step.conv_state.transpose(-1, -2)
    out = step.mixed_qkv.new_empty(sum(step.lengths), HV, V)
    metadata = None if step.is_decode else conv_blocks(step)

    def norm() -> Tensor:
        y: Tensor = f.rmsnorm_fn(
            out.reshape(-1, V),
            step.norm,
            None,
            z=step.z.reshape(-1, V),
            eps=EPS,
            group_size=None,
            norm_before_gate=True,
            activation="silu",
        )
        return y.view(out.shape)

    def decode() -> Tensor:
        x = f.causal_conv1d_update(
            step.mixed_qkv,
            conv_state,
            step.weight,
            None,
            "silu",
            conv_state_indices=step.slots,
            validate_data=False,
        )
        decoded(step, f, x, out.unsqueeze(1))
        return norm()

    def prefill() -> Tensor:
        x = convolved(step, f, conv_state, metadata=metadata)
        prepared = f.fused_post_conv_prep(
            conv_output=x,
            a=step.a,
            b=step.b,
            **gates,
            num_k_heads=H,
            head_k_dim=K,
            head_v_dim=V,
            apply_l2norm=True,
            output_g_exp=False,
        )
        q, k, v, g, beta = (y.unsqueeze(0) for y in prepared)
        state = step.state[step.slots].contiguous()
        state[~step.has_initial_state, ...] = 0
        if flashinfer is None:
            o, state = f.chunk_gated_delta_rule(
                q=q,
                k=k,
                v=v,
                g=g,
                beta=beta,
                initial_state=state,
                output_final_state=True,
                cu_seqlens=step.cu_seqlens,
                use_qk_l2norm_in_kernel=False,
            )
        else:
            o, state = flashinfer(
                q=q.squeeze(0),
                k=k.squeeze(0),
                v=v.squeeze(0),
                g=torch.exp(g.squeeze(0).float()),
                beta=beta.squeeze(0).float(),
                initial_state=state.float(),
                output_final_state=True,
                cu_seqlens=step.cu_seqlens.long(),
                use_cp="auto",
                backend="flashinfer",
            )
        step.state[step.slots] = state.to(step.state.dtype)
        out.copy_(o.view(out.shape))
        return norm()

    if step.drafts:
        raise NotImplementedError("drafts are measured for ours only")
    if step.is_decode and flashinfer is not None:
        raise NotImplementedError("vLLM decodes with its Triton kernels in either case")
    return decode if step.is_decode else prefill


def sglang(step: Step, theirs: dict[str, Callable[..., Any]]) -> Call:
    if step.drafts:
        raise NotImplementedError("drafts are measured for ours only")
    f = SimpleNamespace(**theirs)
    H, HV, K, V = step.sizes
    conv_state = step.conv_state.transpose(-1, -2).contiguous()
    conv = (conv_state, step.weight, None, "silu")

    def norm(o: Tensor) -> Tensor:
        y: Tensor = f.rms_norm_gated(
            x=o.reshape(-1, V),
            weight=step.norm,
            bias=None,
            z=step.z.reshape(-1, V),
            eps=EPS,
            norm_before_gate=True,
            is_rms_norm=True,
        )
        return y.view(-1, HV, V)

    def decode() -> Tensor:
        x = f.causal_conv1d_update(step.mixed_qkv, *conv, conv_state_indices=step.slots)
        o = x.new_empty(x.shape[0], 1, HV, V)
        decoded(step, f, x, o)
        return norm(o)

    def prefill() -> Tensor:
        x = convolved(step, f, conv_state, seq_lens_cpu=list(step.lengths))
        q, k, v = f.fused_qkv_split_gdn_prefill(x, H, H, HV, K, K, V)
        g, beta = f.fused_gdn_gating(step.A_log, step.a, step.b, step.dt_bias)
        o = f.chunk_gated_delta_rule(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            initial_state=step.state,
            initial_state_indices=step.slots,
            cu_seqlens=step.cu_seqlens,
            head_first=False,
            use_qk_l2norm_in_kernel=True,
        )[0]
        return norm(o)

    return decode if step.is_decode else prefill
