"""What waits for a crop: tokens of recorded forwards that may yet be taken back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvtailor.engine.layer_parts import Clock, Observed, Stored
from kvtailor.types import Visibility

__all__ = ["Checkpoint", "Draft", "Pending", "Reading"]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Queries of an attention module that reads what a layer holds, with the layer's own factor before the softmax.

    Attributes:
        query: (b, q, t, d) post-RoPE; of the last t tokens of the forward.
        visible: what each of them may see.
        mass: for each part (m, s) the attention that it was given; None where it is not needed.
    """

    query: Tensor
    visible: Visibility
    mass: list[Tensor] | None = None

    def and_next(self, other: Reading) -> Reading:
        """Return the same and that of the next forward, as if all queries had come at once."""
        visible = other.visible.with_earlier(self.query.shape[2])
        return replace(other, query=torch.cat([self.query, other.query], 2), visible=visible)


@dataclass(frozen=True, kw_only=True)
class Pending:
    """Forwards whose last tokens may yet be taken back: their queries, and what the attention had carried before.

    Attributes:
        query: (b, q, t, d) post-RoPE.
        visible: what each of them may see.
        carry: what the attention had carried before.
        decoded: they are decoded tokens if they stay, and not a prompt or a turn.
        others: of the modules that read the same layer.
    """

    query: Tensor
    visible: Visibility
    carry: Mapping[str, Tensor]
    decoded: bool = False
    others: tuple[Reading, ...] = ()

    @property
    def tokens(self) -> int:
        """How many tokens may be taken back."""
        return self.query.shape[2]

    def followed_by(self, query: Tensor, visible: Visibility, others: Sequence[Reading] = ()) -> Pending:
        """The same and the next forward, with queries (b, q, t, d), as if all had come at once."""
        joined = visible.with_earlier(self.tokens)
        both = tuple(old.and_next(new) for old, new in zip(self.others, others, strict=True))
        return replace(self, query=torch.cat([self.query, query], 2), visible=joined, others=both)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a layer was before a draft; see `LayerState.checkpoint`."""

    stored: Stored
    observed: Observed
    clock: Clock
    pending: Pending | None


@dataclass(frozen=True, kw_only=True)
class Draft:
    """Tokens of a recorded forward that are decoded ones if they stay.

    Attributes:
        keys, values: (b, h, t, d) and (b, h, t, dv).
        query: (b, q, t, d) post-RoPE.
        visible: what each of them may see.
        before: the layer as it was before the first of them, where the plan acts in their midst; else None.
    """

    keys: Tensor
    values: Tensor
    query: Tensor
    visible: Visibility
    before: Checkpoint | None = field(default=None, repr=False)

    @property
    def tokens(self) -> int:
        """t."""
        return self.query.shape[2]

    def piece(self, first: int, count: int) -> Draft:
        """`count` of them from `first` on, without `before`."""
        last = self.tokens - first - count
        return Draft(
            keys=self.keys[:, :, first : first + count],
            values=self.values[:, :, first : first + count],
            query=self.query[:, :, first : first + count],
            visible=self.visible.without_last(last).without_first(first),
        )
