"""A cache from the file that `KvCache.save` wrote: every checksum, every layout and the model are compared first."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvtailor.engine.layer_state import LayerState
from kvtailor.errors import CacheFileError, KvtailorError, PlanError
from kvtailor.hf.cache import KvCache
from kvtailor.hf.conversation import Conversation, Known
from kvtailor.hf.layers import CompressedLayer
from kvtailor.hf.make_cache import cache_for
from kvtailor.hf.saved_model import differences, said_of_geometry, said_of_model
from kvtailor.hf.saving import COUNTERS, MEMORIES
from kvtailor.ops.segments.stored_parts import check_layout, check_segment
from kvtailor.plan import Plan
from kvtailor.store.cache_file import CacheFile, read_cache_file
from kvtailor.store.tail import Tail
from kvtailor.types import Layout
from kvtailor.types.evidence import Evidence

__all__ = ["load_cache"]

# What a file with wrong content raises while a cache is made from it.
_MALFORMED = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def load_cache(path: str | os.PathLike[str], model: Any) -> KvCache:
    """A cache that was saved, for the same model, in this or another process. It goes on exactly where it stopped.

    Every checksum is compared, all layouts are checked, and the model must have the weights, the dtype and the
    configuration that the file names; comparing weights costs what it does in `save`. A file of kvtailor 0.1.0 has
    neither checksums nor a fingerprint, and a warning is given.

    Args:
        path: of a file that `KvCache.save` wrote.
        model: the model that the cache was made for.

    Raises:
        CacheFileError: the file is damaged or no saved cache, or the model is another one.
    """
    name = os.fspath(path)
    file = read_cache_file(Path(path))
    try:
        about = {each: json.loads(file.about[each]) for each in ("geometry", "layers")}
        about["same"] = json.loads(file.about.get("same", "{}"))
        about["conversation"] = json.loads(file.about.get("conversation", "[]"))
        about["model"] = json.loads(file.about["model"]) if file.checked else None
        plan, plan_hash = file.about["plan"], file.about["plan_hash"]
    except _MALFORMED as error:
        raise _damaged(name, error) from error
    try:
        cache = cache_for(model, plan)
    except KvtailorError as error:
        why = "; ".join(error.faults) if isinstance(error, PlanError) else str(error)
        raise CacheFileError(
            f"{name!r} was saved under the plan {plan!r}, which cannot be used with this model: {why}"
        ) from error
    if cache.plan.hash != plan_hash:
        raise CacheFileError(f"{name!r} was saved under the plan {plan!r}, which means something else now")
    _check_model(name, file, about, cache, model)
    device = next(model.parameters()).device
    tensors = {each: tensor.to(device) for each, tensor in file.tensors.items()}
    try:
        tensors |= {each: tensors[first] for each, first in about["same"].items()}
        _fill(cache, about["layers"], tensors, device)
        _fill_conversation(cache, about["conversation"], tensors.get("conversation.real"))
    except _MALFORMED as error:
        if isinstance(error, KvtailorError):
            raise
        raise _damaged(name, error) from error
    _warn_of_what_it_lacks(name, file, about["model"])
    return cache


def _damaged(name: str, error: Exception) -> CacheFileError:
    return CacheFileError(
        f"the saved cache {name!r} is damaged or was changed, and no cache can be made from it "
        f"({type(error).__name__}: {error}); make the cache again from its prompt, and save it"
    )


def _check_model(name: str, file: CacheFile, about: Mapping[str, Any], cache: KvCache, model: Any) -> None:
    """Refuse a model of other shapes, weights, dtype or configuration."""
    try:
        clauses = differences(about["geometry"], said_of_geometry(cache.geometry))
        if about["model"] is not None and not clauses:
            clauses = differences(about["model"], said_of_model(model))
        dtypes = {each["dtype"] for each in about["layers"] if each.get("dtype") is not None}
    except _MALFORMED as error:
        raise _damaged(name, error) from error
    own, device = str(model.dtype).removeprefix("torch."), next(model.parameters()).device.type
    if not file.checked and dtypes - {own} and not torch.is_autocast_enabled(device):
        clauses.append(f"its keys are {', '.join(sorted(dtypes))} there and would be {own} here, outside of autocast")
    if clauses:
        raise CacheFileError(
            f"{name!r} was saved from another model: {'; '.join(clauses)}. Load it with the model that it was made "
            "from, or make a cache for this one from the prompt"
        )


def _warn_of_what_it_lacks(name: str, file: CacheFile, model: Mapping[str, Any] | None) -> None:
    if not file.checked:
        warnings.warn(
            f"{name!r} was written by kvtailor 0.1.0 and carries no checksums and no fingerprint of its model: damage "
            "to it, or another model of the same shapes, would not be noticed. Save it again with cache.save(path)",
            stacklevel=3,
        )
    elif model is None or model.get("weights") is None:
        warnings.warn(
            f"{name!r} has no fingerprint of its model's weights, since they could not be read when it was saved; "
            "another model of the same shapes would not be noticed",
            stacklevel=3,
        )


def _fill(cache: KvCache, layers: list[Any], tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Fill an empty cache from the fields of its layers and the tensors.

    Raises:
        Any of `_MALFORMED`: they do not fit together.
    """
    rows = {each["rows"] for each in layers if "rows" in each}
    if len(rows) > 1 or len({each["seen"] for each in layers}) > 1:
        raise ValueError("its layers differ in their rows, or in the tokens that they have seen")
    for index, (layer, fields) in enumerate(zip(cache.layers, layers, strict=True)):
        mine = _under(f"{index}.", tensors)
        if isinstance(layer, CompressedLayer):
            _restore(layer.state, fields, mine, cache.plan, cache.geometry.kv_heads)
            if fields["dtype"] is not None:
                like = torch.empty(0, dtype=getattr(torch, fields["dtype"]), device=device)
                layer.lazy_initialization(like, like)
        elif mine:
            for states in (mine["keys"], mine["values"]):
                if states.ndim != 4 or states.shape[:2] != (*(rows or {states.shape[0]}), cache.geometry.kv_heads):
                    raise ValueError(f"a window of layer {index} has the shape {tuple(states.shape)}")
            layer.lazy_initialization(mine["keys"], mine["values"])
            layer.keys, layer.values, layer.cumulative_length = mine["keys"], mine["values"], fields["seen"]
    real = tensors.get("real")
    if real is not None and (real.dtype != torch.bool or real.ndim != 2 or real.shape[0] not in (rows or {len(real)})):
        raise ValueError(f"its mask of tokens that are no padding is {real.dtype} of shape {tuple(real.shape)}")
    cache.guard.real = real


