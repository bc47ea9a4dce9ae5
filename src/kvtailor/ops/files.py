"""Files, read and written in one way: only regular files are read, and a file is written whole or not at all.

A file is written beside its place as `.kvtailor-PROCESS-RANDOM.partial`, synced and renamed, so that a full disk, a
killed process or a link at its name leaves whole what was there before. The writer holds a lock on the partial file. A
lock ends with its process, so a partial file whose lock is free is a leftover: the next writing in the same folder
removes it.

What kvtailor writes and reads again carries a checksum: a JSON object as its last entry (`seal_json`), TOML as its last
line (`seal_toml`), tensors in the head of their file (`ops/tensor_file.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtailor.errors import FileError

__all__ = [
    "FileContent",
    "append_line",
    "file_within",
    "free_space",
    "make_folder",
    "open_regular",
    "partial_beside",
    "read_bytes",
    "read_file",
    "read_text",
    "read_toml",
    "remove_leftovers",
    "safetensors_metadata",
    "seal_json",
    "seal_toml",
    "sync_folder",
    "unseal_json",
    "unseal_toml",
    "write_all",
    "write_whole",
]

_PARTIAL = re.compile(r"\.kvtailor-[0-9]+-[0-9a-f]{16}\.partial")
_JSON_SEAL = re.compile(r', "checksum": "([0-9a-f]{16})"\}$')
_TOML_SEAL = re.compile(r"^# checksum: ([0-9a-f]{16})\n\Z", re.MULTILINE)
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


@dataclass(frozen=True, kw_only=True)
class FileContent:
    """What a file held when it was read.

    Attributes:
        name: its name, without its folders.
        data: its bytes.
        hash: their sha256, for `Method.content_hash`.
    """

    name: str
    data: bytes
    hash: str


def open_regular(path: str | os.PathLike[str]) -> int:
    """Open a regular file to read it; return its descriptor, which the caller closes.

    Raises:
        FileError: it is a pipe, which would be waited for without an end, a device, a socket or a folder.
        OSError: it is not there, or cannot be opened.
    """
    # Without waiting: a pipe that nobody writes to opens at once, and is seen for what it is.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(file).st_mode
        if not stat.S_ISREG(mode):
            kind = next((name for test, name in _KINDS if test(mode)), "something else")
            raise FileError(
                f"{str(path)!r} is {kind} and no regular file: write what it holds to a file, and name that"
            )
    except BaseException:
        os.close(file)
        raise
    return file


def file_within(folder: str | os.PathLike[str], name: str) -> Path | None:
    """Return the path of a regular file that a folder has itself; None: nothing has that name there.

    A link to a file of the same folder is one too, and so is what the hub's cache has: in
    `snapshots/REVISION/` a link to a file of `blobs/` beside it.

    Raises:
        FileError: it is a link to somewhere else, or to nothing, or no regular file.
    """
    where = Path(folder)
    path = where / name
    if not os.path.lexists(path):
        return None
    if path.is_symlink():
        home, target = Path(os.path.realpath(where)), Path(os.path.realpath(path))
        blobs = [each.parent.parent / "blobs" for each in (home, *home.parents) if each.parent.name == "snapshots"]
        if target.parent not in (home, *blobs) or not target.exists():
            raise FileError(
                f"{str(path)!r} is a link to {str(target)!r}, which is not there or is no file of that folder: put "
                "the file itself there"
            )
    os.close(open_regular(path))
    return path


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Return what a regular file holds.

    Raises:
        OSError: as `open_regular`, or it cannot be read.
    """
    with open(open_regular(path), "rb") as file:
        return file.read()


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a regular file in UTF-8, with the line breaks that it has and without a byte order mark.

    Raises:
        FileError: it is not UTF-8.
        OSError: as `read_bytes`.
    """
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(f"{str(path)!r} is no text in UTF-8: {error}") from error


def read_toml(path: str | os.PathLike[str]) -> str:
    """Return the text of a TOML file, whose checksum is compared where it has one: see `unseal_toml`.

    Raises:
        FileError: it is not as it was written, or no UTF-8.
        OSError: as `read_bytes`.
    """
    text = read_text(path).replace("\r\n", "\n")
    try:
        return unseal_toml(text)
    except ValueError as error:
        raise FileError(
            f"{str(path)!r} {error}: it is damaged, or was edited. If it was edited on purpose, take away its last line"
        ) from error


def read_file(path: str, asked: str) -> FileContent:
    """What a file holds; `~` is the user's folder, and a relative path begins at the current one.

    Args:
        path: where it is.
        asked: which argument of which method names it, such as "table: file".

    Raises:
        ValueError: it cannot be read; the sentence begins with `asked`.
    """
    place = Path(os.path.expanduser(path)).absolute()
    try:
        data = read_bytes(place)
    except FileNotFoundError as error:
        raise ValueError(f"{asked} is {path!r}, and there is no file {place}: name one that is there") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{asked} is {path!r}, which cannot be read: {error}") from error
    return FileContent(name=place.name, data=data, hash=hashlib.sha256(data).hexdigest())


def safetensors_metadata(data: bytes) -> dict[str, str]:
    """Return the texts in the head of a safetensors file, without its tensors and without a look at its checksums.

    Raises:
        ValueError: the head is no JSON object.
    """
    size = int.from_bytes(data[:8], "little")
    try:
        head = json.loads(data[8 : 8 + size])
    except RecursionError as error:
        raise ValueError("its head is nested too deeply") from error
    if not isinstance(head, dict) or not isinstance(head.get("__metadata__", {}), dict):
        raise ValueError(f"its head is a {type(head).__name__} and no JSON object with texts")
    return dict(head.get("__metadata__", {}))


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file whole or not at all; one that exists, or a link, is replaced.

    Args:
        path: of the file, in a folder that is there.
        content: bytes, or a text, which is written in UTF-8.

    Raises:
        FileError: it cannot be written; what was at `path` is as it was.
    """
    place = Path(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        with partial_beside(place) as (file, partial):
            write_all(file, memoryview(data), 0)
            os.fsync(file)
            os.replace(partial, place)
    except OSError as error:
        raise FileError(
            f"cannot write {str(place)!r}, {len(data)} bytes: {error.strerror or error}{free_space(place.parent)}. "
            "What was there before is as it was; free some space, or name another place"
        ) from error
    # The file is there. Where a system cannot sync folders, a crash of the system now may bring back the one before.
    with contextlib.suppress(OSError):
        sync_folder(place.parent)


def append_line(path: str | os.PathLike[str], line: str) -> None:
    """Write a line at the end of a file, which is made where it is not there; the line is written whole or not at all.

    Raises:
        FileError: it cannot be written, or the path is that of a link or of no regular file; the lines before it are
            as they were.
    """
    data = memoryview((line + "\n").encode("utf-8"))
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(path, flags, 0o666)
        try:
            size = os.fstat(file).st_size
            try:
                while data:
                    data = data[os.write(file, data) :]
            except BaseException:
                # Also where a run is interrupted: half a line would end the file for whoever reads it.
                os.ftruncate(file, size)
                raise
        finally:
            os.close(file)
    except OSError as error:
        raise FileError(
            f"cannot write a line of {str(path)!r}: {error.strerror or error}{free_space(Path(path).parent)}. "
            "The lines before it are there; free some space, or name another place"
        ) from error


def make_folder(path: str | os.PathLike[str]) -> None:
    """Make a folder and those above it, where they are not there.

    Raises:
        FileError: it cannot be one.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(
            f"asked to write to {str(path)!r}, which cannot be a folder: {error.strerror or error}; name another one"
        ) from error


def seal_json(text: str) -> str:
    """Return a JSON object, of at least one entry and in one line, with its checksum as its last entry."""
    return f'{text[:-1]}, "checksum": "{_checksum(text[:-1])}"}}'


def unseal_json(text: str) -> tuple[str, bool]:
    """Return a JSON object without its checksum, and whether it had one.

    One whose checksum has another form keeps it, as an entry that a reader of known entries refuses.

    Raises:
        ValueError: it is not as it was written, a clause without a full stop.
    """
    found = _JSON_SEAL.search(text)
    if found is None:
        return text, False
    if _checksum(text[: found.start()]) != found[1]:
        raise ValueError("it does not have the checksum that it was written with")
    return text[: found.start()] + "}", True


def seal_toml(text: str) -> str:
    """Return TOML with its checksum in a comment below it."""
    text = text.rstrip("\n") + "\n"
    return f"{text}# checksum: {_checksum(text)}\n"


def unseal_toml(text: str) -> str:
    """Return TOML without its checksum; one that has none, as a user writes it, as it is.

    Raises:
        ValueError: it is not as it was written, a clause without a full stop.
    """
    found = _TOML_SEAL.search(text)
    if found is None:
        return text
    if _checksum(text[: found.start()]) != found[1]:
        raise ValueError("does not have the checksum that it was written with")
    return text[: found.start()]


@contextmanager
def partial_beside(path: Path) -> Iterator[tuple[int, Path]]:
    """Give a new file in the folder of `path`, open and locked; it is gone afterwards unless it was renamed.

    Raises:
        OSError: it cannot be made.
        FileError: what is at `path` is a device, a pipe or a socket, which a rename would remove.
    """
    with contextlib.suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode) or stat.S_ISDIR(mode)):
            raise FileError(
                f"cannot write {str(path)!r}: what is there is no regular file, so nothing replaces it; name another "
                "path"
            )
    remove_leftovers(path.parent)
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


def remove_leftovers(folder: Path) -> None:
    """Remove what writers left that were killed."""
    with contextlib.suppress(OSError):
        for path in [each for each in folder.iterdir() if _PARTIAL.fullmatch(each.name)]:
            _remove_leftover(path)


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


def _checksum(text: str) -> str:
    # Half of a pair of surrogates is no UTF-8, and has a checksum even so.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _remove_leftover(path: Path) -> None:
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
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
