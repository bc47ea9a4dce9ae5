"""Channels: keys without the channels that matter least to the newest queries.

*Idea* The logit is a sum over channels, and most of it comes from few of them. For each kv head the channels are ranked
by the length of the newest queries in them times the length of the keys in them; the least are dropped from the keys
that are stored, and count as 0. Values stay as they are.
*Paper* `xu2025think` (arXiv 2407.21018), section 3: keep = 1 - its pruning ratio, window = its observation window,
recent = its recent tokens.
*Source* The paper; kvtailor's own code.
*Departs* A group's query heads count together, as one longer window. Decoded tokens are encoded too, each block with
channels of its own, where the paper leaves them as they are. Where heads hold other tokens, or tokens have moved, keys
are read with zeros in place; else the query's channels are dropped, as in the paper. Channels are ranked by products
before any cap on logits.
*Cost* keep of the keys' bytes, so (1 + keep) / 2 of the cache, and 1 byte for each channel that stays and 128 tokens;
`window` queries of each query head.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvtailor.encode.contract import Codec, refuse_non_finite
from kvtailor.encode.settings import ByBlocks
from kvtailor.method import Serves
from kvtailor.ops import huge_pages
from kvtailor.ops.segments.coded import Coded, PairSegment, TimeGrouped, Whole, alone
from kvtailor.types import Coordinates, Layout, Needs, PickedChannels

__all__ = ["Channels", "ChannelsSegment", "KeptChannels"]


@dataclass(frozen=True, kw_only=True)
class KeptChannels(TimeGrouped):
    """States of which each lane has some channels.

    Attributes:
        size: c, channels that there were.
        states: (m, s, k) of the cache's dtype.
        kept: (m, ceil(s / group), k) uint8 or int16 their channels, ascending; with `row` (rows, k).
    """

    size: int
    states: Tensor
    kept: Tensor
    of_tokens = ("states",)
    shared = ("kept",)
    dtypes = {**TimeGrouped.dtypes, "kept": (torch.uint8, torch.int16)}

    def regather(self, lane: Tensor, slot: Tensor) -> Self:
        """See `Coded.regather`; the lanes of one head have the same channels, and tokens do not change heads."""
        kept = self.kept[lane, 0] if self.row is None else None
        if kept is None or bool((kept != kept[:, :1]).any()):
            return super().regather(lane, slot)
        groups = -(-slot.shape[1] // self.group)
        states = huge_pages.picked(self.states, (lane, slot))
        return replace(self, states=states, kept=kept[:, :1].repeat(1, groups, 1))

    def regather_with(self, others: Sequence[Coded], at: Tensor) -> Self | None:
        """None: blocks have channels of their own, and a segment of several could not be read by picking them."""
        return None

    def decode(self) -> Tensor:
        # Until tokens move, all groups of a lane have the same channels.
        kept = self.kept[:, :1] if self.row is None else self.per_token("kept")
        whole = self.states.new_zeros((*self.states.shape[:2], self.size))
        return whole.scatter_(2, kept.to(torch.int64).expand_as(self.states), self.states)

    def stored(self) -> Tensor:
        return self.states if self.row is None else self.decode()

    def check(self) -> None:
        least, most = (int(each) for each in self.kept.aminmax()) if self.kept.numel() else (0, 0)
        if self.kept.dtype not in (torch.uint8, torch.int16) or least < 0 or most >= self.size:
            raise ValueError(f"channels go from {least} to {most} as {self.kept.dtype}, and there are {self.size}")

    def as_read(self) -> Coded:
        return Whole(states=self.states) if self.row is None else self

    def coordinates(self) -> Coordinates | None:
        """Each lane's channels among all."""
        return PickedChannels(channels=self.kept[:, 0], size=self.size) if self.row is None else None

    def closed_form_bytes(self, lanes: int, slots: int) -> int:
        count = self.states.shape[-1]
        codes = lanes * slots * count * self.states.element_size()
        return codes + self.groups(lanes, slots) * count * _index_bytes(self.size) + self.index_bytes(lanes, slots)


@dataclass(frozen=True, kw_only=True)
class ChannelsSegment(PairSegment):
    """Keys of fewer channels, and values as they are."""

    codec = "channels"
    kinds = (KeptChannels, Whole)


