"""What kvpress keeps, and what ours keep under the same hyper-parameters; the records' origin: `kvpress_kept.md`."""

from __future__ import annotations

import pytest
import torch
from tests.support.kvpress_cases import (
    Pairing,
    cases,
    each_pairing,
    held_of_case,
    probabilities,
    reconstruction,
    recorded,
    states_of,
)
from tests.support.kvpress_recipe import GEOMETRIES

from kvtailor.ops.lanes.rotate import turn
from kvtailor.plan import Plan
from kvtailor.types import Rotation

# kvpress takes means, over a window and over a group, where ours take sums: the order is the same.
SCORES = (
    Pairing(case="knorm two-rows", plan="knorm"),
    Pairing(case="knorm three-heads", plan="knorm"),
    Pairing(case="keydiff two-rows", plan="keydiff"),
    Pairing(case="keydiff three-heads", plan="keydiff"),
    Pairing(case="lagkv s4 l16 two-rows", plan="lagkv(sinks=4, lag=16)"),
    Pairing(case="lagkv s4 l32 three-heads", plan="lagkv(sinks=4, lag=32)"),
    Pairing(case="lagkv s4 l128 one-head", plan="lagkv(sinks=4, lag=128)"),
    Pairing(case="tova two-rows", plan="tova"),
    Pairing(case="tova one-head", plan="tova"),
    Pairing(case="snapkv w8 k5 two-rows", plan="snapkv(window=8, kernel=5)"),
    Pairing(case="snapkv w16 k7 two-rows", plan="snapkv(window=16, kernel=7)"),
    Pairing(case="snapkv w1 k1 two-rows", plan="snapkv(window=1, kernel=1)"),
    Pairing(case="snapkv w32 k3 three-heads", plan="snapkv(window=32, kernel=3)"),
    Pairing(case="snapkv w8 k5 three-heads", plan="snapkv(window=8, kernel=5)"),
    Pairing(case="snapkv w64 k5 one-head", plan="snapkv(window=64, kernel=5)"),
    Pairing(case="snapkv w8 k7 ungrouped", plan="snapkv(window=8, kernel=7)"),
    Pairing(case="h2o two-rows", plan="h2o(recent=0, normalise=true)"),
    Pairing(case="h2o three-heads", plan="h2o(recent=0, normalise=true)"),
    Pairing(case="h2o ungrouped", plan="h2o(recent=0, normalise=true)"),
    Pairing(case="streaming s4 two-rows", plan="position(sinks=4)"),
    Pairing(case="streaming s1 three-heads", plan="position(sinks=1)"),
    Pairing(case="expected two-rows", plan="expected(sinks=4, future=512)"),
    Pairing(case="expected f64 e0.02", plan="expected(sinks=4, future=64, epsilon=0.02)"),
    Pairing(case="expected mean only", plan="expected(sinks=2, future=16, covariance=false, value_norm=false)"),
)
# kvpress normalises over a layer, which leaves the order as it is. Its sketch of leverage is wider than a key here, so
# that ours is none, and two of its own draws differ by up to 0.007 standard deviations.
DRAWN = 0.01
LEVERAGE = (
    Pairing(case="noncausal c9 two-rows", plan="noncausal(chunk=9)"),
    Pairing(case="noncausal c100 one-head", plan="noncausal(chunk=100)"),
    Pairing(case="noncausal c13 ungrouped", plan="noncausal(chunk=13)"),
    Pairing(case="leverage two-rows", plan="leverage", noise=DRAWN),
    Pairing(case="leverage three-heads", plan="leverage", noise=DRAWN),
    Pairing(case="compactor c25 three-heads", plan="compactor(chunk=25, blending=0.35)", noise=DRAWN),
    Pairing(case="compactor s2 r1 ungrouped", plan="compactor(chunk=31, blending=1.5, sinks=2, recent=1)", noise=DRAWN),
    Pairing(case="cur two-rows", plan="cur"),
    Pairing(case="cur w7 mean three-heads", plan="cur(of=mean, window=7)"),
    Pairing(case="cur whole keys", plan="cur(of=keys, window=0)"),
    Pairing(case="capkv two-rows", plan="capkv"),
    Pairing(case="capkv t2 f64 three-heads", plan="capkv(tau=2.0, future=64, sinks=2)"),
    Pairing(case="capkv ungrouped", plan="capkv"),
    Pairing(case="finch w7 two-rows", plan="finch(window=7)"),
    Pairing(case="finch w19 three-heads", plan="finch(window=19)"),
    Pairing(case="finch w19 three-heads plain", plan="finch(window=19, normalise=false)"),
    Pairing(case="finch w5 ungrouped", plan="finch(window=5)"),
)
# kvpress's epsilon stands beside a mean over group and window; ours is the same number, whatever our scores sum.
CRITICAL = (
    Pairing(case="critical h2o two-rows", plan="critical(of=h2o(recent=0, normalise=true))"),
    Pairing(case="critical h2o first 0.25", plan="critical(of=h2o(recent=0, normalise=true), first=0.25)"),
    Pairing(case="critical snapkv three-heads", plan="critical(of=snapkv(window=8, kernel=5))"),
)
# Of two layers the file holds the kept sets alone.
KEPT_ONLY = (
    Pairing(case="lagkv s0 l64 two-layers", plan="lagkv(sinks=0, lag=64)"),
    Pairing(case="lagkv s4 l128 too short", plan="lagkv(sinks=4, lag=128)"),
    Pairing(case="qfilters two-layers", plan="qfilters"),
    Pairing(case="leverage two-layers", plan="leverage"),
    Pairing(case="compactor by ratio", plan="compactor(chunk=47)"),
    Pairing(case="cur values two-layers", plan="cur(of=values, sinks=2)"),
)


