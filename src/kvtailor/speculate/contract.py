"""The stage `speculate`: what drafts tokens, how they are judged, and how many are drafted at once.

Shape letters are those of `types`; `k` is the number of drafted tokens and `v` the size of the vocabulary. `ids` (b, n)
are all columns of the text, padding included. No model has read the last column yet, so a reader has seen at most
n - 1.

All rows of a batch advance by the same number of tokens in a round, that of the row with the shortest accepted run.
The tokens that other rows had accepted beyond it are drafted again.
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
        """Return how many columns were read."""
        ...

    def read(self, tokens: Tensor, keep: int) -> Tensor:
        """Read new tokens (b, t) and return the logits (b, keep, v) after the last `keep` of them."""
        ...

    def retract(self, length: int) -> None:
        """Forget what was read beyond the first `length` columns; only what came after `settle` can be forgotten."""
        ...

    def settle(self) -> None:
        """Keep what has been read: the plan may now evict and encode it."""
        ...

    def tokens_until_action(self) -> int | None:
        """Return how many tokens can be read at once with the same result as one by one; None: any number."""
        ...

    def wait(self) -> None:
        """Wait until the device has finished its work, so that measured times are right."""
        ...


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Drafted tokens (b, k), and the draft's prediction for each in its rule's form (b, k, ...)."""

    tokens: Tensor
    prediction: Tensor


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """The verdict on a proposal: (b,) int64 how many tokens were accepted, and (b,) the token that follows them."""

    accepted: Tensor
    following: Tensor


class Rule(ABC):
    """How tokens are chosen, and drafted ones judged. A subclass is a frozen, keyword-only dataclass."""

    @abstractmethod
    def prediction(self, logits: Tensor) -> Tensor:
        """Return what of logits (..., v) is needed to judge a token, in the rule's own form."""

    @abstractmethod
    def pick(self, prediction: Tensor) -> Tensor:
        """Choose a token by each prediction, (...) int64."""

    @abstractmethod
    def judge(self, target: Tensor, proposal: Proposal) -> Acceptance:
        """Accept the first drafted tokens, as many as keep the emitted text distributed as the target's own.

        Args:
            target: (b, k + 1, ...) the target's prediction at each drafted token's place, and after all of them.
            proposal: the k tokens, drawn from `proposal.prediction`.
        """


class Draft(ABC):
    """A source of drafted tokens, which remembers what it has read."""

    @abstractmethod
    def propose(self, ids: Tensor, count: int) -> Proposal:
        """Draft 1 to `count` tokens that follow the columns `ids`, each drawn from the draft's prediction."""

    @abstractmethod
    def retract(self, length: int) -> None:
        """Forget what was read beyond the first `length` columns."""

    @abstractmethod
    def settle(self) -> None:
        """Keep what was read."""


@dataclass(frozen=True, kw_only=True)
class RunCosts:
    """Costs of a run so far, in seconds; None: not measured yet.

    Attributes:
        plain: of a token of plain decoding.
        draft: of a drafted token.
        verify: of a whole verification.
        verified: mean number of drafted tokens in a verification.
        acceptance: share of drafted tokens that were accepted, counted up to the first rejection.
    """

    plain: float | None = None
    draft: float | None = None
    verify: float | None = None
    verified: float = 0.0
    acceptance: float | None = None

    def gain(self, count: int) -> float | None:
        """Return the speed relative to plain decoding with `count` drafted tokens at once; None: a cost is not known.

        The accepted run is taken to be geometrically distributed: (1 - a^(k+1)) / (1 - a) tokens for k drafts and a
        verification, whose cost grows linearly from that of a plain token.
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
