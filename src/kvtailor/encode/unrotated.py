"""Unrotated: any codec, of keys as they were before the rotary embedding.

*Idea* The rotation mixes two channels by an angle that grows with the position, so a channel of cached keys has no
magnitude of its own over time. Before it, outliers stay in their channels. So keys are turned back by their position,
encoded, and turned again when they are decoded.
*Paper* `hooper2024kvquant` (arXiv 2401.18079), section 3.2, pre-RoPE key quantization.
*Source* The paper; kvtailor's own code.
*Departs* The paper never rotates the keys that it stores; here the model has rotated them, and turning back costs a
rounding to the cache's dtype. Positions count from each row's first real token, as models do that get an attention
mask; where a model gets other positions, its keys are turned by the difference, and decoding takes that back.
*Cost* 8 bytes for each lane in padded batches, 4 for each slot where a row has padding in its midst, else no memory; a
sine, a cosine and 3 operations for each turned channel, at every step again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from kvtailor.encode.contract import Around, Codec, CodecContext, refuse_non_finite
from kvtailor.method import Serves
from kvtailor.ops.lanes.rotate import turn
from kvtailor.ops.segments.around import PositionedSegment, first_of_lanes, positions_of
from kvtailor.ops.segments.attention_inputs import Turning
from kvtailor.types import Layout, Rotation, Segment

__all__ = ["Unrotated", "UnrotatedSegment"]


@dataclass(frozen=True, kw_only=True)
class UnrotatedSegment(PositionedSegment):
    """Keys that were turned back before they were encoded.

    Attributes:
        rotation: of the layer; its frequencies are the model's, and shared.
    """

    rotation: Rotation
    codec = "unrotated"

    def keys_back(self, keys: Tensor) -> Tensor:
        return turn(keys, positions_of(self.layout, self.first, keys.device), self.rotation)

    def turning(self) -> Turning:
        return Turning(rotation=self.rotation, first=self.first)


@dataclass(frozen=True, kw_only=True)
class Unrotated(Around, Codec):
    """Turning back before another codec.

    Attributes:
        of: the codec.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "unrotated(of=kivi(bits=4))",
        "unrotated(of=hadamard(of=vector(bits=4), only=keys))",
    )
    _rotation: Rotation | None = field(init=False, repr=False, compare=False, default=None)
    serves: ClassVar[Serves] = Serves(
        latents="it turns whole keys by their positions, and of a latent layer's keys only the last channels are turned"
    )

    @property
    def needs_rotation(self) -> bool:
        return True

    def for_layer(self, context: CodecContext) -> Unrotated:
        made = replace(self, of=self.of.for_layer(replace(context, unrotated=True)))
        object.__setattr__(made, "_rotation", context.rotation)
        return made

    def segment_type(self) -> type[UnrotatedSegment]:
        return UnrotatedSegment

    def encode(self, layout: Layout, keys: Tensor, values: Tensor, first: Tensor | None = None) -> UnrotatedSegment:
        """Keys (m, s, d), turned back, and values (m, s, dv), encoded.

        Raises:
            CacheMisuse: NaN or infinity.
        """
        refuse_non_finite("unrotated", keys, values, "which would be turned into other channels")
        of_lane = first_of_lanes(layout, first, keys.device)
        back = turn(keys, -positions_of(layout, of_lane, keys.device), self._bound())
        return self._around(self.of.encode(layout, back, values, first), of_lane)

    def restore(self, layout: Layout, fields: Mapping[str, object], tensors: Mapping[str, Tensor]) -> UnrotatedSegment:
        return self._around(self.of.restore(layout, fields, tensors), tensors.get("first"))

    def encode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int | None:
        """Those of the inner codec, and 3 for each key channel (2 products and a sum), as if all were turned."""
        inner = self.of.encode_flops(tokens=tokens, key_size=key_size, value_size=value_size)
        return None if inner is None else inner + 3 * tokens * key_size

    def decode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int | None:
        """As `encode_flops`."""
        inner = self.of.decode_flops(tokens=tokens, key_size=key_size, value_size=value_size)
        return None if inner is None else inner + 3 * tokens * key_size

    def _around(self, inner: Segment, first: Tensor | None) -> UnrotatedSegment:
        return UnrotatedSegment(layout=inner.layout, inner=inner, rotation=self._bound(), first=first)

    def _bound(self) -> Rotation:
        if self._rotation is None:
            raise ValueError("unrotated: no rotary embedding was given; call for_layer first, with the rotation")
        return self._rotation
