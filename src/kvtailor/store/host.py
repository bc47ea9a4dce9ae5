"""Segments live in pinned host memory, and come back layer by layer while the layers before them compute.

*Idea* As `disk`, one step nearer: a forward reads one layer after the other, so a layer's segments can be in host
memory, encoded, until the layer before it computes. A stream of its own copies the next layer meanwhile.
*Paper* None.
*Source* kvtailor's own; the offloading cache of TriForce (arXiv 2404.11912) and that of transformers do the same with
uncompressed layers.
*Departs* Segments travel as they are encoded, and go to the host once: transformers' sends the whole layer back at
every step. The resident set is fixed, where MSpecKV's evicts the least recently used layer. Never run on an accelerator
yet: there was none where it was written.
*Cost* On the device: the resident layers, the one that is read, the next one, tails and layouts. On the host: pinned
memory of the rest. Each step takes at least the bytes that are not resident over the link's rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.ops.segments.packed import Packing
from kvtailor.store.contract import OffloadStore, Placement
from kvtailor.store.residency import Policy
from kvtailor.store.tiered import Arrival, StoredBundle, Tier, Tiered

__all__ = ["Host"]


class _Pinned(StoredBundle):
    """A bundle in one run of host memory; pinned where it came from a device that copies from such memory by itself."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.packing = Packing.of(tensors)
        self.device = next((t.device for t in tensors.values() if t.numel()), torch.device("cpu"))
        self.run = torch.empty(self.packing.size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        for start, piece in self.packing.pieces(tensors):
            self.run[start : start + piece.numel()].copy_(piece)

    @property
    def overhead(self) -> int:
        return self.packing.padding

    @property
    def travels(self) -> int:
        return self.packing.size

    def entry(self) -> tuple[Mapping[str, Tensor], int]:
        return {"run": self.run}, 0


class _Copied(Arrival):
    """Runs that a stream is copying; a caller of `result` waits on the device and not here."""

    def __init__(self, runs: Sequence[Tensor], done: torch.cuda.Event):
        self._runs, self._done = runs, done

    def result(self) -> Sequence[Tensor]:
        for run in self._runs:
            now = torch.cuda.current_stream(run.device)
            now.wait_event(self._done)
            # Its memory belongs to the copying stream, which must not use it again before this one is through.
            run.record_stream(now)
        return self._runs


class _Here(Arrival):
    def __init__(self, runs: Sequence[Tensor]):
        self._runs = runs

    def result(self) -> Sequence[Tensor]:
        return self._runs


class _Memory(Tier):
    name = "host"

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> _Memory:
        return self

    def store(self, tensors: Mapping[str, Tensor], about: object) -> _Pinned:
        return _Pinned(tensors)

    def fetch(self, stored: Sequence[StoredBundle]) -> Arrival:
        pinned = [each for each in stored if isinstance(each, _Pinned)]
        device = pinned[0].device
        if device.type != "cuda":
            return _Here([each.run.clone() for each in pinned])
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        with torch.cuda.stream(stream):
            runs = [each.run.to(device, non_blocking=True) for each in pinned]
        return _Copied(runs, stream.record_event())

    def rest(self) -> None:
        """Nothing is kept for the next forward."""


@dataclass(frozen=True, kw_only=True)
class Host(Tiered, Placement):
    """Two tiers: the device, and pinned host memory. Only for models whose device is not the host itself.

    Attributes:
        on_device_layers: layers, from the first on, that never leave the device.
        resident_layers: of the others, how many stay on the device as well.
        resident_bytes: bytes that these may take; fewer layers stay where they grow. Where both are None, none does.
        policy: see `disk`.
        device_bytes: what the cache may take on the device; one that needs more raises `TierError`.
        host_bytes: what segments may take on the host, likewise.
        block: tokens that leave a full-precision tail together where the plan names no codec.
    """

    on_device_layers: int = 0
    resident_layers: int | None = None
    resident_bytes: int | str | None = None
    policy: Policy = "fixed"
    device_bytes: int | str | None = None
    host_bytes: int | str | None = None
    block: int = 128
    examples: ClassVar[tuple[str, ...]] = ("host", "host(on_device_layers=1, resident_layers=1)")

    def refusal(self, device: torch.device) -> str | None:
        """The host itself."""
        if device.type != "cpu":
            return None
        return (
            "host: the model is on the cpu, whose memory is the host's, so nothing would leave the device; use disk, "
            "or leave host out"
        )

    def open(self, groups: Sequence[Sequence[int]]) -> OffloadStore:
        return self.open_store(_Memory(), groups)
