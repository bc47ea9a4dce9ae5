"""What a plan with another tier holds beside the segments themselves: headers, padding, and copies on the device.

Where the tier packs what it holds, that is less than nothing at the least.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtailor.hf.sizes.bounds import Bounds, summed
from kvtailor.hf.sizes.simulate import Holding, Unit
from kvtailor.store.tiered import Tiered

if TYPE_CHECKING:
    from kvtailor.plan import Plan

__all__ = ["tier_bytes"]

# Of one file: its header fills whole pages of 4096 bytes, and its tensors begin at multiples of 64.
_HEADER = 8192


def tier_bytes(plan: Plan, units: Sequence[Unit], held: Sequence[Holding], rows: int) -> tuple[Bounds, Bounds]:
    """Return what comes on top of the segments on their tier, and the bytes of copies on the device.

    Args:
        plan: with a placement that moves segments.
        units: layers, those that are encoded together in one.
        held: by each of them, or by all.
        rows: b.
    """
    groups = [unit.layers for unit in units]
    encoded = [each.stages["encode"] for each in held]
    # Where only the sum is known, any of them may have all of it.
    alone = len(held) == len(units)
    most = [each.high for each in encoded] if alone else [summed(encoded).high] * len(units)
    segments = max(each.segments for each in held)
    files = sum(len(group) for group in groups) * segments
    # What stays is there twice once it has been away; one unit more may be on its way, or be read.
    staying = plan.store.open(groups).stays(most)
    if isinstance(plan.store, Tiered):
        staying -= {unit for unit, group in enumerate(groups) if group[-1] < plan.store.on_device_layers}
    copies = sum(most[unit] for unit in staying) + max(most, default=0)
    padding = 64 * 16 * files
    # How much smaller a packed file is depends on what the tokens are.
    least = -summed(encoded).low if plan.store.makes_smaller else 0
    return Bounds(least, files * _HEADER + padding), Bounds(0, min(copies, sum(most)) + padding)
