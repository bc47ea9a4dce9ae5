"""The constant that a model's key projections add to all keys, and the plans that it harms.

A bias of the key projection is in every key, and in Qwen2 and Qwen2.5 it is many times what keys differ by. Codes in
few levels with one scale for a whole key spend them on it (`Codec.bears_offset`).
"""

from __future__ import annotations

import inspect
import math
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from kvtailor.encode.contract import CodecContext
from kvtailor.errors import UnsupportedModel
from kvtailor.hf.model.devices import runs_on
from kvtailor.hf.model.geometry import Geometry
from kvtailor.hf.model.loading import load_bare
from kvtailor.hf.model.modules import angles_at, modules_by_layer, rotation_of
from kvtailor.hf.model.projection import output_layer
from kvtailor.hf.versions import ATTENTION_CACHE_ARGUMENTS
from kvtailor.ops.lanes.rotate import turn
from kvtailor.plan import Plan
from kvtailor.types import KeyOffset, Rotation

__all__ = [
    "INSTEAD",
    "bits_taken",
    "harmed_by_key_bias",
    "has_key_bias",
    "key_bias_bits",
    "key_offset_of",
    "said_without_weights",
    "sentence_of",
    "warn_of_key_bias",
]

INSTEAD = "kivi4 or kvquant4"
"""Presets that lose nothing by such a bias."""
_MUCH = 2.0
# Stands for a constant that is not at hand.
_TAKEN_OFF = KeyOffset(vectors=torch.zeros(1, 1, dtype=torch.float32))
_PAIRS = 4
# Bits of an attention module, found once for the biases that it had then.
_known: weakref.WeakKeyDictionary[nn.Module, tuple[object, float]] = weakref.WeakKeyDictionary()
# The constants of an attention module's keys, likewise: all caches of a model share them, and none holds one.
_offsets: weakref.WeakKeyDictionary[nn.Module, tuple[list[Tensor], KeyOffset | None]] = weakref.WeakKeyDictionary()
_warned: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


class _KeysSeen(Exception):
    """Ends an attention's forward once it has handed its keys to the cache."""

    def __init__(self, keys: Tensor):
        super().__init__("keys")
        self.keys = keys


class _Probe:
    """Stands for a cache in an attention's forward, and takes the keys (1, h, t, d)."""

    is_updated: Mapping[int, bool] = {}

    def update(self, keys: Tensor, *_: object, **__: object) -> None:
        raise _KeysSeen(keys)

    def get_seq_length(self, *_: object) -> int:
        return 0


def has_key_bias(module: nn.Module) -> bool:
    """Whether an attention module has a projection with a bias, its output projection apart."""
    return bool(_biases(module))


def key_bias_bits(model: Any, geometry: Geometry) -> dict[int, float]:
    """Return the bits of a key's codes that the constant in all keys takes, by compressed layer that has a bias.

    Of a kv head: 0.5 log2(1 + |o|^2 / E|W x|^2), where o is what the layer makes of no input and W x what its keys
    differ by, for inputs of independent channels behind the layer's norm. The largest of the layer's heads counts. A
    layer whose keys are not of that form, or whose forward cannot be asked, is left out.

    Args:
        model: a transformers causal language model, its weights loaded.
        geometry: of the model.
    """
    modules = modules_by_layer(model)
    found = {}
    for layer in geometry.compressed:
        if layer in modules and has_key_bias(modules[layer]) and not geometry.shapes[layer].latents:
            bits = _bits_of(model, modules[layer], geometry.shapes[layer].kind)
            if bits is not None:
                found[layer] = bits
    return found


def bits_taken(constant: Tensor, spread: Tensor) -> float:
    """Return the bits of a key's codes that a constant takes, of the kv head where they are most.

    Args:
        constant: (h,) its square in each kv head.
        spread: (h,) mean square of what keys differ by.
    """
    return 0.5 * math.log2(1 + float((constant / spread.clamp_min(1e-30)).max()))


