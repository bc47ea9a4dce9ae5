"""Codes whose levels are the best ones for numbers that are spread as a bell, with one scale for each vector.

`ResidualCodes` add one bit for each channel of what the levels leave: the signs of a random projection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from kvtailor.errors import KvtailorError
from kvtailor.ops import huge_pages
from kvtailor.ops.codes.quant import count_below, pack, packed_size, unpack
from kvtailor.ops.lanes.pieces import pieces
from kvtailor.ops.segments.code_layout import CodeKind, CodeLayout, TokenSigns
from kvtailor.ops.segments.coded import Coded
from kvtailor.types import Coordinates
from kvtailor.types.late_checks import send

__all__ = [
    "of_unit_variance",
    "scale_back",
    "within",
    "GaussianCodes",
    "gaussian_levels",
    "ResidualCodes",
    "projection",
]


def of_unit_variance(states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Vectors (..., c) float32 whose mean square is 1, and their lengths in two factors (..., 1): norm and top.

    Args:
        states: (..., c), finite. A vector of zeros stays one, of norm 0.
    """
    part = states.float()
    # The largest number first: the squares of large states overflow float32.
    top = part.abs().amax(-1, keepdim=True)
    top = torch.where(top > 0, top, 1.0)
    part = part / top
    norm = _length(part)
    return part * (math.sqrt(states.shape[-1]) / torch.where(norm > 0, norm, 1.0)), norm, top


def _length(vectors: Tensor) -> Tensor:
    """(..., 1) float32 of vectors (..., c): summed in float64, so that order does not tell, as in bell.h."""
    # Apple's devices have no float64, and not all of Intel's do.
    wide = torch.float32 if vectors.device.type in ("mps", "xpu") else torch.float64
    length: Tensor = vectors.norm(dim=-1, keepdim=True, dtype=wide)
    return length.float()


def scale_back(norm: Tensor, top: Tensor, made: Tensor | float, dtype: torch.dtype) -> Tensor:
    """(..., 1): what gives vectors of the length `made` the length norm * top, in a cache's dtype; 0 for zeros."""
    return within(norm / made * top, dtype)


def within(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 numbers in a cache's dtype; its largest in place of any beyond it."""
    # Float64 has room for more than float32 can be asked to keep below.
    most = min(torch.finfo(dtype).max, torch.finfo(numbers.dtype).max)
    return numbers.clamp(-most, most).to(dtype)


# Elements that are worked on at once.
_PIECE = 1 << 20
# Of Newton, at most: 1 to 8 bits take 2 to 5.
_STEPS = 50


@cache
def gaussian_levels(bits: int) -> Tensor:
    """Return the 2^bits levels, ascending float32, with the least squared error for normal numbers of variance 1.

    Each is the mean of what is nearer to it than to the others (S. P. Lloyd, Least squares quantization in PCM, 1982;
    J. Max, Quantizing for minimum distortion, 1960). Newton's steps find them, a handful of which do what thousands of
    Lloyd's rounds would, from where many levels would lie: with the density of a variance of 3 (P. F. Panter and
    W. Dite, Quantization distortion in pulse-count modulation with nonuniform spacing of levels, 1951).
    """
    # Made outside of any inference mode: a cached tensor must serve all callers.
    with torch.inference_mode(False):
        ranks = (torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits
        levels: Tensor = math.sqrt(3) * torch.special.ndtri(ranks)
        # So far out that a normal number beyond it has no probability in float64.
        end = levels.new_tensor([40.0])
        for _ in range(_STEPS):
            border = torch.cat([-end, (levels[1:] + levels[:-1]) / 2, end])
            density = (-border.square() / 2).exp() / math.sqrt(2 * math.pi)
            share = torch.special.ndtr(border).diff()
            mean = (density[:-1] - density[1:]) / share
            # How a mean follows the border below and above it, each of which follows both of its levels by a half.
            below = density[:-1] * (mean - border[:-1]) / share / 2
            above = density[1:] * (border[1:] - mean) / share / 2
            slope = torch.diag(below + above) + torch.diag(below[1:], -1) + torch.diag(above[:-1], 1)
            moved = levels + torch.linalg.solve(torch.eye(len(levels), dtype=slope.dtype) - slope, mean - levels)
            # Symmetric, as the bell is; sums would drift off it.
            moved = (moved - moved.flip(0)) / 2
            change, levels = float((moved - levels).abs().max()), moved
            if change <= 1e-9:
                return levels.float()
    raise KvtailorError(f"the levels of a bell in {bits} bits still move by {change:g} after {_STEPS} steps")


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
            found = count_below(unit, middle)
            made = _length(levels[found.int()]) if keep_norm else math.sqrt(size)
            codes[at] = pack(found, bits)
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


# Elements that are worked on at once.


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
