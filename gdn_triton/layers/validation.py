"""Validates the arguments of a layer and of its calls."""

import math

import torch
from torch import Tensor

from gdn_triton._host.arguments import (
    FLOAT_DTYPES,
    FLOATS,
    INDEX_DTYPES,
    INDICES,
    check_dtype,
    check_offsets,
    check_on_host,
    check_same_offsets,
    check_tensors,
    count_sequences,
    must,
    real_or_none,
    shape_of,
    type_of,
    value_of,
)
from gdn_triton._host.slots import LAST_SKIPPED
from gdn_triton._host.tensors import check_local, host_reads
from gdn_triton.layers.cache import GatedDeltaNetCache


def check_sizes(
    *, hidden_size: int, head_dim: int, num_heads: int, num_v_heads: int, conv_size: int
) -> None:
    """Validates the sizes of a layer."""
    sizes = {
        "hidden_size": hidden_size,
        "head_dim": head_dim,
        "num_heads": num_heads,
        "num_v_heads": num_v_heads,
        "conv_size": conv_size,
    }
    for name, size in sizes.items():
        if type(size) is not int:
            raise TypeError(must(name, "be an int", value_of(size)))
        if size < 1:
            raise ValueError(must(name, "be at least 1", str(size)))
    if num_v_heads % num_heads:
        expected = f"be a multiple of num_heads={num_heads}"
        raise ValueError(must("num_v_heads", expected, str(num_v_heads)))


def value_channels(head_dim: int, expand_v: float) -> int:
    """Returns V, the channels of a value head. Validates expand_v."""
    factor = real_or_none("expand_v", expand_v)
    if factor is None:
        raise TypeError(must("expand_v", "be a real number", value_of(expand_v)))
    V = round(head_dim * factor) if math.isfinite(factor) else 0
    if V < 1 or not math.isclose(head_dim * factor, V, rel_tol=1e-5):
        expected = f"make expand_v * head_dim, with head_dim={head_dim}, whole and positive"
        raise ValueError(must("expand_v", expected, str(expand_v)))
    return V


def check_call(
    x: Tensor,
    attention_mask: Tensor | None,
    cache: GatedDeltaNetCache | None,
    slots: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    cp_context: object | None,
    *,
    hidden_size: int,
    state_shape: tuple[int, ...],
    conv_shape: tuple[int, ...] | None,
) -> int:
    """Validates the arguments of the layer's `forward` and returns N, the number of sequences.
    state_shape, conv_shape: the shapes of a slot of the layer's cache. conv_shape is None if the
    layer has no convolution."""
    check_tensors({"hidden_states": x}, {})
    check_local("hidden_states", x)
    others = {"attention_mask": attention_mask, "slots": slots, "cu_seqlens": cu_seqlens}
    check_tensors({}, others)
    for name, given in others.items():
        if given is None:
            continue
        check_local(name, given)
        if given.device != x.device:
            expected = f"be on the device of hidden_states, {x.device}"
            raise ValueError(must(name, expected, str(given.device)))
    if x.dim() != 3 or x.shape[2] != hidden_size:
        expected = f"have shape [B, T, hidden_size={hidden_size}]"
        raise ValueError(must("hidden_states", expected, shape_of(x)))
    check_dtype("hidden_states", x, FLOAT_DTYPES, FLOATS)
    B, T, _ = x.shape
    N = B
    if cp_context is not None:
        excluded = {**others, "cache": cache, "cu_seqlens_cpu": cu_seqlens_cpu}
        for name, other in excluded.items():
            if other is not None:
                raise ValueError(must(name, "be None with cp_context", type_of(other)))
        _check_context(x, cp_context)
        return N
    if attention_mask is not None:
        if cu_seqlens is not None:
            raise ValueError(must("attention_mask", "be None with cu_seqlens", "a tensor"))
        mask = attention_mask
        if mask.dtype.is_complex:
            raise ValueError(must("attention_mask", "be bool, integer or float", str(mask.dtype)))
        if mask.dim() != 2 or mask.shape[0] != B or mask.shape[1] < T:
            expected = f"have shape [B={B}, S], S at least T={T}"
            raise ValueError(must("attention_mask", expected, shape_of(mask)))
        if mask.is_floating_point() and host_reads(mask):
            read = mask[:, mask.shape[1] - T :]
            other = read[(read != 0) & (read != 1)]
            if other.numel() > 0:
                expected = "hold 1 for a token and 0 for none, where it is float"
                raise ValueError(must("attention_mask", expected, str(other[0].item())))
    if cu_seqlens is not None:
        check_dtype("cu_seqlens", cu_seqlens, INDEX_DTYPES, INDICES)
        N = count_sequences(cu_seqlens)
        if B != 1:
            expected = "have batch size B=1 with cu_seqlens"
            raise ValueError(must("hidden_states", expected, f"B={B}"))
        if host_reads(cu_seqlens):
            check_offsets("cu_seqlens", cu_seqlens.tolist(), T)
    if cu_seqlens_cpu is not None:
        _check_host_offsets(cu_seqlens_cpu, cu_seqlens, T)
    _check_cache(x, cache, slots, N, state_shape=state_shape, conv_shape=conv_shape)
    return N


