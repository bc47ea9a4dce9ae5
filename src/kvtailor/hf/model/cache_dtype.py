"""In which dtype a cache holds what a model in float32 makes: the model's own, or 16 bits."""

from __future__ import annotations

from typing import Any

import torch

from kvtailor.errors import ArgumentError

__all__ = ["dtype_of_caches", "set_cache_dtype", "stored_dtype"]

_HALVES = (torch.bfloat16, torch.float16)
# Attribute of a model whose caches hold another dtype than its float32 unless their maker is asked otherwise.
_MARK = "kvtailor_cache_dtype"


def stored_dtype(model: Any, asked: torch.dtype | None = None) -> torch.dtype | None:
    """Return the dtype in which a cache of a model holds keys and values, where it is another than the model's.

    Args:
        model: of transformers.
        asked: what the caller wants; None: what `set_cache_dtype` said of this model, else the model's own.

    Raises:
        ArgumentError: a cache of this model cannot hold what was asked for.
    """
    own: torch.dtype = getattr(model, "dtype", torch.float32)
    if asked is None:
        return getattr(model, _MARK, None) if own is torch.float32 else None
    if asked is own:
        return None
    if own is torch.float32 and asked in _HALVES:
        return asked
    halves = " or ".join(str(each).removeprefix("torch.") for each in _HALVES)
    raise ArgumentError(
        f"asked for a cache in {str(asked).removeprefix('torch.')} of a model in {str(own).removeprefix('torch.')}: a "
        f"cache holds the model's own dtype, or {halves} where that is float32"
    )


def set_cache_dtype(model: Any, dtype: torch.dtype) -> None:
    """Say in which dtype the caches of a model hold keys and values from now on, for whoever asks for no other.

    Raises:
        ArgumentError: see `stored_dtype`.
    """
    setattr(model, _MARK, stored_dtype(model, dtype))


def dtype_of_caches(model: Any) -> torch.dtype:
    """Return the dtype in which a cache of a model holds keys and values."""
    own: torch.dtype = getattr(model, "dtype", torch.float32)
    return stored_dtype(model) or own
