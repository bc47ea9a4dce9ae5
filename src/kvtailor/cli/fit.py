"""`kvtailor fit`: the plan that is cut to what you have, shown on text that the search never saw."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvtailor.cli.words.lines import begins_in, columns, kept_in, python_lines, say, stopped, wrapped
from kvtailor.cli.words.options import GroupedCommand, dtype_options, share_option
from kvtailor.fitting.effort import EFFORTS

if TYPE_CHECKING:
    from rich.console import Console

    from kvtailor.bench.schema import Record
    from kvtailor.bench.stages import Advance
    from kvtailor.fitting.progress import TimeLeft
    from kvtailor.fitting.result import Fit

__all__ = ["TerminalProgress", "command", "show"]

GENERATED_WINDOWS = 80
_LONGER = 1.3  # a step of a plan over one of the uncompressed cache, in the mean over the steps of a fit
_OFTEN = 30.0  # seconds between two lines within a stage
_NAME = 16  # columns of a name of a plan that the others leave on a terminal of 80


@click.command(cls=GroupedCommand, short_help="Find the plan that is cut to your memory, and show that it is.")
@click.option("--model", help="'demo' (embedded), a folder, a GGUF file, or a hub name.  [demo, or that of --out]")
@click.option(
    "--text",
    "texts",
    multiple=True,
    help="A text file like your model's work; may be given again. 'generated': made up, to try it out.",
)
@click.option(
    "--memory",
    help="Bytes that the cache of all rows may have: 2GiB, 300KiB, or 25% of the full one in the cache's dtype.",
)
@click.option("--bytes-per-token", type=float, help="The same for one token of one row.")
@click.option("--keep-bytes", help="The same as a share of the uncompressed cache: 25% or 0.25.")
@click.option("--loss", type=float, help="Most nats per token of text to lose.")
@click.option("--points", type=float, help="Most points of percent of right answers to lose, in any family.")
@click.option("--tpot", help="Most time for a decoded token of all rows: 12ms.")
@click.option("--context", type=int, help="Tokens of each prompt.  [2048, or what the model has]")
@click.option("--batch", type=int, default=1, show_default=True, help="Rows.")
@click.option(
    "--tasks",
    help="Answers that count, with ',' between: families of generated documents (needle, key_value ...), or files of "
    "JSON lines with prompt and answer; 'none': text alone.  [needle,key_value]",
)
@click.option("--proof-tasks", help="Families that only the proof has, with ',' between.  [variables,passkey]")
@click.option(
    "--without", help="Methods and presets that no plan may have, with ',' between: kvzip reads prompts twice."
)
@click.option(
    "--effort",
    type=click.Choice(list(EFFORTS)),
    default="normal",
    show_default=True,
    help="How much is tried.",
)
@click.option("--no-times", is_flag=True, help="Measure no times.")
@click.option("--state", type=click.IntRange(0), default=0, show_default=True, help="Random state of the search.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for plan, page and records; a fit that was killed goes on there.",
)
@share_option
@click.option(
    "--workers",
    type=click.IntRange(1),
    help="Measure so many plans at once, each in one thread. Linux, on the CPU.  [as many as threads and memory]",
)
@click.option("--again", is_flag=True, help="Fit anew, though --out has a finished fit of this model.")
@click.option(
    "--ray", is_flag=False, flag_value="here", metavar="[ADDRESS]", help="Measure on a Ray cluster, as in `bench`."
)
@click.option("--resources", metavar="LINE", help="What a measurement takes on the cluster.  [cpus=1]")
@dtype_options
@click.option("--device", help="Such as cpu or cuda.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line of standard output.")
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Find the plan that answers a question: give any two of memory, loss and time, or one; the rest is made small.

    \b
    kvtailor fit --model NAME --text notes.txt --memory 2GiB \\
        --context 32768 --batch 4 --out fitted
    kvtailor fit --model NAME --text notes.txt --loss 0.01     # fewest bytes
    kvtailor run --model NAME --plan fitted/fitted.toml --prompt-file long.txt

    Half of each text is never searched on: the plan is judged there, against the best presets of the same bytes.
    In a folder that has a finished fit, another memory is answered in seconds from what was measured.
    """
    from rich.console import Console

    from kvtailor.errors import KvtailorError

    console = Console(stderr=True, highlight=False)
    try:
        folder = options["out"]
        if folder is not None and not options["again"] and (folder / "fit.json").is_file():
            given = {
                name for name in options if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
            }
            found = _again(folder, options, given, console)
        else:
            options["model"] = options["model"] or "demo"
            with stopped(lambda: _kept(folder)):
                found = _fit(options, console)
    except (KvtailorError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if options["as_json"]:
        click.echo(json.dumps(found, ensure_ascii=False, allow_nan=False))


command.option_groups = {
    "What you have": ("model", "texts", "context", "batch", "memory", "bytes_per_token", "keep_bytes"),
    "What it may lose": ("loss", "points", "tpot"),
    "What is tried, and on what": ("tasks", "proof_tasks", "without", "effort", "no_times", "state"),
    "Where it runs": ("dtype", "cache_dtype", "device", "share", "workers", "ray", "resources"),
    "Results": ("out", "again", "as_json"),
}


def _fit(options: dict[str, Any], console: Console) -> dict[str, Any]:
    from kvtailor.bench.resources import resources_of_line
    from kvtailor.bench.subject import Subject
    from kvtailor.cli.bench import executor_of
    from kvtailor.errors import KvtailorError
    from kvtailor.fitting.material import check_positions, generated
    from kvtailor.fitting.pieces import CONTINUATION
    from kvtailor.fitting.run import fit

    if not options["texts"]:
        raise KvtailorError(
            "there is no text to measure on: give --text FILE, some megabytes that are like your model's work, or "
            "--text generated to try it out"
        )
    with executor_of(options["ray"], console) as executor:
        with console.status(f"loading {options['model']}"):
            subject = Subject.load(
                options["model"],
                dtype=options["dtype"],
                cache_dtype=options["cache_dtype"],
                device=options["device"],
            )
        context = options["context"]
        if context is None:
            context = 2048 if subject.positions is None else min(2048, subject.positions - CONTINUATION)
        check_positions(subject, context)
        texts = _read_texts(options["texts"])
        if "generated" in options["texts"]:
            texts |= generated(context, GENERATED_WINDOWS)
        found = fit(
            subject,
            texts,
            memory=options["memory"],
            bytes_per_token=options["bytes_per_token"],
            keep_bytes=options["keep_bytes"],
            loss=options["loss"],
            points=options["points"],
            tpot=options["tpot"],
            context=context,
            batch=options["batch"],
            tasks=_tasks(options["tasks"]),
            proof_tasks=_listed(options["proof_tasks"]),
            without=_listed(options["without"]) or (),
            effort=options["effort"],
            timed=not options["no_times"],
            out=options["out"],
            state=options["state"],
            executor=executor,
            resources=resources_of_line(options["resources"] or ""),
            workers=options["workers"],
            share=options["share"] == "on",
            progress=TerminalProgress(console, options["out"]),
        )
    show(found, options["out"])
    return found.as_dict()


def _kept(folder: Path | None) -> str:
    """Return what a fit that was stopped leaves."""
    from kvtailor.fitting.stages import BEST_FILE

    if folder is None or not (folder / BEST_FILE).is_file():
        return kept_in(folder)
    return f"{kept_in(folder)} Its best plan so far, not proved: kvtailor run --plan {folder / BEST_FILE}"


def _read_texts(names: Sequence[str]) -> dict[str, str]:
    """The texts of files, by their names, without the generated one.

    Raises:
        KvtailorError: there is no such file.
    """
    from kvtailor.bench.data.texts import named_texts
    from kvtailor.errors import KvtailorError

    files = [Path(name) for name in names if name != "generated"]
    for path in files:
        if not path.expanduser().is_file():
            raise KvtailorError(f"there is no text file {path}: give the path of one, or 'generated'")
    return named_texts(files) if files else {}


def _again(folder: Path, options: dict[str, Any], given: set[str], console: Console) -> dict[str, Any]:
    """Another question to what was measured; the same one has its answer already."""
    from kvtailor.bench.data.overlap import text_hash
    from kvtailor.errors import KvtailorError
    from kvtailor.fitting.again import another_memory
    from kvtailor.fitting.question import Question
    from kvtailor.fitting.result import Fit

    found = Fit.load(folder)
    question, asked = found.question, found.asked
    device = options["device"] and options["device"].partition(":")[0]
    there = {
        "model": found.model,
        "context": question.context,
        "batch": question.batch,
        "effort": found.effort,
        "state": found.state,
        # A fit of before says of neither dtype nor device what it computed in.
        "dtype": asked.get("dtype", options["dtype"]),
        "cache_dtype": found.dtype,
        "device": asked.get("device", device),
        "tasks": asked.get("tasks"),
        "proof_tasks": asked.get("proof_tasks"),
        "without": asked.get("without"),
        "texts": asked.get("texts"),
    }
    texts = _read_texts(options["texts"])
    now = {
        **options,
        "tasks": _tasks(options["tasks"]),
        "proof_tasks": _listed(options["proof_tasks"]),
        "without": sorted(_listed(options["without"]) or ()),
        "texts": sorted([*texts, *({"generated text"} if "generated" in options["texts"] else ())]),
        "device": device,
    }
    other = [name for name in there if name in given and now[name] != there[name]]
    # A fit of before has no hashes of its texts.
    hashes, now_hashes = asked.get("text_hashes", {}), {name: text_hash(text) for name, text in texts.items()}
    if "texts" not in other and any(hashes.get(name, own) != own for name, own in now_hashes.items()):
        other.append("texts")
    if other:
        words = ", ".join("--text" if name == "texts" else f"--{name.replace('_', '-')}" for name in other)
        raise KvtailorError(
            f"{folder} has a finished fit that was asked for another {words}: give --again to fit anew, or another "
            "--out"
        )
    limits = {
        name: options[name]
        for name in ("memory", "bytes_per_token", "keep_bytes", "loss", "points", "tpot")
        if options[name] is not None
    }
    same = (
        not limits or Question.of(full=found.full, context=question.context, batch=question.batch, **limits) == question
    )
    if same:
        console.print(f"{folder} has this fit, finished (--again fits anew)", style="dim", markup=False)
        show(found, folder)
        return found.as_dict()
    if "points" in limits or "tpot" in limits:
        raise KvtailorError(
            f"{folder} has a finished fit, from which another memory or loss is answered, and no points or tpot: give "
            "--again to fit anew"
        )
    answer = another_memory(
        found,
        memory=options["memory"],
        bytes_per_token=options["bytes_per_token"],
        keep_bytes=options["keep_bytes"],
        loss=options["loss"],
        model=options["model"],
        folder=folder,
    )
    console.print(
        f"{folder} has a finished fit of {found.model}: answered from what it measured (--again fits anew)",
        style="dim",
        markup=False,
    )
    click.echo(str(answer))
    return answer.as_dict()


def show(found: Fit, folder: Path | None) -> None:
    """Print a result: the plan, its proof, and what to do with it."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kvtailor.bench.report.words import milliseconds
    from kvtailor.ops.sizes import byte_text

    console = Console(highlight=False)
    chosen, question = found.chosen, found.question
    console.print()
    say(found.plan, hang=4, bold=True)
    console.print(
        f"{byte_text(chosen.bytes)} of {byte_text(found.full)} in {found.dtype} "
        f"({100 * chosen.bytes / found.full:.1f} %) for {question.batch} row(s) of "
        f"{question.context} tokens. {found.sentence}",
        markup=False,
    )
    console.print()
    table = Table(title="on text and questions that the search never saw", title_justify="left", box=None)
    # A name is parted at its blanks and not in the middle of a word.
    longest = max((len(word) for each in found.proof for word in each.label.split()), default=0)
    for name in ("plan", "bytes", "loss, nats", "95 %", "right", "ms a token", "chosen is"):
        table.add_column(name, overflow="fold", min_width=min(longest, _NAME) if name == "plan" else None)
    for each in found.proof:
        if each.error is not None:
            table.add_row(Text(each.label), "", "", Text(f"failed: {each.error}"), "", "", "")
            continue
        loss, seconds = each.loss, (each.seconds or {}).get("median")
        interval = loss.interval(4, signed=True) or "-"
        told = "" if each.origin == "full" else "this one" if each is chosen else found.told.get(each.label, "")
        table.add_row(
            Text(each.label),
            f"{100 * each.bytes / found.full:.1f} %",
            f"{loss.value:+.4f}",
            interval,
            f"{each.right} of {each.asked}" if each.asked else "-",
            "-" if seconds is None else milliseconds(seconds),
            told,
        )
    console.print(table)
    console.print()
    for note in (*([found.regret] if found.regret else []), *found.notes):
        console.print(f"- {note}", markup=False)
    console.print()
    most = columns()
    click.echo(found.python if most is None else "\n".join(python_lines(found.plan, most)))
    if folder is not None:
        say(f"--plan {folder / 'fitted.toml'} works everywhere; evidence and front: {folder / 'fit.html'}")


class TerminalProgress:
    """Says how long a fit or a check takes before its first step, and then what runs and how long the rest takes.

    On a terminal a line stays with the stage; elsewhere a line comes when a stage begins, every half a minute, and when
    it ends.

    Args:
        console: where to.
        folder: where its records stay; None: it has none.
        what: takes that long, such as "a fit".
    """

    def __init__(self, console: Console, folder: Path | None = None, what: str = "A fit"):
        self._console, self._folder, self._what = console, folder, what
        self._left: TimeLeft | None = None

    def expect(self, stages: Mapping[str, int], seconds: float | None) -> None:
        """Say how long it takes."""
        from datetime import datetime

        from kvtailor.fitting.progress import TimeLeft

        pace = None if seconds is None else _LONGER * seconds
        self._left = TimeLeft({name: float(steps) for name, steps in stages.items()}, pace)
        if pace is None:
            how = f"how long they take is not known until the first, which begins at {datetime.now():%H:%M:%S}"
        else:
            how = f"at {pace:.2g} s each, as timed here, they take {_about(self._left.left or 0.0)}"
        steps = sum(stages.values())
        self._say(f"{self._what} of at most {steps} steps: {how}. Ctrl-C stops it. {begins_in(self._folder)}")

    def tell(self, sentence: str) -> None:
        """Say it."""
        self._say(sentence)

    @contextmanager
    def stage(self, name: str, steps: int) -> Iterator[Advance]:
        from time import monotonic

        from kvtailor.bench.progress import bar

        begun, done = monotonic(), 0
        last = said = begun
        plain = not self._console.is_terminal
        if self._left is not None:
            self._left.begin(name, steps)
        if plain:
            self._say(f"{name}: at most {steps} steps{self._rest()}")
        with bar(steps, self._console, name) as advance:

            def told(label: str, skipped: int = 0) -> None:
                nonlocal done, steps, last, said
                if skipped:
                    steps = max(done, steps - skipped)
                    if self._left is not None:
                        self._left.skip(skipped)
                    for _ in range(skipped):
                        advance(f"{name}{self._rest()} · {label}")
                    return
                done, now = done + 1, monotonic()
                if self._left is not None:
                    self._left.step(now - last)
                last = now
                if plain and now - said >= _OFTEN:
                    said = now
                    self._say(f"{name}: {done} of at most {max(steps, done)} steps, {now - begun:.0f} s{self._rest()}")
                advance(f"{name}{self._rest()} · {label}")

            yield told
        if self._left is not None:
            self._left.end()
        self._say(f"{name}: {done} of at most {max(steps, done)} steps, {monotonic() - begun:.0f} s")

    def _rest(self) -> str:
        left = None if self._left is None else self._left.left
        return "" if left is None else f"; {_about(left)} left of all"

    def _say(self, sentence: str) -> None:
        self._console.print(wrapped(sentence, self._console.width), style="dim", markup=False, soft_wrap=True)

    def finish(self, record: Record) -> None:
        """Say what failed; the rest is counted."""
        if record.error is not None:
            self._console.print(
                f"failed: {record.label}: {record.error}",
                style="dim",
                markup=False,
                soft_wrap=columns(err=True) is None,
            )


def _about(seconds: float) -> str:
    """A time that is an estimate, in one unit or two."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"about {minutes} min" if minutes < 90 else f"about {minutes // 60} h {minutes % 60} min"


def _tasks(line: str | None) -> list[str] | None:
    return [] if line == "none" else _listed(line)


def _listed(line: str | None) -> list[str] | None:
    return None if line is None else [each.strip() for each in line.split(",") if each.strip()]
