"""Stage 3: the best few against the best presets, on text and on task families that the search never saw.

Everything here is measured by the bench's own tasks, `perplexity`, `needle` and `speed`, with all of their sanity
checks; the user's own questions by `damage`. `verdict` has the rule that names the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from kvtailor.bench.contestant import Contestant
from kvtailor.bench.schema import Record
from kvtailor.bench.tasks.contract import Task
from kvtailor.bench.tasks.needle import Needle
from kvtailor.bench.tasks.perplexity import Perplexity
from kvtailor.bench.tasks.speed import Speed
from kvtailor.fitting.damage import Damage
from kvtailor.fitting.material import Material
from kvtailor.fitting.pieces import CONTINUATION
from kvtailor.fitting.verdict import Family, Judged
from kvtailor.plan import Plan
from kvtailor.presets import FULL

__all__ = ["judged", "proof_tasks", "speed_task"]


class _SpeedOfPlans(Speed):
    """`speed` without the model's own cache beside the plans."""

    own_cache: ClassVar[bool] = False


class _PerplexityOfPlans(Perplexity):
    """`perplexity`, whose plan 'full' is held against the model's own cache on a few windows: each is a prompt more."""

    own_windows: ClassVar[int | None] = 4


def speed_task(material: Material, *, context: int, batch: int, rounds: int) -> Task:
    """Return what measures the time of a token of all rows; the proof before it has warmed the plans up."""
    return _SpeedOfPlans(
        text=material.proof.text,
        source=material.proof.source,
        context=context,
        batch=batch,
        tokens=16,
        rounds=rounds,
        warmup=0,
    )


def proof_tasks(material: Material, *, context: int, windows: int, documents: int) -> list[Task]:
    """Return what the proof measures.

    Args:
        material: whose second halves it has.
        context: tokens of a prompt.
        windows: most windows of text. documents: of each family.
    """
    tasks: list[Task] = [
        _PerplexityOfPlans(
            text=material.proof.text,
            source=material.proof.source,
            starts=material.proof.starts,
            context=context,
            continuation=CONTINUATION,
            windows=min(windows, material.proof.windows),
            least_distinct=material.distinct,
        )
    ]
    depths = (0.1, 0.3, 0.5, 0.7, 0.9)
    for kind in (*(each for each in material.kinds if each in _generated(material)), *material.unseen):
        tasks.append(Needle(kind=kind, lengths=(context,), depths=depths, documents=max(1, documents // len(depths))))
    if material.asked:
        tasks.append(Damage(pieces=material.asked))
    return tasks


def judged(
    records: Sequence[Record], plans: Sequence[tuple[Contestant, str, int]], *, kinds: Sequence[str]
) -> list[Judged]:
    """Return the plans as some records have them, 'full' first.

    Args:
        records: of `proof_tasks`.
        plans: each with its origin and the bytes of all rows.
        kinds: families that the search had.
    """
    of_full = [record for record in records if record.is_full]
    found = []
    for contestant, origin, size in plans:
        own = [record for record in records if record.plan_hash == contestant.hash]
        error = next((record.error for record in own if record.error is not None), None)
        blank = Judged(
            label=contestant.label,
            plan=str(contestant.text),
            origin=origin,
            bytes=size,
            methods=_methods(contestant.plan),
        )
        if error is not None:
            found.append(replace(blank, error=error))
            continue
        text = next(record for record in own if record.task == Perplexity.name)
        theirs = next(record for record in of_full if record.task == Perplexity.name)
        found.append(
            replace(
                blank,
                nll=text.values["nll"],
                full=theirs.values["nll"],
                documents=text.values.get("document", ()),
                families=tuple(_families(own, of_full, kinds)),
                seconds=_seconds(own),
            )
        )
    return found


def _families(own: Sequence[Record], full: Sequence[Record], kinds: Sequence[str]) -> list[Family]:
    def by_name(records: Sequence[Record], values: str) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for record in records:
            name = record.point.get("kind") if record.task == Needle.name else record.point.get("group")
            if record.task in (Needle.name, Damage.name) and "hit" in record.values:
                found.setdefault(str(name), []).extend(record.values[values])
        return found

    theirs, nll = by_name(full, "hit"), by_name(own, "nll")
    return [
        Family(name=name, seen=name in kinds, hits=tuple(hits), full=tuple(theirs[name]), nll=tuple(nll[name]))
        for name, hits in by_name(own, "hit").items()
    ]


def _seconds(records: Sequence[Record]) -> Mapping[str, float | None] | None:
    found = next((record.timings.get("tpot") for record in records if record.task == Speed.name), None)
    return None if not found else {name: found.get(name) for name in ("median", "q1", "q3", "count")}


def _methods(plan: Plan | None) -> int:
    if plan is None or str(plan) == FULL:
        return 0
    return str(plan).split(" @ ")[0].count(" + ") + 1 + str(plan).count("of=")


def _generated(material: Material) -> tuple[str, ...]:
    from kvtailor.bench.data.synthetic.documents import ALL_TASKS

    return tuple(kind for kind in material.kinds if kind in ALL_TASKS)
