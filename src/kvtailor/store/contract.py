"""The stage `store`: where segments live between two readings.

A `Placement` is what a plan names; it holds nothing. For each cache it opens an `OffloadStore`, which holds that
cache's segments. Layers put their segments away when a forward is done with them, and get them back when the next
forward comes. In between a layer keeps a `Placed` segment, which has the layout alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar, NoReturn

import torch
from torch import Tensor

from kvtailor.errors import CacheMisuse
from kvtailor.ledger import Entry
from kvtailor.method import Method
from kvtailor.types import Layout, Segment

__all__ = ["Placed", "Placement", "Restore", "OffloadStore", "Traffic"]

Restore = Callable[[str, Layout, Mapping[str, object], Mapping[str, Tensor]], Segment]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Counts of what has moved between tiers since a cache was made.

    Attributes:
        hits: how often a layer (or layers that are encoded together) was read with all of its segments resident.
        misses: how often something had to be fetched from the tier.
        bytes_read: bytes fetched from the tier, in the form in which they lie there, without the heads of files.
        bytes_written: bytes that what was written takes there, as the ledger counts them: files whole.
        seconds_waited: how long the computation waited for what was fetched.
    """

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    seconds_waited: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """Return the numbers for JSON."""
        return asdict(self)


class Placed(Segment):
    """A segment that is offloaded: it has the layout of its tokens, but not their keys and values."""

    def __init__(self, layout: Layout, codec: str):
        self.layout, self.codec = layout, codec

    def decode(self) -> tuple[Tensor, Tensor]:
        self._refuse()

    def rows(self, index: Tensor) -> Segment:
        self._refuse()

    def regather(self, lane: Tensor, slot: Tensor, layout: Layout) -> Segment:
        self._refuse()

    def state(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        self._refuse()

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the layout, which stays with the layer."""
        return self.layout.tensors()

    def closed_form_bytes(self) -> int:
        return self.layout.closed_form_bytes()

    def _refuse(self) -> NoReturn:
        raise CacheMisuse(f"this {self.codec} segment is on a tier; read it through LayerState.here() or parts()")


class OffloadStore(ABC):
    """Holds the segments of one cache, and moves them between tiers."""

    @abstractmethod
    def get(self, layer: int, segments: Sequence[Segment], restore: Restore) -> list[Segment]:
        """Return the segments of a layer where attention can read them, encoded as they were.

        Args:
            layer: 0-based among the layers that the plan compresses.
            segments: as the layer keeps them; those that are not `Placed` are returned as they are.
            restore: makes a segment from its codec's name, its layout, and its `Segment.state()`.

        Raises:
            TierError: the tier cannot give one back as it was.
        """

    @abstractmethod
    def put(self, layers: Sequence[int], held: Sequence[list[Segment]]) -> list[list[Segment]]:
        """Take all segments of layers that are encoded together (or of one), and return what the layers keep instead.

        Segments of these layers that were held before and are not among these are forgotten.

        Raises:
            TierError: the tier cannot take them; no segment is lost.
        """

    @abstractmethod
    def prefetch(self, layer: int) -> None:
        """Begin to fetch the segments that are read after those of a layer."""

    @abstractmethod
    def rest(self) -> None:
        """End the reading: let leave the device what is not resident."""

    def keep(self, layer: int, segments: Sequence[Segment]) -> None:  # noqa: B027
        """Keep segments of a layer readable, even if others are put in their place. An empty sequence ends this."""

    def entries(self, layer: int) -> list[Entry]:
        """Return what the ledger lists for a layer's `Placed` segments, their layouts left out."""
        return []

    def device_bytes(self) -> int:
        """Return the bytes that `Placed` segments take on the device, those on their way there included."""
        return 0

    def stays(self, sizes: Sequence[int]) -> frozenset[int]:
        """Return which groups would always stay on the device, if each took as many bytes as `sizes` says."""
        return frozenset(range(len(sizes)))

    def traffic(self) -> Traffic:
        """Return what has moved so far."""
        return Traffic()

    @abstractmethod
    def reset(self) -> None:
        """Forget all segments."""


class Placement(Method, ABC):
    """One way to place segments on tiers. A subclass is a frozen, keyword-only dataclass.

    Attributes:
        moves: segments may leave the device between forwards.
    """

    moves: ClassVar[bool] = True

    @property
    def limit(self) -> int | None:
        """Return how many bytes a cache may take on the device; None: no limit."""
        return None

    @property
    def block(self) -> int:
        """Return how many tokens leave a full-precision tail at once, if the plan names no codec; 0: none leave."""
        return 0

    @property
    def makes_smaller(self) -> bool:
        """Whether segments on the tier take fewer bytes than in memory, how many fewer depends on their content."""
        return False

    @property
    def is_memory(self) -> bool:
        """Whether all segments stay in the device's memory, without a limit."""
        return not self.moves and not self.block and self.limit is None

    def refusal(self, device: torch.device) -> str | None:
        """Return why models on a device are not supported, a sentence that begins with the method's name, or None."""
        return None

    @abstractmethod
    def open(self, groups: Sequence[Sequence[int]]) -> OffloadStore:
        """Return an empty store for one cache.

        Args:
            groups: the layers that the plan compresses, ascending; those that are encoded together in one group.
        """
