"""Nothing that the command line prints is wider than a terminal of 80 columns; `ls` does without torch."""

import io
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner
from rich.console import Console
from tests.support.bench.frauds import record

from kvtailor.bench.kinds import KINDS
from kvtailor.bench.progress import Remaining, Watch, Work, bar, watch, works_of
from kvtailor.bench.runner import contestants_of, plan_run
from kvtailor.bench.tasks.needle import Needle
from kvtailor.bench.tasks.perplexity import Perplexity
from kvtailor.cli import _verbs, main
from kvtailor.cli.bench import command as bench
from kvtailor.cli.words.lines import columns, wrapped
from kvtailor.cli.words.options import GroupedCommand

VERBS = [[verb] for verb in _verbs()]
HELP = [[], *VERBS]
PLANS = ("snapkv(window=16) + adakv + kivi(bits=4) @ keep=0.25, slack=64", "rocket", "full", "kivi4")


def said(*words, env=None):
    found = CliRunner().invoke(main, list(words), env={"COLUMNS": "80", **(env or {})}, terminal_width=80)
    assert "Traceback" not in found.output
    return found.output


def wide(text, most=80):
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return [line for line in plain.splitlines() if len(line) > most]


@pytest.mark.parametrize("words", HELP, ids=" ".join)
def test_help_fits(words):
    if words == ["eval"]:
        pytest.importorskip("lm_eval")
    text = said(*words, "--help")
    # A word that cannot be parted, such as an address in lm_eval's help, stays whole.
    assert [line for line in wide(text) if len(line.split()) > 1 and "://" not in line] == []
    assert "\\b" not in text and "Usage" in text or words == ["eval"]


@pytest.mark.parametrize("words", [["ls"], ["ls", "presets"], ["bench", "--suite", "list"]], ids=" ".join)
def test_lists_fit(words):
    assert len(said(*words).splitlines()) > 5 and wide(said(*words)) == []


@pytest.mark.parametrize("plan", PLANS)
def test_show_and_check_fit(plan):
    for words in (
        ["show", plan],
        ["show", plan, "--model", "demo", "--context", "300"],
        ["check", plan, "--model", "demo"],
    ):
        text = said(*words)
        assert wide(text) == [] and len(text.splitlines()) > 3
    refused = said("check", "snapk + adakv(floor=7) @ tokens=3, keep=1")
    assert "fault" in refused and wide(refused) == []


def test_a_file_gets_each_sentence_on_one_line():
    wrapped_text = said("show", "snapkv @ tokens=64")
    whole = CliRunner().invoke(main, ["show", "snapkv @ tokens=64"], env={"COLUMNS": ""}).output
    assert " ".join(whole.split()) == " ".join(wrapped_text.split()) and wide(whole)


def test_a_path_stays_whole_and_the_rest_is_indented(monkeypatch):
    path = "/" + "x" * 90
    assert wrapped(f"  written to {path} just now", 40).split("\n") == ["  written to", f"    {path}", "    just now"]
    assert wrapped("short", 40) == "short"
    monkeypatch.setenv("COLUMNS", "100")
    assert columns() == 100
    monkeypatch.delenv("COLUMNS")
    assert columns() is None


def test_every_option_of_bench_stands_under_a_heading():
    text = said("bench", "--help")
    heads = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert heads[:2] == ["What is compared", "What is measured"] and heads[-1] == "Further options"
    assert any(head.startswith("Of perplexity, fidelity") for head in heads)
    last = text[text.index("Further options") :]
    assert re.findall(r"--[a-z-]+", last) == ["--help"]
    for param in bench.params:
        assert all(re.search(rf"{flag}\b", text) for flag in param.opts), param.name
    assert {name for names in bench.option_groups.values() for name in names} == {param.name for param in bench.params}


def test_an_option_that_no_group_names_is_not_lost():
    import click

    class Late(GroupedCommand):
        option_groups = {"Named": ("one",)}

    late = Late("late", params=[click.Option(["--one"]), click.Option(["--two"])])
    text = CliRunner().invoke(late, ["--help"]).output
    assert text.index("Named:") < text.index("--one") < text.index("Further options:") < text.index("--two")


def test_ls_does_without_torch():
    code = (
        "import sys; from kvtailor.cli import main\n"
        "try: main(['ls'])\nexcept SystemExit: pass\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr.strip().splitlines()[-1] == "False False"
    assert "snapkv" in done.stdout and "calibrations" in done.stdout


def test_progress_fits_a_terminal_and_a_file():
    label = "a plan of many words " * 6
    for terminal in (True, False):
        screen = io.StringIO()
        console = Console(file=screen, force_terminal=terminal, width=80, legacy_windows=False)
        work = Work(alike=("perplexity",), even=True, cells=4, steps=400)
        with watch(4, 400, console, [work]) as seen:
            for _ in range(2):
                for _ in range(50):
                    seen.step(label)
                seen.finish(record(label, "perplexity"))
                seen._progress.refresh()
        with bar(9, console, label) as advance:
            advance(label)
        lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()).replace("\r", "\n")
        assert lines.strip() and wide(lines) == []


