"""What one layer holds after a prompt and some decoded tokens, in numbers of slots: the engine's rules without tensors.

A rule that needs no tensor is the engine's own function; the others name the one that they follow. Where the numbers
depend on the text, they are bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvtailor.encode.contract import Codec
from kvtailor.engine.apply import count_leaving
from kvtailor.hf.sizes.segments import NOTHING, Aging, Bounds, BytesByAge, SegmentBytes, hull, of_kept, slots_of_kept
from kvtailor.ops.lanes.ragged import page_size
from kvtailor.store.recent_window import capacity_for

__all__ = ["KeptCount", "LayerForecast", "Whole"]


Whole = Literal["no", "least", "most"]


@dataclass(frozen=True)
class KeptCount:
    """How many tokens an eviction leaves, over all batch rows and kv heads of a layer, the recent window included.

    Attributes:
        low, high: bounds of the sum.
        counts: of each row and kv head, where that is known.
        alike: all rows and kv heads keep the same number, although it may not be known which.
    """

    low: int
    high: int
    counts: tuple[int, ...] | None = None
    alike: bool = False

    @classmethod
    def of(cls, counts: tuple[int, ...]) -> KeptCount:
        """Return the kept set of known numbers."""
        return cls(sum(counts), sum(counts), counts, alike=min(counts) == max(counts))


@dataclass
class LayerForecast:
    """One layer, or layers that are encoded together and so hold the same tokens.

    Attributes:
        codec: as it is on the layer.
        segments: bytes of what it encodes.
        rows, heads: b and h.
        token_bytes: bytes of a key and a value of one kv head in full precision.
        weighted: the plan's merger gives kept tokens weights.
        may_stay_tail: see the engine's function of this name.
        waiting: tokens of a head that an eviction encodes at once while it decodes (`waiting_tokens`); 0: all of them.
        block: how many wait in the tail (`count_waiting_in_tail`); 0: none.
        first: tokens that the plan keeps by their ages alone beside the newest (`count_first_tokens`); None: it does
            not keep tokens so.
        whole: what is assumed where only the text tells whether all heads happen to keep the same number: they do
            not, or they do and that is the least or the most of what may stay.
        tail, capacity: tokens of the tail, and slots of its buffer, of each row and kv head.
        gone: slots in front of the tail that have held tokens, until its buffer grows.
        listed: the tail stores the column of each slot.
        encoded: bytes of the segments.
        slots: of the segments, over all rows and kv heads, of one layer.
        tokens: in the segments, counted likewise.
        each: tokens held by each row and kv head; None where only their sum is known.
        parts: how many segments there are at most.
        coded: bytes that were encoded since the last eviction that moved no codes, at most; and of how many tokens.
        scored: slots for which the scorer's numbers are kept, of one layer.
        apart: what waits to be encoded is a segment of its own, since less is held than the tail would have.
        moved_codes: an eviction has moved tokens that had been encoded before.
        anchored: the first tokens, as many as a plan keeps by their ages alone, are those of the text.
        aging: which segments have which codec, where a codec is by age and nothing was evicted.
    """

    codec: Codec
    segments: SegmentBytes
    rows: int
    heads: int
    token_bytes: int
    weighted: bool
    may_stay_tail: bool
    waiting: int
    block: int
    first: int | None
    whole: Whole = "no"
    tail: int = 0
    capacity: int = 0
    gone: int = 0
    listed: bool = False
    encoded: Bounds = NOTHING
    slots: Bounds = NOTHING
    tokens: Bounds = NOTHING
    each: tuple[int, ...] | None = ()
    parts: int = 0
    coded: tuple[int, int] = (0, 0)
    scored: Bounds = NOTHING
    apart: bool = False
    moved_codes: bool = False
    seen: int = field(default=0)
    aging: Aging | None = None
    anchored: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.segments, BytesByAge):
            self.aging = Aging(self.segments)

    @property
    def owners(self) -> int:
        """b * h."""
        return self.rows * self.heads

    @property
    def held(self) -> Bounds:
        """Tokens held, over all rows and kv heads of one layer."""
        return self.tokens + Bounds.exactly(self.tail * self.owners)

    @property
    def tail_bytes(self) -> int:
        """Bytes of the tail's buffers, free slots included, of all its layers (`Tail.closed_form_bytes`)."""
        each = self.token_bytes + (4 if self.listed else 0)
        return self.segments.layers * self.owners * self.capacity * each

    @property
    def mass_bytes(self) -> Bounds:
        """Bytes of one float32 for each slot of the segments and each token of the tail."""
        return (self.slots + Bounds.exactly(self.tail * self.owners)) * (4 * self.segments.layers)

    def scored_bytes(self, numbers: int) -> Bounds:
        """Bytes of so many float32 numbers and one int32 column for each of `scored`; none without a number."""
        return self.scored * ((4 * numbers + 4) * self.segments.layers) if numbers else NOTHING

    def append(self, tokens: int, *, exactly: bool) -> None:
        """Let new tokens join the tail (`Tail.append`)."""
        self.tail += tokens
        self.seen += tokens
        if self.each is not None:
            self.each = tuple(count + tokens for count in self.each or [0] * self.owners)
        if self.capacity - self.gone < self.tail:
            self.capacity, self.gone = self.tail if exactly else capacity_for(self.tail), 0

    def keep_all(self) -> None:
        """Let an eviction pass by which all tokens stay (`Eviction._apply` without a kept set)."""
        self.scored = self._padded(self.held, None)
        if self.aging is not None:
            self.aging.encode(0, 0, self.seen, None)
            self.encoded = self.aging.bytes() * self.rows
        elif self.segments.kinds > 1:
            self.encoded = self._grown_old(self.encoded)

    def cut(self, kept: KeptCount, recent: int, *, decoded: bool) -> None:
        """Let an eviction leave so many tokens, of which the newest `recent` stay a tail (`compute_contents`).

        Args:
            kept: the tokens.
            recent: see there.
            decoded: what has come last is a decoded token.
        """
        codec, before, first = self.codec, self.tail, self.first
        self.each, self.aging = kept.counts, None
        recent = min(recent, self.tail, self.seen)
        self.scored = self._padded(Bounds(kept.low, kept.high), kept.counts)
        if self.may_stay_tail and (kept.alike or (kept.counts is None and self.whole != "no")):
            # Every row and kv head keeps the same number, which a tail can hold.
            self.tail = (kept.low if self.whole == "least" else kept.high) // self.owners
            in_place = decoded and first is not None and self.anchored and self.tail > first
            self.gone += before - self.tail
            if not in_place:
                self.capacity, self.gone = self.tail, 0
            self.listed = self.listed or not in_place or first != 0
            self.anchored = self.anchored and first is not None and self.tail > first
            self._hold(NOTHING, NOTHING, NOTHING)
            return
        # Beside a codec what has left no block yet stays in the tail, if every row and head keeps it.
        by_age = decoded and self.block > 0
        waits = by_age and 0 < before < self.block and kept.low // self.owners - (first or 0) >= before
        waits = waits and not self.apart
        self.apart = self.apart or (by_age and not waits and before < self.block)
        recent = before if waits else recent
        window = recent * self.owners
        old = Bounds(max(0, kept.low - window), max(0, kept.high - window))
        counts = None if kept.counts is None else tuple(max(0, each - recent) for each in kept.counts)
        moves = not codec.exact and self.tokens.high > 0
        if moves:
            # The text's first tokens, and the block that loses tokens now, become segments of their own.
            self.parts += 2 if by_age else 0
            self._move(old, fresh=min(old.high, (before - recent) * self.owners), waits=self.apart or not by_age)
        else:
            found, slots = self._fresh(old, counts, alike=kept.alike, recent=recent)
            self._hold(found, slots, old)
            self.parts = self.segments.kinds if old.high > 0 else 0
            self.coded = found.high, old.low
        self.tail, self.capacity = recent, self.capacity if waits else recent
        if self.weighted:
            # Tokens have a weight as soon as one of the layer does.
            self.encoded += Bounds(0, 4 * self.slots.high * self.segments.layers)

    def encode_tail(self, new_tokens: int) -> None:
        """Encode what leaves the tail after a forward (`encode_tail`)."""
        count = count_leaving(self.codec, self.tail, new_tokens)
        if not count:
            return
        start = None if self.listed else self.seen - self.tail
        more = Bounds.exactly(count * self.owners)
        found, parts = self.segments.row(count, start) * self.rows, self.parts + 1
        encoded = self.encoded + found
        if isinstance(self.segments, BytesByAge):
            if self.aging is not None:
                self.aging.encode(count, self.tail, self.seen, start)
                encoded, parts = self.aging.bytes() * self.rows, len(self.aging.runs)
            else:
                encoded = self._grown_old(self.encoded) + found
        self._hold(encoded, self.slots + more, self.tokens + more)
        self.parts = parts
        self.coded = self.coded[0] + found.high, self.coded[1] + more.low
        self.tail -= count
        self.capacity = self.tail

    def _grown_old(self, encoded: Bounds) -> Bounds:
        """Bytes of segments of an eviction: how many have grown old depends on what it left of each age."""
        return Bounds(min(encoded.low, int(self.segments.per_slot[0] * self.tokens.low)), encoded.high)

    def _hold(self, encoded: Bounds, slots: Bounds, tokens: Bounds) -> None:
        self.encoded, self.slots, self.tokens = encoded, slots, tokens

    def _padded(self, tokens: Bounds, counts: tuple[int, ...] | None) -> Bounds:
        """Slots of padded rows: every row and kv head has as many as the one that holds most."""
        if counts is not None:
            return Bounds.exactly(max(counts) * self.owners)
        least = -(-tokens.low // self.owners)
        most = min(tokens.high, self.seen) if self.owners > 1 else tokens.high
        return Bounds(least, max(least, most)) * self.owners

    def _fresh(self, old: Bounds, counts: tuple[int, ...] | None, *, alike: bool, recent: int) -> tuple[Bounds, Bounds]:
        """Bytes and slots of tokens that are encoded at once (`cut_lanes` and `Codec.encode_aged`)."""
        if old.high == 0:
            return NOTHING, NOTHING
        if isinstance(self.segments, BytesByAge):
            bytes_ = of_kept(self.segments, old, owners=self.owners, recent=recent, seen=self.seen)
            return bytes_, slots_of_kept(self.segments, old, owners=self.owners)
        multiple, owners = self.codec.lane_multiple, self.owners
        if alike or owners == 1:
            each = hull(*(self.segments.row(tokens // owners, None) for tokens in (old.low, old.high)))
            return each * self.rows, old
        if counts is not None:
            page = page_size(sum(counts) / owners, multiple)
            lanes = sum(-(-each // page) for each in counts)
            return self.segments.page(page) * lanes, Bounds.exactly(lanes * page)
        found, slots = [], []
        for tokens in {old.low, old.high}:
            page = page_size(tokens / owners, multiple)
            each, filled = self.segments.page(page), min(owners, tokens)
            # The fewest pages are full ones; the most, where the last of each row and head holds a single token.
            fewest = -(-tokens // page)
            lanes = filled + (tokens - filled) // page
            found.append(Bounds(fewest * each.low, lanes * each.high))
            slots.append(Bounds(tokens, lanes * page))
            # All may happen to keep the same number, and then they need no pages.
            alone = self.segments.row(tokens // owners, None) * self.rows
            found.append(Bounds(alone.low, alone.low))
        return hull(*found), hull(*slots)

    def _move(self, old: Bounds, *, fresh: int, waits: bool) -> None:
        """Let tokens of segments stay where each row and kv head keeps its own of them (`_moved_codes`).

        Args:
            old: tokens that stay and are older than the tail.
            fresh: how many of them come from the tail, at most.
            waits: these may wait to be encoded, as a segment.
        """
        self.moved_codes = True
        own_low, own_high, alone = self.segments.moved
        plain_low, plain_high = self.segments.per_slot
        multiple, owners = self.codec.lane_multiple, self.owners
        parts = self.parts + (self.segments.kinds if fresh > 0 else 0)
        page = max(16, int(old.high / owners / 12))
        page = -(-page // multiple) * multiple
        # A part with few tokens has a page for each of them at most.
        slots = old.high + parts * owners * (page - 1)
        lanes = parts * owners + old.high // 16
        # What a moved token has of its own counts its column and its rows in two tables, which it did not have before.
        tables = max(0.0, self.coded[0] - self.coded[1] * max(0.0, own_low - 12))
        most = min(slots * max(alone, plain_high + 4), slots * own_high + tables + fresh * (plain_high + 4))
        low = int(old.low * min(own_low, plain_low))
        # What waits to be encoded is in full precision, in pages of its own.
        waiting = owners * (self.waiting - 1 + page) if self.waiting and fresh and waits else 0
        most += waiting * (self.token_bytes + 4)
        slots += waiting
        self._hold(Bounds(low, max(low, int(most) + 12 * lanes)), Bounds(old.low, slots), old)
        self.parts = parts
        self.coded = self.coded[0] + int(fresh * plain_high), self.coded[1]
