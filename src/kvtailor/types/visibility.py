"""What the new tokens of a forward may see."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Visibility", "first_real", "real_before"]


class Visibility(Protocol):
    """What the new tokens of one forward may see, evaluated lazily at stored columns.

    Attributes:
        new_tokens: t, queries of this forward.
        first_column: column of the first of them.
        causal_only: nothing but causality restricts them (no padding, no custom mask).
        real: (b, first_column + new_tokens) bool: this column is a token and not padding; None where all are.
    """

    @property
    def new_tokens(self) -> int: ...

    @property
    def first_column(self) -> int: ...

    @property
    def causal_only(self) -> bool: ...

    @property
    def real(self) -> Tensor | None: ...

    def without_last(self, count: int) -> Visibility:
        """The same without the last `count` new tokens (rejected drafts)."""
        ...

    def without_first(self, count: int) -> Visibility:
        """The same without the first `count` new tokens (a prompt that a draft follows)."""
        ...

    def with_earlier(self, count: int) -> Visibility:
        """The same with the `count` tokens before the new ones among them (forwards that are judged together)."""
        ...

    def at(self, rows: Tensor, columns: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        """Whether queries first..last of this forward see the given columns.

        Args:
            rows: (m,) int64 batch row of each lane.
            columns: (m, s) int64 columns, or (1, s) where all lanes hold the same.
            first, last: a slice of the t queries.

        Returns:
            (m, t', s) bool, broadcastable: any of its sizes may be 1.
        """
        ...


def first_real(real: Tensor) -> Tensor:
    """(b,) int64 column of each row's first token, of `real` (b, columns) bool, False for padding; 0 without one."""
    return real.to(torch.int8).argmax(-1)


def real_before(real: Tensor) -> Tensor:
    """(b, columns) int64: how many tokens of its row came before each token, of `real` as above; -1 for padding."""
    return (real.cumsum(-1) - 1).masked_fill(~real, -1)
