"""Stage 1's optimum with scorers that read a prompt twice, where the search may not suggest them.

Such a scorer (kvzip) takes as long as five others, so that `quick` cannot afford a sampler that likes it. But a preset
with one is often the best at few bytes. Then its scorer is tried with stage 1's layers: a few points beside the trials.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvtailor.fitting.layers.layer_map import PLAIN
from kvtailor.fitting.measuring import Measurer
from kvtailor.fitting.pieces import Piece
from kvtailor.fitting.structure.search import Candidate, Searched, measured_to_fit, same_score
from kvtailor.fitting.structure.space import Space

__all__ = ["slow_points", "with_slow_points"]

_AMONG_BEST = 3


def slow_points(searched: Searched, space: Space) -> list[dict[str, Any]]:
    """Return the points to try: none where no preset with such a scorer is among the best three."""
    if space.layers is None:
        return []
    best = searched.presets()[:_AMONG_BEST]
    least = {
        "least_width": min(width for width in space.layers.widths if width != PLAIN),
        "least_share": min(space.layers.shares),
    }
    return [
        {"how": "layers", "score": score, "merge": "drop", "allocate": allocate, **least}
        for score in space.slow_scores
        if any(same_score(each.plan, score) for each in best)
        for allocate in space.allocations
    ]


def with_slow_points(
    searched: Searched,
    points: Sequence[Mapping[str, Any]],
    space: Space,
    measurer: Measurer,
    *,
    memory: int,
    first: Sequence[Piece],
    every: Sequence[Piece],
) -> Searched:
    """Return what a search met, and these points beside it.

    Args:
        searched: by the trials.
        points: see `slow_points`.
        space: makes plans of them.
        measurer: measures these.
        memory: bytes of the whole cache.
        first: pieces that every candidate is measured on. every: these and the others.
    """
    plans = [space.plan(point, memory) for point in points]
    there = [(point, plan) for point, plan in zip(points, plans, strict=True) if plan is not None]
    begun = measured_to_fit(space, measurer, [plan for _, plan in there], first, memory=memory) if there else {}
    refused = [f"{plan}: {begun[plan.hash].error}" for _, plan in there if begun[plan.hash].error is not None]
    able = [(point, begun[plan.hash]) for point, plan in there if begun[plan.hash].error is None]
    whole = measurer.measure([found.plan for _, found in able], every) if able else []
    met = {each.plan.hash for each in searched.candidates}
    new = [
        Candidate(point=point, plan=found.plan, first=found, whole=each)
        for (point, found), each in zip(able, whole, strict=True)
        if each.error is None and found.plan.hash not in met
    ]
    refused += [f"{each.plan}: {each.error}" for each in whole if each.error is not None]
    return replace(searched, candidates=(*searched.candidates, *new), refused=(*searched.refused, *refused))
