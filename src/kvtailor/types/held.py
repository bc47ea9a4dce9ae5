"""What one layer's methods see of it when tokens are evicted: what it holds, and the evidence that they declared.

Shape letters are those of `types`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvtailor.types.evidence import Moments, Needs, Rotation, first_of_window, strided
from kvtailor.types.head_share import ALL_HEADS, HeadShare
from kvtailor.types.softmax import PLAIN_SOFTMAX, Softmax
from kvtailor.types.visibility import real_before

__all__ = ["Held"]


@dataclass(frozen=True, kw_only=True)
class Held:
    """What one layer holds at the moment of scoring, as padded rows: a view that lives no longer than the eviction.

    Attributes:
        keys: (b, h, n, d) post-RoPE keys. Slots with `valid` False hold finite filler.
        values: (b, h, n, dv).
        positions: (b, h, n) int64 columns, ascending among the valid slots of each row and head.
        valid: (b, h, n) bool. False for filler and for padding.
        first: (b,) int64 column of each row's first real token (its count of left padding).
        seen: tokens seen so far, padding included; the newest token's column is seen - 1.
        prompt: tokens of the first prompt, padding included: those that came before the first that was decoded;
            (b, 1, 1) int64 where rows differ.
        real: (b, seen) bool: columns that are no padding, by which `within` moves all padding to the left; None: there
            is none, or it was moved.
        holes: (b,) int64 columns of padding behind each row's first real token, before they were moved; None as `real`.
        layer: which of the plan's layers this is, 0-based among those that the plan compresses.
        layers: how many layers the plan compresses.
        scaling: the model's own factor before the softmax.
        budget: (b,) int64 on the CPU: tokens that each row may hold per kv head, on average over heads and layers; None
            where the caller gave none.
        queries: (b, q, w, d) the post-RoPE queries of the newest needs.window columns; None if not needed.
        query_columns: (w,) int64 their columns, ascending, several of one column where several layers of the model read
            this one; None with `queries`.
        query_span: see `Evidence.span`.
        mass: (b, h, n) float32, see `Needs.mass`; None if not needed.
        sampled: (b, q, m, d) post-RoPE queries spread over each row, in time order; None if not needed.
        sampled_columns: (b, m) int64 their columns, -1 where a row has fewer than m; None with `sampled`.
        moments: see `Needs.moments`; None if not needed.
        previous: (b, h, n) float32 scores, or (b, h, c, n) the c notes, NaN for tokens that were not there at the
            eviction before; None if not needed.
        noted: (b, h, c, n) float32 what `Scorer.note` has just made of this; None where it makes no notes.
        reconstruction: (b, h, n) float32, see `Needs.reconstruction`, -1 for what came after the context; None if not
            needed.
        repeated: (b, q, m, d) post-RoPE queries of a repetition of the context, which all come after what is held; None
            if not needed, and at later evictions.
        repeated_columns: (b, m) int64 their places in the repetition, -1 where a row has fewer; None with `repeated`.
        output: (q, dv, D) the part of the output projection that each query head's values go through; None if not
            needed.
        rotation: None if not needed.
        calibration: this layer's tensors of the file that the scorer was calibrated with; None where it has none.
        log_weight: (b, h, n) float32 logarithm of how many tokens each stands for in the softmax, from earlier merges;
            None where each stands for itself.
        window_held: (2, b, w) bool: each query's own token is held by the layer's first head, and by any head; None
            where all heads are here and no padding was moved, so that it is found from `positions`.
        softmax: what the model's softmax has besides `scaling`; its sinks are of these kv heads' query heads.
        front: (b, h) int64 on the CPU: the tokens of each row and head are its first so many slots, as the host knows
            without a look at the device; None where it does not, as with padding.
        newest: so many of the newest columns are held by every head of every row, as the host knows; there may be more.
        kept: (b, h) int64 on the CPU: at a merge, how many tokens each head keeps; else None.
        taking: (b, h) int64 on the CPU: at a merge, how many of these may take others in; None where the host does not
            know.
        decoding: the cache is cut while it decodes; False where what has come is a prompt, a turn or a part of one.
        share: which of the model's heads these are. A method whose result depends on other heads of the layer meets
            those of other processes through it.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    valid: Tensor
    first: Tensor
    seen: int
    layer: int
    layers: int
    scaling: float
    prompt: int | Tensor = 0
    real: Tensor | None = None
    holes: Tensor | None = None
    budget: Tensor | None = None
    queries: Tensor | None = None
    query_columns: Tensor | None = None
    query_span: range | None = None
    mass: Tensor | None = None
    sampled: Tensor | None = None
    sampled_columns: Tensor | None = None
    moments: Moments | None = None
    previous: Tensor | None = None
    noted: Tensor | None = None
    reconstruction: Tensor | None = None
    repeated: Tensor | None = None
    repeated_columns: Tensor | None = None
    output: Tensor | None = None
    rotation: Rotation | None = None
    calibration: Mapping[str, Tensor] | None = None
    log_weight: Tensor | None = None
    window_held: Tensor | None = None
    softmax: Softmax = PLAIN_SOFTMAX
    front: Tensor | None = None
    newest: int = 0
    kept: Tensor | None = None
    taking: Tensor | None = None
    decoding: bool = False
    share: HeadShare = ALL_HEADS

    def there(self, row: int, head: int) -> slice | Tensor:
        """Return an index along n of the tokens of a row and head, in time order: a slice, or (n,) bool.

        With a slice the host need not wait to learn how many there are.
        """
        return self.valid[row, head] if self.front is None else slice(0, int(self.front[row, head]))

    def merging(self, row: int, head: int, *, all_take: bool) -> tuple[int | None, int | None]:
        """Return how many kept tokens of a row and head may take others in, and how many are dropped, at a merge.

        None where the host does not know. `all_take`: all that are kept may.
        """
        if self.kept is None or self.front is None:
            return None, None
        kept = int(self.kept[row, head])
        some = None if self.taking is None else int(self.taking[row, head])
        return kept if all_take else some, int(self.front[row, head]) - kept

    @property
    def holds_window(self) -> bool:
        """Whether every head holds the own token of each query of the window, as far as the host knows."""
        span = self.query_span
        return span is not None and span.stop == self.seen and self.front is not None and len(span) <= self.newest

    def counts(self) -> Tensor:
        """(b, h) int64: valid tokens of each row and kv head."""
        return self.valid.sum(-1)

    def softmax_of(self, head: int) -> Softmax:
        """The softmax of one kv head's query heads; with any queries."""
        of = next(each for each in (self.queries, self.sampled, self.repeated) if each is not None)
        group = of.shape[1] // self.keys.shape[1]
        return self.softmax.of_heads(head * group, group)

    def within(self, needs: Needs) -> Held:
        """What one method is shown: no more queries than it declared, and rows as if all padding lay at their left."""
        held = self if self.real is None else self._padded_at_left(self.real)
        if held.queries is not None and held.query_columns is not None and held.query_columns.shape[0] > needs.window:
            first = first_of_window(held.query_columns, held.query_span, needs.window) if needs.window else 0
            queries, columns = held.queries[:, :, first:], held.query_columns[first:]
            held = replace(
                held,
                queries=queries if needs.window else None,
                query_columns=columns if needs.window else None,
                query_span=None if held.query_span is None or not needs.window else held.query_span[first:],
                window_held=None if held.window_held is None else held.window_held[..., first:],
            )
        if held.sampled is not None and held.sampled_columns is not None:
            fewer, theirs = strided(held.sampled, held.sampled_columns, needs.rows)
            held = replace(held, sampled=fewer, sampled_columns=theirs)
        if held.repeated is not None and held.repeated_columns is not None:
            most = needs.reconstruction.queries if needs.reconstruction else 0
            fewer, theirs = strided(held.repeated, held.repeated_columns, most)
            held = replace(held, repeated=fewer, repeated_columns=theirs)
        return held

    def to_come(self, count: int) -> Tensor:
        """(b, count) int64: positions of the next tokens as `Moments` count them."""
        ahead = torch.arange(self.seen, self.seen + count, device=self.first.device).expand(self.first.shape[0], -1)
        return ahead if self.holes is None else ahead - self.holes[:, None]

    def _padded_at_left(self, real: Tensor) -> Held:
        """The same with columns as if the padding of each row all lay at its left, so that it counts nowhere.

        A turn that is shorter than others in its batch, or a mask with holes, has padding in the midst of a row.
        """
        first, before = self.seen - real.sum(-1), real_before(real)
        # (b, seen): where the token of each column lies then. What is padding lies nowhere.
        moved = torch.where(before < 0, before, before + first[:, None])
        rows = torch.arange(real.shape[0], device=real.device)[:, None, None]
        held = replace(
            self,
            positions=torch.where(self.positions < 0, self.positions, moved[rows, self.positions.clamp(min=0)]),
            first=first,
            prompt=(first + real[:, : self.prompt].sum(-1))[:, None, None],
            real=None,
            holes=first - self.first,
        )
        if self.sampled_columns is not None:
            own = self.sampled_columns
            held = replace(held, sampled_columns=moved.gather(1, own.clamp(min=0)).masked_fill(own < 0, -1))
        if self.queries is None or self.query_columns is None:
            return held
        # (b, w): real queries go to the right, in order, as their columns do; those before them count for nothing.
        asks = real[:, self.query_columns]
        order = asks.to(torch.uint8).argsort(dim=-1, stable=True)
        any_here = torch.stack([self.held_by_any(row) for row in range(len(asks))])
        told = (torch.stack([self.held_by_first(), any_here]) & asks).gather(-1, order.expand(2, -1, -1))
        queries = self.queries.gather(2, order[:, None, :, None].expand_as(self.queries))
        return replace(held, queries=queries, window_held=told)

    def recent(self, count: int | Tensor) -> Tensor:
        """(b, h, n) bool: tokens among the newest `count` columns seen; (b, 1, 1) int64 where rows differ."""
        return self.valid & (self.positions >= self.seen - count)

    def held_by_first(self) -> Tensor:
        """(b, w) bool: the layer's first kv head holds the own token of each query of the window."""
        if self.window_held is not None:
            return self.window_held[0]
        assert self.query_columns is not None
        own = self.positions[:, 0, None] == self.query_columns[None, :, None]
        return (own & self.valid[:, 0, None]).any(-1)

    def held_by_any(self, row: int) -> Tensor:
        """(w,) bool: some kv head of the layer holds the own token of each query of a row's window."""
        if self.window_held is not None:
            return self.window_held[1, row]
        assert self.query_columns is not None
        if self.holds_window:
            return torch.ones_like(self.query_columns, dtype=torch.bool)
        # No query has the column -1.
        return torch.isin(self.query_columns, self.positions[row].masked_fill(~self.valid[row], -1))

    def meeting_others(self) -> Held:
        """Return the same with what it takes other processes' heads to know; collective where there are others."""
        if self.share.ranks == 1 or self.query_columns is None:
            return self
        any_here = torch.stack([self.held_by_any(row) for row in range(self.first.shape[0])])
        # (2, b, w): of the first process, and of all of them.
        told = torch.stack([self.held_by_first(), any_here]).to(torch.int64)
        return replace(self, window_held=torch.stack([self.share.of_first(told)[0], self.share.sum(told)[1]]) > 0)

    def looked_back(self, positions: Tensor, values: Tensor) -> Tensor:
        """(b, h, n) or (b, h, c, n) float32: of each held token the `values` at its column; NaN where there is none.

        Args:
            positions: (b, h, k) columns, ascending.
            values: (b, h, k) float32, or (b, h, c, k) several of each column.
        """
        wanted = self.positions.to(positions.dtype)
        at = torch.searchsorted(positions.contiguous(), wanted.contiguous()).clamp(max=max(positions.shape[-1] - 1, 0))
        shape = (*values.shape[:-1], wanted.shape[-1])
        if not positions.shape[-1]:
            return values.new_full(shape, float("nan"))
        lost = ~((positions.gather(-1, at) == wanted) & self.valid)
        if values.ndim == 4:
            at, lost = at[:, :, None].expand(shape), lost[:, :, None]
        return values.gather(-1, at).masked_fill(lost, float("nan"))
