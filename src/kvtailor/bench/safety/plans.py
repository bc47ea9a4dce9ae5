"""The plans of a check: every preset, and the plans that README starts from, with the bytes that each takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtailor.bench.contestant import Contestant
from kvtailor.bench.subject import Subject
from kvtailor.calibration_file import calibrated, shipped
from kvtailor.errors import KvtailorError, PlanError
from kvtailor.hf.model.geometry import Geometry
from kvtailor.hf.sizes.segments import SegmentBytes
from kvtailor.hf.sizes.size import forecast_size
from kvtailor.plan import Plan
from kvtailor.plan.arguments import with_nested
from kvtailor.plan.registry import presets

__all__ = ["CheckedPlan", "candidates_of", "length_of", "share_of"]

ELEMENT = 2
"""Bytes of an element of the cache whose share is told, whatever dtype the model computes in."""
LONGEST = 4096
"""Tokens at which bytes are told at most. At fewer, what a plan keeps in full precision weighs more."""
_SAVES = 0.97
_OTHERS = (
    "kivi(key_bits=8, value_bits=4, recent=32)",
    "vector(bits=4)",
    "snapkv(kernel=21) + adakv",
)
_EIGHTH = ("kvzip",)


@dataclass(frozen=True, kw_only=True)
class CheckedPlan:
    """A plan of a check.

    Attributes:
        contestant: the plan, with its budget for this model.
        bytes: of a cache of `length_of` tokens in 16 bits, over those of an uncompressed one.
    """

    contestant: Contestant
    bytes: float


def length_of(subject: Subject) -> int:
    """Return the tokens at which the bytes of a check are told: the model's positions, at most 4,096."""
    return min(LONGEST, subject.positions or LONGEST)


def share_of(plan: Plan, geometry: Geometry, tokens: int, known: dict[Any, SegmentBytes] | None = None) -> float:
    """Return the bytes of a plan's 16-bit cache after so many tokens, over those of an uncompressed one.

    Args:
        plan: of the cache.
        geometry: of the model.
        tokens: of one row.
        known: see `forecast_size`; for several plans of one model.

    Raises:
        PlanError: the model refuses the plan.
    """
    counted = geometry.state_bytes(ELEMENT) is not None
    size = forecast_size(plan, geometry, context=tokens, element_size=ELEMENT, count_states=counted, known=known)
    return size.share


def candidates_of(subject: Subject, plans: Sequence[str] = ()) -> tuple[list[CheckedPlan], dict[str, str]]:
    """Return the plans to measure on a model, and why others are not, by name.

    A preset that evicts keeps a quarter of the tokens.

    Args:
        subject: the model.
        plans: those to measure in one line each, with their own budgets; none: every preset, and what README names.

    Raises:
        PlanError: a plan in `plans` has faults, or the model refuses it.
        KvtailorError: the model's cache has no size that is known.
    """
    geometry, tokens = Geometry.of(subject.model.config), length_of(subject)
    if plans:
        return [_given(text, geometry, tokens, {}) for text in plans], {}
    known: dict[Any, SegmentBytes] = {}
    found: dict[str, CheckedPlan] = {}
    without: dict[str, str] = {}
    wanted = [(name, 0.25) for name in (*presets(), *_OTHERS)] + [(name, 0.125) for name in _EIGHTH]
    for text, keep in wanted:
        try:
            made = _fitted(text, keep, geometry, tokens, known)
            why = _why_not(made, subject)
        except PlanError as error:
            without[text] = error.faults[0]
            continue
        if why is not None:
            without[text] = why
        else:
            found.setdefault(made.contestant.hash, made)
    return list(found.values()), without


def _given(text: str, geometry: Geometry, tokens: int, known: dict[Any, SegmentBytes]) -> CheckedPlan:
    made = Contestant.named(text)
    assert made.plan is not None
    return CheckedPlan(contestant=made, bytes=share_of(made.plan, geometry, tokens, known))


def _fitted(text: str, keep: float, geometry: Geometry, tokens: int, known: dict[Any, SegmentBytes]) -> CheckedPlan:
    """A plan as it is named, or where that is no plan yet or holds all of a text of these lengths, with a budget.

    Raises:
        PlanError: the model refuses the plan.
    """
    try:
        plan = Plan.parse(text)
    except PlanError:
        return _given(f"{text} @ keep={keep:g}", geometry, tokens, known)
    return _given(f"{text} @ keep={keep:g}" if plan.evicts else text, geometry, tokens, known)


def _why_not(made: CheckedPlan, subject: Subject) -> str | None:
    """Why a plan is not measured; None where it is."""
    plan = made.contestant.plan
    assert plan is not None
    if made.bytes > _SAVES:
        return "it saves no bytes"
    methods = [method for part in plan.parts.values() for method in calibrated(with_nested(part))]
    for method in methods:
        if not any(True for _ in shipped(method.calibrates)):
            return f"it reads a calibration: kvtailor calibrate {method.calibrates}"
    try:
        if subject.make_cache is None and methods:
            subject.new_cache(made.contestant)
    except KvtailorError:
        return f"it reads a calibration of this model: kvtailor calibrate {methods[0].calibrates}"
    return None
