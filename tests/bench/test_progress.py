"""What a run shows of itself: cells and steps that were counted, the time so far, and no guess at the rest."""

import io
import re
import threading
import time

from rich.console import Console
from tests.support.bench.dummy import FULL, CountingModel, DummyCache, contestant, subject
from tests.support.bench.frauds import TEXT, record, task

from kvtailor.bench import progress
from kvtailor.bench.progress import bar, watch
from kvtailor.bench.runner import contestants_of, plan_run, run
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.fidelity import Fidelity
from kvtailor.bench.tasks.needle import Needle
from kvtailor.bench.tasks.perplexity import Perplexity
from kvtailor.bench.tasks.speed import Speed


def shown(terminal):
    screen = io.StringIO()
    return screen, Console(file=screen, force_terminal=terminal, width=160, legacy_windows=False)


def plain(screen):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())


def test_a_cell_that_fills_most_of_the_time_is_not_called_almost_done():
    """Of four cells three are done at once and the last one waits: no share and no remaining time is shown for it."""
    screen, console = shown(terminal=True)
    with watch(4, 400, console) as seen:
        for label in "abc":
            for _ in range(130):
                seen.step(f"perplexity · {label}")
            seen.finish(record(label, "perplexity"))
        for _ in range(5):
            seen.step("speed · slow one")
        seen._progress.refresh()
    said = plain(screen)
    assert "speed · slow one" in said and "3 of 4 cells, 395 of at most 400 steps" in said
    assert "%" not in said and "-:--:--" not in said
    assert len(set(re.findall(r"\d:\d\d:\d\d", said))) == 1, "the time so far, and no other"


def test_work_of_equal_units_is_counted_without_a_guess_too():
    screen, console = shown(terminal=True)
    with bar(7, console) as advance:
        for _ in range(3):
            advance("passage")
    assert "3/7" in plain(screen) and "%" not in plain(screen) and "-:--:--" not in plain(screen)


def test_without_a_terminal_each_finished_cell_is_a_line():
    screen, console = shown(terminal=False)
    given = subject(CountingModel(), one=DummyCache(keep=20))
    asked, plans = [task(), task(text=TEXT[::-1], source="other")], [FULL, contestant("one")]
    with watch(*plan_run(asked, plans), console) as seen:
        run(given, plans, asked, bandwidth=False, advance=seen.step, finish=seen.finish)
    lines = screen.getvalue().splitlines()
    assert [line.split("·")[1].strip() for line in lines] == ["full: done", "one: done"] * 2
    assert [re.match(r"\[(\d) of 4, 0:\d\d so far\] perplexity \(context=200", line)[1] for line in lines] == list(
        "1234"
    )


def test_a_run_says_what_comes_then_its_first_step_and_a_long_cell_now_and_then(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    screen, console = shown(terminal=False)
    with watch(2, 50, console) as seen:
        seen.begin("It stays in out.")
        said, begun = " ".join(screen.getvalue().split()), len(screen.getvalue())
        assert re.fullmatch(
            r"2 cells, 50 steps at most\. How long they take is not known until the first step, which begins at "
            r"\d\d:\d\d:\d\d\. Ctrl-C stops it\. It stays in out\.",
            said,
        )
        seen.step("known before")
        for _ in range(40):
            now[0] += 4.0
            seen.step("slow one")
    lines = screen.getvalue()[begun:].splitlines()
    assert lines[0] == "the first step took 4 s: slow one"
    assert lines[1] == "[step 10 of at most 50, 0:36 so far] slow one" and len(lines) == 5


def test_a_cell_that_failed_says_why_in_its_line():
    screen, console = shown(terminal=False)
    with watch(1, 0, console) as seen:
        seen.finish(record("one", "perplexity", error="There is [no] space."))
    assert screen.getvalue() == "[1 of 1, 0:00 so far] perplexity · one: failed: There is [no] space.\n"


def test_as_many_cells_come_as_were_announced():
    given, plans = Subject.load("demo"), contestants_of(["knorm @ keep=0.5"])
    tasks = [
        Perplexity(text=TEXT, source="t", context=60, continuation=8, windows=2),
        Fidelity(text=TEXT, source="t", context=60, continuation=8, windows=2),
        Needle(lengths=(150, 200), depths=(0.5,), documents=1),
        Speed(text=TEXT, source="t", context=40, tokens=2, rounds=1, patience=1, warmup=0),
    ]
    steps, found = [], []
    cells, most = plan_run(tasks, plans)
    records = run(given, plans, tasks, bandwidth=False, advance=steps.append, finish=found.append)
    assert cells == len(records) == len(found) == 2 + 2 + 4 + 3
    assert found == records and len(steps) <= most


def test_a_bar_that_does_not_tick_draws_only_between_samples() -> None:
    """A thread that draws while a sample is taken would take part of its time."""
    file, console = shown(True)
    before = threading.active_count()
    with bar(3, console, "[1 of 2] a table: preparing", ticking=False) as advance:
        assert threading.active_count() == before and "[1 of 2] a table: preparing" in file.getvalue()
        drawn = len(file.getvalue())
        time.sleep(0.3)
        assert len(file.getvalue()) == drawn
        advance("[1 of 2] a table: a side")
        assert "a side" in file.getvalue()[drawn:] and "1/3" in file.getvalue()[drawn:]
    with bar(3, console):
        assert threading.active_count() == before + 1


def test_paced_work_says_the_time_left_without_a_terminal_too(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    told = io.StringIO()
    with progress.paced(6, Console(file=told, width=100)) as step:
        assert told.getvalue().startswith("6 steps; the first will tell how long they take.")
        for label, seconds in [("states", 2), ("states", 2), ("gradients", 60), ("gradients", 62), ("gradients", 1)]:
            now[0] += seconds
            step(label)
    assert told.getvalue().splitlines()[1:] == [
        "[1 of 6] states: 10 s left at this pace",
        "[3 of 6] gradients: 3 min left at this pace",
        "[4 of 6] gradients: 2 min left at this pace",
    ]