def _check_context(x: Tensor, cp_context: object) -> None:
    """Validates a call with cp_context. The exchange checks the number of tokens."""
    if not isinstance(getattr(cp_context, "cu_seqlens", None), Tensor):
        expected = (
            "be a gdn_triton.distributed.ContextParallel, or have the attributes of "
            "fla.ops.cp.FLACPContext"
        )
        raise TypeError(must("cp_context", expected, type_of(cp_context)))
    if x.shape[0] != 1:
        expected = "have batch size B=1 with cp_context"
        raise ValueError(must("hidden_states", expected, f"B={x.shape[0]}"))


def _check_host_offsets(given: Tensor, cu_seqlens: Tensor | None, T: int) -> None:
    name = "cu_seqlens_cpu"
    check_tensors({}, {name: given})
    check_local(name, given)
    check_on_host(given, cu_seqlens)
    check_dtype(name, given, INDEX_DTYPES, INDICES)
    if host_reads(given):
        check_offsets(name, given.tolist(), T)
        if cu_seqlens is not None and host_reads(cu_seqlens):
            check_same_offsets(cu_seqlens.tolist(), given.tolist())


def _check_cache(
    x: Tensor,
    cache: GatedDeltaNetCache | None,
    slots: Tensor | None,
    N: int,
    *,
    state_shape: tuple[int, ...],
    conv_shape: tuple[int, ...] | None,
) -> None:
    if cache is None:
        if slots is not None:
            raise ValueError(must("slots", "be None without a cache", "a tensor"))
        return
    if not isinstance(cache, GatedDeltaNetCache):
        raise TypeError(must("cache", "be a GatedDeltaNetCache or None", type_of(cache)))
    conv_state = cache.conv_state
    found = [
        list(cache.recurrent_state.shape[1:]),
        None if conv_state is None else list(conv_state.shape[1:]),
    ]
    wanted = [list(state_shape), None if conv_shape is None else list(conv_shape)]
    if found != wanted:
        expected = f"have states of this layer's shapes, {wanted[0]} and {wanted[1]}"
        raise ValueError(must("cache", expected, f"{found[0]} and {found[1]}"))
    for pool in (cache.recurrent_state, conv_state):
        if pool is None:
            continue
        if pool.device != x.device:
            expected = f"be on the device of hidden_states, {x.device}"
            raise ValueError(must("cache", expected, str(pool.device)))
        if torch.is_grad_enabled() and pool.requires_grad:
            raise NotImplementedError(
                "cache is updated in place and has no gradient, and one of its states requires "
                "one: detach it"
            )
    first = LAST_SKIPPED[cache.skip] + 1
    if slots is None:
        if cache.slots - first < N:
            expected = f"have room for N={N} sequences"
            raise ValueError(must("cache", expected, f"{cache.slots - first} slots"))
        return
    if slots.shape != (N,):
        expected = f"have shape [N={N}], a slot a sequence"
        raise ValueError(must("slots", expected, shape_of(slots)))
    check_dtype("slots", slots, INDEX_DTYPES, INDICES)
    if host_reads(slots):
        named = [slot for slot in slots.tolist() if slot >= first]
        if named and max(named) >= cache.slots:
            expected = f"be less than the {cache.slots} slots of the cache"
            raise ValueError(must("slots", expected, str(max(named))))
        if len(set(named)) < len(named):
            slot = next(slot for slot in named if named.count(slot) > 1)
            raise ValueError(must("slots", "name no slot twice", f"{slot} twice"))
