"""The stage `encode`: kept keys and values of some lanes -> an immutable segment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, Self, cast

from torch import Tensor

from kvtailor.errors import CacheMisuse
from kvtailor.method import Method
from kvtailor.ops.segments.coded import Coded, PairSegment, Whole, alone
from kvtailor.types import ALL_HEADS, HeadShare, KeyOffset, Layout, Needs, Rotation, Segment
from kvtailor.types.late_checks import all_finite, require_none

__all__ = ["Around", "Codec", "CodecContext", "Sides", "TwoSided", "refuse_non_finite"]

Sides = Literal["both", "keys", "values"]


@dataclass(frozen=True, kw_only=True)
class CodecContext:
    """What a codec may know of the layer whose tokens it stores.

    Attributes:
        layer: 0-based among the layers that the plan compresses.
        layers: how many the plan compresses.
        rotation: the layer's rotary embedding; None where the codec does not need it, or where only its bytes are
            needed.
        heads: h, kv heads; None where it is not known yet.
        evicts: tokens are evicted from the layer, by each head on its own.
        calibration: the tensors of the plan's calibration files, stacked over the layers; None where it has none.
        unrotated: keys are handed over as they were before the rotary embedding.
        offset: the constant part of the layer's keys; None where it has none, or none is known.
        share: which of the model's kv heads this process holds; `heads` are these.
    """

    layer: int
    layers: int
    rotation: Rotation | None = None
    heads: int | None = None
    evicts: bool = False
    calibration: Mapping[str, Tensor] | None = None
    unrotated: bool = False
    share: HeadShare = ALL_HEADS
    offset: KeyOffset | None = None


class Codec(Method, ABC):
    """One way to store tokens. A subclass is a frozen, keyword-only dataclass of its hyper-parameters.

    `for_layer` is called once for each layer, and the codec that it returns encodes and restores this layer's tokens.
    `tail`, `block`, `lane_multiple` and `exact` are the same for all layers, except for those that get `plain`.

    Attributes:
        exact: decode(encode(x)) == x bit for bit.
        across: tokens of several layers may be encoded at once, see `layer_groups`.
        kinds_by_layer: `for_layer` may return another kind of codec on each layer, so that no codec can be around it.
            Its `lane_multiple` is then a multiple of each layer's, and a flag is True where it is for any layer.
    """

    exact: ClassVar[bool] = False
    across: ClassVar[bool] = False
    kinds_by_layer: ClassVar[bool] = False

    @property
    def tail(self) -> int:
        """Return how many of the newest tokens stay in full precision."""
        return 0

    @property
    def block(self) -> int:
        """Return how many tokens are encoded at once, when the tail has `tail + block`; 0: it is never encoded."""
        return 0

    @property
    def lane_multiple(self) -> int:
        """Return of how many slots ragged lanes have a multiple (groups along time)."""
        return 1

    @property
    def needs_rotation(self) -> bool:
        """Whether `CodecContext.rotation` must be there before anything is encoded."""
        return False

    @property
    def needs_offset(self) -> bool:
        """Whether it uses `CodecContext.offset`, which many models do not have."""
        return False

    @property
    def bears_offset(self) -> bool:
        """Whether its codes stay as precise where one constant is added to all keys of a head.

        A key projection with a bias adds such a constant, which may be many times as large as the keys' differences. A
        code with one scale for a whole key spends its few levels on the constant; one with a scale for each channel
        does not. On such a model a plan whose codec returns False draws a warning.
        """
        return self.exact

    @property
    def rounds_on_write(self) -> bool:
        """Whether tokens are rounded through it before anything reads them, those of a prompt among them."""
        return False

    @property
    def weighs_tokens(self) -> bool:
        """Whether a slot may stand for several tokens, so that `Segment.view` has weights."""
        return False

    @property
    def table_layers(self) -> int | None:
        """Return for how many layers its tables are; None: for any number."""
        return None

    @property
    def ages(self) -> tuple[int, ...]:
        """Return the ages in tokens at which segments are encoded again, see `renewed`; none: never again."""
        return ()

    @property
    def needs(self) -> Needs:
        """Return the evidence to gather for `seeing`: a window of queries, or none."""
        return Needs()

    def seeing(self, queries: Tensor, heads: int, valid: Tensor | None) -> Codec:
        """Return this codec with the newest queries (b, q, w, d) of `heads` kv heads; called if `needs` has a window.

        `valid` (b, w) bool is False for queries of padding; None: there are none.
        """
        return self

    def for_layer(self, context: CodecContext) -> Codec:
        """Return this codec, and the codecs inside it, as they are on one layer."""
        return self

    def one_sided(self, side: Sides, asked: str) -> Codec:
        """Return this codec such that it, and the codecs inside it, encode only keys or only values.

        A codec that keeps states as they are returns itself. A codec with an argument `only` overrides this.

        Args:
            side: "keys" or "values".
            asked: the name of the method that has this codec in `of`, for the error.

        Raises:
            ValueError: nothing would be left to encode.
        """
        if not self.exact:
            raise _nothing_to_code(self, side, asked)
        return self

    def in_blocks(self, tokens: int) -> Codec:
        """Return this codec with blocks of `tokens` tokens, if its own `block` is 0.

        Called for plans that move segments to another tier, where no tail can be.
        """
        return self

    def layer_groups(self, layers: int) -> tuple[tuple[int, ...], ...]:
        """Group so many layers: those that are encoded at once, so that they may share what they store.

        Groups are of adjacent layers, ascending, and each layer is in one of them; by default each is alone. Layers of
        a group hold the same tokens, and are encoded when the last of them has its own.
        """
        return tuple((layer,) for layer in range(layers))

    def mean_bytes_per_token(
        self, layers: int, key_size: int, value_size: int, element_size: int, *, heads: int | None = None
    ) -> float:
        """Return `bytes_per_token` on average over so many layers, of so many kv heads."""
        each = [self.for_layer(CodecContext(layer=layer, layers=layers, heads=heads)) for layer in range(layers)]
        return sum(codec.bytes_per_token(key_size, value_size, element_size) for codec in each) / layers

    @abstractmethod
    def segment_type(self) -> type[Segment]:
        """Return the class of segments that `encode` makes."""

    @abstractmethod
    def encode(self, layout: Layout, keys: Tensor, values: Tensor, first: Tensor | None = None) -> Segment:
        """Encode keys (m, s, d) and values (m, s, dv). Unfilled slots of a lane repeat one of its tokens.

        Args:
            layout: which tokens these are.
            keys, values: must not be changed.
            first: (b,) int64 column of each row's first real token, from which positions count; None: column 0.
                Codecs of kvtailor get (b, columns) where a row has padding behind that token, too: the column from
                which the position of each column's token counts, and for padding the next one.

        Raises:
            CacheMisuse: a filled slot has NaN or infinity, which no code can hold.
        """

    def runs(self, tokens: int, youngest: int, *, whole: bool = False) -> Sequence[tuple[int, int]]:
        """Split consecutive columns that are encoded at the same time into segments.

        Args:
            tokens: how many columns.
            youngest: age of the newest column: how many tokens were seen after it.
            whole: return as few segments as possible.

        Returns:
            For each segment, the oldest first, how many columns it has and the age of the last of them.
        """
        return ((tokens, youngest),)

    def encode_aged(
        self, layout: Layout, keys: Tensor, values: Tensor, first: Tensor | None, *, newest: int, seen: int
    ) -> Segment:
        """Encode one of the `runs`, as `encode` does.

        Args:
            layout, keys, values, first: see `encode`.
            newest: the last column of the run, even if its token was evicted.
            seen: tokens seen; the age of the last column is seen - 1 - newest.
        """
        return self.encode(layout, keys, values, first)

    def renewed(self, segment: Segment, seen: int, first: Tensor | None = None) -> Segment:
        """Encode a segment again if its age asks for it; else return the same object.

        It is made from the codes, with the same layout, lanes and slots.

        Args:
            segment: of this codec; others stay as they are.
            seen: tokens seen.
            first: see `encode`.
        """
        return segment

    def encode_group(
        self, layout: Layout, states: Sequence[tuple[Tensor, Tensor]], first: Tensor | None = None
    ) -> Sequence[Segment]:
        """Encode a group of layers with the same tokens; called on the codec of the group's last layer.

        Args:
            layout, first: as for `encode`.
            states: keys (m, s, d) and values (m, s, dv) of each layer.
        """
        return [self.encode(layout, keys, values, first) for keys, values in states]

    def joined(self, segments: Sequence[Segment]) -> Sequence[Segment]:
        """Return the segments of a group of layers, sharing again what they shared before.

        Picking rows or tokens of each layer has given each its own copy of that.
        """
        return segments

    @abstractmethod
    def restore(self, layout: Layout, fields: Mapping[str, object], tensors: Mapping[str, Tensor]) -> Segment:
        """Make a segment of a saved cache again from its layout and what `Segment.state` returned."""

    @abstractmethod
    def bytes_per_token(self, key_size: int, value_size: int, element_size: int) -> float:
        """Return the bytes of one encoded token of one kv head in closed form, scales included, layout excluded.

        Args:
            key_size, value_size: d and dv.
            element_size: bytes of the cache's dtype.
        """

    def encode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int | None:
        """Count the operations of encoding tokens of one kv head, as `Scorer.flops` counts; None: not known.

        Args:
            tokens: how many are encoded at once.
            key_size, value_size: d and dv.
        """
        return None

    def decode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int | None:
        """Count the operations of decoding tokens of one kv head; see `encode_flops`."""
        return None

    def read_flops(self, *, tokens: int, queries: int, key_size: int, value_size: int) -> int | None:
        """Count the operations by which few queries of one kv head read encoded tokens, attention itself excluded.

        By default each token is decoded. If one linear map decodes all tokens, queries and sums are mapped instead; see
        `Segment` and `ops.segments.sides`.

        Args:
            tokens, key_size, value_size: as of `encode_flops`.
            queries: query heads of the kv head, times new tokens.
        """
        return self.decode_flops(tokens=tokens, key_size=key_size, value_size=value_size)


@dataclass(frozen=True, kw_only=True)
class Around(Method):
    """A base of codecs that change states and hand them to another codec; name it before `Codec` among the bases.

    Attributes:
        of: the other codec.
    """

    of: Codec

    @property
    def tail(self) -> int:
        return self.of.tail

    @property
    def block(self) -> int:
        return self.of.block

    def one_sided(self, side: Sides, asked: str) -> Self:
        """Return this codec around the one-sided inner codec; see `Codec.one_sided`."""
        return replace(self, of=self.of.one_sided(side, asked))

    def in_blocks(self, tokens: int) -> Self:
        """Return this codec around the inner codec in blocks: of this one's size, or of `tokens`."""
        return replace(self, of=self.of.in_blocks(self.block or tokens))

    @property
    def lane_multiple(self) -> int:
        return self.of.lane_multiple

    @property
    def needs_rotation(self) -> bool:
        return self.of.needs_rotation

    @property
    def needs_offset(self) -> bool:
        """Whether the inner codec does."""
        return self.of.needs_offset

    @property
    def bears_offset(self) -> bool:
        """Whether the inner codec does."""
        return self.of.bears_offset

    @property
    def rounds_on_write(self) -> bool:
        """Whether the inner codec does."""
        return self.of.rounds_on_write

    @property
    def weighs_tokens(self) -> bool:
        return self.of.weighs_tokens

    def bytes_per_token(self, key_size: int, value_size: int, element_size: int) -> float:
        """Return the inner codec's bytes."""
        return self.of.bytes_per_token(key_size, value_size, element_size)


