"""Heads that are cut apart and joined again: a cache goes on as if nothing had happened, under every codec."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.support.calibrated import shipped_for
from tests.support.every_plan import every_plan
from tests.support.other_device.decoding import decode
from tests.support.seam.zoo import build, held_columns, prompts

import kvtailor
from kvtailor.engine.saving import HeadsOf, regroup
from kvtailor.hf.cache import KvCache
from kvtailor.hf.saved_ranks import StandIn

LENGTHS = (190, 61)
PLANS = [
    "snapkv(window=6) + adakv + kivi(bits=4, group=8, recent=8) @ tokens=24, slack=4",
    "h2o(recent=6) + adakv @ tokens=24, slack=4",
    "pairs(window=6, sinks=2) + adakv + asymkv @ tokens=24",
    "unrotated(of=lowrank(heads=2, basis=random))",
    "lowrank(heads=2, only=values, of=vector, basis=random)",
    "minicache(of=vector(bits=8, block_size=40), block_size=40)",
    "think",
    "snapkv(window=6) + adakv + quest(tokens=16, least=1, dense_layers=1) + indexed(page=4) @ tokens=40",
    "snapkv(window=6) + rocket(tokens=24, expect=4) @ tokens=60",
    "kvquant3",
    "full",
]


@pytest.fixture(scope="module", autouse=True)
def _calibrated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with shipped_for([build("llama")], tmp_path_factory.mktemp("calibrations")):
        yield


def filled(plan: str) -> tuple[KvCache, torch.Tensor]:
    """A cache that has seen a padded prompt and some tokens more, and the mask of what it has seen."""
    model = build("llama")
    ids, mask = prompts(LENGTHS)
    cache = kvtailor.prefill(model, ids, mask, plan=plan)
    decode(model, cache, mask, 5)
    mask = torch.nn.functional.pad(mask, (0, 5), value=1)
    # The model lives as long as its cache here.
    cache.model = model
    return cache, mask


def like(cache: KvCache, share: StandIn) -> KvCache:
    """An empty cache of the same model for some of its heads."""
    made = KvCache(cache.plan, cache.geometry, cache.guard.config, share=share)
    for own, state in zip(made.engine.states, cache.engine.states, strict=True):
        own.model = type(own.model)(**{**vars(state.model), "share": share})
    return made


def apart_and_joined(cache: KvCache) -> None:
    """Cut the two heads of each layer apart, and let the layer be made of both again."""
    parts = [like(cache, StandIn(rank, 2)) for rank in range(2)]
    for rank, part in enumerate(parts):
        for own, whole in zip(part.engine.states, cache.engine.states, strict=True):
            regroup(own, [HeadsOf(state=whole, first=rank, count=1)], cache.plan)
    for index, whole in enumerate(cache.engine.states):
        pieces = [HeadsOf(state=part.engine.states[index], first=0, count=1) for part in parts]
        regroup(whole, pieces, cache.plan)


@pytest.mark.parametrize(
    "plan",
    [*PLANS, *(pytest.param(plan, marks=pytest.mark.long) for plan in every_plan().values() if "host" not in plan)],
)
def test_cut_apart_and_joined_it_goes_on(plan: str) -> None:
    (unbroken, mask), (cut, _) = filled(plan), filled(plan)
    apart_and_joined(cut)
    before, after = held_columns(unbroken), held_columns(cut)
    assert all(torch.equal(after[layer], columns) for layer, columns in before.items())
    assert cut.held().tolist() == unbroken.held().tolist() and cut.ledger().full == unbroken.ledger().full
    due, found = (decode(cache.model, cache, mask, 12) for cache in (unbroken, cut))
    assert torch.equal(found[0], due[0])
    # Segments of fewer heads are merged in another order.
    assert torch.allclose(found[1], due[1], atol=2e-5 * float(due[1].abs().max()))
    assert all(torch.equal(held_columns(cut)[layer], columns) for layer, columns in held_columns(unbroken).items())
    # Every storage is still accounted for, in closed form where there is one.
    ledger = cut.ledger()
    assert ledger.closed_form in (None, ledger.total)


def test_parts_of_other_texts_are_refused() -> None:
    (one, _), (other, _) = filled("full"), filled("full")
    decode(other.model, other, torch.nn.functional.pad(prompts(LENGTHS)[1], (0, 5), value=1), 1)
    pieces = [HeadsOf(state=cache.engine.states[0], first=0, count=1) for cache in (one, other)]
    with pytest.raises(ValueError, match="differ in their rows, or in what they have seen"):
        regroup(like(one, StandIn(0, 1)).engine.states[0], pieces, one.plan)


def test_heads_that_share_latents_are_not_divided_unevenly() -> None:
    cache, _ = filled("lowrank(heads=2, basis=random)")
    segment = cache.engine.states[0].stored.segments[0]
    assert segment.sharing == 2
    with pytest.raises(ValueError, match="belong to their group"):
        segment.relaid(segment.layout)
