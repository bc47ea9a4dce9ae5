"""The first sentence of a run: what to use, what is broken, what to type next; nothing from an interval with 0."""

import re
from dataclasses import replace

import pytest
from tests.bench.report.test_headline import FULL, around, plan
from tests.bench.report.test_report import needles

from kvtailor.bench.report import summarise
from kvtailor.bench.report.files import markdown_page


def advice(*records):
    return summarise(records).advice


def test_the_best_and_the_worst_are_named_as_plainly_and_the_command_follows():
    kivi4, broken = plan("kivi4", around(0.002, 0.01), size=280), plan("turboquant4", around(1.6, 0.4), size=270)
    found = advice(FULL, kivi4, broken)
    assert found.sentence == (
        "Use kivi4: 28 % of the bytes, at most 0.004 nats per token lost; turboquant4 is broken here: perplexity 37.7 "
        "against 7.61."
    )
    assert found.next == 'kvtailor run --model m --plan "kivi4" --prompt-file FILE'


def test_a_plan_that_loses_and_still_works_is_not_called_broken():
    found = advice(FULL, plan("kivi4", around(0.002, 0.01)), plan("streaming", around(0.1, 0.05), size=300))
    assert "streaming loses most here: perplexity 8.41 against 7.61." in found.sentence


def test_the_worst_of_those_shown_is_not_called_the_worst_where_another_lost_more():
    quiet, noisy = plan("streaming", around(0.1, 0.05), size=300), plan("noisy", around(0.2, 3.0), size=300)
    found = advice(FULL, plan("kivi4", around(0.002, 0.01)), quiet, noisy)
    assert "of the plans that are shown to lose, streaming loses most: perplexity 8.41 against 7.61." in found.sentence
    assert "loses most here" not in found.sentence
    milder = plan("milder", around(0.05, 3.0), size=300)
    assert "streaming loses most here" in advice(FULL, plan("kivi4", around(0.002, 0.01)), quiet, milder).sentence


def test_whoever_lost_most_answers_is_named_by_them_whatever_may_have_been_lost_on_text():
    answers = needles("full", [1] * 60), needles("noisy", [1] * 48 + [0] * 12), needles("forgets", [1] * 40 + [0] * 20)
    forgets, noisy = plan("forgets", around(0.001, 0.01)), plan("noisy", around(0.5, 9.0), size=280)
    found = advice(FULL, forgets, noisy, *answers)
    assert "; forgets loses most here: 40 of 60 answers right ('full': 60)." in found.sentence


def test_the_first_sentence_is_short_however_many_plans_are_undecided():
    plans = [plan(f"hadamard(of=gaussian(bits={bits}), signs=0)", around(0.0, 0.6)) for bits in range(2, 13)]
    said = advice(FULL, *plans).sentence
    first, _, rest = said.partition(". ")
    assert first.endswith(" and 8 more are undecided") and first.count("hadamard") == 3 and len(first) < 180
    assert rest == "Their loss is not shown to be less than 0.02 nats per token, nor to be more."


def test_a_plan_that_is_broken_in_answers_alone_is_told_by_them():
    answers = needles("full", [1] * 60), needles("kivi4", [1] * 60), needles("streaming", [0] * 57 + [1] * 3)
    found = advice(FULL, plan("kivi4", around(0.0, 0.01)), plan("streaming", around(0.001, 0.01), size=100), *answers)
    assert found.sentence.startswith(
        "Use kivi4: 25 % of the bytes, at most 0.002 nats per token lost, 60 of 60 answers"
    )
    assert found.sentence.endswith("; streaming is broken here: 3 of 60 answers right ('full': 60).")


def test_answers_that_are_too_few_are_said_to_be_and_hide_no_text():
    answers = needles("full", [1] * 12), needles("kivi4", [1] * 12)
    found = advice(FULL, plan("kivi4", around(0.0, 0.01)), *answers)
    assert found.sentence == (
        "Use kivi4: 25 % of the bytes, at most 0.002 nats per token lost, 12 of 12 answers right ('full': 12), too few "
        "to be sure of them (kvtailor bench --documents 25 would do)."
    )
    fallen = needles("full", [1] * 12), needles("kivi4", [1] * 5 + [0] * 7)
    assert "Use kivi4" not in advice(FULL, plan("kivi4", around(0.0, 0.01)), *fallen).sentence


@pytest.mark.parametrize("depths", [(0.5,), (0.2, 0.8), (0.1, 0.3, 0.5, 0.7, 0.9)])
@pytest.mark.parametrize("lengths", [1, 2])
def test_as_many_documents_are_asked_for_as_the_records_have_lengths_and_depths(depths, lengths):
    points, told = len(depths) * lengths, {}
    for spread in (False, True):
        asked = [
            replace(each, point={**each.point, "length": 100 + length, "depth": depth}, text_hash=f"{length} {depth}")
            for label in ("full", "kivi4")
            for each in [needles(label, [1] * (2 if spread else 2 * points))]
            for length in range(lengths if spread else 1)
            for depth in (depths if spread else depths[:1])
        ]
        said = advice(FULL, plan("kivi4", around(0.0, 0.01)), *asked).sentence
        told[spread] = int(re.search(r"\(kvtailor bench --documents (\d+) would do\)", said)[1])
    assert told[True] == -(-told[False] // points)


@pytest.mark.parametrize("middle", [-0.01, 0.0, 0.012])
def test_an_interval_that_contains_0_recommends_nothing_and_accuses_nobody(middle):
    found = advice(FULL, plan("noisy", around(middle, 0.6)))
    assert found.sentence == (
        "Use none of these plans yet: noisy is undecided. Its loss is not shown to be less than 0.02 nats per token, "
        "nor to be more."
    )
    assert "broken" not in found.sentence and "loses most" not in found.sentence
    assert f"{middle:+.3f}" not in found.sentence
    assert found.next.startswith("the same with kvtailor bench --windows ")


def test_where_each_loses_none_is_recommended():
    found = advice(FULL, plan("one", around(0.1, 0.02)), plan("two", around(2.0, 0.1)))
    assert found.sentence == (
        "Use none of these plans: each loses more than 0.02 nats per token; two is broken here: perplexity 56.2 "
        "against 7.61."
    )
    assert found.next.startswith("kvtailor fit --model m ")


def test_a_better_plan_that_is_not_shown_asks_for_more_and_does_not_contradict_the_headline():
    noisy, dear = plan("noisy", around(0.001, 0.25), size=250), plan("dear", around(0.005, 0.002), size=320)
    found = summarise([FULL, dear, noisy])
    assert found.headline.startswith("No plan is recommended")
    assert found.advice.sentence.startswith("Measure more before you choose: dear is shown to lose less than 0.02")
    assert found.advice.next.startswith("the same with kvtailor bench --windows ")


def test_without_anything_to_judge_nothing_is_advised():
    assert advice(FULL).sentence == "" and advice(FULL).next is None


def test_pages_begin_with_it():
    records = [FULL, plan("kivi4", around(0.002, 0.01))]
    assert markdown_page(summarise(records)).startswith("**Use kivi4: 25 % of the bytes")
