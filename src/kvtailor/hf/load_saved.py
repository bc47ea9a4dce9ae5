"""A cache from the file that `KvCache.save` wrote: every checksum, every layout and the model are compared first."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvtailor.engine.saving import HeadsOf, regroup, restore
from kvtailor.errors import CacheFileError, KvtailorError, PlanError
from kvtailor.hf.cache import KvCache
from kvtailor.hf.conversation import Conversation, Known
from kvtailor.hf.graphs.obstacles import check_processes
from kvtailor.hf.layers.compressed import CompressedLayer
from kvtailor.hf.layers.states import StatesMixin
from kvtailor.hf.layers.window import WindowLayer
from kvtailor.hf.make_cache import cache_for, find_layer_devices
from kvtailor.hf.model.devices import input_device
from kvtailor.hf.model.geometry import Geometry
from kvtailor.hf.model.tensor_parallel import RankHeads, fail_together, gather_objects, share_of
from kvtailor.hf.saved_model import differences, said_of_geometry, said_of_model
from kvtailor.hf.saved_ranks import Shard, StandIn, shards_of
from kvtailor.ops.segments.coded import under
from kvtailor.plan.calls import check_call
from kvtailor.store.cache_file import read_cache_file
from kvtailor.types import HeadShare

__all__ = ["load_cache"]

# What a file with wrong content raises while a cache is made from it.
_MALFORMED = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@check_call
def load_cache(model: Any, path: str | os.PathLike[str], *, graphs: bool = False) -> KvCache:
    """A cache that was saved, for the same model, in this or another process. It goes on exactly where it stopped.

    Every checksum is compared, all layouts are checked, and the model must have the weights, the dtype and the
    configuration that the file names; comparing weights costs what it does in `save`. A file of kvtailor 0.1.0 has
    neither checksums nor a fingerprint, and a warning is given.

    Where the model's kv heads lie on several processes, all of them call it; it may be another number of processes than
    the cache was saved by.

    Args:
        model: the model that the cache was made for.
        path: of a file, or of a folder of several processes, that `KvCache.save` wrote.
        graphs: replay decoded tokens as a CUDA graph from here on, see `kvtailor.cache_for`; whether the cache that was
            saved did so does not matter.

    Raises:
        CacheFileError: the file is damaged or no saved cache, or the model is another one.
        UnsupportedModel: steps of this model and plan cannot be recorded where `graphs` is set.
        CacheMisuse: `graphs` is set, and several processes share the model.
    """
    name = os.fspath(path)
    share = share_of(model, Geometry.of(model.config))
    if graphs:
        check_processes(share)
    with fail_together(share, CacheFileError):
        files = [_read(shard) for shard in _needed(shards_of(Path(path)), share, model)]
        _check_same(name, files)
    if isinstance(share, RankHeads):
        _check_alike(name, files[0], share)
    about = files[0].about
    try:
        cache = cache_for(model, about["plan"], cache_dtype=_stored(name, files[0], model))
    except KvtailorError as error:
        why = "; ".join(error.faults) if isinstance(error, PlanError) else str(error)
        raise CacheFileError(
            f"{name!r} was saved under the plan {about['plan']!r}, which cannot be used with this model: {why}"
        ) from error
    if cache.plan.hash != about["plan_hash"]:
        raise CacheFileError(f"{name!r} was saved under the plan {about['plan']!r}, which means something else now")
    _check_model(name, files[0], cache, model)
    if graphs:
        # Made anew, so that steps that cannot be recorded are refused in those words: nothing is wrong with the file.
        cache = cache_for(model, about["plan"], graphs=True, cache_dtype=cache.guard.stored_dtype or model.dtype)
    with fail_together(share, CacheFileError):
        try:
            if len(files) == 1 and files[0].shard.ranks == share.ranks:
                _fill(cache, about["layers"], files[0].tensors, model)
            else:
                _fill_from_shards(cache, files, model)
            _fill_conversation(cache, about, files[0].tensors.get("conversation.real"))
            _fill_rope_deltas(cache, about["rope_deltas"], files[0].tensors.get("rope_deltas"), model)
        except _MALFORMED as error:
            if isinstance(error, KvtailorError):
                raise
            raise _damaged(name, error) from error
    _warn_of_what_it_lacks(name, files[0])
    if cache.guard.rope.kept and about["rope_deltas"] is None:
        warnings.warn(
            f"{name!r} was written before kvtailor saved by how much images shift the positions of what follows them; "
            "if its conversation has images, what comes next is read at wrong positions: make the cache again",
            stacklevel=2,
        )
    return cache


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What one file says.

    Attributes:
        shard: the file.
        tensors: by name, also by those that stand for another one.
        about: its texts, read as JSON where they are.
        checked: it has checksums.
    """

    shard: Shard
    tensors: Mapping[str, Tensor]
    about: Mapping[str, Any]
    checked: bool


