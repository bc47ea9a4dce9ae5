"""How long the rest of a fit takes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

__all__ = ["TimeLeft"]

_KNOWN = 0.05
"""A step that takes less of the pace than this was not measured now: its record was there."""
_NEWEST = 40
"""Steps whose pace is that of the rest."""
_ENOUGH = 10.0
"""Units after which the pace is that of this run and no longer that of the one step that was timed before it."""


@dataclass
class TimeLeft:
    """How long the rest of a fit takes, at the pace of its newest steps.

    Attributes:
        stages: to come, each with its units, see `bench.stages.Progress.expect`.
        seconds: of a unit, as it was timed before the first; None: not known.
    """

    stages: dict[str, float]
    seconds: float | None
    _open: dict[str, tuple[float, float]] = field(default_factory=dict)
    # Of the newest steps, seconds and units: the first ones of a fit prefill the pieces that later ones find.
    _paces: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_NEWEST))

    def begin(self, name: str, steps: int) -> None:
        """Take that a stage begins: stages that stand before it are over, or were left out."""
        if name in self.stages:
            for before in list(self.stages)[: list(self.stages).index(name)]:
                del self.stages[before]
            # What is left of it, and the units of one of its steps.
            self._open = {name: (self.stages[name], self.stages[name] / max(1, steps))}

    def step(self, seconds: float) -> None:
        """Take that a step of the open stage is done."""
        for name, (left, unit) in self._open.items():
            self.stages[name] = max(0.0, left - unit)
            self._open[name] = self.stages[name], unit
            pace = self.pace
            if pace is None or seconds > _KNOWN * pace * unit:
                self._paces.append((seconds, unit))

    def end(self) -> None:
        """Take that the open stage is over."""
        for name in self._open:
            self.stages.pop(name, None)
        self._open = {}

    @property
    def pace(self) -> float | None:
        """Seconds of a unit."""
        units = sum(unit for _, unit in self._paces)
        if units >= _ENOUGH or (self.seconds is None and units):
            return sum(seconds for seconds, _ in self._paces) / units
        return self.seconds

    @property
    def left(self) -> float | None:
        """Seconds that all that is left takes at this pace; None where no pace is known."""
        return None if self.pace is None else self.pace * sum(self.stages.values())
