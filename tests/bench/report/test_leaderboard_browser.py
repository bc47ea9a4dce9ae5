"""The leaderboard in a real browser: nothing runs over, a budget, a task and words choose what is shown, heads sort."""

import pytest
from tests.bench.report.test_browser import asked
from tests.support.bench.equal_bytes import records_of, suite_in
from tests.support.browser import BROWSER

from kvtailor.bench.report.pages.leaderboard import leaderboard_page
from kvtailor.bench.report.suite.ranking import rank

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
const names = () => rows().filter(seen).map(row => row.cells[0].querySelector('code').textContent);
const heads = () => [...table.tHead.rows[0].cells].filter(seen).map(head => head.textContent);
const set = (name, value) => {
  byId(name).value = value;
  byId(name).dispatchEvent(new Event('input', {bubbles: true}));
};
found.left = byId('left').textContent;
[...table.tHead.rows[0].cells][3].querySelector('button').click();
found.sorted = names();
set('budget', '0.25');
found.sections = [...document.querySelectorAll('section[data-budget]')].filter(seen).map(each => each.id);
found.leaders = [...document.querySelectorAll('.leaders tbody tr')].filter(seen).length;
set('task', '1');
found.heads = heads();
set('words', 'NEA');
found.named = names();
found.after = byId('left').textContent;
parent.postMessage(JSON.stringify(found), '*');
}
</script>
"""


def test_a_reader_chooses_what_is_shown(tmp_path):
    suite = suite_in(tmp_path)
    page = leaderboard_page(rank(suite, records_of(suite)), "Made up.")
    answers = asked(tmp_path, {1280: page, 420: page}, questions=QUESTIONS)
    assert set(answers) == {1280, 420}
    for width, found in answers.items():
        assert found["complaints"] == [] and found["over"] == [] and found["body"] <= width
        assert found["left"] == "6 plans" and found["after"] == "1 of 5 plans"
        assert found["sorted"][:4] == ["full", "half done", "best", "near"] and len(found["sorted"]) == 6
        assert found["sections"] == ["at-0-25"] and found["leaders"] == 1
        assert found["heads"] == ["plan", "family", "bytes, %", "easy", "TPOT"]
        assert found["named"] == ["full", "near"]
