"""A progress bar on standard error that says what runs and when it will end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

__all__ = ["bar"]


@contextmanager
def bar(total: int, console: Console) -> Iterator[Callable[[str], None]]:
    """Gives the function that counts one unit of work with the label of what runs. Silent where nobody watches."""
    columns = (TextColumn("{task.description}"), BarColumn(24), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        work = progress.add_task("starting", total=total)
        yield lambda label: progress.update(work, advance=1, description=label[:48].ljust(48))
