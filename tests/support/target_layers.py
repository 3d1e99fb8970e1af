"""The launches of a layer's step, for compile_targets.py."""

import itertools
from collections.abc import Collection
from typing import Any

import torch
from target_calls import BF16, Shape


def packed(x: Any) -> Any:
    """The operands of sequences of 2 and of 3 tokens, of 6 rows."""
    of_tokens = {name: getattr(x, name) for name in ("mixed_qkv", "a", "b", "gate")}
    rows = {name: None if y is None else y.flatten(0, 1) for name, y in of_tokens.items()}
    return x._replace(**rows, cu_seqlens=torch.tensor([0, 2, 5], dtype=torch.int32))


def options_of(v_first: bool) -> Any:
    from gdn_triton.step.problem import LayerOptions

    return LayerOptions(
        activation="silu",
        norm_eps=1e-6,
        norm_activation="silu",
        allow_neg_eigval=False,
        use_qk_l2norm_in_kernel=True,
        scale=None,
        state_v_first=v_first,
        skip="negative",
    )


def run_layer_step(shape: Shape, pools: Collection[tuple[bool, torch.dtype]]) -> None:
    """A layer's step from pools (`POOLS` of target_calls.py), of a batch and of a large one, of one
    token and of several; where its kernel takes the shape."""
    from gdn_triton.recurrent.api import call_of
    from gdn_triton.recurrent.validation import validate_step
    from gdn_triton.recurrent.window import make_window
    from gdn_triton.step.backends import kernel_refusal, load_triton
    from gdn_triton.step.problem import LayerCall, LayerOperands, step_arguments
    from gdn_triton.step.triton import tokens_plan
    from gdn_triton.step.triton.window import plan_norm
    from gdn_triton.step.validation import validate_layer

    H, HV, K, V, full = shape.HV // 2, shape.HV, shape.K, shape.V, shape.full
    D, W = 2 * H * K + HV * V, 4 if full else 3
    weight, bias = torch.empty(D, W, dtype=shape.dtype), torch.empty(D)
    for N, (v_first, dtype) in itertools.product((2, 140), pools):
        heads = torch.empty(N, HV, V + 8, dtype=shape.dtype)
        operands = LayerOperands(
            mixed_qkv=torch.empty(N, D + 8, dtype=shape.dtype)[..., 8:],
            a=heads[..., 0],
            b=heads[..., 1],
            A_log=torch.empty(HV),
            dt_bias=torch.empty(HV) if full else None,
            state=torch.empty(N, HV, *((V, K) if v_first else (K, V)), dtype=dtype),
            read_slots=torch.arange(N, dtype=torch.int32),
            conv_state=torch.empty(N, D, W - 1, dtype=shape.dtype),
            conv_weight=weight,
            conv_bias=bias if full else None,
            gate=heads[..., :V] if v_first else None,
            norm_weight=torch.empty(V) if v_first else None,
            counters=None,
        )
        options = options_of(v_first)
        records = make_window(N, H, HV, K, V, shape.dtype, "cpu")
        positions = torch.zeros(N, dtype=torch.int32)
        calls = [LayerCall(operands, options)]
        if N == 2:
            calls.append(LayerCall(operands, options, records, positions))
            tokens = operands._replace(
                mixed_qkv=torch.empty(N, 3, D + 8, dtype=shape.dtype)[..., 8:],
                **dict.fromkeys("ab", torch.empty(N, 3, HV)),
                gate=torch.empty(N, 3, HV, V) if v_first else None,
            )
            counters = torch.zeros(N, H, dtype=torch.int32)
            calls.append(LayerCall(tokens._replace(counters=counters), options))
            records = make_window(N, H, HV, K, V, shape.dtype, "cpu", max_tokens=3)
            calls.append(LayerCall(tokens, options, records, positions))
            wide = torch.empty(N, D, W + 1, dtype=shape.dtype)
            drafts = tokens._replace(conv_state=wide, num_accepted_tokens=positions + 1)
            calls.append(LayerCall(drafts, options, records, positions))
            calls.append(LayerCall(packed(drafts), options, records, positions))
            drafts = drafts._replace(
                state=operands.state.repeat(3, 1, 1, 1),
                conv_state=wide.repeat(3, 1, 1),
                read_slots=torch.arange(3 * N).view(N, 3),
                counters=counters.repeat(3, 1),
            )
            calls.append(LayerCall(drafts, options))
            calls.append(LayerCall(packed(drafts), options._replace(max_tokens=3)))
            tree = drafts._replace(
                conv_state=operands.conv_state.repeat(4, 1, 1),
                state=operands.state.repeat(4, 1, 1, 1),
                read_slots=operands.read_slots,
                write_slots=N + torch.arange(3 * N).view(N, 3),
                parents=torch.tensor([[-1, -1, 0]] * N),
                num_accepted_tokens=None,
                counters=counters.repeat(4, 1),
            )
            calls.append(LayerCall(tree, options))
            last = packed(tree)._replace(write_slots=None, parents=None)
            calls.append(LayerCall(last, options._replace(max_tokens=3)))
        for call in calls:
            problem = validate_layer(call)
            if kernel_refusal(problem) is None:
                load_triton()(problem, call)(call)
                if problem.T > 1 and problem.has_window:
                    step = call_of(mixed_qkv=call.inputs.mixed_qkv, **step_arguments(call))
                    rule = validate_step(step)
                    tokens_plan.plan_window(problem, call, rule, step.inputs)(call)
                elif problem.T > 1:
                    tokens_plan.plan(problem, call)(call)
                if problem.T > 1 and problem.has_norm:
                    o = torch.empty(*call.inputs.mixed_qkv.shape[:-1], HV, V).to(BF16)
                    plan_norm(problem, call.inputs)(call.inputs, o)