def _read(shard: Shard) -> _Part:
    name = str(shard.path)
    file = read_cache_file(shard.path)
    try:
        about: dict[str, Any] = {each: json.loads(file.about[each]) for each in ("geometry", "layers")}
        about["conversation"] = json.loads(file.about.get("conversation", "[]"))
        about["reordered"] = json.loads(file.about.get("reordered", "false"))
        about["rope_deltas"] = json.loads(file.about.get("rope_deltas", "null"))
        about["cache_dtype"] = json.loads(file.about.get("cache_dtype", "null"))
        about["model"] = json.loads(file.about["model"]) if file.checked else None
        about["plan"], about["plan_hash"] = file.about["plan"], file.about["plan_hash"]
        part = json.loads(file.about.get("part", "null"))
        same = json.loads(file.about.get("same", "{}"))
        tensors = {**file.tensors, **{each: file.tensors[first] for each, first in same.items()}}
    except _MALFORMED as error:
        raise _damaged(name, error) from error
    shard.check(part)
    return _Part(shard=shard, tensors=tensors, about=about, checked=file.checked)


def _needed(shards: list[Shard], share: HeadShare, model: Any) -> list[Shard]:
    """The files that have heads of this process."""
    heads = Geometry.of(model.config).kv_heads
    if heads % len(shards):
        raise CacheFileError(
            f"{str(shards[0].path.parent)!r} was saved by {len(shards)} processes, and {heads} kv heads of this model "
            "cannot have lain on them evenly: it was saved from another model"
        )
    mine, each = heads // share.ranks, heads // len(shards)
    first = share.first(mine)
    return [shard for shard in shards if shard.rank * each < first + mine and first < (shard.rank + 1) * each]


def _check_alike(name: str, file: _Part, share: RankHeads) -> None:
    """Raise on all processes where they have read different savings, as a folder of each machine's own would have."""
    what = (file.shard.saving, file.shard.ranks, file.about["plan_hash"], file.about["conversation"])
    seen = sorted({each.get("seen", 0) for each in file.about["layers"]})
    told = gather_objects(share, (*what, seen))
    other = next((rank for rank, each in enumerate(told) if each != told[0]), None)
    if other is not None:
        raise CacheFileError(
            f"the processes read different caches from {name!r}: process 0 that of saving {told[0][0]} ({told[0][4]} "
            f"tokens seen), process {other} that of {told[other][0]} ({told[other][4]}); name a folder that all of "
            "their machines share"
        )


def _check_same(name: str, files: list[_Part]) -> None:
    for file in files[1:]:
        for what in ("plan_hash", "geometry", "model", "conversation", "cache_dtype"):
            if file.about[what] != files[0].about[what]:
                raise _damaged(name, ValueError(f"its files differ in their {what}"))


