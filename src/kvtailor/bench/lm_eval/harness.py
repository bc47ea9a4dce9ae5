"""The lm-evaluation-harness with kvtailor's model in it: its tasks, its own command line, local data.

lm_eval 0.4.13 looks for no plugins: what is not in its own package is there only after a caller has put it into its
registry. So its command line is started from here, unchanged but for two things: `--model kvtailor` is known, and
`--data FOLDER` takes the data sets of the tasks from a local folder (see `bench.lm_eval.local_data`).

    python -m kvtailor.bench.lm_eval.harness --model kvtailor --model_args "pretrained=demo,plan=snapkv @ keep=0.25" \\
        --tasks arc_easy --data FOLDER

In Python, `register()` and then `lm_eval.simple_evaluate(model="kvtailor", model_args={"pretrained": "demo",
"plan": "snapkv @ keep=0.25"}, ...)`.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvtailor.bench.lm_eval.local_data import write_task
from kvtailor.errors import ArgumentError, KvtailorError, UnknownName

__all__ = ["TASK_SEED", "load_tasks", "main", "register", "version"]

TASK_SEED = 1234
_MODEL = "kvtailor.bench.lm_eval.model:HarnessModel"


def version() -> str:
    """The installed lm_eval.

    Raises:
        KvtailorError: there is none.
    """
    try:
        import lm_eval
    except ImportError as error:
        raise KvtailorError(
            "asked for the lm-evaluation-harness, which is not installed here: pip install 'kvtailor[harness]' "
            f"({error})"
        ) from error
    return str(lm_eval.__version__)


def register() -> None:
    """Puts the model `kvtailor` into the registry of lm_eval, to be imported when it is used.

    Raises:
        KvtailorError: lm_eval is not installed.
    """
    version()
    import lm_eval.models  # noqa: F401  (fills the registry, which it leaves alone once it holds anything)
    from lm_eval.api.registry import model_registry

    if "kvtailor" not in model_registry:
        model_registry.register("kvtailor", target=_MODEL)


def load_tasks(
    task: str, *, data: Path | None = None, into: Path | None = None, fewshot: int | None = None
) -> tuple[dict[str, Any], list[str]]:
    """What `lm_eval.evaluate` takes as `task_dict`, and notes on the data.

    Args:
        task: a task or a group of the harness, or the path of a YAML file.
        data: folder of local data sets; None: those that the task names.
        into: an empty folder for what local tasks need; it must stay while they are used. Only with `data`.
        fewshot: examples before each question, where the task does not forbid it; None: as many as the task has.

    Raises:
        KvtailorError: no such task, or its data cannot be had.
    """
    version()
    from lm_eval.tasks import TaskManager

    notes: list[str] = []
    if task.endswith(".yaml"):
        if data is not None:
            raise KvtailorError(f"asked for {task} and for the data in {data}: such a file names its own data")
        manager, name = TaskManager(include_defaults=False), task
    elif data is None:
        manager, name = _all_tasks(), task
        _leaves([task], manager)
    else:
        if into is None:
            raise ArgumentError("local data needs a folder to write to")
        notes = write_tasks([task], data, into, fewshot=fewshot)
        alone = (into / f"{task}.yaml").is_file()
        manager, name = TaskManager(include_defaults=not alone, include_path=str(into)), task
    try:
        loaded: dict[str, Any] = dict(manager.load([name]))
    except (OSError, ValueError, KeyError) as error:
        raise KvtailorError(
            f"asked for the harness's task {task!r}, whose data could not be read ({type(error).__name__}: {error}): "
            "check the connection or the file, or give a folder of local data"
        ) from error
    for each in loaded["tasks"].values():
        if each.get_config("num_fewshot") is None or (fewshot is not None and each.get_config("num_fewshot") != 0):
            each.set_config(key="num_fewshot", value=fewshot or 0)
    return loaded, notes


def write_tasks(tasks: Sequence[str], data: Path, into: Path, *, fewshot: int | None = None) -> list[str]:
    """Writes the tasks (and those of groups, tags and patterns) to `into`, reading local files. Returns notes.

    Raises:
        KvtailorError: an unknown task, or data that is missing or has another layout.
    """
    manager = _all_tasks()
    notes: list[str] = []
    for name in _leaves(tasks, manager):
        entry = manager.task_index[name]
        said = write_task(name, entry.yaml_path, entry.cfg or {}, data, into, fewshot)
        notes += [note for note in said if note not in notes]
    return notes


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line of lm_eval, with `--model kvtailor` and `--data FOLDER`.

    Raises:
        KvtailorError: lm_eval or accelerate is not installed, or data cannot be had.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    ours = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    ours.add_argument("--data", type=Path)
    asked, rest = ours.parse_known_args(given)
    register()
    if importlib.util.find_spec("accelerate") is None:
        raise KvtailorError(
            "asked for the lm-evaluation-harness, which runs models of transformers by accelerate, and that is not "
            "installed here: pip install 'kvtailor[harness]'"
        )
    from lm_eval.__main__ import cli_evaluate

    with TemporaryDirectory(prefix="kvtailor-") as folder:
        if asked.data is not None:
            rest = [*rest, "--include_path", folder]
            for note in _write_asked(rest, asked.data, Path(folder)):
                print(f"kvtailor: {note}", file=sys.stderr)
        before = sys.argv
        sys.argv = ["lm_eval", *rest]
        try:
            cli_evaluate()
        except KvtailorError:
            raise
        except (OSError, ValueError) as error:
            # As `datasets` says it where it finds nothing on the disk and the hub does not answer.
            if isinstance(error, ValueError) and "find cache" not in str(error):
                raise
            said = str(error).strip().split("\n", 1)[0]
            raise KvtailorError(
                f"the harness could not read what it needs ({type(error).__name__}: {said}): the data of a task that "
                "is not on this disk comes from the hub; give --data FOLDER with it, or check the connection"
            ) from error
        finally:
            sys.argv = before


def _write_asked(rest: Sequence[str], data: Path, into: Path) -> list[str]:
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    peek.add_argument("--tasks", "-t", nargs="+", default=[])
    peek.add_argument("--num_fewshot", "-f", type=int)
    peek.add_argument("--include_path", action="append")
    seen, _ = peek.parse_known_args(rest)
    if len(seen.include_path) > 1:
        raise KvtailorError("asked for --data and --include_path: the harness takes one folder of tasks, give one")
    tasks = [name for each in seen.tasks for name in each.split(",") if name]
    if not tasks:
        raise KvtailorError("asked for --data without --tasks: name the tasks")
    return write_tasks(tasks, data, into, fewshot=seen.num_fewshot)


@functools.cache
def _all_tasks() -> Any:
    """The index of all tasks of the harness, which takes seconds to read."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _leaves(names: Sequence[str], manager: Any) -> list[str]:
    """The tasks that names, groups, tags and patterns stand for."""
    index: Mapping[str, Any] = manager.task_index
    found: dict[str, None] = {}

    def visit(name: str) -> None:
        if any(letter in name for letter in "*?["):
            matches = fnmatch.filter(index, name)
        else:
            matches = [name] if name in index else []
        if not matches:
            raise UnknownName("task of the lm-evaluation-harness", name, index)
        for each in matches:
            entry = index[each]
            members = (entry.cfg or {}).get("task")
            if entry.yaml_path is None:
                for member in sorted(entry.tags):
                    visit(member)
            elif isinstance(members, list):
                for member in members:
                    visit(member if isinstance(member, str) else member.get("task") or member.get("group"))
            else:
                found[each] = None

    for name in names:
        visit(name)
    return list(found)


if __name__ == "__main__":
    try:
        main()
    except KvtailorError as error:
        sys.exit(f"error: {error}")
