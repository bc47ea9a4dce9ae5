"""From records to rows: what every page of a report is made of. Reads records only, never a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

from kvtailor.bench.measure.equivalence import Margins
from kvtailor.bench.report.machines import machines_of
from kvtailor.bench.report.points import of_one_model
from kvtailor.bench.report.table import Number, Row, rows_of, tidy
from kvtailor.bench.report.tables.footnotes import footnotes
from kvtailor.bench.report.tables.grid import Grid
from kvtailor.bench.report.tables.quality import Measure, measures_of
from kvtailor.bench.report.tables.tables import main_grid, quality_grid, task_grids
from kvtailor.bench.report.verdict.advice import Advice, advise
from kvtailor.bench.report.verdict.verdict import headline, how_judged, judge
from kvtailor.bench.schema import Record

__all__ = ["Row", "Summary", "summarise"]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run in words and numbers.

    Attributes:
        advice: what to do, and what to type next.
        headline: one sentence: which plan, at which memory, is shown to lose less than the margins here.
        margins: what counts as no loss.
        rows: one for each plan, 'full' first.
        measures: every text, kind of document and task with the scores of all plans.
        missing: plans that this kvtailor does not have yet, each with what it lacks.
        footnotes: what a reader must know to judge the rows, whole sentences.
        machines: every machine and version behind the numbers, see `machines_of`.
        records: of the model that was measured last.
    """

    advice: Advice
    headline: str
    margins: Margins
    rows: tuple[Row, ...]
    measures: tuple[Measure, ...]
    missing: tuple[tuple[str, str], ...]
    footnotes: tuple[str, ...]
    machines: dict[str, tuple[str, ...]]
    records: tuple[Record, ...] = field(repr=False)

    def table(self) -> list[Number]:
        """Return the tidy table: every number of the run, a row each."""
        return tidy(self.records, self.measures, (row.numbers.values() for row in self.rows))

    @cached_property
    def plans(self) -> Grid:
        """The main table: one row for each plan, with what was measured."""
        return main_grid(self.rows)

    @cached_property
    def quality(self) -> Grid:
        """Every text, kind of document and task (across) for every plan (down)."""
        return quality_grid(self.measures, self.rows)

    @cached_property
    def tasks(self) -> tuple[Grid, ...]:
        """The tables of tasks in which anything was measured: a row for each plan at each point."""
        return tuple(task_grids([record for record in self.records if record.error is None], self.rows))

    def as_dict(self) -> dict[str, Any]:
        """For JSON, without the records."""
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "records"}
        words = ("advice", "margins")
        return (
            found
            | {name: asdict(found[name]) for name in words}
            | {
                "rows": [row.as_dict() for row in self.rows],
                "measures": [asdict(measure) for measure in self.measures],
            }
        )


def summarise(records: Sequence[Record], margins: Margins | None = None, left_out: Sequence[str] = ()) -> Summary:
    """The summary of the records of one run, or of a folder of runs: of the model that was measured last.

    Args:
        records: of one run, or of a folder of runs.
        margins: what counts as no loss in the headline; None: the usual ones.
        left_out: sentences on what could not be read, the first footnotes.

    Raises:
        ArgumentError: no records.
    """
    ours, others = of_one_model(records)
    rows = rows_of(ours)
    full = next((row.plan_hash for row in rows if row.is_full), None)
    measures = measures_of(ours, full)
    found = judge(rows, measures, margins)
    rule = how_judged(found)
    there = [record for record in ours if not record.missing]
    return Summary(
        advice=advise(found, ours[0].model),
        headline=headline(found),
        margins=found.margins,
        rows=tuple(rows),
        measures=tuple(measures),
        missing=tuple(dict.fromkeys((r.label, "; ".join(r.missing)) for r in ours if r.missing)),
        footnotes=(*left_out, *footnotes(there, rows, measures, others=others), *([rule] if rule else [])),
        machines=machines_of([record for record in there if record.error is None] or ours),
        records=tuple(ours),
    )
