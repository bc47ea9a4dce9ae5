"""What `kvtailor.evaluate` gives back: the records, what they come to, and how a notebook shows it."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtailor.bench.choices import one_choice
from kvtailor.bench.contestant import Contestant
from kvtailor.bench.kinds import KINDS
from kvtailor.bench.measure.equivalence import Margins
from kvtailor.bench.measure.statistics import Estimate
from kvtailor.bench.report import Row, Summary, summarise
from kvtailor.bench.report.machines import hardware_text, versions_text
from kvtailor.bench.report.points import Series, series_of
from kvtailor.bench.report.table import OWN, frame_of
from kvtailor.bench.report.tables.grid import Cell, Grid
from kvtailor.bench.report.tables.quality import difference, documents_of
from kvtailor.bench.schema import Record, latest, read_records
from kvtailor.bench.schema import leave_out as without
from kvtailor.errors import KvtailorError, UnknownName
from kvtailor.ops.files import write_whole
from kvtailor.ops.notebook_html import html_block, html_table
from kvtailor.plan import Plan

if TYPE_CHECKING:
    import pandas

__all__ = ["Evaluation"]

_COLUMNS = 80


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What plans lose and save against `full`.

    Attributes:
        records: every measurement, as `kvtailor bench` writes it; the numbers of each window or document are in
            `Record.values`.
        summary: the first sentence, the rows, the footnotes.
        out: the folder that the records are in; None where nothing was written.
    """

    records: tuple[Record, ...]
    summary: Summary
    out: Path | None = None

    @property
    def headline(self) -> str:
        """One sentence: which plan, at which memory, is shown to lose less than the margins here."""
        return self.summary.headline

    @property
    def rows(self) -> tuple[Row, ...]:
        """One for each plan, 'full' first; the model's own cache, where a task measures it, has none here."""
        return tuple(row for row in self.summary.rows if row.plan_hash != OWN)

    @property
    def errors(self) -> dict[str, tuple[str, ...]]:
        """Why numbers are missing, by plan; empty where all was measured."""
        return {row.label: row.errors for row in self.rows if row.errors}

    def row(self, plan: str | Plan) -> Row:
        """Return the row of a plan, as it was given or in any other spelling of the same plan.

        Raises:
            UnknownName: it was not measured here.
        """
        text = str(plan)
        for row in self.rows:
            if text in (row.label, row.plan):
                return row
        wanted = self._hash(text)
        for row in self.rows:
            if row.plan_hash == wanted:
                return row
        raise UnknownName("plan in this evaluation", text, [row.label for row in self.rows])

    def frame(self) -> pandas.DataFrame:
        """Return every number of the model that was measured last as one tidy table, a row each.

        The columns are those of `bench.report.table.Number`: plan, model, text, task, point (as JSON), metric, unit,
        value, low and high (the 95 % interval), n, over ("point"; "points" that a page shows together; "plan": what the
        main table has), plan_hash, and keys of the records behind it. What was not measured has no row.

        Raises:
            KvtailorError: pandas is not installed.
        """
        return frame_of(self.summary.table())

    def difference(
        self, plan: str | Plan, other: str | Plan, *, task: str | None = None, value: str | None = None
    ) -> Estimate:
        """Return the mean of `plan - other` over the samples that both have, with its 95 % interval.

        The difference is paired: sample i of both is the same window, document or example.

        Args:
            plan, other: two plans of this evaluation.
            task: whose samples; None: the first task that has some.
            value: which list of `Record.values`; None: that of the task's first metric.

        Raises:
            UnknownName: a plan, a task or a value that is not there.
            KvtailorError: the two plans have no samples in common.
        """
        ours, theirs = self.row(plan), self.row(other)
        tasks = list(dict.fromkeys(record.task for record in self.records if record.values))
        if task is not None and task not in tasks:
            raise UnknownName("task with samples in this evaluation", task, tasks)
        for name in tasks if task is None else [task]:
            both = [
                each
                for each in series_of(self.records, name)
                if ours.plan_hash in each.records and theirs.plan_hash in each.records
            ]
            if both:
                return _difference(both, ours.plan_hash, theirs.plan_hash, _value_of(name, value, both))
        raise KvtailorError(
            f"asked for the difference of {ours.label!r} and {theirs.label!r}"
            f"{f' in {task}' if task else ''}, which have no samples in common here: {_why(ours, theirs)}"
        )

    def save(self, folder: str | Path) -> Path:
        """Write the records and all pages of the report into a folder; return the path of `report.html`.

        `kvtailor report FOLDER` makes the pages again from the records, and `Evaluation.load` reads them.

        Raises:
            KvtailorError: the folder cannot be written.
        """
        from kvtailor.bench.report.files import texts

        where = Path(folder)
        try:
            where.mkdir(parents=True, exist_ok=True)
            for run in dict.fromkeys(record.run for record in self.records):
                path = where / f"records-{run}.jsonl"
                lines = "".join(record.to_line() + "\n" for record in self.records if record.run == run)
                # A run that wrote its records there itself may have written more than these.
                if not path.exists():
                    write_whole(path, lines)
            for name, text in texts(self.records, margins=self.summary.margins).items():
                write_whole(where / name, text)
        except OSError as error:
            raise KvtailorError(
                f"asked to write an evaluation to {folder}, which cannot be written ({error}): give another folder"
            ) from error
        return where / "report.html"

    @classmethod
    def load(
        cls, folder: str | Path, *, margin: float = 0.02, margin_points: float = 10.0, leave_out: Sequence[str] = ()
    ) -> Evaluation:
        """Return the evaluation of the records in a folder, of `save`, of `out=` or of `kvtailor bench --out`.

        Args:
            folder: with records.
            margin, margin_points: what counts as no loss, in nats and in points.
            leave_out: records that are left out, FIELD=VALUE each, such as "text=novel.txt".

        Raises:
            RecordError: there are none, or a line is damaged.
        """
        where = Path(folder)
        records, choices = one_choice(latest(without(read_records(where), leave_out)))
        for sentence in choices:
            warnings.warn(sentence, stacklevel=2)
        margins = Margins(nats=margin, points=margin_points)
        return cls(records=tuple(records), summary=summarise(records, margins), out=where)

    def __str__(self) -> str:
        """The sentence, the tables and the footnotes, at most 80 columns wide."""
        from rich.console import Console

        from kvtailor.bench.report.terminal import show

        file = io.StringIO()
        show(self.summary, Console(file=file, width=_COLUMNS, no_color=True, highlight=False))
        return "\n".join(line.rstrip() for line in file.getvalue().strip("\n").split("\n"))

    def __repr__(self) -> str:
        model = self.records[0].model if self.records else "nothing"
        plans, count = len(self.rows), len(self.records)
        failed = sum(record.error is not None for record in self.records)
        errors = f", {failed} without numbers" if failed else ""
        return f"Evaluation({model!r}, {plans} plans, {count} records{errors}: {self.headline!r})"

    def _repr_html_(self) -> str:
        """For notebooks: the sentence, the tables, and what a reader must know behind a line that opens."""
        parts = [_html_of(self.summary.plans)]
        grid = self.summary.quality
        if len(self.summary.measures) > 1:
            parts.append(html_block(grid.title, _html_of(grid), notes=[grid.note]))
        failed = [f"{label}: {'; '.join(why)}" for label, why in self.errors.items()]
        model = self.records[0].model if self.records else "nothing"
        machines = self.summary.machines
        where = ", ".join(filter(None, [hardware_text(machines), versions_text(machines)]))
        notes = [*failed, *self.summary.footnotes, f"{where}."]
        return html_block(f"kvtailor.evaluate: {model}", *parts, lead=self.headline, notes=notes)

    @staticmethod
    def _hash(text: str) -> str | None:
        try:
            return Contestant.named(text).hash
        except KvtailorError:
            # Not a plan at all; the caller names those that there are.
            return None


