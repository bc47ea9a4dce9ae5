"""Which kv heads of a model this process holds, and how it meets the processes that hold the others.

Under tensor parallelism each process (rank) of a group holds some of the kv heads of every layer, all ranks as many and
in their order. What heads decide together, such as a budget that they share, is decided from what all ranks gathered.
`ALL_HEADS` stands for the usual case: one process holds all heads, and nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["ALL_HEADS", "HeadShare"]


class HeadShare:
    """The kv heads of one process among those of the model. This class is the case of one process.

    Every method but `total`, `first` and `own` is collective where there are several ranks: all of them call it, in the
    same order, or all of them wait. What it returns is the same on all ranks, bit for bit.

    Attributes:
        rank: number of this process among those that share the heads, from 0.
        ranks: how many processes share them.
    """

    rank: int = 0
    ranks: int = 1

    def total(self, heads: int) -> int:
        """Return the kv heads (or query heads) of all ranks, where this one has `heads`."""
        return heads * self.ranks

    def first(self, heads: int) -> int:
        """Return the number, in the whole layer, of this rank's first head, where it has `heads`."""
        return heads * self.rank

    def own(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's part, a view, of a tensor whose axis `dim` is all heads."""
        if self.ranks == 1:
            return tensor
        heads = tensor.shape[dim] // self.ranks
        return tensor.narrow(dim, self.first(heads), heads)

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the tensors of all ranks, one behind the other along `dim` in the order of the ranks.

        Args:
            tensor: of the same shape and dtype on all ranks, on any device.
            dim: the axis of the heads.
        """
        return tensor if self.ranks == 1 else torch.cat(list(self._of_all(tensor)), dim)

    def gather_padded(self, tensor: Tensor, dim: int, filler: float) -> Tensor:
        """Return what `gather` does, of tensors whose last axis may differ between ranks; the shorter get `filler`."""
        if self.ranks == 1:
            return tensor
        longest = self.highest(tensor.shape[-1])
        return self.gather(torch.nn.functional.pad(tensor, (0, longest - tensor.shape[-1]), value=filler), dim)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, of the same shape and dtype, added in the order of the ranks."""
        if self.ranks == 1:
            return tensor
        first, *others = self._of_all(tensor)
        total = first
        for each in others:
            total = total + each
        return total

    def highest(self, number: int) -> int:
        """Return the highest of the ranks' numbers."""
        if self.ranks == 1:
            return number
        return max(int(each) for each in self._of_all(torch.tensor(number)))

    def any(self, flag: bool) -> bool:
        """Return whether any rank has the flag set."""
        return bool(self.highest(int(flag)))

    def all(self, flag: bool) -> bool:
        """Return whether all ranks have the flag set."""
        return not self.any(not flag)

    def of_first(self, tensor: Tensor) -> Tensor:
        """Return the tensor of rank 0, whose shape and dtype the others know: what is decided once, for all."""
        return tensor if self.ranks == 1 else self._of_all(tensor)[0]

    def _of_all(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return the tensors of all ranks, on the device of `tensor`."""
        return [tensor]

    def __deepcopy__(self, memo: dict[int, Any]) -> HeadShare:
        """A copy of a cache belongs to the same processes."""
        return self


ALL_HEADS = HeadShare()
"""One process holds all heads."""
