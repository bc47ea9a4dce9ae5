"""`kvtailor report`: all pages of a run again, from its records alone."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["command", "write"]


@click.command(short_help="Pages of a run: HTML, Markdown, CSV, LaTeX.")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--to", type=click.Path(file_okay=False, path_type=Path), help="Where to write.  [FOLDER]")
def command(folder: Path, to: Path | None) -> None:
    """Write report.html, report.md, rows.csv and table.tex from the records that `kvtailor bench --out` left in FOLDER.

    No model is loaded and nothing is measured: whatever a page shows is in the records.
    """
    for path in write(folder, to or folder):
        click.echo(path)


def write(folder: Path, to: Path) -> list[Path]:
    """The pages of the records in a folder; of records of the same thing, the latest.

    Raises:
        RecordError: the folder holds no records.
        Fraud: the records cannot be what they say.
    """
    from kvtailor.bench import tripwires
    from kvtailor.bench.report import summarise
    from kvtailor.bench.report.page import page
    from kvtailor.bench.report.tables import csv_text, latex, markdown
    from kvtailor.bench.schema import latest, read_records

    records = latest(read_records(folder))
    tripwires.check_records(records)
    summary = summarise(records)
    notes = "\n".join(f"- {note}" for note in summary.footnotes)
    to.mkdir(parents=True, exist_ok=True)
    texts = {
        "report.html": page(records),
        "report.md": f"**{summary.headline}**\n\n{markdown(summary.rows)}\n\n{notes}\n",
        "rows.csv": csv_text(summary.rows),
        "table.tex": latex(summary.rows) + "\n",
    }
    for name, text in texts.items():
        (to / name).write_text(text, encoding="utf-8")
    return [to / name for name in texts]
