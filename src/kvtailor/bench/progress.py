"""What runs and how much of it is done, on standard error; how long the rest takes only where like work was timed.

The cells of a run (one task for one plan at one point) take very different times, and so do the steps within them, so a
share of them is no share of the time: what is shown is what was counted, and the time that it has taken so far.
The time that is left is a range: of each kind of cell that is left, the steps at the pace of the fastest and of the
slowest one that this run has timed. Cells are of one kind where the task, its sizes and the way to a prompt are the
same: the first plan of a sample prefills for all others, some read their prompts themselves, and some read them twice.
Where a kind has not been timed, or documents grow, no time is said: a bound that leaves out the slow cells misleads.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

from kvtailor.bench.kinds import KINDS
from kvtailor.bench.schema import Record

if TYPE_CHECKING:
    from kvtailor.bench.contestant import Contestant
    from kvtailor.bench.runner import TaskJob
    from kvtailor.bench.tasks.contract import Task

__all__ = ["Remaining", "Watch", "Work", "bar", "paced", "watch", "works_of"]

_WIDTH = 48
_LEAST_WIDTH = 16
# Below it there is room for neither a bar nor steps.
_NARROW = 120
# Plans of which the pace must be known before a range is given.
_TIMED = 2
# Seconds between two lines on the time that is left.
_OFTEN = 30.0
# Seconds that a step takes at least that is measured and not known from before.
_NOT_MEASURED = 0.05
# Records tell their beginning to the millisecond.
_TICK = timedelta(milliseconds=1)


@dataclass(frozen=True, kw_only=True)
class Work:
    """One task of a run, for all of its plans.

    Attributes:
        alike: what its pace depends on besides the plan: its kind, and its settings that count tokens.
        even: its samples are of one size, so that some of them tell how long the others take.
        cells: records that it gives.
        steps: the most steps that it takes.
        kinds: of each cell of a sample, in their order, what its pace depends on besides; none: all are of one kind.
        idle: so many of the last cells take no time, since their plans are not there.
    """

    alike: tuple[object, ...]
    even: bool
    cells: int
    steps: int
    kinds: tuple[object, ...] = ()
    idle: int = 0

    def kind(self, cell: int) -> tuple[object, ...]:
        """Return what the pace of a cell depends on, by its number."""
        return *self.alike, self.kinds[cell % len(self.kinds)] if self.kinds else None

    def left(self, done: int) -> Counter[tuple[object, ...]]:
        """Return how many cells of each kind are left once so many are done."""
        return Counter(self.kind(cell) for cell in range(done, self.cells - self.idle))


def works_of(tasks: Sequence[Task | TaskJob], contestants: Sequence[Contestant] = ()) -> list[Work]:
    """Return the work of a run in its order; the arguments are those of `runner.plan_run`."""
    from kvtailor.bench.runner import TaskJob

    found = []
    for each in tasks:
        job = each if isinstance(each, TaskJob) else TaskJob(kind=each.name, task=each, contestants=tuple(contestants))
        sizes = KINDS[job.kind].sizes() if job.kind in KINDS and job.task is not None else ()
        values = {name: getattr(job.task, name, None) for name in sizes}
        several = any(isinstance(value, list | tuple) and len(value) > 1 for value in values.values())
        alike = (job.kind, *(f"{name}={value}" for name, value in values.items()))
        found.append(
            Work(
                alike=alike,
                even=not several,
                cells=job.cells,
                steps=job.units,
                kinds=_kinds_of(job),
                idle=len(job.absent),
            )
        )
    return found


def _kinds_of(job: TaskJob) -> tuple[object, ...]:
    """The kinds of a sample's cells; of a task whose plans take turns they come all at once."""
    if job.task is None or job.task.exclusive:
        return ()
    plans = [None] * job.task.own_cache + [each.plan for each in job.there]
    kinds = [
        None if plan is None else (plan.prompt_pass, plan.needs.mass, plan.needs.reconstruction is not None)
        for plan in plans
    ]
    return ("first", *kinds[1:]) if kinds else ()


