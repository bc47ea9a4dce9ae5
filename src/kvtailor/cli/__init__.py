"""The command line: one file per verb, each imported only when it is called.

A file of this folder that defines `command` is the verb of its name. What the user did wrong ends with one message on
standard error and exit code 2.
"""

from __future__ import annotations

import ast
import importlib
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

import click

import kvtailor
from kvtailor.cli.machine_share import share_machine
from kvtailor.cli.torchrun import mute_others, refusal
from kvtailor.cli.words.lines import columns, formatted_warning, say, wrapped
from kvtailor.errors import KvtailorError, UnknownName

__all__ = ["RefusingGroup", "Verbs", "main"]


@cache
def _verbs() -> tuple[str, ...]:
    """The files of this folder that define `command`, from their syntax trees."""
    found = []
    for path in sorted(Path(__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        if any(isinstance(node, ast.FunctionDef) and node.name == "command" for node in tree.body):
            found.append(path.stem)
    return tuple(found)


class RefusingGroup(click.Group):
    """Turns errors that were raised on purpose into messages, no line of which is longer than the terminal is wide."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            result: object = super().invoke(ctx)
            return result
        except KvtailorError as error:
            raise Refusal(str(error)) from error
        except click.UsageError as error:
            most, text = columns(err=True), f"Error: {error.format_message()}"
            if most is None or len(text) <= most:
                raise
            raise click.UsageError(wrapped(text, most).removeprefix("Error: "), error.ctx) from error
        except click.ClickException as error:
            raise Refusal(error.format_message()) from error


class Verbs(RefusingGroup):
    """Finds its verbs in this folder."""

    def main(self, args: Sequence[str] | None = None, *more: Any, **options: Any) -> Any:
        if args is None:
            # Called as the program, which has this process for itself.
            share_machine()
            mute_others()
            warnings.formatwarning = formatted_warning
        return super().main(args, *more, **options)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_verbs())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _verbs():
            return None
        command: click.Command = importlib.import_module(f"{__name__}.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in _verbs():
            raise click.UsageError(str(UnknownName("verb", args[0], _verbs())), ctx)
        if args and (sentence := refusal(args)) is not None:
            raise Refusal(sentence)
        return super().resolve_command(ctx, args)


class Refusal(click.ClickException):
    """What the user did wrong, in one message."""

    exit_code = 2

    def show(self, file: IO[str] | None = None) -> None:
        """Print it on standard error, in as many lines as the terminal needs."""
        if file is None:
            say(f"Error: {self.format_message()}", err=True)
        else:
            super().show(file)


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(kvtailor.__version__, prog_name="kvtailor")
@click.option(
    "--implementation",
    type=click.Choice(["auto", "reference", "triton"]),
    help="reference: no compiled kernels, only the plain forms that they are tested against; triton: GPU kernels too.",
)
@click.pass_context
def main(ctx: click.Context, implementation: str | None) -> None:
    """kvtailor cuts an LLM's KV cache to measure.

    \b
    kvtailor ls                              what there is to choose from
    kvtailor show "snapkv @ tokens=256"      what a plan does, before it runs
    kvtailor run --plan "snapkv @ tokens=256" --prompt-file book.txt
                                             text from a compressed cache
    kvtailor fit --memory 25% --text my.txt  the plan for your memory
    kvtailor bench                           what each plan costs and buys
    """
    if implementation is not None:
        from kvtailor.ops.dispatch import using

        ctx.with_resource(using(implementation))