def harmed_by_key_bias(
    plan: Plan,
    layers: Sequence[int],
    bits: Mapping[int, float],
    offsets: Mapping[int, KeyOffset | None] | None = None,
) -> dict[int, float]:
    """Return the bits of the layers where the constant takes two or more, and where the plan codes keys coarsely.

    Args:
        plan: of a cache.
        layers: that the plan compresses.
        bits: as `key_bias_bits` gives them.
        offsets: what `centred` takes off, by layer; None: taken to be known wherever it is asked for.
    """
    found = {}
    for index, layer in enumerate(layers):
        if bits.get(layer, 0.0) >= _MUCH:
            known = _TAKEN_OFF if offsets is None else offsets.get(layer)
            context = CodecContext(layer=index, layers=len(layers), offset=known)
            if not plan.encode.for_layer(context).bears_offset:
                found[layer] = bits[layer]
    return found


def sentence_of(plan: Plan, harmed: Mapping[int, float]) -> str:
    """Return what to say of a plan on a model in whose `harmed` layers it codes keys coarsely; not empty."""
    return (
        f"{_harm(plan, harmed)}. Write the codec inside centred(of=...), which takes the bias off before it codes, as "
        f"the presets turboquant4 and quarot4 do, use {INSTEAD}, or measure the loss with kvtailor bench"
    )


def _harm(plan: Plan, harmed: Mapping[int, float]) -> str:
    worst = max(harmed, key=lambda layer: harmed[layer])
    where = f"layer {worst}" if len(harmed) == 1 else f"{len(harmed)} layers, most in layer {worst}"
    return (
        f"{plan} harms this model: its key projections have a bias, many times what keys differ by ({where}), and this "
        "codec has few levels and one scale for a whole key"
    )


def said_without_weights(plan: Plan, name: str, geometry: Geometry) -> str | None:
    """Return what to say of a plan on a model that is not loaded: `sentence_of`, a condition, or None.

    Biases and key projections are read from a folder's safetensors, where the model has a `k_proj`.

    Args:
        plan: of a cache.
        name: see `hf.model.loading.load`.
        geometry: of the model.
    """
    if plan.encode.bears_offset or not geometry.compressed:
        return None
    bare = load_bare(name)
    modules = {layer: each for layer, each in modules_by_layer(bare).items() if layer in geometry.compressed}
    biased = {layer: each for layer, each in modules.items() if has_key_bias(each)}
    if not biased:
        return None
    bits = _bits_of_folder(Path(name), bare, biased, geometry)
    if bits is not None:
        harmed = harmed_by_key_bias(plan, geometry.compressed, bits)
        return sentence_of(plan, harmed) if harmed else None
    return (
        f"{plan}: the key projections of this model may have a bias. Where it is large, as in Qwen2 and Qwen2.5, this "
        f"codec loses much; inside centred(of=...) it does not, nor do {INSTEAD}. `run`, `bench` and cache_for look at "
        "the weights and tell"
    )


def warn_of_key_bias(
    model: Any,
    plan: Plan,
    geometry: Geometry,
    offsets: Mapping[int, KeyOffset | None],
    *,
    stacklevel: int = 3,
) -> None:
    """Warn once of each plan whose codec is harmed by the bias of a model's key projections.

    Args:
        model: a transformers causal language model, its weights loaded.
        plan: of a cache.
        geometry: of the model.
        offsets: what `centred` takes off, by layer.
        stacklevel: of the warning.
    """
    said = _warned.setdefault(model, set())
    if str(plan) in said or (plan.encode.bears_offset and not plan.encode.needs_offset):
        return
    said.add(str(plan))
    bits = key_bias_bits(model, geometry)
    harmed, bare = (harmed_by_key_bias(plan, geometry.compressed, bits, each) for each in (offsets, None))
    if bare:
        warnings.warn(sentence_of(plan, bare), stacklevel=stacklevel)
    elif harmed:
        warnings.warn(
            f"{_harm(plan, harmed)}; centred could not take the bias off there, since the attention does not tell what "
            f"it adds to a key at each position. Use {INSTEAD}, or measure the loss with kvtailor bench",
            stacklevel=stacklevel,
        )


