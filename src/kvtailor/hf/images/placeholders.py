"""Tokens that stand for images, video or sound. Without the pixels a model would read them as text, without a word."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kvtailor.errors import CacheMisuse, UnknownName
from kvtailor.hf.versions import CACHE_ARGUMENTS

__all__ = ["check_inputs", "check_text", "placeholders"]

_MEDIA = ("image", "video", "audio")


def placeholders(config: Any) -> dict[str, int]:
    """By kind ("image", "video", "audio"), the token id that a model's processor puts where its features go."""
    found = {}
    for kind in _MEDIA:
        for name in (f"{kind}_token_id", f"{kind}_token_index"):
            token = getattr(config, name, None)
            if isinstance(token, int):
                found[kind] = token
    return found


def check_text(model: Any, ids: Tensor, what: str, instead: str) -> None:
    """Raise where token ids have placeholders, and nothing of what they stand for came with them.

    Args:
        model: of transformers.
        ids: (b, n) token ids.
        what: takes them, in words.
        instead: what to do, in words.
    """
    for kind, token in placeholders(model.config).items():
        count = int((ids == token).sum())
        if count:
            raise CacheMisuse(
                f"{what} got {count} {kind} tokens (id {token}) and not the {kind} that they stand for, so the model "
                f"would read them as text: {instead}"
            )


def check_inputs(model: Any, inputs: Mapping[str, Any]) -> None:
    """Raise where one of these inputs of a processor is none that the model's forward takes."""
    known = list(inspect.signature(model.forward).parameters)
    for name in inputs:
        if name in CACHE_ARGUMENTS:
            raise CacheMisuse(
                f"got a cache as {name} among the inputs: kvtailor.prefill takes it as cache=, in place of the plan"
            )
        if name not in known or name in ("self", "kwargs"):
            raise UnknownName(f"input of {type(model).__name__}", name, known)
