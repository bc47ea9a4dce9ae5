import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvtailor.bench.measure import machine
from kvtailor.cli import demo


@pytest.fixture
def small(monkeypatch):
    # What a changed working tree measured stands for nothing.
    monkeypatch.setattr(machine, "_commit", lambda: "0" * 12)
    for name, value in {"CONTEXT": 128, "WINDOWS": 6, "ROUNDS": 1, "LONGEST": 384}.items():
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr(demo, "PLANS", {name: demo.PLANS[name] for name in ("full", "streaming @ keep=0.25")})


def lines_of(folder: Path) -> int:
    """Records that were written in a folder."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.glob("records-*.jsonl"))


def test_the_tour_answers_first_then_measures_and_goes_on_where_it_stopped(small, tmp_path):
    done = CliRunner().invoke(demo.command, ["--out", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    # What a cache is and how long it takes comes first, then answers, then the verdict and its table.
    told = " ".join(done.stdout.split())
    at = [told.index(each) for each in ("its KV", "All of it takes about", "see it:", "what each plan cost")]
    assert at == sorted(at) and at[0] < 200
    assert found["headline"] in told.split("what each plan cost")[1]
    assert len(found["answers"]) == 2 * demo.FACTS and {answer["right"] for answer in found["answers"][:4]} == {True}
    assert demo.PLANS["streaming @ keep=0.25"] in told
    assert str(tmp_path / "report.html") in done.stdout.replace("\n", "")
    written = (tmp_path / "report.html").read_text(encoding="utf-8")
    # What the tour took stands on its page, beside what was said before it began.
    took, expected = re.search(r"This tour took (\d+) seconds; (\d+ \w+) were expected\.", written).groups()
    assert len(written) > 10_000 and 0 < int(took) <= found["seconds"] + 1
    assert f"All of it takes about {expected} here." in told
    before = lines_of(tmp_path)
    assert before
    again = CliRunner().invoke(demo.command, ["--out", str(tmp_path)])
    assert again.exit_code == 0, again.output
    # Times that other programs disturbed are measured anew; nothing else is.
    assert lines_of(tmp_path) <= before + 2


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (3, "10 seconds"),
        (44, "40 seconds"),
        (89, "90 seconds"),
        (91, "2 minutes"),
        (149, "2 minutes"),
        (151, "3 minutes"),
        (600, "10 minutes"),
    ],
)
def test_how_long_it_takes_is_a_round_number(seconds, said):
    assert demo._minutes(seconds) == said
