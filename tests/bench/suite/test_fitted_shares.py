"""Plans with `share=`: the largest budget whose cache fits, the file that keeps it, and what happens without one."""

from __future__ import annotations

import tomllib
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from kvtailor.bench.subject import Subject
from kvtailor.bench.suite.fitted import fit_shares, known_before, written
from kvtailor.bench.suite.suite import SuiteError, read_suite
from kvtailor.hf.model.geometry import Geometry
from kvtailor.hf.sizes.size import forecast_size
from kvtailor.plan import Plan

SUITE = """
title = "Shares"
columns = [{ label = "PPL", task = "ppl", value = "metrics.perplexity" }]
[leaderboard]
title = "Equal"
budgets = [0.5, 0.25]
[settings.default]
context = 63
[tasks.ppl]
run = "perplexity"
context = 63
[[tables]]
name = "one"
title = "One"
labels = ["Plan", "share"]
rows = [
    { Plan = "knorm", plan = "knorm @ share={share}", for = { share = [0.5, 0.01] } },
    { Plan = "coded", plan = "snapkv(window=5) + adakv + vector(bits=4) @ share=0.3, slack=7", share = "half" },
    { Plan = "plain", plan = "tova @ keep=0.3", share = "own" },
]
"""


def subject() -> Subject:
    config = AutoConfig.for_model(
        "llama",
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=24,
        num_hidden_layers=1,
        max_position_embeddings=512,
    )
    return Subject(name="some/Model", model=SimpleNamespace(config=config, dtype=torch.bfloat16))


def suite_of(tmp_path, text=SUITE):
    (tmp_path / "shares.toml").write_text(text)
    return read_suite(tmp_path / "shares.toml")


def test_a_share_becomes_the_largest_budget_whose_cache_fits(tmp_path):
    model = subject()
    found = fit_shares(suite_of(tmp_path), model).fitted["some/Model"]
    full = 2 * 3 * 24 * 63 * 2
    assert set(found) == {"knorm @ share=0.5", "snapkv(window=5) + adakv + vector(bits=4) @ share=0.3, slack=7"}
    for share, plan in found.items():
        line, keep = plan.split(" @ keep=")
        keep, *rest = keep.split(", ")
        assert (line, rest) == (share.split(" @ ")[0], ["slack=7"] if "slack" in share else [])
        tokens = int(float(keep) * 63 + 1e-6)

        sizes = [cache_size_of(model.model.config, f"{line} @ tokens={each}") for each in (tokens, tokens + 2)]
        assert sizes[0] <= (0.3 if rest else 0.5) * full < sizes[1], plan
    # A hundredth of 63 tokens is less than one for each head, so nothing fits: the plan shows what it takes.
    assert {cell.plan for cell in fit_shares(suite_of(tmp_path), model).tables_for("some/Model")[0].rows[1].cells} == {
        "knorm @ keep=0.01"
    }


def cache_size_of(config, plan):

    return forecast_size(Plan.parse(plan), Geometry.of(config), context=63, element_size=2).high


def test_the_file_beside_the_records_has_the_budgets_of_every_model(tmp_path):
    suite, path = suite_of(tmp_path), tmp_path / "kept.toml"
    first = fit_shares(suite, subject())
    path.write_text(written(first, SUITE, path))
    again = read_suite(path)
    assert again.fitted == first.fitted and again.tables_for("some/Model") == first.tables_for("some/Model")
    assert again.tables_for("another")[0].rows[0].cells[0].plan == "knorm @ keep=0.5"
    # A second model, from the file that is there; what an earlier run fitted stays, whatever is found now.
    other = fit_shares(
        again, Subject(name="another", model=subject().model), {"knorm @ share=0.5": "knorm @ keep=0.111"}
    )
    path.write_text(written(other, path.read_text(), path))
    assert set(tomllib.loads(path.read_text())["fitted"]) == {"some/Model", "another"}
    assert known_before(path, "some/Model") == first.fitted["some/Model"]
    assert known_before(path, "another")["knorm @ share=0.5"] == "knorm @ keep=0.111"
    assert known_before(tmp_path / "none.toml", "another") == {}


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("[settings.default]\ncontext = 63", "[settings.default]\nlength = 63", "needs the setting `context`"),
        ("budgets = [0.5, 0.25]", "budgets = [0.25, 0.5]", "from many to few"),
        ("budgets = [0.5, 0.25]", "budgets = [1.0]", "give shares above 0 and below 1"),
        ('title = "Equal"', 'titel = "Equal"', "did you mean 'title'"),
        ("budgets = [0.5, 0.25]", "budgets = [0.5]\ntolerance = 2", "tolerance is 2"),
        ("share=0.3, slack", "share=most, slack", "keep"),
    ],
)
def test_what_is_wrong_is_told(tmp_path, old, new, told):
    with pytest.raises(SuiteError) as caught:
        fit_shares(suite_of(tmp_path, SUITE.replace(old, new, 1)), subject())
    assert told in str(caught.value), str(caught.value)
