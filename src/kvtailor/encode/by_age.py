"""By age: tokens are stored in fewer bits as they grow old.

*Idea* A model looks at its newest tokens most, so their codes are worth more bits than those of old ones. A token is
in full precision at first, then in the codes of the first codec, and of the next ones as it reaches each age. A
segment is encoded anew at most twice, from its codes, since what was behind them is gone. That loses little where
codes nest: 255 = 17 * 15 steps of 8 bits and 15 = 5 * 3 of 4 bits share their boundaries, so that kivi's 2-bit codes
are those that the originals would have given, but for the rounding of the scales to the cache's dtype.
*Paper* None; feature request 49198 of vLLM (https://github.com/vllm-project/vllm/issues/49198) asks for it.
*Source* That request, for what is asked; kvtailor's own code.
*Departs* The request moves blocks of a share of the sequence between pools; here ages are numbers of tokens, since a
share would move with every token.
*Cost* A token's bytes are those of the codec of its age. Where one price is asked for, as `bytes=` does, it is the
first codec's, so that such a budget is not used up. While decoding each segment is decoded and encoded at most twice
more, when a block leaves the tail. On a tier a layer's segments are written again when one of them is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from kvtailor.encode.contract import Codec, CodecContext, Sides
from kvtailor.encode.kivi import Kivi
from kvtailor.encode.settings import check_agreement
from kvtailor.ops.segments.around import AroundSegment
from kvtailor.ops.segments.coded import under
from kvtailor.types import Coordinates, Layout, Segment

__all__ = ["AgedSegment", "ByAge"]


@dataclass(frozen=True, kw_only=True)
class AgedSegment(AroundSegment):
    """Tokens in one of several encodings; what is stored is the inner segment's alone.

    Attributes:
        level: which of the encodings, from 0 on.
        newest: no token has a later column. The host knows it without looking at the layout's own columns.
    """

    level: int
    newest: int
    codec = "by_age"

    def coordinates(self, key_size: int, value_size: int) -> tuple[Coordinates | None, Coordinates | None]:
        """Those of the inner segment: nothing is changed."""
        return None, None

    def state(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        fields, tensors = self.inner.state()
        inner = {f"inner.{name}": each for name, each in fields.items()}
        return {"level": self.level, "newest": self.newest, **inner}, tensors


@dataclass(frozen=True, kw_only=True)
class ByAge(Codec):
    """A codec for each age.

    The age of a token is the number of tokens that were seen after it. Tokens that leave the tail together are cut into
    segments of a block, and a segment changes its codec when its newest token has the age, at the next time at which
    tokens leave the tail or are evicted. So no token is in fewer bits than its age says, and a decoded one is late by
    two blocks at most. Kept tokens of an eviction make one segment of each codec, which waits for the newest of them.
    Tokens that are old when they leave the tail are encoded once, by the codec of their age.

    Attributes:
        of: the codecs, the youngest tokens' first; two or three, which agree in the recent window and in the block.
        ages: from which age on each but the first is used; ascending.
    """

    of: tuple[Codec, ...] = (Kivi(bits=8), Kivi(bits=4), Kivi(bits=2))
    ages: tuple[int, ...] = (512, 2048)
    examples: ClassVar[tuple[str, ...]] = (
        "by_age",
        "by_age(of=[vector(block_size=32), hadamard(of=vector(bits=4, block_size=32))], ages=[64])",
        "by_age(of=[unrotated(of=kivi(bits=8, group=16, recent=32)), sides(keys=kivi(bits=4, group=16, recent=32), "
        "values=vector(bits=3, block_size=32))], ages=[96])",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "of", tuple(self.of))
        object.__setattr__(self, "ages", tuple(self.ages))
        if not 2 <= len(self.of) <= 3:
            raise ValueError(
                f"by_age: of must be two or three codecs, found {len(self.of)}: a segment is encoded anew at most twice"
            )
        for place, codec in enumerate(self.of):
            _check(place, codec)
        check_agreement("by_age", "codecs", self.of)
        whole = all(isinstance(age, int) and not isinstance(age, bool) for age in self.ages)
        if not whole or len(self.ages) != len(self.of) - 1 or list(self.ages) != sorted(set(self.ages)):
            raise ValueError(
                f"by_age: ages must be {len(self.of) - 1} ascending numbers of tokens, one for each codec but the "
                f"first, found {list(self.ages)}"
            )
        if self.ages[0] <= self.tail:
            raise ValueError(
                f"by_age: the first age must be above the {self.tail} newest tokens that stay in full precision, found "
                f"{self.ages[0]}; else no token would have the first codec"
            )

    def misfit(self, *, layers: int, heads: int, size: int) -> str | None:
        """That of a codec."""
        found = (codec.misfit(layers=layers, heads=heads, size=size) for codec in self.of)
        return next((each for each in found if each is not None), None)

    @property
    def tail(self) -> int:
        """That of all codecs."""
        return self.of[0].tail

    @property
    def block(self) -> int:
        """That of all codecs."""
        return self.of[0].block

    @property
    def lane_multiple(self) -> int:
        """The least common multiple, since the lanes of a segment stay when it is encoded anew."""
        return math.lcm(*(codec.lane_multiple for codec in self.of))

    @property
    def needs_rotation(self) -> bool:
        """Whether a codec does."""
        return any(codec.needs_rotation for codec in self.of)

    @property
    def needs_offset(self) -> bool:
        """Whether a codec does."""
        return any(codec.needs_offset for codec in self.of)

    @property
    def bears_offset(self) -> bool:
        """Whether the codecs of all ages do."""
        return all(codec.bears_offset for codec in self.of)

    def in_blocks(self, tokens: int) -> ByAge:
        """See `Codec.in_blocks`."""
        return replace(self, of=tuple(codec.in_blocks(tokens) for codec in self.of))

    def one_sided(self, side: Sides, asked: str) -> Codec:
        """Refuses: a codec around this one would hide the age of a segment.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{asked}: by_age stands outside: write by_age(of=[{asked}(...), ...])")

    def for_layer(self, context: CodecContext) -> ByAge:
        return replace(self, of=tuple(codec.for_layer(context) for codec in self.of))

    def segment_type(self) -> type[AgedSegment]:
        return AgedSegment

    def runs(self, tokens: int, youngest: int, *, whole: bool = False) -> Sequence[tuple[int, int]]:
        """See `Codec.runs`: segments of a block, and one for all tokens that have the last codec."""
        found: list[tuple[int, int]] = []
        age, end = youngest, youngest + tokens
        for level, until in enumerate((*self.ages, end)):
            last = level == len(self.ages)
            while age < min(until, end):
                size = end - age if last else min(until if whole else age + self.block, end) - age
                found.append((size, age))
                age += size
        return found[::-1]

    def encode(self, layout: Layout, keys: Tensor, values: Tensor, first: Tensor | None = None) -> AgedSegment:
        """As tokens of which the last has just come."""
        last = layout.start + layout.size - 1 if layout.start is not None else int(layout.columns(keys.device).max())
        return self.encode_aged(layout, keys, values, first, newest=last, seen=last + 1)

    def encode_aged(
        self, layout: Layout, keys: Tensor, values: Tensor, first: Tensor | None, *, newest: int, seen: int
    ) -> AgedSegment:
        """See `Codec.encode_aged`: by the codec of the newest token's age.

        Raises:
            CacheMisuse: NaN or infinity.
        """
        level = self._level(seen - 1 - newest)
        inner = self.of[level].encode(layout, keys, values, first)
        return AgedSegment(layout=inner.layout, inner=inner, level=level, newest=newest)

    def renewed(self, segment: Segment, seen: int, first: Tensor | None = None) -> Segment:
        """See `Codec.renewed`: in the codec of its newest token's age, from what the codes decode to."""
        if not isinstance(segment, AgedSegment):
            return segment
        level = self._level(seen - 1 - segment.newest)
        if level <= segment.level:
            return segment
        keys, values = segment.decode()
        inner = self.of[level].encode(segment.layout, keys, values, first)
        return AgedSegment(layout=inner.layout, inner=inner, level=level, newest=segment.newest)

    def restore(self, layout: Layout, fields: Mapping[str, object], tensors: Mapping[str, Tensor]) -> AgedSegment:
        """See `Codec.restore`.

        Raises:
            LookupError, ValueError: the fields name no codec, or no column.
        """
        level, newest = fields["level"], fields["newest"]
        if type(level) is not int or not 0 <= level < len(self.of) or type(newest) is not int or newest < 0:
            raise ValueError(f"a by_age segment has codec {level!r} of {len(self.of)} and newest column {newest!r}")
        inner = self.of[level].restore(layout, under("inner.", fields), tensors)
        return AgedSegment(layout=layout, inner=inner, level=level, newest=newest)

    def bytes_per_token(self, key_size: int, value_size: int, element_size: int) -> float:
        """Of a token that has just left the tail: the first codec's."""
        return self.of[0].bytes_per_token(key_size, value_size, element_size)

    def encode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int | None:
        """The first codec's."""
        return self.of[0].encode_flops(tokens=tokens, key_size=key_size, value_size=value_size)

    def decode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int | None:
        """The most that a codec takes."""
        each = [codec.decode_flops(tokens=tokens, key_size=key_size, value_size=value_size) for codec in self.of]
        return None if None in each else max(flops for flops in each if flops is not None)

    def read_flops(self, *, tokens: int, queries: int, key_size: int, value_size: int) -> int | None:
        """The most that a codec takes."""
        each = [
            codec.read_flops(tokens=tokens, queries=queries, key_size=key_size, value_size=value_size)
            for codec in self.of
        ]
        return None if None in each else max(flops for flops in each if flops is not None)

    def _level(self, age: int) -> int:
        """Which codec tokens of this age have."""
        return sum(age >= each for each in self.ages)


def _check(place: int, codec: object) -> None:
    """Raise where a codec cannot be that of an age."""
    if not isinstance(codec, Codec):
        raise ValueError(f"by_age: of[{place}] must be a codec such as kivi, found {codec!r}")
    name = type(codec).__name__
    if codec.ages:
        raise ValueError(f"by_age: of[{place}] is by age itself: give each age one codec")
    if codec.kinds_by_layer:
        raise ValueError(
            f"by_age: of[{place}] is {name}, which gives each layer a codec of its own: write by_layer outside, as in "
            "by_layer(of=[by_age(...), ...])"
        )
    if codec.across:
        raise ValueError(
            f"by_age: of[{place}] is {name}, which stores two layers' tokens together, and they would have to grow "
            "old together: leave one of the two out"
        )
    if codec.exact:
        raise ValueError(
            f"by_age: of[{place}] is {name}, which encodes nothing: tokens stay in full precision while they are in "
            "the recent window of the codecs; give these a larger `recent`"
        )
    if codec.weighs_tokens or codec.needs.window:
        raise ValueError(
            f"by_age: of[{place}] is {name}, which needs queries or weights that are gone when a segment is encoded "
            "anew: choose another codec"
        )
