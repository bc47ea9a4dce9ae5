"""What a cell of a run takes on a cluster: the table `[resources]` of a suite, and the option `--resources`.

    [resources]                # of every cell
    cpus = 2                   # processors, and threads of torch; 1 where nothing is written
    memory = "8GiB"            # of the machine, reserved; none where nothing is written
    gpus = 1                   # accelerators; 1 where the model is on one, else none
    [resources.default]        # the same, where a table is wanted: beside [resources.memory], which is a task's
    [resources.speed]          # of the cells of one task of `bench.kinds`, where they differ
    cpus = 8

A task that times or weighs has a machine to itself besides: no file has to ask for that. A run without a cluster has
all of its process, and reads none of this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvtailor.bench.kinds import KINDS
from kvtailor.cluster import Resources
from kvtailor.errors import ArgumentError, shown, suggest
from kvtailor.ops.sizes import bytes_of

__all__ = ["DEFAULT", "CellResources", "read_resources", "resources_of_line"]


DEFAULT = "default"
_NAMES = ("cpus", "gpus", "memory")


@dataclass(frozen=True, kw_only=True)
class CellResources:
    """What cells take, by the name of their task.

    Attributes:
        usual: names and values that were given for every cell.
        by_task: those that were given for one task's.
    """

    usual: Mapping[str, Any] = field(default_factory=dict)
    by_task: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def of(self, task: str, *, exclusive: bool, device: str = "cpu") -> Resources:
        """Return what a cell of a task takes.

        Args:
            task: its name.
            exclusive: it times or weighs.
            device: the type of the model's device; where that is an accelerator, a cell takes one if nothing is said.
        """
        needed = {"gpus": 0.0 if device == "cpu" else 1.0}
        return replace(Resources(**{**needed, **self.usual, **self.by_task.get(task, {})}), exclusive=exclusive)

    def over(self, other: CellResources) -> CellResources:
        """Return the values of both, these where both have one; a task's own goes before what is for every cell."""
        names = dict.fromkeys([*other.by_task, *self.by_task])
        below = {name: {**other.by_task.get(name, {}), **self.by_task.get(name, {})} for name in names}
        return CellResources(usual={**other.usual, **self.usual}, by_task=below)


def read_resources(raw: Mapping[str, Any], faults: list[str]) -> CellResources:
    """Return what a table `[resources]` says.

    Args:
        raw: the table, as TOML is read.
        faults: what is wrong is added here, a sentence each; the result is of no use then.
    """
    usual: dict[str, Any] = {}
    by_task: dict[str, dict[str, Any]] = {}
    for name, value in raw.items():
        # `memory` is a task, too: alone it is the resource, a table is the task's.
        if not isinstance(value, Mapping):
            _add(usual, name, value, f"resources.{name}", (*KINDS, *_NAMES), faults)
            continue
        if name not in KINDS and name != DEFAULT:
            near = suggest(name, (*KINDS, DEFAULT))
            faults.append(f"[resources.{name}] is of no task: there is no task named {name!r}{near}")
        into = usual if name == DEFAULT else by_task.setdefault(name, {})
        for inner, each in value.items():
            _add(into, inner, each, f"resources.{name}.{inner}", _NAMES, faults)
    return CellResources(usual=usual, by_task=by_task)


def resources_of_line(line: str) -> CellResources:
    """Return what `cpus=2, memory=8GiB, speed.cpus=8` says.

    Raises:
        ArgumentError: with all faults at once.
    """
    faults: list[str] = []
    table: dict[str, Any] = {}
    for part in filter(None, (each.strip() for each in line.split(","))):
        name, equals, text = (each.strip() for each in part.partition("="))
        if not equals or not text:
            faults.append(f"{shown(part)} has no value: write NAME=VALUE, such as cpus=2")
            continue
        task, dot, inner = name.partition(".")
        there, key = (table.setdefault(task, {}), inner) if dot else (table, name)
        if not isinstance(there, dict) or key in there:
            faults.append(
                f"{name} is given twice, or beside a task of that name: leave one out, or write {DEFAULT}.NAME for "
                "what is of every cell"
            )
            continue
        there[key] = _number(text)
    found = read_resources(table, faults)
    if faults:
        head = f"--resources {shown(line)} has {len(faults)} fault{'s' if len(faults) != 1 else ''}:"
        raise ArgumentError("\n  - ".join([head, *faults]))
    return found


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _add(into: dict[str, Any], name: str, value: object, where: str, known: tuple[str, ...], faults: list[str]) -> None:
    if name not in known:
        near = suggest(name, known).removesuffix("?")
        faults.append(f"there is nothing named {where}{near}: give some of {', '.join(_NAMES)}")
        return
    try:
        into[name] = _read(name, value)
    except ValueError as error:
        faults.append(f"{where} is {value!r}: {error}")


def _read(name: str, value: object) -> float:
    """The value of a resource."""
    if name not in _NAMES:
        raise ArgumentError("write a table with cpus, gpus or memory")
    if name == "memory":
        size = bytes_of(value) if isinstance(value, str) else value
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ArgumentError("give bytes, such as '8GiB'")
        return size
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ArgumentError("give a number, such as 2")
    # A cell without a processor would run beside one that times.
    if value < 0 or (name == "cpus" and value == 0) or (value > 1 and value != int(value)):
        what = "processors" if name == "cpus" else "accelerators"
        raise ArgumentError(f"give a whole number of {what}, or a part of one, such as 2 or 0.5")
    return float(value)
