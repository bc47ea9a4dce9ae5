"""Placements with a second tier, whatever the tier is: what travels when, and what stays on the device.

A *unit* is a layer, or the layers that are encoded together. A *bundle* is what a unit puts away at one time: it goes
to the tier at most once, when it first leaves the device, and never changes. While a unit is read its bundles are on
the device; when the next one is read, or reading ends, those that are not resident leave it.

`Tier` is what a tier offers for bundles, `TieredStore` moves them, and `Tiered` has the arguments of such placements.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from kvtailor.errors import TierError
from kvtailor.ledger import Entry, storage_bytes
from kvtailor.ops.segments.coded import under
from kvtailor.ops.segments.packed import Packing
from kvtailor.ops.sizes import asked_bytes
from kvtailor.store.contract import OffloadStore, Placed, Restore, Traffic
from kvtailor.store.residency import Policy, Residency
from kvtailor.types import Segment

__all__ = ["Arrival", "Bundle", "OnDevice", "Offloaded", "StoredBundle", "Tier", "TieredStore", "Tiered"]


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


class TieredStore(OffloadStore):
    """See the module.

    Args:
        tier: where bundles go.
        groups: see `Placement.open`.
        on_device: layers from the first on that never leave the device.
        residency: of the units that do.
        most: bytes that the tier may hold; None: as many as it can.
    """

    def __init__(
        self, tier: Tier, groups: Sequence[Sequence[int]], on_device: int, residency: Residency, most: int | None
    ):
        self.tier, self.residency, self.most = tier, residency, most
        self._unit_of = {
            layer: unit for unit, layers in enumerate(groups) for layer in layers if layers[-1] >= on_device
        }
        self._lowest = {unit: layers[0] for unit, layers in enumerate(groups)}
        self._units = sorted(set(self._unit_of.values()))
        self._traffic = Traffic()
        self.reset()

    def __deepcopy__(self, memo: dict[int, object]) -> TieredStore:
        other = object.__new__(type(self))
        other.__dict__ = dict(self.__dict__)
        other.residency, other._ahead = deepcopy(self.residency), None
        other._held = {unit: list(bundles) for unit, bundles in self._held.items()}
        other._kept = {unit: list(bundles) for unit, bundles in self._kept.items()}
        other._here = {unit: dict(bundles) for unit, bundles in self._here.items()}
        return other

    def reset(self) -> None:
        self._held: dict[int, list[Bundle]] = {}
        self._kept: dict[int, list[Bundle]] = {}
        self._here: dict[int, dict[Bundle, OnDevice]] = {}
        self._open: int | None = None
        self._ahead: tuple[int, list[Bundle], Arrival] | None = None
        self.residency.forget()

    def get(self, layer: int, segments: Sequence[Segment], restore: Restore) -> list[Segment]:
        asked = [segment for segment in segments if isinstance(segment, Offloaded)]
        if not asked:
            return list(segments)
        unit = self._unit_of[layer]
        here = self._brought(unit, list(dict.fromkeys(segment.bundle for segment in asked)))
        return [here[s.bundle].segment(s, restore) if isinstance(s, Offloaded) else s for s in segments]

    def put(self, layers: Sequence[int], held: Sequence[list[Segment]]) -> list[list[Segment]]:
        unit = self._unit_of.get(layers[0])
        if unit is None:
            return list(held)
        bundles = list(dict.fromkeys(s.bundle for own in held for s in own if isinstance(s, Offloaded)))
        fresh = [segment for own in held for segment in own if not isinstance(segment, Placed)]
        kept: list[list[Segment]] = list(held)
        if fresh:
            bundle = Bundle(fresh)
            bundles.append(bundle)
            self._here.setdefault(unit, {})[bundle] = OnDevice(dict(enumerate(fresh)))
            layouts = [id(segment.layout) for segment in fresh]
            offloaded = (
                Offloaded(segment, bundle, place, first=layouts.index(id(segment.layout)) == place)
                for place, segment in enumerate(fresh)
            )
            kept = [[s if isinstance(s, Placed) else next(offloaded) for s in own] for own in held]
        self._held[unit] = bundles
        if self._open != unit:
            # Put away again as it was: it was not read, so this must not count as a use.
            self._settle(unit if fresh else None)
        return kept

    def keep(self, layer: int, segments: Sequence[Segment]) -> None:
        unit = self._unit_of.get(layer)
        if unit is None:
            return
        self._kept[unit] = list(dict.fromkeys(s.bundle for s in segments if isinstance(s, Offloaded)))
        if not segments and self._open is None:
            self._settle(None)

    def prefetch(self, layer: int) -> None:
        after = [unit for unit in self._units if self._lowest[unit] > layer]
        for unit in after + [unit for unit in self._units if unit not in after]:
            absent = [] if unit == self._open else self._absent(unit, self._held.get(unit, []))
            if absent:
                if self._ahead is None or self._ahead[0] != unit:
                    self._ahead = unit, absent, self._fetch(absent)
                return

    def rest(self) -> None:
        unit, self._open = self._open, None
        if unit is not None:
            self._settle(unit)
            if unit == self._units[-1]:
                self.tier.rest()

    def entries(self, layer: int) -> list[Entry]:
        unit = self._unit_of.get(layer)
        if unit is None or layer != self._lowest[unit]:
            return []
        found = []
        for bundle in self._bundles(unit):
            here = self._here.get(unit, {}).get(bundle)
            if bundle.stored is not None:
                tensors, size = bundle.stored.entry()
                form = bundle.form + bundle.stored.overhead
                found.append(
                    Entry(
                        layer=layer, stage="encode", tier=self.tier.name, tensors=tensors, stored=size, closed_form=form
                    )
                )
            if here is not None:
                stage, form = "encode" if bundle.stored is None else "store", bundle.form + here.padding
                found.append(Entry(layer=layer, stage=stage, tensors=here.tensors(), closed_form=form))
        if self._ahead is not None and self._ahead[0] == unit:
            _, bundles, arrival = self._ahead
            runs = {str(i): run for i, run in enumerate(arrival.result())}
            form = sum(bundle.stored_size for bundle in bundles)
            found.append(Entry(layer=layer, stage="store", tensors=runs, closed_form=form))
        return found

    def device_bytes(self) -> int:
        total = sum(storage_bytes(here.tensors().values()) for unit in self._here.values() for here in unit.values())
        coming = [] if self._ahead is None else self._ahead[1]
        return total + sum(bundle.stored_size for bundle in coming)

    def stays(self, sizes: Sequence[int]) -> frozenset[int]:
        always = frozenset(range(len(sizes))) - frozenset(self._units)
        return always | self.residency.settled({unit: sizes[unit] for unit in self._units})

    def traffic(self) -> Traffic:
        return self._traffic

    def _bundles(self, unit: int) -> list[Bundle]:
        """What a unit holds, and what may be read of it again."""
        return list(dict.fromkeys([*self._held.get(unit, []), *self._kept.get(unit, [])]))

    def _absent(self, unit: int, bundles: Sequence[Bundle]) -> list[Bundle]:
        here = self._here.get(unit, {})
        return [bundle for bundle in bundles if bundle not in here]

    def _brought(self, unit: int, bundles: Sequence[Bundle]) -> Mapping[Bundle, OnDevice]:
        """The bundles of a unit on the device, as it is read now."""
        looking = self._open != unit
        if looking:
            self.rest()
            self._open = unit
        absent = self._absent(unit, bundles)
        if absent:
            began = time.perf_counter()
            self._take_ahead(unit, absent)
            late = self._absent(unit, absent)
            if late:
                self._arrive(unit, late, self._fetch(late))
            self._count(misses=int(looking), seconds_waited=time.perf_counter() - began)
        else:
            self._count(hits=int(looking))
        return self._here[unit]

    def _take_ahead(self, unit: int, wanted: Sequence[Bundle]) -> None:
        if self._ahead is not None and self._ahead[0] == unit:
            (_, bundles, arrival), self._ahead = self._ahead, None
            self._arrive(unit, bundles, arrival, wanted)

    def _arrive(
        self, unit: int, bundles: Sequence[Bundle], arrival: Arrival, wanted: Sequence[Bundle] | None = None
    ) -> None:
        here = self._here.setdefault(unit, {})
        for bundle, run in zip(bundles, arrival.result(), strict=True):
            assert bundle.stored is not None
            if wanted is None or bundle in wanted:
                here[bundle] = OnDevice({}, run.to(bundle.device), bundle.stored.packing)

    def _fetch(self, bundles: Sequence[Bundle]) -> Arrival:
        self._count(bytes_read=sum(bundle.stored.travels for bundle in bundles if bundle.stored is not None))
        return self.tier.fetch([bundle.stored for bundle in bundles if bundle.stored is not None])

    def _settle(self, unit: int | None) -> None:
        """Let leave what does not stay now that a unit was used; None: none was."""
        if unit is not None:
            sizes = {each: sum(bundle.form for bundle in self._bundles(each)) for each in self._held}
            self.residency.used(unit, sizes)
        for each in list(self._here):
            held, stays = self._bundles(each), each in self.residency.staying
            for bundle, here in list(self._here[each].items()):
                if bundle not in held:
                    del self._here[each][bundle]
                elif not stays and each != self._open:
                    self._store(bundle, here)
                    del self._here[each][bundle]

    def _store(self, bundle: Bundle, here: OnDevice) -> None:
        if bundle.stored is not None:
            return
        there = [b for unit in self._held for b in self._bundles(unit) if b.stored is not None]
        taken = sum(self._taken(b) for b in there)
        if not self.tier.makes_smaller:
            self._refuse_above(taken, bundle.form)
        about = [{"codec": codec, "fields": fields} for codec, fields in bundle.described]
        stored = self.tier.store(here.tensors(), about)
        # What it takes is known only now. Where that is too much, it goes from there again, and stays here.
        self._refuse_above(taken, bundle.form + stored.overhead)
        bundle.stored = stored
        self._count(bytes_written=self._taken(bundle))

    def _taken(self, bundle: Bundle) -> int:
        """Bytes that a bundle takes on the tier, as the ledger has them."""
        assert bundle.stored is not None
        return bundle.form + bundle.stored.overhead

    def _refuse_above(self, taken: int, more: int) -> None:
        if self.most is not None and taken + more > self.most:
            raise TierError(
                f"{self.tier.name}: {more} bytes more would make {taken + more} there, and the plan allows "
                f"{self.tier.name}_bytes={self.most}; allow more, or hold less"
            )

    def _count(self, **more: float) -> None:
        now = self._traffic.as_dict()
        self._traffic = replace(self._traffic, **{name: now[name] + each for name, each in more.items()})  # type: ignore[arg-type]


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
