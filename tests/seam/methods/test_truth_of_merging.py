"""Truth of merging: the logits are those of a full cache whose dropped tokens were folded by hand, in every layer."""

from __future__ import annotations

import cmath
import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor

import kvtailor
from kvtailor.hf.versions import hand_cache
from kvtailor.merge.drop import Drop
from kvtailor.merge.matching import Matching
from tests.support.crossed import crossed
from tests.support.fit_by_hand import fit_by_hand
from tests.support.seam.folded import FoldedReference, Lane, Token
from tests.support.seam.zoo import build, error, held_columns, prompts


def d2o(lane: Lane) -> list[Token]:
    """Each token over the mean goes to the kept key that it resembles most; the counts are exp(cosine), and e."""
    if not lane.gone:
        return lane.stays
    nearest: list[tuple[float, Token]] = []
    for token in lane.gone:
        cosines = [float(token.key @ kept.key / (token.key.norm() * kept.key.norm())) for kept in lane.stays]
        nearest.append((max(cosines), lane.stays[cosines.index(max(cosines))]))
    threshold = sum(u for u, _ in nearest) / len(nearest)
    found = []
    for kept in lane.stays:
        joining = [
            (math.exp(u), token)
            for (u, at), token in zip(nearest, lane.gone, strict=True)
            if at is kept and u >= threshold
        ]
        total = math.e + sum(count for count, _ in joining)
        key = (math.e * kept.key + sum(count * token.key for count, token in joining)) / total
        value = (math.e * kept.value + sum(count * token.value for count, token in joining)) / total
        found.append(Token(kept.column, key, value))
    return found


def cam(share: int):
    def fold(lane: Lane) -> list[Token]:
        received = dict(zip([t.column for t in lane.tokens], lane.attention().mean((0, 1)).tolist(), strict=True))
        found = [Token(kept.column, kept.key, kept.value.clone()) for kept in lane.stays]
        for token in lane.gone:
            following = [kept for kept in found if kept.column > token.column][:share]
            if following:
                near = [received[kept.column] for kept in following]
                certain = min(1.0, received[token.column] / (sum(near) / len(near)))
                for kept in following:
                    kept.value += certain / len(following) * token.value
        return found

    return fold


def asymkv(family: str):
    """Runs of dropped tokens join the kept one before them; derivatives of the output weigh the keys."""
    planes = {"llama": 8, "gpt_neox": 2}[family]

    def turned(key: Tensor, by: int) -> Tensor:
        found = key.clone()
        for plane in range(planes):
            angle = by * 10000.0 ** (-plane / planes)
            one = complex(key[plane], key[plane + planes]) * cmath.exp(1j * angle)
            found[plane], found[plane + planes] = one.real, one.imag
        return found

    def fold(lane: Lane) -> list[Token]:
        shares = lane.attention()
        values = torch.stack([token.value for token in lane.tokens])
        apart = (values - (shares @ values)[..., None, :]).square().sum(-1)
        fisher = torch.einsum("gwn,gwd->nd", (shares * lane.scaling).square() * apart, lane.queries.square())
        groups: list[list[int]] = [[]]
        begun = False
        for number, token in enumerate(lane.tokens):
            if token.column in lane.kept and begun:
                groups.append([])
            groups[-1].append(number)
            begun |= token.column in lane.kept
        found = []
        for group in groups:
            kept = next(lane.tokens[i] for i in group if lane.tokens[i].column in lane.kept)
            if len(group) == 1:
                found.append(kept)
                continue
            weight = sum(lane.tokens[i].weight for i in group)
            value = sum(lane.tokens[i].weight * lane.tokens[i].value for i in group) / weight
            keys = [turned(lane.tokens[i].key, kept.column - lane.tokens[i].column) for i in group]
            key = sum(fisher[i] * k for i, k in zip(group, keys, strict=True)) / fisher[group].sum(0)
            found.append(Token(kept.column, key, value, weight))
        return found

    return fold


