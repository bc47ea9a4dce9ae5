"""The bytes of a codec's segments, from small segments that the codec itself encodes.

A codec decides alone which tensors it stores, so nothing about it is repeated here: it encodes a few random tokens, and
the bytes of the result are read. Bytes grow by the same number with each further period of tokens, and the period is
found by encoding more of them; so a long segment costs no more to forecast than a short one. Where segments are stored
otherwise as they grow old, there are those of a codec of each age, and what has which.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import lcm

import torch
from torch import Tensor

from kvtailor.encode.by_age import ByAge
from kvtailor.encode.contract import Codec
from kvtailor.errors import ArgumentError
from kvtailor.ledger import storage_bytes
from kvtailor.ops.lanes.ragged import page_size
from kvtailor.types import Layout, Segment

__all__ = ["NOTHING", "Aging", "Bounds", "BytesByAge", "SegmentBytes", "hull", "of_kept", "slots_of_kept", "summed"]

# Columns that no codec takes for a first token of a row, such as one that it keeps as it is.
_FAR = 1 << 20
# How many periods further the growth is looked at, as far as so many tokens allow.
_STEPS = (1, 2, 3, 5, 8, 13, 21, 34)
_MOST_TOKENS = 4096
_PERIODS = (1, 20, 100)


@dataclass(frozen=True)
class Bounds:
    """A number that lies between `low` and `high`, both included.

    Attributes:
        low, high: whole numbers; equal where the number is known exactly.
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ArgumentError(f"bounds from {self.low} to {self.high} hold no number")

    @classmethod
    def exactly(cls, number: int) -> Bounds:
        """Return the bounds of a number that is known."""
        return cls(number, number)

    @property
    def exact(self) -> bool:
        """Whether the number is known exactly."""
        return self.low == self.high

    @property
    def middle(self) -> int:
        """The number itself where it is known; else the middle of the bounds."""
        return (self.low + self.high) // 2

    def __add__(self, other: Bounds) -> Bounds:
        return Bounds(self.low + other.low, self.high + other.high)

    def __mul__(self, times: int) -> Bounds:
        return Bounds(self.low * times, self.high * times)

    def __contains__(self, number: float) -> bool:
        return self.low <= number <= self.high


NOTHING = Bounds(0, 0)


def summed(each: Iterable[Bounds]) -> Bounds:
    """Return the bounds of a sum."""
    return sum(each, NOTHING)


def hull(first: Bounds, *others: Bounds) -> Bounds:
    """Return bounds that hold for each of several cases."""
    every = (first, *others)
    return Bounds(min(b.low for b in every), max(b.high for b in every))


