"""Which layers stay on the device although they have a place elsewhere, and what a step takes with the others away.

Every forward reads the layers once, from the first to the last, and then from the first again: a cyclic scan. The least
recently used layer is then always the one that is needed next, so LRU has no hit at all until everything fits. What can
be had is R of N by never changing the set, and (R - 1) of (N - 1) if each layer that is read must be taken in (MRU).

While a layer computes, the next one that is not resident comes. It has from the moment at which the one before it was
taken up until it is needed, so a step takes for each layer that comes the longer of two times: that of its bytes on
the link, and that of the layers that compute meanwhile. Layers that come are therefore best spread evenly.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Policy", "Residency", "spread", "TransferForecast", "forecast_transfers", "step_seconds"]


Policy = Literal["fixed", "mru", "lru"]


def spread(count: int, chosen: int) -> frozenset[int]:
    """So many of 0 .. count - 1 that those that are left out lie evenly, so that each can come while others compute."""
    out = count - chosen
    return frozenset(range(count)) - {(2 * i + 1) * count // (2 * out) for i in range(out)}


class Residency:
    """Which of some units (layers, or layers that are encoded together) stay, under limits.

    Attributes:
        policy: "fixed": a set that only changes where it no longer fits; "mru", "lru": each unit that was used is
            taken in, and the most or least recently used of the others give way.
        most: units that may stay; None: any number.
        most_bytes: bytes that they may take; None: any number. Where both are None, none stays.
    """

    def __init__(self, policy: Policy, units: Sequence[int], most: int | None, most_bytes: int | None):
        self.policy, self.most, self.most_bytes = policy, most, most_bytes
        self._units = list(units)
        self._staying: list[int] = []
        self._known: tuple[Mapping[int, int], frozenset[int]] = {}, frozenset()

    @property
    def staying(self) -> tuple[int, ...]:
        """Units that stay now, the most recently taken in last."""
        return tuple(self._staying)

    def used(self, unit: int, sizes: Mapping[int, int]) -> None:
        """A unit was used.

        Args:
            unit: which.
            sizes: bytes of each unit; one that is not there has never been seen.
        """
        if self.most is None and self.most_bytes is None:
            return
        before = [each for each in self._staying if each != unit]
        if self.policy == "fixed":
            members = self._fixed(sizes)
            self._staying = [each for each in [*before, unit] if each in members]
        elif self._fits([unit], sizes):
            while not self._fits([*before, unit], sizes):
                before.pop(-1 if self.policy == "mru" else 0)
            self._staying = [*before, unit]
        else:
            self._staying = before

    def settled(self, sizes: Mapping[int, int]) -> frozenset[int]:
        """Units that find themselves there at each use, in the long run of a cycle over units of these bytes.

        For "mru", where each is there in some turns, as many as there are hits in a turn, which is one less than fit.
        """
        if self.most is None and self.most_bytes is None:
            return frozenset()
        members = self._spread(sizes)
        if self.policy == "fixed" or len(members) == len(self._units):
            return members
        hits = (
            (len(members) - 1) * len(self._units) // (len(self._units) - 1) if self.policy == "mru" and members else 0
        )
        return frozenset(self._units[i] for i in spread(len(self._units), hits))

    def forget(self) -> None:
        """Nothing stays."""
        self._staying, self._known = [], ({}, frozenset())

    def _fits(self, units: Sequence[int], sizes: Mapping[int, int]) -> bool:
        few = self.most is None or len(units) <= self.most
        return few and (self.most_bytes is None or sum(sizes.get(u, 0) for u in units) <= self.most_bytes)

    def _fixed(self, sizes: Mapping[int, int]) -> frozenset[int]:
        """The largest spread set that fits; a unit that was never seen counts as the largest one."""
        if sizes == self._known[0]:
            return self._known[1]
        self._known = dict(sizes), self._spread(sizes)
        return self._known[1]

    def _spread(self, sizes: Mapping[int, int]) -> frozenset[int]:
        known = {unit: sizes.get(unit, max(sizes.values(), default=0)) for unit in self._units}
        for chosen in range(len(self._units), 0, -1):
            members = frozenset(self._units[i] for i in spread(len(self._units), chosen))
            if self._fits(sorted(members), known):
                return members
        return frozenset()


@dataclass(frozen=True, kw_only=True)
class TransferForecast:
    """A prediction; nothing in it was measured.

    Attributes:
        resident: units that stay on the device.
        bytes_moved: that come in each step.
        step_seconds: what a step takes.
        compute_seconds: what it would take if everything were resident.
        link_seconds: what the bytes alone take.
    """

    resident: tuple[int, ...]
    bytes_moved: int
    step_seconds: float
    compute_seconds: float
    link_seconds: float

    @property
    def stall(self) -> float:
        """The share of a step in which nothing computes."""
        return 1 - self.compute_seconds / self.step_seconds if self.step_seconds else 0.0


def step_seconds(sizes: Sequence[int], resident: Collection[int], *, rate: float, compute: Sequence[float]) -> float:
    """The time of one step in the long run.

    Args:
        sizes: bytes of each unit.
        resident: those that stay.
        rate: bytes per second of the link.
        compute: seconds of each unit.
    """
    coming = [unit for unit in range(len(sizes)) if unit not in resident]
    if not coming:
        return sum(compute)
    if len(coming) == 1:
        # It cannot come while it is read itself.
        own = compute[coming[0]]
        return own + max(sum(compute) - own, sizes[coming[0]] / rate)
    total = 0.0
    for one, following in zip(coming, [*coming[1:], coming[0] + len(sizes)], strict=True):
        meanwhile = sum(compute[unit % len(sizes)] for unit in range(one, following))
        total += max(meanwhile, sizes[following % len(sizes)] / rate)
    return total


def forecast_transfers(
    sizes: Sequence[int], *, rate: float, compute: Sequence[float], most_bytes: int
) -> TransferForecast:
    """The fewest resident units, spread evenly, with which a step is as short as these bytes allow.

    Args:
        sizes, rate, compute: as for `step_seconds`.
        most_bytes: that resident units may take.
    """
    sets = [tuple(sorted(spread(len(sizes), chosen))) for chosen in range(len(sizes) + 1)]
    fitting = [members for members in sets if sum(sizes[unit] for unit in members) <= most_bytes]
    timed = [(step_seconds(sizes, members, rate=rate, compute=compute), members) for members in fitting]
    # What differs by rounding alone is the same, and then fewer are better.
    step, resident = min(timed, key=lambda each: (round(each[0], 9), len(each[1])))
    moved = sum(size for unit, size in enumerate(sizes) if unit not in resident)
    return TransferForecast(
        resident=resident,
        bytes_moved=moved,
        step_seconds=step,
        compute_seconds=sum(compute),
        link_seconds=moved / rate,
    )
