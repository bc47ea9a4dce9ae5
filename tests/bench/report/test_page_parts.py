"""The parts of a run's page: its top, its contents, the large chart's numbers, what bytes mean, and its size."""

import re
from dataclasses import replace

import pytest
from tests.bench.report.test_pages import RECORDS, Page
from tests.support.bench.made_records import record, whole_run
from tests.support.bench.pages import data_of, page

from kvtailor.bench.report import summarise
from kvtailor.bench.report.charts import MOST_DRAWN


@pytest.fixture(scope="module")
def sixty():
    records = whole_run(plans=60)
    return records, page(records)


def test_60_plans_take_less_than_a_megabyte_and_all_have_their_rows(sixty):
    records, text = sixty
    assert len(text.encode("utf-8")) < 1_000_000
    for name in ("plans", "quality", "fidelity", "capacity"):
        table = text[text.index(f'id="table-{name}"') :].split("</table>")[0]
        assert table.count("<tr") == 61, name
    assert len(re.findall(r'<tr id="r\d+">', text)) == len(records) == 1562
    assert len(data_of(text)["asked"][0]["points"]) == 59


def test_of_many_plans_the_small_charts_draw_full_the_front_and_the_mildest(sixty):
    _, text = sixty
    bars = [chart for chart in data_of(text)["charts"] if chart["kind"] == "bars"]
    assert len(bars) == 10
    for chart in bars:
        drawn = [mark[0] for mark in chart["marks"]]
        # 'full', and the four plans that no other beats.
        assert len(drawn) == MOST_DRAWN and {"1", "2", "3", "4", "5"} <= set(drawn)
    assert text.count(f"Drawn are {MOST_DRAWN} of 60 plans") == 6
    assert "Drawn are" not in page(whole_run())


def test_the_front_of_each_question_is_what_no_other_plan_beats(sixty):
    _, text = sixty
    for asked in data_of(text)["asked"]:
        places = [(share, loss, number) for number, _, _, share, loss, _, _ in asked["points"]] + [(1.0, 0.0, "1")]
        best = [
            number
            for share, loss, number in sorted(places)
            if not any(a <= share and b <= loss and (a, b) != (share, loss) for a, b, _ in places)
        ]
        assert set(asked["front"]) <= set(best) and len(asked["front"]) > 1
        assert len({place[:2] for place in places if place[2] in best}) == len(asked["front"])


def test_the_page_begins_with_what_was_run_and_the_verdict():
    records = whole_run()
    text = page(records)
    top = text[text.index("<header>") : text.index("</header>")]
    assert "<h1>kvtailor bench: made-up</h1>" in top and "<title>kvtailor bench: made-up</title>" in text
    assert "made-up, float32 on cpu" in top and "Run made-up: 4 plans, 106 records." in top
    verdict = top[top.index("Verdict, by an equivalence test") :]
    assert " ".join(Page(f"<p>{verdict.split('</strong>')[1]}").said).strip().startswith(summarise(records).headline)


def test_the_contents_name_every_part_in_its_order():
    text = page(whole_run())
    contents = text[text.index('<nav class="contents"') : text.index("</nav>")]
    links = re.findall(r'<a href="#([^"]*)">([^<]*)</a>', contents)
    assert links == re.findall(r'<section id="([^"]*)"><h2>([^<]*)</h2>', text) and len(links) > 12
    assert len({title for _, title in links}) == len(links)


