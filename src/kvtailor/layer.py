"""One compressed layer: its segments, its tail, its evidence, and how a kept set becomes new segments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvtailor.errors import CacheMisuse
from kvtailor.ledger import Entry
from kvtailor.observe import Evidence
from kvtailor.ops.ragged import Cut, cut_lanes
from kvtailor.store.contract import Placement
from kvtailor.store.tail import Tail
from kvtailor.types import Held, Layout, PlainSegment, Segment, Visibility

if TYPE_CHECKING:
    from kvtailor.plan import Plan

__all__ = ["LayerState", "Pending"]


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A forward whose last tokens may yet be taken back: what is put off until then needs its queries."""

    query: Tensor
    visible: Visibility


class LayerState:
    """What one layer remembers between forwards.

    Attributes:
        index: 0-based among the layers that the plan compresses.
        seen: tokens seen, padding included.
        segments: encoded parts in time order; the tail comes after them.
        evidence: what the scorer needs.
        recording: forwards wait for a crop before anything is evicted or encoded (assisted decoding).
        walk_at: tokens since the last walk after which it is due again; None before the first walk.
        tail_growth: tokens since the last walk.
        due: the walk waits for the landing.
        read: (b, h) tokens that the last attention read; None where it read all.
    """

    def __init__(self, index: int):
        self.index = index
        self.recording = False
        self.scaling = 1.0
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self.tail: Tail | None = None
        self.segments: list[Segment] = []
        self.evidence = Evidence()
        self.seen = 0
        self.settled_seen = 0
        self.walk_at: int | None = None
        self.tail_growth = 0
        self.due = False
        self.read: Tensor | None = None
        self.pending: Pending | None = None

    @property
    def rows(self) -> int:
        """b; 0 before the first token."""
        return 0 if self.tail is None else self.tail.rows

    @property
    def heads(self) -> int:
        """h; 0 before the first token."""
        return 0 if self.tail is None else self.tail.heads

    def sizes(self) -> tuple[int, int, int]:
        """d, dv and the bytes of an element, of the newest token."""
        assert self.tail is not None
        segment = self.tail.as_segment()
        return segment.keys.shape[-1], segment.values.shape[-1], segment.keys.element_size()

    def append(self, keys: Tensor, values: Tensor, *, exactly: bool) -> None:
        """New keys (b, h, t, d) and values (b, h, t, dv)."""
        if self.tail is None:
            self.tail = Tail(keys.shape[0], keys.shape[1])
        if (keys.shape[0], keys.shape[1]) != (self.tail.rows, self.tail.heads):
            raise CacheMisuse(
                f"this cache holds {self.tail.rows} rows of {self.tail.heads} kv heads, and got new keys of shape "
                f"{tuple(keys.shape)}; use a new cache for another batch or model, or cache.reset()"
            )
        self.tail.append(keys.detach(), values.detach(), self.seen, exactly=exactly)
        self.seen += keys.shape[2]
        self.tail_growth += keys.shape[2]

    def parts(self, placement: Placement) -> list[Segment]:
        """All that is held, in time order, where attention can read it."""
        parts = [placement.get(segment) for segment in self.segments]
        if self.tail is not None and self.tail.length:
            parts.append(self.tail.as_segment())
        return parts

    def counts(self) -> Tensor:
        """(b, h) int64 on the CPU: tokens held."""
        assert self.tail is not None
        total = torch.full((self.rows, self.heads), self.tail.length, dtype=torch.int64)
        for segment in self.segments:
            total += segment.layout.counts()
        return total

    def keep(self, plan: Plan, held: Held, slots: list[Tensor], keep: Tensor) -> None:
        """Holds only a kept set.

        Args:
            plan: whose codec stores what leaves the tail.
            held: the padded rows that were scored.
            slots: for each part the index of its slots along them.
            keep: (b, h, n) bool.
        """
        assert self.tail is not None and plan.score is not None
        codec = plan.encode
        if codec.exact and codec.block == 0:
            cut = cut_lanes(keep)
            if cut is not None and cut.owner is None:
                self.tail.replace(_gather(held, cut))
                self.segments = []
                self._take_mass(held, [cut])
                return
        newest = self._common_newest(held, keep, plan.score.recents)
        old = keep & ~held.recent(newest) if newest else keep
        cuts: list[Cut] = []
        segments: list[Segment] = []
        if codec.exact:
            cut = cut_lanes(old, codec.lane_multiple)
            if cut is not None:
                plain = _gather(held, cut)
                segments.append(plan.store.put(codec.encode(plain.layout, plain.keys, plain.values)))
                cuts.append(cut)
        else:
            for segment, slot in zip(self.segments, slots, strict=False):
                mine, lane_of, slot_of = _whose(segment.layout, slot, old)
                cut = cut_lanes(mine, codec.lane_multiple)
                if cut is not None:
                    layout = cut.layout(held.keys.shape[0], held.keys.shape[1], held.positions)
                    lane, place = lane_of[cut.owners[:, None], cut.index], slot_of[cut.owners[:, None], cut.index]
                    segments.append(plan.store.put(plan.store.get(segment).regather(lane, place, layout)))
                    cuts.append(cut)
            in_tail = _whose(self.tail.as_segment().layout, slots[-1], old)[0]
            cut = cut_lanes(in_tail, codec.lane_multiple)
            if cut is not None:
                plain = _gather(held, cut)
                segments.append(plan.store.put(codec.encode(plain.layout, plain.keys, plain.values)))
                cuts.append(cut)
        self.tail.drop_oldest(self.tail.length - newest)
        if newest:
            recent = cut_lanes(keep & held.recent(newest))
            assert recent is not None
            cuts.append(recent)
        self.segments = segments
        self._take_mass(held, cuts)

    def flush(self, plan: Plan) -> None:
        """Encodes the oldest whole blocks of the tail, once they are past what the codec leaves in full precision."""
        codec, tail = plan.encode, self.tail
        if tail is None or codec.block == 0 or self.due or self.recording or tail.length < codec.tail + codec.block:
            return
        count = (tail.length - codec.tail) // codec.block * codec.block
        whole = tail.as_segment()
        layout = whole.layout
        positions = None if layout.positions is None else layout.positions[:, :count].clone()
        block = Layout(rows=self.rows, heads=self.heads, size=count, start=layout.start, positions=positions)
        self.segments.append(plan.store.put(codec.encode(block, whole.keys[:, :count], whole.values[:, :count])))
        tail.drop_oldest(count)
        if self.evidence.mass:
            *before, last = self.evidence.mass
            split = (last[:, :count].clone(), last[:, count:].clone())
            mass = (*before, *(split if tail.length else split[:1]))
            self.evidence = Evidence(queries=self.evidence.queries, columns=self.evidence.columns, mass=mass)

    def crop(self, count: int, *, exact: bool) -> None:
        """Takes back the newest tokens outside of a recorded forward, where that leaves no trace."""
        if count == 0 or self.tail is None:
            return
        if not exact or self.seen - count < self.settled_seen or count > self.tail.length:
            raise CacheMisuse(
                f"asked to take back {count} tokens of {self.seen} seen, but they have already had a part in compressing the "
                "cache; call cache.activate_past_recording() before the forward that may be rolled back"
            )
        self.forget_newest(count)

    def forget_newest(self, count: int) -> None:
        """Drops the newest tokens, of which nothing but the tail has heard."""
        if count:
            assert self.tail is not None
            self.tail.crop(count)
            self.seen -= count
            self.tail_growth -= count

    def select_rows(self, index: Tensor) -> None:
        """Becomes the layer of a batch made of the rows `index` (k,) int64 of this one."""
        if self.tail is None:
            return
        parts = [*self.segments, *([self.tail.as_segment()] if self.tail.length else [])]
        mass = [
            m.index_select(0, part.layout.lanes_of_rows(index)[0].to(m.device))
            for part, m in zip(parts, self.evidence.mass, strict=False)
        ]
        self.evidence = self.evidence.select_rows(index, mass)
        self.segments = [segment.rows(index) for segment in self.segments]
        self.tail.select_rows(index)
        if self.pending is not None:
            raise CacheMisuse("the rows of a cache cannot change between a recorded forward and its crop")

    def entries(self, layer: int, placement: Placement) -> list[Entry]:
        """What the ledger lists for this layer, `layer` of the model."""
        entries = []
        if self.tail is not None:
            form = self.tail.closed_form_bytes()
            entries.append(Entry(layer=layer, room="tail", tensors=self.tail.tensors(), closed_form=form))
        for segment in self.segments:
            form, tier = segment.closed_form_bytes(), placement.tier(segment)
            entries.append(Entry(layer=layer, room="encode", tier=tier, tensors=segment.tensors(), closed_form=form))
        seen = self.evidence.tensors()
        if self.pending is not None:
            seen = {**seen, "pending": self.pending.query}
        form = sum(t.numel() * t.element_size() for t in seen.values())
        entries.append(Entry(layer=layer, room="observe", tensors=seen, closed_form=form))
        return entries

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """JSON-able fields and tensors from which `restore` makes this layer again."""
        if self.pending is not None:
            raise CacheMisuse("a cache cannot be saved between a recorded forward and its crop")
        fields: dict[str, Any] = {
            name: getattr(self, name) for name in ("seen", "settled_seen", "walk_at", "tail_growth", "scaling")
        }
        tensors = {f"evidence.{name}": t for name, t in self.evidence.tensors().items()}
        if self.tail is not None:
            fields["rows"], fields["heads"] = self.rows, self.heads
            fields["tail"], kept = self.tail.state()
            tensors |= {f"tail.{name}": t for name, t in kept.items()}
        fields["segments"] = []
        for i, segment in enumerate(self.segments):
            own, kept = segment.state()
            layout = {"size": segment.layout.size, "start": segment.layout.start}
            fields["segments"].append({"codec": segment.codec, "layout": layout, "fields": own})
            tensors |= {f"segment.{i}.{name}": t for name, t in kept.items()}
            tensors |= {f"segment.{i}.layout.{name}": t for name, t in segment.layout.tensors().items()}
        return fields, tensors

    def restore(self, fields: Mapping[str, Any], tensors: Mapping[str, Tensor], plan: Plan) -> None:
        """Becomes the layer that `state()` described."""
        self.reset()
        for name in ("seen", "settled_seen", "walk_at", "tail_growth", "scaling"):
            setattr(self, name, fields[name])
        if "tail" not in fields:
            return
        rows, heads = fields["rows"], fields["heads"]
        self.tail = Tail.from_state(rows, heads, fields["tail"], _under("tail.", tensors))
        for i, saved in enumerate(fields["segments"]):
            mine = _under(f"segment.{i}.", tensors)
            layout = Layout(rows=rows, heads=heads, **saved["layout"], **_under("layout.", mine))
            segment_type = PlainSegment if saved["codec"] == "plain" else plan.encode.segment_type()
            self.segments.append(plan.store.put(segment_type.from_state(layout, saved["fields"], mine)))
        evidence = _under("evidence.", tensors)
        mass = tuple(evidence[f"mass.{i}"] for i in range(sum(name.startswith("mass.") for name in evidence)))
        self.evidence = Evidence(queries=evidence.get("queries"), columns=evidence.get("columns"), mass=mass)

    def _common_newest(self, held: Held, keep: Tensor, recents: int) -> int:
        """How many of the newest columns can stay a tail: all the recents if every row and head keeps them all."""
        assert self.tail is not None
        recents = min(recents, self.tail.length, self.seen)
        newest = (held.positions >= self.seen - recents) & keep
        return recents if bool((newest.sum(-1) == recents).all()) else 0

    def _take_mass(self, held: Held, cuts: list[Cut]) -> None:
        if held.mass is not None:
            flat = held.mass.flatten(0, 1)
            mass = tuple(flat[cut.owners[:, None], cut.index] for cut in cuts)
            self.evidence = Evidence(queries=self.evidence.queries, columns=self.evidence.columns, mass=mass)


