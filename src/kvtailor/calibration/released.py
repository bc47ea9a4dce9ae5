"""Files of other projects as calibrations: Q-filters, DuoAttention's patterns, LU-KV's curves, checkpoints' scales.

Q-filters (`nthngdy/*_qfilt` on the hub, arXiv 2503.02812) are one safetensors file with the tensor `q_filters`,
(layers, kv heads, d), and keys are scored there by minus their projection: the sign is turned here. A pattern of
DuoAttention (arXiv 2410.10819) is `full_attention_heads.tsv`, a line for each layer and in it a number for each kv
head, separated by tabs and cut to 0 to 1 where it is used; `config.json` beside it has the sizes that its streaming
heads were trained with. A curve of LU-KV (arXiv 2602.08585) is one NumPy array (99, layers, kv heads): the share that
each head drops where 1 to 99 percent of all tokens go. These formats are as kvpress (Apache-2.0) reads them. A
checkpoint with scales of an 8-bit cache is a folder that serving engines load, see `checkpoint_scales`.

Nothing in such a file says which weights it was made from: that is the caller's word. What text it was measured on is
not known either, so the bench cannot refuse to judge it by that text, and the file's verdict says so.
"""

from __future__ import annotations

import io
import json
import math
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from kvtailor.allocate.lukv import RATIOS
from kvtailor.bench.data.overlap import written
from kvtailor.calibration.checkpoint_scales import read_scales
from kvtailor.calibration.run import head_of, subject_of
from kvtailor.calibration_file import Calibration, read, write
from kvtailor.errors import CalibrationError, UnknownName
from kvtailor.hf.model.geometry import Geometry
from kvtailor.ops.files import read_file, read_text

__all__ = ["RELEASED", "import_released"]

_PATTERN, _FILTERS, _CONFIG = "full_attention_heads.tsv", "model.safetensors", "config.json"


def import_released(
    kind: str, model: Any, source: str | os.PathLike[str], *, out: str | os.PathLike[str], again: bool = False
) -> Calibration:
    """Write a calibration file from one that another project released for the very model.

    ```python
    import_released("qfilters", "meta-llama/Llama-3.1-8B", "model.safetensors", out="filters.safetensors")
    ```

    Args:
        kind: one of `RELEASED`.
        model: as for `kvtailor.calibrate`.
        source: the file, or the folder that holds it under its own name.
        out: the file to write.
        again: replace a file that is there.

    Raises:
        UnknownName: nothing released is known of this kind.
        CalibrationError: `out` is there already, or the source is damaged, of another format or of other shapes.
        KvtailorError: the model cannot be loaded or compressed.
    """
    if kind not in RELEASED:
        raise UnknownName("kind of released file", kind, RELEASED)
    target, path = Path(out).expanduser(), Path(source).expanduser()
    if target.exists() and not again:
        raise CalibrationError(f"{target} is there already: give another file, or ask for it again (again, --again)")
    subject = subject_of(model)
    geometry = Geometry.of(subject.model.config)
    if kind == _SCALES:
        digest, tensors = _scales(path, geometry)
    else:
        if path.is_dir():
            # A curve has a name of its own for each model and score.
            path = path / {"qfilters": _FILTERS, "duo": _PATTERN}.get(kind, "")
        digest, tensors = _of_file(kind, path, geometry, subject.name)
    facts: dict[str, Any] = {
        "verdict": "imported; on which text it was measured is not known, so no record can vouch for another",
        "released": {"file": path.name, "sha256": digest, "beside": {} if kind == _SCALES else _beside(path)},
    }
    words = ["kvtailor", "calibrate", kind, "--model", subject.name, "--released", path.name, "--out", target.name]
    head = head_of(kind, subject, {"tokens": 0, "imported": path.name, "command": shlex.join(words)})
    write(target, tensors, {**head, "facts": json.dumps(facts), **written(())})
    return read(str(target), kind, "what was just written")


def _of_file(kind: str, path: Path, geometry: Geometry, model: str) -> tuple[str, dict[str, Tensor]]:
    """The file's sha256, and its tensor of the compressed layers."""
    try:
        content = read_file(str(path), f"{kind}: released")
    except ValueError as error:
        raise CalibrationError(str(error)) from error
    name, found = _READERS[kind](content.data, path)
    wanted = (geometry.layers, geometry.kv_heads, RATIOS if kind == "lukv" else geometry.head_dim)[: found.ndim]
    if tuple(found.shape) != wanted:
        raise CalibrationError(
            f"{path} is for a model of {_told(tuple(found.shape))}, and {model} has {_told(wanted)}: give the file "
            "that was released for it"
        )
    return content.hash, {name: found[list(geometry.compressed)]}


