"""The largest budget of a plan whose cache fits a number of bytes, before any run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvtailor.errors import ArgumentError, PlanError
from kvtailor.hf.sizes.size import CacheSize, forecast_size
from kvtailor.plan.registry import name_of

if TYPE_CHECKING:
    from kvtailor.hf.model.geometry import Geometry
    from kvtailor.hf.sizes.segments import SegmentBytes
    from kvtailor.plan import Plan

__all__ = ["largest_tokens", "least_size"]


def largest_tokens(
    plan: Plan,
    geometry: Geometry,
    *,
    memory: int,
    context: int,
    batch: int = 1,
    element_size: int,
    own_size: int | None = None,
    new_tokens: int = 0,
    known: dict[Any, SegmentBytes] | None = None,
) -> int | None:
    """Return the largest budget `tokens=` for which the whole cache surely fits, at most `context`.

    It is found between bounds, one that fits and one that does not, over the upper bound of `forecast_size`. Where
    heads are stored in pages that bound has small steps down, and a budget a few tokens above the result may fit as
    well.

    Args:
        plan: that evicts; its own budget is replaced.
        geometry: of the model.
        memory: bytes for the whole cache.
        context: tokens of the prompt, in each row.
        batch: rows.
        element_size, own_size: see `forecast_size`.
        new_tokens: decoded one by one after the prompt.
        known: see `forecast_size`; for several plans of one model.

    Returns:
        None where not even `tokens=1` fits.

    Raises:
        PlanError: the plan evicts nothing, or the model refuses it.
        ArgumentError: see `forecast_size`; or fewer than 0 bytes.
    """
    if memory < 0:
        raise ArgumentError(f"asked for the largest budget in {memory} bytes: give 0 or more")

    stored: dict[Any, SegmentBytes] = {} if known is None else known

    def bytes_of(tokens: int) -> int:
        budgeted = _with_tokens(plan, tokens)
        return forecast_size(
            budgeted,
            geometry,
            context=context,
            batch=batch,
            element_size=element_size,
            own_size=own_size,
            new_tokens=new_tokens,
            known=stored,
        ).high

    below = bytes_of(1)
    if below > memory:
        # All tokens may take less than one fewer, whose columns are stored; one token never takes more than that.
        return None
    above = bytes_of(context)
    if above <= memory:
        return context
    low, high = 1, context
    guesses = 0
    while high - low > 1:
        # Bytes grow with the budget, and nearly in a line, but for a whole page and where nothing is dropped: of three
        # guesses two lie where the line meets the memory, just below and just above, and one halves what is between.
        guess = low + (memory - below) * (high - low) // max(1, above - below)
        guess = (guess, guess + 1, (low + high) // 2)[guesses % 3]
        guess, guesses = min(max(guess, low + 1), high - 1), guesses + 1
        size = bytes_of(guess)
        if size <= memory:
            low, below = guess, size
        else:
            high, above = guess, size
    return low


def least_size(
    plan: Plan,
    geometry: Geometry,
    *,
    context: int,
    batch: int = 1,
    element_size: int,
    own_size: int | None = None,
    new_tokens: int = 0,
) -> CacheSize:
    """Return what the cache takes with the least budget that the plan can have, `tokens=1`.

    No budget makes it smaller: what remains are the model's own windows and states, what scores observe, and the tail
    of the newest tokens.

    Args:
        plan: that evicts; its own budget is replaced.
        geometry, context, batch, element_size, own_size, new_tokens: see `forecast_size`.

    Raises:
        PlanError: the plan evicts nothing, or the model refuses it.
        ArgumentError: see `forecast_size`.
    """
    least = _with_tokens(plan, 1)
    return forecast_size(
        least,
        geometry,
        context=context,
        batch=batch,
        element_size=element_size,
        own_size=own_size,
        new_tokens=new_tokens,
    )


def _with_tokens(plan: Plan, tokens: int) -> Plan:
    if not plan.evicts:
        raise PlanError(str(plan), [f"it evicts nothing, so it has no budget to choose: {name_of(plan.encode)} alone"])
    return replace(plan, tokens=tokens, keep=None, bytes=None)
