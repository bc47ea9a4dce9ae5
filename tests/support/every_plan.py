"""A plan for every method and for every preset, found by themselves: for tests of whole models that leave none out."""

from __future__ import annotations

import importlib
from functools import cache

from tests.support.discover import methods_of, samples_of

from kvtailor.errors import PlanError
from kvtailor.plan import Plan, registry
from kvtailor.plan.arguments import word_of

__all__ = ["every_plan", "first_of_each_method", "plans_of_methods", "plans_of_presets"]

# What a method may need beside it; the first plan without faults is taken.
_EVICTING = (
    "{} @ tokens=48, slack=2",
    "snapkv(window=6) + {} @ tokens=48, slack=2",
    "pairs(window=6, sinks=2) + {} @ tokens=48, slack=2",
    "h2o(recent=6) + {} @ tokens=48, slack=2",
)
_OTHERS = ("{}", "indexed(page=4) + {}", "kivi + {}")
_FRAMES = {"score": _EVICTING, "allocate": _EVICTING, "select": _EVICTING, "merge": _EVICTING}


@cache
def plans_of_methods(layers: int = 3, heads: int = 2, size: int = 16) -> dict[str, str]:
    """A plan for each example of each method, by "stage: method"; without those that are for models of other sizes.

    Budgets are small enough to bind on prompts of 60 tokens; codecs have their defaults, and encode nothing of fewer
    than 128 tokens.
    """
    found: dict[str, str] = {}
    for stage in registry.stages():
        for kind in methods_of(importlib.import_module(f"kvtailor.{stage}"), registry.contract(stage)):
            for sample in samples_of(kind):
                if sample.misfit(layers=layers, heads=heads, size=size) is None:
                    word = str(word_of(sample))
                    found[f"{stage}: {word}"] = _framed(stage, word)
    return found


@cache
def plans_of_presets() -> dict[str, str]:
    """Every preset, with a small budget where it needs one."""
    return {
        f"preset: {name}": f"{name} @ tokens=48" if preset.budget else name
        for name, preset in registry.presets().items()
    }


def first_of_each_method() -> dict[str, str]:
    """One plan for each method, and none twice."""
    found: dict[str, str] = {}
    for case in plans_of_methods():
        found.setdefault(case.partition("(")[0], case)
    once = {plans_of_methods()[case]: case for case in reversed(found.values())}
    return {case: plan for plan, case in reversed(once.items())}


def every_plan() -> dict[str, str]:
    """Plans of all methods and presets by name."""
    return plans_of_methods() | plans_of_presets()


def _framed(stage: str, word: str) -> str:
    faults = []
    for frame in _FRAMES.get(stage, _OTHERS):
        try:
            return str(Plan.parse(frame.format(word)))
        except PlanError as error:
            faults.append(str(error))
    raise AssertionError(f"no plan of {__name__} takes {word}: add above what it needs\n" + "\n".join(faults))
