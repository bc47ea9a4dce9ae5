"""The bytes of segments that are stored otherwise as they grow old: a codec of each age, and what has which."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtailor.encode.by_age import ByAge
from kvtailor.hf.sizes.bounds import Bounds, hull
from kvtailor.hf.sizes.segments import SegmentBytes
from kvtailor.ops.lanes.ragged import page_size

__all__ = ["Aging", "BytesByAge", "of_kept", "slots_of_kept"]


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
