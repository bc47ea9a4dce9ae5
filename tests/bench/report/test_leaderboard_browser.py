"""The leaderboard in a real browser: nothing runs over, a memory and words choose what is shown, heads sort."""

import pytest
from tests.bench.report.test_browser import asked
from tests.support.bench.equal_bytes import OTHER_PLANS, records_of, suite_in
from tests.support.bench.pages import data_of
from tests.support.browser import BROWSER

from kvtailor.bench.report.leaderboard import leaderboard_page
from kvtailor.bench.report.suite.ranking import rank, rank_each
from kvtailor.bench.report.suite.records import SuiteRun, by_model

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine: the page was not looked at")

QUESTIONS = """
<script>
{
const byId = name => document.getElementById(name);
const seen = each => each.getClientRects().length > 0;
const found = {width: innerWidth, body: document.documentElement.scrollWidth, complaints};
found.over = [...document.querySelectorAll('h1, h2, p, section, form, label, .wide')]
  .filter(each => each.getBoundingClientRect().right > innerWidth + 1).map(each => each.outerHTML.slice(0, 80));
const table = document.querySelector('#at-0-25 table'), rows = () => [...table.tBodies[0].rows];
const names = () => rows().filter(seen).map(row => row.cells[1].querySelector('code').textContent);
const set = (name, value) => {
  byId(name).value = value;
  byId(name).dispatchEvent(new Event('input', {bubbles: true}));
};
found.count = byId('count').textContent;
[...table.tHead.rows[0].cells][4].querySelector('button').click();
found.sorted = names();
found.questions = [...byId('question').options].map(option => option.textContent);
set('memory', '26%');
found.picked = [...document.querySelectorAll('tr.picked')].map(row => row.dataset.n);
found.words = byId('pick').textContent;
set('memory', '');
set('find', 'NEA');
found.named = names();
found.after = byId('count').textContent;
parent.postMessage(JSON.stringify(found), '*');
}
</script>
"""


def test_a_reader_chooses_what_is_shown(tmp_path):
    suite = suite_in(tmp_path)
    page = leaderboard_page([rank(suite, records_of(suite))], ["Made up."], records_of(suite))
    (first, *_) = data_of(page)["asked"]
    fitting = [point for point in first["points"] if point[1] <= 0.26 * first["full"]]
    best = min(fitting, key=lambda point: (point[4], point[1]))[0]
    assert len(fitting) > 3
    answers = asked(tmp_path, {1280: page, 420: page}, questions=QUESTIONS)
    assert set(answers) == {1280, 420}
    for width, found in answers.items():
        assert found["complaints"] == [] and found["over"] == [] and found["body"] <= width
        assert found["count"] == "10 of 10 plans shown" and found["after"] == "2 of 10 plans shown"
        assert found["sorted"][:4] == ["full", "half done", "best", "near"] and len(found["sorted"]) == 6
        assert found["questions"] == ["text", "easy"]
        assert found["picked"] == [best] and "it loses" in found["words"] and "cache_for(model" in found["words"]
        assert found["named"] == ["full", "near"]


OF_MODELS = """
<script>
{
const byId = name => document.getElementById(name);
const found = {width: innerWidth, body: document.documentElement.scrollWidth, complaints, told: []};
found.over = [...document.querySelectorAll('h1, h2, p, section, form, label, select, nav, .wide')]
  .filter(each => each.getBoundingClientRect().right > innerWidth + 1).map(each => each.outerHTML.slice(0, 80));
const set = (name, value) => {
  byId(name).value = value;
  byId(name).dispatchEvent(new Event('input', {bubbles: true}));
};
set('memory', '25.5%');
for (const index of [0, 1]) {
  set('question', index);
  found.told.push([byId('pick').dataset.plan, byId('pick').textContent, byId('absent').textContent]);
}
set('memory', '30000');
found.fits = byId('pick').textContent;
parent.postMessage(JSON.stringify(found), '*');
}
</script>
"""


def test_a_memory_is_held_against_the_model_that_is_chosen(tmp_path):
    kept = {name: {"keydiff @ share=0.25": f"keydiff @ keep={keep}"} for name, keep in (("a/one", 0.2), ("b/two", 0.3))}
    suite = suite_in(tmp_path, kept)
    records = [*records_of(suite, "a/one"), *records_of(suite, "b/two", OTHER_PLANS, full=25_000, day=3)]
    rankings = rank_each(by_model([SuiteRun(suite=suite, records=records)]))
    page = leaderboard_page(rankings, ["One.", "Two."], records)
    number = {each["label"]: each["number"] for each in data_of(page)["plans"]}
    answers = asked(tmp_path, {1280: page, 390: page}, questions=OF_MODELS)
    assert set(answers) == {1280, 390}
    for width, found in answers.items():
        assert found["complaints"] == [] and found["over"] == [] and found["body"] <= width
        (first, one, _), (second, two, absent) = found["told"]
        assert first == number["half done"] and second == number["near"]
        assert (
            all("25.5 % of the uncompressed cache" in words for words in (one, two))
            and "random(state=2) @ keep=0.25" in one
        )
        assert "in text on two, by its mean" in two and '"keydiff @ keep=0.3"' in two
        assert number["small"] in absent.split(": ")[1].rstrip(".").split(", ")
        assert found["fits"].startswith("The uncompressed cache itself, 24.4 KiB in bfloat16, fits in 29.2 KiB")
