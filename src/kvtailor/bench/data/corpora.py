"""Texts that perplexity is usually reported on, by name: WikiText-2, C4 and PG-19.

Each comes from a local folder in its original layout or from the hub, and is the same text either way:

- `wikitext2`: the test split in its raw form (no `<unk>`), its lines joined with a blank line, as the papers on
  quantized and compressed models do. Its file must be the standard one, to the byte.
- `c4`: documents of the English validation split in their order, joined with a blank line.
- `pg19`: whole books of the test split in the order of their numbers, joined with a blank line.

The longer two are cut after the first document that completes the wanted number of characters.

Licences: WikiText-2 CC BY-SA 3.0, C4 ODC-BY 1.0, PG-19 books in the public domain (Apache-2.0 as a collection).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtailor.bench.data.sources import find_files, hub_rows, read_rows, read_utf8
from kvtailor.bench.data.texts import BETWEEN, starts_of
from kvtailor.errors import KvtailorError, UnknownName

__all__ = ["CORPORA", "Corpus", "corpus"]

CORPORA: tuple[str, ...] = ("wikitext2", "c4", "pg19")
_BETWEEN = BETWEEN
# A line " = Title = "; sections have more signs on both sides.
_ARTICLE = re.compile(r"^ = [^=\n]+ = *$", re.MULTILINE)
_CHARACTERS = 4_000_000
# wiki.test.raw of wikitext-2-raw-v1.zip (Merity et al. 2016); 1,290,590 bytes, 4,358 lines.
_WIKITEXT2_BYTES = 1_290_590
_WIKITEXT2_SHA256 = "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08"
_WIKITEXT2_FOLDERS = ("wikitext2", "wikitext-2-raw-v1", "wikitext-2-raw", "wikitext/wikitext-2-raw-v1", ".")
_WIKITEXT2_FILES = ("wiki.test.raw", "test.raw.txt", "test-*.parquet")
_C4_FOLDERS = ("c4", "c4/en", "c4_en")
_C4_FILES = ("c4-validation.*.json.gz", "c4-validation.*.json", "validation*.jsonl", "test*.jsonl")
# Of files with such names anything may be in a folder of another name.
_C4_BARE_FOLDERS = ("en", ".")
_C4_BARE_FILES = _C4_FILES[:2]
_PG19_FOLDERS = ("pg19/test", "pg19", "pg19/data")
_PG19_FILES = ("[0-9]*.txt", "test-*.parquet")
# Novels that do PG-19's duty where PG-19 itself is not there; a record names them as what they are.
_BOOKS = "books_eval"


@dataclass(frozen=True)
class Corpus:
    """A text with its name.

    Attributes:
        text: the text.
        source: its name in records: that of the corpus, or of the books that do its duty.
        starts: where its documents (articles of WikiText, books) begin in it, in characters.
        origin: the folder or `hub:NAME@REVISION` it was read from, and for WikiText-2 the file's SHA-256.
    """

    text: str
    source: str
    origin: str
    starts: tuple[int, ...] = ()


def corpus(name: str, *, data: Path | None = None, characters: int | None = None) -> Corpus:
    """A text that perplexity is reported on.

    Args:
        name: one of `CORPORA`.
        data: a folder that has it, under one of its usual names; None: from the hub.
        characters: how many are wanted at least; what is complete (a line, a document, a book) stays so. None: all
            of WikiText-2, and 4 million of the others or what there is.

    Raises:
        UnknownName: there is no such corpus.
        KvtailorError: it cannot be found or read, is not the named corpus, or has fewer characters than needed.
    """
    if name not in CORPORA:
        raise UnknownName("corpus", name, CORPORA)
    if characters is not None and characters < 1:
        raise KvtailorError(f"asked for {characters} characters of {name}: ask for at least 1")
    return _READERS[name](data, characters)


def _wikitext2(data: Path | None, characters: int | None) -> Corpus:
    if data is None:
        hub = hub_rows("Salesforce/wikitext", "wikitext-2-raw-v1", "test", purpose=_purpose("wikitext2"))
        rows, origin = [_text(row, hub.origin) for row in hub.rows], hub.origin
    else:
        file = find_files(data, _WIKITEXT2_FOLDERS, _WIKITEXT2_FILES, purpose=_purpose("wikitext2"))[0]
        origin = str(file)
        if file.suffix == ".parquet":
            rows = [_text(row, origin) for row in read_rows(file)]
        else:
            lines = read_utf8(file).removesuffix("\n").split("\n")
            rows = [f"{line}\n" if line.strip() else "" for line in lines]
    # The hub's rows keep their line ends and make a line with nothing but a space an empty row.
    standard = "".join(row or " \n" for row in rows).encode()
    digest = hashlib.sha256(standard).hexdigest()
    if digest != _WIKITEXT2_SHA256:
        raise KvtailorError(
            f"asked for wikitext2 and found {origin}, which is not the raw test split of WikiText-2: {len(standard)} "
            f"bytes with SHA-256 {digest}, not {_WIKITEXT2_BYTES} bytes with {_WIKITEXT2_SHA256}: give the original "
            "file, or measure this one as a text file of its own"
        )
    text, _ = _joined("wikitext2", rows, origin, characters, characters)
    articles = tuple(found.start() for found in _ARTICLE.finditer(text))
    return Corpus(text, "wikitext2", f"{origin} sha256:{digest}", articles)


def _c4(data: Path | None, characters: int | None) -> Corpus:
    if data is None:
        hub = hub_rows("allenai/c4", "en", "validation", purpose=_purpose("c4"))
        rows, origin = hub.rows, hub.origin
    else:
        files = _c4_files(data)
        rows, origin = (row for file in files for row in read_rows(file)), _origin(files)
    documents = (_text(row, origin) for row in rows)
    text, starts = _joined("c4", documents, origin, characters, characters or _CHARACTERS)
    return Corpus(text, "c4", origin, starts)


def _pg19(data: Path | None, characters: int | None) -> Corpus:
    source = "pg19"
    if data is None:
        hub = hub_rows("emozilla/pg19", None, "test", purpose=_purpose("pg19"))
        books: Iterable[str] = (_text(row, hub.origin) for row in hub.rows)
        origin = hub.origin
    else:
        files = _books(data)
        source, origin = (_BOOKS if files[0].parent.name == _BOOKS else source), _origin(files)
        books = _texts_of(files)
    text, starts = _joined("pg19", books, origin, characters, characters or _CHARACTERS)
    return Corpus(text, source, origin, starts)


def _own(data: Path, name: str, folders: tuple[str, ...]) -> tuple[str, ...]:
    """The folders of a corpus below `data`, and `data` itself if it bears the corpus' name."""
    return (*folders, ".") if data.name.startswith(name) else folders