def _difference(series: Sequence[Series], ours: str, theirs: str, value: str) -> Estimate:
    sides: list[tuple[float, ...]] = []
    for plan in (ours, theirs):
        sides.append(tuple(x for each in series for x in each.records[plan].values[value]))
    if len(sides[0]) != len(sides[1]):
        raise KvtailorError(
            f"asked for the difference of two plans, which have {len(sides[0])} and {len(sides[1])} samples: they were "
            "not measured on the same ones"
        )
    # Documents are numbered apart in each record, so only one record's can be told from each other.
    documents = documents_of(series[0].records[ours]) if len(series) == 1 else ()
    hits = value == "hit"
    return difference(sides[0], sides[1], documents=documents, top=1.0 if hits else None)


def _value_of(task: str, asked: str | None, series: Sequence[Series]) -> str:
    """The list of values that a difference is of.

    Raises:
        UnknownName: no such list.
    """
    known = sorted(set.intersection(*({*r.values} for each in series for r in each.records.values())))
    declared = [each.mean_of for each in (KINDS[task].metrics or ()) if each.mean_of in known] if task in KINDS else []
    name = asked or next((each for each in declared if each is not None), known[0] if known else "")
    if name not in known:
        raise UnknownName(f"list of values of {task}", name, known)
    return name


def _why(*rows: Row) -> str:
    errors = [f"{row.label}: {error}" for row in rows for error in row.errors]
    return "; ".join(errors) or "they were measured on other texts or in other tasks"


def _html_of(grid: Grid) -> str:
    rows = [[_shown(cell) for cell in row] for row in grid.rows]
    return html_table(rows, grid.heads)


def _shown(cell: Cell) -> str | None:
    return cell.text if cell.interval is None else f"{cell.text}\n{cell.interval}"
