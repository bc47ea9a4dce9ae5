"""A segment that holds another one and changes what it decodes to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from kvtailor.types import Layout, Segment

__all__ = ["AroundSegment"]


@dataclass(frozen=True, kw_only=True)
class AroundSegment(Segment):
    """What a codec around another one gives; a subclass says how it decodes.

    Attributes:
        layout: the inner segment's.
        inner: what is stored.
    """

    layout: Layout
    inner: Segment

    def rows(self, index: Tensor) -> Self:
        return self._around(self.inner.rows(index))

    def regather(self, lane: Tensor, slot: Tensor, layout: Layout) -> Self:
        return self._around(self.inner.regather(lane, slot, layout))

    def tensors(self) -> dict[str, Tensor]:
        return self.inner.tensors()

    def closed_form_bytes(self) -> int:
        return self.inner.closed_form_bytes()

    def state(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        return self.inner.state()

    def _around(self, inner: Segment) -> Self:
        return replace(self, layout=inner.layout, inner=inner)
