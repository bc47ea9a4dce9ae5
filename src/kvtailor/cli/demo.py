"""`kvtailor demo`: the tour. The embedded model reads a text that hides facts, and answers questions from caches that
hold all of it, fewer bits of it, or a quarter of its tokens; then a table says what each plan cost on more text."""

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
    from collections.abc import Callable

    from rich.console import Console

    from kvtailor.bench.contestant import Contestant
    from kvtailor.bench.data.synthetic.documents import Document
    from kvtailor.bench.subject import Subject

__all__ = ["command"]

PLANS = {
    FULL: "everything is kept, as every model does by itself",
    "kivi(key_bits=8, value_bits=4, recent=32)": "every token is kept, in fewer bits",
    "snapkv(kernel=21) @ keep=0.25": "a quarter of the tokens: those that the end of the text looks at",
    "snapkv(kernel=21) + adakv + kivi(bits=4, recent=32) @ keep=0.25": "a quarter of the tokens, in 4 bits",
    "streaming @ keep=0.25": "the first tokens and the newest: what lay between is gone",
}
"""The plans, each with what it keeps."""
LONGEST = 1024
ANSWER_ROOM = 24
FACTS = 4
CONTEXT = 384
WINDOWS = 42
ROUNDS = 2
ANSWER_WORTH = 1.15
"""An answer over a prompt of its length and `ANSWER_TOKENS` tokens after it, as `_seconds` times them."""
ANSWER_TOKENS = 8
WINDOW_WORTH = 1.1
"""A window of the table, with what is checked of it, over one that `_seconds` times."""
MORE_WINDOWS = 90
"""What the rest of the tour takes, in windows: times of tokens, checks of the machine, pages. Measured in processor
time on one core with AVX-512: 4.5 s of answers, 25.7 s of windows, 8.5 s of the rest."""
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
        "model.generate(**inputs, cache=cache)",
    ),
)


