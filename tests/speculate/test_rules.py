"""The verify rule: what it emits is distributed as the target says, and the published error is seen."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from tests.support.chains import Table, chi_square, random_tables, transitions
from torch import Tensor
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from kvtailor.speculate.contract import Acceptance, Proposal, Rule
from kvtailor.speculate.decode import Decoding, Drafting
from kvtailor.speculate.drafts import Hierarchy, Steps
from kvtailor.speculate.lookahead import Controller, Fixed
from kvtailor.speculate.rounds import Level
from kvtailor.speculate.rules import Greedy, Sampling

V = 4


@dataclass(frozen=True, kw_only=True)
class DrawsFromTarget(Sampling):
    """The published error: on a rejection it draws from p, and not from what q lacks of p."""

    def judge(self, target: Tensor, proposal: Proposal) -> Acceptance:
        right = super().judge(target, proposal)
        rows = torch.arange(target.shape[0])
        return Acceptance(accepted=right.accepted, following=self.pick(target[rows, right.accepted]))


def run(rule: Rule, tokens: int, *, inner: Rule | None = None, hierarchy: bool = True, gamma: int = 3, rows: int = 1):
    """A run of table models; `inner`: the rule inside the hierarchy, where it is another."""
    target, middle, small = random_tables(V)
    start = torch.randint(V, (rows, 2), generator=torch.Generator().manual_seed(9))
    for reader in (target, middle, small):
        reader.read(start, 1)
        reader.settle()
    levels = (Level(), Level()) if hierarchy else (Level(),)
    draft = Steps(small, inner or rule)
    if hierarchy:
        draft = Hierarchy(middle, draft, inner or rule, 2, levels[1])
    drafting = Drafting(draft=draft, levels=levels)
    decoding = Decoding(target, rule, Controller(Fixed(tokens=gamma), None), drafting)
    first = torch.zeros(rows, dtype=torch.int64)
    return target, decoding.run(start, first, tokens), decoding.statistics


@pytest.mark.parametrize("hierarchy", [False, True])
def test_sampling_is_the_targets_own(hierarchy: bool) -> None:
    torch.manual_seed(1)
    rule = Sampling(temperature=0.9)
    target, ids, statistics = run(rule, 2_500 if hierarchy else 1_500, hierarchy=hierarchy)
    found = chi_square(transitions(ids[0], V), rule.prediction(target.logits).flatten(0, 1))
    assert found > 1e-3
    assert 0.2 < statistics.acceptance < 0.9 and 1 < statistics.emitted_per_verification < 4


def test_the_chi_square_sees_the_published_error_of_an_inner_rejection() -> None:
    torch.manual_seed(1)
    rule = Sampling(temperature=0.9)
    target, ids, _ = run(rule, 2_500, inner=DrawsFromTarget(temperature=0.9))
    assert chi_square(transitions(ids[0], V), rule.prediction(target.logits).flatten(0, 1)) < 1e-4


def test_small_batches_that_go_in_step_are_the_targets_own() -> None:
    torch.manual_seed(6)
    rule = Sampling()
    target, ids, _ = run(rule, 1_000, rows=3)
    counts = sum(transitions(row, V) for row in ids)
    assert chi_square(counts, rule.prediction(target.logits).flatten(0, 1)) > 1e-3


def test_one_judgement_of_random_distributions() -> None:
    """60,000 rows with the same p and q: what is emitted first is distributed as p, token by token."""
    generator = torch.Generator().manual_seed(7)
    p = torch.randn((2, 11), generator=generator).softmax(-1)
    q = torch.randn((11,), generator=generator).softmax(-1)
    rule, rows = Sampling(generator=generator), 60_000
    prediction = q.expand(rows, 1, 11)
    tokens = rule.pick(prediction)
    judged = rule.judge(p.expand(rows, 2, 11), Proposal(tokens=tokens, prediction=prediction))
    first = torch.where(judged.accepted > 0, tokens[:, 0], judged.following)
    assert chi_square(torch.bincount(first, minlength=11)[None].double(), p[:1]) > 1e-3
    # The one more after an accepted token comes from the target's next distribution.
    bonus = judged.following[judged.accepted == 1]
    assert chi_square(torch.bincount(bonus, minlength=11)[None].double(), p[1:]) > 1e-3
    assert judged.accepted.double().mean().item() == pytest.approx(float(torch.minimum(p[0], q).sum()), abs=0.01)


def test_a_draft_that_says_what_the_target_says_is_never_rejected() -> None:
    p = torch.rand(5, 4, 9).softmax(-1)
    rule = Sampling()
    judged = rule.judge(p, Proposal(tokens=rule.pick(p[:, :3]), prediction=p[:, :3]))
    assert judged.accepted.tolist() == [3] * 5


def test_greedy_by_hand() -> None:
    """The target says 4 7 2 9; the drafts agree on none, one, and all three places."""
    prediction = torch.tensor([[4, 7, 2, 9]] * 3)
    tokens = torch.tensor([[5, 7, 2], [4, 6, 2], [4, 7, 2]])
    judged = Greedy().judge(prediction, Proposal(tokens=tokens, prediction=tokens))
    assert judged.accepted.tolist() == [0, 1, 3]
    assert judged.following.tolist() == [4, 7, 9]


@pytest.mark.parametrize(("top_k", "top_p"), [(None, 0.9), (None, 0.3), (5, 1.0), (7, 0.6), (1, 0.5), (None, 1e-9)])
def test_cuts_as_transformers_does(top_k: int | None, top_p: float) -> None:
    logits = torch.randn(40, 23, generator=torch.Generator().manual_seed(3)) * 2
    expected = logits / 0.7
    if top_k is not None:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    found = Sampling(temperature=0.7, top_k=top_k, top_p=top_p).prediction(logits)
    torch.testing.assert_close(found, expected.softmax(-1))


@pytest.mark.parametrize("hierarchy", [False, True])
@pytest.mark.parametrize("gamma", [1, 2, 5])
def test_greedy_is_the_targets_own(hierarchy: bool, gamma: int) -> None:
    target, ids, statistics = run(Greedy(), 60, hierarchy=hierarchy, gamma=gamma, rows=2)
    plain = ids[:, :3]
    while plain.shape[1] < ids.shape[1]:
        plain = torch.cat([plain, target.logits[plain[:, -2], plain[:, -1]].argmax(-1)[:, None]], 1)
    assert torch.equal(ids, plain) and ids.shape[1] == 62
    assert statistics.tokens == 59


def test_counts_are_what_a_record_of_all_rounds_says() -> None:
    """Acceptance counts drafted tokens up to the first rejection, and what ends a round counts as emitted alone."""
    rounds: list[tuple[int, int]] = []

    class Watched(Greedy):
        def judge(self, target: Tensor, proposal: Proposal) -> Acceptance:
            judged = super().judge(target, proposal)
            rounds.append((int(judged.accepted), proposal.tokens.shape[1]))
            return judged

    _, _, statistics = run(Watched(), 80, hierarchy=False, gamma=3)
    level = statistics.levels[0]
    assert level.verifications == len(rounds) and level.accepted == sum(a for a, _ in rounds)
    assert level.proposed == sum(min(a + 1, k) for a, k in rounds)
    assert level.emitted == sum(a + 1 for a, _ in rounds) == statistics.tokens - statistics.plain_tokens
    assert statistics.speed_up is None


def test_a_reader_is_never_asked_to_forget_what_has_settled() -> None:
    table = Table(torch.zeros(V, V, V))
    table.read(torch.zeros((1, 5), dtype=torch.int64), 1)
    table.settle()
    with pytest.raises(RuntimeError, match="5 have settled"):
        table.retract(4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": 0.0}, "sampling: temperature must be above 0, found 0.0"),
        ({"top_p": 0.0}, "sampling: top_p must be above 0 and at most 1, found 0.0"),
        ({"top_k": 0}, "sampling: top_k must be at least 1 token, found 0"),
    ],
)
def test_refuses_what_is_no_distribution(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**wrong)
