"""The launches of the kernels on an engine's rings, for compile_targets.py."""

import itertools

import torch
from target_calls import BF16, Shape

from gdn_triton.recurrent import rings
from gdn_triton.recurrent.ring_problem import RingOperands
from gdn_triton.recurrent.triton import ring_plan


def run_rings(shape: Shape) -> None:
    """A token, drafts and their fold, with states of 32 and 16 bits."""
    H, HV, K, V, L, N = shape.HV // 2, shape.HV, shape.K, shape.V, 16, 2
    for dtype, tokens in itertools.product((torch.float32, BF16), (1, 4)):
        drafts = tokens > 1
        T = N * tokens
        ring = shape.dtype if drafts else dtype
        mixed = torch.empty(T, 2 * H * K + HV * V + 8, dtype=shape.dtype)[:, 8:]
        q, k, v = mixed.split((H * K, H * K, HV * V), -1)
        rows = {
            "d": torch.empty(2, N, HV, L, V, dtype=ring),
            "k_rows": torch.empty(2, N, H, L, K, dtype=ring),
            "g_rows": torch.empty(2, N, HV, L),
        }
        if drafts and ring != torch.float32:
            rows |= {"d_low": rows["d"].clone(), "k_low": rows["k_rows"].clone()}
        states = torch.empty(2, N, HV, V, K, dtype=dtype)
        index = torch.arange(N, dtype=torch.int32)
        cursors = {name: torch.zeros(N, dtype=torch.int32) for name in ("counts", "flags")}
        places = {"slots": index, **cursors}
        if drafts:
            places |= {"ring_slots": index.long(), "bases": cursors["counts"].clone()}
        gates = torch.empty(T, HV, 2, dtype=shape.dtype)
        x = RingOperands(
            state=states[0],
            **{name: y[0] for name, y in rows.items()},
            **places,
            q=q.unflatten(-1, (H, K)),
            k=k.unflatten(-1, (H, K)),
            v=v.unflatten(-1, (HV, V)),
            a=gates[..., 0],
            b=gates[..., 1],
            A_log=torch.empty(HV),
            dt_bias=torch.empty(HV),
            out=torch.empty(T, HV, V, dtype=shape.dtype),
            cu_seqlens=torch.arange(0, T + 1, tokens) if drafts else None,
        )
        problem = rings._judged(x, None, True, tokens, -1, {})
        (ring_plan.drafts if drafts else ring_plan.step)(problem, x)
        if drafts:
            track = {name: index for name in ("accepted", "track_slots", "track_steps")}
            fold = RingOperands(state=states, **rows, **places, **track)
            ring_plan.fold(rings._judged(fold, None, False, 1, -1, {}), fold)
