"""Decoding in which a step is recorded once and replayed, so that a GPU need not wait for the host to launch kernels.

Between two moments at which the plan evicts or encodes, nothing moves but the tails: a step of one token writes one
slot of each and reads all that is held. So tails get free slots beforehand, and how far they are filled and where the
tokens stand is counted on the device; then every step launches the same on the same addresses. When the plan acts
again, the cache gets the number of tokens that have come, and the next step is recorded anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from kvtailor.engine import rollback
from kvtailor.engine.phase import Replaying
from kvtailor.errors import CacheMisuse, UnsupportedModel
from kvtailor.hf.cache import KvCache
from kvtailor.hf.graphs.fixed_layers import FixedLayer, Ring, with_free_slots
from kvtailor.hf.layers.compressed import CompressedLayer
from kvtailor.hf.layers.window import WindowLayer
from kvtailor.hf.mask import LazyMask
from kvtailor.hf.versions import hand_cache
from kvtailor.types import Segment

__all__ = ["Recorder", "Replay", "captured", "recorder_of"]

Recorder = Callable[[Callable[[], None]], Callable[[], None]]
# Free slots for so many tokens where the plan never acts: recording takes about as long as a step without it.
_FREE_SLOTS = 256


def recorder_of(device: torch.device) -> Recorder | None:
    """What records a step on a device; None where nothing does."""
    return captured if device.type == "cuda" else None


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """`run` as a CUDA graph, recorded and not run. It must have run before, which compiles what it launches.

    Args:
        run: launches on fixed addresses only, without waiting for the device.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