class TwoSided(ABC):
    """A base of codecs that encode keys and values separately; name it before `Codec` among the bases.

    Attributes:
        only: what is encoded; the other side stays as it is. A field of the codec.
        segment: what `encode` gives.
    """

    only: Sides
    segment: ClassVar[type[PairSegment]]

    @abstractmethod
    def code_keys(self, keys: Tensor, layout: Layout, first: Tensor | None) -> Coded:
        """Encode keys (m, s, d); `layout` and `first` as in `Codec.encode`."""

    @abstractmethod
    def code_values(self, values: Tensor, layout: Layout, first: Tensor | None) -> Coded:
        """Encode values (m, s, dv); `layout` and `first` as in `Codec.encode`."""

    @abstractmethod
    def key_bytes(self, size: int, element_size: int) -> float:
        """Return the bytes of one encoded key in closed form, as `Codec.bytes_per_token`."""

    @abstractmethod
    def value_bytes(self, size: int, element_size: int) -> float:
        """Return the bytes of one encoded value in closed form."""

    @property
    def codes_keys(self) -> bool:
        """Whether keys are encoded."""
        return self.only != "values"

    @property
    def codes_values(self) -> bool:
        """Whether values are encoded."""
        return self.only != "keys"

    def one_sided(self, side: Sides, asked: str) -> Codec:
        """Return this codec with `only` set; see `Codec.one_sided`."""
        if self.only not in ("both", side):
            raise _nothing_to_code(self, side, asked)
        # Every method is a dataclass, which its contract cannot declare.
        made: Codec = replace(cast(Any, self), only=side)
        return made

    def segment_type(self) -> type[PairSegment]:
        """Return `segment`."""
        return self.segment

    def encode(self, layout: Layout, keys: Tensor, values: Tensor, first: Tensor | None = None) -> PairSegment:
        """Encode each side by itself; see `Codec.encode`."""
        refuse_non_finite(self.segment.codec, keys, values, "which no code can hold")
        return self.segment(
            layout=layout,
            keys=self.code_keys(keys, layout, first) if self.codes_keys else Whole(states=alone(keys)),
            values=self.code_values(values, layout, first) if self.codes_values else Whole(states=alone(values)),
        )

    def restore(self, layout: Layout, fields: Mapping[str, object], tensors: Mapping[str, Tensor]) -> PairSegment:
        """Restore both sides; see `Codec.restore`."""
        return self.segment.from_state(layout, fields, tensors)

    def bytes_per_token(self, key_size: int, value_size: int, element_size: int) -> float:
        """Add up the bytes of both sides; see `Codec.bytes_per_token`."""
        key = self.key_bytes(key_size, element_size) if self.codes_keys else key_size * element_size
        return key + (self.value_bytes(value_size, element_size) if self.codes_values else value_size * element_size)

    def sizes_coded(self, key_size: int, value_size: int) -> int:
        """Count the channels of a token that are encoded."""
        return (key_size if self.codes_keys else 0) + (value_size if self.codes_values else 0)


def _nothing_to_code(codec: object, side: Sides, asked: str) -> ValueError:
    return ValueError(f"{asked}: only={side} leaves {type(codec).__name__} in `of` nothing to code: leave it out")


def refuse_non_finite(codec: str, keys: Tensor, values: Tensor, why: str) -> None:
    """Raise `CacheMisuse` for NaN or infinity in keys (m, s, d) or values (m, s, dv); `why` ends the sentence."""
    for name, states in (("keys", keys), ("values", values)):
        said = (
            f"{codec} was given {name} of shape {tuple(states.shape)} with NaN or infinity, {why}; check the "
            "model's inputs and dtype (float16 overflow is the usual cause), or use encode=plain"
        )
        require_none(~all_finite(states), partial(CacheMisuse, said))
