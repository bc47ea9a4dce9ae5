"""A saved cache of several processes: a folder with one file for each, and a list of them.

The files of a saving have names of their own, and the list (`cache.json`) is replaced last and at once. So a saving
that breaks off leaves what was there before.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtailor.errors import CacheFileError, FileError
from kvtailor.hf.model.tensor_parallel import RankHeads, broadcast_from_first, fail_together
from kvtailor.ops.files import read_text, seal_json, unseal_json, write_whole

__all__ = ["Shard", "StandIn", "save_ranks", "shards_of"]

_LIST, _FORMAT = "cache.json", "kvtailor-cache-ranks-1"
_OURS = re.compile(r"rank-[0-9]+-of-[0-9]+-[0-9a-f]{16}\.safetensors")


class StandIn(RankHeads):
    """The heads that a process had when it saved them. Nothing can be exchanged with it any more."""

    def __init__(self, rank: int, ranks: int):
        self.rank, self.ranks = rank, ranks
        self.process, self.processes, self.group = rank, ranks, None


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A file with some of the kv heads.

    Attributes:
        path: of the file.
        rank, ranks: which part of the heads it has, of how many.
        saving: what all files of one saving are called by; None for a file that is by itself.
    """

    path: Path
    rank: int
    ranks: int
    saving: str | None = None

    @property
    def mark(self) -> dict[str, object] | None:
        """What the file itself must say, under its checksum."""
        return None if self.saving is None else {"saving": self.saving, "rank": self.rank, "ranks": self.ranks}

    def check(self, found: object) -> None:
        """Raise where a file says that it is another part of a cache, or of another saving.

        Raises:
            CacheFileError: with what it is.
        """
        if found == self.mark:
            return
        if self.saving is None:
            raise CacheFileError(
                f"{str(self.path)!r} is one of several files of a saved cache ({found}): name its folder, "
                f"{str(self.path.parent)!r}"
            )
        raise CacheFileError(
            f"{str(self.path)!r} does not belong where it is: {_LIST} beside it lists it as {self.mark}, and the file "
            f"says {found}. Its folder was changed, or is another one on this machine than on that of the first process"
        )


def save_ranks(path: Path, share: RankHeads, write: Callable[[Path, dict[str, object]], None]) -> None:
    """Write a cache whose heads lie on several processes; all of them call it.

    Args:
        path: of the folder; a saved cache in it is replaced.
        share: of the processes.
        write: writes this process's part to a file, with a mark of which part it is.

    Raises:
        CacheFileError: a process cannot write, or does not see the same folder; what was there is as it was.
    """
    with fail_together(share, CacheFileError):
        if share.process == 0:
            _prepare(path)
    name = broadcast_from_first(share, secrets.token_hex(8))
    files = [f"rank-{rank}-of-{share.ranks}-{name}.safetensors" for rank in range(share.ranks)]
    mine = path / files[share.rank]
    try:
        with fail_together(share, CacheFileError):
            own = Shard(path=mine, rank=share.rank, ranks=share.ranks, saving=name)
            write(mine, own.mark or {})
        with fail_together(share, CacheFileError):
            if share.process == 0:
                missing = [each for each in files if not (path / each).is_file()]
                if missing:
                    raise CacheFileError(
                        f"asked to save one cache from {share.ranks} processes to {str(path)!r}, and the first process "
                        f"does not see what others wrote there ({', '.join(missing)}): name a folder that all of their "
                        "machines share"
                    )
                _list(path, files, name)
    except CacheFileError:
        with contextlib.suppress(OSError):
            mine.unlink(missing_ok=True)
        raise


def shards_of(path: Path) -> list[Shard]:
    """Return the files of a saved cache in the order of their heads: one, or those that a folder lists.

    Raises:
        CacheFileError: it is a folder, and no saved cache.
    """
    if not path.is_dir():
        return [Shard(path=path, rank=0, ranks=1)]
    try:
        text, sealed = unseal_json(read_text(path / _LIST))
        about = json.loads(text)
        files, ranks, saving = list(about["files"]), about["ranks"], str(about["saving"])
        if about["format"] != _FORMAT or ranks != len(files) or not all(_OURS.fullmatch(str(each)) for each in files):
            raise ValueError(f"{_LIST} lists {len(files)} files for {ranks} processes, format {about['format']!r}")
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise CacheFileError(
            f"{str(path)!r} is a folder, and no saved cache of several processes ({type(error).__name__}: {error}): "
            "name the file or the folder that cache.save was given"
        ) from error
    if not sealed:
        warnings.warn(
            f"{str(path / _LIST)!r} has no checksum: save the cache again with cache.save(path)", stacklevel=2
        )
    return [Shard(path=path / name, rank=rank, ranks=ranks, saving=saving) for rank, name in enumerate(files)]


def _prepare(path: Path) -> None:
    """Make the folder, or refuse one that holds something else."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        others = [each.name for each in path.iterdir() if each.name != _LIST and not each.name.startswith(".")]
    except OSError as error:
        raise CacheFileError(
            f"asked to save a cache whose heads lie on several processes to {str(path)!r}, which cannot be a folder "
            f"({error.strerror or error}): each process writes a file of its own, so name a folder"
        ) from error
    strange = [name for name in others if not _OURS.fullmatch(name)]
    if strange:
        raise CacheFileError(
            f"asked to save a cache to the folder {str(path)!r}, which holds other files ({', '.join(strange[:3])}): "
            "name a new folder, or that of an earlier saving"
        )


def _list(path: Path, files: list[str], saving: str) -> None:
    """Let the folder be the cache in these files, and remove those of savings before."""
    about = {"format": _FORMAT, "saving": saving, "ranks": len(files), "files": files}
    try:
        write_whole(path / _LIST, seal_json(json.dumps(about)))
    except FileError as error:
        raise CacheFileError(str(error)) from error
    for each in path.iterdir():
        if _OURS.fullmatch(each.name) and each.name not in files:
            with contextlib.suppress(OSError):
                each.unlink()
