import json
import time
from dataclasses import replace

import pytest
import torch
from tests.bench.measure.test_flops import tiny
from tests.support.bench.dummy import FULL, DummyCache, UniformModel, contestant, subject

from kvtailor.bench.contestant import OWN
from kvtailor.bench.measure import flops, machine
from kvtailor.bench.measure.flops import CountedFlops
from kvtailor.bench.measure.machine import Neighbours
from kvtailor.bench.runner import run
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks import speed
from kvtailor.bench.tasks.speed import Speed
from kvtailor.errors import KvtailorError
from kvtailor.hf.graphs import replay


class Clock:
    """Stands for the module `time` in the task, so that a busy machine makes no test fail."""

    def __init__(self, monkeypatch):
        self.passed = self.ran = 0.0
        monkeypatch.setattr(speed, "time", self)

    def perf_counter(self):
        return self.passed

    def process_time(self):
        return self.ran

    def wait(self, seconds):
        self.passed += seconds

    def work(self, seconds):
        self.passed += seconds
        self.ran += seconds


class SlowModel(UniformModel):
    """A prefill takes 1 ms, a token 1 ms or, on a cut cache, 4 ms."""

    def __init__(self, wait=time.sleep):
        super().__init__()
        self.wait = wait

    def logits(self, cache, ids):
        self.wait(0.004 if cache.keep and ids.numel() == 1 else 0.001)
        return torch.zeros(ids.numel(), 256)


def quiet(monkeypatch, answer=False):
    monkeypatch.setattr(Neighbours, "disturbed", lambda self: answer)


def test_times_are_interleaved_and_told_apart(monkeypatch):
    quiet(monkeypatch)
    clock = Clock(monkeypatch)
    task = Speed(text="abc", source="t", context=8, tokens=5, rounds=4, warmup=1)
    records = run(
        subject(SlowModel(clock.wait), slow=DummyCache(keep=4)), [FULL, contestant("slow")], [task], bandwidth=False
    )
    own, full, slow = records
    assert own.plan_hash == OWN.hash
    assert full.samples == slow.samples == 4
    assert len(full.values["tpot"]) == 4
    assert slow.timings["tpot"]["median"] == pytest.approx(0.004) == 4 * full.timings["tpot"]["median"]
    assert full.timings["ttft"]["median"] == pytest.approx(0.001)
    assert full.floor_seconds is None


def test_processor_time_is_what_the_prefill_ran_and_not_what_it_waited(monkeypatch):
    quiet(monkeypatch)
    clock = Clock(monkeypatch)

    class Waiting(UniformModel):
        def logits(self, cache, ids):
            clock.work(0.03 if ids.numel() > 1 and cache.keep else 0.0)
            clock.wait(0.03)
            return torch.zeros(ids.numel(), 256)

    task = Speed(text="abc", source="t", context=8, tokens=3, rounds=3, warmup=1)
    records = run(subject(Waiting(), slow=DummyCache(keep=4)), [FULL, contestant("slow")], [task], bandwidth=False)
    for record, ran in zip(records, (0.0, 0.0, 0.03), strict=True):
        assert record.values["ttft_processor"] == pytest.approx([ran] * 3)
        assert record.values["ttft"] == pytest.approx([0.03 + ran] * 3)


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


def prompts(text: str, **settings: int) -> list[str]:
    found = Speed(text=text, source="t", **settings)._prompt(subject(UniformModel()))
    return [bytes(row).decode() for row in found.tolist()]


