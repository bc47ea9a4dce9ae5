"""From settings to tasks: what is unknown, missing or too large is refused before anything is read."""

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.support.bench.dummy import FULL, CountingModel, DummyCache, contestant, subject

from kvtailor.bench import build
from kvtailor.bench.build import SettingsError, make_task
from kvtailor.bench.data.longsets import BENCHMARKS
from kvtailor.bench.kinds import FIELDS, KINDS, TEXTS, measure_faults, setting_faults
from kvtailor.bench.runner import run
from kvtailor.bench.schema import Record
from kvtailor.bench.tasks import memory, needle
from kvtailor.errors import ArgumentError, KvtailorError


def small(positions=None):
    found = subject(CountingModel(), small=DummyCache(keep=20))
    found.model.config = SimpleNamespace(max_position_embeddings=positions, vocab_size=256)
    return found


@pytest.mark.parametrize("name", KINDS)
def test_what_a_task_reads_are_its_fields(name):
    has = {field.name for field in dataclasses.fields(KINDS[name])}
    assert {"text", "source"} <= has or not KINDS[name].reads_text
    assert "data" in has or not KINDS[name].reads_data


def test_fields_are_fields_of_a_record():
    assert set(FIELDS) <= {field.name for field in dataclasses.fields(Record)}


def test_the_corpora_are_those_that_there_are():
    corpora = pytest.importorskip("kvtailor.bench.data.corpora")
    assert (*corpora.CORPORA, "generated") == TEXTS


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("perplexity", {"context": 60, "continuation": 9, "windows": 3}),
        ("needle", {"lengths": [150], "depths": [0.5], "documents": 1, "kind": "passkey"}),
        ("fidelity", {"context": 60, "continuation": 9, "windows": 2}),
        ("speed", {"context": 40, "tokens": 3, "rounds": 1, "warmup": 0}),
    ],
)
def test_records_hold_the_numbers_that_a_kind_names_and_no_others(name, settings):
    task = make_task(name, settings, small(), data=None)
    records = run(small(), [FULL, contestant("small")], [task], bandwidth=False)
    kind = KINDS[name]
    metrics = {metric.name for metric in kind.metrics}
    assert records and all(record.error is None for record in records)
    for record in records:
        assert {key for key in record.metrics if not key.rsplit("_", 1)[-1].isdigit()} <= metrics
        assert set(kind.values) - {"recall"} <= set(record.values) and set(record.timings) <= set(kind.timings)
    if name != "speed":
        assert {key for record in records for key in record.metrics} >= metrics


def test_settings_reach_the_task():
    found = make_task("needle", {"lengths": [200, 300], "documents": 3, "question_outside": True}, small(), data=None)
    assert (found.lengths, found.documents, found.question_outside, found.kind) == ((200, 300), 3, True, "needle")
    found = make_task("perplexity", {"context": 77, "windows": 4, "chunk": 5}, small(), data=None)
    assert (found.context, found.windows, found.chunk, found.continuation) == (77, 4, 5, 128)
    assert found.source == "generated text" and len(found.text) > 4 * (77 + 128)


def test_a_file_is_read(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("some words " * 3)
    found = make_task("perplexity", {"text": str(path)}, small(), data=None)
    assert (found.text, found.source) == ("some words " * 3, "words.txt")
    with pytest.raises(KvtailorError, match="cannot be read"):
        make_task("perplexity", {"text": str(tmp_path / "none.txt")}, small(), data=None)


def test_a_corpus_gets_the_folder(monkeypatch):
    asked = []

    def corpus(name, *, data):
        asked.append((name, data))
        return SimpleNamespace(text="a text", source="the name", origin="there@1", starts=(0, 4))

    monkeypatch.setitem(sys.modules, "kvtailor.bench.data.corpora", SimpleNamespace(corpus=corpus))
    build._read.cache_clear()
    found = build._text("wikitext2", {}, KINDS["perplexity"], Path("there"))
    build._read.cache_clear()
    assert found == ("a text", "the name", "there@1", (0, 4))
    assert asked == [("wikitext2", Path("there"))]


def test_all_faults_come_at_once_and_before_any_text(monkeypatch):
    monkeypatch.setattr(build, "_read", lambda *_: pytest.fail("a text was read"))
    with pytest.raises(SettingsError) as caught:
        make_task("perplexity", {"contxt": 5, "text": "wikitext", "continuation": 0}, small(), data=None)
    assert len(caught.value.faults) == 3
    told = str(caught.value)
    assert "'contxt'; did you mean 'context'" in told and "'wikitext2'" in told and "continuation is 0" in told


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        ("perplexity", {"context": 900, "continuation": 125}, "context=900 + continuation=125, 1025 tokens"),
        ("perplexity", {"context": 900}, "continuation=128"),
        ("needle", {"lengths": [100, 993]}, "lengths=993 and 32 more to generate, 1025 tokens"),
        ("speed", {"context": 1024}, "context=1024 + tokens=32"),
        ("memory", {"context": 993}, "context=993 and 32 more to generate, 1025 tokens"),
    ],
)
def test_more_than_the_model_has_positions_is_refused(name, settings, told):
    with pytest.raises(SettingsError, match="1024 positions") as caught:
        make_task(name, settings, small(1024), data=None)
    assert told in str(caught.value)
    less = {key: [1] if isinstance(value, list) else 1 for key, value in settings.items()}
    assert setting_faults(name, less, "dummy", 1024) == []


