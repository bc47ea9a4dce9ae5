"""Least squares with bounds, and of many right sides, for batches of matrices; each with a ridge, in double precision.

A matrix (r, t) has a row for each equation and a column for each unknown, of which there may be many more: systems of
(r, r) are solved, and float32 matrices are widened a block of columns at a time, so the scratch does not grow with t.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["bounded_factors", "product", "ridge_change"]

# Columns that are widened to double precision at a time.
_BLOCK = 128
# A step that is this much of Newton's own, 2^-40, moves nothing.
_HALVINGS = 40
_EXACT = 1e-11


def bounded_factors(
    matrix: Tensor, target: Tensor, *, ridge: Tensor, low: float, high: float, prior: float = 1.0, steps: int = 100
) -> Tensor:
    """The x with low <= x <= high of least |matrix x - target|^2 + ridge |x - prior|^2.

    x = clip(prior + matrix^T v) for the v of r numbers that minimises the convex dual, ridge / 2 |v|^2 - target v plus,
    for each column, the integral of the clip. A semismooth Newton method finds it: the second derivative is that of the
    columns within their bounds, and each step is halved until the dual falls. The dual is piecewise quadratic, so it
    ends where the right columns are within.

    Args:
        matrix: (b, r, t), float32 or float64.
        target: (b, r).
        ridge: (b,) above 0.
        low: at most `prior`.
        high: at least `prior`; infinity for none.
        prior: where an unknown stays that no equation asks for.
        steps: the most that are taken; what is found then is within the bounds, and not quite the least.

    Returns:
        (b, t) float64.
    """
    aim, ridge = target.double(), ridge.double()
    dual = torch.zeros_like(aim)
    free = torch.full((matrix.shape[0], matrix.shape[2]), prior, dtype=torch.float64, device=matrix.device)
    for _ in range(steps):
        found = free.clamp(low, high)
        reached = _times(matrix, found)
        slope = ridge[:, None] * dual + reached - aim
        # As large as what it is a difference of, but for the rounding.
        small = slope.abs().amax(-1) <= _EXACT * (reached.abs() + aim.abs()).amax(-1)
        if small.is_cpu and bool(small.all()):
            break
        step = -_solved(matrix, slope[..., None], ridge, (free > low) & (free < high))[..., 0]
        along = _transposed(matrix, step)
        falls = (slope * step).sum(-1)
        before, size = _dual(free, dual, aim, ridge, low, high), torch.ones_like(falls)
        ends = False
        for halved in range(_HALVINGS):
            moved = size[:, None] * along + free, size[:, None] * step + dual
            # What is small already, and what is not finite, is left as it is.
            steep = _dual(*moved, aim, ridge, low, high) > before + 1e-4 * size * falls
            steep = steep & ~small
            # A device is asked both at once, for a step in vain: it would wait for the host each time.
            ends, climbs = (
                torch.stack([small.all(), steep.any()]).tolist() if not halved else (False, bool(steep.any()))
            )
            if ends or not climbs:
                break
            size = torch.where(steep, size / 2, size)
        if ends:
            break
        size = size.masked_fill(small, 0.0)[:, None]
        free, dual = free + size * along, dual + size * step
    return free.clamp(low, high)


def ridge_change(matrix: Tensor, target: Tensor, *, ridge: Tensor) -> Tensor:
    """The X of least |matrix X - target|^2 + ridge |X|^2.

    Args:
        matrix: (b, r, t), float32 or float64.
        target: (b, r, c).
        ridge: (b,) above 0.

    Returns:
        (b, t, c) float64.
    """
    return _transposed(matrix, _solved(matrix, target.double(), ridge.double(), None))


def product(matrix: Tensor, right: Tensor) -> Tensor:
    """(b, r, c) float64: a matrix (b, r, t) times (b, t, c) float64."""
    total = right.new_zeros((matrix.shape[0], matrix.shape[1], right.shape[2]))
    for first in range(0, matrix.shape[2], _BLOCK):
        total += matrix[..., first : first + _BLOCK].double() @ right[:, first : first + _BLOCK]
    return total


def _dual(free: Tensor, dual: Tensor, aim: Tensor, ridge: Tensor, low: float, high: float) -> Tensor:
    """(b,): what `bounded_factors` minimises, of what the unknowns (b, t) would be without bounds and `dual` (b, r)."""
    held = free.clamp(low, high)
    # The integral of the clip from 0 to f is c f - c^2 / 2 with c = clip(f), but for a constant.
    return (held * (free - held / 2)).sum(-1) + (dual * (ridge[:, None] * dual / 2 - aim)).sum(-1)


def _solved(matrix: Tensor, right: Tensor, ridge: Tensor, free: Tensor | None) -> Tensor:
    """(b, r, c): the inverse of (matrix matrix^T + ridge), over the columns that are `free` (b, t), times (b, r, c)."""
    system = _gram(matrix, free)
    system.diagonal(dim1=1, dim2=2).add_(ridge[:, None])
    # In place of the system, which is as large.
    system = torch.linalg.cholesky_ex(system).L
    return torch.cholesky_solve(right, system)


def _gram(matrix: Tensor, free: Tensor | None) -> Tensor:
    """(b, r, r) float64: the products of the rows of (b, r, t), over the columns that are free."""
    total = torch.zeros((matrix.shape[0], matrix.shape[1], matrix.shape[1]), dtype=torch.float64, device=matrix.device)
    for first in range(0, matrix.shape[2], _BLOCK):
        some = matrix[..., first : first + _BLOCK].double()
        if free is not None:
            some = some * free[:, None, first : first + _BLOCK]
        total.baddbmm_(some, some.mT)
    return total


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    """(b, r) float64: (b, r, t) times (b, t)."""
    return product(matrix, vector[..., None])[..., 0]


def _transposed(matrix: Tensor, right: Tensor) -> Tensor:
    """(b, t, ...) float64: the transpose of (b, r, t) times (b, r, ...)."""
    wide = right if right.ndim == 3 else right[..., None]
    parts = [matrix[..., first : first + _BLOCK].double().mT @ wide for first in range(0, matrix.shape[2], _BLOCK)]
    found = torch.cat(parts, 1) if parts else wide.new_zeros((matrix.shape[0], 0, wide.shape[2]))
    return found if right.ndim == 3 else found[..., 0]
