"""`kvtailor export`: the nearest setting of another engine to a plan, what it lacks, and what was measured of both."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from kvtailor.cli.words.lines import say
from kvtailor.cli.words.plan import read_plan

__all__ = ["command"]


@click.command(short_help="Write a plan as the nearest setting of another engine.")
@click.argument("engine")
@click.argument("plan", nargs=-1, required=True)
@click.option("--layers", type=click.IntRange(1), help="How many the plan compresses.  [as many as its codec names]")
@click.option(
    "--records",
    type=click.Path(exists=True, path_type=Path),
    help="Records of one model: what the plan and the setting's neighbour were measured to lose.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line of standard output.")
def command(engine: str, plan: tuple[str, ...], layers: int | None, records: Path | None, as_json: bool) -> None:
    """Write PLAN, a line or a TOML file, as the nearest setting of ENGINE.

    Engines: vllm, sglang, tensorrt-llm, llama.cpp, transformers.

    \b
    kvtailor export vllm fitted/fitted.toml
    kvtailor export llama.cpp "kivi(key_bits=8, value_bits=4)"

    No engine runs a plan of kvtailor. What the setting lacks is said, and its loss where --records has measured it.
    """
    from kvtailor.bench.schema import read_records
    from kvtailor.fitting.engines import measured_losses, setting_of

    parsed = read_plan(plan)
    setting = setting_of(parsed, engine, layers)
    losses = {} if records is None else measured_losses(parsed, setting, read_records(records))
    say(setting.setting or f"{setting.engine} has no setting that comes near: serve with its uncompressed cache.")
    if setting.lacks:
        say(f"{setting.engine}: {setting.lacks}")
    near = f"kvtailor's {setting.neighbour}, a neighbour of the setting and not {setting.engine}'s own arithmetic"
    whose = {"plan": "the plan", "neighbour": near}
    for what, loss in losses.items():
        if what == "neighbour" and setting.neighbour is None:
            say("loss of the setting: not known, since it was not run and no plan of kvtailor stands beside it")
        elif loss is None:
            say(f"loss of {whose[what]}: not measured in {records}")
        else:
            between = "" if loss.low is None else f" ({loss.low:+.4f} to {loss.high:+.4f})"
            say(f"loss of {whose[what]}: {loss.value:+.4f} nats a token{between}, {loss.count} windows")
    if records is None:
        say("What either loses is not known here: give --records.")
    say(f"Options as of {setting.engine} {setting.version} ({setting.source}); none was run on a GPU.")
    if as_json:
        found = {what: None if loss is None else asdict(loss) for what, loss in losses.items()}
        click.echo(json.dumps({"plan": str(parsed), **asdict(setting), "losses": found}, ensure_ascii=False))