def test_rows_are_pieces_of_the_text_and_where_it_is_short_they_begin_apart():
    assert prompts("abcdefghijklmnop", context=5, batch=3) == ["abcde", "fghij", "klmno"]
    assert prompts("abcdef", context=5, batch=3) == ["abcde", "cdefa", "efabc"]
    assert prompts("abc", context=7) == ["abcabca"]
    assert len(prompts("ab", context=3, batch=5)) == 5
    for wrong in ({"batch": 0}, {"tokens": 1}, {"context": 0}, {"warmup": -1}, {"patience": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} is "):
            Speed(text="a", source="t", **wrong)


def of_tiny(monkeypatch, work: CountedFlops | None, task: Speed, *, busy: bool = False, **described: float):
    quiet(monkeypatch, answer=busy)
    if work is not None:
        monkeypatch.setattr(flops, "count", lambda *_: work)
    monkeypatch.setattr(machine, "describe", lambda **_: described)
    tokenizer = subject(UniformModel()).tokenizer
    return run(Subject(name="tiny", model=tiny(), tokenizer=tokenizer), [FULL], [task])


def test_throughput_flops_and_floors_are_the_records_own_numbers(monkeypatch):
    task = Speed(text="!\"#$%&'()*+,-./0123456789:", source="t", context=9, tokens=4, batch=2, rounds=3, warmup=0)
    work = CountedFlops(prefill=4_000_000, token=50_000.0, method_prefill=1_000, method_token=20.0)
    own, full = of_tiny(monkeypatch, work, task, read_bandwidth=1e9, matmul_flops=1e10)
    for record in (own, full):
        assert record.error is None and record.point["batch"] == 2 and record.task_version == 3
        metrics, ttft, tpot = record.metrics, record.timings["ttft"]["median"], record.timings["tpot"]["median"]
        assert metrics["tokens_per_second"] == pytest.approx(2 / tpot, rel=1e-12)
        assert [metrics[f"flops_{name}"] for name in ("prefill", "token", "method_prefill", "method_token")] == [
            4_000_000,
            50_000.0,
            1_000,
            20.0,
        ]
        assert metrics["achieved_gflops_prefill"] == pytest.approx(4_001_000 / ttft / 1e9, rel=1e-12)
        assert metrics["achieved_gflops_token"] == pytest.approx(2 * 50_020 / tpot / 1e9, rel=1e-12)
        assert metrics["floor_ttft_seconds"] == 4_000_000 / 1e10
    # 97 * 60 weights of the embedding are looked up; 12 tokens of 2 rows are in the cache at the end.
    read = 4 * (23_400 + 5_820 + 3 * 60)
    assert own.floor_seconds == (read + 2 * 12 * 3 * 20 * 4) / 1e9
    assert full.floor_seconds == (read + full.bytes_held) / 1e9
    slow = of_tiny(monkeypatch, work, task, read_bandwidth=1e9, matmul_flops=1e15)[0]
    assert slow.metrics["floor_ttft_seconds"] == read / 1e9


def test_a_floor_above_the_time_is_no_floor(monkeypatch):
    task = Speed(text="!\"#$%&'()*+,-./", source="t", context=9, tokens=4, rounds=3, warmup=0)
    work = CountedFlops(prefill=4_000_000, token=50_000.0, method_prefill=0, method_token=0.0)
    found = of_tiny(monkeypatch, work, task, read_bandwidth=1.0, matmul_flops=1e15)[1]
    assert found.floor_seconds is None and found.metrics["floor_ttft_seconds"] is None
    assert sum("faster than what the machine was measured at" in note for note in found.notes) == 2
    assert found.timings["ttft"]["median"] > 0


def test_work_is_counted_on_the_prompts_that_are_timed(monkeypatch):
    task = Speed(text="!\"#$%&'()*+,-./0123456789:", source="t", context=9, tokens=4, batch=2, rounds=1, warmup=0)
    full = of_tiny(monkeypatch, None, task)[1]
    assert full.metrics["flops_prefill"] == 2 * (2 * (9 * 23_400 + 5_820) + 2 * 6 * 10 * 9**2)
    assert full.metrics["flops_token"] == 2 * (23_400 + 5_820) + 4 * 6 * 10 * 11
    assert full.metrics["flops_method_prefill"] == full.metrics["flops_method_token"] == 0
    assert full.metrics["floor_ttft_seconds"] is None and full.floor_seconds is None


def test_what_is_not_known_of_the_work_is_null(monkeypatch):
    quiet(monkeypatch)
    task = Speed(text="abc", source="t", context=8, tokens=2, rounds=3, warmup=0)
    found = run(subject(UniformModel()), [FULL], [task], bandwidth=False)[1].metrics
    assert found.pop("tokens_per_second") > 0
    assert len(found) == 7 and set(found.values()) == {None}
    work = CountedFlops(prefill=10, token=1.0, method_prefill=None, method_token=0.0)
    task = replace(task, text="012")
    found = of_tiny(monkeypatch, work, task)[1].metrics
    assert found["achieved_gflops_prefill"] is None and found["achieved_gflops_token"] > 0
    found = of_tiny(monkeypatch, work, task, busy=True)[1].metrics
    assert found["tokens_per_second"] is None and found["achieved_gflops_token"] is None


def test_plans_decode_by_graphs_where_that_is_asked_for(monkeypatch):
    """The model's own cache decodes as ever, in the same rounds; without a GPU there are no graphs, and no times."""
    task = Speed(text="!\"#$%&'()*+,-./", source="t", context=9, tokens=4, rounds=3, warmup=0, graphs=True)
    own, full = of_tiny(monkeypatch, None, task)
    assert own.point["graphs"] and full.point["graphs"] and own.error is None and own.timings["tpot"]["median"] > 0
    if torch.cuda.is_available():
        assert full.error is None
        return
    assert "graphs are CUDA's" in full.error
    runs = []
    monkeypatch.setattr(replay, "recorder_of", lambda device: lambda run: lambda: runs.append(run()))
    full = of_tiny(monkeypatch, None, task)[1]
    # Of the three steps after the first token of each of three rounds, the first is not replayed.
    assert full.error is None and full.tokens_seen == 12 and len(runs) == 6


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


def test_arithmetic_that_no_model_can_beat_is_measured():
    assert 1e8 < machine.matmul_flops() < 1e15
    found = machine.describe(dtype=torch.bfloat16)
    assert 1e8 < found["matmul_flops"] < 1e15
    assert found["accelerator_bytes"] is None
    assert machine.describe(bandwidth=False)["matmul_flops"] is None


def test_arithmetic_is_that_of_the_faster_dtype(monkeypatch):
    rates = {torch.float32: 7e9, torch.bfloat16: 2e9, torch.float16: 9e9}
    monkeypatch.setattr(machine, "matmul_flops", lambda device, dtype: rates[dtype])
    for dtype, best in ((torch.float32, 7e9), (torch.bfloat16, 7e9), (torch.float16, 9e9)):
        assert machine.describe(dtype=dtype)["matmul_flops"] == best


def test_a_floor_that_was_measured_beside_other_programs_says_so(monkeypatch):
    for answer in (True, False):
        monkeypatch.setattr(Neighbours, "disturbed", lambda self, answer=answer: answer)
        assert machine.describe()["probes_disturbed"] is (answer if Neighbours().metered else None)
    assert machine.describe(bandwidth=False)["probes_disturbed"] is None
    task = Speed(text="012", source="t", context=4, tokens=2, rounds=1, warmup=0)
    work = CountedFlops(prefill=10, token=1.0, method_prefill=0, method_token=0.0)
    said = of_tiny(monkeypatch, work, task, read_bandwidth=1e9, matmul_flops=1e9, probes_disturbed=True)[1].notes
    assert any("floors may be too high" in note for note in said)
    assert of_tiny(monkeypatch, work, task, read_bandwidth=1e9, matmul_flops=1e9, probes_disturbed=False)[1].notes == ()
