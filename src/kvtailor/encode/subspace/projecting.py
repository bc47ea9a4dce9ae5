"""Codecs that store coordinates of heads, alone or several of a layer together, in directions of their own."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Self

from torch import Tensor

from kvtailor.encode.contract import CodecContext, Sides, refuse_non_finite
from kvtailor.ops.codes.quant import largest_divisor
from kvtailor.ops.codes.subspace import Basis, on_device, part_of_heads
from kvtailor.ops.lanes.joined import group_layout, hold_the_same, members, together
from kvtailor.ops.segments.coded import alone
from kvtailor.ops.segments.latents import LatentSegment, inner_state
from kvtailor.types import ALL_HEADS, HeadShare, Layout, Segment

__all__ = ["Projecting"]


class Projecting(ABC):
    """Projects groups of kv heads, and gives what it finds to `store_latents`. Stands before `Codec` among the bases.

    Attributes:
        heads: kv heads that are projected together, or the largest number below that divides the model's; 0: all.
        only: what is projected; the other side stays as it is.
    """

    heads: int
    only: Sides
    _context: CodecContext | None

    @abstractmethod
    def ranks_of(self, joined: int, heads: int, key_size: int, value_size: int) -> tuple[int, int]:
        """Directions of so many joined heads' keys and values on this layer, 0 for a side that is not projected."""

    @abstractmethod
    def basis_of(self, side: str, rank: int, joined: int, heads: int, size: int) -> Basis:
        """The basis of a layer with so many kv heads in all; the same object each time, on the CPU."""

    @abstractmethod
    def store_latents(
        self, layout: Layout, keys: Tensor, values: Tensor, first: Tensor | None, *, joined: int, sizes: tuple[int, int]
    ) -> Segment:
        """The segment of latents of so many joined heads; those of a side that is not projected have no channels.

        `sizes` are those of a key and of a value.
        """

    @abstractmethod
    def restore_latents(self, layout: Layout, fields: Mapping[str, object], tensors: Mapping[str, Tensor]) -> Segment:
        """What `store_latents` gave."""

    def split_refusal(self, *, heads: int, ranks: int) -> str | None:
        """Groups of heads that neither fit into a process nor are made of whole processes."""
        group = self._group(heads * ranks)
        if group % heads == 0 or heads % group == 0:
            return None
        return (
            f"{type(self).__name__.lower()}: it projects {group} kv heads together, and each of the {ranks} processes "
            f"holds {heads}: neither divides the other; give another `heads`, or another number of processes"
        )

    def for_layer(self, context: CodecContext) -> Self:
        made = copy.copy(self)
        object.__setattr__(made, "_context", context)
        return made

    def segment_type(self) -> type[LatentSegment]:
        return LatentSegment

    def encode(self, layout: Layout, keys: Tensor, values: Tensor, first: Tensor | None = None) -> LatentSegment:
        """Keys (m, s, d) and values (m, s, dv), projected.

        Raises:
            CacheMisuse: NaN or infinity.
            ValueError: there is no calibration.
        """
        refuse_non_finite(type(self).__name__.lower(), keys, values, "which would be in every direction")
        # `here` of the `joined` heads of a group are this process's; the others lie in those beside it.
        joined = self._joined(layout.heads)
        here = min(joined, layout.heads)
        lanes = members(layout, here) if here > 1 else None
        if here > 1 and not hold_the_same(layout, lanes):
            joined, lanes = 1, None
        own = layout if lanes is None else group_layout(layout, lanes)
        sizes = keys.shape[-1], values.shape[-1]
        bases = self._bases(joined, layout.heads, *sizes, keys)
        latents = []
        for side, states, basis in zip(("keys", "values"), (keys, values), bases, strict=True):
            wide = states if lanes is None else together(states, lanes)
            if basis is None:
                latents.append(wide[..., :0])
            elif basis.apart == 1:
                latents.append(basis.latents(wide, own.owner))
            else:
                latents.append(self._latents_of_group(side, wide, own.owner, basis, layout.heads))
        inner = self.store_latents(own, latents[0], latents[1], first, joined=joined, sizes=sizes)
        whole = None if self.only == "both" else alone(keys if self.only == "values" else values)
        return self.segment_type()(layout=layout, inner=inner, keys_basis=bases[0], values_basis=bases[1], whole=whole)

    def restore(self, layout: Layout, fields: Mapping[str, object], tensors: Mapping[str, Tensor]) -> LatentSegment:
        joined, apart = int(str(fields["joined"])), int(str(fields["apart"]))
        lanes = members(layout, joined) if joined > 1 else None
        own = layout if lanes is None else group_layout(layout, lanes)
        inner, whole = self.restore_latents(own, *inner_state(fields, tensors)), tensors.get("whole")
        key_size, value_size = (int(str(fields[name])) for name in ("key_size", "value_size"))
        like = next(iter(tensors.values()))
        keys, values = self._bases(joined * apart, layout.heads, key_size, value_size, like)
        # The heads of a group went apart, and each has the group's latents for itself.
        keys, values = (
            None if each is None else each if each.joined == joined else each.by_head() for each in (keys, values)
        )
        return self.segment_type()(layout=layout, inner=inner, keys_basis=keys, values_basis=values, whole=whole)

    def _group(self, heads: int) -> int:
        """Heads of a group, as the plan has it, of so many of a layer."""
        return heads if self.heads == 0 else largest_divisor(heads, self.heads)

    @property
    def _share(self) -> HeadShare:
        return ALL_HEADS if self._context is None else self._context.share

    @property
    def _known_heads(self) -> int:
        return (self._context.heads if self._context is not None else None) or max(1, self.heads)

    def _joined(self, heads: int) -> int:
        """Heads of a group that are projected together, of this process's `heads` and those of others."""
        return 1 if self._context is not None and self._context.evicts else self._group(self._share.total(heads))

    def _latents_of_group(self, side: str, wide: Tensor, owner: Tensor | None, own: Basis, heads: int) -> Tensor:
        """(m', s, r) of a group that several processes hold, which is all heads of each of them.

        All of them take the same product of all of the group's states, as one process would: parts of it that were
        added up would be rounded otherwise, and coded otherwise.

        Args:
            side: "keys" or "values".
            wide: (m', s, w) the states of this process's heads.
            owner: see `Basis.latents`.
            own: the part of the basis that belongs to these heads.
            heads: how many they are.
        """
        share, near = self._share, own.apart
        first, width = share.rank // near * near, wide.shape[-1]
        states = share.gather(wide, 2)[..., first * width : (first + near) * width]
        whole = self.basis_of(side, own.rank, heads * near, share.total(heads), width // heads)
        group = part_of_heads(whole, first * heads, heads * near)
        return on_device(group, wide.device).latents(states, owner)

    def _bases(
        self, joined: int, heads: int, key_size: int, value_size: int, like: Tensor
    ) -> tuple[Basis | None, Basis | None]:
        """On the device of a tensor."""
        sizes, ranks = (key_size, value_size), self.ranks_of(joined, heads, key_size, value_size)
        keys, values = (
            None if rank == 0 else on_device(self._own_basis(side, rank, joined, heads, size), like.device)
            for side, rank, size in zip(("keys", "values"), ranks, sizes, strict=True)
        )
        return keys, values

    def _own_basis(self, side: str, rank: int, joined: int, heads: int, size: int) -> Basis:
        """What the basis of all heads is for this process's `heads`."""
        share = self._share
        whole = self.basis_of(side, rank, joined, share.total(heads), size)
        return whole if share.ranks == 1 else part_of_heads(whole, share.first(heads), heads)
