"""The controller: speculates while that pays, and decodes plainly while it does not.

It times plain tokens, drafts and verifications as they come, and predicts the gain of the next round from their medians
(`RunCosts.gain`). Below `min_gain` it decodes plainly for some tokens, twice as many each time, and tries again.
"""

from __future__ import annotations

from collections import deque
from statistics import fmean, median

from kvtailor.speculate.contract import Lookahead, RunCosts

__all__ = ["Controller"]

_SAMPLES = 9
_TRIALS = 3
_PAUSE = 16
_LONGEST_PAUSE = 256
_TIMED_AGAIN = 32
_MEMORY = 0.95


class Controller:
    """Of one run.

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
        """The medians so far."""
        return RunCosts(
            # The first plain token of a run warms up what all of them need, so the median of two is unreliable.
            plain=median(self._plain) if len(self._plain) >= _TRIALS else None,
            draft=median(self._draft) if self._draft else None,
            verify=median(self._verify) if self._verify else None,
            verified=fmean(self._verified) if self._verified else 0.0,
            acceptance=self._accepted / self._judged if self._judged else None,
        )

    def length(self) -> int:
        """Tokens to draft now; 0: decode plainly."""
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
        """A plain token."""
        self._plain.append(seconds)

    def round_took(self, count: int, drafting: float, verifying: float, accepted: float, judged: float) -> None:
        """A round with `count` drafted tokens, and how many of those that were judged were accepted, over all rows."""
        self._draft.append(drafting / count)
        self._verify.append(verifying)
        self._verified.append(count)
        self._accepted = _MEMORY * self._accepted + accepted
        self._judged = _MEMORY * self._judged + judged
        self._since_plain += 1
