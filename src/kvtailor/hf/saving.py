"""A compressed cache as one safetensors file: what is held, encoded as it is, and the plan that goes on with it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvtailor.errors import CacheMisuse
from kvtailor.hf.cache import KvCache, cache_for
from kvtailor.hf.conversation import Conversation, Known
from kvtailor.hf.layers import CompressedLayer
from kvtailor.layer import LayerState
from kvtailor.observe import Evidence
from kvtailor.plan import Plan
from kvtailor.store.tail import Tail
from kvtailor.types import Layout

__all__ = ["load_cache", "save"]

_FORMAT = "kvtailor-cache-1"


def save(cache: KvCache, path: str | os.PathLike[str]) -> None:
    """Writes a cache. The file appears whole or not at all.

    Args:
        cache: not between a recorded forward and its crop.
        path: of the file; one that exists is replaced.
    """
    fields: list[Any] = []
    tensors: dict[str, Tensor] = {}
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, CompressedLayer):
            own, kept = _layer_state(layer.state)
            fields.append({**own, "dtype": str(layer.dtype).removeprefix("torch.") if layer.is_initialized else None})
        else:
            kept = {} if layer.keys is None else {"keys": layer.keys, "values": layer.values}
            fields.append({"seen": layer.get_seq_length()})
        tensors |= {f"{index}.{name}": tensor for name, tensor in kept.items()}
    if cache._real is not None:
        tensors["real"] = cache._real
    if cache.conversation.real is not None:
        tensors["conversation.real"] = cache.conversation.real
    once, same = _once(tensors)
    metadata = {
        "format": _FORMAT,
        "plan": str(cache.plan),
        "plan_hash": cache.plan.hash,
        "geometry": json.dumps(_described(cache)),
        "layers": json.dumps(fields),
        "same": json.dumps(same),
        "conversation": json.dumps([[known.columns, *known.hashes] for known in cache.conversation.known]),
    }
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    try:
        save_file({name: tensor.contiguous().clone() for name, tensor in once.items()}, partial, metadata)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def load_cache(path: str | os.PathLike[str], model: Any) -> KvCache:
    """A cache that was saved, for the same model, in this or another process. It goes on exactly where it stopped.

    Args:
        path: of a file that `KvCache.save` wrote.
        model: the model that the cache was made for.

    Raises:
        CacheMisuse: for a file that is damaged or not ours, or a model of another shape.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CacheMisuse(f"cannot read a cache from {os.fspath(path)!r}: {error}") from error
    if metadata.get("format") != _FORMAT:
        raise CacheMisuse(
            f"{os.fspath(path)!r} is not a saved kvtailor cache (format {metadata.get('format')!r}, expected "
            f"{_FORMAT!r})"
        )
    cache = cache_for(model, metadata["plan"])
    if cache.plan.hash != metadata["plan_hash"]:
        raise CacheMisuse(
            f"{os.fspath(path)!r} was saved under the plan {metadata['plan']!r}, which means something else now"
        )
    saved, found = json.loads(metadata["geometry"]), _described(cache)
    if saved != found:
        differing = sorted(name for name in found if saved.get(name) != found[name])
        raise CacheMisuse(
            f"{os.fspath(path)!r} was saved from another model: "
            + ", ".join(f"{name} is {saved.get(name)} there and {found[name]} here" for name in differing)
        )
    device = next(model.parameters()).device
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    tensors |= {name: tensors[first] for name, first in json.loads(metadata.get("same", "{}")).items()}
    for index, (layer, fields) in enumerate(zip(cache.layers, json.loads(metadata["layers"]), strict=True)):
        mine = {
            name.removeprefix(f"{index}."): tensor for name, tensor in tensors.items() if name.startswith(f"{index}.")
        }
        if isinstance(layer, CompressedLayer):
            _restore(layer.state, fields, mine, cache.plan)
            if fields["dtype"] is not None:
                like = torch.empty(0, dtype=getattr(torch, fields["dtype"]), device=device)
                layer.lazy_initialization(like, like)
        elif mine:
            layer.lazy_initialization(mine["keys"], mine["values"])
            layer.keys, layer.values, layer.cumulative_length = mine["keys"], mine["values"], fields["seen"]
    cache._real = tensors.get("real")
    known = json.loads(metadata.get("conversation", "[]"))
    real = tensors.get("conversation.real")
    cache.conversation = Conversation(
        [Known(columns, tuple(hashes)) for columns, *hashes in known], None if real is None else real.cpu()
    )
    return cache


