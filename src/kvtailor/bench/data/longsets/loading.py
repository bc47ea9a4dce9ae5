"""Examples of the long-context sets, from a local folder in the original layout or from the hub.

LongBench: `SUBSET.jsonl` as in its `data.zip`, with input, context, answers, all_classes and _id. ZeroSCROLLS:
`SUBSET/validation.jsonl` as in its `SUBSET.zip`, with id, input, output, query_start_index, query_end_index and
truncation_seperator (so spelled); rows with the same id are one example with several right answers. The archives need
not be unpacked, and are what is read on the hub.

Any file that `sources.read_rows` reads will do in place of those: `.jsonl` or `.json`, either with `.gz`, or
`.parquet`; with a word between, as in `SUBSET.dev.jsonl`, if it is the only one; and of LongBench in a folder of the
set, named after its split.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvtailor.bench.data.longsets.longbench import LONGBENCH
from kvtailor.bench.data.longsets.sets import Example, LongSet
from kvtailor.bench.data.longsets.zeroscrolls import ZEROSCROLLS
from kvtailor.bench.data.sources import find_files, hub_archive, read_rows
from kvtailor.errors import KvtailorError, UnknownName

__all__ = ["BENCHMARKS", "long_set", "read_examples"]

BENCHMARKS: Mapping[str, Mapping[str, LongSet]] = {"longbench": LONGBENCH, "zeroscrolls": ZEROSCROLLS}
_HUB = {"longbench": ("THUDM/LongBench", "data.zip"), "zeroscrolls": ("tau/zero_scrolls", "{0}.zip")}
_MEMBER = {"longbench": "{0}.jsonl", "zeroscrolls": "validation.jsonl"}
_FOLDERS = {
    "longbench": ("longbench", "LongBench", "longbench/data", "LongBench/data", "data", "."),
    "zeroscrolls": ("zero_scrolls", "zeroscrolls", "ZeroSCROLLS", "."),
}
_ENDS = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")


def _names(*stems: str) -> tuple[str, ...]:
    return tuple(stem + end for stem in stems for end in _ENDS)


_FILES = {
    "longbench": (
        *_names("{0}", "{0}.*", "{0}/test", "{0}/test.*", "{0}/{0}"),
        "{0}/test-*.parquet",
        "{0}-*.parquet",
        "data.zip",
        "{0}.zip",
    ),
    "zeroscrolls": (
        *_names("{0}/validation", "{0}/{0}/validation", "{0}/validation.*"),
        "{0}/validation-*.parquet",
        "{0}.zip",
    ),
}
_USUAL = {
    "longbench": ("{0}.jsonl", "{0}.dev.jsonl", "{0}/test-*.parquet", "data.zip"),
    "zeroscrolls": ("{0}/validation.jsonl", "{0}/validation-*.parquet", "{0}.zip"),
}
_LONGBENCH_FIELDS = {"input": str, "context": str, "answers": list}
_ZEROSCROLLS_FIELDS = {
    "input": str,
    "query_start_index": int,
    "query_end_index": int,
    "truncation_seperator": str,
}


def long_set(benchmark: str, subset: str) -> LongSet:
    """A set by its name.

    Raises:
        UnknownName: there is no such benchmark or set.
    """
    if benchmark not in BENCHMARKS:
        raise UnknownName("long-context benchmark", benchmark, BENCHMARKS)
    if subset not in BENCHMARKS[benchmark]:
        raise UnknownName(f"set of {benchmark}", subset, BENCHMARKS[benchmark])
    return BENCHMARKS[benchmark][subset]


def read_examples(benchmark: str, subset: str, data: Path | None) -> tuple[list[Example], str]:
    """All examples of a set in the data set's order, and where they come from (a path, or `hub:NAME@REVISION`).

    Raises:
        UnknownName: there is no such benchmark or set.
        KvtailorError: the examples cannot be found or read, or a row is no example.
    """
    long_set(benchmark, subset)
    purpose = f"the set {subset!r} of {benchmark}"
    member = _MEMBER[benchmark].format(subset)
    if data is None:
        name, archive = _HUB[benchmark]
        hub = hub_archive(name, archive.format(subset), member, purpose=purpose)
        rows, origin = hub.rows, hub.origin
    else:
        folders, patterns = ([each.format(subset) for each in names[benchmark]] for names in (_FOLDERS, _FILES))
        usual = [each.format(subset) for each in _USUAL[benchmark]]
        files = find_files(data, folders, patterns, purpose=purpose, usual=usual)
        # What hubs cut into parts is parquet with a dash; of other names each is a file of its own.
        if len(files) > 1 and not all("-" in file.name and file.suffix == ".parquet" for file in files):
            raise KvtailorError(
                f"asked for {purpose} in {data}, found several files of it: {', '.join(file.name for file in files)}; "
                "keep one of them in the folder"
            )
        rows = (row for file in files for row in read_rows(file, member))
        origin = str(files[0])
    found = _longbench(rows, origin) if benchmark == "longbench" else _zeroscrolls(rows, origin)
    if not found:
        raise KvtailorError(f"asked for {purpose}, but {origin} has no examples")
    return found, origin


def _longbench(rows: Iterable[dict[str, Any]], origin: str) -> list[Example]:
    found = []
    for number, row in enumerate(rows):
        _check(row, _LONGBENCH_FIELDS, number, origin)
        found.append(
            Example(
                name=str(row.get("_id", number)),
                fields=row,
                references=_answers(row["answers"], number, origin),
                classes=tuple(row.get("all_classes") or ()),
            )
        )
    return found


def _zeroscrolls(rows: Iterable[dict[str, Any]], origin: str) -> list[Example]:
    found: dict[str, Example] = {}
    for number, row in enumerate(rows):
        _check(row, _ZEROSCROLLS_FIELDS, number, origin)
        name = str(row.get("id", number))
        earlier = found.get(name)
        answers = _answers([row.get("output")], number, origin)
        found[name] = Example(
            name, earlier.fields if earlier else row, (*(earlier.references if earlier else ()), *answers)
        )
    return list(found.values())


def _answers(answers: list[Any], number: int, origin: str) -> tuple[str, ...]:
    if not answers or not all(isinstance(each, str) for each in answers):
        raise KvtailorError(
            f"asked for the examples in {origin}, but row {number} has no right answer (it has {answers!r}): give a "
            "split whose answers are public"
        )
    return tuple(answers)


def _check(row: Mapping[str, Any], fields: Mapping[str, type], number: int, origin: str) -> None:
    wrong = [name for name, kind in fields.items() if not isinstance(row.get(name), kind)]
    if wrong:
        raise KvtailorError(
            f"asked for the examples in {origin}, but row {number} lacks {', '.join(wrong)}, or they are of another "
            f"kind: it has {sorted(row)}"
        )
