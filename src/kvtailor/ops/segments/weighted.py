"""Segments whose tokens stand for several, and have the number for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvtailor.ops.segments.around import AroundSegment
from kvtailor.ops.segments.coded import places_in_all
from kvtailor.types import Layout, Segment, SegmentView

__all__ = ["Weighted", "log_weight_of", "without_weight"]


@dataclass(frozen=True, kw_only=True)
class Weighted(AroundSegment):
    """Tokens in any encoding, and a weight for each.

    Attributes:
        log_weight: (m, s) float32 logarithm of how many tokens each stands for in the softmax.
    """

    log_weight: Tensor
    codec = "weighted"
    of_slots: ClassVar[tuple[str, ...]] = ("log_weight",)

    def view(self) -> SegmentView:
        return replace(self.inner.view(), log_weight=self.log_weight)

    def regather(self, lane: Tensor, slot: Tensor, layout: Layout) -> Self:
        return self._weighing(self.inner.regather(lane, slot, layout), self.log_weight[lane, slot])

    def tensors(self) -> dict[str, Tensor]:
        return {**self.inner.tensors(), "log_weight": self.log_weight}

    def closed_form_bytes(self) -> int:
        return self.inner.closed_form_bytes() + 4 * self.layout.lanes * self.layout.size

    def state(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        fields, tensors = self.inner.state()
        named = {f"inner.{name}": tensor for name, tensor in tensors.items()}
        return {"codec": self.inner.codec, "fields": fields}, {**named, "log_weight": self.log_weight}

    def _of_lanes(self, lanes: Tensor, inner: Segment) -> Self:
        return self._weighing(inner, self.log_weight[lanes.to(self.log_weight.device)])

    def _stacked(self, parts: Sequence[Self], order: Tensor, inner: Segment) -> Self:
        weights = torch.cat([each.log_weight for each in parts])
        return self._weighing(inner, weights[order.to(weights.device)])

    def _moved_with(self, others: Sequence[Self], lane: Tensor, slot: Tensor, inner: Segment) -> Self:
        parts = [self, *others]
        at = places_in_all([each.layout for each in parts], lane, slot)
        return self._weighing(inner, torch.cat([each.log_weight.flatten() for each in parts])[at])

    def _weighing(self, inner: Segment, log_weight: Tensor) -> Self:
        return replace(self, layout=inner.layout, inner=inner, log_weight=log_weight)


def without_weight(segment: Segment) -> Segment:
    """What is stored, in its own encoding."""
    return segment.inner if isinstance(segment, Weighted) else segment


def log_weight_of(segment: Segment) -> Tensor | None:
    """(m, s) float32; None where each token stands for itself."""
    return segment.log_weight if isinstance(segment, Weighted) else None
