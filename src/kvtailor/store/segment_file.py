"""Tensors in one flat file: written whole or not at all, read with their checksum, and gone with the last reader.

The file is `KVTSEG01`, the header's length and CRC-32 (little-endian, 4 bytes each), the header as JSON (a random id,
name, dtype, shape and first byte of each tensor, the size and CRC-32 of what follows, and what the writer adds), zeros
up to a multiple of 4096 bytes, and the tensors. It is written under another name, synced, and renamed.

Its bytes shall not stay in memory a second time, so the kernel drops them from its page cache (`POSIX_FADV_DONTNEED`)
after writing and after each reading.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import weakref
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from kvtailor.errors import TierError
from kvtailor.ops.cpu.checksum import crc32
from kvtailor.ops.segments.packed import Packing
from kvtailor.store.offload.folder import PARTIAL, Folder
from kvtailor.store.written import free_space, sync_folder, write_all

__all__ = ["SegmentFile"]

_MAGIC = b"KVTSEG01"
_PAGE = 4096


class SegmentFile:
    """One such file, which is removed when the last reference to it is gone.

    Args:
        folder: where it is made.
        tensors: by name.
        about: what else the header has, JSON-able.

    Attributes:
        path: of the file.
        packing: where each tensor lies behind the header.
        header_bytes: in front of them.

    Raises:
        TierError: it cannot be written, and is not there.
    """

    def __init__(self, folder: Folder, tensors: Mapping[str, Tensor], about: object = None):
        self._folder = folder
        self.path, self.packing = folder.next_file(), Packing.of(tensors)
        self._id = secrets.token_hex(16)
        self.header_bytes = len(self._header(about, 0))
        partial = self.path.with_suffix(PARTIAL)
        try:
            self._checksum, self._header_checksum = self._write(partial, tensors, about)
            os.replace(partial, self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            raise TierError(
                f"disk: cannot write {str(self.path)!r}, {self.header_bytes + self.packing.size} bytes: "
                f"{error.strerror or error}{free_space(folder.path)}; nothing that was held is lost. Free some space, "
                "name another disk with disk(folder=...), or hold less"
            ) from error
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
        self._end = weakref.finalize(self, _unlink, self.path, os.getpid())

    def size(self) -> int:
        """Bytes of the file, as the file system has it now; 0 where it is gone."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def read(self, buffer: Callable[[int], Tensor] | None = None) -> Tensor:
        """What is behind the header, (packing.size,) uint8 on the CPU, from the disk and not from the page cache.

        Args:
            buffer: gives so many bytes of uint8 to read into; None: fresh ones.

        Raises:
            TierError: the file is gone, cannot be read, or is not as it was written.
        """
        try:
            file = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            self._refuse(f"cannot be opened: {error.strerror}", error)
        try:
            size = self.packing.size
            found, written = os.fstat(file).st_size, self.header_bytes + size
            if found != written:
                self._refuse(f"has {found} bytes and was written with {written}")
            self._check_header(os.pread(file, self.header_bytes, 0))
            run = torch.empty(size, dtype=torch.uint8) if buffer is None else buffer(size)
            view, done = run.numpy().data, 0
            while done < size:
                step = os.preadv(file, [view[done:]], self.header_bytes + done)
                if step == 0:
                    self._refuse(f"ends after {done} of {size} bytes of tensors")
                done += step
            _drop_from_page_cache(file)
        except OSError as error:
            self._refuse(f"cannot be read: {error.strerror}", error)
        finally:
            os.close(file)
        if crc32(run) != self._checksum:
            self._refuse("is damaged: its tensors do not have the checksum that they were written with")
        return run

    def _check_header(self, header: bytes) -> None:
        if header[:8] != _MAGIC:
            self._refuse(f"is no segment file: it begins with {header[:8]!r}")
        if self._id.encode() not in header:
            self._refuse("is a segment file of something else, under this name")
        if zlib.crc32(header) != self._header_checksum:
            self._refuse("is damaged: its header does not have the checksum that it was written with")

    def _header(self, about: object, checksum: int) -> bytes:
        named = {
            name: {"dtype": str(dtype).removeprefix("torch."), "shape": shape, "first": first}
            for name, (first, dtype, shape) in self.packing.places.items()
        }
        content = {"id": self._id, "tensors": named, "size": self.packing.size, "crc32": f"{checksum:08x}"}
        text = json.dumps({**content, "about": about}).encode()
        start = _MAGIC + len(text).to_bytes(4, "little") + zlib.crc32(text).to_bytes(4, "little")
        return (start + text).ljust(-(-(len(start) + len(text)) // _PAGE) * _PAGE, b"\0")

    def _write(self, path: Path, tensors: Mapping[str, Tensor], about: object) -> tuple[int, int]:
        """The checksums of tensors and header."""
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            checksum = end = 0
            for start, piece in self.packing.pieces(tensors):
                gap = bytes(start - end)
                piece = piece.cpu()
                data = piece.numpy().data
                checksum = crc32(piece, zlib.crc32(gap, checksum))
                write_all(file, memoryview(gap), self.header_bytes + end)
                write_all(file, data, self.header_bytes + start)
                end = start + len(data)
            header = self._header(about, checksum)
            write_all(file, memoryview(header), 0)
            os.fsync(file)
            _drop_from_page_cache(file)
        finally:
            os.close(file)
        return checksum, zlib.crc32(header)

    def _refuse(self, found: str, error: BaseException | None = None) -> NoReturn:
        raise TierError(
            f"disk: {str(self.path)!r}, which this cache wrote, {found}; what it held is lost, so the cache must be "
            "made again from its prompt"
        ) from error


def _drop_from_page_cache(file: int) -> None:
    # Not every system has it, and where it is missing only memory is lost.
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def _unlink(path: Path, process: int) -> None:
    # A child that was forked has this object too, but not the file.
    if os.getpid() == process:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
