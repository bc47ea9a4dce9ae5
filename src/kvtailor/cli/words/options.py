"""Options that several verbs have, with the same words each, and `--help` with options in lists of their own.

They are the dtypes in which a model computes and its caches hold keys and values, whether a prompt goes through the
model once for all plans, and what counts as no loss in a headline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from kvtailor.bench.measure.equivalence import Margins

__all__ = [
    "ABOVE_0",
    "CACHE_DTYPE_HELP",
    "GroupedCommand",
    "dtype_options",
    "margin_options",
    "margins_of",
    "share_option",
]

CACHE_DTYPE_HELP = (
    "Of keys and values: --dtype's, or bfloat16 or float16 under float32.  [--dtype's; under float32 the checkpoint's "
    "16 bits where the CPU has no arithmetic for them]"
)


def dtype_options(command: Any) -> Any:
    """Give a command `--dtype` and `--cache-dtype`, for `bench.subject.Subject.load`."""
    of_cache = click.option("--cache-dtype", help=CACHE_DTYPE_HELP)
    of_model = click.option("--dtype", help="float32, bfloat16 or float16; otherwise the checkpoint's own.")
    return of_model(of_cache(command))


share_option = click.option(
    "--share",
    type=click.Choice(["on", "off"]),
    default="on",
    show_default=True,
    help="Prefill a text once for all plans; off: once for each. The numbers are the same.",
)


Command = TypeVar("Command", bound=Callable[..., Any])


class _Margin(click.FloatRange):
    """A finite number above 0."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = float(super().convert(value, param, ctx))
        if math.isnan(found):
            self.fail(f"{value} is not a number: give a number above 0.", param, ctx)
        if math.isinf(found):
            self.fail(f"{value} is infinite, and every loss would be below it: give a finite number.", param, ctx)
        return found


ABOVE_0 = _Margin(min=0, min_open=True)


def margin_options(command: Command) -> Command:
    """Adds --margin and --margin-points."""
    points = click.option(
        "--margin-points",
        type=ABOVE_0,
        default=10.0,
        show_default=True,
        help="Headline: a loss of right answers must be shown to be below so many points.",
    )
    nats = click.option(
        "--margin",
        type=ABOVE_0,
        default=0.02,
        show_default=True,
        help="Headline: a loss on a text must be shown to be below so many nats per token.",
    )
    return nats(points(command))


def margins_of(nats: float, points: float) -> Margins:
    """Return the margins that the options set."""
    from kvtailor.bench.measure.equivalence import Margins

    return Margins(nats=nats, points=points)


_REST = "Further options"


class GroupedCommand(click.Command):
    """A command whose help lists its options under headings.

    Attributes:
        option_groups: names of parameters by heading, in the order of the page. An option that none of them names
            stands under "Further options", so that none is ever left out.
    """

    option_groups: Mapping[str, Sequence[str]] = {}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the headings with their options; called by click."""
        records = {
            param.name or "": record
            for param in self.get_params(ctx)
            if (record := param.get_help_record(ctx)) is not None
        }
        groups = {
            title: [records.pop(name) for name in names if name in records]
            for title, names in self.option_groups.items()
        }
        for title, rows in {**groups, _REST: list(records.values())}.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