def matching(merger: Matching):
    """What the newest queries see of all but the newest tokens, which stay in the tail, is fitted."""

    def fold(lane: Lane) -> list[Token]:
        newest = set(range(lane.tokens[-1].column - 5, lane.tokens[-1].column + 1))
        given = lane.attention().flatten(0, 1).numpy()
        values = torch.stack([token.value for token in lane.tokens]).numpy()
        fixed = np.array([token.column in newest for token in lane.tokens])
        opened = np.array([token.column in lane.kept for token in lane.tokens]) & ~fixed
        if not opened.any():
            return lane.stays
        sides = [(given[:, each].sum(-1), given[:, each] @ values[each]) for each in (~fixed, fixed)]
        factors, new, dropping, fitting = fit_by_hand(merger, given[:, opened], *sides[0], *sides[1], values[opened])
        if fitting >= dropping:
            return lane.stays
        found = [token for token in lane.tokens if token.column in lane.kept - newest]
        changed = [
            Token(token.column, token.key, torch.from_numpy(value), token.weight * factor)
            for token, value, factor in zip(found, new, factors, strict=True)
        ]
        return [*changed, *[token for token in lane.stays if token.column in newest]]

    return fold


MATCHING = "matching(window=6, spread=0, ridge=0.1)"
CASES = {
    f"snapkv(window=6) + {MATCHING} @ tokens=20": matching(Matching(window=6, spread=0, ridge=0.1)),
    f"snapkv(window=6) + adakv + {MATCHING} @ tokens=16, slack=5": matching(Matching(window=6, spread=0, ridge=0.1)),
    "pairs(window=6, sinks=2) + asymkv(window=6) @ tokens=20": asymkv,
    "pairs(window=6, sinks=0) + adakv + asymkv(window=6) @ tokens=16, slack=5": asymkv,
    "snapkv(window=6) + d2o @ tokens=20": d2o,
    "snapkv(window=6) + adakv + d2o @ tokens=20, slack=5": d2o,
    "h2o(recent=4) + cam(share=3, window=6) @ tokens=20, slack=6": cam(3),
    "knorm + adakv + cam(share=40, window=6) @ tokens=20": cam(40),
}


@pytest.mark.parametrize(("family", "plan"), crossed(["llama", "gpt_neox"], CASES))
@torch.no_grad()
def test_logits_equal_a_full_cache_folded_by_hand(family: str, plan: str) -> None:
    worst, plain, folded = differences(family, plan)
    assert folded > 0 and worst < 1e-5
    assert plain > 1e-3, "dropping gives the same, so this test has shown nothing"


def differences(family: str, plan: str, steps: int = 14) -> tuple[float, float, int]:
    """Largest error from the folded reference, largest from the plan that drops, and how often a lane was folded."""
    model = build(family)
    fold = CASES[plan](family) if CASES[plan] is asymkv else CASES[plan]
    reference = FoldedReference(family, fold, window=6)
    ids, mask = prompts((40, 31, 24))
    made = kvtailor.Plan.parse(plan)
    caches = [kvtailor.cache_for(model, each) for each in (made, dataclasses.replace(made, merge=Drop()))]

    def logits_of(tokens: Tensor, cache: kvtailor.KvCache) -> Tensor:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        return model(tokens, attention_mask=mask, **hand_cache(cache), position_ids=positions).logits

    for cache in caches:
        logits_of(ids, cache)
    reference(ids, mask, {})
    worst = plain = 0.0
    # Greedy tokens would repeat themselves, and which of two equal keys is the most similar one is not determined.
    for token in prompts((steps,) * 3, state=2)[0].split(1, 1):
        reference.hold(held_columns(caches[0]))
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        logits, dropped = (logits_of(token, cache) for cache in caches)
        worst = max(worst, error(logits, reference(token, mask, {})))
        plain = max(plain, error(logits, dropped))
    return worst, plain, reference.folded
