"""The page of a fit: whole, escaped, with the fit's own numbers, and the right plan marked in a real browser."""

import json
import re
import tomllib
from dataclasses import replace
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path

import markupsafe
import pytest
from tests.support.browser import BROWSER, PROBE, ask_frames
from tests.support.fitting.made_fits import FULL_BYTES, made_fit

import kvtailor.bench.report.page
from kvtailor.fitting.page import page
from kvtailor.fitting.question import Question
from kvtailor.fitting.result import Fit

SIZES = (2, 8, 60)
VOID = {"meta", "br", "input", "link", "img", "hr"}


class Read(HTMLParser):
    """The tree of a page as lists: tags that are open, what went wrong, and the text by id of the nearest element."""

    def __init__(self):
        super().__init__()
        self.open, self.wrong, self.ids, self.sources, self.scripts = [], [], [], [], []
        self.text, self.data, self.rows = [], "", {}

    def handle_starttag(self, tag, attrs):
        known = dict(attrs)
        self.ids += [known["id"]] if "id" in known else []
        self.sources += [known[name] for name in ("src", "href", "srcset", "action") if name in known]
        self.scripts += [known] if tag == "script" else []
        self.wrong += [f"{tag} has {name}" for name in known if name.startswith("on")]
        if tag == "table":
            self.table = known.get("id")
        if tag == "tr":
            self.row = self.rows.setdefault(self.table, [])
            self.row.append((known, []))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}> closes another")

    def handle_data(self, text):
        if self.open and self.open[-1] == "script" and self.scripts[-1].get("id") == "page-data":
            self.data += text
        elif self.open and self.open[-1] not in ("script", "style"):
            self.text.append(text)
            if {"td", "th"} & set(self.open[-4:]):
                self.row[-1][1].append(text)


def read(text):
    found = Read()
    found.feed(text)
    found.close()
    return found


@pytest.mark.parametrize("points", SIZES)
def test_the_page_is_whole_and_has_every_plan(points):
    made = made_fit(points)
    text = page(made)
    found = read(text)
    assert found.wrong == [] and found.open == []
    assert len(set(found.ids)) == len(found.ids)
    shown = "".join(found.text)
    for plan in [*made.front, *made.proof]:
        assert plan.plan in shown and plan.label in shown
    assert len(found.rows["table-front"]) == points + 1
    assert len(found.rows["table-proof"]) == len(made.proof) + 1
    assert made.sentence in shown and made.python in shown and made.regret in shown
    assert all(note in shown for note in made.notes) and made.toml() in shown
    assert all(each.engine in shown for each in made.engines)


def test_nothing_is_loaded_from_elsewhere():
    text = page(made_fit())
    assert "http:" not in text and "https:" not in text and "@import" not in text and "url(" not in text
    found = read(text)
    assert all(each.startswith("#") and each[1:] in found.ids for each in found.sources) and len(found.scripts) == 2
    assert "default-src 'none'" in text


