"""Vectors of two layers as one direction: the arc between theirs, and which tokens are too far apart for it.

A vector is its direction, of root mean square 1, times its magnitude, its root mean square: sqrt(c) times the unit
vector, and the norm over sqrt(c), for c channels. So a direction's entries are near 1, where float16 is fine, and no
magnitude is above the vector's largest entry.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from kvtailor.ops.lanes.topk import keep_top
from kvtailor.types import Layout

__all__ = ["angle", "far_places", "slerp", "split"]

# Below this sine the quotients of the formula cancel, and the straight line is the arc to within rounding.
_STRAIGHT = 1e-3
_NOTHING = 1e-6


def split(states: Tensor) -> tuple[Tensor, Tensor]:
    """Directions (m, s, c) and magnitudes (m, s, 1) of states (m, s, c), float32 or wider; of zeros both are zero."""
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    # Squares of what is divided by the largest entry neither overflow nor vanish.
    largest = wide.abs().amax(-1, keepdim=True)
    wide = wide / torch.where(largest > 0, largest, 1)
    mean = wide.square().mean(-1, keepdim=True).sqrt()
    return wide / torch.where(mean > 0, mean, 1), largest * mean


def angle(one: Tensor, other: Tensor) -> Tensor:
    """(m, s, 1) angles, 0 to pi, between directions (m, s, c); 0 where one of them is zero, and so is its vector."""
    # The arc cosine loses half of the digits near 0 and pi.
    between = 2 * torch.atan2((one - other).norm(dim=-1, keepdim=True), (one + other).norm(dim=-1, keepdim=True))
    return between.masked_fill(~(one.any(-1, keepdim=True) & other.any(-1, keepdim=True)), 0)


def slerp(lower: Tensor, upper: Tensor, t: float, between: Tensor) -> Tensor:
    """Directions (m, s, c) on the arc from `lower` to `upper`, the share `t` of the way.

    Args:
        lower, upper: directions (m, s, c), zeros allowed.
        t: 0 to 1.
        between: (m, s, 1) their angles. Near 0 and pi the straight line is taken and brought back to length; where that
            has no length either, `upper` is.
    """
    sine = between.sin()
    straight = sine < _STRAIGHT
    divisor = torch.where(straight, 1, sine)
    first = torch.where(straight, 1 - t, ((1 - t) * between).sin() / divisor)
    second = torch.where(straight, t, (t * between).sin() / divisor)
    mixed = first * lower + second * upper
    length = mixed.square().mean(-1, keepdim=True).sqrt()
    back = torch.where(length > _NOTHING, mixed / torch.where(length > _NOTHING, length, 1), upper)
    return torch.where(straight, back, mixed)


def far_places(between: Tensor, share: float, layout: Layout) -> Tensor:
    """The tokens of each row and kv head whose angle is largest.

    Args:
        between: (m, s, 1) angles.
        share: of the tokens of each row and kv head, rounded up to a whole number of them.
        layout: which tokens these are.

    Returns:
        (r,) int32 ascending: lane * s + slot.
    """
    scores, device = between[..., 0], between.device
    filled, owner = layout.filled(device), layout.owners(device)
    if filled is not None:
        scores = scores.masked_fill(~filled, -math.inf)
    # The lanes of an owner, which follow each other, side by side.
    page = torch.arange(owner.shape[0], device=device) - torch.searchsorted(owner, owner)
    pages = int(page.max()) + 1 if owner.numel() else 0
    rows = scores.new_full((layout.rows * layout.heads, pages, layout.size), -math.inf)
    rows[owner, page] = scores
    rows = rows.flatten(1)
    exact = Fraction(str(share))
    counts = [math.ceil(exact * count) for count in (rows > -math.inf).sum(-1).tolist()]
    kept = keep_top(rows[:, None], torch.tensor(counts, dtype=torch.int64)[:, None])
    kept = kept.view(-1, pages, layout.size)[owner, page]
    return kept.flatten().nonzero().flatten().to(torch.int32)
