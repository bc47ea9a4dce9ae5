"""A suite from end to end on a model whose right answers are known: run, resumed, and its tables from records alone."""

import math
import random
from dataclasses import replace

import pytest
import torch
from tests.bench.dummy import CountingModel, DummyCache, UniformModel, subject

from kvtailor.bench import build, machine
from kvtailor.bench.report.suite_tables import provenance, suite_markdown, suite_tables
from kvtailor.bench.schema import latest, read_records
from kvtailor.bench.suite import SuiteError, read_suite
from kvtailor.bench.suite_run import prepare, run_suite
from kvtailor.bench.tripwires import Fraud
from kvtailor.errors import KvtailorError

CONTEXT, TARGETS, WINDOWS, KEEP = 90, 21, 6, 32
PLAN = f"snapkv @ tokens={KEEP}"
VERSIONS = {"python": "3", "torch": "2", "transformers": "5", "kvtailor": "0", "commit": "abc"}
SUITE = """
title = "A | small one"
awaits = ["erank", "speculation"]
[settings.default]
keep = 32
[tasks.ppl]
run = "perplexity"
text = "{Text}"
context = 90
continuation = 21
windows = 6
[tasks.needle]
run = "needle"
for = { kind = ["needle", "passkey"] }
kind = "{kind}"
lengths = [200]
depths = [0.0, 1.0]
documents = 2
[tasks.guess]
run = "speculation"
gamma = 8
[[tables]]
name = "loss"
title = "Loss"
note = "A note."
labels = ["Method", "Text"]
for_rows = { Text = ["FILE", "c4"] }
columns = [
    { label = "PPL", task = "ppl", value = "metrics.perplexity", digits = 6 },
    { label = "ΔNLL", task = "ppl", value = "paired.nll", digits = 6 },
    { label = "PPL (%)", task = "ppl", value = "metrics.perplexity", shows = "change", scale = 7 },
    { label = "PPL (x)", task = "ppl", value = "metrics.perplexity", shows = "ratio" },
    { label = "KiB", task = "ppl", value = "bytes_held", scale = 0.0009765625, digits = 4 },
    { label = "kept", task = "ppl", value = "kept", digits = 3 },
    { label = "reduction", task = "ppl", value = "reduction", digits = 3 },
]
rows = [
    { Method = "full", plan = "full" },
    { Method = "snap", plan = "snapkv @ tokens={keep}" },
    { Method = "again", plan = "snapkv(window=32) @ tokens={keep}" },
    { Method = "rank", plan = "snapkv + erank @ tokens={keep}" },
]
[[tables]]
name = "again"
title = "The same task once more, and two that are one cell"
labels = ["Method"]
columns = [
    { label = "PPL", task = "ppl", value = "metrics.perplexity" },
    { label = "needle (%)", task = "needle", value = "mean.hit", scale = 100 },
    { label = "nats", task = "needle", value = "metrics.answer_nll", digits = 6 },
]
rows = [{ Method = "full", plan = "full", Text = "FILE" }]
[[tables]]
name = "guess"
title = "Speculation"
labels = ["Method"]
columns = [{ label = "rate", task = "guess", value = "metrics.rate" }]
rows = [{ Method = "snap", plan = "snapkv @ tokens={keep}" }]
"""


class Watched(CountingModel):
    calls = 0

    def logits(self, cache, ids):
        self.calls += 1
        return super().logits(cache, ids)


@pytest.fixture(autouse=True)
def same_versions(monkeypatch):
    """A checkout in which somebody works is dirty, and then nothing is reused."""
    monkeypatch.setattr(machine, "versions", lambda: dict(VERSIONS))
    build._read.cache_clear()


@pytest.fixture
def text(tmp_path):
    source = random.Random(731)
    path = tmp_path / "letters.txt"
    path.write_text("".join(source.choices("abcdefghij \n", weights=range(1, 13), k=1501)))
    return path


@pytest.fixture
def small(tmp_path, text):
    path = tmp_path / "small.toml"
    path.write_text(SUITE.replace("FILE", str(text)))
    return read_suite(path)


def dummy(model=None, keep=KEEP, **more):
    caches = {plan.replace(" ", "_"): DummyCache(keep=keep) for plan in (PLAN, f"snapkv(window=32) @ tokens={KEEP}")}
    return subject(model or CountingModel(), **caches, **more)


