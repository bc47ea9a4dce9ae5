"""By layer: each layer has a codec of its own, or none.

*Idea* Layers differ in what an error of their keys and values costs, so that the same bytes go further where other
layers have other codecs. This is how a plan writes such a table.
*Paper* None; `tao2025asymkv` and others choose bits by layer, and `bit_table` writes bits alone.
*Source* kvtailor's own code.
*Departs* Nothing known.
*Cost* On each layer that of its own codec. A layer with `plain` costs what it does without a codec.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from kvtailor.encode.contract import Codec, CodecContext, Sides
from kvtailor.encode.plain import Plain
from kvtailor.encode.settings import check_agreement
from kvtailor.types import Layout, Segment

__all__ = ["ByLayer"]


@dataclass(frozen=True, kw_only=True)
class ByLayer(Codec):
    """A table of codecs.

    A plan has one recent window and one block, so the codecs must agree in both; `plain` has neither. The table is what
    makes the plan: however it was written, `of` lists each codec once, in the order of the layers.

    A calibrated codec gets the whole calibration, as it does outside of the table. Under `allocation=fisher` a layer's
    rank is the one that it has where all layers are projected.

    Attributes:
        of: a codec for each layer that the plan compresses; with `layers`, the codecs to choose from. `plain` leaves a
            layer as it is.
        layers: for each layer that the plan compresses, the place of its codec in `of`, from 0 on; None: `of` has one
            for each layer.
    """

    of: tuple[Codec, ...]
    layers: tuple[int, ...] | None = None
    kinds_by_layer: ClassVar[bool] = True
    examples: ClassVar[tuple[str, ...]] = (
        "by_layer(of=[kivi(bits=4), kivi], layers=[0, 1, 1])",
        "by_layer(of=[fp8(block_size=32), nuq(group=32, block_size=32), kivi(bits=4, recent=0)])",
    )

    def __post_init__(self) -> None:
        if not isinstance(self.of, tuple | list) or not self.of:
            raise ValueError(f"by_layer: of must be a list of codecs, one or more, found {self.of!r}")
        for place, codec in enumerate(self.of):
            _check(place, codec)
        table = tuple(self.of) if self.layers is None else self._looked_up()
        # By text, since codecs of 1 direction and of a share of 1.0 are equal in Python.
        texts = [repr(codec) for codec in table]
        places = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        once = len(places) == len(table)
        object.__setattr__(self, "of", tuple(table[texts.index(text)] for text in places))
        object.__setattr__(self, "layers", None if once else tuple(places[text] for text in texts))
        self._check_agreement()

    def misfit(self, *, layers: int, heads: int, size: int) -> str | None:
        """A table for another number of layers."""
        given = self.table_layers
        if given == layers:
            return None
        return f"by_layer: it has codecs for {given} layers; the plan compresses {layers} of this model"

    @property
    def table_layers(self) -> int:
        """The length of the table."""
        return len(self.of if self.layers is None else self.layers)

    @property
    def tail(self) -> int:
        """The recent window of all layers that are encoded."""
        return max(codec.tail for codec in self._coding)

    @property
    def block(self) -> int:
        """The block of all layers that are encoded."""
        return max(codec.block for codec in self._coding)

    @property
    def lane_multiple(self) -> int:
        """The least common multiple; a layer's own lanes are multiples of what its codec needs."""
        return math.lcm(*(codec.lane_multiple for codec in self._coding))

    @property
    def needs_rotation(self) -> bool:
        """Whether a layer needs it."""
        return any(codec.needs_rotation for codec in self.of)

    @property
    def needs_offset(self) -> bool:
        """Whether a codec does."""
        return any(codec.needs_offset for codec in self.of)

    @property
    def bears_offset(self) -> bool:
        """Whether all layers' do."""
        return all(codec.bears_offset for codec in self.of)

    @property
    def rounds_on_write(self) -> bool:
        """Whether a layer's codec does; each layer does as its own."""
        return any(codec.rounds_on_write for codec in self.of)

    @property
    def weighs_tokens(self) -> bool:
        """Whether a layer may."""
        return any(codec.weighs_tokens for codec in self.of)

    def in_blocks(self, tokens: int) -> ByLayer:
        """See `Codec.in_blocks`: layers that are left as they are get the block of the others."""
        return replace(self, of=tuple(codec.in_blocks(self.block or tokens) for codec in self.of))

    def one_sided(self, side: Sides, asked: str) -> Codec:
        """Refuses: see `Codec.kinds_by_layer`.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{asked}: by_layer is the outermost codec: write by_layer(of=[{asked}(...), ...])")

    def for_layer(self, context: CodecContext) -> Codec:
        """The layer's own codec.

        Raises:
            ValueError: the table is for another number of layers.
        """
        why = self.misfit(layers=context.layers, heads=context.heads or 0, size=0)
        if why is not None:
            raise ValueError(why)
        place = context.layer if self.layers is None else self.layers[context.layer]
        return self.of[place].for_layer(context)

    def segment_type(self) -> type[Segment]:
        """That of all layers, if it is the same."""
        kinds = {codec.segment_type() for codec in self.of}
        return kinds.pop() if len(kinds) == 1 else Segment

    def encode(self, layout: Layout, keys: Tensor, values: Tensor, first: Tensor | None = None) -> Segment:
        """Refuses: the codec depends on the layer, see `for_layer`.

        Raises:
            ValueError: always.
        """
        raise _unbound()

    def restore(self, layout: Layout, fields: Mapping[str, object], tensors: Mapping[str, Tensor]) -> Segment:
        """As `encode`."""
        raise _unbound()

    def bytes_per_token(self, key_size: int, value_size: int, element_size: int) -> float:
        """As `encode`."""
        raise _unbound()

    @property
    def _coding(self) -> list[Codec]:
        """The codecs that encode."""
        return [codec for codec in self.of if not codec.exact]

    def _looked_up(self) -> tuple[Codec, ...]:
        assert self.layers is not None
        last = len(self.of) - 1
        for layer, place in enumerate(self.layers):
            if not isinstance(place, int) or not 0 <= place <= last:
                raise ValueError(
                    f"by_layer: layers[{layer}] is {place!r}, and the places in `of` go from 0 to {last}: it has "
                    f"{len(self.of)} codecs"
                )
        unused = sorted(set(range(len(self.of))) - set(self.layers))
        if unused:
            raise ValueError(
                f"by_layer: no layer has of[{unused[0]}], {self.of[unused[0]]!r}: leave it out, or give its place in "
                "`layers`"
            )
        return tuple(self.of[place] for place in self.layers)

    def _check_agreement(self) -> None:
        coding = self._coding
        if not coding:
            raise ValueError("by_layer: all layers have plain, so nothing would be encoded: write plain")
        check_agreement("by_layer", "layers", coding)


def _check(place: int, codec: object) -> None:
    """Raise where a codec cannot be one layer's."""
    if not isinstance(codec, Codec):
        raise ValueError(f"by_layer: of[{place}] must be a codec such as kivi, found {codec!r}")
    name = type(codec).__name__
    if codec.kinds_by_layer:
        raise ValueError(f"by_layer: of[{place}] is another table of layers: give each layer one codec")
    if codec.across:
        raise ValueError(
            f"by_layer: of[{place}] is {name}, which stores two layers' tokens together, and here each layer has a "
            "codec of its own: leave one of the two out"
        )
    if codec.exact and not isinstance(codec, Plain):
        raise ValueError(
            f"by_layer: of[{place}] is {name}, which keeps its tokens as they are for an attention that reads it "
            "alone: write plain"
        )


def _unbound() -> ValueError:
    return ValueError("by_layer: the codec depends on the layer; call for_layer first")
