"""The parts of one layer's state, by what they are. Each gives its fields and tensors for a saved cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvtailor.engine.observe import observe
from kvtailor.ops.segments.coded import under
from kvtailor.store.recent_window import Tail
from kvtailor.types import ALL_HEADS, PLAIN_SOFTMAX, HeadShare, KeyOffset, Needs, Rotation, Segment, Softmax
from kvtailor.types.evidence import Evidence
from kvtailor.types.latent_attention import LatentAttention

__all__ = ["Clock", "ModelPart", "Observed", "Stored", "whole_number"]

# What `Observed` remembers of earlier evictions and of a reconstruction.
_MEMORIES = ("scored", "scored_columns", "reconstruction")
# The names of a clock's numbers that saved caches have had from the beginning.
_CLOCK_NAMES = {"settled_seen": "settled_seen", "evict_at": "walk_at", "growth": "tail_growth", "prompt": "prompt"}
# Of these the first versions of the file have none.
_SINCE = {"prompt": 0}


@dataclass
class Stored:
    """What a layer holds.

    Attributes:
        tail: the recent window in full precision; None before the first token.
        segments: encoded parts in time order, `Placed` where they are on a tier; the tail comes after them.
        seen: tokens seen, padding included.
    """

    tail: Tail | None = None
    segments: list[Segment] = field(default_factory=list)
    seen: int = 0

    def copied(self) -> Stored:
        """Return the same with a list and a tail of its own. No tensor is copied: tensors are replaced, never written,
        but for the tail's buffers behind the last token."""
        return Stored(None if self.tail is None else self.tail.copied(), list(self.segments), self.seen)

    def state(self, here: list[Segment]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return JSON-able fields and tensors of all of this.

        Args:
            here: the segments where they can be read.
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
    """What earlier forwards and evictions left for the plan's methods.

    Attributes:
        evidence: what the scorer and others need.
        carry: what the plan's attention finds again at its next call, by name, batch rows first.
        tokens_read: (b, h) tokens that the last attention read; None where it read all.
        scored, scored_columns: (b, h, k) the scores of the last eviction, or (b, h, c, k) the scorer's notes, and the
            columns (b, h, k) they belong to; None where the scorer does not look back.
        reconstruction: (b, h, n) float32 what a pass that repeats the context found of its columns; None without one.
        repeated: samples of the queries of such passes, from the first of them until the context is compressed.
        repeated_real: (b, t) bool: of all queries of these passes, those that are no padding.
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
        """Take at most `most` of each row's queries (b, q, t, d), those of earlier passes among them; `real` (b, t)."""
        before = real[:, :0] if self.repeated_real is None else self.repeated_real
        self.repeated_real = torch.cat([before, real], 1)
        self.repeated = observe(
            Needs(rows=most), self.repeated or Evidence(), query, before.shape[1], None, real=self.repeated_real
        )

    def end_repetition(self, *, again: bool) -> None:
        """Forget what the context is compressed by; where it will be `again`, not what was found of its columns."""
        self.repeated = self.repeated_real = None
        if not again:
            self.reconstruction = None

    def memories(self) -> dict[str, Tensor]:
        """Return what earlier evictions and a reconstruction left, by attribute; batch rows first."""
        named = {name: getattr(self, name) for name in _MEMORIES}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def rows(self, index: Tensor, mass: Sequence[Tensor]) -> Observed:
        """Return what a batch made of the rows `index` (k,) int64 of this one has observed.

        Args:
            index: rows.
            mass: that of the evidence, of these rows already: its lanes are picked part by part.
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
        """Return JSON-able fields and tensors of all of this but `tokens_read`, which is of one forward."""
        tensors = {f"evidence.{name}": t for name, t in self.evidence.tensors().items()}
        tensors |= {f"memory.{name}": t for name, t in self.memories().items()}
        return {}, tensors | {f"carry.{name}": t for name, t in self.carry.items()}

    @classmethod
    def from_state(cls, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Observed:
        """Return what `state` described.

        Raises:
            ValueError: there are memories of no known name.
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
        evict_at: tokens since then after which the next is due while decoding; None before the first eviction.
        growth: tokens since the last eviction.
        due: an eviction is due and waits for the layers behind this one.
        decoding: what has come last is decoded tokens, and no prompt or turn; each forward says it anew.
        reindex: what is held has changed otherwise than by growing since the attention last indexed it.
        prompt: tokens seen before the first that was decoded.
    """

    settled_seen: int = 0
    evict_at: int | None = None
    growth: int = 0
    due: bool = False
    decoding: bool = field(default=False, compare=False)
    reindex: bool = False
    prompt: int = 0

    def came(self, new: int, seen: int) -> None:
        """Take note of `new` tokens of a prompt or a turn, or of a decoded one, after which so many are seen."""
        if new > 1 and seen - new <= self.prompt:
            self.prompt = seen

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return JSON-able fields of all of this between two forwards, when nothing is due."""
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
    """What belongs to the model and not to a text: a layer keeps it through `reset`.

    Attributes:
        scaling: the model's own factor before the softmax.
        softmax: what its softmax has besides, as the newest forward told it; a saved cache has none of it.
        output: gives the layer's own output projection, (q, dv, D), as it is now; for plans that need it.
        rotation: the layer's rotary embedding, for plans that need it.
        offset: the constant part of its keys, for plans that need it; None where it has none, or none is known.
        calibration: this layer's tensors of the scorer's calibration file.
        encoding: the tensors of the codec's calibration files, stacked over the layers.
        share: which of the model's kv heads this process holds.
        latents: the layer's projections where it holds latents (in the place of keys) and rotated keys (in that of
            values) of one kv head; None where it holds keys and values. Queries are as the model made them even so,
            and are absorbed where they meet what is held.
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
        """Return JSON-able fields of what the forwards told. The rest comes from the model when a cache is loaded."""
        return {"scaling": self.scaling}, {}

    def take_state(self, fields: Mapping[str, Any]) -> None:
        """Take what `state` described.

        Raises:
            ValueError: the factor is no number above 0.
        """
        value = fields["scaling"]
        if not (isinstance(value, float | int) and 0 < value < float("inf")):
            raise ValueError(f"scaling of a layer is {value!r}")
        self.scaling = value


def whole_number(fields: Mapping[str, Any], name: str) -> int:
    """Return a count that a layer's fields name.

    Raises:
        ValueError: it is no whole number, or below 0.
    """
    value = fields[name]
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} of a layer is {value!r}")
    return value
