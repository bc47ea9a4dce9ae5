"""Rocket and quest in a whole model: what C++ chooses where it lies is what torch chooses, and copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.attention_cases import request_of
from tests.support.segments_of import Padded, states
from tests.support.sharp_model import sharp_model

import kvtailor
from kvtailor.attend import rocket
from kvtailor.attend.contract import AttentionContext
from kvtailor.attend.quest import Quest
from kvtailor.encode.indexed import Indexed
from kvtailor.engine.fast_path import slow_path
from kvtailor.hf.versions import hand_cache
from kvtailor.ops import dispatch
from kvtailor.ops.cpu.library import library
from kvtailor.ops.dispatch import using
from kvtailor.types import Layout, PlainSegment

pytestmark = pytest.mark.skipif(library() is None, reason="there are no C++ kernels")
PLANS = (
    "snapkv(window=6) + rocket(tokens=16, expect=40) @ tokens=48",
    "rocket(tokens=16, expect=40, turns=true, window=6, kernel=5)",
    "snapkv(window=6) + rocket(tokens=36, expect=8) @ tokens=40",
    # Segments of 8 tokens come while it decodes; pages of 4 of which the last has fewer.
    "quest(tokens=17, least=2, dense_layers=0) + indexed(page=4, block_size=8)",
)
# A prompt, tokens, a second turn and tokens.
FORWARDS = ((0, 60), *((i, i + 1) for i in range(60, 70)), (70, 80), *((i, i + 1) for i in range(80, 90)))


@torch.no_grad()
@pytest.mark.parametrize("plan", PLANS)
def test_both_ways_choose_the_same(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = sharp_model(), torch.randint(3, 128, (2, 90), generator=torch.Generator().manual_seed(2))
    module, name = (dispatch, "best_pages") if "quest" in plan else (rocket, "read_chosen")
    read, found = getattr(module, name), []
    for in_place in (True, False):
        taken: list[Any] = []

        def counted(*args: Any, taken: list[Any] = taken, in_place: bool = in_place, **how: Any) -> Any:
            taken.append(read(*args, **how) if in_place else None)
            return taken[-1]

        monkeypatch.setattr(module, name, counted)
        cache, logits, tokens = kvtailor.cache_for(model, plan), [], []
        for first, end in FORWARDS:
            # The fast path of what chooses is held by tests/seam/test_fast_path.py.
            with slow_path():
                logits.append(model(ids[:, first:end], **hand_cache(cache)).logits[:, -1])
            tokens += [state.observed.tokens_read for state in cache.engine.states]
        found.append((logits, tokens, sum(each is not None for each in taken)))
    assert found[0][2] >= 36 and not found[1][2]
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert torch.allclose(one, other, atol=2e-5 * float(other.abs().max()))
    for mine, theirs in zip(found[0][1], found[1][1], strict=True):
        assert (mine is None) == (theirs is None) and (mine is None or torch.equal(mine, theirs))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_pages_that_no_finite_number_has_chosen_are_not_read(wrong: float) -> None:
    """Head 1 of row 0 asks for what is no number; the others read on."""
    keys, values = states((6, 63, 32), 1), states((6, 63, 32), 2)
    segment = Indexed(page=4, block_size=4).encode(Layout(rows=2, heads=3, size=63, start=0), keys, values)
    keys, values = states((6, 5, 32), 3), states((6, 5, 32), 4)
    tail = PlainSegment(layout=Layout(rows=2, heads=3, size=5, start=63), keys=keys, values=values)
    query = states((2, 6, 1, 32), 5)
    query[0, 3, 0, 7] = wrong
    visible, quest = Padded(new_tokens=1, first_column=67), Quest(tokens=24, dense_layers=0)
    request = request_of(query, [segment, tail], visible, 0.2, context=AttentionContext(layer=1, layers=2))
    mine = quest.attend(request)
    with using("reference"):
        expected = quest.attend(request)
    assert mine.tokens_read is not None and expected.tokens_read is not None
    assert torch.equal(mine.tokens_read, expected.tokens_read) and mine.tokens_read[0, 1] < mine.tokens_read[1, 1]
    assert torch.allclose(mine.output, expected.output, atol=1e-5, equal_nan=True)
    assert mine.output.isfinite().flatten(2).all(-1).sum() >= 11
