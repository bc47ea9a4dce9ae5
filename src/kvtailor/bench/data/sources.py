"""Rows of public data sets, from files in their original layouts or from the Hugging Face hub through `datasets`.

Nothing stands in for what is missing: a file, a library or a network that is not there is an error.
"""

from __future__ import annotations

import gzip
import json
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

from kvtailor.errors import KvtailorError
from kvtailor.ops.files import read_bytes

__all__ = ["HubRows", "find_files", "hub_archive", "hub_rows", "library", "read_rows", "read_utf8"]


@dataclass(frozen=True)
class HubRows:
    """Rows from the hub.

    Attributes:
        rows: one mapping for each, in the data set's order; they are read as they are needed.
        origin: `hub:NAME@REVISION`, the revision being the commit that was read.
    """

    rows: Iterator[dict[str, Any]]
    origin: str


def library(module: str, package: str, purpose: str) -> Any:
    """A module that only some tasks need.

    Args:
        module: what is imported.
        package: what `pip install` calls it.
        purpose: what it is needed for, as in "the data set X".

    Raises:
        KvtailorError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise KvtailorError(
            f"asked for {purpose}, which needs the library {package!r}, and that is not installed ({error}): "
            f"pip install {package}"
        ) from error


def hub_rows(name: str, config: str | None, split: str, *, purpose: str) -> HubRows:
    """The rows of a data set on the hub, read as a stream at the newest commit, which is recorded.

    Raises:
        KvtailorError: `datasets` is not installed, the hub cannot be reached, or it has no such data set.
    """
    datasets = library("datasets", "datasets", purpose)
    with _from_hub(name, purpose):
        revision = _revision(name, purpose)
        stream = iter(datasets.load_dataset(name, config, split=split, revision=revision, streaming=True))
        first = next(stream, None)
    if first is None:
        raise KvtailorError(f"asked for {purpose}, but {name!r} on the hub has no rows in its split {split!r}")

    def rows() -> Iterator[dict[str, Any]]:
        yield first
        with _from_hub(name, purpose):
            yield from stream

    return HubRows(rows(), f"hub:{name}@{revision}")


def hub_archive(name: str, archive: str, member: str, *, purpose: str) -> HubRows:
    """The rows of a JSON-lines file in an archive of a data set that `datasets` does not read, at its newest commit.

    `datasets` runs no loading scripts since its version 4, and some benchmarks are on the hub in no other form.

    Args:
        name: of the data set.
        archive: path of the `.zip` in it.
        member: name of the file in that.
        purpose: what it is wanted for.

    Raises:
        KvtailorError: the hub cannot be reached, or has no such archive, or that no such file.
    """
    hub = library("huggingface_hub", "huggingface_hub", purpose)
    with _from_hub(name, purpose):
        revision = _revision(name, purpose)
        path = Path(hub.hf_hub_download(name, archive, repo_type="dataset", revision=revision))
    return HubRows(read_rows(path, member), f"hub:{name}@{revision}")


def _revision(name: str, purpose: str) -> str:
    return str(library("huggingface_hub", "huggingface_hub", purpose).HfApi().dataset_info(name).sha)


@contextmanager
def _from_hub(name: str, purpose: str) -> Iterator[None]:
    try:
        yield
    except KvtailorError:
        raise
    # What hub and network raise has no common base; whatever it is, there are no rows.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise KvtailorError(
            f"asked for {purpose}, which is read from the hub as {name!r}, and that failed ({reason}): give a folder "
            "that has it in its original layout (data=), or try again with a network"
        ) from error


def find_files(
    data: Path, folders: Sequence[str], patterns: Sequence[str], *, purpose: str, usual: Sequence[str] | None = None
) -> list[Path]:
    """The files of a data set below a local folder: those of the first folder and pattern that match, by name.

    Args:
        data: the folder that was given.
        folders: names that the data set's own folder may have below it; "." is the folder itself.
        patterns: names that its files may have.
        purpose: what they are wanted for, as in "the data set X".
        usual: the patterns that an error names; None: all.

    Raises:
        KvtailorError: there are none.
    """
    if not data.is_dir():
        raise KvtailorError(f"asked for {purpose} in {data}, which is no folder: give one that has it")
    for folder in folders:
        for pattern in patterns:
            if found := sorted(path for path in (data / folder).glob(pattern) if path.is_file()):
                return found
    wanted = ", ".join(str(Path(folder) / pattern) for folder in folders for pattern in usual or patterns)
    raise KvtailorError(
        f"asked for {purpose} in {data}, which has none of {wanted}: give the folder that has it in one of these "
        "layouts, or no folder for the hub"
    )


def read_utf8(path: Path) -> str:
    """The text of a file (`.gz` is unpacked), its line ends as they are.

    Raises:
        KvtailorError: it cannot be read, or is not UTF-8.
    """
    try:
        raw = gzip.decompress(read_bytes(path)) if path.suffix == ".gz" else read_bytes(path)
        return raw.decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise KvtailorError(f"asked for the data in {path}, which cannot be read: {error}") from error


def read_rows(path: Path, member: str | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a file of JSON lines or of a `.parquet` file, in their order.

    Args:
        path: `.jsonl` or `.json`, either with `.gz`; `.parquet`; or a `.zip`.
        member: the name of the file of JSON lines in a `.zip`.

    Raises:
        KvtailorError: it cannot be read, or a line is no JSON object.
    """
    if path.suffix == ".parquet":
        parquet = library("pyarrow.parquet", "pyarrow", f"the rows of {path.name}")
        yield from parquet.read_table(path).to_pylist()
        return
    text = _from_archive(path, str(member)) if path.suffix == ".zip" else read_utf8(path)
    # Not splitlines(): strings in JSON may hold other line separators of Unicode.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        # Python itself refuses numbers of thousands of digits, and brackets that are thousands deep.
        except (ValueError, RecursionError) as error:
            raise KvtailorError(f"asked for the rows of {path}, but line {number} is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise KvtailorError(f"asked for the rows of {path}, but line {number} is no JSON object: {line[:60]!r}")
        yield row


def _from_archive(path: Path, member: str) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            inside = [name for name in archive.namelist() if PurePosixPath(name).name == member]
            if len(inside) != 1:
                raise KvtailorError(f"asked for {member} in {path}, which has {len(inside)} files of that name")
            return archive.read(inside[0]).decode("utf-8")
    except (OSError, zipfile.BadZipFile, UnicodeDecodeError) as error:
        raise KvtailorError(f"asked for the data in {path}, which cannot be read: {error}") from error
