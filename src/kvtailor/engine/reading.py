"""Two special ways of reading a layer: layers of latents, and contexts that are read again.

A layer of latents is read as one kv head of latents, or as the heads that they expand to (`read_latents`). Both give
the same attention (`types.latent_attention`). A decoded token reads latents, r + e numbers of each held token. For the
many queries of a long prompt, expanding is cheaper: d + dv products for each pair of a query and a token instead of
2 r + e. Expanded states exist only during the call.

In a `ReconstructionPass` the model repeats a piece of its context, to see what the repetition attends to. The pass is a
forward over the whole cache whose new tokens are not kept. For each of the piece's tokens the layer remembers the
highest attention probability that any new token gives it, in any query head of the group. That probability is a softmax
over the row's sinks, the piece and the new tokens alone, so that its cost does not grow with the context. If the pass
has weights, a probability is multiplied by the length of the token's value after the layer's output projection for that
query head, and by the weight of the new token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvtailor.attend.contract import Attended, Attention, AttentionRequest
from kvtailor.engine.state import LayerState
from kvtailor.ops.segments.around import log_weight_of
from kvtailor.ops.segments.latent_keys import as_one_head, joined
from kvtailor.plan import registry
from kvtailor.types import PlainSegment, Segment, Softmax, Visibility
from kvtailor.types.checked_returns import check_attended
from kvtailor.types.late_checks import send
from kvtailor.types.latent_attention import LatentAttention

__all__ = ["ReconstructionPass", "read_latents"]


def read_latents(method: Attention, request: AttentionRequest, latents: LatentAttention) -> Attended:
    """Return the attention of the new tokens over latents, with the output (b, H, t, dv) of the model's own heads.

    Args:
        method: the plan's attention, which gets one form or the other.
        request: with the model's own query (b, H, t, d), and parts as they are stored.
        latents: of the layer.

    Raises:
        MethodError: the method breaks its contract.
    """
    query, parts = request.query, request.parts
    held = sum(part.layout.size for part in parts)
    if all(map(_is_even, parts)) and latents.expands_cheaply(query.shape[2], held):
        asked = replace(request, parts=[_expanded(part, latents, query) for part in parts])
        attended = _checked(method, asked)
        if attended.mass is None:
            return attended
        # (b * H, s) for each head of the model becomes (b, s) for the one kv head: the sum over its query heads.
        summed = [each.unflatten(0, (query.shape[0], -1)).sum(1) for each in attended.mass]
        return replace(attended, mass=summed)
    asked = replace(request, query=latents.absorbed(query), parts=[as_one_head(part) for part in parts])
    attended = _checked(method, asked)
    return replace(attended, output=latents.lifted(attended.output))


def _checked(method: Attention, request: AttentionRequest) -> Attended:
    attended = method.attend(request)
    check_attended(method, attended, request.query, request.parts, want_mass=request.want_mass)
    return attended


def _is_even(part: Segment) -> bool:
    """Whether each row is one full lane, so that its heads can lie side by side."""
    return part.layout.owner is None and part.layout.lengths is None and log_weight_of(part) is None


def _expanded(part: Segment, latents: LatentAttention, query: Tensor) -> PlainSegment:
    """Expand a part (b lanes of one kv head) to b * H lanes, one for each head of the model, in the queries' dtype."""
    keys, values = latents.expanded(*(states.to(query.dtype) for states in part.decode()))
    layout, heads = part.layout, keys.shape[1]
    positions = None if layout.positions is None else layout.positions.repeat_interleave(heads, 0)
    wide = replace(layout, heads=heads, positions=positions)
    return PlainSegment(layout=wide, keys=keys.flatten(0, 1), values=values.flatten(0, 1))


# Elements of the float32 logits at a time: 16 MiB.
_SCRATCH = 1 << 22


