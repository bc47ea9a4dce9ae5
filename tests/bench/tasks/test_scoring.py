"""What choosing costs: the suite finds every method, ratios are of rounds, and an untrained model answers nothing."""

from __future__ import annotations

import math
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.bench.made_records import MACHINE, record

from kvtailor.bench.report.suite.numbers import measured
from kvtailor.bench.report.suite.tables import suite_grids
from kvtailor.bench.runner import contestants_of, run
from kvtailor.bench.schema import Record
from kvtailor.bench.subject import Subject
from kvtailor.bench.suite.cells import SuiteCell, TaskSettings
from kvtailor.bench.suite.run import prepare
from kvtailor.bench.suite.suite import Suite, everything, read_suite
from kvtailor.bench.tasks.needle import Needle
from kvtailor.bench.tasks.perplexity import Perplexity
from kvtailor.bench.tasks.speed import Speed
from kvtailor.errors import KvtailorError
from kvtailor.plan import Plan, registry

WRITER = Path(__file__).parents[3] / "docs" / "write_cost.py"
MODEL = "random-llama"


@pytest.fixture(scope="module")
def untrained() -> Subject:
    return Subject.load(MODEL)


@pytest.fixture(scope="module")
def suite() -> Suite:
    return read_suite("scoring")


def test_every_score_budget_and_evicting_preset_has_a_row(suite: Suite) -> None:
    share = suite.tables_for(MODEL)[0]
    plans = {row.labels: Plan.parse(row.cells[0].plan) for row in share.rows}
    assert all(plan.tokens == 1024 and plan.evicts for plan in plans.values())
    scores = {registry.name_of(plan.score) for (kind, _), plan in plans.items() if kind == "score"}
    budgets = {registry.name_of(plan.allocate) for (kind, _), plan in plans.items() if kind == "budget"}
    presets = {name for kind, name in plans if kind == "preset"}
    assert scores == set(registry.methods("score"))
    assert budgets == set(registry.methods("allocate")) - {"uniform"}
    assert presets == {name for name, preset in registry.presets().items() if Plan.parse(line(preset)).evicts}


def line(preset: registry.Preset) -> str:
    return f"{preset.name} @ {preset.budget}" if preset.budget else preset.name


def ratio(shows: str, name: str, ours: dict, theirs: dict) -> object:
    cell = SuiteCell(
        plan="p", written="p", tasks=(TaskSettings("speed", ()),), measure=f"paired.{name}", against="full", shows=shows
    )
    return measured(cell, [[record("p", "speed", values=ours)]], [[record("full", "speed", values=theirs)]])


def test_a_ratio_is_that_of_each_round() -> None:
    """A machine that is slower in some rounds moves no ratio; a difference it would."""
    full = (1.0, 2.0, 4.0, 1.5, 3.0)
    ours = tuple(1.1 * x for x in full)
    found = ratio("ratio", "ttft_processor", {"ttft_processor": ours}, {"ttft_processor": full})
    assert (found.value, found.low, found.high, found.count) == (*[pytest.approx(1.1)] * 3, 5)
    change = ratio("change", "ttft_processor", {"ttft_processor": ours}, {"ttft_processor": full})
    assert (change.value, change.low, change.high) == tuple([pytest.approx(0.1)] * 3)
    plain = ratio("value", "ttft_processor", {"ttft_processor": ours}, {"ttft_processor": full})
    assert plain.value == pytest.approx(0.1 * sum(full) / 5) and plain.low < plain.value < plain.high


def test_the_mean_of_ratios_is_geometric_and_its_interval_holds_it() -> None:
    ones = {"ttft_processor": (1.0,) * 6}
    found = ratio("ratio", "ttft_processor", {"ttft_processor": (2.0, 0.5, 2.0, 0.5, 4.0, 0.25)}, ones)
    assert found.value == pytest.approx(1.0) and found.low < 0.8 and found.high > 1.2
    assert found.low * found.high == pytest.approx(1.0, rel=0.1)
    few = ratio("ratio", "ttft_processor", {"ttft_processor": (2.0, 8.0)}, {"ttft_processor": (1.0, 1.0)})
    assert few.value == pytest.approx(4.0) and few.low is few.high is None


def test_disturbed_rounds_of_either_side_do_not_count_for_what_the_clock_times() -> None:
    ours = {"ttft": (2.0, 9.0, 2.0, 2.0), "ttft_processor": (3.0,) * 4, "disturbed": (0.0, 1.0, 0.0, 0.0)}
    full = {"ttft": (1.0, 1.0, 9.0, 1.0), "ttft_processor": (1.0,) * 4, "disturbed": (0.0, 0.0, 1.0, 0.0)}
    assert ratio("ratio", "ttft", ours, full).value == pytest.approx(2.0)
    assert ratio("value", "ttft", ours, full).count == 2
    assert ratio("ratio", "ttft_processor", ours, full).count == 4
    assert ratio("ratio", "ttft", {**ours, "disturbed": (1.0,) * 4}, full) is None
    assert ratio("ratio", "ttft", {"ttft": (1.0, 0.0)}, {"ttft": (1.0, 1.0)}) is None


def test_the_untrained_model_is_the_same_at_every_load(untrained: Subject) -> None:
    before = torch.get_rng_state()
    again = Subject.load(MODEL, dtype="bfloat16")
    assert torch.equal(torch.get_rng_state(), before), "loading a model must not move the caller's random numbers"
    assert again.dtype == torch.bfloat16 and untrained.dtype == torch.float32
    for one, two in zip(untrained.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one.to(torch.bfloat16), two)
    assert untrained.loadable and not untrained.trained and Subject.load("demo").trained
    config = untrained.model.config
    beside = 3 * config.hidden_size * config.intermediate_size + 2 * config.hidden_size * 64 * (4 + 2)
    assert beside / config.num_attention_heads == pytest.approx(60.8e6 / 32, rel=0.04), "as in Llama 3.2 1B"


