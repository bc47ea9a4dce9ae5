"""Integers in proportion to weights, between bounds, that sum exactly."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["apportion", "even_shares", "layer_shares", "moved_shares", "split_shares"]

# Shares that differ by less than this count as equal, so that rounding noise decides neither a floor nor a tie.
_STEP = 1e-6


def apportion(weights: Tensor, total: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Split each total over n places by weight.

    The real-valued share of place i is `clamp(scale * weights[i], low[i], high[i])` with the one scale at which the
    shares sum to the total (water-filling: what a bound cuts off goes to the others by weight). Each share is then
    rounded down, and the units left over go to the largest remainders, the earliest place first among equals.

    Args:
        weights: (..., n), not negative, finite. Places of weight 0 get `low`, and more only when all others are full,
            equally.
        total: (...) int64. A total outside [sum of low, sum of high] is moved to the nearer of the two.
        low: (..., n) int64, at most `high`.
        high: (..., n) int64.

    Returns:
        (..., n) int64 between `low` and `high`. The last sum is exact while totals stay below 2**33.

    Raises:
        ValueError: a negative or non-finite weight, or low > high.
    """
    weights = weights.to(torch.float64)
    shape = (low + high).shape
    weights, low, high = weights.expand(shape), low.expand(shape), high.expand(shape)
    if not bool(((weights >= 0) & torch.isfinite(weights)).all()):
        raise ValueError(
            f"apportion: weights must be finite and not negative, found {weights.tolist()}; clean them first"
        )
    if bool((low > high).any()):
        raise ValueError(f"apportion: low must be at most high, found low {low.tolist()} and high {high.tolist()}")
    total = total.clamp(low.sum(-1), high.sum(-1))

    # Where even all the weighted places filled up leave tokens over, the weightless ones share them equally.
    full = torch.where(weights > 0, high, low)
    spill = (full.sum(-1) <= total)[..., None]
    floor = torch.where(spill, full, low)
    weights = torch.where(spill, torch.ones_like(weights), weights)

    shares = _fill(weights, total, floor.double(), high.double())
    result = torch.minimum(torch.maximum(torch.floor(shares + _STEP).to(torch.int64), floor), high)
    left = total - result.sum(-1)
    remainder = torch.round((shares - result) / _STEP).masked_fill(result >= high, -torch.inf)
    rank = remainder.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return result + (rank < left[..., None]).to(torch.int64)


