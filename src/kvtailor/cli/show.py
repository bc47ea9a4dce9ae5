"""`kvtailor show`: what a plan does in each stage, and what a token will cost, before anything runs."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import click

from kvtailor.cli.words.budget import ELEMENT_SIZES, as_dict, budget_notes, element_of, holding, say_holding
from kvtailor.cli.words.lines import say
from kvtailor.cli.words.plan import read_plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtailor.calibration_file import Calibration
    from kvtailor.cli.words.budget import HeldTokens
    from kvtailor.hf.model.geometry import Geometry
    from kvtailor.hf.sizes.size import CacheSize
    from kvtailor.plan import Plan

__all__ = ["command"]

_LAYERS = 32
# Where the words of a stage begin.
_INDENT = 12
# Decoded tokens over which the growth of a cache is averaged.
_LATER = 512


@click.command(short_help="Say what a plan does, before anything runs.")
@click.argument("plan", nargs=-1, required=True)
@click.option(
    "--model",
    help="'demo' or 'demo-draft', a folder, a GGUF file, or a hub name: its sizes instead of --head-size.",
)
@click.option("--head-size", type=click.IntRange(1), help="Of a key and of a value, without --model.  [128]")
@click.option("--cache-dtype", type=click.Choice(list(ELEMENT_SIZES)), help="[the checkpoint's own, else bfloat16]")
@click.option(
    "--context",
    "--tokens",
    "tokens",
    type=click.IntRange(1),
    help="Length of a prompt: the bytes of its cache, and what comes in a step.",
)
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Rows of the batch.")
@click.option(
    "--link", help="Bytes per second that can come, as you measured them; prints what the link takes in a step."
)
@click.option(
    "--step-ms", type=float, help="A step with nothing away, as you measured it; with --link predicts a step."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line of standard output.")
def command(
    plan: tuple[str, ...],
    model: str | None,
    head_size: int | None,
    cache_dtype: str | None,
    tokens: int | None,
    batch: int,
    link: str | None,
    step_ms: float | None,
    as_json: bool,
) -> None:
    """Show PLAN, a line or a TOML file: the method of each stage, its arguments and source, and closed-form bytes.

    With --model and --context it prints the bytes of the whole cache, before any run: the number that `run` and `bench`
    will read from the cache, or its bounds where the text decides, and why. The whole prompt is taken to be read at
    once, and rows to be equally long.
    Times come from the rates that you give, and without them there are none.
    """
    from kvtailor.cli.words.plan import about as describe
    from kvtailor.cli.words.plan import read_by
    from kvtailor.plan.check import BUDGETS

    if model is not None and head_size is not None:
        raise click.UsageError("--model and --head-size both say how wide a head is: give one.")
    parsed, named = read_plan(plan), _named(" ".join(plan))
    sizes: dict[str, Any] = {"model": model, "head_size": head_size or 128, "dtype": cache_dtype or "bfloat16"}
    config: Any = None
    geometry = own = None
    if model is not None:
        from kvtailor.hf.model.config import config_of

        config = config_of(model)
        geometry, known = _sizes_of(config, cache_dtype)
        sizes |= known
    _check_context(tokens, with_rates=link is not None or step_ms is not None, with_model=geometry is not None)
    stages, cost, files = _stages(parsed), _cost(parsed, sizes), read_by(parsed, model)
    if named is not None:
        say(named, bold=True)
    _say(parsed, stages, sizes, cost)
    for word, found in files.items():
        _say_files(word, found, model)
    notes = budget_notes(parsed, geometry, ELEMENT_SIZES[sizes["dtype"]], tokens)
    if parsed.score is not None and parsed.score.needs.of_attention and parsed.score.needs.reconstruction is None:
        notes.append(
            "what it keeps follows the prompt's own queries, so a question that is not in the prompt finds little: for "
            "questions that come later try kvzip, or a code that evicts nothing such as kivi4 "
            "(docs/how-to/ask-later.md)"
        )
    if geometry is not None and model is not None:
        own = _size_in_windows(config) if cache_dtype is None else None
        notes += _notes_on_model(parsed, model, geometry, own, sizes["dtype"])
    held = step = size = None
    if batch > 1 and tokens is None:
        raise click.UsageError("--batch needs --context, the length of each row")
    if tokens is not None and geometry is not None:
        size, grown = _sizes_at(parsed, geometry, ELEMENT_SIZES[sizes["dtype"]], tokens, batch, own)
        held = holding(parsed, geometry, ELEMENT_SIZES[sizes["dtype"]], size, own)
        say_holding(parsed, held, size, grown)
        step = _forecast(parsed, sizes, cost, held, link, step_ms, batch)
    for note in notes:
        say(note)
    if as_json:
        about = {
            "plan": str(parsed),
            "named": named,
            "hash": parsed.hash,
            "python": repr(parsed),
            "toml": parsed.to_toml(),
            "scope": parsed.scope,
            "slack_tokens": parsed.slack_tokens,
            "budget": {name: getattr(parsed, name) for name in BUDGETS if getattr(parsed, name) is not None},
        }
        told = {word: [describe(each) for each in found] for word, found in files.items()}
        known = {"stages": stages, "sizes": sizes, "closed_form": cost, "calibrations": told, "forecast": step}
        known |= {"holding": as_dict(held), "size": None if size is None else size.as_dict(), "notes": notes}
        click.echo(json.dumps({**about, **known}, default=str))


def _check_context(tokens: int | None, *, with_rates: bool, with_model: bool) -> None:
    """Refuse rates without a context, and a context without a model."""
    if tokens is None and with_rates:
        raise click.UsageError(
            "--link and --step-ms need --tokens (or --context), the length at which the step is computed"
        )
    if tokens is not None and not with_model:
        raise click.UsageError("--context (or --tokens) needs the sizes of a model: give --model as well")


def _size_in_windows(config: Any) -> int | None:
    """Return the bytes of an element where this CPU computes in another dtype than the model's; None: the same."""
    from kvtailor.hf.model.loading import faster_dtype

    faster = faster_dtype(config)
    return None if faster is None else faster.itemsize