def test_an_untrained_model_is_asked_for_costs_alone(untrained: Subject) -> None:
    plans = contestants_of(["full"])
    perplexity = Perplexity(text="a text", source="t", context=8, continuation=8, windows=1)
    cheap = Speed(text="words " * 20, source="t", context=8, tokens=2, rounds=1, warmup=0)
    for task in (perplexity, Needle(lengths=(200,))):
        with pytest.raises(
            KvtailorError, match=rf"{task.name} on random-llama, whose weights are random.*speed, memory"
        ):
            run(untrained, plans, [cheap, task], bandwidth=False)
    with pytest.raises(KvtailorError, match="perplexity on random-llama"):
        prepare(read_suite("standard"), untrained).run(bandwidth=False)
    records = run(untrained, plans, [cheap], bandwidth=False)
    assert [r.error for r in records] == [None, None] and records[0].model == MODEL


def test_the_harness_refuses_an_untrained_model(untrained: Subject) -> None:
    pytest.importorskip("lm_eval")
    from kvtailor.bench.lm_eval.model import HarnessModel

    with pytest.raises(KvtailorError, match="harness on random-llama, whose weights are random"):
        HarnessModel(pretrained=untrained, plan="full")


def made(suite: Suite) -> list[Record]:
    """Records of all cells but those of h2o, which failed: every plan takes 1.2 times as long as 'full'."""
    cells = [cell for table in suite.tables_for(MODEL) for row in table.rows for cell in row.cells]
    found = {}
    for cell in cells:
        for plan in ("full", cell.plan):
            contestant = suite.contestant(plan)
            seconds = tuple(round_ * (1.0 if plan == "full" else 1.2) for round_ in (1.0, 1.5, 1.2, 0.9, 1.1))
            times = dict.fromkeys(("ttft", "tpot", "ttft_processor"), seconds)
            median = {"median": seconds[4], "q1": 1.0, "q3": 1.2, "left_out": 0}
            good = record(
                contestant.label,
                "speed",
                model=MODEL,
                plan_hash=contestant.hash,
                asked=str(cell.tasks[0]),
                values={**times, "disturbed": (0.0,) * 5},
                point=dict(cell.tasks[0].settings),
                machine=MACHINE,
                timings={"ttft": median, "tpot": median},
            )
            failed = replace(good, values={}, timings={}, error="h2o was tired")
            found[plan, cell.tasks[0]] = failed if plan.startswith("h2o @") else good
    return list(found.values())


def test_the_page_is_made_from_records_alone(suite: Suite, tmp_path: Path) -> None:
    records = made(suite)
    (tmp_path / "records-1.jsonl").write_text("".join(f"{each.to_json()}\n" for each in records))
    page = runpy.run_path(str(WRITER))["page"](tmp_path)
    assert all(f"`score · {name}` |" in page for name in everything()["scorers"])
    assert all(f"`preset · {name}` |" in page for name in everything()["evicting"])
    assert "| `score · snapkv` | +20.0 (+20.0 to +20.0) | 1.200 (1.200 to 1.200) | +20.0" in page
    assert "| `score · h2o` | – | – | – | – |" in page and "h2o was tired" in page
    assert "2026-01-02" in page and "commit aaaaaaaaaaaa" in page and "(one)" in page
    assert "kvtailor bench --suite scoring --model random-llama --out FOLDER" in page
    table = suite_grids(suite, records)[-1]
    assert [row[1].value for row in table.rows] == [pytest.approx(math.fsum((1.0, 1.5, 1.2, 0.9, 1.1)) / 5)] * 3


def test_one_table_of_the_page_is_written_anew_and_says_so(suite: Suite, tmp_path: Path) -> None:
    records = made(suite)
    writer = runpy.run_path(str(WRITER))
    (tmp_path / "records-1.jsonl").write_text("".join(f"{each.to_json()}\n" for each in records))
    whole = writer["page"](tmp_path)
    assert "## A short prompt: 1024 tokens kept of 2048" in whole and "| `snapkv` | +20.0" in whole

    def slow(each: Record) -> Record:
        twice = tuple(2 * x for x in each.values["ttft_processor"])
        return replace(each, values={**each.values, "ttft_processor": twice})

    slower = [slow(each) if each.label.startswith("snapkv @") else each for each in records]
    (tmp_path / "records-1.jsonl").write_text("".join(f"{each.to_json()}\n" for each in slower))
    spliced = writer["with_table"](whole, tmp_path, "brief")
    assert "| `snapkv` | +140.0" in spliced and "| `score · snapkv` | +20.0 (+20.0 to +20.0)" in spliced
    assert spliced.count("## A short prompt") == 1 and spliced.count("--table brief --model") == 1
    assert writer["with_table"](spliced, tmp_path, "brief") == spliced
    without = "".join(part for part in spliced.split("## ") if not part.startswith("A short"))
    assert "A short prompt" in writer["with_table"](
        without.replace("\n\nChoosing", "\n\n## Choosing"), tmp_path, "brief"
    )
    with pytest.raises(ValueError, match="no record of the table 'breef' of the suite 'scoring'"):
        writer["with_table"](whole, tmp_path, "breef")
