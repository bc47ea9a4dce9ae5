import math
from collections.abc import Iterator
from dataclasses import fields, replace
from statistics import fmean

import pytest
import torch
from tests.support.bench.dummy import FULL, CountingModel, DummyCache, UniformModel, contestant, subject

from kvtailor.bench import checks
from kvtailor.bench.checks import Fraud
from kvtailor.bench.data.texts import BETWEEN, generated_text, starts_of
from kvtailor.bench.runner import plan_run, run
from kvtailor.bench.schema import read_records
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.perplexity import Perplexity
from kvtailor.errors import KvtailorError

TEXT = generated_text(12_000)


def task(**changes):
    return Perplexity(
        **{"text": TEXT, "source": "generated text", "context": 200, "continuation": 40, "windows": 8} | changes
    )


def bench(model, *labels, caches=None, tasks=None, **options):
    plans = [FULL, *map(contestant, labels)]
    return run(subject(model, **(caches or {})), plans, tasks or [task()], bandwidth=False, **options)


def test_uniform_logits_give_the_logarithm_of_the_vocabulary():
    [record] = bench(UniformModel())
    assert record.metrics["nll"] == pytest.approx(math.log(256), abs=1e-6)
    assert record.metrics["perplexity"] == pytest.approx(256, abs=1e-3)
    assert record.metrics["bits_per_byte"] == pytest.approx(8, abs=1e-6)
    assert (record.samples, record.tokens_scored, record.tokens_seen) == (8, 320, 200)
    assert record.bytes_held == record.bytes_full == record.bytes_closed_form == 1600


def counting_nll(context: bytes, targets: bytes, keep: int | None) -> float:
    """By hand: counts of the remembered bytes, smoothed by one. Cut after the context only, as the dummy does."""
    memory = list(context)[-keep:] if keep else list(context)
    nats = []
    for place, target in enumerate(targets):
        # The first target is scored by the prefill, which saw the whole context.
        known = list(context) if place == 0 else memory
        nats.append(-math.log((known.count(target) + 1) / (len(known) + 256)))
        memory.append(target)
    return fmean(nats)


@pytest.mark.parametrize("keep", [None, 5, 63])
def test_nll_meets_a_count_by_hand(keep):
    the_task, model = task(), CountingModel()
    caches = {"cut": DummyCache(keep=keep)} if keep else {}
    record = bench(model, *caches, caches=caches, tasks=[the_task])[-1]
    windows = the_task.cut(subject(model))
    by_hand = [counting_nll(bytes(w.context.tolist()), bytes(w.targets.tolist()), keep) for w in windows]
    assert record.values["nll"] == pytest.approx(by_hand, abs=1e-5)
    assert record.tokens_held == (keep or 200)


def streamed_nll(context: bytes, targets: bytes, keep: int, chunk: int) -> float:
    """By hand, where the memory is cut after the context and after each chunk."""
    memory, nats = list(context), []
    for place, target in enumerate(targets):
        nats.append(-math.log((memory.count(target) + 1) / (len(memory) + 256)))
        if place % chunk == 0:
            memory = memory[-keep:]
        memory.append(target)
    return fmean(nats)


@pytest.mark.parametrize("chunk", [1, 7, 39, 100])
def test_a_streamed_continuation_meets_a_count_by_hand(chunk):
    the_task, model = task(chunk=chunk), CountingModel()
    record = bench(model, "cut", caches={"cut": DummyCache(keep=21)}, tasks=[the_task])[-1]
    windows = the_task.cut(subject(model))
    by_hand = [streamed_nll(bytes(w.context.tolist()), bytes(w.targets.tolist()), 21, chunk) for w in windows]
    assert record.values["nll"] == pytest.approx(by_hand, abs=1e-5)
    assert record.tokens_seen == 239 and record.tokens_held == 21 and record.point["chunk"] == chunk


def test_windows_are_pieces_of_the_text_that_do_not_overlap():
    windows = task(windows=1000).cut(subject(UniformModel()))
    joined = b"".join(bytes(torch.cat([w.context, w.targets]).tolist()) for w in windows)
    assert TEXT.encode().startswith(joined)
    assert len(windows) == len(TEXT.encode()) // 240
    assert [w.text for w in windows] == [joined[i * 240 : i * 240 + 240].decode() for i in range(len(windows))]


def test_a_text_shorter_than_asked_is_said():
    [record] = bench(UniformModel(), tasks=[task(windows=1000)])
    assert record.samples == len(TEXT) // 240
    assert "not for 1000" in record.notes[0]
    with pytest.raises(KvtailorError, match="12000 tokens|has 1[0-9]+ tokens"):
        bench(UniformModel(), tasks=[task(context=50_000)])


def test_more_than_the_model_has_positions_is_refused():
    model = UniformModel()
    model.config = type(model.config)(max_position_embeddings=128, vocab_size=256)
    with pytest.raises(KvtailorError, match="200 \\+ 40 tokens.*128 positions.*--beyond"):
        bench(model)
    [record] = bench(model, tasks=[task(beyond=True)])
    assert record.error is None and any("Windows of 240 tokens: the model was made for 128" in n for n in record.notes)


def test_bytes_of_the_targets_count_characters_of_several_bytes():
    the_task = task(text="äöü€ " * 400, least_distinct=0.0, windows=1)
    [window] = the_task.cut(subject(UniformModel()))
    assert window.bytes == 40


def test_a_cache_that_is_ignored_is_caught(tmp_path):
    caches = {"liar": DummyCache(claims=20)}
    with pytest.raises(Fraud, match="untouched cache.*'liar'.*20 of 200"):
        bench(CountingModel(), "liar", caches=caches, out=tmp_path)
    assert [r.label for r in read_records(tmp_path)] == ["full", "liar"]


