"""`kvtailor ls`: the methods of each stage, the presets, and the calibration files that are shipped."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import click

__all__ = ["command"]


@click.command(short_help="List methods and presets.")
@click.argument("stage", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line of standard output.")
def command(stage: str | None, as_json: bool) -> None:
    """List what a plan can name: the methods of STAGE, the presets (STAGE "presets"), or everything.

    Neither a method nor torch is imported for it: names and sentences come from the source text. STAGE "calibrations"
    is what `kvtailor calibrate` made for the embedded models.
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
