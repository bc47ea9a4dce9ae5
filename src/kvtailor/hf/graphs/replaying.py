"""Decoding by steps that are replayed: which models and plans allow it, and one recording after the other."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from kvtailor.errors import UnsupportedModel
from kvtailor.hf.cache import KvCache
from kvtailor.hf.graphs import replay
from kvtailor.hf.graphs.replay import Recorder, Replay
from kvtailor.hf.run.prefill import fed
from kvtailor.hf.run.reader import CacheReader, with_columns
from kvtailor.plan import Plan

__all__ = ["ReplayingReader", "Replays", "greedy"]

_RECOMPUTED = ("dynamic", "longrope")


def _obstacle(cache: KvCache, model: Any) -> str | None:
    """Why steps of this model over such a cache cannot be recorded, a sentence; None where they can."""
    plan, geometry = cache.plan, cache.geometry
    if not geometry.compressed:
        return f"all layers of this {geometry.model_type} have a sliding window of its own, and no plan compresses them"
    if geometry.multiplies:
        return f"{geometry.model_type} computes its attention itself, in steps that kvtailor follows one by one"
    if geometry.has_states or geometry.readers:
        kept = "states of constant size" if geometry.has_states else "keys that several of them read"
        return f"this {geometry.model_type} has layers with {kept}, which are not recorded yet"
    if geometry.has_latents:
        return f"the attention of this {geometry.model_type} reads latents, which steps that are recorded do not"
    if not plan.attend.graph_safe:
        return f"{plan} chooses anew at every token what it reads"
    if cache.engine.listens:
        return f"{plan} keeps account of what every new token attends to"
    if plan.store.moves:
        return f"{plan} moves segments between tiers at every token"
    if plan.store.limit is not None:
        return f"{plan} limits the bytes on the device, which would be looked at at every token"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{type(model).__name__} counts positions itself: it takes no position_ids"
    parameters = getattr(cache.guard.config, "rope_parameters", None) or {}
    kinds = [parameters, *(each for each in parameters.values() if isinstance(each, dict))]
    if any(each.get("rope_type") in _RECOMPUTED for each in kinds):
        return f"this {geometry.model_type} computes its rotary frequencies anew from the length of the text"
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        return f"the model's weights are on {len(devices)} devices"
    return None


class Replays:
    """Greedy or sampled decoding of a cache by `Replay`s, one after the other.

    ```python
    steps = Replays(model, cache, expected=255)
    for _ in range(255):
        logits = steps.step(tokens)
    steps.land()
    ```

    Args:
        model: a transformers decoder-only model.
        cache: of it; nothing else uses it before `land`.
        mask: (b, n) of what was seen, 0 for padding; None: nothing was padding.
        expected: tokens that will come, at most: slots are reserved for no more.
        record: see `Replay`; None: what records on the model's device.

    Attributes:
        now: the steps of now; None before the first, and between the plan's action and the next.

    Raises:
        UnsupportedModel: steps of this model under this plan cannot be recorded; the message has the reason.
    """

    def __init__(
        self, model: Any, cache: KvCache, mask: Tensor | None = None, *, expected: int, record: Recorder | None = None
    ):
        device = next(model.parameters()).device
        record = replay.recorder_of(device) if record is None else record
        reason = f"the model is on {device}, and graphs are CUDA's" if record is None else _obstacle(cache, model)
        if record is None or reason is not None:
            raise UnsupportedModel(f"steps cannot be recorded and replayed: {reason}; decode without graphs")
        self.model, self.cache, self.mask, self.record = model, cache, mask, record
        self.expected = expected
        self.now: Replay | None = None

    @property
    def seen(self) -> int:
        """Columns read."""
        return self.cache.seen + (0 if self.now is None else self.now.done)

    def step(self, tokens: Tensor) -> Tensor:
        """Logits (b, v) after new tokens (b, 1)."""
        if self.now is not None and not self.now.left:
            self.land()
        self.expected -= 1
        if self.now is None:
            if any(state.stored.tail is None or not state.stored.tail.length for state in self.cache.engine.states):
                # An empty tail has no buffer yet whose slots could be filled.
                mask = with_columns(self.mask, self.cache.seen + 1)
                return fed(self.model, self.cache, tokens, mask, keep=1)[:, 0]
            mask = with_columns(self.mask, self.cache.seen)
            self.now = Replay(self.model, self.cache, mask, max(1, self.expected + 1), self.record)
        return self.now.step(tokens)

    def land(self) -> None:
        """Tells the cache what has come; another step may follow."""
        if self.now is not None:
            self.now.land()
            self.now = None


class ReplayingReader(CacheReader):
    """A `Reader` for plain decoding, which replays steps of one token.

    Args:
        expected, record: see `Replays`.
        Others: see `CacheReader`.

    Attributes:
        steps: how they are replayed.
    """

    def __init__(
        self,
        model: Any,
        plan: Plan,
        mask: Tensor | None,
        chunk: int | None,
        *,
        expected: int,
        record: Recorder | None = None,
    ):
        super().__init__(model, plan, mask, chunk)
        self.steps = Replays(model, self.cache, mask, expected=expected, record=record)

    @property
    def seen(self) -> int:
        return self.steps.seen

    def read(self, tokens: Tensor, keep: int) -> Tensor:
        if tokens.shape[1] == 1:
            return self.steps.step(tokens)[:, None]
        self.steps.land()
        return super().read(tokens, keep)

    def retract(self, length: int) -> None:
        self.steps.land()
        super().retract(length)

    def settle(self) -> None:
        """Nothing waits: no draft is verified here."""

    def close(self) -> KvCache:
        self.steps.land()
        return super().close()

    def _open(self) -> None:
        """What is read stays."""


@torch.inference_mode()
def greedy(model: Any, cache: KvCache, following: Tensor, tokens: int) -> None:
    """Feeds so many tokens, of which `following` (b, 1) are the first and each other is the likeliest, by replays.

    Raises:
        UnsupportedModel: see `Replays`.
    """
    steps = Replays(model, cache, expected=tokens)
    for _ in range(tokens):
        following = steps.step(following).argmax(-1, keepdim=True)
    steps.land()
