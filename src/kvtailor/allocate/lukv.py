"""LU-KV: each head's share of the budget, as a profile of the model has it for that budget.

*Idea*: how well a score guesses what later queries will look at differs from head to head. Where it guesses well, few
tokens are enough; elsewhere more are needed for the same. Which split over all heads loses least is worked out on texts
beforehand, for every ratio, and looked up when a cache is cut.

*Paper*: "Predicting Future Utility: Global Combinatorial Optimization for Task-Agnostic KV Cache Eviction", arXiv
2602.08585, whose profile is our file.

*Source*: the paper's abstract, a reader's notes on it for the formulas (git.lyz.one/SidneyZhang/myWiki), and kvpress
(Apache-2.0) for the table's form: 99 ratios by layers by kv heads.

*Departs*: the ratio is what the budget leaves of all tokens that a row has seen, and between two ratios of the table
the shares lie on a line, where kvpress takes the nearest. Budgets are in proportion to what the table keeps, and sum to
the plan's total exactly. A profile belongs to one score: `kvtailor calibrate lukv` makes one for `expected`, and
nothing stops a plan from using it with another. How ours is measured: `calibration/lukv.py`.

*Cost*: none; each layer is cut as soon as it is done. Heads hold different numbers of tokens. A file of 396 bytes for
each kv head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.allocate.contract import Allocator, BudgetRequest
from kvtailor.calibration_file import CalibratedMethod
from kvtailor.ops.lanes.apportion import split_shares

__all__ = ["RATIOS", "LUKV"]

RATIOS = 99
"""Ratios of a profile: 1 to 99 percent of all tokens go."""


@dataclass(frozen=True, kw_only=True)
class LUKV(CalibratedMethod, Allocator):
    """Heads by a profile.

    Attributes:
        file: of `kvtailor calibrate lukv`; None: the one that is shipped for the model.
    """

    calibrates: ClassVar[str] = "lukv"
    per_head: ClassVar[tuple[str, ...]] = ("pruned",)

    def allocate(self, request: BudgetRequest) -> Tensor:
        """(b, l, h) int64 on the CPU.

        Raises:
            ValueError: no profile was given.
        """
        if request.calibration is None:
            raise ValueError("lukv splits by a profile, but none was given; see `kvtailor calibrate lukv`")
        heads = request.capacity.shape[-1]
        seen = request.capacity.amax((1, 2)) if request.row_tokens is None else request.row_tokens
        kept = request.total.double() / (seen.clamp_min(1) * request.num_layers * heads)
        weights = 1 - pruned_at(request.calibration["pruned"], 1 - kept)
        return split_shares(weights, request.total, request.floor, request.capacity, request.layers, request.row_tokens)

    def flops(self, *, tokens: int, heads: int, group: int, size: int) -> int:
        """0: a few numbers for each head."""
        return 0

    @classmethod
    def example_calibration(
        cls, *, layers: int, heads: int, group: int, size: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """A profile (layers, heads, 99) of heads that differ, each from 0 to 1 and never falling."""
        power = torch.rand(layers, heads, 1, generator=generator, dtype=torch.float32) + 0.5
        return {"pruned": (torch.arange(1, RATIOS + 1) / (RATIOS + 1)) ** power}


def pruned_at(pruned: Tensor, gone: Tensor) -> Tensor:
    """(b, l, h) float64 from 0 to 1: the share of its tokens that each head drops where all together drop `gone`.

    Args:
        pruned: (l, h, 99) the same at 1 to 99 percent; 0 and 100 percent are 0 and 1 in all heads.
        gone: (b,) from 0 to 1; what lies outside is moved to the nearer end.
    """
    table = pruned.double().cpu().clamp(0, 1)
    ends = torch.zeros_like(table[..., :1]), torch.ones_like(table[..., :1])
    table = torch.cat([ends[0], table, ends[1]], -1)
    at = (gone.double().clamp(0, 1) * (RATIOS + 1)).clamp(max=RATIOS + 1)
    # Rounding noise must not leave a ratio that the table has.
    at = torch.where((at - at.round()).abs() < 1e-9, at.round(), at)
    below = at.floor().long().clamp(max=RATIOS)
    part = (at - below)[:, None, None]
    first, second = (table[..., each].movedim(-1, 0) for each in (below, below + 1))
    return first + part * (second - first)