def test_two_plans_with_the_same_results_are_caught():
    caches = {"one": DummyCache(keep=20), "other": DummyCache(keep=20, claims=21)}
    with pytest.raises(Fraud, match="equal results.*'one' and 'other'"):
        bench(CountingModel(), *caches, caches=caches)


def test_honest_plans_pass():
    caches = {"one": DummyCache(keep=20), "other": DummyCache(keep=21)}
    assert len(bench(CountingModel(), *caches, caches=caches)) == 3


def test_a_full_plan_that_differs_from_the_model_is_caught():
    broken = subject(CountingModel())
    object.__setattr__(broken, "make_cache", lambda model, plan: DummyCache(keep=199))
    with pytest.raises(Fraud, match="identity"):
        run(broken, [FULL], [task()], bandwidth=False)


class OnTwo(Perplexity):
    own_windows = 2


def test_the_full_plan_may_be_held_against_the_model_on_a_few_windows():
    few = OnTwo(**{each.name: getattr(task(), each.name) for each in fields(Perplexity)})
    assert plan_run([few], [FULL])[1] == plan_run([task()], [FULL])[1] - 6 == 10
    steps = []
    whole, [part] = bench(CountingModel()), bench(CountingModel(), tasks=[few], advance=steps.append)
    assert len(steps) == 10 and part.metrics == whole[0].metrics
    broken = subject(CountingModel())
    object.__setattr__(broken, "make_cache", lambda model, plan: DummyCache(keep=199))
    with pytest.raises(Fraud, match="identity"):
        run(broken, [FULL], [few], bandwidth=False)


class Unchecked(Perplexity):
    own_windows = 0
    probes = False


def test_windows_whose_plans_were_checked_before_have_the_same_numbers_and_no_checks():
    caches = {"one": DummyCache(keep=20)}
    last = Unchecked(**{each.name: getattr(task(), each.name) for each in fields(Perplexity)})
    steps = []
    whole = bench(CountingModel(), *caches, caches=caches)
    part = bench(CountingModel(), *caches, caches=caches, tasks=[last], advance=steps.append)
    assert len(steps) == plan_run([last], [FULL, FULL])[1] == 16
    assert [r.metrics for r in part] == [r.metrics for r in whole]
    assert whole[1].rounding is not None
    assert all(r.rounding is None and r.reads_held is None and not r.notes for r in part)
    broken = subject(CountingModel())
    object.__setattr__(broken, "make_cache", lambda model, plan: DummyCache(keep=199))
    with pytest.raises(Fraud, match="full that holds less"):
        run(broken, [FULL], [last], bandwidth=False)


def test_a_sentence_said_again_and_again_is_caught():
    with pytest.raises(Fraud, match="repeated text"):
        bench(UniformModel(), tasks=[task(text="The same old story is told here once more, dear reader. " * 400)])
    assert checks.distinct_8grams(["a b c d e f g h i"]) == 1.0
    assert checks.distinct_8grams(["too short"]) is None


def test_the_same_window_twice_is_caught():
    with pytest.raises(Fraud, match="repeated data"):
        bench(UniformModel(), tasks=[task(text=TEXT[:240] * 8, least_distinct=0.0)])


def test_a_plan_that_fails_is_recorded_and_the_others_go_on():
    class Failing(CountingModel):
        def logits(self, cache, ids) -> Iterator:
            if cache.keep == 13:
                raise KvtailorError("thirteen is not done here")
            return super().logits(cache, ids)

    caches = {"bad": DummyCache(keep=13), "good": DummyCache(keep=14)}
    records = bench(Failing(), *caches, caches=caches)
    assert [r.error for r in records] == [None, "thirteen is not done here", None]
    assert records[1].metrics == {} and records[1].bytes_held is None


@pytest.mark.parametrize("what", ["context", "continuation", "windows", "chunk"])
def test_settings_below_one_are_refused(what):
    with pytest.raises(ValueError, match=f"{what} is 0: .* or equal to 1"):
        task(**{what: 0})


def test_steps_that_a_short_text_has_no_use_for_are_told_all_the_same():
    told = []
    asked = [Perplexity(text=generated_text(1500), source="short", context=100, continuation=20, windows=40)]
    run(subject(CountingModel()), [FULL], asked, bandwidth=False, advance=told.append)
    assert len(told) == plan_run(asked, [FULL])[1] == 80


def test_one_target_reads_no_cache_and_is_refused():
    with pytest.raises(ValueError, match="no cache is read"):
        Perplexity(text="", source="short", context=100, continuation=1)


def test_where_a_corpus_came_from_is_in_its_records():
    asked = Perplexity(text=generated_text(1500), source="c4", origin="hub:c4@c0ffee", context=100, continuation=20)
    [record] = run(subject(CountingModel()), [FULL], [asked], bandwidth=False)
    assert "c4 was read from hub:c4@c0ffee." in record.notes


def test_a_window_is_of_the_document_that_its_first_target_is_from(tmp_path):
    documents = [f"{'ä' * 7} " + " ".join(f"{name}{i}" for i in range(90)) for name in "abcdef"]
    text = BETWEEN.join(documents)
    task = Perplexity(text=text, source="t", starts=starts_of(documents), context=30, continuation=8, windows=9)
    loaded = Subject.load("demo")
    windows = task.cut(loaded)
    assert [window.document for window in windows] == sorted(window.document for window in windows)
    assert len({window.document for window in windows}) > 3
    for window in windows:
        target = loaded.text(window.targets.tolist()).strip()
        assert target.split()[1] in documents[window.document - 1]
    assert {window.document for window in replace(task, starts=()).cut(loaded)} == {None}
