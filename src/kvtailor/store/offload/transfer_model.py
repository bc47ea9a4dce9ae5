"""What a step will take with some layers on another tier, before anything runs, and which layers had better stay.

While a layer computes, the next one that is not resident comes. It has from the moment at which the one before it was
taken up until it is needed, so a step takes for each layer that comes the longer of two times: that of its bytes on
the link, and that of the layers that compute meanwhile. Layers that come are therefore best spread evenly.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvtailor.store.offload.residency import spread

__all__ = ["TransferForecast", "forecast_transfers", "step_seconds"]


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
