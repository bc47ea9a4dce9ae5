"""Directions on which states are projected: the principal ones of measured moments, or random ones."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from kvtailor.ops.lanes.apportion import apportion
from kvtailor.types import Coordinates, Lift
from kvtailor.types.late_checks import send

__all__ = [
    "Basis",
    "StateMoments",
    "on_device",
    "part_of_heads",
    "principal",
    "random_directions",
    "rank_of",
    "split_ranks",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class Basis:
    """A subspace for each group of kv heads.

    Attributes:
        directions: (groups, w, r) float32, orthonormal columns over the w channels of a group's heads, one after
            another.
        mean: (groups, w) float32 taken off before; None: nothing is.
        joined: heads of a group.
        apart: these are the blocks that single heads have in the directions of so many joined heads, of whose latents
            each head has its own; 1: they are no such blocks. Directions are not orthonormal then.
    """

    directions: Tensor
    joined: int
    mean: Tensor | None = None
    apart: int = 1

    @property
    def rank(self) -> int:
        """r, numbers that stand for the w channels."""
        return self.directions.shape[-1]

    @property
    def scale(self) -> float:
        """By which latents are divided: a power of two that keeps them below the largest state, for float16's sake."""
        return 2.0 ** math.ceil(math.log2(self.directions.shape[-2] * self.apart) / 2)

    def latents(self, states: Tensor, owner: Tensor | None) -> Tensor:
        """The coordinates of states.

        Args:
            states: (m, s, w).
            owner: (m,) int64 row * groups + group of each lane; None where lane i belongs to owner i.

        Returns:
            (m, s, r) in the dtype of the states.
        """
        offset = None if self.mean is None else -(self.mean[:, None] @ self.directions / self.scale)
        return _by_group(states.float(), self.directions / self.scale, offset, owner).to(states.dtype)

    def states(self, latents: Tensor, owner: Tensor | None) -> Tensor:
        """What latents (m, s, r) stand for, (m, s, w) in their dtype; `owner` as for `latents`."""
        offset = None if self.mean is None else self.mean[:, None]
        return _by_group(latents.float(), self.directions.mT * self.scale, offset, owner).to(latents.dtype)

    def by_head(self) -> Basis:
        """For each head what its own channels are of its group's latents."""
        mean = None if self.mean is None else self.mean.unflatten(1, (self.joined, -1)).flatten(0, 1)
        directions = self.directions.unflatten(1, (self.joined, -1)).flatten(0, 1)
        return Basis(directions=directions, mean=mean, joined=1, apart=self.apart * self.joined)

    def coordinates(self) -> Coordinates:
        """What latents are of each head's states. Tensors are views of the basis's own."""
        head = self.by_head()
        return Coordinates(matrix=head.directions, scale=self.scale, mean=head.mean)

    def lift(self) -> Lift:
        """The way from sums of latents to each head's channels."""
        head = self.by_head()
        return Lift(matrix=head.directions.mT * self.scale, offset=head.mean)