def _fill(weights: Tensor, total: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """(..., n) float64: clamp(scale * weights, low, high) at the scale where it sums to `total`."""
    wanted = total.double()[..., None]
    safe = torch.where(weights > 0, weights, torch.ones_like(weights))
    # The sum is piecewise linear in the scale and bends only where some place leaves `low` or reaches `high`.
    rise, stop = low / safe, high / safe
    bends = torch.cat([rise, stop], -1).masked_fill(torch.cat([weights, weights], -1) <= 0, 0.0)
    sums = torch.clamp(bends[..., None] * weights[..., None, :], low[..., None, :], high[..., None, :]).sum(-1)
    reached = sums <= wanted * (1 + 1e-12)
    scale = bends.masked_fill(~reached, 0.0).amax(-1, keepdim=True)
    free = (weights > 0) & (rise <= scale) & (stop > scale)
    fixed = torch.clamp(scale * weights, low, high)
    open_weight = torch.where(free, weights, 0.0).sum(-1, keepdim=True)
    remaining = wanted - torch.where(free, 0.0, fixed).sum(-1, keepdim=True)
    exact = remaining / torch.where(open_weight > 0, open_weight, 1.0)
    return torch.where(free, torch.clamp(exact * weights, low, high), fixed)


def layer_shares(
    weights: Tensor,
    total: Tensor,
    low: Tensor,
    high: Tensor,
    layers: tuple[int, ...],
    absent_high: Tensor | None = None,
) -> Tensor:
    """The tokens of each present layer, of a total over all layers.

    With all layers present this is `apportion`. Where only some layers are present, the others are taken to have their
    bounds (or `absent_high`): layers that come one by one sum to the total where their bounds agree.

    Args:
        weights: (b, L) weight of each of the plan's layers.
        total: (b,) int64 over all L layers.
        low: (b, l) int64 bounds of the present layers, summed over heads.
        high: (b, l) int64.
        layers: the l present ones, 0-based.
        absent_high: (b,) int64: what an absent layer can hold.

    Returns:
        (b, l) int64 between `low` and `high`.
    """
    count = weights.shape[-1]
    if layers == tuple(range(count)):
        return apportion(weights, total, low, high)
    shares = []
    for i, layer in enumerate(layers):
        own_low, own_high = low[:, i], high[:, i]
        others = own_high if absent_high is None else torch.maximum(absent_high, own_low)
        split = apportion(weights, total, own_low[:, None].expand(-1, count), others[:, None].expand(-1, count))
        shares.append(torch.minimum(split[:, layer], own_high))
    return torch.stack(shares, -1)


def even_shares(
    weights: Tensor,
    total: Tensor,
    low: Tensor,
    high: Tensor,
    layers: tuple[int, ...],
    absent_high: Tensor | None = None,
) -> Tensor:
    """The tokens of each present layer and head, equal for all heads of a layer wherever their bounds are.

    Where the bounds of a row's heads differ, each layer's share is exact and its heads fill up like water. Where
    they agree, a layer must get a multiple of h, so the sum is the largest multiple of h within the total.

    Args:
        weights: (b, L) weight of each of the plan's layers.
        total: (b,) int64 over all L layers and h heads.
        low: (b, l, h) int64 bounds of the present layers' heads.
        high: (b, l, h) int64.
        layers: the l present ones, 0-based.
        absent_high: (b,) int64: what one head of an absent layer can hold.

    Returns:
        (b, l, h) int64 between `low` and `high`.
    """
    heads = low.shape[-1]
    each = layer_shares(weights, total // heads, low[..., 0], high[..., 0], layers, absent_high)[..., None]
    alike = ((low == low[..., :1]) & (high == high[..., :1])).all(-1).all(-1)
    if bool(alike.all()):
        return each.expand(low.shape).clone()
    absent = None if absent_high is None else absent_high * heads
    whole = layer_shares(weights, total, low.sum(-1), high.sum(-1), layers, absent)
    return torch.where(alike[:, None, None], each, apportion(torch.ones(heads, dtype=torch.float32), whole, low, high))


def split_shares(
    weights: Tensor,
    total: Tensor,
    low: Tensor,
    high: Tensor,
    layers: tuple[int, ...],
    absent_high: Tensor | None = None,
) -> Tensor:
    """The tokens of each present layer and head by weights of both: first the layers', then their split over heads.

    Args:
        weights: (b, L, h) weight of each head of each of the plan's layers.
        total: (b,) int64 over all L layers and h heads.
        low: (b, l, h) int64 bounds of the present layers' heads.
        high: (b, l, h) int64.
        layers: the l present ones, 0-based.
        absent_high: (b,) int64: what one head of an absent layer can hold.

    Returns:
        (b, l, h) int64 between `low` and `high`. A layer's sum depends on its heads' bounds only through their sums.
    """
    absent = None if absent_high is None else absent_high * low.shape[-1]
    whole = layer_shares(weights.sum(-1), total, low.sum(-1), high.sum(-1), layers, absent)
    return apportion(weights[:, list(layers)], whole, low, high)


def moved_shares(budgets: Tensor, source: Tensor, low: Tensor, high: Tensor, *, even: bool) -> Tensor:
    """Budgets after layers have changed places: each layer gets another one's, with its split over the heads.

    Where a layer cannot hold what it gets, the rest goes to the other layers by their budgets.

    Args:
        budgets: (b, L, h) int64.
        source: (b, L) int64: whose budget each layer gets, a permutation for each row.
        low: (b, L, h) int64 bounds of the layers' heads.
        high: (b, L, h) int64.
        even: heads of a layer get the same wherever their bounds are, as in `even_shares`.

    Returns:
        (b, L, h) int64 between `low` and `high`, of the same sum where the bounds allow it.
    """
    moved = budgets.gather(1, source[..., None].expand_as(budgets))
    total, layers = budgets.sum((1, 2)), tuple(range(budgets.shape[1]))
    if even:
        return even_shares(moved.sum(-1), total, low, high, layers)
    return split_shares(moved, total, low, high, layers)
