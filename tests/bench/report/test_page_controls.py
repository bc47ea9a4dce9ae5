"""The controls of a run's page in a real browser: memory, filter, one plan lit everywhere, keys, names of fields."""

import pytest
from tests.bench.report.test_browser import asked
from tests.support.bench.made_records import PLANS, whole_run
from tests.support.bench.pages import data_of, page
from tests.support.browser import BROWSER

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine: the scripts were not run")
WIDTHS = (390, 820, 1280, 1920)
FULL = 3072 * 256
"""Bytes of the uncompressed cache of the made-up run's first text."""

QUESTIONS = """
<script>
{
const $ = name => document.getElementById(name);
const all = what => [...document.querySelectorAll(what)];
const numbers = what => all(what).filter(each => getComputedStyle(each).display !== 'none').map(each => each.dataset.n);
const type = (name, value) => { $(name).value = value; $(name).dispatchEvent(new Event('input', {bubbles: true})); };
const state = () => ({
  plan: $('pick').dataset.plan ?? null, words: $('pick').textContent,
  picked: all('#table-plans tr.picked').map(row => row.dataset.n),
  tables: all('table.of-plans').map(table => table.querySelectorAll('tr.picked').length),
  ring: all('#chart .ring').map(ring => ring.parentElement.dataset.n),
  drawn: all('#chart .point').map(point => point.dataset.n).sort(),
  best: all('#chart .point.best').map(point => point.dataset.n).sort(),
  rows: numbers('#table-plans tbody tr'), quality: numbers('#table-quality tbody tr'),
  bars: [...new Set(numbers('#quality-charts svg g[data-n]'))], bar: $('standing').textContent,
  count: $('count').textContent,
});
const found = {width: innerWidth, first: state()};
const texts = all('#chart text').map(text => [text.textContent, text.getBoundingClientRect()]);
found.crossed = texts.flatMap(([a, x], i) => texts.slice(i + 1).filter(([b, y]) =>
  x.left < y.right - 1 && y.left < x.right - 1 && x.top < y.bottom - 3 && y.top < x.bottom - 3).map(([b]) => [a, b]));
const frame = $('chart').getBoundingClientRect();
found.out = texts.filter(([, x]) => x.left < frame.left - 1 || x.right > frame.right + 1).map(([a]) => a);
found.over = document.documentElement.scrollWidth;
found.whiskers = all('#chart .point .bar').length;
type('memory', '40%'); found.share = state();
type('memory', 'much'); found.wrong = [state().plan, $('memory').getAttribute('aria-invalid')];
type('memory', ''); found.empty = [state().words, $('memory').getAttribute('aria-invalid')];
type('memory', '1 B'); found.none = state();
type('slide', 1000); found.all = [$('memory').value, state()];
type('memory', '');
const questions = [...$('question').options].map(option => option.textContent);
found.questions = questions.map((name, index) => { type('question', index); return [name, state().drawn]; });
type('question', 0);
type('find', 'snapkv'); found.words = state(); $('every').click();
$('front-only').click(); found.front = state(); $('every').click();
document.querySelector('input[name=plan][value="1"]').click(); found.boxed = state(); $('every').click();
found.again = state();
const lit = number => ({
  row: getComputedStyle(document.querySelector(`#table-quality tr[data-n="${number}"] td`)).backgroundColor,
  other: all('#chart .point').filter(point => point.dataset.n !== number).map(each => getComputedStyle(each).opacity),
  own: all(`#quality-charts g[data-n="${number}"]`).map(each => getComputedStyle(each).opacity),
});
const style = document.createElement('style');
style.textContent = '* { transition: none !important; }';
document.head.append(style);
found.dark = lit('2');
const link = document.querySelector('#table-plans tr[data-n="2"] a'); link.focus(); found.focused = lit('2');
link.blur(); document.body.dispatchEvent(new Event('pointerover', {bubbles: true})); found.left = lit('2');
const pin = document.querySelector('button.pin[data-pin="2"]'); pin.click();
document.body.dispatchEvent(new Event('pointerover', {bubbles: true}));
found.pinned = [lit('2'), pin.getAttribute('aria-pressed'), $('standing').textContent];
document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape', bubbles: true}));
found.out_again = [lit('2'), pin.getAttribute('aria-pressed'), $('standing').textContent];
found.stops = all('#chart .point[tabindex="0"]').length;
const point = document.querySelector('#chart .point[tabindex="0"]'); point.focus();
found.tip = [$('tip').hidden, $('tip').textContent, point.dataset.n];
point.dispatchEvent(new KeyboardEvent('keydown', {key: 'Home', bubbles: true}));
found.home = document.activeElement.dataset.n;
document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', bubbles: true}));
found.entered = state();
const name = each => each.getAttribute('aria-label') || each.textContent.trim() ||
  [...(each.labels ?? [])].map(label => label.textContent.trim()).join(' ');
const written = each => each.outerHTML;
found.nameless = all('input, select, button, a, svg, [role=region]').filter(each => !name(each)).map(written);
found.unreachable = all('input, select, button, summary, a').filter(each => each.tabIndex < 0).map(written);
const mark = document.querySelector('#quality-charts g[data-r]');
const before = mark.querySelector('title').textContent;
mark.dispatchEvent(new Event('pointerover', {bubbles: true}));
found.told = [before, mark.querySelector('title').textContent];
found.complaints = complaints;
parent.postMessage(JSON.stringify(found), '*');
}
</script>
"""


