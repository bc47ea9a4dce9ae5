"""What the compressed caches of one run of the harness held, and whether they were read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvtailor.bench.measure.cache_fields import weigh

__all__ = ["AfterPrefill", "HeldSummary"]


@dataclass
class HeldSummary:
    """What caches held when they had just been compressed.

    Attributes:
        contexts: prefills weighed; a batch of prompts is one.
        compressed: those after which fewer tokens or fewer bytes were held than an uncompressed cache holds.
        read: those of the compressed ones from which something was scored or generated. The first token after a
            prefill is not: it comes from the prefill's own logits.
        truncated: requests that were longer than the model's positions and lost their beginning, as `hf` cuts them.
        scored: tokens whose log-probability was requested.
        heaviest: fields of a `Record` of the heaviest cache, see `weigh`.
    """

    contexts: int = 0
    compressed: int = 0
    read: int = 0
    truncated: int = 0
    scored: int = 0
    heaviest: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.heaviest:
            return "no cache of its own was weighed."
        sizes = "{tokens_held:g} of {tokens_seen} tokens, {bytes_held} of {bytes_full} bytes.".format(**self.heaviest)
        lost = f" {self.truncated} requests lost their beginning." if self.truncated else ""
        return (
            f"{self.compressed} of {self.contexts} contexts were compressed, {self.read} of them read afterwards; the "
            f"heaviest cache held {sizes}{lost}"
        )

    def add(self, cache: Any) -> bool:
        """Weighs a cache; whether it holds less than an uncompressed one."""
        weight = weigh(cache)
        self.contexts += 1
        if not weight:
            return False
        smaller = weight["tokens_held"] < weight["tokens_seen"] or weight["bytes_held"] < weight["bytes_full"]
        self.compressed += smaller
        if weight["bytes_held"] >= self.heaviest.get("bytes_held", 0):
            self.heaviest = weight
        return bool(smaller)


class AfterPrefill:
    """What `generate(streamer=)` calls with the prompt, then with each token: the first of them is not fed yet."""

    def __init__(self, cache: Any, held: HeldSummary):
        self.cache, self.held = cache, held
        self.puts, self.smaller = 0, False

    def put(self, ids: Tensor) -> None:
        """Weighs the cache when the first token is chosen; with the second, the cache was read."""
        self.puts += 1
        if self.puts == 2:
            self.smaller = self.held.add(self.cache)
        elif self.puts == 3:
            self.held.read += self.smaller

    def end(self) -> None:
        """Nothing is left to do."""
