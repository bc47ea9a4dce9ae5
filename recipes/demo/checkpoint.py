"""Checkpoints of a training run as a folder of safetensors shards, so that a piece of a run can travel.

A folder is written beside the old one and then takes its place, so that a kill at any moment leaves a whole checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kvtailor.errors import ArgumentError

__all__ = ["SHARD_BYTES", "load_checkpoint", "save_checkpoint"]

SHARD_BYTES = 15 * 2**20


def save_checkpoint(folder: Path, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
    """Write ``tensors`` in shards of at most `SHARD_BYTES` bytes, and ``facts`` as JSON, in place of ``folder``.

    Raises:
        ArgumentError: one tensor alone is larger than a shard.
    """
    fresh, old = folder.with_name(f"{folder.name}.part"), folder.with_name(f"{folder.name}.old")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    shard: dict[str, torch.Tensor] = {}
    held = count = 0
    for name, tensor in tensors.items():
        if tensor.nbytes > SHARD_BYTES:
            raise ArgumentError(f"asked to save {name} of {tensor.nbytes:,} bytes, but a shard holds {SHARD_BYTES:,}")
        if held + tensor.nbytes > SHARD_BYTES:
            save_file(shard, fresh / f"{count:05}.safetensors")
            shard, held, count = {}, 0, count + 1
        shard[name] = tensor.detach().cpu().contiguous()
        held += tensor.nbytes
    save_file(shard, fresh / f"{count:05}.safetensors")
    (fresh / "facts.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
    """Tensors and facts of the checkpoint ``folder``, or of the one that a kill left beside it; None without any."""
    for place in (folder, folder.with_name(f"{folder.name}.old")):
        if (place / "facts.json").is_file():
            tensors: dict[str, torch.Tensor] = {}
            for file in sorted(place.glob("*.safetensors")):
                tensors.update(load_file(file))
            return tensors, json.loads((place / "facts.json").read_text(encoding="utf-8"))
    return None
