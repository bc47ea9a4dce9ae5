"""Parameters that transformers has sharded over processes (torch's `DTensor`)."""

from __future__ import annotations

from torch import Tensor

__all__ = ["local_part", "whole"]


def whole(parameter: Tensor) -> Tensor:
    """Return a parameter as one process would hold it; collective where it is sharded."""
    gather = getattr(parameter, "full_tensor", None)
    return parameter if gather is None else gather()


def local_part(parameter: Tensor) -> Tensor:
    """Return what this process holds of a parameter; all of it where it is not sharded."""
    own = getattr(parameter, "to_local", None)
    return parameter if own is None else own()
