"""`kvtailor calibrate`: measure once on a model what a method needs, and keep it in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvtailor.cli.words.lines import say, stopped
from kvtailor.cli.words.options import dtype_options

if TYPE_CHECKING:
    from kvtailor.calibration_file import Calibration

__all__ = ["command"]


@click.command(short_help="Measure on a model what a method needs.")
@click.argument("kind")
@click.option(
    "--model",
    default="demo",
    show_default=True,
    help="'demo' or 'demo-draft' (embedded), a folder, a GGUF file, or a hub name.",
)
@click.option(
    "--text",
    "texts",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A text file, or JSON lines with a field 'text'; may be given again. Not what you will evaluate on.",
)
@click.option("--tokens", type=click.IntRange(1), help="Of all texts together.  [what the kind uses]")
@click.option("--context", type=click.IntRange(2), help="Tokens of a passage.  [what the kind uses]")
@click.option("--state", type=int, default=0, show_default=True, help="Random state of what is drawn.")
@dtype_options
@click.option("--device", help="Such as cpu or cuda.")
@click.option(
    "--released",
    type=click.Path(exists=True, path_type=Path),
    help="Take what another project released for the model: Q-filters' model.safetensors, DuoAttention's "
    "full_attention_heads.tsv, a curve of LU-KV (.npy), or a checkpoint's folder with k_scale and v_scale.",
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="The file to write.  [must be given]")
@click.option("--again", is_flag=True, help="Replace a file that is there.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line of standard output.")
def command(
    kind: str,
    model: str,
    texts: tuple[Path, ...],
    tokens: int | None,
    context: int | None,
    state: int,
    dtype: str | None,
    cache_dtype: str | None,
    device: str | None,
    released: Path | None,
    out: Path | None,
    again: bool,
    as_json: bool,
) -> None:
    """Measure on a model what the methods of KIND need, and write it to a safetensors file with its provenance.

    \b
    kvtailor calibrate qfilters --text mine.txt --out filters.safetensors
    kvtailor run --plan "qfilters(file=filters.safetensors) @ keep=0.25" ...

    "kvtailor calibrate list" prints the kinds. The bench refuses to score a plan on the text that its file
    was made from.
    """
    if kind == "list":
        _list_kinds()
        return
    if out is None:
        raise click.UsageError("There is no file to write: give --out FILE.safetensors.")
    if released is not None and (texts or tokens or context):
        raise click.UsageError("--released measures nothing: leave out --text, --tokens and --context.")
    from rich.console import Console

    from kvtailor.bench.data.texts import free_name
    from kvtailor.bench.progress import paced
    from kvtailor.bench.subject import Subject
    from kvtailor.calibration.contract import calibrator
    from kvtailor.calibration.released import import_released
    from kvtailor.calibration.run import calibrate
    from kvtailor.cli.words.plan import about
    from kvtailor.errors import KvtailorError

    console = Console(stderr=True, highlight=False)
    try:
        calibrator(kind)
        if len({path.resolve() for path in texts}) < len(texts):
            raise click.UsageError("--text names a file twice: give each once.")
        named: dict[str, str] = {}
        for path in texts:
            named[free_name(path.name, named)] = _read(path)
        with console.status(f"loading {model}"):
            subject = Subject.load(model, dtype=dtype, cache_dtype=cache_dtype, device=device)
        if released is not None:
            made = import_released(kind, subject, released, out=out, again=again)
        else:
            with stopped(lambda: f"{out} was not written, and the same command begins anew."):
                made = calibrate(
                    subject,
                    kind,
                    named,
                    out=out,
                    tokens=tokens,
                    context=context,
                    state=state,
                    again=again,
                    progress=lambda units: paced(units, console),
                )
    except (KvtailorError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    _say(made, out)
    if as_json:
        click.echo(json.dumps({**about(made), "file": str(out)}, ensure_ascii=False))


def _list_kinds() -> None:
    from kvtailor.calibration.contract import calibrator, kinds

    for name in kinds():
        say(f"{name:<13}{calibrator(name).summary}", hang=13)


def _read(path: Path) -> str:
    from kvtailor.bench.data.sources import read_rows
    from kvtailor.bench.data.texts import read_text
    from kvtailor.errors import KvtailorError

    if ".jsonl" not in path.suffixes:
        return read_text(path)
    found = [row.get("text") for row in read_rows(path)]
    if not found or not all(isinstance(each, str) for each in found):
        raise KvtailorError(f"asked for the texts in {path}, but not every line has a field 'text' with one")
    return "\n\n".join(map(str, found))


def _say(made: Calibration, out: Path) -> None:
    from kvtailor.cli.words.plan import lines_of
    from kvtailor.plan.grammar import write_settings

    say(f"{out}, {out.stat().st_size:,} bytes")
    for line in lines_of(made):
        say(f"  {line}")
    say(f"  in a plan: {made.kind}({write_settings({'file': str(out)})})")
