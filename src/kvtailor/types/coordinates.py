"""Coordinates in which states are stored, where one linear map for all tokens leads back."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Coordinates", "PickedChannels"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Coordinates:
    """A state of c channels is scale * matrix @ x + mean, of x in r numbers that are stored.

    Attributes:
        matrix: (k, c, r) float32, contiguous. k is 1, or the number of kv heads of a row, each with its own.
        scale: factor of the products.
        blocks: so many blocks of c channels make the state, and of r numbers what is stored, each by the same matrix.
        mean: (k, blocks * c) float32; None: nothing is added.
    """

    matrix: Tensor
    scale: float = 1.0
    blocks: int = 1
    mean: Tensor | None = None

    def of_queries(self, query: Tensor) -> Tensor:
        """Return queries (n, g, t, c) of n = b * h kv heads for what is stored, (n, g, t, r) float32.

        Their products with x are those of the queries with scale * matrix @ x.
        """
        return self._there(query.float())

    def of_sums(self, sums: Tensor, lse: Tensor) -> Tensor:
        """Return weighted sums (n, g, t, c) float32 of states, from those of what is stored.

        Args:
            sums: (n, g, t, r); the weights add up to 1 where something is seen, else to 0.
            lse: (n, g, t), -inf where nothing is seen.
        """
        found = self._back(sums.float())
        if self.mean is None:
            return found
        return torch.where((lse > -torch.inf)[..., None], found + self._means(found)[:, None, None], found)

    def products_with_mean(self, query: Tensor) -> Tensor:
        """Return (n, g, t) float32 products of queries (n, g, t, c) with the mean; there is one."""
        assert self.mean is not None
        return torch.einsum("ngtc,nc->ngt", query.float(), self._means(query))

    def _there(self, states: Tensor) -> Tensor:
        """(n, g, t, r) of states (n, g, t, c), by the transposed matrix."""
        return self._times(states, self.matrix)

    def _back(self, states: Tensor) -> Tensor:
        """(n, g, t, c) of states (n, g, t, r)."""
        return self._times(states, self.matrix.mT)

    def _means(self, like: Tensor) -> Tensor:
        """(n, c) mean of each of the n kv heads of all rows, for states (n, g, t, c)."""
        assert self.mean is not None
        return self.mean.repeat(like.shape[0] // self.mean.shape[0], 1)

    def _times(self, states: Tensor, matrix: Tensor) -> Tensor:
        """(n, g, t, blocks * a) times the matrix (k, a, b) of their head: (n, g, t, blocks * b)."""
        n, g, t, _ = states.shape
        k = matrix.shape[0]
        # (b, k, g * t * blocks, a): one product for each row and head.
        by_head = states.reshape(n // k, k, g * t * self.blocks, -1)
        return (by_head @ matrix).mul_(self.scale).view(n, g, t, -1)


@dataclass(frozen=True, kw_only=True, eq=False)
class PickedChannels(Coordinates):
    """A state of c channels has what is stored in some of them, and 0 in the others.

    Attributes:
        channels: (k, r) uint8 or int16 which ones, each row of other ones; dense but for its first stride.
        size: c.
        matrix: (k, c, r) of ones and zeros, of which nothing but the shape is there: no number is multiplied by it.
    """

    channels: Tensor
    size: int
    matrix: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        heads, count = self.channels.shape
        object.__setattr__(self, "matrix", torch.empty((heads, self.size, count), device="meta", dtype=torch.float32))

    def _there(self, states: Tensor) -> Tensor:
        return states.gather(-1, self._places(states))

    def _back(self, states: Tensor) -> Tensor:
        whole = states.new_zeros((*states.shape[:-1], self.size))
        return whole.scatter_(-1, self._places(states), states)

    def _places(self, states: Tensor) -> Tensor:
        """(n, g, t, r) int64 the channels of the head of each state."""
        n, g, t, _ = states.shape
        channels = self.channels.to(torch.int64).repeat(n // self.channels.shape[0], 1)
        return channels[:, None, None].expand(n, g, t, -1)
