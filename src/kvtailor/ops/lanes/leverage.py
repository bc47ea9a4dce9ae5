"""Statistical leverage of rows: how much of a direction of their span rests on one row alone.

Products are float64, some tokens at a time: a Gram matrix of keys is often close to singular.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

__all__ = ["gaussian_sketch", "gram", "leverage_of", "mean_of"]

# Tokens that are widened to float64 at once.
_BLOCK = 2048
# Of the mean diagonal, beside a ridge: what keeps a Gram matrix of large numbers positive after rounding.
_ROUNDING = 1e-12


@cache
def gaussian_sketch(size: int, width: int, state: int) -> Tensor:
    """(size, width) float64 on the CPU: normal numbers of variance 1 / width, the same whenever they are asked for.

    Args:
        size: d, channels of a state.
        width: channels that it is mapped to.
        state: which draw.
    """
    drawn = torch.randn(size, width, generator=torch.Generator().manual_seed(state), dtype=torch.float64)
    return drawn.div_(width**0.5)


def mean_of(states: Tensor, member: Tensor) -> Tensor:
    """(b, d) float64: the mean of the members (b, n) among states (b, n, d); zeros where there is none."""
    total = sum(
        (_weighed(states, member, at).sum(1) for at in _blocks(states)),
        torch.zeros((), device=states.device, dtype=torch.float32),
    )
    return total / member.sum(-1, keepdim=True).clamp(min=1)


def gram(states: Tensor, weights: Tensor, *, centre: Tensor | None = None, sketch: Tensor | None = None) -> Tensor:
    """Weighed sum of the outer products of rows with themselves.

    Args:
        states: (b, n, d), finite.
        weights: (b, n) not negative; bool counts as 1 and 0.
        centre: (b, d) float64, what is taken off each row first.
        sketch: (d, k) float64, by which each row is multiplied then.

    Returns:
        (b, k, k) float64, k = d without a sketch.
    """
    total = torch.zeros((), device=states.device, dtype=torch.float64)
    for at in _blocks(states):
        rows = _rows(states, at, centre, sketch)
        total = total + rows.transpose(1, 2) @ (rows * weights[:, at, None])
    return total


def leverage_of(
    states: Tensor, gram: Tensor, ridge: float, *, centre: Tensor | None = None, sketch: Tensor | None = None
) -> Tensor:
    """x^T (gram + ridge I)^-1 x of each row x.

    Args:
        states: (b, n, d).
        gram: (b, k, k) float64, positive semi-definite.
        ridge: above 0.
        centre, sketch: as for `gram`.

    Returns:
        (b, n) float32, not negative.
    """
    diagonal = gram.diagonal(dim1=1, dim2=2).mean(-1) * _ROUNDING + ridge
    unit = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    # cholesky_ex: the host need not wait to learn that there is a factor, since the ridge makes sure of it.
    factor = torch.linalg.cholesky_ex(gram + diagonal[:, None, None] * unit).L
    found = []
    for at in _blocks(states):
        rows = _rows(states, at, centre, sketch)
        solved = torch.linalg.solve_triangular(factor, rows.transpose(1, 2), upper=False)
        found.append(solved.square_().sum(1).float())
    return torch.cat(found, 1)


def _blocks(states: Tensor) -> Iterator[slice]:
    for first in range(0, states.shape[1], _BLOCK):
        yield slice(first, first + _BLOCK)


def _weighed(states: Tensor, weights: Tensor, at: slice) -> Tensor:
    return states[:, at].double() * weights[:, at, None]


def _rows(states: Tensor, at: slice, centre: Tensor | None, sketch: Tensor | None) -> Tensor:
    rows = states[:, at].double()
    if centre is not None:
        rows = rows - centre[:, None]
    return rows if sketch is None else rows @ sketch
