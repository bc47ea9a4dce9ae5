"""The layers of our cache, as transformers' `Cache` drives them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

from kvtailor.errors import CacheMisuse
from kvtailor.hf.attention import HANDLE
from kvtailor.hf.mask import LazyMask, TensorMask
from kvtailor.layer import LayerState
from kvtailor.types import Visibility

if TYPE_CHECKING:
    from kvtailor.hf.cache import KvCache

__all__ = ["CompressedLayer", "WindowLayer"]


class CompressedLayer(CacheLayerMixin):
    """One layer that the plan compresses, as transformers' `Cache` drives it.

    Attributes:
        record_past: a forward may be rolled back by `crop` (transformers' name).
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: KvCache, state: LayerState, layer_idx: int):
        super().__init__()
        self.cache, self.state, self.layer_idx = cache, state, layer_idx
        self._module: weakref.ref[Any] | None = None
        self._overheard: tuple[Tensor, Tensor] | None = None
        self._recorded_after = 0

    @property
    def record_past(self) -> bool:
        """Forwards wait for a crop before anything is evicted or encoded."""
        return self.state.recording

    @record_past.setter
    def record_past(self, on: bool) -> None:
        self.state.recording = on

    def activate_past_recording(self) -> None:
        """From now on each forward waits for `crop` before anything is evicted or encoded."""
        self.state.recording = True
        self._recorded_after = self.state.seen

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Remembers dtype and device of the first keys."""
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Takes new keys (b, h, t, d) and values, and gives the handle by which the attention finds this layer."""
        # Under autocast rotated keys are float32 and values are not: what the projections gave is the model's dtype.
        key_states = key_states.to(value_states.dtype)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif key_states.dtype != self.dtype or key_states.device != self.device:
            raise CacheMisuse(
                f"this cache holds {self.dtype} on {self.device}, and got keys of {key_states.dtype} on "
                f"{key_states.device}; use a new cache after moving or casting the model"
            )
        self.cache.check_opened()
        self.cache.expect_attention(self.layer_idx)
        before = self.state.seen
        self.cache.route.append(self.state, key_states, value_states)
        if self.cache.followers and self.cache.route.repeating is None:
            self._overheard = key_states, value_states
        b, h, t, d = key_states.shape
        keys = key_states.new_full((1, 1, 1, 1), float("nan")).expand(b, h, before + t, d)
        values = value_states.new_full((1, 1, 1, 1), float("nan")).expand(b, h, before + t, value_states.shape[-1])
        setattr(keys, HANDLE, self)
        return keys, values

    def check_model(self, module: torch.nn.Module) -> None:
        """Raises where another model's attention layer calls than the one that this layer belongs to."""
        bound = None if self._module is None else self._module()
        if bound is None:
            if getattr(module, "config", None) is not self.cache.config.value:
                raise CacheMisuse(
                    f"this cache was made for another model than the {type(module).__name__} that is using it; make "
                    "one for this model with kvtailor.cache_for(model, plan)"
                )
            self._module = weakref.ref(module)
        elif bound is not module:
            raise CacheMisuse(
                f"layer {self.layer_idx} of this cache is in use by another model; make a cache for each model"
            )

    def attend(self, query: Tensor, mask: LazyMask | Tensor | None, scaling: float) -> Tensor:
        """Attention of the new tokens (b, q, t, d) over what this layer holds, then the walk. (b, q, t, dv)."""
        self.cache.attention_came(self.layer_idx)
        new, route = query.shape[2], self.cache.route
        seen = self.state.seen + (0 if route.repeating is None else new)
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
        if route.repeating is None:
            self._check_recorded(visible)
            self.cache.check_padding(self.layer_idx, visible)
        if self._overheard is not None:
            for follower in self.cache.followers:
                follower.layers[self.layer_idx].overhear(*self._overheard, query, visible, scaling)
            self._overheard = None
        return route.attend(self.state, query, visible, scaling)

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

    def overhear(self, keys: Tensor, values: Tensor, query: Tensor, visible: Visibility, scaling: float) -> None:
        """Takes in what another cache of the same model has just got on this layer; see `hf.sharing`."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self.cache.check_padding(self.layer_idx, visible)
        self.cache.route.append(self.state, keys, values)
        self.cache.route.overhear(self.state, query, visible, scaling)

    def get_seq_length(self) -> int:
        """Tokens seen, padding included, whatever is held."""
        return self.state.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask that transformers makes: all tokens seen and the new ones."""
        self.cache.check_opened()
        return self.state.seen + query_length, 0

    def get_max_length(self) -> int:
        """-1: no maximum."""
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        """Forgets everything; the layer may then serve another batch."""
        self.state.reset()
        self.is_initialized = False

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Takes back the newest tokens; a recorded forward is then compressed.

        Args:
            tokens_to_remove: minus the number of tokens, 0 to take back none.
        """
        count = -int(tokens_to_remove)
        if count < 0:
            raise CacheMisuse(f"crop takes minus the number of tokens to remove, and got {-count}")
        if self.cache.route.speculating:
            self.cache.route.take_back(self.state, count)
        else:
            self.cache.route.commit(self.state, rejected=count)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        self.state.select_rows(beam_idx.to(torch.int64))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, next to itself."""
        self.state.select_rows(torch.arange(self.state.rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows, given as indices or as a boolean mask."""
        self.state.select_rows(torch.arange(self.state.rows)[indices.cpu()])


class WindowLayer(DynamicSlidingWindowLayer):
    """A layer with the model's own sliding window: transformers' layer, less the prompt that its views keep alive.

    Attributes:
        passing: new tokens are only passing: they see the window and each other, and it stays what it was.
        speculating: what leaves the window stays until `settle`, so that `crop` may come several times before.
    """

    passing = False
    speculating = False
    keys: Tensor
    values: Tensor

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See transformers' `DynamicSlidingWindowLayer`."""
        if self.passing:
            return torch.cat([self.keys, key_states], -2), torch.cat([self.values, value_states], -2)
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if self.keys.untyped_storage().nbytes() > self.keys.numel() * self.keys.element_size():
            self.keys, self.values = self.keys.clone(), self.values.clone()
        # Masks are made for the window alone, but transformers 5.17 gives all that a recording layer holds.
        visible = self.sliding_window - 1 + key_states.shape[-2]
        return keys[:, :, -visible:], values[:, :, -visible:]

    def crop(self, tokens_to_remove: int) -> None:
        """See transformers' `DynamicSlidingWindowLayer`."""
        count = -int(tokens_to_remove)
        if not self.speculating:
            super().crop(tokens_to_remove)
        elif count:
            self.keys, self.values = self.keys[:, :, :-count], self.values[:, :, :-count]
            self.cumulative_length -= count

    def settle(self) -> None:
        """Forgets what has left the window for good."""
        if self.is_initialized:
            super().crop(0)
