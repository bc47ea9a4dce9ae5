"""The stage `merge`: tokens that are not kept -> changed keys and values of those that are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvtailor.method import Method
from kvtailor.types import Held, Needs

__all__ = ["Merged", "Merger"]


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The new keys and values of the kept tokens of each row and kv head, in time order.

    Attributes:
        keys: (b, h, k, d) in the dtype of what was held, k the most that a head keeps; finite filler behind those of a
            head that keeps fewer.
        values: (b, h, k, dv).
        log_weight: (b, h, k) float32 logarithm of how many tokens each stands for in the softmax; None where the
            merger is not `weighted`.
    """

    keys: Tensor
    values: Tensor
    log_weight: Tensor | None = None


class Merger(Method, ABC):
    """One way to fold tokens that are not kept into kept ones. A subclass is a frozen, keyword-only dataclass.

    Pure: inputs are never changed, nothing is remembered between calls, rows and kv heads are never mixed, and
    permuting the kv heads (with their groups) permutes the result. Which tokens are kept is decided before and does not
    change.

    Attributes:
        weighted: kept tokens get a weight in the softmax. Tokens in the tail have no weight, so no other token is
            merged into them; every other kept token is stored with its weight.
    """

    weighted: ClassVar[bool] = False

    @property
    def needs(self) -> Needs:
        """The evidence to gather for this merger."""
        return Needs()

    @abstractmethod
    def merge(self, held: Held, keep: Tensor, into: Tensor) -> Merged | None:
        """Return the kept tokens with dropped ones merged into them, at a cut that drops at least one token.

        Args:
            held: what is held, as scorers see it. Tokens with `valid` False are padding and take no part. Its `kept`
                says how many tokens each head keeps.
            keep: (b, h, n) bool, never where `held.valid` is False.
            into: (b, h, n) bool, a subset of `keep`: tokens that others may be merged into. The rest do not change by a
                bit, above all what a lossy codec has encoded, since a segment is never rewritten.

        Returns:
            The kept tokens; None: they stay as they are.
        """

    def flops(self, *, tokens: int, kept: int, group: int, size: int) -> int | None:
        """Count what one call of `merge` computes for one row and kv head, as `Scorer.flops` counts; None: not known.

        Args:
            tokens: n, tokens held.
            kept: k, of them kept.
            group: g, query heads of a kv head.
            size: d, of a key and of a value.
        """
        return None
