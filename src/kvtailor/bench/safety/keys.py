"""What a model's keys are like: a constant part in all of them, and channels that are larger than the others."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvtailor.bench.contestant import OWN
from kvtailor.bench.subject import Subject
from kvtailor.encode.contract import Codec, CodecContext
from kvtailor.errors import UnsupportedModel
from kvtailor.hf.model.geometry import Geometry
from kvtailor.hf.model.key_bias import bits_taken, harmed_by_key_bias, key_bias_bits
from kvtailor.hf.model.modules import modules_by_layer, rotation_of
from kvtailor.ops.lanes.rotate import turn
from kvtailor.plan import Plan
from kvtailor.plan.arguments import with_nested
from kvtailor.plan.registry import name_of
from kvtailor.types import Rotation

__all__ = ["KeyShape", "cause_of", "key_shape"]

MUCH = 3.0
"""Bits of a code that a constant part takes: then it is 8 times what keys differ by. SmolLM2-135M has up to 2.1."""
LARGE = 16.0
"""Times the middle channel. SmolLM2-135M and Qwen2.5-Coder-0.5B have up to 10."""
_FIRST = 4  # tokens that many models use as sinks, with keys like no others


@dataclass(frozen=True, kw_only=True)
class KeyShape:
    """What keys are like, by compressed layer; of its kv heads the largest number counts.

    Attributes:
        bias_bits: of a code that the bias of the key projection takes, from the weights, see `key_bias_bits`.
        constant_bits: the same of the mean key of a text before the rotary embedding, which needs no bias.
        outliers: what the largest channel differs by around its mean, over what the middle one does.
    """

    bias_bits: dict[int, float] = field(default_factory=dict)
    constant_bits: dict[int, float] = field(default_factory=dict)
    outliers: dict[int, float] = field(default_factory=dict)

    def facts(self) -> list[str]:
        """Return what of it is unusual, a sentence each."""
        found = []
        for what, bits in (("the bias of the key projection", self.bias_bits), ("the mean key", self.constant_bits)):
            worst, many = _worst(bits, MUCH)
            if worst is not None:
                found.append(
                    f"{what} is {_times(bits[worst]):.0f} times what keys differ by in layer {worst}, and 8 times or "
                    f"more in {many} of its layers"
                )
                break
        worst, many = _worst(self.outliers, LARGE)
        if worst is not None:
            found.append(
                f"the keys of layer {worst} have a channel {self.outliers[worst]:.0f} times as large as the middle one"
            )
        return found


@torch.inference_mode()
def key_shape(subject: Subject, ids: Tensor) -> KeyShape:
    """Return what a model's keys are like on a text; what cannot be asked of a layer is left out.

    Args:
        subject: a transformers model.
        ids: (n,) of a text, n >= 32.
    """
    geometry = Geometry.of(subject.model.config)
    if geometry.has_latents:
        return KeyShape()
    _, cache = subject.forward(ids[None], subject.new_cache(OWN), last_only=True)
    modules, known = modules_by_layer(subject.model), dict[object, Rotation]()
    constant, outliers = {}, {}
    for layer in geometry.compressed:
        keys = getattr(cache.layers[layer], "keys", None)
        if layer not in modules or keys is None or keys.shape[2] <= 2 * _FIRST:
            continue
        shape, heads = geometry.shapes[layer], keys[0].float()
        try:
            rotation = rotation_of(subject.model, modules[layer], shape.kind, shape.key_size, known)
        except UnsupportedModel:
            # Keys that are not turned stay as they are; of an unknown rotation only slow channels have a mean.
            rotation = None
        if rotation is not None:
            back = -torch.arange(heads.shape[1], device=heads.device)
            heads = turn(heads, back.expand(heads.shape[:2]), rotation)
        heads = heads[:, _FIRST:]
        middle = heads.mean(1, keepdim=True)
        spread = (heads - middle).square().mean(1)
        constant[layer] = bits_taken(middle[:, 0].square().sum(-1), spread.sum(-1))
        channels = spread.sqrt()
        outliers[layer] = float((channels.amax(-1) / channels.median(-1).values.clamp_min(1e-15)).max())
    return KeyShape(bias_bits=key_bias_bits(subject.model, geometry), constant_bits=constant, outliers=outliers)


def cause_of(plan: Plan, shape: KeyShape, geometry: Geometry) -> str | None:
    """Return why a plan may harm a model, as half a sentence; None where nothing that is known here says it.

    Args:
        plan: that harms it.
        shape: of the model's keys.
        geometry: of the model.
    """
    layers, codec = geometry.compressed, plan.encode
    if codec.block:
        harmed = harmed_by_key_bias(plan, layers, shape.bias_bits)
        if harmed:
            most = max(harmed, key=lambda layer: harmed[layer])
            return (
                f"key bias, {_times(harmed[most]):.0f} times what keys differ by in layer {most}; this code has one "
                "scale for a whole key"
            )
        worst, _ = _worst(shape.constant_bits, MUCH)
        # What a bias makes of the mean key is said above, or taken off.
        biased = max(shape.bias_bits.values(), default=0.0) >= MUCH
        if worst is not None and not biased and not _on(plan, worst, layers).bears_offset:
            return (
                f"a constant part in all keys, {_times(shape.constant_bits[worst]):.0f} times what they differ by in "
                f"layer {worst}, without a bias; this code has one scale for a whole key"
            )
        turned = any(name_of(each) == "hadamard" for each in with_nested(codec))
        worst, _ = _worst(shape.outliers, LARGE)
        if worst is not None and not turned and not _on(plan, worst, layers).bears_offset:
            return (
                f"outlier channels: one of layer {worst} is {shape.outliers[worst]:.0f} times as large as the middle "
                "one; this code has one scale for both"
            )
    if plan.keep is not None and plan.evicts:
        return f"it drops {100 - 100 * plan.keep:.0f} % of the tokens"
    return None


def _on(plan: Plan, layer: int, layers: tuple[int, ...]) -> Codec:
    """The plan's codec on a layer of a model whose keys have no bias."""
    return plan.encode.for_layer(CodecContext(layer=layers.index(layer), layers=len(layers)))


def _worst(values: dict[int, float], least: float) -> tuple[int | None, int]:
    """The layer with the largest value, and how many have at least `least`; None where none has."""
    many = sum(value >= least for value in values.values())
    return (max(values, key=lambda layer: values[layer]) if many else None), many


def _times(bits: float) -> float:
    """The constant over what keys differ by, of the bits that it takes."""
    return math.sqrt(max(0.0, 4.0**bits - 1))
