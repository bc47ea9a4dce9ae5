"""Segments live in files, and come back layer by layer while the layers before them compute.

*Idea* A forward reads one layer after the other. So a layer's segments can be on the disk, encoded, until the layer
before it is read: a thread reads ahead while the model computes. What stays on the device all the time is chosen once,
spread evenly over the layers, so that each layer that must come has its neighbours' time to do it in.
*Paper* None.
*Source* kvtailor's own; the offloading cache of TriForce (arXiv 2404.11912) reads ahead in this way from host memory.
*Departs* Segments travel as they are encoded and are written once. The resident set is fixed, where the offloading
caches of others evict the least recently used layer, which on a cyclic scan is always the one that is needed next.
Entropy coding (`pack=deflate`) is the last step of `staniszewski2025kvtc` (arXiv 2511.01815); here any codec has it.
*Cost* On the device: the resident layers, the one that is read, the next one, tails and layouts. Each forward reads
what is not resident: a step takes at least these bytes over the disk's rate. Other rows (beams) are written anew.
`pack=deflate` writes fewer bytes, and takes the time of inflating them at each reading (docs/tiers.md).
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import ClassVar, Literal

import numpy
import torch
from torch import Tensor

from kvtailor.store.contract import OffloadStore, Placement
from kvtailor.store.residency import Policy
from kvtailor.store.segment_file import Folder, SegmentFile, sweep
from kvtailor.store.tiered import Arrival, StoredBundle, Tier, Tiered

__all__ = ["Buffers", "Disk"]


class Buffers:
    """Lends memory, and takes it back when the last tensor over it is gone; what is idle serves one reading more."""

    def __init__(self) -> None:
        self._idle: list[numpy.ndarray] = []
        self._lock = Lock()

    @property
    def idle_bytes(self) -> int:
        """Bytes that are kept for the next reading."""
        with self._lock:
            return sum(each.nbytes for each in self._idle)

    def expect(self, sizes: Sequence[int]) -> None:
        """The next reading takes buffers of these sizes in bytes; other idle ones are given back to the system."""
        with self._lock:
            missing, kept = list(sizes), []
            for each in self._idle:
                if each.nbytes in missing:
                    missing.remove(each.nbytes)
                    kept.append(each)
            self._idle[:] = kept

    def take(self, size: int) -> Tensor:
        """(size,) uint8 with anything in it."""
        with self._lock:
            at = next((i for i, each in enumerate(self._idle) if each.nbytes == size), None)
            own = numpy.empty(size, numpy.uint8) if at is None else self._idle.pop(at)
        # A tensor holds the array that it was made from, and so do all tensors over the same memory. What takes it back
        # needs no lock: the garbage collector may call it in the middle of `expect` or `take`.
        lent = own[:]
        weakref.finalize(lent, self._idle.append, own).atexit = False
        return torch.from_numpy(lent)


class _File(StoredBundle):
    def __init__(self, file: SegmentFile):
        self.file, self.packing = file, file.packing

    @property
    def overhead(self) -> int:
        return self.file.header_bytes + self.travels - self.packing.size + self.packing.padding

    @property
    def travels(self) -> int:
        return self.file.stored_bytes

    def entry(self) -> tuple[Mapping[str, Tensor], int]:
        return {}, self.file.size()


class _Coming(Arrival):
    """Files that a thread of this process reads. A child that was forked meanwhile lacks the thread, and reads them."""

    def __init__(self, files: Sequence[SegmentFile], read: Future[list[Tensor]]):
        self._files, self._read, self._process = files, read, os.getpid()

    def result(self) -> list[Tensor]:
        # The lock inside of the future may be held by the thread that the child lacks, so the future is not used.
        return self._read.result() if os.getpid() == self._process else [file.read() for file in self._files]


class _Files(Tier):
    """A folder, made when the first file is written, and a thread that reads ahead."""

    name = "disk"

    def __init__(self, root: Path, *, deflate: bool = False):
        self.root, self.makes_smaller = root, deflate
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._folder: Folder | None = None
        self._reader: ThreadPoolExecutor | None = None
        self._buffers = Buffers()

    def _follow_fork(self) -> None:
        """Begin anew in a child that was forked: the thread is not there, locks may be held by it for good, and files
        in its parent's folder would get the names that the parent gives to its next ones."""
        if os.getpid() != self._process:
            self._begin()

    def store(self, tensors: Mapping[str, Tensor], about: object) -> _File:
        self._follow_fork()
        if self._folder is None:
            self._folder = Folder(self.root)
        return _File(SegmentFile(self._folder, tensors, about, deflate=self.makes_smaller))

    def fetch(self, stored: Sequence[StoredBundle]) -> Arrival:
        self._follow_fork()
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="kvtailor-disk")
        files = [each.file for each in stored if isinstance(each, _File)]
        self._buffers.expect([file.packing.size for file in files])
        take = self._buffers.take
        return _Coming(files, self._reader.submit(lambda: [file.read(take) for file in files]))

    def rest(self) -> None:
        self._follow_fork()
        self._buffers.expect([])


@dataclass(frozen=True, kw_only=True)
class Disk(Tiered, Placement):
    """Two tiers: the device, and files.

    Attributes:
        folder: where the cache makes a subfolder of its own, which goes when the cache goes; what dead processes left
            there goes when the next cache is made. None: `kvtailor-<user>` in the system's folder for temporary files,
            which on some systems is memory.
        on_device_layers: layers, from the first on, that never leave the device.
        resident_layers: of the others, how many stay on the device as well.
        resident_bytes: bytes that these may take; fewer layers stay where they grow. Where both are None, none does.
        policy: "fixed": which layers stay never changes but where they no longer fit; "mru" and "lru": each layer that
            was read stays, and the most or least recently read of the others goes.
        device_bytes: what the cache may take on the device; one that needs more raises `TierError`.
        disk_bytes: what segments may take on the disk, likewise.
        block: tokens that leave a full-precision tail together where the plan names no codec.
        pack: "deflate" makes files smaller without loss, as far as what is in them allows; None: they have the bytes as
            they are.
    """

    folder: str | None = None
    on_device_layers: int = 0
    resident_layers: int | None = None
    resident_bytes: int | str | None = None
    policy: Policy = "fixed"
    device_bytes: int | str | None = None
    disk_bytes: int | str | None = None
    block: int = 128
    pack: Literal["deflate"] | None = None
    examples: ClassVar[tuple[str, ...]] = (
        "disk",
        "disk(on_device_layers=1, resident_layers=1)",
        "disk(resident_bytes=4096, policy=mru)",
        "disk(pack=deflate)",
    )

    @property
    def makes_smaller(self) -> bool:
        return self.pack is not None

    def open(self, groups: Sequence[Sequence[int]]) -> OffloadStore:
        """Remove what dead processes left; the folder is made when the first segment leaves the device."""
        own = Path(tempfile.gettempdir()) / f"kvtailor-{os.getuid()}"
        root = own if self.folder is None else Path(os.path.expanduser(self.folder)).absolute()
        sweep(root)
        return self.open_store(_Files(root, deflate=self.makes_smaller), groups)
