"""The layers of our cache, as transformers' `Cache` drives them."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

from kvtailor.engine import rollback
from kvtailor.engine.engine import Engine
from kvtailor.engine.layer_state import LayerState, check_rows_and_heads
from kvtailor.engine.phase import Reconstructing, Recording, Speculating
from kvtailor.errors import CacheMisuse
from kvtailor.hf.attention import HANDLE
from kvtailor.hf.guard import CacheGuard
from kvtailor.hf.mask import LazyMask, TensorMask
from kvtailor.hf.model.projection import check_projections
from kvtailor.types import Visibility

__all__ = ["CompressedLayer", "WindowLayer"]


class CompressedLayer(CacheLayerMixin):
    """One layer that the plan compresses, as transformers' `Cache` drives it.

    Attributes:
        guard: of the cache.
        state: what the layer holds.
        arriving: keys (b, h, t, d) and values of new tokens, between `update` and the attention; they join what is held
            only when nothing more can be refused.
        record_past: a forward may be rolled back by `crop` (transformers' name).
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, guard: CacheGuard, state: LayerState, layer_idx: int):
        super().__init__()
        self.guard, self.state, self.layer_idx = guard, state, layer_idx
        self.arriving: tuple[Tensor, Tensor] | None = None
        self._module: weakref.ref[Any] | None = None
        self._recorded_after = 0

    @property
    def record_past(self) -> bool:
        """Forwards wait for a crop before anything is evicted or encoded."""
        return isinstance(self.guard.engine.phase, Recording | Speculating)

    @record_past.setter
    def record_past(self, on: bool) -> None:
        _record(self.guard.engine, on)

    def activate_past_recording(self) -> None:
        """From now on each forward waits for `crop` before anything is evicted or encoded."""
        self.guard.engine.switch.go_on_recording()
        self._recorded_after = self.state.stored.seen

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Remembers dtype and device of the first keys."""
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Takes new keys (b, h, t, d) and values, and gives the handle by which the attention finds this layer."""
        # Under autocast rotated keys are float32 and values are not: what the projections gave is the model's dtype.
        key_states = key_states.to(value_states.dtype)
        if self.is_initialized and (key_states.dtype != self.dtype or key_states.device != self.device):
            raise CacheMisuse(
                f"this cache holds {self.dtype} on {self.device}, and got keys of {key_states.dtype} on "
                f"{key_states.device}; use a new cache after moving or casting the model"
            )
        self.state.check_fits(key_states)
        if not self.is_initialized:
            self._check_heads(key_states.shape[1])
        self.guard.check_opened()
        self.guard.update_begins(self.layer_idx)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        before = self.state.stored.seen
        self.arriving = key_states, value_states
        b, h, t, d = key_states.shape
        keys = key_states.new_full((1, 1, 1, 1), float("nan")).expand(b, h, before + t, d)
        values = value_states.new_full((1, 1, 1, 1), float("nan")).expand(b, h, before + t, value_states.shape[-1])
        setattr(keys, HANDLE, self)
        return keys, values

    def _check_heads(self, found: int) -> None:
        """Raise where the first keys are not of the kv heads that this process was taken to have."""
        guard = self.guard
        due = guard.geometry.of_rank(guard.share.ranks).kv_heads
        if found != due:
            shared = "" if guard.share.ranks == 1 else f" of {guard.geometry.kv_heads} on {guard.share.ranks} processes"
            raise CacheMisuse(
                f"this cache was made for layers of {due} kv heads{shared}, and layer {self.layer_idx} has keys of "
                f"{found}: the model is sharded or shaped otherwise than its configuration and its plan say"
            )

    def refuse_forward(self) -> None:
        """A forward is refused between this layer's update and its attention."""
        self.arriving = None
        self.guard.nothing_changed(self.layer_idx)

    def check_model(self, module: torch.nn.Module) -> None:
        """Raises where another model's attention layer calls than the one that this layer belongs to."""
        bound = None if self._module is None else self._module()
        if bound is None:
            model = None if self.guard.model is None else self.guard.model()
            # Two models may share one configuration.
            mine = model is None or any(module is each for each in model.modules())
            if getattr(module, "config", None) is not self.guard.config or not mine:
                raise CacheMisuse(
                    f"this cache was made for another model than the {type(module).__name__} that is using it; make "
                    "one for this model with kvtailor.cache_for(model, plan)"
                )
            self._module = weakref.ref(module)
        elif bound is not module:
            raise CacheMisuse(
                f"layer {self.layer_idx} of this cache is in use by another model; make a cache for each model"
            )
        if self.layer_idx == self.guard.geometry.compressed[0]:
            check_projections(state.model.output for state in self.guard.engine.states)

    def attend(self, query: Tensor, mask: LazyMask | Tensor | None, scaling: float) -> Tensor:
        """Attention of the new tokens (b, q, t, d) over what this layer holds, then what follows it. (b, q, t, dv)."""
        guard, engine = self.guard, self.guard.engine
        guard.attention_begins(self.layer_idx)
        assert self.arriving is not None
        (keys, values), self.arriving = self.arriving, None
        try:
            visible = self._visible(query, mask)
            reconstructing = isinstance(engine.phase, Reconstructing)
            if not reconstructing:
                self._check_recorded(visible)
                rollback.check_draft(engine, self.state, query.shape[2])
                guard.check_padding(self.layer_idx, visible)
        except CacheMisuse:
            guard.nothing_changed(self.layer_idx)
            raise
        guard.layer_changes(self.layer_idx)
        if reconstructing:
            output = engine.reconstruct(self.state, keys, values, query, visible, scaling)
        else:
            for observe in guard.observers:
                observe(self.layer_idx, keys, values, query, visible, scaling)
            output = self._attended(keys, values, query, visible, scaling)
        guard.layer_ends(self.layer_idx)
        return output

    def _attended(self, keys: Tensor, values: Tensor, query: Tensor, visible: Visibility, scaling: float) -> Tensor:
        """Attention of tokens that are a prompt, a turn or decoded, of a draft, or of a prompt and its first draft."""
        guard, engine, state = self.guard, self.guard.engine, self.state
        new = query.shape[2]
        prompt = rollback.prompt_of(engine, state, new)
        if prompt == new:
            engine.append(state, keys, values)
            guard.take_padding(self.layer_idx, visible)
            return self._attended_and_acted(query, visible, scaling)
        outputs = []
        if prompt:
            # (b, h, t, d) of the prompt and of the draft behind it are taken one after the other.
            engine.append(state, keys[:, :, :prompt], values[:, :, :prompt])
            guard.take_padding(self.layer_idx, visible)
            outputs.append(self._attended_and_acted(query[:, :, :prompt], visible.without_last(new - prompt), scaling))
            keys, values, query = keys[:, :, prompt:], values[:, :, prompt:], query[:, :, prompt:]
            visible = visible.without_first(prompt)
        guard.take_padding(self.layer_idx, visible)
        outputs.append(rollback.attend_draft(engine, state, keys, values, query, visible, scaling))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)

    def _attended_and_acted(self, query: Tensor, visible: Visibility, scaling: float) -> Tensor:
        """Return the attention (b, q, t, dv) of the tokens that were appended last, once what follows it is done."""
        engine, state = self.guard.engine, self.state
        attended = engine.attend(state, query, visible, scaling)
        engine.act(state, query, visible, attended)
        return attended.output

    def _visible(self, query: Tensor, mask: LazyMask | Tensor | None) -> Visibility:
        """What the new tokens may see, by the model's mask; raises where that does not fit what was seen."""
        new = query.shape[2]
        seen = self.state.stored.seen + new
        visible: Visibility
        if mask is None:
            visible = LazyMask.causal(query.shape[0], new, seen - new, query.device)
        elif isinstance(mask, LazyMask):
            visible = mask
        else:
            visible = TensorMask.of(mask, new, seen)
        if visible.first_column + visible.new_tokens != seen or visible.new_tokens != new:
            raise CacheMisuse(
                f"the mask is for {visible.new_tokens} tokens after {visible.first_column}, and the cache has seen "
                f"{seen - new} tokens before these {new}; was the cache used outside of the model between?"
            )
        return visible

    def _check_recorded(self, visible: Visibility) -> None:
        """Raises where assisted decoding feeds its prompt to a cache that has seen it, as transformers' does."""
        before, self._recorded_after = self._recorded_after, 0
        if 0 < before < visible.new_tokens and visible.real is None:
            raise CacheMisuse(
                f"this cache had seen {before} tokens when recording began, and {visible.new_tokens} come at "
                "once: transformers' assisted decoding and prompt lookup feed the whole prompt again, whatever a cache "
                "has seen. Start them with an empty cache, or draft with kvtailor.generate; if all of these tokens are "
                "new, feed them before recording begins"
            )

    def prefill_shared(self, keys: Tensor, values: Tensor, query: Tensor, visible: Visibility, scaling: float) -> None:
        """Takes in what another cache of the same model has just got on this layer; see `hf.run.sharing`."""
        guard = self.guard
        guard.check_padding(self.layer_idx, visible)
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        guard.engine.append(self.state, keys, values)
        guard.take_padding(self.layer_idx, visible)
        guard.engine.act_unread(self.state, query, visible, scaling)

    def get_seq_length(self) -> int:
        """Tokens seen, padding included, whatever is held."""
        if self.arriving is None or not self.guard.awaits_attention(self.layer_idx):
            return self.state.stored.seen
        return self.state.stored.seen + self.arriving[0].shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask that transformers makes: all tokens seen and the new ones."""
        self.guard.check_opened()
        return self.state.stored.seen + query_length, 0

    def get_max_length(self) -> int:
        """-1: no maximum."""
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        """Forgets everything; the layer may then serve another batch."""
        self.state.reset()
        self.arriving = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Takes back the newest tokens; a recorded forward is then compressed.

        Args:
            tokens_to_remove: minus the number of tokens, 0 to take back none.
        """
        count = -int(tokens_to_remove)
        if count < 0:
            raise CacheMisuse(f"crop takes minus the number of tokens to remove, and got {-count}")
        if isinstance(self.guard.engine.phase, Speculating):
            rollback.take_back(self.guard.engine, self.state, count)
        else:
            rollback.crop(self.guard.engine, self.state, count)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        self.state.select_rows(beam_idx.to(torch.int64))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, next to itself."""
        self.state.select_rows(torch.arange(self.state.rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows, given as indices or as a boolean mask."""
        self.state.select_rows(torch.arange(self.state.rows)[indices.cpu()])


