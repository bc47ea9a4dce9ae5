"""The state of one compressed layer: what it holds, what was observed, when the plan acts, what the model gave it.

`LayerState` has four parts: `Stored`, `Observed`, `Clock` and `ModelPart`; each returns its fields and tensors for a
saved cache. `Pending` and `DraftTokens` are tokens of recorded forwards that a crop may still remove. `encode_parts`
and `join_parts` are for layers whose tokens are encoded together.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvtailor.encode.contract import Codec, CodecContext
from kvtailor.engine.observe import observe
from kvtailor.errors import CacheMisuse
from kvtailor.ledger import Entry, storage_bytes
from kvtailor.ops.segments.around import Weighted
from kvtailor.ops.segments.coded import under
from kvtailor.ops.segments.latent_keys import as_one_head
from kvtailor.store.contract import OffloadStore
from kvtailor.store.recent_window import Tail
from kvtailor.types import (
    ALL_HEADS,
    PLAIN_SOFTMAX,
    HeadShare,
    KeyOffset,
    Layout,
    Needs,
    PlainSegment,
    Rotation,
    Segment,
    Softmax,
    Visibility,
)
from kvtailor.types.checked_returns import check_segment, contract_error
from kvtailor.types.evidence import Evidence
from kvtailor.types.latent_attention import LatentAttention

if TYPE_CHECKING:
    from kvtailor.plan import Plan

__all__ = [
    "Checkpoint",
    "Clock",
    "DraftTokens",
    "LayerState",
    "ModelPart",
    "Observed",
    "Pending",
    "ReaderQueries",
    "Stored",
    "check_rows_and_heads",
    "encode_parts",
    "join_parts",
    "whole_number",
]


# What `Observed` remembers of earlier evictions and of a reconstruction.
_MEMORIES = ("scored", "scored_columns", "reconstruction")
# The names of a clock's numbers that saved caches have had from the beginning.
_CLOCK_NAMES = {"settled_seen": "settled_seen", "evict_at": "walk_at", "growth": "tail_growth", "prompt": "prompt"}
# Of these the first versions of the file have none.
_SINCE = {"prompt": 0}


@dataclass
class Stored:
    """The tokens that a layer holds.

    Attributes:
        tail: the recent window in full precision; None before the first token.
        segments: encoded parts in time order, `Placed` if they are on a tier; they are older than the tail.
        seen: tokens seen, padding included.
    """

    tail: Tail | None = None
    segments: list[Segment] = field(default_factory=list)
    seen: int = 0

    def copied(self) -> Stored:
        """Return a copy with a list and a tail of its own, but the same tensors.

        Tensors are replaced and never written to, except for the tail's buffers behind the last token.
        """
        return Stored(None if self.tail is None else self.tail.copied(), list(self.segments), self.seen)

    def state(self, here: list[Segment]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return JSON-able fields and tensors that describe it.

        Args:
            here: the segments, readable and none of them `Placed`.
        """
        fields: dict[str, Any] = {"seen": self.seen}
        if self.tail is None:
            return fields, {}
        fields["rows"], fields["heads"] = self.tail.rows, self.tail.heads
        fields["tail"], kept = self.tail.state()
        tensors = {f"tail.{name}": t for name, t in kept.items()}
        fields["segments"] = []
        for i, segment in enumerate(here):
            own, kept = segment.state()
            layout = {"size": segment.layout.size, "start": segment.layout.start}
            fields["segments"].append({"codec": segment.codec, "layout": layout, "fields": own})
            tensors |= {f"segment.{i}.{name}": t for name, t in kept.items()}
            tensors |= {f"segment.{i}.layout.{name}": t for name, t in segment.layout.tensors().items()}
        return fields, tensors


