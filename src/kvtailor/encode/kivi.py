"""KIVI: keys in groups along time within a channel, values in groups of channels within a token, 1 to 8 bits.

*Idea* Outliers of keys sit in a few channels, those of values do not; so each key channel gets its own minimum and step
for every `group` tokens, and each value token its own for every `group` channels. The newest tokens stay as they are.
*Paper* `liu2024kivi` (arXiv 2402.02750), sections 3.2 and 4.1; bits = B, group = G, recent = R.
*Source* The paper; kvtailor's own code.
*Departs* Values leave the tail with their keys, a block of `recent` tokens at a time, and not one token at each step
(segments are never rewritten, so a value is in full precision between R and 2 R tokens instead of R). After a prompt
all but the newest R tokens are encoded, where the paper encodes whole blocks of R. A group of equal values, 0 / 0 in
the paper, has the step 2^-14. A segment that is no multiple of `group` ends with a shorter key group. Where `group`
does not divide a value's size, the largest divisor below it is taken. Bits other than 2 and 4, other bits for keys than
for values, and `only` are kvtailor's additions.
*Cost* bits / 8 + 2 * element / group bytes for each element; attention decodes the segment at every step where no
kernel reads its codes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvtailor.encode.contract import Codec, Sides, TwoSided
from kvtailor.encode.settings import InBits
from kvtailor.ops.codes.quant import largest_divisor, packed_size
from kvtailor.ops.codes.sides import ChannelCodes, TokenCodes
from kvtailor.ops.dispatch import quantiser
from kvtailor.ops.segments.coded import PairSegment, Whole
from kvtailor.types import Layout

__all__ = ["Kivi", "KiviSegment"]


@dataclass(frozen=True, kw_only=True)
class KiviSegment(PairSegment):
    """Keys with scales for each channel of a run of tokens, values with scales for each run of channels of a token."""

    codec = "kivi"
    kinds = (ChannelCodes, TokenCodes, Whole)


@dataclass(frozen=True, kw_only=True)
class Kivi(InBits, TwoSided, Codec):
    """Asymmetric codes.

    Attributes:
        bits: of a code, 1 to 8.
        group: tokens of a key group, and channels of a value group.
        recent: newest tokens in full precision, and tokens encoded at once; a multiple of `group`. With 0 all of a
            prompt is encoded, and decoded tokens stay in full precision only until they are a whole group.
        key_bits: of a key's code, where it is to differ.
        value_bits: of a value's code, where it is to differ.
        only: what is encoded; the other side stays as it is.
    """

    bits: int = 2
    group: int = 32
    recent: int = 128
    key_bits: int | None = None
    value_bits: int | None = None
    only: Sides = "both"
    segment = KiviSegment

    def __post_init__(self) -> None:
        self.check_bits("kivi", lambda name, bits: f"; the paper's are {name}=2 and {name}=4")
        if self.group < 2:
            raise ValueError(f"kivi: group must be 2 values or more, found {self.group}; the paper's is group=32")
        if self.recent < 0 or self.recent % self.group:
            raise ValueError(
                f"kivi: recent must be 0 or a multiple of its group, and recent={self.recent} is none of "
                f"group={self.group}; write recent={max(1, round(self.recent / self.group)) * self.group}"
            )

    @property
    def tail(self) -> int:
        """The recent window."""
        return self.recent

    @property
    def block(self) -> int:
        """The recent window leaves the tail as a whole; without one, a group does."""
        return self.recent or self.group

    @property
    def lane_multiple(self) -> int:
        """Key groups run along time."""
        return self.group if self.codes_keys else 1

    @property
    def bears_offset(self) -> bool:
        """Each channel has its own minimum, which takes the constant."""
        return True

    def code_keys(self, keys: Tensor, layout: Layout, first: Tensor | None) -> ChannelCodes:
        return quantiser(keys).channels(keys, self.bits_of_keys, self.group)

    def code_values(self, values: Tensor, layout: Layout, first: Tensor | None) -> TokenCodes:
        return quantiser(values).tokens(values, self.bits_of_values, largest_divisor(values.shape[-1], self.group))

    def key_bytes(self, size: int, element_size: int) -> float:
        """The code, and two scales of each channel shared by a group of tokens."""
        return packed_size(size, self.bits_of_keys) + 2 * element_size * size / self.group

    def value_bytes(self, size: int, element_size: int) -> float:
        """The code, and two scales for each group of channels."""
        groups = size // largest_divisor(size, self.group)
        return packed_size(size, self.bits_of_values) + 2 * element_size * groups

    def encode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int:
        """2 for each value (less its minimum, divided by the step) and 2 for the step of each group."""
        key_groups = -(-tokens // self.group) * key_size if self.codes_keys else 0
        value_groups = tokens * (value_size // largest_divisor(value_size, self.group)) if self.codes_values else 0
        return 2 * (tokens * self.sizes_coded(key_size, value_size) + key_groups + value_groups)

    def decode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int:
        """2 for each value: times the step, plus the minimum."""
        return 2 * tokens * self.sizes_coded(key_size, value_size)
