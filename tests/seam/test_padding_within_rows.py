"""A row with padding in its midst, of a mask with a hole or of a second turn in a batch, is what it is without."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

import kvtailor
from kvtailor.errors import CacheMisuse, PlanError
from kvtailor.hf.versions import hand_cache
from kvtailor.types import Held, Needs
from tests.support.calibrated import shipped_for
from tests.support.every_plan import first_of_each_method
from tests.support.seam.zoo import build, error, prompts

TEXT, TURN, HOLE, STEPS = 50, 100, 19, 12
CODES = "snapkv(window=6) + adakv + centred(of=hadamard(of=vector(bits=4, block_size=8))) @ keep=0.6"
# What stays in full precision, and what votes, is of the newest columns: no more of them than the turn has tokens.
SHORT = {
    "allocate: erank": "snapkv(window=6) + erank(rows=16) @ tokens=48, slack=2",
    "encode: bit_table": "bit_table(of=kivi(group=8, recent=8), keys=1, high=8, low=4)",
    "encode: by_age": "by_age(of=[kivi(bits=4, group=8, recent=8), kivi(group=8, recent=8)], ages=[64])",
    "encode: by_layer": "by_layer(of=[kivi(bits=4, group=8, recent=8), kivi(group=8, recent=8)], layers=[0, 1, 1])",
    "encode: kivi": "kivi(bits=4, group=8, recent=8)",
    "encode: sides": "sides(keys=kivi(bits=4, group=8, recent=8), values=vector(bits=3, block_size=8))",
    "encode: unrotated": "unrotated(of=kivi(bits=4, group=8, recent=8))",
    "encode: kvtc": "kvtc(bits=4.0, group=8, recent=8, block_size=8, basis=random)",
}
PLANS = {
    **{case: plan for case, plan in first_of_each_method().items() if case.partition("(")[0] not in SHORT},
    **SHORT,
    "and codes": CODES,
    "and codes of unturned keys": "expected(future=16) + unrotated(of=nuq(sinks=2, group=8, recent=8)) @ keep=0.6",
}


@pytest.fixture(scope="module", autouse=True)
def _calibrated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with shipped_for([build("llama")], tmp_path_factory.mktemp("calibrations")):
        yield


@torch.no_grad()
def read(
    model: Any, plan: str, ids: torch.Tensor, real: torch.Tensor, text: int = TEXT, steps: int = STEPS
) -> torch.Tensor:
    """Logits of the last row of `ids` (b, t) behind its first turn: a second one, and tokens one by one."""
    cache, found, end = kvtailor.cache_for(model, plan), [], ids.shape[1]
    positions = (real.cumsum(-1) - 1).clamp(min=0)
    turns = (0, text, *range(end - steps, end + 1))
    for begin, until in pairwise(turns):
        given = {"attention_mask": real[:, :until].long(), "position_ids": positions[:, begin:until]}
        logits = model(ids[:, begin:until], **given, **hand_cache(cache)).logits[-1]
        found.append(logits[real[-1, begin:until]])
    ledger = cache.ledger()
    assert ledger.total == ledger.closed_form
    return torch.cat(found[1:])


def check(model: Any, plan: str, *, left: int = 0, steps: int = STEPS) -> None:
    """The second row of a batch has a second turn that is shorter than the first row's; alone it has no padding.

    Sums in another order may turn a near tie round, so one of some draws must agree.
    """
    apart = []
    for state in range(1, 6):
        ids = prompts((TEXT + TURN + steps,) * 2, state=state)[0]
        real = torch.ones_like(ids, dtype=torch.bool)
        real[1, TEXT : TEXT + HOLE] = False
        real[1, :left] = False
        own = ids[1:, real[1]]
        together = read(model, plan, ids, real, steps=steps)
        alone = read(model, plan, own, torch.ones_like(own, dtype=torch.bool), TEXT - left, steps)
        apart.append(error(together, alone))
        if apart[-1] < 1e-4:
            return
    raise AssertionError(f"of {len(apart)} draws rows lie {apart} from what they are alone")


@pytest.mark.parametrize("case", PLANS)
def test_padding_before_a_second_turn_counts_for_nothing(case: str) -> None:
    """Every plan keeps of a row what it keeps of it alone."""
    try:
        check(build("llama"), PLANS[case])
    except (PlanError, CacheMisuse) as refused:
        assert isinstance(refused, PlanError) or "reads its context twice" in str(refused)
        pytest.skip(f"refused: {refused}")


@pytest.mark.parametrize("left", [0, 3])
@pytest.mark.parametrize(
    "plan",
    [
        CODES,
        "centred(of=hadamard(of=vector(bits=4, block_size=8)))",
        "h2o(recent=6) + centred(of=vector(bits=4, block_size=8)) @ tokens=60, slack=2",
        "on_write(of=centred(of=vector(bits=8, block_size=8)))",
    ],
)
def test_a_constant_of_keys_is_that_of_their_positions(plan: str, left: int) -> None:
    """It was that of their columns: `turboquant4` lost eighteen times as much of Qwen2.5's second turn.

    Codes of the first turn, whose padding is at the left alone, become one with those of later ones.
    """
    model = build("qwen2")
    for layer in model.model.layers:
        drawn = torch.randn(layer.self_attn.k_proj.bias.shape, generator=torch.Generator().manual_seed(7))
        layer.self_attn.k_proj.bias.data = 8 * drawn
    check(model, plan, left=left, steps=40)


def test_what_methods_see_of_a_row_is_what_they_see_of_it_behind_all_of_its_padding() -> None:
    """Positions, sampled queries, and of the window the queries that there are: padding in it counts for nothing."""
    real = torch.tensor([[True] * 5 + [False] * 3 + [True] * 2 + [False] + [True] * 2])
    columns, window = real[0].nonzero()[:, 0], 9
    keys = torch.randn(1, 2, 9, 4)
    queries = torch.randn(1, 4, window, 4)
    held = Held(
        keys=keys,
        values=keys,
        positions=columns.expand(1, 2, -1),
        valid=torch.ones(1, 2, 9, dtype=torch.bool),
        first=torch.tensor([0]),
        seen=13,
        prompt=8,
        layer=0,
        layers=1,
        scaling=1.0,
        queries=queries,
        query_columns=torch.arange(4, 13),
        sampled=queries[:, :, :2],
        sampled_columns=torch.tensor([[4, -1]]),
        real=real,
    )
    shown = held.within(Needs(window=window, rows=2))
    assert shown.positions.tolist() == [[list(range(4, 13))] * 2]
    assert (shown.first.item(), shown.prompt.item(), shown.sampled_columns.tolist()) == (4, 9, [[8, -1]])
    assert torch.equal(shown.recent(3)[0, 0], torch.arange(9) >= 6)
    # Columns 4, 8, 9, 11 and 12 of the window have a token; theirs are the newest five.
    assert torch.equal(shown.queries[:, :, -5:], queries[:, :, [0, 4, 5, 7, 8]])
    assert shown.held_by_first().tolist() == [[False] * 4 + [True] * 5]
    assert shown.held_by_any(0).tolist() == [False] * 4 + [True] * 5
    assert torch.equal(shown.to_come(2), torch.tensor([[9, 10]]))
