"""`kvtailor report`: all pages of a run again, or of several together, from their records alone."""

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
    from kvtailor.bench.schema import Record

__all__ = ["LEAVE_OUT", "command", "write"]

LEAVE_OUT = "Leave out records of the folder, such as text=novel.txt or run=NAME; may be given again."

# Pages that not every folder of records gets.
_OF_SOME = ("leaderboard-*", "suite-*", "*.tex")


@click.command(short_help="Pages of a run: HTML, Markdown, CSV, LaTeX.")
@click.argument(
    "folders",
    nargs=-1,
    required=True,
    metavar="FOLDER...",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
@click.option("--to", type=click.Path(file_okay=False, path_type=Path), help="Where to write.  [the one FOLDER]")
@click.option("--leave-out", "without", multiple=True, metavar="FIELD=VALUE", help=LEAVE_OUT)
@margin_options
def command(
    folders: tuple[Path, ...], to: Path | None, without: tuple[str, ...], margin: float, margin_points: float
) -> None:
    """Write report.html, report.md, results.csv and all tables as LaTeX from what `kvtailor bench --out` left.

    No model is loaded and nothing is measured: whatever a page shows is in the records. The tables of a suite that was
    run there are made again as well.

    A suite's leaderboard has all models that the suite was run on, in one FOLDER or in several, beside each other. The
    other pages are of the model that was measured last.
    """
    if to is None and len(folders) > 1:
        raise click.UsageError(f"{len(folders)} folders without --to: say where their pages are to be written.")
    for path in write(folders, to or folders[0], margins_of(margin, margin_points), without):
        click.echo(path)


def write(
    folders: Sequence[Path],
    to: Path,
    margins: Margins | None = None,
    without: Sequence[str] = (),
    said: Sequence[str] = (),
) -> list[Path]:
    """The pages of the records in some folders; of records of the same thing, the latest. `report.html` comes first.

    Of several models a line on standard error says which pages have all of them.

    Args:
        folders: with records, one at least.
        to: where to write.
        margins: what counts as no loss in the headline; None: the usual ones.
        without: records that are left out, see `bench.schema.leave_out`.
        said: sentences that the pages have besides, first of what the numbers rest on.

    Raises:
        RecordError: a folder holds no records, or they do not fit together.
        SuiteError: a suite's file beside them has faults.
        Fraud: the records contradict themselves or each other.
        KvtailorError: `to` cannot be written.
    """
    from kvtailor.bench import checks
    from kvtailor.bench.choices import one_choice
    from kvtailor.bench.report.files import texts
    from kvtailor.bench.report.suite.records import SuiteRun
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

    named, whose = " and ".join(map(str, folders)), "folder's" if len(folders) == 1 else "folders'"
    read = {folder: read_records(folder) for folder in folders}
    every = [record for found in read.values() for record in found]
    left = leave_out(every, without)
    records, choices = one_choice(latest(left))
    cut = [
        f"A damaged last line of {file.name} was left out: its record is not in these pages."
        for folder in folders
        for file in damaged_ends(folder)
    ]
    cut += choices
    for sentence in cut:
        say(sentence, err=True)
    if not records:
        raise RecordError(f"asked to leave out all records of {named} ({'; '.join(without)}): nothing is left to show")
    if without:
        count = len(every) - len(left)
        cut.append(f"{count} of the {whose} {len(every)} records were left out as asked: {'; '.join(without)}.")
    if count := sum(map(unchecked, folders)):
        cut.append(say_unchecked(count))
    kept = set(map(id, left))
    runs = [
        SuiteRun(suite=read_suite(path), records=latest(r for r in found if id(r) in kept), folder=str(folder))
        for folder, found in read.items()
        for path in sorted((folder / "suites").glob("*.toml"))
    ]
    try:
        checks.check_records(records, stored=True)
        pages = texts(records, runs, margins, [*said, *cut])
    # Each field is of its type, but types do not ensure that a measure has its samples, or a name its number.
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, KvtailorError):
            raise
        raise RecordError(
            f"the records in {named} do not fit together ({type(error).__name__}: {error}): one may have been edited; "
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
    if old := sorted({each.name for form in _OF_SOME for each in to.glob(form)} - pages.keys()):
        say(f"{to} also has {', '.join(old)}, of records or suites that are not among these", err=True)
    _say_of_which(records, [name for name in pages if name.startswith("leaderboard-") and name.endswith(".html")])
    return [to / name for name in pages]


def _say_of_which(records: Sequence[Record], leaderboards: Sequence[str]) -> None:
    """Say which model the pages are of, where there are several."""
    models = dict.fromkeys(record.model for record in records)
    if len(models) > 1:
        last = max(records, key=lambda record: record.started).model
        has = "has all that its suite was" if len(leaderboards) == 1 else "have all that their suites were"
        more = f"; {' and '.join(leaderboards)} {has} run on" if leaderboards else ""
        say(f"report.html and its tables are of {last}, the last measured of {len(models)} models{more}", err=True)
