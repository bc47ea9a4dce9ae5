"""Suites: what ships is whole, a typo is a fault and never a missing plan, and a run fills the tables from records."""

import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.support.bench.dummy import DummyTokenizer

from kvtailor.bench.build import Text
from kvtailor.bench.kinds import KINDS
from kvtailor.bench.subject import Subject
from kvtailor.bench.suite import suite as suite_module
from kvtailor.bench.suite.run import prepare
from kvtailor.bench.suite.suite import SuiteError, read_suite, suites
from kvtailor.errors import KvtailorError, UnknownName

POSITIONS = {
    "EleutherAI/pythia-2.8b": 2048,
    "Qwen/Qwen2.5-0.5B": 32768,
    "Qwen/Qwen2.5-7B": 32768,
    "llama-7B-128K": 131072,
    "NousResearch/Yarn-Llama-2-7b-128k": 131072,
    "demo": 4096,
    "demo-draft": 4096,
    "random-llama": 131072,
}
WANTED = ("rankkv", "kv-plugin", "atskv", "pyramidkv", "mspeckv", "scoring", "standard", "field", "reasoning")
LONG = ("llama-7B-128K", "NousResearch/Yarn-Llama-2-7b-128k", "demo", "demo-draft")  # what mspeckv's lengths fit
WIDE = (*LONG, "random-llama", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B")  # what scoring's lengths fit
FITS = {"mspeckv": LONG, "scoring": WIDE, "field": WIDE, "reasoning": WIDE}
ALL = [(name, model) for name in WANTED for model in POSITIONS if model in FITS.get(name, POSITIONS)]

SMALL = """
title = "A small one"
awaits = ["tomorrow", "telepathy"]
[settings.default]
budget = 64
texts = ["generated", "c4"]
[settings.demo]
budget = 32
[tasks.ppl]
run = "perplexity"
text = "{Dataset}"
context = 128
[tasks.guess]
run = "telepathy"
gamma = 8
[[tables]]
name = "budget"
title = "Budget {budget}"
labels = ["Method", "Dataset"]
for_rows = { Dataset = "{texts}" }
columns = [
    { label = "PPL", task = "ppl", value = "metrics.perplexity" },
    { label = "loss", task = "ppl", value = "paired.nll" },
]
rows = [
    { Method = "snapkv", plan = "snapkv  @ tokens={budget}" },
    { Method = "rankkv", plan = "snapkv + tomorrow @ tokens={budget}" },
]
[[tables]]
name = "guess"
title = "Telepathy"
labels = ["Method"]
columns = [{ label = "rate", task = "guess", value = "metrics.rate", plan = "full" }]
rows = [{ Method = "full" }]
"""


def read(tmp_path, text=SMALL, *changes):
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    path = tmp_path / "small.toml"
    path.write_text(text)
    return read_suite(path)


@cache
def shipped(name):
    """A suite that comes with the package: reading it asks for every cell of it under every setting."""
    return read_suite(name)


def subject_of(model, positions):
    config = SimpleNamespace(max_position_embeddings=positions, vocab_size=256)
    return Subject(name=model, model=SimpleNamespace(config=config), tokenizer=DummyTokenizer())


def test_all_wanted_suites_ship():
    assert set(WANTED) == set(suites())
    root = Path(suite_module.__file__).parents[3]
    assert not (root / "suites").exists() or (root / "suites").resolve() == next(iter(suites().values())).parent


@pytest.mark.parametrize("name", WANTED)
def test_a_file_begins_with_its_command_and_its_report(name):
    text = suites()[name].read_text()
    assert text.startswith(f"# kvtailor bench --suite {name} ")
    assert re.search(r"^# From: ", text, re.MULTILINE) or "From no report" in text
    assert max(map(len, re.findall(r"^#.*", text, re.MULTILINE))) <= 150


@pytest.mark.parametrize("name", WANTED)
def test_a_shipped_suite_has_no_fault_and_awaits_nothing_that_is_here(name):
    """Red when a method of `awaits` arrives: take its name out, and see that the suite's plans say what was built."""
    assert shipped(name).arrived() == []


@pytest.mark.parametrize(("name", "model"), ALL)
def test_every_task_of_every_suite_can_be_made_for_its_models(name, model, monkeypatch):
    monkeypatch.setattr("kvtailor.bench.build._read", lambda *_: Text("a text", "a name", None, ()))
    for kind in KINDS.values():
        # Some read their data to say how long they take.
        monkeypatch.setattr(kind, "units", lambda task, contestants: contestants)
    suite = shipped(name)
    found = prepare(suite, subject_of(model, POSITIONS[model]))
    for why in found.unavailable:
        kind = why.split("(")[0]
        assert kind not in KINDS and kind in suite.awaits, why
    lines = [job.asked for job in found.jobs]
    assert len(set(lines)) == len(lines) > 0


@pytest.mark.parametrize("name", WANTED)
def test_a_table_says_which_sets_it_holds_and_shows_their_own_score(name):
    """ZeroSCROLLS' score is no mean over examples, and a model may have some of the sets only."""
    suite = shipped(name)
    tables = [table for model in POSITIONS for table in suite.tables_for(model)]
    shown = [
        (table, head, cell, task.kind, dict(task.settings))
        for table in tables
        for row in table.rows
        for head, cell in zip(table.columns, row.cells, strict=True)
        for task in cell.tasks
    ]
    for table, head, cell, kind, settings in shown:
        if kind == "longcontext":
            assert settings["subset"] in re.findall(r"[\w-]+", table.note), (table.name, settings)
            assert cell.measure != "mean.score" and (cell.measure != "paired.score" or "examples" in head), table.name
        if kind == "harness" and settings["task"].startswith("mmlu"):
            assert head.split()[0] == settings["task"], table.name
    kinds = {kind for *_, kind, _ in shown}
    assert ("longcontext" in kinds) == (name in ("atskv", "kv-plugin"))


def test_sizes_that_a_model_cannot_take_are_said_at_once_and_before_any_text(monkeypatch):
    monkeypatch.setattr("kvtailor.bench.build._read", lambda *_: pytest.fail("a text was read"))
    with pytest.raises(SuiteError) as caught:
        prepare(read_suite("rankkv"), subject_of("tiny", 1024))
    assert len(caught.value.faults) == 3
    assert "context=1536 + continuation=512" in str(caught.value) and "tiny has 1024 positions" in str(caught.value)


def test_places_are_filled_for_each_model(tmp_path):
    suite = read(tmp_path)
    for model, budget in (("demo", 32), ("some/folder/Demo/", 32), ("other", 64)):
        table = suite.tables_for(model)[0]
        assert table.title == f"Budget {budget}"
        assert [row.labels for row in table.rows] == [
            ("snapkv", "generated"),
            ("snapkv", "c4"),
            ("rankkv", "generated"),
            ("rankkv", "c4"),
        ]
        cells = [cell for row in table.rows for cell in row.cells]
        assert {cell.plan for cell in cells[:4]} == {f"snapkv @ tokens={budget}"}
        assert [cell.against for cell in cells[:2]] == [None, "full"]
        assert str(cells[2].tasks[0]) == "perplexity(context=128, text=c4)"


def test_a_list_reads_as_one_in_titles_notes_and_labels(tmp_path):
    changes = [('title = "Budget {budget}"', 'title = "{texts}"\nnote = "Of {texts}."'), ('"loss"', '"loss, {texts}"')]
    table = read(tmp_path, SMALL, *changes, ('"c4"]', '"2-wiki.txt"]')).tables_for("demo")[0]
    assert (table.title, table.note) == ("generated, 2-wiki.txt", "Of generated, 2-wiki.txt.")
    assert table.columns == ("PPL", "loss, generated, 2-wiki.txt")


def test_a_plan_is_missing_by_the_name_that_it_awaits(tmp_path):
    suite = read(tmp_path)
    assert suite.contestant("snapkv + tomorrow @ tokens=90").missing == ("tomorrow",)
    assert suite.contestant("snapkv @ tokens=90").missing == ()


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("snapkv + tomorrow @", "snapkv + tomorrowk @", "no method named 'tomorrowk'"),
        ("snapkv + tomorrow @", "snapkv(windw=3) + tomorrow @", "windw"),
        ("snapkv + tomorrow @", "snapkv + tomorrow + nothing @", "no method named 'nothing'"),
        ("snapkv + tomorrow @", "snapkv + tomorrow(of=) @", "of is empty"),
        ("snapkv  @ tokens={budget}", "snapkv", "budget"),
        ("tokens={budget}", "tokens={budgt}", "did you mean 'budget'"),
        ('run = "telepathy"', 'run = "telepathie"', "did you mean 'telepathy'"),
        ("context = 128", "contxt = 128", "did you mean 'context'"),
        ("metrics.perplexity", "metrics.perplexty", "did you mean 'metrics.perplexity'"),
        ('task = "guess"', 'task = "gess"', "did you mean 'guess'"),
        ('labels = ["Method", "Dataset"]', 'labels = ["Method", "Data"]', "has no Data"),
        ('task = "guess", ', "", "neither the row nor the column says task"),
        ('"metrics.rate"', '"metrics.rate", shows = "rati"', "did you mean 'ratio'"),
        ('"metrics.rate"', '"metrics.rate", against = "full"', "neither shows nor value compares"),
        ("[settings.demo]\nbudget", "[settings.demo]\nbugdet", "did you mean 'budget'"),
        ('title = "Telepathy"\n', "", "has no title"),
        ('name = "guess"', 'name = "budget"', "two tables"),
        ('label = "loss"', 'label = "PPL"', "two columns are called 'PPL'"),
        ('awaits = ["tomorrow",', 'awaits = ["tomorrow", "never",', "no plan and no task uses"),
        ('awaits = ["tomorrow", "telepathy"]', "awaits = 3", "awaits is 3"),
        ('texts = ["generated", "c4"]', "texts = []", "give a list"),
        ('"{texts}"', '["wikitext"]', "did you mean 'wikitext2'"),
        ('"A small one"', '"A small one', "is not TOML"),
        ("rows = [{ Method", "rows = 3\nrow = [{ Method", "unknown key 'row'"),
    ],
)
def test_a_fault_is_told(tmp_path, old, new, told):
    with pytest.raises(SuiteError) as caught:
        read(tmp_path, SMALL, (old, new))
    assert told in str(caught.value), str(caught.value)


