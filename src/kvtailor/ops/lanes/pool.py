"""Pooling along held tokens, as if nothing but the members were there."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["pool_members"]


def pool_members(values: Tensor, member: Tensor, kernel: int, kind: str) -> Tensor:
    """Pool each lane over its members, which count as neighbours across any gap between them.

    Both ends are padded by `kernel // 2` zeros, and the average always divides by `kernel`. So a lane gives the same
    numbers wherever its members sit and whatever fills the other slots.

    Args:
        values: (..., n) float, not negative (0 then stands for "nothing there" in a maximum too).
        member: (..., n) bool.
        kernel: odd width in tokens.
        kind: "average" or "max".

    Returns:
        (..., n), 0 outside the members.
    """
    if kernel == 1 or not values.shape[-1]:
        return values.masked_fill(~member, 0.0)
    n = values.shape[-1]
    # Members move to the front of their lane; slot n collects the rest and is cut off.
    place = (member.cumsum(-1) - 1).masked_fill(~member, n)
    packed = values.new_zeros(*values.shape[:-1], n + 1).scatter(-1, place, values)[..., :n]
    packed = packed * (torch.arange(n, device=values.device) < member.sum(-1, keepdim=True))
    lanes = packed.reshape(-1, 1, n)
    if kind == "average":
        pooled = F.avg_pool1d(lanes, kernel, stride=1, padding=kernel // 2)
    else:
        pooled = F.max_pool1d(lanes, kernel, stride=1, padding=kernel // 2)
    return pooled.view(values.shape).gather(-1, place.clamp_max(n - 1)).masked_fill(~member, 0.0)
