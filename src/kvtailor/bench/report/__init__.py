"""From records to rows: what every page of a report is made of. Reads records only, never a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvtailor.bench.report.rows import Row, rows_of
from kvtailor.bench.report.verdict import footnotes, headline
from kvtailor.bench.schema import Record

__all__ = ["Row", "Summary", "summarise"]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run in words and numbers.

    Attributes:
        headline: one sentence: which plan, at which memory, loses nothing measurable here.
        rows: one for each plan, 'full' first.
        footnotes: what a reader must know to judge the rows, whole sentences.
        machine: see `Record.machine`.
    """

    headline: str
    rows: tuple[Row, ...]
    footnotes: tuple[str, ...]
    machine: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def summarise(records: Sequence[Record]) -> Summary:
    """The summary of the records of one run."""
    if not records:
        raise ValueError("asked for a summary of no records: run a task first")
    rows = rows_of(records)
    return Summary(
        headline=headline(rows),
        rows=tuple(rows),
        footnotes=tuple(footnotes(records, rows)),
        machine=dict(records[-1].machine),
    )
