"""Making a cache for a model under a plan: the checks before it, and the calibration and modules that layers need."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvtailor.calibration_file import calibrated
from kvtailor.errors import CacheMisuse, PlanError, UnsupportedModel
from kvtailor.hf.attention import NAME, register
from kvtailor.hf.cache import KvCache
from kvtailor.hf.graphs.forward import lend_forward, obstacle_of_forward
from kvtailor.hf.graphs.obstacles import check_processes, checked_recorder, obstacle
from kvtailor.hf.graphs.replayed_cache import ReplayedCache
from kvtailor.hf.images import RopeDeltas
from kvtailor.hf.minimax import cache_class
from kvtailor.hf.model.attending.latents import LatentOutput, projections_of
from kvtailor.hf.model.attending.softmax import check_plan_softmax, softmax_before
from kvtailor.hf.model.cache_dtype import stored_dtype
from kvtailor.hf.model.calibrated import calibrations_of, tensors_of
from kvtailor.hf.model.devices import input_device, runs_on
from kvtailor.hf.model.geometry import Geometry, check
from kvtailor.hf.model.key_bias import has_key_bias, key_offset_of, warn_of_key_bias
from kvtailor.hf.model.modules import modules_by_layer, rotation_of
from kvtailor.hf.model.projection import OutputProjection
from kvtailor.hf.model.rope_border import rope_border
from kvtailor.hf.model.tensor_parallel import check_plan, check_same_plan, share_of
from kvtailor.hf.switch import switch
from kvtailor.plan import Plan
from kvtailor.plan.arguments import with_nested
from kvtailor.plan.calls import check_call
from kvtailor.plan.registry import name_of
from kvtailor.types import HeadShare, Needs, Rotation
from kvtailor.types.late_checks import LateChecks

__all__ = ["cache_for", "check_fit", "make_gathering_cache", "find_layer_devices"]


# Models in float64 that were told of it.
_told: weakref.WeakSet[Any] = weakref.WeakSet()


@check_call
def cache_for(model: Any, plan: str | Plan, *, graphs: bool = False, cache_dtype: torch.dtype | None = None) -> KvCache:
    """Make a cache that compresses by a plan; hand it to the model as `cache`.

    ```python
    cache = kvtailor.cache_for(model, "snapkv + adakv @ tokens=1024")
    output = model.generate(**inputs, cache=cache)  # before transformers 5.24: past_key_values=cache
    ```

    The model's attention is switched to "kvtailor" (`model.set_attn_implementation`), which runs transformers' own sdpa
    for every other cache. The model gets its own attention back once none of its kvtailor caches is alive.

    If several processes share the model (tensor parallelism), all of them must call it, with the same plan.

    Args:
        model: a transformers decoder-only model.
        plan: one line or a `Plan`.
        graphs: replay decoded tokens as a CUDA graph, as in `kvtailor.generate`, under plain `model.generate()`. While
            such a cache is alive, the model's `forward` is replaced by one that replays what it can and otherwise runs
            the model's own; `cache.replays` counts both.
        cache_dtype: dtype in which keys and values are held. bfloat16 or float16 halve the bytes of a float32 model's
            cache; queries, softmax, outputs, and the model's own windows and states stay float32. None: what
            `kvtailor.load_model` chose for this model, else the model's own dtype.

    Raises:
        ArgumentError: a cache of this model cannot hold that dtype.
        PlanError: the plan has faults, all of which it lists, or a method of it was made for a model of other sizes.
        UnsupportedModel: the model cannot be compressed, or its steps cannot be recorded although `graphs` is set;
            nothing has been changed.
        CacheMisuse: several processes share the model, and `graphs` is set or the cache would have another dtype.
        CalibrationError: a method needs a calibration, and there is none for exactly this model.
    """
    parsed = Plan.parse(plan) if isinstance(plan, str) else plan
    attending = check(model, NAME)
    register()
    config = model.config.get_text_config(decoder=True)
    geometry = replace(Geometry.of(model.config), multiplies=attending.multiplies)
    devices, known, share = check_fit(model, parsed, geometry)
    check_same_plan(parsed, share)
    if graphs:
        check_processes(share)
    stored = stored_dtype(model, cache_dtype)
    if stored is not None and share.ranks > 1:
        raise CacheMisuse(
            f"asked for a cache in {str(stored).removeprefix('torch.')} of a model in float32 that {share.ranks} "
            "processes share, which was not tried: load the model in that dtype, or ask for cache_dtype=torch.float32"
        )
    made = ReplayedCache if graphs else cache_class(config)
    cache = made(parsed, geometry, config, share=share, stored_dtype=stored)
    if isinstance(cache, ReplayedCache):
        cache.open_steps.record = checked_recorder(model, obstacle_of_forward(model) or obstacle(cache, model))
    cache.guard.model = weakref.ref(model)
    cache.guard.border = rope_border(model)
    cache.guard.rope = RopeDeltas(model, turned_by=str(parsed) if cache.plan.needs.rotation else None)
    for state, layer in zip(cache.engine.states, geometry.compressed, strict=True):
        if layer in known:
            state.model.softmax = softmax_before(known[layer], share)
    _equip(cache, model, devices, parsed.needs)
    if share.ranks == 1:
        offsets = {layer: s.model.offset for s, layer in zip(cache.engine.states, geometry.compressed, strict=True)}
        warn_of_key_bias(model, cache.plan, geometry, offsets)
    _warn_of_double(model)
    cache.lease = switch(model, NAME)
    if isinstance(cache, ReplayedCache):
        cache.forward_lease = lend_forward(model)
    return cache


def make_gathering_cache(model: Any, needs: Needs) -> KvCache:
    """Make a cache under the null plan that gathers evidence for other plans, see `hf.run.kept_prompt`.

    Args:
        model: see `cache_for`.
        needs: the evidence to gather.

    Raises:
        UnsupportedModel: see `cache_for`; or the needs take a rotary embedding that the model's modules do not show.
    """
    cache = cache_for(model, Plan())
    places = find_layer_devices(model, cache.geometry)
    devices = [places[layer] for layer in cache.geometry.compressed]
    _equip(cache, model, devices, replace(needs.of_prompt, rotation=needs.moments))
    cache.engine.gather(needs.of_prompt)
    return cache


def _warn_of_double(model: Any) -> None:
    """Warn once that decoded tokens of a float64 model are computed with less precision."""
    if getattr(model, "dtype", None) is torch.float64 and model not in _told:
        _told.add(model)
        warnings.warn(
            "this model is in float64, and attention that reads a cache of ours is computed in float32: its "
            "logits are as exact as those of a float32 model, which takes half the bytes",
            stacklevel=4,
        )


def check_fit(model: Any, plan: Plan, geometry: Geometry) -> tuple[list[torch.device], dict[int, Any], HeadShare]:
    """Check a plan against a model, before anything is made.

    Args:
        model: one that kvtailor supports.
        plan: of the cache.
        geometry: of the model.

    Returns:
        The devices of the compressed layers, their modules by layer as far as the model shows them, and the model's kv
        heads that this process holds.

    Raises:
        PlanError: the model does not support the plan; lists all reasons.
        UnsupportedModel: the plan does not support the way in which the model's heads lie on processes.
    """
    places = find_layer_devices(model, geometry)
    devices = [places[layer] for layer in geometry.compressed]
    refusals = [plan.store.refusal(device) for device in dict.fromkeys(devices)]
    faults = [refusal for refusal in refusals if refusal is not None] + _groups_apart(plan, devices)
    if faults:
        raise PlanError(str(plan), faults)
    share = share_of(model, geometry)
    check_plan(plan, geometry, share)
    modules = modules_by_layer(model, attending=_with_states(geometry))
    # Of a model whose modules do not show their layers, its first forward tells.
    known = {layer: modules[layer] for layer in geometry.compressed if layer in modules}
    check_plan_softmax(plan, list(known.values()), share)
    return devices, known, share


def _equip(cache: KvCache, model: Any, devices: Sequence[torch.device], needs: Needs) -> None:
    """Give the layers what the plan needs of calibration files, and what `needs` takes of the model's modules."""
    geometry = cache.geometry
    _calibrate(cache, model, devices)
    if needs.offset:
        _centre(cache, model)
    if not (needs.output or needs.rotation or geometry.has_latents):
        return
    modules = modules_by_layer(model, attending=_with_states(geometry))
    missing = [layer for layer in geometry.compressed if layer not in modules]
    if missing:
        raise UnsupportedModel(
            f"kvtailor has to read the modules of {len(geometry.compressed)} attention layers for the plan "
            f"{cache.plan}, and this {geometry.model_type} does not show those of layers "
            f"{', '.join(map(str, missing))}"
        )
    checks = LateChecks()
    known: dict[object, Rotation] = {}
    with checks.collecting():
        for state, layer in zip(cache.engine.states, geometry.compressed, strict=True):
            shape = cache.own_geometry.shapes[layer]
            if shape.latents:
                state.model.latents = latents = projections_of(modules[layer])
                state.model.output = LatentOutput(latents, modules[layer]) if needs.output else None
            elif needs.output:
                state.model.output = OutputProjection(modules[layer], shape.q_heads, shape.value_size)
            if needs.rotation:
                state.model.rotation = rotation_of(model, modules[layer], shape.kind, shape.key_size, known)
    checks.settle()


