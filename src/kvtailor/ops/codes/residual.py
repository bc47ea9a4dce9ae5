"""Levels of a bell, and one bit for each channel of what they leave: the signs of a random projection."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from kvtailor.ops import huge_pages
from kvtailor.ops.codes.gaussian import GaussianCodes
from kvtailor.ops.codes.quant import pack, packed_size, unpack
from kvtailor.ops.codes.unit_variance import scale_back, within
from kvtailor.ops.lanes.pieces import pieces
from kvtailor.ops.segments.code_layout import CodeKind, CodeLayout, TokenSigns
from kvtailor.ops.segments.coded import Coded
from kvtailor.types import Coordinates
from kvtailor.types.late_checks import send

__all__ = ["ResidualCodes", "projection"]

# Elements that are worked on at once.
_PIECE = 1 << 20


@cache
def projection(size: int, state: int, device: torch.device) -> Tensor:
    """Return S (size, size) float32 of independent normal numbers, made once for each device.

    Args:
        size: channels.
        state: of the random numbers.
        device: where it is to lie.
    """
    # Made outside of any inference mode: a cached tensor must serve all callers.
    with torch.inference_mode(False):
        return send(
            torch.randn((size, size), generator=torch.Generator().manual_seed(state), dtype=torch.float32), device
        )


@cache
def _coordinates(size: int, state: int, device: torch.device) -> Coordinates:
    with torch.inference_mode(False):
        # |sum of signs(S r) times rows of S| grows with c: its mean is c sqrt(2 / pi) r / |r|.
        spread = projection(size, state, device).mT * (math.sqrt(math.pi / 2) / size)
        matrix = torch.cat([torch.eye(size, device=device, dtype=torch.float32), spread], 1)
        return Coordinates(matrix=matrix.contiguous()[None])


@dataclass(frozen=True, kw_only=True)
class ResidualCodes(Coded):
    """Levels times a scale, and for the residual its norm and the signs of its projection by S.

    The residual r stands as sqrt(pi / 2) / c * |r| * S^T sign(S r), whose products with any vector are those of r in
    the mean over S.

    Attributes:
        bits: of a code of levels.
        size: c.
        state: of the random numbers of S.
        codes: (m, s, bytes) uint8, packed along the channels.
        scale: (m, s, 1) of the cache's dtype.
        signs: (m, s, ceil(c / 8)) uint8, packed as codes of one bit; 1 is positive.
        rest: (m, s, 1) of the cache's dtype: norm of the residual.
    """

    bits: int
    size: int
    state: int
    codes: Tensor
    scale: Tensor
    signs: Tensor
    rest: Tensor
    of_tokens = ("codes", "scale", "signs", "rest")

    @classmethod
    def of(cls, states: Tensor, bits: int, state: int, *, keep_norm: bool) -> ResidualCodes:
        """Codes of finite states (m, s, c).

        Args:
            bits: of a code and a sign together, 2 or more.
            state: of the random numbers of S.
            keep_norm: see `GaussianCodes.of`; the residual is what is left of the state whatever the scale is.
        """
        lanes, slots, size = states.shape
        levels = GaussianCodes.of(states, bits - 1, keep_norm=keep_norm)
        onto = projection(size, state, states.device).mT
        signs = torch.zeros((lanes, slots, packed_size(size, 1)), dtype=torch.uint8, device=states.device)
        rest = torch.zeros((lanes, slots, 1), dtype=states.dtype, device=states.device)
        for at in pieces(lanes, slots, size, _PIECE):
            left = states[at].float() - levels.numbers_at(at)
            # The largest number first: the squares of large states overflow float32.
            top = left.abs().amax(-1, keepdim=True)
            left = left / torch.where(top > 0, top, 1.0)
            signs[at] = pack((left @ onto >= 0).to(torch.uint8), 1)
            rest[at] = scale_back(left.norm(dim=-1, keepdim=True), top, 1.0, states.dtype)
        return cls(
            bits=bits - 1, size=size, state=state, codes=levels.codes, scale=levels.scale, signs=signs, rest=rest
        )

    @cached_property
    def code_layout(self) -> CodeLayout:
        signs = TokenSigns(signs=self.signs, norm=self.rest)
        return self._levels.code_layout._replace(kind=CodeKind.SIGNS, signs=signs)

    def decode(self) -> Tensor:
        spread = self.coordinates().matrix[0, :, self.size :]
        lanes, slots = self.codes.shape[:2]
        states = huge_pages.read_buffer(self.scale, (lanes, slots, self.size))
        levels = self._levels
        for at in pieces(lanes, slots, self.size, _PIECE):
            numbers = levels.numbers_at(at).add_(self._signs_at(at) @ spread.mT)
            # Signs may point beyond the largest number of a dtype.
            states[at] = within(numbers, states.dtype)
        return states

    def stored(self) -> Tensor:
        lanes, slots = self.codes.shape[:2]
        states = huge_pages.read_buffer(self.scale, (lanes, slots, 2 * self.size))
        levels = self._levels
        for at in pieces(lanes, slots, self.size, _PIECE):
            states[at][..., : self.size] = levels.numbers_at(at).to(states.dtype)
            states[at][..., self.size :] = self._signs_at(at).to(states.dtype)
        return states

    def coordinates(self) -> Coordinates:
        return _coordinates(self.size, self.state, self.codes.device)

    def closed_form_bytes(self, lanes: int, slots: int) -> int:
        each = packed_size(self.size, self.bits) + packed_size(self.size, 1)
        return lanes * slots * (each + 2 * self.scale.element_size())

    @property
    def _levels(self) -> GaussianCodes:
        return GaussianCodes(bits=self.bits, size=self.size, codes=self.codes, scale=self.scale)

    def _signs_at(self, at: tuple[slice, slice]) -> Tensor:
        """(l, s', c) float32 at these lanes and slots: 1 and -1 times the residual's norm."""
        return unpack(self.signs[at], 1, self.size).float().mul_(2).sub_(1).mul_(self.rest[at].float())
