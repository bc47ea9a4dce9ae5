"""The stage `speculate`: what drafts, how drafts are judged, and how many tokens are drafted at once.

Shape letters are those of `types`; `k` is the number of drafted tokens and `v` the size of the vocabulary. `ids` (b, n)
are all columns of the text, padding included. Their last column was chosen but not read by any model yet, so a reader
has seen at most n - 1.

The rows of a batch go in step: what is taken of a round is what the row with the shortest accepted run takes. The
others take accepted tokens alone, which are as good as any, and draft anew what they had beyond.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

__all__ = ["Draft", "Acceptance", "Lookahead", "RunCosts", "Proposal", "Reader", "Rule"]


class Reader(Protocol):
    """A model over a cache that can be taken back."""

    @property
    def seen(self) -> int:
        """Columns read."""
        ...

    def read(self, tokens: Tensor, keep: int) -> Tensor:
        """Read new tokens (b, t) and return the logits (b, keep, v) after the last `keep` of them."""
        ...

    def retract(self, length: int) -> None:
        """Forget what was read beyond so many columns, which must have come since `settle`."""
        ...

    def settle(self) -> None:
        """Keep what has been read: the plan may now evict and encode it."""
        ...

    def tokens_until_action(self) -> int | None:
        """Return how many tokens, read at once, are read as they would be one by one; None: any number."""
        ...

    def wait(self) -> None:
        """Return when the device has finished its work, so that times are right."""
        ...


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Drafted tokens (b, k), and the draft's prediction for each, as its rule keeps it (b, k, ...)."""

    tokens: Tensor
    prediction: Tensor


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """What became of a proposal: (b,) int64 how many tokens were accepted, and (b,) the token that follows them."""

    accepted: Tensor
    following: Tensor


class Rule(ABC):
    """How tokens are chosen, and drafted ones judged. A subclass is a frozen, keyword-only dataclass."""

    @abstractmethod
    def prediction(self, logits: Tensor) -> Tensor:
        """Return what is kept of logits (..., v) until a token is judged."""

    @abstractmethod
    def pick(self, prediction: Tensor) -> Tensor:
        """Return a token for each, (...) int64."""

    @abstractmethod
    def judge(self, target: Tensor, proposal: Proposal) -> Acceptance:
        """Accept a run of drafted tokens from the first on, so that what is emitted is distributed as the target's.

        Args:
            target: (b, k + 1, ...) the target's prediction at each drafted token's place, and after all of them.
            proposal: the k tokens, drawn from `proposal.prediction`.
        """


class Draft(ABC):
    """A source of drafted tokens. It has a state: what it has read."""

    @abstractmethod
    def propose(self, ids: Tensor, count: int) -> Proposal:
        """Draft one to `count` tokens that follow the columns `ids`, each drawn from its prediction."""

    @abstractmethod
    def retract(self, length: int) -> None:
        """Forget what was read beyond the first so many columns, which were right."""

    @abstractmethod
    def settle(self) -> None:
        """Keep what was read."""


@dataclass(frozen=True, kw_only=True)
class RunCosts:
    """What a run has measured so far; costs in seconds, None where nothing was measured yet.

    Attributes:
        plain: a token of plain decoding.
        draft: a drafted token.
        verify: a verification, all included.
        verified: drafted tokens of such a verification, on average.
        acceptance: share of drafted tokens that were accepted, counted up to the first rejection.
    """

    plain: float | None = None
    draft: float | None = None
    verify: float | None = None
    verified: float = 0.0
    acceptance: float | None = None

    def gain(self, count: int) -> float | None:
        """Return the speed over plain decoding with so many drafted tokens at once; None where a cost is not known.

        A run of geometrically distributed length: (1 - a^(k+1)) / (1 - a) tokens for k drafts and a verification,
        whose cost grows linearly from that of a plain token.
        """
        if self.plain is None or self.draft is None or self.verify is None or self.acceptance is None:
            return None
        slope = max(0.0, self.verify - self.plain) / self.verified if self.verified else 0.0
        start = min(self.plain, self.verify)
        a = min(self.acceptance, 0.999)
        tokens = (1 - a ** (count + 1)) / (1 - a)
        return tokens * self.plain / (count * self.draft + start + slope * count)


class Lookahead(ABC):
    """How many tokens to draft at once. A subclass is a frozen, keyword-only dataclass."""

    @abstractmethod
    def length(self, measured: RunCosts) -> int:
        """Return how many tokens to draft, at least 1."""
