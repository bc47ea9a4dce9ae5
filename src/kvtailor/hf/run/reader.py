"""A model over a cache of ours that can be taken back: what the stage `speculate` drives."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from kvtailor.engine import rollback
from kvtailor.hf.cache import KvCache
from kvtailor.hf.layers.of_cache import settle_others
from kvtailor.hf.make_cache import cache_for
from kvtailor.hf.model.devices import input_device
from kvtailor.hf.run.feeding import fed
from kvtailor.hf.run.prefill import read
from kvtailor.hf.run.sharing import forget_queries, remake, sharing_prefill
from kvtailor.plan import Plan

__all__ = ["CacheReader", "with_columns"]


class CacheReader:
    """A `Reader` (see `speculate.contract`) of one model under one plan.

    Args:
        model: a transformers decoder-only model.
        plan: of its cache.
        mask: (b, n) of the prompt, 0 for padding; None: no padding.
        chunk, cache_dtype: see `kvtailor.prefill`.
    """

    def __init__(
        self,
        model: Any,
        plan: Plan,
        mask: Tensor | None,
        chunk: int | None,
        cache_dtype: torch.dtype | None = None,
    ):
        self.model, self.plan, self.mask, self.chunk, self.cache_dtype = model, plan, mask, chunk, cache_dtype
        self.cache = self._new_cache()
        self._speculation = ExitStack()
        # All ids so far, where the model may want them read anew; see `hf.model.rope_border`.
        self._text: Tensor | None = None

    @property
    def seen(self) -> int:
        return self.cache.seen

    def prefill(self, ids: Tensor, others: Sequence[CacheReader] = ()) -> Tensor:
        """Read a prompt (b, n), let the plan compress it, and return its last logits (b, v).

        `others`, of the same model, read it in the same forward; see `hf.run.sharing.can_follow`.
        """
        border = self.cache.guard.border
        self._text = ids if border is not None and border.turns else None
        with sharing_prefill(self.cache, [each.cache for each in others]):
            logits = read(self.model, self.cache, ids, self._mask(ids.shape[1]), chunk=self.chunk)
        for each in (self, *others):
            each._open()
        return logits[:, -1]

    def _new_cache(self) -> KvCache:
        return cache_for(self.model, self.plan, cache_dtype=self.cache_dtype)

    def _open(self) -> None:
        # What an earlier cache of this reader was in ends with that cache.
        self._speculation = ExitStack()
        self._speculation.enter_context(rollback.speculating(self.cache.engine))

    def read(self, tokens: Tensor, keep: int) -> Tensor:
        border = self.cache.guard.border
        if self._text is not None and border is not None:
            self._text = torch.cat([self._text, tokens], 1)
            if keep == 1 and self.seen <= border.tokens < self.seen + tokens.shape[1]:
                # At once, whatever `chunk` is: a piece within the border would be turned by the first factors.
                self.cache = self._new_cache()
                logits = read(self.model, self.cache, self._text, self._mask(self._text.shape[1]))
                self._open()
                return logits
        return fed(self.model, self.cache, tokens, self._mask(self.seen + tokens.shape[1]), keep=keep)

    def retract(self, length: int) -> None:
        if self.seen > length:
            self.cache.crop(length - self.seen)

    def settle(self) -> None:
        rollback.settle(self.cache.engine)
        settle_others(self.cache.layers)

    def close(self) -> KvCache:
        """The cache, which takes what comes as any other does from now on."""
        self.settle()
        self._speculation.close()
        forget_queries(self.cache)
        return self.cache

    def renew(self, ids: Tensor, source: CacheReader | None) -> None:
        """A new cache that has read all columns but the last, as if they were a prompt.

        `source`: of the same model, holds all of them; None: they are read once more.
        """
        self.cache = self._new_cache()
        if source is None:
            self.prefill(ids[:, :-1])
        else:
            remake(self.cache, source.cache, self._mask(source.seen))
            self._open()

    def tokens_until_action(self) -> int | None:
        return rollback.tokens_until_action(self.cache.engine)

    def wait(self) -> None:
        device = input_device(self.model)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def _mask(self, columns: int) -> Tensor | None:
        return with_columns(self.mask, columns)


def with_columns(mask: Tensor | None, columns: int) -> Tensor | None:
    """The mask (b, n) of a prompt, cut or continued with tokens, to so many columns; None: nothing is padding."""
    if mask is None:
        return None
    more = columns - mask.shape[1]
    if more <= 0:
        return mask[:, :columns]
    return torch.cat([mask, mask.new_ones((mask.shape[0], more))], 1)
