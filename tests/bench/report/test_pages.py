"""The pages of a run: self-contained, complete, and made from records alone."""

import csv
import io
import json
import math
import random
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from tests.bench.report.test_report import needles, record, scored, timed
from tests.support.bench.made_records import whole_run
from tests.support.bench.pages import charts_of, page

from kvtailor.bench.report import summarise
from kvtailor.bench.report.files import texts
from kvtailor.bench.report.front import front_of, pareto
from kvtailor.bench.report.page import COLOURS, PALETTE
from kvtailor.bench.report.tables.grid import Cell, Grid, as_csv, as_latex, as_markdown
from kvtailor.bench.report.tables.tables import main_grid
from kvtailor.bench.schema import latest
from kvtailor.cli.report import write

RECORDS = [
    scored("full", [1.0, 1.1, 1.2, 1.3, 1.4, 1.6], 100, 1000),
    scored("snapkv @ keep=0.25", [1.0, 1.2, 1.25, 1.3, 1.5, 1.6], 25, 250),
    scored("<b>odd</b> & 50 %", [2.0, 2.2, 2.25, 2.3, 2.5, 2.6], 30, 300),
    needles("full", [True, True, False]),
    needles("snapkv @ keep=0.25", [True, False, False]),
    replace(needles("snapkv @ keep=0.25", [True, True, False]), point={**needles("x", [1]).point, "depth": 0.9}),
    timed("full", 0.02),
    timed("snapkv @ keep=0.25", 0.01),
    record("h2o @ tokens=9", "perplexity", point={"context": 100, "continuation": 20}, error="no room"),
]


MACHINE = {"kvtailor": "0.1", "torch": "2", "transformers": "5", "processor": "one", "threads": 2, "commit": "a" * 40}
RECORDS = [replace(each, dtype="float32", device="cpu", machine=MACHINE) for each in RECORDS]


VOID = ("meta", "input", "br")


