"""Indexed: tokens as they are, and for each page of them the range of every key channel.

*Idea* Quest bounds how much any query can attend to a page from the page's channel-wise minimum and maximum of keys.
They are made once, when the page is stored, and read instead of the keys when pages are chosen.
*Paper* `quest` (arXiv 2406.10774), section 3.3; page = page size.
*Source* The paper; kvtailor's own code.
*Departs* The newest tokens have no bounds until their block of `block_size` tokens is stored; attention always reads
them.
*Cost* 2 / page more than the keys alone; saves no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.encode.contract import Codec, refuse_non_finite
from kvtailor.method import Serves
from kvtailor.ops.segments.coded import alone
from kvtailor.types import Layout, Segment

__all__ = ["Indexed", "IndexedSegment"]


@dataclass(frozen=True, kw_only=True)
class IndexedSegment(Segment):
    """Plain states with page bounds.

    Attributes:
        layout: which tokens these are.
        page: slots of a page; the last of a lane may have fewer.
        keys, values: (m, s, d) and (m, s, dv).
        low, high: (m, ceil(s / page), d) least and greatest of each key channel over the slots of the page. Filler
            repeats a filled slot, so it widens nothing but, in a page of nothing else, gives that slot's own bounds.
    """

    layout: Layout
    page: int
    keys: Tensor
    values: Tensor
    low: Tensor
    high: Tensor
    codec = "indexed"
    plain: ClassVar[bool] = True

    @classmethod
    def of(cls, layout: Layout, page: int, keys: Tensor, values: Tensor) -> IndexedSegment:
        """Make the bounds of keys (m, s, d), and hold them with the keys and values (m, s, dv)."""
        missing = -keys.shape[1] % page
        padded = torch.cat([keys, keys[:, -1:].expand(-1, missing, -1)], 1) if missing else keys
        paged = padded.unflatten(1, (-1, page))
        return cls(layout=layout, page=page, keys=keys, values=values, low=paged.amin(2), high=paged.amax(2))

    def decode(self) -> tuple[Tensor, Tensor]:
        return self.keys, self.values

    def check(self, dtype: torch.dtype) -> None:
        lanes, pages = self.layout.lanes, -(-self.layout.size // self.page) if self.page > 0 else 0
        wanted = {"keys": self.layout.size, "values": self.layout.size, "low": pages, "high": pages}
        for name, count in wanted.items():
            states = getattr(self, name)
            size = (self.values if name == "values" else self.keys).shape[-1]
            if states.dtype != dtype or tuple(states.shape) != (lanes, count, size):
                raise ValueError(f"the {name} of pages are {states.dtype} of shape {tuple(states.shape)}")

    def rows(self, index: Tensor) -> IndexedSegment:
        lanes, layout = self.layout.lanes_of_rows(index)
        lanes = lanes.to(self.keys.device)
        picked = {name: getattr(self, name).index_select(0, lanes) for name in ("keys", "values", "low", "high")}
        return IndexedSegment(layout=layout, page=self.page, **picked)

    def regather(self, lane: Tensor, slot: Tensor, layout: Layout) -> IndexedSegment:
        return self.of(layout, self.page, self.keys[lane, slot], self.values[lane, slot])

    def tensors(self) -> dict[str, Tensor]:
        return {**self.state()[1], **self.layout.tensors()}

    def closed_form_bytes(self) -> int:
        lanes, slots, size = self.keys.shape
        states = lanes * slots * (size + self.values.shape[-1])
        bounds = 2 * lanes * -(-slots // self.page) * size
        return (states + bounds) * self.keys.element_size() + self.layout.closed_form_bytes()

    def state(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        return {"page": self.page}, {name: getattr(self, name) for name in ("keys", "values", "low", "high")}

    @classmethod
    def from_state(cls, layout: Layout, fields: Mapping[str, object], tensors: Mapping[str, Tensor]) -> IndexedSegment:
        states = {name: tensors[name] for name in ("keys", "values", "low", "high")}
        return cls(layout=layout, page=int(str(fields["page"])), **states)


@dataclass(frozen=True, kw_only=True)
class Indexed(Codec):
    """Exact states with page bounds.

    Attributes:
        page: tokens of a page.
        block_size: tokens that are given bounds at once; a multiple of `page`.
    """

    exact: ClassVar[bool] = True
    page: int = 16
    block_size: int = 128
    serves: ClassVar[Serves] = Serves(
        latents="its ranges are of whole keys, and of a latent layer's keys it is given one part"
    )

    def __post_init__(self) -> None:
        if self.page < 1:
            raise ValueError(f"a page has at least 1 token, not {self.page}; the paper's is page=16")
        if self.block_size < self.page or self.block_size % self.page:
            raise ValueError(
                f"indexed stores whole pages, and block_size={self.block_size} is no multiple of page={self.page}; "
                f"write block_size={max(1, round(self.block_size / self.page)) * self.page}"
            )

    @property
    def block(self) -> int:
        """Tokens whose bounds are made at once."""
        return self.block_size

    @property
    def lane_multiple(self) -> int:
        """Pages run along time."""
        return self.page

    def segment_type(self) -> type[IndexedSegment]:
        return IndexedSegment

    def encode(self, layout: Layout, keys: Tensor, values: Tensor, first: Tensor | None = None) -> IndexedSegment:
        """Keys (m, s, d) and values (m, s, dv) as they are, with the bounds of the keys.

        Raises:
            CacheMisuse: NaN or infinity, from which no bounds can be made.
        """
        refuse_non_finite("indexed", keys, values, "over which no page has bounds")
        return IndexedSegment.of(layout, self.page, alone(keys), alone(values))

    def restore(self, layout: Layout, fields: Mapping[str, object], tensors: Mapping[str, Tensor]) -> IndexedSegment:
        return IndexedSegment.from_state(layout, fields, tensors)

    def bytes_per_token(self, key_size: int, value_size: int, element_size: int) -> float:
        """Keys, values, and two bounds of each key channel shared by a page."""
        return element_size * (key_size + value_size + 2 * key_size / self.page)

    def encode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int:
        """0: bounds are comparisons."""
        return 0

    def decode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int:
        """0: tokens lie as they are."""
        return 0
