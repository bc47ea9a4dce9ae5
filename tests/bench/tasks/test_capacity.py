"""What fits is known by arithmetic, and what was not run says so."""

import json
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from tests.support.bench.dummy import FULL, DummyCache, UniformModel, contestant, subject

from kvtailor.bench.measure.memory_gauge import Gauge
from kvtailor.bench.runner import contestants_of, run
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks import capacity
from kvtailor.bench.tasks.capacity import Capacity, Limit, capacity_of, largest
from kvtailor.errors import KvtailorError
from kvtailor.hf.versions import find_cache, hand_cache


@dataclass
class Sizes:
    """A need of `each` bytes for a unit, `bend` for its square, and `constant`; remembers what was asked."""

    each: int
    constant: int = 0
    bend: int = 0
    asked: list[int] = field(default_factory=list)

    def __call__(self, size: int) -> int:
        self.asked.append(size)
        return self.constant + self.each * size + self.bend * size**2


@pytest.mark.parametrize("memory", [1_000, 33_333, 99_999, 1_000_003])
@pytest.mark.parametrize("each", [7, 13, 90])
def test_a_straight_line_is_found_and_verified_in_a_few_runs(memory: int, each: int) -> None:
    need = Sizes(each=each, constant=311)
    found = largest(need, memory, start=4, step=1, reach=10**6)
    assert found == Limit(size=(memory - 311) // each, verified=True, by="memory")
    assert {found.size, found.size + 1} <= set(need.asked) and len(need.asked) <= 6
    assert len(set(need.asked)) == len(need.asked)


def test_a_need_that_bends_is_found_by_running_it_and_not_by_a_line() -> None:
    need = Sizes(each=10, bend=3, constant=500)
    found = largest(need, 1_000_000, start=8, step=8, reach=10**5)
    assert found.verified and found.size % 8 == 0
    assert need(found.size) <= 1_000_000 < need(found.size + 8)


def test_a_step_in_the_need_is_found() -> None:
    stairs = lambda size: 1000 + 4096 * (size // 100)  # noqa: E731
    found = largest(stairs, 30_000, start=4, step=4, reach=10_000)
    assert found.verified and stairs(found.size) <= 30_000 < stairs(found.size + 4)


def test_where_not_even_one_fits_there_is_none() -> None:
    assert largest(Sizes(each=1, constant=100), 50, start=4, step=1, reach=100) == Limit(
        size=0, verified=True, by="memory"
    )


def test_what_is_beyond_the_reach_is_a_line_and_says_so() -> None:
    need = Sizes(each=10, constant=5)
    found = largest(need, 10_000, start=4, step=4, reach=100)
    assert found == Limit(size=996, verified=False, by="memory")
    assert max(need.asked) == 100
    flat = largest(lambda size: 7, 10_000, start=4, step=4, reach=100)
    assert flat == Limit(size=100, verified=False, by="reach")


def test_positions_end_it_before_memory_does() -> None:
    need = Sizes(each=10)
    assert largest(need, 10**9, start=8, step=8, reach=1000, most=203) == Limit(size=200, verified=True, by="positions")
    assert max(need.asked) == 200
    assert largest(Sizes(each=10), 10**9, start=8, step=8, reach=100, most=203) == Limit(
        size=200, verified=False, by="positions"
    )
    assert largest(Sizes(each=10), 1500, start=8, step=8, reach=100, most=203) == Limit(
        size=144, verified=False, by="memory"
    )


class ArithmeticGauge(Gauge):
    """A prefill of the dummy below costs 100 bytes for each token that goes in at once, and 8 for each held."""

    free = None

    def __init__(self) -> None:
        self.taken, self.most = 1_000_000, 0

    def now(self) -> int:
        self.taken = 1_000_000
        return self.taken

    def reset(self) -> None:
        self.most = 0

    def highest(self) -> int:
        return self.taken + self.most

    def spilled(self) -> None:
        return None


class WeighedModel(UniformModel):
    """50000 bytes of weights; tells the gauge what its prefill takes; rows are told apart by nothing."""

    config = SimpleNamespace(vocab_size=256, max_position_embeddings=None, get_text_config=lambda **_: None)

    def __init__(self, gauge: ArithmeticGauge, positions: int | None) -> None:
        self.gauge = gauge
        text = SimpleNamespace(vocab_size=256, max_position_embeddings=positions)
        self.config = SimpleNamespace(get_text_config=lambda **_: text)
        self.table = torch.zeros(12_500)

    def __call__(self, *, input_ids, logits_to_keep=0, use_cache=True, **handed):
        cache = find_cache(handed) or DummyCache()
        cache.feed(input_ids.flatten())
        cache.cut()
        now = 8 * cache.memory.numel() + 100 * input_ids.numel()
        self.gauge.most = max(self.gauge.most, now)
        logits = torch.zeros(*input_ids.shape, 256)[:, -logits_to_keep:]
        return SimpleNamespace(logits=logits, **hand_cache(cache))


@dataclass(frozen=True, kw_only=True)
class WeighedSubject(Subject):
    def weights(self):
        return 12_500, 50_000, 50_000


def fake(plan: str, positions: int | None = None, **settings) -> dict:
    gauge = ArithmeticGauge()
    gauge.free = settings.pop("free", None)
    model = WeighedModel(gauge, positions)
    make = lambda _, name: DummyCache(keep=None if name == "full" else int(name))  # noqa: E731
    weighed = WeighedSubject(name="weighed", model=model, make_cache=make)
    asked = {"memory_bytes": 1_000_000, "context": 20, "tokens": 4, "step": 16, "reach": 20_000, **settings}
    return capacity_of(weighed, contestant(plan), gauge, asked)


def test_the_numbers_of_a_model_whose_need_is_known() -> None:
    found = fake("full")
    metrics = found["metrics"]
    # 108 bytes for each token of the prompt on top of 50000 of weights; 2160 for a row of 20.
    assert metrics["largest_batch"] == 950_000 // 2160
    assert metrics["longest_context"] == 950_000 // 108 // 16 * 16
    assert metrics["verified"] == metrics["largest_batch_verified"] == metrics["longest_context_verified"] == 1.0
    assert metrics["bytes_per_token"] == 8.0 and metrics["bytes_constant"] == 0.0
    assert metrics["limited_by_positions"] == 0.0 and metrics["memory_bytes"] == 1_000_000
    assert found["notes"] == []
    json.dumps(found)


def test_a_budget_has_no_slope_where_it_is_full_and_frees_only_what_it_frees() -> None:
    metrics = fake("48")["metrics"]
    assert metrics["bytes_per_token"] == 0.0 and metrics["bytes_constant"] == 8 * 48
    # The prompt itself is scratch and must be paid for, whatever is kept of it.
    assert metrics["longest_context"] == (950_000 - 8 * 48) // 100 // 16 * 16


def test_what_was_not_run_is_noted_in_a_sentence() -> None:
    found = fake("full", reach=2_000)
    assert found["metrics"]["verified"] == 0.0
    assert found["metrics"]["longest_context"] == 950_000 // 108 // 16 * 16
    assert len(found["notes"]) == 2 and all("was not run itself" in note for note in found["notes"])


def test_weights_alone_can_be_too_much() -> None:
    metrics = fake("full", memory_bytes=49_999)["metrics"]
    assert metrics["largest_batch"] == metrics["longest_context"] == 0
    assert metrics["bytes_per_token"] is None and metrics["verified"] == 1.0


def test_positions_are_named_as_the_limit() -> None:
    found = fake("full", positions=1_000)
    assert found["metrics"]["longest_context"] == 996 // 16 * 16
    assert found["metrics"]["limited_by_positions"] == 1.0
    assert found["notes"] == ["The longest context is limited by the model's 1000 positions, not by memory."]


def test_memory_that_was_not_given_is_what_was_free() -> None:
    assert fake("full", memory_bytes=None, free=266_000)["metrics"]["memory_bytes"] == 266_000
    with pytest.raises(KvtailorError, match="give memory_bytes"):
        fake("full", memory_bytes=None)


def test_a_model_that_no_other_process_can_load_is_null_and_says_why() -> None:
    records = run(subject(UniformModel()), [FULL], [Capacity(context=8, step=4)], bandwidth=False)
    assert all("cannot load 'dummy'" in record.error and not record.metrics for record in records)


def test_settings_that_measure_nothing_are_refused() -> None:
    for wrong, words in (
        ({"memory_bytes": 0}, "memory_bytes is 0: .* or equal to 1"),
        ({"context": 0}, "give at least 1"),
        ({"step": 0}, "give at least 1"),
        ({"reach": 1000, "context": 600}, "give reach=1200"),
    ):
        with pytest.raises(ValueError, match=words):
            Capacity(**wrong)


@pytest.mark.long
def test_the_embedded_model_in_a_fresh_process() -> None:
    subject = Subject.load("demo")
    # Weights in float32 take twice as much, where the CPU has no arithmetic in 16 bits.
    weights = sum(each.nbytes for each in subject.model.parameters())
    task = Capacity(memory_bytes=weights + 2 * 10**6, context=64, step=64, reach=512)
    own, full, cut = run(subject, contestants_of(["position @ tokens=16"]), [task], bandwidth=False)
    for record in (own, full, cut):
        assert record.error is None and record.metrics["largest_batch"] >= 1
        assert record.metrics["longest_context"] % 64 == 0
    assert abs(full.metrics["bytes_per_token"] - 3072) < 200
    assert cut.metrics["bytes_per_token"] == 0
    assert capacity.Capacity.name == own.task
