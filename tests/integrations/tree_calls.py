"""Calls of the adapters' functions whose drafts are trees."""

from typing import Any

import torch
from engine_calls import K, V, decoding
from pool_cases import Op

from gdn_triton.integrations import sglang


def tree() -> dict[str, Any]:
    return {
        **decoding(3),
        "softplus_beta": 1.0,
        "softplus_threshold": 20.0,
        "initial_state_source": torch.randn(6, 4, V, K),
        "initial_state_indices": torch.tensor([4, -1, 2]),
        "disable_state_update": True,
        "intermediate_states_buffer": torch.zeros(4, 3, 4, V, K),
        "intermediate_state_indices": torch.tensor([3, 0, 1]),
        "retrieve_parent_token": torch.tensor([[0, 0, 0], [0, 5, 5], [0, 0, 1]]),
    }


CALLS: dict[str, Op] = {
    "sglang.fused_sigmoid_gating_delta_rule_update, tree": Op(
        sglang.fused_sigmoid_gating_delta_rule_update, tree, ("intermediate_states_buffer",)
    ),
}
