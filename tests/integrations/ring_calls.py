"""Calls of the adapter's functions that write SGLang's rings."""

from typing import Any

import torch
from engine_calls import B, K, V, decoding, mixed_token
from pool_cases import Op

from gdn_triton.integrations import sglang

ROWS = 4


def caches(*lead: int) -> dict[str, Any]:
    return {
        "d_cache": torch.randn(*lead, 6, 4, ROWS, V),
        "k_cache": torch.randn(*lead, 6, 2, ROWS, K),
        "g_cache": -torch.rand(*lead, 6, 4, ROWS),
    }


def decode() -> dict[str, Any]:
    return {
        **mixed_token(),
        "initial_state": torch.randn(6, 4, V, K),
        **caches(),
        "out": torch.zeros(B, 1, 4, V),
        "ssm_state_indices": torch.tensor([4, 1, 2]),
        "write_pos": torch.tensor([0, 3, 1], dtype=torch.int32),
        "force_flush": torch.tensor([0, 0, 1], dtype=torch.int32),
    }


def cursors() -> dict[str, Any]:
    return {
        "replay_indices": torch.tensor([3, 0, 5]),
        "write_pos": torch.tensor([1, 0, 0, 2, 0, 0], dtype=torch.int32),
        "cache_base": torch.tensor([3, 0, 0, 1, 0, 0], dtype=torch.int32),
    }


def drafts() -> dict[str, Any]:
    x = decoding(2)
    return {
        **{name: x[name].flatten(0, 1) for name in ("q", "k", "v", "a", "b")},
        "A_log": x["A_log"],
        "dt_bias": x["dt_bias"],
        "checkpoint_state": torch.randn(6, 4, V, K),
        **{name: x if name == "g_cache" else x.half() for name, x in caches().items()},
        "rawv_cache": torch.zeros(6, 4, ROWS, V).half(),
        "rawk_cache": torch.zeros(6, 2, ROWS, K).half(),
        "beta_cache": None,
        "out": torch.zeros(2 * B, 4, V),
        "query_start_loc": torch.tensor([0, 2, 4, 6], dtype=torch.int32),
        "ssm_state_indices": torch.tensor([4, 1, 2]),
        **cursors(),
        "is_flush": torch.zeros(6, dtype=torch.int8),
        "max_cache_len": ROWS,
        "max_spec_len": 2,
        "null_block_id": -1,
        "launch_mode": "verify",
    }


def commit() -> dict[str, Any]:
    return {
        "checkpoint_state": torch.randn(2, 6, 4, V, K),
        **caches(2),
        "d_residual_cache": torch.zeros(2, 6, 4, ROWS, V),
        "k_residual_cache": torch.zeros(2, 6, 2, ROWS, K),
        "state_batch_indices": torch.tensor([4, 1, 2]),
        **cursors(),
        "is_flush": torch.tensor([1, 0, 0, 1, 0, 0], dtype=torch.int8),
        "accept_lens": torch.tensor([1, 1, 0]),
        "mamba_track_indices": torch.tensor([0, -1, -1]),
        "mamba_steps_to_track": torch.tensor([0, -1, -1]),
    }


RECORDS = ("d_cache", "k_cache", "g_cache")
CALLS: dict[str, Op] = {
    "sglang.fused_recurrent_gdn_replayssm_decode": Op(
        sglang.fused_recurrent_gdn_replayssm_decode, decode, ("initial_state", "out", *RECORDS)
    ),
    "sglang.gdn_replayssm_spec_decode": Op(
        sglang.gdn_replayssm_spec_decode, drafts, ("out", *RECORDS, "rawv_cache", "rawk_cache")
    ),
    "sglang.commit_gdn_replayssm_circular": Op(
        sglang.commit_gdn_replayssm_circular,
        commit,
        ("checkpoint_state", "write_pos", "cache_base", "is_flush"),
    ),
}