def _centre(cache: KvCache, model: Any) -> None:
    """Give the layers the constant part of their keys; if several processes share the model, warn instead."""
    shapes = cache.own_geometry.shapes
    modules, known = modules_by_layer(model, attending=_with_states(cache.geometry)), dict[object, Rotation]()
    biased = []
    for state, layer in zip(cache.engine.states, cache.geometry.compressed, strict=True):
        if layer not in modules or shapes[layer].latents:
            continue
        if cache.share.ranks == 1:
            shape = shapes[layer]
            state.model.offset = key_offset_of(model, modules[layer], shape.kind, shape.key_size, known)
        elif has_key_bias(modules[layer]):
            biased.append(layer)
    if biased:
        warnings.warn(
            f"{cache.plan}: in {len(biased)} layers, the first of them {biased[0]}, a projection has a bias; what it "
            "adds to keys is not looked for where several processes share a model, so there the codec stores keys as "
            "without centred",
            stacklevel=4,
        )


def _with_states(geometry: Geometry) -> list[int]:
    """Return the compressed layers that keep a state as well."""
    return [layer for layer in geometry.compressed if geometry.shapes[layer].states]


def find_layer_devices(model: Any, geometry: Geometry) -> list[torch.device]:
    """Return the device of each layer of a model."""
    modules = modules_by_layer(model)
    if any(layer not in modules for layer in geometry.compressed):
        # No module shows its layer: such a model is taken to be on one device.
        return [input_device(model)] * geometry.layers
    elsewhere = input_device(model)
    return [runs_on(modules[layer]) if layer in modules else elsewhere for layer in range(geometry.layers)]


