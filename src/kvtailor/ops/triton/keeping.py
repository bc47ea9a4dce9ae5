"""Attention of few queries that can also give how much each slot received, once the log-sum-exp over all parts is
known.

No weights are written down: keys are read once more, and their logits made again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtailor.ops.segments.coded import Coded, Whole
from kvtailor.ops.triton.attend import attend_coded
from kvtailor.ops.triton.mass import column_mass

__all__ = ["Kept", "attend_keeping"]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The arguments of one part; see `attend_coded`.

    Attributes:
        query: (n, g, t, d) of the keys' dtype. keys: (m, s, d).
        scaling: factor before the softmax.
        softcap: of the logits; None: none.
        owner, lengths, visible, log_weight: as they were given.
    """

    query: Tensor
    keys: Tensor
    scaling: float
    softcap: float | None = None
    owner: Tensor | None = None
    lengths: Tensor | None = None
    visible: Tensor | None = None
    log_weight: Tensor | None = None

    def mass(self, lse: Tensor, counts: Tensor) -> Tensor:
        """(m, s) float32: the attention that each slot received, 0 past what is filled.

        Args:
            lse: (n, g, t) float32 over all parts that were read, and the sinks.
            counts: (n, t) float32: how much each query counts.
        """
        lanes, slots, _ = self.keys.shape
        new = self.query.shape[2]
        filled = None
        if self.lengths is not None:
            filled = torch.arange(slots, device=lse.device) < self.lengths[:, None]
        alike = self.visible is None or self.visible.ndim < 2 or self.visible.shape[-2] == 1
        total = None
        # Where queries see different slots, each has a launch of its own.
        for now in [slice(0, new)] if alike else [slice(i, i + 1) for i in range(new)]:
            mass = self._of(lse[:, :, now], counts[:, now], now)
            if self.visible is not None:
                seen = self.visible.expand(lanes, new, slots)[:, now][:, 0]
                mass = mass.masked_fill(~seen, 0.0)
            if filled is not None:
                mass = mass.masked_fill(~filled, 0.0)
            total = mass if total is None else total + mass
        assert total is not None
        return total if self.log_weight is None else total * self.log_weight.exp()

    def _of(self, lse: Tensor, counts: Tensor, now: slice) -> Tensor:
        """(m, s) sums over some queries, as if each saw every slot."""
        query = self.query[:, :, now]
        weight = counts[:, None].expand_as(lse)
        query, lse, weight = (
            (each if self.owner is None else each.index_select(0, self.owner)).flatten(1, 2)
            for each in (query, lse, weight)
        )
        # The heads of a group are so many new tokens of one head, and share a tile.
        rows, keys = query[:, None].contiguous(), self.keys[:, None]
        return column_mass(rows, keys, lse[:, None], self.scaling, softcap=self.softcap, weight=weight, causal=False)[
            :, 0
        ]


def attend_keeping(
    query: Tensor, keys: Coded, values: Coded, *, scaling: float, **how: Any
) -> tuple[Tensor, Tensor, Kept]:
    """As `attend_coded` over plain keys, of whose arguments `how` are the others, and what mass can be made of."""
    assert isinstance(keys, Whole), "mass is made of plain keys"
    out, lse = attend_coded(query, keys, values, scaling=scaling, **how)
    return out, lse, Kept(query=query.to(keys.states.dtype), keys=keys.states, scaling=scaling, **how)