def paced(works, cells):
    """A run of cells of (seconds, steps); None: known from before."""
    remaining = Remaining(works=works)
    for seconds, steps in cells:
        for _ in range(steps):
            remaining.step()
        remaining.finish(seconds)
    return remaining


EVEN = Work(alike=("perplexity", 512), even=True, cells=4, steps=40)


def test_the_time_left_is_a_range_of_what_was_timed():
    assert paced([EVEN], [(30, 10)]).words() == "", "one plan is no range"
    assert paced([EVEN], [(30, 10), (60, 10)]).words() == "about 1 min to 2 min left"
    assert paced([EVEN], [(30, 10), (60, 10), (40, 10), (40, 10)]).words() == ""
    half = paced([EVEN], [(3, 10), (6, 10)])
    for _ in range(10):
        half.step()
    assert half.words() == "about 3 s to 6 s left"


def test_what_was_known_before_or_failed_is_no_pace():
    assert paced([EVEN], [(None, 10), (None, 10), (30, 10)]).words() == ""


def test_of_work_that_was_not_timed_nothing_is_said():
    """A lower bound that leaves it out was 45 s, 20 minutes before the end."""
    speed = Work(alike=("speed", 512), even=True, cells=5, steps=100)
    assert paced([EVEN, speed], [(30, 10), (60, 10)]).words() == ""
    assert paced([EVEN, speed], [(30, 10), (60, 10), (30, 10), (30, 10)]).words() == ""
    again = Work(alike=EVEN.alike, even=True, cells=2, steps=20)
    assert paced([EVEN, again], [(30, 10), (60, 10), (30, 10), (30, 10)]).words() == "about 1 min to 2 min left"
    uneven = Work(alike=("needle",), even=False, cells=4, steps=40)
    assert paced([uneven], [(30, 10), (60, 10)]).words() == "", "longer documents come last"


def test_cells_of_several_kinds_are_forecast_by_kinds():
    """Two samples of four plans: the first prefills for all, one reads its prompts itself."""
    kinds = ("first", "shared", "own", "shared")
    work = Work(alike=("needle", 512), even=True, cells=12, steps=12, kinds=kinds)
    sample = [(12, 1), (0.2, 1), (12, 1), (0.2, 1)]
    assert paced([work], sample).words() == "", "one first cell and one of a plan's own are no range"
    # 12 + 0.2 + 12 + 0.2 are left of the third sample.
    assert paced([work], 2 * sample).words() == "about 24 s to 25 s left"
    assert paced([work], 2 * sample + sample[:3]).words() == ""
    alone = Work(alike=("needle", 512), even=True, cells=4, steps=4, kinds=kinds)
    assert paced([alone], sample[:2]).words() == "", "the plan that reads its own prompts was not timed"


def test_steps_that_a_work_still_owes_are_not_the_next_ones():
    """The run tells them after the last cell, all at once."""
    again = Work(alike=EVEN.alike, even=True, cells=4, steps=40)
    remaining = paced([EVEN, again], [(20, 5), (20, 5), (20, 5), (20, 5)])
    for _ in range(20):
        remaining.step()
    assert remaining.words() == "about 2 min to 3 min left"  # 40 steps of 4 s: 160 s
    for _ in range(10):
        remaining.step()
    assert remaining.words() == "about 2 min left"


def test_works_are_those_of_the_run():
    plans = contestants_of(["knorm @ keep=0.5"])
    tasks = [Perplexity(text="t", source="t", context=60, continuation=8), Needle(lengths=(150, 200), documents=1)]
    works = works_of(tasks, plans)
    assert (sum(work.cells for work in works), sum(work.steps for work in works)) == plan_run(tasks, plans)
    assert [work.even for work in works] == [True, False] and works[0].alike == (
        "perplexity",
        "context=60",
        "continuation=8",
    )
    assert set(KINDS) >= {work.alike[0] for work in works}


def test_a_line_has_the_time_that_is_left(monkeypatch):
    screen = io.StringIO()
    console = Console(file=screen, width=160)
    clock = iter(range(0, 10_000, 30))
    monkeypatch.setattr("kvtailor.bench.progress.time.monotonic", lambda: next(clock))
    with watch(4, 40, console, [EVEN]) as seen:
        assert isinstance(seen, Watch)
        for _ in range(2):
            for _ in range(10):
                seen.step("x")
            seen.finish(record("one", "perplexity", started="2999-01-01T00:00:00+00:00"))
    last = screen.getvalue().splitlines()[-1]
    assert re.match(r"\[2 of 4, \d+:\d\d so far, about \d+ min to \d+ min left\] perplexity", last), last
