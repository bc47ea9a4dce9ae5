"""Sizes of plans on one model at one load: what fits a memory, and the largest budget that does."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvtailor.errors import KvtailorError
from kvtailor.hf.model.cache_dtype import dtype_of_caches
from kvtailor.hf.model.config import config_of
from kvtailor.hf.model.geometry import Geometry
from kvtailor.hf.sizes.segments import SegmentBytes
from kvtailor.hf.sizes.size import CacheSize, known_size, largest_fitting
from kvtailor.plan import Plan

__all__ = ["Sizer"]


@dataclass(frozen=True, kw_only=True)
class Sizer:
    """Sizes at one context and batch.

    Attributes:
        model: whose cache it is, or its name; then calibrations are not looked for.
        config: of the model.
        dtype: of the cache.
        context: tokens of each row's prompt.
        batch: rows.
    """

    model: Any
    config: Any
    dtype: torch.dtype
    context: int
    batch: int
    _known: dict[str, CacheSize | KvtailorError] = field(default_factory=dict, repr=False, compare=False)
    _segments: dict[Any, SegmentBytes] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, model: Any, *, context: int, batch: int) -> Sizer:
        """Return the sizes on a model."""
        return cls(model=model, config=model.config, dtype=dtype_of_caches(model), context=context, batch=batch)

    @classmethod
    def named(cls, name: str, dtype: str, *, context: int, batch: int) -> Sizer:
        """Return the sizes on a model of which only the configuration is read."""
        return cls(model=name, config=config_of(name), dtype=getattr(torch, dtype), context=context, batch=batch)

    @property
    def geometry(self) -> Geometry:
        """Of the model."""
        return Geometry.of(self.config)

    @property
    def element(self) -> int:
        """Bytes of an element of the cache."""
        return self.dtype.itemsize

    @property
    def full(self) -> int:
        """Bytes of the uncompressed cache, without spare slots, as a ledger's `full`."""
        return self.size(Plan()).full

    def size(self, plan: Plan, *, context: int | None = None, batch: int | None = None) -> CacheSize:
        """Return a plan's size.

        Raises:
            KvtailorError: the model cannot have the plan.
        """
        context, batch = context or self.context, batch or self.batch
        name = f"{plan} {context} {batch}"
        if name not in self._known:
            try:
                self._known[name] = known_size(
                    self.model, plan, context=context, batch=batch, dtype=self.dtype, known=self._segments
                )
            except KvtailorError as error:
                self._known[name] = error
        found = self._known[name]
        if isinstance(found, KvtailorError):
            raise found
        return found

    def refusal(self, plan: Plan) -> str | None:
        """Return why the model cannot have a plan; None where it can."""
        try:
            self.size(plan)
        except (KvtailorError, ValueError) as error:
            return str(error)
        return None

    def most(self, plan: Plan) -> int | None:
        """Return the bytes that a plan is expected to have; None where the model cannot have it.

        Where they depend on the text, the middle of their bounds: what is measured decides, see `structure.search`.
        """
        try:
            return self.size(plan).total
        except (KvtailorError, ValueError):
            return None

    def filled(self, plan: Plan, memory: int) -> Plan | None:
        """Return a plan with the largest budget that fits; None where none does, or where the model cannot have it.

        A scorer that would have nothing to drop is left out.
        """
        if not plan.evicts:
            size = self.most(plan)
            return plan if size is not None and size <= memory else None
        whole = Plan(encode=plan.encode, store=plan.store)
        size = self.most(whole)
        if size is not None and size <= memory:
            return whole

        def at(tokens: int) -> Plan:
            return replace(plan, tokens=tokens, keep=None, bytes=None)

        tokens = largest_fitting(lambda tokens: self.most(at(tokens)), memory, self.context)
        return None if tokens is None else at(tokens)

    def measured(self, plan: Plan, held: int) -> int:
        """Return the bytes of all rows, from what one row was measured to have."""
        if self.batch == 1:
            return held
        return round(held * self.size(plan).total / self.size(plan, batch=1).total)

    def elsewhere(self, plan: Plan) -> tuple[tuple[int, int, int, int], ...]:
        """Return a plan at other lengths and batches: context, rows, its bytes, and those of the uncompressed cache."""
        found = []
        for context in sorted({self.context // 2, self.context, 2 * self.context, 4 * self.context}):
            for batch in sorted({1, self.batch, 4 * self.batch}):
                size = self.size(plan, context=max(1, context), batch=batch)
                found.append((context, batch, size.total, size.full))
        return tuple(found)

    def cut(self, plan: Plan, factor: float) -> Plan | None:
        """Return a plan with a smaller budget, for one that was measured to have too many bytes."""
        if plan.tokens is None or int(plan.tokens * factor) < 1:
            return None
        return replace(plan, tokens=int(plan.tokens * factor))