def _notes_on_model(parsed: Plan, model: str, geometry: Geometry, own: int | None, dtype: str) -> list[str]:
    """Say what of a model changes the bytes or the loss; `own`: bytes of an element in its windows and states."""
    from kvtailor.hf.model.key_bias import said_without_weights

    notes = []
    if own is not None and (geometry.full_bytes(1, 1, 1, own) > geometry.full_bytes(1, 1, 1) or geometry.has_states):
        notes.append(
            f"the model's own windows and states are counted in float32, in which this CPU computes for want of "
            f"arithmetic in {dtype}"
        )
    harm = said_without_weights(parsed, model, geometry)
    return notes if harm is None else [*notes, f"warning: {harm}"]


def _named(text: str) -> str | None:
    """Return the words of a plan that were asked for, where one of them is a preset's name; None where none is."""
    from kvtailor.plan import registry

    words = set(re.findall(r"\w+", text.partition("@")[0])) if not text.strip().endswith(".toml") else set()
    return " ".join(text.split()) if any(map(registry.preset_of, words)) else None


def _sizes_of(config: Any, dtype: str | None) -> tuple[Geometry, dict[str, Any]]:
    from kvtailor.hf.model.geometry import Geometry

    geometry = Geometry.of(config)
    return geometry, {
        "head_size": geometry.first.key_size,
        "value_size": geometry.first.value_size,
        "latents": geometry.has_latents,
        "dtype": element_of(config, dtype),
        "kv_heads": geometry.kv_heads,
        "compressed_layers": len(geometry.compressed),
    }


def _sizes_at(
    plan: Plan, geometry: Geometry, element: int, tokens: int, batch: int, own: int | None
) -> tuple[CacheSize, CacheSize]:
    """The size of a cache after a prompt, and some decoded tokens later; of `own` see `forecast_size`."""
    from kvtailor.hf.sizes.size import forecast_size

    now, grown = (
        forecast_size(
            plan,
            geometry,
            context=tokens,
            batch=batch,
            element_size=element,
            own_size=own,
            new_tokens=more,
            count_states=geometry.state_bytes(element) is not None,
        )
        for more in (0, _LATER)
    )
    return now, grown


def _stages(plan: Plan) -> dict[str, Any]:
    """Each stage's method as far as it has one, and the methods among its arguments."""
    from kvtailor.plan.arguments import with_nested, word_of

    found: dict[str, Any] = {}
    for stage, part in plan.parts.items():
        found[stage] = None
        if part is not None:
            word, inner = word_of(part, everything=True), [_about(each) for each in with_nested(part)][1:]
            found[stage] = {**_about(part), "arguments": word.arguments, "word": str(word), "inner": inner}
    return found


def _about(method: object) -> dict[str, Any]:
    from kvtailor.plan import registry

    info = registry.describe(registry.name_of(method))
    return {"method": info.name, "summary": info.summary, "paper": info.paper, "by": info.by}


def _cost(plan: Plan, sizes: dict[str, Any]) -> dict[str, Any]:
    """Closed-form bytes of a token, indices of ragged caches not counted; by age where they change."""
    from kvtailor.encode.by_age import ByAge

    element, size = ELEMENT_SIZES[sizes["dtype"]], sizes["head_size"]
    value_size = sizes.get("value_size", size)
    full = float((size + value_size) * element)
    layers = _layers_of(plan, sizes)
    encoded = plan.encode.mean_bytes_per_token(layers, size, value_size, element, heads=sizes.get("kv_heads"))
    copies = sizes["kv_heads"] * sizes["compressed_layers"] if "kv_heads" in sizes else None
    by_age = None
    if isinstance(plan.encode, ByAge):
        by_age = [
            {
                "from_age": age,
                "bytes_per_token_and_kv_head": each.mean_bytes_per_token(
                    layers, size, value_size, element, heads=sizes.get("kv_heads")
                ),
            }
            for age, each in zip((0, *plan.encode.ages), plan.encode.of, strict=True)
        ]
    return {
        "full_bytes_per_token_and_kv_head": full,
        "bytes_per_token_and_kv_head": encoded,
        "full_bytes_per_token": None if copies is None else full * copies,
        "bytes_per_token": None if copies is None else encoded * copies,
        "by_age": by_age,
        "full_precision_tail_tokens": plan.encode.tail + plan.encode.block if plan.encode.block else None,
    }


