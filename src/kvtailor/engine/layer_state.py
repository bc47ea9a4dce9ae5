"""One compressed layer: what it holds, what was observed of it, when the plan acts on it, what the model gave it."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvtailor.encode.contract import Codec, CodecContext
from kvtailor.engine.layer_group import joined
from kvtailor.engine.layer_parts import Clock, ModelPart, Observed, Stored
from kvtailor.engine.pending import Checkpoint, Draft, Pending
from kvtailor.errors import CacheMisuse
from kvtailor.ledger import Entry, storage_bytes
from kvtailor.ops.segments.coded import under
from kvtailor.ops.segments.latent_keys import as_one_head
from kvtailor.ops.segments.weighted import Weighted
from kvtailor.store.contract import OffloadStore
from kvtailor.store.recent_window import Tail
from kvtailor.types import Layout, PlainSegment, Segment

if TYPE_CHECKING:
    from kvtailor.plan import Plan

__all__ = ["LayerState", "check_rows_and_heads"]


class LayerState:
    """What one layer remembers between forwards.

    Attributes:
        index: 0-based among the layers that the plan compresses.
        layers: how many layers the plan compresses.
        offload: where the cache's segments live.
        stored: what is held.
        observed: what earlier forwards and evictions left for the plan's methods.
        clock: when the plan acts next.
        model: what belongs to the model.
        pending: recorded forwards that wait for a crop.
        draft: all tokens of the recorded forward that waits, where they are decoded ones.
        unsteady: segments that `engine.steady` has found to be decoded to be read, so that it need not look again.
        layer_group: the layers whose tokens are encoded at once, this one among them; none where it is alone.
    """

    def __init__(self, index: int, layers: int = 1, offload: OffloadStore | None = None):
        self.index, self.layers, self.offload = index, layers, offload
        self.model = ModelPart()
        self._codec: Codec | None = None
        self._layer_group: tuple[weakref.ref[LayerState], ...] = ()
        self.reset()

    def reset(self) -> None:
        """Forget everything but what belongs to the model."""
        self.stored, self.observed, self.clock = Stored(), Observed(), Clock()
        self.pending: Pending | None = None
        self.draft: Draft | None = None
        self.unsteady: list[weakref.ref[Segment]] = []

    @property
    def rows(self) -> int:
        """b; 0 before the first token."""
        return 0 if self.stored.tail is None else self.stored.tail.rows

    @property
    def heads(self) -> int:
        """h; 0 before the first token."""
        return 0 if self.stored.tail is None else self.stored.tail.heads

    def codec(self, plan: Plan) -> Codec:
        """The plan's codec, as it is on this layer."""
        if self._codec is None:
            context = CodecContext(
                layer=self.index,
                layers=self.layers,
                rotation=self.model.rotation,
                offset=self.model.offset,
                heads=self.heads or None,
                evicts=plan.evicts,
                calibration=self.model.encoding,
                share=self.model.share,
            )
            self._codec = plan.encode.for_layer(context)
        return self._codec

    def encoder(self, plan: Plan, first: Tensor | None) -> Codec:
        """The same with the queries that it needs; `first` (b,) is the column of each row's first real token."""
        codec, queries, columns = self.codec(plan), self.observed.evidence.queries, self.observed.evidence.columns
        if not codec.needs.window or queries is None or columns is None:
            return codec
        valid = None if first is None else columns >= first.to(columns.device)[:, None]
        return codec.seeing(queries, self.heads, valid)

    def sizes(self) -> tuple[int, int, int]:
        """d, dv and the bytes of an element, of the newest token."""
        assert self.stored.tail is not None
        segment = self.stored.tail.as_segment()
        return segment.keys.shape[-1], segment.values.shape[-1], segment.keys.element_size()

    @property
    def layer_group(self) -> tuple[LayerState, ...]:
        """The layers whose tokens are encoded at once, this one among them; none where it is alone."""
        # Weak: a layer would else keep itself alive through its own group.
        return tuple(state for each in self._layer_group if (state := each()) is not None)

    @layer_group.setter
    def layer_group(self, states: Sequence[LayerState]) -> None:
        self._layer_group = tuple(weakref.ref(state) for state in states)

    def check_fits(self, keys: Tensor) -> None:
        """Raises where new keys (b, h, t, d) are of another batch or model than what is held."""
        if self.stored.tail is not None:
            check_rows_and_heads(keys, self.stored.tail.rows, self.stored.tail.heads)

    def append(self, keys: Tensor, values: Tensor, *, exactly: bool) -> None:
        """New keys (b, h, t, d) and values (b, h, t, dv)."""
        self.check_fits(keys)
        if self.stored.tail is None:
            self.stored.tail = Tail(keys.shape[0], keys.shape[1])
        self.stored.tail.append(keys.detach(), values.detach(), self.stored.seen, exactly=exactly)
        self.stored.seen += keys.shape[2]
        self.clock.growth += keys.shape[2]

    def filled(self, tokens: int) -> None:
        """Count new tokens that were written into the tail's free slots."""
        assert self.stored.tail is not None
        self.stored.tail.filled(tokens, self.stored.seen)
        self.stored.seen += tokens
        self.clock.growth += tokens

    def parts(self) -> list[Segment]:
        """All that is held, in time order, where attention can read it."""
        parts = self.here()
        if self.stored.tail is not None and self.stored.tail.length:
            parts.append(self.stored.tail.as_segment())
        return parts

    def readable_parts(self) -> list[Segment]:
        """All that is held, as keys and values: `parts`, but where the layer holds latents."""
        parts = self.parts()
        return parts if self.model.latents is None else [as_one_head(part) for part in parts]

    def here(self, segments: Sequence[Segment] | None = None) -> list[Segment]:
        """The segments where they can be read; of this layer at an earlier time where they are given."""
        asked = self.stored.segments if segments is None else segments
        return list(asked) if self.offload is None else self.offload.get(self.index, asked, self.restored)

    def put_away(self) -> None:
        """Nobody changes the segments any more: they go where they live, with those of the layers in its group."""
        group = self.group
        if self.offload is not None and self is group[-1]:
            kept = self.offload.put([each.index for each in group], [each.stored.segments for each in group])
            for each, own in zip(group, kept, strict=True):
                each.stored.segments = own

    def restored(self, name: str, layout: Layout, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Segment:
        """The segment of this layer that `Segment.state` described; `name` is its codec's."""
        if name == Weighted.codec:
            held = self.restored(fields["codec"], layout, fields["fields"], under("inner.", tensors))
            return Weighted(layout=layout, inner=held, log_weight=tensors["log_weight"])
        if name == PlainSegment.codec:
            return PlainSegment.from_state(layout, fields, tensors)
        assert self._codec is not None
        return self._codec.restore(layout, fields, tensors)

    def counts(self, real: Tensor | None = None) -> Tensor:
        """(b, h) int64 on the CPU: tokens held.

        Args:
            real: (b, columns) bool, False for padding, which is not counted; None: all that is held is.
        """
        assert self.stored.tail is not None
        layouts = [segment.layout for segment in self.stored.segments]
        if self.stored.tail.length:
            layouts.append(self.stored.tail.as_segment().layout)
        total = torch.zeros((self.rows, self.heads), dtype=torch.int64)
        for layout in layouts:
            total += layout.counts() if real is None else _real_counts(layout, real)
        return total

    def checkpoint(self) -> Checkpoint:
        """Return what `go_back` needs to make this layer again what it is now, until `end_draft`; copy no tensor."""
        if self.offload is not None:
            self.offload.keep(self.index, self.stored.segments)
        return Checkpoint(
            stored=self.stored.copied(),
            observed=copy.copy(self.observed),
            clock=copy.copy(self.clock),
            pending=self.pending,
        )

    def go_back(self, checkpoint: Checkpoint) -> None:
        """Become what the layer was. The checkpoint may be used once, since the layer goes on with its parts."""
        self.stored, self.observed, self.clock = checkpoint.stored, checkpoint.observed, checkpoint.clock
        self.pending = checkpoint.pending
        self.put_away()

    def end_draft(self) -> Draft | None:
        """The draft that waited, which is forgotten here."""
        draft, self.draft = self.draft, None
        if draft is not None and draft.before is not None and self.offload is not None:
            self.offload.keep(self.index, ())
        return draft

    def check_crop(self, count: int, *, exact: bool) -> None:
        """Raises where the newest tokens cannot be taken back outside of a recorded forward."""
        if count == 0 or self.stored.tail is None:
            return
        if not exact or self.stored.seen - count < self.clock.settled_seen or count > self.stored.tail.length:
            raise CacheMisuse(
                f"asked to take back {count} tokens of {self.stored.seen} seen, but they have already had a part in "
                "compressing the cache; call cache.activate_past_recording() before the forward that may be rolled "
                "back"
            )

    def crop(self, count: int, *, exact: bool) -> None:
        """Takes back the newest tokens outside of a recorded forward, where that leaves no trace."""
        self.check_crop(count, exact=exact)
        if count and self.stored.tail is not None:
            self.forget_newest(count)
            self.observed.carry = {}

    def tokens_until_action(self, plan: Plan) -> int | None:
        """New tokens, read at once or one by one, after which the plan acts next while it decodes; None: never."""
        codec, counts = self.codec(plan), []
        if codec.block and self.stored.tail is not None:
            counts.append(max(1, codec.tail + codec.block - self.stored.tail.length))
        eviction = self.tokens_until_eviction(plan)
        if eviction is not None:
            counts.append(eviction)
        return min(counts) if counts else None

    def tokens_until_eviction(self, plan: Plan) -> int | None:
        """The same, until the plan evicts next."""
        if plan.slack_tokens is None:
            return None
        return 1 if self.clock.evict_at is None else max(1, self.clock.evict_at - self.clock.growth + 1)

    def forget_newest(self, count: int) -> None:
        """Drops the newest tokens, of which nothing but the tail has heard."""
        if count:
            assert self.stored.tail is not None
            self.stored.tail.crop(count)
            self.stored.seen -= count
            self.clock.growth -= count

    def select_rows(self, index: Tensor) -> None:
        """Becomes the layer of a batch made of the rows `index` (k,) int64 of this one."""
        if self.pending is not None:
            raise CacheMisuse("the rows of a cache cannot change between a recorded forward and its crop")
        if self.stored.tail is None:
            return
        segments = self.here()
        parts = [*segments, *([self.stored.tail.as_segment()] if self.stored.tail.length else [])]
        mass = [
            m.index_select(0, part.layout.lanes_of_rows(index)[0].to(m.device))
            for part, m in zip(parts, self.observed.evidence.mass, strict=False)
        ]
        self.observed = self.observed.rows(index, mass)
        self.stored.segments = [segment.rows(index) for segment in segments]
        self.stored.tail.select_rows(index)
        self.rejoin()

    def rejoin(self) -> None:
        """Puts the segments away; those of layers that are encoded together once the last of them is there to share."""
        layers = self.layer_group
        if layers and not self.completes:
            return
        if layers and self._codec is not None:
            shared = joined([state.stored.segments for state in layers], self._codec)
            for state, own in zip(layers, shared, strict=True):
                state.stored.segments = own
        self.put_away()
        if self.offload is not None:
            self.offload.rest()

    @property
    def completes(self) -> bool:
        """Whether it is the last of layers that are encoded together."""
        return bool(self._layer_group) and self is self._layer_group[-1]()

    @property
    def group(self) -> tuple[LayerState, ...]:
        """`layer_group`, or this layer alone."""
        return self.layer_group or (self,)

    def device_bytes(self) -> int:
        """What this layer takes on the device, but for segments that are offloaded."""
        return storage_bytes(tensor for entry in self._own_entries(0) for tensor in entry.tensors.values())

    def entries(self, layer: int) -> list[Entry]:
        """What the ledger lists for this layer, `layer` of the model."""
        offloaded = [] if self.offload is None else self.offload.entries(self.index)
        return self._own_entries(layer) + [replace(entry, layer=layer) for entry in offloaded]

    def _own_entries(self, layer: int) -> list[Entry]:
        entries = []
        if self.stored.tail is not None:
            form = self.stored.tail.closed_form_bytes()
            entries.append(Entry(layer=layer, stage="tail", tensors=self.stored.tail.tensors(), closed_form=form))
        for segment in self.stored.segments:
            form = segment.closed_form_bytes()
            entries.append(Entry(layer=layer, stage="encode", tensors=segment.tensors(), closed_form=form))
        seen = self.observed.evidence.tensors() | self.observed.memories()
        # A draft's queries are in the draft.
        pending = None if self.pending is None or self.draft is not None else self.pending.query
        seen |= {
            name: each for name, each in (("pending", pending), ("read", self.observed.tokens_read)) if each is not None
        }
        if self.draft is not None:
            seen |= {"draft.keys": self.draft.keys, "draft.values": self.draft.values, "draft.query": self.draft.query}
        before = {} if self.pending is None else self.pending.carry
        carried = {f"before.{n}": t for n, t in before.items() if t is not self.observed.carry.get(n)} | dict(
            self.observed.carry
        )
        for stage, named in (("observe", seen), ("attend", carried)):
            if named or stage == "observe":
                form = sum(t.numel() * t.element_size() for t in named.values())
                entries.append(Entry(layer=layer, stage=stage, tensors=named, closed_form=form))
        return entries


def check_rows_and_heads(keys: Tensor, rows: int, heads: int) -> None:
    """Raises where new keys (b, h, t, d) are not of the rows and kv heads that are held."""
    if (keys.shape[0], keys.shape[1]) != (rows, heads):
        raise CacheMisuse(
            f"this cache holds {rows} rows of {heads} kv heads, and got new keys of shape {tuple(keys.shape)}; use a "
            "new cache for another batch or model, or cache.reset()"
        )


def _real_counts(layout: Layout, real: Tensor) -> Tensor:
    """(b, h) int64 on the CPU: slots of a layout that are filled with a token and not with padding.

    Args:
        layout: m lanes of s slots.
        real: (b, columns) bool.
    """
    device = real.device
    owners = layout.owners(device)
    rows = torch.div(owners, layout.heads, rounding_mode="floor")
    # (m, s): each lane's row of `real`, at the column of each slot. Filler may name any column.
    columns = layout.columns(device).clamp(0, real.shape[1] - 1).expand(owners.shape[0], -1)
    counted = real[rows[:, None], columns]
    filled = layout.filled(device)
    if filled is not None:
        counted = counted & filled
    total = torch.zeros(layout.rows * layout.heads, dtype=torch.int64, device=device)
    return total.index_add_(0, owners, counted.sum(-1)).view(layout.rows, layout.heads).cpu()
