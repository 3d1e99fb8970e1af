"""The context of a rank: which tokens and sequences the rank holds, and the halo of a
convolution."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from gdn_triton._host.arguments import (
    INDEX_DTYPES,
    INDICES,
    check_dtype,
    check_offsets,
    check_on_host,
    check_same_offsets,
    check_tensors,
    count_sequences,
    must,
    shape_of,
    value_of,
)
from gdn_triton._host.derivatives import IN_NONE, found_once
from gdn_triton._ranks.exchange import gather_slots
from gdn_triton._ranks.layout import (
    Interval,
    ShardLayout,
    any_crosses,
    cut_out,
    places_of_slots,
    slots_of_rank,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LAYOUTS = ("contiguous", "zigzag")


@dataclass(frozen=True, eq=False)
class ContextParallel:
    """The part of a packed batch that this rank holds. `build_cp_context` makes it.

    All tokens form one row, which is cut into slots in the order of the tokens. A rank holds one
    slot ("contiguous") or two ("zigzag": rank r of W holds slots r and 2 W - 1 - r, one after the
    other). A local sequence is the part of a sequence that lies on this rank. The attributes up to
    `layout` have the names and meanings of those of FLA's `FLACPContext`.

    Attributes:
        group: the process group; None where the caller exchanges the maps.
        cu_seqlens: [N + 1], int32, on the device of the builder's argument: offsets of the local
            sequences.
        cu_seqlens_cpu: the same on the CPU.
        conv1d_kernel_size: the default kernel size of `conv_halo`, or None.
        layout: "contiguous" or "zigzag".
        sequences: for each local sequence, the number of the whole sequence. It indexes a tensor
            with one entry per whole sequence, such as the initial states.
        lengths: the tokens of every slot.
        rank, world_size: of this process in the group.
        intervals: the slots that this rank holds.
        crosses: whether any sequence, on any rank, lies in more than one slot.
    """

    group: "ProcessGroup | None"
    cu_seqlens: Tensor
    cu_seqlens_cpu: Tensor
    conv1d_kernel_size: int | None
    layout: str
    sequences: tuple[int, ...]
    lengths: tuple[int, ...]
    rank: int
    world_size: int
    intervals: tuple[Interval, ...]
    crosses: bool

    @property
    def num_seqs(self) -> int:
        """The number of local sequences."""
        return len(self.sequences)

    @property
    def is_cp_enabled(self) -> bool:
        return True

    @property
    def is_first_rank(self) -> bool:
        """Whether no earlier rank holds tokens of the first local sequence. Contiguous layout
        only."""
        return not self._only.before

    @property
    def is_last_rank(self) -> bool:
        """Whether no later rank holds tokens of the last local sequence. Contiguous layout only."""
        return not self._only.after

    @property
    def pre_num_ranks(self) -> int:
        """How many ranks before this one the first local sequence begins. Contiguous layout
        only."""
        return self.rank - min(self._only.before, default=self.rank)

    @property
    def post_num_ranks(self) -> int:
        """How many ranks after this one the last local sequence ends. Contiguous layout only."""
        return max(self._only.after, default=self.rank) - self.rank

    @property
    def pre_num_conv_tokens(self) -> int:
        """The number of tokens of the first local sequence on earlier ranks. Contiguous layout
        only."""
        return self._only.history

    @property
    def _only(self) -> Interval:
        if len(self.intervals) != 1:
            raise AttributeError("a rank holds two slots in the zigzag layout: see intervals")
        return self.intervals[0]

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The first token and the end of each slot that this rank holds."""
        ends = [0, *accumulate(self.lengths)]
        return tuple((ends[i.slot], ends[i.slot + 1]) for i in self.intervals)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Returns this rank's tokens of a tensor that has all tokens in dimension `dim`: a view for
        one slot, a copy for two. Raises TypeError if x is no tensor, and ValueError if that
        dimension does not exist or has another size."""
        check_tensors({"x": x}, {})
        total = sum(self.lengths)
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != total:
            expected = f"have all {total} tokens in dimension {dim}"
            raise ValueError(must("x", expected, shape_of(x)))
        parts = [x.narrow(dim, start, end - start) for start, end in self.spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    @cached_property
    def _shard_layout(self) -> ShardLayout:
        return ShardLayout(
            group=self.group,
            cu_seqlens=self.cu_seqlens,
            offsets=tuple(self.cu_seqlens_cpu.tolist()),
            intervals=self.intervals,
            lengths=self.lengths,
            places=places_of_slots(self.world_size, self.layout == "zigzag"),
            crosses=self.crosses,
        )


def build_cp_context(
    cu_seqlens: Tensor,
    group: "ProcessGroup | None",
    conv1d_kernel_size: int | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    lengths: Sequence[int] | None = None,
    layout: str = "contiguous",
    place: tuple[int, int] | None = None,
) -> ContextParallel:
    """Computes the part of the packed sequences `cu_seqlens` that this rank of `group` holds.

    Every rank calls it with the same arguments, and ranks do not communicate here. The host reads
    the offsets; without `cu_seqlens_cpu` the host waits for the device.

    Args:
        cu_seqlens: [N + 1], int32 or int64: offsets of all sequences, over all ranks. The offsets
            start at 0 and do not decrease. One sequence of T tokens is [0, T].
        group: the process group, its ranks in the order of their tokens.
        conv1d_kernel_size: the default kernel size of `conv_halo`.
        cu_seqlens_cpu: the same offsets on the CPU.
        lengths: the number of tokens of each slot, which may be 0; a rank has one slot, or two with
            "zigzag". The sum is at least cu_seqlens[-1]; tokens after cu_seqlens[-1] belong to no
            sequence. None: cu_seqlens[-1] tokens in parts that differ by at most one token, the
            longer ones first.
        layout: "contiguous", or "zigzag" for two slots a rank, the r-th from either end.
        place: with a group of None, the rank and the number of ranks, for a caller that itself
            exchanges the results of `forward_prepare` and `backward_prepare`. Only the four stages
            take such a context.

    A sequence without tokens belongs to the rank of the last slot that begins at or before it.

    Raises:
        TypeError, ValueError: an argument that does not fit; also if this process is no rank of
            `group`.
    """
    check_tensors({"cu_seqlens": cu_seqlens}, {"cu_seqlens_cpu": cu_seqlens_cpu})
    count_sequences(cu_seqlens)
    for name, x in (("cu_seqlens", cu_seqlens), ("cu_seqlens_cpu", cu_seqlens_cpu)):
        if x is not None:
            check_dtype(name, x, INDEX_DTYPES, INDICES)
    if layout not in _LAYOUTS:
        raise ValueError(f"layout must be one of {_LAYOUTS}, got {layout!r}")
    if lengths is not None and not isinstance(lengths, Sequence):
        expected = "be a sequence of ints, one for each slot, or None"
        raise TypeError(must("lengths", expected, value_of(lengths)))
    if conv1d_kernel_size is not None and (
        type(conv1d_kernel_size) is not int or conv1d_kernel_size < 1
    ):
        given = value_of(conv1d_kernel_size)
        raise ValueError(must("conv1d_kernel_size", "be an int >= 1 or None", given))
    rank, world_size = _place(group, "group") if place is None else _own_place(group, place)
    if cu_seqlens_cpu is None:
        cu_seqlens_cpu = cu_seqlens.cpu()
    else:
        check_on_host(cu_seqlens_cpu, cu_seqlens)
    offsets: list[int] = cu_seqlens_cpu.tolist()
    if cu_seqlens.device.type == "cpu":
        check_same_offsets(cu_seqlens.tolist(), offsets)
    slots = world_size * (2 if layout == "zigzag" else 1)
    if lengths is None:
        least, longer = divmod(offsets[-1], slots)
        lengths = [least + (slot < longer) for slot in range(slots)]
    if len(lengths) != slots or any(type(n) is not int or n < 0 for n in lengths):
        raise ValueError(
            f"lengths must be {slots} ints >= 0, one for each slot of {world_size} ranks "
            f"({layout}), got {list(lengths)}"
        )
    check_offsets("cu_seqlens", offsets, sum(lengths))

    parts = [
        cut_out(offsets, lengths, slot)
        for slot in slots_of_rank(rank, world_size, layout == "zigzag")
    ]
    local: list[int] = [0]
    sequences: list[int] = []
    intervals: list[Interval] = []
    for part in parts:
        first = len(sequences)
        interval = part.interval
        intervals.append(interval._replace(first=first, last=first + interval.last))
        sequences += part.sequences
        for n in part.lengths:
            local.append(local[-1] + n)
    cu_local = torch.tensor(local, dtype=torch.int32, device="cpu")
    return ContextParallel(
        group=group,
        cu_seqlens=cu_local.to(cu_seqlens.device),
        cu_seqlens_cpu=cu_local,
        conv1d_kernel_size=conv1d_kernel_size,
        layout=layout,
        sequences=tuple(sequences),
        lengths=tuple(lengths),
        rank=rank,
        world_size=world_size,
        intervals=tuple(intervals),
        crosses=any_crosses(offsets, lengths),
    )


def _own_place(group: object, place: object) -> tuple[int, int]:
    if group is not None:
        raise ValueError("place must be None with a group, which has the rank")
    if (
        not isinstance(place, tuple)
        or len(place) != 2
        or any(type(n) is not int for n in place)
        or not 0 <= place[0] < place[1]
    ):
        raise ValueError(f"place must be (rank, number of ranks), 0 <= rank, got {place!r}")
    return place


def _place(group: Any, name: str) -> tuple[int, int]:
    """Returns (rank, world size) of this process in a group."""
    if group is None:
        raise ValueError(f"{name} must be a torch.distributed.ProcessGroup, got None")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{name} must be a torch.distributed.ProcessGroup, got {type(group).__name__}"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"{name} must be a group that this process is a rank of, got another")
    return rank, dist.get_world_size(group)


# ------------------------------------------------------------------------- contexts of other makers


def shard_layout(cp_context: object) -> ShardLayout:
    """Converts a context to the layout that the operator reads. The context is ours, or any object
    with the attributes of `fla.ops.cp.FLACPContext` (0.6.0). Raises TypeError or ValueError if it
    does not fit."""
    if isinstance(cp_context, ContextParallel):
        return cp_context._shard_layout
    group, cu_seqlens = _attribute(cp_context, "group"), _attribute(cp_context, "cu_seqlens")
    rank, world_size = _place(group, "cp_context.group")
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        given = list(cu_seqlens.shape) if isinstance(cu_seqlens, Tensor) else cu_seqlens
        raise ValueError(f"cp_context.cu_seqlens must be a tensor [N + 1], N >= 0, got {given}")
    for name in ("pre_num_ranks_dev", "post_num_ranks_dev"):
        if getattr(cp_context, name, None) is not None:
            raise NotImplementedError(
                f"cp_context.{name} must be None: numbers of ranks that change on the device "
                "between replays of a CUDA graph are not served"
            )
    on_host = getattr(cp_context, "cu_seqlens_cpu", None)
    offsets = tuple((cu_seqlens if on_host is None else on_host).tolist())
    kind = getattr(cp_context, "layout", "contiguous")
    if kind not in _LAYOUTS:
        raise ValueError(f"cp_context.layout must be one of {_LAYOUTS}, got {kind!r}")
    zigzag = kind == "zigzag"
    # In both layouts of FLA every slot has as many tokens as the others.
    if zigzag:
        front = _number(cp_context, "front_num_seqs", 1, len(offsets) - 2)
        edges = [(0, front - 1), (front, len(offsets) - 2)]
        length = _number(cp_context, "part_len", 1, offsets[-1])
        suffix = "_by_part"
    else:
        edges, length, suffix = [(0, len(offsets) - 2)], offsets[-1], ""
    slots = slots_of_rank(rank, world_size, zigzag)
    n_slots = world_size * len(slots)
    intervals = []
    for part, (slot, (first, last)) in enumerate(zip(slots, edges, strict=True)):
        at = part if zigzag else None
        before = _number(cp_context, f"pre_num_ranks{suffix}", 0, slot, at)
        after = _number(cp_context, f"post_num_ranks{suffix}", 0, n_slots - 1 - slot, at)
        history = 0
        if getattr(cp_context, f"pre_num_conv_tokens{suffix}", None) is not None:
            history = _number(cp_context, f"pre_num_conv_tokens{suffix}", 0, slot * length, at)
        intervals.append(
            Interval(
                slot=slot,
                first=first,
                last=last,
                before=tuple(range(slot - before, slot)),
                after=tuple(range(slot + 1, slot + 1 + after)),
                history=history,
            )
        )
    return ShardLayout(
        group=group,
        cu_seqlens=cu_seqlens,
        offsets=offsets,
        intervals=tuple(intervals),
        lengths=(length,) * n_slots,
        places=places_of_slots(world_size, zigzag),
        # This rank does not know the tokens of the other ranks, and all ranks must give the same
        # answer.
        crosses=n_slots > 1,
    )


def _attribute(cp_context: object, name: str) -> Any:
    if not hasattr(cp_context, name):
        raise TypeError(
            "cp_context must be a gdn_triton.distributed.ContextParallel, or have the attributes "
            f"of fla.ops.cp.FLACPContext: {type(cp_context).__name__} has no {name}"
        )
    return getattr(cp_context, name)


def _number(cp_context: object, name: str, least: int, most: int, at: int | None = None) -> int:
    """Returns an attribute, or entry `at` of it, after checking that it is an int from least to
    most."""
    value = _attribute(cp_context, name)
    if at is not None and isinstance(value, tuple | list) and len(value) == 2:
        value = value[at]
    if type(value) is not int or not least <= value <= most:
        place = name if at is None else f"{name}[{at}]"
        raise ValueError(f"cp_context.{place} must be an int from {least} to {most}, got {value!r}")
    return value


# --------------------------------------------------------------------------- the convolution's halo


def conv_halo(x: Tensor, cp_context: object, kernel_size: int | None = None) -> Tensor:
    """Returns the tokens before this rank's own that a causal convolution of `kernel_size` needs.

    These are, for every local sequence, the kernel_size - 1 tokens of the same sequence before its
    first local token, or 0 where the sequence has no such token. Transposed to [N, D, kernel_size -
    1], they are the initial state of a convolution over packed sequences. The tokens come from
    several ranks if shards are shorter than the halo. The function is differentiable once. Every
    rank has to call it, and every rank has to run its backward if one rank does. The forward
    all-gathers the last kernel_size - 1 tokens of each slot, and the backward all-gathers the
    gradients of the halos.

    Args:
        x: [1, T, D], this rank's tokens; any dtype that the group's backend gathers.
        cp_context: as for `chunk_gated_delta_rule`.
        kernel_size: at least 1. None: that of the context.

    Returns:
        [N, kernel_size - 1, D], the dtype of x.

    Raises:
        TypeError, ValueError: an argument that does not fit.
    """
    layout = shard_layout(cp_context)
    if layout.crosses:
        _place(layout.group, "cp_context.group")
    if kernel_size is None:
        kernel_size = getattr(cp_context, "conv1d_kernel_size", None)
    if type(kernel_size) is not int or kernel_size < 1:
        raise ValueError(
            "kernel_size must be an int >= 1, here or as cp_context.conv1d_kernel_size, got "
            f"{kernel_size!r}"
        )
    tokens = sum(layout.lengths[interval.slot] for interval in layout.intervals)
    check_tensors({"x": x}, {})
    if x.dim() != 3 or x.shape[0] != 1 or x.shape[1] != tokens:
        raise ValueError(
            f"x must have shape [1, T, D] with the T={tokens} tokens of this rank's part of "
            f"cp_context, got shape {list(x.shape)}"
        )
    return _ConvHalo.apply(x, layout, kernel_size - 1)  # type: ignore[no-any-return, no-untyped-call]


def _halo_sources(layout: ShardLayout, slot: int, width: int) -> list[tuple[int, int, int]]:
    """Returns, for each of the `width` tokens before a slot that exists: (its place in the halo,
    the slot that holds it, its place among that slot's last `width` tokens)."""
    bounds = [0, *accumulate(layout.lengths)]
    sources = []
    for place in range(width):
        token = bounds[slot] - width + place
        if token >= 0:
            # Several slots begin at this token if some are empty; only the last of them has tokens.
            holder = bisect_right(bounds, token) - 1
            sources.append((place, holder, token - bounds[holder + 1] + width))
    return sources


class _ConvHalo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: ShardLayout, width: int) -> Tensor:
        ctx.layout, ctx.width, ctx.shape = layout, width, x.shape
        halo = x.new_zeros(len(layout.offsets) - 1, width, x.shape[2])
        if width == 0 or not layout.crosses:
            return halo
        tails = x.new_zeros(len(layout.intervals), width, x.shape[2])
        end = 0
        for tail, interval in zip(tails, layout.intervals, strict=True):
            start, end = end, end + layout.lengths[interval.slot]
            n = min(width, end - start)
            tail[width - n :] = x[0, end - n : end]
        everyone = gather_slots(layout, tails)
        for interval in layout.intervals:
            for place, slot, row in _halo_sources(layout, interval.slot, width):
                if place >= width - interval.history:
                    halo[interval.first, place] = everyone[layout.places[slot], row]
        return halo

    @staticmethod
    def backward(ctx: Any, dhalo: Tensor) -> tuple[Tensor | None, None, None]:
        find = partial(_of_tokens, layout=ctx.layout, width=ctx.width, shape=ctx.shape)
        (dx,) = found_once(
            find,
            dhalo,
            operator="gdn_triton.distributed.conv_halo",
            backends=IN_NONE,
        )
        return dx, None, None


def _of_tokens(
    dhalo: Tensor, *, layout: ShardLayout, width: int, shape: torch.Size
) -> tuple[Tensor]:
    """Returns the gradient of this rank's tokens, [1, T, D], from the gradients of all ranks'
    halos."""
    dx = dhalo.new_zeros(shape)
    if width == 0 or not layout.crosses:
        return (dx,)
    heads = dhalo.new_zeros(len(layout.intervals), width, dhalo.shape[2])
    for head, interval in zip(heads, layout.intervals, strict=True):
        n = min(width, interval.history)
        if n > 0:
            head[width - n :] = dhalo[interval.first, width - n :]
    everyone = gather_slots(layout, heads)
    end_of = {}
    end = 0
    for interval in layout.intervals:
        end += layout.lengths[interval.slot]
        end_of[interval.slot] = end
    # Add in the order of the slots that used the tokens: the sum then has a fixed order.
    for slot in range(len(layout.lengths)):
        for place, holder, row in _halo_sources(layout, slot, width):
            if holder in end_of:
                dx[0, end_of[holder] - width + row] += everyone[layout.places[slot], place]
    return (dx,)
