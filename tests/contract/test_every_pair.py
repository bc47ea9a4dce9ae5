"""Any score goes with any budget, and both with merging: in a model, on a padded batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.support.calibrated import shipped_for
from tests.support.crossed import crossed
from tests.support.discover import methods_of, samples_of
from tests.support.seam.zoo import build, held_columns, prompts
from torch import Tensor

import kvtailor
import kvtailor.allocate
import kvtailor.score
from kvtailor.allocate.contract import Allocator
from kvtailor.plan import Plan
from kvtailor.plan.arguments import word_of
from kvtailor.score.contract import Scorer
from kvtailor.types import Needs

SCORERS = [each for kind in methods_of(kvtailor.score, Scorer) for each in samples_of(kind)]
ALLOCATORS = [each for kind in methods_of(kvtailor.allocate, Allocator) for each in samples_of(kind)]
# The second row is below the budget, and the third just above the windows that are in use.
LENGTHS, TOKENS = (90, 31, 63), 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[torch.nn.Module]:
    model = build("llama")
    with shipped_for([model], tmp_path_factory.mktemp("calibrations")):
        yield model


def runnable(method: Scorer | Allocator) -> bool:
    """Its shapes are the model's."""
    return method.misfit(layers=3, heads=2, size=16) is None


def text_of(method: Scorer | Allocator) -> str:
    return str(word_of(method))


def held_by(model: torch.nn.Module, plan: Plan) -> Tensor:
    """(b, l, h) tokens after the prompt, padding left out."""
    ids, mask = prompts(LENGTHS)
    cache = kvtailor.prefill(model, ids, mask, plan=plan)
    assert cache.ledger().total == cache.ledger().closed_form
    # A layer of which no row has to give up a token still holds the padding.
    return torch.stack([(columns & mask.bool()[:, None]).sum(-1) for columns in held_columns(cache).values()], 1)


@pytest.mark.parametrize(
    ("scorer", "allocator"),
    crossed(list(filter(runnable, SCORERS)), list(filter(runnable, ALLOCATORS)), each=4),
    ids=text_of,
)
def test_holds_exactly_the_budget(model: torch.nn.Module, scorer: Scorer, allocator: Allocator) -> None:
    held = held_by(model, Plan(score=scorer, allocate=allocator, tokens=TOKENS))
    owed = [min(TOKENS, length) * 3 * 2 for length in LENGTHS]
    assert held.sum((1, 2)).tolist() == owed
    assert (held <= torch.tensor(LENGTHS)[:, None, None]).all()
    if allocator.even_heads:
        assert (held == held[..., :1]).all()


@pytest.mark.parametrize("allocator", list(filter(runnable, ALLOCATORS)), ids=text_of)
def test_and_any_budget_goes_with_merging(model: torch.nn.Module, allocator: Allocator) -> None:
    """Tokens with weights, encoded in groups: layers that are cut twice, wait for others, or have ragged heads."""
    plan = Plan.parse(
        f"pairs(window=8, sinks=2) + asymkv(window=8) + kivi(bits=4, group=8, recent=8) @ tokens={TOKENS}"
    )
    held = held_by(model, replace(plan, allocate=allocator))
    assert held.sum((1, 2)).tolist() == [min(TOKENS, length) * 3 * 2 for length in LENGTHS]


def test_most_methods_are_asked() -> None:
    asked = {type(method).__name__ for method in filter(runnable, [*SCORERS, *ALLOCATORS])}
    assert {"SnapKV", "H2O", "Position", "Random", "Uniform", "DynamicKV", "Cake", "Duo", "Erank", "Table"} <= asked


@pytest.mark.parametrize("allocator", ["entropy(window=32)", "erank", "coverage(per_head=true)", "cake"])
def test_what_an_allocator_needs_changes_no_score(
    model: torch.nn.Module, allocator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scorer of 4 queries has 4, whatever wider window the allocator is given."""
    seen: dict[str, list[Tensor]] = {}
    scorer = type(Plan.parse("snapkv(window=4) @ tokens=40").score)
    score = scorer.score
    for name in ("uniform", allocator):
        found = seen.setdefault(name, [])
        monkeypatch.setattr(scorer, "score", lambda self, held, into=found: into.append(score(self, held)) or into[-1])
        held_by(model, Plan.parse(f"snapkv(window=4) + {name} @ tokens={TOKENS}"))
    assert len(seen[allocator]) == 3
    for one, other in zip(seen[allocator], seen["uniform"], strict=True):
        assert torch.equal(one, other)
    assert Plan.parse(f"snapkv(window=4) + {allocator} @ tokens=40").needs != Needs(window=4)
