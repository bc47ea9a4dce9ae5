"""Tasks of the lm-evaluation-harness from a local folder: the harness's own task, with only its dataset replaced.

For each task a YAML file is written that includes the harness's own and names local files instead of a hub data set;
the harness's `--include_path` takes the folder of such files, so that its other models run on the same data as well.
The files keep their original layouts, see `bench.lm_eval.layouts`.

A file's name gives its split by its first word of train, val, valid, validation, dev, test: `test.dev.jsonl` is test,
`fewshot_dev.jsonl` is dev.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvtailor.bench.lm_eval.layouts import LocalSet, local_set
from kvtailor.errors import KvtailorError
from kvtailor.ops.files import read_text, write_whole

__all__ = ["write_task"]

_ROLES = {"train": "train", "val": "validation", "valid": "validation", "validation": "validation", "dev": "dev"}
_ROLES |= {"test": "test"}


def write_task(
    task: str, yaml: Path, config: Mapping[str, Any], data: Path, into: Path, fewshot: int | None
) -> list[str]:
    """Writes `into/TASK.yaml`, which is the task on local files, and those files. Returns notes, whole sentences.

    Args:
        task: name of one task.
        yaml: the harness's file of it.
        config: the content of that file, its includes merged in.
        data: folder that holds a folder for each data set.
        into: where to write.
        fewshot: examples before each question; None: as many as the task has.

    Raises:
        KvtailorError: files are missing, or have another layout.
    """
    layout = local_set(task, config)
    home, notes = data / layout.folder, []
    names = ("training_split", "validation_split", "test_split", "fewshot_split")
    wanted = {name: str(config[name]) for name in names if config.get(name)}
    if isinstance(sampled := config.get("fewshot_config"), Mapping) and sampled.get("split"):
        wanted["fewshot_config"] = str(sampled["split"])
    asked = wanted.get("test_split") or wanted.get("validation_split")
    files: dict[str, str] = {}
    for split in dict.fromkeys(wanted.values()):
        file = _file(home, layout.splits.get(split, (split,)))
        if file is None:
            continue
        rows, said = _rows(file, layout, task)
        notes += [note for note in said if note not in notes]
        target = into / f"{task}-{split}.jsonl"
        write_whole(target, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        files[split] = str(target)
    if asked not in files:
        stands = ", ".join(layout.splits.get(str(asked), (str(asked),)))
        raise KvtailorError(
            f"asked for the task {task!r} from {data}, which needs a file {layout.folder}/{stands}.jsonl of rows with "
            f"{layout.expects}; found {_listing(home)}"
        )
    notes += _fewshot_notes(task, config, wanted, files, fewshot, asked)
    absent = {name: None for name, split in wanted.items() if split not in files and name != "fewshot_config"}
    alias = {"task_alias": f"{task} (closed book)"} if any("closed-book" in note for note in notes) else {}
    written = {
        "include": str(yaml),
        "task": task,
        "tag": None,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files, "cache_dir": str(into / "cache")},
        **absent,
        **alias,
    }
    # JSON is YAML.
    write_whole(into / f"{task}.yaml", json.dumps(written, indent=1))
    return notes


def _fewshot_notes(
    task: str,
    config: Mapping[str, Any],
    wanted: Mapping[str, str],
    files: Mapping[str, str],
    fewshot: int | None,
    asked: str | None,
) -> list[str]:
    count = fewshot if fewshot is not None and config.get("num_fewshot") != 0 else config.get("num_fewshot") or 0
    sampled = config.get("fewshot_config")
    if not count or (isinstance(sampled, Mapping) and sampled.get("samples")):
        return []
    order = ("fewshot_split", "fewshot_config", "training_split", "validation_split")
    first = next((wanted[name] for name in order if name in wanted), None)
    taken = next((wanted[name] for name in order if wanted.get(name) in files), None)
    if taken is None or taken == asked:
        raise KvtailorError(
            f"asked for {count} examples before each question of {task!r}, which come from its split {first!r}, and "
            f"there is no file of it: add one, or ask for 0 examples"
        )
    return [] if taken == first else [f"There is no file of the split {first!r}: the examples are from {taken!r}."]


def _file(home: Path, splits: Iterable[str]) -> Path | None:
    by_split: dict[str, list[Path]] = {}
    for path in sorted(home.glob("*.jsonl")):
        words = re.split(r"[^a-z]+", path.name.lower())
        if role := next((_ROLES[word] for word in words if word in _ROLES), None):
            by_split.setdefault(role, []).append(path)
    found = next((by_split[split] for split in splits if split in by_split), [])
    if len(found) > 1:
        raise KvtailorError(
            f"asked for one split of {home.name}, found several files of it: {', '.join(path.name for path in found)}; "
            "keep one of them in the folder"
        )
    return found[0] if found else None


def _rows(file: Path, layout: LocalSet, task: str) -> tuple[list[dict[str, Any]], list[str]]:
    rows, notes = [], []
    for number, line in enumerate(read_text(file).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            made = layout.convert(row)
            note = layout.note(row)
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise KvtailorError(
                f"asked for the task {task!r} from {file}, but its line {number} is {line[:60]!r}: expected rows with "
                f"{layout.expects} ({type(error).__name__}: {error})"
            ) from error
        if made is not None:
            rows.append(made)
        if note is not None and note not in notes:
            notes.append(note)
    if not rows:
        raise KvtailorError(f"asked for the task {task!r} from {file}, which has no row of it: {layout.expects}")
    return rows, notes


def _listing(home: Path) -> str:
    if not home.is_dir():
        return f"no folder {home}"
    return ", ".join(path.name for path in sorted(home.iterdir())) or f"nothing in {home}"
