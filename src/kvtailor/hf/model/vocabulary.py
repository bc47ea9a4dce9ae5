"""What a tokenizer can write, and token ids that a model has a row for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvtailor.errors import CacheMisuse

__all__ = ["check_characters", "check_ids", "token_rows"]


def token_rows(model: Any) -> int | None:
    """Return the rows of a model's table of tokens; None where that is not known."""
    table = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    shape: tuple[int, ...] = getattr(getattr(table, "weight", None), "shape", ())
    return int(shape[0]) if len(shape) == 2 else None


def check_ids(model: Any, ids: Tensor) -> None:
    """Check ids before a model looks them up: torch would end in an `IndexError`, on an accelerator in an assertion.

    Args:
        model: that is fed them.
        ids: of any shape.

    Raises:
        CacheMisuse: an id is negative or beyond the model's rows.
    """
    rows = token_rows(model)
    if rows is None or not ids.numel() or ids.is_floating_point():
        return
    # One transfer, from wherever they are.
    low, high = torch.stack(ids.aminmax()).tolist()
    if low < 0 or high >= rows:
        raise CacheMisuse(
            f"a token has the id {low if low < 0 else high}, and the model has rows for 0 to {rows - 1}: the tokenizer "
            "is of another model, or tokens were added to it without model.resize_token_embeddings(len(tokenizer))"
        )


def check_characters(text: str) -> None:
    """Check that a text is one of whole characters: tokenizers end in a `TypeError` that names none.

    Raises:
        CacheMisuse: a half of a character stands in it, as Python reads bytes of an argument that are no UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CacheMisuse(
            f"the text has {text[error.start]!r} at character {error.start}, which no UTF-8 has: it was read in "
            "another encoding, or from an argument that is not UTF-8"
        ) from error
