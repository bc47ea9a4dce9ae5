"""Plans: which method does the work in each stage, under which budget; read from Python, TOML or one line."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtailor.plan.plan import Plan, parse

__all__ = ["Plan", "parse"]


if not TYPE_CHECKING:  # a type checker is to miss names that are not there

    def __getattr__(name: str) -> Any:
        # The registry lists methods without importing them, and its package must not import torch either.
        if name not in __all__:
            raise AttributeError(f"module 'kvtailor.plan' has no attribute {name!r}")
        return getattr(import_module("kvtailor.plan.plan"), name)