@dataclass
class Observed:
    """What earlier forwards and evictions have left for the plan's methods.

    Attributes:
        evidence: what the scorer and other methods need.
        carry: tensors of the plan's attention for its next call, by name, batch rows first.
        tokens_read: (b, h) tokens that the last attention read; None: all.
        scored, scored_columns: (b, h, k) the scores of the last eviction, or (b, h, c, k) the scorer's notes, and
            their columns (b, h, k); None: the scorer does not need them.
        reconstruction: (b, h, n) float32 what a pass that repeats the context measured for each column; None: there
            was no such pass.
        repeated: samples of the queries of such passes, until the context is compressed.
        repeated_real: (b, t) bool: False for queries of these passes that are padding.
    """

    evidence: Evidence = field(default_factory=Evidence)
    carry: Mapping[str, Tensor] = field(default_factory=dict)
    tokens_read: Tensor | None = None
    scored: Tensor | None = None
    scored_columns: Tensor | None = None
    reconstruction: Tensor | None = None
    repeated: Evidence | None = None
    repeated_real: Tensor | None = None

    def repeat(self, query: Tensor, real: Tensor, most: int) -> None:
        """Sample at most `most` queries of each row from (b, q, t, d) and from earlier passes; `real` is (b, t)."""
        before = real[:, :0] if self.repeated_real is None else self.repeated_real
        self.repeated_real = torch.cat([before, real], 1)
        self.repeated = observe(
            Needs(rows=most), self.repeated or Evidence(), query, before.shape[1], None, real=self.repeated_real
        )

    def end_repetition(self, *, again: bool) -> None:
        """Forget the samples of a repetition, and unless it will be used `again`, what it measured."""
        self.repeated = self.repeated_real = None
        if not again:
            self.reconstruction = None

    def memories(self) -> dict[str, Tensor]:
        """Return what earlier evictions and a reconstruction have left, by attribute; batch rows first."""
        named = {name: getattr(self, name) for name in _MEMORIES}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def rows(self, index: Tensor, mass: Sequence[Tensor]) -> Observed:
        """Return the same for a batch of the rows `index` (k,) int64 of this one.

        Args:
            index: rows.
            mass: the mass of the evidence, already of these rows.
        """

        def picked(tensor: Tensor) -> Tensor:
            return tensor.index_select(0, index.to(tensor.device))

        memories: dict[str, Any] = {name: picked(tensor) for name, tensor in self.memories().items()}
        return Observed(
            evidence=self.evidence.select_rows(index, mass),
            carry={name: picked(tensor) for name, tensor in self.carry.items()},
            tokens_read=self.tokens_read,
            **memories,
        )

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return JSON-able fields and tensors that describe it, without `tokens_read`, which is of one forward."""
        tensors = {f"evidence.{name}": t for name, t in self.evidence.tensors().items()}
        tensors |= {f"memory.{name}": t for name, t in self.memories().items()}
        return {}, tensors | {f"carry.{name}": t for name, t in self.carry.items()}

    @classmethod
    def from_state(cls, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Observed:
        """Return what `state` described.

        Raises:
            ValueError: a name is unknown.
        """
        memories = under("memory.", tensors)
        if unknown := memories.keys() - set(_MEMORIES):
            raise ValueError(f"a layer remembers {', '.join(sorted(unknown))}, which no layer does")
        return cls(
            evidence=Evidence.from_tensors(under("evidence.", tensors)), carry=under("carry.", tensors), **memories
        )


@dataclass
class Clock:
    """When the plan acts on a layer.

    Attributes:
        settled_seen: tokens seen at the last eviction.
        evict_at: how many tokens after the last eviction the next one is due while decoding; None before the first
            eviction, and under a plan that is never cut while it decodes.
        growth: tokens since the last eviction.
        due: an eviction is due, and waits for later layers.
        decoding: the last forward was of decoded tokens, and of no prompt or turn.
        reindex: tokens were evicted or encoded since the attention last indexed what is held.
        prompt: tokens seen before the first that was decoded.
    """

    settled_seen: int = 0
    evict_at: int | None = None
    growth: int = 0
    due: bool = False
    decoding: bool = field(default=False, compare=False)
    reindex: bool = False
    prompt: int = 0

    def count_arrived(self, new: int, seen: int) -> None:
        """Count `new` tokens of a prompt or a turn, or a decoded one; `seen` includes them."""
        if new > 1 and seen - new <= self.prompt:
            self.prompt = seen

    def is_due(self, slack: int | None, new: int) -> bool:
        """Return whether an eviction is due after `new` new tokens, under a plan with such a `slack_tokens`."""
        return new > 1 or (slack is not None and (self.evict_at is None or self.growth > self.evict_at))

    def settle(self, slack: int | None, seen: int) -> None:
        """Begin anew behind an eviction, at `seen` tokens."""
        self.due, self.settled_seen, self.evict_at, self.growth = False, seen, slack, 0

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return JSON-able fields that describe it between two forwards, when nothing is due."""
        return {name: getattr(self, own) for own, name in _CLOCK_NAMES.items()}, {}

    @classmethod
    def from_state(cls, fields: Mapping[str, Any]) -> Clock:
        """Return what `state` described.

        Raises:
            ValueError: a number is none, or below 0.
        """
        fields = _SINCE | dict(fields)
        found: dict[str, Any] = {
            own: None if own == "evict_at" and fields[name] is None else whole_number(fields, name)
            for own, name in _CLOCK_NAMES.items()
        }
        return cls(**found)


