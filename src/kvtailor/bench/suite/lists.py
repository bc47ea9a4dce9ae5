"""Lists that a suite's rows can run over: the methods of a stage, and the presets that evict, as a plan writes them."""

from __future__ import annotations

from functools import cache

from kvtailor.plan import registry

__all__ = ["everything"]


@cache
def everything() -> dict[str, list[str]]:
    """The lists by the name that a suite writes: `{scorers}`, `{allocators}`, `{evicting}`.

    A method is there under its name, or as its first example where its name alone is not enough. The allocator of plans
    that name none is not among them: it is what a plan without one does.
    """
    return {
        "scorers": _words("score"),
        "allocators": _words("allocate"),
        "evicting": [name for name, preset in registry.presets().items() if "score" in preset.plan],
    }


def _words(stage: str) -> list[str]:
    examples = {name: getattr(registry.load(stage, name), "examples", ()) for name in registry.methods(stage)}
    return [some[0] if some else name for name, some in examples.items() if name != registry.null(stage)]