def test_the_large_chart_has_the_losses_of_the_tables():
    records = whole_run()
    summary, found = summarise(records), data_of(page(records))
    numbers = {row.plan_hash: str(i) for i, row in enumerate(summary.rows[:4], 1)}
    named = [(each["number"], each["label"]) for each in found["plans"]]
    assert named == [(numbers[row.plan_hash], row.label) for row in summary.rows[:4]]
    asked = {each["name"]: each for each in found["asked"]}
    # The three sets of questions were not weighed, so they have no share of bytes; KL is no measure of its own.
    weighed = [measure for measure in summary.measures if measure.task in ("perplexity", "needle")]
    assert len(asked) == len(weighed) + 1 == 6 and len(summary.measures) == 8
    for measure in weighed:
        sign = 1 if measure.lower_is_better else -1
        points = {each[0]: each for each in asked[f"{measure.task}: {measure.name}"]["points"]}
        assert len(points) == 3
        for plan, score in measure.scores.items():
            if numbers[plan] == "1":
                continue
            _, size, _, share, loss, low, high = points[numbers[plan]]
            assert (size, share, loss) == (score.bytes_held, score.ratio, sign * score.difference.value)
            ends = (score.difference.low, score.difference.high)
            assert (low, high) == (ends if sign == 1 or None in ends else (-ends[1], -ends[0]))
    kl = {each[0]: each for each in asked["fidelity: KL(full || plan)"]["points"]}
    assert [kl[numbers[row.plan_hash]][4:] for row in summary.rows[1:4]] == [
        [row.kl, None, None] for row in summary.rows[1:4]
    ]
    assert {each["full"] for each in asked.values()} == {3072 * 256, 3072 * 512}


def test_a_run_without_a_loss_has_a_filter_and_no_chart():
    records = [each for each in whole_run() if each.task == "speed"]
    text = page(records)
    assert 'id="chart"' not in text and 'id="find"' in text and 'id="memory"' not in text
    alone = page([each for each in records if each.label in ("full", "own")])
    assert 'id="find"' not in alone


def test_a_plan_without_bytes_is_no_point_of_the_chart():
    records = [replace(each, bytes_held=None) if each.label == "kivi(bits=4)" else each for each in whole_run()]
    data = data_of(page(records))
    assert [each["number"] for each in data["plans"] if each["label"] == "kivi(bits=4)"] == ["4"]
    assert all({point[0] for point in each["points"]} == {"2", "3"} for each in data["asked"])


def test_bytes_have_one_meaning_and_the_other_sizes_are_explained_where_they_stand():
    text = page(whole_run())
    part = text[text.index('<section id="bytes">') :].split("</section>")[0]
    names = re.findall(r"<dt>([^<]*)</dt>", part)
    assert "Bytes without another word are bytes held" in part and names == [
        "tokens held, in Plans",
        "resident, in Memory of a fresh process",
        "peak, prefill, in Memory of a fresh process",
        "peak, decode, in Memory of a fresh process",
        "memory, in What fits",
        "one more token, in What fits",
    ]
    few = page([each for each in whole_run() if each.task == "perplexity"])
    assert re.findall(r"<dt>([^<]*)</dt>", few) == ["tokens held, in Plans"]


def test_a_name_of_a_plan_never_becomes_html_or_ends_the_data():
    evil = "</script><script>alert(1)</script>\"'&"
    records = [replace(each, label=evil, plan=evil) if "odd" in each.label else each for each in RECORDS]
    text = page(records)
    assert "<script>alert" not in text and text.count("</script>") == text.count("<script") == 2
    assert evil in [each["label"] for each in data_of(text)["plans"]]
    assert Page(text).open == []


def test_a_row_of_one_record_has_one_link():
    text = page(whole_run())
    cost = text[text.index('id="table-speed"') :].split("</table>")[0]
    rows = cost[cost.index("<tbody>") :].split("<tr")[1:]
    assert len(rows) == 17 and all(row.count("<a ") == 1 for row in rows)
    assert re.match(r' data-n="1"><td><span class="swatch pf"></span>1</td><td class="name"><a href="#r\d+">', rows[0])


def test_a_size_is_sorted_by_what_it_is():
    little = {"memory_bytes": 300.0, "largest_batch": 3.0, "bytes_per_token": 2.0}
    point = {"memory_bytes": 5, "context": 9, "tokens": 1}
    table = page([*whole_run(), record("full", "capacity", point=point, metrics=little)])
    table = table[table.index('id="table-capacity"') :].split("</table>")[0]
    values = [float(value) for value in re.findall(r'<td data-value="([^"]*)">[^<]*iB<', table)]
    assert 2.0**30 in values and '<td data-value="300.0">300 B</td>' in table
