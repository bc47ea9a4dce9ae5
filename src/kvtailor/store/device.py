"""Everything stays on the device where the model computes.

*Idea* No tier at all, the null object of this stage.
*Paper* None.
*Source* None.
*Departs* Nothing known.
*Cost* None: a segment is handed back as it came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvtailor.ops.sizes import asked_bytes
from kvtailor.store.contract import OffloadStore, Placement, Restore
from kvtailor.types import Segment

__all__ = ["Device"]


class _Here(OffloadStore):
    def get(self, layer: int, segments: Sequence[Segment], restore: Restore) -> list[Segment]:
        return list(segments)

    def put(self, layers: Sequence[int], held: Sequence[list[Segment]]) -> list[list[Segment]]:
        return list(held)

    def prefetch(self, layer: int) -> None:
        """Nothing has to come."""

    def rest(self) -> None:
        """Nothing leaves."""

    def reset(self) -> None:
        """Nothing is held here."""


@dataclass(frozen=True, kw_only=True)
class Device(Placement):
    """One tier: the device of the model.

    Attributes:
        device_bytes: what a cache may take there, such as 64MiB; one that needs more raises `TierError`. None: what
            there is.
    """

    device_bytes: int | str | None = None
    moves: ClassVar[bool] = False
    examples: ClassVar[tuple[str, ...]] = ("device", "device(device_bytes=67108864)")

    def __post_init__(self) -> None:
        object.__setattr__(self, "device_bytes", asked_bytes(self.device_bytes, "device: device_bytes"))

    @property
    def limit(self) -> int | None:
        return asked_bytes(self.device_bytes, "device: device_bytes")

    def open(self, groups: Sequence[Sequence[int]]) -> OffloadStore:
        return _Here()
