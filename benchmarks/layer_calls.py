"""The calls of a layer's part that benchmarks.layer times, for vLLM and SGLang; the tensors of all
calls, and their results in float64. `benchmarks/layer_ours.py` has the calls of this package."""

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.shapes import Random, gate_parameters
from gdn_triton.reference.chunk import recurrent_gated_delta_rule
from gdn_triton.reference.conv import causal_conv1d
from gdn_triton.reference.norm import rms_norm_gated as exact_norm
from gdn_triton.reference.prep import fused_post_conv_prep

W = 4
EPS = 1e-6
CHECKED = 200  # tokens of a prefill's first sequence, and sequences of a step, that are compared
ROWS = 16  # of a window
# The kinds of steps. DECODE: one token of each sequence. DRAFTS: slots keep the state after each
# token, and all tokens of the step before were accepted. LAST: only the last state is kept. TREE:
# the tokens are nodes of a tree. PACKED: the sequences have different numbers of tokens.
DECODE, DRAFTS, LAST, TREE, PACKED = "decode", "drafts", "last state", "tree", "packed"
STEPS = (DECODE, DRAFTS, LAST, TREE, PACKED)
PREFILL = "prefill"
PARENTS = (-1, 0, 0, 1)  # of the nodes of a tree
LENGTHS = (4, 1, 3, 4, 2)  # of the packed sequences, over and over

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
    sequence. conv_state: [slots, W - 1, D]; state: [slots, HV, V, K]. what: of STEPS, or
    PREFILL."""

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
    what: str = PREFILL

    @property
    def is_decode(self) -> bool:
        return self.what == DECODE

    def copied(self) -> "Step":
        """The same call on its own copies of the tensors."""
        made: Any = [x.clone() if isinstance(x, Tensor) else x for x in self]
        return Step(*made)


def lengths_of(what: str, N: int) -> list[int]:
    """The tokens of each of N sequences in a step."""
    if what == PACKED:
        return list(itertools.islice(itertools.cycle(LENGTHS), N))
    return [1 if what == DECODE else len(PARENTS)] * N


def make_step(
    sizes: Sizes, what: str, lengths: Sequence[int], device: torch.device, dtype: torch.dtype
) -> Step:
    """what: of STEPS, whose sequences continue from states, or PREFILL, whose sequences begin."""
    N, T = len(lengths), sum(lengths)
    rand = Random(0, device)

    def normal(*shape: int) -> Tensor:
        return rand.normal(*shape).to(dtype)

    A, dt_bias = gate_parameters("model", sizes.HV, rand)
    continues = what != PREFILL
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
        conv_state=conv_state if continues else torch.zeros_like(conv_state),
        state=state if continues else torch.zeros_like(state),
        # Slot 0 is unused in vLLM.
        slots=1 + torch.arange(N, device=device).int(),
        cu_seqlens=offsets.int(),
        has_initial_state=torch.full((N,), continues, device=device),
        what=what,
    )


def exact(step: Step) -> Tensor:
    """The result in float64, of the first tokens of a prefill or of the first sequences."""
    device = step.slots.device
    if step.what == PREFILL:
        return in_order(step, torch.arange(min(CHECKED, step.lengths[0]), device=device)[None])[0]
    n = min(CHECKED, len(step.lengths))
    lengths = torch.tensor(step.lengths[:n], device=device)
    columns = torch.arange(max(step.lengths), device=device)
    rows = step.cu_seqlens[:n, None] + columns  # of the tokens of each sequence
    is_token = columns < lengths[:, None]
    rows = rows.where(is_token, 0)
    if step.what != TREE:
        return in_order(step, rows)[is_token]
    nodes = []
    for node in range(len(PARENTS)):
        path = [node]
        while PARENTS[path[0]] >= 0:
            path.insert(0, PARENTS[path[0]])
        nodes.append(in_order(step, rows[:, path])[:, -1])
    return torch.stack(nodes, 1).flatten(0, 1)


def in_order(step: Step, rows: Tensor) -> Tensor:
    """The results [N, T, HV, V] of the tokens of rows [N, T], each after the one before it."""
    H, HV, K, V = step.sizes
    slots = step.slots[: rows.shape[0]].long()
    earlier = step.conv_state[slots].mT.double()
    x = causal_conv1d(step.mixed_qkv[rows].double(), step.weight.double(), None, True, earlier)
    a, b, z = (y[rows].flatten(0, 1).double() for y in (step.a, step.b, step.z))
    rule = fused_post_conv_prep(x.flatten(0, 1), a, b, step.A_log, step.dt_bias, H, K, V)
    q, k, v, g, beta = (y.unflatten(0, rows.shape) for y in rule)
    state = step.state[slots].mT.double()
    o, _ = recurrent_gated_delta_rule(q, k, v, g, beta, initial_state=state)
    y = exact_norm(o.reshape(-1, HV, V), z, step.norm.double(), EPS)
    return y.unflatten(0, rows.shape)


# ------------------------------------------------------------------------------ implementations


def refuse_several(step: Step) -> None:
    if step.what not in (PREFILL, DECODE):
        raise NotImplementedError("steps of several tokens are measured for ours only")


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

    refuse_several(step)
    if step.is_decode and flashinfer is not None:
        raise NotImplementedError("vLLM decodes with its Triton kernels in either case")
    return decode if step.is_decode else prefill


def sglang(step: Step, theirs: dict[str, Callable[..., Any]]) -> Call:
    refuse_several(step)
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
