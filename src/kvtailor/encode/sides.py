"""Sides: keys by one codec, values by another.

*Idea* Outliers of keys sit in a few channels, those of values do not, and an error of a key passes through the softmax.
So what is best for keys is seldom best for values: each side has a codec of its own, with bits and groups of its own.
*Paper* None; `liu2024kivi` (arXiv 2402.02750) and `hooper2024kvquant` (arXiv 2401.18079) are two such pairs.
*Source* kvtailor's own code.
*Departs* Tokens leave the tail with both sides at once, since a tail holds tokens and not sides. So the larger of the
two recent windows counts for both, and the larger of the two blocks: no token is encoded earlier than its codec would
alone, and a side with a smaller window has a few more in full precision. Blocks are rounded up to whole groups of both.
*Cost* For each side that of its codec; a side with `plain` costs what it does without a codec.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

from torch import Tensor

from kvtailor.encode.centred import Centred
from kvtailor.encode.contract import Codec, CodecContext, Sides, TwoSided, refuse_non_finite
from kvtailor.encode.hadamard import Hadamard
from kvtailor.encode.plain import Plain
from kvtailor.encode.unrotated import Unrotated
from kvtailor.ops.segments.coded import PairSegment, Whole, alone
from kvtailor.types import Layout, Segment

__all__ = ["SidesCodec", "SidesSegment"]

_Side = Literal["keys", "values"]
_OTHER: dict[_Side, _Side] = {"keys": "values", "values": "keys"}


@dataclass(frozen=True, kw_only=True)
class SidesSegment(PairSegment):
    """Keys in the encoding of one codec, values in that of another."""

    codec = "sides"


@dataclass(frozen=True, kw_only=True)
class SidesCodec(Codec):
    """A codec for each side.

    Each is one that codes keys and values on their own (kivi, vector, fp8, nuq), or hadamard, unrotated or centred
    around one.

    Attributes:
        keys: the codec of keys; `plain`: they stay as they are.
        values: the codec of values, likewise. Values have no rotary embedding, so `unrotated` is for keys alone. Nor
            have they the constant that `centred` takes off keys, so that it is left out there.
    """

    keys: Codec
    values: Codec
    examples: ClassVar[tuple[str, ...]] = (
        "sides(keys=kivi(bits=4), values=vector(bits=3))",
        "sides(keys=plain, values=nuq(bits=4, group=32))",
        "sides(keys=hadamard(of=vector(bits=4, symmetric=false)), values=hadamard(of=kivi(bits=3)))",
        "sides(keys=unrotated(of=hadamard(of=fp8(group=16))), values=plain)",
    )

    def __post_init__(self) -> None:
        _check("keys", self.keys)
        _check("values", self.values)
        if isinstance(self.keys, Plain) and isinstance(self.values, Plain):
            raise ValueError("sides: keys and values are both plain, so nothing would be encoded: write plain")

    @property
    def tail(self) -> int:
        """The larger recent window."""
        return max(codec.tail for codec in self._coding)

    @property
    def block(self) -> int:
        """The larger block, in whole groups of both sides."""
        multiple = self.lane_multiple
        return -(-max(codec.block for codec in self._coding) // multiple) * multiple

    @property
    def lane_multiple(self) -> int:
        """The least common multiple of what the sides need along time."""
        return math.lcm(*(codec.lane_multiple for codec in self._coding))

    @property
    def needs_rotation(self) -> bool:
        """Whether keys are turned back."""
        return self.keys.needs_rotation

    @property
    def needs_offset(self) -> bool:
        """Whether the keys' codec does."""
        return self.keys.needs_offset

    @property
    def bears_offset(self) -> bool:
        """Whether the keys' codec does."""
        return self._of("keys").bears_offset

    @property
    def rounds_on_write(self) -> bool:
        """Whether a side's codec does; then both go through it, and a plain one changes nothing."""
        return self._of("keys").rounds_on_write or self._of("values").rounds_on_write

    def one_sided(self, side: Sides, asked: str) -> Codec:
        """See `Codec.one_sided`; the other side becomes `plain`."""
        if isinstance(self.keys if side == "keys" else self.values, Plain):
            return super().one_sided(side, asked)
        return replace(self, values=Plain()) if side == "keys" else replace(self, keys=Plain())

    def for_layer(self, context: CodecContext) -> Codec:
        """This codec, inside of what mixes or turns a side's states, which is made to change this side alone.

        `sides(keys=hadamard(of=vector), values=kivi)` is `hadamard(of=sides(keys=vector, values=kivi), only=keys)`.
        """
        keys, values = _changes(self._of("keys")), _changes(self._of("values"))
        if not keys and not values:
            return self
        made: Codec = replace(self, keys=_inmost(self.keys), values=_inmost(self.values))
        # From the inside out. The sides do not meet, so only the order within each counts.
        for each in (*reversed(values), *reversed(keys)):
            made = replace(each, of=made)
        return made.for_layer(context)

    def segment_type(self) -> type[Segment]:
        """That of what `for_layer` gives, which is the same on all layers."""
        bound = self.for_layer(CodecContext(layer=0, layers=1))
        return SidesSegment if bound is self else bound.segment_type()

    def encode(self, layout: Layout, keys: Tensor, values: Tensor, first: Tensor | None = None) -> SidesSegment:
        """Keys (m, s, d) and values (m, s, dv), each by its codec.

        Raises:
            CacheMisuse: NaN or infinity.
            ValueError: a side's states are mixed or turned before; call `for_layer` first.
        """
        refuse_non_finite("sides", keys, values, "which no code can hold")
        key, value = self._coder("keys"), self._coder("values")
        return SidesSegment(
            layout=layout,
            keys=Whole(states=alone(keys)) if key is None else key.code_keys(keys, layout, first),
            values=Whole(states=alone(values)) if value is None else value.code_values(values, layout, first),
        )

    def restore(self, layout: Layout, fields: Mapping[str, object], tensors: Mapping[str, Tensor]) -> SidesSegment:
        coders = [self._coder("keys"), self._coder("values")]
        kinds = [kind for coder in coders if coder is not None for kind in coder.segment.kinds]
        return SidesSegment.from_state(layout, fields, tensors, kinds=(*kinds, Whole))

    def bytes_per_token(self, key_size: int, value_size: int, element_size: int) -> float:
        """The sum of both sides."""
        keys = self._of("keys").bytes_per_token(key_size, 0, element_size)
        return keys + self._of("values").bytes_per_token(0, value_size, element_size)

    def encode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int | None:
        """The sum of both sides."""
        keys = self._of("keys").encode_flops(tokens=tokens, key_size=key_size, value_size=0)
        values = self._of("values").encode_flops(tokens=tokens, key_size=0, value_size=value_size)
        return None if keys is None or values is None else keys + values

    def decode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int | None:
        """The sum of both sides."""
        keys = self._of("keys").decode_flops(tokens=tokens, key_size=key_size, value_size=0)
        values = self._of("values").decode_flops(tokens=tokens, key_size=0, value_size=value_size)
        return None if keys is None or values is None else keys + values

    @cached_property
    def _coding(self) -> list[Codec]:
        """What the sides that are encoded need, each of its own side alone; kept, since each decoded token needs it."""
        sides = self._of("keys"), self._of("values")
        return [codec for codec in sides if not isinstance(codec, Plain)]

    def _of(self, side: _Side) -> Codec:
        """A side's codec, as it is where it codes this side alone."""
        codec = self.keys if side == "keys" else self.values
        return codec.one_sided(side, "sides")

    def _coder(self, side: _Side) -> TwoSided | None:
        """What codes a side; None: it stays as it is."""
        codec = self.keys if side == "keys" else self.values
        if isinstance(codec, TwoSided):
            return codec
        if not isinstance(codec, Plain):
            raise ValueError(f"sides: {side} are changed before they are coded; call for_layer first")
        return None


