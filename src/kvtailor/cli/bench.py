"""`kvtailor bench`: what each plan costs and buys, on one model and one text, or the tables of a suite."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvtailor.cli.asked import (
    GROUPS,
    OPTIONS,
    SERVES,
    SETS,
    TASKS,
    USUAL,
    TaskRequest,
    check_flags,
    settings_of,
    split_tasks,
    task_options,
    text_name,
    values_of,
)
from kvtailor.cli.machine_share import WAITING
from kvtailor.cli.report import LEAVE_OUT
from kvtailor.cli.suite_time import MEASURED, say_estimate, say_time_of
from kvtailor.cli.torchrun import under_torchrun
from kvtailor.cli.words.lines import begins_in, kept_in, say, stopped
from kvtailor.cli.words.options import GroupedCommand, dtype_options, margin_options, margins_of, share_option
from kvtailor.presets import FULL

if TYPE_CHECKING:
    from rich.console import Console

    from kvtailor.bench.measure.equivalence import Margins
    from kvtailor.bench.progress import Watch
    from kvtailor.bench.report import Summary
    from kvtailor.bench.schema import Record
    from kvtailor.bench.sinks.named import Sinks
    from kvtailor.bench.subject import Subject
    from kvtailor.cluster import Executor

__all__ = ["command", "executor_of"]

# Records tell their beginning to the millisecond.
_TICK = timedelta(milliseconds=1)

_MANY_BUDGETS = 20
"""Plans of a suite whose budgets take longer than a moment to find."""

DEFAULT_PLANS = (FULL, "streaming @ keep=0.25", "snapkv @ keep=0.25", "snapkv + adakv @ keep=0.25", "kivi(bits=4)")
OF_ONE_RUN = {
    "plans": "--plans",
    "texts": "--text",
    "tasks": "--tasks",
    **{name: option.flag for name, option in OPTIONS.items()},
}


@click.command(cls=GroupedCommand, short_help="Compare plans: quality, bytes and speed.")
@click.option(
    "--model",
    default="demo",
    show_default=True,
    help="demo, demo-draft (embedded), a folder, a GGUF file, a hub name; costs: random-llama, random-llama3-8b, "
    "random-llama2-7b.",
)
@click.option(
    "--plans", "--plan", "plans", multiple=True, help="A plan, or several with ';' between; may be given again."
)
@click.option("--suite", help="All tables of a suite, by name or TOML file; 'list' says which there are.")
@click.option("--set", "given", multiple=True, metavar="NAME=VALUE", help="A setting of the suite; may be given again.")
@click.option("--table", "tables", multiple=True, help="Only this table of the suite; may be given again.")
@click.option(
    "--estimate",
    is_flag=False,
    flag_value=MEASURED,
    metavar="[RATES]",
    help="Only say how long --suite takes, from the model's shapes: on 'flops=4e14, bytes=3e12', or as measured here.",
)
@click.option(
    "--text",
    "texts",
    multiple=True,
    help="A text file, or wikitext2, c4 or pg19; may be given again. Without it text is generated.",
)
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with data sets in their original layouts; without it the datasets library fetches them.",
)
@task_options
@click.option(
    "--tasks",
    default=",".join(USUAL),
    show_default=True,
    help=f"What to measure: {', '.join(TASKS)}, {', '.join(f'{name}:NAME' for name in SETS)}.",
)
@dtype_options
@click.option("--device", help="Such as cpu or cuda.")
@click.option(
    "--ray",
    is_flag=False,
    flag_value="here",
    metavar="[ADDRESS]",
    help="Run the cells on a Ray cluster: HOST:PORT, auto, ray://HOST:PORT; alone: this machine's, or a new one.",
)
@click.option(
    "--resources",
    metavar="LINE",
    help="What a cell takes on the cluster, such as 'cpus=2, memory=8GiB, speed.cpus=8'.  [cpus=1]",
)
@share_option
@click.option(
    "--workers",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Score so many plans at once, each in one thread, but for what is timed or weighed. Linux, on the CPU.",
)
@click.option("--again", is_flag=True, help="Measure anew what --out already has.")
@click.option("--leave-out", "without", multiple=True, metavar="FIELD=VALUE", help=LEAVE_OUT)
@click.option("--allow", multiple=True, help="Go on past this sanity check, by its name; the report says so.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for records and pages; goes on there."
)
@margin_options
@click.option(
    "--send-to",
    multiple=True,
    metavar="NAME[:PROJECT]",
    help="Pass each record on to wandb or mlflow, too; may be given again. Without it nothing is sent.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line of standard output.")
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Compare plans on one model and one text: quality with intervals, bytes that are read, times as ratios.

    \b
    kvtailor bench --plans "snapkv @ keep=0.25; kivi(bits=4)" --out results
    kvtailor bench --suite rankkv --model demo --data FOLDER --out results

    Everything is measured against 'full' on the same tokens, and 'full' against the model's own cache.
    """
    from rich.console import Console

    from kvtailor.bench.resources import resources_of_line
    from kvtailor.bench.sinks.named import Sinks, sinks_of
    from kvtailor.bench.subject import Subject
    from kvtailor.errors import KvtailorError
    from kvtailor.hf.model.processes import started

    console = Console(stderr=True, highlight=False)
    if options["suite"] == "list":
        _list_suites()
        return
    given = [name for name in OF_ONE_RUN if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE]
    _check_suite(options, given)
    if options["estimate"]:
        say_estimate(options)
        return
    _check_where(options)
    tasks, values = split_tasks(options["tasks"]), values_of(options)
    idle = [name for name in SERVES if name in given and not {task for task, _ in tasks} & set(SERVES[name])]
    if idle:
        words = "; ".join(f"{OF_ONE_RUN[name]} is about {' and '.join(SERVES[name])}" for name in idle)
        raise click.UsageError(f"{words}, which --tasks does not ask for.")
    try:
        resources = resources_of_line(options["resources"] or "")
        with executor_of(options["ray"], console) as executor, sinks_of(options["send_to"]) as sinks:
            spread = {
                "executor": executor,
                "resources": resources,
                "share": options["share"] == "on",
                "workers": options["workers"],
            }
            with console.status(f"loading {options['model']}"):
                processes = started(options["device"], begin=True)
                subject = Subject.load(
                    options["model"],
                    dtype=options["dtype"],
                    cache_dtype=options["cache_dtype"],
                    device=options["device"],
                )
            if not processes.first:
                # One process writes; what it knows from before it tells the others.
                options["out"], sinks = None, Sinks([])
            if options["suite"]:
                found, failed = _suite(options, subject, console, spread, sinks)
            else:
                texts = [text_name(text) for text in options["texts"]] or ["generated"]
                wanted = list(settings_of(tasks, values, texts, subject))
                found, failed = _one_run(options, wanted, subject, console, spread, sinks)
    except (KvtailorError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if options["as_json"]:
        click.echo(json.dumps(found, ensure_ascii=False, allow_nan=False))
    if failed:
        plans = ", ".join(dict.fromkeys(each.label for each in failed))
        count = "1 record has" if len(failed) == 1 else f"{len(failed)} records have"
        say(f"{count} an error in place of numbers ({plans}): exit code 1", err=True)
        ctx.exit(1)


check_flags(command)
command.option_groups = {
    "What is compared": ("model", "plans", "texts", "data", "suite", "tables", "given", "estimate"),
    "What is measured": ("tasks", *(name for name in OPTIONS if name not in chain.from_iterable(GROUPS.values()))),
    **GROUPS,
    "Where it runs": ("dtype", "cache_dtype", "device", "share", "workers", "ray", "resources"),
    "Results": ("out", "again", "without", "allow", "margin", "margin_points", "send_to", "as_json"),
}


def _check_suite(options: Mapping[str, Any], given: Sequence[str]) -> None:
    """Refuse options of one run (`given` on the line) beside a suite, and a suite's without one."""
    if options["suite"] and given:
        words = ", ".join(OF_ONE_RUN[name] for name in given)
        raise click.UsageError(f"{words} beside --suite: a suite says what runs; leave out one of them.")
    if options["plans"] and not any(each.strip(" ;") for each in options["plans"]):
        raise click.UsageError(
            '--plans is empty: give a plan, such as --plans "snapkv @ keep=0.25", or leave it out to compare a few.'
        )
    for name, flag in (("tables", "--table"), ("given", "--set"), ("estimate", "--estimate")):
        if options[name] and not options["suite"]:
            raise click.UsageError(f"{flag} without --suite: say which suite.")


def _check_where(options: Mapping[str, Any]) -> None:
    """Refuse what does not go with a cluster, and what goes with one or with a folder alone."""
    if options["ray"] is not None and under_torchrun():
        raise click.UsageError(
            "--ray under torchrun: a sweep sends whole models to a cluster, and torchrun's processes share one; leave "
            "out one of them."
        )
    if options["workers"] > 1 and (options["ray"] is not None or under_torchrun()):
        raise click.UsageError(
            "--workers beside --ray or under torchrun: these have workers of their own; leave out one of them."
        )
    if options["without"] and options["out"] is None:
        raise click.UsageError("--leave-out without --out: it is about the records of that folder.")
    if options["resources"] and not options["ray"]:
        raise click.UsageError("--resources without --ray: a run in one process has all that the process has.")


def executor_of(address: str | None, console: Console) -> AbstractContextManager[Executor | None]:
    """The executor of `--ray`; None without it."""
    if address is None:
        return nullcontext()
    from kvtailor.cluster import connect

    environment = {name: os.environ[name] for name in WAITING if name in os.environ}
    with console.status(f"connecting to Ray ({address})"):
        return connect(address, environment=environment)


def _one_run(
    options: dict[str, Any],
    wanted: Sequence[TaskRequest],
    subject: Subject,
    console: Console,
    spread: dict[str, Any],
    sinks: Sinks,
) -> tuple[dict[str, Any], list[Record]]:
    """Measure plans; return what `--json` says, and the records of what failed."""
    from kvtailor.bench.build import make_task
    from kvtailor.bench.progress import watch, works_of
    from kvtailor.bench.report import summarise
    from kvtailor.bench.report.terminal import show
    from kvtailor.bench.runner import contestants_of, plan_run, run

    plans = options["plans"] or DEFAULT_PLANS
    contestants = contestants_of([plan for each in plans for plan in each.split(";") if plan.strip()])
    tasks = [make_task(kind, settings, subject, data=options["data"]) for kind, settings in wanted]
    begun = datetime.now(UTC)
    with watch(*plan_run(tasks, contestants), console, works_of(tasks, contestants)) as seen, _stopped(options, seen):
        seen.begin(begins_in(options["out"]))
        records = run(
            subject,
            contestants,
            tasks,
            out=options["out"],
            advance=seen.step,
            finish=_each(seen.finish, sinks.take),
            resume=not options["again"],
            without=options["without"],
            allow=options["allow"],
            **spread,
        )
    seen.say_machines()
    _say_kept(begun, records, console)
    margins = margins_of(options["margin"], options["margin_points"])
    summary = summarise(records, margins)
    _pages(options["out"], margins, options["without"])
    _picture(summary, options["out"])
    show(summary, _terminal())
    return summary.as_dict(), [record for record in records if record.error is not None]


def _suite(
    options: dict[str, Any], subject: Subject, console: Console, spread: dict[str, Any], sinks: Sinks
) -> tuple[dict[str, Any], list[Record]]:
    """Run a suite; return as `_one_run` does. What the suite was known to lack before it began has not failed."""
    from rich.markup import escape

    from kvtailor.bench.progress import watch, works_of
    from kvtailor.bench.report import summarise
    from kvtailor.bench.report.suite.tables import suite_pages
    from kvtailor.bench.report.terminal import show_suite
    from kvtailor.bench.suite.fitted import fit_shares, known_before, written
    from kvtailor.bench.suite.run import prepare
    from kvtailor.bench.suite.shapes import fit_settings, settings_of_lines
    from kvtailor.bench.suite.suite import read_suite, suites
    from kvtailor.ops.files import make_folder, read_toml, seal_toml, write_whole

    suite, kept = read_suite(options["suite"]), None
    if options["out"] is not None:
        kept = options["out"] / "suites" / f"{suite.name}.toml"
    with console.status(f"preparing {suite.name}"):
        before = known_before(kept, subject.name) if kept is not None and not options["again"] else {}
        suite, differing = fit_settings(suite, subject, settings_of_lines(options["given"]))
        count = len([text for text in suite.shares_of(subject.name) if text not in before])
        if count >= _MANY_BUDGETS:
            console.print(
                f"first the budgets of {count} plans are computed, so that all have the same bytes: a minute or two",
                style="dim",
                markup=False,
            )
        suite = fit_shares(suite, subject, before)
        prepared = prepare(suite, subject, data=options["data"], only=options["tables"])
    for sentence in differing:
        console.print(f"set for {subject.name}: {sentence}", style="dim", markup=False)
    for sentence in _by_reason(prepared.unavailable):
        console.print(f"not to be had here: {sentence}", style="yellow", markup=False)
    if kept is not None:
        # Beside the records and before them, so that the pages can be made from this folder alone, whatever happens.
        text = written(suite, read_toml(suites().get(options["suite"], Path(options["suite"]))), kept)
        make_folder(kept.parent)
        write_whole(kept, seal_toml(text))
    say_time_of(prepared, console)
    begun = datetime.now(UTC)
    with watch(*prepared.size, console, works_of(prepared.jobs)) as seen, _stopped(options, seen):
        seen.begin(begins_in(options["out"]))
        records = prepared.run(
            out=options["out"],
            advance=seen.step,
            finish=_each(seen.finish, sinks.take),
            resume=not options["again"],
            without=options["without"],
            allow=options["allow"],
            **spread,
        )
    seen.say_machines()
    _say_kept(begun, records, console)
    margins = margins_of(options["margin"], options["margin_points"])
    _pages(options["out"], margins, options["without"])
    pages = suite_pages(suite, records, only=options["tables"])
    summary = summarise(records, margins)
    _terminal().print(f"\n[bold]{escape(summary.advice.sentence or summary.headline)}[/]")
    if pages is not None:
        show_suite(pages, _terminal())
    told = {
        "suite": suite.name,
        "headline": summary.headline,
        "missing": list(prepared.missing),
        "unavailable": list(prepared.unavailable),
        "pages": asdict(pages) if pages is not None else None,
    }
    return told, prepared.failed(records)


def _by_reason(sentences: Sequence[str]) -> list[str]:
    """Return sentences of a subject and a reason, each reason once: the first subject, and how many more it is true of.

    The name that a reason quotes first is of its own subject, such as that of a set of data.
    """
    found: dict[str, list[str]] = {}
    for sentence in sentences:
        _, _, reason = sentence.partition("): ") if "): " in sentence else sentence.partition(": ")
        quoted = re.search(r"'([^']+)'", reason)
        found.setdefault(re.sub(rf"\b{re.escape(quoted[1])}\b", "", reason) if quoted else reason, []).append(sentence)
    told = []
    for same in found.values():
        first, more = same[0], len(same) - 1
        told.append(first if not more else f"{first} (and {more} more, for the same reason)")
    return told


def _list_suites() -> None:
    from kvtailor.bench.suite.suite import read_suite, suites

    for name in suites():
        suite = read_suite(name)
        say(f"{name:<12}{suite.title}" + (f"  ({suite.report})" if suite.report else ""), hang=12)


def _each(*takers: Callable[[Record], None]) -> Callable[[Record], None]:
    """One function that gives a record to several."""

    def take(record: Record) -> None:
        for taker in takers:
            taker(record)

    return take


def _stopped(options: dict[str, Any], seen: Watch) -> AbstractContextManager[None]:
    """Turn Ctrl-C into what is kept of a run."""
    return stopped(lambda: f"{seen.done} of {seen.cells} cells were done. {kept_in(options['out'])}")


def _say_kept(begun: datetime, records: list[Record], console: Console) -> None:
    kept = sum(datetime.fromisoformat(record.started) < begun - _TICK for record in records)
    if kept:
        console.print(f"{kept} of {len(records)} records were there already (--again measures anew)", style="dim")


def _pages(out: Path | None, margins: Margins, without: Sequence[str]) -> None:
    from kvtailor.cli.report import write

    if out is not None:
        made = write([out], out, margins, without)
        say(f"{made[0]} and {len(made) - 1} files beside it", dim=True, err=True)


def _picture(summary: Summary, out: Path | None) -> None:
    from kvtailor.bench.report.plot import plot
    from kvtailor.errors import KvtailorError

    if out is None:
        return
    try:
        where = plot(summary, out / "loss-vs-bytes.png")
        say(str(where), dim=True, err=True)
    except KvtailorError as error:
        say(f"no picture: {error}", dim=True, err=True)


def _terminal() -> Console:
    from rich.console import Console

    return Console(highlight=False)
