"""Another memory asked of a finished fit."""

from dataclasses import replace
from pathlib import Path

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
