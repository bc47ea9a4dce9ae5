"""`kvtailor.evaluate`: the bench in one call, and what a notebook shows of it."""

import dataclasses
import json

import pytest
from tests.support.bench.dummy import CountingModel, DummyCache, subject

import kvtailor
from kvtailor.bench.data.texts import generated_text
from kvtailor.bench.evaluation.asked import OPTIONS, settings_of
from kvtailor.bench.evaluation.given import lines_of, options_of, tasks_of, texts_of
from kvtailor.bench.measure.statistics import mean_difference
from kvtailor.bench.runner import contestants_of, run
from kvtailor.bench.schema import read_records
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.perplexity import Perplexity
from kvtailor.errors import KvtailorError, UnknownName

TEXT = generated_text(20_000)
PLANS = ["knorm @ keep=0.5", "streaming @ keep=0.25"]
SMALL = {"context": 96, "continuation": 16, "windows": 6}


@pytest.fixture(scope="module")
def found():
    return kvtailor.evaluate("demo", {"mine": TEXT}, plans=PLANS, **SMALL)


@pytest.mark.together
def test_it_is_the_bench_and_nothing_else(found):
    task = Perplexity(text=TEXT, source="mine", **SMALL)
    records = run(Subject.load("demo"), contestants_of(PLANS), [task], bandwidth=False)
    assert [r.key for r in found.records] == [r.key for r in records]
    assert [r.values["nll"] for r in found.records] == [r.values["nll"] for r in records]
    assert [row.label for row in found.rows] == ["full", *PLANS]
    assert found.rows[1].loss is not None and found.headline == found.summary.headline and found.out is None


@pytest.mark.together
def test_the_result_is_frozen_and_its_rows_are_found_by_any_spelling(found):
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.records = ()
    assert found.row("knorm   @   keep=0.50").label == "knorm @ keep=0.5"
    assert found.row(kvtailor.Plan.parse(PLANS[1])) is found.row(PLANS[1])
    with pytest.raises(UnknownName, match="knorm @ keep=0.5"):
        found.row("knorm @ keep=0.6")
    with pytest.raises(UnknownName):
        found.row("no plan at all")


@pytest.mark.together
def test_a_difference_is_the_paired_one(found):
    nll = {record.label: record.values["nll"] for record in found.records}
    asked = found.difference(PLANS[1], PLANS[0])
    assert asked == mean_difference(nll[PLANS[1]], nll[PLANS[0]])
    assert found.difference(PLANS[0], PLANS[1]).value == pytest.approx(-asked.value)
    with pytest.raises(UnknownName, match="nll"):
        found.difference(*PLANS, value="nil")
    with pytest.raises(UnknownName, match="perplexity"):
        found.difference(*PLANS, task="needle")


@pytest.mark.together
def test_a_notebook_gets_a_table_and_a_terminal_80_columns(found):
    html = found._repr_html_()
    assert html.count("<tr>") == 1 + len(found.rows) and found.headline.split(":")[0] in html
    assert "Fewer than 50 windows" in html, "what limits the numbers is in the notebook too"
    assert max(map(len, str(found).splitlines())) <= 80
    assert repr(found).startswith("Evaluation('demo', 3 plans, 3 records: ") and "\n" not in repr(found)


def test_text_that_looks_like_html_stays_text():
    found = kvtailor.evaluate("demo", {"<script>alert(1)</script>": TEXT}, plans=PLANS[0], **SMALL)
    assert "<script>" not in found._repr_html_() and "&lt;script&gt;" in found._repr_html_()


@pytest.mark.together
def test_it_is_saved_and_read_again(found, tmp_path):
    page = found.save(tmp_path / "here")
    assert page.name == "report.html" and page.exists()
    again = kvtailor.Evaluation.load(tmp_path / "here")
    assert again.records == found.records and again.headline == found.headline
    assert found.save(tmp_path / "here") == page and len(read_records(tmp_path / "here")) == 3


def test_records_come_one_by_one_and_into_the_folder(tmp_path):
    came = []
    found = kvtailor.evaluate("demo", TEXT, plans=PLANS[0], out=tmp_path, on_record=came.append, **SMALL)
    assert came == list(found.records) == read_records(tmp_path) and found.out == tmp_path
    lines = [json.loads(line) for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines()]
    assert [line["text"] for line in lines] == ["text 1", "text 1"]


