"""`kvtailor ls`: the methods of each stage, the presets, and the calibration files that are shipped."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterable
from dataclasses import asdict

import click

__all__ = ["command"]


@click.command(short_help="List methods and presets.")
@click.argument("stage", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line of standard output.")
def command(stage: str | None, as_json: bool) -> None:
    """List what a plan can name: the methods of STAGE, the presets (STAGE "presets"), or everything.

    Nothing is imported for it: names and sentences come from the source text. STAGE "calibrations" is what
    `kvtailor calibrate` made for the embedded models.
    """
    from kvtailor.errors import UnknownName
    from kvtailor.plan import registry

    known = (*registry.stages(), "presets", "calibrations")
    if stage is not None and stage not in known:
        raise UnknownName("stage", stage, known)
    wanted = known if stage is None else (stage,)
    methods = {name: registry.methods(name) for name in wanted if name in registry.stages()}
    presets = registry.presets() if "presets" in wanted else {}
    for name, found in methods.items():
        null = registry.null(name)
        names = {info.name: f"{info.name} (default)" if info.name == null else info.name for info in found.values()}
        _table(name, ((names[info.name], info.summary) for info in found.values()))
    if presets:
        _table("presets", ((preset.name, preset.note) for preset in presets.values()))
    files = _calibrations() if "calibrations" in wanted else {}
    if files:
        _table("calibrations", files.items())
    if as_json:
        stages = {name: {key: asdict(info) for key, info in found.items()} for name, found in methods.items()}
        told = {name: asdict(preset) for name, preset in presets.items()}
        click.echo(json.dumps({"stages": stages, "presets": told, "calibrations": files}))


def _calibrations() -> dict[str, str]:
    """What each file that is shipped was made from, by kind and model."""
    from kvtailor.calibration_file import shipped

    return {
        f"{each.kind} {each.model}": f"{each.made['tokens']:,} tokens of {', '.join(each.texts) or 'random ids'}, "
        f"{each.made['date'][:10]}, sha256 {each.hash[:12]}"
        for each in shipped()
    }


def _table(title: str, rows: Iterable[tuple[str, str]]) -> None:
    width = max(60, shutil.get_terminal_size().columns)
    click.secho(title, bold=True)
    for name, text in rows:
        click.echo(textwrap.fill(f"{name:<18} {text}", width, initial_indent="  ", subsequent_indent=" " * 21))
