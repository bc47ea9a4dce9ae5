"""The page in a real browser: nothing runs over, nothing complains, sorting sorts, numbers lead to their records."""

import pytest
from tests.support.bench.made_records import whole_run
from tests.support.bench.pages import page
from tests.support.browser import BROWSER, PROBE, ask_frames

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine: the pages were not looked at")
QUESTIONS = """
<script>
{
const found = {width: innerWidth, body: document.documentElement.scrollWidth};
found.paper = getComputedStyle(document.body).backgroundColor;
found.pictures = [...document.querySelectorAll('svg')].map(svg => {
  const size = svg.getBoundingClientRect(), view = svg.viewBox.baseVal, out = [];
  for (const text of svg.querySelectorAll('text')) {
    const box = text.getBoundingClientRect();
    const inside = box.left > size.left - 1 && box.right < size.right + 1 &&
      box.top > size.top - 1 && box.bottom < size.bottom + 1;
    if (!inside) out.push(text.textContent);
  }
  const values = [...svg.querySelectorAll('.name')].map(text => text.getBoundingClientRect());
  const names = [...svg.querySelectorAll('.axis')].map(text => text.getBoundingClientRect());
  const ticks = [...svg.querySelectorAll('.tick')].map(text => text.getBoundingClientRect());
  const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  return {name: svg.getAttribute('aria-label'), wide: size.width, high: size.height, out,
    small: parseFloat(getComputedStyle(svg).fontSize) * size.width / view.width,
    crossed: names.filter(name => [...ticks, ...values].some(other => meet(name, other))).length};
});
found.over = [...document.querySelectorAll('h1, h2, h3, p, figure, table, ul, section, .filter')]
  .filter(each => !each.closest('.wide') && each.getBoundingClientRect().right > innerWidth + 1)
  .map(each => each.outerHTML.slice(0, 80));
const table = document.querySelector('#table-plans'), head = [...table.tHead.rows[0].cells];
const at = head.findIndex(cell => cell.textContent.startsWith('bytes, %'));
const column = () => [...table.tBodies[0].rows].map(row => Number(row.cells[at].dataset.value));
const button = head[at].querySelector('button');
button.focus(); found.focus = document.activeElement === button;
button.click(); found.up = [head[at].getAttribute('aria-sort'), column()];
button.click(); found.down = [head[at].getAttribute('aria-sort'), column()];
const records = document.querySelector('#records'), rows = [...records.querySelectorAll('tbody tr')];
found.closed = !records.open;
const link = document.querySelector('#table-plans tbody a[data-r*=" "]');
// Without the jump: a browser may open what it jumps to by itself, and not every one does.
link.addEventListener('click', event => event.preventDefault());
link.click();
found.opened = records.open;
found.keys = link.dataset.r.split(' ').flatMap(part => {
  const [first, last = first] = part.split('-').map(Number);
  return Array.from({length: last - first + 1}, (_, index) => `r${first + index}`);
}).sort();
found.shown = rows.filter(row => !row.hidden).map(row => row.id).sort();
const box = document.querySelector('#filter');
box.value = 'capacity kivi(bits=4)'; box.dispatchEvent(new Event('input'));
found.filtered = rows.filter(row => !row.hidden).map(row =>
  row.closest('table').caption.textContent.includes('capacity') && row.textContent.includes('kivi(bits=4)'));
document.querySelector('#all').click();
found.again = rows.filter(row => !row.hidden).length;
found.complaints = complaints;
parent.postMessage(JSON.stringify(found), '*');
}
</script>
"""


def asked(folder, pages, *options, questions=QUESTIONS):
    """What pages say of themselves, each at a width: by width."""
    for width, text in pages.items():
        whole = text.replace("<head>", "<head>" + PROBE, 1).replace("</body>", questions + "</body>", 1)
        (folder / f"{width}.html").write_text(whole, encoding="utf-8")
    answers = ask_frames(folder, {width: f"{width}.html" for width in pages}, *options, seconds=60, milliseconds=3000)
    assert answers.console == []
    return {found["width"]: found for found in answers.posted}


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_the_page_is_whole_in_a_browser(tmp_path, mode):
    # The wide page has more plans than there are colours.
    runs = {1280: whole_run(plans=13), 420: whole_run()}
    answers = asked(
        tmp_path,
        {width: page(records) for width, records in runs.items()},
        *(["--force-dark-mode"] if mode == "dark" else []),
    )
    assert set(answers) == set(runs)
    for width, found in answers.items():
        assert found["complaints"] == []
        assert found["paper"] == ("rgb(20, 23, 27)" if mode == "dark" else "rgb(255, 255, 255)")
        assert found["body"] <= width and found["over"] == []
        assert len(found["pictures"]) >= 20
        for picture in found["pictures"]:
            assert picture["wide"] > 40 and picture["high"] > 30, picture
            assert picture["out"] == [] and picture["crossed"] == 0, picture
            assert picture["small"] >= 9.5, picture
        assert found["focus"]
        up, down = found["up"], found["down"]
        assert up == ["ascending", sorted(up[1])] and len(up[1]) == (13 if width == 1280 else 4)
        assert down == ["descending", up[1][::-1]]
        assert found["closed"] and found["opened"]
        assert found["shown"] == found["keys"] and len(found["keys"]) > 1
        assert found["filtered"] and all(found["filtered"])
        assert found["again"] == len(runs[width])
