"""A suite from end to end: what is there is measured once, what is not is told, and a killed run goes on."""

import pytest
import torch
from tests.support.bench.dummy import CountingModel, UniformModel
from tests.support.bench.suite_case import KEEP, PLAN, VERSIONS, dummy, go, small_suite, write_text

from kvtailor.bench import build
from kvtailor.bench.checks import Fraud
from kvtailor.bench.measure import machine
from kvtailor.bench.report.suite.tables import suite_grids
from kvtailor.bench.suite.run import prepare
from kvtailor.bench.suite.suite import SuiteError
from kvtailor.bench.tasks.needle import Needle
from kvtailor.errors import KvtailorError


class Watched(CountingModel):
    calls = 0

    def logits(self, cache, ids):
        self.calls += 1
        return super().logits(cache, ids)


@pytest.fixture(autouse=True)
def same_versions(monkeypatch):
    """A checkout with changed files is dirty, and then nothing is reused."""
    monkeypatch.setattr(machine, "versions", lambda: dict(VERSIONS))
    build._read.cache_clear()


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path)


@pytest.fixture
def small(tmp_path, text):
    return small_suite(tmp_path, text)


def test_what_is_missing_gives_one_record_for_each_plan_and_no_number(small, tmp_path):
    records = go(small, data=tmp_path)
    guesses = [record for record in records if record.task == "telepathy"]
    assert sorted(record.label for record in guesses) == ["full", PLAN]
    for record in guesses:
        assert record.error == "This kvtailor does not have the task 'telepathy'."
        assert (record.metrics, record.values, record.timings, record.bytes_held, record.samples) == (
            {},
            {},
            {},
            None,
            None,
        )
    absent = [record for record in records if record.label == f"snapkv + tomorrow @ tokens={KEEP}"]
    assert [record.task for record in absent] == ["perplexity", "perplexity"]
    assert all(record.missing == ("tomorrow",) and "does not have it: tomorrow" in record.error for record in absent)
    gone = [record for record in records if record.asked and "c4" in record.asked and not record.missing]
    assert {record.label for record in gone} == {"full", PLAN} and all(record.error for record in gone)


def test_what_cannot_be_done_is_told_before_the_run(small, tmp_path):
    found = prepare(small, dummy(), data=tmp_path)
    assert [why.split("(")[0] for why in found.unavailable] == ["perplexity", "telepathy"]
    assert "c4" in found.unavailable[0] and found.missing == (f"snapkv + tomorrow @ tokens={KEEP}",)


def test_a_task_that_finds_no_data_is_told_before_the_run(small, tmp_path, monkeypatch):
    def units(task, contestants):
        raise KvtailorError("there is no such folder")

    monkeypatch.setattr(Needle, "units", units)
    found = prepare(small, dummy(), data=tmp_path)
    assert [why for why in found.unavailable if why.startswith("needle") and why.endswith("no such folder")]
    records = found.run(bandwidth=False)
    assert {r.error for r in records if r.task == "needle"} == {"there is no such folder"}
    assert [r for r in records if r.task == "perplexity" and r.error is None]


def test_every_task_is_measured_once_for_the_plans_that_show_it(small, tmp_path):
    records = go(small, data=tmp_path)
    good = [(r.asked, r.plan_hash, str(r.point)) for r in records if r.error is None]
    assert len(set(good)) == len(good)
    assert {r.label for r in records if r.task == "needle"} == {"full"}
    assert {r.label for r in records if r.task == "perplexity" and r.error is None} == {"full", PLAN}
    assert len({r.run for r in records}) == 1


def test_a_run_goes_on_where_it_was(small, tmp_path):
    first = go(small, out=tmp_path / "out", data=tmp_path)
    model = Watched()
    again = go(small, model, out=tmp_path / "out", data=tmp_path)
    assert model.calls == 0
    assert [r.key for r in again] == [r.key for r in first] and suite_grids(small, again) == suite_grids(small, first)
    go(small, model, out=tmp_path / "out", data=tmp_path, resume=False)
    assert model.calls > 0


def test_one_table_alone(small, tmp_path):
    found = prepare(small, dummy(), only=["guess"])
    assert [job.kind for job in found.jobs] == ["telepathy"]
    with pytest.raises(SuiteError, match="did you mean 'guess'"):
        prepare(small, dummy(), only=["gues"])


def test_a_task_that_breaks_off_is_told_and_the_others_go_on(small, tmp_path, text):
    text.write_text("too short")
    records = go(small, data=tmp_path)
    broken = [r for r in records if r.task == "perplexity" and str(text) in r.asked]
    assert len(broken) == 3 and all("longer text" in r.error or r.missing for r in broken)
    assert all(r.error is None for r in records if r.task == "needle")
    failed = prepare(small, dummy(), data=tmp_path).failed(records)
    assert failed == [r for r in broken if not r.missing] != [], "c4, telepathy and tomorrow were known to be missing"


def test_a_fraud_stops_the_run(small, tmp_path):
    with pytest.raises(Fraud, match="untouched cache"):
        go(small, UniformModel(), data=tmp_path)


def test_a_text_that_repeats_itself_stops_the_run(small, text, tmp_path):
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    with pytest.raises(Fraud, match="repeated text"):
        go(small, data=tmp_path)


def test_torch_is_left_as_it_was(small, tmp_path):
    before = torch.get_rng_state()
    go(small, data=tmp_path)
    assert torch.equal(before, torch.get_rng_state())
