"""The options that set what counts as no loss in a headline, the same for every command that prints one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from kvtailor.bench.measure.equivalence import Margins

__all__ = ["ABOVE_0", "margin_options", "margins_of"]

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