@dataclass(kw_only=True)
class Remaining:
    """How long the rest of a run takes, from what this run has timed of the same work.

    Attributes:
        works: of the run, in its order.
        paces: seconds for a step, of each cell that was timed, by `Work.kind`.
    """

    works: Sequence[Work]
    paces: dict[tuple[object, ...], list[float]] = field(default_factory=dict)
    _at: int = 0
    _cells: int = 0
    _steps: int = 0
    _since: int = 0
    _owed: int = 0

    def step(self) -> None:
        """A step is done."""
        if self._owed:
            # The run tells the steps that a work promised and did not take once its last cell is done.
            self._owed -= 1
            return
        self._steps += 1
        self._since += 1

    def finish(self, seconds: float | None) -> None:
        """A cell of the present work is done.

        Args:
            seconds: that it took; None where that tells nothing: it was known from before, or it failed.
        """
        while self._at < len(self.works) and self._cells >= self.works[self._at].cells:
            self._begin_next()
        if self._at == len(self.works):
            return
        if seconds is not None and self._since:
            self.paces.setdefault(self.works[self._at].kind(self._cells), []).append(seconds / self._since)
        self._since = 0
        self._cells += 1
        if self._cells >= self.works[self._at].cells:
            self._begin_next()

    def words(self) -> str:
        """How long the rest takes, in words; empty where nothing is known of it."""
        low = high = 0.0
        for place, work in enumerate(self.works[self._at :]):
            done, since = (self._cells, self._since) if place == 0 else (0, 0)
            left, each = work.left(done), work.steps / max(1, work.cells)
            if not left or not each:
                continue
            if not work.even:
                return ""
            every = work.left(0)
            for kind, count in left.items():
                paces = self.paces.get(kind, [])
                if len(paces) < min(_TIMED, every[kind]):
                    return ""
                steps = count * each - (min(since, each) if kind == work.kind(done) else 0)
                low, high = low + steps * min(paces), high + steps * max(paces)
        if high < 1:
            return ""
        least, most = _time(low, up=False), _time(high, up=True)
        return f"about {least if least == most else f'{least} to {most}'} left"

    def _begin_next(self) -> None:
        self._owed = max(0, self.works[self._at].steps - self._steps)
        self._at, self._cells, self._steps = self._at + 1, 0, 0


