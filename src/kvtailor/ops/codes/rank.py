"""The effective rank of a matrix of few rows."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["effective_rank"]

# Columns that are widened to float64 at once (256 rows: 4 MiB).
_BLOCK = 2048
_ZERO = 1e-10


def effective_rank(matrix: Tensor) -> Tensor:
    """exp(-sum p ln p) of the singular values divided by their sum (Roy and Vetterli, EUSIPCO 2007).

    Singular values are the roots of the eigenvalues of `matrix @ matrix^T` in float64, which separates them from
    rounding down to about 1e-7 of the largest. Smaller ones, and those of at most 1e-10, count as none.

    Args:
        matrix: (m, n) of any float dtype; time O(m**2 n + m**3), scratch O(m**2).

    Returns:
        () float64 from 1 to min(m, n); 1 for a matrix of zeros.
    """
    count = matrix.shape[0]
    if not count:
        return matrix.new_ones((), dtype=torch.float64)
    gram = torch.zeros((count, count), dtype=torch.float64, device=matrix.device)
    for block in matrix.split(_BLOCK, 1):
        wide = block.double()
        gram.addmm_(wide, wide.t())
    squares = torch.linalg.eigvalsh(gram)
    noise = torch.finfo(torch.float64).eps * count * squares[-1]
    values = squares.clamp(min=0).sqrt()
    # Of a matrix of zeros none is left, and the sum over nothing is 0.
    values = values[(squares > noise) & (values > _ZERO)]
    entropy: Tensor = torch.special.entr(values / values.sum()).sum()
    return entropy.exp()