@pytest.mark.parametrize("points", SIZES)
def test_its_numbers_are_the_fit_s(points):
    made = made_fit(points)
    data = json.loads(read(page(made)).data)
    plans, (asked,) = {each["plan"]: each for each in data["plans"]}, data["asked"]
    assert (asked["full"], asked["limit"]) == (made.full, made.question.memory)
    assert asked["plan"] == plans[made.plan]["number"] and data["memory"] == [FULL_BYTES // 8, "384 KiB"]
    by_number = {each[0]: each for each in asked["points"]}
    assert len(by_number) == len(made.front)
    for each in made.front:
        plan = plans[each.plan]
        number, size, _, share, *loss = by_number[plan["number"]]
        assert (size, share, number in asked["front"]) == (each.bytes, each.bytes / made.full, each.best)
        assert loss == [each.loss.value, each.loss.low, each.loss.high] and plan["label"] == each.label
        assert f"Measured on {each.loss.count} pieces of the search." in plan["told"]
        assert plan["group"] == {"layers": "fitted by layers", "words": "fitted in words"}.get(each.origin, each.origin)


def test_the_tables_have_the_unrounded_numbers_to_sort_by():
    made = made_fit()
    text = page(made)
    for each in made.front:
        assert f'data-value="{each.bytes}"' in text and f'data-value="{each.loss.value}"' in text
    for label, each in made.against.items():
        assert f'data-value="{each.value}"' in text, label
        assert made.told[label] in text
    for layer in made.layers.keys:
        assert all(f"{value:.6g} nats per token" in text for value in layer[1:])


def test_save_writes_it_and_a_loaded_fit_has_the_same_page(tmp_path):
    made = made_fit()
    made.save(tmp_path)
    text = (tmp_path / "fit.html").read_text(encoding="utf-8")
    assert text == page(made) == page(Fit.load(tmp_path))


def test_answers_and_the_time_of_a_token_are_in_the_proof_s_table():
    made = made_fit()
    rows = {cells[1]: cells for _, cells in read(page(made)).rows["table-proof"]}
    assert rows[made.plan][-2:] == ["8.2", "7.9 to 8.8"]
    # 20 of 20 needles at 0.05 nats; 15 of 20 keys and values at 0.05, the others at 1.85.
    assert [rows[made.plan][-8:-2]] == [["20 of 20", "0.05 nats", "15 of 20", "0.5 nats", "3 of 20", "1.58 nats"]]
    untimed = next(each for each in made.proof if each.seconds is None and each.error is None)
    assert rows[untimed.plan][-1] == "–"


def test_what_the_page_is_made_of_is_in_the_wheel():
    folder = Path(kvtailor.bench.report.page.__file__).parent
    listed = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    globs = listed["tool"]["setuptools"]["package-data"]["kvtailor"]
    parts = {path.name for path in folder.iterdir() if path.is_file() and path.suffix != ".py"}
    assert parts == {"page.html.jinja", "page.css", "page.js", "chart.js"}
    assert all(any(fnmatch(f"bench/report/page/{name}", glob) for glob in globs) for name in parts)


def test_text_of_users_is_escaped():
    evil = "<script>alert('1')</script>\"&</title>"
    made = made_fit()
    front = (replace(made.front[0], label=evil, origin=evil, plan=f"{evil} @ tokens=1"), *made.front[1:])
    proof = (*made.proof, replace(made.proof[2], label=evil, plan=f"{evil} @ tokens=2", families=(), error=evil))
    made = replace(
        made,
        front=front,
        proof=proof,
        model=evil,
        notes=(evil,),
        sentence=evil,
        counts={evil: 3},
        regret=evil,
        layers=replace(made.layers, score=evil),
    )
    text = page(made)
    found = read(text)
    assert found.wrong == [] and found.open == []
    assert len(found.scripts) == 2 and "<script>alert" not in text and text.count("</title>") == 1
    assert evil in [each["label"] for each in json.loads(found.data)["plans"]]
    assert str(markupsafe.escape(evil)) in text


def test_what_was_not_measured_is_a_dash():
    made = made_fit()
    proof = tuple(replace(each, seconds=None, families=()) for each in made.proof)
    bare = replace(
        made,
        proof=proof,
        seconds=None,
        layers=None,
        additivity=None,
        tokens_by_head=(),
        sizes=(),
        regret=None,
        needed=None,
        notes=(),
    )
    text = page(bare)
    found = read(text)
    assert found.wrong == []
    assert "<dt>right answers</dt><dd>–</dd>" in text and "<dt>a decoded token</dt><dd>–</dd>" in text
    assert "<dt>seconds in all</dt><dd>–</dd>" in text and "Stage 1 did not run" in text
    broken = next(cells for _, cells in found.rows["table-proof"] if "quest: quest @ tokens=200" in cells)
    assert "not measured: out of memory" in broken and "0" not in broken and broken.count("–") >= 2
    text = page(replace(bare, front=()))
    assert read(text).wrong == [] and "measured no plan at several memories" in text


def test_a_plan_without_bytes_has_a_dash_and_no_share():
    found = read(page(made_fit()))
    broken = next(cells for _, cells in found.rows["table-proof"] if "quest: quest @ tokens=200" in cells)
    assert "0 B" not in broken and "0 %" not in broken
    made = made_fit()
    lost = replace(made.front[0].loss, value=float("inf"), low=None, high=None)
    front = (replace(made.front[0], bytes=0), replace(made.front[1], loss=lost), *made.front[2:])
    found = read(page(replace(made, front=front)))
    assert len(json.loads(found.data)["asked"][0]["points"]) == 6 and len(found.rows["table-front"]) == 9
    assert "2 plans of the table have no bytes or no finite loss" in "".join(found.text)


def test_each_part_tells_where_its_numbers_are_from():
    text = page(made_fit())
    for name, kind in (
        ("front", "search"),
        ("proof", "unseen"),
        ("layers", "search"),
        ("tokens", "unseen"),
        ("additivity", "search"),
        ("sizes", "computed"),
        ("engines", "documented"),
    ):
        assert re.search(rf'<section id="{name}"><h2>[^<]* <span class="from {kind}">', text), name
    # The fit's own families: two of the search, one unseen, which the full cache cannot do.
    assert text.count("right answers, seen family") == 2 and "unseen family; not counted" in text


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"memory": FULL_BYTES // 4}, "the least loss in 768 KiB, 25 % of the uncompressed bytes, at 2,048 tokens"),
        ({"loss": 0.01}, "the fewest bytes with at most 0.01 nats per token lost, at"),
        ({"points": 5.0, "seconds": 0.012}, "at most 5 points of right answers lost in any family and at most 12 ms"),
        ({"memory": FULL_BYTES // 2, "loss": 0.02}, "the least time for a token in 1.5 MiB"),
    ],
)
def test_the_question_is_in_words(limits, words):
    made = made_fit()
    assert words in page(replace(made, question=Question(context=2048, **limits)))


def test_many_layers_and_heads_are_all_there():
    made = made_fit(layers=40, by_head=True)
    text = page(made)
    assert text.count("layer 39, head 1, kept") == 3 and "layer 39, keys, 2 bits" in text


QUESTIONS = """
<pre id="answers"></pre><script>
{
const $ = name => document.getElementById(name);
const plans = new Map(JSON.parse($('page-data').textContent).plans.map(plan => [plan.number, plan.plan]));
const named = all => [...all].map(each => plans.get(each.dataset.n));
const state = () => ({
  plan: plans.get($('pick').dataset.plan) ?? null, words: $('pick').textContent,
  rows: named(document.querySelectorAll('#table-front tr.picked')),
  ring: named([...document.querySelectorAll('#chart .ring:not(.plan)')].map(ring => ring.parentElement)),
  shown: named([...document.querySelectorAll('#table-front tbody tr')].filter(row => row.getClientRects().length)),
  drawn: named(document.querySelectorAll('#chart .point')),
  best: named(document.querySelectorAll('#chart .point.best')),
});
const found = {first: state()};
const type = (name, value) => { $(name).value = value; $(name).dispatchEvent(new Event('input')); };
const texts = [...document.querySelectorAll('#chart text')].map(
  text => [text.textContent, text.getBoundingClientRect()]);
found.crossed = texts.flatMap(([a, x], i) => texts.slice(i + 1).filter(([b, y]) =>
  x.left < y.right - 1 && y.left < x.right - 1 && x.top < y.bottom - 3 && y.top < x.bottom - 3).map(([b]) => [a, b]));
const frame = $('chart').getBoundingClientRect();
found.out = texts.filter(([, x]) => x.left < frame.left - 1 || x.right > frame.right + 1).map(([a]) => a);
type('memory', '25%'); found.share = state();
type('memory', '1e9'); found.wrong = [state().plan, $('memory').getAttribute('aria-invalid')];
type('memory', '1 B'); found.none = state();
type('slide', 1000); found.all = [$('memory').value, state()];
document.querySelector('input[value=preset]')?.click(); found.without = state();
type('find', 'pyramid'); found.words = state();
$('every').click(); found.again = state();
$('front-only').click(); found.front = state();
const point = document.querySelector('#chart .point[tabindex="0"]'); point.focus();
found.tip = [$('tip').hidden, $('tip').textContent, plans.get(point.dataset.n)];
point.dispatchEvent(new KeyboardEvent('keydown', {key: 'Home', bubbles: true}));
found.home = plans.get(document.activeElement.dataset.n);
found.over = [document.documentElement.scrollWidth, innerWidth];
found.complaints = complaints;
$('answers').textContent = JSON.stringify(found);
parent.postMessage(JSON.stringify(found), '*');
}
</script>
"""


def asked(folder, text, address, widths):
    """What a page tells of itself at several widths, by width."""
    whole = text.replace("<head>", "<head>" + PROBE, 1).replace("</body>", QUESTIONS + "</body>", 1)
    (folder / "fit.html").write_text(whole, encoding="utf-8")
    frames = dict.fromkeys(widths, f"fit.html{address}")
    answers = ask_frames(folder, frames, seconds=90, milliseconds=4000)
    return {found["over"][1]: found for found in answers.posted}


def best_that_fits(made, memory, wanted=lambda each: True):
    fitting = [each for each in made.front if each.bytes <= memory and wanted(each)]
    return min(fitting, key=lambda each: (each.loss.value, each.bytes))


@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine: the script was not run")
@pytest.mark.parametrize("points", SIZES)
def test_the_script_marks_the_best_plan_that_fits(tmp_path, points):
    made = made_fit(points)
    least = min(each.bytes for each in made.front)
    memory = 640 * 1024
    assert least < memory
    answers = asked(tmp_path, page(made), "#memory=640KiB", (390, 820, 1280, 1920))
    assert set(answers) == {390, 820, 1280, 1920}
    for width, found in answers.items():
        assert found["complaints"] == [] and found["over"][0] <= width
        assert found["crossed"] == [] and found["out"] == [], width
        best = best_that_fits(made, memory)
        first = found["first"]
        assert first["plan"] == best.plan and first["rows"] == [best.plan] and first["ring"] == [best.plan]
        assert f'kvtailor.cache_for(model, "{best.plan}")' in first["words"] and "640 KiB" in first["words"]
        assert sorted(first["drawn"]) == sorted(each.plan for each in made.front)
        assert sorted(first["best"]) == sorted(each.plan for each in made.front if each.best)
        assert found["share"]["plan"] == best_that_fits(made, FULL_BYTES // 4).plan
        assert found["wrong"] == [None, "true"]
        assert found["none"]["plan"] is None and "No plan that is shown fits" in found["none"]["words"]
        assert found["all"][0] == "3 MiB" and "The uncompressed cache itself" in found["all"][1]["words"]
        assert found["all"][1]["plan"] == best_that_fits(made, FULL_BYTES).plan
        if points == 2:
            continue
        kept = [each.plan for each in made.front if each.origin != "preset"]
        assert found["without"]["shown"] == kept and sorted(found["without"]["drawn"]) == sorted(kept)
        kept = [each.plan for each in made.front if each.origin == "words"]
        assert found["words"]["shown"] == kept and sorted(found["words"]["drawn"]) == sorted(kept)
        of_words = best_that_fits(made, FULL_BYTES, lambda each: each.origin == "words")
        assert found["words"]["plan"] == of_words.plan
        assert len(found["again"]["shown"]) == points
        assert found["front"]["shown"] == [each.plan for each in made.front if each.best]
        hidden, tip, focused = found["tip"]
        assert not hidden and focused in tip
        assert found["home"] == made.front[0].plan