def _biases(module: nn.Module) -> list[Tensor]:
    out = output_layer(module)
    outside = () if out is None else tuple(out.modules())
    found = (getattr(each, "bias", None) for each in module.modules() if each is not module and each not in outside)
    # A norm of queries or keys may have a bias too, and is a vector of weights.
    weighs = [each for each in module.modules() if getattr(getattr(each, "weight", None), "ndim", 0) >= 2]
    return [each for each in found if isinstance(each, Tensor)] if weighs else []


@torch.no_grad()
def _bits_of(model: Any, module: nn.Module, kind: str | None) -> float | None:
    now = tuple((id(each), each._version) for each in _biases(module))
    if module in _known and _known[module][0] == now:
        return _known[module][1]
    found = _constant_and_spread(model, module, kind)
    if found is None:
        return None
    constant, spread = found
    bits = bits_taken(constant.square().sum(-1), spread)
    _known[module] = (now, bits)
    return bits


@torch.no_grad()
def key_offset_of(
    model: Any, module: nn.Module, kind: str | None, size: int, known: dict[object, Rotation]
) -> KeyOffset | None:
    """Return the constant part of a layer's keys; None where it has none, or its attention cannot be asked.

    Args:
        model: a transformers causal language model, its weights loaded.
        module: the layer's attention.
        kind: of the layer, where the model has several rotary embeddings.
        size: d, of a key.
        known: see `modules.rotation_of`.
    """
    now = _biases(module)
    before, found = _offsets.get(module, ([], None))
    # By their values: what was stored with a constant must be read with the same one, in another process too.
    if len(before) != len(now) or not all(map(_are_same, before, now)):
        found = _asked_offset(model, module, kind, size, known)
        _offsets[module] = [each.detach().clone() for each in now], found
    return found


def _are_same(one: Tensor, two: Tensor) -> bool:
    return one.device == two.device and one.dtype == two.dtype and torch.equal(one, two)


def _asked_offset(
    model: Any, module: nn.Module, kind: str | None, size: int, known: dict[object, Rotation]
) -> KeyOffset | None:
    found = _constant_and_spread(model, module, kind) if has_key_bias(module) else None
    if found is None or not found[0].any():
        return None
    constant, positions = found[0].clone(), torch.tensor([0, 1, 7])
    there, like = _keys_of(model, module, kind, positions), _like(module)
    if there is None or like is None:
        return None
    near = 16 * torch.finfo(like.dtype).eps * float(constant.abs().max())
    at_rest = constant[:, None].expand(-1, 3, -1)
    if torch.allclose(there, at_rest, rtol=0, atol=near):
        return KeyOffset(vectors=constant)
    try:
        rotation = rotation_of(model, module, kind, size, known)
    except UnsupportedModel:
        return None
    if not torch.allclose(there, turn(at_rest, positions.to(there.device), rotation), rtol=0, atol=near):
        return None
    return KeyOffset(vectors=constant, rotation=rotation)


def _constant_and_spread(model: Any, module: nn.Module, kind: str | None) -> tuple[Tensor, Tensor] | None:
    """The constant (h, d) in a layer's keys at position 0, and the mean square (h,) of what they differ by.

    None: the keys are not a constant and a linear part, or the attention cannot be asked.
    """
    keys = _keys_of(model, module, kind, torch.zeros(1 + 2 * _PAIRS, dtype=torch.int64), pairs=_PAIRS)
    if keys is None or not bool(keys.isfinite().all()):
        return None
    # (h, 1 + 2 pairs, d): of no input, of some inputs, and of their negatives.
    constant, plus, minus = keys[:, :1], keys[:, 1 : 1 + _PAIRS], keys[:, 1 + _PAIRS :]
    if not torch.allclose(plus + minus, 2 * constant.expand_as(plus), rtol=1e-2, atol=1e-2 * float(keys.abs().max())):
        return None
    return constant[:, 0], (plus - constant).square().sum(-1).mean(-1)