def _gather(held: Held, cut: Cut) -> PlainSegment:
    b, h = held.keys.shape[:2]
    keys = held.keys.flatten(0, 1)[cut.owners[:, None], cut.index]
    values = held.values.flatten(0, 1)[cut.owners[:, None], cut.index]
    return PlainSegment(layout=cut.layout(b, h, held.positions), keys=keys, values=values)


def _whose(layout: Layout, slots: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The kept tokens (b, h, n) that one part holds, and for each of them its lane and slot there (b * h, n)."""
    flat = keep.flatten(0, 1)
    mine = torch.zeros_like(flat)
    lane_of = torch.zeros(flat.shape, dtype=torch.int64, device=flat.device)
    slot_of = torch.zeros_like(lane_of)
    owner = layout.owners(flat.device)[:, None].expand_as(slots)
    filled = layout.filled(flat.device)
    filled = torch.ones_like(slots, dtype=torch.bool) if filled is None else filled
    lane = torch.arange(layout.lanes, device=flat.device)[:, None].expand_as(slots)
    place = torch.arange(layout.size, device=flat.device)[None].expand_as(slots)
    at = owner[filled], slots[filled]
    mine[at], lane_of[at], slot_of[at] = True, lane[filled], place[filled]
    return (mine & flat).view_as(keep), lane_of, slot_of


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
