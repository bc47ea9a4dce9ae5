"""The random control: uniform, and the same however it is asked."""

from __future__ import annotations

import dataclasses

import torch
from tests.support.held_rows import held_of, make_row

from kvtailor.score.random import Random
from kvtailor.types import Held, Needs


def held(tokens: int, layer: int = 0, heads: int = 4) -> Held:
    row = make_row(tokens, heads=heads, group=1, size=2, generator=torch.Generator().manual_seed(0))
    return held_of([row], Needs(), layer=layer)


def test_a_longer_prompt_begins_with_the_same_numbers() -> None:
    assert torch.equal(Random().score(held(500))[..., :63], Random().score(held(63)))


def test_what_was_evicted_before_changes_nothing() -> None:
    whole = held(50)
    some = torch.arange(0, 50, 3)
    part = dataclasses.replace(
        whole,
        keys=whole.keys[:, :, some],
        values=whole.values[:, :, some],
        positions=whole.positions[..., some],
        valid=whole.valid[..., some],
    )
    assert torch.equal(Random().score(part), Random().score(whole)[..., some])


def test_states_layers_and_heads_draw_apart() -> None:
    draws = [Random().score(held(4000)), Random(state=1).score(held(4000)), Random().score(held(4000, layer=1))]
    lanes = torch.cat([draw[0] for draw in draws])
    agreement = torch.corrcoef(lanes) - torch.eye(lanes.shape[0])
    assert agreement.abs().max() < 0.08


def test_numbers_are_uniform() -> None:
    drawn = Random(state=-7).score(held(20000, heads=1)).flatten()
    assert drawn.min() >= 0 and drawn.max() < 1
    counts = torch.histc(drawn, bins=20, min=0, max=1)
    assert ((counts - 1000).abs() < 150).all()
    neighbours = torch.corrcoef(torch.stack([drawn[1:], drawn[:-1]]))[0, 1]
    assert neighbours.abs() < 0.03
