"""Another memory asked of a finished fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvtailor.bench.data.overlap import text_hash
from kvtailor.cli.fit import command
from kvtailor.errors import KvtailorError
from kvtailor.fitting.again import another_memory
from kvtailor.fitting.result import Fit

FITS = Path(__file__).parents[2] / "docs" / "records" / "fits"


def test_a_plan_that_fills_the_memory_and_was_measured_is_not_told_as_unmeasured() -> None:
    found = Fit.load(next(FITS.glob("smollm2*")))
    small = replace(found.front[0], plan="snapkv @ tokens=33", bytes=1000)
    fit = replace(found, model="demo", dtype="float32", layers=None, front=(small,))
    alone = another_memory(fit, memory="256KiB")
    assert alone.resized is not None and alone.measured == small, "it has a budget, which can fill the memory"
    filling = replace(small, plan=alone.resized, bytes=alone.resized_bytes, loss=small.loss.map(lambda each: each + 1))
    both = another_memory(replace(fit, front=(small, filling)), memory="256KiB")
    assert both.measured == small and both.resized is None
    assert "not measured" not in str(both)


def test_a_loss_beside_a_memory_is_held() -> None:
    found = Fit.load(next(FITS.glob("smollm2*")))
    point = replace(found.front[0], plan="kivi4", bytes=1000, text=0.02)
    better = replace(point, plan="fp8", bytes=2000, text=0.002, loss=point.loss.map(lambda each: each / 10))
    fit = replace(found, model="demo", dtype="float32", front=(point, better))
    both = another_memory(fit, memory=3000, loss=0.01)
    assert both.measured == better and both.solved is None
    assert "the least that fits" in str(both) and "on text alone 0.0020, of the 0.01 that were asked" in str(both)
    with pytest.raises(KvtailorError, match=r"at most 1.46 KiB and loses at most 0.01 .* fp8 has the fewest bytes"):
        another_memory(fit, memory=1500, loss=0.01)
    alone = another_memory(fit, loss=0.05)
    assert alone.measured == point and "the fewest bytes that do" in str(alone)
    assert "the least that fits" not in str(alone) and "memory" not in str(alone)


@pytest.mark.parametrize(
    ("given", "other"),
    [
        ({}, None),
        ({"--text": "other"}, "--text"),
        ({"--dtype": "bfloat16"}, "--dtype"),
        ({"--cache-dtype": "float16"}, "--cache-dtype"),
        ({"--device": "cuda"}, "--device"),
    ],
)
def test_a_finished_fit_answers_for_what_it_measured_alone(
    given: dict[str, str], other: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights in float32 under a cache in bfloat16, and a text whose content has changed under its name."""
    texts = {name: tmp_path / name / "text.txt" for name in ("same", "other")}
    for name, path in texts.items():
        path.parent.mkdir()
        path.write_text(name)
    found = Fit.load(next(FITS.glob("smollm2*")))
    asked: dict[str, Any] = {**found.asked, "texts": ["text.txt"], "text_hashes": {"text.txt": text_hash("same")}}
    asked |= {"dtype": "float32", "device": "cpu"}
    monkeypatch.setattr(Fit, "load", lambda folder: replace(found, dtype="bfloat16", asked=asked))
    (tmp_path / "fit.json").write_text("{}")
    options = {"--text": "same", "--dtype": "float32", "--cache-dtype": "bfloat16", "--device": "cpu"} | given
    options["--text"] = str(texts[options["--text"]])
    line = [each for pair in options.items() for each in pair]
    result = CliRunner().invoke(command, ["--out", str(tmp_path), "--model", found.model, *line])
    said = " ".join(result.output.split())
    if other is None:
        assert result.exit_code == 0 and "has this fit, finished" in said
    else:
        assert result.exit_code == 1 and f"was asked for another {other}: give --again" in said