@dataclass
class ModelPart:
    """What belongs to the model and not to a text; `reset` keeps it.

    Attributes:
        scaling: the model's own factor before the softmax.
        softmax: what its softmax has besides, as of the newest forward; it is not saved.
        output: returns the layer's output projection, (q, dv, D), as it is now; for plans that need it.
        rotation: the layer's rotary embedding, for plans that need it.
        offset: the constant part of its keys, for plans that need it; None: there is none, or it is not known.
        calibration: this layer's tensors of the scorer's calibration file.
        encoding: the tensors of the codec's calibration files, stacked over the layers.
        share: which of the model's kv heads this process holds.
        latents: the layer's projections, if it holds latents as keys and rotated keys as values of one kv head; None:
            it holds keys and values. Queries are the model's own in either case, and are absorbed when they are used.
    """

    scaling: float = 1.0
    softmax: Softmax = PLAIN_SOFTMAX
    output: Callable[[], Tensor] | None = None
    rotation: Rotation | None = None
    offset: KeyOffset | None = None
    calibration: Mapping[str, Tensor] | None = None
    encoding: Mapping[str, Tensor] | None = None
    share: HeadShare = ALL_HEADS
    latents: LatentAttention | None = None

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return JSON-able fields of what forwards have set; the rest comes from the model when a cache is loaded."""
        return {"scaling": self.scaling}, {}

    def take_state(self, fields: Mapping[str, Any]) -> None:
        """Restore what `state` described.

        Raises:
            ValueError: the factor is no number above 0.
        """
        value = fields["scaling"]
        if not (isinstance(value, float | int) and 0 < value < float("inf")):
            raise ValueError(f"scaling of a layer is {value!r}")
        self.scaling = value


def whole_number(fields: Mapping[str, Any], name: str) -> int:
    """Return a count from a layer's fields.

    Raises:
        ValueError: it is no whole number, or below 0.
    """
    value = fields[name]
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} of a layer is {value!r}")
    return value


@dataclass(frozen=True, kw_only=True)
class ReaderQueries:
    """Queries of another attention module that reads what a layer holds, scaled for the layer's own factor.

    Attributes:
        query: (b, q, t, d) post-RoPE, of the last t tokens of the forward.
        visible: what each of these tokens may see.
        mass: for each part (m, s) the attention that it received; None: it is not needed.
    """

    query: Tensor
    visible: Visibility
    mass: list[Tensor] | None = None

    def and_next(self, other: ReaderQueries) -> ReaderQueries:
        """Join these queries and those of the next forward, as if all had come at once."""
        visible = other.visible.with_earlier(self.query.shape[2])
        return replace(other, query=torch.cat([self.query, other.query], 2), visible=visible)


@dataclass(frozen=True, kw_only=True)
class Pending:
    """Recorded forwards whose last tokens a crop may remove.

    Attributes:
        query: (b, q, t, d) post-RoPE.
        visible: what each of them may see.
        carry: the attention's carry before them.
        decoded: the tokens count as decoded if they stay, and not as a prompt or a turn.
        others: queries of other modules that read the same layer.
    """

    query: Tensor
    visible: Visibility
    carry: Mapping[str, Tensor]
    decoded: bool = False
    others: tuple[ReaderQueries, ...] = ()

    @property
    def tokens(self) -> int:
        """Return how many tokens may be removed."""
        return self.query.shape[2]

    def followed_by(self, query: Tensor, visible: Visibility, others: Sequence[ReaderQueries] = ()) -> Pending:
        """Join these and the next forward, with queries (b, q, t, d), as if all had come at once."""
        joined = visible.with_earlier(self.tokens)
        both = tuple(old.and_next(new) for old, new in zip(self.others, others, strict=True))
        return replace(self, query=torch.cat([self.query, query], 2), visible=joined, others=both)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The state of a layer before a draft; see `LayerState.checkpoint`."""

    stored: Stored
    observed: Observed
    clock: Clock
    pending: Pending | None


