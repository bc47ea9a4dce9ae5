"""`kvtailor bench`: what each plan costs and buys, on one model and one text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

if TYPE_CHECKING:
    from kvtailor.bench.subject import Subject
    from kvtailor.bench.tasks import Task

__all__ = ["command"]

N = TypeVar("N", int, float)

DEFAULT_PLANS = ("full", "streaming @ keep=0.25", "snapkv @ keep=0.25", "snapkv + adakv @ keep=0.25", "kivi(bits=4)")
TASKS = ("perplexity", "needle", "fidelity", "speed", "memory")
USUAL = ("perplexity", "needle", "speed", "memory")
ANSWER_ROOM = 32
FIDELITY_WINDOWS = 20


@click.command(short_help="Compare plans: quality, bytes and speed.")
@click.option(
    "--model", default="demo", show_default=True, help="'demo' or 'demo-draft' (embedded), a folder, or a hub name."
)
@click.option(
    "--plans", "--plan", "plans", multiple=True, help="A plan, or several with ';' between; may be given again."
)
@click.option("--text", type=click.Path(path_type=Path), help="A text file; without it text is generated.")
@click.option(
    "--context", type=click.IntRange(1), help="Tokens prefilled and compressed.  [512, or what the model has]"
)
@click.option("--continuation", type=click.IntRange(1), help="Tokens scored after them.  [a quarter of --context]")
@click.option(
    "--chunk",
    type=click.IntRange(1),
    help="Feed the continuation so many tokens at a time, so that eviction while decoding acts.  [all at once]",
)
@click.option("--windows", type=click.IntRange(1), default=50, show_default=True, help="Windows of the text.")
@click.option("--needles", help="Lengths of the needle documents in tokens, with ',' between.  [--context]")
@click.option("--depths", default="0.1,0.3,0.5,0.7,0.9", show_default=True, help="Where the needles stand, 0 to 1.")
@click.option(
    "--documents", type=click.IntRange(1), default=4, show_default=True, help="Documents for each length and depth."
)
@click.option(
    "--kind",
    default="needle",
    show_default=True,
    help="Which documents, with ',' between: needle, passkey, key_value, multi_value, multi_query, variables, "
    "characters, first_names, copy_span, common_words, frequent_words.",
)
@click.option("--question-outside", is_flag=True, help="Ask after the compressed context, not inside it.")
@click.option("--rounds", type=click.IntRange(1), default=10, show_default=True, help="Timed rounds over all plans.")
@click.option(
    "--new-tokens", type=click.IntRange(2), default=32, show_default=True, help="Tokens decoded in a timed round."
)
@click.option("--tasks", default=",".join(USUAL), show_default=True, help=f"What to measure, of {', '.join(TASKS)}.")
@click.option("--dtype", help="float32, bfloat16 or float16; otherwise the checkpoint's own.")
@click.option("--device", help="Such as cpu or cuda.")
@click.option("--again", is_flag=True, help="Measure anew what --out already has.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for records and the plot; goes on there."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line of standard output.")
def command(
    model: str,
    plans: tuple[str, ...],
    text: Path | None,
    context: int | None,
    continuation: int | None,
    chunk: int | None,
    windows: int,
    needles: str | None,
    depths: str,
    documents: int,
    kind: str,
    question_outside: bool,
    rounds: int,
    new_tokens: int,
    tasks: str,
    dtype: str | None,
    device: str | None,
    again: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Compare plans on one model and one text: quality with intervals, bytes that are read, times as ratios.

    \b
    kvtailor bench --plans "snapkv @ keep=0.25; snapkv + adakv + kivi(bits=4) @ keep=0.25"
    kvtailor bench --model ./my-model --text book.txt --context 2048 --out results/
    """
    wanted = _names(tasks)
    kinds = list(dict.fromkeys(each.strip() for each in kind.split(",") if each.strip()))
    lengths = _numbers(needles, int, "--needles") if needles else None
    places = _numbers(depths, float, "--depths")

    from rich.console import Console

    from kvtailor.bench.progress import bar
    from kvtailor.bench.report import summarise
    from kvtailor.bench.report.terminal import show
    from kvtailor.bench.runner import contestants_of, finished, plan_run, run
    from kvtailor.bench.subject import Subject
    from kvtailor.bench.tasks.fidelity import Fidelity
    from kvtailor.bench.tasks.memory import Memory
    from kvtailor.bench.tasks.needle import Needle
    from kvtailor.bench.tasks.perplexity import Perplexity
    from kvtailor.bench.tasks.speed import Speed
    from kvtailor.cli.report import write
    from kvtailor.errors import KvtailorError

    console = Console(stderr=True, highlight=False)
    try:
        contestants = contestants_of([p for each in plans or DEFAULT_PLANS for p in each.split(";") if p.strip()])
        with console.status(f"loading {model}"):
            subject = Subject.load(model, dtype=dtype, device=device)
        size, tail = _sizes(subject, context, continuation, new_tokens)
        content, source = _text(text, (size + tail) * windows)
        made: dict[str, Task] = {}
        if "perplexity" in wanted:
            made["perplexity"] = Perplexity(
                text=content, source=source, context=size, continuation=tail, chunk=chunk, windows=windows
            )
        if "needle" in wanted:
            for each in kinds:
                made[f"needle {each}"] = Needle(
                    lengths=lengths or (size,),
                    depths=places,
                    documents=documents,
                    kind=each,
                    question_outside=question_outside,
                )
        if "fidelity" in wanted:
            made["fidelity"] = Fidelity(
                text=content, source=source, context=size, continuation=tail, windows=min(windows, FIDELITY_WINDOWS)
            )
        if "speed" in wanted:
            made["speed"] = Speed(text=content, source=source, context=size, tokens=new_tokens, rounds=rounds)
        if "memory" in wanted:
            made["memory"] = Memory(context=size)
        before = {} if again else finished(out)
        with bar(plan_run(list(made.values()), contestants), console) as advance:
            records = run(subject, contestants, list(made.values()), out=out, advance=advance, resume=not again)
        kept = sum(before.get(record.key) == record for record in records)
        if kept:
            console.print(f"{kept} of {len(records)} records were there already (--again measures anew)", style="dim")
        summary = summarise(records)
        if out is not None:
            _plot(summary, out, console)
            for page in write(out, out):
                console.print(f"{page}", style="dim", markup=False, soft_wrap=True)
    except (KvtailorError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    show(summary, Console(highlight=False))
    if as_json:
        click.echo(json.dumps(summary.as_dict(), ensure_ascii=False, allow_nan=False))


def _names(tasks: str) -> list[str]:
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    unknown = [name for name in names if name not in TASKS]
    if unknown or not names:
        raise click.UsageError(f"--tasks has {', '.join(unknown) or 'nothing'}: give some of {', '.join(TASKS)}.")
    return names


def _numbers(text: str, kind: Callable[[str], N], option: str) -> tuple[N, ...]:
    try:
        found = tuple(kind(part) for part in text.split(",") if part.strip())
    except ValueError:
        found = ()
    if not found:
        raise click.UsageError(f"{option} is {text!r}: give numbers with ',' between.")
    return found


def _sizes(subject: Subject, context: int | None, continuation: int | None, new_tokens: int) -> tuple[int, int]:
    """Context and continuation, as asked or as the model's positions allow."""
    positions = subject.positions
    if context is None:
        context = (
            512 if positions is None else max(16, min(512, positions - max(new_tokens, ANSWER_ROOM, positions // 5)))
        )
    if continuation is None:
        continuation = max(1, context // 4)
        if positions is not None:
            continuation = max(1, min(continuation, positions - context))
    return context, continuation


def _text(path: Path | None, tokens: int) -> tuple[str, str]:
    from kvtailor.bench.texts import generated_text, read_text

    if path is None:
        # Tokens of the coarsest tokenizers have about 6 characters.
        return generated_text(6 * tokens + 10_000), "generated text"
    return read_text(path), path.name


def _plot(summary: object, out: Path, console: object) -> None:
    from kvtailor.bench.report.plot import plot
    from kvtailor.errors import KvtailorError

    try:
        where = plot(summary, out / "loss-vs-bytes.png")  # type: ignore[arg-type]
        console.print(f"records and {where.name} are in {out}", style="dim")  # type: ignore[attr-defined]
    except KvtailorError as error:
        console.print(f"records are in {out}; no picture: {error}", style="dim", markup=False)  # type: ignore[attr-defined]