def _like(module: nn.Module) -> Tensor | None:
    """A matrix of the module, for dtype and device."""
    return next((each for each in module.parameters() if each.is_floating_point() and each.ndim >= 2), None)


def _keys_of(model: Any, module: nn.Module, kind: str | None, positions: Tensor, *, pairs: int = 0) -> Tensor | None:
    """(h, t, d) float32 keys at positions (t,); None: this attention cannot be asked in this way.

    Of no input; with `pairs`, t = 1 + 2 * pairs, of no input first, then of so many inputs behind the layer's norm, and
    of their negatives.
    """
    like, width = _like(module), getattr(getattr(module, "config", None), "hidden_size", None)
    if like is None or width is None or like.device.type == "meta":
        return None
    device = runs_on(module)
    inputs = torch.zeros(len(positions), width, device=device, dtype=like.dtype)
    try:
        if pairs:
            drawn = torch.randn(pairs, width, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
            drawn, norm = drawn.to(device, like.dtype), _norm_before(model, module)
            drawn = drawn if norm is None else norm(drawn)
            inputs[1:] = torch.cat([drawn, -drawn])
        taken = inspect.signature(module.forward).parameters
        given: dict[str, Any] = {name: _Probe() for name in ATTENTION_CACHE_ARGUMENTS if name in taken}
        angles = angles_at(model, module, kind, positions)
        if "position_embeddings" in taken and angles is not None:
            given["position_embeddings"] = tuple(each.to(device, like.dtype) for each in angles)
        if "attention_mask" in taken:
            given["attention_mask"] = None
        for name in ("position_ids", "cache_position"):
            if name in taken:
                given[name] = positions[None].to(device) if name == "position_ids" else positions.to(device)
        module.forward(inputs[None], **given)
    except _KeysSeen as seen:
        return seen.keys[0].float()
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):
        # What cannot be asked says nothing: no warning is made of a guess.
        return None
    return None


def _norm_before(model: Any, module: nn.Module) -> nn.Module | None:
    """The norm in front of an attention: the first norm of the layer that the attention is a child of."""
    for layer in model.modules():
        if any(child is module for child in layer.children()):
            names = ((name, child) for name, child in layer.named_children() if child is not module)
            return next((child for name, child in names if "norm" in name or name.startswith("ln")), None)
    return None


def _bits_of_folder(
    folder: Path, bare: Any, biased: Mapping[int, nn.Module], geometry: Geometry
) -> dict[int, float] | None:
    """`key_bias_bits` of the weights in a folder; None: they are not there, or under other names."""
    files = (
        {key: path for path in sorted(folder.glob("*.safetensors")) for key in _keys_in(path)}
        if folder.is_dir()
        else {}
    )
    names = {module: name for name, module in bare.named_modules()}
    found = {}
    for layer, module in biased.items():
        norm = _norm_before(bare, module)
        wanted = [f"{names[module]}.k_proj.bias", f"{names[module]}.k_proj.weight"]
        if norm is None or any(each not in files for each in (*wanted, f"{names[norm]}.weight")):
            return None
        bias, weight, scale = (_read(files[each], each) for each in (*wanted, f"{names[norm]}.weight"))
        heads = geometry.shapes[layer].kv_heads
        spread = (weight * scale).square().view(heads, -1).sum(-1)
        found[layer] = bits_taken(bias.square().view(heads, -1).sum(-1), spread)
    return found


def _keys_in(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def _read(path: Path, key: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(key)
        return tensor.float()
