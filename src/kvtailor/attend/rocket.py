"""Rocket: one new token reads only the tokens that a cheap guess of its logits puts first.

*Idea*: two savings multiply. What an answer will hardly look at is evicted when the prompt is done, coarsely; of what
is left each new token reads a few tokens, chosen finely. The choice is cheap because it looks at chunks of adjacent
tokens instead of tokens, and only at the channels in which the query is large. One budget is split between the two.

*Paper*: RocketKV, "RocketKV: Accelerating Long-Context LLM Inference via Two-Stage KV Cache Compression", arXiv
2502.14051: its second stage, and its split of the budget. `tokens` = its token budget, `turns` = its multi-turn
variant.

*Source*: the paper and a description of it. The paper's code is under a licence of its own and was not read.

*Departs*: the split does not know the longest text that the model takes. Where the plan has a budget of its own, that
is what the first stage keeps, and the second is sized by what is held. The model's own factor stands for 1 / sqrt(d).
The newest tokens, up to 128, are in no chunk yet: each stands for itself, and competes for the budget like the others.
Chunks of one token have no bounds: their keys are looked at. With `turns` the chunks run over the chosen tokens, and
where tokens are taken back outside of a recorded forward, all held ones compete until the next turn. More than one new
token at a time reads everything.

*Cost*: reads the kept channels of the chunks' bounds, and tokens // 2 tokens, which it copies where no C++ kernel reads
them as they lie (of codes, with padding, ragged heads, on another device). Codes are copied as codes on the CPU; on
another device, where heads share what is stored, and without bounds, all that is held is decoded. Holds 2 / chunk of
the keys as bounds, and 4 bytes for each token. `turns` saves no memory; during a prompt it holds `window` queries more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvtailor.attend.contract import (
    READS_ALL,
    Attended,
    Attention,
    AttentionRequest,
    CarryRequest,
    FastPathReading,
    FlopsRequest,
    IndexRequest,
)
from kvtailor.errors import CacheMisuse
from kvtailor.method import Serves
from kvtailor.ops.attention.chosen import read_chosen
from kvtailor.ops.attention.lanes import Lanes
from kvtailor.ops.attention.parts import read_all, read_lanes
from kvtailor.ops.attention.votes import window_votes
from kvtailor.ops.lanes.chunks import chunk_bounds, indexed_on_host, note_index, promised
from kvtailor.ops.lanes.pool import pool_members
from kvtailor.ops.lanes.rows import Rows, chosen_places, gather, moved, rows_of
from kvtailor.ops.lanes.topk import keep_top
from kvtailor.types import HeadShare, Segment
from kvtailor.types.late_checks import send

__all__ = ["Rocket"]

# Newest tokens that wait for chunks of their own: making them reads the keys once, a hundredth of a token's reading.
_LOOSE = 128


@dataclass(frozen=True, kw_only=True)
class Rocket(Attention):
    """Hybrid sparse attention, and the budget of the stage before it.

    Attributes:
        tokens: the budget that one new token may cost: half of it is read, the other half pays for the choice.
        expect: tokens that a prompt's answer is expected to have.
        turns: nothing needs to be evicted: after each forward of several tokens those that SnapKV would keep are
            chosen, and the tokens that follow one by one choose among them and what is newer.
        window, kernel: of that choice; see `snapkv`.
    """

    has_token_budget: ClassVar[bool] = True
    carry_of: ClassVar[Mapping[str, Literal["row", "head", "queries"]]] = {
        "capacity": "row",
        "columns": "head",
        "bounds": "head",
        "chosen": "head",
        "queries": "queries",
    }
    reads_alike: ClassVar[bool] = False
    tokens: int = 1024
    expect: int = 256
    turns: bool = False
    window: int = 32
    kernel: int = 63
    serves: ClassVar[Serves] = Serves(
        latents="it looks at chosen channels of whole keys, and a latent layer's keys lie in two parts"
    )

    def __post_init__(self) -> None:
        if self.tokens < 2:
            raise ValueError(f"rocket: tokens must be 2 or more, since half of it is read, found {self.tokens}")
        if self.expect < 1:
            raise ValueError(f"rocket: expect must be at least 1 token, found {self.expect}; 256 is a usual answer")
        if self.window < 1:
            raise ValueError(f"rocket: window must be at least 1 query, found {self.window}; the paper uses 32")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"rocket: kernel must be odd and at least 1, found {self.kernel}; the paper uses 63")

    def held_tokens(self, tokens: Tensor) -> Tensor | None:
        """The paper's split: what the first stage keeps of a prompt; None with `turns`, which keeps everything."""
        return None if self.turns else self._first_stage(tokens)

    def read_on_fast_path(self, layer: int, parts: Sequence[Segment]) -> FastPathReading:
        """As many as one new token may read."""
        return FastPathReading(up_to=self.tokens // 2)

    def prompt_pass(self) -> str | None:
        """See `Attention.prompt_pass`; with `turns` a prompt leaves what its queries have chosen."""
        return None if self.turns else READS_ALL

    def attend(self, request: AttentionRequest) -> Attended:
        """See `Attention.attend`. `want_mass` is refused: what is not read receives no mass.

        Raises:
            CacheMisuse: mass was asked for.
        """
        query, parts, visible, scaling = request.query, request.parts, request.visible, request.scaling
        if request.want_mass:
            raise CacheMisuse("rocket reads a part of the cache and knows no attention mass; use attend=segments")
        if query.shape[2] > 1 or request.context.deferred:
            read = read_all(query, parts, visible, scaling, softmax=request.softmax)
            carry = self._choose(request) if self.turns else {}
            return Attended(output=read.output, lse=read.lse, carry=carry)
        carry = {name: tensor for name, tensor in request.context.carry.items() if name != "queries"}
        if request.visible.causal_only and not _moves_codes(query, parts, carry):
            sizes = partial(_sizes_of_row, self, query.shape[-1])
            found = read_chosen(
                query, parts, carry, sizes, scaling, request.softmax, most=self.tokens // 2, waiting=_LOOSE
            )
            if found is not None:
                read, count = found
                each = torch.full((query.shape[0], parts[0].layout.heads), count)
                return Attended(output=read.output, lse=read.lse, tokens_read=each, carry=carry)
        few = int(torch.stack([part.layout.counts() for part in parts]).sum(0).max()) <= self.tokens // 2
        if "capacity" not in carry:
            # It is found from the heads of all processes, so all of them go on to find it, or none does.
            few = request.context.share.all(few)
        if few:
            read = read_all(query, parts, visible, scaling, softmax=request.softmax)
            return Attended(output=read.output, lse=read.lse, carry=carry)
        return self._attend_some(request, carry)

    def index(self, request: IndexRequest) -> Mapping[str, Tensor]:
        """Bounds of the chunks of what is held, or of what the turn chose of it."""
        parts, carry = request.parts, request.context.carry
        keys = [part.decode()[0] for part in parts]
        rows = _candidates(rows_of(parts, request.visible.real, keys[0].device), carry)
        return self._indexed(rows, lambda: keys, keys[0].shape[-1], parts[0].layout.rows, carry, request.context.share)

    def flops(self, request: FlopsRequest) -> int | None:
        """(2 r + 5) g for each chunk, and each token that stands for itself: logits in r channels, softmax, mean.

        The sums of the queries' absolute values and the choice itself are left out.
        """
        held, carry, group = request.held, request.context.carry, request.group
        if held is None or "capacity" not in carry:
            return None
        if int(held.max()) <= self.tokens // 2:
            return 0
        _, kept = self._sizes(carry["capacity"], request.size)
        heads = held.shape[1]
        chunks = _covered(carry).cpu().view(-1, heads) if "columns" in carry else 0
        loose = (held.cpu() - chunks).clamp(min=0).sum(1)
        number = loose + (carry["bounds"].shape[-1] * heads if "bounds" in carry else 0)
        return int((number * (2 * group * kept.cpu() + 5 * group)).sum())

    def carried_bytes(self, request: CarryRequest) -> tuple[int, int]:
        """See `Attention.carried_bytes`. What is indexed lies between what was held after the prompt and what is now.

        8 bytes of capacity for each row. For each slot of padded rows a column, 4 bytes, and for each chunk of them two
        keys. With `turns` 4 bytes for each chosen token, and the newest queries until a token is decoded.
        """
        rows, size, context, new_tokens = request.rows, request.size, request.context, request.new_tokens
        owners, beside, key_bytes = rows * request.heads, 0, size * request.element_size
        least, most = max(0, request.held[0] - new_tokens * owners) // owners, request.longest
        if self.turns:
            chosen = min(int(self._first_stage(torch.tensor([context]))), context)
            least, most = chosen, chosen + new_tokens
            if context > 1:
                beside = 4 * owners * chosen
                beside += 0 if new_tokens else rows * request.q_heads * min(self.window, context) * key_bytes
        mean = least if self.turns else -(-request.held[1] // owners)
        sizes = [int(self._sizes(torch.tensor([count + self.expect]), size)[0]) for count in (least, mean)]
        indexed = beside + 8 * rows
        # A prompt of a single token is read as a decoded one, and nothing is indexed before one that is.
        low = high = indexed if context > 1 else 0
        if most <= self.tokens // 2 or max(sizes) == 1:
            return low, max(high, 0 if context > 1 else 8 * rows)

        def index(slots: int, chunk: int) -> int:
            return owners * (4 * slots + 2 * key_bytes * -(-slots // chunk))

        if context > 1 and least > self.tokens // 2 and min(sizes) > 1:
            low = indexed + index(least, max(sizes))
        return low, indexed + index(most, max(2, min(sizes)))

    def _first_stage(self, tokens: Tensor) -> Tensor:
        whole = (tokens + self.expect).double()
        ratio = (whole / self.tokens).clamp(min=1.0)
        capacity = (whole / ratio ** (0.2 + 0.06 * ratio.log2()).clamp(max=0.8)).floor()
        return torch.maximum(capacity, whole.clamp(max=2.0 * self.expect)).to(torch.int64) - self.expect

    def _sizes(self, capacity: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Tokens of a chunk, and channels that are looked at, for capacities (b,); both (b,) int64."""
        ratio = (capacity.double() / self.tokens).clamp(min=1.0)
        chunk = ratio.sqrt().ceil()
        chunk = torch.where(chunk > ratio, 1.0, chunk)
        return chunk.to(torch.int64), (size * chunk / ratio).floor().clamp(1, size).to(torch.int64)

    def _indexed(
        self,
        rows: Rows,
        keys: Callable[[], Sequence[Tensor]],
        size: int,
        batch: int,
        carry: Mapping[str, Tensor],
        share: HeadShare,
        known: Tensor | None = None,
    ) -> Mapping[str, Tensor]:
        """The carry with bounds over all of these rows; none where no chunk has several tokens, or all will be read.

        `known` is the carry's capacity on the CPU, where it was read before.
        """
        kept = {name: tensor for name, tensor in carry.items() if name not in ("columns", "bounds")}
        heads = rows.counts.shape[0] // batch
        if "capacity" not in kept:
            here = rows.counts if rows.on_host is None or share.ranks > 1 else rows.on_host
            held = share.sum(here.view(batch, heads).sum(1))
            capacity = torch.div(held, share.total(heads), rounding_mode="floor") + self.expect
            kept["capacity"] = send(capacity, rows.counts.device)
        elif known is not None:
            capacity = known
        else:
            capacity = kept["capacity"]
        # As the sizes of what follows are.
        capacity = capacity.cpu()
        chunk = self._sizes(capacity, size)[0]
        chunk = torch.where(chunk > 1, chunk, 0).repeat_interleave(heads)
        if bool((chunk > 0).any()) and rows.columns.shape[1] > self.tokens // 2:
            without = send(chunk == 0, rows.columns.device)[:, None]
            columns = rows.columns.masked_fill(~rows.valid() | without, -1).to(torch.int32)
            kept["columns"] = columns.unflatten(0, (batch, heads))
            kept["bounds"] = chunk_bounds(keys(), rows, chunk).unflatten(0, (batch, heads))
        note_index(kept, rows.on_host, capacity, chunk)
        return kept

    def _attend_some(self, request: AttentionRequest, carry: Mapping[str, Tensor]) -> Attended:
        query, parts, visible, scaling = request.query, request.parts, request.visible, request.scaling
        b, heads, device = query.shape[0], parts[0].layout.heads, query.device
        stored = _Stored(parts, query, _moves_codes(query, parts, carry))
        rows = _candidates(rows_of(parts, visible.real, device), carry)
        if not rows.columns.shape[1]:
            read = read_all(query, parts, visible, scaling, softmax=request.softmax)
            return Attended(output=read.output, lse=read.lse, carry=carry)
        if "capacity" not in carry:
            carry = self._indexed(rows, stored.keys, query.shape[-1], b, carry, request.context.share)
        carry, capacity, loose = self._up_to_date(request, rows, stored.keys, carry)
        sizes = self._sizes(capacity, query.shape[-1])
        chunk, channels = send(sizes[0].repeat_interleave(heads), device), sizes[1].repeat_interleave(heads)
        covered = _covered(carry).to(device) if "bounds" in carry else torch.zeros_like(rows.counts)
        rows_of_query = query.reshape(b * heads, -1, query.shape[-1])
        bounds = carry["bounds"].flatten(0, 1) if "bounds" in carry else None
        scores = promised(
            rows_of_query,
            stored.keys_at,
            rows,
            scaling,
            bounds=bounds,
            size=chunk,
            covered=covered,
            channels=channels,
            softmax=request.softmax,
            sinks=request.softmax.sink_rows(b, heads),
            loose=loose,
        )
        seen = rows.valid()
        if not visible.causal_only:
            row = torch.arange(b, device=device).repeat_interleave(heads)
            seen &= visible.at(row, rows.columns.clamp(max=visible.first_column))[:, 0]
        scores = scores.masked_fill(~seen, -torch.inf).view(b, heads, -1)
        known = rows.on_host if visible.causal_only else None
        budget = (seen.sum(1) if known is None else known).clamp(max=self.tokens // 2)
        kept = keep_top(scores, budget.view(b, heads)).flatten(0, 1)
        place, chosen = chosen_places(kept, None if known is None else budget)
        address = rows.address.gather(1, place)
        if stored.moves and bool(chosen.any()):
            some = [part for part, _ in moved(parts, address, chosen)]
            read = read_all(query, some, visible, scaling, softmax=request.softmax)
        else:
            keys, values = (gather(side, address) for side in (stored.keys(), stored.values()))
            lanes = Lanes(keys=keys, values=values, visible=chosen[:, None])
            read = read_lanes(query, heads, [lanes], scaling, softmax=request.softmax)
        if device.type != "cpu":
            # What was chosen by scores that are NaN means nothing; the error for it comes when the next forward begins.
            broken = scores.isnan().any(-1).repeat_interleave(query.shape[1] // heads, 1, output_size=query.shape[1])
            read = replace(read, output=read.output.masked_fill(broken[..., None, None], torch.nan))
        return Attended(output=read.output, lse=read.lse, tokens_read=chosen.sum(1).view(b, heads), carry=carry)

    def _up_to_date(
        self,
        request: AttentionRequest,
        rows: Rows,
        keys: Callable[[], Sequence[Tensor]],
        carry: Mapping[str, Tensor],
    ) -> tuple[Mapping[str, Tensor], Tensor, int]:
        """Return the carry with bounds of what is held, its capacity on the CPU, and the most tokens without bounds.

        Where the host does not know all of it (rows with padding, a turn's choice, carries that were copied), what is
        asked of the device is read in one transfer, unless bounds have to be made anew.
        """
        b, heads, share = len(carry["capacity"]), request.parts[0].layout.heads, request.context.share
        size = request.query.shape[-1]

        def asked(carry: Mapping[str, Tensor]) -> tuple[Tensor, bool, Tensor]:
            known = indexed_on_host(carry)
            if known is not None and rows.on_host is not None:
                loose = rows.on_host - torch.tensor(known.covered)
                return torch.tensor(known.capacity), bool((loose >= 0).all()), loose
            loose = rows.counts - (_covered(carry).to(rows.counts.device) if "bounds" in carry else 0)
            numbers = torch.cat([carry["capacity"], _is_of(carry, rows).view(1), loose]).cpu()
            return numbers[:b], bool(numbers[b]), numbers[b + 1 :]

        capacity, fits, loose = asked(carry)
        if not fits:
            carry = self._indexed(rows, keys, size, b, carry, share, capacity)
            capacity, _, loose = asked(carry)
        chunk = self._sizes(capacity, size)[0].repeat_interleave(heads)
        if bool(((loose > _LOOSE) & (chunk > 1)).any()):
            carry = self._indexed(rows, keys, size, b, carry, share, capacity)
            loose = asked(carry)[2]
        return carry, capacity, int(loose.max())

    def _choose(self, request: AttentionRequest) -> Mapping[str, Tensor]:
        """What SnapKV would keep of what is held, by the newest queries of this turn, whatever its pieces were."""
        query, parts, visible, carry = request.query, request.parts, request.visible, request.context.carry
        b, q, _, size = query.shape
        heads, end = parts[0].layout.heads, visible.first_column + visible.new_tokens
        queries = torch.cat([carry["queries"], query], 2) if "queries" in carry else query
        queries = queries[:, :, -self.window :].clone()
        columns = torch.arange(end - queries.shape[2], end, device=query.device)
        real = torch.ones((b, end), dtype=torch.bool, device=query.device) if visible.real is None else visible.real
        rows = rows_of(parts, visible.real, query.device)
        valid = rows.valid().unflatten(0, (b, heads))
        positions = rows.columns.unflatten(0, (b, heads))
        keys = gather([part.decode()[0] for part in parts], rows.address).unflatten(0, (b, heads))
        votes = torch.stack(
            [
                window_votes(
                    queries.unflatten(1, (heads, -1))[:, head],
                    columns,
                    real.to(query.device)[:, columns],
                    keys[:, head],
                    positions[:, head],
                    valid[:, head],
                    request.scaling,
                    softmax=request.softmax.of_heads(head * q // heads, q // heads),
                ).sum(1)
                for head in range(heads)
            ],
            1,
        )
        scores = pool_members(votes, valid & (positions < columns[0]), self.kernel, "max")
        scores = scores.masked_fill(positions >= end - self.window, torch.inf).masked_fill(~valid, -torch.inf)
        seen = torch.full((b,), end) if visible.real is None else real[:, :end].sum(1).cpu()
        held = (rows.counts.cpu() if rows.on_host is None else rows.on_host).view(b, heads)
        budget = torch.minimum(self._first_stage(seen)[:, None].expand(b, heads), held)
        place, here = chosen_places(keep_top(scores, budget).flatten(0, 1), budget.flatten())
        chosen = rows.columns.gather(1, place).masked_fill(~here, -1).to(torch.int32)
        return {"queries": queries, "chosen": chosen.unflatten(0, (b, heads))}


class _Stored:
    """What is held, of which no more is decoded than is asked for, and nothing twice.

    Attributes:
        moves: tokens are taken out as they are stored; else all is decoded.
    """

    def __init__(self, parts: Sequence[Segment], query: Tensor, moves: bool):
        self.parts, self.query, self.moves = parts, query, moves
        self._states: list[tuple[Tensor, Tensor]] = []

    def keys(self) -> list[Tensor]:
        """Of each part, (m, s, d)."""
        return [keys for keys, _ in self._decoded()]

    def values(self) -> list[Tensor]:
        """Of each part, (m, s, dv)."""
        return [values for _, values in self._decoded()]

    def keys_at(self, address: Tensor) -> Tensor:
        """(b * h, k, d) keys at ascending addresses (b * h, k)."""
        if self._states or not self.moves or address.shape[1] > _LOOSE:
            return gather(self.keys(), address)
        found = self.query.new_empty((*address.shape, self.query.shape[-1]))
        for part, entry in moved(self.parts, address, torch.ones_like(address, dtype=torch.bool)):
            keys, filled = part.decode()[0].to(found.dtype), part.layout.filled(address.device)
            if filled is None:
                found.scatter_(1, entry[..., None].expand_as(keys), keys)
            else:
                owner, slot = filled.nonzero(as_tuple=True)
                found[owner, entry[owner, slot]] = keys[owner, slot]
        return found

    def _decoded(self) -> list[tuple[Tensor, Tensor]]:
        if not self._states:
            self._states = [part.decode() for part in self.parts]
        return self._states


def _moves_codes(query: Tensor, parts: Sequence[Segment], carry: Mapping[str, Tensor]) -> bool:
    """Whether some part would have to be decoded, and its tokens can be taken out as they are stored.

    Without bounds all keys are looked at, so all are decoded in any case.
    """
    coded = "bounds" in carry and any(not part.plain for part in parts)
    return coded and query.is_cpu and all(part.sharing == 1 for part in parts)


@lru_cache(maxsize=256)
def _sizes_of_row(rocket: Rocket, size: int, capacity: int) -> tuple[int, int]:
    """Tokens of a chunk, and channels that are looked at."""
    chunk, channels = rocket._sizes(torch.tensor([capacity]), size)
    return int(chunk), int(channels)


def _candidates(rows: Rows, carry: Mapping[str, Tensor]) -> Rows:
    """The tokens that may be read: those that the turn chose and all newer ones; without a choice all."""
    if "chosen" not in carry or not rows.columns.shape[1]:
        return rows
    chosen = carry["chosen"].flatten(0, 1).to(rows.columns)
    at = torch.searchsorted(rows.columns, chosen).clamp(max=rows.columns.shape[1] - 1)
    there = (rows.columns.gather(1, at) == chosen) & (chosen >= 0)
    since = torch.searchsorted(rows.columns, chosen.amax(1, keepdim=True) + 1)
    number = rows.counts - since[:, 0]
    # (2, b * h): the newer ones and all, in one transfer.
    told = torch.stack([number, number + there.sum(1)]).cpu()
    newer = since + torch.arange(int(told[0].max()), device=since.device)
    return rows.pick(torch.cat([at, newer], 1), torch.cat([there, newer < rows.counts[:, None]], 1), told[1])


def _covered(carry: Mapping[str, Tensor]) -> Tensor:
    """(b * h,) int64 tokens that have bounds."""
    return (carry["columns"] >= 0).sum(-1).flatten()


def _is_of(carry: Mapping[str, Tensor], rows: Rows) -> Tensor:
    """() bool: whether the bounds are of the oldest of these tokens, as they are after nothing but new tokens came."""
    always = torch.ones((), dtype=torch.bool, device=rows.columns.device)
    if "columns" not in carry:
        return always
    columns = carry["columns"].flatten(0, 1)
    if columns.shape[1] > rows.columns.shape[1]:
        return ~always
    return ((rows.columns[:, : columns.shape[1]] == columns) | (columns < 0)).all()
