"""`kvtailor check`: every fault of a plan, whether a model can hold it, and whether it is safe there."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvtailor.cli.words.budget import ELEMENT_SIZES, Reach, budget_notes, element_of, reachable, say_reachable
from kvtailor.cli.words.lines import kept_in, say, stopped
from kvtailor.cli.words.options import ABOVE_0, CACHE_DTYPE_HELP, GroupedCommand
from kvtailor.cli.words.plan import read_plan

if TYPE_CHECKING:
    from kvtailor.hf.model.geometry import Geometry
    from kvtailor.plan import Plan

__all__ = ["command"]


@click.command(cls=GroupedCommand, short_help="Say all faults of a plan, or measure which plans are safe on a model.")
@click.argument("plan", nargs=-1)
@click.option(
    "--model",
    help="'demo' or 'demo-draft', a folder, a GGUF file, or a hub name: also check the plan against this model.",
)
@click.option(
    "--tokens",
    type=click.IntRange(1),
    help="Length of a prompt: what the budget comes to there, and what a window compresses.  [the model's positions; "
    "384 for --measure]",
)
@click.option("--measure", is_flag=True, help="Measure on the model which plans are safe: PLAN, or every preset.")
@click.option(
    "--engine",
    help="Measure on the model what the cache types of vllm, sglang, tensorrt-llm or llama.cpp would cost it.",
)
@click.option("--text", help="--measure: a text file like your model's work.  [passages of eight books]")
@click.option("--margin", type=ABOVE_0, help="--measure: nats a token that a safe plan loses at most.  [0.01]")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="--measure: folder for records; goes on there."
)
@click.option("--again", is_flag=True, help="--measure: measure anew what --out already has.")
@click.option(
    "--workers",
    type=click.IntRange(1),
    help="--measure: so many plans at once, each in one thread. Linux, on the CPU.  [as many as threads and memory]",
)
@click.option("--dtype", help="--measure: float32, bfloat16 or float16; otherwise the checkpoint's own.")
@click.option("--cache-dtype", help=f"--measure: {CACHE_DTYPE_HELP[0].lower()}{CACHE_DTYPE_HELP[1:]}")
@click.option("--device", help="--measure: such as cpu or cuda.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line of standard output.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    plan: tuple[str, ...],
    model: str | None,
    tokens: int | None,
    measure: bool,
    engine: str | None,
    as_json: bool,
    **measured: Any,
) -> None:
    """Check PLAN, a line or a TOML file. Exit code 0: no fault; 2: faults, each a sentence on standard error.

    \b
    kvtailor check "snapkv @ keep=0.25" --model NAME
    kvtailor check --model NAME --measure     # every preset, in minutes
    kvtailor check "kivi4; k3v3" --model NAME --measure
    kvtailor check --model NAME --engine vllm

    Also reports where a budget does nothing, or leaves nothing to the score. A model's weights are not loaded, only its
    configuration. Also reports which kernels run on this machine, and why.
    With --measure every preset, or PLAN, is measured on the model, and a word says of each whether it is safe there.
    With --engine the engine's own cache types are, as plans of the same arithmetic.
    """
    if engine is not None and plan:
        raise click.UsageError("--engine measures the engine's own cache types: leave PLAN out.")
    if measure or engine is not None:
        _measure(plan, model, tokens, engine, as_json, measured)
        return
    _check_unmeasured(plan, measured)
    import torch

    from kvtailor.errors import PlanError
    from kvtailor.ops import huge_pages
    from kvtailor.ops.what_runs import explained
    from kvtailor.plan import Plan

    parsed, on_model = None, _OnModel()
    faults: list[str] = []
    notes: list[str] = []
    try:
        parsed = read_plan(plan)
    except PlanError as error:
        faults += error.faults
    if model is not None:
        on_model = _on_model(parsed, model, tokens)
        faults += on_model.faults
        notes += on_model.notes
    geometry, reach = on_model.geometry, on_model.reach
    if parsed is not None:
        notes += budget_notes(parsed, geometry, on_model.element, tokens)
    for fault in faults:
        say(f"fault: {fault}", err=True)
    if not faults:
        say(f"no fault: {parsed}")
        if geometry is not None and geometry.compressed and parsed != Plan():
            say(f'what it loses there, in minutes: kvtailor check "{parsed}" --model {model} --measure')
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    choices = explained(device, torch.bfloat16)
    for note in notes:
        say(note)
    for choice in choices:
        say(f"{choice.operation} on {device.type}: {choice.implementation} ({choice.why})")
    if device.type == "cpu":
        say(f"huge pages on cpu: {huge_pages.explained()}")
    if as_json:
        click.echo(
            json.dumps(
                {
                    "plan": None if parsed is None else str(parsed),
                    "hash": None if parsed is None else parsed.hash,
                    "faults": faults,
                    "model": model,
                    "layers": None if geometry is None else geometry.layers,
                    "compressed_layers": None if geometry is None else list(geometry.compressed),
                    "tokens": tokens,
                    "reachable": None if reach is None else asdict(reach),
                    "notes": notes,
                    "huge_pages": huge_pages.size_asked_for() if device.type == "cpu" else None,
                    "implementations": [{"device": device.type, **asdict(choice)} for choice in choices],
                }
            )
        )
    if faults:
        ctx.exit(2)


command.option_groups = {
    "Measuring on the model": (
        "measure",
        "engine",
        "text",
        "margin",
        "out",
        "again",
        "workers",
        "dtype",
        "cache_dtype",
        "device",
    ),
}


def _split(plan: tuple[str, ...]) -> list[str]:
    """The plans of the words of a line, with ';' between them."""
    return [each.strip() for each in " ".join(plan).split(";") if each.strip()]


def _check_unmeasured(plan: tuple[str, ...], measured: dict[str, Any]) -> None:
    """Refuse options of a measurement where nothing is measured, and a check of no plan."""
    idle = [f"--{name.replace('_', '-')}" for name, value in measured.items() if value]
    if idle:
        raise click.UsageError(f"{', '.join(idle)} without --measure or --engine: it says how plans are measured.")
    if not plan:
        raise click.UsageError("Missing argument 'PLAN...': give a plan, or --model NAME --measure to try all presets.")


def _measure(
    plan: tuple[str, ...],
    model: str | None,
    tokens: int | None,
    engine: str | None,
    as_json: bool,
    given: dict[str, Any],
) -> None:
    """`--measure` and `--engine`."""
    if model is None:
        raise click.UsageError("--measure or --engine without --model: say which model is to be measured on.")
    from rich.console import Console

    from kvtailor.bench.safety.check import MARGIN, check_model
    from kvtailor.bench.safety.engine_types import EngineCheck, check_engine
    from kvtailor.bench.safety.result import ModelCheck
    from kvtailor.bench.subject import Subject
    from kvtailor.cli.fit import TerminalProgress
    from kvtailor.errors import KvtailorError

    console, out = Console(stderr=True, highlight=False), given["out"]
    text = None if given["text"] is None else Path(given["text"]).expanduser()
    try:
        with stopped(lambda: kept_in(out)):
            with console.status(f"loading {model}"):
                subject = Subject.load(
                    model, dtype=given["dtype"], cache_dtype=given["cache_dtype"], device=given["device"]
                )
            found: ModelCheck | EngineCheck
            how: dict[str, Any] = {
                "context": tokens,
                "margin": given["margin"] or MARGIN,
                "out": out,
                "again": given["again"],
                "workers": given["workers"],
                "progress": TerminalProgress(console, out, "A check"),
            }
            if engine is not None:
                found = check_engine(subject, engine, text, **how)
            else:
                found = check_model(subject, text, plans=[str(read_plan((each,))) for each in _split(plan)], **how)
    except (KvtailorError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(str(found))
    if out is not None:
        say(f"All numbers: kvtailor report {out}")
    if as_json:
        click.echo(json.dumps(found.as_dict(), ensure_ascii=False, allow_nan=False))


@dataclass(kw_only=True)
class _OnModel:
    """What the configuration of a model says of a plan.

    Attributes:
        geometry: of the model; None: there is none, or the model is refused.
        element: bytes of an element of its cache.
        reach: what a row of its cache takes; None as with `geometry`.
        faults, notes: sentences.
    """

    geometry: Geometry | None = None
    element: int = 1
    reach: Reach | None = None
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def _on_model(plan: Plan | None, model: str, tokens: int | None) -> _OnModel:
    """Read a model's configuration, and check a plan against it; None: the plan has faults of its own."""
    import torch

    from kvtailor.hf.model.config import config_of
    from kvtailor.hf.model.geometry import Geometry, refusal
    from kvtailor.hf.model.loading import cache_stays, faster_dtype, slow_here

    config = config_of(model)
    sentence = refusal(config)
    if sentence is not None:
        return _OnModel(faults=[sentence])
    geometry, element = Geometry.of(config), ELEMENT_SIZES[element_of(config, None)]
    faults, notes = _against(plan, geometry, model)
    if not torch.cuda.is_available() and faster_dtype(config) is not None:
        notes += [f"{model}: {slow_here(config)}", f"{model}: {cache_stays(config)}"]
    reach = reachable(geometry, element, tokens)
    notes += say_reachable(reach)
    return _OnModel(geometry=geometry, element=element, reach=reach, faults=faults, notes=notes)