def _groups_apart(plan: Plan, devices: Sequence[torch.device]) -> list[str]:
    """Describe the first layers that the codec stores together and that lie on different devices, if there are any."""
    for group in plan.encode.layer_groups(len(devices)):
        found = dict.fromkeys(str(devices[layer]) for layer in group)
        if len(found) > 1:
            return [
                f"{name_of(plan.encode)} stores compressed layers {group[0]} to {group[-1]} together, which lie on "
                f"{' and '.join(found)}: give a device_map that keeps them on one device"
            ]
    return []


def _calibrate(cache: KvCache, model: Any, devices: Sequence[torch.device]) -> None:
    """Give the layers of a cache the tensors of the calibration files that its plan reads."""
    found = calibrations_of(cache.plan, model) if cache.geometry.compressed else {}
    cache.calibrations = tuple(each for of_stage in found.values() for each in of_stage)
    if not found:
        return
    # Codecs and allocators read theirs on the CPU, where they are. What scorers read is there once for each device.
    places = {stage: devices if stage == "score" else [torch.device("cpu")] * len(devices) for stage in found}
    made = {
        (stage, device): tensors_of(found[stage], cache.plan, device)
        for stage, each in places.items()
        for device in dict.fromkeys(each)
    }
    of_stage = {stage: [made[stage, device] for device in each] for stage, each in places.items()}
    cache.engine.eviction.calibration = of_stage["allocate"][0] if "allocate" in of_stage else None
    for index, state in enumerate(cache.engine.states):
        state.model.encoding = of_stage["encode"][index] if "encode" in of_stage else None
        state.model.calibration = (
            {name: _own(t[index], name, cache) for name, t in of_stage["score"][index].items()}
            if "score" in of_stage
            else None
        )


def _own(tensor: Tensor, name: str, cache: KvCache) -> Tensor:
    """Return one layer's part of a calibration tensor; of one entry for each kv head, those of this process's heads."""
    methods = calibrated(with_nested(cache.plan.score)) if cache.plan.score is not None else []
    by_head = any(name in each.per_head for each in methods)
    return cache.share.own(tensor, 0) if by_head else tensor
