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

from kvtailor.engine.layer_saving import restore
from kvtailor.errors import CacheFileError, KvtailorError, PlanError
from kvtailor.hf.cache import KvCache
from kvtailor.hf.conversation import Conversation, Known
from kvtailor.hf.layers import CompressedLayer
from kvtailor.hf.make_cache import cache_for
from kvtailor.hf.saved_model import differences, said_of_geometry, said_of_model
from kvtailor.ops.segments.coded import under
from kvtailor.store.cache_file import CacheFile, read_cache_file

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
        mine = under(f"{index}.", tensors)
        if isinstance(layer, CompressedLayer):
            restore(layer.state, fields, mine, cache.plan, cache.geometry.kv_heads)
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
