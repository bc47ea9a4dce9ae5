"""The bytes of a model's cache before any run, from the model or from its name alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvtailor.calibration_file import calibrated
from kvtailor.errors import ArgumentError, PlanError
from kvtailor.hf.attention import NAME
from kvtailor.hf.layers.of_cache import plan_misfits
from kvtailor.hf.make_cache import check_fit
from kvtailor.hf.model.cache_dtype import dtype_of_caches
from kvtailor.hf.model.calibrated import calibrations_of, tensors_of
from kvtailor.hf.model.config import config_of
from kvtailor.hf.model.geometry import Geometry, check
from kvtailor.hf.sizes.segments import SegmentBytes
from kvtailor.hf.sizes.size import CacheSize, forecast_size
from kvtailor.plan import Plan
from kvtailor.plan.arguments import with_nested
from kvtailor.plan.calls import check_call

__all__ = ["cache_size", "known_size"]


@check_call
def cache_size(
    model: str | Path | Any,
    plan: str | Plan,
    *,
    context: int,
    batch: int = 1,
    new_tokens: int = 0,
    dtype: str | torch.dtype | None = None,
) -> CacheSize:
    """Return how many bytes a cache will hold, before any run.

    ```python
    size = kvtailor.cache_size("demo", "snapkv + kivi4 @ keep=0.25", context=4096, batch=8)
    print(size, size.total)
    ```

    Args:
        model: a transformers model, or the name or folder of one, of which the configuration alone is read.
        plan: one line or a `Plan`.
        context: tokens of the prompt, in each row, read at once.
        batch: rows, equally long.
        new_tokens: decoded one by one after the prompt.
        dtype: of the cache, such as "bfloat16"; None: what `kvtailor.cache_for` takes by itself, else float32. Windows
            and states of a model in float32 stay float32, see there.

    Raises:
        PlanError: with all faults of the plan, or where the model refuses it.
        UnsupportedModel: for a model that cannot be compressed.
        CalibrationError: a model was given, and a method needs a calibration that is not there for it.
        ArgumentError: a number that no cache can have, or a model of whose states the size is not known.
    """
    return known_size(model, plan, context=context, batch=batch, new_tokens=new_tokens, dtype=dtype, known={})


def known_size(
    model: Any,
    plan: str | Plan,
    *,
    context: int,
    batch: int,
    new_tokens: int = 0,
    dtype: str | torch.dtype | None = None,
    known: dict[Any, SegmentBytes],
) -> CacheSize:
    """Return what `cache_size` does, faster for many plans of one model: what codecs store is kept in `known`."""
    parsed = Plan.parse(plan) if isinstance(plan, str) else plan
    named = isinstance(model, str | Path)
    config = config_of(str(model)) if named else model.config
    if not named:
        check(model, NAME)
    geometry = Geometry.of(config)
    if not named:
        check_fit(model, parsed, geometry)
    misfits = plan_misfits(parsed, geometry)
    if misfits:
        raise PlanError(str(parsed), misfits)
    # A cache of a model in float32 may hold less; of any other it holds what the model does.
    own = torch.float32.itemsize if not named and model.dtype is torch.float32 else None
    return forecast_size(
        parsed,
        geometry,
        context=context,
        batch=batch,
        element_size=_element_size(config, None if named else model, dtype),
        own_size=own,
        new_tokens=new_tokens,
        calibration=None if named or not geometry.compressed else _tensors(parsed, model),
        known=known,
    )


def _element_size(config: Any, model: Any, dtype: str | torch.dtype | None) -> int:
    """Bytes of an element of the cache."""
    own = config.get_text_config(decoder=True).dtype if model is None else dtype_of_caches(model)
    asked = own if dtype is None else dtype
    found = getattr(torch, asked.removeprefix("torch."), None) if isinstance(asked, str) else asked
    if found is None and asked is None:
        found = torch.float32
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ArgumentError(f"asked for a cache in {dtype!r}: give float32, bfloat16 or float16")
    return found.itemsize


def _tensors(plan: Plan, model: Any) -> Mapping[str, Mapping[str, Tensor]]:
    """The tensors of the plan's calibration files by stage, as `cache_for` reads them."""
    if not any(calibrated(with_nested(part)) for part in plan.parts.values()):
        return {}
    cpu = torch.device("cpu")
    return {stage: tensors_of(found, plan, cpu) for stage, found in calibrations_of(plan, model).items()}
