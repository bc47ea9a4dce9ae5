"""What a forward was handed, read from the frames that run it: a cache of ours, and token ids.

transformers may take a cache away between the call and the layers: gradient checkpointing gives each layer none, a
model that turns longer texts otherwise (`prepare_inputs_for_generation` of Phi-3) puts it aside and reads everything
anew into a cache of its own, `use_cache=False` drops it. Nothing of that reaches the cache. But each forward makes its
mask by our function while a cache is alive, and the frames above tell what was given to whom. They are read, never
written; where they have another form, nothing is known.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.generation import utils

from kvtailor.errors import CacheMisuse
from kvtailor.hf.versions import CACHE_ARGUMENTS

__all__ = ["Given", "Handed", "check_fed", "handed", "not_fed"]

# What stands between a call and the layers, beside forwards: wrappers of these packages.
_BETWEEN = ("torch", "transformers", "accelerate", "peft", "kvtailor.hf", "contextlib")
# A recorded step is given a stand-in of the cache, on purpose.
_OWN_FORWARDS = "kvtailor.hf.graphs"


@dataclass(frozen=True)
class Given:
    """A cache that a forward was handed.

    Attributes:
        cache: a weak reference.
        updates: how often layers of it had been fed before.
    """

    cache: weakref.ref[Any]
    updates: int


@dataclass(frozen=True, kw_only=True)
class Handed:
    """What a forward was handed.

    Attributes:
        given: a cache of ours, whether or not it comes to the layers; None: there is none.
        arrives: the cache of ours for which the model has made its mask.
        ids: (b, t) token ids of the new tokens; None where they are not known.
    """

    given: Given | None = None
    arrives: Any = None
    ids: Tensor | None = None


def handed(frame: FrameType | None, config: Any, tokens: int) -> Handed:
    """What the forward was handed that runs in this frame and those above.

    Args:
        frame: in which a mask is made, or a layer attends.
        config: of the decoder that it is made for.
        tokens: t.
    """
    text, found, arrives, ids, asked = config.get_text_config(decoder=True), None, None, None, False
    for owner, given in _givers(frame):
        caches = [given[name] for name in CACHE_ARGUMENTS if isinstance(given.get(name), Cache)]
        if not asked:
            # The innermost that names a cache, or none, is the one that makes the mask.
            asked = any(name in given for name in CACHE_ARGUMENTS)
            arrives = next((each for each in caches if _is_ours(each, text)), None)
        found = found or next((each for each in caches if _is_ours(each, text)), None)
        if owner is not None:
            new = given.get("input_ids")
            if isinstance(new, Tensor) and new.ndim == 2 and new.shape[1] == tokens:
                # The outermost has them as the caller gave them.
                ids = new
    return Handed(
        given=None if found is None else Given(weakref.ref(found), found.guard.updates), arrives=arrives, ids=ids
    )


def not_fed(given: Given, module: Any) -> NoReturn:
    """Refuse a forward whose layers run without the cache that it was handed."""
    cache = given.cache()
    model = None if cache is None or cache.guard.model is None else cache.guard.model()
    why = (
        "transformers took it away on the way to the layers (use_cache=False does that, and models that read their "
        "text anew beyond some length)"
    )
    if getattr(model, "training", False) and getattr(model, "is_gradient_checkpointing", False):
        why = (
            "gradient checkpointing is on and the model in training mode, in which transformers gives its layers no "
            "cache: call model.eval() or model.gradient_checkpointing_disable()"
        )
    layer = getattr(module, "layer_idx", None)
    where = type(module).__name__ if layer is None else f"layer {layer} of the model"
    raise CacheMisuse(
        f"a kvtailor cache was handed over, and {where} runs without it, so nothing would be compressed and the cache "
        f"would not know of these tokens: {why}"
    )


def check_fed(seen: int, expected: int, model: Any) -> None:
    """Raise where a cache has seen fewer tokens than a model was given."""
    if seen != expected:
        raise CacheMisuse(
            f"the cache was handed to this {type(model).__name__} and has seen {seen} tokens, where the model read "
            f"{expected}: the model, or its mode, takes a cache away (gradient checkpointing in training mode does), "
            "so nothing of it was compressed"
        )


def _givers(frame: FrameType | None) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The frames that hand on a cache, from the inside: what makes a mask, forwards of models, and `generate`'s loop.

    Yields:
        The model of a forward, None for others; and the arguments.
    """
    while frame is not None:
        module, code = str(frame.f_globals.get("__name__")), frame.f_code
        if module == utils.__name__:
            more = frame.f_locals.get("model_kwargs")
            if isinstance(more, dict):
                yield None, more
            return
        if module.startswith((_OWN_FORWARDS, "transformers.generation")):
            return
        if module == "transformers.masking_utils" and any(name in code.co_varnames for name in CACHE_ARGUMENTS):
            yield None, frame.f_locals
        elif code.co_name == "forward":
            given = frame.f_locals
            if isinstance(given.get("self"), PreTrainedModel):
                more = given.get("kwargs")
                yield given["self"], {**more, **given} if isinstance(more, dict) else given
        elif not module.startswith(_BETWEEN):
            return
        frame = frame.f_back


def _is_ours(cache: Any, text: Any) -> bool:
    guard = getattr(cache, "guard", None)
    return guard is not None and getattr(guard, "config", None) is text and hasattr(guard, "updates")
