"""A run that was killed goes on where it was: nothing is lost, nothing is measured twice."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
from tests.support.bench.dummy import FULL, CountingModel, DummyCache, UniformModel, contestant, subject
from tests.support.calibrated import tiny

from kvtailor.bench.contestant import Contestant
from kvtailor.bench.data.texts import generated_text
from kvtailor.bench.measure import machine
from kvtailor.bench.runner import contestants_of, finished, of_other_code, plan_run, run
from kvtailor.bench.schema import read_records
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.needle import Needle
from kvtailor.bench.tasks.perplexity import Perplexity
from kvtailor.bench.tasks.speed import Speed
from kvtailor.errors import KvtailorError
from kvtailor.score.by_keys.knorm import KNorm

CACHES = {"one": DummyCache(keep=20), "other": DummyCache(keep=21)}
PLANS = [FULL, contestant("one"), contestant("other")]
VERSIONS = {"python": "3", "torch": "2", "transformers": "5", "kvtailor": "0", "commit": "abc"}


def tasks():
    text = generated_text(4000)
    return [
        Perplexity(text=text, source="generated text", context=100, continuation=20, windows=6),
        Needle(lengths=(300, 400), depths=(0.0, 1.0), documents=2),
    ]


@pytest.fixture(autouse=True)
def same_versions(monkeypatch):
    """A checkout with changed files is dirty, and then nothing is reused."""
    monkeypatch.setattr(machine, "versions", lambda: dict(VERSIONS))


def go(out, model=None, plans=PLANS, asked=None, **options):
    counted = []
    asked = asked or tasks()
    found = run(
        subject(model or CountingModel(), **CACHES),
        plans,
        asked,
        out=out,
        bandwidth=False,
        advance=counted.append,
        **options,
    )
    assert any(r.error for r in found) or len(counted) == plan_run(asked, plans)[1]
    return found


def results(records):
    return [(r.key, r.label, r.task, dict(r.point), dict(r.metrics), dict(r.values), r.bytes_held) for r in records]


class Watched(CountingModel):
    calls = 0

    def logits(self, cache, ids):
        self.calls += 1
        return super().logits(cache, ids)


def test_a_finished_run_is_not_measured_again(tmp_path):
    first = go(tmp_path)
    model = Watched()
    again = go(tmp_path, model)
    assert model.calls == 0 and results(first) == results(again)
    assert len(read_records(tmp_path)) == len(first)
    go(tmp_path, model, resume=False)
    assert model.calls > 0 and len(read_records(tmp_path)) == 2 * len(first)


CHILD = """
import os, signal, sys
from pathlib import Path
from tests.bench import test_resume as t
from kvtailor.bench.measure import machine
machine.versions = lambda: dict(t.VERSIONS)
left = int(sys.argv[2])
def advance(label):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
out = Path(sys.argv[1])
t.run(t.subject(t.CountingModel(), **t.CACHES), t.PLANS, t.tasks(), out=out, bandwidth=False, advance=advance)
"""


@pytest.mark.parametrize(
    "after", [pytest.param(3, marks=pytest.mark.long), 20, pytest.param(40, marks=pytest.mark.long)]
)
def test_after_a_kill_nothing_is_lost_or_doubled(tmp_path, after):
    whole = go(None)
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    killed = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path), str(after)], cwd=root, env={**os.environ, "PYTHONPATH": path}
    )
    assert killed.returncode == -signal.SIGKILL
    there = [line for file in tmp_path.glob("*.jsonl") for line in file.read_text().splitlines()]
    assert len(there) < len(whole)
    model = Watched()
    assert results(go(tmp_path, model)) == results(whole)
    keys = [record.key for record in read_records(tmp_path)]
    assert len(keys) == len(set(keys)) == len(whole)


def test_a_line_that_a_kill_cut_is_measured_again(tmp_path):
    whole = go(tmp_path)
    [file] = tmp_path.glob("*.jsonl")
    text = file.read_text()
    file.write_text(text[: text.rstrip().rindex("\n") + 80])
    assert len(read_records(tmp_path)) == len(whole) - 1
    assert results(go(tmp_path)) == results(whole)
    assert len(read_records(tmp_path)) == len(whole)


def test_only_what_is_missing_is_measured(tmp_path):
    go(tmp_path, plans=PLANS[:2])
    model = Watched()
    found = go(tmp_path, model)
    assert model.calls > 0 and len(read_records(tmp_path)) == len(found)
    assert results(found) == results(go(None))


@pytest.mark.parametrize(
    "changed", [name if i < 2 else pytest.param(name, marks=pytest.mark.long) for i, name in enumerate(VERSIONS)]
)
def test_what_other_code_measured_is_measured_again(tmp_path, monkeypatch, changed):
    one = tasks()[:1]
    assert not of_other_code(tmp_path)
    first = go(tmp_path, asked=one)
    assert not of_other_code(tmp_path)
    monkeypatch.setattr(machine, "versions", lambda: {**VERSIONS, changed: "other"})
    assert finished(tmp_path) == {}
    who = f"measured by other code ({changed} {VERSIONS[changed]}, here other)"
    assert who in of_other_code(tmp_path) and f"{len(first)} of its {len(first)} records" in of_other_code(tmp_path)
    go(tmp_path, asked=one)
    assert len(read_records(tmp_path)) == 2 * len(first)
    assert f"{len(first)} of its {2 * len(first)} records" in of_other_code(tmp_path)


def test_a_dirty_checkout_reuses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "versions", lambda: {**VERSIONS, "commit": "abc-dirty"})
    go(tmp_path)
    assert finished(tmp_path) == {}
    monkeypatch.setattr(machine, "versions", lambda: {**VERSIONS, "commit": f"{'ab' * 20}-dirty"})
    assert f"(commit abc-dirty, here {'ab' * 6}-dirty)" in of_other_code(tmp_path), "digits for people"


def test_errors_are_tried_again(tmp_path):
    class Failing(CountingModel):
        def logits(self, cache, ids):
            if cache.keep == 20:
                raise ValueError("not now")
            return super().logits(cache, ids)

    assert any(record.error for record in go(tmp_path, Failing()))
    assert not any(record.error for record in go(tmp_path))


def test_times_are_reused_together_or_not_at_all(tmp_path):
    asked = [Speed(text="abc" * 50, source="letters", context=30, tokens=3, rounds=2, warmup=0)]
    go(tmp_path, UniformModel(), PLANS[:2], asked)
    wider = go(tmp_path, UniformModel(), PLANS, asked)
    assert len({record.run for record in wider}) == 1
    model = Watched()
    same = go(tmp_path, model, PLANS, asked)
    assert model.calls == 0 and results(same) == results(wider)


def test_other_weights_under_the_same_name_are_another_model(tmp_path):
    from kvtailor.hf.model.loading import new_model

    model = new_model(
        "llama",
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    first = Subject(name="m", model=model).fingerprint()
    model.set_attn_implementation("eager")
    assert Subject(name="m", model=model).fingerprint() == first
    model.model.norm.weight.data[3] += 1e-3
    assert Subject(name="m", model=model).fingerprint() != first
    assert subject(UniformModel()).fingerprint() is None
    assert json.loads(go(None)[0].to_json())["model_hash"] is None


def test_a_missing_plan_is_reported_for_every_task_and_runs_nowhere(tmp_path):
    absent = Contestant.of("palu(rank=0.5)", may_be_missing=True)
    assert absent.missing and "palu" in absent.missing[0]
    with pytest.raises(KvtailorError, match="palu"):
        Contestant.of("palu(rank=0.5)")
    records = go(tmp_path, model=UniformModel(), plans=[FULL, absent])
    mine = [record for record in records if record.plan_hash == absent.hash]
    assert [record.task for record in mine] == ["perplexity", "needle"]
    assert all(record.missing == absent.missing and not record.metrics for record in mine)
    assert all("palu" in record.error for record in mine)
    cells, steps = plan_run(tasks(), [FULL])
    assert plan_run(tasks(), [FULL, absent]) == (cells + len(tasks()), steps)
    assert len(contestants_of(["full", "palu(rank=0.5)"], may_be_missing=True)) == 2


def test_a_method_of_another_package_whose_code_has_changed_is_measured_again(tmp_path, monkeypatch):
    """Its name and arguments are in the plan's hash, and its code is not."""
    module = tmp_path / "their_score.py"
    module.write_text("# one")
    theirs = types.ModuleType("their_score")
    theirs.__file__ = str(module)
    monkeypatch.setitem(sys.modules, "their_score", theirs)
    plans, out = contestants_of(["full", "knorm @ tokens=50"]), tmp_path / "out"
    caches = {plans[1].text.replace(" ", "_"): DummyCache(keep=20)}
    monkeypatch.setattr(KNorm, "__module__", "their_score")

    def calls():
        model = Watched()
        run(subject(model, **caches), plans, tasks()[:1], out=out, bandwidth=False)
        return model.calls

    first = calls()
    assert first > 0 and calls() == 0, "the same code is not measured twice"
    [digests] = {str(each.machine.get("methods")) for each in read_records(out) if each.plan != "full"}
    assert "their_score" in digests and all("methods" not in r.machine for r in read_records(out) if r.plan == "full")
    module.write_text("# two")
    assert 0 < calls() < first, "its plan alone"
    module.unlink()
    assert calls() > 0 and calls() > 0, "what comes from no file may be any code"


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_in_a_method_of_another_package_is_its_plans_own(tmp_path, monkeypatch, workers):
    module = tmp_path / "their_score.py"
    module.write_text("def score(self, held):\n    return [][3]\n")
    spec = importlib.util.spec_from_file_location("their_score", module)
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    monkeypatch.setitem(sys.modules, "their_score", theirs)
    monkeypatch.setattr(KNorm, "score", theirs.score)
    model = tiny()
    text = " ".join(f"w{number}" for number in range(400))
    task = Perplexity(text=text, source="a text", context=64, continuation=8, windows=2)
    plans = contestants_of(["full", "knorm @ tokens=50", "position @ tokens=50"])
    with pytest.raises(IndexError, match="list index out of range"):
        run(model, plans, [task], bandwidth=False, workers=workers)
    monkeypatch.setattr(KNorm, "__module__", "their_score")
    records = run(model, plans, [task], bandwidth=False, workers=workers)
    assert {each.label for each in records if each.error is None} == {"full", "position @ tokens=50"}
    [why] = {each.error for each in records if each.error is not None}
    assert why == f"IndexError: list index out of range ({module}, line 2)"
