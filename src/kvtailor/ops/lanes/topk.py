"""Exactly so many of the highest scores, in each lane or pooled over lanes."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from kvtailor.errors import CacheMisuse
from kvtailor.types.late_checks import require_none, send

__all__ = ["keep_top", "pooled_counts"]


def keep_top(scores: Tensor, budgets: Tensor) -> Tensor:
    """Mark the highest scores of each lane, ties to the earliest.

    Only the value of the last score that stays is sought; on the CPU nothing is sorted. On another device nothing is
    waited for where the budgets are on the CPU and a cache is at work, which reads these checks later.

    Args:
        scores: (b, h, n) float, -inf where no token is.
        budgets: (b, h) int64 on any device.

    Returns:
        (b, h, n) bool on the device of `scores`, with exactly `budgets` trues and none where the score is -inf.

    Raises:
        CacheMisuse: a score is NaN.
        ValueError: a budget is negative or above the number of tokens.
    """
    if scores.shape[:-1] != budgets.shape:
        raise ValueError(f"one budget per lane is needed: scores {tuple(scores.shape)}, budgets {tuple(budgets.shape)}")
    shape = tuple(scores.shape)
    require_none(
        torch.isnan(scores),
        lambda: CacheMisuse(
            f"scores of shape {shape} hold NaN, so no order exists; look for NaN in keys, queries or mass"
        ),
    )
    wanted = send(budgets.to(torch.int64), scores.device)
    available = (scores > -torch.inf).sum(-1)
    require_none(
        (wanted < 0) | (wanted > available),
        lambda: ValueError(
            f"budgets {budgets.tolist()} were given where only {available.tolist()} tokens are; stay within capacity"
        ),
    )
    # On the CPU the most that any lane keeps; where it is not known there, all that a lane has.
    most = int(budgets.max()) if budgets.device.type == "cpu" and budgets.numel() else scores.shape[-1]
    last = _lowest_kept(scores, wanted, min(most, scores.shape[-1]))[..., None]
    kept = scores > last
    spare = wanted - kept.sum(-1)
    level = scores == last
    # Elsewhere the host would have to wait to save the sum.
    if scores.device.type != "cpu" or bool((level.sum(-1) > spare).any()):
        level &= level.cumsum(-1, dtype=torch.int32) <= spare[..., None]
    return kept | level


def _lowest_kept(scores: Tensor, wanted: Tensor, most: int | None = None) -> Tensor:
    """(b, h) the value of the lowest score that stays; +inf where none does.

    Args:
        scores: (b, h, n).
        wanted: (b, h) int64 how many stay, on the device of the scores.
        most: at most so many stay in any lane, no more than n; None: n.
    """
    n = scores.shape[-1]
    if scores.device.type == "cpu":
        # Selection in linear time, whatever the order: torch's kthvalue needs the square of n where scores are sorted
        # but for a few, as positions behind sinks are (66 ms for 32,768 of them, this 0.2). topk grows with the budget.
        # numpy comes with transformers.
        exact = scores if scores.dtype in (torch.float32, torch.float64) else scores.float()
        lanes, each = exact.detach().flatten(0, 1).numpy(), wanted.flatten().tolist()
        found = [numpy.partition(lane, n - k)[n - k] if k else numpy.inf for lane, k in zip(lanes, each, strict=True)]
        return torch.tensor(found, dtype=scores.dtype).view(wanted.shape)
    most = n if most is None else most
    if most <= 0 or not wanted.numel():
        return scores.new_full(wanted.shape, torch.inf)
    ranked = scores.topk(most, dim=-1).values
    # A wrong budget is reported later; until then its index must be one.
    found_at = ranked.gather(-1, (wanted - 1).clamp(0, most - 1)[..., None])[..., 0]
    return found_at.masked_fill(wanted == 0, torch.inf)


def pooled_counts(scores: Tensor, least: Tensor, total: Tensor) -> Tensor:
    """How many tokens each lane has among the best of all lanes of its row, when each is sure of its own best.

    Args:
        scores: (b, m, n) float, -inf where no token is, +inf for at most `least` tokens of a lane.
        least: (b, m) int64 tokens that each lane gets in any case.
        total: (b,) int64, from the sum of `least` to the number of tokens.

    Returns:
        (b, m) int64 on the CPU, at least `least`, that sums to `total`; ties go to the earliest lane, then token.
    """
    lifted = scores.masked_fill(keep_top(scores, least), torch.inf)
    kept = keep_top(lifted.flatten(1)[:, None], total[:, None])
    return kept.view(scores.shape).sum(-1).cpu()
