"""Which layers stay on the device although they have a place elsewhere.

Every forward reads the layers once, from the first to the last, and then from the first again: a cyclic scan. The least
recently used layer is then always the one that is needed next, so LRU has no hit at all until everything fits. What can
be had is R of N by never changing the set, and (R - 1) of (N - 1) if each layer that is read must be taken in (MRU).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

__all__ = ["Policy", "Residency", "spread"]

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
