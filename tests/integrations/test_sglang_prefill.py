"""SGLang's own method for a prefill, and its kernel class, on the functions of this package."""

from functools import partial
from types import SimpleNamespace
from typing import Any, Optional, Union

import pytest
import torch
from engine_sources import load
from helpers import same_bits
from torch import Tensor
from torch.nn import functional as F

from gdn_triton import chunk_prefill
from gdn_triton.integrations import sglang

H, HV, K, V, W = 2, 4, 16, 8, 4
D = 2 * H * K + HV * V
LENGTHS = (70, 1, 9)
BASE = "sglang/srt/layers/attention/linear"


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("GDN_BACKEND", "reference")
    no = dict.fromkeys(("is_cpu", "is_npu", "is_xpu", "is_hip", "is_cuda"), lambda: False)
    names = ("RadixLinearAttention", "ForwardBatch", "MambaPool")
    found = {"torch": torch, "LinearAttnKernelBase": object, "Union": Union, "Optional": Optional}
    found |= {"Tuple": tuple, "_is_hip": False, **no, **dict.fromkeys(names, Any)}
    return found | sglang.FUNCTIONS


def made_before(layer: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    g = -layer.A_log.exp() * F.softplus(a.float() + layer.dt_bias)
    return g[None], b.float().sigmoid()[None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill(given: Any, dtype: torch.dtype) -> None:
    names = ("GDNAttnBackend.forward_extend", "GDNAttnBackend._convolve_prefill")
    methods = load("sglang", f"{BASE}/gdn_backend.py", names, given)
    kernel = load("sglang", f"{BASE}/kernels/gdn_triton.py", ["TritonGDNKernel"], given)
    kernel = kernel["TritonGDNKernel"]()
    # As SGLang's other kernels say of themselves.
    kernel.supports_track_state_snapshot = False
    torch.manual_seed(0)
    layer = SimpleNamespace(
        layer_id=0, A_log=torch.rand(HV), dt_bias=torch.randn(HV), bias=None, activation="silu",
        conv_weights=torch.randn(D, W).to(dtype), q_dim=H * K, k_dim=H * K, v_dim=HV * V,
        num_q_heads=H, num_k_heads=H, num_v_heads=HV, head_q_dim=K, head_k_dim=K, head_v_dim=V,
    )  # fmt: skip
    T = sum(LENGTHS)
    # Views of a projection, as Qwen3.5's layer passes them.
    mixed_qkv, ba = torch.randn(T, D + HV * V).to(dtype)[:, :D], torch.randn(T, 2 * HV).to(dtype)
    b, a = ba.split(HV, 1)
    states = torch.randn(6, HV, V, K)
    pools = SimpleNamespace(conv=[torch.zeros(6, D, W - 1).to(dtype)], temporal=states.clone())
    backend = SimpleNamespace(
        mis_metadata=None,
        requires_contiguous_prefill_state=True,
        _use_strided_target_verify_qkv=False,
        req_to_token_pool=SimpleNamespace(mamba2_layer_cache=lambda layer: pools),
        kernel_dispatcher=SimpleNamespace(extend_kernel=kernel, extend=kernel.extend),
        forward_metadata=SimpleNamespace(
            query_start_loc=torch.tensor([0, *LENGTHS]).cumsum(0).int(),
            mamba_cache_indices=torch.tensor([2, 5, 1]),
            conv_block_table=None,
            has_mamba_track_mask=False,
            **dict.fromkeys(("retrieve_next_token", "retrieve_next_sibling")),
            **dict.fromkeys(("retrieve_parent_token", "state_checkpoint_cu_starts")),
            **dict.fromkeys(("num_state_checkpoints", "state_checkpoint_every_n_tokens")),
        ),
    )
    backend._convolve_prefill = partial(methods[names[1]], backend)
    backend._prefill_gates = made_before
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_target_verify=lambda: False),
        extend_prefix_lens=torch.tensor([0, 3, 0]),
        extend_seq_lens_cpu=list(LENGTHS),
    )
    o = methods[names[0]](backend, layer, batch, mixed_qkv.clone(), a, b)

    slots, started = torch.tensor([2, 5, 1]), torch.tensor([False, True, False])
    x = sglang.causal_conv1d_fn(
        mixed_qkv.T,
        layer.conv_weights,
        None,
        activation="silu",
        conv_states=torch.zeros(6, D, W - 1).to(dtype),
        has_initial_state=started,
        cache_indices=slots,
        query_start_loc=torch.tensor([0, *LENGTHS]).cumsum(0),
        seq_lens_cpu=list(LENGTHS),
    ).T
    q, k, v = sglang.fused_qkv_split_gdn_prefill(x, H, H, HV, K, K, V)
    expected = states.clone()
    expected_o, _ = chunk_prefill(
        expected,
        slots,
        q=q,
        k=k,
        v=v,
        g=a[None],
        beta=b[None],
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        use_qk_l2norm_in_kernel=True,
        state_v_first=True,
        cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0),
    )
    torch.testing.assert_close(o, expected_o)
    torch.testing.assert_close(pools.temporal, expected)
    assert same_bits(pools.temporal[[0, 3, 4]], states[[0, 3, 4]])
