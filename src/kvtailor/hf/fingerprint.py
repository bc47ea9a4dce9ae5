"""Telling models apart: the same architecture trained twice, or a folder whose weights were replaced."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["fingerprint", "weight_fingerprint"]

_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "dtype", "_attn_implementation_internal")


def fingerprint(model: Any) -> str | None:
    """SHA-256 of the config and of up to 64 values of every parameter; None for a model without parameters.

    Tells two trainings of one model apart, and a folder whose weights were replaced, without reading all bytes.
    """
    if not hasattr(model, "named_parameters") or not hasattr(model, "config"):
        return None
    config = model.config.to_diff_dict() if hasattr(model.config, "to_diff_dict") else {}
    kept = {name: value for name, value in config.items() if name not in _NOT_THE_MODEL}
    head = json.dumps(kept, sort_keys=True, default=str).encode()
    return _digest(head, _sampled(model, None))


def weight_fingerprint(model: Any, dtype: torch.dtype | None = None) -> str:
    """SHA-256 of up to 64 values of every parameter, and nothing of the config, whose form follows the library.

    Args:
        model: of torch.
        dtype: that the values are rounded to first; None: as they are. So a file can also name the same weights as
            somebody else loads them.
    """
    return _digest(b"", _sampled(model, dtype))


def _sampled(model: Any, dtype: torch.dtype | None) -> Iterator[bytes]:
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        at = torch.linspace(0, flat.numel() - 1, min(64, flat.numel()), dtype=torch.float64).to(torch.int64)
        values = flat[at.to(flat.device)]
        yield f"{name}{tuple(parameter.shape)}".encode()
        yield (values if dtype is None else values.to(dtype)).double().cpu().numpy().tobytes()


def _digest(head: bytes, pieces: Iterator[bytes]) -> str:
    digest = hashlib.sha256(head)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
