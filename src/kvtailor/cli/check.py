"""`kvtailor check`: every fault of a plan, and whether a model can hold it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from kvtailor.cli.words.budget import ELEMENT_SIZES, budget_notes, element_of
from kvtailor.cli.words.lines import say
from kvtailor.cli.words.plan import read_plan
from kvtailor.cli.words.reach import reachable, say_reachable

if TYPE_CHECKING:
    from kvtailor.hf.model.geometry import Geometry
    from kvtailor.plan import Plan

__all__ = ["command"]


@click.command(short_help="Say all faults of a plan.")
@click.argument("plan", nargs=-1, required=True)
@click.option(
    "--model",
    help="'demo' or 'demo-draft' (embedded), a folder, or a hub name: also check the plan against this model.",
)
@click.option(
    "--tokens",
    type=click.IntRange(1),
    help="Length of a prompt: what the budget comes to there.  [default: the model's positions]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line of standard output.")
@click.pass_context
def command(ctx: click.Context, plan: tuple[str, ...], model: str | None, tokens: int | None, as_json: bool) -> None:
    """Check PLAN, a line or a TOML file. Exit code 0: no fault; 2: faults, each a sentence on standard error.

    Also reports where a budget does nothing, or leaves nothing to the score. A model's weights are not loaded, only its
    configuration. Also reports which kernels run on this machine, and why.
    """
    import torch

    from kvtailor.errors import PlanError
    from kvtailor.ops import huge_pages
    from kvtailor.ops.what_runs import explained

    parsed, geometry, element, reach = None, None, 1, None
    faults: list[str] = []
    notes: list[str] = []
    try:
        parsed = read_plan(plan)
    except PlanError as error:
        faults += error.faults
    if model is not None:
        from kvtailor.hf.model.config import config_of
        from kvtailor.hf.model.geometry import Geometry, refusal
        from kvtailor.hf.model.loading import faster_dtype, slow_here

        config = config_of(model)
        sentence = refusal(config)
        if sentence is not None:
            faults.append(sentence)
        else:
            geometry, element = Geometry.of(config), ELEMENT_SIZES[element_of(config, None)]
            found, notes = _against(parsed, geometry, model)
            if not torch.cuda.is_available() and faster_dtype(config) is not None:
                notes.append(f"{model}: {slow_here(config)}")
            reach = reachable(geometry, element, tokens)
            notes += say_reachable(reach)
            faults += found
    if parsed is not None:
        notes += budget_notes(parsed, geometry, element, tokens)
    for fault in faults:
        say(f"fault: {fault}", err=True)
    if not faults:
        say(f"no fault: {parsed}")
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


def _against(plan: Plan | None, geometry: Geometry, model: str) -> tuple[list[str], list[str]]:
    """Faults and notes of a plan on a model."""
    from kvtailor.cli.words.calibration import read_by
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
