"""New tokens go into a model with a cache, at the positions that `generate()` would give them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kvtailor.errors import CacheMisuse
from kvtailor.hf.cache import KvCache
from kvtailor.hf.versions import hand_cache

__all__ = ["fed", "placed"]

# Of every other model, 0. These add it inside generate(), and where they are given no positions.
_FIRST_POSITION = {"paligemma": 1}


def placed(model: Any, cache: KvCache, ids: Tensor, mask: Tensor, *, by_model: bool = False) -> dict[str, Tensor]:
    """Return what tells a model of padding: the mask, and positions where it takes them.

    `by_model`: it computes positions by itself, as models with positions of three axes do with images.
    """
    options = {"attention_mask": mask}
    if not by_model and "position_ids" in inspect.signature(model.forward).parameters:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        positions = positions + _FIRST_POSITION.get(model.config.model_type, 0)
        options["position_ids"] = cache.guard.rope.shift(positions)
    return options


def fed(
    model: Any,
    cache: KvCache,
    ids: Tensor,
    mask: Tensor | None,
    *,
    keep: int = 0,
    inputs: Mapping[str, Any] | None = None,
) -> Tensor:
    """Return logits of new tokens (b, t), or of the last `keep` of them.

    `inputs`: what belongs to images among them, by the names of the model's forward.

    Raises:
        CacheMisuse: the tokens go beyond a model's table of positions, which torch found on the CPU.
    """
    before = cache.seen
    options: dict[str, Any] = {"logits_to_keep": keep} if keep else {}
    options |= inputs or {}
    cache.guard.rope.put()
    if mask is not None:
        options |= placed(model, cache, ids, mask, by_model=bool(inputs) and cache.guard.rope.kept)
    try:
        logits: Tensor = model(input_ids=ids, **hand_cache(cache), use_cache=True, **options).logits
    except IndexError as error:
        most, wanted = cache.geometry.max_positions, before + ids.shape[1]
        if most is None or wanted <= most:
            raise
        raise CacheMisuse(
            f"a forward of {ids.shape[1]} behind {before} seen tokens needs {wanted} positions, and "
            f"{model.config.model_type} has a table of {most}: hand it a shorter text"
        ) from error
    return logits
