"""A model over a cache of ours that can be taken back: what the room `speculate` drives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvtailor.hf.cache import KvCache, cache_for
from kvtailor.hf.layers import WindowLayer
from kvtailor.hf.prefill import fed, read
from kvtailor.plan import Plan

__all__ = ["CacheReader"]


class CacheReader:
    """A `Reader` (see `speculate.contract`) of one model under one plan.

    Args:
        model: a transformers decoder-only model.
        plan: of its cache.
        mask: (b, n) of the prompt, 0 for padding; None: no padding.
        chunk: see `kvtailor.prefill`.
    """

    def __init__(self, model: Any, plan: Plan, mask: Tensor | None, chunk: int | None):
        self.model, self.plan, self.mask, self.chunk = model, plan, mask, chunk
        self.cache = cache_for(model, plan)

    @property
    def seen(self) -> int:
        return self.cache.seen

    def prefill(self, ids: Tensor) -> Tensor:
        """Reads a prompt (b, n), lets the plan compress it, and gives its last logits (b, v)."""
        mask = self._mask(ids.shape[1])
        logits = read(self.model, self.cache, ids, mask, chunk=self.chunk)
        self.cache.route.speculate()
        for layer in self._windows():
            layer.record_past = layer.speculating = True
        return logits[:, -1]

    def read(self, tokens: Tensor, keep: int) -> Tensor:
        return fed(self.model, self.cache, tokens, self._mask(self.seen + tokens.shape[1]), keep=keep)

    def retract(self, length: int) -> None:
        if self.seen > length:
            self.cache.crop(length - self.seen)

    def settle(self) -> None:
        self.cache.route.settle()
        for layer in self._windows():
            layer.settle()

    def close(self) -> KvCache:
        """The cache, which takes what comes as any other does from now on."""
        self.settle()
        self.cache.route.stop_speculating()
        for layer in self._windows():
            layer.record_past = layer.speculating = False
        return self.cache

    def renew(self, ids: Tensor) -> None:
        """A new cache that has read all columns but the last, as if they were a prompt."""
        self.cache = cache_for(self.model, self.plan)
        self.prefill(ids[:, :-1])

    def room(self) -> int | None:
        return self.cache.route.room()

    def wait(self) -> None:
        device = next(self.model.parameters()).device
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def _windows(self) -> list[WindowLayer]:
        return [layer for layer in self.cache.layers if isinstance(layer, WindowLayer)]

    def _mask(self, columns: int) -> Tensor | None:
        if self.mask is None:
            return None
        more = columns - self.mask.shape[1]
        if more <= 0:
            return self.mask[:, :columns]
        return torch.cat([self.mask, self.mask.new_ones((self.mask.shape[0], more))], 1)
