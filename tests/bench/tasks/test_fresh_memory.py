"""What a fresh process counts, and what it refuses to report."""

import json
from types import SimpleNamespace

import pytest
import torch
from tests.bench.measure.test_flops import tiny
from tests.support.bench.dummy import FULL, UniformModel, subject

from kvtailor.bench.measure import fresh
from kvtailor.bench.measure.memory_gauge import AllocatorGauge, ResidentGauge, gauge_of
from kvtailor.bench.runner import contestants_of, run
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks import memory
from kvtailor.bench.tasks.memory import Memory
from kvtailor.errors import KvtailorError
from kvtailor.hf.versions import find_cache, hand_cache


class Counters:
    """Counts as `torch.cuda` does, for a device of 1000 bytes of which 800 were free."""

    def __init__(self) -> None:
        self.held = self.high = self.reserved = 0

    def mem_get_info(self, device):
        return 800, 1000

    def take(self, count: int) -> None:
        self.held += count
        self.high = max(self.high, self.held)
        self.reserved = max(self.reserved, self.held)

    def memory_allocated(self, device):
        return self.held

    def max_memory_allocated(self, device):
        return self.high

    def max_memory_reserved(self, device):
        return self.reserved

    def reset_peak_memory_stats(self, device):
        self.high = self.reserved = self.held

    def synchronize(self, device): ...

    def empty_cache(self): ...


def test_an_accelerator_counts_by_its_allocator_and_a_spill_is_refused():
    counters = Counters()
    gauge = AllocatorGauge(torch.device("cuda"), counters)
    assert gauge.free == 800
    counters.take(300)
    assert gauge.now() == 300
    counters.take(400)
    counters.take(-400)
    assert gauge.highest() == 700
    gauge.reset()
    counters.take(50)
    assert gauge.highest() == 350 and gauge.spilled() is None
    counters.take(500)
    counters.take(-500)
    gauge.reset()
    assert gauge.highest() == 350
    assert "850 bytes on cuda, of which 800 were free" in gauge.spilled()


def test_swapped_memory_is_refused(monkeypatch, tmp_path):
    assert isinstance(gauge_of(torch.device("cpu")), ResidentGauge)
    monkeypatch.setattr("kvtailor.bench.measure.memory_gauge._kilobytes", lambda path, name: {"VmSwap": 4096}.get(name))
    assert "4096 bytes" in ResidentGauge().spilled()
    monkeypatch.setattr("kvtailor.bench.measure.memory_gauge._kilobytes", lambda path, name: 0)
    assert ResidentGauge().spilled() is None
    with pytest.raises(KvtailorError, match="mps"):
        gauge_of(torch.device("mps"))


def test_the_kernels_high_water_mark_is_of_the_time_since_the_reset():
    gauge = ResidentGauge()
    if not gauge.resets:
        pytest.skip("this system does not reset the high-water mark")
    block = torch.ones(2**23)
    del block
    before = gauge.now()
    gauge.reset()
    assert gauge.highest() - before < 2**23
    block = torch.ones(2**23)
    assert 2**25 - 2**20 < gauge.highest() - before < 2**25 + 2**23
    del block
    gauge.now()
    gauge.reset()
    assert gauge.highest() - before < 2**23


def test_peaks_of_prefill_and_decoding_are_above_what_was_there_before(monkeypatch):
    counters = Counters()
    gauge = AllocatorGauge(torch.device("cuda"), counters)

    class Taking(UniformModel):
        """A prompt takes 10 for each token while it runs and leaves 2; a further token takes 30 and leaves 1."""

        config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=256))

        def __call__(self, *, input_ids, logits_to_keep=0, use_cache=True, **handed):
            cache = find_cache(handed) or Leaving()
            new = input_ids.numel()
            passing, stays = (10 * new, 2 * new) if new > 1 else (30, 1)
            counters.take(passing)
            counters.take(stays - passing)
            cache.bytes += stays
            return SimpleNamespace(logits=torch.zeros(1, 1, 256), **hand_cache(cache))

    class Leaving:
        bytes = 0

        def __del__(self) -> None:
            counters.take(-self.bytes)

    monkeypatch.setattr(memory, "_DECODED", 20)
    counters.take(100)
    counters.take(500)
    counters.take(-500)
    weighed = Subject(name="taking", model=Taking(), make_cache=lambda model, plan: Leaving())
    found = memory.weigh_in_this_process(weighed, FULL, gauge, {"context": 7, "batch": 1, "caches": 3})
    assert found["metrics"] == {"bytes_before": 100}
    assert found["bytes_resident"] == 14
    assert found["bytes_peak"] == 70
    assert found["bytes_peak_decode"] == 14 + 19 + 30


def test_a_process_that_loaded_other_weights_is_not_believed(monkeypatch):
    answers = SimpleNamespace(returncode=0, stderr="", stdout='noise\n{"bytes_peak": 5, "weight_bytes": 8}\n')
    monkeypatch.setattr(fresh.subprocess, "run", lambda *_, **__: answers)
    asked = Subject(name="tiny", model=tiny())
    assert "weights of another size" in fresh.ask("a.module", asked, FULL, {}, 1.0)["error"]
    answers.stdout = json.dumps({"bytes_peak": 5, "weight_bytes": asked.weights()[1]})
    assert fresh.ask("a.module", asked, FULL, {}, 1.0) == {"bytes_peak": 5}
    answers.returncode, answers.stderr = 3, "Traceback\nit broke"
    assert fresh.ask("a.module", asked, FULL, {}, 1.0)["error"].endswith("status 3: it broke")


def test_memory_that_cannot_be_measured_is_null_and_says_why():
    records = run(subject(UniformModel()), [FULL], [Memory(context=8)], bandwidth=False)
    assert [r.bytes_resident for r in records] == [None, None]
    assert "cannot load 'dummy'" in records[0].error


@pytest.mark.long
def test_a_fresh_process_grows_by_what_the_ledger_says():
    plans = contestants_of(["snapkv @ keep=0.25"])
    demo = Subject.load("demo")
    own, full, snap = run(demo, plans, [Memory(context=1500)], bandwidth=False)
    assert full.point == {"context": 1500, "batch": 1, "caches": 4}
    for record in (full, snap):
        assert record.error is None
        assert abs(record.bytes_resident - record.bytes_held) < 0.1 * record.bytes_held + 2**17
        assert record.bytes_peak > record.bytes_resident
        # 32 more tokens and one token's scratch; what the prefill needed is gone.
        assert record.bytes_held < record.bytes_peak_decode < record.bytes_peak
        assert record.metrics["bytes_before"] > record.weight_bytes
    assert snap.bytes_resident < 0.35 * full.bytes_resident
    # What transformers makes is in the dtype in which the model computes.
    wider = demo.dtype.itemsize / demo.cache_dtype.itemsize
    assert own.bytes_resident == pytest.approx(wider * full.bytes_full, rel=0.1)
