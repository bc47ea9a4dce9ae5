"""Analytic arithmetic: what a model and a method must compute, from shapes and from what a cache really held.

A multiply-add is two floating-point operations. With P the weights that one token multiplies (counted from the
model's own modules; embedding rows that are looked up are none), d the size of a head and q the query heads:

- a decoded token: 2 P + the sum over layers and kv heads of 4 d g * tokens read (g = q / kv heads);
- a prefill of n tokens: 2 n P, the output head once (logits of the last token only), + for each layer 2 q d n**2, the
  causal half of 4 q d n**2; on a layer with a window of w < n tokens 2 q d (n**2 - (n - w)**2).

Norms, activations, rotations and the model's own softmax are left out, as is usual: they are small, and no method
changes them. What a method adds is counted apart, by what its parts declare (`Scorer.flops` and its like), over the
tokens that a real cache held at each step. Where a part declares nothing, the sum is None.

What repeating a context costs, for plans that read it twice, is counted from shapes in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvtailor.attend.contract import AttentionContext, FlopsRequest
from kvtailor.bench.contestant import Contestant
from kvtailor.bench.subject import Subject
from kvtailor.engine.state import LayerState
from kvtailor.errors import UnsupportedModel
from kvtailor.hf.cache import KvCache
from kvtailor.hf.model.geometry import Geometry
from kvtailor.hf.run.prefill import instruction_of, repetitions
from kvtailor.ops.dispatch import MOST_QUERIES
from kvtailor.plan import Plan
from kvtailor.types import Needs, Segment

__all__ = ["Weights", "CountedFlops", "count", "prefill_flops", "repetition_flops", "token_flops", "twice_pairs"]

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk")


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Weights that one token multiplies.

    Attributes:
        body: of all layers; of experts, those that a token is sent to.
        head: of the output head.
    """

    body: int
    head: int

    @classmethod
    def of(cls, model: nn.Module) -> Weights | None:
        """Counted from the model's own modules; None where it has matrices whose use is not known.

        A linear layer counts by its sizes, so that packed (quantised) weights count as what they stand for. Of a
        mixture of experts counts the share of experts that a token is sent to, by its config.
        """
        head = getattr(model, "get_output_embeddings", lambda: None)()
        if head is None or _size_of(head) is None:
            return None
        experts, chosen = _first_of(model, _EXPERTS), _first_of(model, _CHOSEN)
        every = shared_out = 0
        for name, module in model.named_modules():
            if module is head or isinstance(module, nn.Embedding):
                continue
            size = _size_of(module)
            if size is not None:
                if experts and ".experts." in name:
                    shared_out += size
                else:
                    every += size
                continue
            for what, parameter in module.named_parameters(recurse=False):
                if parameter.ndim == 1 or what.endswith("bias"):
                    continue
                if parameter.shape[0] != experts or parameter.ndim > 3:
                    return None
                if parameter.ndim == 2:
                    every += parameter.numel()
                else:
                    shared_out += parameter.numel()
        if shared_out and not (experts and chosen):
            return None
        return cls(body=every + (shared_out // experts * chosen if experts and chosen else 0), head=_size_of(head) or 0)


def _first_of(model: Any, names: Sequence[str]) -> int | None:
    config = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if config is not None else None
    found = (getattr(text, name, None) for name in names)
    return next((int(value) for value in found if value), None)


def _size_of(module: Any) -> int | None:
    """Weights of a linear layer; None for any other module."""
    if isinstance(module, nn.Linear):
        return module.in_features * module.out_features
    # transformers' name for a linear layer that stores its matrix the other way round.
    return int(module.weight.numel()) if type(module).__name__ == "Conv1D" else None


@dataclass(frozen=True, kw_only=True)
class CountedFlops:
    """Floating-point operations of a prefill and of the tokens decoded after it.

    Attributes:
        prefill: of the model, for all rows.
        token: of the model, for one token of one row, mean over rows and decoded tokens.
        method_prefill, method_token: what the plan adds to them; None where a part of it declares nothing.
    """

    prefill: int
    token: float
    method_prefill: int | None
    method_token: float | None


def prefill_flops(weights: Weights, geometry: Geometry, *, rows: int, tokens: int) -> int:
    """Operations of one prefill of `rows` prompts of `tokens` tokens, logits of the last token only."""
    matrices = 2 * (weights.body * tokens + weights.head)
    attention = sum(
        s.q_heads * (s.key_size + s.value_size) * twice_pairs(tokens, s.window) for s in geometry.shapes if s.kv_heads
    )
    return rows * (matrices + attention)


def token_flops(weights: Weights, geometry: Geometry, *, rows: int, read: int) -> int:
    """Operations of one decoding step.

    Args:
        weights, geometry: of the model.
        rows: rows that get a token each.
        read: tokens that the step's queries read, summed over rows, layers and kv heads.
    """
    group = geometry.q_heads // geometry.kv_heads
    return 2 * rows * (weights.body + weights.head) + 4 * group * geometry.head_dim * read


@torch.inference_mode()
def count(subject: Subject, contestant: Contestant, prompt: Tensor, tokens: int) -> CountedFlops | None:
    """The work of a prefill and of the tokens decoded after it, from one pass that is not timed.

    Args:
        subject, contestant: what runs.
        prompt: (b, n) int64 ids without padding.
        tokens: tokens decoded, the first, which comes from the prefill, included; at least 2.

    Returns:
        None where the model is no transformers model, or not of a kind whose arithmetic is known.

    Raises:
        KvtailorError: what the plan itself raises.
    """
    if not isinstance(subject.model, nn.Module) or not hasattr(subject.model, "config"):
        return None
    try:
        geometry = Geometry.of(subject.model.config)
    except UnsupportedModel:
        return None
    if geometry.has_states or geometry.has_latents or geometry.readers or not geometry.alike:
        return None
    weights = Weights.of(subject.model)
    if weights is None:
        return None
    rows, n = prompt.shape
    cache = subject.new_cache(contestant)
    first = _Step(cache, geometry, rows, seen=0)
    logits, cache = subject.prefill(prompt, cache, last_only=True)
    own, extra = 0, []
    again = repetition_flops(weights, geometry, cache, subject.tokenizer, rows=rows, tokens=n)
    added = _sum([first.added(cache, new=n), again])
    for seen in range(n, n + tokens - 1):
        step = _Step(cache, geometry, rows, seen=seen)
        logits, cache = subject.forward(logits[:, -1:].argmax(-1), cache, last_only=True)
        own += token_flops(weights, geometry, rows=rows, read=step.read(cache))
        extra.append(step.added(cache, new=1))
    every = _sum(extra)
    steps = rows * (tokens - 1)
    return CountedFlops(
        prefill=prefill_flops(weights, geometry, rows=rows, tokens=n),
        token=own / steps,
        method_prefill=added,
        method_token=None if every is None else every / steps,
    )


@dataclass(frozen=True, kw_only=True)
class _Before:
    """A layer before a forward: tokens (b, h) in its segments, these, their newest column, its tail, its context."""

    encoded: Tensor
    segments: tuple[Segment, ...]
    newest: int
    tail: int
    context: AttentionContext

    @classmethod
    def of(cls, state: LayerState, rows: int, heads: int) -> _Before:
        counts = torch.zeros((rows, heads), dtype=torch.int64)
        for segment in state.stored.segments:
            counts += segment.layout.counts()
        columns = [int(segment.layout.columns(torch.device("cpu")).max()) for segment in state.stored.segments]
        return cls(
            encoded=counts,
            segments=tuple(state.stored.segments),
            newest=max(columns, default=-1),
            tail=0 if state.stored.tail is None else state.stored.tail.length,
            context=AttentionContext(layer=state.index, carry=state.observed.carry),
        )


class _Step:
    """One forward, seen from the cache before and after it; a cache that is not ours (None) holds everything."""

    def __init__(self, cache: Any, geometry: Geometry, rows: int, *, seen: int):
        self.geometry, self.rows, self.seen = geometry, rows, seen
        self.states: list[LayerState] = cache.engine.states if isinstance(cache, KvCache) else []
        self.before = [_Before.of(state, rows, geometry.kv_heads) for state in self.states]

    def read(self, cache: Any) -> int:
        """Tokens that one new token of each row read, over rows, layers and kv heads."""
        heads, total = self.rows * self.geometry.kv_heads, 0
        states = iter(zip(self.states, self.before, strict=True))
        for window in self.geometry.windows:
            if window is not None or not self.states:
                total += heads * min(self.seen + 1, window or self.seen + 1)
                continue
            state, before = next(states)
            total += (
                int(state.observed.tokens_read.sum())
                if state.observed.tokens_read is not None
                else int(before.encoded.sum()) + heads * (before.tail + 1)
            )
        return total

    def added(self, cache: Any, *, new: int) -> int | None:
        """What the plan added to this forward, over rows, layers and kv heads."""
        if not self.states:
            return 0
        plan: Plan = cache.plan
        return _sum(
            self._layer(plan, state, before, new) for state, before in zip(self.states, self.before, strict=True)
        )

    def _layer(self, plan: Plan, state: LayerState, before: _Before, new: int) -> int | None:
        size = self.geometry.head_dim
        heads = self.geometry.kv_heads
        group = self.geometry.q_heads // heads
        sizes = {"key_size": size, "value_size": size}
        held = before.encoded + before.tail + new
        # As it is on this layer: what a table gives to one layer costs nothing on another.
        codec = state.codec(plan)
        few = {"queries": group * new, **sizes}
        parts = [
            _each(before.encoded, lambda n: codec.read_flops(tokens=n, **few))
            if new <= MOST_QUERIES
            else _each(before.encoded, lambda n: codec.decode_flops(tokens=n, **sizes))
        ]
        if new == 1:
            encoded = state.here(before.segments)
            request = FlopsRequest(encoded=encoded, group=group, size=size, held=held, context=before.context)
            parts.append(plan.attend.flops(request))
        if plan.score is not None:
            pairs = held.double() if new == 1 else torch.full_like(held, twice_pairs(new, None)).double() / 2
            parts.append(_evidence(plan.needs, group, float(pairs.sum())))
            if state.clock.settled_seen == state.stored.seen and state.clock.growth == 0:
                score, allocate, select = plan.score, plan.allocate, plan.select
                parts += [
                    # The eviction reads keys and values once more.
                    _each(before.encoded, lambda n: codec.decode_flops(tokens=n, **sizes)),
                    _each(held, lambda n: score.flops(tokens=n, group=group, size=size)),
                    _each(held, lambda n: allocate.flops(tokens=n, heads=heads, group=group, size=size)),
                    _each(held, lambda n: select.flops(tokens=n)),
                    _merging(plan, held, state.counts(), group, size),
                ]
        for segment in state.stored.segments:
            if not any(segment is old for old in before.segments):
                # What an exact codec keeps is encoded anew, of any other only what was in the tail.
                fresh = _later_than(segment, -1 if codec.exact else before.newest)
                parts.append(_each(fresh, lambda n: codec.encode_flops(tokens=n, **sizes)))
        return _sum(parts)


def _evidence(needs: Needs, group: int, pairs: float) -> int | None:
    """Gathering what a plan needs: 2 for each (query head, query, key) of a mass; queries are only copied."""
    if needs.moments:
        return None
    return int(2 * group * pairs) if needs.mass else 0


def _merging(plan: Plan, held: Tensor, kept: Tensor, group: int, size: int) -> int | None:
    """What the plan's merger computes where (b, h) tokens were `held` and `kept`."""
    pairs = zip(held.flatten().tolist(), kept.flatten().tolist(), strict=True)
    return _sum(plan.merge.flops(tokens=n, kept=k, group=group, size=size) for n, k in pairs if k < n)


def _later_than(segment: Segment, column: int) -> Tensor:
    """(b, h) tokens of a segment that are newer than a column: those that were encoded and not only moved."""
    layout, cpu = segment.layout, torch.device("cpu")
    later = (layout.columns(cpu) > column).expand(layout.lanes, layout.size)
    filled = layout.filled(cpu)
    each = (later if filled is None else later & filled).sum(1)
    total = torch.zeros(layout.rows * layout.heads, dtype=torch.int64).index_add_(0, layout.owners(cpu), each)
    return total.view(layout.rows, layout.heads)


def _each(counts: Tensor, price: Callable[[int], int | None]) -> int | None:
    """The sum of a price over (b, h) counts; nothing is free where there are no tokens to pay for."""
    tokens, often = counts[counts > 0].unique(return_counts=True)
    priced = [(price(n), times) for n, times in zip(tokens.tolist(), often.tolist(), strict=True)]
    return _sum(None if one is None else one * times for one, times in priced)


def _sum(parts: Iterable[int | None]) -> int | None:
    total = 0
    for part in parts:
        if part is None:
            return None
        total += part
    return total


def twice_pairs(tokens: int, window: int | None) -> int:
    """Twice the (query, key) pairs of a causal prompt, its diagonal counted half: n**2, less what a window hides."""
    hidden = 0 if window is None else max(0, tokens - window)
    return tokens**2 - hidden**2


def repetition_flops(
    weights: Weights, geometry: Geometry, cache: Any, tokenizer: Any, *, rows: int, tokens: int
) -> int:
    """Operations of the passes that repeat `rows` contexts of `tokens` tokens; 0 for a plan that reads once.

    A pass of t new tokens after n is a prefill of n + t less one of n. Then, for each layer that sees all, each query
    head and each new token, 2 d + 4 for every sink, token of the piece and earlier new token: its logit, and its
    softmax (less the maximum, exponential, sum, division); the highest probability is chosen for nothing. Where a plan
    takes gradients, each pass is run once more and then backward: as much again for what multiplies weights, whose own
    gradients are not taken, and twice as much for attention, which has two factors.
    """
    engine = getattr(cache, "engine", None)
    how = None if engine is None else engine.needs.reconstruction
    if how is None or not geometry.compressed:
        return 0
    context, words = torch.zeros((1, tokens), dtype=torch.int64), instruction_of(tokenizer)
    total = 0
    for piece, new in repetitions(context, None, words, how, geometry.max_positions):
        t, known = new.shape[1], piece.columns[0].numel()
        known += int((piece.sinks[0] < piece.columns[0][0]).sum())
        attention = sum(
            s.q_heads
            * (s.key_size + s.value_size)
            * (twice_pairs(tokens + t, s.window) - twice_pairs(tokens, s.window))
            for s in geometry.shapes
            if s.kv_heads
        )
        total += 2 * (weights.body * t + weights.head) + attention
        if how.graded:
            total += 2 * (2 * weights.body * t + weights.head) + 3 * attention
        looked_at = (2 * t * known + twice_pairs(t, None)) // 2
        total += len(geometry.compressed) * geometry.q_heads * looked_at * (2 * geometry.head_dim + 4)
    return rows * total
