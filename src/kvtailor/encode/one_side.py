"""A codec of keys and values, made one of keys or of values alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvtailor.encode.contract import Codec, Sides

__all__ = ["one_sided"]


def one_sided(asked: str, codec: Codec, side: Sides) -> Codec:
    """A codec of one side alone, and the codecs inside it.

    Args:
        asked: the name of the method that has it in `of`, for errors.
        codec: with an argument `only`; one that keeps states as they are needs none.
        side: that it shall code.

    Raises:
        ValueError: it has none, or codes the other side.
    """
    method: Any = codec
    changes: dict[str, Any] = {}
    if isinstance(getattr(method, "of", None), Codec):
        changes["of"] = one_sided(asked, method.of, side)
    if hasattr(method, "only") and method.only in ("both", side):
        changes["only"] = side
    elif not codec.exact and not changes:
        raise ValueError(f"{asked}: only={side} leaves {type(codec).__name__} in `of` nothing to code: leave it out")
    made: Codec = replace(method, **changes)
    return made
