"""Converts the linear-attention weights of Qwen3-Next and Qwen3.5 to the names of `GatedDeltaNet`.

Both models compute the same layer as this package, but store the projections differently:

    Qwen3-Next  in_proj_qkvz  [H (2 K + 2 G V), hidden]   for each key head its q, k, then v and z
                in_proj_ba    [H 2 G, hidden]             of its G = HV / H value heads; b before a
    Qwen3.5     in_proj_qkv   [2 H K + HV V, hidden]      all of q, all of k, all of v
                in_proj_z, in_proj_b, in_proj_a
    both        conv1d [2 H K + HV V, 1, conv_size], norm [V], out_proj, A_log, dt_bias
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from einops import rearrange
from torch import Tensor

__all__ = ["weights_from_qwen"]

_SHARED = ("A_log", "dt_bias", "conv1d.weight", "norm.weight", "out_proj.weight")
_FORMATS = {
    "Qwen3-Next": (*_SHARED, "in_proj_qkvz.weight", "in_proj_ba.weight"),
    "Qwen3.5": (
        *_SHARED,
        "in_proj_qkv.weight",
        "in_proj_z.weight",
        "in_proj_b.weight",
        "in_proj_a.weight",
    ),
}


def weights_from_qwen(
    state_dict: Mapping[str, Tensor], num_heads: int, prefix: str = ""
) -> dict[str, Tensor]:
    """Returns a state dict for `gdn_triton.layers.GatedDeltaNet` from one of Qwen3-Next or Qwen3.5.

    `gdn_triton.layers.GatedDeltaNet.from_qwen` also makes the layer.

    Args:
        state_dict: the tensors of one layer's linear attention, among any others.
        num_heads: H, the number of key heads (`linear_num_key_heads` of the configuration), which
            cannot be derived from the shapes. A wrong number that divides the sizes gives wrong
            results.
        prefix: the prefix of these tensors' names, such as "model.layers.0.linear_attn.". Other
            names are ignored.

    Returns:
        New tensors, which share no memory with the given ones or with each other, in the dtypes and
        on the devices of the given ones.

    Warns:
        UserWarning: K and V differ with this num_heads, but would be equal with another number of
            heads. In the published models K and V are equal.

    Raises:
        ValueError: the tensors with the prefix belong to neither model, or their shapes do not fit
            each other.
    """
    given = {
        name.removeprefix(prefix): x for name, x in state_dict.items() if name.startswith(prefix)
    }
    fits = [model for model, names in _FORMATS.items() if set(names) == set(given)]
    if not fits:
        expected = "; ".join(f"{model}: {', '.join(names)}" for model, names in _FORMATS.items())
        found = ", ".join(sorted(given)[:12]) or "none"
        raise ValueError(
            f"state_dict must have the linear-attention weights of one layer under the prefix "
            f"{prefix!r} ({expected}), got {found}"
        )
    V = given["norm.weight"].shape[0]
    HV = given["A_log"].shape[0]
    values = HV * V
    keys, odd = divmod(given["conv1d.weight"].shape[0] - values, 2)
    if odd or keys < 1 or num_heads < 1 or keys % num_heads or HV % num_heads:
        raise ValueError(
            f"num_heads must divide the HV={HV} value heads of A_log and the channels of each of q "
            f"and k, {(given['conv1d.weight'].shape[0] - values) / 2:g} in conv1d.weight, got "
            f"{num_heads}"
        )
    hidden = given["out_proj.weight"].shape[0]
    shapes = {
        "dt_bias": (HV,),
        "out_proj.weight": (hidden, values),
        "in_proj_qkvz.weight": (2 * keys + 2 * values, hidden),
        "in_proj_ba.weight": (2 * HV, hidden),
        "in_proj_qkv.weight": (2 * keys + values, hidden),
        "in_proj_z.weight": (values, hidden),
        "in_proj_b.weight": (HV, hidden),
        "in_proj_a.weight": (HV, hidden),
    }
    for name, shape in shapes.items():
        if name in given and given[name].shape != shape:
            raise ValueError(
                f"{prefix}{name} must have shape {list(shape)}, got {list(given[name].shape)}"
            )

    other, rest = divmod(keys, V)
    if not rest and other != num_heads and HV % other == 0:
        warnings.warn(
            f"num_heads={num_heads} makes keys of K={keys // num_heads} channels next to values of "
            f"V={V}; num_heads={other} makes K equal to V, as in the published models. The right "
            "one is linear_num_key_heads of the configuration",
            stacklevel=2,
        )
    if fits == ["Qwen3-Next"]:
        K, G = keys // num_heads, HV // num_heads
        heads = rearrange(given["in_proj_qkvz.weight"], "(H rows) D -> H rows D", H=num_heads)
        parts = heads.split([K, K, G * V, G * V], 1)
        q, k, v, z = (rearrange(x, "H rows D -> (H rows) D") for x in parts)
        b, a = rearrange(given["in_proj_ba.weight"], "(H two G) D -> two (H G) D", two=2, G=G)
    else:
        q, k, v = given["in_proj_qkv.weight"].split([keys, keys, values])
        z, b, a = (given[f"in_proj_{name}.weight"] for name in "zba")
    q_conv, k_conv, v_conv = torch.split(given["conv1d.weight"], [keys, keys, values])
    weights = {
        "A_log": given["A_log"],
        "dt_bias": given["dt_bias"],
        "q_proj.weight": q,
        "k_proj.weight": k,
        "v_proj.weight": v,
        "a_proj.weight": a,
        "b_proj.weight": b,
        "q_conv1d.weight": q_conv,
        "k_conv1d.weight": k_conv,
        "v_conv1d.weight": v_conv,
        "g_proj.weight": z,
        "o_norm.weight": given["norm.weight"],
        "o_proj.weight": given["out_proj.weight"],
    }
    # Copy the weights: training a layer on views would change the given model.
    return {name: x.clone(memory_format=torch.contiguous_format) for name, x in weights.items()}