@dataclass(frozen=True, kw_only=True)
class Channels(ByBlocks, Codec):
    """Thinner keys.

    Attributes:
        keep: share of a key's channels that stay.
        window: newest queries that rank the channels.
        recent: newest tokens whose keys keep all of them.
        block_size: tokens that are encoded at once while decoding.
    """

    keep: float = 0.6
    window: int = 32
    recent: int = 32
    block_size: int = 128
    _lengths: Tensor | None = field(init=False, repr=False, compare=False, default=None)
    serves: ClassVar[Serves] = Serves(
        latents="it leaves out channels of keys, and the channels of a latent are those of values as well"
    )

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ValueError(
                f"channels: keep must be a share above 0 and at most 1, found {self.keep}; the paper uses 0.6"
            )
        if self.window < 1:
            raise ValueError(f"channels: window must be at least 1 query, found {self.window}; the paper uses 32")
        if self.recent < 0 or self.block_size < 1:
            raise ValueError(
                f"channels: recent must be 0 or more tokens and block_size 1 or more, found {self.recent} and "
                f"{self.block_size}"
            )

    @property
    def needs(self) -> Needs:
        """The queries of the window."""
        return Needs(window=self.window)

    def seeing(self, queries: Tensor, heads: int, valid: Tensor | None) -> Channels:
        """Ranks channels by these queries, see `Codec.seeing`."""
        made, grouped = copy.copy(self), queries[:, :, -self.window :].float().unflatten(1, (heads, -1))
        if valid is not None:
            grouped = grouped * valid[:, None, None, -self.window :, None]
        object.__setattr__(made, "_lengths", grouped.square().sum((2, 3)).sqrt().flatten(0, 1))
        return made

    @property
    def bears_offset(self) -> bool:
        """Channels stay as they are, or go."""
        return True

    def segment_type(self) -> type[ChannelsSegment]:
        return ChannelsSegment

    def encode(self, layout: Layout, keys: Tensor, values: Tensor, first: Tensor | None = None) -> ChannelsSegment:
        """Some channels of keys (m, s, d), and values (m, s, dv); without queries the channels of the longest keys.

        Raises:
            CacheMisuse: NaN or infinity.
        """
        refuse_non_finite("channels", keys, values, "by which no channels can be ranked")
        lanes, slots, size = keys.shape
        owner = layout.owners(keys.device)
        filled = layout.filled(keys.device)
        squares = keys.float().square()
        squares = squares if filled is None else squares * filled[..., None]
        lengths = squares.new_zeros((layout.rows * layout.heads, size)).index_add_(0, owner, squares.sum(1)).sqrt()
        if self._lengths is not None:
            lengths = lengths * self._lengths.to(lengths.device)
        kept = lengths.topk(self._count(size), sorted=False).indices.sort(-1).values[owner]
        states = keys.gather(2, kept[:, None].expand(-1, slots, -1))
        table = kept.to(torch.uint8 if _index_bytes(size) == 1 else torch.int16)
        groups = -(-slots // self.block_size)
        return ChannelsSegment(
            layout=layout,
            keys=KeptChannels(
                group=self.block_size, size=size, states=states, kept=table[:, None].repeat(1, groups, 1)
            ),
            values=Whole(states=alone(values)),
        )

    def restore(self, layout: Layout, fields: Mapping[str, object], tensors: Mapping[str, Tensor]) -> ChannelsSegment:
        return ChannelsSegment.from_state(layout, fields, tensors)

    def bytes_per_token(self, key_size: int, value_size: int, element_size: int) -> float:
        """The kept channels, their numbers shared by a block of tokens, and the value."""
        each = element_size + _index_bytes(key_size) / self.block_size
        return self._count(key_size) * each + value_size * element_size

    def encode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int:
        """2 for each element of a key: its square, and the sum."""
        return 2 * tokens * key_size

    def decode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int:
        """0: channels are put in their places."""
        return 0

    def _count(self, size: int) -> int:
        return max(1, round(self.keep * size))


def _index_bytes(size: int) -> int:
    return 1 if size <= 256 else 2
