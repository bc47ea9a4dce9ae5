"""A cache for a model under a plan: what is checked first, and what its layers get of calibration and modules."""

from __future__ import annotations

import weakref
from typing import Any

from kvtailor.errors import PlanError, UnsupportedModel
from kvtailor.hf.attention import NAME, register
from kvtailor.hf.cache import KvCache
from kvtailor.hf.model.calibrated import calibrations_of, tensors_of
from kvtailor.hf.model.geometry import Geometry, check
from kvtailor.hf.model.modules import attention_modules, rotation_of
from kvtailor.hf.model.projection import OutputProjection
from kvtailor.hf.switch import switch
from kvtailor.plan import Plan

__all__ = ["cache_for"]


def cache_for(model: Any, plan: str | Plan) -> KvCache:
    """A cache that compresses by a plan, to be handed to the model as `past_key_values`.

    ```python
    cache = kvtailor.cache_for(model, "snapkv + adakv @ tokens=1024")
    output = model.generate(**inputs, past_key_values=cache)
    ```

    The model's attention is switched to "kvtailor" (`model.set_attn_implementation`), which is transformers' own sdpa
    for every other cache. The model gets its own attention back once no cache of ours is alive.

    Args:
        model: a transformers decoder-only model.
        plan: one line or a `Plan`.

    Raises:
        PlanError: with all faults of the plan, or where a method of it was made for a model of other sizes.
        UnsupportedModel: for a model that cannot be compressed, before anything is changed.
        CalibrationError: a method needs a calibration, and there is none for this very model.
    """
    parsed = Plan.parse(plan) if isinstance(plan, str) else plan
    check(model, NAME)
    register()
    config = model.config.get_text_config(decoder=True)
    refusal = parsed.store.refusal(next(model.parameters()).device)
    if refusal is not None:
        raise PlanError(str(parsed), [refusal])
    cache = KvCache(parsed, Geometry.of(model.config), config)
    cache.guard.model = weakref.ref(model)
    _equip(cache, model)
    cache.lease = switch(model, NAME)
    return cache


def _equip(cache: KvCache, model: Any) -> None:
    """Gives the layers what their plan needs of calibration files and of the model's own modules."""
    needs, geometry = cache.plan.needs, cache.geometry
    _calibrate(cache, model)
    if not (needs.output or needs.rotation):
        return
    modules = attention_modules(model)
    if len(modules) != geometry.layers:
        raise UnsupportedModel(
            f"the plan {cache.plan} reads the modules of {geometry.layers} attention layers, and this "
            f"{geometry.model_type} shows {len(modules)}"
        )
    for state, layer in zip(cache.engine.states, geometry.compressed, strict=True):
        if needs.output:
            state.model.output = OutputProjection(modules[layer], geometry.q_heads, geometry.head_dim)
        if needs.rotation:
            state.model.rotation = rotation_of(model, modules[layer], geometry.layer_types[layer], geometry.head_dim)


def _calibrate(cache: KvCache, model: Any) -> None:
    """Gives the layers of a cache the tensors of the calibration files that its plan reads."""
    found = calibrations_of(cache.plan, model) if cache.geometry.compressed else {}
    cache.calibrations = tuple(each for of_stage in found.values() for each in of_stage)
    device = next(model.parameters()).device if found else None
    by_stage = {stage: tensors_of(of_stage, cache.plan, device) for stage, of_stage in found.items()}
    cache.engine.eviction.calibration = by_stage.get("allocate")
    for index, state in enumerate(cache.engine.states):
        state.model.encoding = by_stage.get("encode")
        state.model.calibration = (
            {name: t[index] for name, t in by_stage["score"].items()} if "score" in by_stage else None
        )