def _fill_conversation(cache: KvCache, known: list[Any], real: Tensor | None) -> None:
    """Tell a cache which ids it has seen; raises as `_fill` does."""
    if real is not None and (real.dtype != torch.bool or real.ndim != 2):
        raise ValueError(f"its mask of known token ids is {real.dtype} of shape {tuple(real.shape)}")
    beginnings = [Known(int(columns), tuple(int(each) for each in hashes)) for columns, *hashes in known]
    cache.conversation = Conversation(beginnings, None if real is None else real.cpu())


def _restore(
    state: LayerState, fields: Mapping[str, Any], tensors: Mapping[str, Tensor], plan: Plan, kv_heads: int
) -> None:
    """Make a layer what `hf.saving` described."""
    state.reset()
    for name in COUNTERS:
        setattr(state, name, _counter(name, fields[name]))
    if "tail" not in fields:
        return
    rows, heads, seen = fields["rows"], fields["heads"], state.seen
    if heads != kv_heads:
        raise ValueError(f"a layer has {heads} kv heads, and the model {kv_heads}")
    state.tail = _tail(rows, heads, fields["tail"], _under("tail.", tensors), seen)
    for i, saved in enumerate(fields["segments"]):
        mine = _under(f"segment.{i}.", tensors)
        own = _under("layout.", mine)
        layout = Layout(rows=rows, heads=heads, size=saved["layout"]["size"], start=saved["layout"]["start"], **own)
        check_layout(layout, seen)
        state.codec(plan)
        segment = state.restored(saved["codec"], layout, saved["fields"], mine)
        if segment.codec != saved["codec"]:
            raise ValueError(f"a segment is said to be of {saved['codec']}, and the plan makes {segment.codec}")
        check_segment(segment)
        state.segments.append(segment)
    state.rejoin()
    state.evidence = Evidence.from_tensors(_under("evidence.", tensors))
    state.carry = _under("carry.", tensors)
    memories = _under("memory.", tensors)
    if memories.keys() - MEMORIES:
        raise ValueError(f"a layer remembers {', '.join(sorted(memories))}, of which only {MEMORIES} are known")
    for name, tensor in memories.items():
        setattr(state, name, tensor)


def _tail(rows: int, heads: int, fields: Mapping[str, Any], tensors: Mapping[str, Tensor], seen: int) -> Tail:
    tail = Tail.from_state(rows, heads, fields, tensors)
    slots = {tensor.shape[1] for tensor in tensors.values()}
    if slots - {tail.length} or bool(tail.length) > bool(slots):
        raise ValueError(f"a tail is said to hold {tail.length} tokens, and has {sorted(slots)} slots")
    if tail.length:
        held = tail.as_segment()
        check_layout(held.layout, seen)
        check_segment(held)
    return tail


def _counter(name: str, value: Any) -> Any:
    """A number of a layer, of the kind that it must be."""
    if name == "scaling":
        good = isinstance(value, float | int) and 0 < value < float("inf")
    else:
        good = type(value) is int and value >= 0 or (name == "evict_at" and value is None)
    if not good:
        raise ValueError(f"{name} of a layer is {value!r}")
    return value


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
