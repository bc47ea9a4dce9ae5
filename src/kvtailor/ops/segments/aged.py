"""A segment that knows how old its tokens are, so that it can be stored in another encoding later."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvtailor.ops.segments.around import AroundSegment
from kvtailor.types import Coordinates

__all__ = ["AgedSegment"]


@dataclass(frozen=True, kw_only=True)
class AgedSegment(AroundSegment):
    """Tokens in one of several encodings; what is stored is the inner segment's alone.

    Attributes:
        level: which of the encodings, from 0 on.
        newest: no token has a later column. The host knows it without looking at the layout's own columns.
    """

    level: int
    newest: int
    codec = "by_age"

    def coordinates(self, key_size: int, value_size: int) -> tuple[Coordinates | None, Coordinates | None]:
        """Those of the inner segment: nothing is changed."""
        return None, None

    def state(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        fields, tensors = self.inner.state()
        inner = {f"inner.{name}": each for name, each in fields.items()}
        return {"level": self.level, "newest": self.newest, **inner}, tensors
