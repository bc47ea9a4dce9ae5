"""Layers that keep states of constant size: linear attention, state-space models and short convolutions.

The bookkeeping is transformers' own (`LinearAttentionLayer`). What is added is what a cache of ours needs of each of
its layers: its part in the order of a forward, rows that are repeated or chosen, a reset that another batch may follow,
and a recording that lasts until tokens have settled.

A recurrent state has no past: once a token is in it, it cannot be taken out again. A convolution's state is its newest
inputs, so it can be recorded like a sliding window.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from kvtailor.engine.phase import Speculating
from kvtailor.engine.state import LayerState
from kvtailor.errors import CacheMisuse
from kvtailor.hf.guard import CacheGuard
from kvtailor.hf.layers.compressed import CompressedLayer, record_past_of_all
from kvtailor.hf.layers.run_eagerly import run_eagerly
from kvtailor.hf.layers.window import WindowLayer

__all__ = ["HybridLayer", "HybridWindowLayer", "StateLayer", "StatesMixin"]

_SIDES = ("conv", "recurrent")


class StatesMixin(LinearAttentionLayer):
    """transformers' states of one layer, as a part of a cache of ours.

    Attributes:
        guard: of the cache.
        layer_idx: of the model.
    """

    guard: CacheGuard
    layer_idx: int
    device: Any
    dtype: Any

    @property
    def record_past(self) -> bool:
        """Whether a convolution keeps the inputs that may be taken back until a crop (transformers' name)."""
        return self.guard.engine.phase.windows_record

    @record_past.setter
    def record_past(self, on: bool) -> None:
        record_past_of_all(self.guard.engine, on)

    @run_eagerly
    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **options: Any) -> Tensor:
        """See transformers' `LinearAttentionLayer`."""
        self._check_rows(conv_states)
        self.touched()
        found: Tensor = super().update_conv_state(conv_states, state_idx, **options)
        return found

    @run_eagerly
    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **options: Any) -> Tensor:
        """See transformers' `LinearAttentionLayer`."""
        self._check_rows(recurrent_states)
        self.guard.states_change(self.layer_idx, recurrent=True)
        found: Tensor = super().update_recurrent_state(recurrent_states, state_idx, **options)
        return found

    def replace_recurrent_state(self, state: Tensor) -> None:
        """Take a recurrent state as it is, for models that hand over a new tensor each time."""
        self._check_rows(state)
        self.guard.states_change(self.layer_idx, recurrent=True)
        self.recurrent_states[0], self.is_recurrent_states_initialized[0] = state, True
        self.has_previous_state[0] = True
        self.dtype, self.device = state.dtype, state.device

    def touched(self, asked: str | None = None) -> None:
        """The model asks for a state of this name, or writes one; decoding writes in place what it has asked for."""
        self.guard.states_change(self.layer_idx, asked=asked)

    def states(self) -> dict[str, Tensor]:
        """Return what is held, by name: "conv.0", "recurrent.0", and so on; rows first."""
        return {
            f"{side}.{index}": tensor
            for side in _SIDES
            for index, tensor in getattr(self, f"{side}_states").items()
            if tensor is not None
        }

    def forget_states(self) -> None:
        """Become what the layer was before its first token, so that a batch of other rows may follow."""
        LinearAttentionLayer.__init__(self, number_of_states=self.number_of_states)

    def remember_states(self) -> Callable[[], None]:
        """Return what makes the states again what they are now, whatever is written into them meanwhile."""
        kept = {name: copy.deepcopy(value) for name, value in self.__dict__.items() if name in self._own()}
        return lambda: self.__dict__.update(kept)

    def copy_states_from(self, other: StatesMixin) -> None:
        """Hold a copy of the states of another cache's layer."""
        self.__dict__.update({name: copy.deepcopy(other.__dict__[name]) for name in self._own()})

    def states_facts(self) -> dict[str, Any]:
        """Return what a saved cache has of the states beside their tensors, JSON-able."""
        return {
            "kernels": [self.conv_kernel_size[index] for index in range(self.number_of_states)],
            "begun": [self.has_previous_state[index] for index in range(self.number_of_states)],
        }

    def restore_states(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor], rows: int | None) -> None:
        """Hold what `states` and `states_facts` described.

        Raises:
            ValueError: they do not fit together.
        """
        self.forget_states()
        kernels, begun = facts["kernels"], facts["begun"]
        if len(kernels) != self.number_of_states or len(begun) != self.number_of_states:
            raise ValueError(f"layer {self.layer_idx} keeps {self.number_of_states} states, and {len(kernels)} came")
        for name, tensor in tensors.items():
            side, _, number = name.partition(".")
            index = int(number)
            if side not in _SIDES or index not in self.conv_states or (rows and tensor.shape[0] != rows):
                raise ValueError(f"a state {name!r} of shape {tuple(tensor.shape)} of layer {self.layer_idx}")
            getattr(self, f"{side}_states")[index] = tensor
            getattr(self, f"is_{side}_states_initialized")[index] = True
            if side == "conv" or self.device is None:
                self.dtype, self.device = tensor.dtype, tensor.device
        for index in range(self.number_of_states):
            self.conv_kernel_size[index] = kernels[index]
            self.has_previous_state[index] = bool(begun[index])

    def select_state_rows(self, index: Tensor) -> None:
        """Become the states of a batch made of the rows `index` (k,) int64 of this one."""
        for side in _SIDES:
            held = getattr(self, f"{side}_states")
            for number, tensor in held.items():
                if tensor is not None:
                    held[number] = tensor.index_select(0, index.to(tensor.device))

    @property
    def has_recurrent_states(self) -> bool:
        """Whether a state is there that cannot be taken back."""
        return any(tensor is not None for tensor in self.recurrent_states.values())

    def check_states_crop(self, count: int) -> None:
        """Raise where the newest tokens cannot be taken out of the states."""
        if not count or not any(self.has_previous_state.values()):
            return
        if self.has_recurrent_states:
            raise CacheMisuse(
                f"asked to take back {count} tokens, and layer {self.layer_idx} keeps a recurrent state, out of which "
                "no token can be taken: go on with a copy of the cache that was made before them"
            )
        held = [self.conv_states[index] for index in range(self.number_of_states)]
        if not self.record_past or any(
            tensor is not None and tensor.shape[-1] < count + (kernel or 0)
            for tensor, kernel in zip(held, self.conv_kernel_size.values(), strict=True)
        ):
            raise CacheMisuse(
                f"asked to take back {count} tokens, and layer {self.layer_idx} keeps the inputs of its convolution "
                "only: call cache.activate_past_recording() before the forward that may be rolled back"
            )

    def crop_states(self, count: int) -> None:
        """Take back the newest tokens of a recorded convolution; past a recording, forget what it need not keep."""
        for index, tensor in self.conv_states.items():
            if tensor is not None and count:
                self.conv_states[index] = tensor[..., : tensor.shape[-1] - count]
        if not isinstance(self.guard.engine.phase, Speculating):
            self.settle_states()

    def settle_states(self) -> None:
        """Forget the inputs that only a recording kept."""
        for index, tensor in self.conv_states.items():
            kernel = self.conv_kernel_size[index]
            if tensor is None or kernel is None or tensor.shape[-1] == kernel:
                continue
            # A slice keeps its parent alive. A short first text is padded as transformers pads it.
            missing = max(0, kernel - tensor.shape[-1])
            self.conv_states[index] = torch.nn.functional.pad(tensor[..., -kernel:], (missing, 0)).clone()

    @classmethod
    def _own(cls) -> tuple[str, ...]:
        return (
            "conv_states",
            "recurrent_states",
            "is_conv_states_initialized",
            "is_recurrent_states_initialized",
            "has_previous_state",
            "conv_kernel_size",
            "device",
            "dtype",
        )

    def _check_rows(self, states: Tensor) -> None:
        held = next(iter(self.states().values()), None)
        if held is not None and held.shape[0] != states.shape[0]:
            raise CacheMisuse(
                f"this cache holds {held.shape[0]} rows, and layer {self.layer_idx} got states of "
                f"{states.shape[0]}: use a new cache for another batch, or cache.reset()"
            )


