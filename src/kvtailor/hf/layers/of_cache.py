"""Which layers a cache is made of, by what each layer of the model keeps; and the plans that these cannot have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from kvtailor.hf.guard import CacheGuard
from kvtailor.hf.layers.compressed import CompressedLayer
from kvtailor.hf.layers.latent import LatentLayer
from kvtailor.hf.layers.states import HybridLayer, HybridWindowLayer, StateLayer, StatesMixin
from kvtailor.hf.layers.window import WindowLayer
from kvtailor.hf.model.geometry import Geometry
from kvtailor.plan import Plan
from kvtailor.plan.registry import name_of

__all__ = ["EmptyLayer", "copy_layer", "layers_of", "plan_misfits", "settle_others", "remember_all_states"]


class EmptyLayer:
    """A layer of the model that keeps nothing: it has no attention, or reads what another layer keeps."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    is_initialized = True
    supports_early_init = False
    keys = values = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refused: the model has no keys of its own here."""
        raise NotImplementedError("a layer that keeps nothing got keys")

    def get_max_length(self) -> int:
        """-1: no maximum."""
        return -1

    def reset(self) -> None:
        """Nothing is to be forgotten."""

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing is to be taken back."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """There are no rows."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        """There are no rows."""

    def batch_select_indices(self, indices: Tensor) -> None:
        """There are no rows."""


def layers_of(guard: CacheGuard) -> list[Any]:
    """Return the layers of a cache, in the model's order."""
    states, layers = iter(guard.engine.states), []
    for index, shape in enumerate(guard.geometry.shapes):
        layer: Any = EmptyLayer()
        if shape.compressed:
            state = next(states)
            layer = LatentLayer(guard, state, index) if shape.latents else CompressedLayer(guard, state, index)
            if shape.states:
                layer = HybridLayer(guard, state, index, shape.states)
        elif shape.window is not None:
            layer = WindowLayer(guard, index, sliding_window=shape.window)
            if shape.states:
                layer = HybridWindowLayer(guard, index, shape.states, sliding_window=shape.window)
        elif shape.states:
            layer = StateLayer(guard, index, shape.states)
        layers.append(layer)
    return layers


def plan_misfits(plan: Plan, geometry: Geometry) -> list[str]:
    """Return why the compressed layers of a model cannot be served by a plan, a sentence for each method and shape."""
    sizes = dict.fromkeys((shape.kv_heads, shape.key_size) for shape in geometry.compressed_shapes)
    layers = len(geometry.compressed)
    found = [each for heads, size in sizes for each in plan.misfits(layers=layers, heads=heads, size=size)]
    if geometry.has_latents:
        found += plan.latent_misfits()
    if not geometry.alike and len({shape.token_elements for shape in geometry.compressed_shapes}) > 1:
        found += _unequal_layers(plan, geometry)
    repeated = plan.needs.reconstruction
    if repeated is not None and repeated.graded:
        others = [layer for layer, shape in enumerate(geometry.shapes) if not shape.compressed or shape.states]
        if others:
            found.append(
                f"its repetition is weighed by gradients through the whole model, and layers "
                f"{', '.join(map(str, others))} of this {geometry.model_type} have windows or states of their own, or "
                "read the keys of others: take kvzip_plus, which needs none"
            )
    if plan.bytes is not None and geometry.state_bytes(1) is None:
        found.append(
            f"bytes= covers the whole cache, and how many bytes the states of this {geometry.model_type} take is not "
            "known before they are there: give the budget as tokens= or keep="
        )
    return list(dict.fromkeys(found))


def _unequal_layers(plan: Plan, geometry: Geometry) -> list[str]:
    """What a plan cannot do where a token takes more bytes in some compressed layers than in others."""
    what = f"the compressed layers of this {geometry.model_type} differ in their kv heads or head sizes"
    found = []
    if plan.evicts and not plan.allocate.even_layers:
        found.append(
            f"{name_of(plan.allocate)} moves tokens between layers, and {what}: a token does not cost the same in "
            "each. Use an allocator that gives every layer the same, such as uniform or adakv"
        )
    if any(len(group) > 1 for group in plan.encode.layer_groups(len(geometry.compressed))):
        found.append(f"{name_of(plan.encode)} stores several layers together, and {what}")
    return found


def copy_layer(layer: Any, other: Any) -> None:
    """Let a layer that the plan does not compress hold a copy of what another cache's layer holds."""
    if isinstance(layer, WindowLayer):
        # All that it has, states included.
        layer.copy_from(other)
    elif isinstance(layer, StatesMixin):
        layer.copy_states_from(other)


def settle_others(layers: list[Any]) -> None:
    """Let the layers that the plan does not compress forget what only a recording kept."""
    for layer in layers:
        if isinstance(layer, WindowLayer):
            layer.settle()
        elif isinstance(layer, StatesMixin):
            layer.settle_states()


def remember_all_states(layers: list[Any]) -> Callable[[], None]:
    """Return what makes the states of all layers again what they are now."""
    restore = [layer.remember_states() for layer in layers if isinstance(layer, StatesMixin)]

    def again() -> None:
        for each in restore:
            each()

    return again