@pytest.mark.parametrize(
    ("benchmark", "subset"), [(benchmark, subset) for benchmark in BENCHMARKS for subset in BENCHMARKS[benchmark]]
)
def test_the_answers_of_a_set_take_positions_too(benchmark, subset):
    answer = BENCHMARKS[benchmark][subset].generation
    settings = {"benchmark": benchmark, "subset": subset, "max_tokens": 1537 - answer}
    assert setting_faults("longcontext", settings, "dummy", 1537) == []
    (told,) = setting_faults("longcontext", settings, "dummy", 1536)
    assert f"max_tokens={1537 - answer} and {answer} more to generate, 1537 tokens" in told
    assert setting_faults("longcontext", {"benchmark": benchmark, "subset": subset}, "dummy", 1536) == []


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"benchmark": "longbench", "subset": "multi_new"}, "did you mean 'multi_news'"),
        ({"benchmark": "longbenhc", "subset": "multi_news"}, "did you mean 'longbench'"),
        ({"benchmark": "longbench"}, "needs the setting 'subset'"),
    ],
)
def test_a_set_that_there_is_not_is_a_fault(settings, told):
    (fault,) = setting_faults("longcontext", settings)
    assert told in fault


def test_what_a_task_generates_is_what_its_kind_leaves_space_for():
    assert KINDS["memory"].generates == memory._DECODED
    assert needle.Needle.generates == needle.Needle.generated({"kind": "copy_span"})
    assert needle.Needle.generated({"kind": "tool_call"}) == 96


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        ("perplexty", {}, "did you mean 'perplexity'"),
        ("needle", {}, "needs the setting 'lengths'"),
        ("needle", {"lengths": [100], "kind": "pass_key"}, "did you mean 'passkey'"),
        ("needle", {"lengths": []}, r"lengths is \[\]: .* at least 1 item"),
        ("needle", {"lengths": [100, 0]}, r"lengths is \[100, 0\]: .* greater than or equal to 1"),
        ("needle", {"lengths": [100], "depths": [0.5, 1.5]}, "depths is .* less than or equal to 1"),
        ("needle", {"lengths": [100], "question_outside": 1}, "question_outside is 1: .* a valid boolean"),
        ("speed", {"context": "many"}, "context is 'many': .* a valid integer"),
        ("speed", {"tokens": 1}, "tokens is 1: .* greater than or equal to 2"),
        ("perplexity", {"windows": 0}, "windows is 0: .* greater than or equal to 1"),
        ("perplexity", {"windows": "ten"}, "windows is 'ten': .* a valid integer"),
        ("perplexity", {"windows": True}, "windows is True: .* a valid integer"),
        ("speculation", {"gamma": 1.5}, "gamma is 1.5: .* a valid integer, or .* a valid string"),
    ],
)
def test_nonsense_is_a_fault(name, settings, told):
    with pytest.raises(SettingsError, match=told):
        make_task(name, settings, small(), data=None)


@pytest.mark.parametrize(
    ("measure", "told"),
    [
        ("metrics.perplexty", "did you mean 'metrics.perplexity'"),
        ("paired.nlll", "did you mean 'paired.nll'"),
        ("timings.tpot", "no measure 'timings.tpot'"),
        ("bytes_hold", "did you mean 'bytes_held'"),
        ("mode.nll", "begin with one of"),
    ],
)
def test_a_measure_that_no_record_holds_is_a_fault(measure, told):
    assert [fault for fault in measure_faults("perplexity", measure) if told in fault]


def test_the_harness_names_its_metrics_itself():
    assert measure_faults("harness", "metrics.acc_norm,none") == []


def test_a_task_that_is_made_by_hand_is_checked_too():
    with pytest.raises(ArgumentError, match="documents is 0: .*; state is -1: .*"):
        needle.Needle(lengths=(100,), documents=0, state=-1)
