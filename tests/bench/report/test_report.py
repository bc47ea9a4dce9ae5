import ast
import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tests.support.bench.pages import page

import kvtailor.bench.report as report
from kvtailor.bench.checks import Fraud, check_records
from kvtailor.bench.report import summarise
from kvtailor.bench.report.plot import plot
from kvtailor.bench.report.terminal import show
from kvtailor.bench.schema import Record
from kvtailor.errors import KvtailorError
from kvtailor.ops.sizes import byte_text


def record(label, task, **fields):
    common = {"run": "r", "started": "now", "model": "m", "plan": label, "plan_hash": f"#{label}", "task_version": 1}
    return Record(**common | {"label": label, "task": task} | fields)


def scored(label, nll, held=25, size=250, **fields):
    return record(
        label,
        "perplexity",
        point={"context": 100, "continuation": 20},
        text="t.txt",
        samples=len(nll),
        tokens_scored=20 * len(nll),
        tokens_seen=100,
        tokens_held=float(held),
        bytes_held=size,
        bytes_full=1000,
        metrics={"nll": sum(nll) / len(nll)},
        values={"nll": tuple(nll)},
        **fields,
    )


def needles(label, hits):
    point = {"length": 100, "depth": 0.5, "kind": "needle", "question_outside": False}
    values = {"hit": tuple(map(float, hits)), "nll": tuple(0.5 + label.count("x") for _ in hits)}
    return record(label, "needle", point=point, samples=len(hits), values=values)


def test_fidelity_has_its_columns_and_its_sentence():
    faithful = [
        record(
            label,
            "fidelity",
            point={"context": 64, "continuation": 8},
            text="t.txt",
            samples=5,
            tokens_scored=40,
            metrics={"kl": kl, "top1": top1},
            values={"kl": (kl,) * 5},
        )
        for label, kl, top1 in (("full", 0.0, 1.0), ("x", 0.123, 0.875))
    ]
    shown = io.StringIO()
    show(summarise(faithful), Console(file=shown, width=140))
    assert "0.123" in shown.getvalue() and "87.5 %" in shown.getvalue() and "KL(full || plan)" in shown.getvalue()
    shown = io.StringIO()
    show(summarise([scored("full", [1.0] * 9)]), Console(file=shown, width=140))
    assert "top-1" not in shown.getvalue()


def timed(label, tpot, plan_hash=None):
    timings = {
        n: {"median": t, "q1": t, "q3": t, "p10": t, "count": 5, "left_out": 1}
        for n, t in (("ttft", 0.1), ("tpot", tpot))
    }
    return record(
        label,
        "speed",
        plan_hash=plan_hash or f"#{label}",
        timings=timings,
        samples=5,
        point={"context": 100, "tokens": 8},
        floor_seconds=0.001,
    )


BASE = [2.0 + i / 10 for i in range(10)] * 5
JITTER = [0.01, -0.02, 0.015, -0.01, 0.005, 0.0, -0.005, 0.01, -0.01, 0.004] * 5
FULL = scored("full", BASE, held=100, size=1000)
SAME = scored("same", [a + b for a, b in zip(BASE, JITTER, strict=True)])
WORSE = scored("worse", [a + 0.3 + b for a, b in zip(BASE, JITTER, strict=True)], size=125)


def printed(records, width=100):
    console = Console(file=io.StringIO(), width=width)
    show(summarise(records), console)
    return console.file.getvalue()


def test_the_first_line_names_the_smallest_plan_that_loses_nothing():
    said = summarise([FULL, WORSE, SAME]).headline
    assert said.startswith("same loses less than 0.02 nats per token here at 25 % of the bytes")
    assert [row.label for row in summarise([SAME, WORSE, FULL]).rows] == ["full", "same", "worse"]


def test_a_loss_is_not_called_nothing():
    said = summarise([FULL, WORSE]).headline
    assert said.startswith(
        "Every plan here that saves bytes loses more than 0.02 nats per token; the mildest is worse:"
    )
    assert "+0.300 nats per token" in said
    assert "at 12 % of the bytes" in said


