"""The tidy table: every number that a page shows is in it, with where it is from, and pandas reads it."""

import builtins
import json

import pytest
from tests.bench.report.test_report import FULL, scored
from tests.support.bench.made_records import whole_run

from kvtailor.bench.evaluation.result import Evaluation
from kvtailor.bench.report import summarise
from kvtailor.bench.report.table import PLAN, POINT, POINTS_TOGETHER, Number, frame_of
from kvtailor.bench.report.tables.tables import brief_grid, main_grid, task_grids
from kvtailor.errors import KvtailorError

RECORDS = whole_run()


def test_every_number_of_the_tables_is_one_of_the_table_and_of_records_that_are_there():
    summary, keys = summarise(RECORDS), {record.key for record in RECORDS}
    table = summary.table()
    values = {(each.plan_hash, each.value) for each in table}
    assert {each.over for each in table} == {POINT, POINTS_TOGETHER, PLAN}
    assert all(set(each.keys) <= keys and each.keys and each.unit and each.metric for each in table)
    checked = 0
    for grid in (main_grid(summary.rows), brief_grid(summary.rows), *task_grids(RECORDS, summary.rows)):
        for plan, row in zip(grid.plans, grid.rows, strict=True):
            for head, cell in zip(grid.heads, row, strict=True):
                # Made of two numbers of its record.
                if not cell.keys or head == "of full, %":
                    continue
                # A share is shown in percent, and seconds in milliseconds.
                own = [value for held, value in values if held == plan]
                assert any(cell.value == pytest.approx(by * value) for value in own for by in (1, 100, 1000)), head
                checked += 1
    assert checked > 400


def test_no_row_of_the_table_stands_twice():
    names = [(each.plan, each.text, each.point, each.name, each.over) for each in summarise(RECORDS).table()]
    assert len(names) == len(set(names)) > 1000


def test_a_frame_has_the_numbers_of_the_table():
    pandas = pytest.importorskip("pandas")
    summary = summarise(RECORDS)
    frame = Evaluation(records=tuple(RECORDS), summary=summary).frame()
    assert list(frame.columns) == list(Number._fields) and len(frame) == len(summary.table())
    wide = frame[frame.over == "plan"].pivot(index="plan", columns=["task", "metric"], values="value")
    for row in summary.rows:
        if row.ratio is not None:
            assert wide.loc[row.label, ("cache", "ratio")] == row.ratio
        if row.loss is not None:
            assert wide.loc[row.label, ("perplexity", "nll_over_full")] == row.loss.value
    loss = frame[(frame.over == "plan") & (frame.metric == "nll_over_full") & (frame.plan != "full")]
    assert (loss.low < loss.value).all() and (loss.value < loss.high).all() and (loss.n > 0).all()
    assert {len(json.loads(point)) for point in frame.point} and frame.low.isna().any() and frame.n.isna().any()
    assert isinstance(frame.n.dtype, pandas.Int64Dtype)


def test_a_folder_that_is_loaded_gives_the_same_frame(tmp_path):
    pandas = pytest.importorskip("pandas")
    records = [FULL, scored("half", [3.1] * len(FULL.values["nll"]))]
    whole = Evaluation(records=tuple(records), summary=summarise(records))
    whole.save(tmp_path)
    pandas.testing.assert_frame_equal(whole.frame(), Evaluation.load(tmp_path).frame())


def test_without_pandas_a_frame_says_what_to_install(monkeypatch):
    whole = builtins.__import__

    def lacking(name, *more):
        if name == "pandas":
            raise ImportError(name)
        return whole(name, *more)

    monkeypatch.setattr(builtins, "__import__", lacking)
    with pytest.raises(KvtailorError, match=r"needs pandas.*pip install 'kvtailor\[bench\]'.*results.csv"):
        frame_of([])
