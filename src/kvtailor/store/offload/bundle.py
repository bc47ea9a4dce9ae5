"""What travels between tiers: bundles of segments, and what a tier has to offer for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvtailor.ops.segments.coded import under
from kvtailor.ops.segments.packed import Packing
from kvtailor.store.contract import Placed, Restore
from kvtailor.types import Segment

__all__ = ["Arrival", "Bundle", "OnDevice", "Offloaded", "StoredBundle", "Tier"]


class StoredBundle(Protocol):
    """What a tier holds of one bundle.

    Attributes:
        packing: where its tensors lie in what arrives.
        overhead: bytes that it takes beyond those tensors; below 0 where they are packed into fewer.
        travels: bytes that it takes to bring them.
    """

    packing: Packing

    @property
    def overhead(self) -> int: ...

    @property
    def travels(self) -> int: ...

    def entry(self) -> tuple[Mapping[str, Tensor], int]:
        """Tensors that it keeps alive, and bytes that are no tensors, as they are now."""
        ...


class Arrival(Protocol):
    """What is on its way."""

    def result(self) -> Sequence[Tensor]:
        """The runs of bytes (size,) uint8, in the order in which they were requested."""
        ...


class Tier(ABC):
    """Where bundles go.

    Attributes:
        name: what the ledger calls it.
        makes_smaller: what a bundle takes there is known only once it is there; no more than its tensors.
    """

    name: str
    makes_smaller: bool = False

    @abstractmethod
    def store(self, tensors: Mapping[str, Tensor], about: object) -> StoredBundle:
        """Take a bundle's tensors, whole or not at all."""

    @abstractmethod
    def fetch(self, stored: Sequence[StoredBundle]) -> Arrival:
        """Begin to bring bundles to the device."""

    @abstractmethod
    def rest(self) -> None:
        """A forward is over: memory that only serves the next one is given back."""


class Bundle:
    """Segments that were put away together.

    Attributes:
        described: of each segment the codec's name and the fields of its state.
        form: closed form of the bytes of their tensors, layouts left out.
        device: where they came from.
        stored: on the tier; None until they first leave the device.
    """

    def __init__(self, segments: Sequence[Segment]):
        states = [segment.state() for segment in segments]
        self.described = [(segment.codec, fields) for segment, (fields, _) in zip(segments, states, strict=True)]
        layouts = {id(segment.layout): segment.layout for segment in segments}
        self.form = sum(segment.closed_form_bytes() for segment in segments)
        self.form -= sum(layout.closed_form_bytes() for layout in layouts.values())
        self.device = next((t.device for _, tensors in states for t in tensors.values()), torch.device("cpu"))
        self.stored: StoredBundle | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> Bundle:
        return self

    @property
    def stored_size(self) -> int:
        """Bytes that arrive when it is fetched."""
        return 0 if self.stored is None else self.stored.packing.size


class Offloaded(Placed):
    """Segment `place` of a bundle; `first` of those with its layout."""

    def __init__(self, segment: Segment, bundle: Bundle, place: int, *, first: bool):
        super().__init__(segment.layout, segment.codec)
        self.bundle, self.place, self.first = bundle, place, first

    def closed_form_bytes(self) -> int:
        return super().closed_form_bytes() if self.first else 0


class OnDevice:
    """A bundle's tensors on the device: the segments themselves, or what they are made from again when read."""

    def __init__(self, segments: dict[int, Segment], run: Tensor | None = None, packing: Packing | None = None):
        self.segments, self._run = segments, run
        self._views = {} if run is None or packing is None else packing.views(run)
        self.padding = 0 if packing is None else packing.padding

    def segment(self, offloaded: Offloaded, restore: Restore) -> Segment:
        if offloaded.place not in self.segments:
            codec, fields = offloaded.bundle.described[offloaded.place]
            mine = under(f"{offloaded.place}.", self._views)
            self.segments[offloaded.place] = restore(codec, offloaded.layout, fields, mine)
        return self.segments[offloaded.place]

    def tensors(self) -> dict[str, Tensor]:
        named = {} if self._run is None else {"run": self._run}
        for place, segment in self.segments.items():
            named |= {f"{place}.{name}": tensor for name, tensor in segment.state()[1].items()}
        return named