def _once(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors without those that another name already stands for, and for each of these the other name."""
    first: dict[object, str] = {}
    once: dict[str, Tensor] = {}
    same: dict[str, str] = {}
    for name, tensor in tensors.items():
        # An empty tensor has no place of its own.
        place: object = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else name
        if first.setdefault(place, name) == name:
            once[name] = tensor
        else:
            same[name] = first[place]
    return once, same


_COUNTERS = ("seen", "settled_seen", "walk_at", "tail_growth", "scaling")


def _layer_state(state: LayerState) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """JSON-able fields and tensors from which `_restore` makes a layer again."""
    if state.pending is not None:
        raise CacheMisuse("a cache cannot be saved between a recorded forward and its crop")
    fields: dict[str, Any] = {name: getattr(state, name) for name in _COUNTERS}
    tensors = {f"evidence.{name}": t for name, t in state.evidence.tensors().items()}
    tensors |= {f"memory.{name}": t for name, t in state.memories().items()}
    tensors |= {f"carry.{name}": t for name, t in state.carry.items()}
    if state.tail is not None:
        fields["rows"], fields["heads"] = state.rows, state.heads
        fields["tail"], kept = state.tail.state()
        tensors |= {f"tail.{name}": t for name, t in kept.items()}
    fields["segments"] = []
    for i, segment in enumerate(state.here()):
        own, kept = segment.state()
        layout = {"size": segment.layout.size, "start": segment.layout.start}
        fields["segments"].append({"codec": segment.codec, "layout": layout, "fields": own})
        tensors |= {f"segment.{i}.{name}": t for name, t in kept.items()}
        tensors |= {f"segment.{i}.layout.{name}": t for name, t in segment.layout.tensors().items()}
    return fields, tensors


def _restore(state: LayerState, fields: Mapping[str, Any], tensors: Mapping[str, Tensor], plan: Plan) -> None:
    """Makes a layer what `_layer_state` described."""
    state.reset()
    for name in _COUNTERS:
        setattr(state, name, fields[name])
    if "tail" not in fields:
        return
    rows, heads = fields["rows"], fields["heads"]
    state.tail = Tail.from_state(rows, heads, fields["tail"], _under("tail.", tensors))
    for i, saved in enumerate(fields["segments"]):
        mine = _under(f"segment.{i}.", tensors)
        size, start = saved["layout"]["size"], saved["layout"]["start"]
        own = _under("layout.", mine)
        layout = Layout(
            rows=rows,
            heads=heads,
            size=size,
            start=start,
            positions=own.get("positions"),
            owner=own.get("owner"),
            lengths=own.get("lengths"),
        )
        state.codec(plan)
        segment = state.restored(saved["codec"], layout, saved["fields"], mine)
        state.segments.append(segment)
    state.rejoin()
    state.evidence = Evidence.from_tensors(_under("evidence.", tensors))
    state.carry = _under("carry.", tensors)
    for name, tensor in _under("memory.", tensors).items():
        setattr(state, name, tensor)


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _described(cache: KvCache) -> dict[str, Any]:
    geometry = cache.geometry
    return {
        "model_type": geometry.model_type,
        "windows": list(geometry.windows),
        "q_heads": geometry.q_heads,
        "kv_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
    }
