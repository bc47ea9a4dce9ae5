"""MiniCache: two adjacent layers share the directions of their keys and values.

*Idea* In the deeper half of a model adjacent layers hold nearly parallel vectors for the same token. Two layers store
one direction on the arc between theirs (SLERP), and each its own magnitude; the tokens whose two directions are
farthest apart are not merged, and both layers keep theirs.
*Paper* `liu2024minicache` (arXiv 2405.14366), sections 3 and 4; start = S / L, t = t.
*Source* The paper; kvtailor's own code.
*Departs* The paper retains tokens by a threshold, the share gamma of the range of angles that it observed, so one
outlier decides how many; here `retained` is their exact share, rounded up, for each kv head, keys and values apart. One
of an odd number of layers from `start` on stays alone. Angles near 0 and pi are interpolated along the straight line.
While decoding, tokens are merged `block_size` at a time. `only` is kvtailor's addition.
*Cost* For each layer of a pair (d + dv) / 2 elements, 2 for the magnitudes, and for the retained share d + dv elements
and 4 bytes of index; layers below `start` cost what they do in `of`. A lower layer waits uncompressed for the deeper
one, so a prefill holds two layers as they are instead of one. Attention reads directions as they lie, and multiplies
logits and weights; where `of` has them in other coordinates, it restores the segment at every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvtailor.encode.contract import Around, Codec, CodecContext, Sides, refuse_non_finite
from kvtailor.encode.plain import Plain
from kvtailor.errors import CacheMisuse
from kvtailor.method import Serves
from kvtailor.ops.codes.slerp import angle, far_places, slerp, split
from kvtailor.ops.segments.coded import under
from kvtailor.ops.segments.pair_sides import HalfSegment, MergedSide, PairSide, Unmerged, side_of
from kvtailor.types import Layout, Segment

__all__ = ["MiniCache", "MiniCacheSegment"]


@dataclass(frozen=True, kw_only=True)
class MiniCacheSegment(HalfSegment):
    """One layer's half of a pair.

    Attributes:
        lower: this is the lower layer of the two, where what they share is counted.
    """

    lower: bool
    codec = "minicache"

    def decode(self) -> tuple[Tensor, Tensor]:
        keys, values = self.shared.decode()
        return self.keys.restore(keys), self.values.restore(values)

    def relaid(self, layout: Layout) -> MiniCacheSegment:
        return replace(self, layout=layout, shared=self.shared.relaid(layout))

    def rows(self, index: Tensor) -> MiniCacheSegment:
        device = next(iter(self.keys.tensors().values())).device
        lanes = self.layout.lanes_of_rows(index)[0].to(device)
        # A choice of rows is a move of whole lanes: (m', 1) lanes and (m', s) slots 0, 1, ...
        slot = torch.arange(self.layout.size, device=device)
        return self._moved(self.shared.rows(index), lanes[:, None], slot[None].expand(lanes.shape[0], -1))

    def regather(self, lane: Tensor, slot: Tensor, layout: Layout) -> MiniCacheSegment:
        return self._moved(self.shared.regather(lane, slot, layout), lane, slot)

    def tensors(self) -> dict[str, Tensor]:
        return {**_named("shared", self.shared.tensors()), **self._own()}

    def closed_form_bytes(self) -> int:
        sides = (self.keys, self.values)
        own = sum(side.closed_form_bytes(self.layout.lanes, self.layout.size) for side in sides)
        # What both layers hold exists once, and the lower layer counts it.
        if not self.lower:
            return own
        return own + self.shared.closed_form_bytes() + sum(side.shared_bytes() for side in sides)

    def state(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        fields, tensors = self.shared.state()
        return {"lower": self.lower, **_named("shared", fields)}, {**_named("shared", tensors), **self._own()}

    def of_pair(self, lower: MiniCacheSegment) -> MiniCacheSegment:
        """This half, on the tensors of the lower one wherever they are the same."""
        if (self.layout.lanes, self.layout.size) != (lower.layout.lanes, lower.layout.size):
            raise CacheMisuse(
                f"two layers that minicache stores together hold {self.layout.lanes} lanes of {self.layout.size} "
                f"tokens and {lower.layout.lanes} of {lower.layout.size}; their rows can only change together, as "
                "the cache's own methods do it"
            )
        keys, values = self.keys.of_pair(lower.keys), self.values.of_pair(lower.values)
        return replace(self, layout=lower.layout, shared=lower.shared, keys=keys, values=values)

    def _moved(self, shared: Segment, lane: Tensor, slot: Tensor) -> MiniCacheSegment:
        keys, values = self.keys.moved(lane, slot), self.values.moved(lane, slot)
        return replace(self, layout=shared.layout, shared=shared, keys=keys, values=values)

    def _own(self) -> dict[str, Tensor]:
        return {**_named("keys", self.keys.tensors()), **_named("values", self.values.tensors())}


@dataclass(frozen=True, kw_only=True)
class MiniCache(Around, Codec):
    """Pairs of layers.

    Attributes:
        start: the share of the layers below the first pair.
        t: how far from the lower layer's direction to the deeper one's.
        retained: the share of tokens that are not merged.
        of: how the directions are stored, and the layers that are in no pair; what is retained and the magnitudes stay
            in full precision.
        block_size: tokens that are merged at once; the block of `of` goes before it.
        only: what is merged, and encoded by `of`; the other side stays as it is.
    """

    start: float = 0.5
    t: float = 0.6
    retained: float = 0.05
    of: Codec = Plain()
    block_size: int = 128
    only: Sides = "both"
    across: ClassVar[bool] = True
    examples: ClassVar[tuple[str, ...]] = (
        "minicache(block_size=100)",
        "minicache(of=vector(bits=4, block_size=40), retained=0.1)",
        "minicache(of=kivi(bits=4, group=20, recent=40), start=0.0, t=0.5)",
        "minicache(of=hadamard(of=fp8), retained=0.0)",
        "minicache(block_size=40, only=keys)",
        "minicache(of=kivi(bits=4, group=20, recent=40), only=values)",
    )
    serves: ClassVar[Serves] = Serves(
        latents="it gives two layers one direction of keys, and the latents of two layers have no channel in common"
    )

    def __post_init__(self) -> None:
        for name in ("start", "t", "retained"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"minicache: {name} must be a share from 0.0 to 1.0, found {getattr(self, name)}")
        if self.of.across or self.of.weighs_tokens:
            raise ValueError(
                "minicache: of must be a codec that stores each token of one layer by itself, and "
                f"{type(self.of).__name__} does not; vector and kivi do"
            )
        if self.of.needs_offset and self.only != "values":
            raise ValueError(
                "minicache: of must code what two layers share, which is no key whose constant could be taken off: "
                "leave centred out"
            )
        if self.only == "values" and self.of.needs_rotation:
            raise ValueError("minicache: only=values merges no keys that `of` could turn back; leave unrotated out")
        if self.only != "both":
            self.of.one_sided(self.only, "minicache")
        if self.block_size < 1:
            raise ValueError(f"minicache: block_size must be 1 token or more, found {self.block_size}; 128 is usual")

    def misfit(self, *, layers: int, heads: int, size: int) -> str | None:
        """No pair of layers."""
        if any(len(each) > 1 for each in self.layer_groups(layers)):
            return None
        found = f"start={self.start} leaves no two layers of {layers} that the plan compresses"
        return f"minicache: {found}; write start=0.0"

    @property
    def block(self) -> int:
        """The inner codec's, or `block_size` where that encodes nothing."""
        return self.of.block or self.block_size

    @property
    def lane_multiple(self) -> int:
        """That of what is merged."""
        return self._of.lane_multiple

    def layer_groups(self, layers: int) -> tuple[tuple[int, ...], ...]:
        """Pairs from `start` on, the lowest first; the layers below are alone, and the last of an odd number."""
        first = int(Fraction(str(self.start)) * layers)
        alone = tuple((layer,) for layer in range(first))
        return alone + tuple(tuple(range(layer, min(layer + 2, layers))) for layer in range(first, layers, 2))

    def one_sided(self, side: Sides, asked: str) -> MiniCache:
        made = super().one_sided(side, asked)
        return replace(made, only=side) if self.only in ("both", side) else made

    def for_layer(self, context: CodecContext) -> Codec:
        """The inner codec on a layer that is in no pair. A pair has what that is on its lower layer."""
        # Tables by layer (`bit_table`) must give both halves the same codec, so the inner one is asked for the lower.
        pair = next(each for each in self.layer_groups(context.layers) if context.layer in each)
        of = self._of.for_layer(replace(context, layer=pair[0]))
        return of if len(pair) == 1 else replace(self, of=of)

    def segment_type(self) -> type[MiniCacheSegment]:
        return MiniCacheSegment

    def encode(self, layout: Layout, keys: Tensor, values: Tensor, first: Tensor | None = None) -> Segment:
        """Refuses: one layer is no pair.

        Raises:
            ValueError: always.
        """
        raise ValueError("minicache: two layers are encoded at once; call encode_group")

    def encode_group(
        self, layout: Layout, states: Sequence[tuple[Tensor, Tensor]], first: Tensor | None = None
    ) -> list[MiniCacheSegment]:
        """The halves of a lower and a deeper layer.

        Args:
            layout, first: as for `Codec.encode`.
            states: keys (m, s, d) and values (m, s, dv) of the two.

        Raises:
            CacheMisuse: NaN or infinity, or layers of different shapes.
        """
        shapes = [(tuple(keys.shape), tuple(values.shape)) for keys, values in states]
        if len(set(shapes)) != 1:
            raise CacheMisuse(
                f"minicache stores two layers together, and they have keys and values of shapes {shapes[0]} and "
                f"{shapes[1]}; only layers of the same kv heads and head size can share directions"
            )
        for keys, values in states:
            refuse_non_finite("minicache", keys, values, "which have no direction")
        # The order matters: directions come from both layers' states as they are, each side's retained tokens are
        # chosen by the angle between them, and only then are the shared directions encoded, for both at once.
        below, above = states
        keys, key_sides = self._merged(below[0], above[0], layout, merging=self.only != "values")
        values, value_sides = self._merged(below[1], above[1], layout, merging=self.only != "keys")
        shared = self._of.encode(layout, keys, values, first)
        # Lower layer first, as everywhere in a group.
        halves = zip(key_sides, value_sides, (True, False), strict=True)
        return [
            MiniCacheSegment(layout=layout, shared=shared, keys=key, values=value, lower=lower)
            for key, value, lower in halves
        ]

    def joined(self, segments: Sequence[Segment]) -> list[Segment]:
        """See `Codec.joined`."""
        lower, upper = segments
        assert isinstance(lower, MiniCacheSegment) and isinstance(upper, MiniCacheSegment)
        return [lower, upper.of_pair(lower)]

    def restore(self, layout: Layout, fields: Mapping[str, object], tensors: Mapping[str, Tensor]) -> MiniCacheSegment:
        shared = self._of.restore(layout, under("shared.", fields), under("shared.", tensors))
        keys, values = side_of(under("keys.", tensors)), side_of(under("values.", tensors))
        return MiniCacheSegment(layout=layout, shared=shared, keys=keys, values=values, lower=bool(fields["lower"]))

    def bytes_per_token(self, key_size: int, value_size: int, element_size: int) -> float:
        """On average over a pair: half of the shared direction, and for each side that is merged a magnitude, the
        retained share of its vector and half of a 4-byte index. A share that leaves a remainder is rounded up for each
        row and kv head."""
        merged = self._sizes(key_size, value_size)
        # A side that is not merged has a width of 0 here, and is counted whole in the end.
        shared = self._of.bytes_per_token(*merged, element_size) / 2
        own = sum(element_size + self.retained * (size * element_size + 2) for size in merged if size)
        return shared + own + (key_size + value_size - sum(merged)) * element_size

    def encode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int | None:
        """Those of the inner codec for one direction of two, and for each channel 4 for its own direction, 3 for the
        angle's half and 2 for the arc's half of the pair."""
        key, value = self._sizes(key_size, value_size)
        inner = self._of.encode_flops(tokens=tokens, key_size=key, value_size=value)
        return None if inner is None else inner // 2 + 9 * tokens * (key + value)

    def decode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int | None:
        """Those of the inner codec, and a product for each channel."""
        key, value = self._sizes(key_size, value_size)
        inner = self._of.decode_flops(tokens=tokens, key_size=key, value_size=value)
        return None if inner is None else inner + tokens * (key + value)

    @property
    def _of(self) -> Codec:
        """The inner codec; a side that is not merged does not use it."""
        return self.of if self.only == "both" else self.of.one_sided(self.only, "minicache")

    def _sizes(self, key_size: int, value_size: int) -> tuple[int, int]:
        """Channels that are merged."""
        return 0 if self.only == "values" else key_size, 0 if self.only == "keys" else value_size

    def _merged(
        self, lower: Tensor, upper: Tensor, layout: Layout, *, merging: bool
    ) -> tuple[Tensor, Sequence[PairSide]]:
        """Directions (m, s, c) of states (m, s, c) of two layers, or (m, s, 0), and what each keeps beside them."""
        if not merging:
            return lower.new_empty((*lower.shape[:2], 0)), [Unmerged.of(lower), Unmerged.of(upper)]
        # Directions (m, s, c) and magnitudes (m, s, 1) in float32; rounding to the cache's dtype comes last.
        (below, below_magnitudes), (above, above_magnitudes) = split(lower), split(upper)
        between = angle(below, above)
        # One list of places for both layers, since the angle is between the two; each keeps its own vectors there.
        places = far_places(between, self.retained, layout)
        own = [MergedSide.of(lower, below_magnitudes, places), MergedSide.of(upper, above_magnitudes, places)]
        # Retained tokens get a direction too, which nothing reads: a codec needs lanes without holes.
        return slerp(below, above, self.t, between).to(lower.dtype), own


def _named(prefix: str, named: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}.{name}": each for name, each in named.items()}
