"""Tables of a micro bench, each printed when it is measured."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from kvtailor.cli.words.lines import columns, say

if TYPE_CHECKING:
    import torch

    from benchmarks.micro.tables import Bench

__all__ = ["measure_cells"]


def measure_cells(
    make: Callable[[torch.device], Bench],
    *,
    device: str,
    threads: int | None,
    threads_on_cpu: int | None = None,
) -> None:
    """Make a bench and measure its cells, each of which is printed when it is done; the last line is JSON.

    Args:
        make: of the device.
        device, threads: as given.
        threads_on_cpu: where none are given and the device is a CPU; None: as many as torch takes.
    """
    import torch
    from rich.console import Console

    from kvtailor.bench.measure.machine import describe
    from kvtailor.bench.progress import bar
    from kvtailor.hf.model.loading import check_device

    where = check_device(device)
    if threads is None and where.type == "cpu":
        threads = threads_on_cpu
    if threads is not None:
        torch.set_num_threads(threads)
    console, begun = Console(stderr=True, highlight=False), time.monotonic()
    bench = make(where)
    if not bench.cells:
        raise click.UsageError("nothing is left to measure: every list of this bench is empty.")
    # Its lines are those of a wide page; a terminal gets its words in as many lines as it needs.
    say(bench.about if columns() is None else " ".join(bench.about.split()), hang=0)
    say(bench.machine, hang=0)
    tables: dict[str, Any] = {}
    for done, cell in enumerate(bench.cells, start=1):
        place = f"{done} of {len(bench.cells)}"
        # Nothing is drawn while a sample is taken: a thread that draws would take part of its time.
        with bar(cell.samples, console, f"[{place}] {cell.name}: preparing", ticking=False) as advance:
            table = cell.measure(_labelled(advance, f"[{place}] {cell.name}: "))
        click.echo("\n".join(table.lines))
        _add(tables, table.rows)
        if not console.is_terminal:
            minutes, seconds = divmod(int(time.monotonic() - begun), 60)
            line = f"[{place}, {minutes}:{seconds:02} so far] {cell.name}: done"
            console.print(line, markup=False, soft_wrap=columns(err=True) is None, style="dim")
    told = {"machine": describe(bandwidth=False, device=where), **bench.found, "tables": tables}
    click.echo(json.dumps(told, ensure_ascii=False, allow_nan=False))


def _labelled(advance: Callable[[str], None], prefix: str) -> Callable[[str], None]:
    return lambda name: advance(prefix + name)


def _add(tables: dict[str, Any], rows: Mapping[str, Any]) -> None:
    """Puts a cell's rows beside those of the same name."""
    for name, each in rows.items():
        tables[name] = [*tables[name], *each] if name in tables else each
