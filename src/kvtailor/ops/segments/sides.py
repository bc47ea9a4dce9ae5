"""A segment as attention reads it where it lies: nothing is decoded but what a kernel decodes on its way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvtailor.ops.segments.around import AroundSegment, Weighted
from kvtailor.ops.segments.attention_inputs import Offsetting, Turned, Turning
from kvtailor.ops.segments.code_layout import CodeKind
from kvtailor.ops.segments.coded import Coded, PairSegment, Whole
from kvtailor.ops.segments.latents import LatentSegment
from kvtailor.ops.segments.pair_sides import HalfSegment
from kvtailor.types import Coordinates, Layout, PickedChannels, Segment

# Of coordinates and queries, or sums and their lse: see `Coordinates`.
Mapping = Callable[[Coordinates, Tensor], Tensor]
Summing = Callable[[Coordinates, Tensor, Tensor], Tensor]
__all__ = ["StoredSides", "stored_sides"]


class StoredSides(NamedTuple):
    """Keys and values as they are stored, and by which linear maps they become the model's.

    A map of the keys goes over to the query: q . (A k + a) is (A^T q) . k + q . a. A map of the values goes over to the
    sum of the weighted values. So both are applied once for each query, and not once for each token. Keys that are
    turned by their positions are mapped and turned one by one, as they are read.

    Attributes:
        layout: of the lanes that are stored.
        keys, values: their sides, (m, s, r) each.
        keys_in, values_in: the coordinates in which they are, the model's side first; none where they are the model's.
        joined: neighbouring kv heads of the model that share a lane. `layout` has so many times fewer heads.
        turning: the keys are turned by their positions once they are out of `keys_in`, so that the query stays as it
            is; None: they are not.
        offsetting: a constant that the model's keys have besides; the logits get the product of the query, as it is in
            the model's channels, with it. None: none.
        log_weight: (m, s) float32 added to the logits; None: nothing.
    """

    layout: Layout
    keys: Coded
    values: Coded
    keys_in: tuple[Coordinates, ...] = ()
    values_in: tuple[Coordinates, ...] = ()
    joined: int = 1
    turning: Turning | None = None
    offsetting: Offsetting | None = None
    log_weight: Tensor | None = None

    @property
    def turned(self) -> Turned | None:
        """What a kernel needs to turn the keys; None where they are not turned."""
        if self.turning is None:
            return None
        return Turned(*self.turning, layout=self.layout, keys_in=self.keys_in, joined=self.joined)

    @property
    def changing(self) -> dict[str, Any]:
        """What a kernel must know of keys that are changed by their positions, see `dispatch.coded_attention`."""
        return {"turned": self.turned, "offset": self.offsetting is not None}

    @property
    def as_they_are(self) -> bool:
        """Whether queries and sums stay as they are."""
        own = not self.keys_in and not self.values_in and self.joined == 1
        return own and self.turning is None and self.offsetting is None

    @property
    def shifts_logits(self) -> bool:
        """Whether something is added to all logits of a query, which no kernel does."""
        return any(each.mean is not None for each in self._of_queries)

    @property
    def _of_queries(self) -> tuple[Coordinates, ...]:
        """The maps that go over to the query."""
        return self.keys_in if self.turning is None else ()

    def channels(self) -> tuple[int | None, int | None]:
        """Channels of keys and of values in the model's coordinates; None where the side does not tell."""
        return _channels(self.keys, self.keys_in), _channels(self.values, self.values_in)

    def in_numbers(self) -> StoredSides:
        """The same with numbers in place of codes, in the coordinates in which these are."""
        return self._replace(keys=Whole(states=self.keys.stored()), values=Whole(states=self.values.stored()))

    def map_query(self, query: Tensor, of_queries: Mapping = Coordinates.of_queries) -> Tensor:
        """The queries (n, g, t, d) of the kv heads for the stored keys: (n / joined, joined * g, t, r)."""
        for each in self._of_queries:
            query = of_queries(each, query)
        return query if self.joined == 1 else query.reshape(-1, self.joined * query.shape[1], *query.shape[2:])

    def logit_shift(self, query: Tensor, scaling: float) -> Tensor | None:
        """Return what is added to all logits of the queries (n, g, t, d) of the kv heads, (n, g, t); None: nothing.

        Args:
            query: as it was before `map_query`.
            scaling: factor before the softmax.
        """
        if not self.shifts_logits:
            return None
        shift = query.new_zeros(query.shape[:3], dtype=torch.float32)
        for each in self._of_queries:
            if each.mean is not None:
                shift = shift + scaling * each.products_with_mean(query)
            query = each.of_queries(query)
        return shift

    def map_output(
        self, out: Tensor, lse: Tensor, query: Tensor, shift: Tensor | None, of_sums: Summing = Coordinates.of_sums
    ) -> tuple[Tensor, Tensor]:
        """Map what mapped queries found back to the queries (n, g, t, d) of the kv heads.

        Args:
            out: (n / joined, joined * g, t, r) float32 sums whose weights add up to 1, or to 0 where nothing is seen.
            lse: (n / joined, joined * g, t), -inf there.
            query: as it was before `map_query`.
            shift: what `logit_shift` gives.
            of_sums: what maps them.

        Returns:
            out (n, g, t, dv) and lse (n, g, t).
        """
        shape = query.shape[:3]
        out, lse = out.reshape(*shape, -1), lse.reshape(shape)
        for each in reversed(self.values_in):
            out = of_sums(each, out, lse)
        return out, lse if shift is None else lse + shift


