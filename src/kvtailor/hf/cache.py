"""The cache that a user hands to `model.generate()`: transformers' `Cache`, made of our layers.

Outside it speaks of tokens *seen* (positions, slicing of inputs, mask sizes); inside each layer holds what its plan
left.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from kvtailor.calibration import Calibration
from kvtailor.errors import CacheMisuse, PlanError, UnsupportedModel
from kvtailor.hf.attention import NAME, register
from kvtailor.hf.calibrations import calibrate
from kvtailor.hf.geometry import Geometry, check
from kvtailor.hf.layers import CompressedLayer, WindowLayer
from kvtailor.hf.modules import attention_modules, rotation_of
from kvtailor.hf.projection import OutputProjection
from kvtailor.hf.switch import Lease, switch
from kvtailor.ledger import Entry, Ledger
from kvtailor.plan import Plan
from kvtailor.repeat import Piece
from kvtailor.route import Route
from kvtailor.store.contract import Traffic
from kvtailor.types import Visibility

__all__ = ["KvCache", "cache_for"]


def cache_for(model: Any, plan: str | Plan) -> KvCache:
    """A cache that compresses by a plan, to be handed to the model as `past_key_values`.

    ```python
    cache = kvtailor.cache_for(model, "snapkv + adakv @ tokens=1024")
    output = model.generate(**inputs, past_key_values=cache)
    ```

    The model's attention is switched to "kvtailor" (`model.set_attn_implementation`), which is transformers' own sdpa
    for every other cache. The model gets its own attention back once no cache of ours is alive.

    Args:
        model: a transformers decoder-only model.
        plan: one line or a `Plan`.

    Raises:
        PlanError: with all faults of the plan, or where a method of it was made for a model of other sizes.
        UnsupportedModel: for a model that cannot be compressed, before anything is changed.
        CalibrationError: a method needs a calibration, and there is none for this very model.
    """
    parsed = Plan.parse(plan) if isinstance(plan, str) else plan
    check(model, NAME)
    register()
    config = model.config.get_text_config(decoder=True)
    refusal = parsed.store.refusal(next(model.parameters()).device)
    if refusal is not None:
        raise PlanError(str(parsed), [refusal])
    cache = KvCache(parsed, Geometry.of(model.config), config)
    _equip(cache, model)
    cache.lease = switch(model, NAME)
    return cache


def _equip(cache: KvCache, model: Any) -> None:
    """Gives the layers what their plan needs of calibration files and of the model's own modules."""
    needs, geometry = cache.plan.needs, cache.geometry
    calibrate(cache, model)
    if not (needs.output or needs.rotation):
        return
    modules = attention_modules(model)
    if len(modules) != geometry.layers:
        raise UnsupportedModel(
            f"the plan {cache.plan} reads the modules of {geometry.layers} attention layers, and this "
            f"{geometry.model_type} shows {len(modules)}"
        )
    for state, layer in zip(cache.route.states, geometry.compressed, strict=True):
        if needs.output:
            state.output = OutputProjection(modules[layer], geometry.q_heads, geometry.head_dim)
        if needs.rotation:
            state.rotation = rotation_of(model, modules[layer], geometry.layer_types[layer], geometry.head_dim)


class _Same:
    """Keeps an object as itself through a deep copy of what refers to it."""

    def __init__(self, value: Any):
        self.value = value

    def __deepcopy__(self, memo: dict[int, Any]) -> _Same:
        return self


