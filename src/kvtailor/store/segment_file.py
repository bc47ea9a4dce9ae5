"""Segments in files of a folder that one cache has to itself: whole or not at all, and gone with the last reader.

A file is `KVTSEG01`, the header's length and CRC-32 (little-endian, 4 bytes each), the header as JSON (a random id,
name, dtype, shape and first byte of each tensor, the size and CRC-32 of what follows, and what the writer adds), zeros
up to a multiple of 4096 bytes, and the tensors. It is written under another name, synced, and renamed.

Where tensors are deflated, each place lies right behind the one before, coded or, where that would make it no smaller,
as it is; the header then also has the length of each in the file and of all. The CRC-32 is of what lies in the file.

Its bytes shall not stay in memory a second time, so the kernel drops them from its page cache (`POSIX_FADV_DONTNEED`)
after writing and after each reading.

A tensor's bytes are made smaller without loss (`deflate`), and back. The coder is DEFLATE, from the standard library's
zlib: every Python has it, it is the coder of arXiv 2511.01815, and it makes codes and floats of a cache about as much
smaller as slower ones. The first bytes of all elements come first, then the second ones, and so on: what a float's
exponents have in common is found so.

Under the root that a plan names each cache has a subfolder named by the process and a random number, with a locked file
in it. A lock ends with its process, however that ends, so a subfolder whose lock is free is a leftover: the next cache
that is made under the same root removes it. Files of other names are never touched. A child that was forked shares the
lock: a folder stays while one of the two lives, though only its maker removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import weakref
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import numpy
import torch
from torch import Tensor

from kvtailor.errors import TierError
from kvtailor.ops.cpu.checksum import crc32
from kvtailor.ops.files import free_space, sync_folder, write_all
from kvtailor.ops.segments.packed import Packing

__all__ = ["PARTIAL", "SEGMENT", "Folder", "sweep", "SegmentFile", "deflated", "inflated"]


SEGMENT, PARTIAL = ".segment", ".partial"
_OWN = re.compile(r"[0-9]+-[0-9a-f]{16}")
_OWN_FILE = re.compile(rf"[0-9]{{8}}({re.escape(SEGMENT)}|{re.escape(PARTIAL)})")
_LOCK = "lock"


class Folder:
    """A subfolder of `root` for one cache, made at once.

    Attributes:
        path: of the subfolder.

    Raises:
        TierError: it cannot be made.
    """

    def __init__(self, root: Path):
        self.path = root / f"{os.getpid()}-{secrets.token_hex(8)}"
        try:
            root.mkdir(parents=True, exist_ok=True)
            with _alone_in(root):
                _sweep(root)
                self.path.mkdir(mode=0o700)
                lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise TierError(
                f"disk: cannot make a folder for this cache under {str(root)!r}: {error}; name another one with "
                "disk(folder=...)"
            ) from error
        self._number = 0
        self._end = weakref.finalize(self, _remove_own, self.path, lock, os.getpid())

    def __deepcopy__(self, memo: dict[int, object]) -> Folder:
        return self

    def next_file(self) -> Path:
        """A path that no file has yet."""
        self._number += 1
        return self.path / f"{self._number:08d}{SEGMENT}"


def sweep(root: Path) -> None:
    """Remove what dead processes left under a root, which need not exist. What cannot be removed stays."""
    with contextlib.suppress(OSError), _alone_in(root):
        _sweep(root)


@contextmanager
def _alone_in(root: Path) -> Iterator[None]:
    """No other process makes or removes subfolders meanwhile."""
    lock = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _sweep(root: Path) -> None:
    """Removes what dead processes left."""
    for path in root.iterdir():
        if not _OWN.fullmatch(path.name) or not path.is_dir() or path.is_symlink():
            continue
        try:
            lock = os.open(path / _LOCK, os.O_RDWR)
        except FileNotFoundError:
            _remove(path)
            continue
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            _remove(path)
        finally:
            os.close(lock)


def _remove_own(path: Path, lock: int, process: int) -> None:
    # A child that was forked has this object too, but not the folder.
    if os.getpid() == process:
        _remove(path)
        os.close(lock)


def _remove(path: Path) -> None:
    """Removes files of ours, and the folder if nothing else is in it."""
    with contextlib.suppress(OSError):
        for each in path.iterdir():
            if _OWN_FILE.fullmatch(each.name):
                each.unlink(missing_ok=True)
        (path / _LOCK).unlink(missing_ok=True)
        path.rmdir()


_MAGIC = b"KVTSEG01"
_PAGE = 4096
_Place = tuple[int, int, int, int]


class SegmentFile:
    """One such file, which is removed when the last reference to it is gone.

    Args:
        folder: where it is made.
        tensors: by name.
        about: what else the header has, JSON-able.
        deflate: tensors are made smaller without loss.

    Attributes:
        path: of the file.
        packing: where each tensor lies in what is read; without `deflate` also behind the header.
        header_bytes: in front of them.
        stored_bytes: behind the header.

    Raises:
        TierError: it cannot be written, and is not there.
    """

    def __init__(self, folder: Folder, tensors: Mapping[str, Tensor], about: object = None, *, deflate: bool = False):
        self._folder = folder
        self.path, self.packing = folder.next_file(), Packing.of(tensors)
        self._id = secrets.token_hex(16)
        self.stored_bytes = self.packing.size
        # (first byte in the run, bytes there, bytes of an element, bytes in the file) of each place that is deflated
        # by itself. The header is as long as its longest numbers make it, and is written last.
        self._places = _places(self.packing) if deflate else None
        self.header_bytes = len(self._header(about, 0))
        partial, most = self.path.with_suffix(PARTIAL), " at most" if deflate else ""
        try:
            self._checksum, self._header_checksum = self._write(partial, tensors, about)
            os.replace(partial, self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            raise TierError(
                f"disk: cannot write {str(self.path)!r}, {self.header_bytes + self.packing.size} bytes{most}: "
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
            found, written = os.fstat(file).st_size, self.header_bytes + self.stored_bytes
            if found != written:
                self._refuse(f"has {found} bytes and was written with {written}")
            self._check_header(os.pread(file, self.header_bytes, 0))
            run = torch.empty(size, dtype=torch.uint8) if buffer is None else buffer(size)
            if self._places is None:
                self._fill(file, run, 0)
                checksum, whole = crc32(run), True
            else:
                checksum, whole = self._inflate(file, run, self._places)
            _drop_from_page_cache(file)
        except OSError as error:
            self._refuse(f"cannot be read: {error.strerror}", error)
        finally:
            os.close(file)
        if checksum != self._checksum:
            self._refuse("is damaged: its tensors do not have the checksum that they were written with")
        if not whole:
            self._refuse("is damaged: its tensors cannot be inflated to what they were")
        return run

    def _fill(self, file: int, part: Tensor, offset: int) -> None:
        """Read bytes from `offset` behind the header on until a part (n,) uint8 is full."""
        view, done = part.numpy().data, 0
        while done < len(view):
            step = os.preadv(file, [view[done:]], self.header_bytes + offset + done)
            if step == 0:
                self._refuse(f"ends after {offset + done} of {self.stored_bytes} bytes of tensors")
            done += step

    def _inflate(self, file: int, run: Tensor, places: Sequence[_Place]) -> tuple[int, bool]:
        """The checksum of what was read, and whether all of it could be inflated into the run."""
        checksum, offset, whole = 0, 0, True
        for start, size, element_size, stored in places:
            piece = run[start : start + size]
            part = piece if stored == size else torch.empty(stored, dtype=torch.uint8)
            self._fill(file, part, offset)
            checksum, offset = crc32(part, checksum), offset + stored
            whole = whole and (part is piece or inflated(part, piece, element_size))
        return checksum, whole

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
        if self._places is not None:
            lengths = [stored for *_, stored in self._places]
            content |= {"deflate": {"lengths": lengths, "size": sum(lengths)}}
        text = json.dumps({**content, "about": about}).encode()
        start = _MAGIC + len(text).to_bytes(4, "little") + zlib.crc32(text).to_bytes(4, "little")
        return (start + text).ljust(-(-(len(start) + len(text)) // _PAGE) * _PAGE, b"\0")

    def _write(self, path: Path, tensors: Mapping[str, Tensor], about: object) -> tuple[int, int]:
        """The checksums of tensors and header."""
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            checksum = end = 0
            for start, piece in self.packing.pieces(tensors):
                piece = piece.cpu()
                if self._places is not None:
                    checksum, end = self._deflate(file, piece, start, checksum, end)
                    continue
                gap = bytes(start - end)
                data = piece.numpy().data
                checksum = crc32(piece, zlib.crc32(gap, checksum))
                write_all(file, memoryview(gap), self.header_bytes + end)
                write_all(file, data, self.header_bytes + start)
                end = start + len(data)
            self.stored_bytes = end
            header = self._header(about, checksum).ljust(self.header_bytes, b"\0")
            write_all(file, memoryview(header), 0)
            os.fsync(file)
            _drop_from_page_cache(file)
        finally:
            os.close(file)
        return checksum, zlib.crc32(header)

    def _deflate(self, file: int, piece: Tensor, start: int, checksum: int, end: int) -> tuple[int, int]:
        """Write a place behind `end`, and take down its length; the checksum and the end with it."""
        assert self._places is not None
        at = bisect_left(self._places, (start,))
        _, size, element_size, _ = self._places[at]
        coded = deflated(piece, element_size)
        data = piece.numpy().data if coded is None else memoryview(coded)
        self._places[at] = start, size, element_size, len(data)
        write_all(file, data, self.header_bytes + end)
        return zlib.crc32(data, checksum), end + len(data)

    def _refuse(self, found: str, error: BaseException | None = None) -> NoReturn:
        raise TierError(
            f"disk: {str(self.path)!r}, which this cache wrote, {found}; what it held is lost, so the cache must be "
            "made again from its prompt"
        ) from error


def _places(packing: Packing) -> list[_Place]:
    """Each place of a packing once, ascending, as long in the file as it is."""
    found = {
        start: (start, torch.Size(shape).numel() * dtype.itemsize, dtype.itemsize)
        for start, dtype, shape in packing.places.values()
        if torch.Size(shape).numel()
    }
    return [(start, size, element_size, size) for start, size, element_size in sorted(found.values())]


def _drop_from_page_cache(file: int) -> None:
    # Not every system has it, and where it is missing only memory is lost.
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def _unlink(path: Path, process: int) -> None:
    # A child that was forked has this object too, but not the file.
    if os.getpid() == process:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


# The fastest: of what a cache of `demo` holds, level 6 leaves 0.2 to 3.5 % less and takes 1.1 to 4.8 times as long.
_LEVEL = 1
_RAW, _MEMORY = -15, 9


def deflated(piece: Tensor, element_size: int) -> bytes | None:
    """The coded bytes of a piece (n,) uint8 on the CPU of so many bytes to an element; None: they would be no fewer."""
    coder = zlib.compressobj(_LEVEL, zlib.DEFLATED, _RAW, _MEMORY)
    data = coder.compress(_apart(piece, element_size).numpy().data) + coder.flush()
    return data if len(data) < piece.numel() else None


def inflated(data: Tensor, piece: Tensor, element_size: int) -> bool:
    """Fill a piece (n,) uint8 with what `deflated` had coded as `data` (k,) uint8; False: that are no such bytes."""
    coder = zlib.decompressobj(_RAW)
    try:
        found = coder.decompress(data.numpy().data, piece.numel())
        # What is left may be the end mark alone, which gives nothing more.
        more = coder.decompress(coder.unconsumed_tail, 1)
    except zlib.error:
        return False
    if more or len(found) != piece.numel() or not coder.eof or coder.unused_data:
        return False
    planes = numpy.frombuffer(found, numpy.uint8).reshape(element_size, -1)
    numpy.copyto(piece.numpy().reshape(-1, element_size), planes.T)
    return True


def _apart(piece: Tensor, element_size: int) -> Tensor:
    """The bytes with the first ones of all elements before all second ones."""
    return piece if element_size == 1 else piece.view(-1, element_size).t().contiguous().view(-1)
