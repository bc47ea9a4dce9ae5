"""Adding a task touches its file: the runner, resume, the command line, suites and reports need no word of it."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from tests.support.bench.dummy import FULL, CountingModel, DummyCache, contestant, subject
from tests.support.bench.toy import PLACE, TOY, install, write_task

from kvtailor.bench.build import SettingsError, make_task
from kvtailor.bench.data.texts import generated_text
from kvtailor.bench.kinds import FIELDS, KINDS, found_kinds, measure_faults, setting_faults
from kvtailor.bench.measure import machine
from kvtailor.bench.report import summarise
from kvtailor.bench.report.files import texts
from kvtailor.bench.report.tables.tables import FORMS, brief_grid, main_grid, task_grids
from kvtailor.bench.report.terminal import show
from kvtailor.bench.runner import plan_run, run
from kvtailor.bench.schema import Record, RecordError, read_records
from kvtailor.bench.suite.suite import SuiteError, read_suite
from kvtailor.bench.tasks.fidelity import Fidelity
from kvtailor.errors import KvtailorError

CACHES = {"one": DummyCache(keep=20), "other": DummyCache(keep=10)}
PLANS = [FULL, contestant("one"), contestant("other")]
VERSIONS = {"python": "3", "torch": "2", "transformers": "5", "kvtailor": "0", "commit": "abc"}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def toy(tmp_path, monkeypatch):
    path = write_task(tmp_path / "tasks")
    install(monkeypatch, path)
    monkeypatch.setattr(machine, "versions", lambda: dict(VERSIONS))
    return path


def go(model=None, plans=PLANS, out=None, **settings) -> list[Record]:
    task = make_task("toy", settings, subject(CountingModel()), data=None)
    told: list[str] = []
    given = subject(model or CountingModel(), **CACHES)
    found = run(given, plans, [task], out=out, bandwidth=False, advance=told.append)
    assert (len(found), len(told)) == plan_run([task], plans)
    assert {label.partition(" · ")[0] for label in told} <= {"toy"}
    return found


def test_the_worked_example_is_no_real_file_and_formatted_as_one(tmp_path):
    assert PLACE == "src/kvtailor/bench/tasks/toy.py" and not (ROOT / PLACE).exists()
    path = write_task(tmp_path / "tasks")
    for words in (["format", "--check"], ["check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *words, "--config", str(ROOT / "pyproject.toml"), str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout


def test_it_is_found_with_all_that_it_declares(toy):
    assert list(found_kinds())[-1] == "toy"
    toy = KINDS["toy"]
    assert [each.name for each in toy.declared()] == ["context", "prompts", "points_wanted"]
    assert (toy.sizes(), toy.asked_as(), toy.default("prompts")) == (("context",), ("toy",), 6)
    [option] = [each.option for each in toy.declared() if each.name == "prompts"]
    assert (option.flag, option.type, option.least) == ("--toy-prompts", int, 1)
    assert option.help == "Prompts of the toy at each point."


def test_it_runs_over_plans(toy):
    records = go(context=50, prompts=4)
    assert [(r.label, r.point["place"], r.metrics["kept_share"]) for r in records] == [
        ("full", 0, 1.0),
        ("one", 0, 0.4),
        ("other", 0, 0.2),
        ("full", 1, 1.0),
        ("one", 1, 0.4),
        ("other", 1, 0.2),
    ]
    for record in records:
        assert (record.task, record.task_version, record.samples, record.text) == ("toy", 1, 4, "random tokens")
        assert record.bytes_held == 8 * record.tokens_held and record.wall_seconds > 0 and record.error is None
        assert Record.from_json(record.to_json()) == record


def test_a_plan_that_fails_has_an_error_and_the_others_go_on(toy):
    class Failing(CountingModel):
        fed = 0

        def logits(self, cache, ids):
            if cache.keep == 20:
                self.fed += 1
                raise ValueError("twenty is not done here")
            return super().logits(cache, ids)

    model = Failing()
    records = go(model)
    assert [r.error for r in records] == 2 * [None, "twenty is not done here", None]
    assert not records[1].metrics and records[2].metrics["kept_share"] == 0.25
    assert model.fed == 1, "a plan that failed at one point is not tried at the next"


CHILD = """
import os, signal, sys
from pathlib import Path
import kvtailor.bench.tasks as tasks
tasks.__path__.append(sys.argv[1])
from tests.bench import test_a_task_is_one_file as t
t.machine.versions = lambda: dict(t.VERSIONS)
left = 20
def advance(label):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
given = t.subject(t.CountingModel(), **t.CACHES)
task = t.make_task("toy", {}, given, data=None)
t.run(given, t.PLANS, [task], out=Path(sys.argv[2]), bandwidth=False, advance=advance)
"""


def child(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
        capture_output=True,
        check=False,
    )


@pytest.mark.long
def test_a_killed_run_goes_on_where_it_was(toy, tmp_path):
    out = tmp_path / "out"
    assert child(CHILD, str(toy.parent), str(out)).returncode == -signal.SIGKILL
    before = read_records(out)
    assert [(r.label, r.point["place"]) for r in before] == [("full", 0), ("one", 0), ("other", 0)]

    class Watched(CountingModel):
        seen: list[int] = []

        def logits(self, cache, ids):
            self.seen.append(cache.keep or 0)
            return super().logits(cache, ids)

    again = go(Watched(), out=out)
    assert [r.key for r in again[:3]] == [r.key for r in before] and len(Watched.seen) == 3 * 6
    assert [r.metrics for r in again] == [r.metrics for r in go()]
    assert len(read_records(out)) == 6


def test_of_plans_that_are_scored_together_only_those_that_are_new_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "versions", lambda: dict(VERSIONS))
    task = Fidelity(text=generated_text(3000), source="generated text", context=60, continuation=9, windows=3)

    def go(plans):
        return run(subject(CountingModel(), **CACHES), plans, [task], out=tmp_path, bandwidth=False)

    first, wider = go(PLANS[:2]), go(PLANS)
    assert [r.key for r in wider[:2]] == [r.key for r in first] and wider[:2] == first
    assert wider[2].run != first[0].run and wider[2].metrics["kl"] > 0
    assert wider == go(PLANS) and len(read_records(tmp_path)) == 3


def test_its_metrics_are_columns_tables_and_measures(toy):
    summary = summarise(records := go())
    heads = main_grid(summary.rows).heads
    assert "toy kept share, share" in heads and "toy prompts fed, prompts" in heads
    full, one, other = main_grid(summary.rows).rows
    at = heads.index("toy kept share, share")
    assert [row[at].value for row in (full, one, other)] == [1.0, 0.5, 0.25] and one[at].keys == (records[1].key,)
    assert [measure.name for measure in summary.measures] == ["toy kept share, place 0", "toy kept share, place 1"]
    score = summary.measures[0].scores[records[2].plan_hash]
    assert (score.value, score.difference.value) == (25.0, -75.0)
    pages = texts(records)
    assert "kept share, share" in pages["toy.tex"] and "kept_share: held over seen." in pages["report.md"]
    assert "toy kept share" in pages["report.html"]
    rows = list(csv.DictReader(io.StringIO(pages["results.csv"])))
    assert {(row["metric"], row["unit"]) for row in rows} >= {
        ("toy.kept_share", "share"),
        ("toy.prompts_fed", "prompts"),
    }
    out = io.StringIO()
    show(summary, Console(file=out, width=200))
    assert "toy kept share, share" in out.getvalue() and "0.25" in out.getvalue()


SHOWN = """    shown: ClassVar[Shown] = Shown(
        first=(Column("kept, %", "kept_share", 1, 100),),
        terminal=(Column("kept", "kept_share", 0, 100, unit=" %"),),
        title="Toys",
        own=(Column("of its prompts, %", "kept_share", 2, 100),),
    )
    values: ClassVar[tuple[str, ...]] = ("kept",)
