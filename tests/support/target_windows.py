"""Steps with a window on CPU tensors whose contents mean nothing: a part of `target_calls`."""

from typing import Any

import torch


def run_windows(call: Any, H: int) -> None:
    """The step with windows, of one token and of all of its tokens, and a fold. call: a mixed one
    of several tokens, for H heads of k."""
    from gdn_triton.recurrent.problem import WINDOW_AND_SCALES, FoldCall, FoldOperands
    from gdn_triton.recurrent.triton.window_form import FEW_STATES, FEWEST_STATES
    from gdn_triton.recurrent.triton.window_plan import fold_slots, plan
    from gdn_triton.recurrent.validation import validate_step
    from gdn_triton.recurrent.validation_window import validate_fold
    from gdn_triton.recurrent.window import make_window

    v_first = call.options.state_v_first
    state = call.inputs.state
    # One of both layouts for int8 and for trees: a program of them differs from the others by a few
    # instructions, and takes as long to compile.
    pools = [state, state.to(torch.int8)] if v_first and state.dtype == torch.bfloat16 else [state]
    for pool in pools:
        slots, HV, *last = pool.shape
        K, V = last[:: -1 if v_first else 1]
        window = make_window(
            *(slots, H, HV, K, V, call.inputs.q.dtype, "cpu"),
            max_tokens=4,
            with_scales=pool.dtype == torch.int8,
        )
        rows = {field: getattr(window, name) for field, name in WINDOW_AND_SCALES.items()}
        positions = torch.zeros_like(call.inputs.read_slots)
        several = call.inputs._replace(**rows, state=pool, positions=positions)
        one = several._replace(**{name: getattr(several, name)[:, 0] for name in ("q", "k", "v")})
        one = one._replace(g=several.g[:, 0], beta=several.beta[:, 0])
        tree = several._replace(parents=torch.full(several.g.shape[:2], -1, dtype=torch.int32))
        trees = [tree] if pool.dtype == torch.float32 and not v_first else []
        for x in (one, several, *trees):
            step = call._replace(inputs=x, max_tokens=window.max_tokens)
            plan(validate_step(step), x)(x)
        # Calls of one token in a window of such calls have kernels and forms of their own, which
        # depend on the number of states.
        for states in (HV, FEWEST_STATES + 1, FEW_STATES + 1):
            x = one._replace(
                **{
                    name: getattr(one, name)[:1].repeat(
                        -(-states // HV), *[1] * (getattr(one, name).dim() - 1)
                    )
                    for name in ("q", "k", "v", "g", "beta", "read_slots", "positions")
                }
            )
            step = call._replace(inputs=x, max_tokens=1)
            plan(validate_step(step), x)(x)
        folded = FoldCall(
            inputs=FoldOperands(**rows, state=pool, slots=several.read_slots, positions=positions),
            max_tokens=window.max_tokens,
            state_v_first=v_first,
            skip="negative",
        )
        fold_slots(validate_fold(folded, folds=True), folded.inputs)
    path = torch.zeros(*positions.shape, 2, dtype=torch.int32)
    accepted = folded._replace(inputs=folded.inputs._replace(state=None, path=path))
    fold_slots(validate_fold(accepted, folds=False), accepted.inputs)