def _time(seconds: float, *, up: bool) -> str:
    """A time in the unit that suits it, whole units, rounded up or down."""
    whole = math.ceil if up else math.floor
    if whole(seconds) < 60:
        return f"{whole(seconds)} s"
    minutes = whole(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


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
        # The count, the time and the blanks between take some 24 columns.
        room = console.width - 24 - (0 if console.width < _NARROW else 25)
        work = progress.add_task(_label(label, room), total=total)
        progress.refresh()
        yield lambda label: progress.update(work, advance=1, description=_label(label, room), refresh=not ticking)


@contextmanager
def paced(total: int, console: Console) -> Iterator[Callable[[str], None]]:
    """As `bar`, and says in whole lines how long the rest takes, without a terminal too.

    After the first step, then at most every half a minute, at the pace of the newest kind of step: steps of another
    label may be slower, and the first of each is said as well.

    Args:
        total: units that will come.
        console: where to.
    """
    done, newest, last = 0, "", -math.inf
    before = time.monotonic()
    since = before, 0
    console.print(f"{total} steps; the first will tell how long they take. Ctrl-C stops it, and writes nothing.")
    with bar(total, console) as count:

        def step(label: str) -> None:
            nonlocal done, newest, last, before, since
            now, done = time.monotonic(), done + 1
            first = label != newest
            if first:
                newest, since = label, (before, done - 1)
            before = now
            if done < total and (first or (now - last >= _OFTEN and not console.is_terminal)):
                left = (now - since[0]) / (done - since[1]) * (total - done)
                console.print(f"[{done} of {total}] {label}: {_span(left)} left at this pace", markup=False)
                last = now
            count(label)

        yield step


def _clock(seconds: float) -> str:
    """A time as minutes:seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _span(seconds: float) -> str:
    """A time in one unit."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


class Watch:
    """Shows a run of the bench: a line that stays on a terminal, and elsewhere a line for each finished cell.

    Args:
        cells: records that will come, those that were there already included.
        steps: the most steps that they take together.
        console: where to.
        progress: the line that stays.
        works: what comes, for the time that is left; none: no such time is shown.
    """

    def __init__(self, cells: int, steps: int, console: Console, progress: Progress, works: Sequence[Work] = ()):
        self._cells, self._steps, self._console, self._progress = cells, steps, console, progress
        self._done = self._stepped = 0
        self._begun = self._last = time.monotonic()
        # As records have it, so that texts compare like times.
        self._started = (datetime.now(UTC) - _TICK).isoformat(timespec="milliseconds")
        self._remaining = Remaining(works=works)
        self._hosts: dict[str, int] = {}
        self._said, self._timed = self._begun, True
        self._work = progress.add_task("starting", total=cells, counted=self._counted())

    def step(self, label: str) -> None:
        """One step within a cell is done; `label` says of what."""
        self._stepped += 1
        self._remaining.step()
        counted = self._counted()
        room = self._console.width - len(counted) - 10 - (0 if self._is_narrow else 25)
        self._progress.update(self._work, description=_label(label, room), counted=counted)
        self._say_step(label)

    def begin(self, kept: str) -> None:
        """Say what comes, before its first step.

        Args:
            kept: what becomes of records where the run is stopped.
        """
        cells = f"{self._cells} cell{'s' if self._cells != 1 else ''}"
        steps = f", {self._steps} steps at most" if self._steps else ""
        self._timed = False
        self._say(
            f"{cells}{steps}. How long they take is not known until the first step, which begins at "
            f"{datetime.now():%H:%M:%S}. Ctrl-C stops it. {kept}"
        )

    def _say_step(self, label: str) -> None:
        """Say the first step that is measured and what it took, and of long cells a line now and then."""
        now = time.monotonic()
        took = now - self._last
        if not self._timed and took >= _NOT_MEASURED:
            self._timed = True
            self._say(f"the first step took {_span(took)}: {label}")
        elif not self._console.is_terminal and now - self._said >= _OFTEN:
            most = max(self._steps, self._stepped)
            self._say(f"[step {self._stepped} of at most {most}, {_clock(now - self._begun)} so far] {label}")

    def _say(self, sentence: str) -> None:
        """Print a line that stays, in as many as its width needs; paths stay whole."""
        self._said = time.monotonic()
        lines = textwrap.fill(
            sentence, self._console.width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
        )
        self._console.print(lines, markup=False, soft_wrap=True, style="dim")

    @property
    def cells(self) -> int:
        """Records that will come."""
        return self._cells

    @property
    def done(self) -> int:
        """Cells that are done."""
        return self._done

    def finish(self, record: Record) -> None:
        """A cell is done, well or not."""
        self._done += 1
        now = time.monotonic()
        known = record.started < self._started
        timed = None if known or record.error is not None else now - self._last
        self._remaining.finish(timed)
        self._last = now
        host = record.machine.get("host")
        if host is not None:
            self._hosts[str(host)] = self._hosts.get(str(host), 0) + 1
        self._progress.update(self._work, advance=1, counted=self._counted())
        if not self._console.is_terminal:
            what = f"failed: {record.error}" if record.error is not None else "done"
            left = self._left()
            self._say(
                f"[{self._done} of {self._cells}, {_clock(now - self._begun)} so far{f', {left}' if left else ''}] "
                f"{record.task} {_where(record)}· {record.label}: {what}{f' on {host}' if host is not None else ''}"
            )

    def _counted(self) -> str:
        steps = f", {self._stepped} of at most {max(self._steps, self._stepped)} steps" if self._steps else ""
        machines = f" on {len(self._hosts)} machine{'s' if len(self._hosts) != 1 else ''}" if self._hosts else ""
        left = self._left()
        rest = f", {left}" if left else ""
        return f"{self._done} of {self._cells} cells{machines}{'' if self._is_narrow else steps}{rest}"

    @property
    def _is_narrow(self) -> bool:
        return self._console.width < _NARROW

    def _left(self) -> str:
        """How long the rest takes; of cells that machines of a cluster run side by side nothing is known."""
        return "" if self._hosts else self._remaining.words()

    def say_machines(self) -> None:
        """Tell how many records each machine of a cluster made; nothing of a run in this process alone."""
        if self._hosts:
            counts = ", ".join(f"{host}: {count}" for host, count in sorted(self._hosts.items()))
            self._console.print(f"records by machine: {counts}", style="dim", markup=False, soft_wrap=True)


@contextmanager
def watch(cells: int, steps: int, console: Console, works: Sequence[Work] = ()) -> Iterator[Watch]:
    """Gives what a run tells of its steps and cells, see `Watch`."""
    with _progress(console, TextColumn("{task.fields[counted]}")) as progress:
        yield Watch(cells, steps, console, progress, works)


def _progress(console: Console, count: ProgressColumn, *, ticking: bool = True) -> Progress:
    bars = () if console.width < _NARROW else (BarColumn(24),)
    columns = (TextColumn("{task.description}"), *bars, count, TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal, auto_refresh=ticking)


def _label(label: str, room: int) -> str:
    """A label cut or filled to the columns that are left for it."""
    width = max(_LEAST_WIDTH, min(_WIDTH, room))
    return label[:width].ljust(width)


def _where(record: Record) -> str:
    """The text and the plain numbers of a record's point, with a space behind."""
    named = (f"{name}={value}" for name, value in record.point.items() if isinstance(value, int | float | str))
    words = ", ".join(list(named)[:3])
    return f"({words}) " if words else ""
