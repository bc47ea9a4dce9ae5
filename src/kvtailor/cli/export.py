"""`kvtailor export`: the nearest setting of another engine to a plan, what it lacks, and what was measured of both."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvtailor.cli.words.lines import say
from kvtailor.cli.words.loss import loss_words
from kvtailor.cli.words.plan import read_plan, read_plan_and_layers
from kvtailor.errors import UnknownName

if TYPE_CHECKING:
    from kvtailor.bench.measure.statistics import Estimate

__all__ = ["command"]

_CHECKPOINT, _SCHEMA = "compressed-tensors", "modelopt"


@click.command(short_help="Write a plan as the nearest setting of another engine.")
@click.argument("engine")
@click.argument("plan", nargs=-1, required=True)
@click.option("--layers", type=click.IntRange(1), help="How many the plan compresses.  [as many as its codec names]")
@click.option(
    "--model",
    help="'demo', a folder or a hub name: numbers of its layers, where it has some that no plan compresses; for "
    "compressed-tensors the checkpoint's folder.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="compressed-tensors: the folder that the checkpoint is copied to; modelopt: the file to make.",
)
@click.option("--unread", is_flag=True, help="modelopt: write a file that no released engine reads.")
@click.option(
    "--records",
    type=click.Path(exists=True, path_type=Path),
    help="Records of one model: what the plan and the setting's neighbour were measured to lose.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line of standard output.")
def command(
    engine: str,
    plan: tuple[str, ...],
    layers: int | None,
    model: str | None,
    out: Path | None,
    unread: bool,
    records: Path | None,
    as_json: bool,
) -> None:
    """Write PLAN, a line, a TOML file or a fit's folder, as the nearest setting of ENGINE.

    Engines: vllm, sglang, tensorrt-llm, llama.cpp, transformers; compressed-tensors, which gets a copy of the
    checkpoint with calibrated scales; and modelopt, the formats of layers in a file that no released engine reads.

    \b
    kvtailor export vllm fitted     # layers to skip by their measured losses
    kvtailor export llama.cpp "kivi(key_bits=8, value_bits=4)"
    kvtailor export compressed-tensors PLAN --model FOLDER --out FOLDER

    No engine runs a plan of kvtailor. What the setting lacks is said, and its loss where --records has measured it.
    """
    if engine.lower() == _CHECKPOINT:
        _refuse({"--layers": layers is not None, "--unread": unread}, _CHECKPOINT)
        _write_checkpoint(plan, model, out, records, as_json)
        return
    if engine.lower() == _SCHEMA:
        _refuse({"--layers": layers is not None, "--records": records is not None}, _SCHEMA)
        _write_schema(plan, model, out, unread, as_json)
        return
    from kvtailor.plan.engines import ENGINES, WHO_DROPS

    engines = [*(each.name.lower() for each in ENGINES), _CHECKPOINT, _SCHEMA]
    if engine.lower() not in engines:
        raise UnknownName("engine", engine, engines)
    _refuse({"--unread": unread}, engine)
    if out is not None:
        raise click.UsageError(f"--out is for {_CHECKPOINT} and {_SCHEMA}: the settings of {engine} are printed.")
    from kvtailor.bench.recorded_losses import layers_of, losses_beside
    from kvtailor.bench.schema import read_records
    from kvtailor.plan import Plan

    if layers is not None and model is not None:
        raise click.UsageError("--layers and --model both say which layers are compressed: give one.")
    parsed, measured = read_plan_and_layers(plan)
    found = None if records is None else read_records(records)
    counted = layers_of(found) if layers is None and found is not None else layers
    setting = parsed.export(engine, layers=counted if model is None else _numbers(model), measured=measured)
    losses = None if found is None else losses_beside(parsed, setting, found)
    is_full = parsed == Plan()
    none = "needs no setting for it" if is_full else "has no setting that comes near"
    say(setting.setting or f"{setting.engine} {none}: serve with its uncompressed cache.")
    if setting.lacks:
        say(f"{setting.engine}: {setting.lacks}")
    if parsed.evicts:
        say(WHO_DROPS)
    if setting.skipping:
        say(setting.skipping)
    if losses is None:
        if not is_full:
            say("What either loses is not known here: give --records.")
    else:
        _say_loss("the plan", losses.plan, records)
        if losses.neighbour is None:
            say("loss of the setting: not known, since it was not run and no plan of kvtailor stands beside it")
        else:
            beside = f"a neighbour of the setting, which {setting.engine} itself was not run for"
            _say_loss(f"kvtailor's {losses.neighbour}, {beside}", losses.setting, records)
    say(f"Options as of {setting.engine} {setting.version} ({setting.source}); none was run on a GPU.")
    if as_json:
        told = {} if losses is None else asdict(losses)
        click.echo(json.dumps({"plan": str(parsed), **asdict(setting), "losses": told}, ensure_ascii=False))


def _say_loss(whose: str, loss: Estimate | None, records: Path | None) -> None:
    if loss is None:
        say(f"loss of {whose}: not measured in {records}")
        return
    say(f"loss of {whose}: {loss_words(loss)}")


def _write_checkpoint(
    plan: tuple[str, ...], model: str | None, out: Path | None, records: Path | None, as_json: bool
) -> None:
    """`export compressed-tensors`."""
    if model is None or out is None:
        raise click.UsageError(
            f"{_CHECKPOINT} gets a copy of a checkpoint: give --model, the folder that has it, and --out, one to make."
        )
    from kvtailor.bench.recorded_losses import recorded_loss
    from kvtailor.bench.schema import read_records
    from kvtailor.calibration.checkpoint_scales import export_scales

    parsed = read_plan(plan)
    made = export_scales(parsed, Path(model).expanduser(), out)
    loss = None if records is None else recorded_loss(parsed, read_records(records))
    say(f"{made.folder}: {len(made.names)} scales beside the weights, and their kv_cache_scheme in config.json")
    skipped = f" --kv-cache-dtype-skip-layers {' '.join(map(str, made.without))}" if made.without else ""
    say(f"vllm serve {made.folder}{skipped}")
    if parsed.encode.tail:
        say(
            f"vLLM rounds each token as it comes, so that the newest {parsed.encode.tail}, which the plan keeps whole, "
            "have no counterpart: with recent=0 it is the plan that is served."
        )
    if made.per == "head":
        say("Scales of single heads need an attention backend of vLLM that takes them; per=tensor needs none.")
    if records is None:
        say(f'what exactly these scales lose: kvtailor check "{parsed}" --model {model} --measure')
    else:
        _say_loss("the plan", loss, records)
    say("Names as vLLM and compressed-tensors 0.20.0 have them; nothing was run on a GPU.")
    if as_json:
        found = {"plan": str(parsed), "folder": str(made.folder), "tensors": made.names, "without": made.without}
        click.echo(json.dumps({**found, "loss": None if loss is None else asdict(loss)}, ensure_ascii=False))


def _refuse(given: Mapping[str, bool], engine: str) -> None:
    """Options that say nothing there."""
    idle = [name for name, is_given in given.items() if is_given]
    if idle:
        raise click.UsageError(f"{', '.join(idle)} says nothing about {engine}: leave it out.")


def _write_schema(plan: tuple[str, ...], model: str | None, out: Path | None, unread: bool, as_json: bool) -> None:
    """`export modelopt`."""
    from kvtailor.calibration.checkpoint_scales import attention_names
    from kvtailor.errors import FileError
    from kvtailor.ops.files import write_whole
    from kvtailor.plan.modelopt import FILE, SCHEMA_VERSION, SOURCE, formats_of

    if not unread:
        raise click.UsageError(
            f"No released engine reads ModelOpt's formats of layers (schema {SCHEMA_VERSION}: {SOURCE}): give --unread "
            f"to write {FILE} even so, or ask for vllm, which takes a list of layers to skip."
        )
    if model is None:
        raise click.UsageError(f"{_SCHEMA} names layers as the checkpoint does: give --model, the folder that has it.")
    parsed = read_plan(plan)
    made = formats_of(parsed, attention_names(model, _numbers(model)))
    if out is None:
        say(made.text().rstrip("\n"))
    else:
        if os.path.lexists(out):
            raise FileError(f"asked to write {out}, which is there already: give another file")
        write_whole(out, made.text())
        say(f"{out}: the formats of {len(made.formats)} layers, for {FILE} of the checkpoint")
    if made.lacks:
        say(f"ModelOpt: {made.lacks}")
    if parsed.evicts:
        from kvtailor.plan.engines import WHO_DROPS

        say(WHO_DROPS)
    say(f"No released engine reads it, and it has no scales. Schema {SCHEMA_VERSION} as of {SOURCE}.")
    if as_json:
        found = {"plan": str(parsed), "schema": SCHEMA_VERSION, **asdict(made), "file": json.loads(made.text())}
        click.echo(json.dumps(found, ensure_ascii=False))


def _numbers(model: str) -> Sequence[int]:
    """Those of the layers that plans compress."""
    from kvtailor.hf.model.config import config_of
    from kvtailor.hf.model.geometry import Geometry

    return tuple(Geometry.of(config_of(model)).compressed)
