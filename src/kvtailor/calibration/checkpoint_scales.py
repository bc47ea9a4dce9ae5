"""Scales of 8-bit caches in checkpoints, as compressed-tensors writes and vLLM loads them.

A checkpoint that has them says so in `config.json` (`quantization_config.kv_cache_scheme`: 8-bit floats, symmetric, not
dynamic, with one scale for a layer, "tensor", or for each kv head, "attn_head"), and has two tensors for each layer,
`...layers.N.self_attn.k_scale` and `v_scale`, of shape (1,) or (kv heads, 1, 1). vLLM finds its own names from these
(`maybe_remap_kv_scale_name`), casts them to float32, and then stores its cache in 8-bit floats unless another
`--kv-cache-dtype` is asked for.

Names and shapes are as compressed-tensors 0.20.0 declares them for its modules, and as vLLM read them in 2026.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvtailor.encode.static_fp8 import StaticFp8
from kvtailor.errors import ArgumentError, FileError
from kvtailor.hf.model.calibrated import calibrations_of
from kvtailor.hf.model.geometry import Geometry
from kvtailor.hf.model.loading import load
from kvtailor.ops.files import read_text, write_whole
from kvtailor.plan import Plan

__all__ = ["CheckpointScales", "ScaledCheckpoint", "export_scales", "read_scales", "write_scales"]

_INDEX = "model.safetensors.index.json"
_STRATEGY = {"tensor": "tensor", "head": "attn_head"}
_PROJECTION = re.compile(r"(?P<base>.+)\.(?P<layer>\d+)\.self_attn\.(?:k_proj|qkv_proj)\.weight")
_SCALE = re.compile(r".+\.(?P<layer>\d+)\.(?:self_attn|attn)\.(?:attn\.|[kv]_proj\.)?(?P<side>[kv])_scale")
_NOT_TEXT = ("vision", "visual", "audio", "speech")


@dataclass(frozen=True, kw_only=True)
class ScaledCheckpoint:
    """A checkpoint that scales were written to.

    Attributes:
        folder: where it is.
        names: of the tensors that were added.
        per: what has a scale, "tensor" or "head".
        without: numbers of the model's layers that got none, since no plan compresses them.
    """

    folder: Path
    names: tuple[str, ...]
    per: Literal["tensor", "head"]
    without: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class CheckpointScales:
    """What a checkpoint has.

    Attributes:
        keys, values: float32 scales of each layer that has some, (1,) or (kv heads,), by its number in the model.
        hash: sha256 over their names and numbers.
    """

    keys: Mapping[int, Tensor]
    values: Mapping[int, Tensor]
    hash: str


def export_scales(
    plan: str | Plan, checkpoint: str | os.PathLike[str], out: str | os.PathLike[str]
) -> ScaledCheckpoint:
    """Copy a checkpoint to a new folder with the scales of a plan, for engines that load compressed-tensors.

    ```python
    export_scales("static_fp8(file=scales.safetensors)", "SmolLM2-135M-Instruct", "SmolLM2-fp8-cache")
    ```

    The checkpoint is loaded once, to see that the scales were measured on its very weights.

    Args:
        plan: `static_fp8` with the file of a calibration, and nothing else.
        checkpoint: a folder with `config.json` and safetensors.
        out: the folder to make.

    Raises:
        ArgumentError: the plan drops tokens, or is not this codec of keys and values with a file.
        CalibrationError: the file was made for other weights.
        FileError: see `write_scales`.
    """
    parsed = Plan.parse(plan) if isinstance(plan, str) else plan
    codec = parsed.encode
    if parsed.evicts or not isinstance(codec, StaticFp8) or codec.calibration is None or codec.only != "both":
        why = "which drops tokens" if parsed.evicts else "which has no calibrated scales of keys and values"
        raise ArgumentError(
            f"asked to write the scales of the plan {parsed}, {why}: run `kvtailor calibrate static_fp8 --model M "
            "--text T --out F.safetensors` and give static_fp8(file='F.safetensors') alone"
        )
    model, _ = load(Path(checkpoint).expanduser())
    calibrations_of(parsed, model)
    scales = codec.calibration.tensors
    return write_scales(
        checkpoint,
        scales["key_scale"],
        scales["value_scale"],
        out,
        layers=Geometry.of(model.config).compressed,
        per=codec.per,
    )


def write_scales(
    checkpoint: str | os.PathLike[str],
    keys: Tensor,
    values: Tensor,
    out: str | os.PathLike[str],
    *,
    layers: Sequence[int],
    per: Literal["tensor", "head"],
) -> ScaledCheckpoint:
    """Copy a checkpoint's files to a new folder, with scales among its tensors and their scheme in its configuration.

    Subfolders and hidden files are not copied. The weights are, byte for byte.

    Args:
        checkpoint: a folder with `config.json` and safetensors.
        keys, values: (l, h) float32 scales of each kv head of the layers.
        out: the folder to make; what is there already is refused.
        layers: numbers of these layers in the model, from 0.
        per: "tensor" writes the largest scale of a layer, "head" all.

    Raises:
        FileError: the folder is no such checkpoint, has scales already or weights of another scheme than
            compressed-tensors, names its layers in a way that is not known, or `out` cannot be written.
    """
    source, target = Path(checkpoint).expanduser(), Path(out).expanduser()
    if os.path.lexists(target):
        raise FileError(f"asked to write a checkpoint to {target}, which is there already: give another folder")
    files = _files_of(source)
    config = _with_scheme(_json_of(source / "config.json"), source, per)
    places = _places(files, source, layers)
    added: dict[Path, dict[str, Tensor]] = {}
    for number, layer in enumerate(layers):
        base, file = places[layer]
        for name, scales in (("k_scale", keys[number]), ("v_scale", values[number])):
            kept = scales.float().max().reshape(1) if per == "tensor" else scales.float().reshape(-1, 1, 1)
            added.setdefault(file, {})[f"{base}.{layer}.self_attn.{name}"] = kept.contiguous()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise FileError(f"asked to write a checkpoint to {target}, which failed: {error}") from error
    try:
        for path in sorted(source.iterdir()):
            if path.is_file() and not path.name.startswith("."):
                _copy(path, made / path.name, added.get(path, {}))
        write_whole(made / "config.json", json.dumps(config, indent=2) + "\n")
        if (source / _INDEX).is_file():
            index = _json_of(source / _INDEX)
            index["weight_map"] |= {name: file.name for file, named in added.items() for name in named}
            size = sum(each.numel() * each.element_size() for named in added.values() for each in named.values())
            if "total_size" in index.get("metadata", {}):
                index["metadata"]["total_size"] += size
            write_whole(made / _INDEX, json.dumps(index, indent=2) + "\n")
        made.chmod(0o755)
        made.rename(target)
    except OSError as error:
        raise FileError(f"asked to write a checkpoint to {target}, which failed: {error}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return ScaledCheckpoint(
        folder=target,
        names=tuple(name for named in added.values() for name in named),
        per=per,
        without=tuple(sorted({*places} - {*layers})),
    )


def read_scales(checkpoint: str | os.PathLike[str]) -> CheckpointScales:
    """Return the scales of a checkpoint's cache.

    Args:
        checkpoint: a folder with safetensors.

    Raises:
        FileError: it has no scales of keys and of values of the same layers, or some that are no finite numbers
            above 0.
    """
    source = Path(checkpoint).expanduser()
    found: dict[str, dict[int, Tensor]] = {"k": {}, "v": {}}
    digest = sha256()
    for path in _files_of(source):
        with _opened(path) as file:
            for name in sorted(file.keys()):
                if (match := _SCALE.fullmatch(name)) is not None:
                    scales = file.get_tensor(name).float().flatten()
                    if not bool((scales.isfinite() & (scales > 0)).all()):
                        raise FileError(f"{path} has {name}, which is no finite number above 0: fetch it again")
                    found[match["side"]][int(match["layer"])] = scales
                    digest.update(f"{name} {scales.tolist()}".encode())
    if not found["k"] or found["k"].keys() != found["v"].keys():
        raise FileError(
            f"asked for the scales of a cache in {source}, found those of the keys of {len(found['k'])} layers and of "
            f"the values of {len(found['v'])}: give a checkpoint with ...self_attn.k_scale and v_scale for each"
        )
    return CheckpointScales(keys=found["k"], values=found["v"], hash=digest.hexdigest())


def _files_of(source: Path) -> list[Path]:
    found = sorted(source.glob("*.safetensors")) if source.is_dir() else []
    if not found:
        raise FileError(f"asked for the checkpoint in {source}, found no folder with *.safetensors: give one")
    return found


def _json_of(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(
            f"asked for the checkpoint in {path.parent}, whose {path.name} cannot be read: {error}"
        ) from error
    if not isinstance(found, dict):
        raise FileError(f"{path} holds no JSON object: fetch it again")
    return found


def _with_scheme(config: dict[str, Any], source: Path, per: str) -> dict[str, Any]:
    """The configuration with the scheme of the cache in it."""
    known = config.get("quantization_config")
    if known is not None and known.get("quant_method") != "compressed-tensors":
        raise FileError(
            f"{source} has weights of the scheme {known.get('quant_method')!r}, and scales of a cache stand in the "
            "configuration of compressed-tensors: give a checkpoint without a quantization_config, or one of that"
        )
    if known is not None and known.get("kv_cache_scheme") is not None:
        raise FileError(f"{source} has a kv_cache_scheme already: give the checkpoint that it was made from")
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": _STRATEGY[per], "dynamic": False}
    own = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "frozen",
        "config_groups": {},
        "ignore": [],
    }
    return {**config, "quantization_config": {**(known or own), "kv_cache_scheme": scheme}}


def _places(files: Sequence[Path], source: Path, layers: Sequence[int]) -> dict[int, tuple[str, Path]]:
    """For each layer of the model what its tensors' names begin with, and the file that its keys' weights are in."""
    found: dict[str, dict[int, tuple[str, Path]]] = {}
    for path in files:
        with _opened(path) as file:
            names = file.keys()
            for name in names:
                if _SCALE.fullmatch(name):
                    raise FileError(f"{source} has {name} already: give the checkpoint that it was made from")
                match = _PROJECTION.fullmatch(name)
                if match is not None and not any(word in name for word in _NOT_TEXT):
                    found.setdefault(match["base"], {})[int(match["layer"])] = match["base"], path
    fitting = {base: places for base, places in found.items() if places.keys() >= {*layers}}
    if len(fitting) != 1:
        there = ", ".join(f"{base} with {len(places)} layers" for base, places in found.items()) or "none"
        raise FileError(
            f"asked for the attention of {len(layers)} layers in {source}, under names like "
            f"model.layers.0.self_attn.k_proj.weight; found {there}: scales cannot be named there"
        )
    return next(iter(fitting.values()))


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise FileError(f"{path} is damaged or no safetensors file ({error}): fetch it again") from error


def _copy(path: Path, to: Path, added: Mapping[str, Tensor]) -> None:
    """Copy a file; into one of safetensors put float32 tensors before the others, whose bytes stay as they are."""
    if not added:
        shutil.copyfile(path, to)
        return
    with path.open("rb") as given, to.open("wb") as made:
        head = json.loads(given.read(int.from_bytes(given.read(8), "little")))
        data = b"".join(each.to(torch.float32).numpy().tobytes() for each in added.values())
        own = dict(_entries(added))
        others = {
            name: entry if name == "__metadata__" else {**entry, "data_offsets": [at + len(data) for at in _at(entry)]}
            for name, entry in head.items()
        }
        metadata = {name: others.pop(name) for name in ("__metadata__",) if name in others}
        text = json.dumps({**metadata, **own, **others}).encode()
        # A pair of scales is a multiple of eight bytes, so that what was aligned stays so.
        text += b" " * (-len(text) % 8)
        made.write(len(text).to_bytes(8, "little") + text + data)
        shutil.copyfileobj(given, made, 1 << 24)


def _entries(added: Mapping[str, Tensor]) -> Iterator[tuple[str, dict[str, Any]]]:
    begin = 0
    for name, each in added.items():
        end = begin + 4 * each.numel()
        yield name, {"dtype": "F32", "shape": [*each.shape], "data_offsets": [begin, end]}
        begin = end


def _at(entry: Mapping[str, Any]) -> Sequence[int]:
    offsets: Sequence[int] = entry["data_offsets"]
    return offsets
