"""What docs/fit.md and README say of fits on real models is what docs/records/fits says."""

from __future__ import annotations

import runpy
from dataclasses import replace

import pytest
from tests.docs.test_site import REPOSITORY

SCRIPT = runpy.run_path(str(REPOSITORY / "docs" / "write_fits.py"))
FITS = {f"{fit.model}, {fit.question.memory}": fit for fit in SCRIPT["read"]()}


def test_the_table_is_what_the_published_fits_say() -> None:
    text = SCRIPT["PAGE"].read_text(encoding="utf-8")
    assert "<!-- fits: start -->" in text and FITS
    assert SCRIPT["written"](text, list(FITS.values())) == text


@pytest.mark.parametrize("name", FITS)
def test_another_loss_in_a_fit_is_another_table(name: str) -> None:
    fit = FITS[name]
    plan = replace(fit.chosen, nll=tuple(each + 0.01 for each in fit.chosen.nll))
    other = replace(fit, proof=tuple(plan if each.plan == fit.plan else each for each in fit.proof))
    page = "<!-- fits: start -->\n<!-- /fits -->"
    assert SCRIPT["written"](page, [other]) != SCRIPT["written"](page, [fit])


@pytest.mark.parametrize("name", FITS)
def test_the_chosen_plan_fits_and_was_judged_on_what_the_search_never_saw(name: str) -> None:
    fit = FITS[name]
    assert fit.chosen.bytes <= fit.question.memory and len(fit.chosen.nll) == 24
    best = SCRIPT["best_preset"](fit)
    assert best is None or fit.against[best.label].value == pytest.approx(fit.chosen.loss.value - best.loss.value)


def test_readme_says_of_an_eighth_what_the_fits_say() -> None:
    text = " ".join((REPOSITORY / "README.md").read_text(encoding="utf-8").split())
    eighths = [fit for fit in FITS.values() if fit.question.memory / fit.full == pytest.approx(0.125, abs=1e-3)]
    assert eighths
    for fit in eighths:
        less = fit.against[SCRIPT["best_preset"](fit).label]
        assert f"{-less.value:.3f} ({-less.high:.3f} to {-less.low:.3f})" in text, fit.model