def _record(engine: Engine, on: bool) -> None:
    """Do what setting transformers' `record_past` of one layer means: all layers of a cache record, or none does."""
    if on:
        engine.switch.go_on_recording()
    else:
        engine.switch.end_recording()


class WindowLayer(DynamicSlidingWindowLayer):
    """A layer with the model's own sliding window: transformers' layer, less the prompt that its views keep alive.

    Attributes:
        guard: of the cache, whose phase is what new tokens are. In `Reconstructing` they see the window and each other,
            and it stays what it was. In `Recording` and `Speculating` what leaves the window stays until a crop or
            `settle`.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, guard: CacheGuard, layer_idx: int, **options: Any):
        # transformers' own `__init__` sets `record_past`, which belongs to the phase.
        self.guard, self.layer_idx = guard, layer_idx
        super().__init__(**options)

    @property
    def record_past(self) -> bool:
        """Whether what leaves the window stays until a crop."""
        return self.guard.engine.phase.windows_record

    @record_past.setter
    def record_past(self, on: bool) -> None:
        _record(self.guard.engine, on)

    def reset(self) -> None:
        """Forget everything; the layer may then serve another batch."""
        super().reset()
        self.record_past = False

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See transformers' `DynamicSlidingWindowLayer`."""
        if self.is_initialized:
            check_rows_and_heads(key_states, self.keys.shape[0], self.keys.shape[1])
        self.guard.update_begins(self.layer_idx)
        before = dict(self.__dict__)
        self.guard.layer_changes(self.layer_idx, undo=lambda: self.__dict__.update(before))
        if isinstance(self.guard.engine.phase, Reconstructing):
            found = torch.cat([self.keys, key_states], -2), torch.cat([self.values, value_states], -2)
        else:
            keys, values = super().update(key_states, value_states, *args, **kwargs)
            self._free_what_left()
            # Masks are made for the window alone, but transformers 5.17 gives all that a recording layer holds.
            visible = self.sliding_window - 1 + key_states.shape[-2]
            found = keys[:, :, -visible:], values[:, :, -visible:]
        self.guard.layer_ends(self.layer_idx)
        return found

    def _free_what_left(self) -> None:
        """A slice keeps its parent alive: what is in the window gets a storage of its own."""
        if self.keys.untyped_storage().nbytes() > self.keys.numel() * self.keys.element_size():
            self.keys, self.values = self.keys.clone(), self.values.clone()

    def become(self, other: WindowLayer) -> None:
        """Holds a copy of what another cache's layer holds; guard and place stay this one's."""
        kept = {name: value for name, value in other.__dict__.items() if name not in ("guard", "layer_idx")}
        self.__dict__.update(copy.deepcopy(kept))

    def check_crop(self, count: int) -> None:
        """Raise where tokens that have left the window for good would have to come back."""
        if not count or self.cumulative_length < self.sliding_window:
            return
        # What must be there once `count` tokens are gone: a whole window, or all that was seen.
        needed = min(self.sliding_window - 1, self.cumulative_length - count)
        if not self.record_past or self.keys.shape[-2] - count < needed:
            raise CacheMisuse(
                f"asked to crop a cache whose layer {self.layer_idx} has a window of {self.sliding_window} tokens of "
                f"the model's own and has seen {self.cumulative_length}: what left the window is gone; call "
                "cache.activate_past_recording() before the forward that may be rolled back"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """See transformers' `DynamicSlidingWindowLayer`."""
        count = -int(tokens_to_remove)
        if isinstance(self.guard.engine.phase, Speculating):
            if count:
                self.keys, self.values = self.keys[:, :, :-count], self.values[:, :, :-count]
                self.cumulative_length -= count
        elif count:
            super().crop(tokens_to_remove)
            self._free_what_left()
        else:
            # A recording may have ended since, and transformers' layer takes no crop outside of one.
            self.settle()

    def settle(self) -> None:
        """Forget what has left the window for good."""
        if self.is_initialized and self.cumulative_length >= self.sliding_window:
            visible = self.sliding_window - 1
            self.keys, self.values = self.keys[:, :, -visible:], self.values[:, :, -visible:]
            self._free_what_left()
