"""Caches of ours that a forward was handed, and that never come to its layers.

transformers may take a cache away between the call and the layers: gradient checkpointing gives each layer none, a
model may put it aside before the forward (`prepare_inputs_for_generation`), `use_cache=False` drops it. Nothing of that
reaches the cache. But a layer whose cache was taken away attends to its own tokens alone, by our function while a cache
is alive, and the frames above tell what was given to whom. So they are looked at there (`hf.callers`), and at
prompts, and at no decoded token that reads a cache. Where they have another form, nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from kvtailor.errors import CacheMisuse
from kvtailor.hf.callers import givers
from kvtailor.hf.versions import CACHE_ARGUMENT, CACHE_ARGUMENTS, hand_cache

__all__ = ["CLOCK", "check_fed", "check_mode", "check_seen"]

CLOCK = count(1)
"""Orders what happens to caches and forwards: a forward began before its layers were fed."""
_CHECKPOINTED = (
    "gradient checkpointing is on and the model in training mode, in which transformers gives its layers no cache: "
    "call model.eval(), or switch gradient checkpointing off"
)


def check_fed(module: Any, mask: Any) -> None:
    """Raise where a layer reads its own tokens alone, and its forward was handed a cache of ours that was not fed.

    Args:
        module: whose attention it is, or the mask that is added to its logits.
        mask: a `LazyMask`, a tensor or None.
    """
    config = getattr(module, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return
    cache = _handed(config.get_text_config(decoder=True))
    if cache is None:
        return
    guard, began = cache.guard, getattr(mask, "began", None)
    if began is None:
        # A mask of the caller's own has no time. Behind its last layer a forward counts as ended.
        fed = guard.at_work or getattr(module, "layer_idx", 0) == guard.layers - 1
    else:
        fed = guard.fed_at > began
    if not fed:
        layer = getattr(module, "layer_idx", None)
        where = "the model" if layer is None else f"layer {layer} of the model"
        why = (
            "transformers took it away on the way to the layers (use_cache=False does that, and models that read their "
            "text anew beyond some length)"
        )
        model = None if guard.model is None else guard.model()
        if model is not None and any(getattr(each, "gradient_checkpointing", False) for each in _trained(model)):
            why = _CHECKPOINTED
        raise CacheMisuse(
            f"a kvtailor cache was handed over, and {where} runs without it, so nothing would be compressed and the "
            f"cache would not know of these tokens: {why}"
        )


def check_mode(model: Any) -> None:
    """Raise where a model in training mode gives its layers no cache, since it would compute them anew."""
    layers = [each for each in _trained(model) if isinstance(each, GradientCheckpointingLayer)]
    takes = [each for each in layers if not getattr(each, "_can_checkpoint_with_cache", False)]
    if any(each.gradient_checkpointing for each in takes) and _takes_caches():
        raise CacheMisuse(f"a kvtailor cache was handed over: {_CHECKPOINTED}")


def check_seen(seen: int, expected: int, model: Any) -> None:
    """Raise where a cache has seen fewer tokens than a model was given."""
    if seen < expected:
        raise CacheMisuse(
            f"the cache was handed to this {type(model).__name__} and has seen {seen} tokens, where the model read "
            f"{expected}: the model takes a cache away, so not all of it was compressed; call its forward token by "
            "token, and compare cache.seen"
        )


def _trained(model: Any) -> Iterator[Any]:
    """The parts of a model that are in training mode."""
    return (each for each in model.modules() if each.training)


def _takes_caches() -> bool:
    """Whether a checkpointed layer is given no cache now; from 5.24 on it is given one where gradients are off."""
    layer = _Layer()
    layer.gradient_checkpointing = True
    layer._gradient_checkpointing_func = lambda function, *args: function(*args)
    return layer(**hand_cache(layer)) is None


class _Layer(GradientCheckpointingLayer):
    """Gives back the cache that it is handed."""

    def forward(self, **given: Any) -> Any:
        return given[CACHE_ARGUMENT]


def _handed(text: Any) -> Any:
    """The innermost cache of ours, made for this configuration, that frames have handed over; None: there is none."""
    for given in givers():
        for name in CACHE_ARGUMENTS:
            guard = getattr(given.get(name), "guard", None)
            if isinstance(given.get(name), Cache) and guard is not None and guard.config is text:
                return given[name]
    return None
