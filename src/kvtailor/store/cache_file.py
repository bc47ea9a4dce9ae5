"""The file of a saved cache: named tensors, texts about them, and a checksum of every byte.

The file has the layout of safetensors (https://huggingface.co/docs/safetensors), so that other tools open it: the
length of the header (8 bytes, little-endian), the header as JSON, the tensors without gaps. `__metadata__` holds,
beside the caller's texts, `format`, `crc32` (8 hex digits for each tensor's bytes, in the order of the header), and
`header_sha256`, over the length and the header with zeros in the place of this digest. Files of format 1, which
kvtailor 0.1.0 wrote, have no checksums.

It is not read by the safetensors package: that maps the file into memory, where bytes can change after they were
checked, and where a file that is cut while it is in use ends the process. Nor is it written by it: a process that is
killed leaves a file there whose name could be that of a user's file.

A file is written beside its place as `.kvtailor-PROCESS-RANDOM.partial`, synced and renamed. The writer holds a lock on
it. A lock ends with its process, so a partial file whose lock is free is a leftover: the next writing or reading in the
same folder removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from kvtailor.errors import CacheFileError
from kvtailor.ops import huge_pages
from kvtailor.ops.cpu.checksum import crc32
from kvtailor.store.written import free_space, sync_folder, write_all

__all__ = ["CacheFile", "read_cache_file", "write_cache_file"]

_FORMAT, _WITHOUT_CHECKSUMS = "kvtailor-cache-2", "kvtailor-cache-1"
_DIGEST, _CHECKSUMS, _ABOUT = "header_sha256", "crc32", "__metadata__"
_NO_DIGEST = "0" * 64
_PARTIAL = re.compile(r"\.kvtailor-[0-9]+-[0-9a-f]{16}\.partial")
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class CacheFile:
    """What a file held.

    Attributes:
        tensors: by name, on the CPU, each in a storage of its own.
        about: the texts that were written with them.
        checked: every byte had the checksum that it was written with; False for a file of format 1, which has none.
    """

    tensors: Mapping[str, Tensor]
    about: Mapping[str, str]
    checked: bool


def write_cache_file(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """Write a file whole or not at all; one that exists is replaced.

    Args:
        path: of the file.
        tensors: by name, on any device.
        about: texts about them.

    Raises:
        CacheFileError: it cannot be written; what was at `path` is as it was.
    """
    # Descending element sizes keep each tensor aligned to its elements.
    ordered = sorted(tensors.items(), key=lambda each: (-each[1].element_size(), each[0]))
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in ordered}
    header = _header(ordered, about, "0" * 8 * len(ordered))
    try:
        with _partial_beside(path) as (file, partial):
            offset, checksums = len(header), ""
            for name, tensor in ordered:
                piece = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
                checksums += f"{crc32(piece):08x}"
                write_all(file, piece.numpy().data, offset)
                offset += sizes[name]
            write_all(file, memoryview(_with_digest(_header(ordered, about, checksums))), 0)
            os.fsync(file)
            os.replace(partial, path)
    except OSError as error:
        needed = len(header) + sum(sizes.values())
        raise CacheFileError(
            f"cannot write the cache to {str(path)!r}, {needed} bytes: {error.strerror or error}"
            f"{free_space(path.parent)}. Nothing of it is left, and what was there before is as it was; free some "
            "space or name another path"
        ) from error
    # The file is there. Where a system cannot sync folders, a crash of the system now may bring back the one before.
    with contextlib.suppress(OSError):
        sync_folder(path.parent)


def read_cache_file(path: Path) -> CacheFile:
    """What a file holds, with every checksum compared.

    Raises:
        CacheFileError: it is not there, is damaged, or no saved cache.
    """
    _sweep(path.parent)
    try:
        with open(path, "rb", buffering=0) as file:
            return _read(path, file.fileno())
    except OSError as error:
        raise CacheFileError(f"cannot read a cache from {str(path)!r}: {error.strerror or error}") from error


def _read(path: Path, file: int) -> CacheFile:
    size = os.fstat(file).st_size
    start = _bytes_at(file, 0, min(8, size))
    length = int.from_bytes(start, "little")
    if len(start) < 8 or not 2 <= length <= size - 8:
        _damaged(path, f"it has {size} bytes, and its header gives {length} as its own length")
    text = _bytes_at(file, 8, length)
    try:
        header = json.loads(text)
        about = dict(header.pop(_ABOUT))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        _damaged(path, f"its header cannot be read ({type(error).__name__}: {error})", error)
    checked = about.get("format") == _FORMAT
    if not checked and about.get("format") != _WITHOUT_CHECKSUMS:
        raise CacheFileError(
            f"{str(path)!r} is not a saved kvtailor cache (format {about.get('format')!r}, expected {_FORMAT!r})"
        )
    if checked and not _has_digest(start + text, about.get(_DIGEST)):
        _damaged(path, "its header does not have the checksum that it was written with")
    if not checked and (_DIGEST in about or _CHECKSUMS in about):
        _damaged(path, "its format is one without checksums, and it has some")
    try:
        digits = about[_CHECKSUMS] if checked else ""
        checksums = {name: digits[8 * i : 8 * i + 8] for i, name in enumerate(header)}
        places = _places(header, size - 8 - length)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        _damaged(path, str(error), error)
    tensors = {}
    for name, (dtype, shape, first, end) in places.items():
        data = huge_pages.empty((end - first,), torch.uint8)
        if _read_into(file, 8 + length + first, data) != end - first:
            _damaged(path, "it became shorter while it was read")
        if checked and f"{crc32(data):08x}" != checksums[name]:
            _damaged(path, f"the tensor {name!r} does not have the checksum that it was written with")
        if dtype == torch.bool and bool((data > 1).any()):
            _damaged(path, f"the tensor {name!r} holds bytes that are neither true nor false")
        tensors[name] = data.view(dtype).view(shape)
    own = {name: text for name, text in about.items() if name not in ("format", _DIGEST, _CHECKSUMS)}
    return CacheFile(tensors=tensors, about=own, checked=checked)


def _damaged(path: Path, found: str, error: BaseException | None = None) -> NoReturn:
    raise CacheFileError(
        f"the saved cache {str(path)!r} is damaged or was changed: {found}; make the cache again from its prompt, and "
        "save it"
    ) from error


def _places(header: Any, size: int) -> dict[str, tuple[torch.dtype, tuple[int, ...], int, int]]:
    """Dtype, shape, first and last byte of each tensor, ascending, which together must fill `size` bytes.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: they do not; or the header is none.
    """
    found = {}
    for name, entry in header.items():
        dtype, shape, (first, end) = _DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        if not all(type(each) is int and each >= 0 for each in (*shape, first, end)):
            raise ValueError(f"the tensor {name!r} has a shape or a place that is no number of elements or bytes")
        if math.prod(shape) * dtype.itemsize != end - first:
            raise ValueError(f"the tensor {name!r} has {end - first} bytes and the shape {shape} of {dtype}")
        found[name] = dtype, shape, first, end
    ordered = dict(sorted(found.items(), key=lambda each: each[1][2:]))
    reached = 0
    for name, (_, _, first, end) in ordered.items():
        if first != reached:
            raise ValueError(f"the tensor {name!r} begins at byte {first} and not at {reached}")
        reached = end
    if reached != size:
        raise ValueError(f"its tensors are {reached} bytes long, and {size} follow the header")
    return ordered


def _header(ordered: list[tuple[str, Tensor]], about: Mapping[str, str], checksums: str) -> bytes:
    """Length and header, with zeros for the digest; a multiple of 8 bytes, whatever the checksums are."""
    texts = {**about, "format": _FORMAT, _CHECKSUMS: checksums, _DIGEST: _NO_DIGEST}
    entries: dict[str, Any] = {_ABOUT: texts}
    first = 0
    for name, tensor in ordered:
        end = first + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [first, end]}
        first = end
    text = json.dumps(entries).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text


def _with_digest(header: bytes) -> bytes:
    name = f'"{_DIGEST}": "'.encode()
    digest = hashlib.sha256(header).hexdigest().encode()
    return header.replace(name + _NO_DIGEST.encode(), name + digest)


def _has_digest(header: bytes, digest: object) -> bool:
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        return False
    return _with_digest(header.replace(digest.encode(), _NO_DIGEST.encode())) == header


def _bytes_at(file: int, offset: int, size: int) -> bytes:
    data = torch.empty(size, dtype=torch.uint8)
    return bytes(data.numpy().data[: _read_into(file, offset, data)])


def _read_into(file: int, offset: int, data: Tensor) -> int:
    """Bytes that were read into `data` (n,) uint8: n, or fewer where the file ends."""
    view, done = data.numpy().data, 0
    while done < len(view):
        step = os.preadv(file, [view[done:]], offset + done)
        if step == 0:
            break
        done += step
    return done


@contextmanager
def _partial_beside(path: Path) -> Iterator[tuple[int, Path]]:
    """A new file in the folder of `path`, open and locked; it is gone afterwards unless it was renamed."""
    _sweep(path.parent)
    while True:
        partial = path.parent / f".kvtailor-{os.getpid()}-{secrets.token_hex(8)}.partial"
        file = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            # Where a file system has no locks a leftover stays, since it cannot be locked to be removed.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(file, partial):
                continue
            yield file, partial
            return
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            os.close(file)


def _sweep(folder: Path) -> None:
    """Remove what writers left that were killed."""
    with contextlib.suppress(OSError):
        for path in [each for each in folder.iterdir() if _PARTIAL.fullmatch(each.name)]:
            _remove_leftover(path)


def _remove_leftover(path: Path) -> None:
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, path):
                path.unlink()
        finally:
            os.close(file)


def _is_at(file: int, path: Path) -> bool:
    """Whether an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(file), os.lstat(path))
    except FileNotFoundError:
        return False