def stored_sides(part: Segment) -> StoredSides | None:
    """Return keys and values of a part as they are stored, where they are all that attention needs; else None."""
    if part.plain:
        whole: Any = part
        return StoredSides(layout=part.layout, keys=Whole(states=whole.keys), values=Whole(states=whole.values))
    if isinstance(part, PairSegment):
        return _pair(part)
    if isinstance(part, Weighted):
        inner = stored_sides(part.inner)
        # Heads that share a lane have weights of their own.
        return None if inner is None or inner.joined > 1 else inner._replace(log_weight=part.log_weight)
    if isinstance(part, AroundSegment):
        return _around(part)
    if isinstance(part, LatentSegment):
        return _latents(part)
    if isinstance(part, HalfSegment):
        shared = stored_sides(part.shared)
        # What is whole is so in the model's coordinates, and the query is in those of the directions.
        if shared is None or not shared.as_they_are:
            return None
        return shared._replace(keys=part.keys.as_read(shared.keys), values=part.values.as_read(shared.values))
    return None


def _pair(part: PairSegment) -> StoredSides | None:
    # A codec with a view of its own gives attention other values than those it decodes.
    if type(part).view is not Segment.view:
        return None
    keys, values = part.keys, part.values
    own = keys.coordinates(), values.coordinates()
    found = StoredSides(
        layout=part.layout,
        keys=keys if own[0] is None else keys.as_read(),
        values=values if own[1] is None else values.as_read(),
    )
    if part.layout.owner is not None and any(each is not None and each.matrix.shape[0] > 1 for each in own):
        # A map of each lane maps the queries of no kv head where lanes are pages of heads.
        return None
    return _within(found, *own)


def _around(part: AroundSegment) -> StoredSides | None:
    turning = part.turning()
    if turning is not None:
        return _turned(part, turning)
    offsetting = part.offsetting()
    if offsetting is not None:
        inner = stored_sides(part.inner)
        # Both count positions, of what would be two kinds of keys.
        if inner is None or inner.joined > 1 or inner.turning is not None or inner.offsetting is not None:
            return None
        return inner._replace(offsetting=offsetting)
    inner = None if type(part).coordinates is AroundSegment.coordinates else stored_sides(part.inner)
    if inner is None or inner.joined != 1:
        return None
    key_size, value_size = inner.channels()
    maps = None if key_size is None or value_size is None else part.coordinates(key_size, value_size)
    moved = inner.turning is not None or inner.offsetting is not None
    if maps is None or (moved and maps[0] is not None):
        return None
    return _within(inner, *maps)


def _turned(part: AroundSegment, turning: Turning) -> StoredSides | None:
    inner = stored_sides(part.inner)
    if inner is None or inner.turning is not None or any(isinstance(m, PickedChannels) for m in inner.keys_in):
        # What turns keys multiplies them with matrices.
        return None
    if inner.offsetting is not None:
        return None
    first, layout = turning.first, inner.layout
    if first is not None and inner.joined > 1:
        # The lanes of a row have the same, and those that are stored are fewer.
        row, mine = (
            torch.div(each.owners(first.device), each.heads, rounding_mode="floor") for each in (part.layout, layout)
        )
        first = first.new_zeros((layout.rows, *first.shape[1:])).index_copy_(0, row, first)[mine]
    return inner._replace(turning=turning._replace(first=first))


def _latents(part: LatentSegment) -> StoredSides | None:
    inner = stored_sides(part.inner)
    if inner is None or inner.joined != 1 or (part.whole is not None and part.joined > 1):
        return None
    if inner.turning is not None or inner.offsetting is not None:
        return None
    keys, values = (None if each is None else each.coordinates() for each in (part.keys_basis, part.values_basis))
    # The side that is not projected has no channels among the latents.
    if keys is None:
        assert part.whole is not None
        inner = inner._replace(keys=Whole(states=part.whole), keys_in=())
    if values is None:
        assert part.whole is not None
        inner = inner._replace(values=Whole(states=part.whole), values_in=())
    return _within(inner, keys, values)._replace(joined=part.joined)


def _channels(side: Coded, maps: tuple[Coordinates, ...]) -> int | None:
    if maps:
        return maps[0].blocks * maps[0].matrix.shape[1]
    layout = side.code_layout
    # 8-bit floats, and what has magnitudes, are decoded into the model's coordinates.
    if layout is None or layout.kind is CodeKind.FLOATS or layout.magnitudes is not None:
        return None
    return layout.size


def _within(inner: StoredSides, keys: Coordinates | None, values: Coordinates | None) -> StoredSides:
    """The same, whose states are in further coordinates."""
    return inner._replace(
        keys_in=inner.keys_in if keys is None else (keys, *inner.keys_in),
        values_in=inner.values_in if values is None else (values, *inner.values_in),
    )