def _changes(codec: Codec) -> list[Hadamard | Unrotated | Centred]:
    """What mixes, turns or shifts states before they are coded, the outermost first."""
    found: list[Hadamard | Unrotated | Centred] = []
    while isinstance(codec, Hadamard | Unrotated | Centred):
        found.append(codec)
        codec = codec.of
    return found


def _inmost(codec: Codec) -> Codec:
    """What codes, inside of all `_changes`."""
    changes = _changes(codec)
    return changes[-1].of if changes else codec


def _check(side: _Side, codec: object) -> None:
    """Raise where a codec cannot be that of one side."""
    if not isinstance(codec, Codec):
        raise ValueError(f"sides: {side} must be a codec such as kivi, found {codec!r}")
    coder = _inmost(codec)
    name, kind = f"sides: {side} is {type(codec).__name__}", type(coder).__name__
    if isinstance(codec, Plain):
        if codec.block_size:
            raise ValueError(f"{name}(block_size={codec.block_size}), and the blocks are the other side's: write plain")
        return
    if coder.across:
        raise ValueError(
            f"sides: {side} has {kind}, which stores two layers' tokens together: write it outside, around sides"
        )
    if not isinstance(coder, TwoSided) or coder.block < 1:
        raise ValueError(
            f"sides: {side} has {kind}, and each side must have a codec that codes keys and values on their own "
            "(kivi, vector, fp8, nuq), hadamard, unrotated or centred around one, or plain"
        )
    if side == "values" and codec.needs_rotation:
        raise ValueError("sides: values have no rotary embedding that could be turned back: leave unrotated out")
    for each in (*_changes(codec), coder):
        only = "both" if isinstance(each, Unrotated | Centred) else each.only
        if only != "both":
            raise ValueError(
                f"sides: {side} has {type(each).__name__}(only={only}), and gets {side} alone by its place: leave "
                "`only` out"
            )
    unused = f"{_OTHER[side][:-1]}_bits"
    bits = vars(coder).get(unused)
    if bits is not None:
        raise ValueError(
            f"sides: {side} has {kind}({unused}={bits}), and it codes no {_OTHER[side]}: leave {unused} out"
        )