def go(suite, model=None, **options):
    counted = []
    found = prepare(suite, dummy(model), data=options.pop("data", None))
    records = found.run(bandwidth=False, advance=counted.append, **options)
    assert len(counted) == found.units > 0
    return records


def nats(text, keep):
    """The mean NLL of each window, by counting letters."""
    codes, found = list(text.read_bytes()), []
    size = CONTEXT + TARGETS
    for i in range(WINDOWS):
        at = i * (len(codes) // size) // WINDOWS * size
        context, targets = codes[at : at + CONTEXT], codes[at + CONTEXT : at + size]
        memory, total = context, 0.0
        for j, target in enumerate(targets):
            total -= math.log((memory.count(target) + 1) / (len(memory) + 256))
            memory = (context if j == 0 and keep is None else context[-keep:] if keep else context) + targets[: j + 1]
        found.append(total / TARGETS)
    return found


def test_the_tables_hold_what_was_measured_and_say_what_was_not(small, text, tmp_path):
    records = go(small, out=tmp_path / "out", data=tmp_path)
    loss, again, guess = suite_tables(small, records)
    full, kept = nats(text, None), nats(text, KEEP)
    rows = {row.labels: row for row in loss.rows}
    where = str(text)
    values = [cell.value for cell in rows["snap", where].cells]
    means = [sum(each) / WINDOWS for each in (full, kept)]
    assert values[0] == pytest.approx(math.exp(means[1]), rel=1e-6)
    assert values[1] == pytest.approx(means[1] - means[0], abs=1e-6) and abs(values[1]) > 1e-3
    cell = rows["snap", where].cells[1]
    assert cell.low < cell.value < cell.high and cell.text.startswith(f"{cell.value:+.6f} (") and cell.samples == 6
    assert values[2] == pytest.approx(100 * math.expm1(values[1]), rel=1e-5)
    assert values[3] == pytest.approx(math.exp(values[1]), abs=1e-6)
    assert values[4] == pytest.approx(8 * KEEP / 1024)
    assert values[5:] == pytest.approx([KEEP / CONTEXT, 1 - KEEP / CONTEXT])
    assert [cell.value for cell in rows["full", where].cells[:4]] == pytest.approx([math.exp(means[0]), 0, 0, 1])
    # Data that is not there: dashes, with the reason below; the other text was measured all the same.
    assert {cell.text for cell in rows["snap", "c4"].cells} == {"–"} and rows["snap", "c4"].missing == ()
    assert any("c4" in note for note in loss.notes) and loss.notes[0] == "A note."
    assert any("snap" in note and "again" in note and "same plan" in note for note in loss.notes)
    # A plan and a task that are not there.
    assert rows["rank", where].missing == ("erank",) and {cell.value for cell in rows["rank", where].cells} == {None}
    assert guess.rows[0].missing == ("the task speculation",) and guess.rows[0].cells[0].text == "–"
    assert again.rows[0].cells[0].value == pytest.approx(math.exp(means[0]))
    told = suite_markdown(small, records)
    assert "missing: erank" in told and "missing: the task speculation" in told
    assert "| Method | Text |" in told and "| 1.00 |" in told
    assert provenance(small, records) in told and "dummy" in provenance(small, records)
    assert suite_markdown(small, latest(read_records(tmp_path / "out"))) == told


def test_what_is_missing_gives_one_record_for_each_plan_and_no_number(small, tmp_path):
    records = go(small, data=tmp_path)
    guesses = [record for record in records if record.task == "speculation"]
    assert sorted(record.label for record in guesses) == ["full", PLAN]
    for record in guesses:
        assert record.error == "This kvtailor does not have the task 'speculation'."
        assert (record.metrics, record.values, record.timings, record.bytes_held, record.samples) == (
            {},
            {},
            {},
            None,
            None,
        )
    absent = [record for record in records if record.label == f"snapkv + erank @ tokens={KEEP}"]
    assert [record.task for record in absent] == ["perplexity", "perplexity"]
    assert all(record.missing == ("erank",) and "does not have it: erank" in record.error for record in absent)
    gone = [record for record in records if record.asked and "c4" in record.asked and not record.missing]
    assert {record.label for record in gone} == {"full", PLAN} and all(record.error for record in gone)


def test_what_cannot_be_done_is_told_before_the_run(small, tmp_path):
    found = prepare(small, dummy(), data=tmp_path)
    assert [why.split("(")[0] for why in found.unavailable] == ["perplexity", "speculation"]
    assert "c4" in found.unavailable[0] and found.missing == (f"snapkv + erank @ tokens={KEEP}",)


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
    assert [r.key for r in again] == [r.key for r in first] and suite_tables(small, again) == suite_tables(small, first)
    go(small, model, out=tmp_path / "out", data=tmp_path, resume=False)
    assert model.calls > 0


def test_one_table_alone(small, tmp_path):
    found = prepare(small, dummy(), only=["guess"])
    assert [part.asked.kind for part in found.parts] == ["speculation"]
    with pytest.raises(SuiteError, match="did you mean 'guess'"):
        prepare(small, dummy(), only=["gues"])


def test_a_cell_of_several_tasks_is_empty_where_one_is_lacking(small, tmp_path):
    records = go(small, data=tmp_path)
    hits = [x for r in records if r.task == "needle" for x in r.values["hit"]]
    cells = suite_tables(small, records)[1].rows[0].cells
    assert len(hits) == 8 and cells[1].value == pytest.approx(100 * sum(hits) / 8) and cells[1].samples == 8
    means = [r.metrics["answer_nll"] for r in records if r.task == "needle"]
    assert cells[2].value == pytest.approx(sum(means) / len(means))
    some = [r for r in records if r.task != "needle" or r.point["kind"] == "needle"]
    assert [cell.value for cell in suite_tables(small, some)[1].rows[0].cells[1:]] == [None, None]


@pytest.mark.parametrize("field", ["text_hash", "model_hash", "dtype", "device", "task_version"])
def test_what_was_not_measured_alike_does_not_stand_together(small, text, tmp_path, field):
    records = go(small, data=tmp_path)
    other = 1 if field == "task_version" else "other"
    mixed = [replace(r, **{field: other}, started="2001" + r.started[4:]) if r.label == PLAN else r for r in records]
    rows = {row.labels: row for row in suite_tables(small, mixed)[0].rows}
    assert rows["snap", str(text)].cells[0].value is None and rows["full", str(text)].cells[0].value is not None


def test_times_of_another_run_do_not_stand_together(tmp_path):
    path = tmp_path / "times.toml"
    path.write_text("""
title = "Times"
tasks.speed = { run = "speed", context = 40, tokens = 3, rounds = 2, warmup = 0 }
settings.default = {}
[[tables]]
name = "times"
title = "Times"
labels = ["plan"]
columns = [{ label = "ms", task = "speed", value = "timings.tpot", scale = 1e3 }]
rows = [{ plan = "full" }, { plan = "snapkv @ tokens=32" }]
""")
    suite = read_suite(path)
    records = run_suite(suite, dummy(), bandwidth=False)
    timed = [replace(r, timings={"tpot": {"median": 0.5}}) for r in records]
    assert [row.cells[0].value for row in suite_tables(suite, timed)[0].rows] == [500.0, 500.0]
    other = [replace(r, run="other", started="2001" + r.started[4:]) if r.label == PLAN else r for r in timed]
    assert [row.cells[0].value for row in suite_tables(suite, other)[0].rows] == [500.0, None]


def test_a_task_that_breaks_off_is_told_and_the_others_go_on(small, tmp_path, text):
    text.write_text("too short")
    records = go(small, data=tmp_path)
    broken = [r for r in records if r.task == "perplexity" and str(text) in r.asked]
    assert len(broken) == 3 and all("longer text" in r.error or r.missing for r in broken)
    assert all(r.error is None for r in records if r.task == "needle")


def test_a_fraud_stops_the_run(small, tmp_path):
    with pytest.raises(Fraud, match="untouched cache"):
        go(small, UniformModel(), data=tmp_path)


def test_records_of_others_are_passed_over(small, tmp_path):
    records = go(small, data=tmp_path)
    foreign = [replace(r, asked=None, started="2999" + r.started[4:]) for r in records]
    assert suite_tables(small, [*records, *foreign]) == suite_tables(small, records)
    for these in ([], foreign):
        with pytest.raises(KvtailorError, match="kvtailor bench --suite small"):
            suite_tables(small, these)
    with pytest.raises(KvtailorError, match="for other"):
        suite_markdown(small, records, model="other")


def test_torch_is_left_as_it_was(small, tmp_path):
    before = torch.get_rng_state()
    go(small, data=tmp_path)
    assert torch.equal(before, torch.get_rng_state())
