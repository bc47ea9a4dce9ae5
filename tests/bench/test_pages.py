"""The pages of a run: self-contained, complete, and made from records alone."""

import csv
import io
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from tests.bench.test_report import needles, record, scored, timed

from kvtailor.bench.report import summarise
from kvtailor.bench.report.page import page, pareto
from kvtailor.bench.report.svg import Mark, heat_map, scatter, ticks
from kvtailor.bench.report.tables import csv_text, latex, markdown
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


class Page(HTMLParser):
    """Tags that are opened and closed, attributes, and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.links, self.said, self.rows = [], [], [], 0
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag != "meta":
            self.open.append(tag)
        self.rows += tag == "tr"
        self.links += [value for name, value in attributes if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.said.append(data)


def test_the_page_is_whole_and_asks_nothing_of_the_network():
    text = page(RECORDS)
    found = Page(text)
    assert found.open == [] and found.links == []
    assert "http" not in text and "@import" not in text and "url(" not in text
    said = " ".join(found.said)
    for row in summarise(RECORDS).rows:
        assert row.label in said
    assert "<b>odd</b>" not in text and not re.search(r'["> ](nan|NaN|None)["< ]', text)
    assert "prefers-color-scheme: dark" in text and text.count("<svg") >= 3
    assert f"{len(RECORDS)} records" in said and "no room" in said


def test_every_number_of_the_table_is_on_the_page_and_in_markdown():
    rows = summarise(RECORDS).rows
    text, table = " ".join(Page(page(RECORDS)).said), markdown(rows)
    for part in ("+0.0417", "25.0", "0.500"):
        assert part in text and part in table
    assert "| `h2o @ tokens=9` |" in table and "–" in table


def test_csv_has_plain_numbers_and_empty_cells_where_nothing_was_measured():
    rows = summarise(RECORDS).rows
    read = list(csv.DictReader(io.StringIO(csv_text(rows))))
    assert [each["plan"] for each in read] == [row.label for row in rows]
    snap = next(each for each in read if each["plan"].startswith("snapkv"))
    row = next(row for row in rows if row.label.startswith("snapkv"))
    assert float(snap["loss"]) == row.loss.value and float(snap["loss_low"]) == row.loss.low
    assert float(snap["bytes_held"]) == 250 and snap["kl"] == ""
    assert next(each for each in read if each["plan"].startswith("h2o"))["loss"] == ""


def test_latex_escapes_what_latex_reads():
    text = latex(summarise(RECORDS).rows)
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


@pytest.mark.parametrize("span", [(0, 1), (0, 0.0031), (-3.2, 118), (0, 0), (0, 1e6)])
def test_ticks_are_round_and_cover(span):
    found = ticks(*span)
    assert found[0] <= span[0] + 1e-9 and found[-1] >= span[1] - 1e-9 and 2 <= len(found) <= 9
    steps = {round(b - a, 9) for a, b in zip(found, found[1:], strict=False)}
    assert len(steps) == 1


def test_a_mark_stands_where_its_numbers_say():
    marks = [Mark(x=0, y=0, label="zero", number="1", hover="h"), Mark(x=100, y=1, label="top", number="2", hover="h")]
    found = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', scatter(marks, x="x", y="y", title="t"))
    (left, low), (right, high) = [tuple(map(float, each)) for each in found]
    assert (left, low, right, high) == (64, 328, 624, 16)


def test_a_heat_map_is_darker_where_more_is_right():
    cells = [[(0.0, "none"), (1.0, "all")], [None, (0.5, "half")]]
    text = heat_map(cells, columns=["a", "b"], rows=["0", "1"], title="t")
    assert [float(x) for x in re.findall(r"fill-opacity:([\d.]+)", text)] == [0.08, 1.0, 0.54]


def test_pages_are_made_again_from_records_alone(tmp_path):
    lines = [each.to_json() for each in RECORDS]
    (tmp_path / "records-a.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    written = write(tmp_path, tmp_path / "pages")
    assert [path.name for path in written] == ["report.html", "report.md", "rows.csv", "table.tex"]
    before = [path.read_text(encoding="utf-8") for path in written]
    assert [path.read_text(encoding="utf-8") for path in write(tmp_path, tmp_path / "pages")] == before


def test_of_records_of_the_same_thing_the_latest_counts():
    old = scored("full", [1.0], started="2026-01-01T00:00:00.000+00:00")
    new = scored("full", [2.0], started="2026-01-02T00:00:00.000+00:00")
    other = scored("other", [3.0], started="2026-01-01T00:00:00.000+00:00")
    assert latest([new, other, old]) == latest([old, other, new]) == [new, other]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on this machine")
@pytest.mark.parametrize("width", [1280, 420])
def test_a_browser_shows_the_page_without_complaint(tmp_path, width):
    (tmp_path / "report.html").write_text(page(RECORDS), encoding="utf-8")
    done = subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
         "--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging",
         "--v=0", f"--window-size={width},900", "--virtual-time-budget=2000", "--dump-dom",
         f"file://{tmp_path / 'report.html'}"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and "snapkv @ keep=0.25" in done.stdout
    assert "CONSOLE" not in done.stderr
