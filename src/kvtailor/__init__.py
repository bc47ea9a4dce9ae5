"""kvtailor cuts the KV cache of Hugging Face language models to measure, for real, and measures honestly what that
costs.

```python
import kvtailor

cache = kvtailor.cache_for(model, "snapkv + adakv @ tokens=1024")
output = model.generate(**inputs, cache=cache)
print(cache.ledger().ratio)
```
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvtailor.version import __version__

if TYPE_CHECKING:
    from kvtailor.bench.evaluation.evaluate import evaluate
    from kvtailor.bench.evaluation.result import Evaluation
    from kvtailor.bench.safety.check import check_model
    from kvtailor.bench.safety.engine_types import EngineCheck, check_engine
    from kvtailor.bench.safety.result import ModelCheck
    from kvtailor.calibration.run import calibrate
    from kvtailor.errors import KvtailorError
    from kvtailor.fitting.result import Fit
    from kvtailor.fitting.run import fit
    from kvtailor.hf.cache import KvCache
    from kvtailor.hf.load_saved import load_cache
    from kvtailor.hf.make_cache import cache_for
    from kvtailor.hf.model.loading import load as load_model
    from kvtailor.hf.run.ask import Answers, Reading, ask, read
    from kvtailor.hf.run.generate import Generated, generate
    from kvtailor.hf.run.prefill import prefill
    from kvtailor.hf.run.session import Session, session
    from kvtailor.hf.sizes.size import CacheSize, cache_size
    from kvtailor.ledger import Ledger
    from kvtailor.plan import Plan

__all__ = [
    "Answers",
    "CacheSize",
    "EngineCheck",
    "Evaluation",
    "Generated",
    "Fit",
    "KvCache",
    "KvtailorError",
    "Ledger",
    "ModelCheck",
    "Plan",
    "Reading",
    "Session",
    "__version__",
    "ask",
    "cache_for",
    "cache_size",
    "calibrate",
    "check_engine",
    "check_model",
    "evaluate",
    "fit",
    "generate",
    "load_cache",
    "load_model",
    "prefill",
    "read",
    "session",
]

# Importing transformers takes seconds; `import kvtailor` and the command line's help do not wait for it.
_HOMES = {
    "Answers": "hf.run.ask",
    "CacheSize": "hf.sizes.size",
    "Evaluation": "bench.evaluation.result",
    "Generated": "hf.run.generate",
    "KvCache": "hf.cache",
    "KvtailorError": "errors",
    "Ledger": "ledger",
    "Plan": "plan",
    "Reading": "hf.run.ask",
    "Session": "hf.run.session",
    "ask": "hf.run.ask",
    "cache_for": "hf.make_cache",
    "check_engine": "bench.safety.engine_types",
    "EngineCheck": "bench.safety.engine_types",
    "check_model": "bench.safety.check",
    "ModelCheck": "bench.safety.result",
    "evaluate": "bench.evaluation.evaluate",
    "fit": "fitting.run",
    "Fit": "fitting.result",
    "cache_size": "hf.sizes.size",
    "calibrate": "calibration.run",
    "generate": "hf.run.generate",
    "load_cache": "hf.load_saved",
    "load_model": "hf.model.loading:load",
    "prefill": "hf.run.prefill",
    "read": "hf.run.ask",
    "session": "hf.run.session",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvtailor' has no attribute {name!r}")
    home, _, own = _HOMES[name].partition(":")
    return getattr(import_module(f"kvtailor.{home}"), own or name)


def __dir__() -> list[str]:
    return sorted(__all__)