def _against(plan: Plan | None, geometry: Geometry, model: str) -> tuple[list[str], list[str]]:
    """Faults and notes of a plan on a model."""
    from kvtailor.cli.words.plan import read_by
    from kvtailor.hf.layers.of_cache import plan_misfits
    from kvtailor.hf.model.key_bias import said_without_weights

    faults, notes = [], []
    count = len(geometry.compressed)
    others = _others(geometry)
    if others:
        notes.append(f"{count} of {geometry.layers} layers are compressed; {'; '.join(others)}")
    else:
        notes.append(f"all {count} layers are compressed")
    if plan is not None and not count and (plan.evicts or plan.encode.block):
        faults.append(
            f"no layer of {model} keeps the keys of all tokens, so the plan has nothing to compress: use the plan "
            "'full', or a model with layers that see all tokens"
        )
    if plan is not None and count:
        faults += plan_misfits(plan, geometry)
        harm = None if faults else said_without_weights(plan, model, geometry)
        notes += [] if harm is None else [f"warning: {harm}"]
        for word, found in read_by(plan, model).items():
            named = ", ".join(f"{each.name} of {each.model}" for each in found) or "none that is shipped"
            notes.append(f"{word} reads a calibration: {named}; it must be of this model's very weights")
    return faults, notes


def _others(geometry: Geometry) -> list[str]:
    """What the layers keep that no plan compresses, a clause for each kind."""
    shapes = geometry.shapes
    windows = sorted({shape.window for shape in shapes if shape.window is not None})
    windowed = sum(shape.window is not None for shape in shapes)
    alone = sum(bool(shape.states) and not shape.kv_heads for shape in shapes)
    both = sum(bool(shape.states) and shape.compressed for shape in shapes)
    reading = sum(shape.reads is not None for shape in shapes)
    found = []
    if windowed:
        sizes = " and ".join(map(str, windows))
        found.append(f"{windowed} keep the model's own window of {sizes} tokens")
    if alone:
        found.append(f"{alone} keep a state of constant size (linear attention, convolution)")
    if both:
        found.append(f"{both} of the compressed ones keep a state of constant size as well")
    if reading:
        found.append(f"{reading} read the keys of other layers")
    return found