class KvCache(Cache):
    """A cache that compresses by a plan. Made by `kvtailor.cache_for`; one for each conversation or batch.

    Attributes:
        plan: what it does.
        geometry: of the model that it was made for.
        route: the walk and the state of the compressed layers.
        calibrations: the files whose tensors the plan's methods read.
        followers: caches of the same model that overhear each layer; see `hf.sharing`.
        lease: keeps the model's attention ours while this cache or a copy of it is alive; see `hf.switch`.
    """

    followers: tuple[KvCache, ...] = ()
    lease: Lease | None = None

    def __init__(self, plan: Plan, geometry: Geometry, config: Any):
        misfits = plan.misfits(layers=len(geometry.compressed), heads=geometry.kv_heads, size=geometry.head_dim)
        if misfits and geometry.compressed:
            raise PlanError(str(plan), misfits)
        self.plan, self.geometry, self.config = plan, geometry, _Same(config)
        self.route = Route(plan, len(geometry.compressed), geometry.window_elements())
        states = iter(self.route.states)
        layers: list[Any] = [
            CompressedLayer(self, next(states), i) if window is None else WindowLayer(sliding_window=window)
            for i, window in enumerate(geometry.windows)
        ]
        super().__init__(layers=layers)
        self.calibrations: tuple[Calibration, ...] = ()
        self._awaiting: int | None = None
        self._real: Tensor | None = None
        self._warned = False
        if not geometry.compressed and (plan.evicts or plan.encode.block):
            warnings.warn(
                f"all {geometry.layers} layers of this {geometry.model_type} have a sliding window of the model's "
                f"own, so the plan {plan} has nothing to compress",
                stacklevel=3,
            )

    @property
    def seen(self) -> int:
        """Tokens seen, padding included."""
        return int(self.layers[0].get_seq_length()) if self.layers else 0

    def held(self) -> Tensor:
        """(b, l, h) int64: tokens held by each row, compressed layer and kv head; b is 0 before the first token."""
        if not self.route.states or self.route.states[0].rows == 0:
            return torch.zeros((0, len(self.route.states), self.geometry.kv_heads), dtype=torch.int64)
        return torch.stack([state.counts() for state in self.route.states], 1)

    def ledger(self) -> Ledger:
        """What this cache costs now, read from its storages."""
        entries: list[Entry] = []
        states = iter(self.route.states)
        rows = element = 0
        for index, layer in enumerate(self.layers):
            if isinstance(layer, CompressedLayer):
                state = next(states)
                entries += state.entries(index)
                if state.tail is not None and layer.is_initialized:
                    rows, element = state.rows, layer.dtype.itemsize
            elif layer.is_initialized and layer.keys is not None:
                held = {"keys": layer.keys, "values": layer.values}
                form = sum(t.numel() * t.element_size() for t in held.values())
                entries.append(Entry(layer=index, room="window", tensors=held, closed_form=form))
                rows, element = layer.keys.shape[0], layer.keys.element_size()
        if self._real is not None:
            entries.append(Entry(layer=0, room="observe", tensors={"real": self._real}, closed_form=self._real.numel()))
        counts = self.held()
        return Ledger.of(
            entries,
            layers=len(self.layers),
            full=self.geometry.full_bytes(rows, self.seen, element),
            seen=self.seen,
            held=float(counts.double().mean()) if counts.numel() else None,
        )

    def traffic(self) -> Traffic:
        """What has moved between tiers since this cache was made."""
        return self.route.shelves.traffic()

    def save(self, path: Any) -> None:
        """Writes the compressed cache to one safetensors file; see `kvtailor.load_cache`."""
        from kvtailor.hf.saving import save

        save(self, path)

    def reset(self) -> None:
        """Forgets everything; the cache may then serve another batch of the same model."""
        for layer in self.layers:
            layer.reset()
        self.route.reset()
        self._awaiting = self._real = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was (beam search)."""
        super().reorder_cache(beam_idx)
        if self._real is not None:
            self._real = self._real.index_select(0, beam_idx.to(self._real.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, next to itself."""
        super().batch_repeat_interleave(repeats)
        if self._real is not None:
            self._real = self._real.repeat_interleave(repeats, 0)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows, given as indices or as a boolean mask."""
        super().batch_select_indices(indices)
        if self._real is not None:
            self._real = self._real[indices.to(self._real.device)]

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the newest tokens; `tokens_to_remove` is minus their number."""
        super().crop(tokens_to_remove)
        if self._real is not None:
            self._real = self._real[:, : self.seen].clone()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen by a layer."""
        self.expect_attention(None)
        return int(super().get_seq_length(layer_idx))

    def expect_attention(self, layer_idx: int | None) -> None:
        """Raises where the last update was never attended through kvtailor, then awaits the attention of a layer."""
        if self._awaiting is not None:
            raise CacheMisuse(
                f"layer {self._awaiting} updated this cache, but its attention never asked for it, so its output is "
                f"not to be trusted: the model must run with attn_implementation={NAME!r}, which kvtailor.cache_for "
                "sets and something has changed since"
            )
        self._awaiting = layer_idx

    def attention_came(self, layer_idx: int) -> None:
        """The attention of the awaited layer asked for it."""
        if self._awaiting != layer_idx:
            raise CacheMisuse(f"the attention of layer {layer_idx} asked for its cache twice, or without an update")
        self._awaiting = None

    def check_opened(self) -> None:
        """Raises where a plan that reads its context twice would see it only once."""
        route = self.route
        if route.needs.reconstruction and not (route.holding or route.opened or route.states[0].seen):
            raise CacheMisuse(
                f"{self.plan} reads its context twice, which plain generate() does not: prefill it first with "
                "kvtailor.prefill(model, cache, input_ids, attention_mask), then hand the whole conversation to "
                "generate(); kvtailor.session does both by itself"
            )

    @contextmanager
    def repeating(self, piece: Piece) -> Iterator[None]:
        """Forwards inside leave no trace but what they say of a piece of the context, see `repeat`."""
        windows = [layer for layer in self.layers if isinstance(layer, WindowLayer)]
        self.route.repeating = piece
        for layer in windows:
            layer.passing = True
        try:
            yield
        finally:
            self.route.repeating = self.route.passing = None
            for layer in windows:
                layer.passing = False

    def check_padding(self, layer_idx: int, visible: Visibility) -> None:
        """Raises where a column that was padding is a token now: what was dropped as padding cannot come back."""
        if layer_idx != self.geometry.compressed[0]:
            return
        self._warn_of_positions()
        before, now = self._real, visible.real
        if before is not None:
            columns = before.shape[1]
            if now is None or bool((now[:, :columns] & ~before).any()):
                raise CacheMisuse(
                    "attention_mask shows tokens that were padding when this cache saw them; pass the mask of the "
                    f"whole conversation ({visible.first_column + visible.new_tokens} columns) with the same padding"
                )
        if now is not None:
            self._real = now.clone()

    def _warn_of_positions(self) -> None:
        limit = self.geometry.max_positions
        if limit is None or self.seen <= limit or self._warned:
            return
        rolls = self.plan.attend.in_cache_positions
        # In a first forward only the first layers hold anything yet.
        held = max(int(state.counts().max()) for state in self.route.states if state.rows)
        if rolls and held <= limit:
            return
        self._warned = True
        what = (
            f"holds {held} tokens, which its positions count,"
            if rolls
            else f"has now seen {self.seen} tokens, whose positions compression keeps,"
        )
        warnings.warn(
            f"the cache {what} and this {self.geometry.model_type} was made for {limit} positions: the model is "
            "beyond what it was trained on",
            stacklevel=2,
        )
