"""Quest: one new token reads only the pages that could matter to it.

*Idea* A page's channel-wise least and greatest key bound from above every logit that the query can have in it. The
pages with the highest bounds are read, the rest is not; nothing is evicted, so another query may choose others.
*Paper* `quest` (arXiv 2406.10774), section 3.3; tokens = token budget; the page size is that of `indexed`.
*Source* The paper; kvtailor's own code.
*Departs* The paper has one kv head for each query head; here a group's heads read the same pages, ranked by the
greatest bound of any of them. The newest tokens, which have no bounds yet, are always read and do not count for the
budget (the paper counts the page of the newest). The first `dense_layers` of the layers that a plan compresses read
everything, as the paper's first 2 do; layers with the model's own window are not counted. Their bounds are held all the
same. A cap grows with the logit and sinks are the same for all pages, so pages stand in one order with and without
them. More than one new token at a time reads everything, as the paper's prompt does.
*Cost* Reads 2 / page of the keys for the bounds, and the chosen tokens, which it copies where no kernel reads pages in
place. Saves no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeGuard

import torch
from torch import Tensor

from kvtailor.attend.contract import READS_ALL, Attended, Attention, AttentionRequest, FastPathReading, FlopsRequest
from kvtailor.errors import CacheMisuse
from kvtailor.method import Serves
from kvtailor.ops import dispatch
from kvtailor.ops.attention.lanes import Lanes
from kvtailor.ops.attention.parts import lane_sees, lanes_of, read_all, read_lanes
from kvtailor.ops.segments.attention_inputs import AttentionInputs, BestPages
from kvtailor.ops.segments.coded import Whole
from kvtailor.types import Layout, Segment, Visibility

__all__ = ["Quest"]


class _Paged(Protocol):
    """What this method reads of the segments of its codec.

    Attributes:
        layout: m lanes of s slots.
        page: slots of a page; a lane has p = ceil(s / page) of them, and the last may have fewer slots.
        low, high: (m, p, d) least and greatest of each key channel over a page.
    """

    layout: Layout
    page: int
    low: Tensor
    high: Tensor

    def decode(self) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, kw_only=True)
class _Pages:
    """A part's pages by owner: where each starts, its bound (-inf: no page), the tokens seen in it, all (b * h, p).

    Attributes:
        seen: (m, s) bool; None where all slots are.
    """

    lane: Tensor
    first: Tensor
    bound: Tensor
    tokens: Tensor
    seen: Tensor | None


@dataclass(frozen=True, kw_only=True)
class _Chosen:
    """The pages that are read.

    Attributes:
        parts, pages: all that are paged, and their pages.
        here, places: for each part (b * h, k): this choice is one of its pages, and which.
        tokens: (b * h,) int64 tokens in the chosen pages.
    """

    parts: Sequence[_Paged]
    pages: Sequence[_Pages]
    here: Sequence[Tensor]
    places: Sequence[Tensor]
    tokens: Tensor


@dataclass(frozen=True, kw_only=True)
class Quest(Attention):
    """Reads the best pages.

    Attributes:
        tokens: budget of each row and kv head, in whole pages, at one new token.
        least: pages that are read however small the budget.
        dense_layers: first layers that read everything.
    """

    needs_codec: ClassVar[str | None] = "indexed"
    has_token_budget: ClassVar[bool] = True
    reads_alike: ClassVar[bool] = False
    tokens: int = 1024
    least: int = 3
    dense_layers: int = 2
    serves: ClassVar[Serves] = Serves(
        latents="it ranks pages by ranges of whole keys, and a latent layer's keys lie in two parts"
    )

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.least < 1:
            raise ValueError(
                f"quest reads at least one page of at least one token, and was given tokens={self.tokens}, "
                f"least={self.least}; the paper's are tokens=1024, least=3"
            )
        if self.dense_layers < 0:
            raise ValueError(f"quest: dense_layers must be 0 or more, found {self.dense_layers}; the paper's is 2")

    def read_on_fast_path(self, layer: int, parts: Sequence[Segment]) -> FastPathReading:
        """All in the first layers, and in others while there are no more pages than are read; else the best."""
        if self._reads_all(layer, parts):
            return FastPathReading()
        page = next(part.page for part in parts if _is_paged(part))
        return FastPathReading(pages=BestPages(page=page, most=self._most(page), bounds=_bounds_of(parts)))

    def prompt_pass(self) -> str:
        """See `Attention.prompt_pass`."""
        return READS_ALL

    def attend(self, request: AttentionRequest) -> Attended:
        """See `Attention.attend`. `want_mass` is refused: what is not read receives no mass.

        Raises:
            CacheMisuse: mass was asked for.
        """
        query, parts, visible, scaling = request.query, request.parts, request.visible, request.scaling
        softmax = request.softmax
        if request.want_mass:
            raise CacheMisuse("quest reads a part of the cache and knows no attention mass; use attend=segments")
        paged = [part for part in parts if _is_paged(part)]
        if query.shape[2] > 1 or request.context.deferred or self._reads_all(request.context.layer, parts):
            read = read_all(query, parts, visible, scaling, softmax=softmax)
            return Attended(output=read.output, lse=read.lse)
        b, heads, device = query.shape[0], parts[-1].layout.heads, query.device
        in_one = self._in_one(request, paged[0].page)
        if in_one is not None:
            return in_one
        chosen = self._choose(query, paged, visible, newest=_is_paged(parts[-1]))
        # A kernel reads chosen pages where they lie; else they are copied into lanes, and read with what has no pages.
        found = _in_place(query.reshape(b * heads, -1, 1, query.shape[-1]), chosen, scaling, softmax.softcap)
        lanes, count = [] if found else [_copied(chosen)], chosen.tokens
        for part in parts:
            if not _is_paged(part):
                seen = lane_sees(part.layout, visible, 0, 1, newest=part is parts[-1], device=device)
                lanes.append(lanes_of(part.layout, part.view(), seen))
                # What has no pages is read whole: an owner's tokens of it are the slots that its one query sees.
                shape = (part.layout.lanes, 1, part.layout.size)
                each = torch.ones(shape, device=device, dtype=torch.float32) if seen is None else seen.expand(shape)
                count = count.index_add(0, part.layout.owners(device), each.sum((1, 2)).to(torch.int64))
        read = read_lanes(query, heads, lanes, scaling, found=found, softmax=softmax)
        return Attended(output=read.output, lse=read.lse, tokens_read=count.view(b, heads))

    def _reads_all(self, layer: int, parts: Sequence[Segment]) -> bool:
        """Whether one new token reads all pages: in the first layers, and where nobody has more than are read."""
        paged = [part for part in parts if _is_paged(part)]
        if layer < self.dense_layers or not paged:
            return True
        # Of the row and kv head with the most lanes in each part.
        pages = sum(part.low.shape[1] * _most_lanes(part.layout) for part in paged)
        return pages <= self._most(paged[0].page)

    def _most(self, page: int) -> int:
        """Pages that are read."""
        return max(self.least, self.tokens // page)

    def _in_one(self, request: AttentionRequest, page: int) -> Attended | None:
        """All of it in one call; None where heads are ragged, padding is to be hidden, or no kernel can do it."""
        query, parts = request.query, request.parts
        uneven = any(part.layout.owner is not None or part.layout.lengths is not None for part in parts)
        if uneven or not query.is_cpu or not request.visible.causal_only:
            return None
        states = [part.decode() for part in parts]
        bounds = _bounds_of(parts)
        attend, (b, q), heads = dispatch.best_pages(query, states, bounds), query.shape[:2], parts[-1].layout.heads
        if attend is None:
            return None
        found = attend(
            query.reshape(b * heads, q // heads, 1, -1),
            states,
            bounds,
            page=page,
            most=self._most(page),
            scaling=request.scaling,
            softcap=request.softmax.softcap,
        )
        read = read_lanes(query, heads, [], request.scaling, found=[found[:2]], softmax=request.softmax)
        return Attended(output=read.output, lse=read.lse, tokens_read=found[2].to(torch.int64).view(b, heads))

    def flops(self, request: FlopsRequest) -> int:
        """4 g d for each page: the query times its least and its greatest keys; 0 where all is read."""
        if self._reads_all(request.context.layer, request.encoded):
            return 0
        pages = sum(part.low.shape[0] * part.low.shape[1] for part in request.encoded if _is_paged(part))
        return 4 * request.group * request.size * pages

    def _choose(self, query: Tensor, parts: Sequence[_Paged], visible: Visibility, *, newest: bool) -> _Chosen:
        """The best pages of each owner over all parts."""
        b, heads = query.shape[0], parts[0].layout.heads
        rows = query.reshape(b * heads, -1, query.shape[-1]).float()
        found = [
            _bounds(part, rows, lane_sees(part.layout, visible, 0, 1, newest=newest, device=query.device))
            for part in parts
        ]
        # The pages of all parts compete, side by side: (b * h, p_1 + p_2 + ...). `base` is where a part's begin.
        bound = torch.cat([pages.bound for pages in found], 1)
        best = bound.topk(min(bound.shape[1], self._most(parts[0].page)), sorted=False).indices
        here, places, base = [], [], 0
        # An owner with fewer pages than are chosen gets places that are no page, whose bound is -inf.
        there = bound.gather(1, best).isfinite()
        for pages in found:
            size = pages.bound.shape[1]
            # Of the k chosen places (b * h, k), those that are pages of this part, and which of its pages they are.
            here.append((best >= base) & (best < base + size) & there)
            places.append((best - base).clamp(0, size - 1))
            base += size
        tokens = torch.stack(
            [
                pages.tokens.gather(1, place).masked_fill(~mine, 0).sum(1)
                for pages, mine, place in zip(found, here, places, strict=True)
            ]
        ).sum(0)
        return _Chosen(parts=parts, pages=found, here=here, places=places, tokens=tokens)


def _copied(chosen: _Chosen) -> Lanes:
    """The chosen pages of each owner as one lane (b * h, pages * page, ...)."""
    page, device = chosen.parts[0].page, chosen.tokens.device
    states = [part.decode() for part in chosen.parts]
    # (b * h, k, page, d): each owner's k chosen pages, in the order of the choice, whatever part they are of.
    shape = (*chosen.here[0].shape, page)
    keys, values = (state.new_zeros((*shape, state.shape[-1])) for state in states[0])
    seen = torch.zeros(shape, dtype=torch.bool, device=device)
    for part, pages, here, place, (all_keys, all_values) in zip(
        chosen.parts, chosen.pages, chosen.here, chosen.places, states, strict=True
    ):
        if device.type != "cpu":
            # How many choices are pages of this part is known to the device alone: something is copied for all of them.
            lane, first = pages.lane.gather(1, place)[..., None], pages.first.gather(1, place)[..., None]
            slot = first + torch.arange(page, device=device)
            mine = here[..., None] & (slot < part.layout.size)
            slot = slot.clamp(max=part.layout.size - 1)
            for into, every in ((keys, all_keys), (values, all_values)):
                into.copy_(torch.where(here[..., None, None], every[lane, slot], into))
            seen |= mine if pages.seen is None else mine & pages.seen[lane, slot]
            continue
        # `here` picks r pairs (owner, choice) in row-major order: the owner of each, and the place of its page among
        # the owner's pages in this part. From those (r, 1) the page's lane, and (r, page) its slots.
        at = here.nonzero()[:, 0], place[here]
        lane, slot = pages.lane[at][:, None], pages.first[at][:, None] + torch.arange(page, device=device)
        inside = slot < part.layout.size
        # The last page of a lane may be cut short: its missing slots read the last one, and are not seen.
        slot = slot.clamp(max=part.layout.size - 1)
        keys[here], values[here] = all_keys[lane, slot], all_values[lane, slot]
        seen[here] = inside if pages.seen is None else inside & pages.seen[lane, slot]
    # (b * h, k * page, d), and what is seen with a query axis of one token.
    return Lanes(keys=keys.flatten(1, 2), values=values.flatten(1, 2), visible=seen.flatten(1)[:, None])


def _in_place(query: Tensor, chosen: _Chosen, scaling: float, softcap: float | None) -> list[tuple[Tensor, Tensor]]:
    """Out and log-sum-exp of a query (b * h, g, 1, d) over the chosen pages of each part; none where nothing can."""
    found = []
    for part, pages, here, place in zip(chosen.parts, chosen.pages, chosen.here, chosen.places, strict=True):
        keys, values = (Whole(states=states) for states in part.decode())
        attend = dispatch.page_attention(query, keys, values, part.page)
        if attend is None:
            return []
        lanes, count = part.layout.lanes, part.low.shape[1]
        # (b * h, k): the number of each chosen page within its lane.
        number = torch.div(pages.first.gather(1, place), part.page, rounding_mode="floor")
        if part.layout.owner is None:
            # An owner has one lane: (m, k).
            table = number.masked_fill(~here, -1)
        else:
            # What is not chosen goes to a place past the last; nothing here waits for the device.
            at = (pages.lane.gather(1, place) * count + number).masked_fill(~here, lanes * count)
            table = number.new_full((lanes * count + 1,), -1).scatter_(0, at.flatten(), number.flatten())
            # From owners to lanes (m, p): each lane's chosen pages first, -1 for none. A lane has at most k of them.
            table = table[:-1].view(lanes, count).sort(1, descending=True).values[:, : place.shape[1]]
        found.append(
            attend(
                AttentionInputs(
                    query,
                    keys,
                    values,
                    scaling=scaling,
                    softcap=softcap,
                    owner=None if part.layout.owner is None else part.layout.owner.to(query.device),
                    visible=None if pages.seen is None else pages.seen[:, None],
                ),
                table.to(torch.int32),
                part.page,
            )
        )
    return found


def _bounds_of(parts: Sequence[Segment]) -> list[tuple[Tensor, Tensor] | None]:
    return [(part.low, part.high) if _is_paged(part) else None for part in parts]


def _most_lanes(layout: Layout) -> int:
    """Of a row and kv head. Owners are on the CPU."""
    return 1 if layout.owner is None else int(torch.bincount(layout.owner.cpu()).max())


def _is_paged(part: Segment) -> TypeGuard[_Paged]:
    return part.codec == Quest.needs_codec


def _bounds(part: _Paged, rows: Tensor, seen: Tensor | None) -> _Pages:
    """The pages of a part, with the greatest bound of any of the group's queries rows (b * h, g, d), float32."""
    layout, device = part.layout, rows.device
    lanes, pages, _ = part.low.shape
    owner = layout.owners(device)
    # The greatest of query * key over a page is at most, channel by channel, query * high where the query is positive
    # and query * low where it is negative: (m, p, d) times (m, d, g), twice, and the greatest over the group's heads.
    find = dispatch.page_bounds(rows, part.low, part.high)
    if find is not None:
        bound = find(rows, part.low, part.high, layout.owner)
    else:
        mine = rows.index_select(0, owner)
        bound = torch.bmm(part.high.float(), mine.clamp(min=0).transpose(1, 2))
        bound = bound.baddbmm(part.low.float(), mine.clamp(max=0).transpose(1, 2)).amax(-1)
    lane = torch.arange(lanes, device=device)[:, None].expand(lanes, pages)
    first = (torch.arange(pages, device=device) * part.page).expand(lanes, pages)
    # (m, p): the last page of a lane may be cut short.
    tokens = (layout.size - first).clamp(max=part.page)
    if seen is not None:
        seen = seen.expand(lanes, 1, layout.size)[:, 0]
        # One query, so the axis of new tokens (m, 1, s) goes; up to whole pages, slots that are not there are not seen.
        padded = torch.nn.functional.pad(seen, (0, pages * part.page - layout.size))
        tokens = padded.view(lanes, pages, part.page).sum(-1)
        bound = bound.masked_fill(tokens == 0, -torch.inf)
    if layout.owner is None:
        return _Pages(lane=lane, first=first, bound=bound, tokens=tokens, seen=seen)
    # Ragged: the lanes of an owner follow each other, so a page's place among its owner's is known from counts.
    number = torch.bincount(owner, minlength=rows.shape[0])
    # (m,) the number of a lane among its owner's: its place among all lanes, less those of the owners before.
    place = torch.arange(lanes, device=device) - (number.cumsum(0) - number)[owner]
    # Lane `place` of an owner holds its pages place * p to place * p + p - 1.
    at = owner[:, None].expand(lanes, pages), place[:, None] * pages + torch.arange(pages, device=device)
    shape = (rows.shape[0], int(number.max()) * pages)
    table = _Pages(
        lane=lane.new_zeros(shape),
        first=first.new_zeros(shape),
        bound=bound.new_full(shape, -torch.inf),
        tokens=tokens.new_zeros(shape),
        seen=seen,
    )
    table.lane[at], table.first[at], table.bound[at], table.tokens[at] = lane, first, bound, tokens
    return table
