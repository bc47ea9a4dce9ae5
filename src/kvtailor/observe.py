"""The room `observe`: queries and attention of this step -> the evidence that the plan's scorer declared it needs.

Evidence is chunk by chunk: gathering it over a prompt in pieces gives what gathering it at once gives. No n x n matrix
is ever held: a window keeps w queries, a mass keeps one number for each held token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvtailor.types import Needs

__all__ = ["Evidence", "observe"]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What one layer remembers for its scorer.

    Attributes:
        queries: (b, q, w, d) the newest post-RoPE queries, at most the needed window; None if none are needed.
        columns: (w,) int64 their columns.
        mass: for each stored part, in time order, (m, s) float32 attention mass received so far.
    """

    queries: Tensor | None = None
    columns: Tensor | None = None
    mass: tuple[Tensor, ...] = field(default=())

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that the evidence keeps alive, by name."""
        named = {f"mass.{i}": part for i, part in enumerate(self.mass)}
        if self.queries is not None and self.columns is not None:
            named |= {"queries": self.queries, "columns": self.columns}
        return named

    def select_rows(self, index: Tensor, mass: Sequence[Tensor]) -> Evidence:
        """The evidence of a batch made of the rows `index` (k,); `mass` was picked lane by lane by the caller."""
        queries = None if self.queries is None else self.queries.index_select(0, index.to(self.queries.device))
        return replace(self, queries=queries, mass=tuple(mass))

    def without_queries(self) -> Evidence:
        """The evidence once no later walk will ask for its queries."""
        return replace(self, queries=None, columns=None)


def observe(
    needs: Needs, evidence: Evidence, query: Tensor, first_column: int, mass: Sequence[Tensor] | None
) -> Evidence:
    """The evidence after one forward.

    Args:
        needs: what the scorer declared.
        evidence: what was gathered before.
        query: (b, q, t, d) post-RoPE queries of this forward.
        first_column: column of the first of them.
        mass: for each part (m, s) what this forward's attention gave it; None where `needs.mass` is not.

    Returns:
        New evidence; the old is unchanged. Its tensors share no storage with `query`.
    """
    queries, columns = evidence.queries, evidence.columns
    if needs.window:
        new = query[:, :, -needs.window :]
        new_columns = torch.arange(query.shape[2], device=query.device)[-needs.window :] + first_column
        missing = needs.window - new.shape[2]
        if queries is not None and columns is not None and missing:
            new = torch.cat([queries[:, :, -missing:], new], 2)
            new_columns = torch.cat([columns[-missing:], new_columns])
        queries, columns = new.detach().clone(), new_columns
    summed = evidence.mass
    if needs.mass:
        if mass is None:
            raise ValueError("the scorer needs attention mass, and the attention gave none")
        summed = tuple(_add(old, now) for old, now in zip([*summed, *[None] * len(mass)], mass, strict=False))
    return Evidence(queries=queries, columns=columns, mass=summed)


def _add(old: Tensor | None, now: Tensor) -> Tensor:
    """`old` (m, s) + `now` (m, s'), s' >= s: tokens that joined since start from nothing."""
    if old is None:
        return now
    total = now.clone()
    total[:, : old.shape[1]] += old
    return total
