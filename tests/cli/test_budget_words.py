"""What `show` and `check` say of a budget at a length: what is held then, and where it does nothing or little."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import kvtailor
from kvtailor.cli import main
from kvtailor.hf.model.cache_dtype import dtype_of_caches
from kvtailor.hf.model.loading import load
from kvtailor.hf.versions import hand_cache

RESIDENT = ("tail", "encode", "store")


def asked(verb: str, *words: str) -> tuple[dict[str, Any], str]:
    done = CliRunner().invoke(main, [verb, *words, "--json"])
    assert done.exit_code == 0, done.output
    *lines, last = done.stdout.splitlines()
    return json.loads(last), "\n".join(lines)


@pytest.mark.parametrize(
    ("plan", "held", "recent"),
    [
        ("snapkv + kivi(bits=4) @ keep=0.25", 75, 32),
        ("snapkv @ keep=0.25", 75, 75),
        ("snapkv @ tokens=100", 100, 100),
        ("snapkv @ tokens=1000", 300, 300),
        ("snapkv + kivi(bits=4) @ keep=0.05", 15, 15),
        ("streaming + kivi(bits=4) @ tokens=100", 100, 0),
        ("kivi(bits=4)", 300, 128),
        ("kivi(bits=4, recent=64)", 300, 64),
        ("vector(bits=8)", 300, 0),
        ("full", 300, 300),
    ],
)
def test_what_is_shown_as_held_is_what_a_cache_holds(plan: str, held: int, recent: int) -> None:
    """On the embedded model: tokens exactly, and bytes but for a cut cache's positions and the tail's free slots."""
    model, _ = load("demo")[:2]
    said = asked("show", plan, "--model", "demo", "--tokens", "300")[0]["holding"]
    cache = kvtailor.cache_for(model, plan)
    ids = torch.randint(5, 1000, (1, 300), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(ids, **hand_cache(cache))
    assert {int(count) for state in cache.engine.states for count in state.counts().flatten()} == {held}
    assert {state.stored.tail.length for state in cache.engine.states} == {recent}
    assert (said["tokens_seen"], said["tokens_held"], said["tokens_full_precision"]) == (300, held, recent)
    states = [part for state in cache.engine.states for part in state.parts()]
    layouts = sum(part.layout.closed_form_bytes() for part in states)
    stored = sum(part.closed_form_bytes() for part in states) - layouts
    # A group of codes that is not full has a whole scale, of the cache's dtype.
    spare = 0.02 * dtype_of_caches(model).itemsize
    assert said["bytes"] == stored if "kivi" not in plan else said["bytes"] == pytest.approx(stored, rel=spare)
    assert said["full_bytes"] == cache.ledger().full


def test_bytes_are_read_as_a_budget_and_written_for_people() -> None:
    found, text = asked("show", "snapkv @ bytes=1MiB", "--model", "demo", "--tokens", "4000")
    holding = found["holding"]
    assert 0.9 * 2**20 < holding["bytes"] <= 2**20 and holding["tokens_held"] < 4000
    assert f"{holding['tokens_held']} of 4000 tokens are held per kv head" in text
    assert "MiB" in text and str(holding["bytes"]) not in text


@pytest.mark.parametrize(
    ("plan", "line"),
    [
        ("h2o + kivi4 @ tokens=20", "none of them is encoded"),
        ("h2o @ tokens=20", "cut back to the budget whenever more than 32 tokens have come"),
        ("snapkv @ tokens=20", "every new token is held as well"),
        ("kivi(bits=4, recent=64)", "236 encoded, the newest 64 in full precision"),
        ("snapkv + threshold @ tokens=50", "at most 50 of 300 tokens are held"),
    ],
)
def test_what_is_encoded_and_what_decoding_adds_is_said(plan: str, line: str) -> None:
    assert line in asked("show", plan, "--model", "demo", "--tokens", "300")[1]


@pytest.mark.parametrize(("size", "above"), [("100KiB", True), ("1GiB", False)])
def test_a_cache_above_its_bytes_is_said(size: str, above: bool) -> None:
    text = asked("show", f"snapkv @ bytes={size}", "--model", "demo", "--tokens", "300")[1]
    assert (f"more than the {size[:-3]} {size[-3:]} of bytes=" in text) is above


def test_no_time_is_said_that_nobody_measured() -> None:
    plan = "kivi(bits=4) + disk"
    found, text = asked("show", plan, "--model", "demo", "--tokens", "1000")
    assert " ms" not in text and "come in each step" in text
    forecast = found["forecast"]
    assert forecast["step_seconds"] is forecast["link_seconds"] is forecast["compute_seconds"] is None
    found, text = asked("show", plan, "--model", "demo", "--tokens", "1000", "--link", "1M")
    assert found["forecast"]["link_seconds"] == pytest.approx(found["forecast"]["bytes_moved"] / 1e6)
    assert found["forecast"]["step_seconds"] is None and "predicted step" not in text and "the link alone takes" in text
    assert (
        "predicted step"
        in asked("show", plan, "--model", "demo", "--tokens", "900", "--link", "1M", "--step-ms", "8")[1]
    )
    # Nothing comes where nothing lives elsewhere, so there is no step to speak of.
    assert "step" not in asked("show", "snapkv @ keep=0.5", "--model", "demo", "--tokens", "1000")[1]


def test_what_comes_is_what_is_held_and_encoded() -> None:
    """A quarter is held, of which the tail never leaves the device."""
    whole, part = (
        asked("show", f"{plan} + kivi(bits=4) + disk{budget}", "--model", "demo", "--tokens", "2000")[0]
        for plan, budget in (("position", " @ keep=1.0"), ("snapkv", " @ keep=0.25"))
    )
    each = part["closed_form"]["bytes_per_token"]
    assert part["forecast"]["bytes_moved"] == pytest.approx((500 - 32) * each, rel=1e-6)
    assert part["forecast"]["bytes_resident"] == 32 * part["closed_form"]["full_bytes_per_token"]
    assert whole["forecast"]["bytes_moved"] == pytest.approx((2000 - 128) * each, rel=1e-6)


@pytest.mark.parametrize("words", [["--link", "1M"], ["--step-ms", "5"], ["--link", "1M", "--step-ms", "5"]])
def test_rates_without_a_length_are_refused(words: list[str]) -> None:
    done = CliRunner().invoke(main, ["show", "kivi4", "--model", "demo", *words])
    assert done.exit_code == 2 and "need --tokens" in done.output


NEWEST = r"nothing but the newest"
NOTED = [
    ("snapkv @ tokens=16", [], "the budget is 16 per kv head, and the score always keeps the newest 32"),
    ("snapkv @ tokens=32", [], NEWEST),
    ("snapkv @ tokens=33", [], None),
    ("snapkv @ keep=0.1", [], "prompts of up to 329 tokens"),
    (
        "snapkv @ keep=0.1",
        ["--tokens", "329"],
        "the newest 32 of 329 tokens is held, no first token (the budget is 32 per kv head",
    ),
    ("snapkv @ keep=0.1", ["--tokens", "330"], None),
    ("position @ tokens=4", [], None),
    ("snapkv @ bytes=1MiB", [], None),
    ("snapkv @ bytes=20KiB", ["--model", "demo"], NEWEST),
    ("snapkv @ tokens=64", ["--tokens", "64"], "nothing will be evicted"),
    ("snapkv @ tokens=64", ["--tokens", "65"], None),
    ("snapkv @ keep=1.0", [], "nothing will be evicted"),
    ("snapkv + threshold @ tokens=64", ["--tokens", "64"], "only what threshold drops is evicted"),
    ("snapkv @ bytes=1GiB", ["--model", "demo"], "nothing will be evicted"),
    ("snapkv @ bytes=1GiB", ["--model", "demo", "--tokens", "100"], "nothing will be evicted"),
    ("full", ["--tokens", "64"], None),
    ("quest + indexed", ["--tokens", "64"], None),
]


@pytest.mark.parametrize("verb", ["show", "check"])
@pytest.mark.parametrize(("plan", "words", "note"), NOTED)
def test_a_budget_that_does_little_or_nothing_is_said(verb: str, plan: str, words: list[str], note: str | None) -> None:
    if verb == "show" and "--tokens" in words and "--model" not in words:
        words = [*words, "--model", "demo"]
    found, text = asked(verb, plan, *words)
    said = [each for each in found["notes"] if "newest" in each or "evicted" in each]
    if note is None:
        assert not said
    else:
        assert any(note in each for each in said) and note in text


@pytest.mark.parametrize("computes", [True, False])
def test_bytes_are_those_of_the_checkpoints_dtype_whatever_this_cpu_computes_in(computes: bool, monkeypatch) -> None:
    """But for the model's own windows, which are as the model computes them."""
    from kvtailor.hf.model import loading

    monkeypatch.setattr(loading, "cpu_computes", lambda dtype: computes or dtype is not torch.bfloat16)
    found, said = asked("show", "kivi4", "--model", "demo", "--tokens", "300")
    model, _ = load("demo")
    assert found["size"]["total"] == kvtailor.cache_size(model, "kivi4", context=300).total
    assert found["sizes"]["dtype"] == "bfloat16" and "own windows" not in said
    assert (model.dtype is torch.bfloat16) == computes


def test_rates_are_not_passed_over_where_nothing_comes_over_a_link() -> None:
    text = asked("show", "kivi4", "--model", "demo", "--tokens", "300", "--link", "2GiB", "--step-ms", "40")[1]
    assert "nothing comes over a link in a step" in text
    assert "over a link" not in asked("show", "kivi4", "--model", "demo", "--tokens", "300")[1]
