"""kvtailor cuts the KV cache of Hugging Face language models to measure, for real, and measures honestly what that
costs.

```python
import kvtailor

cache = kvtailor.cache_for(model, "snapkv + adakv @ tokens=1024")
output = model.generate(**inputs, past_key_values=cache)
print(cache.ledger().ratio)
```
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtailor.calibrators.run import calibrate
    from kvtailor.errors import KvtailorError
    from kvtailor.hf.ask import Answers, Reading, ask, read
    from kvtailor.hf.cache import KvCache, cache_for
    from kvtailor.hf.generate import Generated, generate
    from kvtailor.hf.prefill import prefill
    from kvtailor.hf.saving import load_cache
    from kvtailor.hf.session import Session, session
    from kvtailor.ledger import Ledger
    from kvtailor.plan import Plan

__all__ = [
    "Answers",
    "Generated",
    "KvCache",
    "KvtailorError",
    "Ledger",
    "Plan",
    "Reading",
    "Session",
    "__version__",
    "ask",
    "cache_for",
    "calibrate",
    "generate",
    "load_cache",
    "prefill",
    "read",
    "session",
]
__version__ = "0.1.0"

# Importing transformers takes seconds; `import kvtailor` and the command line's help do not wait for it.
_HOMES = {
    "Answers": "hf.ask",
    "Generated": "hf.generate",
    "KvCache": "hf.cache",
    "KvtailorError": "errors",
    "Ledger": "ledger",
    "Plan": "plan",
    "Reading": "hf.ask",
    "Session": "hf.session",
    "ask": "hf.ask",
    "cache_for": "hf.cache",
    "calibrate": "calibrators.run",
    "generate": "hf.generate",
    "load_cache": "hf.saving",
    "prefill": "hf.prefill",
    "read": "hf.ask",
    "session": "hf.session",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvtailor' has no attribute {name!r}")
    return getattr(import_module(f"kvtailor.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