def _c4_files(data: Path) -> list[Path]:
    try:
        return find_files(data, _C4_BARE_FOLDERS, _C4_BARE_FILES, purpose=_purpose("c4"))
    except KvtailorError:
        return find_files(data, _own(data, "c4", _C4_FOLDERS), _C4_FILES, purpose=_purpose("c4"))


def _books(data: Path) -> list[Path]:
    own = data if data.name == _BOOKS else data / _BOOKS
    purpose = f"{_purpose('pg19')} (or {_BOOKS}/*.txt)"
    try:
        files = find_files(data, _own(data, "pg19", _PG19_FOLDERS), _PG19_FILES, purpose=purpose)
    except KvtailorError:
        files = sorted(own.glob("*.txt"))
        if not files:
            raise
    # PG-19 names its books by their numbers.
    return sorted(files, key=lambda path: (int(path.stem) if path.stem.isdigit() else 0, path.name))


def _texts_of(files: Iterable[Path]) -> Iterator[str]:
    for file in files:
        if file.suffix == ".parquet":
            yield from (_text(row, str(file)) for row in read_rows(file))
        else:
            yield read_utf8(file)


def _joined(
    name: str, parts: Iterable[str], origin: str, wanted: int | None, enough: int | None
) -> tuple[str, tuple[int, ...]]:
    """The first parts that together have `enough` characters, and where each begins; all parts where that is None."""
    found: list[str] = []
    size = -len(_BETWEEN)
    for part in parts:
        found.append(part)
        size += len(_BETWEEN) + len(part)
        if enough is not None and size >= enough:
            break
    text = _BETWEEN.join(found)
    if not text.strip():
        raise KvtailorError(f"asked for {name} and found {origin}, which has no text")
    if wanted is not None and len(text) < wanted:
        raise KvtailorError(
            f"asked for {wanted} characters of {name}, but {origin} has {len(text)}: ask for fewer, or give more of it"
        )
    return text, starts_of(found)


def _text(row: dict[str, Any], origin: str) -> str:
    text = row.get("text")
    if not isinstance(text, str):
        raise KvtailorError(f"asked for the texts in {origin}, but a row has no field 'text': it has {sorted(row)}")
    return text


def _origin(files: list[Path]) -> str:
    return str(files[0]) if len(files) == 1 else str(files[0].parent)


def _purpose(name: str) -> str:
    return f"the corpus {name!r}"


_READERS: dict[str, Callable[[Path | None, int | None], Corpus]] = {"wikitext2": _wikitext2, "c4": _c4, "pg19": _pg19}