"""


def shown_toy(folder, monkeypatch, form="number"):
    shown = SHOWN.replace("1, 100)", f"1, 100, form={form!r})")
    text = TOY.replace('    values: ClassVar[tuple[str, ...]] = ("kept",)\n', shown)
    install(monkeypatch, write_task(folder, text.replace("CONTEXTS, Count", "CONTEXTS, Column, Count, Shown")))


def test_its_columns_stand_in_its_file_too(tmp_path, monkeypatch):
    shown_toy(tmp_path / "tasks", monkeypatch)
    summary = summarise(records := go())
    first, terminal = main_grid(summary.rows), brief_grid(summary.rows)
    assert [row[first.heads.index("kept, %")].text for row in first.rows] == ["100.0", "50.0", "25.0"]
    assert [row[terminal.heads.index("kept")].text for row in terminal.rows] == ["100 %", "50 %", "25 %"]
    assert not [head for head in (*first.heads, *terminal.heads) if "toy" in head]
    [own] = task_grids(records, summary.rows)
    assert own.title == "Toys" and own.heads[-1] == "of its prompts, %" and own.rows[-1][-1].text == "25.00"


def test_a_form_that_there_is_not_is_refused(tmp_path, monkeypatch):
    shown_toy(tmp_path / "tasks", monkeypatch, form="bites")
    with pytest.raises(KvtailorError, match="no form of a column named 'bites'; did you mean 'bytes'"):
        main_grid(summarise(go()).rows)


@pytest.mark.parametrize("name", [name for name, task in KINDS.items() if task.shown])
def test_a_column_shows_a_number_that_there_is(name):
    """A number that no record has would be a column that is never seen."""
    task = KINDS[name]
    timings = {f"{timing}{end}" for timing in task.timings for end in ("", "_median", "_q1", "_q3")}
    over_full = {f"{number}_over_full" for number in ("nll", "answer_nll", "ttft", "tpot")}
    known = {*FIELDS, *timings, *over_full, "tokens_per_second_per_gib"} | {each.name for each in task.metrics or ()}
    columns = [*task.shown.first, *task.shown.terminal, *task.shown.own]
    assert {each.number for each in columns} | {each.beside for each in columns if each.beside} <= known
    assert {each.form for each in columns} <= set(FORMS)


def test_a_record_whose_mean_is_not_that_of_its_values_is_refused(toy):
    line = json.loads(go()[1].to_json())
    line["metrics"]["kept_share"] = 0.51
    with pytest.raises(RecordError, match=r"metrics.kept_share is 0.51, but the mean of the 6 numbers in values.kept"):
        Record.from_json(json.dumps(line))


def test_wrong_settings_and_measures_suggest_neighbours(toy):
    assert "did you mean 'prompts'" in setting_faults("toy", {"promts": 3})[0]
    assert "did you mean 'toy'" in setting_faults("toi", {})[0]
    assert "did you mean 'metrics.kept_share'" in measure_faults("toy", "metrics.kept_shares")[0]
    assert measure_faults("toy", "paired.kept") == [] and "no measure" in measure_faults("toy", "timings.ttft")[0]
    model = subject(CountingModel())
    model.model.config.max_position_embeddings = 30
    try:
        with pytest.raises(SettingsError, match="context=40, 40 tokens, but dummy has 30 positions"):
            make_task("toy", {}, model, data=None)
    finally:
        model.model.config.max_position_embeddings = None


SUITE = """
title = "Of a toy"
[settings.default]
keep = 32
[tasks.kept]
run = "toy"
prompts = 3
[[tables]]
name = "kept"
title = "Kept"
labels = ["Method"]
columns = [{ label = "kept", task = "kept", value = "metrics.kept_share" }]
rows = [{ Method = "snap", plan = "snapkv @ tokens={keep}" }]
"""


def test_a_suite_may_name_it(toy, tmp_path):
    path = tmp_path / "suite.toml"
    path.write_text(SUITE)
    assert read_suite(path).tables_for("demo")[0].columns == ("kept",)
    path.write_text(SUITE.replace("prompts = 3", "prompt = 3").replace("kept_share", "kept_shar"))
    with pytest.raises(SuiteError) as caught:
        read_suite(path)
    assert "did you mean 'prompts'" in str(caught.value) and "did you mean 'metrics.kept_share'" in str(caught.value)


BENCH = """
import sys
import kvtailor.bench.tasks as tasks
tasks.__path__.append(sys.argv[1])
from kvtailor.cli.bench import command
command(sys.argv[2:])
"""


def test_its_options_are_those_of_the_command_line(toy):
    helped = child(BENCH, str(toy.parent), "--help").stdout
    assert "--toy-prompts INTEGER" in helped and "Prompts of the toy at each point." in helped and "toy," in helped


@pytest.mark.long
def test_its_options_are_read_and_are_about_it_alone(toy):
    idle = child(BENCH, str(toy.parent), "--tasks", "speed", "--toy-prompts", "2")
    assert idle.returncode == 2 and "--toy-prompts is about toy, which --tasks does not ask for" in idle.stderr
    words = ["--tasks", "toy", "--toy-prompts", "2", "--contexts", "30,60", "--plans", "streaming @ keep=0.5"]
    found = child(BENCH, str(toy.parent), *words, "--dtype", "float32", "--json")
    assert found.returncode == 0, found.stderr
    rows = json.loads(found.stdout.splitlines()[-1])["rows"]
    assert [row["numbers"]["toy.kept_share"]["value"] for row in rows] == [1.0, 0.5]
    assert [row["numbers"]["toy.prompts_fed"]["value"] for row in rows] == [2, 2]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"toy"', '"game"', "the task is named 'game', but its file 'toy': give both one name"),
        ("setting(6,", "setting(int(os.environ['N']),", r"toy.py cannot be imported \(NameError: name 'os'"),
        ("context: Count", "context: int", "declare the option --contexts differently"),
        ("prompts: Count =", "prompts: dict[str, int] =", "--toy-prompts is of the type dict.*no option can be made"),
        ("prompts: Count =", "prompts: Subject =", "of Toy cannot be read .*'Subject'.*outside of TYPE_CHECKING"),
        ("    by_sample: ClassVar[bool] = True", "    by_sampel: ClassVar[bool] = True", "did you mean 'by_sample'"),
        (
            "by_sample: ClassVar[bool] = True",
            'by_sample: ClassVar[bool] = "no"',
            "by_sample is 'no', not .* bool",
        ),
        ("by_sample: ClassVar[bool]", "by_sample: bool", "by_sample is a field, and must be a ClassVar"),
        ('name="prompts_fed"', 'name="kept_share"', "the metric 'kept_share' is declared twice"),
        ("@dataclass(frozen=True, kw_only=True)", "", "Toy is no dataclass"),
        ("class Toy", "class Other(PlanByPlan):\n    pass\n\n\nclass Toy", "holds the tasks Other and Toy"),
    ],
)
def test_a_declaration_that_cannot_be_is_refused(tmp_path, monkeypatch, old, new, told):
    assert old in TOY
    path = write_task(tmp_path / "tasks", TOY.replace(old, new, 1))
    with pytest.raises(KvtailorError, match=told):
        install(monkeypatch, path)


def test_an_option_that_the_command_has_already_is_refused(tmp_path):
    path = write_task(tmp_path / "tasks", TOY.replace("--toy-prompts", "--model"))
    assert "a task declares the option --model, which `kvtailor bench` has" in child(BENCH, str(path.parent)).stderr


def test_a_metric_that_is_not_declared_is_refused(tmp_path, monkeypatch):
    path = write_task(tmp_path / "tasks", TOY.replace('"prompts_fed": len', '"prompts_feed": len'))
    install(monkeypatch, path)
    with pytest.raises(KvtailorError, match="gives the metric 'prompts_feed'.*did you mean 'prompts_fed'.*of Toy"):
        go()


def test_the_tasks_are_imported_without_what_takes_long():
    code = "import sys, kvtailor.bench.kinds; print(sorted({'torch', 'numpy', 'scipy', 'pydantic'} & set(sys.modules)))"
    assert child(code).stdout == "[]\n"
