"""What records say that a plan lost, and the plan of ours that stands beside the setting of another engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtailor.bench.measure.statistics import Estimate, mean_difference
from kvtailor.bench.schema import Record, latest
from kvtailor.errors import KvtailorError
from kvtailor.plan import Plan
from kvtailor.plan.engines import EngineSetting

__all__ = ["LossesBeside", "losses_beside", "recorded_loss"]


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


def recorded_loss(plan: Plan, records: Sequence[Record]) -> Estimate | None:
    """Return the nats a token that a plan loses against 'full' on the same tokens; None where no such pair is there.

    Of records with one key the newest counts, and both sides are of the same weights and dtypes.
    """
    scored = [
        each for each in latest(records) if each.task == "perplexity" and each.error is None and each.values.get("nll")
    ]
    for ours in (each for each in scored if each.plan == str(plan)):
        for full in (each for each in scored if each.is_full):
            if _tokens_and_model(ours) == _tokens_and_model(full):
                documents = ours.values.get("document", ())
                return mean_difference(ours.values["nll"], full.values["nll"], documents=documents)
    return None


def _tokens_and_model(record: Record) -> tuple[Any, ...]:
    return record.text_hash, record.point, record.model_hash, record.dtype, record.cache_dtype