def _scales(folder: Path, geometry: Geometry) -> tuple[str, dict[str, Tensor]]:
    """A hash of a checkpoint's scales, and these for each kv head of the compressed layers."""
    found = read_scales(folder)
    sides = {"key_scale": found.keys, "value_scale": found.values}
    lacking = [layer for layer in geometry.compressed if layer not in found.keys]
    sizes = {each.numel() for scales in sides.values() for each in scales.values()}
    if lacking or not sizes <= {1, geometry.kv_heads}:
        raise CalibrationError(
            f"{folder} has {sorted(sizes)} scales for each of {len(found.keys)} layers, and the model has "
            f"{len(geometry.compressed)} layers of {geometry.kv_heads} kv heads: give a checkpoint of that model"
        )
    tensors = {
        name: torch.stack([scales[layer].expand(geometry.kv_heads).clone() for layer in geometry.compressed])
        for name, scales in sides.items()
    }
    return found.hash, tensors


def _filters(data: bytes, path: Path) -> tuple[str, Tensor]:
    """Filters (layers, h, d) in our sign."""
    try:
        tensors = safetensors.torch.load(data)
    except (SafetensorError, ValueError) as error:
        raise CalibrationError(f"{path} is damaged or no safetensors file ({error}): fetch it again") from error
    found = tensors.get("q_filters")
    if found is None or found.ndim != 3 or not bool(found.isfinite().all()):
        raise CalibrationError(
            f"{path} holds {', '.join(sorted(tensors)) or 'nothing'}, and released Q-filters are one finite tensor "
            "q_filters of (layers, kv heads, head size)"
        )
    return "filters", -found.float()


def _gates(data: bytes, path: Path) -> tuple[str, Tensor]:
    """Gates (layers, h) from 0 to 1."""
    lines = [line for line in data.decode("utf-8", errors="replace").splitlines() if line.strip()]
    try:
        rows = [[float(word) for word in line.split("\t")] for line in lines]
    except ValueError as error:
        raise CalibrationError(f"{path} is no table of numbers with tabs between ({error}): fetch it again") from error
    if len({len(row) for row in rows}) != 1 or not all(math.isfinite(each) for row in rows for each in row):
        raise CalibrationError(
            f"{path} has {len(rows)} lines of {sorted({len(row) for row in rows})} numbers: expected a line for each "
            "layer with one finite number for each kv head"
        )
    return "gates", torch.tensor(rows).clamp(0, 1)


def _curve(data: bytes, path: Path) -> tuple[str, Tensor]:
    """Shares that go (layers, h, 99), from 0 to 1."""
    try:
        found = torch.from_numpy(np.asarray(np.load(io.BytesIO(data), allow_pickle=False), dtype=np.float32))
    except (ValueError, TypeError, EOFError, OSError) as error:
        raise CalibrationError(f"{path} is damaged or no NumPy array of numbers ({error}): fetch it again") from error
    if found.ndim != 3 or found.shape[0] != RATIOS or not bool(((found >= 0) & (found <= 1)).all()):
        raise CalibrationError(
            f"{path} holds an array of {tuple(found.shape)}, and a curve of LU-KV has shares from 0 to 1 of "
            f"({RATIOS}, layers, kv heads)"
        )
    return "pruned", found.permute(1, 2, 0).contiguous()


_SCALES = "static_fp8"
# What reads a released file: the name of its tensor here, and the tensor by layer of the model.
_READERS: dict[str, Callable[[bytes, Path], tuple[str, Tensor]]] = {"qfilters": _filters, "duo": _gates, "lukv": _curve}
RELEASED = (*_READERS, _SCALES)
"""The kinds of which files of others are known."""


def _beside(path: Path) -> dict[str, Any]:
    """What the configuration beside a released file says; nothing where there is none."""
    config = path.with_name(_CONFIG)
    if not config.is_file():
        return {}
    try:
        found = json.loads(read_text(config))
    except (OSError, ValueError, RecursionError) as error:
        raise CalibrationError(f"{config} is no JSON ({error}): fetch it again, or take it away") from error
    return dict(found) if isinstance(found, dict) else {}


def _told(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{size} {what}" for size, what in zip(shape, ("layers", "kv heads", "numbers"), strict=False))
