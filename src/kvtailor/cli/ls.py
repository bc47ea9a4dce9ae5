"""`kvtailor ls`: the methods of each room, and the presets."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterable
from dataclasses import asdict

import click

__all__ = ["command"]


@click.command(short_help="List methods and presets.")
@click.argument("room", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line of standard output.")
def command(room: str | None, as_json: bool) -> None:
    """List what a plan can name: the methods of ROOM, the presets (ROOM "presets"), or everything.

    Nothing is imported for it: names and sentences come from the source text.
    """
    from kvtailor import find
    from kvtailor.errors import UnknownName

    known = (*find.rooms(), "presets")
    if room is not None and room not in known:
        raise UnknownName("room", room, known)
    wanted = known if room is None else (room,)
    methods = {name: find.methods(name) for name in wanted if name != "presets"}
    presets = find.presets() if "presets" in wanted else {}
    for name, found in methods.items():
        null = find.null(name)
        names = {info.name: f"{info.name} (default)" if info.name == null else info.name for info in found.values()}
        _table(name, ((names[info.name], info.summary) for info in found.values()))
    if presets:
        _table("presets", ((preset.name, preset.note) for preset in presets.values()))
    if as_json:
        rooms = {name: {key: asdict(info) for key, info in found.items()} for name, found in methods.items()}
        click.echo(json.dumps({"rooms": rooms, "presets": {name: asdict(preset) for name, preset in presets.items()}}))


def _table(title: str, rows: Iterable[tuple[str, str]]) -> None:
    width = max(60, shutil.get_terminal_size().columns)
    click.secho(title, bold=True)
    for name, text in rows:
        click.echo(textwrap.fill(f"{name:<18} {text}", width, initial_indent="  ", subsequent_indent=" " * 21))
