"""What all files that this library writes have in common: whole writes, synced folders, and the space that is left."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["free_space", "sync_folder", "write_all"]


def write_all(file: int, data: memoryview, offset: int) -> None:
    """Write all of `data` (bytes) at `offset` of an open file, however little the system takes at once."""
    while data:
        step = os.pwrite(file, data, offset)
        data, offset = data[step:], offset + step


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def free_space(folder: Path) -> str:
    """A clause on the bytes that the file system of a folder has free now; empty where that is not known."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return ""
    return f"; its file system has {found.f_bavail * found.f_frsize} bytes free"
