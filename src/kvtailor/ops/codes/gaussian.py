"""Codes whose levels are the best ones for numbers that are spread as a bell, with one scale for each vector."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from kvtailor.ops import huge_pages
from kvtailor.ops.codes.quant import pack, packed_size, unpack
from kvtailor.ops.codes.unit_variance import of_unit_variance, scale_back
from kvtailor.ops.lanes.pieces import pieces
from kvtailor.ops.segments.code_layout import CodeKind, CodeLayout
from kvtailor.ops.segments.coded import Coded
from kvtailor.types.late_checks import send

__all__ = ["GaussianCodes", "gaussian_levels"]

# Elements that are worked on at once.
_PIECE = 1 << 20
_ROUNDS = 10_000


@cache
def gaussian_levels(bits: int) -> Tensor:
    """Return the 2^bits levels, ascending float32, with the least squared error for normal numbers of variance 1.

    Each is the mean of what is nearer to it than to the others, which Lloyd's rounds bring about (S. P. Lloyd, Least
    squares quantization in PCM, 1982; J. Max, Quantizing for minimum distortion, 1960).
    """
    # Made outside of any inference mode: a cached tensor must serve all callers.
    with torch.inference_mode(False):
        levels = torch.linspace(-2, 2, 2**bits, dtype=torch.float64)
        density = lambda x: (-x.square() / 2).exp() / math.sqrt(2 * math.pi)  # noqa: E731
        for _ in range(_ROUNDS):
            border = torch.cat(
                [levels.new_tensor([-torch.inf]), (levels[1:] + levels[:-1]) / 2, levels.new_tensor([torch.inf])]
            )
            below = torch.special.ndtr(border)
            # The mean of a normal number between two borders.
            moved = (density(border[:-1]) - density(border[1:])) / (below[1:] - below[:-1])
            # Symmetric, as the bell is; rounds of sums would drift off it.
            moved = (moved - moved.flip(0)) / 2
            if torch.equal(moved, levels):
                break
            levels = moved
        return levels.float()


@cache
def _levels_on(bits: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return send(gaussian_levels(bits), device)


@dataclass(frozen=True, kw_only=True)
class GaussianCodes(Coded):
    """Codes of the levels of a bell, times a scale for each token.

    Attributes:
        bits: of a code.
        size: c.
        codes: (m, s, bytes) uint8, packed along the channels.
        scale: (m, s, 1) of the cache's dtype.
    """

    bits: int
    size: int
    codes: Tensor
    scale: Tensor
    of_tokens = ("codes", "scale")

    @classmethod
    def of(cls, states: Tensor, bits: int, *, keep_norm: bool) -> GaussianCodes:
        """Codes of finite states (m, s, c).

        Args:
            bits: of a code.
            keep_norm: the scale gives the decoded vector the norm of the state; else the levels their variance.
        """
        lanes, slots, size = states.shape
        levels = _levels_on(bits, states.device)
        middle = (levels[1:] + levels[:-1]) / 2
        codes = torch.zeros((lanes, slots, packed_size(size, bits)), dtype=torch.uint8, device=states.device)
        scale = torch.zeros((lanes, slots, 1), dtype=states.dtype, device=states.device)
        for at in pieces(lanes, slots, size, _PIECE):
            unit, norm, top = of_unit_variance(states[at])
            found = torch.bucketize(unit, middle, out_int32=True)
            made = levels[found].norm(dim=-1, keepdim=True) if keep_norm else math.sqrt(size)
            codes[at] = pack(found.to(torch.uint8), bits)
            scale[at] = scale_back(norm, top, made, states.dtype)
        return cls(bits=bits, size=size, codes=codes, scale=scale)

    @cached_property
    def code_layout(self) -> CodeLayout:
        return CodeLayout(
            kind=CodeKind.LEVELS,
            codes=self.codes,
            size=self.size,
            dtype=self.scale.dtype,
            bits=self.bits,
            step=self.scale,
            block=self.size,
            levels=gaussian_levels(self.bits),
        )

    def decode(self) -> Tensor:
        lanes, slots = self.codes.shape[:2]
        states = huge_pages.read_buffer(self.scale, (lanes, slots, self.size))
        for at in pieces(lanes, slots, self.size, _PIECE):
            states[at] = self.numbers_at(at).to(states.dtype)
        return states

    def numbers_at(self, at: tuple[slice, slice]) -> Tensor:
        """(l, s', c) float32: what is stored at these lanes and slots."""
        index = unpack(self.codes[at], self.bits, self.size).to(torch.int32)
        return _levels_on(self.bits, self.codes.device)[index].mul_(self.scale[at].float())

    def closed_form_bytes(self, lanes: int, slots: int) -> int:
        return lanes * slots * (packed_size(self.size, self.bits) + self.scale.element_size())
