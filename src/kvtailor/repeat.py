"""One pass in which the model repeats a piece of its context: attention that leaves no trace, and what it looks at.

The pass is a forward over the whole cache, with new tokens that nobody keeps. Each of the piece's tokens is told the
highest attention probability that any of the new tokens, in any query head of the group, gives it. That probability is
a softmax over the row's sinks, the piece and the new tokens alone, so that its cost does not grow with the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtailor import find
from kvtailor.find import Attention, Placement
from kvtailor.layer import LayerState
from kvtailor.types import PlainSegment, Visibility

__all__ = ["Piece"]

# Elements of the float32 logits at a time: 16 MiB.
_SCRATCH = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one pass repeats of each row.

    Attributes:
        columns: for each row (k,) int64 columns of the piece, ascending; none where the row has no such piece.
        sinks: for each row (s,) int64 columns of its first tokens.
        real: (b, t) bool: this new token is one, and not padding.
    """

    columns: Sequence[Tensor]
    sinks: Sequence[Tensor]
    real: Tensor

    def attend(
        self,
        state: LayerState,
        placement: Placement,
        passing: PlainSegment,
        query: Tensor,
        visible: Visibility,
        scaling: float,
    ) -> Tensor:
        """Exact attention (b, q, t, dv) of the new tokens over all that a layer holds, all of it still in its tail.

        What they look at goes into `state.reconstruction`; nothing else changes.

        Args:
            state: of the layer.
            placement: where its segments are.
            passing: keys and values of the new tokens.
            query: (b, q, t, d) post-RoPE.
            visible: what each of them may see.
            scaling: the model's own factor before the softmax.
        """
        assert state.tail is not None and not state.segments, "a context is repeated before anything is encoded"
        if state.reconstruction is None:
            state.reconstruction = torch.zeros((state.rows, state.heads, state.seen), device=query.device)
        held = state.tail.as_segment().keys.unflatten(0, (state.rows, state.heads))
        new = passing.keys.unflatten(0, (state.rows, state.heads))
        for row, columns in enumerate(self.columns):
            if columns.numel():
                best = self._looked_at(row, held[row], new[row], query[row], visible, scaling)
                state.reconstruction[row, :, columns.to(best.device)] = best
        exact = find.method_of("attend", find.null("attend"))
        assert isinstance(exact, Attention)
        return exact.attend(query, [*state.parts(placement), passing], visible, scaling).output

    def _looked_at(
        self, row: int, held: Tensor, new: Tensor, query: Tensor, visible: Visibility, scaling: float
    ) -> Tensor:
        """(h, k) float32: the highest probability that a new token of this row gives to each of its piece.

        Args:
            row: which.
            held: (h, n, d) keys by column. new: (h, t, d) keys of the new tokens.
            query: (q, t, d).
        """
        heads, seen, _ = held.shape
        piece = self.columns[row].to(held.device)
        sinks = self.sinks[row].to(held.device)
        before = torch.cat([sinks[sinks < piece[0]], piece])
        keys = torch.cat([held[:, before], new], 1).float().transpose(1, 2)
        columns = torch.cat([before, torch.arange(seen, seen + new.shape[1], device=held.device)])
        mine = slice(before.numel() - piece.numel(), before.numel())
        grouped = query.unflatten(0, (heads, -1))
        best = torch.zeros((heads, piece.numel()), device=held.device)
        step = max(1, _SCRATCH // (query.shape[0] * columns.numel()))
        owner = torch.tensor([row], device=held.device)
        for first in range(0, new.shape[1], step):
            some = grouped[:, :, first : first + step].float() * scaling
            logits = some.flatten(1, 2) @ keys
            sees = visible.at(owner, columns[None], first, first + step)[0]
            # A finite fill: a padding token may see nothing, and must not turn into NaN before it is left out.
            logits = logits.unflatten(1, some.shape[1:3]).masked_fill_(~sees, torch.finfo(torch.float32).min)
            given = logits.softmax(-1)[..., mine] * self.real[row, first : first + step, None].to(logits)
            best = torch.maximum(best, given.amax((1, 2)))
        return best
