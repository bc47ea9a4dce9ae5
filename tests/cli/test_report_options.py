"""`kvtailor report` and `kvtailor bench` refuse margins and folders that cannot be, in one sentence before any work."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.bench.report.test_report import scored

from kvtailor.cli import main

HARD = [2.0 + 0.01 * (i % 7) for i in range(50)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    label, text = "one\x1b[31m", "a\u2028b\x07\u202e.txt"
    records = [scored("full", HARD, held=100, size=1000), scored(label, [x + 0.1 for x in HARD], size=300)]
    lines = [record.to_json().replace("t.txt", text) + "\n" for record in records]
    (tmp_path / "records-1.jsonl").write_bytes("".join(lines).replace("\x07", "\\u0007").encode())
    return tmp_path


@pytest.mark.parametrize("option", ["--margin", "--margin-points"])
@pytest.mark.parametrize(
    ("value", "words"), [("nan", "not a number"), ("inf", "infinite"), ("-inf", "range"), ("0", "0")]
)
def test_a_margin_that_is_no_finite_number_is_refused_before_any_work(folder, option, value, words) -> None:
    for command in (["report", str(folder)], ["bench", "--model", "no-such-model"]):
        found = CliRunner().invoke(main, [*command, option, value])
        assert found.exit_code == 2 and f"Invalid value for '{option}'" in found.stderr and words in found.stderr
    assert not (folder / "report.md").exists()


def test_a_folder_that_cannot_be_written_is_a_sentence(folder) -> None:
    found = CliRunner().invoke(main, ["report", str(folder), "--to", "/proc/x"])
    assert found.exit_code != 0 and not isinstance(found.exception, OSError)
    assert "/proc/x" in found.stderr and "cannot be" in found.stderr and "Traceback" not in found.output


def test_control_characters_are_written_visibly(folder) -> None:
    assert CliRunner().invoke(main, ["report", str(folder)]).exit_code == 0
    made = [path for path in folder.iterdir() if path.suffix in (".html", ".md", ".csv", ".tex")]
    assert {path.suffix for path in made} == {".html", ".md", ".csv", ".tex"}
    for path in made:
        text = path.read_text(encoding="utf-8")
        assert not set(text) & set("\x1b\x07\u2028\u202e"), path.name
        backslash = r"\textbackslash{}" if path.suffix == ".tex" else "\\"
        assert f"one{backslash}x1b[31m" in text, path.name
    for name in ("report.md", "report.html", "results.csv"):
        assert r"a\u2028b\x07\u202e.txt" in (folder / name).read_text(encoding="utf-8")


def test_pages_of_records_that_are_gone_are_named(folder) -> None:
    """They stayed beside the new ones without a word."""
    assert "also has" not in CliRunner().invoke(main, ["report", str(folder)]).stderr
    (folder / "leaderboard-mine.html").write_text("old")
    said = " ".join(CliRunner().invoke(main, ["report", str(folder)]).stderr.split())
    assert "also has leaderboard-mine.html, of records or suites that are not among these" in said
