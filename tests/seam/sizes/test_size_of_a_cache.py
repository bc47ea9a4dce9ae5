"""The size of a cache in Python and on the command line: what is printed, what is refused, the largest budget."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tests.support.seam.zoo import build

import kvtailor
from kvtailor.allocate.uniform import Uniform
from kvtailor.cli import main
from kvtailor.errors import KvtailorError, PlanError
from kvtailor.hf.model.geometry import Geometry
from kvtailor.hf.sizes.simulate import Evictions
from kvtailor.hf.sizes.size import forecast_size, largest_tokens
from kvtailor.plan import Plan


def geometry(family: str = "llama") -> Geometry:
    return Geometry.of(build(family).config)


def asked(*words: str) -> tuple[dict[str, Any], str]:
    done = CliRunner().invoke(main, ["show", *words, "--json"])
    assert done.exit_code == 0, done.output
    *lines, last = done.stdout.splitlines()
    return json.loads(last), "\n".join(lines)


def test_a_name_and_a_model_give_the_same() -> None:
    model, _ = kvtailor.load_model("demo", dtype=torch.bfloat16)[:2]
    plan = "snapkv + kivi(bits=4) @ keep=0.25"
    of_model = kvtailor.cache_size(model, plan, context=1000, batch=2)
    assert of_model == kvtailor.cache_size("demo", plan, context=1000, batch=2)
    assert of_model == kvtailor.cache_size("demo", Plan.parse(plan), context=1000, batch=2, dtype=model.dtype)
    half = kvtailor.cache_size("demo", plan, context=1000, batch=2, dtype="bfloat16")
    assert half.full == kvtailor.cache_size("demo", plan, context=1000, batch=2, dtype=torch.float32).full // 2


def test_it_reads_well() -> None:
    text = str(kvtailor.cache_size("demo", "snapkv + adakv @ tokens=100", context=1000, batch=2))
    assert text.startswith("snapkv + adakv @ tokens=100: ") and "2 rows of 1000 tokens" in text
    assert " to " in text and "not known before a run: adakv splits" in text
    text = str(kvtailor.cache_size("demo", "full", context=1000, new_tokens=3))
    assert "after 1000 tokens and 3 decoded ones" in text and "not known" not in text and "about" not in text


def test_a_cache_with_nothing_to_compress_is_its_windows() -> None:
    size = forecast_size(Plan.parse("full"), geometry("mistral_window"), context=100, element_size=4)
    assert size.exact and size.total == size.full and size.tokens_held is None and size.uncut == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"context": 0}, "context=0"),
        ({"batch": 0}, "batch=0"),
        ({"new_tokens": -1}, "new_tokens=-1"),
        ({"element_size": 1}, "1 bytes an element"),
    ],
)
def test_impossible_numbers_are_refused(changes: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        forecast_size(Plan.parse("full"), geometry(), **{"context": 10, "element_size": 4, **changes})


def test_a_dtype_that_no_cache_has_is_refused() -> None:
    with pytest.raises(ValueError, match="give float32, bfloat16 or float16"):
        kvtailor.cache_size("demo", "full", context=10, dtype="int8")


def test_states_of_unknown_size_are_refused_and_may_be_left_out() -> None:
    shapes = tuple(replace(shape, state_elements=None) for shape in geometry("qwen3_next").shapes)
    unknown = replace(geometry("qwen3_next"), shapes=shapes)
    with pytest.raises(ValueError, match="is not known before they are there"):
        forecast_size(Plan.parse("full"), unknown, context=10, element_size=4)
    without = forecast_size(Plan.parse("full"), unknown, context=10, element_size=4, count_states=False)
    known = forecast_size(Plan.parse("full"), geometry("qwen3_next"), context=10, element_size=4)
    assert without.total == known.total - known.stages["state"].low and "state" not in without.stages


@pytest.mark.parametrize(
    "text",
    ["snapkv @ keep=0.5", "snapkv(window=6) + kivi(bits=4, group=8, recent=8) @ keep=0.5", "h2o + adakv @ tokens=3"],
)
def test_the_largest_budget_fits_and_the_next_does_not(text: str) -> None:
    plan, own = Plan.parse(text), geometry()
    options = {"context": 300, "batch": 2, "element_size": 2}

    def high(tokens: int) -> int:
        return forecast_size(replace(plan, tokens=tokens, keep=None), own, **options).high

    for memory in (high(20), high(100) - 1, high(150) + 1):
        found = largest_tokens(plan, own, memory=memory, **options)
        assert found is not None and high(found) <= memory < high(found + 1)
    assert largest_tokens(plan, own, memory=high(1) - 1, **options) is None
    assert largest_tokens(plan, own, memory=10**9, **options) == 300


def test_a_plan_without_a_budget_has_no_largest_one() -> None:
    with pytest.raises(PlanError, match="has no budget to choose"):
        largest_tokens(Plan.parse("kivi4"), geometry(), memory=1 << 20, context=100, element_size=4)
    with pytest.raises(ValueError, match="give 0 or more"):
        largest_tokens(Plan.parse("snapkv @ tokens=9"), geometry(), memory=-1, context=100, element_size=4)


def test_show_prints_what_the_ledger_has() -> None:
    model, _ = kvtailor.load_model("demo", dtype=torch.bfloat16)[:2]
    plan = "snapkv + kivi(bits=4) @ keep=0.25"
    found, text = asked(plan, "--model", "demo", "--context", "1000", "--batch", "2")
    ids = torch.randint(5, 1000, (2, 1000), generator=torch.Generator().manual_seed(0))
    ledger = kvtailor.prefill(model, ids, plan=plan).ledger()
    size = found["size"]
    assert size["low"] == size["high"] == size["total"] == ledger.total and size["full"] == ledger.full
    assert {name: low for name, (low, _) in size["stages"].items()} == {n: b for n, b in ledger.by_stage.items() if b}
    assert "2 rows of 1000 tokens" in text and "more for each of the next 512 decoded tokens" in text
    assert "not known before a run" not in text and f"{size['share']:.3f} of the " in text
    assert (
        asked(plan, "--model", "demo", "--tokens", "1000")[0] == asked(plan, "--model", "demo", "--context", "1000")[0]
    )


def test_show_prints_bounds_and_why() -> None:
    found, text = asked("snapkv + adakv @ tokens=100", "--model", "demo", "--context", "1000")
    assert found["size"]["low"] < found["size"]["high"]
    assert "not known before a run: adakv splits a layer's tokens" in text and " to " in text


def test_the_step_of_a_batch_moves_the_bytes_of_all_rows() -> None:
    words = ("kivi(bits=4) + disk", "--model", "demo", "--context", "1000", "--link", "1M", "--step-ms", "8")
    one, three = (asked(*words, "--batch", rows)[0]["forecast"] for rows in ("1", "3"))
    assert three["bytes_moved"] == pytest.approx(3 * one["bytes_moved"], abs=3)
    assert three["bytes_resident"] == pytest.approx(3 * one["bytes_resident"], abs=3)
    assert three["link_seconds"] == pytest.approx(3 * one["link_seconds"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["full", "--batch", "2"], "--batch needs --context"),
        (["minicache(start=1.0)", "--model", "demo", "--context", "9"], "leaves no two layers"),
    ],
)
def test_show_refuses(words: list[str], said: str) -> None:
    done = CliRunner().invoke(main, ["show", *words])
    assert done.exit_code == 2 and said in done.output


@pytest.mark.parametrize(
    ("family", "plan"), [("llama", "kivi4 + host"), ("gemma3", "snapkv + table(weights=[1, 2, 3]) @ tokens=9")]
)
def test_a_plan_that_the_model_refuses_is_refused_in_the_same_words(family: str, plan: str) -> None:
    model = build(family)
    with pytest.raises(KvtailorError) as of_cache:
        kvtailor.cache_for(model, plan)
    with pytest.raises(KvtailorError) as of_size:
        kvtailor.cache_size(model, plan, context=10)
    assert str(of_size.value) == str(of_cache.value)


def test_a_model_that_is_refused_is_refused_in_the_same_words() -> None:
    model = build("llama")
    model.config.is_encoder_decoder = True
    with pytest.raises(KvtailorError) as of_cache:
        kvtailor.cache_for(model, "full")
    with pytest.raises(KvtailorError) as of_size:
        kvtailor.cache_size(model, "full", context=10)
    assert str(of_size.value) == str(of_cache.value)


def test_layers_that_hold_the_same_are_asked_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of SmolLM2's 30 by itself, at each of 192 decoded tokens, took 7 seconds a forecast."""
    asked_of: list[tuple[int, ...]] = []
    allocate = Uniform.allocate
    monkeypatch.setattr(
        Uniform, "allocate", lambda self, request: asked_of.append(request.layers) or allocate(self, request)
    )
    plan = Plan.parse("streaming @ tokens=64, slack=0")
    forecast_size(plan, geometry("llama"), context=100, new_tokens=10, element_size=2)
    # One to see that the budgets are known, and 11 evictions.
    assert len(asked_of) == 1 + 11


def test_layers_get_what_they_get_by_themselves_also_where_tokens_are_left_over() -> None:
    left_over = set()
    for memory in range(20_000, 20_600, 37):
        plan = Plan.parse(f"streaming @ bytes={memory}")
        evictions = Evictions(plan=plan, geometry=geometry("llama"), rows=1, element_size=2)
        for seen, held in ((100, [100, 100]), (300, [40, 40]), (60, [60, 3])):
            every = [held] * len(evictions.shapes)
            alone = [
                plan.allocate.allocate(evictions._request(seen, every, (layer,)))[0, 0].tolist()
                for layer in range(len(every))
            ]
            assert evictions._allocated(seen, every) == alone
            left_over.add(evictions._budget(seen, 0).left_over)
    assert 0 in left_over and len(left_over) > 1
