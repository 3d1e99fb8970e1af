"""The gated delta rule of torch's proposed module `torch.nn.GatedDeltaNet` on this package's op.

The proposal is the open pull request 197487 of pytorch/pytorch; no release of torch has it. Its
module calls the function `_gated_delta_rule_impl` of `torch.nn.attention.gated_delta`, a loop over
the tokens. `gated_delta_rule` of this module replaces that function:

    import torch.nn.attention.gated_delta as proposed
    from gdn_triton.integrations.torch_nn import gated_delta_rule

    proposed._gated_delta_rule_impl = gated_delta_rule
"""

import torch
from torch import Tensor

from gdn_triton._host.arguments import check_dtypes, check_flags, check_tensors
from gdn_triton.chunk.api import chunk_gated_delta_rule

# The smallest length by which the proposal divides q and k.
EPS = 1e-6


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
) -> Tensor:
    """Computes the rule from a state of zeros, with gradients, like the function of
    `torch.nn.attention.gated_delta`.

    Args:
        query, key: [B, T, H, K]. value: [B, T, HV, V], HV a multiple of H; the proposal has HV = H.
            Float16, bfloat16, float32 or float64.
        decay: [B, T, HV], the natural logarithm of the decay. beta: [B, T, HV].
        scale: factor of the output. None: K ** -0.5.
        use_qk_l2norm: divide each q and k by its length, at least 1e-6, in float32, and round the
            quotient to the dtype of the input. (The flag of `gdn_triton.chunk_gated_delta_rule`
            adds 1e-6 to the square of the length instead.)

    Returns:
        o [B, T, HV, V], the dtype of query. The state is float32; in the proposal the state has the
        dtype of query.

    Raises:
        TypeError, ValueError, RuntimeError: see `gdn_triton.chunk_gated_delta_rule`, which names
            the arguments q, k, v, g and beta.
    """
    check_tensors({"query": query, "key": key}, {})
    check_dtypes({"query": query, "key": key}, ())
    check_flags(use_qk_l2norm=use_qk_l2norm)
    if use_qk_l2norm:
        query, key = _unit(query), _unit(key)
    o, _ = chunk_gated_delta_rule(query, key, value, g=decay, beta=beta, scale=scale)
    return o


def _unit(x: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    return (x / length.clamp_min(EPS)).to(x.dtype)
