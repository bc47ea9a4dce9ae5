"""README is short, its code runs as it stands, and its commands do what they are there for."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.docs.test_site import wrong_options
from tests.docs.test_site_build import SNIPPET
from tests.support.docs_code import as_installed

import kvtailor
from kvtailor.cli import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    (kvtailor .*?)(?:  +#.*)?$", README, re.MULTILINE)
(PIPE,) = re.findall(r"^    (yes .*)$", README, re.MULTILINE)


def words(verb):
    """The words after `kvtailor` of README's command of this verb."""
    (found,) = [each for each in COMMANDS if each.split()[1] == verb]
    return shlex.split(found)[1:]


def run(*args):
    done = CliRunner().invoke(main, [str(each) for each in args])
    assert done.exit_code == 0, done.output
    return done.output


def test_it_is_short_and_its_pictures_are_there():
    assert len(README.splitlines()) <= 150
    pictures = re.findall(r"!\[([^\]]+)\]\(([^)]+)\)", README)
    assert pictures and all(len(words) > 20 and (ROOT / path).is_file() for words, path in pictures)


def test_every_command_has_its_options():
    assert {each.split()[1] for each in COMMANDS} == {"demo", "fit", "run", "bench", "report"}
    assert wrong_options("```shell\n" + "\n".join(COMMANDS) + "\n```\n") == []


def test_its_code_runs_as_it_stands(capsys):
    (code,) = [code for mark, _, code in SNIPPET.findall(README) if not mark]
    assert len(code.strip().splitlines()) <= 10
    exec(compile(as_installed(code), "README.md", "exec"), {})
    ratio = float(capsys.readouterr().out.split()[-1])
    assert 0.2 < ratio < 0.45


def test_its_tables_are_measured_and_reported(tmp_path):
    asked = words("bench")
    asked[asked.index("--out") + 1] = tmp_path / "results"
    # Few of them: README's numbers of windows take minutes.
    run(*asked, "--windows", 2, "--documents", 1, "--context", 256)
    verb, folder = words("report")
    assert run(verb, tmp_path / folder)
    assert (tmp_path / folder / "report.html").is_file() and (tmp_path / folder / "results.csv").is_file()


@pytest.mark.long
def test_the_fitted_plan_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from tests.docs.test_site_build import LEAST, SLOW

    from kvtailor.cli import fit
    from kvtailor.fitting import effort

    monkeypatch.setattr(effort, "EFFORTS", {**effort.EFFORTS, "quick": LEAST})
    monkeypatch.setattr(fit, "GENERATED_WINDOWS", 20)
    subprocess.run(PIPE, shell=True, check=True)
    asked = [*words("fit"), "--no-times", "--without", ",".join(SLOW)]
    asked[asked.index("--context") + 1] = "256"
    run(*asked)
    found = run(*words("run"))
    assert "held" in found


def test_the_prompt_is_made_and_read(tmp_path, monkeypatch):
    """What stands between `fit` and `run`, and `run` itself, with a plan in the place of the fitted one."""
    monkeypatch.chdir(tmp_path)
    subprocess.run(PIPE, shell=True, check=True)
    (tmp_path / "fitted").mkdir()
    plan = kvtailor.Plan.parse("snapkv @ tokens=256").to_toml()
    (tmp_path / "fitted" / "fitted.toml").write_text(plan, encoding="utf-8")
    found = run(*words("run"), "--max-new-tokens", 4)
    assert "held" in found and len((tmp_path / words("run")[-1]).read_text().splitlines()) == 100


@pytest.mark.long
def test_the_tour_is_the_one_that_it_names():
    assert "This tour took" in run(*words("demo"))


@pytest.mark.parametrize("line", re.findall(r"`(kvtailor (?:ls|show)[^`]*)`", README))
def test_commands_between_words_run(line):
    assert len(run(*shlex.split(line)[1:]).splitlines()) > 5


@pytest.mark.parametrize("plan", sorted(set(re.findall(r"^\| [^|]+ \| `([^`]+)`", README, re.MULTILINE))))
def test_plans_to_start_from_are_plans(plan):
    if plan not in ("fit",) and "kvtailor.read" not in plan and not plan.startswith("full"):
        assert str(kvtailor.Plan.parse(plan))