def test_all_faults_come_at_once(tmp_path):
    with pytest.raises(SuiteError) as caught:
        read(
            tmp_path,
            SMALL,
            ("snapkv + tomorrow", "snapk + tomorrow"),
            ("context", "contxt"),
            ('"guess", v', '"gess", v'),
        )
    assert len(caught.value.faults) == 4  # the plan has one for each budget


def test_a_suite_that_is_not_there_is_told_with_its_neighbours():
    with pytest.raises(UnknownName, match="did you mean 'rankkv'"):
        read_suite("rankv")


@pytest.mark.parametrize(
    "entry", ["snapkv", "pyramidkv", "kivi.bits", "@slack", "perplexity"]
)  # a method, a preset, an argument, a setting, a task
def test_what_has_arrived_is_seen(tmp_path, entry):
    assert read(tmp_path, SMALL, ('["tomorrow"', f'["{entry}", "tomorrow"')).arrived() == [entry]


@pytest.mark.parametrize(
    ("plan", "entry"),
    [
        ("kivi(bits=4, someday=3)", "kivi.someday"),
        ("full @ resident_layers=4", "@resident_layers"),
        ("snapkv + someday(of=uniform) @ tokens=90", "someday"),
        ("snapkv + inverse(of=someday) @ tokens=90", "someday"),
        ("snapkv + shuffled(of=inverse(of=someday(of=3))) @ tokens=90", "someday"),
        ("snapkv + shuffled(of=inverse(off=3, of=uniform)) @ tokens=90", "inverse.off"),
    ],
)
def test_what_is_awaited_may_be_an_argument_or_a_setting(tmp_path, plan, entry):
    suite = read(tmp_path, SMALL, ('"tomorrow", ', f'"{entry}", '), ("snapkv + tomorrow @ tokens={budget}", plan))
    assert suite.contestant(plan).missing == (entry,)
    with pytest.raises(SuiteError):
        read(tmp_path, SMALL, ("snapkv + tomorrow @ tokens={budget}", plan), ('"tomorrow", ', ""))


def test_a_file_of_another_shape_is_told(tmp_path):
    for text in ("", "tables = [3]\ntitle = 'x'\ntasks = {a = 3}", "title = 'x'\nsettings = {default = 3}"):
        with pytest.raises(KvtailorError):
            read(tmp_path, text)
