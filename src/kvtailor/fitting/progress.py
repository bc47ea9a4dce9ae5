"""How long the rest of a fit takes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

__all__ = ["TimeLeft"]

_KNOWN = 0.05
"""A step that takes less of the pace than this was not measured now: its record was there."""
_NEWEST = 40
"""Steps whose pace is that of the rest."""
_ENOUGH = 10.0
"""Units of a stage after which its own pace is known."""
_MANY = 60.0
"""Units of a stage after which it counts in the pace of the stages to come, as every long stage before it does.
The first stages of a fit are a few plans of all kinds that prefill each piece, at several times the pace of others."""
_DEAR = 5.0
"""Times the middle one of the newest steps that a step counts for at most: a few plans take twenty times what others
do."""


@dataclass
class TimeLeft:
    """How long the rest of a fit takes: the open stage at the pace of its newest steps, the others at a typical one.

    Attributes:
        stages: to come, each with its units, see `bench.stages.Progress.expect`.
        seconds: of a unit, as it was timed before the first, and then as a long stage had it; None: not known.
    """

    stages: dict[str, float]
    seconds: float | None
    _open: str | None = None
    _unit: float = 1.0  # units of one step of the open stage
    _expected: bool = True  # the open stage was among `stages`; else a step of it is of no known length
    # Of the newest steps of the open stage, seconds and units: the first ones prefill the pieces that later ones find.
    _paces: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_NEWEST))
    _measured: float = 0.0  # units of the open stage that were not known before, and their seconds
    _spent: float = 0.0
    _long: tuple[float, float] = (0.0, 0.0)  # seconds and units of the long stages that are over

    def begin(self, name: str, steps: int) -> None:
        """Take that a stage begins: stages that stand before it are over, or were left out.

        Of a stage that was not among those to come, nothing is known before its first step.
        """
        self._expected = name in self.stages
        if self._expected:
            for before in list(self.stages)[: list(self.stages).index(name)]:
                del self.stages[before]
        else:
            self.stages = {name: float(steps), **self.stages}
        self._open, self._unit = name, self.stages[name] / max(1, steps)
        self._paces.clear()
        self._measured = self._spent = 0.0

    def step(self, seconds: float) -> None:
        """Take that a step of the open stage is done."""
        if self._open is None:
            return
        self.stages[self._open] = max(0.0, self.stages[self._open] - self._unit)
        pace = self.pace
        if pace is None or seconds > _KNOWN * pace * self._unit:
            self._paces.append((seconds, self._unit))
            self._measured, self._spent = self._measured + self._unit, self._spent + seconds
        if self._expected and self._measured >= _MANY:
            self.seconds = (self._long[0] + self._spent) / (self._long[1] + self._measured)
        elif self._expected and self.seconds is None:
            self.seconds = self.pace

    def skip(self, steps: int) -> None:
        """Take that so many steps of the open stage are not needed. They count as steps that take no time, since the
        rest of the stage is likely to have such as well.
        """
        if self._open is None:
            return
        self.stages[self._open] = max(0.0, self.stages[self._open] - self._unit * steps)
        self._paces.extend([(0.0, self._unit)] * steps)

    def end(self) -> None:
        """Take that the open stage is over."""
        if self._open is not None:
            del self.stages[self._open]
        if self._expected and self._measured >= _MANY:
            self._long = self._long[0] + self._spent, self._long[1] + self._measured
        self._open = None

    @property
    def pace(self) -> float | None:
        """Seconds of a unit of the open stage; None where it is not known."""
        units = sum(unit for _, unit in self._paces)
        known = self.seconds if self._expected else None
        if self._open is not None and (units >= _ENOUGH or (known is None and units)):
            most = _DEAR * median([seconds for seconds, _ in self._paces if seconds] or [0.0])
            return sum(min(seconds, most) for seconds, _ in self._paces) / units
        return known

    @property
    def left(self) -> float | None:
        """Seconds that all that is left takes; None where no pace is known."""
        here = self.stages[self._open] if self._open is not None else 0.0
        behind = sum(self.stages.values()) - here
        if (here and self.pace is None) or (behind and self.seconds is None):
            return None
        return (self.pace or 0.0) * here + (self.seconds or 0.0) * behind
