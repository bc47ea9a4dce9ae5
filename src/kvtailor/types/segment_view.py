"""How attention reads a segment: not always as keys and values of the model's own size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Lift", "SegmentView"]


@dataclass(frozen=True, kw_only=True)
class Lift:
    """How values of another width become the model's: x @ matrix + offset, by kv head.

    It is linear, so that attention sums what is stored and lifts each sum once: the offset then counts as much as the
    probability that the segment received.

    Attributes:
        matrix: (h, r, dv) float32.
        offset: (h, dv) float32; None: there is none.
    """

    matrix: Tensor
    offset: Tensor | None = None

    def of_sums(self, sums: Tensor, share: Tensor) -> Tensor:
        """The lifted sums.

        Args:
            sums: (b * h, q, r) float32 weighted sums of the segment's values.
            share: (b * h, q) float32 sum of the weights.

        Returns:
            (b * h, q, dv) float32.
        """
        heads = self.matrix.shape[0]
        lifted: Tensor = (sums.unflatten(0, (-1, heads)) @ self.matrix).flatten(0, 1)
        if self.offset is None:
            return lifted
        offset = self.offset.expand(share.shape[0] // heads, -1, -1).flatten(0, 1)
        return torch.addcmul(lifted, share[..., None], offset[:, None])


@dataclass(frozen=True, kw_only=True)
class SegmentView:
    """A segment as attention reads it; see `Segment.view`.

    Attributes:
        keys: (m, s, d), of the same meaning as decoded ones.
        values: (m', s, r), with `lift` in the codec's own coordinates, else (m', s, dv).
        log_weight: (m, s) float32 added to the logits: the logarithm of how many tokens a slot stands for. None: one.
        lift: what makes sums of the values the model's; None: they are.
        shared: (m', c) int64: the lanes of keys that read each lane of values, all of them once. None: each its own,
            and m' = m.
        more_keys: (m, s, e) further channels of the keys, behind those of `keys`, where they are stored apart. None:
            `keys` has all d of them, else d - e.
    """

    keys: Tensor
    values: Tensor
    log_weight: Tensor | None = None
    lift: Lift | None = None
    shared: Tensor | None = None
    more_keys: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether keys and values are all there is."""
        return self.log_weight is None and self.lift is None and self.shared is None and self.more_keys is None

    @property
    def width(self) -> int:
        """dv, of the output."""
        return self.values.shape[-1] if self.lift is None else self.lift.matrix.shape[-1]