class Page(HTMLParser):
    """Tags that are opened and closed, attributes, and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.links, self.said, self.ids, self.attributes = [], [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        assert len({name for name, _ in attributes}) == len(attributes), (tag, attributes)
        if tag not in VOID:
            self.open.append(tag)
        self.attributes.append((tag, dict(attributes)))
        self.ids += [value for name, value in attributes if name == "id"]
        self.links += [value for name, value in attributes if name in ("src", "href")]

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, (tag, self.open)
        self.open.pop()

    def handle_data(self, data):
        self.said.append(data)


@pytest.mark.parametrize("records", [RECORDS, whole_run(), whole_run(plans=1)], ids=["few", "all", "only full"])
def test_the_page_is_whole_and_asks_nothing_of_the_network(records):
    text = page(records)
    found = Page(text)
    assert found.open == [] and len(set(found.ids)) == len(found.ids)
    # What is linked is on the page itself.
    assert found.links and all(link[0] == "#" and link[1:] in found.ids for link in found.links)
    assert "http:" not in text and "https:" not in text and "@import" not in text and "url(" not in text
    said = " ".join(found.said)
    for row in summarise(records).rows:
        assert row.plan_hash == "own" or row.label in said
    assert "<b>odd</b>" not in text and not re.search(r'["> ](nan|NaN|None|inf)["< ]', text)
    assert "prefers-color-scheme: dark" in text
    assert f"{len(records)} records" in said
    assert all(record.error is None or record.error in said for record in records)


def keys_of_lines(text):
    """The key of the record in each line of the records' tables, by the line's number."""
    return {
        int(number): key for number, key in re.findall(r'<tr id="r(\d+)">(?:(?!</tr>).)*?<td>([0-9a-f]{16})</td>', text)
    }


def lines_behind(piece):
    """The lines that a link or a mark names: "4-9 12" in its attribute, or the one of its address."""
    asked = re.search(r'data-r="([^"]*)"', piece) or re.search(r'href="#r(\d+)"', piece)
    ends = [part.split("-") for part in asked[1].split()]
    return [line for first, *last in ends for line in range(int(first), int(last[0] if last else first) + 1)]


def test_every_line_of_the_records_is_of_its_record():
    records = whole_run()
    found = keys_of_lines(page(records))
    assert [found[number] for number in sorted(found)] == [each.key for each in records]


def test_every_number_of_the_main_table_leads_to_the_records_it_was_computed_from():
    records = whole_run()
    by_key = {each.key: each for each in records}
    text = page(records)
    keys = keys_of_lines(text)
    table = text[text.index('id="table-plans"') : text.index("</table>")]
    body = table[table.index("<tbody>") :].split("<tr ")[1:]
    heads = re.findall(r"<button[^>]*>([^<]*)</button>", table)
    assert len(body) == 4 and len(heads) > 12
    tasks = {"perplexity": "perplexity", "answers right, %": "needle", "KL": "fidelity", "tokens/s": "speed"}
    for line in body:
        label = re.search(r"<code>([^<]*)</code>", line)[1]
        for head, cell in zip(heads[2:], line.split("<td")[3:], strict=True):
            behind = [by_key[keys[line]] for line in lines_behind(cell)]
            sides = {label, "full"} if "over full" in head else {label}
            assert behind and {each.label for each in behind} == sides and behind[0].label == label, (head, label)
            assert {each.task for each in behind} == {tasks.get(head, behind[0].task)}, head
            if head == "perplexity":
                value = float(re.search(r'data-value="([^"]*)"', cell)[1])
                # Of both texts: each window counts as much.
                windows = [x for each in behind for x in each.values["nll"]]
                assert len({each.text for each in behind}) == len(behind) == 2
                assert value == pytest.approx(math.exp(sum(windows) / len(windows)))
            if head == "answers right, %":
                assert len(behind) == 12


def test_every_chart_that_was_asked_for_is_there():
    text = page(whole_run())
    titles = [title.partition(", ")[0] if title.startswith("Thr") else title for title in charts_of(text)]
    for title in (
        "Throughput against memory",
        "Memory against context",
        "Throughput against batch",
        "longcontext: longbench qasper",
        "harness: arc_challenge",
        "perplexity: c4, context 256",
        "needle: multi_value, recall",
        "Output error by layer",
        "Attention cosine by layer",
    ):
        assert title in titles, (title, titles)
    for heading in ("Budget by layer and head", "Needles", "Cost", "Memory of a fresh process", "What fits"):
        assert f"<h2>{heading}</h2>" in text
    # Two plans of four hold fewer tokens than they saw, and those two are not the same in every head.
    budget = text[text.index("<h2>Budget by layer") :].split("</section>")[0]
    assert (
        budget.count("<figure") == 2
        and budget.count("<td") == 2 * 5 * 3
        and 'title="layer 4, head 2: 64 of 256' in budget
    )
    assert "As many tokens in every layer" not in budget


def test_a_budget_that_is_the_same_everywhere_is_a_sentence():
    records = [
        replace(each, tokens_by_head=((9.0,) * 3,) * 5) if each.label.startswith("snapkv @") else each
        for each in whole_run()
    ]
    text = page(records)
    budget = text[text.index("<h2>Budget by layer") :].split("</section>")[0]
    assert budget.count("<figure") == 1
    assert "As many tokens in every layer and head: snapkv @ keep=0.25 (9 of 256)." in budget


def test_a_plan_that_is_not_there_stands_in_a_box_and_nowhere_else():
    records = whole_run()
    found = texts(records)
    text = found["report.html"]
    box = text[text.index('class="missing"') : text.index("</section>")]
    assert "rankkv @ keep=0.25" in box and "the score method &#39;rankkv&#39;" in box
    assert "rankkv" not in text.replace(box, "")[: text.index('id="records"') - len(box)]
    assert "Not in this kvtailor yet" in found["report.md"]
    assert "rankkv" not in found["results.csv"] + found["table.tex"]


def test_a_mark_says_its_numbers_and_where_they_came_from():
    text = page(whole_run())
    charts, keys = charts_of(text), keys_of_lines(text)
    (full,) = [each for each in whole_run() if each.task == "perplexity" and each.label == "full" and each.text == "c4"]
    bars = charts["perplexity: c4, context 256"]
    ((_, value, low, high, goal, shown, words, behind),) = [mark for mark in bars["marks"] if mark[0] == "1"]
    assert (low, high, goal, shown) == (None, None, None, f"{full.metrics['perplexity']:.2f}")
    assert value == pytest.approx(full.metrics["perplexity"], rel=1e-5) and words.endswith("over 12 samples")
    assert keys[lines_behind(f'data-r="{behind}"')[0]] == full.key
    line = [mark for mark in charts["Memory against context"]["marks"] if mark[0] == "1"]
    weighed = [each for each in whole_run() if each.task == "memory" and each.label == "full"]
    assert [(x, y * 1024) for _, x, y, _, _ in line] == [(each.point["context"], each.bytes_held) for each in weighed]
    assert line[0][3] == "context 256: 768 KiB" and line[1][4] == ""
    assert {keys[each] for each in lines_behind(f'data-r="{line[0][4]}"')} == {each.key for each in weighed}


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("side", [0, 1], ids=["light", "dark"])
def test_colours_stand_out_from_the_paper(side):
    colours = {name: both[side] for name, both in PALETTE.items()}
    assert contrast(colours["ink"], colours["paper"]) > 7
    for name in ("dim", "warm", "good", "accent"):
        assert contrast(colours[name], colours["paper"]) > 4.4, name
    for name in ["pf", *(f"p{i}" for i in range(COLOURS))]:
        assert contrast(colours[name], colours["paper"]) > 3, name
    assert len({colours[f"p{i}"] for i in range(COLOURS)}) == COLOURS


def test_all_points_have_tables_of_their_own():
    found = texts(whole_run())
    for name, text in found.items():
        if name.endswith(".tex"):
            columns = text[text.index("{l") : text.index("}\n")].count("r")
            assert all(line.count(" & ") == columns for line in text.split("\n") if line.endswith(r"\\")), name
            comment, _, table = text.partition("\n")
            assert name.startswith("suite-") or comment == "% made-up, float32 on cpu"
            assert not re.search(r"(?<!\\)[%_#]", table), name
    fits = found["report.md"][found["report.md"].index("## What fits") :]
    assert "| `full` | 1 GiB | 90 | 9,000 (not run) | 3 KiB |" in fits
    for title in ("Every text and task", "Cost", "What fits", "Fidelity"):
        assert f"## {title}" in found["report.md"]


def test_every_number_of_the_table_is_on_the_page_and_in_markdown():
    rows = summarise(RECORDS).rows
    text, table = " ".join(Page(page(RECORDS)).said), as_markdown(main_grid(rows))
    for part in ("+0.0417", "25.0", "0.500"):
        assert part in text and part in table
    assert "| `h2o @ tokens=9` |" in table and "–" in table


def long_rows(records):
    text = texts(records)["results.csv"]
    return list(csv.DictReader(io.StringIO(text))), text


def test_the_csv_has_a_row_for_each_number_with_what_it_is_of_and_its_unit():
    records = whole_run()
    rows, text = long_rows(records)
    assert text.splitlines()[0] == "model,text,point,plan,metric,unit,value,low,high,n,dtypes"
    assert all(
        row["model"] == "made-up" and row["unit"] and row["plan"] and float(row["value"]) is not None for row in rows
    )
    names = [(row["text"], row["point"], row["plan"], row["metric"]) for row in rows]
    assert len(set(names)) == len(names) > 500

    def of(metric, plan, **point):
        return [
            row
            for row in rows
            if row["metric"] == metric and row["plan"] == plan and point.items() <= json.loads(row["point"]).items()
        ]

    record = next(r for r in records if r.label == "kivi(bits=4)" and r.text == "c4" and r.task == "perplexity")
    (row,) = [row for row in of("perplexity.perplexity", "kivi(bits=4)", context=256) if row["text"] == "c4"]
    assert float(row["value"]) == record.metrics["perplexity"] and row["low"] == row["high"] == "" and row["n"] == "12"
    (row,) = [row for row in of("perplexity.nll_over_full", "kivi(bits=4)", context=256) if row["text"] == "c4"]
    assert row["unit"] == "nats per token" and float(row["low"]) < float(row["value"]) < float(row["high"])
    (row,) = [row for row in of("perplexity.perplexity_over_full", "kivi(bits=4)", context=256) if row["text"] == "c4"]
    assert row["unit"] == "ratio" and 0.9 < float(row["low"]) < 1 < float(row["high"]) < 1.1
    # The interval of a value holds it: what is beside a number is in that number's unit.
    assert all(float(r["low"]) - 1e-9 <= float(r["value"]) <= float(r["high"]) + 1e-9 for r in rows if r["low"])
    assert {r["plan"] for r in rows} >= {"own", "full"} and of("speed.tpot_median", "full", batch=4, context=512)
    assert float(of("capacity.largest_batch", "full")[0]["value"]) == 90
    assert of("needle.accuracy_over_full", "kivi(bits=4)")[-1]["n"] == "24"


def test_a_text_in_a_csv_is_no_formula_and_a_number_stays_one():
    records = [
        replace(each, label="=cmd|' /C calc'!A0", text="@evil", model="+1")
        if "odd" in each.label
        else replace(each, model="+1")
        for each in RECORDS
    ]
    rows, _ = long_rows(records)
    assert {row["model"] for row in rows} == {"'+1"}
    assert any(row["plan"].startswith("'=cmd") and row["text"] == "'@evil" for row in rows)
    assert not any(value[:1] in "=@\t\r" for row in rows for value in row.values() if value)
    assert any(float(row["low"]) < 0 for row in rows if row["low"])
    grid = Grid(
        name="g",
        title="t",
        heads=("=head", "b"),
        plans=("-h",),
        rows=((Cell(text="-1+1", value="-1+1"), Cell(text="-1.5", value=-1.5)),),
    )
    read = list(csv.reader(io.StringIO(as_csv(grid))))
    assert read == [["'=head", "b", "plan_hash", "records"], ["'-1+1", "-1.5", "'-h", ""]]


@pytest.mark.parametrize("name", ["<img src=x onerror=alert(1)>", "a`<script>alert(1)</script>`", "x | <b>\n# y"])
def test_markdown_escapes_html(name):
    records = [
        replace(each, label=name, notes=(f"About {name}.",))
        if "odd" in each.label
        else replace(each, text=each.text and name)
        for each in RECORDS
    ]
    found = texts(records)["report.md"]
    assert "<" not in found and "&lt;" in found and "\n# y" not in found
    assert all(
        line.count(" | ") == found.split("\n\n")[1].split("\n")[0].count(" | ")
        for line in found.split("\n\n")[1].replace(r"\|", "").split("\n")[2:]
    )


def test_latex_escapes_what_latex_reads():
    text = as_latex(main_grid(summarise(RECORDS).rows))
    assert text.startswith(r"\begin{tabular}{l") and text.endswith(r"\end{tabular}")
    assert r"\texttt{<b>odd</b> \& 50 \%}" in text
    assert not re.search(r"(?<!\\)[%_#$]", text)
    columns = text.count("r", text.index("{l"), text.index("}\n"))
    assert all(line.count(" & ") == columns for line in text.split("\n") if line.endswith(r"\\"))


def test_the_front_has_no_plan_that_another_beats_in_both():
    rows = summarise(RECORDS).rows
    front = pareto(rows)
    assert [row.label for row in front] == ["snapkv @ keep=0.25", "full"]
    worse = scored("worse", [1.5] * 6, 26, 260)
    assert [row.label for row in pareto(summarise([*RECORDS, worse]).rows)] == ["snapkv @ keep=0.25", "full"]


@pytest.mark.parametrize("state", range(20))
def test_the_front_is_what_no_other_point_beats(state):
    chance = random.Random(state)
    places = [(chance.randrange(6), chance.randrange(6)) for _ in range(chance.randrange(12))]
    beaten = [
        any(a <= x and b <= y and (a, b) != (x, y) for a, b in places) or (x, y) in places[:i]
        for i, (x, y) in enumerate(places)
    ]
    wanted = sorted(place for place, worse in zip(places, beaten, strict=True) if not worse)
    assert front_of(places, lambda place: place) == wanted


def test_pages_are_made_again_from_records_alone(tmp_path):
    lines = [each.to_json() for each in RECORDS]
    (tmp_path / "records-a.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    written = write([tmp_path], tmp_path / "pages")
    names = [path.name for path in written]
    assert names[:4] == ["report.html", "report.md", "results.csv", "table.tex"]
    assert "quality.tex" in names and all(path.stat().st_size for path in written)
    before = [path.read_text(encoding="utf-8") for path in written]
    assert [path.read_text(encoding="utf-8") for path in write([tmp_path], tmp_path / "pages")] == before


def test_of_records_of_the_same_thing_the_latest_counts():
    old = scored("full", [1.0], started="2026-01-01T00:00:00.000+00:00")
    new = scored("full", [2.0], started="2026-01-02T00:00:00.000+00:00")
    other = scored("other", [3.0], started="2026-01-01T00:00:00.000+00:00")
    assert latest([new, other, old]) == latest([old, other, new]) == [new, other]
