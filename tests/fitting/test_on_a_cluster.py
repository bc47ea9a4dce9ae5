"""On an executor, or side by side, a search gives what it gives here."""

from pathlib import Path

import pytest
import torch
from tests.support.in_process import InProcess

from kvtailor.bench.data.texts import generated_text
from kvtailor.bench.forks import one_thread, why_no_forks
from kvtailor.bench.measure import machine
from kvtailor.bench.subject import Subject
from kvtailor.fitting.layers import measure_layers
from kvtailor.fitting.material import material_of
from kvtailor.fitting.measuring import Measurer
from kvtailor.fitting.search import search
from kvtailor.fitting.sizing import Sizer
from kvtailor.fitting.space import Space

CONTEXT = 96


@pytest.fixture(autouse=True)
def same_versions(monkeypatch):
    monkeypatch.setattr(
        machine, "versions", lambda: dict.fromkeys(("python", "torch", "transformers", "kvtailor", "commit"), "1")
    )


def both_stages(folder: Path, executor=None, workers=1):
    subject = Subject.load("demo", dtype="float32")
    pieces = material_of(subject, {"text": generated_text(12_000)}, context=CONTEXT, kinds=["needle"]).first(3, 1)
    sizer = Sizer.of(subject.model, context=CONTEXT, batch=1)
    measurer = Measurer(subject, folder / "records", executor=executor, workers=workers)
    layers = measure_layers(measurer, sizer.geometry, pieces, score="snapkv(window=8)", widths=(2,), shares=(0.5,))
    space = Space(
        sizer=sizer, layers=layers, scores=("snapkv(window=8)",), presets=("kivi4", "kivi2"), families=("kivi",)
    )
    found = search(
        space,
        measurer,
        memory=int(0.5 * sizer.full),
        first=pieces,
        rest=(),
        trials=8,
        state=0,
        storage=folder / "study.db",
    )
    return layers, [(str(each.plan), each.loss) for each in found.candidates]


@pytest.mark.long
def test_a_search_on_an_executor_is_the_one_that_runs_here(tmp_path):
    for name in ("here", "there", "beside"):
        (tmp_path / name / "records").mkdir(parents=True)
    with one_thread(2):
        here = both_stages(tmp_path / "here")
    there = both_stages(tmp_path / "there", executor=InProcess())
    assert here == there and len(here[1]) >= 3
    if why_no_forks(torch.device("cpu")) is None:
        assert both_stages(tmp_path / "beside", workers=2) == here