class Replay:
    """Steps of one new token for each row, until the plan acts or the free slots are used up.

    Args:
        model: a transformers decoder-only model.
        cache: of it; it has seen a prompt, no tail of it is empty, and nothing else uses it before `land`.
        mask: (b, n) of what was seen, 0 for padding; None: nothing was padding.
        steps: most tokens that will come; the plan may act before.
        record: makes of one step what is run in place of the ones that follow.

    Attributes:
        left: steps that are left.
        done: steps that were made, and of which the cache does not know yet.
        recorded: a step was recorded; the first one is run as it is.
        landed: the cache has been told, or is being told.
        fixed: the cache that the model gets meanwhile.
    """

    def __init__(self, model: Any, cache: KvCache, mask: Tensor | None, steps: int, record: Recorder):
        # Not the cache: one that holds its own open steps would refer to itself, and outlive its last user.
        self._guard, self._engine, self._attention = cache.guard, cache.engine, cache.plan.attend
        self._compressed, self._seen = cache.geometry.compressed, cache.seen
        self.model, self.record = model, record
        until_action = rollback.tokens_until_action(self._engine)
        self.left = min(steps, max(_FREE_SLOTS, self._seen // 32)) if until_action is None else until_action
        self.done = 0
        self.recorded = self.landed = False
        self.rows, self.device = self._engine.states[0].rows, next(model.parameters()).device
        self._mask = None
        if mask is not None and not bool(mask.all()):
            self._mask = torch.cat([mask, mask.new_ones((self.rows, self.left))], 1).to(torch.bool)
        self._rings: list[Ring] = []
        layers = [self._fixed_layer(layer) for layer in cache.layers]
        self._count(layers)
        self.fixed = Cache(layers=layers)
        self._tokens = torch.zeros((self.rows, 1), dtype=torch.int64, device=self.device)
        real = torch.full((self.rows,), self._seen, device=self.device) if mask is None else mask.sum(-1)
        self._positions = real[:, None].to(torch.int64).clone()
        # The layers have what may be seen; without any mask some models look through the tokens for padding.
        self._plain_rule = self._causal
        self._logits: Tensor | None = None
        self._replayed: Callable[[], None] | None = None
        self._phase = ExitStack()
        self._phase.enter_context(self._engine.switch.replaying())

    @property
    def columns(self) -> int:
        """Columns that are seen with the next token."""
        return self._seen + self.done + 1

    def padding(self, columns: int) -> Tensor | None:
        """(b, columns) bool, False for padding, of the mask that goes with the token at the last of so many columns.

        None: nothing is padding.
        """
        return None if self._mask is None else self._mask[:, :columns]

    def step(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits (b, v) after new tokens (b, 1).

        Args:
            tokens: of each row.
            positions: (b or 1, 1) at which they stand; None: each row goes on counting its own tokens.
        """
        self._tokens.copy_(tokens)
        if positions is not None:
            self._positions.copy_(positions)
        # The first step compiles what the recording, which computes nothing, would otherwise have to.
        if self.done == 0:
            self._run()
        else:
            if self._replayed is None:
                try:
                    self._replayed = self.record(self._run)
                except RuntimeError as error:
                    raise UnsupportedModel(
                        f"a step of this {type(self.model).__name__} could not be recorded ({error}); decode without "
                        "graphs"
                    ) from error
                self.recorded = True
            self._replayed()
        assert self._logits is not None
        logits = self._logits.clone()
        # Last, so that a step which is broken off was none: what it wrote lies in slots that count as free.
        self.done += 1
        self.left -= 1
        return logits

    def land(self) -> None:
        """Tell the cache what has come, and let the plan act. No step may follow."""
        self._replayed, self.left = None, 0
        replaying = isinstance(self._engine.phase, Replaying)
        self._phase.close()
        if not self.done:
            self.landed = True
            return
        if not replaying:
            raise CacheMisuse(
                "the cache was reset while steps were replayed, or taking their tokens was interrupted, and it cannot "
                "take them any more"
            )
        if any((state.stored.seen, state.rows) != (self._seen, self.rows) for state in self._engine.states):
            self.landed = True
            self._guard.break_off("a layer was changed by itself while steps were replayed")
            self._guard.check_whole()
        # From here on an error or an interrupt leaves a cache that the guard refuses. What follows runs in the modes in
        # which a layer's attention does, whoever lands.
        modes = torch.no_grad(), torch.autocast(self.device.type, enabled=False)
        with self._guard.changing("taking the tokens of replayed steps"), modes[0], modes[1]:
            self.landed = True
            visible = self._seen_by(self._seen + self.done)
            for ring in self._rings:
                ring.land(self.done)
            for layer, state in zip(self._compressed, self._engine.states, strict=True):
                self._engine.replayed(state, self.done, visible)
                self._guard.take_padding(layer, visible)
            self._engine.late.settle(self._guard.break_off)
            self.done = 0

    def drop(self) -> None:
        """Forget what has come, of a cache that forgets everything. No step may follow."""
        self._replayed, self.left, self.done, self.landed = None, 0, 0, True
        self._phase.close()

    def _fixed_layer(self, layer: CompressedLayer | WindowLayer) -> FixedLayer:
        attention = self._attention
        if isinstance(layer, WindowLayer):
            ring = Ring(layer)
            self._rings.append(ring)
            rule, real = self._ring_rule(ring)
            return FixedLayer(layer, attention, [ring.whole], ring.held, ring.whole.layout.size, rule, real)
        whole, filled = with_free_slots(layer.state, self.left)
        parts = [*layer.state.here(), whole]
        # It lands before it would turn.
        return FixedLayer(layer, attention, parts, filled, whole.layout.size + 1, self._rule_of(parts))

    def _count(self, layers: Sequence[FixedLayer]) -> None:
        """Give the layers the counters of how far they are filled."""
        self._turns = torch.tensor([each.turn for each in layers], dtype=torch.int32, device=self.device)[:, None]
        self._slots = torch.tensor([each.filled for each in layers], device=self.device)[:, None]
        # Layers may have other numbers of heads: a row is as long as the most lanes are.
        self._lengths = self._slots.to(torch.int32).repeat(1, max(each.growing.layout.lanes for each in layers))
        for layer, lengths, slot in zip(layers, self._lengths, self._slots, strict=True):
            layer.count_by(lengths[: layer.growing.layout.lanes], slot)

    def _ring_rule(self, ring: Ring) -> tuple[LazyMask, Tensor | None]:
        """What may be seen of a ring, and its slots that are no padding, which change."""
        real = ring.real(None if self._mask is None else self._mask[:, : self._seen])
        rule = self._causal
        if real is not None:
            rule.mask_function = lambda row, head, query, key: real[row, key]
        return rule, real

    def _rule_of(self, parts: Sequence[Segment]) -> LazyMask:
        """What all coming tokens may see of parts: what the last of them may, since no token sees unfilled slots."""
        rule = self._seen_by(self._seen + self.left)
        for layout in (part.layout for part in parts if rule.padding is not None):
            rows = torch.div(layout.owners(self.device), layout.heads, rounding_mode="floor")
            sees = rule.at(rows, layout.columns(self.device))[:, 0]
            filled = layout.filled(self.device)
            if not bool((sees if filled is None else sees | ~filled).all()):
                return rule
        return self._causal

    @property
    def _causal(self) -> LazyMask:
        return LazyMask.causal(self.rows, 1, self._seen, self.device)

    def _seen_by(self, columns: int) -> LazyMask:
        """What the token at the last of so many columns may see."""
        rule = LazyMask.causal(self.rows, 1, columns - 1, self.device)
        rule.padding = None if self._mask is None else self._mask[:, :columns]
        return rule

    def _run(self) -> None:
        self._lengths.add_(1).clamp_(max=self._turns)
        found = self.model(
            input_ids=self._tokens,
            attention_mask=self._plain_rule,
            position_ids=self._positions,
            **hand_cache(self.fixed),
            use_cache=True,
        ).logits[:, -1]
        if self._logits is None:
            self._logits = torch.empty_like(found)
        self._logits.copy_(found)
        self._slots.add_(1).remainder_(self._turns)
        self._positions.add_(1)
