"""Named tensors in one file, texts about them, and a checksum of every byte: saved caches and calibrations.

The file has the layout of safetensors (https://huggingface.co/docs/safetensors), so that other tools open it: the
length of the header (8 bytes, little-endian), the header as JSON, the tensors without gaps. `__metadata__` holds,
beside the caller's texts, `format`, `crc32` (8 hex digits for each tensor's bytes, in the order of the header), and
`header_sha256`, over the length and the header with zeros in the place of this digest.

It is not read by the safetensors package: that maps the file into memory, where bytes can change after they were
checked, and where a file that is cut while it is in use ends the process. Nor is it written by it: a process that is
killed leaves a file there whose name could be that of a user's file. It is written as `ops/files.py` says.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from kvtailor.errors import FileError
from kvtailor.ops import huge_pages
from kvtailor.ops.cpu.checksum import crc32
from kvtailor.ops.files import (
    free_space,
    open_regular,
    partial_beside,
    remove_leftovers,
    sync_folder,
    write_all,
)

__all__ = ["Format", "TensorFile", "read_tensor_file", "tensors_of", "write_tensor_file"]

_DIGEST, _CHECKSUMS, _ABOUT = "header_sha256", "crc32", "__metadata__"
_NO_DIGEST = "0" * 64
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
class Format:
    """One kind of such files.

    Attributes:
        name: that files have in their header.
        unchecked: the name of an earlier format, without checksums; None where there was none.
        what: a file is, as in "saved cache".
        cure: what to do about a damaged one, an imperative clause.
    """

    name: str
    unchecked: str | None
    what: str
    cure: str


@dataclass(frozen=True, kw_only=True)
class TensorFile:
    """What a file held.

    Attributes:
        tensors: by name, on the CPU, each in a storage of its own.
        about: the texts that were written with them.
        checked: every byte had the checksum that it was written with; False for a file of the format without.
    """

    tensors: Mapping[str, Tensor]
    about: Mapping[str, str]
    checked: bool


def write_tensor_file(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str], form: Format) -> None:
    """Write a file whole or not at all; one that exists is replaced.

    Args:
        path: of the file.
        tensors: by name, on any device.
        about: texts about them.
        form: of the file.

    Raises:
        FileError: it cannot be written; what was at `path` is as it was.
    """
    # Descending element sizes keep each tensor aligned to its elements.
    ordered = sorted(tensors.items(), key=lambda each: (-each[1].element_size(), each[0]))
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in ordered}
    header = _header(ordered, about, "0" * 8 * len(ordered), form)
    try:
        with partial_beside(path) as (file, partial):
            offset, checksums = len(header), ""
            for name, tensor in ordered:
                piece = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
                checksums += f"{crc32(piece):08x}"
                write_all(file, piece.numpy().data, offset)
                offset += sizes[name]
            write_all(file, memoryview(_with_digest(_header(ordered, about, checksums, form))), 0)
            os.fsync(file)
            os.replace(partial, path)
    except OSError as error:
        needed = len(header) + sum(sizes.values())
        raise FileError(
            f"cannot write the {form.what} to {str(path)!r}, {needed} bytes: {error.strerror or error}"
            f"{free_space(path.parent)}. Nothing of it is left, and what was there before is as it was; free some "
            "space or name another path"
        ) from error
    # The file is there. Where a system cannot sync folders, a crash of the system now may bring back the one before.
    with contextlib.suppress(OSError):
        sync_folder(path.parent)


def read_tensor_file(path: Path, form: Format) -> TensorFile:
    """Return what a file holds, with every checksum compared.

    Raises:
        FileError: it is not there, is no regular file, is damaged, or is of another format.
    """
    remove_leftovers(path.parent)
    try:
        file = open_regular(path)
        try:
            size = os.fstat(file).st_size
            return _read(_Source(size, lambda offset, data: _read_into(file, offset, data)), str(path), form)
        finally:
            os.close(file)
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"cannot read a {form.what} from {str(path)!r}: {error.strerror or error}") from error


def tensors_of(data: bytes, name: str, form: Format) -> TensorFile:
    """Return what the bytes of a file hold, with every checksum compared.

    Args:
        data: of the whole file.
        name: of the file, for errors.
        form: of the file.

    Raises:
        FileError: it is damaged, or of another format.
    """

    def read_into(offset: int, into: Tensor) -> int:
        part = data[offset : offset + into.numel()]
        into.numpy().data[: len(part)] = part
        return len(part)

    return _read(_Source(len(data), read_into), name, form)


@dataclass(frozen=True)
class _Source:
    """Where bytes come from: how many there are, and what reads some from an offset on into a tensor."""

    size: int
    read: Callable[[int, Tensor], int]

    def bytes_at(self, offset: int, size: int) -> bytes:
        data = torch.empty(size, dtype=torch.uint8)
        return bytes(data.numpy().data[: self.read(offset, data)])


def _read(source: _Source, path: str, form: Format) -> TensorFile:
    def damaged(found: str, error: BaseException | None = None) -> NoReturn:
        raise FileError(f"the {form.what} {path!r} is damaged or was changed: {found}; {form.cure}") from error

    size = source.size
    start = source.bytes_at(0, min(8, size))
    length = int.from_bytes(start, "little")
    if len(start) < 8 or not 2 <= length <= size - 8:
        damaged(f"it has {size} bytes, and its header gives {length} as its own length")
    text = source.bytes_at(8, length)
    try:
        header = json.loads(text)
        about = dict(header.pop(_ABOUT, {}))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        damaged(f"its header cannot be read ({type(error).__name__}: {error})", error)
    checked = about.get("format") == form.name
    if not checked and (form.unchecked is None or about.get("format") != form.unchecked):
        raise FileError(
            f"{path!r} is not a {form.what} of this kvtailor (format {about.get('format')!r}, expected {form.name!r})"
        )
    if checked and not _has_digest(start + text, about.get(_DIGEST)):
        damaged("its header does not have the checksum that it was written with")
    if not checked and (_DIGEST in about or _CHECKSUMS in about):
        damaged("its format is one without checksums, and it has some")
    try:
        digits = about[_CHECKSUMS] if checked else ""
        checksums = {name: digits[8 * i : 8 * i + 8] for i, name in enumerate(header)}
        places = _places(header, size - 8 - length)
        if not all(isinstance(each, str) for each in about.values()):
            raise TypeError("its texts are not all texts")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        damaged(str(error), error)
    tensors = {}
    for name, (dtype, shape, first, end) in places.items():
        data = huge_pages.empty((end - first,), torch.uint8)
        if source.read(8 + length + first, data) != end - first:
            damaged("it became shorter while it was read")
        if checked and f"{crc32(data):08x}" != checksums[name]:
            damaged(f"the tensor {name!r} does not have the checksum that it was written with")
        if dtype == torch.bool and bool((data > 1).any()):
            damaged(f"the tensor {name!r} holds bytes that are neither true nor false")
        tensors[name] = data.view(dtype).view(shape)
    own = {name: text for name, text in about.items() if name not in ("format", _DIGEST, _CHECKSUMS)}
    return TensorFile(tensors=tensors, about=own, checked=checked)


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


def _header(ordered: list[tuple[str, Tensor]], about: Mapping[str, str], checksums: str, form: Format) -> bytes:
    """Length and header, with zeros for the digest; a multiple of 8 bytes, whatever the checksums are."""
    texts = {**about, "format": form.name, _CHECKSUMS: checksums, _DIGEST: _NO_DIGEST}
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


def _read_into(file: int, offset: int, data: Tensor) -> int:
    """Bytes that were read into `data` (n,) uint8: n, or fewer where the file ends."""
    view, done = data.numpy().data, 0
    while done < len(view):
        step = os.preadv(file, [view[done:]], offset + done)
        if step == 0:
            break
        done += step
    return done
