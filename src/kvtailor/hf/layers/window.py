"""A layer on which the model itself has a sliding window or attends in chunks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvtailor.engine.phase import Reconstructing, Speculating
from kvtailor.engine.state import check_rows_and_heads
from kvtailor.errors import CacheMisuse
from kvtailor.hf.guard import CacheGuard
from kvtailor.hf.layers.compressed import record_past_of_all
from kvtailor.hf.layers.run_eagerly import run_eagerly

__all__ = ["WindowLayer"]


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
        record_past_of_all(self.guard.engine, on)

    def reset(self) -> None:
        """Forget everything; the layer may then serve another batch."""
        # transformers 5.17 puts zeros in place of states, and would join what comes next to them.
        self.__dict__.update(keys=None, values=None, is_initialized=False)
        super().reset()
        self.record_past = False

    @run_eagerly
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

    def copy_from(self, other: WindowLayer) -> None:
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