def test_every_option_of_the_command_line_has_its_name_and_values():
    tasks = tasks_of(["speed", "needle", "fidelity"])
    values = options_of({"new_tokens": [4, 8], "contexts": 64, "needles": "300,400", "windows": 3}, tasks)
    assert values["new_tokens"] == (4, 8) and values["contexts"] == (64,) and values["needles"] == (300, 400)
    assert set(values) == set(OPTIONS) and values["batches"] == (1,)
    given = subject(CountingModel(), one=DummyCache(keep=20))
    kinds = [kind for kind, _ in settings_of(tasks, values, ["generated"], given)]
    assert kinds.count("speed") == 2 and kinds[-1] == "fidelity"
    assert options_of({"memory": "1MiB"}, tasks_of("capacity")) == options_of({"memory": 2**20}, tasks_of("capacity"))


@pytest.mark.parametrize(
    "tasks, options, sentence",
    [
        ("perplexity", {"window": 3}, "did you mean 'windows'"),
        ("perplexity", {"windows": "many"}, "windows is 'many': give a whole number"),
        ("perplexity", {"windows": True}, "give a whole number"),
        ("perplexity", {"windows": 0}, "give 1 or more"),
        ("perplexity", {"beyond": 1}, "give True or False"),
        ("perplexity", {"needles": [300]}, "needles is about needle, which tasks does not ask for"),
        ("needle", {"needles": []}, "or several"),
        ("capacity", {"memory": -1}, "give a number of bytes, or text such as 8GiB"),
        ("capacity", {"memory": "much"}, "not a whole number of bytes"),
        ("perplexety", {}, "did you mean 'perplexity'"),
        ("", {}, "names none"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(tasks, options, sentence):
    with pytest.raises(KvtailorError, match=sentence):
        options_of(options, tasks_of(tasks))


def test_all_faults_are_told_at_once():
    with pytest.raises(KvtailorError) as caught:
        options_of({"window": 3, "windows": 0, "needles": [9]}, tasks_of("perplexity"))
    assert len(caught.value.faults) == 3


def test_texts_are_corpora_files_or_themselves(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("from a file")
    tasks = tasks_of("perplexity")
    names, own = texts_of(["wikitext2", "a text\nof its own", path], tasks)
    assert names == ["wikitext2", "text 1", "notes.txt"]
    assert [own[name].text for name in names[1:]] == ["a text\nof its own", "from a file"]
    assert texts_of(None, tasks) == (["generated"], {}) and texts_of("c4", tasks) == (["c4"], {})
    with pytest.raises(KvtailorError, match="there is no text file notes.text"):
        texts_of("notes.text", tasks)
    with pytest.raises(KvtailorError, match="which tasks does not ask for"):
        texts_of(TEXT, tasks_of("needle"))


def test_plans_are_lines_or_objects():
    plan = kvtailor.Plan.parse("knorm @ keep=0.5")
    assert lines_of("knorm @ keep=0.5; kivi(bits=4)") == ["knorm @ keep=0.5", "kivi(bits=4)"]
    assert lines_of([plan, "full"]) == [str(plan), "full"] and lines_of(plan) == [str(plan)]
    for odd in ([], " ; ", [3]):
        with pytest.raises(KvtailorError, match="give plans such as"):
            lines_of(odd)


def test_a_model_object_needs_its_tokenizer():
    model, tokenizer = kvtailor.load_model("demo")
    with pytest.raises(KvtailorError, match="asked for an evaluation of a model object without its tokenizer"):
        kvtailor.evaluate(model, TEXT, plans=PLANS[0], **SMALL)
    assert len(kvtailor.evaluate(model, TEXT, plans=PLANS[0], tokenizer=tokenizer, **SMALL).records) == 2


def test_a_plan_that_fails_is_told_and_the_others_go_on():
    model, tokenizer = kvtailor.load_model("demo")
    tried = Subject(name="demo", model=model, tokenizer=tokenizer, make_cache=only(PLANS[0]))
    found = kvtailor.evaluate(tried, TEXT, plans=[PLANS[0], PLANS[1]], **SMALL)
    assert list(found.errors) == [PLANS[1]] and "There is no such cache." in found._repr_html_()
    assert found.row(PLANS[0]).loss is not None and "1 without numbers" in repr(found)
    with pytest.raises(KvtailorError, match="no samples in common here: .*There is no such cache"):
        found.difference(PLANS[0], PLANS[1])


def only(plan):
    def made(model, text):
        if text not in (plan, "full"):
            raise KvtailorError("There is no such cache.")
        return kvtailor.cache_for(model, text)

    return made
