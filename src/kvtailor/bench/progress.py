"""What runs and how much of it is done, on standard error. Nothing here guesses when it will end.

The cells of a run (one task for one plan at one point) take very different times, and so do the steps within them, so a
share of them is no share of the time: what is shown is what was counted, and the time that it has taken so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

from kvtailor.bench.schema import Record

__all__ = ["Watch", "bar", "watch"]

_WIDTH = 48


@contextmanager
def bar(
    total: int, console: Console, label: str = "starting", *, ticking: bool = True
) -> Iterator[Callable[[str], None]]:
    """Gives the function that counts one unit of work with the label of what runs. Silent without a terminal.

    Args:
        total: units that will come.
        console: where to.
        label: until the first unit is done.
        ticking: a thread draws the time that passes; without, the line is drawn when a unit is done, and never while
            work that is timed runs.
    """
    with _progress(console, MofNCompleteColumn(), ticking=ticking) as progress:
        work = progress.add_task(_label(label), total=total)
        progress.refresh()
        yield lambda label: progress.update(work, advance=1, description=_label(label), refresh=not ticking)


class Watch:
    """Shows a run of the bench: a line that stays on a terminal, and elsewhere a line for each finished cell.

    Args:
        cells: records that will come, those that were there already included.
        steps: the most steps that they take together.
        console: where to.
        progress: the line that stays.
    """

    def __init__(self, cells: int, steps: int, console: Console, progress: Progress):
        self._cells, self._steps, self._console, self._progress = cells, steps, console, progress
        self._done = self._stepped = 0
        self._begun = time.monotonic()
        self._hosts: dict[str, int] = {}
        self._work = progress.add_task("starting", total=cells, counted=self._counted())

    def step(self, label: str) -> None:
        """One step within a cell is done; `label` says of what."""
        self._stepped += 1
        self._progress.update(self._work, description=_label(label), counted=self._counted())

    def finish(self, record: Record) -> None:
        """A cell is done, well or not."""
        self._done += 1
        self._progress.update(self._work, advance=1, counted=self._counted())
        host = record.machine.get("host")
        if host is not None:
            self._hosts[str(host)] = self._hosts.get(str(host), 0) + 1
        if not self._console.is_terminal:
            what = f"failed: {record.error}" if record.error is not None else "done"
            minutes, seconds = divmod(int(time.monotonic() - self._begun), 60)
            self._console.print(
                f"[{self._done} of {self._cells}, {minutes}:{seconds:02} so far] {record.task} {_where(record)}· "
                f"{record.label}: {what}{f' on {host}' if host is not None else ''}",
                markup=False,
                soft_wrap=True,
                style="dim",
            )

    def _counted(self) -> str:
        steps = f", {self._stepped} of at most {max(self._steps, self._stepped)} steps" if self._steps else ""
        machines = f" on {len(self._hosts)} machine{'s' if len(self._hosts) != 1 else ''}" if self._hosts else ""
        return f"{self._done} of {self._cells} cells{machines}{steps}"

    def say_machines(self) -> None:
        """Tell how many records each machine of a cluster made; nothing of a run in this process alone."""
        if self._hosts:
            counts = ", ".join(f"{host}: {count}" for host, count in sorted(self._hosts.items()))
            self._console.print(f"records by machine: {counts}", style="dim", markup=False, soft_wrap=True)


@contextmanager
def watch(cells: int, steps: int, console: Console) -> Iterator[Watch]:
    """Gives what a run tells of its steps and cells, see `Watch`."""
    with _progress(console, TextColumn("{task.fields[counted]}")) as progress:
        yield Watch(cells, steps, console, progress)


def _progress(console: Console, count: ProgressColumn, *, ticking: bool = True) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(24), count, TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal, auto_refresh=ticking)


def _label(label: str) -> str:
    return label[:_WIDTH].ljust(_WIDTH)


def _where(record: Record) -> str:
    """The text and the plain numbers of a record's point, with a space behind."""
    named = (f"{name}={value}" for name, value in record.point.items() if isinstance(value, int | float | str))
    words = ", ".join(list(named)[:3])
    return f"({words}) " if words else ""