@each_pairing(*SCORES, *LEVERAGE, *CRITICAL, *KEPT_ONLY)
def test_the_same_tokens_stay(pairing: Pairing) -> None:
    pairing.check_kept()


@each_pairing(*SCORES, *LEVERAGE)
def test_tokens_rank_alike_at_every_budget(pairing: Pairing) -> None:
    pairing.check_order()


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_rebuilt_states_are_those_that_kvpress_saw(name: str) -> None:
    geometry = GEOMETRIES[name]
    said = recorded()["geometries"][name]
    assert said == {key: value for key, value in vars(geometry).items() if key in said} and len(said) == 8
    spots = torch.tensor([0, geometry.tokens // 2, geometry.tokens - 1])
    for layer, seen in enumerate(recorded()["witness"][name]):
        states = states_of(geometry, layer)
        mass = probabilities(states.queries, states.keys, geometry.scaling)[-1, -1, -1].sum(0).float()
        torch.testing.assert_close(states.keys[-1, -1][spots, :4], torch.tensor(seen["keys"]), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(states.values[-1, -1][spots, :4], torch.tensor(seen["values"]), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mass[spots], torch.tensor(seen["mass"]), rtol=1e-4, atol=1e-4)


@each_pairing(*CRITICAL)
def test_weighed_scores_rank_alike_at_the_recorded_budget(pairing: Pairing) -> None:
    pairing.check_order()


@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("snapkv w8 k5 two-rows", "snapkv(window=8, kernel=5)"),
        ("snapkv w8 k5 two-rows", 'snapkv(window=8, kernel=5, reduce="sum")'),
        ("snapkv w32 k3 three-heads", "snapkv(window=32, kernel=3)"),
        ("snapkv w64 k5 one-head", "snapkv(window=64, kernel=5)"),
        ("snapkv w1 k1 two-rows", "snapkv(window=1, kernel=1)"),
        ("h2o two-rows", "h2o(recent=0, normalise=true)"),
        ("h2o three-heads", "h2o(recent=0, normalise=true)"),
        ("tova one-head", "tova"),
        ("expected mean only", "expected(sinks=2, future=16, covariance=false, value_norm=false)"),
    ],
)
def test_epsilon_stands_beside_the_published_score(case: str, line: str) -> None:
    """kvpress adds 1e-4 to its own score, which the file holds, and multiplies by the norm of the projected value."""
    found, plan = cases()[case], Plan.parse(f"critical(of={line}, first=0) @ tokens=64")
    assert found.scores is not None and plan.score is not None
    held = held_of_case(found.geometry, 0, plan.score.needs, 64)
    projected = held.values[:, :, None].double() @ held.output.double().unflatten(0, (found.geometry.heads, -1))
    expected = (found.scores[0] + 1e-4) * projected.abs().sum(-1).mean(2)
    ours = plan.score.score(held).double()
    # What must stay (a window, sinks) is lifted by both, each in its own way.
    sinks = getattr(plan.score.of, "sinks", 0)
    free = slice(sinks, found.geometry.tokens - plan.score.recent)
    factor = (ours / expected)[..., free]
    assert expected[..., free].min() > 0 and float(found.scores[0][..., free].median()) < 0.03
    torch.testing.assert_close(factor, factor[:1, :1, :1].expand_as(factor), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("case", "line", "factor"),
    [
        ("snapkv w8 k5 two-rows", "snapkv(window=8, kernel=5) @ tokens=8", 8.0),
        ("h2o two-rows", "h2o(recent=0, normalise=true) @ tokens=8", 2.0),
    ],
)
def test_scores_differ_by_a_mean_and_a_sum_alone(case: str, line: str, factor: float) -> None:
    found, scorer = cases()[case], Plan.parse(line).score
    assert found.scores is not None and scorer is not None
    free = slice(0, found.geometry.tokens - scorer.recent)
    held = held_of_case(found.geometry, 0, scorer.needs, 8)
    ours = scorer.score(held)[..., free]
    said = scorer.attention_scale(held, group=found.geometry.query_heads // found.geometry.heads)
    assert said is not None and said.tolist() == [factor] * found.geometry.rows
    torch.testing.assert_close(ours, factor * found.scores[0][..., free], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("case", "chunk"), [("kvzip per layer c2048", 2048), ("kvzip all layers c100", 100)])
def test_the_rebuilt_repetition_is_the_one_that_kvpress_saw(case: str, chunk: int) -> None:
    """The evidence for KVzip. Its sinks are forced, so the kept set is the pool of the rest."""
    found = cases()[case]
    ours = torch.stack([reconstruction(found.geometry, layer, chunk=chunk) for layer in range(found.geometry.layers)])
    if found.scores is not None:
        torch.testing.assert_close(ours, found.scores, rtol=1e-3, atol=1e-6)
        return
    pool = ours.masked_fill(torch.arange(found.geometry.tokens) < 4, torch.inf).flatten()
    kept = torch.zeros_like(pool, dtype=torch.bool)
    kept[pool.topk(int(found.kept[60].sum())).indices] = True
    assert torch.equal(kept.view(ours.shape), found.kept[60])


def test_keys_turned_to_their_slots_are_those_of_kvpress() -> None:
    case = cases()["rolling s4 two-rows"]
    kept = torch.nonzero(case.kept[20][0, 0, -1])[:, 0]
    keys = states_of(case.geometry, 0).keys[0, -1, kept]
    turned = turn(keys, torch.arange(20) - kept, Rotation(frequencies=case.geometry.frequencies))
    assert case.returned_keys is not None
    torch.testing.assert_close(turned, case.returned_keys, rtol=1e-4, atol=1e-4)
