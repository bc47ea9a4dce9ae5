"""ATSKV: features against plain loops, the network by hand, and relevance that is mixed over evictions."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from tests.support.held_rows import example_tensors, held_by, held_of, make_row
from tests.support.seam.zoo import build, held_columns, prompts

import kvtailor
from kvtailor.hf.versions import hand_cache
from kvtailor.score.atskv import ATSKV
from kvtailor.types import Held

WINDOW, SINKS = 6, 2
SCORER = ATSKV(window=WINDOW, sinks=SINKS, kernel=1)


def held_rows(*lengths: int) -> Held:
    generator = torch.Generator().manual_seed(4)
    return held_by(SCORER, [make_row(n, heads=3, group=2, size=7, generator=generator) for n in lengths])


def plain_features(held: Held, row: int, head: int) -> list[list[float]]:
    """One token after the other, in Python's own numbers, over the tokens of the row that are real."""
    tokens = [i for i in range(held.keys.shape[2]) if held.valid[row, head, i]]
    keys, values = ([[float(x) for x in states[row, head, i]] for i in tokens] for states in (held.keys, held.values))
    columns = [int(held.positions[row, head, i]) for i in tokens]
    given = []
    for query in (2 * head, 2 * head + 1):
        for w, column in enumerate(held.query_columns.tolist()):
            if column not in columns:
                continue
            asked = [float(x) for x in held.queries[row, query, w]]
            seen = [i for i in range(len(tokens)) if columns[i] <= column]
            logits = {i: held.scaling * sum(a * b for a, b in zip(asked, keys[i], strict=True)) for i in seen}
            most = max(logits.values())
            total = sum(math.exp(x - most) for x in logits.values())
            given.append([math.exp(logits[i] - most) / total if i in logits else 0.0 for i in range(len(tokens))])
    count = len(tokens)
    mean = [sum(each[i] for each in given) / len(given) for i in range(count)]
    most = [max(each[i] for each in given) for i in range(count)]

    def around(i: int, before: int, after: int, width: int) -> float:
        return sum(mean[j] for j in range(max(0, i - before), min(count, i + after + 1))) / width

    logs = [[math.log(max(1e-6, math.dist(x, [0] * len(x)))) for x in states] for states in (keys, values)]
    first, span = int(held.first[row]), held.seen - int(held.first[row])
    found = []
    for i in range(count):
        shares = [mean[i], most[i], *(around(i, k // 2, k // 2, k) for k in (5, 21, 63)), around(i, 8, -1, 8)]
        age = columns[i] - first
        found.append(
            [
                *(math.log(share * count + 0.01) for share in shares),
                *(of[i] - sum(of) / count for of in logs),
                age / span,
                math.log(span - age),
            ]
        )
    return found


@pytest.mark.parametrize("row", [0, 1, 2])
def test_features_equal_plain_loops(row: int) -> None:
    held = held_rows(40, 17, 3)
    for head in (0, 2):
        expected = torch.tensor(plain_features(held, row, head))
        torch.testing.assert_close(SCORER.features(held, row, head), expected, atol=2e-4, rtol=1e-3)


def test_the_network_by_hand() -> None:
    """Two hidden units that read age / span: relu(2 a - 1) and relu(1 - 2 a), of which the output takes 3 and -1."""
    hidden, bias, out = torch.zeros(3, 10, 32), torch.zeros(3, 32), torch.zeros(3, 32)
    hidden[:, 8, 0], hidden[:, 8, 1] = 2.0, -2.0
    bias[:, 0], bias[:, 1] = -1.0, 1.0
    out[:, 0], out[:, 1] = 3.0, -1.0
    network = {"hidden": hidden, "hidden_bias": bias, "out": out, "out_bias": torch.tensor([0.0, 0.5, 0.0])}
    held = dataclasses.replace(held_rows(20), calibration=network, previous=None)
    scores = SCORER.score(held)
    for token in range(SINKS, 20):
        age = token / 20
        logit = 3 * max(0.0, 2 * age - 1) - max(0.0, 1 - 2 * age)
        assert scores[0, 0, token].item() == pytest.approx(1 / (1 + math.exp(-logit)), rel=1e-4)
        assert scores[0, 1, token].item() == pytest.approx(1 / (1 + math.exp(-logit - 0.5)), rel=1e-4)
    assert scores[0, :, :SINKS].tolist() == [[2.0] * SINKS] * 3


def test_relevance_is_mixed_with_that_of_the_walk_before() -> None:
    held = held_rows(20)
    before = torch.rand(1, 3, 20)
    before[..., 15:] = torch.nan
    fresh = SCORER.score(dataclasses.replace(held, previous=torch.full_like(before, torch.nan)))
    mixed = SCORER.score(dataclasses.replace(held, previous=before))
    torch.testing.assert_close(mixed[..., SINKS:15], 0.8 * before[..., SINKS:15] + 0.2 * fresh[..., SINKS:15])
    torch.testing.assert_close(mixed[..., 15:], fresh[..., 15:])
    assert SCORER.needs.window == WINDOW and SCORER.needs.previous
    assert not ATSKV(momentum=0.0).needs.previous


def test_relevance_is_smoothed_over_real_neighbours() -> None:
    held = dataclasses.replace(held_rows(20, 9), previous=None)
    alone = SCORER.score(held)
    alone[..., :SINKS] = torch.nan
    found = dataclasses.replace(SCORER, kernel=3).score(held)
    for token in range(SINKS + 1, 19):
        torch.testing.assert_close(found[0, :, token], alone[0, :, token - 1 : token + 2].mean(-1))
    torch.testing.assert_close(found[0, :, 19], alone[0, :, 18:].sum(-1) / 3)
    torch.testing.assert_close(found[1, :, 15], alone[1, :, 14:17].mean(-1))


def test_sinks_are_those_of_each_row() -> None:
    held = dataclasses.replace(held_rows(20, 9), previous=None)
    scores = SCORER.score(held)
    assert (scores[1, :, 11 : 11 + SINKS] == 2.0).all() and (scores[1, :, 11 + SINKS :] < 1).all()
    assert (scores[0, :, :SINKS] == 2.0).all() and (scores[0, :, SINKS:] < 1).all()


def test_refuses_what_makes_no_sense() -> None:
    for bad, reason in (
        ({"window": 0}, "window must be at least 1"),
        ({"sinks": -1}, "sinks must be 0 or more"),
        ({"momentum": 1.0}, "momentum must be from 0 to below 1"),
        ({"kernel": 4}, "kernel must be odd"),
    ):
        with pytest.raises(ValueError, match=f"atskv: {reason}"):
            ATSKV(**bad)
    held = held_rows(9)
    with pytest.raises(ValueError, match="none was given"):
        SCORER.score(dataclasses.replace(held, calibration=None))
    with pytest.raises(ValueError, match="none were gathered"):
        SCORER.score(dataclasses.replace(held, queries=None))


@torch.no_grad()
def test_sinks_and_window_stay_while_it_is_asked_again_and_again(tmp_path) -> None:
    """A cache of 24 tokens that decodes 80 more: every 32 of them it is cut back, and never to anything else."""
    from tests.support.calibrated import write_file

    model = build("llama")
    tensors = example_tensors(ATSKV(), layers=3, heads=2, group=2, size=16)
    path = write_file(tmp_path / "a.safetensors", "atskv", tensors, model)
    cache = kvtailor.cache_for(model, f"atskv(file='{path}', window=8) @ tokens=24")
    token = model(prompts((60,))[0], **hand_cache(cache)).logits[:, -1:].argmax(-1)
    sizes = []
    for step in range(80):
        token = model(token, **hand_cache(cache)).logits.argmax(-1)
        sizes.append(int(cache.held().max()))
        for state in cache.engine.states:
            held = torch.cat([p.layout.columns(torch.device("cpu"))[:1] for p in state.parts()], 1)
            assert {0, 1, 2, 3} <= set(held[0].tolist()), f"a sink is gone after {step + 1} tokens"
            assert set(range(60 + step + 1 - 8, 60 + step + 1)) <= set(held[0].tolist())
    assert min(sizes) == 24 and max(sizes) == 24 + 32


@torch.no_grad()
def test_a_row_whose_first_chunks_are_padding_alone(tmp_path) -> None:
    """It has no token to score yet, and ends with what it keeps when it is read alone."""
    from tests.support.calibrated import write_file

    model = build("llama")
    tensors = example_tensors(ATSKV(), layers=3, heads=2, group=2, size=16)
    path = write_file(tmp_path / "a.safetensors", "atskv", tensors, model)
    plan = f"atskv(file='{path}', window=8) @ tokens=24, slack=4"
    ids, mask = prompts((100, 40))
    together = held_columns(kvtailor.prefill(model, ids, mask, plan=plan, chunk=20))
    alone = held_columns(kvtailor.prefill(model, ids[1:, -40:], mask[1:, -40:], plan=plan, chunk=20))
    for layer, columns in alone.items():
        assert torch.equal(together[layer][1, :, -40:], columns[0]) and int(columns.sum(-1).max()) == 24
        assert not together[layer][1, :, :-40].any()


def test_it_asks_for_no_mass() -> None:
    assert not ATSKV().needs.mass and ATSKV().recent == 32 and ATSKV().slack == 32
    row = make_row(5, heads=1, group=1, size=2, generator=torch.Generator())
    assert held_of([row], ATSKV().needs).mass is None
