"""Evictions that follow from ages alone: a decoding layer drops the tokens behind its first ones, where they lie.

Where a score ranks all tokens but the first by age, all rows and heads of a layer drop the same slots of the tail: no
score has to be made, no kept set has to be found, and no token that stays has to move but the few in front. What is
held is what `engine.evict` would leave, token for token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvtailor.allocate.contract import BudgetRequest
from kvtailor.merge.drop import Drop
from kvtailor.store.recent_window import SPARE, capacity_for
from kvtailor.types import Needs
from kvtailor.types.checked_returns import checked_budgets

if TYPE_CHECKING:
    from kvtailor.engine.budget import Budget
    from kvtailor.engine.layer_state import LayerState
    from kvtailor.plan import Plan
    from kvtailor.types import Visibility

__all__ = ["drop_middle", "first_tokens"]


def first_tokens(plan: Plan) -> int | None:
    """Return how many first tokens a plan holds beside the newest; None where more than ages decides what stays.

    None as well where it evicts more rarely than a tail grows: the slots that get free in front would then be held for
    longer than others of a tail.
    """
    score, allocate, slack = plan.score, plan.allocate, plan.slack_tokens
    if score is None or score.first_kept is None or slack is None or slack >= SPARE or plan.scope != "layer":
        return None
    even = allocate.even_heads and allocate.even_layers and not allocate.needs_scores and allocate.needs == Needs()
    best = plan.select.exact and plan.select.takes_best
    plain = plan.encode.exact and plan.encode.block == 0 and type(plan.merge) is Drop
    return score.first_kept if even and best and plain else None


def drop_middle(state: LayerState, plan: Plan, first: int, visible: Visibility, budget: Budget, layers: int) -> bool:
    """Cut a layer back to its budget where ages decide what that leaves; return whether it could be done so.

    It can after decoded tokens without padding, where the tail has all that is held, and the first tokens of the text.

    Args:
        state: of the layer, for which an eviction is due.
        plan: whose allocator says how many tokens stay.
        first: see `first_tokens`.
        visible: of the forward that has just ended.
        budget: of all layers.
        layers: how many layers the plan compresses.

    Raises:
        MethodError: the allocator returns something else than its contract promises.
    """
    tail, share, allocate = state.stored.tail, state.model.share, plan.allocate
    assert tail is not None and plan.score is not None
    if visible.real is not None or not state.clock.decoding or state.stored.segments or tail.anchor < first:
        return False
    if tail.slots > capacity_for(tail.length):
        return False
    shape = (state.rows, 1, share.total(state.heads))
    capacity, floor = torch.full(shape, tail.length), budget.each.clamp(max=plan.score.recent, min=0)
    floor = floor.clamp(max=tail.length)[:, None, None].expand(shape)
    request = BudgetRequest(
        total=budget.total,
        row_tokens=budget.row_tokens,
        capacity=capacity,
        floor=floor,
        layers=(state.index,),
        num_layers=layers,
    )
    last = layers == 1
    budgets = checked_budgets(
        allocate, allocate.allocate(request), budget.total, floor, capacity, settled=True,
        spare=shape[2] - 1 if last else int(budget.total.max()),
    )  # fmt: skip
    kept = int(budgets.min())
    if kept <= first or kept != int(budgets.max()):
        return False
    if kept < tail.length:
        tail.drop_behind(first, tail.length - kept)
        state.clock.reindex = True
    return True