@dataclass(frozen=True, kw_only=True)
class DraftTokens:
    """Tokens of a recorded forward that count as decoded if they stay.

    Attributes:
        keys, values: (b, h, t, d) and (b, h, t, dv).
        query: (b, q, t, d) post-RoPE.
        visible: what each of them may see.
        before: the layer before the first of them, if the plan acts after some of them; else None.
    """

    keys: Tensor
    values: Tensor
    query: Tensor
    visible: Visibility
    before: Checkpoint | None = field(default=None, repr=False)

    @property
    def tokens(self) -> int:
        """t."""
        return self.query.shape[2]

    def piece(self, first: int, count: int) -> DraftTokens:
        """Return `count` of the tokens from `first` on, without `before`."""
        last = self.tokens - first - count
        return DraftTokens(
            keys=self.keys[:, :, first : first + count],
            values=self.values[:, :, first : first + count],
            query=self.query[:, :, first : first + count],
            visible=self.visible.without_last(last).without_first(first),
        )


def encode_parts(
    parts: Sequence[PlainSegment], codec: Codec, first: Tensor | None, *, newest: int | None = None, seen: int = 0
) -> Sequence[Segment]:
    """Encode the tokens of a group of layers, see `Codec.layer_groups`.

    Args:
        parts: the same tokens of each layer.
        codec: of the last layer.
        first: see `Codec.encode`.
        newest, seen: see `Codec.encode_aged`; None: the codec does not depend on the age of tokens.

    Raises:
        CacheMisuse: the layers hold different tokens.
        MethodError: the codec does not return a segment for each layer.
    """
    _check(parts)
    found: Sequence[Segment]
    if codec.ages and newest is not None:
        found = [
            codec.encode_aged(part.layout, part.keys, part.values, first, newest=newest, seen=seen) for part in parts
        ]
    else:
        found = codec.encode_group(parts[-1].layout, [(part.keys, part.values) for part in parts], first)
    if len(found) != len(parts):
        raise contract_error(codec, f"returned {len(found)} segments for {len(parts)} layers")
    for part, segment in zip(parts, found, strict=True):
        check_segment(codec, segment, codec.segment_type(), part)
    return found


def join_parts(held: Sequence[Sequence[Segment]], codec: Codec, first: Tensor | None = None) -> list[list[Segment]]:
    """Return the segments of a group of layers, sharing again what they shared, after the same change to each of them.

    Tokens that waited for the whole group are encoded.

    Args:
        held: the segments of each layer.
        codec, first: see `encode_parts`.

    Raises:
        CacheMisuse, MethodError: see `encode_parts`.
    """
    found: list[list[Segment]] = [[] for _ in held]
    for parts in zip(*held, strict=True):
        waiting = [part for part in parts if isinstance(part, PlainSegment)]
        if not waiting:
            _check(parts)
        for own, segment in zip(
            found, encode_parts(waiting, codec, first) if waiting else codec.joined(parts), strict=True
        ):
            own.append(segment)
    return found


def _check(parts: Sequence[Segment]) -> None:
    for other in parts[:-1]:
        if not _same_tokens(parts[-1].layout, other.layout):
            raise CacheMisuse(
                "layers whose tokens are encoded together hold different tokens, and so cannot share a segment; use "
                "another codec, or a new cache"
            )


def _same_tokens(one: Layout, other: Layout) -> bool:
    if (one.start, one.size, one.lanes) != (other.start, other.size, other.lanes):
        return False
    for mine, its in ((one.positions, other.positions), (one.owner, other.owner), (one.lengths, other.lengths)):
        if (mine is None) != (its is None) or (mine is not None and its is not None and not torch.equal(mine, its)):
            return False
    return True


