import json
from dataclasses import replace
from functools import partial

from click.testing import CliRunner
from tests.support.few_methods import NOT_SEARCHED

from kvtailor.bench.subject import Subject
from kvtailor.cli import demo
from kvtailor.fitting import effort as efforts


def test_the_tour_opens_with_the_one_line_and_ends_with_its_page(tmp_path, monkeypatch):
    for name, small in {
        "FIT_CONTEXT": 96,
        "FIT_WINDOWS": 24,
        "FIT_WITHOUT": NOT_SEARCHED,
        "CONTEXT": 128,
        "WINDOWS": 6,
        "FIDELITY_WINDOWS": 5,
        "DOCUMENTS": 1,
        "ROUNDS": 1,
    }.items():
        monkeypatch.setattr(demo, name, small)
    least = replace(efforts.EFFORTS["tour"], rest=(1, 0), widths=(4,), trials=0, levels=(), windows=(6, 5))
    monkeypatch.setattr(efforts, "EFFORTS", {**efforts.EFFORTS, "tour": least})
    # Processors without arithmetic in bfloat16 take three times as long in it.
    monkeypatch.setattr(Subject, "load", partial(Subject.load, dtype="float32"))
    monkeypatch.setattr(demo, "LONGEST", 384)
    monkeypatch.setattr(demo, "PLANS", ("full", "streaming @ keep=0.25"))
    done = CliRunner().invoke(demo.command, ["--out", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    told = done.stdout.split("see it:")[0].split()
    assert " ".join(told).startswith(found["headline"])
    assert len(found["answers"]) == 2 * demo.FACTS and {answer["right"] for answer in found["answers"][:4]} == {True}
    assert str(tmp_path / "report.html") in done.stdout.replace("\n", "")
    assert found["fit"]["plan"] in done.stdout.replace("\n", "")
    assert (tmp_path / "fit" / "fitted.toml").is_file()
    assert (tmp_path / "report.html").stat().st_size > 10_000
