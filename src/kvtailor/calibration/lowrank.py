"""Moments and weights for `encode/subspace/lowrank.py`: where a layer's states lie, and each projection's weight.

Means and covariances, over the channels of all heads together, of keys as they are cached, of keys before the rotary
embedding, and of values. Any basis of the method is made from them: of single heads or groups, centred or not. The
weights are those of arXiv 2407.21118, section 3.3: the root of the mean squared gradient of the text's loss in W_k and
W_v of each layer. A gradient takes three times as long as the states of the same passage, and gives one number a layer:
they are taken over at most 16 passages, spread over the texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvtailor.calibration.contract import Calibrator, Job, Made
from kvtailor.calibration.passages import Passage
from kvtailor.calibration.watching import LayerStates, watched
from kvtailor.errors import CalibrationError, KvtailorError, UnsupportedModel
from kvtailor.hf.make_cache import cache_for
from kvtailor.hf.model.geometry import Geometry
from kvtailor.hf.model.modules import modules_by_layer, rotation_of
from kvtailor.ops.codes.subspace import StateMoments, principal
from kvtailor.ops.lanes.rotate import turn
from kvtailor.presets import FULL
from kvtailor.types import Rotation

__all__ = ["SIDES", "LowRank", "Sums", "check_enough", "rotations", "squared_gradients"]

SIDES = ("keys", "unrotated", "values")
_GRADED = 16
"""Passages that gradients are taken over at most."""
_PROJECTIONS = {"keys": ("k_proj", "key"), "values": ("v_proj", "value")}


@dataclass(frozen=True, kw_only=True)
class LowRank(Calibrator):
    """Where keys and values lie."""

    summary = "moments of keys and values, and Fisher weights of their projections (arXiv 2407.21118)"

    def units(self, passages: int) -> int:
        return passages + min(_GRADED, passages)

    def measure(self, job: Job) -> Made:
        """Mean, deviation and correlation for each of keys, unrotated (keys) and values; fisher_keys, fisher_values."""
        model = job.subject.model
        modules, geometry = modules_by_layer(model), cache_for(model, FULL).geometry
        check_enough(job, geometry)
        sums = Sums(rotations=rotations(model))
        with torch.inference_mode():
            for passage in job.passages:
                cache = cache_for(job.subject.model, FULL)
                with watched(cache, sums.add):
                    job.subject.forward(passage.ids[None], cache, last_only=True)
                job.advance("states")
        moments = [sums.moments(side) for side in SIDES]
        tensors = {
            f"{side}_{name}": torch.stack([getattr(each, name) for each in of_side])
            for side, of_side in zip(SIDES, moments, strict=True)
            for name in ("mean", "deviation", "correlation")
        }
        if job.subject.stock_attention is not None:
            job.subject.model.set_attn_implementation(job.subject.stock_attention)
        chosen = [modules[layer] for layer in geometry.compressed]
        count = min(_GRADED, len(job.passages))
        some = tuple(job.passages[place * len(job.passages) // count] for place in range(count))
        for side, squares in squared_gradients(job.subject.model, chosen, some, job.advance).items():
            tensors[f"fisher_{side}"] = squares.sqrt().float()
        shares = {
            f"{side}_energy_of_half_by_layer": [_half(each) for each in of_side]
            for side, of_side in zip(SIDES, moments, strict=True)
        }
        return Made(tensors=tensors, facts={**shares, "rotary": all(each is not None for each in sums.rotations)})


def check_enough(job: Job, geometry: Geometry) -> None:
    """Raise where there are fewer tokens than channels of all heads: then most directions are of nothing.

    Raises:
        CalibrationError: there are.
    """
    tokens, width = job.count * job.context, geometry.kv_heads * geometry.head_dim
    if tokens < width:
        raise CalibrationError(
            f"asked for directions of {width} channels from {tokens} tokens, of which most would be of nothing: read "
            f"{width} tokens or more, and better some thousands"
        )


def rotations(model: Any) -> list[Rotation | None]:
    """The rotary embedding of each compressed layer; None where it has none that can be turned back."""
    modules, geometry = modules_by_layer(model), cache_for(model, FULL).geometry
    found: list[Rotation | None] = []
    for layer in geometry.compressed:
        try:
            found.append(
                rotation_of(model, modules[layer], geometry.shapes[layer].kind, geometry.shapes[layer].key_size)
            )
        except UnsupportedModel:
            found.append(None)
    return found


def squared_gradients(
    model: Any, modules: list[torch.nn.Module], passages: tuple[Passage, ...], advance: Any
) -> dict[str, Tensor]:
    """(layers,) float64 mean squared gradient of the loss in the weights of W_k, and in those of W_v.

    The mean is over weights and passages. Where a model has one weight for queries, keys and values, or none that can
    be read, all layers get 1.

    Args:
        model: a transformers causal language model; its gradients and what needs them are as before afterwards.
        modules: the attention modules.
        passages: the texts.
        advance: called after each.
    """
    found = {side: [_projection(module, names) for module in modules] for side, names in _PROJECTIONS.items()}
    weights = [weight for side in found.values() for weight in side if weight is not None]
    if len(weights) < 2 * len(modules):
        for _ in passages:
            advance("gradients")
        return {side: torch.ones(len(modules), dtype=torch.float64) for side in found}
    device = next(model.parameters()).device
    with torch.inference_mode(False), torch.enable_grad(), _wanting(model, weights):
        sums = {side: torch.zeros(len(modules), dtype=torch.float64) for side in found}
        for passage in passages:
            ids = passage.ids[None].to(device)
            loss = model(ids, labels=ids, use_cache=False).loss
            gradients = torch.autograd.grad(loss, weights)
            squares = torch.stack([each.double().square().mean().cpu() for each in gradients])
            for place, side in enumerate(found):
                sums[side] += squares[place * len(modules) : (place + 1) * len(modules)] / len(passages)
            advance("gradients")
    return sums


@contextmanager
def _wanting(model: Any, weights: list[Tensor]) -> Iterator[None]:
    """While it is open, these weights alone have gradients."""
    before = [(each, each.requires_grad) for each in model.parameters()]
    wanted = {id(each) for each in weights}
    for each, _ in before:
        each.requires_grad_(id(each) in wanted)
    try:
        yield
    finally:
        for each, needed_grad in before:
            each.requires_grad_(needed_grad)


def _projection(module: torch.nn.Module, names: tuple[str, ...]) -> Tensor | None:
    layers = (getattr(module, name, None) for name in names)
    weight = next((layer.weight for layer in layers if isinstance(layer, torch.nn.Module)), None)
    return weight if isinstance(weight, Tensor) and weight.is_floating_point() else None


def _half(moments: StateMoments) -> float:
    """The share of the energy that half of the directions of all heads together keep, the mean taken off."""
    heads, channels = moments.mean.shape
    energies = principal(moments, heads, 1, centred=True, shared=False)[1].clamp(min=0)[0]
    return float(energies[: heads * channels // 2].sum() / energies.sum())


@dataclass
class Sums:
    """Over all tokens so far, by layer and side: (h * c, h * c) and (h, c) float64."""

    rotations: list[Rotation | None]
    second: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    first: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    tokens: int = 0

    def sides(self, states: LayerStates) -> Iterator[tuple[str, Tensor]]:
        """Keys (h, n, d) as they are and turned back, and values (h, n, dv), by name."""
        rotation, count = self.rotations[states.layer], states.keys.shape[1]
        back = -torch.arange(count, device=states.keys.device)
        yield "keys", states.keys
        yield "unrotated", states.keys if rotation is None else turn(states.keys, back, rotation)
        yield "values", states.values

    def add(self, states: LayerStates) -> None:
        self.tokens += states.keys.shape[1] if states.layer == 0 else 0
        for side, each in self.sides(states):
            wide = each.double().transpose(0, 1).flatten(1)
            if not bool(wide.isfinite().all()):
                raise KvtailorError("the model's keys or values have NaN or infinity: calibrate it in another dtype")
            second, first = (wide.mT @ wide).cpu(), each.double().sum(1).cpu()
            at = states.layer, side
            self.second[at] = self.second[at] + second if at in self.second else second
            self.first[at] = self.first[at] + first if at in self.first else first

    def moments(self, side: str) -> list[StateMoments]:
        """Of each layer."""
        layers = len(self.rotations)
        return [StateMoments.of(self.second[i, side], self.first[i, side], self.tokens) for i in range(layers)]
