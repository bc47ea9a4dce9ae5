"""`kvtailor demo`: the tour. What plans cost and buy on the embedded model, in one sentence and a table; then the model
reads a long text that hides facts, and answers from a cache cut to measure; then `fit` finds a plan for a memory."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvtailor.cli.words.lines import say
from kvtailor.presets import FULL

if TYPE_CHECKING:
    from rich.console import Console

    from kvtailor.bench.contestant import Contestant
    from kvtailor.bench.data.synthetic.documents import Document
    from kvtailor.bench.subject import Subject
    from kvtailor.fitting.result import Fit

__all__ = ["command"]

PLANS = (
    FULL,
    "kivi(key_bits=8, value_bits=4, recent=32)",
    "snapkv(kernel=21) @ keep=0.25",
    "snapkv(kernel=21) + adakv + kivi(bits=4, recent=32) @ keep=0.25",
    "streaming @ keep=0.25",
)
LONGEST = 2048
ANSWER_ROOM = 24
FACTS = 4
CONTEXT = 384
WINDOWS = 50
FIDELITY_WINDOWS = 5
# A tour has no time for the 46 needles that the usual margin of 10 points takes with four plans; 20 points take 21.
DOCUMENTS = 7
MARGIN_POINTS = 20.0
ROUNDS = 3
FIT_CONTEXT = 384
FIT_WINDOWS = 40
# A tour has no time for methods that read a prompt twice, or that fit levels to each token.
FIT_WITHOUT = (
    "kvzip", "kvzip_plus", "nuq", "minicache", "critical", "expected", "d2o", "dynamickv", "pairs", "compactor",
    "noncausal",
)  # fmt: skip
FIT_SHARE = 0.2
# What to type next, each command on a line of its own that a terminal of 80 columns does not part.
YOUR_TURN = (
    ("your model, your memory", "kvtailor fit --model NAME --text FILE --memory 2GiB --context 32768"),
    ("compare plans", 'kvtailor bench --model NAME --text FILE --plans "snapkv @ keep=0.25; kivi4"'),
    ("see the text come", 'kvtailor run --model NAME --plan "snapkv @ tokens=1024" --prompt-file FILE'),
    ("every method", "kvtailor ls"),
    ("what a plan will do", 'kvtailor show "snapkv + adakv @ tokens=1024"'),
    (
        "in Python",
        'cache = kvtailor.cache_for(model, "snapkv @ tokens=1024")',
        "model.generate(**inputs, past_key_values=cache)",
    ),
)


@click.command(short_help="The tour: answers from a compressed cache, and what it cost.")
@click.option(
    "--model", default="demo", show_default=True, help="'demo' or 'demo-draft' (embedded), a folder, or a hub name."
)
@click.option(
    "--state", type=click.IntRange(0, 999_999), default=3, show_default=True, help="Another text with other facts."
)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for records and report.html.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line of standard output.")
def command(model: str, state: int, out: Path | None, as_json: bool) -> None:
    """The tour: which plan is shown to lose next to nothing at which memory, and then answers from such caches.

    Nothing in it is prepared: wrong answers are shown as wrong. Takes some two minutes on two cores.
    """
    from rich.console import Console

    from kvtailor.bench.measure.equivalence import Margins
    from kvtailor.bench.report import summarise
    from kvtailor.bench.report.pages.terminal import show
    from kvtailor.bench.runner import contestants_of
    from kvtailor.bench.subject import Subject
    from kvtailor.cli.report import write
    from kvtailor.errors import KvtailorError

    begin = time.perf_counter()
    console = Console(highlight=False)
    try:
        with Console(stderr=True).status(f"loading {model}"):
            subject = Subject.load(model)
        contestants = contestants_of(PLANS)
        margins = Margins(points=MARGIN_POINTS)
        summary = summarise(_bench(subject, contestants, out), margins)
        show(summary, console)
        answers = _answers(subject, contestants, state, console)
        page = write(out, out, margins)[0] if out is not None else None
        fitted = _fit(subject, out, console)
    except (KvtailorError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    _next(console, time.perf_counter() - begin, page)
    if as_json:
        told = {"answers": answers, "fit": fitted.as_dict(), **summary.as_dict()}
        click.echo(json.dumps(told, ensure_ascii=False, allow_nan=False))


def _answers(subject: Subject, contestants: list[Contestant], state: int, console: Console) -> list[dict[str, Any]]:
    from rich.text import Text

    from kvtailor.bench.report.pages.terminal import byte_text

    weights = subject.weights()
    size = f", {weights[0] / 1e6:.1f} million parameters" if weights else ""
    documents = _documents(subject, state)
    console.print()
    console.rule(f"see it: one text, {FACTS} questions, {len(contestants)} caches", align="left", style="dim")
    console.print()
    console.print(f"Model: {subject.name}{size}.", highlight=False)
    console.print(f"Text: {subject.count(documents[0].context)} tokens of generated prose that hide {FACTS} facts:")
    console.print()
    _show_facts(documents, console)
    console.print()
    told: list[dict[str, Any]] = []
    for contestant in contestants:
        console.print(Text(contestant.label, style="bold"))
        right, last = 0, None
        for document in documents:
            found, good = _ask(subject, contestant, document, console, cold=not told)
            told.append(
                {"question": _question(document), "expected": document.answer.strip(), "right": good, **asdict(found)}
            )
            right, last = right + good, found
        assert last is not None
        if last.bytes_held is not None and last.bytes_full and last.tokens_held is not None:
            console.print(
                f"  {right} of {len(documents)} right, {last.tokens_held:.0f} of {last.tokens_seen} tokens held in "
                f"{byte_text(last.bytes_held)} ({100 * last.bytes_held / last.bytes_full:.0f} % of "
                f"{byte_text(last.bytes_full)})",
                style="dim",
            )
        console.print()
    return told


def _documents(subject: Subject, state: int) -> list[Document]:
    """The same facts in the same text, each asked once."""
    from kvtailor.bench.data.synthetic.documents import make_document

    length = LONGEST if subject.positions is None else min(LONGEST, subject.positions - ANSWER_ROOM)
    return [
        make_document(
            "needle",
            state=state,
            length=length - subject.start().numel(),
            depth=index / (FACTS - 1),
            count_tokens=subject.count,
            distractors=FACTS - 1,
        )
        for index in range(FACTS)
    ]


def _show_facts(documents: list[Document], console: Console) -> None:
    """The facts where they stand, each on a line with as much of the prose around it as fits."""
    from rich.text import Text

    context = documents[0].context
    for document in documents:
        fact = str(document.meta["fact"])
        at = context.find(fact)
        around = max(0, console.width - len(fact) - 10) // 2
        before = context[max(0, at - around) : at].split(" ", 1)[-1] if at else ""
        after = context[at + len(fact) : at + len(fact) + around].rsplit(" ", 1)[0]
        line = Text("  ").append(f"… {before}" if before else "", style="dim").append(fact, style="bold")
        console.print(line.append(f"{after} …", style="dim"), no_wrap=True, overflow="ellipsis")


def _ask(
    subject: Subject, contestant: Contestant, document: Document, console: Console, *, cold: bool
) -> tuple[Any, bool]:
    from kvtailor.cli.run import generate

    console.print(f"  {_question(document):<46} ", end="", style="dim", markup=False)
    shown = ""

    def show(piece: str) -> None:
        # The model goes on after its answer; what counts, and what is shown, is the answer's own line.
        nonlocal shown
        before = _first_line(shown)
        shown += piece
        console.print(_first_line(shown)[len(before) :], end="", markup=False)

    longest = subject.count(document.answer) + 2
    found = generate(subject, contestant, subject.prompt(document.prompt), tokens=longest, show=show, cold=cold)
    good = is_right(found.text, document.answer)
    console.print("  [green]right[/]" if good else f"  [red]wrong[/] [dim]({document.answer.strip()})[/]")
    return found, good


def is_right(text: str, answer: str) -> bool:
    """Whether a continuation begins with exactly this answer, and not with a longer word or number."""
    text, answer = text.strip(), answer.strip()
    return text.startswith(answer) and not text[len(answer) : len(answer) + 1].isalnum()


def _question(document: Document) -> str:
    return document.question.split("Question:", 1)[-1].split("Answer:", 1)[0].strip()


def _first_line(text: str) -> str:
    line = text.strip().split("\n", 1)[0]
    return line.split(".", 1)[0]


def _bench(subject: Subject, contestants: list[Contestant], out: Path | None) -> Any:
    from rich.console import Console as Terminal

    from kvtailor.bench.data.texts import BETWEEN, generated_documents, starts_of
    from kvtailor.bench.progress import watch
    from kvtailor.bench.runner import plan_run, run
    from kvtailor.bench.tasks.contract import Task
    from kvtailor.bench.tasks.fidelity import Fidelity
    from kvtailor.bench.tasks.needle import Needle
    from kvtailor.bench.tasks.perplexity import Perplexity
    from kvtailor.bench.tasks.speed import Speed

    context = CONTEXT if subject.positions is None else min(CONTEXT, subject.positions * 3 // 4)
    tail, source = context // 6, "generated text"
    documents = generated_documents(6 * (context + tail) * WINDOWS)
    text = BETWEEN.join(documents)
    tasks: list[Task] = [
        Perplexity(
            text=text,
            source=source,
            starts=starts_of(documents),
            context=context,
            continuation=tail,
            windows=WINDOWS,
        ),
        Needle(lengths=(context,), depths=(0.1, 0.5, 0.9), documents=DOCUMENTS),
        Fidelity(text=text, source=source, context=context, continuation=tail, windows=FIDELITY_WINDOWS),
        Speed(text=text, source=source, context=context, tokens=24, rounds=ROUNDS, warmup=1),
    ]
    with watch(*plan_run(tasks, contestants), Terminal(stderr=True)) as seen:
        return run(subject, contestants, tasks, out=out, advance=seen.step, finish=seen.finish, resume=False)


def _fit(subject: Subject, out: Path | None, console: Console) -> Fit:
    """The plan that is cut to a fifth of the cache, on generated text."""
    from rich.console import Console as Terminal

    from kvtailor.cli.fit import TerminalProgress, show
    from kvtailor.fitting.material import generated
    from kvtailor.fitting.pieces import CONTINUATION
    from kvtailor.fitting.run import fit

    context = FIT_CONTEXT if subject.positions is None else min(FIT_CONTEXT, subject.positions - CONTINUATION)
    share = f"{100 * FIT_SHARE:g} %"
    console.print()
    console.rule(f"fit: the plan that is cut to {share} of the cache's bytes", align="left", style="dim")
    folder = None if out is None else out / "fit"
    found = fit(
        subject, generated(context, FIT_WINDOWS), keep_bytes=FIT_SHARE, context=context, effort="tour", timed=False,
        without=FIT_WITHOUT, out=folder, progress=TerminalProgress(Terminal(stderr=True, highlight=False)),
    )  # fmt: skip
    show(found, folder)
    return found


def _next(console: Console, seconds: float, page: Path | None) -> None:
    console.print()
    console.rule("your turn", align="left", style="dim")
    console.print()
    for what, *how in YOUR_TURN:
        console.print(f"  {what}:")
        for line in how:
            console.print(f"    {line}", markup=False, soft_wrap=True)
    console.print()
    if page is not None:
        say(f"  The same with pictures: {page}")
    console.print(f"  This tour took {seconds:.0f} seconds.", style="dim")
