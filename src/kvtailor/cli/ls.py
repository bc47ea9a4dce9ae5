"""`kvtailor ls`: the methods of each stage, the presets, the calibration files that are shipped, or one of them."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvtailor.cli.words.lines import say

if TYPE_CHECKING:
    from kvtailor.plan.registry import MethodInfo

__all__ = ["command"]


_BUDGETS = ("tokens", "keep", "bytes", "slack")


@click.command(short_help="List methods and presets, or explain one.")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line of standard output.")
def command(name: str | None, as_json: bool) -> None:
    """List what a plan can name: the methods of a stage, "presets", "calibrations", or without NAME everything.

    With the NAME of a method or preset, explain it: its arguments, what each does, and its default.

    \b
    kvtailor ls score      the methods that rank tokens
    kvtailor ls snapkv     window=, kernel=, ... and what stands behind @
    kvtailor ls kivi4      the plan that this name stands for

    For a list neither a method nor torch is imported: names and sentences come from the source text. "calibrations"
    are what `kvtailor calibrate` made for the embedded models.
    """
    from kvtailor.errors import UnknownName
    from kvtailor.plan import registry

    stage = name
    known = (*registry.stages(), "presets", "calibrations")
    if name is not None and name not in known:
        told = _about_one(name)
        if told is None:
            every = [each for of_stage in registry.stages() for each in registry.methods(of_stage)]
            raise UnknownName("stage, method or preset", name, [*known, *every, *registry.presets(), *_BUDGETS])
        if as_json:
            click.echo(json.dumps(told, default=str))
        return
    wanted = known if stage is None else (stage,)
    methods = {each: registry.methods(each) for each in wanted if each in registry.stages()}
    presets = registry.presets() if "presets" in wanted else {}
    for title, found in methods.items():
        null = registry.null(title)
        names = {info.name: f"{info.name} (default)" if info.name == null else info.name for info in found.values()}
        _table(title, ((names[info.name], info.summary) for info in found.values()))
    if presets:
        _table("presets", ((preset.name, preset.note) for preset in presets.values()))
    files = _calibrations() if "calibrations" in wanted else {}
    if files:
        _table("calibrations", files.items())
    if as_json:
        stages = {title: {key: asdict(info) for key, info in found.items()} for title, found in methods.items()}
        notes = {key: asdict(preset) for key, preset in presets.items()}
        click.echo(json.dumps({"stages": stages, "presets": notes, "calibrations": files}))


def _about_one(name: str) -> dict[str, object] | None:
    """Print what a method, a preset or a word of a budget is, and return it; None where there is none of this name."""
    from kvtailor.plan import Plan, registry

    if name in _BUDGETS:
        say(f"{name}= (behind @)", bold=True)
        say(f"  {_budgets()[name]}", hang=2)
        return {"budget": name, "explained": _budgets()[name]}
    stages = [stage for stage in registry.stages() if name in registry.methods(stage)]
    told: dict[str, object] = {}
    if (preset := registry.preset_of(name)) is not None:
        budget = f" @ {preset.budget}" if preset.budget else ""
        plan = Plan.parse(name + budget)
        _say_head(preset.name, "preset" if name == preset.name else f"preset, once {name}", preset.note, preset.paper)
        say(f"  stands for: {plan}", hang=4)
        say(f'  kvtailor show "{preset.name}{budget}" explains each part')
        told = {"preset": asdict(preset), "plan": str(plan)}
    if not stages:
        return told or None
    info = registry.describe(name)
    _say_head(name, info.stage, info.summary, info.paper)
    arguments = _arguments(info)
    for each in arguments:
        say(f"  {each['written']:<24} {each['explained']}", hang=27)
    if not arguments:
        say("  It takes no arguments.")
    if info.stage == "score":
        say("Behind @ stands the budget, one of tokens, keep and bytes; slack may stand beside it:")
        for key, text in _budgets().items():
            say(f"  {key + '=':<24} {text}", hang=27)
    return {**told, "method": asdict(info), "arguments": arguments}


def _say_head(name: str, kind: str, summary: str, paper: str) -> None:
    say(f"{name} ({kind})", bold=True)
    for text in (summary, paper):
        if text and not text.lower().startswith("none"):
            say(f"  {text}", hang=2)


def _arguments(info: MethodInfo) -> list[dict[str, str]]:
    """The arguments of a method in their order: as they are written with their defaults, and what each is."""
    from kvtailor.method import Method
    from kvtailor.plan import registry
    from kvtailor.plan.arguments import defaults_of, explanations, word_of
    from kvtailor.plan.grammar import write_value

    kind = registry.load(info.stage, info.name)
    defaults, told, found = defaults_of(kind), explanations(kind), []
    for each in fields(kind):  # type: ignore[arg-type]
        if each.init:
            default = defaults.get(each.name)
            value = str(word_of(default)) if isinstance(default, Method) else write_value(default)
            written = f"{each.name}={value if each.name in defaults else '... (must be given)'}"
            found.append({"name": each.name, "written": written, "explained": told.get(each.name, "")})
    return found


def _budgets() -> dict[str, str]:
    from kvtailor.plan import Plan
    from kvtailor.plan.arguments import explanations

    told = explanations(Plan)
    return {name: told[name].removeprefix("budget: ") for name in _BUDGETS}


def _calibrations() -> dict[str, str]:
    """What each file that is shipped was made from, by kind and model; only its head is read, which needs no torch."""
    import kvtailor
    from kvtailor.ops.files import read_file, safetensors_metadata

    found = {}
    for path in sorted((Path(kvtailor.__file__).parent / "calibration" / "shipped").glob("*/*.safetensors")):
        content = read_file(str(path), "shipped")
        head = safetensors_metadata(content.data)
        made, texts = json.loads(head["made"]), json.loads(head["calibrated_on"])
        names = ", ".join(each["text_name"] for each in texts) or "random ids"
        found[f"{head['kind']} {head['model']}"] = (
            f"{made['tokens']:,} tokens of {names}, {made['date'][:10]}, sha256 {content.hash[:12]}"
        )
    return found


def _table(title: str, rows: Iterable[tuple[str, str]]) -> None:
    width = max(60, shutil.get_terminal_size().columns)
    click.secho(title, bold=True)
    for name, text in rows:
        click.echo(textwrap.fill(f"{name:<18} {text}", width, initial_indent="  ", subsequent_indent=" " * 21))
