import json
import time

import pytest
import torch
from tests.bench.dummy import FULL, DummyCache, UniformModel, contestant, subject

from kvtailor.bench import machine
from kvtailor.bench.machine import Neighbours
from kvtailor.bench.runner import contestants_of, run
from kvtailor.bench.subject import OWN, Subject
from kvtailor.bench.tasks.memory import Memory
from kvtailor.bench.tasks.speed import Speed
from kvtailor.errors import KvtailorError


class SlowModel(UniformModel):
    """A prefill takes 1 ms, a token 1 ms or, on a cut cache, 4 ms."""

    def logits(self, cache, ids):
        time.sleep(0.004 if cache.keep and ids.numel() == 1 else 0.001)
        return torch.zeros(ids.numel(), 256)


def quiet(monkeypatch, answer=False):
    monkeypatch.setattr(Neighbours, "disturbed", lambda self: answer)


def test_times_are_interleaved_and_told_apart(monkeypatch):
    quiet(monkeypatch)
    task = Speed(text="abc", source="t", context=8, tokens=5, rounds=4, warmup=1)
    records = run(subject(SlowModel(), slow=DummyCache(keep=4)), [FULL, contestant("slow")], [task], bandwidth=False)
    own, full, slow = records
    assert own.plan_hash == OWN.hash
    assert full.samples == slow.samples == 4
    assert len(full.values["tpot"]) == 4
    assert 2.5 < slow.timings["tpot"]["median"] / full.timings["tpot"]["median"] < 5
    assert full.timings["ttft"]["median"] < 0.004
    assert full.floor_seconds is None


def test_disturbed_samples_are_left_out_and_a_machine_too_busy_gives_no_time(monkeypatch):
    answers = iter([True, False, False] * 1000)
    monkeypatch.setattr(Neighbours, "disturbed", lambda self: next(answers))
    task = Speed(text="abc", source="t", context=8, tokens=2, rounds=6, warmup=0)
    record = run(subject(SlowModel()), [FULL], [task], bandwidth=False)[1]
    assert record.timings["tpot"]["left_out"] == sum(record.values["disturbed"]) > 0
    assert record.samples == record.timings["tpot"]["count"] >= 6
    quiet(monkeypatch, answer=True)
    record = run(subject(SlowModel()), [FULL], [task], bandwidth=False)[1]
    assert record.timings == {} and sum(record.values["disturbed"]) == len(record.values["tpot"]) == 12


def test_a_plan_that_fails_does_not_stop_the_clock(monkeypatch):
    quiet(monkeypatch)

    class Failing(UniformModel):
        def logits(self, cache, ids):
            if cache.keep == 3:
                raise KvtailorError("three is not done here")
            return super().logits(cache, ids)

    task = Speed(text="abc", source="t", context=8, tokens=2, rounds=3, warmup=1)
    records = run(subject(Failing(), bad=DummyCache(keep=3)), [FULL, contestant("bad")], [task], bandwidth=False)
    assert [r.error for r in records] == [None, None, "three is not done here"]


def test_own_work_is_no_neighbour():
    meter = Neighbours()
    if not meter.metered:
        pytest.skip("this system has no /proc/stat")
    cores, threads = machine._cores(), torch.get_num_threads()
    free = max(0, cores - threads)
    for busy, expected in [
        (0.9, False),
        (0.9 + free + 0.1 + 0.01 * cores, False),
        (0.9 + free + 0.3 + 0.01 * cores, True),
    ]:
        meter._now = lambda busy=busy: (1.0, busy, 0.9)
        meter._last = (0.0, 0.0, 0.0)
        assert meter.disturbed() is expected, busy


def test_the_machine_is_json_and_knows_itself():
    found = machine.describe()
    assert json.loads(json.dumps(found)) == found
    assert found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    assert 1e8 < found["read_bandwidth"] < 1e13
    assert machine.describe(bandwidth=False)["read_bandwidth"] is None


def test_memory_that_cannot_be_measured_is_null_and_says_why():
    records = run(subject(UniformModel()), [FULL], [Memory(context=8)], bandwidth=False)
    assert [r.bytes_resident for r in records] == [None, None]
    assert "cannot load 'dummy'" in records[0].error


@pytest.mark.long
def test_a_fresh_process_grows_by_what_the_ledger_says():
    plans = contestants_of(["snapkv @ keep=0.25"])
    own, full, snap = run(Subject.load("demo"), plans, [Memory(context=1500)], bandwidth=False)
    for record in (full, snap):
        assert record.error is None
        assert abs(record.bytes_resident - record.bytes_held) < 0.1 * record.bytes_held + 2**17
        assert record.bytes_peak > record.bytes_resident
    assert snap.bytes_resident < 0.35 * full.bytes_resident
    assert own.bytes_resident == pytest.approx(full.bytes_full, rel=0.1)
