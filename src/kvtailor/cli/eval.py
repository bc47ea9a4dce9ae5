"""`kvtailor eval`: lm-evaluation-harness with a model that reads its own compressed cache."""

from __future__ import annotations

import inspect
import io
from contextlib import redirect_stdout

import click

from kvtailor.cli.words.lines import columns, wrapped
from kvtailor.errors import KvtailorError

__all__ = ["command"]


@click.command(
    short_help="lm-evaluation-harness on a compressed cache.",
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def command(words: tuple[str, ...]) -> None:
    """The command line of lm_eval, which has no hook for models of others, with the model `kvtailor` registered.

    \b
    kvtailor eval --model kvtailor --tasks arc_easy,gsm8k --limit 50 \\
        --model_args "pretrained=demo,plan='snapkv @ keep=0.25'" --data FOLDER

    All options are lm_eval's own, but for --data: a folder with the tasks' data in their original layouts.
    """
    from kvtailor.bench.lm_eval.harness import main

    if words and words[0] not in ("-h", "--help"):
        main(list(words))
        return
    most = columns() or 80
    for line in f"{inspect.cleandoc(command.help or '')}\n\nThe help of lm_eval itself:\n".replace("\b\n", "").split(
        "\n"
    ):
        click.echo(wrapped(line, most))
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            main(list(words))
    except KvtailorError as error:
        said.write(str(error))
    finally:
        # Of lm_eval's own lines some are longer than it wraps them to.
        for line in said.getvalue().split("\n"):
            click.echo(wrapped(line, most))
