"""Codes of pairs of channels, whose points have the least squared error for pairs of normal numbers; a scale for each
vector.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from kvtailor.ops import huge_pages
from kvtailor.ops.codes.gaussian import of_unit_variance, scale_back
from kvtailor.ops.codes.grid_points import POINTS
from kvtailor.ops.codes.quant import pack, packed_size, unpack
from kvtailor.ops.lanes.pieces import pieces
from kvtailor.ops.segments.code_layout import CodeKind, CodeLayout
from kvtailor.ops.segments.coded import Coded
from kvtailor.types.late_checks import send

__all__ = ["GridCodes", "grid_of", "pairs_of"]

# Elements that are worked on at once.
_PIECE = 1 << 20


@cache
def grid_of(bits: int) -> Tensor:
    """Return the points (4^bits, 2) float32 of a grid of so many bits for each number, on the CPU."""
    with torch.inference_mode(False):
        return torch.tensor([float(each) for each in POINTS[4**bits].split()], dtype=torch.float32).view(-1, 2)


@cache
def _grid_on(bits: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return send(grid_of(bits), device)


def pairs_of(size: int) -> int:
    """Pairs of `size` channels: channel i and channel size - 1 - i. Of an odd number the last has no second channel."""
    return -(-size // 2)


@dataclass(frozen=True, kw_only=True)
class GridCodes(Coded):
    """Codes of a grid's points for pairs of channels, times a scale for each token.

    After a Hadamard rotation channels i and j have a covariance: the sum of the variances that channels had before,
    each with a sign, the Walsh function of i xor j. That of a pair changes sign with every bit of a channel's number,
    so that variances which grow evenly, or differ between halves or neighbours, give nothing.

    Attributes:
        bits: for each channel; a code has twice as many.
        size: c.
        codes: (m, s, bytes) uint8, packed along the pairs.
        scale: (m, s, 1) of the cache's dtype.
    """

    bits: int
    size: int
    codes: Tensor
    scale: Tensor
    of_tokens = ("codes", "scale")

    @classmethod
    def of(cls, states: Tensor, bits: int, *, keep_norm: bool) -> GridCodes:
        """Codes of finite states (m, s, c).

        Args:
            bits: for each channel, one of those that have a grid.
            keep_norm: the scale gives the decoded vector the norm of the state; else the points their variance.
        """
        lanes, slots, size = states.shape
        pairs, grid = pairs_of(size), _grid_on(bits, states.device)
        # |x - g|^2 is least where g . x - |g|^2 / 2 is largest.
        towards, less = grid.mT.contiguous(), grid.square().sum(-1) / 2
        codes = torch.zeros((lanes, slots, packed_size(pairs, 2 * bits)), dtype=torch.uint8, device=states.device)
        scale = torch.zeros((lanes, slots, 1), dtype=states.dtype, device=states.device)
        for at in pieces(lanes, slots, pairs * len(grid), _PIECE):
            unit, norm, top = of_unit_variance(states[at])
            second = torch.nn.functional.pad(unit[..., pairs:].flip(-1), (0, 2 * pairs - size))
            both = torch.stack([unit[..., :pairs], second], -1)
            found = (both @ towards).sub_(less).argmax(-1)
            points = _side_by_side(grid, found, size)
            made = points.norm(dim=-1, keepdim=True) if keep_norm else math.sqrt(size)
            codes[at] = pack(found.to(torch.uint8), 2 * bits)
            scale[at] = scale_back(norm, top, made, states.dtype)
        return cls(bits=bits, size=size, codes=codes, scale=scale)

    @cached_property
    def code_layout(self) -> CodeLayout:
        return CodeLayout(
            kind=CodeKind.POINTS,
            codes=self.codes,
            size=self.size,
            dtype=self.scale.dtype,
            bits=2 * self.bits,
            step=self.scale,
            block=self.size,
            levels=grid_of(self.bits),
        )

    def decode(self) -> Tensor:
        grid = _grid_on(self.bits, self.codes.device)
        lanes, slots = self.codes.shape[:2]
        states = huge_pages.read_buffer(self.scale, (lanes, slots, self.size))
        for at in pieces(lanes, slots, self.size, _PIECE):
            index = unpack(self.codes[at], 2 * self.bits, pairs_of(self.size)).to(torch.int32)
            states[at] = _side_by_side(grid, index, self.size).mul_(self.scale[at].float()).to(states.dtype)
        return states

    def closed_form_bytes(self, lanes: int, slots: int) -> int:
        each = packed_size(pairs_of(self.size), 2 * self.bits)
        return lanes * slots * (each + self.scale.element_size())


def _side_by_side(grid: Tensor, index: Tensor, size: int) -> Tensor:
    """(..., size) float32: the first numbers of points (..., pairs), and behind them the second ones backwards."""
    first, second = grid[:, 0][index], grid[:, 1][index]
    return torch.cat([first, second[..., : size - first.shape[-1]].flip(-1)], -1)