@click.command(short_help="The tour: answers from a compressed cache, and what it cost.")
@click.option(
    "--model",
    default="demo",
    show_default=True,
    help="'demo' or 'demo-draft' (embedded), a folder, a GGUF file, or a hub name.",
)
@click.option(
    "--state", type=click.IntRange(0, 999_999), default=3, show_default=True, help="Another text with other facts."
)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for records and report.html.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line of standard output.")
def command(model: str, state: int, out: Path | None, as_json: bool) -> None:
    """The tour: answers from compressed caches, right or wrong, and then what each plan cost on more text.

    Nothing in it is prepared: wrong answers are shown as wrong. It says first how long it takes, below two minutes on
    two cores. With --out, a tour that was stopped goes on: what the table needs is not measured twice.
    """
    from rich.console import Console

    from kvtailor.bench.report import summarise
    from kvtailor.bench.report.terminal import show
    from kvtailor.bench.runner import contestants_of
    from kvtailor.bench.subject import Subject
    from kvtailor.cli.report import write
    from kvtailor.errors import KvtailorError

    begin = time.perf_counter()
    console = Console(highlight=False)
    try:
        with Console(stderr=True).status(f"loading {model}"):
            subject = Subject.load(model, dtype=_dtype(model))
        contestants = contestants_of(tuple(PLANS))
        expected = _begin(subject, contestants, begin, console)
        answers = _answers(subject, contestants, state, console)
        console.rule("what each plan cost, on more text", align="left", style="dim")
        summary = summarise(_bench(subject, contestants, out))
        show(summary, console)
        page = None
        if out is not None:
            took = f"This tour took {time.perf_counter() - begin:.0f} seconds; {expected} were expected."
            page = write([out], out, said=(took,))[0]
    except (KvtailorError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    seconds = time.perf_counter() - begin
    _next(console, seconds, page)
    if as_json:
        told = {"answers": answers, "seconds": seconds, **summary.as_dict()}
        click.echo(json.dumps(told, ensure_ascii=False, allow_nan=False))


def _dtype(model: str) -> str | None:
    """float32 for an embedded model, which is small: a CPU without arithmetic in 16 bits takes far longer in them."""
    from kvtailor.hf.model import embedded

    return "float32" if model in embedded.NAMES else None


def _begin(subject: Subject, contestants: list[Contestant], begin: float, console: Console) -> str:
    """Say what a KV cache is, what is about to be shown, and how long that takes on this machine; return the time."""
    from kvtailor.hf.sizes.size import cache_size
    from kvtailor.ops.sizes import byte_text

    most = _longest(subject)
    each = cache_size(subject.model, FULL, context=most).full / most
    console.print(
        "As a model reads, it keeps keys and values of every token, to look back at: its KV cache. Here that is "
        f"{byte_text(each)} a token, and it grows with the text. kvtailor keeps fewer tokens, or fewer bits of each. "
        f"You will see the same {FACTS} questions answered from {len(PLANS)} caches, right or wrong, and then a table."
    )
    answer, window = _seconds(subject, contestants[len(contestants) // 2])
    windows = WINDOW_WORTH * WINDOWS * (len(contestants) + 1) + MORE_WINDOWS
    seconds = ANSWER_WORTH * FACTS * len(contestants) * answer + windows * window
    expected = _minutes(time.perf_counter() - begin + seconds)
    console.print(f"All of it takes about {expected} here.", style="dim")
    return expected


def _seconds(subject: Subject, contestant: Contestant) -> tuple[float, float]:
    """Seconds of a prompt as long as the text with some tokens after it, and of a window of the table, on this machine.

    The plan is one of those in the middle: what a plan does itself is a part of both.
    """
    import torch

    from kvtailor.bench.tasks.perplexity import score_window

    def timed(work: Callable[[], object]) -> float:
        begin = time.perf_counter()
        work()
        subject.wait()
        return time.perf_counter() - begin

    context, tail = _window(subject)
    ids = torch.arange(max(_longest(subject), context + tail)).remainder(64).to(subject.device) + 4

    def answer() -> None:
        _, cache = subject.prefill(ids[None, : _longest(subject)], subject.new_cache(contestant), last_only=True)
        for _ in range(ANSWER_TOKENS):
            subject.forward(ids[None, :1], cache)

    def window() -> None:
        score_window(subject, contestant, ids[:context], ids[context : context + tail])

    # The first of a kind in a process takes longer than any other.
    timed(window)
    return timed(answer), min(timed(window) for _ in range(3))


def _longest(subject: Subject) -> int:
    """Tokens of the text that hides the facts, an answer's room left out."""
    return LONGEST if subject.positions is None else min(LONGEST, subject.positions - ANSWER_ROOM)


def _window(subject: Subject) -> tuple[int, int]:
    """Tokens of a window of the table that are compressed, and that are scored behind them."""
    context = CONTEXT if subject.positions is None else min(CONTEXT, subject.positions * 3 // 4)
    return context, context // 6


def _minutes(seconds: float) -> str:
    """A time that is no more than an estimate."""
    if seconds < 90:
        return f"{max(10, 10 * round(seconds / 10))} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds >= 150 else "2 minutes"


def _answers(subject: Subject, contestants: list[Contestant], state: int, console: Console) -> list[dict[str, Any]]:
    from rich.text import Text

    from kvtailor.ops.sizes import byte_text

    weights = subject.weights()
    size = f", {weights[0] / 1e6:.1f} million parameters" if weights else ""
    documents, dtype = _documents(subject, state), str(subject.cache_dtype).removeprefix("torch.")
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
        console.print(f"  {PLANS.get(contestant.label, '')}", style="dim")
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
                f"{byte_text(last.bytes_full)} in {dtype})",
                style="dim",
            )
        console.print()
    return told


def _documents(subject: Subject, state: int) -> list[Document]:
    """The same facts in the same text, each asked once."""
    from kvtailor.bench.data.synthetic.documents import make_document

    length = _longest(subject)
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
    from kvtailor.bench.tasks.perplexity import Perplexity
    from kvtailor.bench.tasks.speed import Speed

    (context, tail), source = _window(subject), "generated text"
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
        Speed(text=text, source=source, context=context, tokens=24, rounds=ROUNDS, warmup=1),
    ]
    with watch(*plan_run(tasks, contestants), Terminal(stderr=True)) as seen:
        return run(subject, contestants, tasks, out=out, advance=seen.step, finish=seen.finish)


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
