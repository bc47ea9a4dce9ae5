"""Codes of coordinates in groups that have bits of their own, and which bits are best for them.

A group is `UNIT` coordinates one after another, the last of a vector maybe fewer. Each coordinate has a step and a
minimum for a run of tokens, as a key's channel in `ops/codes/sides.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtailor.ops.codes.quant import dequantise, pack, packed_size, quantise, unpack
from kvtailor.ops.codes.sides import decoded_channels, padded_groups
from kvtailor.ops.segments.coded import TimeGrouped

__all__ = [
    "MOST_BITS",
    "UNIT",
    "ComponentCodes",
    "best_bits",
    "bytes_of_run",
    "distortions",
    "part_distortions",
    "principal_parts",
    "unit_sizes",
]

UNIT = 8
MOST_BITS = 8
# A step and a minimum, of 16 bits each.
_SCALES = 4


@dataclass(frozen=True, kw_only=True)
class ComponentCodes(TimeGrouped):
    """Codes of coordinates (m, s, c).

    Attributes:
        bits: a digit for each group of coordinates, 1 to 8.
        size: c.
        codes: (m, s, bytes) uint8, packed along the coordinates, groups of equal bits that follow each other as one.
        step, low: (m, ceil(s / group), c) of the cache's dtype; with `row` (rows, c).
    """

    bits: str
    size: int
    codes: Tensor
    step: Tensor
    low: Tensor
    of_tokens = ("codes",)
    shared = ("step", "low")

    @classmethod
    def of(cls, states: Tensor, bits: str, group: int) -> ComponentCodes:
        """Codes of coordinates (m, s, c), `group` tokens to a step and a minimum."""
        slots, size = states.shape[1], states.shape[-1]
        padded = padded_groups(states, group)
        parts = []
        for first, count, each in _runs(bits, size):
            codes, step, low = quantise(padded[..., first : first + count], each, 1, group)
            parts.append((pack(codes[:, :slots], each), step, low))
        codes, step, low = (torch.cat(of_each, -1) for of_each in zip(*parts, strict=True))
        return cls(group=group, bits=bits, size=size, codes=codes, step=step, low=low)

    def decode(self) -> Tensor:
        return decoded_channels(self, self._unpacked)

    def closed_form_bytes(self, lanes: int, slots: int) -> int:
        scales = self.groups(lanes, slots) * 2 * self.size * self.step.element_size()
        return lanes * slots * _code_bytes(self.bits, self.size) + scales + self.index_bytes(lanes, slots)

    def _unpacked(self, codes: Tensor) -> Tensor:
        end, parts = 0, []
        for _, count, bits in _runs(self.bits, self.size):
            first, end = end, end + packed_size(count, bits)
            parts.append(unpack(codes[..., first:end], bits, count))
        return torch.cat(parts, -1)


def unit_sizes(size: int) -> list[int]:
    """How many of so many coordinates each group has."""
    return [min(UNIT, size - first) for first in range(0, size, UNIT)]


def bytes_of_run(bits: str, size: int, tokens: int, scale_size: int) -> int:
    """Of so many tokens that share steps and minima of so many bytes each."""
    return tokens * _code_bytes(bits, size) + 2 * scale_size * size


def best_bits(distortion: Tensor, size: int, *, tokens: int, budget: float) -> tuple[int, ...]:
    """The bits of each group with the least distortion in all that a budget allows, by dynamic programming.

    With D(u, j) the least distortion of the first u groups in j bytes, D(u, j) = min over b of
    D(u - 1, j - cost(u, b)) + distortion[u, b]. Of equal ones that with fewer bits is taken.

    Args:
        distortion: (groups, 1 + MOST_BITS) of each group with 0 bits (it is dropped) and with more.
        size: coordinates of a vector.
        tokens: that share a step and a minimum, which count 16 bits each.
        budget: bits for each coordinate of a vector, whether it is kept or not.
    """
    costs = [
        [0, *(tokens * packed_size(count, bits) + _SCALES * count for bits in range(1, MOST_BITS + 1))]
        for count in unit_sizes(size)
    ]
    unit = math.gcd(*(cost for of_unit in costs for cost in of_unit))
    most = int(budget * size * tokens / 8) // unit
    best = torch.zeros(most + 1, dtype=torch.float64)
    choices = []
    for each, of_unit in zip(distortion.double().tolist(), costs, strict=True):
        found, choice = best + each[0], torch.zeros(most + 1, dtype=torch.int64)
        for bits in range(1, MOST_BITS + 1):
            cost = of_unit[bits] // unit
            if cost > most:
                break
            tried = best[: most + 1 - cost] + each[bits]
            better = tried < found[cost:]
            found[cost:] = torch.where(better, tried, found[cost:])
            choice[cost:][better] = bits
        best = found
        choices.append(choice)
    chosen, left = [], most
    for choice, of_unit in zip(reversed(choices), reversed(costs), strict=True):
        bits = int(choice[left])
        chosen.append(bits)
        left -= of_unit[bits] // unit
    return tuple(reversed(chosen))


def distortions(coordinates: Tensor, group: int) -> Tensor:
    """(groups, 1 + MOST_BITS) float64 squared errors of coordinates (m, n, c), summed over lanes and tokens.

    With 0 bits a coordinate is taken for 0; with more it is coded as `ComponentCodes` does, `group` tokens to a step.
    """
    tokens, size = coordinates.shape[1:]
    padded, found = padded_groups(coordinates.float(), group), [coordinates.double().square()]
    for bits in range(1, MOST_BITS + 1):
        back = dequantise(*quantise(padded, bits, 1, group), 1)[:, :tokens]
        found.append((back.double() - coordinates.double()).square())
    each = torch.stack([errors.sum((0, 1)) for errors in found], -1)
    return torch.stack([part.sum(0) for part in each.split(unit_sizes(size))])


def principal_parts(second: Tensor, first: Tensor, count: int) -> dict[str, Tensor]:
    """Mean and principal components of one layer's side, of all heads together and of each alone.

    Args:
        second: (h * c, h * c) float64 sum of outer products of all heads' states.
        first: (h, c) float64 sum of states.
        count: of tokens.

    Returns:
        mean (h, c) float32; together_directions (h * c, h * c) and alone_directions (h, c, c) float16, columns of the
        largest variance first; together_variance (h * c,) and alone_variance (h, c) float32.
    """
    heads, size = first.shape
    mean = first / count
    covariance = second / count - mean.flatten()[:, None] * mean.flatten()
    alone = torch.stack([part[:, i * size : (i + 1) * size] for i, part in enumerate(covariance.split(size))])
    found = {"mean": mean.float()}
    for name, each in (("together", covariance), ("alone", alone)):
        variance, vectors = torch.linalg.eigh(each)
        found[f"{name}_directions"] = vectors.flip(-1).to(torch.float16)
        found[f"{name}_variance"] = variance.flip(-1).clamp(min=0).float()
    return found


def part_distortions(states: Tensor, parts: Mapping[str, Tensor], group: int) -> dict[str, Tensor]:
    """together_distortion and alone_distortion of states (h, n, c) in the components that `principal_parts` gave.

    See `distortions`; of single heads the sum over heads, since all have the same bits.
    """
    centred = states.float() - parts["mean"][:, None]
    together = centred.transpose(0, 1).flatten(1) @ parts["together_directions"].float()
    alone = centred @ parts["alone_directions"].float()
    return {
        "together_distortion": distortions(together[None], group),
        "alone_distortion": distortions(alone, group),
    }


def _runs(bits: str, size: int) -> Sequence[tuple[int, int, int]]:
    """First coordinate, number of coordinates and bits of groups of equal bits that follow each other."""
    found: list[tuple[int, int, int]] = []
    first = 0
    for digit, count in zip(bits, unit_sizes(size), strict=True):
        if found and found[-1][2] == int(digit):
            before = found.pop()
            found.append((before[0], before[1] + count, before[2]))
        else:
            found.append((first, count, int(digit)))
        first += count
    return found


def _code_bytes(bits: str, size: int) -> int:
    return sum(packed_size(count, each) for _, count, each in _runs(bits, size))
