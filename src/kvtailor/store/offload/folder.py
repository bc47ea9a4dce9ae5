"""A folder that one cache's files have to themselves, and that goes when the cache goes, or the process dies.

Under the root that a plan names each cache has a subfolder named by the process and a random number, with a locked file
in it. A lock ends with its process, however that ends, so a subfolder whose lock is free is a leftover: the next cache
that is made under the same root removes it. Files of other names are never touched.

A child that was forked shares the lock: a folder stays while one of the two lives, though only its maker removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtailor.errors import TierError

__all__ = ["PARTIAL", "SEGMENT", "Folder", "sweep"]

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