@dataclass(frozen=True, kw_only=True)
class ReconstructionPass:
    """The piece of each row that one pass repeats.

    Attributes:
        columns: for each row (k,) int64 on the CPU: columns of the piece, ascending; empty if the row has none.
        sinks: for each row (s,) int64 on the CPU: columns of its first tokens.
        real: (b, t) bool: False for new tokens that are padding.
        queries: see `Repetition.queries`.
        mean_group: see `Repetition.mean_group`.
        log_weights: maps a compressed layer to (b, t) float32 logarithms of the weights of its new queries; None: there
            are no weights.
    """

    columns: Sequence[Tensor]
    sinks: Sequence[Tensor]
    real: Tensor
    queries: int = 0
    mean_group: bool = False
    log_weights: Callable[[int], Tensor] | None = None

    def attend(
        self, state: LayerState, passing: PlainSegment, query: Tensor, visible: Visibility, scaling: float
    ) -> Tensor:
        """Return the exact attention (b, q, t, dv) of new tokens over all that a layer holds, all of it in its tail.

        `state.observed.reconstruction` records what they attend to, `state.observed.repeated` samples of their queries;
        nothing else changes.

        Args:
            state: of the layer.
            passing: keys and values of the new tokens.
            query: (b, q, t, d) post-RoPE.
            visible: what each of them may see.
            scaling: the model's own factor before the softmax.
        """
        assert state.stored.tail is not None and not state.stored.segments, (
            "a context is repeated before anything is dropped"
        )
        held, latents = state.stored.tail.as_segment(), state.model.latents
        # One part, although it takes a copy of the layer for a moment: torch's own kernel reads no two.
        layout = replace(held.layout, size=state.stored.seen + passing.layout.size)
        keys, values = torch.cat([held.keys, passing.keys], 1), torch.cat([held.values, passing.values], 1)
        whole = PlainSegment(layout=layout, keys=keys, values=values)
        if self.queries:
            # In the dtype of what is held, as all evidence.
            state.observed.repeat(query.to(keys.dtype), self.real.to(query.device), self.queries)
        if state.observed.reconstruction is None:
            state.observed.reconstruction = torch.zeros(
                (state.rows, state.heads, state.stored.seen),
                device=query.device,
                dtype=torch.float32,
            )
        seen, asked = (keys, query) if latents is None else (joined(keys, values)[0], latents.absorbed(query))
        for row, columns in enumerate(self.columns):
            if columns.numel():
                mine = seen.unflatten(0, (state.rows, state.heads))[row]
                place = send(columns, query.device)
                weights = self._weights(row, state, values.unflatten(0, (state.rows, state.heads))[row, :, place])
                best = self._looked_at(row, mine, asked[row], visible, scaling, state.model.softmax, weights)
                # Several modules may read one layer, each with queries of its own.
                known = state.observed.reconstruction[row, :, place]
                state.observed.reconstruction[row, :, place] = torch.maximum(known, best)
        exact = registry.method_of("attend", registry.null("attend"))
        assert isinstance(exact, Attention)
        request = AttentionRequest(
            query=query, parts=[whole], visible=visible, scaling=scaling, softmax=state.model.softmax
        )
        return (exact.attend(request) if latents is None else read_latents(exact, request, latents)).output

    def _weights(self, row: int, state: LayerState, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """Logarithms of the lengths of what a piece's values (h, k, dv) become, (h, g, k), and of the new tokens'
        weights, (t,); None without weights.
        """
        if self.log_weights is None:
            return None
        assert state.model.output is not None
        projections = state.model.output().float().unflatten(0, (state.heads, -1))
        found = values.new_empty((*projections.shape[:2], values.shape[1]), dtype=torch.float32)
        step = max(1, _SCRATCH // projections.shape[-1])
        for head, group in enumerate(projections):
            for first in range(0, values.shape[1], step):
                some = values[head, first : first + step].float()
                for number, projection in enumerate(group):
                    found[head, number, first : first + step] = (some @ projection).norm(dim=-1)
        return found.log(), self.log_weights(state.index)[row].to(found.device)

    def _looked_at(
        self,
        row: int,
        keys: Tensor,
        query: Tensor,
        visible: Visibility,
        scaling: float,
        softmax: Softmax,
        weights: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """(h, k) float32: the most that a new token of this row gives to each of its piece.

        Args:
            row: which.
            keys: (h, n + t, d) by column, those of the new tokens last.
            query: (q, t, d).
            weights: see `_weights`.
        """
        heads, new, device = keys.shape[0], query.shape[1], keys.device
        piece, sinks = self.columns[row], self.sinks[row]
        before = send(torch.cat([sinks[sinks < piece[0]], piece]), device)
        own = torch.arange(keys.shape[1] - new, keys.shape[1], device=device)
        shared = keys[:, torch.cat([before, own])].float().transpose(1, 2)
        grouped, real = query.unflatten(0, (heads, -1)), self.real[row].to(device)
        best = torch.full((heads, grouped.shape[1], piece.numel()), -torch.inf, device=device, dtype=torch.float32)
        step = max(1, _SCRATCH // (query.shape[0] * shared.shape[-1]))
        for first in range(0, new, step):
            some = grouped[:, :, first : first + step].float() * scaling
            logits = softmax.cap_((some.flatten(1, 2) @ shared).unflatten(1, some.shape[1:3]))
            # What stands before the new tokens is real and earlier, so each of them sees it.
            sees = visible.at(torch.full((1,), row, device=device), own[None], first, first + step)[0]
            logits[..., before.numel() :].masked_fill_(~sees, -torch.inf)
            total = logits.logsumexp(-1, keepdim=True)
            if softmax.sinks is not None:
                # (h, g, t', 1): a sink is one more logit of each query head.
                total = torch.logaddexp(total, softmax.sinks.view(heads, -1, 1, 1).expand_as(total))
            given = logits[..., before.numel() - piece.numel() : before.numel()] - total
            if weights is not None:
                given = given + weights[0][:, :, None] + weights[1][first : first + step, None]
            given = given.masked_fill_(~real[first : first + step, None], -torch.inf)
            best = torch.maximum(best, given.amax(2))
        return best.exp().mean(1) if self.mean_group else best.amax(1).exp()
