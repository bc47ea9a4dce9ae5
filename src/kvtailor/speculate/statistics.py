"""What a run counted: acceptance, tokens for each verification, and speed are three numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Level", "Statistics"]


@dataclass(kw_only=True)
class Level:
    """One draft and what verifies it, summed over rows.

    Attributes:
        proposed: drafted tokens that were judged: up to and including the first rejection of each round.
        accepted: of these.
        verifications: forwards of the verifying cache that judged a draft.
        emitted: tokens that they gave, the replacement or the one more that ends each of them included.
    """

    proposed: int = 0
    accepted: int = 0
    verifications: int = 0
    emitted: int = 0

    @property
    def acceptance(self) -> float | None:
        """Accepted of proposed; None where nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else None

    @property
    def emitted_per_verification(self) -> float | None:
        """Between 1 and k + 1; None without a verification."""
        return self.emitted / self.verifications if self.verifications else None


@dataclass(kw_only=True)
class Statistics:
    """A run, first token and prompt left out.

    Attributes:
        levels: the target and what drafts for it first; in a hierarchy then what drafts inside. Empty without a draft.
        tokens: emitted by each row.
        plain_tokens: of these, by plain decoding.
        seconds: for all of them.
        plain_seconds: a token of plain decoding in the same run, the median; None where none was timed.
    """

    levels: tuple[Level, ...] = field(default_factory=tuple)
    tokens: int = 0
    plain_tokens: int = 0
    seconds: float = 0.0
    plain_seconds: float | None = None

    @property
    def acceptance(self) -> float | None:
        """Of what the target judged; see `Level`."""
        return self.levels[0].acceptance if self.levels else None

    @property
    def emitted_per_verification(self) -> float | None:
        """Of the target; see `Level`."""
        return self.levels[0].emitted_per_verification if self.levels else None

    @property
    def speed_up(self) -> float | None:
        """Measured: the time that so many plain tokens would have taken over the time that was taken.

        None where no plain token was timed in the run: `min_gain=None`, or a run that was over too soon.
        """
        if self.plain_seconds is None or not self.seconds:
            return None
        return self.tokens * self.plain_seconds / self.seconds
