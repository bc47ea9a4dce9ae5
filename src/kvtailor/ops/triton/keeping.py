"""Attention of few queries that can also give how much each slot received, once the log-sum-exp over all parts is
known.

No weights are written down: keys are read once more, and their logits made again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtailor.ops.segments.attention_inputs import AttentionInputs
from kvtailor.ops.segments.coded import Whole
from kvtailor.ops.triton.attend import attend_coded
from kvtailor.ops.triton.mass import column_mass

__all__ = ["ReadPart", "attend_and_keep"]


@dataclass(frozen=True, kw_only=True)
class ReadPart:
    """What was read of one part.

    Attributes:
        inputs: as they were given.
        query: (n, g, t, d) of the keys' dtype. keys: (m, s, d).
    """

    inputs: AttentionInputs
    query: Tensor
    keys: Tensor

    def mass(self, lse: Tensor, counts: Tensor) -> Tensor:
        """(m, s) float32: the attention that each slot received, 0 past what is filled.

        Args:
            lse: (n, g, t) float32 over all parts that were read, and the sinks.
            counts: (n, t) float32: how much each query counts.
        """
        lanes, slots, _ = self.keys.shape
        new = self.query.shape[2]
        filled = None
        if self.inputs.lengths is not None:
            filled = torch.arange(slots, device=lse.device) < self.inputs.lengths[:, None]
        alike = self.inputs.visible is None or self.inputs.visible.ndim < 2 or self.inputs.visible.shape[-2] == 1
        total = None
        # Where queries see different slots, each has a launch of its own.
        for now in [slice(0, new)] if alike else [slice(i, i + 1) for i in range(new)]:
            mass = self._of(lse[:, :, now], counts[:, now], now)
            if self.inputs.visible is not None:
                seen = self.inputs.visible.expand(lanes, new, slots)[:, now][:, 0]
                mass = mass.masked_fill(~seen, 0.0)
            if filled is not None:
                mass = mass.masked_fill(~filled, 0.0)
            total = mass if total is None else total + mass
        assert total is not None
        return total if self.inputs.log_weight is None else total * self.inputs.log_weight.exp()

    def _of(self, lse: Tensor, counts: Tensor, now: slice) -> Tensor:
        """(m, s) sums over some queries, as if each saw every slot."""
        query = self.query[:, :, now]
        weight = counts[:, None].expand_as(lse)
        query, lse, weight = (
            (each if self.inputs.owner is None else each.index_select(0, self.inputs.owner)).flatten(1, 2)
            for each in (query, lse, weight)
        )
        # The heads of a group are so many new tokens of one head, and share a tile.
        rows, keys = query[:, None].contiguous(), self.keys[:, None]
        return column_mass(
            rows, keys, lse[:, None], self.inputs.scaling, softcap=self.inputs.softcap, weight=weight, causal=False
        )[:, 0]


def attend_and_keep(inputs: AttentionInputs) -> tuple[Tensor, Tensor, ReadPart]:
    """As `attend_coded` over plain keys, and what mass can be made of."""
    assert isinstance(inputs.keys, Whole), "mass is made of plain keys"
    keys = inputs.keys.states
    return *attend_coded(inputs), ReadPart(inputs=inputs, query=inputs.query.to(keys.dtype), keys=keys)
