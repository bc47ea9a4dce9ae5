"""Which steps cannot be recorded and replayed, and why."""

from __future__ import annotations

import inspect
from typing import Any

from kvtailor.errors import CacheMisuse, UnsupportedModel
from kvtailor.hf.cache import KvCache
from kvtailor.hf.graphs import replay
from kvtailor.hf.graphs.replay import Recorder
from kvtailor.hf.model.tensor_parallel import RankHeads
from kvtailor.plan import Plan
from kvtailor.types import HeadShare

__all__ = ["check_processes", "checked_recorder", "obstacle", "obstacle_of_parts"]

_RECOMPUTED = ("dynamic", "longrope")


def obstacle(cache: KvCache, model: Any) -> str | None:
    """Why steps of this model over such a cache cannot be recorded, a sentence; None where they can."""
    plan, geometry = cache.plan, cache.geometry
    if not geometry.compressed:
        return f"all layers of this {geometry.model_type} have a sliding window of its own, and no plan compresses them"
    if geometry.multiplies:
        return f"{geometry.model_type} computes its attention itself, in steps that kvtailor follows one by one"
    if geometry.has_states or geometry.readers:
        kept = "states of constant size" if geometry.has_states else "keys that several of them read"
        return f"this {geometry.model_type} has layers with {kept}, which are not recorded yet"
    if geometry.has_latents:
        return f"the attention of this {geometry.model_type} reads latents, which steps that are recorded do not"
    why = _obstacle_of_plan(plan, cache.engine.listens) or _obstacle_of_rotation(geometry.model_type, cache, model)
    if why is not None:
        return why
    if cache.guard.stored_dtype is not None:
        held = str(cache.guard.stored_dtype).removeprefix("torch.")
        return (
            f"the cache holds {held} of a model in float32, which steps that are recorded were not tried with "
            "(cache_dtype=torch.float32 holds what is computed)"
        )
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        return f"the model's weights are on {len(devices)} devices"
    return None


def _obstacle_of_plan(plan: Plan, listens: bool) -> str | None:
    """Why steps under a plan cannot be recorded, a sentence; `listens`: its methods see what each token attends to."""
    if not plan.attend.graph_safe:
        return f"{plan} chooses anew at every token what it reads"
    if listens:
        return f"{plan} keeps account of what every new token attends to"
    if plan.store.moves:
        return f"{plan} moves segments between tiers at every token"
    if plan.store.limit is not None:
        return f"{plan} limits the bytes on the device, which would be looked at at every token"
    return None


def _obstacle_of_rotation(name: str, cache: KvCache, model: Any) -> str | None:
    """Why positions of a model called `name` cannot be given to recorded steps, a sentence."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{type(model).__name__} counts positions itself: it takes no position_ids"
    parameters = getattr(cache.guard.config, "rope_parameters", None) or {}
    kinds = [parameters, *(each for each in parameters.values() if isinstance(each, dict))]
    if any(each.get("rope_type") in _RECOMPUTED for each in kinds):
        return f"this {name} computes its rotary frequencies anew from the length of the text"
    return None


def obstacle_of_parts(model: Any) -> str | None:
    """Why a recorded step could be left behind by what parts of a model do later, a sentence; None: nothing is known.

    A token of `kvtailor.generate` follows the one before at once. Between two plain forwards anything may be done.
    """
    for name, module in model.named_modules():
        part = f"its part {name!r}" if name else f"this {type(module).__name__}"
        package = type(module).__module__
        if getattr(module, "_compiled_call_impl", None) is not None or package.startswith("torch._dynamo"):
            return f"{part} is compiled, and may be compiled anew at any token"
        if getattr(module, "_hf_hook", None) is not None:
            return f"{part} has a hook of accelerate, which may move weights at any token"
        if package.partition(".")[0] == "peft":
            return f"{part} is an adapter (PEFT), which may be switched between two tokens"
    return None


def check_processes(share: HeadShare) -> None:
    """Refuse to record steps of one process of several that share a model.

    Raises:
        CacheMisuse: the model's heads lie on several processes.
    """
    if isinstance(share, RankHeads):
        raise CacheMisuse(
            f"graphs=True records the steps of one process, and {share.processes} share this model: leave it out"
        )


def checked_recorder(model: Any, reason: str | None, record: Recorder | None = None) -> Recorder:
    """Return what records steps of a model.

    Args:
        model: a transformers decoder-only model.
        reason: why its steps cannot be recorded; None: nothing is known to be in the way.
        record: what records; None: what does on the model's device.

    Raises:
        UnsupportedModel: there is a reason, or nothing records on this device.
    """
    device = next(model.parameters()).device
    found = replay.recorder_of(device) if record is None else record
    if found is None:
        reason = f"the model is on {device}, and graphs are CUDA's"
    if found is None or reason is not None:
        raise UnsupportedModel(f"steps cannot be recorded and replayed: {reason}; decode without graphs")
    return found