def test_lost_answers_are_a_loss_even_where_nll_is_not():
    records = [FULL, SAME, needles("full", [1] * 20), needles("same", [1] * 17 + [0] * 3)]
    assert "17 of 20 answers right ('full': 20)" in summarise(records).headline


def test_better_than_full_is_no_praise():
    better = scored("better", [a - 0.3 + b for a, b in zip(BASE, JITTER, strict=True)])
    summary = summarise([FULL, better])
    assert summary.headline.startswith("No verdict")
    assert any("look twice" in note for note in summary.footnotes)
    assert summarise([FULL, better, SAME]).headline.startswith("same loses less than 0.02 nats")


def test_too_few_windows_and_nothing_measured_are_said():
    few = [replace(r, values={"nll": r.values["nll"][:3]}) for r in (FULL, SAME)]
    said = summarise(few).headline
    assert said.startswith("No verdict") and "takes 29 windows (this run has 3)" in said
    bare = [replace(r, values={}, metrics={}, task="memory") for r in (FULL, SAME)]
    assert summarise(bare).headline.startswith("Quality was not measured")
    assert "nothing to choose" in summarise([FULL]).headline


def test_without_perplexity_and_answers_the_headline_says_that_and_not_more():
    close = [
        record(
            label,
            "fidelity",
            point={"context": 64},
            metrics={"kl": kl, "top1": 1 - kl},
            bytes_held=size,
            bytes_full=1000,
        )
        for label, kl, size in (("full", 0.0, 1000), ("same", 0.1, 250))
    ]
    said = summarise(close).headline
    assert "no perplexity and no answers" in said and "KL and top-1" in said and "Quality was not" not in said
    failed = replace(SAME, values={}, metrics={}, error="no room")
    weighed = replace(SAME, task="memory", values={}, metrics={})
    assert "no smaller plan has a perplexity or answers" in summarise([FULL, failed, weighed]).headline


def test_the_machine_line_names_all_machines():
    one = {"processor": "one", "torch": "2", "transformers": "5", "commit": "a" * 40}
    two = one | {"processor": "two", "torch": "3", "commit": "b" * 40 + "-dirty"}
    mixed = [replace(FULL, machine=one), replace(SAME, machine=two), replace(WORSE, machine=one)]
    for said in (printed(mixed, 300), page(mixed)):
        assert f"one and two, commit {'a' * 12} and {'b' * 12}-dirty, torch 2 and 3, transformers 5" in said
    lacking = [*mixed[:1], replace(SAME, machine={"processor": "one"})]
    assert "one, commit aaaaaaaaaaaa and unknown, torch 2 and unknown" in printed(lacking, 300)
    assert "unknown processor." in printed([FULL, SAME], 300)
    cards = [
        replace(each, device=each_device, machine=one | {"accelerator": "card"})
        for each, each_device in ((FULL, "cuda:0"), (SAME, "cuda:0"))
    ]
    assert "card, one, commit" in printed(cards, 300)
    assert "card" not in printed([replace(each, device="cpu") for each in cards], 300)
    assert summarise(mixed).machines["processor"] == ("one", "two")


def test_a_wide_interval_admits_what_it_cannot_see():
    wide = scored("wide", [a + (0.36 if i % 2 else -0.34) for i, a in enumerate(BASE)])
    said = summarise([FULL, wide]).headline
    assert said.startswith("No verdict") and "windows (this run has 50)" in said


def test_ratios_are_of_medians_of_the_same_run():
    records = [
        timed("the model's own cache", 0.02, "own"),
        timed("full", 0.01),
        timed("half", 0.005),
        FULL,
        scored("half", BASE),
    ]
    summary = summarise(records)
    assert [row.label for row in summary.rows] == ["full", "half", "the model's own cache"]
    half = summary.rows[1]
    assert half.value("speed.tpot_over_full") == 0.5 and half.value("speed.ttft_over_full") == 1.0
    assert half.value("speed.floor_over_tpot") == pytest.approx(0.2)
    assert any("own cache 100.0 ms" in note and "1 disturbed" not in note for note in summary.footnotes)


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_table_fits_and_shows_every_number(width):
    text = printed(
        [
            FULL,
            SAME,
            WORSE,
            needles("full", [1] * 20),
            needles("same", [1] * 20),
            timed("full", 0.01),
            timed("same", 0.005),
        ],
        width,
    )
    assert all(len(line) <= width for line in text.splitlines())
    for shown in ("25/100", "+0.300", "20/20", "0.50×", "250 B", "25 %"):
        assert shown in text, shown
    assert "–" in text


