"""What records say that a plan lost, and the plan of ours that stands beside the setting of another engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from kvtailor.bench.choices import one_choice
from kvtailor.bench.measure.statistics import Estimate, mean_difference
from kvtailor.bench.schema import Record, latest
from kvtailor.errors import KvtailorError
from kvtailor.plan import Plan
from kvtailor.plan.engines import EngineSetting

__all__ = ["LossesBeside", "has_losses", "layers_of", "loss_of", "losses_beside", "pairs_with_full", "recorded_loss"]


@dataclass(frozen=True, kw_only=True)
class LossesBeside:
    """Nats a token that are lost against 'full', with 95 % intervals over windows of one text.

    Attributes:
        plan: by the plan; None where the records do not have it.
        neighbour: of the plans that stand beside a setting the nearest that the records have, or the nearest of all;
            None where none stands beside it.
        setting: by that neighbour; None where the records do not have it.
    """

    plan: Estimate | None
    neighbour: str | None
    setting: Estimate | None


def losses_beside(plan: Plan, setting: EngineSetting, records: Sequence[Record]) -> LossesBeside:
    """Return what records of one model say of a plan, and of what comes near it in an engine.

    Raises:
        KvtailorError: the records are of several models.
    """
    models = sorted({each.model for each in records})
    if len(models) > 1:
        raise KvtailorError(f"asked for losses on one model, found records of {', '.join(models)}: give those of one")
    near = {each: recorded_loss(Plan.parse(each), records) for each in setting.neighbours}
    chosen = next((each for each, loss in near.items() if loss is not None), next(iter(near), None))
    return LossesBeside(
        plan=recorded_loss(plan, records),
        neighbour=chosen,
        setting=None if chosen is None else near[chosen],
    )


def layers_of(records: Sequence[Record]) -> int | None:
    """Return how many layers plans compress on the model of some records; None where they do not tell one number."""
    counts = {len(each.tokens_by_head) for each in records if each.tokens_by_head is not None}
    return counts.pop() if len(counts) == 1 else None


def recorded_loss(plan: Plan, records: Sequence[Record]) -> Estimate | None:
    """Return the nats a token that a plan loses against 'full' on the same tokens; None where no such pair is there."""
    return next((loss_of(ours, full) for ours, full in pairs_with_full(plan, records) if has_losses(ours)), None)


def pairs_with_full(plan: Plan, records: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Return the records of a plan, each with that of 'full' on the same tokens, of the same weights and dtypes.

    Of records with one key the newest counts, and none that failed; of several choices of windows one (`one_choice`).
    """
    kept = [each for each in latest(records) if each.error is None]
    full = {_place(each): each for each in kept if each.is_full}
    # Which choice stands is not for plans to say that nobody asked for.
    ours, _ = one_choice([each for each in kept if each.plan == str(plan) and _place(each) in full])
    return [(each, full[_place(each)]) for each in ours]


def has_losses(record: Record) -> bool:
    """Return whether a record is of a text that was scored."""
    return record.task == "perplexity" and bool(record.values.get("nll"))


def loss_of(ours: Record, full: Record) -> Estimate:
    """Return the nats a token that one record of a text loses to that of 'full', with its interval over documents."""
    return mean_difference(ours.values["nll"], full.values["nll"], documents=ours.values.get("document", ()))


def _place(record: Record) -> tuple[str | None, ...]:
    """The task, the tokens, the weights and the dtypes."""
    point = json.dumps(record.point, sort_keys=True)
    return record.task, record.text_hash, point, record.model_hash, record.dtype, record.cache_dtype
