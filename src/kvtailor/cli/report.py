"""`kvtailor report`: all pages of a run again, from its records alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvtailor.cli.words.lines import say
from kvtailor.cli.words.options import margin_options, margins_of
from kvtailor.errors import KvtailorError

if TYPE_CHECKING:
    from kvtailor.bench.measure.equivalence import Margins

__all__ = ["LEAVE_OUT", "command", "write"]

LEAVE_OUT = "Leave out records of the folder, such as text=novel.txt or run=NAME; may be given again."


@click.command(short_help="Pages of a run: HTML, Markdown, CSV, LaTeX.")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--to", type=click.Path(file_okay=False, path_type=Path), help="Where to write.  [FOLDER]")
@click.option("--leave-out", "without", multiple=True, metavar="FIELD=VALUE", help=LEAVE_OUT)
@margin_options
def command(folder: Path, to: Path | None, without: tuple[str, ...], margin: float, margin_points: float) -> None:
    """Write report.html, report.md, results.csv and all tables as LaTeX from what `kvtailor bench --out` left.

    No model is loaded and nothing is measured: whatever a page shows is in the records. The tables of a suite that was
    run there are made again as well.
    """
    for path in write(folder, to or folder, margins_of(margin, margin_points), without):
        click.echo(path)


def write(
    folder: Path,
    to: Path,
    margins: Margins | None = None,
    without: Sequence[str] = (),
    said: Sequence[str] = (),
) -> list[Path]:
    """The pages of the records in a folder; of records of the same thing, the latest. `report.html` comes first.

    Args:
        folder: with records.
        to: where to write.
        margins: what counts as no loss in the headline; None: the usual ones.
        without: records that are left out, see `bench.schema.leave_out`.
        said: sentences that the pages have besides, first of what the numbers rest on.

    Raises:
        RecordError: the folder holds no records, or they do not fit together.
        SuiteError: a suite's file beside them has faults.
        Fraud: the records contradict themselves or each other.
        KvtailorError: `to` cannot be written.
    """
    from kvtailor.bench import checks
    from kvtailor.bench.report.files import texts
    from kvtailor.bench.schema import (
        RecordError,
        damaged_ends,
        latest,
        leave_out,
        read_records,
        say_unchecked,
        unchecked,
    )
    from kvtailor.bench.suite.suite import read_suite
    from kvtailor.ops.files import write_whole

    every = read_records(folder)
    records = latest(leave_out(every, without))
    cut = [
        f"A damaged last line of {file.name} was left out: its record is not in these pages."
        for file in damaged_ends(folder)
    ]
    for sentence in cut:
        say(sentence, err=True)
    if not records:
        raise RecordError(f"asked to leave out all records of {folder} ({'; '.join(without)}): nothing is left to show")
    if without:
        left = len(every) - len(leave_out(every, without))
        cut.append(f"{left} of the folder's {len(every)} records were left out as asked: {'; '.join(without)}.")
    if count := unchecked(folder):
        cut.append(say_unchecked(count))
    suites = [read_suite(path) for path in sorted((folder / "suites").glob("*.toml"))]
    try:
        checks.check_records(records, stored=True)
        pages = texts(records, suites, margins, [*said, *cut])
    # Each field is of its type, but types do not ensure that a measure has its samples, or a name its number.
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, KvtailorError):
            raise
        raise RecordError(
            f"the records in {folder} do not fit together ({type(error).__name__}: {error}): one may have been edited; "
            "measure again, or report this if no one touched them"
        ) from error
    try:
        to.mkdir(parents=True, exist_ok=True)
        for name, text in pages.items():
            write_whole(to / name, text)
    except OSError as error:
        raise KvtailorError(
            f"asked to write pages to {to}, which cannot be written ({error}): give another folder with --to"
        ) from error
    return [to / name for name in pages]
