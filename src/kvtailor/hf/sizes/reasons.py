"""Why the bytes of a cache are not known exactly before a run, in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvtailor.hf.sizes.bounds import NOTHING, Bounds
from kvtailor.hf.sizes.evictions import Evictions
from kvtailor.hf.sizes.simulate import Holding
from kvtailor.plan.registry import name_of

if TYPE_CHECKING:
    from kvtailor.plan import Plan

__all__ = ["reasons_of"]


def reasons_of(plan: Plan, evictions: Evictions | None, held: Holding, stages: Mapping[str, Bounds]) -> tuple[str, ...]:
    """Return what depends on the text, a sentence each.

    Args:
        plan: of the cache.
        evictions: of the plan; None where nothing is evicted.
        held: by all compressed layers.
        stages: bytes by stage.
    """
    found = []
    allocate, select = name_of(plan.allocate), name_of(plan.select)
    if evictions is not None and not held.total.exact:
        if not plan.select.exact:
            found.append(f"{select} takes the budget as an upper bound: how many tokens it keeps depends on the text")
        if evictions.known == "layers":
            found.append(
                f"{allocate} splits a layer's tokens over its kv heads by the text, and heads of unequal length are "
                "stored in pages, of which the last may be partly empty"
            )
        elif evictions.known == "sum":
            found.append(
                f"{allocate} splits the tokens over layers and kv heads by the text or by a calibration: the sum is "
                "known, and spare slots, groups and pages depend on the split"
            )
    if held.moved_codes:
        found.append(
            "an eviction while decoding moves tokens that are encoded: how many share a page or a group's scales "
            "depends on the text"
        )
    if plan.merge.weighted and not held.stages["encode"].exact:
        found.append(f"{name_of(plan.merge)} stores a weight for each token only once one of a layer has one")
    if not stages.get("attend", NOTHING).exact:
        found.append(f"{name_of(plan.attend)} carries an index whose size depends on what each kv head holds")
    if plan.attend.has_token_budget and not stages["observe"].exact:
        found.append(f"{name_of(plan.attend)} counts what it has read only where it did not read all")
    if not stages.get("store", NOTHING).exact:
        found.append(
            f"{name_of(plan.store)} holds copies on the device of what is on its way or stays there, and a header for "
            "each file"
        )
    if plan.store.makes_smaller:
        found.append(f"{name_of(plan.store)} packs its files, and how small they get depends on what the tokens are")
    if not found:
        found.append("which tokens stay depends on the text, and some of them are stored otherwise than others")
    return tuple(found)