class LayerState:
    """The state of one layer between forwards.

    Attributes:
        index: 0-based among the layers that the plan compresses.
        layers: how many layers the plan compresses.
        offload: holds the cache's segments that are on a tier.
        stored: what is held.
        observed: what earlier forwards and evictions left for the plan's methods.
        clock: when the plan acts next.
        model: what belongs to the model.
        pending: recorded forwards that wait for a crop.
        draft: the tokens of the recorded forward that waits, if they count as decoded.
        without_fast_path: segments that `engine.fast_path` has found unreadable as they are stored.
        layer_group: the layers whose tokens are encoded together with this one's, it included; empty: it is alone.
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
        self.draft: DraftTokens | None = None
        self.without_fast_path: list[weakref.ref[Segment]] = []

    @property
    def rows(self) -> int:
        """Return b; 0 before the first token."""
        return 0 if self.stored.tail is None else self.stored.tail.rows

    @property
    def heads(self) -> int:
        """Return h; 0 before the first token."""
        return 0 if self.stored.tail is None else self.stored.tail.heads

    def codec(self, plan: Plan, heads: int = 0) -> Codec:
        """Return the plan's codec for this layer; `heads`: its kv heads, where it holds no token yet."""
        if self._codec is None:
            context = CodecContext(
                layer=self.index,
                layers=self.layers,
                rotation=self.model.rotation,
                offset=self.model.offset,
                heads=self.heads or heads or None,
                evicts=plan.evicts,
                calibration=self.model.encoding,
                share=self.model.share,
            )
            self._codec = plan.encode.for_layer(context)
        return self._codec

    def encoder(self, plan: Plan, first: Tensor | None) -> Codec:
        """Return the codec with the queries that it needs; `first`: see `Codec.encode`."""
        codec, queries, columns = self.codec(plan), self.observed.evidence.queries, self.observed.evidence.columns
        if not codec.needs.window or queries is None or columns is None:
            return codec
        valid = None
        if first is not None:
            begin = first.to(columns.device)
            valid = columns >= (begin[:, None] if begin.ndim == 1 else begin[:, columns])
        return codec.seeing(queries, self.heads, valid)

    def sizes(self) -> tuple[int, int, int]:
        """Return d, dv and the bytes of an element, of the newest token."""
        assert self.stored.tail is not None
        segment = self.stored.tail.as_segment()
        return segment.keys.shape[-1], segment.values.shape[-1], segment.keys.element_size()

    @property
    def layer_group(self) -> tuple[LayerState, ...]:
        """Return the layers whose tokens are encoded together with this one's, it included; empty: it is alone."""
        # Weak: a layer would else keep itself alive through its own group.
        return tuple(state for each in self._layer_group if (state := each()) is not None)

    @layer_group.setter
    def layer_group(self, states: Sequence[LayerState]) -> None:
        self._layer_group = tuple(weakref.ref(state) for state in states)

    def check_fits(self, keys: Tensor) -> None:
        """Raise unless new keys (b, h, t, d) fit the batch and the model of what is held."""
        if self.stored.tail is not None:
            check_rows_and_heads(keys, self.stored.tail.rows, self.stored.tail.heads)

    def append(self, keys: Tensor, values: Tensor, *, exactly: bool) -> None:
        """Append new keys (b, h, t, d) and values (b, h, t, dv) to the tail."""
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
        """Return all that is held, in time order and readable by attention."""
        parts = self.here()
        if self.stored.tail is not None and self.stored.tail.length:
            parts.append(self.stored.tail.as_segment())
        return parts

    def readable_parts(self) -> list[Segment]:
        """Return all that is held as keys and values: `parts`, or for a layer of latents these as one kv head."""
        parts = self.parts()
        return parts if self.model.latents is None else [as_one_head(part) for part in parts]

    def here(self, segments: Sequence[Segment] | None = None) -> list[Segment]:
        """Return the segments, fetched from their tier; `segments`: those of this layer at an earlier time."""
        asked = self.stored.segments if segments is None else segments
        return list(asked) if self.offload is None else self.offload.get(self.index, asked, self.restored)

    def put_away(self) -> None:
        """Hand the segments of this layer and its group to their tier; they do not change any more."""
        group = self.group
        if self.offload is not None and self is group[-1]:
            kept = self.offload.put([each.index for each in group], [each.stored.segments for each in group])
            for each, own in zip(group, kept, strict=True):
                each.stored.segments = own

    def restored(self, name: str, layout: Layout, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Segment:
        """Return the segment of this layer that `Segment.state` described; `name` is its codec's."""
        if name == Weighted.codec:
            held = self.restored(fields["codec"], layout, fields["fields"], under("inner.", tensors))
            return Weighted(layout=layout, inner=held, log_weight=tensors["log_weight"])
        if name == PlainSegment.codec:
            return PlainSegment.from_state(layout, fields, tensors)
        assert self._codec is not None
        return self._codec.restore(layout, fields, tensors)

    def counts(self, real: Tensor | None = None) -> Tensor:
        """Return how many tokens are held, (b, h) int64 on the CPU.

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
        """Return what `restore` needs to undo later changes, until `end_draft`; no tensor is copied."""
        if self.offload is not None:
            self.offload.keep(self.index, self.stored.segments)
        return Checkpoint(
            stored=self.stored.copied(),
            observed=copy.copy(self.observed),
            clock=copy.copy(self.clock),
            pending=self.pending,
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore the layer from a checkpoint, which can be used only once, since the layer takes over its parts."""
        self.stored, self.observed, self.clock = checkpoint.stored, checkpoint.observed, checkpoint.clock
        self.pending = checkpoint.pending
        self.put_away()

    def end_draft(self) -> DraftTokens | None:
        """Forget the draft that waited, and return it."""
        draft, self.draft = self.draft, None
        if draft is not None and draft.before is not None and self.offload is not None:
            self.offload.keep(self.index, ())
        return draft

    def check_crop(self, count: int, *, exact: bool) -> None:
        """Raise if the newest tokens cannot be removed outside of a recorded forward."""
        if count == 0 or self.stored.tail is None:
            return
        if count > self.stored.seen:
            raise CacheMisuse(f"asked to take back {count} tokens, and {self.stored.seen} were seen: take back fewer")
        if not exact or self.stored.seen - count < self.clock.settled_seen or count > self.stored.tail.length:
            raise CacheMisuse(
                f"asked to take back {count} tokens of {self.stored.seen} seen, but they have already had a part in "
                "compressing the cache; call cache.activate_past_recording() before the forward that may be rolled "
                "back"
            )

    def crop(self, count: int, *, exact: bool) -> None:
        """Remove the newest tokens outside of a recorded forward, if nothing depends on them yet."""
        self.check_crop(count, exact=exact)
        if count and self.stored.tail is not None:
            self.forget_newest(count)
            self.observed.carry = {}

    def tokens_until_action(self, plan: Plan) -> int | None:
        """Return after how many decoded tokens, at once or one by one, the plan acts next; None: never."""
        codec, counts = self.codec(plan), []
        if codec.block and self.stored.tail is not None:
            counts.append(max(1, codec.tail + codec.block - self.stored.tail.length))
        eviction = self.tokens_until_eviction(plan)
        if eviction is not None:
            counts.append(eviction)
        return min(counts) if counts else None

    def tokens_until_eviction(self, plan: Plan) -> int | None:
        """Return after how many decoded tokens the plan evicts next; None: never."""
        if plan.slack_tokens is None:
            return None
        return 1 if self.clock.evict_at is None else max(1, self.clock.evict_at - self.clock.growth + 1)

    def forget_newest(self, count: int) -> None:
        """Drop the newest tokens: they are in the tail alone, neither observed nor encoded."""
        if count:
            assert self.stored.tail is not None
            self.stored.tail.crop(count)
            self.stored.seen -= count
            self.clock.growth -= count

    def select_rows(self, index: Tensor) -> None:
        """Keep only the rows `index` (k,) int64, in this order; a row may occur several times."""
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
        """Hand the segments to their tier; those of layers that are encoded together at the call for the last one."""
        layers = self.layer_group
        if layers and not self.completes:
            return
        if layers and self._codec is not None:
            shared = join_parts([state.stored.segments for state in layers], self._codec)
            for state, own in zip(layers, shared, strict=True):
                state.stored.segments = own
        self.put_away()
        if self.offload is not None:
            self.offload.rest()

    @property
    def completes(self) -> bool:
        """Whether it is the last of the layers that are encoded together."""
        return bool(self._layer_group) and self is self._layer_group[-1]()

    @property
    def group(self) -> tuple[LayerState, ...]:
        """Return `layer_group`, or this layer alone."""
        return self.layer_group or (self,)

    def device_bytes(self) -> int:
        """Return the bytes of this layer on the device, without segments that are offloaded."""
        return storage_bytes(tensor for entry in self._own_entries(0) for tensor in entry.tensors.values())

    def entries(self, layer: int) -> list[Entry]:
        """Return what the ledger lists for this layer, `layer` of the model."""
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
    """Raise unless new keys (b, h, t, d) have the rows and kv heads of what is held."""
    if (keys.shape[0], keys.shape[1]) != (rows, heads):
        raise CacheMisuse(
            f"this cache holds {rows} rows of {heads} kv heads, and got new keys of shape {tuple(keys.shape)}; use a "
            "new cache for another batch or model, or cache.reset()"
        )


def _real_counts(layout: Layout, real: Tensor) -> Tensor:
    """Return (b, h) int64 on the CPU: how many slots of a layout are filled, padding excluded.

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