def _fill_from_shards(cache: KvCache, files: list[_Part], model: Any) -> None:
    """Fill a cache with the heads that lie on other processes now than when they were saved."""
    whole = cache.geometry.kv_heads
    mine = whole // cache.share.ranks
    start = cache.share.first(mine)
    saved: list[tuple[KvCache, int, int]] = []
    for file in files:
        each = whole // file.shard.ranks
        before = file.shard.rank * each
        first, last = max(start, before), min(start + mine, before + each)
        there = StandIn(file.shard.rank, file.shard.ranks)
        # On several processes a cache is in the dtype of its model, see `cache_for`.
        part = KvCache(cache.plan, cache.geometry, cache.guard.config, share=there)
        for own, state in zip(cache.engine.states, part.engine.states, strict=True):
            state.model = replace(own.model, share=there)
        _fill(part, file.about["layers"], file.tensors, model)
        saved.append((part, first - before, last - first))
    for index, layer in enumerate(cache.layers):
        parts = [part.layers[index] for part, _, _ in saved]
        if isinstance(layer, CompressedLayer):
            pieces = [
                HeadsOf(state=part.state, first=first, count=count)
                for part, (_, first, count) in zip(parts, saved, strict=True)
            ]
            regroup(layer.state, pieces, cache.plan)
        if parts[0].is_initialized:
            if isinstance(layer, CompressedLayer):
                layer.initialize_as(torch.empty(0, dtype=parts[0].dtype, device=parts[0].device))
                continue
            # (b, h, n, d) of the model's own window.
            keys, values = (
                torch.cat(
                    [
                        getattr(part, side)[:, first : first + count]
                        for part, (_, first, count) in zip(parts, saved, strict=True)
                    ],
                    1,
                )
                for side in ("keys", "values")
            )
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values, layer.cumulative_length = keys, values, parts[0].cumulative_length
    cache.guard.real = saved[0][0].guard.real


def _damaged(name: str, error: Exception) -> CacheFileError:
    return CacheFileError(
        f"the saved cache {name!r} is damaged or was changed, and no cache can be made from it "
        f"({type(error).__name__}: {error}); make the cache again from its prompt, and save it"
    )


def _check_model(name: str, file: _Part, cache: KvCache, model: Any) -> None:
    """Refuse a model of other shapes, weights, dtype or configuration."""
    about = file.about
    try:
        clauses = differences(about["geometry"], said_of_geometry(cache.geometry))
        if about["model"] is not None and not clauses:
            clauses = differences(about["model"], said_of_model(model))
        dtypes = {each["dtype"] for each in about["layers"] if each.get("dtype") is not None}
    except _MALFORMED as error:
        raise _damaged(name, error) from error
    own, device = str(model.dtype).removeprefix("torch."), input_device(model).type
    if not file.checked and dtypes - {own} and not torch.is_autocast_enabled(device):
        clauses.append(f"its keys are {', '.join(sorted(dtypes))} there and would be {own} here, outside of autocast")
    if clauses:
        raise CacheFileError(
            f"{name!r} was saved from another model: {'; '.join(clauses)}. Load it with the model that it was made "
            "from, or make a cache for this one from the prompt"
        )


def _warn_of_what_it_lacks(name: str, file: _Part) -> None:
    model = file.about["model"]
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


def _fill_window(layer: WindowLayer, index: int, mine: Mapping[str, Tensor], rows: set[int], heads: int) -> None:
    """Give a window of the model's own its keys and values; `rows` is empty where no other layer says how many."""
    for states in (mine["keys"], mine["values"]):
        if states.ndim != 4 or states.shape[:2] != (*(rows or {states.shape[0]}), heads):
            raise ValueError(f"a window of layer {index} has the shape {tuple(states.shape)}")
    layer.lazy_initialization(mine["keys"], mine["values"])
    layer.keys, layer.values = mine["keys"], mine["values"]