class SegmentBytes:
    """What one layer's segments take, or those of layers that are encoded together.

    Args:
        codec: as it is on the layer; of layers that are encoded together, on the last of them.
        layers: how many are encoded together.
        heads: kv heads.
        sizes: d and dv, of a key and a value.
        dtype: of the cache.
        group: query heads of a kv head.
    """

    def __init__(
        self, codec: Codec, layers: int, heads: int, sizes: tuple[int, int], dtype: torch.dtype, group: int = 1
    ):
        self.codec, self.layers, self.heads, self.sizes, self.dtype = codec, layers, heads, sizes, dtype
        self._encoder = codec
        if codec.needs.window:
            queries = torch.randn(
                (1, heads * group, codec.needs.window, sizes[0]),
                generator=torch.Generator().manual_seed(1),
                dtype=torch.float32,
            )
            self._encoder = codec.seeing(queries.to(dtype), heads, None)
        self._rows: dict[tuple[int, int | None], Bounds] = {}
        self._direct: dict[tuple[int, int, bool], int] = {}
        self._pages: dict[int, Bounds] = {}

    def row(self, slots: int, start: int | None) -> Bounds:
        """Return the bytes of one batch row's segment with `slots` tokens in each kv head.

        Args:
            slots: tokens of each kv head.
            start: column of the first of consecutive tokens; None where columns are stored, and are not known.
        """
        if slots == 0:
            return Bounds(0, 0)
        key = slots, start
        if key not in self._rows:
            if start is not None:
                self._rows[key] = self._long(slots, min(start, _FAR), listed=False)
            else:
                # Which columns stay is not known; a codec may store a row's first ones otherwise.
                self._rows[key] = hull(self._long(slots, 0, listed=True), self._long(slots, _FAR, listed=True))
        return self._rows[key]

    def page(self, slots: int) -> Bounds:
        """Return the bytes of one page of a ragged segment: `slots` slots of one kv head, with columns and owner."""
        if slots not in self._pages:
            found = [
                self._page(slots, filled, first) for filled in {1, max(1, slots // 2), slots} for first in (0, _FAR)
            ]
            self._pages[slots] = Bounds(min(found), max(found))
        return self._pages[slots]

    @cached_property
    def moved(self) -> tuple[float, float, float]:
        """Bytes of a slot of one kv head whose token was moved after it had been encoded, its column included.

        The least and the most of the token's own, without tables (scales) that it shares; and the most with a table of
        which no other token has a part.
        """
        multiple = self.codec.lane_multiple
        length = 4 * max(multiple, 16)
        sample = self._encode(length, 0, listed=True)
        least, most = [], []
        for token in (0, 1, multiple - 1, length // 2, length - 1):
            both = [self._regathered(sample, torch.full((count,), token)) for count in (16, 32)]
            least.append((both[1] - both[0]) / 16 / self.heads)
        for first in range(min(multiple, 4)):
            places = torch.arange(first, length, multiple)
            most.append(self._regathered(sample, places) / len(places) / self.heads)
        return min(least), max(least), max(most + least)

    @cached_property
    def per_slot(self) -> tuple[float, float]:
        """Least and most bytes of a slot of one kv head in a long segment without columns, full groups or not."""
        period, slope = self._growth(_FAR, listed=False)
        rate = slope.low / period / self.heads
        return rate, max(self.row(1, _FAR).high / self.heads, slope.high / period / self.heads)

    def _long(self, slots: int, first: int, *, listed: bool) -> Bounds:
        period, slope = self._growth(first, listed=listed)
        base = self._base + (slots - self._base) % period if slots > self._base else slots
        times = max(0, (slots - base) // period)
        return Bounds.exactly(self._bytes(base, first, listed)) + slope * times

    @property
    def _base(self) -> int:
        return max(256, 2 * self.multiple)

    @property
    def kinds(self) -> int:
        """How many segments are made of tokens that an eviction encodes at once, at most."""
        return 1

    @property
    def multiple(self) -> int:
        """Tokens after which a codec may begin a new group or table."""
        return lcm(self.codec.lane_multiple, max(1, self.codec.block))

    def _growth(self, first: int, *, listed: bool) -> tuple[int, Bounds]:
        """A period of tokens, and the bytes by which each row's segment grows with it: bounds where that differs."""
        key = min(first, 1), listed
        if key not in self._growths:
            self._growths[key] = self._found_growth(first, listed=listed)
        return self._growths[key]

    @cached_property
    def _growths(self) -> dict[tuple[int, bool], tuple[int, Bounds]]:
        return {}

    def _found_growth(self, first: int, *, listed: bool) -> tuple[int, Bounds]:
        multiple, base = self.multiple, self._base
        period, slopes = multiple, [0]
        for factor in _PERIODS:
            period = lcm(multiple, factor)
            steps = [0, *(step for step in _STEPS if step < 3 or base + step * period <= _MOST_TOKENS)]
            slopes, same = [], True
            for offset in (0, 1):
                sizes = [self._bytes(base + offset + step * period, first, listed) for step in steps]
                for (a, low), (b, high) in zip(
                    zip(steps, sizes, strict=True), list(zip(steps, sizes, strict=True))[1:], strict=False
                ):
                    same &= (high - low) % (b - a) == 0
                    slopes += [(high - low) // (b - a), -((low - high) // (b - a))]
            if same and len(set(slopes)) == 1:
                break
        return period, Bounds(min(slopes), max(slopes))

    def _bytes(self, slots: int, first: int, listed: bool) -> int:
        key = slots, first, listed
        if key not in self._direct:
            self._direct[key] = _held(self._encode(slots, first, listed=listed))
        return self._direct[key]

    def _encode(self, slots: int, first: int, *, listed: bool) -> list[Segment]:
        columns = torch.arange(first, first + slots, dtype=torch.int32).expand(self.heads, -1).contiguous()
        layout = Layout(
            rows=1, heads=self.heads, size=slots, start=None if listed else first, positions=columns if listed else None
        )
        return self._encoded(layout)

    def _page(self, slots: int, filled: int, first: int) -> int:
        """Bytes of a page that holds so many tokens, a mean over the kv heads."""
        columns = torch.arange(first, first + slots, dtype=torch.int32).clamp(max=first + filled - 1)
        layout = Layout(
            rows=1,
            heads=self.heads,
            size=slots,
            positions=columns.expand(self.heads, -1).contiguous(),
            owner=torch.arange(self.heads),
            lengths=torch.full((self.heads,), filled, dtype=torch.int32),
        )
        held = _held(self._encoded(layout))
        return -(-held // self.heads) if filled == slots else held // self.heads

    def _encoded(self, layout: Layout) -> list[Segment]:
        states = list(self._states(layout))
        if self.layers == 1:
            return [self._encoder.encode(layout, *states[0])]
        return list(self._encoder.encode_group(layout, states))

    def _states(self, layout: Layout) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.layers):
            keys, values = (
                torch.randn((layout.lanes, layout.size, size), generator=generator, dtype=torch.float32).to(self.dtype)
                for size in self.sizes
            )
            yield keys, values

    def _regathered(self, sample: list[Segment], places: Tensor) -> int:
        """Bytes of the tokens at these slots of each kv head, moved as an eviction moves them."""
        slot = places.expand(self.heads, -1)
        lane = torch.arange(self.heads)[:, None].expand_as(slot)
        columns = torch.arange(len(places), dtype=torch.int32).expand(self.heads, -1).contiguous()
        layout = Layout(rows=1, heads=self.heads, size=len(places), positions=columns)
        found = [segment.regather(lane, slot, layout) for segment in sample]
        return _held(list(self.codec.joined(found)) if self.layers > 1 else found)


class BytesByAge(SegmentBytes):
    """What a layer's segments take where each may have any of the codecs of its ages.

    Args:
        codec: as it is on the layer.
        levels: the same of each of its codecs.
    """

    def __init__(self, codec: ByAge, levels: list[SegmentBytes]):
        one = levels[0]
        super().__init__(codec, one.layers, one.heads, one.sizes, one.dtype)
        self.levels, self.ages = levels, codec.ages

    @property
    def kinds(self) -> int:
        return len(self.levels)

    def row(self, slots: int, start: int | None) -> Bounds:
        return hull(*(each.row(slots, start) for each in self.levels))

    def page(self, slots: int) -> Bounds:
        return hull(*(each.page(slots) for each in self.levels))

    @property
    def moved(self) -> tuple[float, float, float]:
        each = [level.moved for level in self.levels]
        return min(m[0] for m in each), max(m[1] for m in each), max(m[2] for m in each)

    @property
    def per_slot(self) -> tuple[float, float]:
        each = [level.per_slot for level in self.levels]
        return min(e[0] for e in each), max(e[1] for e in each)


@dataclass
class Aging:
    """The segments of one layer under such a codec, as long as nothing was evicted.

    Attributes:
        segments: of the layer.
        runs: of each segment its codec's number, its columns, the first of them, and the last.
    """

    segments: BytesByAge
    runs: list[tuple[int, int, int | None, int]] = field(default_factory=list)

    def encode(self, count: int, tail: int, seen: int, start: int | None) -> None:
        """Let the oldest `count` tokens of a tail leave it, whose first column is `start`, and others grow old."""
        codec = self.segments.codec
        self.runs = [(self._level(newest, seen), size, first, newest) for _, size, first, newest in self.runs]
        for size, age in codec.runs(count, tail - count):
            newest = seen - 1 - age
            self.runs.append((self._level(newest, seen), size, start, newest))
            start = None if start is None else start + size

    def bytes(self) -> Bounds:
        """Bytes of all of them, in one batch row."""
        found = Bounds(0, 0)
        for level, size, first, _ in self.runs:
            found += self.segments.levels[level].row(size, first)
        return found

    def _level(self, newest: int, seen: int) -> int:
        return sum(seen - 1 - newest >= age for age in self.segments.ages)


def of_kept(segments: BytesByAge, old: Bounds, *, owners: int, recent: int, seen: int) -> Bounds:
    """Bytes of tokens that an eviction leaves, whose ages only the text tells.

    Args:
        segments: of the layer.
        old: how many tokens, over all rows and kv heads.
        owners: b * h.
        recent: columns of the tail, which are not among them.
        seen: tokens seen.
    """
    ends = [min(max(age, recent), seen) for age in (*segments.ages, seen)]
    widths = [end - begin for begin, end in zip([min(recent, seen), *ends[:-1]], ends, strict=True)]
    each = [(width * owners, level.per_slot) for width, level in zip(widths, segments.levels, strict=True)]
    low, left = 0.0, old.low
    for room, (least, _) in sorted(each, key=lambda pair: pair[1][0]):
        low, left = low + min(left, room) * (least + 4), left - min(left, room)
    high, left = 0.0, old.high
    for room, (_, most) in sorted(each, key=lambda pair: -pair[1][1]):
        high, left = high + min(left, room) * (most + 4), left - min(left, room)
    page = page_size(old.high / owners, segments.multiple)
    filler = len(each) * owners * page
    high += filler * (max(most for _, (_, most) in each) + 4) + 12 * (old.high // 16 + owners * len(each))
    return Bounds(int(low), max(int(low), int(high)))


def slots_of_kept(segments: BytesByAge, old: Bounds, *, owners: int) -> Bounds:
    """Slots of what `of_kept` tells the bytes of: pages of each age may be partly empty."""
    page = page_size(old.high / owners, segments.multiple)
    return Bounds(old.low, old.high + len(segments.levels) * owners * page)


def _held(segments: list[Segment]) -> int:
    return storage_bytes(tensor for segment in segments for tensor in segment.tensors().values())
