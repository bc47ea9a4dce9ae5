"""`--help` with options in lists of their own, by click's own means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click

__all__ = ["GroupedCommand"]

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