def _fill(cache: KvCache, layers: list[Any], saved: Mapping[str, Tensor], model: Any) -> None:
    """Fill an empty cache from the fields of its layers and the tensors.

    Raises:
        Any of `_MALFORMED`: they do not fit together.
    """
    places = find_layer_devices(model, cache.geometry)
    moved: dict[tuple[int, torch.device], Tensor] = {}
    tensors = {}
    for name, tensor in saved.items():
        number = name.partition(".")[0]
        device = places[int(number)] if number.isdecimal() else input_device(model)
        # A tensor of several names stays one.
        tensors[name] = moved.setdefault((id(tensor), device), tensor.to(device))
    rows = {each["rows"] for each in layers if "rows" in each}
    if len(rows) > 1 or len({each["seen"] for each in layers if "seen" in each}) > 1:
        raise ValueError("its layers differ in their rows, or in the tokens that they have seen")
    for index, (layer, fields) in enumerate(zip(cache.layers, layers, strict=True)):
        mine = under(f"{index}.", tensors)
        if isinstance(layer, CompressedLayer):
            heads = cache.own_geometry.shapes[index].kv_heads
            held = {name: tensor for name, tensor in mine.items() if not name.startswith("state.")}
            shape = cache.own_geometry.shapes[index]
            sizes = None if cache.own_geometry.has_latents else (shape.key_size, shape.value_size)
            dtype = None if fields["dtype"] is None else _dtype(fields["dtype"])
            restore(layer.state, fields, held, cache.plan, heads, dtype, sizes)
            if dtype is not None:
                layer.initialize_as(torch.empty(0, dtype=dtype, device=places[index]))
        elif isinstance(layer, WindowLayer) and mine:
            _fill_window(layer, index, mine, rows, cache.own_geometry.shapes[index].kv_heads)
            layer.cumulative_length = fields["seen"]
        known = ("state.",) if not isinstance(layer, WindowLayer) else ("state.", "keys", "values")
        if not isinstance(layer, CompressedLayer) and (odd := [name for name in mine if not name.startswith(known)]):
            raise ValueError(f"layer {index} is one of the model's own, and has {', '.join(odd[:3])}")
        if isinstance(layer, StatesMixin):
            layer.restore_states(fields["states"], under("state.", mine), next(iter(rows), None))
    beside = {"real", "conversation.real", "rope_deltas"}
    numbers = {str(index) for index in range(len(layers))}
    if odd := [name for name in tensors if name not in beside and name.partition(".")[0] not in numbers]:
        raise ValueError(f"it has tensors of no layer: {', '.join(odd[:3])}")
    real = tensors.get("real")
    if real is not None and (real.dtype != torch.bool or real.ndim != 2 or real.shape[0] not in (rows or {len(real)})):
        raise ValueError(f"its mask of tokens that are no padding is {real.dtype} of shape {tuple(real.shape)}")
    cache.guard.real = real


def _stored(name: str, file: _Part, model: Any) -> torch.dtype:
    """In which dtype the cache held keys and values."""
    said = file.about["cache_dtype"]
    # A model in another dtype than the one that it was saved from is refused where models are compared.
    if said is None or model.dtype is not torch.float32:
        own: torch.dtype = model.dtype
        return own
    try:
        return _dtype(said)
    except ValueError as error:
        raise _damaged(name, error) from error


def _dtype(name: object) -> torch.dtype:
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"its dtype is said to be {name!r}")
    return found


def _fill_conversation(cache: KvCache, about: Mapping[str, Any], real: Tensor | None) -> None:
    """Tell a cache which ids it has seen; raises as `_fill` does."""
    if real is not None and (real.dtype != torch.bool or real.ndim != 2):
        raise ValueError(f"its mask of known token ids is {real.dtype} of shape {tuple(real.shape)}")
    known, real = about["conversation"], None if real is None else real.cpu()
    beginnings = [Known(int(columns), tuple(int(each) for each in hashes)) for columns, *hashes in known]
    cache.conversation = Conversation(beginnings, real, reordered=bool(about["reordered"]))


def _fill_rope_deltas(cache: KvCache, known: bool | None, values: Tensor | None, model: Any) -> None:
    """Tell a cache by how much images have shifted positions; raises as `_fill` does."""
    values = None if values is None else values.to(input_device(model))
    cache.guard.rope.restore(values, rows=cache.rows, known=known is not False)
