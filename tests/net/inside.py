"""What the net reads of the package by names that are not public. A change that renames them changes this file alone.

`net.py compare` runs each commit with the file of its own tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["held_columns", "leaderboards", "pages", "printed"]


def held_columns(cache: Any) -> dict[int, Tensor]:
    """Return for each compressed layer (b, h, seen) bool: this kv head holds this column."""
    found = {}
    here = torch.device("cpu")
    for layer, state in zip(cache.geometry.compressed, cache.engine.states, strict=True):
        held = torch.zeros(state.rows * state.heads, state.stored.seen, dtype=torch.bool)
        for part in state.parts():
            columns = part.layout.columns(here).expand(part.layout.lanes, -1)
            filled = part.layout.filled(here)
            filled = torch.ones_like(columns, dtype=torch.bool) if filled is None else filled
            owner = part.layout.owners(here)[:, None].expand_as(columns)
            held[owner[filled], columns[filled]] = True
        found[layer] = held.view(state.rows, state.heads, -1)
    return found


def leaderboards(folders: Sequence[Path]) -> dict[str, str]:
    """Return the leaderboards of the models of several folders beside each other; see `kvtailor report`."""
    return {name: text for name, text in pages(*folders).items() if name.startswith("leaderboard-")}


def pages(*folders: Path) -> dict[str, str]:
    """Return every page of folders of records by file name; see `kvtailor report`."""
    from kvtailor.bench.report.files import texts
    from kvtailor.bench.report.suite.records import SuiteRun
    from kvtailor.bench.schema import latest, read_records
    from kvtailor.bench.suite.suite import read_suite

    records = {folder: latest(read_records(folder)) for folder in folders}
    runs = [
        SuiteRun(suite=read_suite(path), records=records[folder], folder=folder.name)
        for folder in folders
        for path in sorted((folder / "suites").glob("*.toml"))
    ]
    return texts(latest(each for found in records.values() for each in found), runs)


def printed(folder: Path, width: int) -> str:
    """Return what a terminal of so many columns shows of a folder of records."""
    from io import StringIO

    from rich.console import Console

    from kvtailor.bench.report import summarise
    from kvtailor.bench.report.terminal import show
    from kvtailor.bench.schema import latest, read_records

    console = Console(file=StringIO(), width=width)
    show(summarise(latest(read_records(folder))), console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()
