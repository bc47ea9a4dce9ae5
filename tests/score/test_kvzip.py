"""KVzip: its evidence by hand, and the order that its score makes of it. What a model's passes give: tests/seam."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from tests.support.held_rows import held_of, make_row

from kvtailor.engine.reading import ReconstructionPass
from kvtailor.engine.state import LayerState
from kvtailor.plan import Plan
from kvtailor.score.kvzip import KVzip
from kvtailor.types import Layout, PlainSegment


@dataclass(frozen=True)
class Causal:
    """Visibility of two new tokens after four."""

    new_tokens: int = 2
    first_column: int = 4
    causal_only: bool = True
    real: None = None

    def at(self, rows, columns, first=0, last=None):
        queries = torch.arange(4, 6)[first:last]
        return columns[:, None, :] <= queries[None, :, None]

    def without_last(self, count):
        raise NotImplementedError


def test_the_evidence_by_hand() -> None:
    """One kv head of size 1 with two query heads; keys are logarithms, so that weights are whole numbers."""
    state = LayerState(0)
    keys = torch.tensor([1.0, 100.0, 4.0, 8.0]).log().view(1, 1, 4, 1)
    state.append(keys, torch.zeros(1, 1, 4, 1), exactly=True)
    passing = PlainSegment(
        layout=Layout(rows=1, heads=1, size=2, start=4),
        keys=torch.tensor([1.0, 3.0]).log().view(1, 2, 1),
        values=torch.ones(1, 2, 1),
    )
    queries = torch.tensor([[1.0, 1.0], [0.0, 2.0]]).view(1, 2, 2, 1)
    piece = ReconstructionPass(
        columns=[torch.tensor([2, 3])], sinks=[torch.tensor([0])], real=torch.ones((1, 2), dtype=torch.bool)
    )
    output = piece.attend(state, passing, queries, Causal(), 1.0)
    # The softmax is over the sink (1), the piece (4 and 8) and the new tokens so far (1, then 3); not over the 100.
    # Head one: 4 of 14, then of 17; 8 of 14. Head two: 1 of 4 each; then squares: 16 and 64 of 1 + 16 + 64 + 1 + 9.
    assert state.observed.reconstruction[0, 0].tolist() == pytest.approx([0, 0, 4 / 14, 64 / 91])
    # The attention itself is over all six: the values of the new tokens are 1.
    first, last = 1 / (1 + 100 + 4 + 8 + 1), (1 + 3) / (1 + 100 + 4 + 8 + 1 + 3)
    assert output[0, 0, :, 0].tolist() == pytest.approx([first, last])
    assert state.stored.seen == 4 and state.stored.tail.length == 4
    padded = replace(piece, real=torch.tensor([[True, False]]))
    state.observed.reconstruction = None
    padded.attend(state, passing, queries, Causal(), 1.0)
    assert state.observed.reconstruction[0, 0].tolist() == pytest.approx([0, 0, 4 / 14, 8 / 14])


def test_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    state, new = LayerState(0), torch.randn(1, 3, 2, 5, generator=generator)
    state.append(torch.randn(1, 3, 4, 5, generator=generator), torch.randn(1, 3, 4, 5), exactly=True)
    queries = torch.randn(1, 6, 2, 5, generator=generator)
    passing = PlainSegment(layout=Layout(rows=1, heads=3, size=2, start=4), keys=new[0], values=new[0])
    piece = ReconstructionPass(
        columns=[torch.arange(4)], sinks=[torch.arange(2)], real=torch.ones((1, 2), dtype=torch.bool)
    )
    found = []
    for scratch in (1 << 22, 1):
        monkeypatch.setattr("kvtailor.engine.reading._SCRATCH", scratch)
        state.observed.reconstruction = None
        piece.attend(state, passing, queries, Causal(), 0.3)
        found.append(state.observed.reconstruction)
    torch.testing.assert_close(found[0], found[1])
    assert (found[0] > 0).all() and (found[0] < 1).all()


def test_sinks_first_then_what_came_after_then_the_context() -> None:
    scorer = KVzip(sinks=2)
    row = make_row(9, heads=3, group=2, size=7, generator=torch.Generator().manual_seed(1))
    known = torch.tensor([0.1, 0.2, 0.9, 0.3, 0.0, 1.0, -1.0, -1.0, -1.0]).expand(3, -1)
    held = held_of([replace(row, reconstruction=known)], scorer.needs)
    order = scorer.score(held).argsort(-1, descending=True)
    assert order[0].tolist() == [[0, 1, 8, 7, 6, 5, 2, 3, 4]] * 3
    context = slice(2, 6)
    assert torch.equal(scorer.score(held)[..., context], known[None, :, context])


def test_what_is_no_number_is_not_taken_for_a_token_after_the_context() -> None:
    row = make_row(9, heads=3, group=2, size=7, generator=torch.Generator().manual_seed(1))
    broken = row.reconstruction.clone()
    broken[1, 4] = math.nan
    scorer = KVzip(sinks=0)
    assert scorer.score(held_of([replace(row, reconstruction=broken)], scorer.needs))[0, 1, 4].isnan()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"chunk": 0}, "kvzip: chunk must be at least 1 token, found 0"),
        ({"lead": -1}, "kvzip: lead must be 0 or more tokens, found -1"),
        ({"sinks": -2}, "kvzip: sinks must be 0 or more tokens, found -2"),
    ],
)
def test_refuses_what_makes_no_sense(arguments: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        KVzip(**arguments)


def test_says_what_to_do_where_nothing_was_repeated() -> None:
    row = make_row(9, heads=3, group=2, size=7, generator=torch.Generator().manual_seed(1))
    held = replace(held_of([row], KVzip().needs), reconstruction=None)
    with pytest.raises(ValueError, match=r"kvtailor\.prefill"):
        KVzip().score(held)


def test_the_published_name_is_the_published_method() -> None:
    """One pool for all layers and heads; equal budgets are another method, and its line says so."""
    plan = Plan.parse("kvzip @ keep=0.3")
    assert str(plan) == "kvzip + pooled(floor=0.0) @ keep=0.3"
    assert plan.scope == "prompt" and plan.slack_tokens is None
    assert plan == Plan.parse("kvzip_pooled @ keep=0.3") == Plan.from_toml('preset = "kvzip_pooled"\nkeep = 0.3')
    assert Plan.parse("kvzip(chunk=64) @ keep=0.3") == Plan.parse("kvzip(chunk=64) + pooled(floor=0) @ keep=0.3")
    equal = Plan(score=KVzip(), keep=0.3)
    assert str(equal) == "kvzip + uniform @ keep=0.3" and Plan.parse(str(equal)) == equal != plan
    assert Plan.from_toml(equal.to_toml()) == equal
    with_code = Plan.parse("kvzip + kivi(bits=4) @ keep=0.3")
    assert with_code.scope == "prompt" and str(with_code).startswith("kvzip + pooled(floor=0.0) + kivi")


@pytest.mark.parametrize("name", ["kvzip_plus", "kvgrad", "fastkvzip"])
def test_what_is_built_on_it_shares_the_pool(name: str) -> None:
    assert Plan.parse(f"{name} @ keep=0.3") == Plan.parse(f"{name} + pooled(floor=0) @ keep=0.3")
    assert str(Plan.parse(f"{name} + uniform @ keep=0.3")) == f"{name} + uniform @ keep=0.3"
