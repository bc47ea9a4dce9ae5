"""`--help` with options and commands in lists of their own, by click's own means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

__all__ = ["GroupedCommand", "ListedGroup", "OneOfSeveral"]

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


class ListedGroup(click.Group):
    """A group whose commands are listed as a user types them, in the order of their definition.

    Args:
        list_of: the heading of the list, and the words that stand before each command's name.
    """

    def __init__(self, *args: Any, list_of: tuple[str, str], **attributes: Any):
        super().__init__(*args, **attributes)
        self._heading, self._before = list_of

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands; called by click."""
        self.write_list(formatter)

    def write_list(self, formatter: click.HelpFormatter) -> None:
        """Write the list, each command with its own short help: for this group's help, and for any other's."""
        rows = [(f"{self._before} {name}", each.get_short_help_str()) for name, each in self.commands.items()]
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(f"{self._heading}:")
            formatter.write_dl(rows, col_max=max(len(row[0]) for row in rows) + 2)


class OneOfSeveral(click.Command):
    """A command whose error lists its options where it gets another command's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            mine = [option for each in self.params for option in each.opts if option.startswith("--")]
            raise click.UsageError(
                f"{error.option_name} is not for {self.name}: {', '.join(mine)} are.", ctx
            ) from error
