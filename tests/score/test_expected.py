"""Expected Attention against sampled queries, and against hand-worked numbers."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from tests.support.calibrated import tiny
from tests.support.held_rows import held_of, make_row

import kvtailor
from kvtailor.calibration.passages import cut
from kvtailor.calibration.watching import watched
from kvtailor.hf.versions import hand_cache
from kvtailor.ops.lanes.rotate import turn, turn_on_average
from kvtailor.plan import Plan
from kvtailor.score.expected import Expected
from kvtailor.types import Held, Moments, Needs, Rotation, Softmax


def held_by_hand(*, mean: list[float], spread: list[list[float]], keys: list[list[float]]) -> Held:
    """One row and head, one query head, values of norm 1, five queries seen, no rotation to speak of."""
    n = len(keys)
    return Held(
        keys=torch.tensor(keys)[None, None],
        values=torch.tensor([0.6, 0.8]).expand(1, 1, n, 2),
        positions=torch.arange(n)[None, None],
        valid=torch.ones(1, 1, n, dtype=torch.bool),
        first=torch.zeros(1, dtype=torch.int64),
        seen=n,
        layer=0,
        layers=1,
        scaling=0.5,
        moments=Moments(
            count=torch.tensor([5.0]), mean=torch.tensor(mean)[None, None], spread=5 * torch.tensor(spread)[None, None]
        ),
        rotation=Rotation(frequencies=torch.zeros(1)),
    )


def test_the_closed_form_by_hand() -> None:
    """Logits 0.5 k.m + 0.125 k.Sk: of (1, 0) 0.5 + 0.5; of (0, 2) -1 + 0.5; of (1, 1) 0 + 0.875."""
    held = held_by_hand(mean=[1.0, -1.0], spread=[[4.0, 1.0], [1.0, 1.0]], keys=[[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    weights = [math.exp(1.0), math.exp(-0.5), math.exp(0.875)]
    expected = torch.tensor(weights) / sum(weights)
    torch.testing.assert_close(Expected(sinks=0).score(held)[0, 0], expected)
    mean_only = [math.exp(0.5), math.exp(-1.0), math.exp(0.0)]
    found = Expected(sinks=0, covariance=False).score(held)[0, 0]
    torch.testing.assert_close(found, torch.tensor(mean_only) / sum(mean_only))


def test_sinks_take_no_share_of_the_attention() -> None:
    """As by hand above, but the second and third token alone share it."""
    held = held_by_hand(mean=[1.0, -1.0], spread=[[4.0, 1.0], [1.0, 1.0]], keys=[[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    shares = torch.tensor([math.exp(-0.5), math.exp(0.875)])
    found = Expected(sinks=1).score(held)[0, 0]
    torch.testing.assert_close(found[1:], shares / shares.sum())
    assert found[0] > found[1:].amax()


def test_it_is_the_mean_over_normal_queries() -> None:
    """A million draws of the turned normal distribution, exponentiated and averaged, for one position to come."""
    generator = torch.Generator().manual_seed(0)
    rotation = Rotation(frequencies=torch.tensor([0.7, 0.05]))
    mean, half = torch.randn(4, generator=generator) * 0.5, torch.randn(4, 4, generator=generator) * 0.4
    keys = torch.randn(6, 4, generator=generator)
    held = dataclasses.replace(
        held_by_hand(mean=mean.tolist(), spread=(half @ half.T).tolist(), keys=keys.tolist()), rotation=rotation
    )
    drawn = mean + torch.randn(1_000_000, 4, generator=generator) @ half.T
    turned = turn(drawn, torch.full((1,), held.seen), rotation)
    weights = torch.exp(0.5 * turned @ keys.T).mean(0)
    found = Expected(sinks=0, future=1).score(held)[0, 0]
    torch.testing.assert_close(found, weights / weights.sum(), rtol=2e-2, atol=0)


def test_the_mean_rotation_is_that_of_all_positions_to_come() -> None:
    rotation = Rotation(frequencies=torch.tensor([1.0, 0.1]), interleaved=True)
    states, positions = torch.randn(3, 5), torch.arange(40, 71)
    each = torch.stack([turn(states, p, rotation) for p in positions])
    torch.testing.assert_close(turn_on_average(states, positions, rotation), each.mean(0), rtol=1e-5, atol=1e-6)


def test_sinks_come_first_and_values_count() -> None:
    rows = [make_row(n, heads=2, group=3, size=8, generator=torch.Generator().manual_seed(n)) for n in (40, 21)]
    scorer = Expected(sinks=3)
    held = held_of(rows, scorer.needs)
    scores = scorer.score(held)
    for row, pad in enumerate((0, 19)):
        assert (scores[row, :, pad : pad + 3].amin(-1) > scores[row, :, pad + 3 :].amax(-1)).all()
    louder = dataclasses.replace(held, values=held.values * 2)
    torch.testing.assert_close(scorer.score(louder)[:, :, 22:], 2 * scores[:, :, 22:])
    quiet = Expected(sinks=3, value_norm=False)
    torch.testing.assert_close(quiet.score(louder), quiet.score(held))


def test_it_refuses_what_makes_no_sense() -> None:
    for wrong in ({"future": 0}, {"sinks": -1}, {"epsilon": -1.0}):
        with pytest.raises(ValueError, match="expected: "):
            Expected(**wrong)
    row = make_row(9, heads=2, group=1, size=8, generator=torch.Generator())
    with pytest.raises(ValueError, match="moments"):
        Expected().score(held_of([row], Needs()))


def test_calibrated_statistics_are_those_of_all_texts_and_score_as_the_prompts_would(tmp_path: Path) -> None:
    """The file against the plain mean and covariance of all unturned queries; its scores against a prompt of these."""
    subject = tiny()
    text = "".join(f"word{i} " for i in range(400))
    made = kvtailor.calibrate(subject, "expected", {"t": text}, out=tmp_path / "e.safetensors", tokens=192, context=64)
    passages, queries = cut(subject, {"t": text}, tokens=192, context=64), []
    for passage in passages:
        cache = kvtailor.cache_for(subject.model, "expected @ keep=1.0")
        seen: list[torch.Tensor] = []
        with watched(cache, lambda states, seen=seen: seen.append(states.queries)), torch.no_grad():
            subject.model(passage.ids[None], **hand_cache(cache))
        rotation = cache.engine.states[1].model.rotation
        queries.append(turn(seen[1], -torch.arange(64), rotation)[:, 4:])
    together = torch.cat(queries, 1).double()
    assert made.facts == {"queries": 180}
    for head in range(4):
        mean = together[head].mean(0)
        apart = together[head] - mean
        assert torch.allclose(made.tensors["query_mean"][1, head // 2, head % 2].double(), mean, atol=1e-5)
        spread = made.tensors["query_spread"][1, head // 2, head % 2].double()
        assert torch.allclose(spread, apart.mT @ apart / 180, atol=1e-5)


def test_static_scores_are_those_of_a_prompt_with_the_same_moments_padding_apart() -> None:
    generator = torch.Generator().manual_seed(8)
    scorer, own = Expected(static=True, future=9), Expected(future=9)
    row = make_row(40, heads=3, group=2, size=7, generator=generator)
    example = Expected.example_calibration(layers=1, heads=3, group=2, size=7, generator=generator)
    calibration = {name: tensor[0] for name, tensor in example.items()}
    held = held_of([row], own.needs, calibration=calibration)
    count = held.moments.count
    spread = calibration["query_spread"].flatten(0, 1)[None] * count[:, None, None, None]
    moments = Moments(count=count, mean=calibration["query_mean"].flatten(0, 1)[None], spread=spread)
    expected = own.score(dataclasses.replace(held, moments=moments))
    torch.testing.assert_close(scorer.score(dataclasses.replace(held, moments=None)), expected)
    assert not torch.allclose(own.score(held), expected)
    # Left padding is no position: a padded row scores as it does alone.
    longer = make_row(63, heads=3, group=2, size=7, generator=generator)
    batch = held_of([longer, row], scorer.needs, calibration=calibration)
    torch.testing.assert_close(scorer.score(batch)[1, :, 23:], expected[0], rtol=1e-4, atol=1e-6)
    shifted = dataclasses.replace(batch, first=torch.zeros_like(batch.first))
    assert not torch.allclose(scorer.score(shifted)[1, :, 27:], expected[0][:, 4:], rtol=1e-3)


def test_static_refusals() -> None:
    with pytest.raises(ValueError, match="write static=true too"):
        Expected(file="e.safetensors")
    held = held_of([make_row(9, heads=3, group=2, size=7, generator=torch.Generator())], Expected(static=True).needs)
    with pytest.raises(ValueError, match="see `kvtailor calibrate expected`"):
        Expected(static=True).score(held)
    capped = Softmax(softcap=30.0)
    assert Plan.parse("expected(static=true) @ keep=0.5").softmax_faults(capped)
