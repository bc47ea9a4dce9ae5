"""A forward that begins at a later layer gives what a whole one gives, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvtailor
from kvtailor.errors import CacheMisuse
from kvtailor.hf.run.feeding import fed
from kvtailor.hf.run.kept_prompt import KeptPrompt, fill, keep
from kvtailor.hf.run.later_layers import answering_layers, begin_later, first_change, record
from kvtailor.plan import Plan
from tests.support.seam.layer_kinds import hybrid_configs
from tests.support.seam.zoo import COMPRESSIBLE, VOCABULARY, build, prompts

LAYERS = 4
FOLLOWING = torch.arange(7, 18)[None] % VOCABULARY


def coded(layers: int, at: int) -> str:
    """The plan whose layer number `at`, of those that are compressed, holds codes of few bits, and the others none."""
    if layers == 1:
        return "kivi(bits=2, group=8, recent=8)"
    each = [int(layer == at) for layer in range(layers)]
    return f"by_layer(of=[plain, kivi(bits=2, group=8, recent=8)], layers={each})"


def cut(layers: int, at: int) -> str:
    """The plan whose layer number `at` alone drops tokens."""
    weights = [0.25 if layer == at else 1.0 for layer in range(layers)]
    return f"snapkv(window=4) + table(weights={weights}) @ keep={sum(weights) / layers:.12g}"


def filled(model: Any, plan: str, kept: KeptPrompt) -> Any:
    cache = kvtailor.cache_for(model, plan)
    fill(cache, kept)
    return cache


@pytest.fixture(params=COMPRESSIBLE)
def prompted(request: pytest.FixtureRequest) -> tuple[Any, KeptPrompt]:
    """A model of one family and a prompt that has gone through it."""
    model = build(request.param)
    with torch.inference_mode():
        return model, keep(model, prompts((41,))[0], Plan.parse("snapkv(window=4) @ keep=0.5").needs)


@torch.inference_mode()
def test_logits_are_those_of_a_whole_forward(prompted: tuple[Any, KeptPrompt]) -> None:
    model, kept = prompted
    whole = filled(model, "full", kept)
    layers = answering_layers(model, whole)
    if layers is None:
        pytest.skip("its layers read what others hold, or keep states")
    compressed = whole.geometry.compressed
    with record(layers) as answers:
        fed(model, whole, FOLLOWING, None, keep=0)
    assert len(answers) == len(layers)
    changed = 0
    for make in (coded, cut):
        for number, at in enumerate(compressed):
            plan = make(len(compressed), number)
            cache = filled(model, plan, kept)
            assert first_change(cache, kept.cache) == at
            plain = fed(model, cache, FOLLOWING, None, keep=0)
            changed += not torch.equal(plain, fed(model, filled(model, "full", kept), FOLLOWING, None, keep=0))
            for first in range(1, min(at, len(layers) - 1) + 1):
                late = filled(model, plan, kept)
                with begin_later(late, layers, answers, first):
                    logits = fed(model, late, FOLLOWING, None, keep=0)
                assert torch.equal(logits, plain)
                with pytest.raises(CacheMisuse, match="began at a later layer"):
                    fed(model, late, FOLLOWING, None, keep=0)
    assert changed == 2 * len(compressed)
    assert all("forward" not in layer.__dict__ for layer in layers)


@torch.inference_mode()
def test_a_forward_that_begins_above_a_change_would_show() -> None:
    model = build("llama", layers=LAYERS)
    kept = keep(model, prompts((41,))[0], Plan().needs)
    whole = filled(model, "full", kept)
    layers = answering_layers(model, whole)
    assert layers is not None
    with record(layers) as answers:
        fed(model, whole, FOLLOWING, None, keep=0)
    plan = coded(LAYERS, 1)
    plain = fed(model, filled(model, plan, kept), FOLLOWING, None, keep=0)
    late = filled(model, plan, kept)
    with begin_later(late, layers, answers, 2):
        wrong = fed(model, late, FOLLOWING, None, keep=0)
    assert not torch.equal(wrong, plain)


def test_layers_with_states_begin_nowhere_else() -> None:
    model = build(next(iter(hybrid_configs())))
    assert answering_layers(model, kvtailor.cache_for(model, "full")) is None


def test_a_plan_that_reads_in_a_way_of_its_own_differs_from_the_first_layer_on() -> None:
    model = build("llama", layers=LAYERS)
    kept = keep(model, prompts((41,))[0], Plan().needs)
    assert first_change(filled(model, "full", kept), kept.cache) == LAYERS
    assert first_change(filled(model, "quest(tokens=16)", kept), kept.cache) == 0
