"""A page of many plans stays small: what follows from other parts of it is put together by its script, and is there."""

import re
from dataclasses import replace

import pytest
from tests.bench.report.test_browser import asked
from tests.support.bench.made_records import whole_run
from tests.support.bench.pages import page
from tests.support.browser import BROWSER

from kvtailor.bench.report import summarise
from kvtailor.bench.report.front import pareto

LONG = "snapkv(window=16) + adakv + kivi(bits=4, recent=32) @ "
QUESTIONS = """
<script>
{
const point = (target, kind = 'pointerover') => target.dispatchEvent(new Event(kind, {bubbles: true}));
const title = mark => { point(mark); return mark.querySelector(':scope > title').textContent; };
const found = {width: innerWidth};
const cells = part => [...document.querySelectorAll(`#${part} .maps figure[data-n="3"] td`)].map(cell => cell.title);
found.needle = cells('needles');
found.budget = cells('budgets');
found.bar = title(document.querySelector('#quality-charts g.mark[data-n="3"]'));
found.line = title(document.querySelector('#along g.mark[data-n="3"]'));
found.records = [...new Set([...document.querySelectorAll('#records tbody tr')].map(
  row => [row.dataset.n, row.cells[0].textContent].join('|')))];
const box = document.getElementById('filter');
box.value = 'kivi(bits=4)'; box.dispatchEvent(new Event('input'));
found.left = [...document.querySelectorAll('#records tbody tr')].filter(row => !row.hidden).length;
document.getElementById('front-only').click();
found.front = [...document.querySelectorAll('#table-plans tbody tr')].filter(
  row => getComputedStyle(row).display !== 'none').map(row => row.dataset.n);
found.fronts = [...document.querySelectorAll('#table-plans .front-tag')].map(tag => tag.closest('tr').dataset.n);
parent.postMessage(JSON.stringify(found), '*');
}
</script>
"""


def longer(records):
    """The same run with names of plans as long as real ones."""
    found = []
    for each in records:
        name, mark, budget = each.label.partition(" @ ")
        label = f"{LONG.replace('snapkv', name.split()[0], 1)}{budget}" if mark else each.label
        found.append(replace(each, label=label, plan=label))
    return found


def test_60_plans_have_a_margin_and_long_names_and_three_models_fit_too():
    records = whole_run(plans=60)
    assert len(page(records).encode("utf-8")) <= 900_000
    named = longer(records)
    assert max(len(each.label) for each in named) > 55 and len({each.label for each in named}) > 60
    assert len(page(named).encode("utf-8")) <= 950_000
    models = [replace(each, model=model) for model in ("one", "two", "three") for each in named]
    assert len(page(models).encode("utf-8")) < 2_000_000


def test_records_name_plans_by_the_numbers_of_the_first_table():
    records = whole_run()
    text = page(records)
    part = text[text.index('id="records"') :]
    numbers = {row.plan_hash: str(number) for number, row in enumerate(summarise(records).rows[:4], 1)}
    for number, each in enumerate(records, 1):
        first = re.search(rf'<tr id="r{number}"><td>([^<]*)</td>', part)[1]
        assert first == numbers.get(each.plan_hash, each.label)
    assert "named by their numbers" in part[: part.index("</p>")]


def test_columns_that_are_the_same_are_one_and_the_caption_has_it():
    text = page(whole_run())
    for table in re.findall(r'<table class="sortable records">.*?</table>', text, re.DOTALL):
        heads = re.findall(r"<button[^>]*>([^<]*)</button>", table)
        rows = [re.findall(r"<td>([^<]*)</td>", row) for row in table.split("<tbody>")[1].split("</tr>")]
        columns = list(zip(*(row for row in rows if row), strict=True))
        assert len(columns) == len(heads) and len(set(columns)) == len(columns)
    caption = re.search(r"<caption><b>memory</b>[^<]*</caption>", text)[0]
    assert "seen as context" in caption


@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine: the scripts were not run")
def test_what_is_put_together_is_what_the_page_had_before(tmp_path):
    records = whole_run(plans=60)
    found = asked(tmp_path, {1280: page(records)}, questions=QUESTIONS)[1280]
    rows = summarise(records).rows
    label = rows[2].label
    layers = next(each for each in records if each.key == rows[2].keys("cache.bytes_held")[0])
    assert found["budget"] == [
        f"layer {layer}, head {head}: {tokens:g} of {layers.tokens_seen} tokens"
        for layer, heads in enumerate(layers.tokens_by_head)
        for head, tokens in enumerate(heads)
    ]
    told = re.compile(r"(128|256) tokens, depth (0\.1|0\.5|0\.9): \d+% of 4 documents")
    assert all(map(told.fullmatch, found["needle"]))
    # Two kinds of documents, each at three depths and two lengths.
    places = [each.rpartition(":")[0] for each in found["needle"]]
    assert len(places) == 12 and len(set(places[:6])) == 6 and places[:6] == places[6:]
    assert found["bar"].startswith(f"3 {label}\n") and " samples\n" in found["bar"]
    assert found["line"].startswith(f"3 {label}\n") and "context 256: " in found["line"]
    numbers = {row.label: str(number) for number, row in enumerate(rows[:60], 1)}
    assert set(found["records"]) == {f"{numbers.get(each.label, '')}|{each.label}" for each in records}
    assert found["left"] == sum("kivi(bits=4)" in each.label for each in records) > 0
    # The front is that of the tags, and not all plans: 'full' stays beside it.
    best = {numbers[row.label] for row in pareto([row for row in rows if row.plan_hash != "own"])}
    assert set(found["fronts"]) == best and set(found["front"]) == best | {"1"} and len(found["front"]) < 10
