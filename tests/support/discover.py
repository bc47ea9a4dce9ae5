"""Finds every method of a stage by itself, so that a contract test never has a list to forget a method in."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType
from typing import Any

from kvtailor.plan.arguments import samples_of

__all__ = ["methods_of", "sample_of", "samples_of"]


def methods_of(stage: ModuleType, contract: type) -> list[type]:
    """Every concrete subclass of `contract` that a module of the stage defines, by module name."""
    found: list[type] = []
    modules = pkgutil.walk_packages(stage.__path__, prefix=f"{stage.__name__}.")
    for info in sorted(modules, key=lambda info: info.name.rpartition(".")[2]):
        module = importlib.import_module(info.name)
        for _, each in inspect.getmembers(module, inspect.isclass):
            if issubclass(each, contract) and each.__module__ == module.__name__ and not inspect.isabstract(each):
                found.append(each)
    return found


def sample_of(kind: type) -> Any:
    """One method of a class."""
    return samples_of(kind)[0]
