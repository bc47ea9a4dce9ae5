"""A segment of which keys, values or both are stored as coordinates in a subspace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvtailor.ops.codes.subspace import Basis
from kvtailor.ops.lanes.joined import apart, group_layout, hold_the_same, members, side_by_side
from kvtailor.ops.segments.coded import under
from kvtailor.types import Layout, Segment, SegmentView
from kvtailor.types.late_checks import send

__all__ = ["LatentSegment", "inner_state"]


@dataclass(frozen=True, kw_only=True)
class LatentSegment(Segment):
    """Latents of groups of kv heads, in a codec of their own.

    Attributes:
        layout: which tokens these are.
        inner: the latents (m', s, r) of both sides; a side that is not projected has no channels there.
        keys_basis, values_basis: of the layer, shared by all segments; None for a side that is not projected.
        whole: the side that is not projected, as it is; None where both are.
    """

    layout: Layout
    inner: Segment
    keys_basis: Basis | None
    values_basis: Basis | None
    whole: Tensor | None = None
    codec = "lowrank"

    @property
    def joined(self) -> int:
        """Heads of a group."""
        basis = self.keys_basis or self.values_basis
        assert basis is not None
        return basis.joined

    @property
    def sharing(self) -> int:
        basis = self.keys_basis or self.values_basis
        assert basis is not None
        return basis.joined * basis.apart

    def decode(self) -> tuple[Tensor, Tensor]:
        keys, values = self.inner.decode()
        return self._decoded(keys, self.keys_basis), self._decoded(values, self.values_basis)

    def view(self) -> SegmentView:
        read = self.inner.view()
        if self.values_basis is None or read.lift is not None:
            keys, values = self.decode()
            return SegmentView(keys=keys, values=values, log_weight=read.log_weight)
        lanes = None if self.joined == 1 else members(self.layout, self.joined)
        return SegmentView(
            keys=self._decoded(read.keys, self.keys_basis),
            values=read.values,
            log_weight=read.log_weight,
            lift=self.values_basis.lift(),
            shared=None if lanes is None else send(lanes, read.values.device),
        )

    def relaid(self, layout: Layout) -> LatentSegment:
        if self.joined > 1:
            raise ValueError("latents of joined heads belong to their group: take whole groups by `of_heads`")
        return replace(self, layout=layout, inner=self.inner.relaid(layout))

    def of_heads(self, first: int, count: int) -> Segment:
        """See `Segment.of_heads`. The bases stay as they are: a codec's `restore` gives those of the heads here.

        Raises:
            ValueError: the heads are neither whole groups of those that share their latents nor a part of one.
        """
        joined, layout = self.joined, self.layout
        if joined == 1 or count == layout.heads:
            return super().of_heads(first, count)
        group, last = first // joined, (first + count - 1) // joined
        whole_groups = first % joined == 0 and count % joined == 0
        if not whole_groups and (group != last or joined % count):
            raise ValueError(
                f"{joined} kv heads share their latents, and heads {first} to {first + count - 1} divide them"
            )
        lanes, part = layout.lanes_of_heads(first, count)
        here = min(joined, count)
        return replace(
            self,
            layout=part,
            inner=self.inner.of_heads(group, max(1, count // joined)),
            keys_basis=_shaped_for(self.keys_basis, here),
            values_basis=_shaped_for(self.values_basis, here),
            whole=None if self.whole is None else self.whole[lanes.to(self.whole.device)],
        )

    def beside(self, others: Sequence[Segment]) -> Segment | None:
        """See `Segment.beside`: parts of one group, whose latents all of them have.

        Raises:
            ValueError: they are no such parts.
        """
        basis = self.keys_basis or self.values_basis
        assert basis is not None
        parts = [self, *(each for each in others if isinstance(each, LatentSegment))]
        if basis.apart == 1:
            return None
        heads = sum(each.joined for each in parts)
        if len(parts) != len(others) + 1 or basis.apart * basis.joined % heads:
            raise ValueError(f"parts of a group of kv heads that share their latents have {heads} of them")
        layout, order = side_by_side([each.layout for each in parts])
        whole = None
        if self.whole is not None:
            whole = torch.cat([each.whole for each in parts if each.whole is not None])
            whole = whole[order.to(whole.device)]
        return replace(
            self,
            layout=layout,
            keys_basis=_shaped_for(self.keys_basis, heads),
            values_basis=_shaped_for(self.values_basis, heads),
            whole=whole,
        )

    def rows(self, index: Tensor) -> LatentSegment:
        lanes, layout = self.layout.lanes_of_rows(index)
        inner = self.inner.rows(index)
        whole = None if self.whole is None else self.whole[lanes.to(self.whole.device)]
        return replace(self, layout=layout if self.joined > 1 else inner.layout, inner=inner, whole=whole)

    def regather(self, lane: Tensor, slot: Tensor, layout: Layout) -> LatentSegment:
        whole = None if self.whole is None else self.whole[lane, slot]
        if self.joined == 1:
            return replace(self, layout=layout, inner=self.inner.regather(lane, slot, layout), whole=whole)
        mine = members(self.layout, self.joined)
        assert mine is not None
        group = torch.empty(mine.numel(), dtype=torch.int64)
        group[mine] = torch.arange(mine.shape[0])[:, None].expand_as(mine)
        source, lanes = send(group, lane.device)[lane], members(layout, self.joined)
        if lanes is not None and hold_the_same(layout, lanes):
            of_each = torch.stack([source, slot])[:, send(lanes, lane.device)]
            if bool((of_each == of_each[:, :, :1]).all()):
                first = of_each[:, :, 0]
                inner = self.inner.regather(first[0], first[1], group_layout(layout, lanes))
                return replace(self, layout=layout, inner=inner, whole=whole)
        # The heads of a group go apart: each takes the whole group's latents along.
        return replace(
            self,
            layout=layout,
            inner=self.inner.regather(source, slot, layout),
            keys_basis=None if self.keys_basis is None else self.keys_basis.by_head(),
            values_basis=None if self.values_basis is None else self.values_basis.by_head(),
            whole=whole,
        )

    def tensors(self) -> dict[str, Tensor]:
        latents = {f"latents.{name}": tensor for name, tensor in self.inner.tensors().items()}
        return {**latents, **self._whole(), **(self.layout.tensors() if self.joined > 1 else {})}

    def closed_form_bytes(self) -> int:
        own = self.layout.closed_form_bytes() if self.joined > 1 else 0
        whole = 0 if self.whole is None else self.whole.numel() * self.whole.element_size()
        return self.inner.closed_form_bytes() + own + whole

    def state(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        fields, tensors = self.inner.state()
        basis = self.keys_basis or self.values_basis
        assert basis is not None
        own: dict[str, object] = {"joined": self.joined, "apart": basis.apart}
        for name, each in (("key_size", self.keys_basis), ("value_size", self.values_basis)):
            whole = 0 if self.whole is None else self.whole.shape[-1]
            own[name] = whole if each is None else each.directions.shape[-2] // each.joined
        return {**own, **{f"latents.{name}": each for name, each in fields.items()}}, {
            **self._whole(),
            **{f"latents.{name}": each for name, each in tensors.items()},
        }

    def _whole(self) -> dict[str, Tensor]:
        return {} if self.whole is None else {"whole": self.whole}

    def _decoded(self, latents: Tensor, basis: Basis | None) -> Tensor:
        if basis is None:
            assert self.whole is not None
            return self.whole
        wide = basis.states(latents, self.inner.layout.owner)
        if basis.joined == 1:
            return wide
        lanes = members(self.layout, basis.joined)
        assert lanes is not None
        return apart(wide, lanes)


def _shaped_for(basis: Basis | None, joined: int) -> Basis | None:
    """A basis in the shape that it has for so many heads of a group; only `restore` makes one that can be read."""
    if basis is None or basis.joined == joined:
        return basis
    rows = basis.directions.shape[-2] // basis.joined * joined
    times = -(-rows // basis.directions.shape[-2])
    directions = basis.directions.repeat(1, times, 1)[:, :rows]
    mean = None if basis.mean is None else basis.mean.repeat(1, times)[:, :rows]
    return Basis(directions=directions, mean=mean, joined=joined, apart=basis.apart * basis.joined // joined)


def inner_state(
    fields: Mapping[str, object], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, object], dict[str, Tensor]]:
    """The part of `LatentSegment.state` that is the latents' own."""
    return under("latents.", fields), under("latents.", tensors)