@dataclass(frozen=True, kw_only=True, eq=False)
class StateMoments:
    """Mean and covariance of one layer's states over some text, over the channels of all heads, one after another.

    Attributes:
        mean: (h, c).
        deviation: (h, c) standard deviations.
        correlation: (h * c * (h * c - 1) / 2,) int8, the strict lower triangle row by row, 127 for 1.
    """

    mean: Tensor
    deviation: Tensor
    correlation: Tensor

    @classmethod
    def of(cls, second: Tensor, first: Tensor, count: int) -> StateMoments:
        """From sums over `count` tokens: second (h * c, h * c) of outer products, first (h, c); float64."""
        mean = first.flatten() / count
        covariance = second / count - mean[:, None] * mean
        deviation = covariance.diagonal().clamp(min=0).sqrt()
        safe = torch.where(deviation > 0, deviation, 1.0)
        row, column = torch.tril_indices(mean.shape[0], mean.shape[0], -1)
        correlation = (covariance / safe[:, None] / safe)[row, column].clamp(-1, 1)
        return cls(
            mean=mean.view_as(first).to(torch.float16),
            deviation=deviation.view_as(first).to(torch.float16),
            correlation=(correlation * 127).round().to(torch.int8),
        )

    def covariance(self) -> Tensor:
        """(h * c, h * c) float64."""
        deviation = self.deviation.double().flatten()
        size = deviation.shape[0]
        row, column = torch.tril_indices(size, size, -1)
        half = torch.zeros((size, size), dtype=torch.float64)
        half[row, column] = self.correlation.double() / 127
        return (half + half.mT + torch.eye(size, dtype=torch.float64)) * deviation[:, None] * deviation

    def __hash__(self) -> int:
        return hash(self.digest())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StateMoments) and self.digest() == other.digest()

    def digest(self) -> bytes:
        """Of the content, so that two readings of one file are the same."""
        found = hashlib.sha256()
        for each in (self.mean, self.deviation, self.correlation):
            found.update(each.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return found.digest()


@lru_cache(maxsize=512)
def principal(moments: StateMoments, joined: int, rank: int, *, centred: bool, shared: bool) -> tuple[Basis, Tensor]:
    """The directions in which states have most energy.

    Args:
        moments: measured.
        joined: heads of a group.
        rank: r.
        centred: the mean is taken off, so that energy is variance.
        shared: all heads have one basis, of their states together; `joined` is 1 then.

    Returns:
        The basis on the CPU; and (groups, w) float64 energies of all directions, the largest first.
    """
    # Made outside of any inference mode: what is kept must serve all callers.
    with torch.inference_mode(False):
        heads, channels = moments.mean.shape
        mean = moments.mean.cpu().double()
        second = StateMoments(
            mean=moments.mean.cpu(), deviation=moments.deviation.cpu(), correlation=moments.correlation.cpu()
        ).covariance()
        second = second + mean.flatten()[:, None] * mean.flatten()
        width = joined * channels
        blocks = second.unflatten(0, (-1, width)).unflatten(2, (-1, width))
        blocks = torch.stack([blocks[i, :, i] for i in range(heads // joined)])
        mean = mean.view(-1, width)
        if shared:
            blocks = blocks.mean(0, keepdim=True)
            mean = mean.mean(0, keepdim=True)
        if centred:
            blocks = blocks - mean[:, :, None] * mean[:, None]
        energies, vectors = torch.linalg.eigh(blocks)
        directions = vectors.flip(-1)[..., :rank].float()
        groups = heads // joined
        basis = Basis(
            directions=directions.expand(groups, -1, -1).contiguous(),
            mean=mean.float().expand(groups, -1).contiguous() if centred else None,
            joined=joined,
        )
        return basis, energies.flip(-1).expand(groups, -1)


@lru_cache(maxsize=512)
def random_directions(groups: int, joined: int, width: int, rank: int, state: int, *, shared: bool) -> Basis:
    """Random orthonormal directions, others for each group unless they are shared, on the CPU."""
    with torch.inference_mode(False):
        generator = torch.Generator().manual_seed(state)
        drawn = torch.randn(1 if shared else groups, width, width, generator=generator, dtype=torch.float64)
        directions = torch.linalg.qr(drawn).Q[..., :rank].float().expand(groups, -1, -1).contiguous()
        return Basis(directions=directions, joined=joined)


@lru_cache(maxsize=512)
def part_of_heads(basis: Basis, first: int, heads: int) -> Basis:
    """What a basis of all heads is for some of them, on the CPU.

    Args:
        basis: of groups of heads, none of them apart.
        first: number of the first head.
        heads: how many there are from there on; they are whole groups, or a part of one.

    Returns:
        The bases of these groups; or, of a part of a group, the rows of its heads: `joined` is `heads` then, and
        `apart` how many such parts make a group. The latents of the parts add up to those of the group.
    """
    with torch.inference_mode(False):
        if basis.joined <= heads:
            groups = slice(first // basis.joined, (first + heads) // basis.joined)
            mean = None if basis.mean is None else basis.mean[groups].clone()
            return replace(basis, directions=basis.directions[groups].clone(), mean=mean)
        group, size = first // basis.joined, basis.directions.shape[-2] // basis.joined
        rows = slice(first % basis.joined * size, (first % basis.joined + heads) * size)
        mean = None if basis.mean is None else basis.mean[group : group + 1, rows].clone()
        directions = basis.directions[group : group + 1, rows].clone()
        return Basis(directions=directions, mean=mean, joined=heads, apart=basis.joined // heads)


@lru_cache(maxsize=512)
def on_device(basis: Basis, device: torch.device) -> Basis:
    """The same basis on a device."""
    mean = None if basis.mean is None else send(basis.mean, device)
    return replace(basis, directions=send(basis.directions, device), mean=mean)


def rank_of(rank: int | float, width: int, parts: int = 1) -> int:
    """Directions of a width.

    Args:
        rank: how many, or a share of the width if it is a float.
        width: w; 0 has none.
        parts: of how many parts of this width `rank` is a count.
    """
    if width == 0:
        return 0
    wanted = round(rank * width) if isinstance(rank, float) else rank // parts
    return min(max(1, wanted), width)


def split_ranks(weights: Tensor, ranks: Tensor, widths: Tensor) -> Tensor:
    """The ranks of all layers' keys and values, of the sum that equal ones would have, by weight.

    They are multiples of a sixteenth of the smallest width, as Palu's 32 are of 512, but for what is then left over.

    Args:
        weights: (2, layers), of keys and of values.
        ranks: (2,) int64 that each would have.
        widths: (2,) int64, the most that each can have; 0 for a side that is not projected.

    Returns:
        (2, layers) int64.
    """
    layers = weights.shape[1]
    unit = max(1, min(min(width // 16, rank) for width, rank in zip(*_some(widths, ranks), strict=True)))
    total = int(ranks.sum()) * layers
    most = widths[:, None].expand(-1, layers).flatten()
    weighed = weights.double().flatten().masked_fill(most == 0, 0.0)
    units = apportion(weighed, torch.tensor(total // unit), (most > 0).long(), torch.div(most, unit).long())
    found = units * unit
    for place in weighed.argsort(descending=True, stable=True).tolist():
        more = min(total - int(found.sum()), int(most[place] - found[place]))
        found[place] += more
    return found.view(2, layers)


def _some(widths: Tensor, ranks: Tensor) -> tuple[list[int], list[int]]:
    there = widths > 0
    return widths[there].tolist(), ranks[there].tolist()


def _by_group(states: Tensor, matrices: Tensor, offset: Tensor | None, owner: Tensor | None) -> Tensor:
    """(m, s, b) float32: states (m, s, a) times their group's matrix (groups, a, b), plus offset (groups, 1, b)."""
    groups = matrices.shape[0]
    if owner is None:
        product = states.unflatten(0, (-1, groups)) @ matrices
        whole: Tensor = product if offset is None else product + offset
        return whole.flatten(0, 1)
    out = states.new_empty((*states.shape[:2], matrices.shape[-1]))
    group = owner % groups
    for index in range(groups):
        mine = group == index
        product = states[mine] @ matrices[index]
        out[mine] = product if offset is None else product + offset[index]
    return out
