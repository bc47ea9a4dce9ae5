"""What placements with a tier have in common, whatever the tier is: their arguments, and the stores that these open."""

from __future__ import annotations

from collections.abc import Sequence

from kvtailor.ops.sizes import asked_bytes
from kvtailor.store.offload.bundle import Tier
from kvtailor.store.offload.offload_store import TieredStore
from kvtailor.store.offload.residency import Policy, Residency

__all__ = ["Tiered"]


class Tiered:
    """A base, beside `Placement`, of those with these arguments and `<name>_bytes`, what segments may take on the tier.

    Attributes:
        on_device_layers: layers, from the first on, that never leave the device.
        resident_layers: of the others, how many stay on the device as well.
        resident_bytes: bytes that these may take. Where both are None, none stays.
        policy: which of them stay.
        device_bytes: what the cache may take on the device.
        block: tokens that leave a full-precision tail together where the plan names no codec.
    """

    on_device_layers: int
    resident_layers: int | None
    resident_bytes: int | str | None
    policy: Policy
    device_bytes: int | str | None
    block: int

    def __post_init__(self) -> None:
        name = type(self).__name__.lower()
        for layers in ("on_device_layers", "resident_layers"):
            count = getattr(self, layers)
            if count is not None and count < 0:
                raise ValueError(f"{name}: {layers} must be 0 layers or more, found {count}")
        if self.block < 1:
            raise ValueError(f"{name}: block must be 1 token or more, found {self.block}; 128 is usual")
        for size in ("resident_bytes", "device_bytes", f"{name}_bytes"):
            object.__setattr__(self, size, asked_bytes(getattr(self, size), f"{name}: {size}"))

    @property
    def limit(self) -> int | None:
        return self._bytes("device")

    def open_store(self, tier: Tier, groups: Sequence[Sequence[int]]) -> TieredStore:
        """What `open` gives, over this tier."""
        moving = [unit for unit, layers in enumerate(groups) if layers[-1] >= self.on_device_layers]
        residency = Residency(self.policy, moving, self.resident_layers, self._bytes("resident"))
        return TieredStore(tier, groups, self.on_device_layers, residency, self._bytes(tier.name))

    def _bytes(self, of: str) -> int | None:
        size: int | None = getattr(self, f"{of}_bytes")
        return size
