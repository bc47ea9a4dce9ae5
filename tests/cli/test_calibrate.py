"""`kvtailor calibrate` from the command line to the bench that refuses its text."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvtailor.calibration_file import shipped
from kvtailor.cli import main


def call(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


def text_of(state: int) -> str:
    draw = random.Random(state)
    names = [f"{a}{b}" for a in ("ba", "do", "ki", "lu", "re") for b in ("ton", "mer", "sil", "gan", "vey")]
    return " ".join(
        f"{draw.choice(names).title()} {draw.choice(names)} {draw.choice(names)} {draw.randrange(100)}."
        for _ in range(900)
    )


def test_a_file_is_made_shown_used_and_refused_on_its_own_text(tmp_path: Path) -> None:
    mine, other, out = tmp_path / "mine.txt", tmp_path / "other.txt", tmp_path / "f.safetensors"
    mine.write_text(text_of(0))
    other.write_text(text_of(1))
    words = (
        "calibrate",
        "qfilters",
        "--model",
        "demo-draft",
        "--text",
        str(mine),
        "--tokens",
        "1024",
        "--context",
        "256",
        "--dtype",
        "float32",
        "--out",
        str(out),
    )
    made = call(*words, "--json")
    assert made.exit_code == 0, made.output
    told = json.loads(made.stdout.splitlines()[-1])
    assert told["kind"] == "qfilters" and told["model"] == "demo-draft" and told["texts"] == ["mine.txt"]
    assert told["made"]["command"] == (
        "kvtailor calibrate qfilters --model demo-draft --dtype float32 --text mine.txt --tokens 1024 --context 256 "
        "--state 0 --out f.safetensors"
    )
    again = call(*words)
    assert again.exit_code == 2 and "is there already: give another file" in again.stderr
    assert call(*words, "--again").exit_code == 0

    plan = f"qfilters(file='{out}') @ keep=0.5"
    shown = call("show", plan, "--json")
    assert "from 1,024 tokens of mine.txt, in float32" in shown.stdout and "made by: kvtailor calibrate" in shown.stdout
    known = json.loads(shown.stdout.splitlines()[-1])["calibrations"]
    assert [each["kind"] for each in next(iter(known.values()))] == ["qfilters"] and "sketch" not in shown.stdout
    assert "f.safetensors of demo-draft" in call("check", plan, "--model", "demo-draft").stdout
    fits_not = call("check", plan, "--model", "demo")
    assert fits_not.exit_code == 2 and "made for demo-draft, of 4 layers" in fits_not.stderr

    ask = (
        "bench",
        "--model",
        "demo-draft",
        "--plans",
        plan,
        "--tasks",
        "perplexity",
        "--context",
        "64",
        "--continuation",
        "8",
        "--windows",
        "2",
        "--dtype",
        "float32",
    )
    refused = call(*ask, "--text", str(mine))
    assert refused.exit_code == 1
    said = " ".join(refused.output.split())
    assert "has no number for perplexity: calibration on the evaluated text: f.safetensors was made from mine" in said
    assert "1 record has an error" in " ".join(refused.stderr.split())
    allowed = call(*ask, "--text", str(other))
    assert allowed.exit_code == 0, allowed.output


def test_lines_of_json_are_texts(tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "f.safetensors"
    rows.write_text("".join(json.dumps({"text": text_of(state)[:3000]}) + "\n" for state in range(3)))
    made = call(
        "calibrate",
        "qfilters",
        "--model",
        "demo-draft",
        "--text",
        str(rows),
        "--tokens",
        "256",
        "--context",
        "128",
        "--out",
        str(out),
    )
    assert made.exit_code == 0 and "rows.jsonl" in made.stdout
    rows.write_text('{"words": "none"}\n')
    bad = call("calibrate", "qfilters", "--model", "demo-draft", "--text", str(rows), "--out", str(tmp_path / "g"))
    assert bad.exit_code == 2 and "not every line has a field 'text'" in bad.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("qfilter", "--out", "f.safetensors"), "did you mean 'qfilters'"),
        (("qfilters",), "give --out FILE.safetensors"),
        (("qfilters", "--model", "demo-draft", "--out", "f.safetensors"), "is measured on text, and none was given"),
        (("duo", "--model", "demo-draft", "--out", "nowhere/f.safetensors"), "there is no folder nowhere"),
        (("duo", "--model", "demo-draft", "--context", "9000", "--out", "f.safetensors"), "the 4096 positions"),
    ],
)
def test_what_is_wrong_is_said(
    words: tuple[str, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = call("calibrate", *words)
    assert found.exit_code == 2 and sentence in " ".join(found.stderr.split())


def test_texts_of_one_name_are_all_read(tmp_path: Path) -> None:
    out, texts = tmp_path / "f.safetensors", [tmp_path / folder / "part.txt" for folder in "ab"]
    for state, text in enumerate(texts):
        text.parent.mkdir()
        text.write_text(text_of(state)[:4000])
    words = ["calibrate", "qfilters", "--model", "demo-draft", "--tokens", "256", "--context", "128", "--out", str(out)]
    made = call(*words, "--text", str(texts[0]), "--text", str(texts[1]), "--json")
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout.splitlines()[-1])["texts"] == ["part.txt", "part.txt (2)"]
    twice = call(*words, "--again", "--text", str(texts[0]), "--text", str(tmp_path / "a" / ".." / "a" / "part.txt"))
    assert twice.exit_code == 2 and "--text names a file twice" in twice.output


def test_kinds_and_shipped_files_are_listed() -> None:
    kinds = call("calibrate", "list")
    assert kinds.exit_code == 0 and "qfilters" in kinds.stdout and "atskv" in kinds.stdout
    listed = call("ls", "calibrations", "--json")
    read = json.loads(listed.stdout.splitlines()[-1])
    assert set(read["calibrations"]) == {f"{each.kind} {each.model}" for each in shipped()}
