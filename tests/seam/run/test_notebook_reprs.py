"""What plans, caches, ledgers and results show of themselves: one true line, and a table for notebooks."""

import re
from dataclasses import replace

import pytest
import torch

import kvtailor
from kvtailor.hf.versions import hand_cache
from kvtailor.ledger import Ledger
from kvtailor.ops.notebook_html import Share, Strong, html_block, html_table
from kvtailor.plan import Plan
from tests.support.fitting.made_fits import made_fit

PLAN = "snapkv(window=6) + adakv + kivi(bits=4) @ tokens=16"


@pytest.fixture(scope="module")
def demo():
    return kvtailor.load_model("demo")


@pytest.fixture(scope="module")
def cache(demo):
    model, tokenizer = demo
    cache = kvtailor.cache_for(model, PLAN)
    inputs = tokenizer("The old mill stood in the village. " * 12, return_tensors="pt")
    model.generate(**inputs, **hand_cache(cache), max_new_tokens=3, do_sample=False)
    return cache


def cells(html):
    return [re.sub("<[^>]*>", " ", cell).strip() for cell in re.findall(r"<td[^>]*>(.*?)</td>", html)]


def test_a_plan_shows_every_stage_and_its_arguments():
    plan = Plan.parse(PLAN)
    html = plan._repr_html_()
    shown = cells(html)
    assert [shown[i] for i in range(0, len(shown), 4)] == list(plan.parts)
    assert [shown[i + 1] for i in (0, 4, 16)] == ["snapkv", "adakv", "kivi"] and "bits=4" in shown
    assert "<strong>snapkv</strong>" in html and "<strong>topk</strong>" not in html
    assert "Nothing is evicted." in Plan()._repr_html_()


def test_a_ledger_is_one_line_and_its_numbers_are_those_that_were_read(cache):
    ledger = cache.ledger()
    text = repr(ledger)
    assert text.startswith(
        f"Ledger({ledger.total} of {ledger.full} bytes, ratio={ledger.ratio:.3f}, seen={ledger.seen}"
    )
    for name, size in ledger.by_stage.items():
        assert (f"{name}={size}" in text) == bool(size)
    assert "closed_form" not in text, "it is the total itself"
    wrong = Ledger(**{**vars(ledger), "closed_form": ledger.total + 1})
    assert f"closed_form={ledger.total + 1}" in repr(wrong)
    empty = Ledger(total=0, by_stage={}, by_tier={}, by_layer=[0], closed_form=0, full=0, seen=0, held=None)
    assert repr(empty) == "Ledger(0 of 0 bytes, seen=0)" and "–" in empty._repr_html_()


def test_a_cache_shows_its_ledger_and_its_plan(cache, demo):
    html = cache._repr_html_()
    assert str(cache.plan) in html and f"{100 * cache.ledger().ratio:.1f} %" in html
    fresh = kvtailor.cache_for(demo[0], "full")
    assert "tokens seen" not in fresh._repr_html_() and repr(fresh) == "KvCache('full', seen=0)"


def test_sizes_and_answers(demo):
    size = kvtailor.cache_size(demo[0], PLAN, context=200)
    assert repr(size).startswith(f"CacheSize('{size.plan}', context=200, batch=1, new_tokens=0: ")
    assert f"of {size.full})" in repr(size) and "before any run" in size._repr_html_()
    answers = kvtailor.ask(
        demo[0], demo[1], "The mill is old. " * 20, ["<b>Who?</b>"], plan="knorm @ keep=0.5", max_new_tokens=2
    )
    assert "&lt;b&gt;Who?&lt;/b&gt;" in answers._repr_html_() and "<b>" not in answers._repr_html_()
    assert repr(answers).startswith("Answers('knorm @ keep=0.5', {'<b>Who?</b>': ")


def test_generated_says_what_was_counted(demo):
    ids = torch.randint(3, 90, (1, 40), generator=torch.Generator().manual_seed(1))
    found = kvtailor.generate(demo[0], ids, plan="knorm @ keep=0.5", max_new_tokens=4)
    assert repr(found).startswith(
        f"Generated(sequences={tuple(found.sequences.shape)}, tokens={found.statistics.tokens}, "
    )
    assert "acceptance" in found._repr_html_()


def test_cells_are_escaped_and_bars_have_bounds():
    html = html_table([["<i>", Strong("a & b"), Share("150 %", 1.5), None]], ["<h>"])
    assert "<i>" not in html and "&lt;i&gt;" in html and "a &amp; b" in html and "&lt;h&gt;" in html
    assert "width:120px" in html and "width:0px" in html_table([[Share("-", -1.0)]])
    assert "–" in html and "1 note<" in html_block("t", notes=["n"]) and "details" not in html_block("t")


def test_a_fit_shows_its_plan_and_the_plans_beside_it():
    found = made_fit()
    html, text = found._repr_html_(), repr(found)
    assert text.startswith(f"Fit({found.model!r}, {found.plan!r}, {found.chosen.bytes} of {found.full} bytes at ")
    assert "\n" not in text and "the plan" in cells(html)
    assert [each.label for each in found.proof if each.label not in cells(html)] == []
    assert any(not each.bytes for each in found.proof) and "0 B" not in cells(html), "not measured is a dash"
    unknown = replace(found, model="<b>mine</b>")
    assert "<b>" not in unknown._repr_html_() and "&lt;b&gt;mine" in unknown._repr_html_()
