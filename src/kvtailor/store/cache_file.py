"""The file of a saved cache: see `ops/tensor_file.py`. Files of format 1, of kvtailor 0.1.0, have no checksums."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from kvtailor.errors import CacheFileError, FileError
from kvtailor.ops.tensor_file import Format, TensorFile, read_tensor_file, write_tensor_file

__all__ = ["read_cache_file", "write_cache_file"]

_FORMAT = Format(
    name="kvtailor-cache-2",
    unchecked="kvtailor-cache-1",
    what="saved cache",
    cure="make the cache again from its prompt, and save it",
)


def write_cache_file(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """Write a file whole or not at all; one that exists is replaced.

    Args:
        path: of the file.
        tensors: by name, on any device.
        about: texts about them.

    Raises:
        CacheFileError: it cannot be written; what was at `path` is as it was.
    """
    try:
        write_tensor_file(path, tensors, about, _FORMAT)
    except FileError as error:
        raise CacheFileError(str(error)) from error


def read_cache_file(path: Path) -> TensorFile:
    """Return what a file holds, with every checksum compared.

    Raises:
        CacheFileError: it is not there, is damaged, or no saved cache.
    """
    try:
        return read_tensor_file(path, _FORMAT)
    except FileError as error:
        raise CacheFileError(str(error)) from error