class StateLayer(StatesMixin):
    """A layer that keeps states alone."""

    def __init__(self, guard: CacheGuard, layer_idx: int, states: int):
        self.guard, self.layer_idx = guard, layer_idx
        super().__init__(number_of_states=states)

    def reset(self) -> None:
        """Forget everything; the layer may then serve another batch."""
        self.forget_states()

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens; `tokens_to_remove` is minus their number."""
        self.crop_states(-int(tokens_to_remove))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        self.select_state_rows(beam_idx.to(torch.int64))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, next to itself."""
        self.select_state_rows(_repeated(self, repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows, given as indices or as a boolean mask."""
        self.select_state_rows(torch.arange(_rows(self))[indices.cpu()])


class HybridLayer(CompressedLayer, StatesMixin):
    """A layer that both attends to all tokens, which the plan compresses, and keeps states."""

    record_past = StatesMixin.record_past

    def __init__(self, guard: CacheGuard, state: LayerState, layer_idx: int, states: int):
        self.guard, self.layer_idx = guard, layer_idx
        LinearAttentionLayer.__init__(self, number_of_states=states)
        CompressedLayer.__init__(self, guard, state, layer_idx)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Remember dtype and device of the first keys, or make room for the first states."""
        if args:
            CompressedLayer.lazy_initialization(self, *args)
        else:
            StatesMixin.lazy_initialization(self, **kwargs)

    def activate_past_recording(self) -> None:
        """See `CompressedLayer.activate_past_recording`."""
        CompressedLayer.activate_past_recording(self)

    def reset(self) -> None:
        """Forget everything; the layer may then serve another batch."""
        CompressedLayer.reset(self)
        self.forget_states()

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Take back the newest tokens; `tokens_to_remove` is minus their number."""
        CompressedLayer.crop(self, tokens_to_remove)
        self.crop_states(-int(tokens_to_remove))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        CompressedLayer.reorder_cache(self, beam_idx)
        self.select_state_rows(beam_idx.to(torch.int64))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, next to itself."""
        repeated = _repeated(self, repeats)
        CompressedLayer.batch_repeat_interleave(self, repeats)
        self.select_state_rows(repeated)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows, given as indices or as a boolean mask."""
        chosen = torch.arange(_rows(self))[indices.cpu()]
        CompressedLayer.batch_select_indices(self, indices)
        self.select_state_rows(chosen)


class HybridWindowLayer(WindowLayer, StatesMixin):
    """A layer that has both a sliding window of the model's own and states."""

    record_past = StatesMixin.record_past

    def __init__(self, guard: CacheGuard, layer_idx: int, states: int, *, sliding_window: int):
        self.guard, self.layer_idx = guard, layer_idx
        LinearAttentionLayer.__init__(self, number_of_states=states)
        WindowLayer.__init__(self, guard, layer_idx, sliding_window=sliding_window)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Make room for the first keys, or for the first states."""
        if args:
            WindowLayer.lazy_initialization(self, *args)
        else:
            StatesMixin.lazy_initialization(self, **kwargs)

    def reset(self) -> None:
        """Forget everything; the layer may then serve another batch."""
        WindowLayer.reset(self)
        self.forget_states()

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens; `tokens_to_remove` is minus their number."""
        WindowLayer.crop(self, tokens_to_remove)
        self.crop_states(-int(tokens_to_remove))

    def settle(self) -> None:
        """Forget what only a recording kept."""
        WindowLayer.settle(self)
        self.settle_states()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        WindowLayer.reorder_cache(self, beam_idx)
        self.select_state_rows(beam_idx.to(torch.int64))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, next to itself."""
        WindowLayer.batch_repeat_interleave(self, repeats)
        self.select_state_rows(_repeated(self, repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows, given as indices or as a boolean mask."""
        chosen = torch.arange(_rows(self))[indices.cpu()]
        WindowLayer.batch_select_indices(self, indices)
        self.select_state_rows(chosen)


def _rows(layer: StatesMixin) -> int:
    return next((tensor.shape[0] for tensor in layer.states().values()), 0)


def _repeated(layer: StatesMixin, repeats: int) -> Tensor:
    return torch.arange(_rows(layer)).repeat_interleave(repeats)