def drawn_of(text):
    """The points of the first question, as the page's data has them: number, bytes and loss."""
    points = data_of(text)["asked"][0]["points"]
    return [(number, size, loss) for number, size, _, _, loss, _, _ in points]


def best_that_fits(points, memory, wanted=lambda number: True):
    fitting = [each for each in points if each[1] <= memory and wanted(each[0])]
    return min(fitting, key=lambda each: (each[2], each[1]))[0]


@pytest.mark.parametrize("plans", [2, 8, pytest.param(60, marks=pytest.mark.long)])
def test_the_controls_do_what_they_are_for(tmp_path, plans):
    text = page(whole_run(plans=plans))
    points = drawn_of(text)
    everyone = sorted(str(number) for number in range(1, plans + 1))
    others = [number for number in everyone if number != "1"]
    answers = asked(tmp_path, dict.fromkeys(WIDTHS, text), questions=QUESTIONS)
    assert set(answers) == set(WIDTHS)
    for width, found in answers.items():
        assert found["complaints"] == [] and found["over"] <= width
        assert found["crossed"] == [] and found["out"] == [], width
        first = found["first"]
        assert first["plan"] is None and first["drawn"] == others and first["picked"] == [] and first["bar"] == ""
        assert sorted(first["rows"]) == sorted(first["quality"]) == everyone and found["whiskers"] == len(others)
        best = best_that_fits(points, 0.4 * FULL)
        share = found["share"]
        assert share["plan"] == best and share["picked"] == share["ring"] == [best] and "307 KiB" in share["words"]
        assert all(count >= 1 for count in share["tables"]) and "by its mean" in share["words"]
        assert found["wrong"] == [None, "true"] and found["empty"] == ["No memory is set.", "false"]
        assert found["none"]["plan"] is None and "No plan that is shown fits" in found["none"]["words"]
        assert found["all"][0] == "768 KiB" and "The uncompressed cache itself" in found["all"][1]["words"]
        assert len(found["questions"]) == 6 and all(drawn == others for _, drawn in found["questions"])
        assert found["questions"][0][0] == "perplexity: wikitext2, context 256"
        # 'full' stays beside what is found by words.
        named = ["1", *[str(i) for i, plan in enumerate(PLANS, 1) if "snapkv" in plan and i <= plans]]
        words = found["words"]
        assert words["rows"] == words["quality"] == named and words["drawn"] == named[1:]
        assert words["bars"] == named and (f"{len(named)} of {plans} plans" in words["bar"]) is (len(named) < plans)
        assert sorted(found["front"]["drawn"]) == first["best"]
        assert found["front"]["rows"] == sorted({"1", *first["best"]}, key=int)
        assert found["boxed"]["rows"] == sorted(others, key=int) and found["again"]["rows"] == first["rows"]
        assert found["again"]["bar"] == "" and found["again"]["count"] == f"{plans} of {plans} plans shown"
        quiet, focused = found["dark"], found["focused"]
        assert set(quiet["own"]) == {"1"} and set(quiet["other"]) <= {"0.75", "1"}
        assert focused["row"] != quiet["row"] and set(focused["own"]) == {"1"} and set(focused["other"]) <= {"0.22"}
        assert found["left"] == quiet
        assert found["pinned"][0] == focused and found["pinned"][1] == "true" and "Plan 2 is lit" in found["pinned"][2]
        assert found["out_again"] == [quiet, "false", ""]
        hidden, tip, number = found["tip"]
        label = list(PLANS)[int(number) - 1] if int(number) <= len(PLANS) else "tova"
        assert found["stops"] == 1 and not hidden and label in tip
        assert found["home"] == min(points, key=lambda each: each[1])[0] == found["entered"]["plan"]
        assert found["nameless"] == [] and found["unreachable"] == []
        before, after = found["told"]
        assert after.startswith(f"{before}\nperplexity, ") and "key " in after and "key " not in before
