"""`kvtailor card`: a folder to publish beside a model, with a plan and what was measured of it there."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from kvtailor.cli.words.lines import say
from kvtailor.cli.words.loss import loss_words
from kvtailor.cli.words.plan import read_plan_and_layers

__all__ = ["command"]


@click.command(short_help="Write a plan and what was measured of it as a folder to publish.")
@click.argument("plan", nargs=-1, required=True)
@click.option(
    "--records",
    required=True,
    type=click.Path(exists=True, path_type=Path),
    help="Records of the bench, or a fit's folder: of one model, with the plan and 'full'.",
)
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="The folder to write.")
def command(plan: tuple[str, ...], records: Path, out: Path) -> None:
    """Write PLAN, a line, a TOML file or a fit's folder, with what RECORDS have of it, to a folder.

    \b
    kvtailor card kivi4 --records results --out kivi4-card
    kvtailor run --model NAME --plan kivi4-card --prompt-file FILE

    The folder has plan.toml, card.json with every number, and README.md as the hub shows it: losses with intervals,
    right answers, what each layer loses where a fit has measured it, texts with their hashes, versions, and the
    nearest settings of other engines.
    """
    from kvtailor.bench.card import make_card
    from kvtailor.bench.schema import read_records

    parsed, layers = read_plan_and_layers(plan)
    of_fit = records / "records"
    made = make_card(parsed, read_records(of_fit if of_fit.is_dir() else records), layers)
    made.save(out)
    for each in made.losses:
        say(f"{each.text}: {loss_words(each.loss)}")
    if not made.layers:
        say("What each layer loses was not measured: a fit's folder in the place of PLAN has it.")
    words = shlex.join(["kvtailor", "run", "--model", made.model, "--plan", str(out), "--prompt-file", "FILE"])
    say(f"{out} has the card. To use it: {words}")
