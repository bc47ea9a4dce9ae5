"""What verbs print while they work, and at their end, fits a terminal of 80 columns.

What cannot be parted stays whole: paths, and the text that a model writes.
"""

import io
import os
import subprocess
import sys
from types import SimpleNamespace

import click
from click.testing import CliRunner
from rich.console import Console
from tests.cli.test_in_80_columns import said, wide
from tests.support.fitting.made_fits import made_fit

from kvtailor.cli import demo
from kvtailor.cli.fit import TerminalProgress, show
from kvtailor.cli.words.lines import formatted_warning, python_lines

PLAN = "snapkv(window=16) + adakv + kivi(bits=4, recent=32) @ keep=0.25, slack=64"
PROMPT = "The old mill stood at the end of the village. " * 20


def too_wide(text):
    """Lines of more than 80 columns that could have been parted; a path of the test's own folder could not."""
    return [line for line in wide(text) if len(line.split()) > 1]


def test_run():
    text = said("run", "--plan", PLAN, "--prompt", PROMPT, "--max-new-tokens", "4")
    ours = text[text.index("plan    ") :]
    assert too_wide(ours) == [] and " ".join(PLAN.split()) in " ".join(ours.split())
    beyond = said("run", "--plan", PLAN, "--prompt", PROMPT * 40, "--max-new-tokens", "4")
    assert "positions" in beyond or "was made for" in beyond
    assert too_wide(beyond) == [] and beyond.startswith("Error: ")
    unknown = said("run", "--plan", PLAN, "--promptt", "x" * 3, "--no-such-option-of-" + "words" * 4)
    assert too_wide(unknown) == [] and "Error: No such option" in unknown


def test_calibrate_and_its_list(tmp_path):
    assert too_wide(said("calibrate", "list")) == []
    out = tmp_path / "kept.safetensors"
    words = ("calibrate", "duo", "--tokens", 512, "--context", 128, "--out", out)
    text = said(*map(str, words))
    assert out.is_file(), text
    assert too_wide(text) == [] and f"{out}" in text


def test_bench_and_its_report(tmp_path):
    few = ("--windows", "2", "--documents", "1", "--context", "128", "--continuation", "32")
    text = said("bench", "--plans", f"{PLAN}; kivi4", "--tasks", "perplexity,needle", *few, "--out", str(tmp_path))
    assert too_wide(text) == [] and str(tmp_path / "report.html") in text
    report = said("report", str(tmp_path))
    assert too_wide(report) == [] and str(tmp_path / "report.md") in report.splitlines()


def test_python_is_parted_into_lines_that_run():
    for plan in ("full", PLAN, " + ".join([PLAN] * 3)):
        for most in (60, 80, 100):
            lines = python_lines(plan, most)
            assert max(map(len, lines)) <= most
            names = {"kvtailor": SimpleNamespace(cache_for=lambda model, text: text), "model": None}
            exec("\n".join(lines), names)
            assert names["cache"] == plan


def test_a_warning_is_a_sentence(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    ours = formatted_warning("words " * 30, UserWarning, sys.modules["kvtailor"].__file__, 3)
    assert ours.startswith("warning: words") and ours.endswith("words\n") and wide(ours) == []
    assert formatted_warning("words", UserWarning, "/else/where.py", 3) == "/else/where.py:3: UserWarning: words\n"


def test_the_program_warns_so():
    words = ("run", "--plan", "snapkv @ tokens=16", "--prompt", PROMPT, "--max-new-tokens", "2")
    code = "from kvtailor.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert "\nwarning: snapkv @ tokens=16: " in f"\n{done.stderr}" and "UserWarning" not in done.stderr
    assert too_wide(done.stderr) == []


def test_demo(tmp_path, monkeypatch):
    small = {"CONTEXT": 128, "WINDOWS": 6, "ROUNDS": 1, "LONGEST": 384, "PLANS": {"full": "all", PLAN: "less"}}
    for name, value in small.items():
        monkeypatch.setattr(demo, name, value)
    text = said("demo", "--out", str(tmp_path))
    assert too_wide(text) == [], text
    asked = [line.strip() for line in text.splitlines() if line.startswith("    kvtailor ")]
    assert len(asked) == 5 and all(each.count('"') % 2 == 0 for each in asked)


def test_what_a_fit_ends_with(tmp_path):
    found, folder = made_fit(), tmp_path / "fit"
    shown = click.command()(lambda: show(found, folder))
    text = CliRunner(env={"COLUMNS": "80"}).invoke(shown, []).output
    assert too_wide(text) == [], text
    assert found.plan in " ".join(text.split()) and str(folder / "fitted.toml") in text
    part = text[text.index("cache = kvtailor.cache_for(") :]
    names = {"kvtailor": SimpleNamespace(cache_for=lambda model, plan: plan), "model": None}
    exec(part[: part.index("\n)") + 2], names)
    assert names["cache"] == found.plan


def test_stages_of_a_fit_and_what_failed_in_them():
    screen = io.StringIO()
    console = Console(file=screen, width=80, highlight=False)
    progress = TerminalProgress(console)
    with progress.stage("a stage of many words " * 5, 3) as advance:
        advance("a plan")
    with progress.stage("more than was thought", 1) as advance:
        advance("a plan")
        advance("another")
    told = " ".join(screen.getvalue().split())
    assert wide(screen.getvalue()) == [] and "1 of at most 3 steps" in told and "2 of at most 2 steps" in told
