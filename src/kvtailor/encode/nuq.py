"""Nuq: levels fitted to the states, outliers and the first tokens as they are; keys by channel, values by token.

*Idea* Keys and values are no more evenly spread over their range than bells are, so the levels of a code lie where the
numbers lie. The few numbers farthest from the rest of their vector would stretch its range; they are kept aside as they
are. So are the first tokens, on which much attention rests.
*Paper* `hooper2024kvquant` (arXiv 2401.18079), sections 3.3 to 3.6; bits = b of nuq-b, outliers = its 1 %. The paper's
whole is `unrotated(of=nuq)`, the presets `kvquant2`, `kvquant3` and `kvquant4`.
*Source* The paper; kvtailor's own code.
*Departs* The paper finds scales, thresholds and levels of keys, and the levels of values, on calibration text, with
squared gradients as weights. Here all come from the tokens themselves, `group` at a time and unweighted, when they are
stored; so each channel's scales cost memory, and no text has to be like the calibration's. Outliers are the share of
each vector that is farthest from its mean (the paper: beyond percentiles); a value vector is that of one kv head and
not of all. The histogram that levels are fitted on has 257 points. Q-Norm is not there.
*Cost* bits / 8 bytes for each element; 2 / group elements for each channel of a key and 2 elements for each value, and
2^bits of each for `group` tokens; for each outlier an element and a byte, and a byte for each vector. A decoded
token looks each element up in a table as it lies on a CPU, more tokens at once decode the segment.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtailor.encode.contract import Codec, Sides, TwoSided
from kvtailor.encode.settings import ByGroups, InBits
from kvtailor.ops.codes.nonuniform import ChannelLevels, LevelCodes, TokenLevels, aside, index_bytes
from kvtailor.ops.codes.quant import packed_size
from kvtailor.ops.dispatch import quantiser
from kvtailor.ops.segments.around import first_of_lanes, positions_of
from kvtailor.ops.segments.coded import PairSegment, Whole
from kvtailor.types import Layout

__all__ = ["Nuq", "NuqSegment"]


@dataclass(frozen=True, kw_only=True)
class NuqSegment(PairSegment):
    """Codes of fitted levels, and numbers kept aside."""

    codec = "nuq"
    kinds = (ChannelLevels, TokenLevels, Whole)


@dataclass(frozen=True, kw_only=True)
class Nuq(ByGroups, InBits, TwoSided, Codec):
    """Fitted levels, dense and sparse.

    Attributes:
        bits: of a code, 1 to 8.
        key_bits: of a key's code, where it is to differ.
        value_bits: of a value's code, where it is to differ.
        outliers: share of each vector that is kept aside; rounded to whole numbers.
        sinks: first tokens of each row that are kept as they are.
        group: tokens that share levels, and a key channel's scales.
        recent: newest tokens that stay in full precision.
        block_size: tokens that are encoded at once; a multiple of `group`.
        only: what is encoded; the other side stays as it is.
    """

    bits: int = 3
    key_bits: int | None = None
    value_bits: int | None = None
    outliers: float = 0.01
    sinks: int = 1
    group: int = 64
    recent: int = 0
    block_size: int = 128
    only: Sides = "both"
    segment = NuqSegment

    def __post_init__(self) -> None:
        self.check_bits("nuq", lambda name, bits: "; the paper's are 2, 3 and 4")
        if not 0 <= self.outliers < 0.5:
            raise ValueError(f"nuq: outliers must be from 0 to below 0.5, found {self.outliers}; the paper's is 0.01")
        for name, least in (("sinks", 0), ("recent", 0), ("group", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"nuq: {name} must be {least} tokens or more, found {getattr(self, name)}")
        self.check_groups("nuq")

    @property
    def bears_offset(self) -> bool:
        """Each channel has its own levels."""
        return True

    def code_keys(self, keys: Tensor, layout: Layout, first: Tensor | None) -> LevelCodes:
        return self._coded(keys, layout, first, self.bits_of_keys, by_channel=True)

    def code_values(self, values: Tensor, layout: Layout, first: Tensor | None) -> LevelCodes:
        return self._coded(values, layout, first, self.bits_of_values, by_channel=False)

    def key_bytes(self, size: int, element_size: int) -> float:
        """Code and outliers, and each channel's scales shared by a group of tokens; no first token."""
        kept = size * aside(self.outliers, self.group) / self.group
        return self._each(size, element_size, self.bits_of_keys, 2 * size / self.group + kept, kept)

    def value_bytes(self, size: int, element_size: int) -> float:
        """Code and outliers, and the token's own scales; no first token."""
        kept = aside(self.outliers, size)
        return self._each(size, element_size, self.bits_of_values, 2 + kept, kept)

    def encode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int:
        """5 for each value: two for its distance from the mean, two for its place, one for the histogram."""
        return 5 * tokens * self.sizes_coded(key_size, value_size)

    def decode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int:
        """2 for each value: times the reach, plus the minimum."""
        return 2 * tokens * self.sizes_coded(key_size, value_size)

    def _each(self, size: int, element_size: int, bits: int, elements: float, indices: float) -> float:
        """A code, so many elements, as many channel numbers, the count of them, and the shared levels."""
        levels: float = 2**bits / self.group
        return packed_size(size, bits) + element_size * (elements + levels) + index_bytes(size) * (indices + 1)

    def _coded(
        self, states: Tensor, layout: Layout, first: Tensor | None, bits: int, *, by_channel: bool
    ) -> LevelCodes:
        filled = layout.filled(states.device)
        whole = self._first_tokens(layout, first, states.device)
        if filled is not None:
            whole = whole & filled
        dense = ~whole if filled is None else filled & ~whole
        dense, whole = (each.expand(states.shape[:2]) for each in (dense, whole))
        coded = quantiser(states).levels
        return coded(states, bits, self.group, self.outliers, by_channel=by_channel, dense=dense, whole=whole)

    def _first_tokens(self, layout: Layout, first: Tensor | None, device: torch.device) -> Tensor:
        """(m, s) or (1, s) bool."""
        return positions_of(layout, first_of_lanes(layout, first, device), device) < self.sinks