def _layers_of(plan: Plan, sizes: dict[str, Any]) -> int:
    """Return how many layers are compressed: the model's, else as many as the codec's table has, else the usual.

    Codecs may differ between layers, so that the mean over them depends on how many there are.

    Raises:
        PlanError: a table is for another number of layers.
    """
    from kvtailor.errors import PlanError
    from kvtailor.plan.arguments import with_nested
    from kvtailor.plan.registry import Codec

    tables = [each for each in with_nested(plan.encode) if isinstance(each, Codec) and each.table_layers is not None]
    layers: int = sizes.get("compressed_layers") or (tables[0].table_layers if tables else None) or _LAYERS
    faults = [each.misfit(layers=layers, heads=sizes.get("kv_heads", 1), size=sizes["head_size"]) for each in tables]
    if any(faults):
        raise PlanError(str(plan), [fault for fault in faults if fault is not None])
    return layers


def _say(plan: Plan, stages: dict[str, Any], sizes: dict[str, Any], cost: dict[str, Any]) -> None:
    say(str(plan), bold=True)
    say(f"hash {plan.hash}")
    for stage, about in stages.items():
        if about is None:
            say(f"  {stage:<9} nothing is scored, so nothing is evicted")
            continue
        say(f"  {stage:<9} {about['word']}", hang=_INDENT)
        for each in [about, *about["inner"]]:
            say(" " * _INDENT + each["summary"], hang=_INDENT)
            if each["paper"] and not each["paper"].lower().startswith("none"):
                say(" " * _INDENT + each["paper"], hang=_INDENT)
    if plan.evicts:
        slack = plan.slack_tokens
        until = "never while decoding" if slack is None else f"again {slack} tokens past the budget"
        when = {
            "layer": "as soon as a layer is done",
            "progressive": "as soon as a layer is done and again as others follow",
            "prompt": "once all layers have arrived",
        }[plan.scope]
        if plan.needs.reconstruction:
            when = "once the context was read twice"
        say(f"  evicts {when}, {until}")
    where = f"{sizes['model']}, " if sizes["model"] else ""
    full, encoded = cost["full_bytes_per_token_and_kv_head"], cost["bytes_per_token_and_kv_head"]
    size, value_size = sizes["head_size"], sizes.get("value_size", sizes["head_size"])
    each = f"head size {size}" if size == value_size else f"keys of {size}, values of {value_size}"
    each = f"latents of {size}, rotated keys of {value_size}" if sizes.get("latents") else each
    say(f"closed form ({where}{each}, {sizes['dtype']}), for each token that is held:")
    say(f"  {encoded:g} bytes per kv head, {full:g} without the plan: {encoded / full:.3f}")
    if cost["bytes_per_token"] is not None:
        copies = f"{sizes['compressed_layers']} layers x {sizes['kv_heads']} kv heads"
        both = cost["bytes_per_token"], cost["full_bytes_per_token"]
        say(f"  {both[0]:g} bytes over {copies}, {both[1]:g} without the plan")
    for each in cost["by_age"] or ():
        say(f"  {each['bytes_per_token_and_kv_head']:g} bytes from an age of {each['from_age']} tokens on")
    if cost["full_precision_tail_tokens"]:
        say(f"  up to {cost['full_precision_tail_tokens']} of the newest tokens stay in full precision")


def _forecast(
    plan: Plan,
    sizes: dict[str, Any],
    cost: dict[str, Any],
    held: HeldTokens,
    link: str | None,
    step_ms: float | None,
    rows: int,
) -> dict[str, Any]:
    from kvtailor.cli.words.budget import forecast, say_forecast
    from kvtailor.ops.sizes import bytes_of

    try:
        rate = None if link is None else bytes_of(link)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--link") from error
    if (rate is not None and rate <= 0) or (step_ms is not None and step_ms <= 0):
        raise click.UsageError("--link and --step-ms must be above 0")
    seconds = None if step_ms is None else step_ms / 1e3
    found = forecast(plan, sizes, cost, held, rows=rows, rate=rate, step_seconds=seconds)
    say_forecast(found)
    if not found["bytes_moved"] and (rate is not None or seconds is not None):
        say("  nothing comes over a link in a step: all that is held stays on the device")
    return found


def _say_files(word: str, found: Sequence[Calibration], model: str | None) -> None:
    from kvtailor.cli.words.plan import lines_of
    from kvtailor.hf.model.config import RANDOM_SHAPES

    if model in RANDOM_SHAPES and not found:
        say(f"{word} reads random numbers in place of a calibration: {model} is not trained")
        return
    which = {0: "no calibration: none is named, and none is shipped", 1: "a calibration"}
    say(f"{word} reads {which.get(len(found), 'that of these calibrations which was made for the model')}:")
    for each in found:
        first, *rest = lines_of(each)
        for line in (f"  {first}", *(f"    {line}" for line in rest)):
            say(line)
