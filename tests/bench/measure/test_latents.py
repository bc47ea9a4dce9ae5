"""What the bench measures of models that cache latents: layers as one kv head, and no arithmetic it does not know."""

from __future__ import annotations

import torch
from tests.support.seam.latent_zoo import build_latent
from tests.support.seam.zoo import prompts

import kvtailor
from kvtailor.bench.contestant import Contestant
from kvtailor.bench.measure.flops import count
from kvtailor.bench.measure.inside import compare_layers, contents, queries_of
from kvtailor.bench.subject import Subject
from kvtailor.hf.versions import hand_cache


@torch.no_grad()
def test_layers_are_compared_as_the_one_kv_head_that_absorbed_queries_read() -> None:
    model, ids = build_latent("deepseek_v3"), prompts((60,))[0]
    full = kvtailor.cache_for(model, "full")
    with queries_of(full) as asked:
        model(ids, **hand_cache(full))
    last = [type(each)(each.states[:, -1:], each.scaling) for each in asked]
    weights = {}
    for plan in ("full", "snapkv(window=8) @ tokens=20", "vector(bits=8, block_size=4)"):
        cache = kvtailor.cache_for(model, plan)
        model(ids, **hand_cache(cache))
        weights[plan] = compare_layers(contents(full), contents(cache), last)
    same, cut, coded = weights.values()
    assert max(same["key_error"]) == max(same["value_error"]) == 0 and min(same["retained_mass"]) > 0.9999
    assert all(0.05 < share < 0.9999 for share in cut["retained_mass"]) and max(cut["key_error"]) == 0
    assert all(0 < off < 1e-3 for off in (*coded["key_error"], *coded["value_error"]))
    # The mass that the kept tokens have, from the model's own probabilities over expanded keys.
    state = full.engine.states[0]
    part = state.parts()[0]
    keys, _ = state.model.latents.expanded(*part.decode())
    observed = {}
    again = kvtailor.cache_for(model, "full")

    def watch(layer: int, *came) -> None:
        observed.setdefault(layer, (came[2], came[4]))

    with again.guard.observed(watch):
        model(ids, **hand_cache(again))
    query, scaling = observed[0]
    shares = (query[0, :, -1:] @ keys[0].mT * scaling).softmax(-1)
    cache = kvtailor.cache_for(model, "snapkv(window=8) @ tokens=20")
    model(ids, **hand_cache(cache))
    held = contents(cache)[0].held[0]
    assert abs(float(shares[..., held].sum(-1).mean()) - cut["retained_mass"][0]) < 1e-5


def test_arithmetic_that_is_not_known_is_none() -> None:
    """Absorbed and expanded forms cost differently, and which one ran is not counted."""
    subject = Subject(name="tiny", model=build_latent("deepseek_v2"))
    contestant = Contestant.of("snapkv(window=8) @ tokens=20")
    assert count(subject, contestant, prompts((40,))[0], 3) is None
