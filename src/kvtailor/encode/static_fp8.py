"""Static fp8: keys and values in 8-bit floats (e4m3), with scales that were calibrated beforehand.

*Idea* A serving engine cannot look at tokens that have not come, so it takes one scale for all of them: of a layer's
keys, and of its values, or of each kv head. A calibration text says how large they get. This is that arithmetic, so
that what such scales cost on a model is measured here before it is served with them.
*Paper* `micikevicius2022fp8` (arXiv 2209.05433) for the format.
*Source* The paper, and how vLLM and compressed-tensors store and read such scales; kvtailor's own code.
*Departs* The scale is rounded to the cache's dtype before it is used; a calibration of ours is exact in bfloat16, so
that nothing changes there. What is larger than 448 scales becomes 448 scales. Engines hold a scale once; here it
stands beside each block of tokens, since a segment is whole in itself. `fp8` has scales of the tokens themselves.
*Cost* 1 byte for each element and an element for `block_size` tokens; a decoded token reads them as they lie on a
CPU, more tokens at once decode the segment.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvtailor.calibration_file import CalibratedMethod
from kvtailor.encode.contract import Codec, CodecContext, Sides, TwoSided
from kvtailor.encode.settings import ByBlocks
from kvtailor.method import Serves
from kvtailor.ops.codes.sides import FloatCodes
from kvtailor.ops.segments.coded import PairSegment, Whole
from kvtailor.types import Layout

__all__ = ["StaticFp8", "StaticFp8Segment"]


@dataclass(frozen=True, kw_only=True)
class StaticFp8Segment(PairSegment):
    """8-bit floats with one scale for all tokens of a head."""

    codec = "static_fp8"
    kinds = (FloatCodes, Whole)


@dataclass(frozen=True, kw_only=True)
class StaticFp8(ByBlocks, TwoSided, CalibratedMethod, Codec):
    """e4m3 with scales from a file.

    Attributes:
        file: of `kvtailor calibrate static_fp8`.
        per: "tensor" has one scale for all heads of a layer, the largest of those of the file, "head" one for each.
        scale: one scale for keys and values of all layers, which no calibration is needed for; vLLM's `fp8` without
            scales in its checkpoint has 1.0. None: those of the file.
        recent: newest tokens that stay in full precision.
        block_size: tokens that are encoded at once.
        only: what is encoded; the other side stays as it is.
    """

    per: Literal["tensor", "head"] = "tensor"
    scale: float | None = None
    recent: int = 0
    block_size: int = 128
    only: Sides = "both"
    calibrates: ClassVar[str] = "static_fp8"
    segment = StaticFp8Segment
    examples: ClassVar[tuple[str, ...]] = ("static_fp8(scale=0.02)", "static_fp8(scale=1.0, only=keys)")
    serves: ClassVar[Serves] = Serves(
        latents="its scales are of keys and values of each kv head, and a latent is both at once"
    )
    _context: CodecContext | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per not in ("tensor", "head"):
            raise ValueError(f"static_fp8: per must be tensor or head, found {self.per!r}")
        if self.scale is not None and not (0 < self.scale < math.inf):
            raise ValueError(f"static_fp8: scale must be a number above 0, found {self.scale}")
        if self.scale is not None and self.file is not None:
            raise ValueError(f"static_fp8: scale={self.scale} and a file both give scales: leave one out")
        self.check_tokens("static_fp8")

    @property
    def wants_calibration(self) -> bool:
        return self.scale is None

    @property
    def bears_offset(self) -> bool:
        """A float's error is a share of its own channel."""
        return True

    def for_layer(self, context: CodecContext) -> StaticFp8:
        made = copy(self)
        object.__setattr__(made, "_context", context)
        return made

    def code_keys(self, keys: Tensor, layout: Layout, first: Tensor | None) -> FloatCodes:
        return self._coded(keys, layout, "key_scale")

    def code_values(self, values: Tensor, layout: Layout, first: Tensor | None) -> FloatCodes:
        return self._coded(values, layout, "value_scale")

    def key_bytes(self, size: int, element_size: int) -> float:
        """A byte for each channel, and the scale that stands beside a block."""
        return size + element_size / self.block_size

    def value_bytes(self, size: int, element_size: int) -> float:
        """As `key_bytes`."""
        return self.key_bytes(size, element_size)

    def encode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int:
        """1 for each value: over the scale."""
        return tokens * self.sizes_coded(key_size, value_size)

    def decode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int:
        """1 for each value: times the scale."""
        return tokens * self.sizes_coded(key_size, value_size)

    @classmethod
    def example_calibration(
        cls, *, layers: int, heads: int, group: int, size: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Scales that serve states of magnitudes up to 9."""
        return {
            name: (0.02 + 0.02 * torch.rand(layers, heads, generator=generator, dtype=torch.float32)).bfloat16().float()
            for name in ("key_scale", "value_scale")
        }

    def misfit(self, *, layers: int, heads: int, size: int) -> str | None:
        """A file that was made for a model of other shapes, or has scales that are none."""
        sentence, own = super().misfit(layers=layers, heads=heads, size=size), self._calibration
        if sentence is not None or own is None or not self.wants_calibration:
            return sentence
        wrong = sorted(name for name, scales in own.tensors.items() if not bool((scales > 0).all()))
        return f"static_fp8: {own.name} has scales that are not above 0 in {', '.join(wrong)}" if wrong else None

    def _coded(self, states: Tensor, layout: Layout, name: str) -> FloatCodes:
        heads = self._of_heads(name, layout.heads, states.device)
        return FloatCodes.scaled(states, self.block_size, heads[layout.owners(states.device) % layout.heads])

    def _of_heads(self, name: str, heads: int, device: torch.device) -> Tensor:
        """(h,) float32 scales of this process's heads of the layer.

        Raises:
            ValueError: there is no calibration.
        """
        if self.scale is not None:
            return torch.full((heads,), self.scale, dtype=torch.float32, device=device)
        context, own = self._context, self._calibration
        found = None if context is None else context.calibration
        if found is None and own is not None and context is not None and own.shapes.layers == context.layers:
            found = own.tensors
        if context is None or found is None:
            raise ValueError("static_fp8: no calibration was given; call for_layer first, with the tensors of a file")
        scales = found[name][context.layer].to(device, torch.float32)
        return scales.max().expand(heads) if self.per == "tensor" else context.share.own(scales, 0)
