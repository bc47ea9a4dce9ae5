"""The number of tokens beyond which a model turns its keys otherwise, and so wants its text read anew.

Models with long rope (Phi-3 and its kin) have two sets of factors: one for texts up to the positions of their first
training, one for longer ones. Keys of the one are worth nothing under the other, so transformers'
`prepare_inputs_for_generation` of these models drops the cache where a text crosses the border, and everything is read
once more into a cache of transformers' own. Which models do that is asked of the model, not of a list.

Whether it is dropped depends on the length that the cache tells. So ours, asked by that function, forgets what it has
seen, tells a length beyond the border, and asks for the whole text in place of the newest token: it stays, and reads
the text as a prompt. For that the dict of further arguments is changed in the function's frame, as the function itself
does in some releases; where the frame has another form, the text is refused.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, GenerationMixin

from kvtailor.errors import CacheMisuse
from kvtailor.hf.callers import Preparing
from kvtailor.hf.versions import CACHE_ARGUMENT, CACHE_ARGUMENTS, FED, PREPARE

__all__ = ["RopeBorder", "check_border", "crossing", "feed_all", "rope_border"]


@dataclass(frozen=True)
class RopeBorder:
    """Where transformers drops a cache.

    Attributes:
        tokens: the longest text that is read with the first factors.
        turns: longer ones are turned by others; False: the model drops a cache though its keys stay what they are.
    """

    tokens: int
    turns: bool


def rope_border(model: Any) -> RopeBorder | None:
    """Return where a model drops its cache; None where it does so at no length."""
    prepare = getattr(model, PREPARE, None)
    tokens = getattr(model.config, "original_max_position_embeddings", None)
    if tokens is None or prepare is None or getattr(type(model), PREPARE, None) is GenerationMixin.__dict__[PREPARE]:
        return None
    taken = inspect.signature(prepare).parameters
    name = next((name for name in CACHE_ARGUMENTS if name in taken), CACHE_ARGUMENT)
    ids = torch.zeros((1, int(tokens) + 1), dtype=torch.int64, device=model.device)
    probe = DynamicCache(config=model.config)
    try:
        inputs = prepare(ids, attention_mask=torch.ones_like(ids), use_cache=True, **{name: probe})
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
        # What a model asks of a prompt beside its ids is not known here; its first forward tells.
        return None
    if inputs.get(name) is probe:
        return None
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return RopeBorder(tokens=int(tokens), turns=rope.get("rope_type") == "longrope")


def check_border(border: RopeBorder | None, *, seen: int, after: int, what: str, why: str = "") -> None:
    """Raise where a cache has read with one set of factors and the model would go on with the other.

    Args:
        border: of the model; None: it has none.
        seen: tokens that the cache has seen before, or sees at first.
        after: tokens that it will have seen.
        what: crosses the border, in words.
        why: the text cannot be read anew there, in words.
    """
    if border is None or not border.turns or not 0 < seen <= border.tokens < after:
        return
    raise CacheMisuse(
        f"{what} goes from {seen} to {after} tokens, and this model turns texts beyond {border.tokens} tokens by other "
        "factors (long rope): keys that were read before fit no query behind it, so the whole text has to be read anew "
        f"there{', and ' + why if why else ''}. Stay within {border.tokens} tokens, or give a new cache more than "
        f"{border.tokens} tokens at once; model.generate and kvtailor.generate of one token at a time read anew by "
        "themselves"
    )


def crossing(border: RopeBorder | None, asker: Preparing, seen: int) -> bool:
    """Return whether a model that asks for the length of a cache would drop it, since its text is beyond the border.

    Args:
        border: of the model; None: it has none.
        asker: the function of the model.
        seen: tokens that the cache has seen.
    """
    if border is None or seen > border.tokens or asker.columns is None:
        return False
    return asker.columns > border.tokens


def feed_all(border: RopeBorder, asker: Preparing, seen: int) -> None:
    """Make the model's own function prepare the whole text in place of what is new.

    Args:
        border: of the model.
        asker: see `crossing`.
        seen: tokens that the cache has seen.

    Raises:
        CacheMisuse: the whole text is not here.
    """
    text, fed = asker.columns or 0, asker.fed
    if fed is None or seen + fed != text:
        why = "the model's function was not given the tokens that this cache has seen"
        check_border(border, seen=seen, after=max(text, seen + (fed or text)), what="the text", why=why)
    else:
        asker.more[FED] = None