def test_columns_that_nobody_measured_are_left_out():
    assert "TPOT" not in printed([FULL, SAME]).splitlines()[4] and "needle" not in printed([FULL, SAME])


def test_errors_are_never_silent():
    failed = replace(
        SAME, label="broken", plan_hash="#b", error="it broke", values={}, metrics={}, bytes_held=None, tokens_held=None
    )
    text = printed([FULL, failed])
    assert "broken has no number for perplexity: it broke" in text.replace("\n", " ")


def test_bytes_as_people_read_them():
    assert [byte_text(x) for x in (12, 2048, 1.5 * 2**20, 3 * 2**30)] == ["12 B", "2 KiB", "1.5 MiB", "3 GiB"]
    assert byte_text(1023 * 1024) == "1023 KiB"


def test_a_ledger_that_hides_bytes_is_caught():
    honest = record("snapkv", "memory", bytes_held=10_000_000, bytes_resident=10_300_000)
    check_records([honest])
    with pytest.raises(Fraud, match="hidden bytes.*'snapkv'.*2500000"):
        check_records([replace(honest, bytes_held=2_500_000)])


def test_a_picture_is_written_and_one_of_nothing_refused(tmp_path):
    pytest.importorskip("matplotlib")
    assert plot(summarise([FULL, SAME]), tmp_path / "x.png").read_bytes()[1:4] == b"PNG"
    with pytest.raises(KvtailorError, match="no plan"):
        plot(summarise([timed("full", 0.1)]), tmp_path / "y.png")


def test_reports_read_records_and_never_a_model():
    for file in Path(report.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = (
                [node.module]
                if isinstance(node, ast.ImportFrom)
                else [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else []
            )
            for name in names:
                assert not (name or "").startswith(
                    ("torch", "transformers", "kvtailor.hf", "kvtailor.bench.subject", "kvtailor.bench.tasks")
                ), (file, name)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bytes_closed_form": 251}, "nominal bytes: plan 'x' holds 250 bytes.*yet 251 by arithmetic"),
        ({"device": "cpu", "machine": {"memory_bytes": 200}}, "impossible bytes.*250 bytes on a machine that has 200"),
    ],
)
def test_bytes_that_cannot_be_are_caught(fields, message):
    check_records([scored("x", [1.0, 2.0], bytes_closed_form=250, device="cpu", machine={"memory_bytes": 2**30})])
    with pytest.raises(Fraud, match=message):
        check_records([scored("x", [1.0, 2.0], **fields)])


def test_a_peak_below_what_is_held_is_caught():
    def fresh(peak):
        return record("x", "memory", bytes_held=10 * 2**20, bytes_full=10 * 2**20, bytes_peak=peak)

    check_records([fresh(9.8 * 2**20), fresh(None)])
    with pytest.raises(Fraud, match="impossible peak.*plan 'x' peaked at"):
        check_records([fresh(9 * 2**20)])


def test_one_file_under_two_names_is_caught():
    one = scored("full", [1.0, 2.0, 3.0], 100, 1000, text_hash="a")
    check_records([one, scored("full", [1.0, 2.0, 3.5], 100, 1000, text_hash="b"), replace(one, plan_hash="other")])
    with pytest.raises(Fraud, match="same results on other data: plan 'full' gives the same 3 values"):
        check_records([one, scored("full", [1.0, 2.0, 3.0], 100, 1000, text_hash="b")])


def test_a_plan_that_loses_answers_is_not_the_mildest():
    full = [scored("full", [1.0] * 8, 100, 1000), needles("full", [True] * 8)]
    loses = [scored("loses", [1.01 + 0.001 * i for i in range(8)]), needles("loses", [True] * 2 + [False] * 6)]
    keeps = [scored("keeps", [1.1 + 0.001 * i for i in range(8)], size=260), needles("keeps", [True] * 8)]
    assert "the mildest is keeps: +0.10" in summarise([*full, *loses, *keeps]).headline
