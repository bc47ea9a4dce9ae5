"""A compressed cache as one file: what is held, encoded as it is, the plan that goes on with it, and the model's marks.

What a file looks like is `store.cache_file`; what it has about the model, `hf.saved_model`; `hf.load_saved` reads it.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvtailor.engine.saving import state_of
from kvtailor.errors import CacheFileError
from kvtailor.hf.conversation import Conversation
from kvtailor.hf.guard import CacheGuard
from kvtailor.hf.layers.compressed import CompressedLayer
from kvtailor.hf.layers.states import StatesMixin
from kvtailor.hf.layers.window import WindowLayer
from kvtailor.hf.model.tensor_parallel import RankHeads, fail_together
from kvtailor.hf.saved_model import said_of_geometry, said_of_model
from kvtailor.hf.saved_ranks import save_ranks
from kvtailor.store.cache_file import write_cache_file

__all__ = ["save"]


def save(
    path: str | os.PathLike[str],
    layers: Sequence[Any],
    guard: CacheGuard,
    conversation: Conversation,
    more: Mapping[str, str] | None = None,
) -> None:
    """Write a cache, which must not be between a recorded forward and its crop. The file appears whole or not at all.

    The file has a checksum of every tensor and of its header, and a fingerprint of the model, for which all weights are
    read once more: see `hf.model.fingerprint.weight_fingerprint` for what that costs.

    Where the kv heads lie on several processes, all of them call it, and `path` becomes a folder with a file of each.

    Args:
        path: of the file; one that exists is replaced.
        layers: of the cache.
        guard: of the cache.
        conversation: that the cache has seen.
        more: further texts of the header, by names that a cache does not use.

    Raises:
        CacheFileError: the file cannot be written; one that was there is as it was.
        CacheMisuse: the cache is between a recorded forward and its crop.
    """
    fields: list[Any] = []
    tensors: dict[str, Tensor] = {}
    for index, layer in enumerate(layers):
        if isinstance(layer, CompressedLayer):
            own, kept = state_of(layer.state)
            fields.append({**own, "dtype": _name(layer.dtype) if layer.is_initialized else None})
        else:
            windowed = isinstance(layer, WindowLayer)
            kept = {"keys": layer.keys, "values": layer.values} if windowed and layer.is_initialized else {}
            fields.append({"seen": layer.get_seq_length()} if windowed else {})
        if isinstance(layer, StatesMixin):
            kept |= {f"state.{name}": tensor for name, tensor in layer.states().items()}
            fields[-1]["states"] = layer.states_facts()
        tensors |= {f"{index}.{name}": tensor for name, tensor in kept.items()}
    if guard.real is not None:
        tensors["real"] = guard.real
    if conversation.real is not None:
        tensors["conversation.real"] = conversation.real
    if guard.rope.values is not None:
        tensors["rope_deltas"] = guard.rope.values
    once, same = _once(tensors)
    about = {
        **(more or {}),
        "plan": str(guard.plan),
        "plan_hash": guard.plan.hash,
        "geometry": json.dumps(said_of_geometry(guard.geometry)),
        "model": json.dumps(_model_of(guard)),
        "layers": json.dumps(fields),
        "same": json.dumps(same),
        "rope_deltas": json.dumps(guard.rope.known),
        **({} if guard.stored_dtype is None else {"cache_dtype": json.dumps(_name(guard.stored_dtype))}),
        "conversation": json.dumps([[known.columns, *known.hashes] for known in conversation.known]),
        "reordered": json.dumps(conversation.reordered),
    }
    share = guard.share
    if Path(path).is_dir() and share.ranks == 1:
        raise CacheFileError(
            f"asked to save a cache to {os.fspath(path)!r}, which is a folder: one process writes a file, so name one"
        )
    if not isinstance(share, RankHeads):
        write_cache_file(Path(path), once, about)
    elif share.ranks > 1:
        save_ranks(
            Path(path), share, lambda own, mark: write_cache_file(own, once, {**about, "part": json.dumps(mark)})
        )
    else:
        # Every process has all heads.
        with fail_together(share, CacheFileError):
            if share.process == 0:
                write_cache_file(Path(path), once, about)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _model_of(guard: CacheGuard) -> dict[str, Any] | None:
    model = None if guard.model is None else guard.model()
    if model is None:
        warnings.warn(
            "the model of this cache is gone, so the saved file cannot have a fingerprint of its weights, and a "
            "model of other weights would be taken for it; save the cache while its model exists",
            stacklevel=4,
        )
        return None
    return said_of_model(model)


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
