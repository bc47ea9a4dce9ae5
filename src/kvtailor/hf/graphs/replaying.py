"""Decoding by steps that are replayed, one recording after the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvtailor.hf.cache import KvCache
from kvtailor.hf.graphs.obstacles import checked_recorder, obstacle
from kvtailor.hf.graphs.replay import Recorder, Replay
from kvtailor.hf.run.feeding import fed
from kvtailor.hf.run.reader import CacheReader, with_columns
from kvtailor.plan import Plan

__all__ = ["ReplayingReader", "Replays", "greedy"]


class Replays:
    """Greedy or sampled decoding of a cache by `Replay`s, one after the other.

    ```python
    steps = Replays(model, cache, expected=255)
    for _ in range(255):
        logits = steps.step(tokens)
    steps.land()
    ```

    Args:
        model: a transformers decoder-only model.
        cache: of it; nothing else uses it before `land`.
        mask: (b, n) of what was seen, 0 for padding; None: nothing was padding.
        expected: tokens that will come, at most: slots are reserved for no more.
        record: see `Replay`; None: what records on the model's device.

    Attributes:
        now: the steps of now; None before the first, and between the plan's action and the next.

    Raises:
        UnsupportedModel: steps of this model under this plan cannot be recorded; the message has the reason.
    """

    def __init__(
        self, model: Any, cache: KvCache, mask: Tensor | None = None, *, expected: int, record: Recorder | None = None
    ):
        self.record = checked_recorder(model, obstacle(cache, model), record)
        self.model, self.cache, self.mask, self.expected = model, cache, mask, expected
        self.now: Replay | None = None

    @property
    def seen(self) -> int:
        """Columns read."""
        return self.cache.seen + (0 if self.now is None else self.now.done)

    def step(self, tokens: Tensor) -> Tensor:
        """Logits (b, v) after new tokens (b, 1)."""
        if self.now is not None and not self.now.left:
            self.land()
        self.expected -= 1
        if self.now is None:
            if any(state.stored.tail is None or not state.stored.tail.length for state in self.cache.engine.states):
                # An empty tail has no buffer yet whose slots could be filled.
                mask = with_columns(self.mask, self.cache.seen + 1)
                return fed(self.model, self.cache, tokens, mask, keep=1)[:, 0]
            mask = with_columns(self.mask, self.cache.seen)
            self.now = Replay(self.model, self.cache, mask, max(1, self.expected + 1), self.record)
        return self.now.step(tokens)

    def land(self) -> None:
        """Tell the cache what has come; another step may follow."""
        if self.now is not None:
            self.now.land()
            self.now = None


class ReplayingReader(CacheReader):
    """A `Reader` for plain decoding, which replays steps of one token.

    Args:
        expected, record: see `Replays`.
        Others: see `CacheReader`.

    Attributes:
        steps: how they are replayed.
    """

    def __init__(
        self,
        model: Any,
        plan: Plan,
        mask: Tensor | None,
        chunk: int | None,
        cache_dtype: torch.dtype | None = None,
        *,
        expected: int,
        record: Recorder | None = None,
    ):
        super().__init__(model, plan, mask, chunk, cache_dtype)
        self.steps = Replays(model, self.cache, mask, expected=expected, record=record)

    @property
    def seen(self) -> int:
        return self.steps.seen

    def read(self, tokens: Tensor, keep: int) -> Tensor:
        if tokens.shape[1] == 1:
            return self.steps.step(tokens)[:, None]
        self.steps.land()
        return super().read(tokens, keep)

    def retract(self, length: int) -> None:
        self.steps.land()
        super().retract(length)

    def settle(self) -> None:
        """Nothing waits: no draft is verified here."""

    def close(self) -> KvCache:
        self.steps.land()
        return super().close()

    def _open(self) -> None:
        """What is read stays."""


@torch.inference_mode()
def greedy(model: Any, cache: KvCache, following: Tensor, tokens: int) -> None:
    """Feed so many tokens, of which `following` (b, 1) are the first and each other is the likeliest, by replays.

    Raises:
        UnsupportedModel: see `Replays`.
    """
    steps = Replays(model, cache, expected=tokens)
    for _ in range(tokens):
        following = steps.step(following).argmax(-1, keepdim=True)
    steps.land()
