"""The number of tokens beyond which a model turns its keys otherwise, and so wants its text read anew.

Models with long rope (Phi-3 and its kin) have two sets of factors: one for texts up to the positions of their first
training, one for longer ones. Keys of the one are worth nothing under the other, so transformers'
`prepare_inputs_for_generation` of these models drops the cache where a text crosses the border, and everything is read
once more. Which models do that is asked of the model, not of a list.
"""

from __future__ import annotations

import inspect
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin
from transformers.generation import utils

from kvtailor.errors import CacheMisuse
from kvtailor.hf.versions import CACHE_ARGUMENT, CACHE_ARGUMENTS

__all__ = ["check_border", "keeps_at_border", "rope_border"]

_PREPARE = "prepare_inputs_for_generation"


def rope_border(model: Any) -> int | None:
    """The most tokens that a model reads with its first factors; None where it drops no cache at any length."""
    prepare = getattr(model, _PREPARE, None)
    border = getattr(model.config, "original_max_position_embeddings", None)
    if border is None or prepare is None or getattr(type(model), _PREPARE, None) is GenerationMixin.__dict__[_PREPARE]:
        return None
    taken = inspect.signature(prepare).parameters
    name = next((name for name in CACHE_ARGUMENTS if name in taken), CACHE_ARGUMENT)
    ids = torch.zeros((1, int(border) + 1), dtype=torch.int64, device=model.device)
    probe = DynamicCache(config=model.config)
    try:
        inputs = prepare(ids, attention_mask=torch.ones_like(ids), use_cache=True, **{name: probe})
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
        # What a model asks of a prompt beside its ids is not known here; its first forward tells.
        return None
    return None if inputs.get(name) is probe else int(border)


def check_border(border: int | None, *, seen: int, after: int, what: str) -> None:
    """Raise where a cache has read with one set of factors and the model would go on with the other.

    Args:
        border: of the model; None: it has none.
        seen: tokens that the cache has seen before, or sees at first.
        after: tokens that it will have seen.
        what: crosses the border, in words.
    """
    if border is None or not 0 < seen <= border < after:
        return
    raise CacheMisuse(
        f"{what} goes from {seen} to {after} tokens, and this model turns texts beyond {border} tokens by other "
        "factors (long rope): keys that were read before fit no query behind it, and transformers reads the whole text "
        f"anew there, without this cache. Stay within {border} tokens, or give a new cache more than {border} tokens "
        "at once"
    )


def keeps_at_border(border: int, frame: FrameType | None, seen: int) -> bool:
    """Whether an empty cache that is asked for its length here would be dropped for nothing.

    transformers drops a cache that is not beyond the border while its text is, an empty one too. This one has no keys
    of the first factors, so the model may keep it.

    Args:
        border: of the model.
        frame: in which the length is asked for.
        seen: tokens that the cache has seen.

    Raises:
        CacheMisuse: it has seen tokens, and the text goes beyond the border now.
    """
    if frame is None or frame.f_code.co_name != _PREPARE:
        return False
    if frame.f_globals.get("__name__") == utils.__name__:
        # transformers' general form computes positions of the length.
        return False
    ids = frame.f_locals.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        return False
    check_border(border, seen=seen, after=ids.shape[1], what="the text")
    return not seen and ids.shape[1] > border
