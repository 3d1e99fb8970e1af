"""The cache of a layer, which stores the states of sequences between calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from gdn_triton._host.arguments import (
    check_devices,
    check_dtypes,
    check_float_dtype,
    check_rank,
    check_tensors,
    must,
    shape_of,
    type_of,
    value_of,
)
from gdn_triton._host.memory import check_own_memory
from gdn_triton._host.slots import LAST_SKIPPED, check_once, check_skip, final_writes
from gdn_triton._host.tensors import host_reads, writing
from gdn_triton.recurrent.window import StepWindow, check_kind, fold_window, make_window

__all__ = ["GatedDeltaNetCache", "empty_cache"]


class SlotPositions(NamedTuple):
    """The positions of a call's sequences, and the rows of these sequences in the cache.

    rows: [N], int32 or int64, indices into `positions` of the cache. None: `now` is a view of
    `positions`. now: [N], int32, the positions.
    """

    rows: Tensor | None
    now: Tensor


@dataclass(frozen=True, eq=False)
class GatedDeltaNetCache:
    """The states of one layer's sequences, in numbered slots; calls update them in place.

    `gdn_triton.layers.GatedDeltaNet.make_cache` makes a cache. A slot of zeros is a new sequence.
    The last row of each pool is not a slot. A call writes the states of skipped sequences to this
    row, because no shape may depend on the number of skipped sequences.

    Args:
        conv_state: [slots + 1, 2 * H * K + HV * V, conv_size - 1]: the last rows of q, k and v
            before the convolution, the latest last; None without a convolution.
        recurrent_state: [slots + 1, HV, V, K].
        skip: which slots are padding, as for `gdn_triton.recurrent_step`: "negative", or
            "non_positive" if no sequence uses slot 0.
        window: the records of the last tokens of each of the slots + 1 rows, from
            `gdn_triton.make_window`. recurrent_state and the records together then hold a state.
            Call `fold` before code other than the layer and this class reads recurrent_state, and
            `restart` after such code has written recurrent_state.
        positions: [slots + 1], int32, with a window: the number of tokens of each slot that were
            decoded with the window since `reset`, `restart` or `write`. The layer advances the
            positions.
        counters: [slots + 1, H], int32, zeros, without a window: as for `gdn_triton.layer_step`.
            None: a step of several tokens is three launches.
    """

    conv_state: Tensor | None
    recurrent_state: Tensor
    skip: str = "negative"
    window: StepWindow | None = None
    positions: Tensor | None = None
    counters: Tensor | None = None
    # A 1 on the device, which `index_add_` adds. Making this tensor in each step would take a
    # launch.
    _one: Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_skip(self.skip)
        pools = {"recurrent_state": self.recurrent_state, "conv_state": self.conv_state}
        check_tensors({"recurrent_state": self.recurrent_state}, pools)
        check_dtypes(pools, ())
        check_devices("recurrent_state", self.recurrent_state.device, pools)
        conv_state, rows = self.conv_state, self.recurrent_state.shape[:1]
        if conv_state is not None and conv_state.shape[:1] != rows:
            expected = "have as many rows as recurrent_state, [slots + 1, ...]"
            given = f"{shape_of(conv_state)} and {shape_of(self.recurrent_state)}"
            raise ValueError(must("conv_state", expected, given))
        for name, pool in pools.items():
            if pool is not None and 0 not in pool.shape:
                check_own_memory(name, (pool.shape, pool.stride(), pool.dtype))
        self._check_window()
        if self.positions is not None:
            object.__setattr__(self, "_one", self.positions.new_ones(()))

    @property
    def slots(self) -> int:
        """The number of slots, including slot 0."""
        return self.recurrent_state.shape[0] - 1

    @torch.no_grad()
    def reset(self, slots: Tensor | None = None) -> None:
        """Sets the states in these slots, int32 or int64 [n], to zeros; None: all slots. Padding
        slots are skipped, and other slots do not change.

        Raises:
            TypeError, ValueError: slots that do not fit; only CPU tensors have their contents
                checked. No state has changed.
        """
        if slots is not None:
            self._check_slots(slots)
        pools = (self.conv_state, self.recurrent_state)
        self._fill([pool for pool in pools if pool is not None], slots)
        self.restart(slots)

    def is_live(self, slots: Tensor) -> Tensor:
        """Returns [n], bool: whether a slot is not padding."""
        return slots > LAST_SKIPPED[self.skip]

    def rows(self, slots: Tensor) -> Tensor:
        """Returns [n], int64: the row of each slot in the pools, and the last row for padding."""
        return torch.where(self.is_live(slots), slots, self.slots).long()

    def read(self, name: Literal["conv_state", "recurrent_state"], slots: Tensor) -> Tensor:
        """Returns copies of the states in these slots, int32 or int64 [n], with all records folded
        in: [n, ...], zeros for padding.

        Raises:
            TypeError, ValueError: slots that do not fit, as for `reset`, or a name of no pool.
        """
        self._check_slots(slots)
        if name == "recurrent_state":
            self.fold(slots)
        pool = self._pool(name)
        live = self.is_live(slots).view(-1, *(1,) * (pool.dim() - 1))
        return torch.where(live, pool[self.rows(slots)], 0)

    def write(
        self, name: Literal["conv_state", "recurrent_state"], slots: Tensor, states: Tensor
    ) -> None:
        """Writes states [n, ...], float, to these slots, int32 or int64 [n], all different, and
        drops the records of a window. The write has no gradient.

        Raises:
            TypeError, ValueError: an argument that does not fit; only CPU tensors have their
                contents checked. No state has changed.
        """
        pool = self._pool(name)
        self._check_slots(slots)
        check_tensors({"states": states}, {})
        check_devices("the cache", pool.device, {"states": states})
        check_dtypes({"states": states}, ())
        expected = (slots.shape[0], *pool.shape[1:])
        if states.shape != expected:
            raise ValueError(must("states", f"have shape {list(expected)}", shape_of(states)))
        if host_reads(slots):
            named = slots.tolist()
            check_once("slots", final_writes(named, named, LAST_SKIPPED[self.skip]))
        with writing(pool):
            pool.index_copy_(0, self.rows(slots), states.detach().to(pool.dtype))
        if name == "recurrent_state":
            self.restart(slots)

    def fold(self, slots: Tensor | None = None) -> None:
        """Folds the records of these slots, int32 or int64 [n], into recurrent_state; None: all
        slots. Later results of the layer do not depend on this call. Without a window it does
        nothing.

        Raises:
            TypeError, ValueError: as for `gdn_triton.fold_window`.
        """
        if self.window is not None:
            slots = self._every_slot() if slots is None else slots
            self._check_slots(slots)
            fold_window(
                self.recurrent_state,
                self.window,
                slots,
                self.slot_positions(slots).now,
                state_v_first=True,
                skip=self.skip,
            )

    def restart(self, slots: Tensor | None = None) -> None:
        """Declares that recurrent_state holds the whole states of these slots, int32 or int64 [n];
        None: all slots. The records of the slots are dropped and the positions set to 0, so later
        results do not depend on earlier contents of the slots. Without a window it does nothing.

        Raises:
            TypeError, ValueError: slots that do not fit, as for `reset`.
        """
        if slots is not None:
            self._check_slots(slots)
        if self.window is not None and self.positions is not None:
            self._fill((self.positions, self.window.start), slots)

    def slot_positions(self, slots: Tensor, *, are_first: bool = False) -> SlotPositions:
        """Returns the positions of these slots, for a step with the window. are_first: slots are
        the first slots of the cache in order. Their positions are a view, which takes no launch."""
        assert self.positions is not None
        last_skipped = LAST_SKIPPED[self.skip]
        if are_first:
            return SlotPositions(None, self.positions.narrow(0, last_skipped + 1, slots.shape[0]))
        # One launch gives padding the last row. torch.where would take a second launch to make a
        # tensor of the number, and indexing would take one more to convert int32 to int64.
        rows = F.threshold(slots, last_skipped, self.slots)
        return SlotPositions(rows, self.positions.index_select(0, rows))

    def advance(self, given: SlotPositions, tokens: int | Tensor) -> None:
        """Counts the tokens of a step with the window. tokens: the number for each sequence, or for
        all."""
        assert self.positions is not None and self._one is not None
        with writing(self.positions):
            if given.rows is None:
                given.now.add_(tokens)
            elif isinstance(tokens, Tensor):
                self.positions.index_add_(0, given.rows, tokens.to(self.positions.dtype))
            else:
                ones = self._one.expand_as(given.now)
                self.positions.index_add_(0, given.rows, ones, alpha=tokens)

    def _pool(self, name: Literal["conv_state", "recurrent_state"]) -> Tensor:
        pools = {"conv_state": self.conv_state, "recurrent_state": self.recurrent_state}
        pool = pools.get(name)
        if pool is None:
            known = " or ".join(key for key, x in pools.items() if x is not None)
            raise ValueError(must("name", f"be {known}", value_of(name)))
        return pool

    def _fill(self, tensors: Iterable[Tensor], slots: Tensor | None) -> None:
        """Sets the rows of these slots to 0; None: all rows."""
        rows = None if slots is None else self.rows(slots)
        for x in tensors:
            with writing(x):
                if rows is None:
                    x.zero_()
                else:
                    x.index_fill_(0, rows, 0)

    def _every_slot(self) -> Tensor:
        first, device = LAST_SKIPPED[self.skip] + 1, self.recurrent_state.device
        return torch.arange(first, max(first, self.slots), device=device)

    def _check_window(self) -> None:
        """Checks the rows of the window and the positions. The steps check everything else."""
        window, positions = self.window, self.positions
        if window is None:
            if positions is not None:
                raise ValueError(must("positions", "be None without window", type_of(positions)))
            return
        check_kind(window)
        check_tensors({"positions": positions, "window.u": window.u}, {})
        device, rows = self.recurrent_state.device, self.recurrent_state.shape[0]
        check_devices("recurrent_state", device, {"positions": positions, "window.u": window.u})
        if window.scales is not None:
            raise ValueError(must("window.scales", "be None: no cache is int8", "a tensor"))
        assert positions is not None
        if positions.dtype != torch.int32 or positions.shape != (rows,):
            expected = f"be int32 [slots + 1 = {rows}]"
            raise ValueError(
                must("positions", expected, f"{positions.dtype} {shape_of(positions)}")
            )
        if window.u.shape[:1] != (rows,):
            expected = f"have slots + 1 = {rows} rows, as recurrent_state has"
            raise ValueError(must("window.u", expected, shape_of(window.u)))
        check_own_memory("positions", (positions.shape, positions.stride(), positions.dtype))

    def _check_slots(self, slots: Tensor) -> None:
        check_tensors({"slots": slots}, {})
        check_devices("the cache", self.recurrent_state.device, {"slots": slots})
        check_rank("slots", slots, "n")
        check_dtypes({"slots": slots}, ("slots",))
        # Skipped sequences write to the row after the last slot.
        if host_reads(slots) and slots.numel() > 0 and int(slots.max()) >= self.slots:
            expected = f"be less than the {self.slots} slots of the cache"
            raise ValueError(must("slots", expected, str(int(slots.max()))))


# What an error says of the argument `window`.
WINDOWS: Final = 'be True, False or "auto"'
# With fewer float32 or 16-bit states, slots times value heads, a layer's step is slower with a
# window: the window then saves less time than the launches that count the tokens take. The numbers
# follow from the times of a layer with 256 and 2048 states on an H100, and of a step with 512 and
# 1024 states on an H200.
LEAST_STATES, LEAST_NARROW_STATES = 1024, 2048


def least_states(dtype: torch.dtype) -> int:
    return LEAST_NARROW_STATES if dtype.itemsize <= 2 else LEAST_STATES


def empty_cache(
    slots: int,
    *,
    conv_shape: tuple[int, ...] | None,
    state_shape: tuple[int, int, int],
    num_heads: int,
    weight: Tensor,
    dtype: torch.dtype | None,
    state_dtype: torch.dtype | None,
    device: torch.device | str | None,
    skip: str,
    window: bool | Literal["auto"],
) -> GatedDeltaNetCache:
    """Makes an empty cache for a layer. `GatedDeltaNet.make_cache` documents the other arguments.

    Args:
        conv_shape, state_shape: the shapes of one slot: [D, W - 1], None without a convolution, and
            [HV, V, K].
        num_heads: H.
        weight: a weight of the layer, whose dtype and device are the defaults.
    """
    if type(slots) is not int:
        raise TypeError(must("slots", "be an int", value_of(slots)))
    if slots < 0:
        raise ValueError(must("slots", "be at least 0", str(slots)))
    for name, asked in (("dtype", dtype), ("state_dtype", state_dtype)):
        if asked is not None:
            check_float_dtype(name, asked)
    if type(window) not in (bool, str):
        raise TypeError(must("window", WINDOWS, value_of(window)))
    if type(window) is str and window != "auto":
        raise ValueError(must("window", WINDOWS, value_of(window)))
    device, dtype = device or weight.device, dtype or weight.dtype
    state_dtype = state_dtype or torch.promote_types(weight.dtype, torch.float32)
    conv_state = None
    if conv_shape is not None:
        conv_state = torch.zeros(slots + 1, *conv_shape, dtype=dtype, device=device)
    recurrent_state = torch.zeros(slots + 1, *state_shape, dtype=state_dtype, device=device)
    device = recurrent_state.device
    HV, V, K = state_shape
    if window == "auto":
        window = slots * HV >= least_states(state_dtype)
    if not window:
        counters = torch.zeros(slots + 1, num_heads, dtype=torch.int32, device=device)
        return GatedDeltaNetCache(
            conv_state=conv_state, recurrent_state=recurrent_state, skip=skip, counters=counters
        )
    # Tokens are never wider than the weights; under autocast they are narrower.
    key_dtype = torch.promote_types(weight.dtype, dtype)
    records = make_window(slots + 1, num_heads, HV, K, V, key_dtype, device)
    positions = torch.zeros(slots + 1, dtype=torch.int32, device=device)
    return GatedDeltaNetCache(
        conv_state=conv_state,
        recurrent_state=recurrent_state,
        skip=skip,
        window=records,
        positions=positions,
    )
