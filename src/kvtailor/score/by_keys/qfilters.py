"""Q-Filters: the tokens whose keys lie along the direction in which the head's queries lie.

*Idea*: the queries of a head share one direction, whatever the text, and a key's projection on it follows the attention
that the key will get on average. The direction is measured once for a model; an eviction looks at no query at all.

*Paper*: "Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression", arXiv 2503.02812, section 3; our `file`
= its filters, the first right-singular vectors of a head's queries with the sign that makes the mean query's projection
positive.

*Source*: the paper and a description of its use in kvpress (Apache-2.0); nothing was taken. The filters that its
authors released have the other sign, and are used there with a minus.

*Departs*: the filters are measured on the queries after their rotation, as they meet the cached keys; the paper leaves
this open. A group's filters are averaged, as in the paper. While decoding the paper cuts at each token past its budget;
here once the cache is `slack` tokens past it. `recent` newest tokens may be kept in any case; 0 is the plain method.

*Cost*: no evidence; 4 d bytes for each kv head, and one product with the keys, one kv head at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.calibration_file import CalibratedMethod
from kvtailor.score.contract import Scorer
from kvtailor.types import Held

__all__ = ["QFilters"]


@dataclass(frozen=True, kw_only=True)
class QFilters(CalibratedMethod, Scorer):
    """Projection of each key on the filter of its head.

    Attributes:
        file: of `kvtailor calibrate qfilters`; None: the one that is shipped for the model.
        recent: newest tokens that always stay.
    """

    recent: int = 0
    calibrates: ClassVar[str] = "qfilters"
    per_head: ClassVar[tuple[str, ...]] = ("filters",)
    slack: ClassVar[int | None] = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recent < 0:
            raise ValueError(f"qfilters: recent must be 0 or more tokens, found {self.recent}; the paper uses 0")

    def score(self, held: Held) -> Tensor:
        """(b, h, n) float32 projections.

        Raises:
            ValueError: no filters were given.
        """
        if held.calibration is None or "filters" not in held.calibration:
            raise ValueError("qfilters scores by calibrated filters, but none were given; see `kvtailor calibrate`")
        filters = held.calibration["filters"].to(held.keys.device, torch.float32)
        projected = [keys.float() @ filters[head] for head, keys in enumerate(held.keys.unbind(1))]
        return torch.stack(projected, dim=1)

    def flops(self, *, tokens: int, group: int, size: int) -> int:
        """2 d n: a product with the filter."""
        return 2 * size * tokens

    @classmethod
    def example_calibration(
        cls, *, layers: int, heads: int, group: int, size: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Filters (layers, heads, size)."""
        return {"filters": torch.randn(layers, heads, size, generator=generator, dtype=torch.float32)}
