"""The preparation between the causal convolution and the gated delta rule, in plain torch: the
specification of `gdn_triton.fused_post_conv_prep`, and its CPU backend.

The function is differentiable by autograd. `gdn_triton.fused_post_conv_prep` checks the arguments.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from gdn_triton.reference.activations import beta_sigmoid, gate, l2norm

__all__ = ["fused_post_conv_prep"]


def fused_post_conv_prep(
    conv_output: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    num_k_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    apply_l2norm: bool = True,
    output_g_exp: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns q, k [L, H, K], v [L, HV, V], g, beta [L, HV] from conv_output [L, 2 H K + HV V].

    q, k: the first and the second H K columns, with `l2norm` of each head if asked for; v: the
    other columns. g: `gate(a, A_log, dt_bias)`, natural log of the decay, or the decay itself with
    `output_g_exp`. beta: `beta_sigmoid(b)`. q, k, v have conv_output's dtype; g and beta are
    float32, or float64 if any argument is.
    """
    inputs = (conv_output, a, b, A_log, dt_bias)
    wide = torch.float64 if any(x.dtype == torch.float64 for x in inputs) else torch.float32
    key_columns = num_k_heads * head_k_dim
    value_columns = conv_output.shape[1] - 2 * key_columns
    q, k, v = conv_output.split([key_columns, key_columns, value_columns], 1)
    q, k = (rearrange(x, "L (H K) -> L H K", K=head_k_dim) for x in (q, k))
    v = rearrange(v, "L (HV V) -> L HV V", V=head_v_dim)
    if apply_l2norm:
        q, k = l2norm(q), l2norm(k)
    g = gate(a.to(wide), A_log, dt_bias)
    g = g.exp() if output_g_exp else g
    beta = beta_sigmoid(b.to(wide))
    # Return new contiguous tensors, whatever the strides of the arguments.
    return _fresh(q), _fresh(k), _fresh(v), _fresh(g), _fresh(beta)


def _fresh(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)
