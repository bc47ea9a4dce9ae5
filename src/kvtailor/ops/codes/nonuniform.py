"""Codes whose levels are fitted to what they stand for, with the farthest numbers kept aside as they are.

A vector (a channel of a run of tokens, or a token) has a minimum and a reach, and its numbers, brought to 0..1, the
nearest of a few levels that all vectors of the run share. Numbers kept aside belong to tokens, so that tokens can move.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from kvtailor.ops import huge_pages
from kvtailor.ops.codes.quant import pack, packed_size, unpack
from kvtailor.ops.lanes.pieces import pieces
from kvtailor.ops.segments.code_layout import Aside, CodeKind, CodeLayout
from kvtailor.ops.segments.coded import TimeGrouped

__all__ = [
    "ChannelLevels",
    "LevelCodes",
    "TokenLevels",
    "aside",
    "coded_by_levels",
    "fit_levels",
    "index_bytes",
    "largest",
]

_POINTS = 257
_TINY = 1e-6
_ROUNDS = 16
# Elements that are worked on at once while coding: their 64-bit indices take 4 MiB.
_AT_ONCE = 1 << 19
# And while decoding.
_PIECE = 1 << 18


@dataclass(frozen=True, kw_only=True)
class LevelCodes(TimeGrouped):
    """Codes of shared levels, and the numbers kept aside.

    Attributes:
        bits: of a code.
        size: c.
        codes: (m, s, bytes) uint8, packed along the channels.
        levels: (m, ceil(s / group), 2^bits) of the cache's dtype, ascending within 0..1; with `row` (rows, 2^bits).
        counts: (m, s) how many channels of each token are kept aside; uint8, or int16 above 255 channels.
        channels: (n,) which, token by token, of the same dtype.
        exact: (n,) what they hold.
    """

    bits: int
    size: int
    codes: Tensor
    low: Tensor
    reach: Tensor
    levels: Tensor
    counts: Tensor
    channels: Tensor
    exact: Tensor
    dtypes = {**TimeGrouped.dtypes, **dict.fromkeys(("counts", "channels"), (torch.uint8, torch.int16))}

    @classmethod
    def of(
        cls,
        states: Tensor,
        bits: int,
        group: int,
        *,
        codes: Tensor,
        low: Tensor,
        reach: Tensor,
        levels: Tensor,
        far: Tensor,
        whole: Tensor | None,
    ) -> Self:
        """Return codes of states (m, s, c) with the numbers kept aside: `far` (m, s, c) and all of `whole` (m, s)."""
        if whole is not None:
            far |= whole[..., None]
        size = states.shape[-1]
        narrow = torch.uint8 if index_bytes(size) == 1 else torch.int16
        at = torch.nonzero(far).unbind(1)
        return cls(
            group=group,
            bits=bits,
            size=size,
            codes=codes,
            low=low,
            reach=reach,
            levels=levels,
            counts=far.sum(-1).to(narrow),
            channels=at[2].to(narrow),
            exact=states[at],
        )

    def rows(self, lanes: Tensor) -> Self:
        slots = torch.arange(self.counts.shape[1], device=lanes.device)
        return replace(super().rows(lanes), **self._aside_of(lanes[:, None] * self.counts.shape[1] + slots))

    def regather(self, lane: Tensor, slot: Tensor) -> Self:
        return replace(super().regather(lane, slot), **self._aside_of(lane * self.counts.shape[1] + slot))

    @cached_property
    def code_layout(self) -> CodeLayout:
        return CodeLayout(
            kind=CodeKind.FITTED,
            codes=self.codes,
            size=self.size,
            dtype=self.low.dtype,
            bits=self.bits,
            step=self.reach,
            low=self.low,
            row=self.row,
            group=self.group,
            block=1 if "reach" in self.shared else self.size,
            levels=self.levels,
            aside=Aside(counts=self.counts, channels=self.channels, exact=self.exact),
        )

    def decode(self) -> Tensor:
        lanes, slots = self.codes.shape[:2]
        states = huge_pages.read_buffer(self.low, (lanes, slots, self.size))
        each = 2**self.bits
        for lane, slot in pieces(lanes, slots, self.size, _PIECE, multiple=self.group):
            row = self._rows_of_tokens(lane, slot)
            index = unpack(self.codes[lane, slot], self.bits, self.size).to(torch.int32) + (row * each)[..., None]
            level = self.levels.view(-1).index_select(0, index.view(-1)).view(index.shape)
            out = states[lane, slot]
            if self.row is None and self._whole_runs(slot):
                # (m', runs, tokens, c): a run's numbers are not copied for each of its tokens.
                level, out = (x.unflatten(1, (-1, self.group)) for x in (level, out))
                low, reach = (self._of_runs(name, lane, slot) for name in ("low", "reach"))
            else:
                low, reach = (self._of_tokens_in(name, lane, slot, row) for name in ("low", "reach"))
            torch.addcmul(low, level, reach, out=out)
        # With its size, which is on the host in the shape of what is kept aside.
        token = torch.repeat_interleave(self.counts.flatten().to(torch.int64), output_size=self.channels.shape[0])
        states.view(-1, self.size)[token, self.channels.to(torch.int64)] = self.exact
        return states

    def check(self) -> None:
        counts, channels, whole = self.counts, self.channels, torch.uint8 if self.size < 256 else torch.int16
        if counts.dtype != whole or channels.dtype != whole or channels.ndim != 1 or self.exact.shape != channels.shape:
            raise ValueError(
                f"numbers kept aside are {self.exact.shape} in {channels.shape} channels of {channels.dtype}, counted "
                f"as {counts.dtype}; {self.size} channels are told by {whole}"
            )
        total = int(counts.sum(dtype=torch.int64))
        if counts.shape != self.codes.shape[:2] or total != channels.shape[0] or bool((counts < 0).any()):
            raise ValueError(f"{total} numbers are said to be kept aside, and there are {channels.shape[0]}")
        if total and not 0 <= int(channels.min()) <= int(channels.max()) < self.size:
            raise ValueError(
                f"channels kept aside go from {int(channels.min())} to {int(channels.max())}, and there are {self.size}"
            )

    def closed_form_bytes(self, lanes: int, slots: int) -> int:
        element, rows = self.low.element_size(), self.groups(lanes, slots)
        tables: int = 2**self.bits * element * rows
        for name in ("low", "reach"):
            often = rows if name in self.shared else lanes * slots
            tables += often * getattr(self, name).shape[-1] * element
        kept = self.channels.shape[0] * (element + index_bytes(self.size))
        tokens = lanes * slots * (packed_size(self.size, self.bits) + index_bytes(self.size))
        return tokens + tables + kept + self.index_bytes(lanes, slots)

    def _rows_of_tokens(self, lane: slice, slot: slice) -> Tensor:
        """(m', s') int32 row of each token in tables (rows, ...)."""
        if self.row is not None:
            return self.row[lane, slot]
        groups, device = self.levels.shape[1], self.codes.device
        places = torch.arange(slot.start, slot.stop, device=device, dtype=torch.int32)
        group = torch.div(places, self.group, rounding_mode="floor")
        return torch.arange(lane.start, lane.stop, device=device, dtype=torch.int32)[:, None] * groups + group

    def _of_tokens_in(self, name: str, lane: slice, slot: slice, row: Tensor) -> Tensor:
        table: Tensor = getattr(self, name)
        return table.view(-1, table.shape[-1])[row] if name in self.shared else table[lane, slot]

    def _whole_runs(self, slot: slice) -> bool:
        return not any(end % self.group for end in (slot.start, slot.stop))

    def _of_runs(self, name: str, lane: slice, slot: slice) -> Tensor:
        """(m', runs, 1 or tokens, c or 1)."""
        table: Tensor = getattr(self, name)
        if name in self.shared:
            found = table[lane, slot.start // self.group : slot.stop // self.group, None]
        else:
            found = table[lane, slot].unflatten(1, (-1, self.group))
        return found

    def _aside_of(self, token: Tensor) -> dict[str, Any]:
        """What is kept aside of the tokens (m', s') int64 lane * s + slot."""
        counts = self.counts.view(-1)[token]
        each = counts.flatten().to(torch.int64)
        total = self.counts.flatten().to(torch.int64)
        before = (total.cumsum(0) - total)[token.flatten()]
        index = torch.repeat_interleave(before - (each.cumsum(0) - each), each)
        index = index + torch.arange(index.shape[0], device=index.device)
        return {"counts": counts, "channels": self.channels[index], "exact": self.exact[index]}


@dataclass(frozen=True, kw_only=True)
class ChannelLevels(LevelCodes):
    """A vector is one channel of a run of tokens: `low` and `reach` (m, ceil(s / group), c); with `row` (rows, c)."""

    of_tokens = ("codes",)
    shared = ("low", "reach", "levels")


@dataclass(frozen=True, kw_only=True)
class TokenLevels(LevelCodes):
    """A vector is one token: `low` and `reach` (m, s, 1)."""

    of_tokens = ("codes", "low", "reach")
    shared = ("levels",)


def aside(share: float, size: int) -> int:
    """How many of `size` numbers are kept aside."""
    return int(share * size + 0.5)


def index_bytes(size: int) -> int:
    """Bytes of a channel's number, and of a count of channels."""
    return 1 if size < 256 else 2


def coded_by_levels(
    states: Tensor,
    bits: int,
    group: int,
    share: float,
    *,
    by_channel: bool,
    dense: Tensor | None = None,
    whole: Tensor | None = None,
    levels: Tensor | None = None,
) -> LevelCodes:
    """Codes of states, and the numbers kept aside.

    Args:
        states: (m, s, c) finite.
        bits: of a code, 1 to 8.
        group: tokens that share levels, and with `by_channel` the scales of each channel.
        share: of each vector's numbers, those farthest from its mean, that are kept aside.
        by_channel: a vector is one channel of `group` tokens; else it is a token.
        dense: (m, s) bool: tokens to which scales and levels are fitted; None: all.
        whole: (m, s) bool: tokens that are kept aside with all their channels; None: none.
        levels: (2^bits,) ascending within 0..1, for all groups; None: each group has its own fitted.
    """
    lanes, slots, size = states.shape
    dense = states.new_ones((lanes, slots), dtype=torch.bool) if dense is None else dense
    rows = []
    for first, end in _pieces(lanes, slots * size):
        runs = [
            _coded(states[first:end, a:b], bits, min(group, b - a), share, dense[first:end, a:b], by_channel, levels)
            for a, b in _runs(slots, group, size)
        ]
        rows.append([torch.cat(each, 1) for each in zip(*runs, strict=True)])
    codes, low, reach, fitted, far = (torch.cat(each) for each in zip(*rows, strict=True))
    made = ChannelLevels if by_channel else TokenLevels
    return made.of(states, bits, group, codes=codes, low=low, reach=reach, levels=fitted, far=far, whole=whole)


def _coded(
    states: Tensor, bits: int, group: int, share: float, dense: Tensor, by_channel: bool, levels: Tensor | None
) -> tuple[Tensor, ...]:
    """Codes, low, reach and levels of runs of `group` tokens, and (m, s, c) bool which numbers are kept aside."""
    x = states.unflatten(1, (-1, group)).float()
    dim = 2 if by_channel else 3
    used = dense.unflatten(1, (-1, group))[..., None].expand_as(x)
    far = _farthest(x, used, share, dim)
    used = used & ~far
    low = x.masked_fill(~used, torch.inf).amin(dim, keepdim=True)
    high = x.masked_fill(~used, -torch.inf).amax(dim, keepdim=True)
    empty = low > high
    low = low.masked_fill(empty, 0).to(states.dtype)
    reach = (high.masked_fill(empty, 0) - low.float()).clamp(max=largest(states.dtype)).to(states.dtype)
    reach = torch.where(reach > 0, reach, torch.ones_like(reach))
    z = ((x - low.float()) / reach.float()).clamp_(0, 1).flatten(2)
    if levels is None:
        levels = fit_levels(z, used.flatten(2), bits)
    levels = levels.to(states).expand(*z.shape[:2], -1).contiguous()
    # The middle between what the levels are once they are stored.
    middle = (levels[..., 1:].float() + levels[..., :-1].float()) / 2
    codes = torch.searchsorted(middle, z, out_int32=True).to(torch.uint8).view(x.shape).flatten(1, 2)
    low, reach = (low.squeeze(2), reach.squeeze(2)) if by_channel else (low.flatten(1, 2), reach.flatten(1, 2))
    return pack(codes, bits), low, reach, levels, far.flatten(1, 2)


def _farthest(x: Tensor, used: Tensor, share: float, dim: int) -> Tensor:
    """bool of x's shape: the numbers of each vector along `dim` that lie farthest from the mean of the used ones.

    Of equal distances the earlier one. The mean is summed in float64, which holds it exactly in whatever order.
    """
    most = aside(share, x.shape[dim])
    far = torch.zeros_like(used, dtype=torch.bool)
    if not most:
        return far
    count = used.sum(dim, keepdim=True)
    mean = ((x * used).sum(dim, keepdim=True, dtype=torch.float64) / count.clamp(min=1)).float()
    distance = (x - mean).abs_().masked_fill_(~used, -1)
    # Of equal numbers `max` gives the first, too, and sorts nothing.
    if most == 1:
        index = distance.max(dim, keepdim=True).indices
    else:
        index = distance.sort(stable=True, dim=dim, descending=True).indices.narrow(dim, 0, most)
    wanted = (share * count.float() + 0.5).floor().to(torch.int64)
    shape = [1] * x.ndim
    shape[dim] = most
    mine = torch.arange(most, device=x.device).view(shape) < wanted
    return far.scatter_(dim, index, mine.expand_as(index))


def fit_levels(z: Tensor, used: Tensor, bits: int) -> Tensor:
    """Levels with the least squared error, found by Lloyd's rounds on a histogram, from evenly spaced ones.

    Args:
        z: (m, g, n) float32 within 0..1.
        used: (m, g, n) bool: numbers that count.
        bits: 2^bits levels.

    Returns:
        (m, g, 2^bits) float32 ascending. A level that nothing is nearest to stays where it was.
    """
    shape, runs = z.shape[:2], z.shape[0] * z.shape[1]
    # Each number is shared by the two points beside it, and cumulative sums are lines between points, so that levels
    # are continuous in the numbers: a rounding error in the states moves them by as little.
    place = z.view(runs, -1) * (_POINTS - 1)
    left = place.floor().clamp_(max=_POINTS - 2)
    place = (place - left).mul_(counted := used.reshape(runs, -1).float())
    left = left.to(torch.int64) + torch.arange(runs, device=z.device)[:, None] * _POINTS
    weight = _summed_by_point(left.flatten(), (counted - place).flatten().double(), runs * _POINTS)
    weight += _summed_by_point(left.flatten() + 1, place.flatten().double(), runs * _POINTS)
    weight = weight.view(runs, _POINTS)
    # (2, runs, points): weights, and their moments.
    both = torch.stack([weight, weight * torch.linspace(0, 1, _POINTS, dtype=torch.float64, device=z.device)])
    summed = both.cumsum(-1)
    total = summed[..., -1:]
    # A point's weight lies half on each side of it.
    below = summed - both / 2
    slope, nothing = below.diff(dim=-1), torch.zeros_like(total)
    even: Tensor = torch.arange(2**bits, dtype=torch.float64, device=z.device) / (2**bits - 1)
    levels = even.repeat(runs, 1)
    for _ in range(_ROUNDS):
        # (runs, levels - 1): the borders between the levels, as points.
        border = (levels[:, 1:] + levels[:, :-1]) / 2 * (_POINTS - 1)
        left = border.to(torch.int64).clamp_(max=_POINTS - 2)
        index = left.expand(2, -1, -1)
        inner = below.gather(-1, index) + (border - left) * slope.gather(-1, index)
        held, moment = torch.cat([nothing, inner, total], -1).diff(dim=-1)
        levels = torch.where(held > _TINY, moment / held.clamp(min=_TINY), levels)
    return levels.float().view(*shape, -1)


def _summed_by_point(point: Tensor, weight: Tensor, points: int) -> Tensor:
    """(points,) float64 sums of the weights (n,) of each of the points (n,)."""
    if point.device.type == "cpu":
        return torch.bincount(point, weight, points)
    # A GPU would read the greatest point first, to learn the size, and the host would wait for it.
    return weight.new_zeros(points).index_add_(0, point, weight)


def largest(dtype: torch.dtype) -> float:
    """Return the largest number of a dtype that float32 has, too."""
    return min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)


def _pieces(lanes: int, elements: int) -> Iterator[tuple[int, int]]:
    """Lanes (first, end) that are worked on at once, of so many elements each."""
    step = max(1, _AT_ONCE // elements)
    for first in range(0, lanes, step):
        yield first, min(first + step, lanes)


def _runs(slots: int, group: int, size: int) -> Iterator[tuple[int, int]]:
    """Slots (first, end) that are worked on at once: whole groups, and what is left as a group of its own."""
    step, split = max(1, _AT_ONCE // (group * size)) * group, slots // group * group
    for first in range(0, split, step):
        yield first, min(first + step, split)
    if split < slots:
        yield split, slots
