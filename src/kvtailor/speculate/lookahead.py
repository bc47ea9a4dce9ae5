"""How many tokens are drafted at once: always the same, the best by what was measured, or none for a while."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import fmean, median

from kvtailor.errors import ArgumentError
from kvtailor.speculate.contract import Lookahead, RunCosts

__all__ = ["Fixed", "Adaptive", "Controller"]

_SAMPLES = 9
_TRIALS = 3
_PAUSE = 16
_LONGEST_PAUSE = 256
_TIMED_AGAIN = 32
_MEMORY = 0.95


@dataclass(frozen=True, kw_only=True)
class Fixed(Lookahead):
    """Draft `tokens` in every round."""

    tokens: int = 4

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ArgumentError(f"gamma must be at least 1 drafted token, found {self.tokens}")

    def length(self, measured: RunCosts) -> int:
        """See `Lookahead.length`."""
        return self.tokens


@dataclass(frozen=True, kw_only=True)
class Adaptive(Lookahead):
    """Draft as many tokens as the measured costs and acceptance make worth while.

    The predicted speed is largest for one k between 1 and `most`, see `RunCosts.gain`.

    Attributes:
        first: how many before anything was measured.
        most: how many at most.
    """

    first: int = 4
    most: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.most:
            raise ArgumentError(f"gamma must go from 1 up: found first={self.first}, most={self.most}")

    def length(self, measured: RunCosts) -> int:
        """See `Lookahead.length`."""
        if measured.gain(1) is None:
            return self.first
        return max(range(1, self.most + 1), key=lambda count: measured.gain(count) or 0.0)


class Controller:
    """Speculates while that pays, and decodes plainly while it does not; one object for each run.

    It times plain tokens, drafts and verifications as they come, and predicts the gain of the next round from their
    medians (`RunCosts.gain`). Below `min_gain` it decodes plainly for some tokens, twice as many each time, and tries
    again.

    Args:
        lookahead: how many tokens to draft where it speculates.
        min_gain: predicted speed over plain decoding below which it does not. None: it always speculates, and times
            nothing that speculation does not need.
    """

    def __init__(self, lookahead: Lookahead, min_gain: float | None):
        self.lookahead, self.min_gain = lookahead, min_gain
        self._plain: deque[float] = deque(maxlen=_SAMPLES)
        self._draft: deque[float] = deque(maxlen=_SAMPLES)
        self._verify: deque[float] = deque(maxlen=_SAMPLES)
        self._verified: deque[int] = deque(maxlen=_SAMPLES)
        self._accepted = self._judged = 0.0
        self._trials, self._pause, self._next_pause, self._since_plain = _TRIALS, 0, _PAUSE, 0

    @property
    def measured(self) -> RunCosts:
        """Return the medians so far."""
        return RunCosts(
            # The first plain token of a run warms up what all of them need, so the median of two is unreliable.
            plain=median(self._plain) if len(self._plain) >= _TRIALS else None,
            draft=median(self._draft) if self._draft else None,
            verify=median(self._verify) if self._verify else None,
            verified=fmean(self._verified) if self._verified else 0.0,
            acceptance=self._accepted / self._judged if self._judged else None,
        )

    def length(self) -> int:
        """Return how many tokens to draft now; 0: decode plainly."""
        measured = self.measured
        if self.min_gain is None:
            return self.lookahead.length(measured)
        if self._pause:
            self._pause -= 1
            return 0
        if measured.plain is None or self._since_plain >= _TIMED_AGAIN:
            self._since_plain = 0
            return 0
        count = self.lookahead.length(measured)
        gain = measured.gain(count)
        if self._trials or gain is None:
            self._trials = max(0, self._trials - 1)
            return count
        if gain < self.min_gain:
            self._pause, self._trials = self._next_pause - 1, _TRIALS
            # What comes then may be another text: it is tried as if nothing were known.
            for samples in (self._draft, self._verify, self._verified):
                samples.clear()
            self._accepted = self._judged = 0.0
            self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
            return 0
        self._next_pause = _PAUSE
        return count

    def plain_took(self, seconds: float) -> None:
        """Take note of what a plain token took."""
        self._plain.append(seconds)

    def round_took(self, count: int, drafting: float, verifying: float, accepted: float, judged: float) -> None:
        """Take note of a round: `count` drafted tokens, two times in seconds, and counts of tokens over all rows."""
        self._draft.append(drafting / count)
        self._verify.append(verifying)
        self._verified.append(count)
        self._accepted = _MEMORY * self._accepted + accepted
        self._judged = _MEMORY * self._judged + judged
        self._since_plain += 1
