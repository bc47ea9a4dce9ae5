"""What a fit leaves out in tests, so that a new method makes none of them longer."""

from __future__ import annotations

from kvtailor.plan.registry import methods

__all__ = ["NOT_SEARCHED"]

_DEFAULTS = {"drop", "plain", "segments", "topk", "uniform"}
_SEARCHED = {"adakv", "by_layer", "kivi", "pooled", "position", "random", "snapkv", "table", "vector"}
_STAGES = ("score", "allocate", "encode", "attend", "merge", "select")
NOT_SEARCHED = tuple(sorted({name for stage in _STAGES for name in methods(stage)} - _DEFAULTS - _SEARCHED))
