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
from kvtailor.ops.files import open_regular, read_text, write_whole
from kvtailor.plan import Plan

__all__ = [
    "CheckpointScales",
    "ScaledCheckpoint",
    "attention_names",
    "export_scales",
    "read_scales",
    "write_scales",
]

_CONFIG, _MODELOPT, _INDEX = "config.json", "hf_quant_config.json", "model.safetensors.index.json"
_ALGORITHM = "kv_cache_quant_algo"
# Where a configuration says in what format the cache is.
_FORMATS = ("kv_cache_scheme", _ALGORITHM)
_STRATEGY = {"tensor": "tensor", "head": "attn_head"}
_PROJECTION = re.compile(r"(?P<base>.+)\.(?P<layer>\d+)\.self_attn\.(?:k_proj|qkv_proj)\.weight")
_SCALE = re.compile(r".+\.(?P<layer>\d+)\.(?:self_attn|attn)\.(?:attn\.|(?:[kv]|qkv)_proj\.)?(?P<side>[kv])_scale")
_NOT_TEXT = ("vision", "visual", "audio", "speech")
_FLOATS = ("F32", "BF16", "F16")


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
    if lost := sorted(path.name for path in source.iterdir() if path.is_symlink() and not path.exists()):
        raise FileError(f"{source} has {lost[0]}, a link to nothing, which a copy would lack: fetch it")
    config = _with_scheme(_json_of(source / _CONFIG), source, per)
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
        write_whole(made / _CONFIG, json.dumps(config, indent=2) + "\n")
        if (source / _INDEX).is_file():
            index = _json_of(source / _INDEX)
            index["weight_map"] |= {name: file.name for file, named in added.items() for name in named}
            size = sum(each.numel() * each.element_size() for named in added.values() for each in named.values())
            if "total_size" in (index.get("metadata") or {}):
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
        FileError: it has no scales of keys and of values of the same layers, several for one of them, some that are no
            finite floats above 0 for a layer or for each kv head, or a configuration by which they are of another
            format than 8-bit floats.
    """
    source = Path(checkpoint).expanduser()
    found: dict[str, dict[int, Tensor]] = {"k": {}, "v": {}}
    names: dict[tuple[str, int], str] = {}
    digest = sha256()
    for path in _files_of(source):
        with _opened(path) as file:
            for name in sorted(file.keys()):
                match = _SCALE.fullmatch(name)
                if match is None or any(word in name for word in _NOT_TEXT):
                    continue
                side, layer = match["side"], int(match["layer"])
                if (side, layer) in names:
                    raise FileError(
                        f"{source} has two scales for one side of layer {layer}, {names[side, layer]} and {name} "
                        f"({path.name}): which of them is meant is not known; take one away"
                    )
                names[side, layer] = name
                scales = _scales_in(file, name, path)
                found[side][layer] = scales
                digest.update(f"{name} {scales.tolist()}".encode())
    if not found["k"] or found["k"].keys() != found["v"].keys():
        raise FileError(
            f"asked for the scales of a cache in {source}, found those of the keys of {len(found['k'])} layers and of "
            f"the values of {len(found['v'])}: give a checkpoint with ...self_attn.k_scale and v_scale for each"
        )
    _check_format(source)
    return CheckpointScales(keys=found["k"], values=found["v"], hash=digest.hexdigest())


def attention_names(checkpoint: str | os.PathLike[str], layers: Sequence[int]) -> list[str]:
    """Return the names of the modules of attention of some layers, such as "model.layers.0.self_attn".

    Args:
        checkpoint: a folder with safetensors.
        layers: their numbers in the model, from 0.

    Raises:
        FileError: it is no such folder, has scales already, or names its layers in a way that is not known.
    """
    source = Path(checkpoint).expanduser()
    places = _places(_files_of(source), source, layers)
    return [f"{places[layer][0]}.{layer}.self_attn" for layer in layers]


def _scales_in(file: Any, name: str, path: Path) -> Tensor:
    """(1,) or (kv heads,) float32."""
    kept = file.get_slice(name)
    dtype, shape = kept.get_dtype(), tuple(kept.get_shape())
    # (), (1,) or (1, 1, 1) for a layer; (kv heads,) or (kv heads, 1, 1) for each of its heads.
    if dtype not in _FLOATS or len(shape) > 3 or any(size != 1 for size in shape[1:]) or 0 in shape:
        raise FileError(
            f"{path} has {name} of {dtype} and shape {shape}: a scale of a cache is a float ({', '.join(_FLOATS)}), "
            "one for a layer or (kv heads, 1, 1); give a checkpoint that has such"
        )
    scales: Tensor = file.get_tensor(name).float().flatten()
    if not bool((scales.isfinite() & (scales > 0)).all()):
        raise FileError(f"{path} has {name}, which is no finite number above 0: fetch it again")
    return scales


def _check_format(source: Path) -> None:
    """What the configurations of compressed-tensors and of ModelOpt say of the cache, where they are there."""
    told: list[tuple[str, object]] = []
    if (source / _CONFIG).is_file():
        scheme = _json_of(source / _CONFIG).get("quantization_config")
        told += [(_CONFIG, scheme[key]) for key in _FORMATS if isinstance(scheme, dict) and scheme.get(key) is not None]
    if (source / _MODELOPT).is_file():
        scheme = _json_of(source / _MODELOPT).get("quantization")
        if isinstance(scheme, dict) and scheme.get(_ALGORITHM) is not None:
            told.append((_MODELOPT, scheme[_ALGORITHM]))
    for name, kept in told:
        is_fp8 = (
            kept.get("type") == "float" and kept.get("num_bits") == 8 and kept.get("symmetric") is not False
            if isinstance(kept, dict)
            else kept == "FP8"
        )
        if not is_fp8:
            raise FileError(
                f"asked for the scales of a cache in 8-bit floats in {source}, whose {name} says that they are of "
                f"{json.dumps(kept)}: give a checkpoint whose cache is in 8-bit floats (float, 8 bits, symmetric)"
            )


def _files_of(source: Path) -> list[Path]:
    """The files of the weights: those that its index names, which must be all that are there."""
    found = sorted(source.glob("*.safetensors")) if source.is_dir() else []
    if not found:
        raise FileError(f"asked for the checkpoint in {source}, found no folder with *.safetensors: give one")
    if (source / _INDEX).is_file():
        named = _weight_map(_json_of(source / _INDEX), source)
        there = {path.name for path in found}
        if lacking := sorted({*named.values()} - there):
            raise FileError(f"{source} has no {lacking[0]}, which its {_INDEX} names: fetch it")
        if more := sorted(there - {*named.values()}):
            raise FileError(
                f"{source} has {more[0]}, which its {_INDEX} does not name: a second copy of the weights, which "
                "loaders would take or leave; take it out of the folder, or give a folder without it"
            )
    owners: dict[str, Path] = {}
    for path in found:
        with _opened(path) as file:
            names = file.keys()
            for name in names:
                if name in owners:
                    raise FileError(
                        f"{source} has {name} in {owners[name].name} and in {path.name}: a second copy of the "
                        "weights; take one of them out of the folder"
                    )
                owners[name] = path
    return found


def _weight_map(index: dict[str, Any], source: Path) -> dict[str, str]:
    """The file of each tensor."""
    found = index.get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise FileError(f"{source / _INDEX} has no weight_map with the file of each tensor: fetch it again")
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
    if (source / _MODELOPT).is_file():
        raise FileError(
            f"{source} has {_MODELOPT}, the configuration of ModelOpt, beside which scales of compressed-tensors would "
            "be a second word on the cache: give a checkpoint without it"
        )
    if known is not None and not isinstance(known, dict):
        raise FileError(f"{source} has a quantization_config that is no object of JSON: fetch it again")
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
        # The library would wait for a pipe without an end.
        os.close(open_regular(path))
        return safe_open(path, framework="pt")
    except FileError:
        raise
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
